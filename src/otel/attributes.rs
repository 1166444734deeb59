//! The attributes of kept spans on their OpenTelemetry spans.

use crate::facts::Measure;
use crate::keep::KeptSpan;
use crate::profile::{SampleKind, Value};

/// An attribute that is no measure: its name and its value, if the span has one.
type TextAttribute = (&'static str, fn(&KeptSpan) -> Option<Value>);

const TEXTS: [TextAttribute; 7] = [
    ("profile.id", |span| span.profile.ok().map(|id| id.to_string().into())),
    ("profile.reason", |span| Some(span.reasons().to_string().into())),
    ("profile.earlier_ids", |span| {
        let ids: Vec<_> = span.earlier.iter().map(ToString::to_string).collect();
        (!ids.is_empty()).then(|| ids.into())
    }),
    ("profile.off_cpu_id", |span| id_of(span, span.samples.waits, SampleKind::OffCpu)),
    ("profile.await_id", |span| id_of(span, span.samples.awaits, SampleKind::Await)),
    ("profile.alloc_space_id", |span| {
        id_of(span, span.samples.allocations, SampleKind::AllocatedBytes)
    }),
    // Pyroscope finds samples by their link.
    ("pyroscope.profile.id", |span| {
        span.link.ids.filter(|_| span.link.has_on_cpu).map(|ids| ids.span.to_string().into())
    }),
];

/// The id of the samples of one kind, if there are any.
fn id_of(span: &KeptSpan, samples: u64, kind: SampleKind) -> Option<Value> {
    span.profile.ok().filter(|_| samples > 0).map(|id| kind.id_of(id).to_string().into())
}

/// The attributes that are set on the OpenTelemetry span of a kept span.
///
/// | name | when | value |
/// |---|---|---|
/// | `profile.id` | if there is a profile | its id, 32 hexadecimal digits |
/// | `profile.reason` | always | `latency`, `error` and so on: the names of [`Reason`](crate::Reason)s, joined by `\|` |
/// | `profile.wall_ns`, `profile.on_cpu_ns` and others: [`Measure::attribute`] | if it is known, and long enough to matter | the value of a [`Measure`] in nanoseconds, bytes or a number |
/// | `profile.earlier_ids` | if there are any | profiles that were made of the span while it was open |
/// | `profile.off_cpu_id` | if the profile has waits of the span | the id of the profile with the waits in OTLP, 32 hexadecimal digits: see [`SampleKind::id_of`](crate::profile::SampleKind::id_of) |
/// | `profile.await_id` | if the profile has awaits of the span | the id of the profile with the awaits in OTLP, 32 hexadecimal digits: see [`SampleKind::id_of`](crate::profile::SampleKind::id_of). Scheduling delays are in one of their own |
/// | `profile.alloc_space_id` | if the profile has samples of what the span allocated | the id of the profile with the bytes in OTLP, 32 hexadecimal digits: see [`SampleKind::id_of`](crate::profile::SampleKind::id_of). The numbers of allocations are in one of their own |
/// | `pyroscope.profile.id` | if there is a profile with on-CPU samples of the span | the id of the span that these samples [link to](crate::guide::opentelemetry), 16 hexadecimal digits, as Grafana's link from traces to profiles expects it |
///
/// The attributes are set when the span closes, and are true then: what is found later adds no attribute. So a span that
/// only waited has `profile.id` and `profile.off_cpu_id` and no `pyroscope.profile.id`, although another span of the same
/// profile may have on-CPU samples.
pub fn span_attributes() -> impl Iterator<Item = &'static str> {
    TEXTS.iter().map(|(name, _)| *name).chain(Measure::major().map(Measure::attribute))
}

