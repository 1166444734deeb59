//! What is known of one future: the stack of its last leaf, its span, and since when it is pending.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, RawWakerVTable};

use parking_lot::Mutex;

use super::place::{AwaitPlace, Carried, mixed};
use super::shared::{LayerAwaits, ListedAt, SAMPLE_NS, SharedAwaits, activity};
use crate::inbox::{CopiedSample, HeapUse, KindWeight, LeafStacks};
use crate::profile::SampleKind;
use crate::span::{
    InnermostSpan, ObservedPoll, RegistryId, SpanKey, Spans, explain_idle, innermost_span,
    is_ignored, last_long_segment, spans_created,
};
use crate::sys::{self, LiveStack, TaskWaker, Uncounted, WakerObserver};

/// The part of a future's state that its wakers and the collector use.
#[derive(Debug, Default)]
pub(super) struct FutureRecord {
    /// The layer of the first profiled span that the future was in.
    awaits: OnceLock<SharedAwaits>,
    /// In ticks; 0 if the future is not pending.
    pending_since: AtomicU64,
    /// When it was first woken since then; 0 if it was not.
    woken_at: AtomicU64,
    /// Other clones of the waker existed when `place` was set in the last poll: it may not be what is still awaited.
    is_unsure: AtomicBool,
    /// The waker was cloned in this poll, or in the last one.
    has_cloned: AtomicBool,
    /// Its stacks were taken back, and the waker was not cloned since.
    is_taken_back: AtomicBool,
    /// The waker was cloned in no profiled span. It matters only as long as it never was in one.
    is_outside: AtomicBool,
    /// The id of the span in `place`, which only polls and the end change; 0 if there is none.
    span_id: AtomicU64,
    /// There are spans around that one in `place`.
    is_nested: AtomicBool,
    place: Mutex<AwaitPlace>,
}

thread_local! {
    /// The future with a carried sample that is polled on this thread, or that ended last.
    static CARRIER: Cell<Option<Arc<TaskWaker<FutureRecord>>>> = const { Cell::new(None) };
}

impl LayerAwaits {
    /// A span is kept that closes on this thread. Sends the sample of what it awaited while it was young, if there is one.
    /// Returns the number of samples.
    pub(crate) fn send_carried(&self, kept: SpanKey) -> u64 {
        let Some(carrier) = CARRIER.try_with(Cell::take).ok().flatten() else { return 0 };
        let mut place = carrier.observer.place.lock();
        let layer = self.spans.layer();
        let is_in = |carried: &mut Carried| {
            let spans = [carried.span, carried.outermost];
            spans.iter().any(|span| span.layer == layer && span.key == kept)
        };
        let carried = place.take_carried(is_in, self.inbox.counters().dropped_memory);
        drop(place);
        _ = CARRIER.try_with(|cell| cell.set(Some(carrier)));
        carried.map_or(0, |carried| u64::from(self.send(carried)))
    }

    /// Returns false if its spans have closed.
    fn send(&self, carried: Carried) -> bool {
        let Carried { span, outermost, stacks, since, woken_at, weights, is_merged } = carried;
        let spans = &self.spans;
        let span = if spans.is_open_span(&span) { span } else { outermost };
        let is_reported = spans.report_await(&span);
        if is_reported {
            let [awaited, delayed] = weights.map(|ticks| spans.clock().ns(ticks));
            let amounts = [(since, awaited), (woken_at, delayed)];
            let sample = await_sample(span, amounts, stacks.unwrap_or_default());
            let largest = if is_merged { SAMPLE_NS } else { u64::MAX };
            self.push(CopiedSample { largest, ..sample });
        }
        is_reported
    }
}

/// The sample of an await and of the delay after it: when each began in ticks, and the nanoseconds that it represents.
fn await_sample(
    span: InnermostSpan,
    [(since, await_ns), (woken_at, delay_ns)]: [(u64, u64); 2],
    stacks: LeafStacks,
) -> CopiedSample {
    let amounts = [
        KindWeight { kind: SampleKind::Await, at: since, weight: await_ns },
        KindWeight { kind: SampleKind::Delay, at: woken_at, weight: delay_ns },
    ];
    let (largest, heap) = (u64::MAX, HeapUse::None);
    CopiedSample { span: Some(span), amounts, largest, stacks, behind: None, heap }
}

