//! What is known of one future: the stack of its last leaf, its span, and since when it is pending.
//!
//! Clones of one poll differ by a tag in the waker's pointer, which tells which leaf is done and which woke the task.
//! The leaf that woke has the time; if that is not known, all share it. Of awaits below 10 ms, that in which the sum
//! passes a multiple of 10 ms is a sample of that.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::RawWakerVTable;

use parking_lot::Mutex;

use super::leaves::{PendingLeaf, PendingLeaves, PollTags, SpanLeaves, WOKE_ITSELF};
use super::place::{AwaitPlace, Carried};
use super::shared::{LayerAwaits, SAMPLE_NS, SharedAwaits, activity};
use crate::inbox::{CopiedSample, CopiedStack, KindWeight};
use crate::profile::SampleKind;
use crate::span::{
    InnermostSpan, LongSegment, OtherSpan, SpanKey, innermost_span, last_long_segment,
};
use crate::stats::Counters;
use crate::sys::{LiveStack, SuspendCounting, TaskWaker, WakerObserver, waker_vtable};

/// The part of a future's state that its wakers and the collector use.
#[derive(Debug, Default)]
pub(super) struct FutureRecord {
    /// The layer of the first profiled span that the future was in.
    pub(super) awaits: OnceLock<SharedAwaits>,
    /// In ticks; 0 if the future is not pending.
    pub(super) pending_since: AtomicU64,
    /// When it was first woken since then; 0 if it was not.
    pub(super) woken_at: AtomicU64,
    /// By which clone.
    pub(super) woken_by: AtomicU8,
    /// After a long await.
    pub(super) waking: Mutex<Waking>,
    pub(super) tags: PollTags,
    /// Other clones of the waker existed when `place` was set in the last poll: it may not be what is still awaited.
    pub(super) is_unsure: AtomicBool,
    /// The waker was cloned in this poll, or in the last one.
    pub(super) has_cloned: AtomicBool,
    /// The stacks of the future were taken back, and the waker was not cloned since.
    pub(super) is_taken_back: AtomicBool,
    /// The waker was cloned in no profiled span. It matters only as long as it never was in one.
    pub(super) is_outside: AtomicBool,
    /// The id of the span in `place`, which only polls and the end change; 0 if there is none.
    pub(super) span_id: AtomicU64,
    /// There are spans around that one in `place`.
    pub(super) is_nested: AtomicBool,
    pub(super) place: Mutex<AwaitPlace>,
}

/// Where a future was woken.
#[derive(Debug, Default)]
pub(super) struct Waking {
    /// In which span, and the outermost one around that.
    pub(super) span: Option<(OtherSpan, SpanKey)>,
    pub(super) stack: Option<CopiedStack>,
    /// What was on the thread for long before that.
    pub(super) after: Option<LongSegment>,
}

thread_local! {
    /// The future that is polled on this thread, or that ended last of those with a carried sample.
    pub(super) static CARRIER: Cell<Option<Arc<TaskWaker<FutureRecord>>>> = const { Cell::new(None) };
}

/// What `action` returns for the carrier of this thread.
fn with_carrier<R>(action: impl FnOnce(&FutureRecord) -> R) -> Option<R> {
    let carrier = CARRIER.try_with(Cell::take).ok().flatten()?;
    let returned = action(&carrier.observer);
    _ = CARRIER.try_with(|cell| cell.set(Some(carrier)));
    Some(returned)
}

impl LayerAwaits {
    /// A span is kept that closes on this thread. Sends what it awaited while it was young. Returns the number of samples.
    pub(crate) fn send_carried(&self, kept: SpanKey) -> u64 {
        let layer = self.spans.layer;
        let is_in = |carried: &mut Carried| {
            let spans = [carried.span, carried.outermost];
            spans.iter().any(|span| span.layer == layer && span.key == kept)
        };
        let all = with_carrier(|FutureRecord { place, .. }| {
            let mut place = place.lock();
            let carried = place.take_carried(is_in, self.inbox.counters().dropped_memory);
            [carried, place.before_error.take_if(is_in)]
        });
        // The stack can be small, and most threads have none.
        let Some(all) = all else { return 0 };
        all.into_iter().flatten().map(|carried| self.send(carried)).sum()
    }

    /// An error was logged on this thread that the outermost span has failed with. Remembers what its future awaited last,
    /// unless it awaits again.
    #[cold]
    pub(crate) fn note_error(&self, outermost: SpanKey) {
        _ = with_carrier(|FutureRecord { place, woken_by, has_cloned, .. }| {
            let (_uncounted, woke) = (SuspendCounting::begin(), woken_by.load(Ordering::Relaxed));
            let (now, lost) = ((&*self.spans, self.now()), self.inbox.counters().dropped_memory);
            let mut place = place.lock();
            // Otherwise it awaits something again, in another branch.
            if !has_cloned.load(Ordering::Relaxed) || place.leaves.are_done() {
                place.note_error(now, woke, outermost, lost);
            }
        });
    }

