//! Finds out why the OpenTelemetry spans of kept spans cannot be reached.

use std::any::type_name;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};

use super::otel_span::is_in_otel_span;
use crate::span::is_ignored;

/// Where the layer of `tracing-opentelemetry` is, as far as types and closing spans show it.
#[derive(Debug, Default)]
pub(crate) struct UnreachedSpans {
    /// What the types of the layers show.
    place: AtomicU8,
    /// What spans that closed have shown.
    seen: AtomicU8,
    /// How many of them had no OpenTelemetry span.
    missed: AtomicU32,
    has_warned: AtomicBool,
}

/// Values of `place`; 0 if it is unknown.
const BEFORE: u8 = 1;
const AFTER: u8 = 2;
const IN_RELOAD: u8 = 3;

/// A bit of `seen`: the OpenTelemetry span of a span was reached, so nothing is wrong.
const REACHED: u8 = 1;
/// No OpenTelemetry span was current at the close of an outermost span. (Otherwise the program made it.)
const NONE_OUTSIDE: u8 = 1 << 1;
/// One was current at the close of an inner span: the one of a span around it.
const ONE_INSIDE: u8 = 1 << 2;
/// One was current at the close of an outermost span: the program makes OpenTelemetry spans itself.
const OF_PROGRAM: u8 = 1 << 3;

/// A filter can hide some spans from OpenTelemetry. After this many without any that is reached, something is wrong.
const MOST_MISSED: u32 = 8;
/// In a program without OpenTelemetry, all are missed.
const MOST_CHECKS: u32 = 256;

const WRONG_ORDER: &str = "the profiling layer comes after the layer of tracing-opentelemetry, so profiles and \
    OpenTelemetry spans are not linked: add it before that layer, as in `.with(profiling).with(opentelemetry)`";
const RELOADED: &str = "the layer of tracing-opentelemetry is inside a `reload::Layer`, which hides it, so profiles and \
    OpenTelemetry spans are not linked: add it without that, and reload its filter instead, as in \
    `opentelemetry.with_filter(reload::Layer::new(filter).0)`";
const UNREACHED: &str = "there are OpenTelemetry spans, but those of kept spans cannot be reached, so profiles and \
    OpenTelemetry spans are not linked: the layer of tracing-opentelemetry comes before the profiling layer, or is inside \
    a `reload::Layer`: add it with `.with(profiling.with_opentelemetry(opentelemetry))`, and without a `reload::Layer`";
const OTHER_RELEASE: &str = "the layer of tracing-opentelemetry has no spans for the spans that are kept, so these get no \
    attributes: the program has another release of tracing-opentelemetry than 0.34 (`cargo tree -i tracing-opentelemetry` \
    lists both), a filter hides the spans from that layer, or it has no tracer (`with_tracer`)";

impl UnreachedSpans {
    /// The profiling layer was added to that subscriber.
    pub(crate) fn note_subscriber<S>(&self) {
        if certainly_has_opentelemetry(type_name::<S>()) {
            self.place.store(BEFORE, Ordering::Relaxed);
        }
    }

