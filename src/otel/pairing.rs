//! Pairs spans with their OpenTelemetry spans where those cannot be reached when they close.
//!
//! The layer of `tracing-opentelemetry` makes its span the current one of the thread as it is
//! entered. So the spans that are current at our enter and at our exit differ by just that one:
//! if our layer comes first it is current at the exit, else at the enter.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::panic::catch_unwind;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};

use parking_lot::Mutex;

use super::SpanAttributes;
use crate::ids::SpanId;
use crate::span::{RegistryId, TraceIds, is_ignored};

/// What is known of the order of this layer and the one of `tracing-opentelemetry`, and of the
/// OpenTelemetry spans of open spans if the order demands it.
#[derive(Debug, Default)]
pub(crate) struct Pairing {
    order: AtomicU8,
    /// Exits of spans at which to look for the order, as long as it is not known.
    looks: AtomicU32,
    was_suspected: AtomicBool,
    /// A span was kept whose OpenTelemetry span is not known.
    has_unpaired: AtomicBool,
    has_warned: AtomicBool,
    /// If there is a span processor, which is what pairs are for.
    spans: OnceLock<Mutex<PairedSpans>>,
}

/// Open spans whose OpenTelemetry spans are known.
#[derive(Debug, Default)]
struct PairedSpans {
    ids: HashMap<RegistryId, TraceIds>,
    by_span_id: HashMap<SpanId, RegistryId>,
}

const UNKNOWN: u8 = 0;
/// OpenTelemetry's spans are reached when they close: there is nothing to pair.
const DIRECT: u8 = 1;
/// This layer comes first, but the other one cannot be reached.
const OURS_FIRST: u8 = 2;
/// This layer comes last: an OpenTelemetry span has ended before ours closes.
const THEIRS_FIRST: u8 = 3;

/// Without OpenTelemetry, spans never have one: so it is looked for only so often.
const LOOKS: u32 = 256;
/// Entered spans of a thread that are remembered: those that are never left must not pile up.
const DEEPEST: usize = 128;

const WRONG_ORDER: &str = "the profiling layer comes after the one of tracing-opentelemetry, so \
    profiles and OpenTelemetry spans do not know of each other: add it before, as in \
    `.with(profiling).with(opentelemetry)`, or give the tracer provider a `Handle::span_processor` (feature \
    `opentelemetry-sdk`)";
const UNPAIRED: &str = "a span was kept whose OpenTelemetry span, if it has one, gets no attributes: where \
    that is not reached when it closes, it is known only once the span has been entered, with context \
    activation; add the profiling layer before the one of tracing-opentelemetry, as in \
    `.with(profiling).with(opentelemetry)`";

/// The span that OpenTelemetry has as the current one of a thread, unless it comes from elsewhere.
type Current = Option<TraceIds>;

thread_local! {
    /// Whether a context was there when it was first asked for, if it was.
    static HAS_CONTEXT: Cell<Option<bool>> = const { Cell::new(None) };

    /// The spans that are entered, from the outside in, and what was current when our layer saw
    /// that.
    ///
    /// Is dropped before the context of its thread, of which nothing may be asked from then on:
    /// that panics, and who asks can be the destructor of a thread-local that enters a span.
    static ENTERED: RefCell<Vec<(RegistryId, Current)>> = const { RefCell::new(Vec::new()) };

    /// Attributes for the OpenTelemetry span that ends on this thread now or next.
    static ATTRIBUTES: Cell<Option<(SpanId, SpanAttributes)>> = const { Cell::new(None) };
}

#[cfg(feature = "opentelemetry")]
fn current() -> Current {
    use opentelemetry::trace::TraceContextExt;
    opentelemetry::Context::map_current(|context| {
        let span = context.span();
        let context = span.span_context();
        let is_local = context.is_valid() && !context.is_remote();
        is_local.then(|| super::values::ids_of(context))
    })
}

#[cfg(not(feature = "opentelemetry"))]
fn current() -> Current {
    None
}