    /// Returns the number of samples; 0 if its spans have closed.
    pub(super) fn send(&self, carried: Carried) -> u64 {
        let Carried { span, outermost, leaves, woke, since, woken_at, weights, .. } = carried;
        let spans = &self.spans;
        let open_of =
            |span: InnermostSpan, or| if spans.is_open(span.id, span.key) { span } else { or };
        let span = open_of(span, outermost);
        let amounts = weights.map(|ticks| spans.clock.ns(ticks).max(ticks.min(1)));
        let [awaited, delayed] = [(since, amounts[0]), (woken_at, amounts[1])];
        let mut sent = 0;
        let leaves = leaves.unwrap_or_default();
        Counters::add(&self.inbox.all_counters.awaits.dropped_branches, leaves.left_out());
        for leaves in leaves.into_samples(woke, span, |it| open_of(it, span)) {
            if spans.report_await(&leaves.span) {
                let largest = if carried.is_merged { SAMPLE_NS } else { u64::MAX };
                let is_before_error = carried.is_before_error;
                let sample = await_sample(leaves, [awaited, delayed]);
                self.push(CopiedSample { largest, is_before_error, ..sample });
                sent += 1;
            }
        }
        sent
    }
}

/// The sample of an await and of the delay after it: when each began in ticks, and the nanoseconds that it represents.
pub(super) fn await_sample(
    SpanLeaves { span, stacks, branch }: SpanLeaves,
    [(since, await_ns), (woken_at, delay_ns)]: [(u64, u64); 2],
) -> CopiedSample {
    let amounts = [
        KindWeight { kind: SampleKind::Await, at: since, weight: await_ns },
        KindWeight { kind: SampleKind::Delay, at: woken_at, weight: delay_ns },
    ];
    CopiedSample::new(Some(span), amounts, (stacks, branch))
}

pub(super) static VTABLE: RawWakerVTable = waker_vtable::<FutureRecord>();

impl WakerObserver for FutureRecord {
    fn vtable() -> &'static RawWakerVTable {
        &VTABLE
    }

    fn on_clone(&self, stack: Option<&LiveStack>, is_only: bool) -> Option<usize> {
        // In the child of a fork, locks may be held forever.
        if !activity().0 {
            return None;
        }
        let tag = self.tags.next(is_only);
        self.note_leaf(stack, is_only, tag);
        Some(usize::from(tag))
    }

    fn on_drop(&self, tag: usize) {
        // It may be the leaf of an earlier poll otherwise.
        if activity().0
            && self.has_cloned.load(Ordering::Relaxed)
            && let Ok(tag) = u8::try_from(tag)
        {
            let mut place = self.place.lock();
            // In no span, the leaves are those of an earlier poll.
            if place.span.is_some() {
                place.leaves.note_drop(tag);
            }
        }
    }

    /// What wakes itself need not clone the waker.
    fn on_own_wake(&self, stack: Option<&LiveStack>, is_only: bool) {
        if activity().0 {
            self.note_leaf(stack, is_only, WOKE_ITSELF);
        }
        self.note_wake(WOKE_ITSELF, || None);
    }

    fn on_wake(&self, tag: usize, stack: impl FnOnce() -> Option<LiveStack>) {
        self.note_wake(u8::try_from(tag).unwrap_or(WOKE_ITSELF), stack);
    }
}

impl FutureRecord {
    fn note_wake(&self, tag: u8, stack: impl FnOnce() -> Option<LiveStack>) {
        if let Some(awaits) = self.awaits.get()
            && self.woken_at.load(Ordering::Relaxed) == 0
        {
            let (since, now) = (self.pending_since.load(Ordering::Relaxed), awaits.now());
            if since != 0
                && now.saturating_sub(since) >= awaits.sample
                && activity().0
                && let Some(mut waking) = self.waking.try_lock()
            {
                let _uncounted = SuspendCounting::begin();
                let stack = if awaits.room.is_tight() { None } else { stack() };
                let stack = stack.and_then(|stack| awaits.copy(None, Some(&stack)));
                let after = last_long_segment(awaits.spans.layer);
                *waking = Waking { span: awaits.spans.waking_span(), stack, after };
            }
            self.woken_by.store(tag, Ordering::Relaxed);
            self.woken_at.store(now, Ordering::Release);
        }
    }

