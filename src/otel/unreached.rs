//! Notices that the OpenTelemetry spans of kept spans cannot be reached.

use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};

use super::otel_span::is_in_otel_span;
use crate::span::is_ignored;

/// Whether there are OpenTelemetry spans, and whether those of closing spans are reached.
#[derive(Debug, Default)]
pub(crate) struct UnreachedSpans {
    /// Bits: what types, callsites and closing spans have shown.
    seen: AtomicU8,
    /// How many closing spans had no OpenTelemetry span.
    missed: AtomicU32,
}

/// The OpenTelemetry span of a span was reached, so nothing is wrong.
const REACHED: u8 = 1;
/// No OpenTelemetry span was current at the close of an outermost span. (Otherwise the program made it.)
const NONE_OUTSIDE: u8 = 1 << 1;
/// One was current at the close of an inner span: the one of a span around it.
const ONE_INSIDE: u8 = 1 << 2;
/// One was current at the close of an outermost span: the program makes OpenTelemetry spans itself.
const OF_PROGRAM: u8 = 1 << 3;
const HAS_WARNED: u8 = 1 << 5;
/// The program has a layer of `tracing-opentelemetry` or exports OpenTelemetry spans, with any release of these crates.
const IN_PROGRAM: u8 = 1 << 4;

/// A filter can hide some spans from OpenTelemetry. After this many without any that is reached, something is wrong.
const MOST_MISSED: u32 = 8;
/// In a program without OpenTelemetry, all are missed.
const MOST_CHECKS: u32 = 256;

const UNREACHED: &str = "kept spans have no OpenTelemetry spans, so profiles and traces are not linked: add the layer of \
    tracing-opentelemetry by `.with(profiling.with_opentelemetry(opentelemetry))`, not inside a `reload::Layer`, and of \
    release 0.34, the only one that `cargo tree -i tracing-opentelemetry` may list; see the guide's page \
    `opentelemetry`";

impl UnreachedSpans {
    /// The program has a layer or a subscriber of the type with that name.
    pub(crate) fn note_type(&self, name: &str) {
        // An `Option` can be `None`.
        let before = name.split_once("tracing_opentelemetry::layer::").map(|(before, _)| before);
        if before.is_some_and(|before| !before.contains("core::option::Option<")) {
            self.seen.fetch_or(IN_PROGRAM, Ordering::Relaxed);
        }
    }

    /// The program has a callsite of that target and name: the thread that exports OpenTelemetry spans has some.
    pub(crate) fn note_callsite(&self, target: &str, name: &str) {
        if target == "opentelemetry_sdk" && name.starts_with("BatchSpanProcessor.") {
            self.seen.fetch_or(IN_PROGRAM, Ordering::Relaxed);
        }
    }

    /// The OpenTelemetry span of a span that has closed was reached, or not. A span is outermost if no other profiled span
    /// is around it.
    pub(crate) fn note(&self, is_reached: bool, is_outermost: bool) {
        let is_known = self.seen.load(Ordering::Relaxed) & REACHED != 0;
        if is_known || self.missed.load(Ordering::Relaxed) >= MOST_CHECKS || is_ignored() {
            return;
        }
        let seen = if is_reached {
            REACHED
        } else {
            self.missed.fetch_add(1, Ordering::Relaxed);
            match (is_outermost, is_in_otel_span()) {
                (true, false) => NONE_OUTSIDE,
                (false, true) => ONE_INSIDE,
                (true, true) => OF_PROGRAM,
                (false, false) => return,
            }
        };
        self.seen.fetch_or(seen, Ordering::Relaxed);
    }

    /// Takes the warning to log, once.
    pub(crate) fn take_warning(&self) -> Option<&'static str> {
        let seen = self.seen.load(Ordering::Relaxed);
        let inside_only = NONE_OUTSIDE | ONE_INSIDE;
        let is_there = seen & IN_PROGRAM != 0 || seen & inside_only == inside_only;
        let is_missed = cfg!(feature = "opentelemetry")
            && seen & (REACHED | OF_PROGRAM) == 0
            && self.missed.load(Ordering::Relaxed) >= MOST_MISSED;
        (is_there
            && is_missed
            && self.seen.fetch_or(HAS_WARNED, Ordering::Relaxed) & HAS_WARNED == 0)
            .then_some(UNREACHED)
    }
}

#[cfg(all(test, feature = "opentelemetry"))]
mod tests {
    use std::any::type_name;

    use opentelemetry::Context;
    use opentelemetry::trace::{
        SpanContext, SpanId, TraceContextExt, TraceFlags, TraceId, TraceState,
    };

    use tracing_opentelemetry::OpenTelemetryLayer;
    use tracing_subscriber::filter::{Filtered, LevelFilter};
    use tracing_subscriber::registry::Registry;
    use tracing_subscriber::reload;

    use super::*;

    type Otel<S> = OpenTelemetryLayer<S, ()>;

    /// Spans close whose OpenTelemetry spans are missed: a number of pairs, the inner one first.
    fn miss(unreached: &UnreachedSpans, pairs: u32, is_of_program: bool, is_remote: bool) {
        let attach = |is_current: bool| {
            let (trace, span) = (TraceId::from(7_u128), SpanId::from(9_u64));
            let (flags, state) = (TraceFlags::SAMPLED, TraceState::NONE);
            let context = SpanContext::new(trace, span, flags, is_remote, state);
            is_current.then(|| Context::new().with_remote_span_context(context).attach())
        };
        for _ in 0..pairs {
            let inside = attach(true);
            unreached.note(false, false);
            drop(inside);
            let _outside = attach(is_of_program);
            unreached.note(false, true);
        }
    }

    /// Spans close that have no OpenTelemetry span, and the warning after the last one.
    fn warning(unreached: &UnreachedSpans) -> Option<&'static str> {
        (1..MOST_MISSED).for_each(|_| unreached.note(false, true));
        assert_eq!(unreached.take_warning(), None);
        unreached.note(false, true);
        unreached.take_warning()
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
    fn current_spans_show_a_layer_that_is_not_reached() {
        let unreached = UnreachedSpans::default();
        miss(&unreached, MOST_MISSED / 2 - 1, false, false);
        assert_eq!(unreached.take_warning(), None);
        miss(&unreached, 1, false, false);
        assert_eq!(unreached.take_warning(), Some(UNREACHED));
        miss(&unreached, 99, false, false);
        assert_eq!(unreached.take_warning(), None, "once");
    }

    #[test]
    fn spans_of_the_program_or_of_another_process_show_nothing() {
        for (is_of_program, is_remote) in [(true, false), (false, true), (true, true)] {
            let unreached = UnreachedSpans::default();
            miss(&unreached, MOST_CHECKS, is_of_program, is_remote);
            assert_eq!(unreached.take_warning(), None, "{is_of_program} {is_remote}");
        }
    }

    #[test]
    fn one_that_is_reached_ends_the_search() {
        let unreached = UnreachedSpans::default();
        unreached.note_type(type_name::<Otel<()>>());
        miss(&unreached, MOST_MISSED, false, false);
        unreached.note(true, false);
        assert_eq!(unreached.take_warning(), None);
    }
}