/// Calls `action` with what was entered on this thread and with what is current, if that can be
/// asked.
fn with_thread<R>(action: impl FnOnce(&mut Vec<(RegistryId, Current)>, Current) -> R) -> Option<R> {
    if is_ignored() {
        return None;
    }
    // The context may be gone already; else it is made by this, so that `ENTERED` comes after it,
    // and goes before it.
    if HAS_CONTEXT.get().is_none() {
        HAS_CONTEXT.set(Some(catch_unwind(current).is_ok()));
    }
    if HAS_CONTEXT.get() == Some(false) {
        return None;
    }
    ENTERED.try_with(|entered| action(&mut entered.borrow_mut(), current())).ok()
}

/// What was current at the enter and at the exit of a span, which differ.
struct Change {
    before: Current,
    after: Current,
    /// What was current at the enter of the span around it, if there is one.
    around: Option<Current>,
}

impl Change {
    /// A span is left; `None` if nothing has changed, or if spans are not left in the order in
    /// which they were entered.
    fn at_exit(id: RegistryId) -> Option<Self> {
        with_thread(|entered, after| {
            let index = entered.iter().rposition(|(entered, _)| *entered == id)?;
            let (_, before) = entered.remove(index);
            let around = entered.last().map(|(_, current)| *current);
            (index == entered.len() && before != after).then_some(Self { before, after, around })
        })?
    }

    /// Whose layer comes first, judging by this change alone.
    fn order(&self) -> u8 {
        let was_around = |current| self.around == Some(current);
        if self.after.is_none() || was_around(self.after) {
            // What is current at the exit is not the span.
            THEIRS_FIRST
        } else if self.before.is_none() || was_around(None) {
            // What was current at the enter was not; or the span around it was not at its own,
            // and then this one was not either.
            OURS_FIRST
        } else {
            UNKNOWN
        }
    }
}

impl Pairing {
    fn order(&self) -> u8 {
        self.order.load(Ordering::Relaxed)
    }

    fn set_order(&self, order: u8) {
        self.order.store(order, Ordering::Relaxed);
    }

    /// The layer is put on that subscriber.
    pub(crate) fn see_subscriber<S>(&self) {
        if std::any::type_name::<S>().contains("tracing_opentelemetry::layer::OpenTelemetryLayer<")
        {
            self.set_order(THEIRS_FIRST);
        }
    }

    /// From now on a span processor sees OpenTelemetry's spans end. Enters and exits must be looked
    /// at.
    #[cfg(feature = "opentelemetry-sdk")]
    pub(crate) fn expect_processor(&self) {
        self.spans.get_or_init(Mutex::default);
        self.looks.store(LOOKS, Ordering::Relaxed);
    }

    /// A span closed that has no OpenTelemetry span. Returns whether enters and exits must be
    /// looked at from now on.
    pub(crate) fn suspect(&self) -> bool {
        let is_first = !self.was_suspected.swap(true, Ordering::Relaxed);
        let must_look = cfg!(feature = "opentelemetry")
            && self.order() == UNKNOWN
            && (is_first || self.spans.get().is_some());
        if must_look {
            self.looks.store(LOOKS, Ordering::Relaxed);
        }
        must_look
    }

    /// A span that closed was reached.
    pub(crate) fn note_direct(&self) {
        self.set_order(DIRECT);
        if let Some(spans) = self.spans.get() {
            *spans.lock() = PairedSpans::default();
        }
    }

    /// A span was kept whose OpenTelemetry span is not known.
    pub(crate) fn note_unpaired(&self) {
        if self.spans.get().is_some() && matches!(self.order(), OURS_FIRST | THEIRS_FIRST) {
            self.has_unpaired.store(true, Ordering::Relaxed);
        }
    }

    /// A span is entered.
    #[cold]
    pub(crate) fn enter(&self, id: RegistryId) {
        with_thread(|entered, current| {
            if entered.len() == DEEPEST {
                entered.remove(0);
            }
            entered.push((id, current));
        });
    }