    /// A leaf has cloned the waker, or woken it, in the poll.
    fn note_leaf(&self, stack: Option<&LiveStack>, is_only: bool, tag: u8) {
        let _uncounted = SuspendCounting::begin();
        // A leaf that clones again still has its clone from before.
        let is_again = self.is_taken_back.load(Ordering::Relaxed);
        if is_again {
            self.is_taken_back.store(false, Ordering::Relaxed);
        }
        if !is_only && !is_again {
            self.is_unsure.store(true, Ordering::Relaxed);
        }
        let span = innermost_span();
        let awaits = match (self.awaits.get(), span) {
            (Some(awaits), _) => awaits,
            (None, Some(span)) => match LayerAwaits::of_layer(span.layer) {
                Some(awaits) => self.awaits.get_or_init(|| awaits),
                None => return,
            },
            (None, None) => {
                self.is_outside.store(true, Ordering::Relaxed);
                return;
            }
        };
        let spans = &awaits.spans;
        let span = span.filter(|span| span.layer == spans.layer);
        // Only the polling thread writes it.
        let is_first = !self.has_cloned.load(Ordering::Relaxed);
        self.has_cloned.store(true, Ordering::Relaxed);
        let mut place = self.place.lock();
        let known = place.span.filter(|_| !is_first);
        // What a child span awaits says more than a leaf in the spans around it, which is likely a timeout.
        let is_inside = |known: InnermostSpan| {
            let is_same = span.is_some_and(|span| span.key == known.key);
            !is_same && spans.is_inside(&known, span.as_ref())
        };
        if known.is_some_and(|_| place.leaves.awaited().any(|leaf| is_inside(leaf.span))) {
            return;
        }
        self.span_id.store(span.map_or(0, |span| span.id.get()), Ordering::Relaxed);
        let Some(here) = span else {
            place.begin(spans, None);
            self.is_nested.store(false, Ordering::Relaxed);
            // What was awaited in the last request, as long as this connection is idle.
            if awaits.room.is_tight() {
                place.drop_leaves();
            }
            return;
        };
        place.keep_carried();
        let reused = match known {
            None => {
                place.begin(spans, span);
                place.leaves.clear()
            }
            Some(known) if known.key == here.key => {
                place.enter(spans, span);
                place.leaves.retain(|_| false)
            }
            Some(_) => {
                place.go_beside(spans, here);
                place.leaves.retain(|other| spans.is_inside(&here, Some(other)))
            }
        };
        let is_nested = !place.around.is_empty() || !place.beside.is_empty();
        self.is_nested.store(is_nested, Ordering::Relaxed);
        let stack = awaits.copy(reused, stack);
        let leaf = PendingLeaf { span: here, tag, is_done: false, stack };
        place.leaves.add(leaf, awaits.room.is_tight());
    }

    pub(super) fn has_layer_stopped(&self) -> bool {
        self.awaits.get().is_some_and(|awaits| !awaits.is_active() || !awaits.is_here())
    }

    /// Frees its stacks if it has been pending since before that time, and was not woken. Returns how many there were.
    pub(super) fn take_back(&self, before: u64) -> u64 {
        let since = self.pending_since.load(Ordering::Relaxed);
        if since == 0 || since >= before || self.woken_at.load(Ordering::Relaxed) != 0 {
            return 0;
        }
        let mut place = self.place.lock();
        // Otherwise they may be those of a later await.
        if self.pending_since.load(Ordering::Relaxed) != since {
            return 0;
        }
        let count = place.take_back();
        if count > 0 {
            self.is_taken_back.store(true, Ordering::Relaxed);
        }
        count
    }

    /// Whether it is pending in an open span.
    pub(super) fn is_pending(&self, awaits: &LayerAwaits) -> bool {
        self.pending_since.load(Ordering::Relaxed) != 0
            && self.place.lock().open_span(&awaits.spans).is_some()
    }

    /// What it awaits now, if it is pending.
    pub(super) fn present(
        &self,
        awaits: &LayerAwaits,
        is_wanted: impl Fn(&InnermostSpan) -> bool,
    ) -> Option<Vec<(InnermostSpan, CopiedSample)>> {
        let since = self.pending_since.load(Ordering::Relaxed);
        let woken_at = self.woken_at.load(Ordering::Acquire);
        let woke = (woken_at != 0).then(|| self.woken_by.load(Ordering::Relaxed));
        let place = self.place.lock();
        let span = place.open_span(&awaits.spans).filter(|_| since != 0)?;
        if !is_wanted(&span) && !place.leaves.awaited().any(|leaf| is_wanted(&leaf.span)) {
            return None;
        }
        let leaves = match place.span == Some(span) {
            true => place.leaves.duplicate(woke, awaits.inbox.counters().dropped_memory),
            false => PendingLeaves::default(),
        };
        drop(place);
        // Otherwise they may be those of a later await.
        if self.pending_since.load(Ordering::Relaxed) != since {
            return None;
        }
        let (clock, now) = (&awaits.spans.clock, awaits.now().max(since));
        let woken = if woken_at == 0 { now } else { woken_at.clamp(since, now) };
        let amounts = [(since, clock.ns(woken - since)), (woken, clock.ns(now - woken))];
        let span_of =
            |it: InnermostSpan| if awaits.spans.is_open(it.id, it.key) { it } else { span };
        let samples = leaves.into_samples(woke, span, span_of).into_iter();
        let wanted = samples.filter(|leaves| is_wanted(&leaves.span));
        Some(wanted.map(|leaves| (leaves.span, await_sample(leaves, amounts))).collect())
    }
}
