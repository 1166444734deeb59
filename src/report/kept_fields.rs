//! The DEBUG event of a kept span, which has all that is known of it. `tracing`'s macros take the names of fields from the
//! source; these are in the table of measures.

use tracing::callsite::DefaultCallsite;
use tracing::field::{Value, display};
use tracing::level_filters::STATIC_MAX_LEVEL;
use tracing::metadata::{Kind, LevelFilter};
use tracing::{Event, Level, Metadata};

use super::format::nanoseconds;
use super::kept_event::{LONG_NS, profile_of};
use crate::facts::{Measure, Unit};
use crate::keep::{DEFAULT_FIELDS, Kept, KeptSpan};
use crate::profile::{Hotspot, SampleKind};
use crate::text::ms;

/// The fields before the measures, and after them.
const BEFORE: [&str; 7] = ["message", "kind", "span", "fields", "reason", "rule", "open"];
const AFTER: [&str; 20] = [
    "samples",
    "top",
    "top_share",
    "coverage",
    "waits",
    "waits_ms",
    "longest_wait",
    "blocked_in_async_ms",
    "longest_await",
    "delayed_by",
    "references",
    "typical_median_ms",
    "times_typical",
    "slower_in",
    "slower_in_ms",
    "trace_id",
    "span_id",
    "profile_id",
    "earlier_profiles",
    "file",
];
const COUNT: usize = BEFORE.len() + DEFAULT_FIELDS.len() + Measure::ALL.len() + AFTER.len();

#[expect(clippy::indexing_slicing, reason = "there is no `get` in constants yet")]
const NAMES: [&str; COUNT] = {
    let mut names = [""; COUNT];
    let mut at = 0;
    while at < COUNT {
        let (values, measures) = (BEFORE.len(), BEFORE.len() + DEFAULT_FIELDS.len());
        let after = measures + Measure::ALL.len();
        names[at] = if at < values {
            BEFORE[at]
        } else if at < measures {
            DEFAULT_FIELDS[at - values]
        } else if at < after {
            Measure::ALL[at - measures].row().field
        } else {
            AFTER[at - after]
        };
        at += 1;
    }
    names
};

static CALLSITE: DefaultCallsite = DefaultCallsite::new(&METADATA);
static METADATA: Metadata<'static> = tracing::metadata! {
    name: "kept",
    target: "tracing_profiling",
    level: Level::DEBUG,
    fields: &NAMES,
    callsite: &CALLSITE,
    kind: Kind::EVENT,
};

/// Nothing is said of a larger coverage.
pub(super) const NEARLY_ALL: f64 = 0.9;