pub(crate) type SpanAttributes = Vec<(&'static str, Value)>;

/// The attributes of a kept span, in the order of [`span_attributes`].
pub(crate) fn attributes_of(span: &KeptSpan) -> SpanAttributes {
    let measured = |measure: Measure| Some(Value::of_number(measure.notable(&span.facts)?));
    let texts = TEXTS.iter().map(|(_, value)| value(span));
    let values = texts.chain(Measure::major().map(measured));
    span_attributes().zip(values).filter_map(|(name, value)| Some((name, value?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::Allocations;
    use crate::keep::NoProfile;
    use crate::profile::ProfileId;
    use crate::span::SpanKey;

    const OFF_CPU_ID: &str = "profile.off_cpu_id";
    const AWAIT_ID: &str = "profile.await_id";
    const ALLOC_SPACE_ID: &str = "profile.alloc_space_id";

    fn attributes(span: &KeptSpan) -> Vec<(String, Value)> {
        let all = attributes_of(span).into_iter();
        all.map(|(name, value)| (name.to_owned(), value)).collect()
    }

    #[test]
    fn each_kind_of_sample_has_an_id_if_there_are_some() {
        let id = ProfileId::for_test(1);
        let ids = |waits, awaits, profile| {
            let mut span = KeptSpan::for_test(SpanKey::MIN, SpanKey::MIN, 3);
            (span.samples.waits, span.samples.awaits) = (waits, awaits);
            span.samples.allocations = waits / 2;
            span.profile = profile;
            let all = attributes(&span).into_iter();
            let of_ids = all.filter(|(name, _)| {
                [OFF_CPU_ID, AWAIT_ID, ALLOC_SPACE_ID].contains(&name.as_str())
            });
            of_ids.collect::<Vec<_>>()
        };
        let off_cpu =
            || (OFF_CPU_ID.to_owned(), Value::from(SampleKind::OffCpu.id_of(id).to_string()));
        let awaits = || (AWAIT_ID.to_owned(), Value::from(SampleKind::Await.id_of(id).to_string()));
        assert_eq!(ids(0, 0, Ok(id)), []);
        assert_eq!(ids(1, 0, Ok(id)), [off_cpu()]);
        assert_eq!(ids(0, 1, Ok(id)), [awaits()]);
        let space = || {
            (
                ALLOC_SPACE_ID.to_owned(),
                Value::from(SampleKind::AllocatedBytes.id_of(id).to_string()),
            )
        };
        assert_eq!(ids(2, 2, Ok(id)), [off_cpu(), awaits(), space()]);
        assert_eq!(ids(2, 2, Err(NoProfile::RateLimit)), []);
    }

    #[test]
    fn idle_time_that_is_explained_has_attributes() {
        let mut span = KeptSpan::for_test(SpanKey::MIN, SpanKey::MIN, 0);
        let times = |span: &KeptSpan| {
            let all = attributes(span).into_iter();
            let of_idle = all.filter(|(name, _)| {
                ["profile.await_ns", "profile.scheduling_delay_ns"].contains(&name.as_str())
            });
            of_idle.map(|(_, value)| value).collect::<Vec<_>>()
        };
        assert_eq!(times(&span), []);
        (span.facts.times.await_ns, span.facts.times.delay_ns) = (7, 5);
        assert_eq!(times(&span), [Value::Int(7), Value::Int(5)]);
    }

    #[test]
    fn what_was_allocated_has_attributes_if_it_is_known() {
        let mut span = KeptSpan::for_test(SpanKey::MIN, SpanKey::MIN, 0);
        let counts = |span: &KeptSpan| {
            let all = attributes(span).into_iter();
            let counts = all.filter(|(name, _)| {
                ["profile.allocated_bytes", "profile.allocations"].contains(&name.as_str())
            });
            counts.map(|(_, value)| value).collect::<Vec<_>>()
        };
        assert_eq!(counts(&span), []);
        span.facts.times.allocations =
            Some(Allocations { allocated_bytes: 700, allocations: 5, ..Allocations::default() });
        assert_eq!(counts(&span), [Value::Int(700), Value::Int(5)]);
    }
}
