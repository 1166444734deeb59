//! Pairs spans with their OpenTelemetry spans if these cannot be accessed when the spans close.
//!
//! When a span is entered, the layer of `tracing-opentelemetry` makes its span the thread's current one. The current
//! spans at this layer's enter and exit therefore differ by exactly that span. If this layer comes first, the span is
//! current at the exit, otherwise at the enter.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::panic::catch_unwind;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};

use parking_lot::Mutex;

use super::SpanAttributes;
use crate::ids::SpanId;
use crate::span::{RegistryId, TraceIds, Verdict, is_ignored};
use crate::sys::Allocations;

/// The order of this layer and the one of `tracing-opentelemetry`, as far as it is known, and the OpenTelemetry spans
/// of open spans if the order requires them.
#[derive(Debug, Default)]
pub(crate) struct Pairing {
    order: AtomicU8,
    /// How many further exits may be checked for the order while it is unknown.
    checks_left: AtomicU32,
    period: Period,
    was_suspected: AtomicBool,
    /// A span was kept whose OpenTelemetry span is unknown.
    has_unpaired: AtomicBool,
    has_warned: AtomicBool,
    /// A layer of that name is around this one, but none of its spans has been found yet.
    is_expected: AtomicBool,
    /// How many kept spans had no OpenTelemetry span while it was expected.
    missed: AtomicU32,
    /// Present if there is a span processor. Pairs are only needed for it.
    spans: OnceLock<Mutex<PairedSpans>>,
}

/// Open spans whose OpenTelemetry spans are known.
#[derive(Debug, Default)]
struct PairedSpans {
    paired: HashMap<RegistryId, Paired>,
    by_span_id: HashMap<SpanId, RegistryId>,
}

/// The OpenTelemetry span of an open span.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Paired {
    pub(crate) ids: TraceIds,
    pub(crate) early: Option<EarlyVerdict>,
}

/// The verdict on a span when its OpenTelemetry span ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EarlyVerdict {
    pub(crate) verdict: Verdict,
    /// For how long the span had been entered. If it is entered again, the verdict is out of date.
    pub(crate) busy_ns: u64,
    /// What it had allocated. A span inside that closes later adds to it.
    pub(crate) allocated: Option<Allocations>,
}

/// Identifies a period in which a layer checks enters and exits. Those in between are not recorded, and layers do not use
/// each other's.
#[derive(Debug)]
struct Period(AtomicU32);

static PERIODS: AtomicU32 = AtomicU32::new(0);

impl Period {
    fn next() -> u32 {
        PERIODS.fetch_add(1, Ordering::Relaxed)
    }

    fn current(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }

    fn end(&self) {
        self.0.store(Self::next(), Ordering::Relaxed);
    }
}

impl Default for Period {
    fn default() -> Self {
        Self(AtomicU32::new(Self::next()))
    }
}

const UNKNOWN: u8 = 0;
/// OpenTelemetry spans can be accessed at close: no pairing is needed.
const DIRECT: u8 = 1;
/// This layer comes first, but the other one cannot be accessed.
const PROFILING_FIRST: u8 = 2;
/// This layer comes last: an OpenTelemetry span has ended before this layer handles the close.
const OTEL_FIRST: u8 = 3;

/// The maximum number of checks. Without OpenTelemetry, no check ever succeeds.
const MOST_CHECKS: u32 = 256;
/// Entered spans that are stored for a thread. Spans that are never exited must not accumulate.
const DEEPEST: usize = 128;

const WRONG_ORDER: &str = "the profiling layer comes after the layer of tracing-opentelemetry, \
    so profiles and OpenTelemetry spans are not linked: add it before that layer, as in \
    `.with(profiling).with(opentelemetry)`, or give the tracer provider a `Handle::span_processor` (feature \
    `opentelemetry-sdk`)";
const FOREIGN: &str = "the layer of tracing-opentelemetry has no spans for the spans that are kept, so these get no \
    attributes: the program has another release of tracing-opentelemetry than 0.34 (`cargo tree -i tracing-opentelemetry` \
    lists both), or a filter hides the spans from that layer";
/// Kept spans without an OpenTelemetry span that show this. Few are hidden by a filter alone.
const MOST_MISSED: u32 = 8;
const UNPAIRED: &str = "the OpenTelemetry span of a kept span is unknown and gets no attributes: if it cannot \
    be accessed when the span closes, it is known only after the span was entered with context activation; \
    add the profiling layer before the layer of tracing-opentelemetry, as in `.with(profiling).with(opentelemetry)`";

