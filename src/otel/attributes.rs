//! The attributes of kept spans on their OpenTelemetry spans.

use std::borrow::Cow;

use crate::keep::KeptSpan;
use crate::profile::Value;

const ID: &str = "profile.id";
const REASON: &str = "profile.reason";
const ON_CPU: &str = "profile.on_cpu_ns";
const ON_CPU_ERROR: &str = "profile.on_cpu_error_ns";
const SUBTREE_ON_CPU: &str = "profile.subtree_on_cpu_ns";
const OFF_CPU: &str = "profile.off_cpu_ns";
const IDLE: &str = "profile.idle_ns";
const AWAIT: &str = "profile.await_ns";
const DELAY: &str = "profile.scheduling_delay_ns";
const AFTER_LAST_EXIT: &str = "profile.after_last_exit_ns";
const EARLIER: &str = "profile.earlier_ids";
const OFF_CPU_ID: &str = "profile.off_cpu_id";
const AWAIT_ID: &str = "profile.await_id";
const OTHER_SPANS: &str = "profile.other_spans_ns";
const ALLOCATED: &str = "profile.allocated_bytes";
const ALLOCATIONS: &str = "profile.allocations";
const ALLOC_SPACE_ID: &str = "profile.alloc_space_id";
const PYROSCOPE: &str = "pyroscope.profile.id";

/// The attributes that are set on the OpenTelemetry span of a kept span.
///
/// | name | when | value |
/// |---|---|---|
/// | `profile.id` | if there is a profile | its id, 32 hexadecimal digits |
/// | `profile.reason` | always | `latency`, `error` and so on: the names of [`Reason`](crate::Reason)s, joined by `\|` |
/// | `profile.on_cpu_ns`, `profile.off_cpu_ns`, `profile.idle_ns` | always; the first two if [CPU time is known](crate::TimeBreakdown::is_cpu_time_unknown) | its time breakdown; see [`TimeBreakdown`](crate::TimeBreakdown) |
/// | `profile.on_cpu_error_ns` | if it is not 0 | the maximum error of on-CPU time |
/// | `profile.subtree_on_cpu_ns` | if child spans ran on threads that were not in the span | on-CPU time including these |
/// | `profile.await_ns`, `profile.scheduling_delay_ns` | if they are not 0 | the parts of idle time in which its future awaited something, and in which it had been woken and not been polled yet |
/// | `profile.other_spans_ns` | if it is not 0 | the time in which its thread was in [other spans on its stack](crate::TimeBreakdown::other_spans) |
/// | `profile.allocated_bytes`, `profile.allocations` | if the program has a [`ProfilingAllocator`](crate::ProfilingAllocator) | what was allocated in the span and in profiled spans inside it |
/// | `profile.after_last_exit_ns` | if it is 1 ms or more | the idle time after the last exit, during which the span stayed open only because of a child or another reference to it |
/// | `profile.earlier_ids` | if there are any | profiles that were made of the span while it was open |
/// | `profile.off_cpu_id` | if the profile has waits of the span | the id of the profile with the waits in OTLP, 32 hexadecimal digits: see [`ProfileId::of_off_cpu`](crate::ProfileId::of_off_cpu) |
/// | `profile.await_id` | if the profile has awaits of the span | the id of the profile with the awaits in OTLP, 32 hexadecimal digits: see [`ProfileId::of_await`](crate::ProfileId::of_await). Scheduling delays are in that of [`ProfileId::of_scheduling_delay`](crate::ProfileId::of_scheduling_delay) |
/// | `profile.alloc_space_id` | if the profile has samples of what the span allocated | the id of the profile with the bytes in OTLP, 32 hexadecimal digits: see [`ProfileId::of_alloc_space`](crate::ProfileId::of_alloc_space). The numbers of allocations are in that of [`ProfileId::of_alloc_objects`](crate::ProfileId::of_alloc_objects) |
/// | `pyroscope.profile.id` | if there is a profile with on-CPU samples of the span | the id of the span that these samples [link to](crate::LinkTo), 16 hexadecimal digits, as Grafana's link from traces to profiles expects it |
///
/// The attributes are set when the span closes, and are true then: what is found later adds no attribute. So a span that
/// only waited has `profile.id` and `profile.off_cpu_id` and no `pyroscope.profile.id`, although another span of the same
/// profile may have on-CPU samples.
pub const SPAN_ATTRIBUTES: [&str; 18] = [
    ID,
    REASON,
    ON_CPU,
    ON_CPU_ERROR,
    SUBTREE_ON_CPU,
    OFF_CPU,
    IDLE,
    AWAIT,
    DELAY,
    OTHER_SPANS,
    ALLOCATED,
    ALLOCATIONS,
    AFTER_LAST_EXIT,
    EARLIER,
    OFF_CPU_ID,
    AWAIT_ID,
    ALLOC_SPACE_ID,
    PYROSCOPE,
];

/// Every span has some nanoseconds between its last exit and its close.
const WORTH_SAYING_NS: u64 = 1_000_000;