    /// That layer was added around the profiling layer.
    pub(crate) fn note_layer_around<L>(&self) {
        if let Some(place) = place_around(type_name::<L>()) {
            self.place.store(place, Ordering::Relaxed);
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
        if seen & REACHED != 0 {
            return None;
        }
        let are_missed = self.missed.load(Ordering::Relaxed) >= MOST_MISSED;
        let warning = match self.place.load(Ordering::Relaxed) {
            BEFORE => WRONG_ORDER,
            IN_RELOAD => RELOADED,
            _ if are_missed && seen == NONE_OUTSIDE | ONE_INSIDE => UNREACHED,
            AFTER if are_missed => OTHER_RELEASE,
            _ => return None,
        };
        (!self.has_warned.swap(true, Ordering::Relaxed)).then_some(warning)
    }
}

const OF_OPENTELEMETRY: &str = "tracing_opentelemetry::layer::";

/// Whether the type with that name is the layer of any release of `tracing-opentelemetry`, or contains it.
fn has_opentelemetry(name: &str) -> bool {
    cfg!(feature = "opentelemetry") && name.contains(OF_OPENTELEMETRY)
}

/// The same, without an `Option` around it, which can be `None`.
fn certainly_has_opentelemetry(name: &str) -> bool {
    let before = name.split_once(OF_OPENTELEMETRY).map(|(before, _)| before);
    has_opentelemetry(name)
        && before.is_some_and(|before| !before.contains("core::option::Option<"))
}

/// Where the layer of `tracing-opentelemetry` is, if a layer of that type is around the profiling layer.
fn place_around(name: &str) -> Option<u8> {
    // What is reloaded comes before the first comma. The rest may be the subscriber.
    let mut reloaded = name.split("tracing_subscriber::reload::Layer<").skip(1);
    let of_first = |parameters: &str| parameters.split(',').next().is_some_and(has_opentelemetry);
    if reloaded.any(of_first) {
        return Some(IN_RELOAD);
    }
    certainly_has_opentelemetry(name).then_some(AFTER)
}

#[cfg(all(test, feature = "opentelemetry"))]
mod tests {
    use opentelemetry::Context;
    use opentelemetry::trace::{
        SpanContext, SpanId, TraceContextExt, TraceFlags, TraceId, TraceState,
    };

    use tracing_opentelemetry::OpenTelemetryLayer;
    use tracing_subscriber::registry::Registry;

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

    #[test]
    fn the_place_is_read_from_types() {
        use tracing_subscriber::filter::{Filtered, LevelFilter};
        use tracing_subscriber::reload::Layer as Reload;

        fn place<L>() -> Option<u8> {
            place_around(type_name::<L>())
        }
        type InReload<L> = Reload<L, Registry>;
        type Reloadable = Filtered<Otel<Registry>, InReload<LevelFilter>, Registry>;
        assert_eq!(place::<Otel<Registry>>(), Some(AFTER));
        assert_eq!(place::<Reloadable>(), Some(AFTER));
        assert_eq!(place::<Reload<LevelFilter, Otel<Registry>>>(), Some(AFTER));
        assert_eq!(place::<InReload<Otel<Registry>>>(), Some(IN_RELOAD));
        assert_eq!(place::<InReload<Option<Otel<Registry>>>>(), Some(IN_RELOAD));
        assert_eq!(place::<InReload<Reloadable>>(), Some(IN_RELOAD));
        assert_eq!(place::<Option<Otel<Registry>>>(), None);
        assert_eq!(place::<Filtered<Option<Otel<Registry>>, LevelFilter, Registry>>(), None);
        assert_eq!(place::<InReload<LevelFilter>>(), None);
    }

    #[test]
    fn what_types_show_needs_no_closing_spans() {
        let unreached = UnreachedSpans::default();
        unreached.note_subscriber::<Registry>();
        assert_eq!(unreached.take_warning(), None);
        // It may be `None`.
        unreached.note_subscriber::<Option<Otel<()>>>();
        assert_eq!(unreached.take_warning(), None);
        unreached.note_subscriber::<Otel<()>>();
        assert_eq!(unreached.take_warning(), Some(WRONG_ORDER));
        assert_eq!(unreached.take_warning(), None, "once");
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
        unreached.note_layer_around::<Otel<()>>();
        miss(&unreached, MOST_MISSED, false, false);
        unreached.note(true, false);
        assert_eq!(unreached.take_warning(), None);
    }

    #[test]
    fn a_layer_without_spans_is_of_another_release() {
        let unreached = UnreachedSpans::default();
        unreached.note_layer_around::<Otel<()>>();
        (1..MOST_MISSED).for_each(|_| unreached.note(false, true));
        assert_eq!(unreached.take_warning(), None);
        unreached.note(false, true);
        assert_eq!(unreached.take_warning(), Some(OTHER_RELEASE));
    }
}