/// The current OpenTelemetry span of a thread, unless it is remote.
type Current = Option<TraceIds>;

/// An entered span, and the OpenTelemetry span that was current when its layer handled the enter.
struct Entered {
    period: u32,
    id: RegistryId,
    current: Current,
}

thread_local! {
    /// Whether the context was available at first use; `None` before that.
    static HAS_CONTEXT: Cell<Option<bool>> = const { Cell::new(None) };

    /// The entered spans from the outermost.
    ///
    /// This is dropped before the thread's context. After that, the context must not be accessed, because that panics,
    /// even in the destructor of a thread-local that enters a span.
    static ENTERED: RefCell<Vec<Entered>> = const { RefCell::new(Vec::new()) };

    /// Attributes for the OpenTelemetry span that ends next on this thread.
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

/// Calls `action` with the entered spans of this thread and the current OpenTelemetry span, if the context is
/// available.
fn with_thread<R>(action: impl FnOnce(&mut Vec<Entered>, Current) -> R) -> Option<R> {
    if is_ignored() {
        return None;
    }
    // The context may already be destroyed. Otherwise this call initializes it before `ENTERED`, so that it is dropped
    // after `ENTERED`.
    if HAS_CONTEXT.get().is_none() {
        HAS_CONTEXT.set(Some(catch_unwind(current).is_ok()));
    }
    if HAS_CONTEXT.get() == Some(false) {
        return None;
    }
    ENTERED.try_with(|entered| action(&mut entered.borrow_mut(), current())).ok()
}

/// The OpenTelemetry spans that were current at the enter and at the exit of a span, which differ.
struct Change {
    before: Current,
    after: Current,
    /// The one that was current at the enter of the enclosing span, if there is one.
    around: Option<Current>,
}

impl Change {
    /// Called at an exit. `None` if nothing has changed, or if spans are not exited in reverse order of their enters.
    fn at_exit(period: u32, id: RegistryId) -> Option<Self> {
        with_thread(|entered, after| {
            let index = entered.iter().rposition(|e| (e.period, e.id) == (period, id))?;
            let before = entered.remove(index).current;
            let is_innermost = entered.iter().skip(index).all(|e| e.period != period);
            let around = entered.iter().rfind(|e| e.period == period).map(|e| e.current);
            (is_innermost && before != after).then_some(Self { before, after, around })
        })?
    }

    /// The order of the layers, judged by this change alone.
    fn order(&self) -> u8 {
        let was_around = |current| self.around == Some(current);
        if self.after.is_none() || was_around(self.after) {
            // The current span at the exit is not the span's own.
            OTEL_FIRST
        } else if self.before.is_none() || was_around(None) {
            // The current span at the enter was not the span's own. Or it was none at the enter of the enclosing span,
            // which means the same, unless that one is hidden from the other layer and a span was activated manually
            // inside it.
            PROFILING_FIRST
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
        if let (UNKNOWN | DIRECT, Some(spans)) = (order, self.spans.get()) {
            *spans.lock() = PairedSpans::default();
        }
    }

    /// The layer was added to that subscriber.
    pub(crate) fn note_subscriber<S>(&self) {
        if is_opentelemetry::<S>() {
            self.set_order(OTEL_FIRST);
        }
    }

    /// That layer was added around this one.
    pub(crate) fn note_layer_around<L>(&self) {
        // An `Option` can be `None`.
        let is_there = !std::any::type_name::<L>().starts_with("core::option::Option<");
        self.is_expected.store(is_there && is_opentelemetry::<L>(), Ordering::Relaxed);
    }

    /// A kept span has an OpenTelemetry span that can be accessed, or not.
    pub(crate) fn note_kept(&self, has_span: bool) {
        if !self.is_expected.load(Ordering::Relaxed) {
            return;
        }
        if has_span {
            self.is_expected.store(false, Ordering::Relaxed);
        } else {
            self.missed.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// A span processor observes the ends of OpenTelemetry spans from now on. Enters and exits must be checked.
    #[cfg(feature = "opentelemetry-sdk")]
    pub(crate) fn expect_processor(&self) {
        self.spans.get_or_init(Mutex::default);
        self.checks_left.store(MOST_CHECKS, Ordering::Relaxed);
    }

    /// A span without an OpenTelemetry span has closed. Returns whether enters and exits must be checked from now on.
    pub(crate) fn suspect(&self) -> bool {
        let is_first = !self.was_suspected.swap(true, Ordering::Relaxed);
        let must_check = cfg!(feature = "opentelemetry")
            && self.order() == UNKNOWN
            && (is_first || self.spans.get().is_some());
        if must_check {
            self.checks_left.store(MOST_CHECKS, Ordering::Relaxed);
        }
        must_check
    }

    /// The OpenTelemetry span of a closing span was accessible.
    pub(crate) fn note_direct(&self) {
        self.set_order(DIRECT);
        self.period.end();
    }

    /// A span was kept whose OpenTelemetry span is unknown.
    pub(crate) fn note_unpaired(&self) {
        if self.spans.get().is_some() && matches!(self.order(), PROFILING_FIRST | OTEL_FIRST) {
            self.has_unpaired.store(true, Ordering::Relaxed);
        }
    }

    /// Records an enter.
    #[cold]
    pub(crate) fn enter(&self, id: RegistryId) {
        with_thread(|entered, current| {
            if entered.len() == DEEPEST {
                entered.remove(0);
            }
            entered.push(Entered { period: self.period.current(), id, current });
        });
    }

    /// Records an exit, and pairs the span if it `is_profiled`. `reach` tries to access the OpenTelemetry span. That
    /// starts nothing, because the context has changed already. Returns whether to continue checking.
    #[cold]
    pub(crate) fn exit(
        &self,
        id: RegistryId,
        is_profiled: bool,
        reach: impl FnOnce() -> Option<TraceIds>,
    ) -> bool {
        let ids = Change::at_exit(self.period.current(), id)
            .and_then(|change| self.changed(&change, reach));
        if let (Some(ids), Some(spans), true) = (ids, self.spans.get(), is_profiled) {
            let mut spans = spans.lock();
            if spans.paired.get(&id).is_none_or(|paired| paired.ids != ids) {
                let old = spans.paired.insert(id, Paired { ids, early: None });
                old.map(|old| spans.by_span_id.remove(&old.ids.span));
                spans.by_span_id.insert(ids.span, id);
            }
        }
        let continues = match self.order() {
            UNKNOWN => self.checks_left.fetch_sub(1, Ordering::Relaxed) > 1,
            DIRECT => false,
            _ => self.spans.get().is_some(),
        };
        if !continues {
            self.period.end();
        }
        continues
    }

    /// Updates the order from a change. Returns the OpenTelemetry span of the exited span.
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
                reached if reached.is_some() && reached == change.before => OTEL_FIRST,
                // A program can detach its own contexts in any order.
                _ => UNKNOWN,
            }
        };
        if order != known {
            self.set_order(order);
        }
        match order {
            PROFILING_FIRST => change.after,
            OTEL_FIRST => change.before,
            _ => None,
        }
    }

    /// The OpenTelemetry span that an open span was paired with.
    pub(crate) fn paired_ids(&self, id: RegistryId) -> Option<TraceIds> {
        Some(self.spans.get()?.lock().paired.get(&id)?.ids)
    }

    /// Takes the OpenTelemetry span that a closing span was paired with.
    #[cold]
    pub(crate) fn take(&self, id: RegistryId) -> Option<Paired> {
        let mut spans = self.spans.get()?.lock();
        let paired = spans.paired.remove(&id)?;
        spans.by_span_id.remove(&paired.ids.span);
        Some(paired)
    }

    /// The span was judged when its OpenTelemetry span ended.
    #[cfg(feature = "opentelemetry-sdk")]
    pub(crate) fn note_judged(&self, id: RegistryId, early: EarlyVerdict) {
        let Some(spans) = self.spans.get() else { return };
        if let Some(paired) = spans.lock().paired.get_mut(&id) {
            paired.early = Some(early);
        }
    }

    /// The open span that is paired with that OpenTelemetry span.
    #[cfg(feature = "opentelemetry-sdk")]
    pub(crate) fn paired_with(&self, span: SpanId) -> Option<RegistryId> {
        self.spans.get()?.lock().by_span_id.get(&span).copied()
    }

    /// Takes the warning to log, once: the layers are in the wrong order and there is no processor, the processor could not
    /// pair a span, or the other layer is of a release whose spans cannot be accessed.
    pub(crate) fn take_warning(&self) -> Option<&'static str> {
        let line = match self.spans.get() {
            None if self.order() == OTEL_FIRST => WRONG_ORDER,
            Some(_) if self.has_unpaired.load(Ordering::Relaxed) => UNPAIRED,
            _ if self.is_expected.load(Ordering::Relaxed)
                && self.missed.load(Ordering::Relaxed) >= MOST_MISSED =>
            {
                FOREIGN
            }
            _ => return None,
        };
        (!self.has_warned.swap(true, Ordering::Relaxed)).then_some(line)
    }
}

