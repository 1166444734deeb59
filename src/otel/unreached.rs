//! Notices that the OpenTelemetry spans of kept spans cannot be reached.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::span::is_ignored;

/// Whether there are OpenTelemetry spans, and whether those of closing spans are reached.
#[derive(Debug, Default)]
pub(crate) struct UnreachedSpans {
    /// The program has a layer of `tracing-opentelemetry` or exports OpenTelemetry spans, with any release of these crates.
    is_in_program: AtomicBool,
    /// How many closing spans had no OpenTelemetry span, or [`DONE`].
    missed: AtomicU32,
}

/// A filter can hide some spans from OpenTelemetry. After this many without any that is reached, something is wrong.
const MOST_MISSED: u32 = 8;
/// One was reached, so nothing is wrong, or the warning was taken.
const DONE: u32 = u32::MAX;

const UNREACHED: &str = "kept spans have no OpenTelemetry spans, so profiles and traces are not linked: add the layer of \
    tracing-opentelemetry after this one, by `.with(profiling).with(opentelemetry)`, not inside a `reload::Layer`, and of \
    release 0.34, the only one that `cargo tree -i tracing-opentelemetry` may list; see the guide's page \
    `opentelemetry`";

impl UnreachedSpans {
    /// The program has a layer or a subscriber of the type with that name.
    pub(crate) fn note_type(&self, name: &str) {
        // An `Option` can be `None`.
        let before = name.split_once("tracing_opentelemetry::layer::").map(|(before, _)| before);
        if before.is_some_and(|before| !before.contains("core::option::Option<")) {
            self.is_in_program.store(true, Ordering::Relaxed);
        }
    }

    /// The program has a callsite of that target and name: the thread that exports OpenTelemetry spans has some.
    pub(crate) fn note_callsite(&self, target: &str, name: &str) {
        if target == "opentelemetry_sdk" && name.starts_with("BatchSpanProcessor.") {
            self.is_in_program.store(true, Ordering::Relaxed);
        }
    }

    /// The OpenTelemetry span of a span that has closed was reached, or not.
    pub(crate) fn note(&self, is_reached: bool) {
        let missed = self.missed.load(Ordering::Relaxed);
        if is_reached && missed != DONE {
            self.missed.store(DONE, Ordering::Relaxed);
        } else if missed < MOST_MISSED && !is_ignored() {
            let more = |missed| (missed < MOST_MISSED).then_some(missed + 1);
            _ = self.missed.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        }
    }

    /// Takes the warning to log, once.
    pub(crate) fn take_warning(&self) -> Option<&'static str> {
        let is_there = self.is_in_program.load(Ordering::Relaxed);
        let is_missed = cfg!(feature = "opentelemetry") && is_there;
        let take = || {
            self.missed.compare_exchange(MOST_MISSED, DONE, Ordering::Relaxed, Ordering::Relaxed)
        };
        (is_missed && take().is_ok()).then_some(UNREACHED)
    }
}

#[cfg(all(test, feature = "opentelemetry"))]
mod tests {
    use std::any::type_name;

    use tracing_opentelemetry::OpenTelemetryLayer;
    use tracing_subscriber::filter::{Filtered, LevelFilter};
    use tracing_subscriber::registry::Registry;
    use tracing_subscriber::reload;

    use super::*;

    type Otel<S> = OpenTelemetryLayer<S, ()>;

    /// Spans close that have no OpenTelemetry span, and the warning after the last one.
    fn warning(unreached: &UnreachedSpans) -> Option<&'static str> {
        (1..MOST_MISSED).for_each(|_| unreached.note(false));
        assert_eq!(unreached.take_warning(), None);
        unreached.note(false);
        let taken = unreached.take_warning();
        (0..99).for_each(|_| unreached.note(false));
        assert_eq!(unreached.take_warning(), None, "once");
        taken
    }

    #[test]
    fn types_and_callsites_show_that_there_are_spans() {
        fn of_type<L>() -> Option<&'static str> {
            let unreached = UnreachedSpans::default();
            unreached.note_type(type_name::<L>());
            warning(&unreached)
        }
        type InReload<L> = reload::Layer<L, Registry>;
        type Reloadable = Filtered<Otel<Registry>, InReload<LevelFilter>, Registry>;
        let found =
            [of_type::<Otel<()>>(), of_type::<Reloadable>(), of_type::<InReload<Reloadable>>()];
        assert_eq!(found, [Some(UNREACHED); 3]);
        // An option may be `None`.
        let others = [
            of_type::<Registry>(),
            of_type::<Option<Otel<()>>>(),
            of_type::<InReload<LevelFilter>>(),
        ];
        assert_eq!(others, [None; 3]);

        let of_callsite = |target, name| {
            let unreached = UnreachedSpans::default();
            unreached.note_callsite(target, name);
            warning(&unreached)
        };
        let started = "BatchSpanProcessor.ThreadStarted";
        assert_eq!(of_callsite("opentelemetry_sdk", started), Some(UNREACHED));
        assert_eq!(of_callsite("opentelemetry_sdk", "MeterProvider.Building"), None);
        assert_eq!(of_callsite("shop", started), None);
    }

    #[test]
    fn one_that_is_reached_ends_the_search() {
        let unreached = UnreachedSpans::default();
        unreached.note_type(type_name::<Otel<()>>());
        (0..9).for_each(|_| unreached.note(false));
        unreached.note(true);
        unreached.note(false);
        assert_eq!(unreached.take_warning(), None);
    }
}