/// Names and values of a span's attributes.
pub(crate) type SpanAttributes = Vec<(Cow<'static, str>, Value)>;

/// The names to use for the attributes.
#[derive(Clone, Debug)]
pub(crate) struct AttributeNames(Vec<(&'static str, Cow<'static, str>)>);

impl Default for AttributeNames {
    fn default() -> Self {
        Self(SPAN_ATTRIBUTES.map(|name| (name, Cow::Borrowed(name))).to_vec())
    }
}

impl AttributeNames {
    pub(crate) fn new(name: impl Fn(&'static str) -> Option<String>) -> Self {
        let named = SPAN_ATTRIBUTES.iter().filter_map(|ours| Some((*ours, name(ours)?.into())));
        Self(named.collect())
    }

    /// The attributes of a kept span.
    pub(crate) fn of(&self, span: &KeptSpan) -> SpanAttributes {
        let named = |(ours, name): &(&'static str, Cow<'static, str>)| {
            Some((name.clone(), value(ours, span)?))
        };
        self.0.iter().filter_map(named).collect()
    }
}

fn value(name: &str, span: &KeptSpan) -> Option<Value> {
    let account = &span.account;
    let int = |value: u64| Some(Value::Int(i64::try_from(value).unwrap_or(i64::MAX)));
    match name {
        ID => span.profile.ok().map(|id| Value::from(id.to_string())),
        REASON => Some(Value::from(span.reasons.to_string())),
        ON_CPU => int(account.on_cpu_ns).filter(|_| !account.is_cpu_time_unknown),
        ON_CPU_ERROR => int(account.on_cpu_error_ns).filter(|_| account.on_cpu_error_ns > 0),
        SUBTREE_ON_CPU => int(account.subtree_on_cpu_ns).filter(|_| account.inside_on_cpu_ns() > 0),
        OFF_CPU => int(account.off_cpu_ns).filter(|_| !account.is_cpu_time_unknown),
        IDLE => int(account.idle_ns),
        AWAIT => int(account.await_ns).filter(|_| account.await_ns > 0),
        DELAY => int(account.delay_ns).filter(|_| account.delay_ns > 0),
        OTHER_SPANS => int(account.other_spans_ns).filter(|_| account.other_spans_ns > 0),
        ALLOCATED => account.allocations.and_then(|all| int(all.allocated_bytes)),
        ALLOCATIONS => account.allocations.and_then(|all| int(all.allocations)),
        AFTER_LAST_EXIT => int(account.after_last_exit_ns)
            .filter(|_| account.after_last_exit_ns >= WORTH_SAYING_NS),
        EARLIER if !span.earlier.is_empty() => {
            let ids = span.earlier.iter().map(|id| Value::from(id.to_string()));
            Some(Value::Array(ids.collect()))
        }
        OFF_CPU_ID if span.samples.waits > 0 => {
            span.profile.ok().map(|id| Value::from(id.of_off_cpu().to_string()))
        }
        AWAIT_ID if span.samples.awaits > 0 => {
            span.profile.ok().map(|id| Value::from(id.of_await().to_string()))
        }
        ALLOC_SPACE_ID if span.samples.allocations > 0 => {
            span.profile.ok().map(|id| Value::from(id.of_alloc_space().to_string()))
        }
        // Pyroscope finds samples by their link.
        PYROSCOPE if span.link.has_on_cpu => {
            span.link.ids.map(|ids| Value::from(ids.span.to_string()))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keep::NoProfile;
    use crate::profile::ProfileId;
    use crate::span::SpanKey;
    use crate::sys::Allocations;

    fn attributes(span: &KeptSpan) -> Vec<(String, Value)> {
        let all = AttributeNames::default().of(span);
        all.into_iter().map(|(name, value)| (name.into_owned(), value)).collect()
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
        let off_cpu = || (OFF_CPU_ID.to_owned(), Value::from(id.of_off_cpu().to_string()));
        let awaits = || (AWAIT_ID.to_owned(), Value::from(id.of_await().to_string()));
        assert_eq!(ids(0, 0, Ok(id)), []);
        assert_eq!(ids(1, 0, Ok(id)), [off_cpu()]);
        assert_eq!(ids(0, 1, Ok(id)), [awaits()]);
        let space = || (ALLOC_SPACE_ID.to_owned(), Value::from(id.of_alloc_space().to_string()));
        assert_eq!(ids(2, 2, Ok(id)), [off_cpu(), awaits(), space()]);
        assert_eq!(ids(2, 2, Err(NoProfile::RateLimit)), []);
    }

    #[test]
    fn idle_time_that_is_explained_has_attributes() {
        let mut span = KeptSpan::for_test(SpanKey::MIN, SpanKey::MIN, 0);
        let times = |span: &KeptSpan| {
            let all = attributes(span).into_iter();
            let of_idle = all.filter(|(name, _)| [AWAIT, DELAY].contains(&name.as_str()));
            of_idle.map(|(_, value)| value).collect::<Vec<_>>()
        };
        assert_eq!(times(&span), []);
        (span.account.await_ns, span.account.delay_ns) = (7, 5);
        assert_eq!(times(&span), [Value::Int(7), Value::Int(5)]);
    }

    #[test]
    fn what_was_allocated_has_attributes_if_it_is_known() {
        let mut span = KeptSpan::for_test(SpanKey::MIN, SpanKey::MIN, 0);
        let counts = |span: &KeptSpan| {
            let all = attributes(span).into_iter();
            let counts = all.filter(|(name, _)| [ALLOCATED, ALLOCATIONS].contains(&name.as_str()));
            counts.map(|(_, value)| value).collect::<Vec<_>>()
        };
        assert_eq!(counts(&span), []);
        span.account.allocations =
            Some(Allocations { allocated_bytes: 700, allocations: 5, ..Allocations::default() });
        assert_eq!(counts(&span), [Value::Int(700), Value::Int(5)]);
    }
}