/// Whether that type is the layer of any release of `tracing-opentelemetry`, or contains it.
fn is_opentelemetry<T>() -> bool {
    std::any::type_name::<T>().contains("tracing_opentelemetry::layer::OpenTelemetryLayer<")
}

/// Stores attributes for the processor of the OpenTelemetry span that ends next on this thread.
pub(super) fn leave_attributes(span: SpanId, attributes: SpanAttributes) {
    _ = ATTRIBUTES.try_with(|left| left.set(Some((span, attributes))));
}

/// Takes the attributes that were stored for that span.
#[cfg(feature = "opentelemetry-sdk")]
pub(super) fn take_attributes(span: SpanId) -> Option<SpanAttributes> {
    let (of, attributes) = ATTRIBUTES.try_with(Cell::take).ok().flatten()?;
    if of != span {
        // Another span ends in between.
        leave_attributes(of, attributes);
        return None;
    }
    Some(attributes)
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

    /// A span whose OpenTelemetry span has the same number, as the layers would create it.
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
        let taken = pairing.take(id(number)).map(|paired| paired.ids.span);
        assert_eq!(open, taken.map(|_| id(number)));
        assert!(taken.is_none_or(|taken| taken == span), "no other");
        assert_eq!(pairing.paired_with(span), None);
        taken.is_some()
    }

    #[test]
    fn nested_spans_are_paired_in_both_orders() {
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
    fn a_span_that_is_paired_again_leaves_nothing_behind() {
        let pairing = with_processor();
        in_span(&pairing, true, 1, || ());
        pairing.enter(id(1));
        let context = attach(2, false);
        exit(&pairing, 1);
        drop(context);
        assert_eq!(
            pairing.take(id(1)).map(|paired| paired.ids.span),
            SpanId::from_bytes(2_u64.to_be_bytes()).into()
        );
        let spans = pairing.spans.get().unwrap().lock();
        assert!(spans.paired.is_empty() && spans.by_span_id.is_empty());
    }

    #[test]
    fn a_change_that_contradicts_the_order_pairs_nothing() {
        for is_ours_first in [true, false] {
            let pairing = with_processor();
            in_span(&pairing, is_ours_first, 1, || ());
            assert!(paired(&pairing, 1));
            in_span(&pairing, !is_ours_first, 2, || ());
            assert!(!paired(&pairing, 2));
            // The order has changed from here on.
            in_span(&pairing, !is_ours_first, 3, || ());
            assert!(paired(&pairing, 3));
        }
    }

    #[test]
    fn spans_that_are_exited_out_of_order_pair_nothing() {
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
    fn an_accessible_span_ends_the_checks() {
        let pairing = with_processor();
        pairing.enter(id(1));
        let _first = attach(1, false);
        assert!(!pairing.exit(id(1), true, current));
        assert!(!paired(&pairing, 1));
        assert!(!pairing.suspect());
    }

    #[test]
    fn another_layer_does_not_end_the_checks() {
        let (pairing, other) = (with_processor(), with_processor());
        in_span(&pairing, true, 1, || {
            in_span(&other, true, 1, || ());
            other.note_direct();
            in_span(&pairing, true, 2, || ());
            // Never exited.
            other.enter(id(2));
        });
        assert!(paired(&pairing, 1) && paired(&pairing, 2) && !paired(&other, 1));
    }

    #[test]
    fn checks_end_if_nothing_changes_and_restart_at_a_span_that_is_not_found() {
        let pairing = with_processor();
        let scan = || {
            pairing.enter(id(1));
            pairing.exit(id(1), true, || None)
        };
        assert_eq!((0..1_000).take_while(|_| scan()).count(), MOST_CHECKS as usize - 1);
        assert!(pairing.suspect());
        assert!(scan());
    }

    #[test]
    fn spans_that_are_never_exited_do_not_accumulate() {
        let pairing = with_processor();
        (1..=1_000).for_each(|number| pairing.enter(id(number)));
        assert_eq!(with_thread(|entered, _| entered.len()), Some(DEEPEST));
    }
}