static VTABLE: RawWakerVTable = RawWakerVTable::new(
    sys::clone_waker::<FutureRecord>,
    sys::wake::<FutureRecord>,
    sys::wake_by_ref::<FutureRecord>,
    sys::drop_waker::<FutureRecord>,
);

impl WakerObserver for FutureRecord {
    fn vtable() -> &'static RawWakerVTable {
        &VTABLE
    }

    fn on_clone(&self, stack: Option<&LiveStack>, is_only: bool) {
        // In the child of a fork, locks may be held forever.
        if !activity().0 {
            return;
        }
        let _uncounted = Uncounted::begin();
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
        let span = span.filter(|span| span.layer == awaits.spans.layer());
        // Only the polling thread writes it.
        let is_first = !self.has_cloned.load(Ordering::Relaxed);
        self.has_cloned.store(true, Ordering::Relaxed);
        let mut place = self.place.lock();
        let known = place.span.filter(|_| !is_first);
        // What a child span awaits says more than a leaf in the spans around it, which is likely a timeout.
        if known.is_some_and(|known| awaits.spans.is_inside(&known, span.as_ref())) {
            return;
        }
        self.span_id.store(span.map_or(0, |span| span.id.get()), Ordering::Relaxed);
        if place.span != span {
            place.span = span;
            awaits.spans.note_observed(span.as_ref(), &mut place.around);
            self.is_nested.store(!place.around.is_empty(), Ordering::Relaxed);
        }
        if span.is_none() {
            // What was awaited in the last request, as long as this connection is idle.
            if awaits.room.is_tight() {
                place.drop_stacks();
            }
            return;
        }
        let is_same = known.is_some_and(|known| Some(known.key) == span.map(|span| span.key));
        place.keep_carried();
        let LeafStacks { last, before } = &mut place.stacks;
        // The memory of the older one is used again.
        let reused = before.take();
        *before = if is_same { last.take() } else { None };
        let reused = reused.or_else(|| last.take());
        *last = awaits.copy(reused, stack);
    }

    /// What wakes itself need not clone the waker.
    fn on_own_wake(&self, stack: Option<&LiveStack>, is_only: bool) {
        self.on_clone(stack, is_only);
    }

    fn on_wake(&self) {
        if let Some(awaits) = self.awaits.get()
            && self.woken_at.load(Ordering::Relaxed) == 0
        {
            self.woken_at.store(awaits.now(), Ordering::Relaxed);
        }
    }
}

impl FutureRecord {
    fn has_stopped(&self) -> bool {
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
    ) -> Option<(InnermostSpan, CopiedSample)> {
        let since = self.pending_since.load(Ordering::Relaxed);
        let woken_at = self.woken_at.load(Ordering::Relaxed);
        if since == 0 {
            return None;
        }
        let place = self.place.lock();
        let span = place.open_span(&awaits.spans).filter(is_wanted)?;
        let stacks = match place.span == Some(span) {
            true => place.stacks.duplicate(awaits.inbox.counters().dropped_memory),
            false => LeafStacks::default(),
        };
        drop(place);
        // Otherwise they may be those of a later await.
        if self.pending_since.load(Ordering::Relaxed) != since {
            return None;
        }
        let (clock, now) = (awaits.spans.clock(), awaits.now().max(since));
        let woken = if woken_at == 0 { now } else { woken_at.clamp(since, now) };
        let amounts = [(since, clock.ns(woken - since)), (woken, clock.ns(now - woken))];
        Some((span, await_sample(span, amounts, stacks)))
    }
}

/// Observes one future, in which it is kept.
#[derive(Debug, Default)]
pub(super) struct Observed {
    waker: Option<Arc<TaskWaker<FutureRecord>>>,
    /// The [`activity`] at the last poll that was observed and in no profiled span.
    unmatched_at: u64,
    /// How many more polls are not observed, and how many will not be after the next that is.
    unobserved: u8,
    next_unobserved: u8,
    idle: Idle,
    /// While the future is dropped. The spans in it are entered once more then, and their idle time is explained.
    dropping: Option<ObservedPoll>,
}