#[derive(Default)]
pub(crate) struct Fields(Vec<(&'static str, Box<dyn Value>)>);

impl Fields {
    /// Returns the fields of a kept span. `has_profile` adds what the profile shows.
    pub(crate) fn of(span: &KeptSpan, kept: &Kept, has_profile: bool) -> Self {
        let facts = &span.facts;
        let mut fields = Self::default();
        fields.set("message", Some(display(format!("facts of `{}`", facts.name()))));
        fields.set("kind", Some(display("kept")));
        fields.set("span", Some(display(facts.span.clone())));
        for name in DEFAULT_FIELDS {
            let value = facts.fields.iter().find(|(field, _)| *field == name);
            fields.set(name, value.map(|(_, value)| value.clone()));
        }
        let others = facts.fields.iter().filter(|(name, _)| !DEFAULT_FIELDS.contains(name));
        let others: Vec<_> = others.map(|(name, value)| format!("{name}={value}")).collect();
        fields.set("fields", (!others.is_empty()).then(|| others.join(" ")));
        fields.set("reason", Some(display(facts.reasons)));
        fields.set("open", facts.is_open.then_some(true));
        fields.set("rule", facts.rule.as_ref().map(ToString::to_string));
        for measure in Measure::ALL {
            let value = measure.notable(facts);
            match measure.unit() {
                Unit::Nanoseconds => fields.set(measure.row().field, value.map(ms)),
                _ => fields.set(measure.row().field, value),
            }
        }
        if has_profile {
            let share = |share: f64| (share * 1_000.0).round() / 1_000.0;
            let (waits, awaits) = (Some(&kept.waits).filter(|waits| waits.count > 0), &kept.awaits);
            let ran_long = facts.times.subtree_on_cpu_ns >= LONG_NS;
            let coverage = kept.coverage.filter(|share| ran_long && *share < NEARLY_ALL);
            let in_async = waits.filter(|waits| waits.in_async.is_some());
            fields.set("samples", kept.profile.map(|_| kept.samples));
            let top = kept.hotspot(SampleKind::OnCpu);
            fields.set("top", top.map(Hotspot::names));
            fields.set("top_share", top.and_then(Hotspot::share).map(share));
            fields.set("coverage", coverage.map(share));
            fields.set("waits", waits.map(|waits| waits.count));
            fields.set("waits_ms", waits.map(|waits| ms(nanoseconds(waits.total))));
            let most = |kind| kept.hotspot(kind).map(|hotspot| display(hotspot.to_string()));
            fields.set("longest_wait", most(SampleKind::OffCpu));
            fields.set("longest_await", most(SampleKind::Await));
            let in_async = in_async.map(|waits| ms(nanoseconds(waits.in_async_total)));
            fields.set("blocked_in_async_ms", in_async);
            fields.set("delayed_by", awaits.delayed_by.clone());
        }
        if let Some(compared) = kept.compared.as_ref().filter(|compared| compared.is_of(facts)) {
            let slower_in = compared.slower_in.as_ref();
            fields.set("references", Some(compared.references));
            fields.set("typical_median_ms", compared.median_wall_ns.map(ms));
            fields.set("times_typical", compared.times());
            fields.set("slower_in", slower_in.map(|slower| display(slower.quantity.to_string())));
            fields.set("slower_in_ms", slower_in.map(|slower| ms(slower.extra_ns)));
        }
        let (trace, id) = facts.ids().unzip();
        fields.set("trace_id", trace.map(display));
        fields.set("span_id", id.map(display));
        let profile = profile_of(span, kept, has_profile);
        fields.set("profile_id", profile.map(display));
        let earlier: Vec<_> = span.earlier_profiles().iter().map(ToString::to_string).collect();
        fields.set("earlier_profiles", (!earlier.is_empty()).then(|| earlier.join(" ")));
        let file = kept.files.first().filter(|_| profile.is_some());
        fields.set("file", file.map(|file| display(file.display().to_string())));
        fields
    }

    fn set(&mut self, name: &'static str, value: Option<impl Value + 'static>) {
        self.0.extend(value.map(|value| -> (_, Box<dyn Value>) { (name, Box::new(value)) }));
    }

    /// Logs them, inside no span of the program. They are only made if a layer wants the event.
    pub(crate) fn log(mut make: impl FnMut() -> Self) {
        let most = STATIC_MAX_LEVEL.min(LevelFilter::current());
        if *METADATA.level() > most || CALLSITE.interest().is_never() {
            return;
        }
        tracing::dispatcher::get_default(|dispatch| {
            if !dispatch.enabled(&METADATA) {
                return;
            }
            let fields = make();
            let values = NAMES.iter().map(|name| {
                let value = fields.0.iter().find(|(known, _)| known == name);
                value.map(|(_, value)| &**value)
            });
            let values: Vec<_> = values.collect();
            let values = METADATA.fields().value_set_all(&values);
            dispatch.event(&Event::new_child_of(None, &METADATA, &values));
        });
    }
}

#[cfg(test)]
mod tests {
    use tracing_subscriber::prelude::*;

    use super::*;
    use crate::profile::Compared;
    use crate::span::SpanKey;

    #[test]
    fn the_guide_has_each_field() {
        let guide = include_str!("../../docs/guide/log.md");
        let of_major = || Measure::major().map(|measure| measure.row().field);
        let is_minor = |name: &str| {
            Measure::ALL.iter().any(|measure| measure.row().field == name)
                && !of_major().any(|field| field == name)
        };
        let names = NAMES.iter().filter(|name| **name != "message" && !is_minor(name));
        let missing: Vec<_> = names.filter(|name| !guide.contains(&format!("`{name}`"))).collect();
        assert!(missing.is_empty(), "{missing:?}");
    }

    #[test]
    fn a_span_has_the_fields_of_a_comparison_that_is_its_own() {
        let fields = |name: &'static str, references| {
            let mut kept =
                super::super::unexported(&[KeptSpan::for_test(SpanKey::MIN, SpanKey::MIN, 1)]);
            kept.spans[0].facts.span = name.into();
            kept.compared = Some(Compared::for_test(references).summary());
            let Fields(fields) = Fields::of(&kept.spans[0], &kept, true);
            let of_comparison = |name: &&str| {
                name.contains("typical") || name.contains("slower") || *name == "references"
            };
            fields.into_iter().map(|(name, _)| name).filter(of_comparison).collect::<Vec<_>>()
        };
        let all = ["references", "typical_median_ms", "times_typical", "slower_in", "slower_in_ms"];
        assert_eq!(fields("GET /checkout", 200), all);
        assert_eq!(fields("GET /checkout", 9), all[..2]);
        assert_eq!(fields("GET /other", 200), [""; 0]);
    }

    #[test]
    fn fields_are_made_only_for_a_layer_that_wants_them() {
        let made_for = |level: LevelFilter| {
            let subscriber = tracing_subscriber::registry().with(level);
            let mut made = 0;
            tracing::subscriber::with_default(subscriber, || {
                Fields::log(|| {
                    made += 1;
                    Fields::default()
                });
            });
            made
        };
        let levels = [LevelFilter::INFO, LevelFilter::DEBUG, LevelFilter::INFO, LevelFilter::TRACE];
        assert_eq!(levels.map(made_for), [0, 1, 0, 1]);
    }
}