    /// A span is left, which is to be paired if it `is_profiled`. `reach` asks the other layer for
    /// it, which starts nothing once contexts have changed. Returns whether to go on looking.
    #[cold]
    pub(crate) fn exit(
        &self,
        id: RegistryId,
        is_profiled: bool,
        reach: impl FnOnce() -> Option<TraceIds>,
    ) -> bool {
        let ids = Change::at_exit(id).and_then(|change| self.changed(&change, reach));
        if let (Some(ids), Some(spans), true) = (ids, self.spans.get(), is_profiled) {
            let mut spans = spans.lock();
            if spans.ids.insert(id, ids) != Some(ids) {
                spans.by_span_id.insert(ids.span, id);
            }
        }
        match self.order() {
            UNKNOWN => self.looks.fetch_sub(1, Ordering::Relaxed) > 1,
            DIRECT => false,
            _ => self.spans.get().is_some(),
        }
    }

    /// Learns the order from what has changed. Returns what belongs to the span that was left.
    fn changed(
        &self,
        change: &Change,
        reach: impl FnOnce() -> Option<TraceIds>,
    ) -> Option<TraceIds> {
        let (known, seen) = (self.order(), change.order());
        let order = if known != UNKNOWN && (seen == UNKNOWN || seen == known) {
            known
        } else {
            match reach() {
                None if known == UNKNOWN => seen,
                reached if reached.is_some() && reached == change.after => DIRECT,
                reached if reached.is_some() && reached == change.before => THEIRS_FIRST,
                // A program may leave contexts that it made current itself in any order.
                _ => UNKNOWN,
            }
        };
        if order != known {
            self.set_order(order);
        }
        match order {
            OURS_FIRST => change.after,
            THEIRS_FIRST => change.before,
            _ => None,
        }
    }

    /// What the span of that id was paired with, if it was, now that it closes.
    #[cold]
    pub(crate) fn take(&self, id: RegistryId) -> Option<TraceIds> {
        let mut spans = self.spans.get()?.lock();
        let ids = spans.ids.remove(&id)?;
        spans.by_span_id.remove(&ids.span);
        Some(ids)
    }

    /// The open span that is paired with that OpenTelemetry span.
    #[cfg(feature = "opentelemetry-sdk")]
    pub(crate) fn paired_with(&self, span: SpanId) -> Option<RegistryId> {
        self.spans.get()?.lock().by_span_id.get(&span).copied()
    }

    /// What is to be said in the log, once: that the layers are in the wrong order and no processor
    /// makes up for it, or where it cannot.
    pub(crate) fn take_warning(&self) -> Option<&'static str> {
        let line = match self.spans.get() {
            None if self.order() == THEIRS_FIRST => WRONG_ORDER,
            Some(_) if self.has_unpaired.load(Ordering::Relaxed) => UNPAIRED,
            _ => return None,
        };
        (!self.has_warned.swap(true, Ordering::Relaxed)).then_some(line)
    }
}

/// Leaves these for the processor of the OpenTelemetry span, which ends on this thread now or next.
pub(super) fn leave_attributes(span: SpanId, attributes: SpanAttributes) {
    _ = ATTRIBUTES.try_with(|left| left.set(Some((span, attributes))));
}

/// The attributes that were left for that span.
#[cfg(feature = "opentelemetry-sdk")]
pub(super) fn take_attributes(span: SpanId) -> Option<SpanAttributes> {
    let left = ATTRIBUTES.try_with(Cell::take).ok().flatten();
    left.filter(|(of, _)| *of == span).map(|(_, attributes)| attributes)
}

#[cfg(test)]
mod tests {
    use opentelemetry::trace::{SpanContext, TraceContextExt, TraceFlags, TraceId, TraceState};
    use opentelemetry::{Context, ContextGuard};

    use super::*;

    fn id(number: u64) -> RegistryId {
        RegistryId::new(number).unwrap()
    }