/// The idle time of a future.
#[derive(Debug, Default)]
struct Idle {
    /// Tells the wakers of polls apart.
    tag: u8,
    listed: Option<ListedAt>,
    /// The record may have a carried sample.
    has_carried: bool,
    /// Idle time that is not in the accounts yet: awaits and delays, in ticks.
    uncounted: [u64; 2],
    /// For how long its span, and those around it, had been idle when the future began to be pending: their ids, and ticks.
    before: Vec<(u64, u64)>,
    /// The time since the last sample of short awaits, and of short delays.
    unsampled: [u64; 2],
}

/// Of a future that was in no profiled span, fewer and fewer polls are observed, but at least one in 64.
const MOST_UNOBSERVED: u8 = 63;

impl Observed {
    /// Polls the future.
    #[inline]
    pub(super) fn poll<R>(
        &mut self,
        context: &mut Context<'_>,
        poll: impl FnOnce(&mut Context<'_>) -> Poll<R>,
    ) -> Poll<R> {
        let (is_active, activity) = activity();
        if !is_active {
            self.forget();
            return poll(context);
        }
        if self.unmatched_at == activity && self.unobserved > 0 {
            self.unobserved -= 1;
            return poll(context);
        }
        self.observe(activity, context, poll)
    }

    fn observe<R>(
        &mut self,
        activity: u64,
        context: &mut Context<'_>,
        poll: impl FnOnce(&mut Context<'_>) -> Poll<R>,
    ) -> Poll<R> {
        // Its layer was stopped. Another one may be running.
        if self.waker.as_ref().is_some_and(|waker| waker.observer.has_stopped()) {
            self.end();
        }
        // A future around this one is observed. Its stacks contain those of this one.
        if std::ptr::eq(context.waker().vtable(), &VTABLE) || is_ignored() {
            if let Some(waker) = &self.waker {
                self.idle.end_await(&waker.observer);
            }
            return poll(context);
        }
        let waker = self.waker.get_or_insert_with(|| {
            let _uncounted = Uncounted::begin();
            TaskWaker::new(FutureRecord::default())
        });
        self.idle.end_await(&waker.observer);
        if waker.observer.is_taken_back.load(Ordering::Relaxed) {
            // Leaves that are still awaited clone this waker again, so that their stacks are copied again.
            self.idle.tag = self.idle.tag.wrapping_add(1);
        }
        waker.observer.is_unsure.store(false, Ordering::Relaxed);
        waker.observer.has_cloned.store(false, Ordering::Relaxed);
        let is_carrier = self.idle.has_carried;
        let mut carrier = is_carrier.then(|| Arc::clone(waker));
        if is_carrier {
            carrier = CARRIER.try_with(|cell| cell.replace(carrier.take())).ok().flatten();
        }
        // A future that handles one request after another may be in none of their spans when it is pending.
        let created = waker.observer.awaits.get().is_none().then(spans_created);
        let observed = ObservedPoll::begin();
        let polled = waker.poll(usize::from(self.idle.tag), context, poll);
        drop(observed);
        if is_carrier {
            _ = CARRIER.try_with(|cell| cell.set(carrier.take()));
        }
        if polled.is_pending() && !self.idle.begin_await(waker) && created == Some(spans_created())
        {
            let is_same = self.unmatched_at == activity;
            self.unobserved = if is_same { self.next_unobserved } else { 0 };
            self.next_unobserved = (2 * self.unobserved + 1).min(MOST_UNOBSERVED);
            self.unmatched_at = activity;
        }
        polled
    }

    /// The future is polled without being observed.
    #[inline]
    fn forget(&mut self) {
        if let Some(waker) = &self.waker {
            waker.observer.pending_since.store(0, Ordering::Relaxed);
        }
    }

    /// The future is about to be dropped, with the spans in it. This is dropped after it.
    pub(super) fn begin_drop(&mut self) {
        if self.end() {
            self.dropping = Some(ObservedPoll::begin());
        }
    }

    /// Returns whether it was pending, and has reported that.
    fn end(&mut self) -> bool {
        let Some(waker) = self.waker.take() else { return false };
        // Declared before what is dropped here, so that it is freed for no span.
        let _uncounted = Uncounted::begin();
        let (waker, mut idle) = (waker, std::mem::take(&mut self.idle));
        // Not in the child of a fork, where locks may be held forever.
        let Some(awaits) = waker.observer.awaits.get().filter(|awaits| awaits.is_here()) else {
            return false;
        };
        let was_pending = idle.end_await(&waker.observer);
        idle.report_rest(&waker.observer, awaits);
        if let Some(place) = idle.listed {
            awaits.remove_future(place);
        }
        // Wakers may outlive the future.
        waker.observer.place.lock().end(&awaits.spans);
        // The spans around the future may be about to close.
        if idle.has_carried {
            _ = CARRIER.try_with(|carrier| carrier.set(Some(waker)));
        }
        was_pending
    }
}

impl Idle {
    /// The future is pending. Returns false if it was in no profiled span.
    #[inline]
    fn begin_await(&mut self, waker: &Arc<TaskWaker<FutureRecord>>) -> bool {
        let record = &waker.observer;
        let Some(awaits) = record.awaits.get() else {
            // Without a clone, it is not known.
            return !record.is_outside.load(Ordering::Relaxed);
        };
        if record.is_unsure.load(Ordering::Relaxed) {
            // Only the stack of the last clone is known. With wakers that differ from all clones, all that are still
            // awaited clone the waker again.
            self.tag = self.tag.wrapping_add(1);
        }
        let now = awaits.now();
        if self.listed.is_none() {
            self.listed = Some(awaits.add_future(waker));
            // Random, so that all points of a short time are equally likely to be sampled.
            let random = mixed(now ^ Arc::as_ptr(waker).addr() as u64);
            self.unsampled = [random % awaits.sample, random.rotate_left(32) % awaits.sample];
        }
        self.before.clear();
        self.note_idle_before(awaits, record.span_id.load(Ordering::Relaxed), now);
        if record.is_nested.load(Ordering::Relaxed) {
            for span in &record.place.lock().around {
                self.note_idle_before(awaits, span.id.get(), now);
            }
        }
        record.pending_since.store(now, Ordering::Relaxed);
        true
    }

    #[inline]
    fn note_idle_before(&mut self, awaits: &LayerAwaits, id: u64, now: u64) {
        let Some(idle) = awaits.spans.idle_until(id, now) else { return };
        if self.before.len() == self.before.capacity() {
            let _uncounted = Uncounted::begin();
            self.before.reserve(1);
        }
        self.before.push((id, idle.all));
    }

    /// The future is polled or dropped. Returns whether it was pending.
    #[inline]
    fn end_await(&mut self, record: &FutureRecord) -> bool {
        let since = record.pending_since.load(Ordering::Relaxed);
        // Also if it was woken while it was not observed.
        let woken_at = record.woken_at.swap(0, Ordering::Relaxed);
        let Some(awaits) = record.awaits.get().filter(|_| since != 0) else { return false };
        let now = awaits.now().max(since);
        record.pending_since.store(0, Ordering::Relaxed);
        let woken_at = match woken_at {
            0 => now,
            // It may have been woken during the poll.
            woken_at => woken_at.clamp(since, now),
        };
        let lengths = [woken_at - since, now - woken_at];
        let mut is_due = false;
        for ((uncounted, unsampled), length) in
            self.uncounted.iter_mut().zip(&mut self.unsampled).zip(lengths)
        {
            *uncounted += length;
            *unsampled += length;
            is_due |= *uncounted >= awaits.portion || *unsampled >= awaits.sample;
        }
        if is_due {
            self.report(record, awaits, since, woken_at, now);
        }
        true
    }

    /// For how long threads were in a span while the future in it was pending: before it was woken, and after. The span was
    /// not idle then. (Where they left it both before and after, the last time counts.)
    fn busy(&self, spans: &Spans, id: u64, [since, woken_at, now]: [u64; 3]) -> [u64; 2] {
        let before = self.before.iter().find(|(of, _)| *of == id);
        let (Some((_, before)), Some(idle)) = (before, spans.idle_until(id, now)) else {
            return [0, 0];
        };
        let (pending, delay) = (now - since, now - woken_at);
        let busy = pending.saturating_sub(idle.all.saturating_sub(*before));
        // Those that are still in it, or this poll, if the span is around the wrapper.
        let at_the_end = idle.entered_since.map_or(0, |since| now.saturating_sub(since)).min(busy);
        let earlier = (busy - at_the_end).min(idle.last_exit.saturating_sub(woken_at));
        let delayed = (at_the_end.min(delay) + earlier).min(delay);
        [(busy - delayed).min(pending - delay), delayed]
    }

    /// Adds what is left of idle time to the accounts.
    fn report_rest(&mut self, record: &FutureRecord, awaits: &LayerAwaits) {
        if self.uncounted != [0, 0]
            && let Some(span) = record.place.lock().open_span(&awaits.spans)
        {
            let rest = std::mem::take(&mut self.uncounted);
            awaits.spans.count_await(&span, |_| rest);
        }
    }

    /// Adds idle time to the accounts, and sends a sample if one is due.
    #[cold]
    #[inline(never)]
    fn report(
        &mut self,
        record: &FutureRecord,
        awaits: &LayerAwaits,
        since: u64,
        woken_at: u64,
        now: u64,
    ) {
        let _uncounted = Uncounted::begin();
        let [awaited, delayed] = std::mem::take(&mut self.uncounted);
        let [mut await_weight, mut delay_weight] = [(0, woken_at - since), (1, now - woken_at)]
            .map(|(kind, length)| self.weight(kind, length, awaits.sample));
        // Spans around the wrapper were entered before this poll.
        explain_idle(awaits.spans.layer());
        let mut place = record.place.lock();
        let Some(span) = place.leave_closed(&awaits.spans) else { return };
        record.span_id.store(span.id.get(), Ordering::Relaxed);
        let busy_in = |id: RegistryId| self.busy(&awaits.spans, id.get(), [since, woken_at, now]);
        awaits.spans.count_await(&span, |id| {
            let [busy, delayed_busy] = busy_in(id);
            [awaited.saturating_sub(busy), delayed.saturating_sub(delayed_busy)]
        });
        let [busy, delayed_busy] = busy_in(span.id);
        let since = since + busy;
        await_weight = await_weight.saturating_sub(busy);
        delay_weight = delay_weight.saturating_sub(delayed_busy);
        if await_weight + delay_weight == 0 {
            return;
        }
        let Some(outermost) = awaits.spans.outermost_of(&span) else { return };
        if !awaits.spans.is_old_await(&span, since, now) {
            let (stacks, weights, is_merged) = (None, [await_weight, delay_weight], false);
            let new = Carried { span, outermost, stacks, since, woken_at, weights, is_merged };
            let before = place.carried.take().filter(|it| it.outermost.key == outermost.key);
            place.carry(before, new);
            self.has_carried = true;
            return;
        }
        let is_inside = |carried: &mut Carried| carried.outermost.key == outermost.key;
        let lost = awaits.inbox.counters().dropped_memory;
        let carried = place.take_carried(is_inside, lost);
        let stacks = place.stacks.duplicate(lost);
        drop(place);
        _ = carried.map(|carried| awaits.send(carried));
        if !awaits.spans.report_await(&span) {
            return;
        }
        let behind = (delay_weight > 0 && now - woken_at >= awaits.sample)
            .then(|| last_long_segment(span.layer))
            .flatten()
            // It took most of the delay.
            .filter(|last| {
                let overlap = last.to.min(now).saturating_sub(last.from.max(woken_at));
                overlap > (now - woken_at) / 2
            });
        let amounts = [(since, await_weight), (woken_at, delay_weight)];
        let sample = await_sample(span, amounts.map(|(at, it)| (at, awaits.weight_ns(it))), stacks);
        awaits.push(CopiedSample { behind: behind.map(|last| last.plan), ..sample });
    }

    /// The time that an await (0) or a delay (1) of that length represents as a sample, in ticks: its length if it is
    /// long. Of the short ones, each point of time is represented with the same probability.
    fn weight(&mut self, kind: usize, length: u64, sample: u64) -> u64 {
        let Some(unsampled) = self.unsampled.get_mut(kind) else { return 0 };
        if length >= sample {
            *unsampled -= length;
            length
        } else if *unsampled >= sample {
            *unsampled -= sample;
            sample
        } else {
            0
        }
    }
}