    fn attach(span: u64, is_remote: bool) -> ContextGuard {
        let (trace, span) = (TraceId::from(7_u128), opentelemetry::trace::SpanId::from(span));
        let (flags, state) = (TraceFlags::SAMPLED, TraceState::NONE);
        let context = SpanContext::new(trace, span, flags, is_remote, state);
        Context::new().with_remote_span_context(context).attach()
    }

    fn with_processor() -> Pairing {
        let pairing = Pairing::default();
        pairing.expect_processor();
        pairing
    }

    fn exit(pairing: &Pairing, number: u64) {
        assert!(pairing.exit(id(number), true, || None));
    }

    /// The span whose OpenTelemetry span has the same number, as the layer makes it.
    fn in_span(pairing: &Pairing, is_ours_first: bool, number: u64, inside: impl FnOnce()) {
        let before = (!is_ours_first).then(|| attach(number, false));
        pairing.enter(id(number));
        let after = is_ours_first.then(|| attach(number, false));
        inside();
        drop(before);
        exit(pairing, number);
        drop(after);
    }

    fn paired(pairing: &Pairing, number: u64) -> bool {
        let span = SpanId::from_bytes(number.to_be_bytes());
        let open = pairing.paired_with(span);
        let taken = pairing.take(id(number)).map(|ids| ids.span);
        assert_eq!(open, taken.map(|_| id(number)));
        assert!(taken.is_none_or(|taken| taken == span), "no other");
        assert_eq!(pairing.paired_with(span), None);
        taken.is_some()
    }

    #[test]
    fn spans_inside_each_other_are_paired_in_both_orders() {
        for is_ours_first in [true, false] {
            for is_below_remote in [true, false] {
                let _remote = is_below_remote.then(|| attach(9, true));
                let pairing = with_processor();
                in_span(&pairing, is_ours_first, 1, || {
                    in_span(&pairing, is_ours_first, 2, || ());
                    assert!(paired(&pairing, 2));
                    // Hidden from the other layer.
                    pairing.enter(id(3));
                    exit(&pairing, 3);
                });
                assert!(paired(&pairing, 1));
                assert!(!paired(&pairing, 3));
            }
        }
    }

    #[test]
    fn what_contradicts_the_order_pairs_nothing() {
        for is_ours_first in [true, false] {
            let pairing = with_processor();
            in_span(&pairing, is_ours_first, 1, || ());
            assert!(paired(&pairing, 1));
            in_span(&pairing, !is_ours_first, 2, || ());
            assert!(!paired(&pairing, 2));
            // From now on it is that order.
            in_span(&pairing, !is_ours_first, 3, || ());
            assert!(paired(&pairing, 3));
        }
    }

    #[test]
    fn spans_that_are_left_in_another_order_pair_nothing() {
        let pairing = with_processor();
        in_span(&pairing, true, 1, || ());
        pairing.enter(id(2));
        let second = attach(2, false);
        pairing.enter(id(3));
        let third = attach(3, false);
        exit(&pairing, 2);
        drop(second);
        exit(&pairing, 3);
        drop(third);
        assert!(!paired(&pairing, 2));
        assert!(paired(&pairing, 3));
    }

    #[test]
    fn a_span_that_is_reached_ends_the_looks() {
        let pairing = with_processor();
        pairing.enter(id(1));
        let _first = attach(1, false);
        assert!(!pairing.exit(id(1), true, current));
        assert!(!paired(&pairing, 1));
        assert!(!pairing.suspect());
    }

    #[test]
    fn looks_end_where_nothing_changes_and_begin_again_with_a_span_that_is_not_found() {
        let pairing = with_processor();
        let look = || {
            pairing.enter(id(1));
            pairing.exit(id(1), true, || None)
        };
        assert_eq!((0..1_000).take_while(|_| look()).count(), LOOKS as usize - 1);
        assert!(pairing.suspect());
        assert!(look());
    }

    #[test]
    fn spans_that_are_never_left_do_not_pile_up() {
        let pairing = with_processor();
        (1..=1_000).for_each(|number| pairing.enter(id(number)));
        assert_eq!(with_thread(|entered, _| entered.len()), Some(DEEPEST));
    }
}
