//! The idle time of a future: what it awaited, and for how long it was not polled after that.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::place::Carried;
use super::record::{FutureRecord, Waking, await_sample};
use super::shared::LayerAwaits;
use crate::inbox::CopiedSample;
use crate::span::{InnermostSpan, LongSegment, RegistryId, Spans, explain_idle, last_long_segment};
use crate::stats::Counters;
use crate::sys::{SuspendCounting, TaskWaker, mixed};

/// The idle time of a future.
#[derive(Debug, Default)]
pub(super) struct Idle {
    /// Tells the wakers of polls apart: that of the next one, and whether a clone can have it.
    pub(super) tag: u8,
    pub(super) is_tag_in_use: bool,
    /// The place in the layer's list of pending futures.
    pub(super) listed: Option<(usize, usize)>,
    /// What is not in the accounts yet: awaits and delays, in ticks, and how many there were.
    uncounted: [u64; 3],
    /// For how long its span, and those around it, had been idle when the future began to be pending: their ids, and ticks.
    before: Vec<(u64, u64)>,
    /// The time since the last sample of short awaits, and of short delays.
    unsampled: [u64; 2],
}

impl Idle {
    /// The future is pending. Returns false if it was in no profiled span.
    #[inline]
    pub(super) fn begin_await(&mut self, waker: &Arc<TaskWaker<FutureRecord>>) -> bool {
        let record = &waker.observer;
        let Some(awaits) = record.awaits.get() else {
            // Without a clone, it is not known.
            return !record.is_outside.load(Ordering::Relaxed);
        };
        if record.is_unsure.load(Ordering::Relaxed) {
            // Others may be awaited that did not clone the waker in this poll. With wakers that differ from all clones, all
            // that are still awaited clone the waker again.
            self.tag = record.tags.unused();
            self.is_tag_in_use = false;
        }
        let now = awaits.now();
        if self.listed.is_none() {
            self.listed = awaits.add_future(waker);
            // Random, so that all points of a short time are equally likely to be sampled.
            let random = mixed(now ^ Arc::as_ptr(waker).addr() as u64);
            self.unsampled = [random % awaits.sample, random.rotate_left(32) % awaits.sample];
        }
        self.before.clear();
        self.note_idle_before(awaits, record.span_id.load(Ordering::Relaxed), now);
        if record.is_nested.load(Ordering::Relaxed) {
            let place = record.place.lock();
            for span in place.around.iter().chain(&place.beside) {
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
            let _uncounted = SuspendCounting::begin();
            self.before.reserve(1);
        }
        self.before.push((id, idle.all));
    }

    /// The future is polled or dropped.
    #[inline]
    pub(super) fn end_await(&mut self, record: &FutureRecord) {
        let since = record.pending_since.load(Ordering::Relaxed);
        // Also if it was woken while it was not observed.
        let woken_at = record.woken_at.swap(0, Ordering::Acquire);
        let woke = (woken_at != 0).then(|| record.woken_by.load(Ordering::Relaxed));
        let Some(awaits) = record.awaits.get().filter(|_| since != 0) else { return };
        let now = awaits.now().max(since);
        record.pending_since.store(0, Ordering::Relaxed);
        let woken_at = match woken_at {
            0 => now,
            // It may have been woken during the poll.
            woken_at => woken_at.clamp(since, now),
        };
        let lengths = [woken_at - since, now - woken_at];
        let mut is_due = false;
        self.uncounted[2] += 1;
        for ((uncounted, unsampled), length) in
            self.uncounted.iter_mut().zip(&mut self.unsampled).zip(lengths)
        {
            *uncounted += length;
            *unsampled += length;
            is_due |= *uncounted >= awaits.portion || *unsampled >= awaits.sample;
        }
        if is_due {
            self.report(record, awaits, woke, [since, woken_at, now]);
        }
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
    pub(super) fn report_rest(&mut self, record: &FutureRecord, awaits: &LayerAwaits) {
        if self.uncounted != [0; 3]
            && let Some(span) = record.place.lock().open_span(&awaits.spans)
        {
            let rest = std::mem::take(&mut self.uncounted);
            awaits.spans.count_await(&span, |_| rest);
        }
    }

    /// Adds idle time to the accounts, and sends a sample if one is due. `woke`: the tag of the waker that woke the task.
    #[cold]
    #[inline(never)]
    fn report(
        &mut self,
        record: &FutureRecord,
        awaits: &LayerAwaits,
        woke: Option<u8>,
        [since, woken_at, now]: [u64; 3],
    ) {
        let _uncounted = SuspendCounting::begin();
        // That of an earlier await is of no use.
        let waking = record.waking.try_lock().map(|mut waking| std::mem::take(&mut *waking));
        let waking = waking.filter(|_| woke.is_some() && woken_at - since >= awaits.sample);
        let [awaited, delayed, number] = std::mem::take(&mut self.uncounted);
        let [mut await_weight, mut delay_weight] = [(0, woken_at - since), (1, now - woken_at)]
            .map(|(kind, length)| self.weight(kind, length, awaits.sample));
        // Spans around the wrapper were entered before this poll.
        explain_idle(awaits.spans.layer);
        let mut place = record.place.lock();
        let Some(span) = place.leave_closed(&awaits.spans) else { return };
        record.span_id.store(span.id.get(), Ordering::Relaxed);
        let spans = &awaits.spans;
        let busy_in = |id: RegistryId| self.busy(spans, id.get(), [since, woken_at, now]);
        // Leaves in different spans have the same time, and so have the spans around several of them, once.
        let beside = place.leaves.awaited().map(|leaf| leaf.span).filter(|it| *it != span);
        let (has_beside, counted) = (beside.clone().next().is_some(), RefCell::new(Vec::new()));
        for span in [span].into_iter().chain(beside) {
            spans.count_await(&span, |id| {
                if has_beside {
                    if counted.borrow().contains(&id) {
                        return [0; 3];
                    }
                    counted.borrow_mut().push(id);
                }
                let [busy, delayed_busy] = busy_in(id);
                let idle = [awaited.saturating_sub(busy), delayed.saturating_sub(delayed_busy)];
                [idle[0], idle[1], if idle == [0, 0] { 0 } else { number }]
            });
        }
        let woken_in = place.leaves.woken_in(woke).filter(|it| spans.is_open(it.id, it.key));
        let span = woken_in.unwrap_or(span);
        let [busy, delayed_busy] = busy_in(span.id);
        let entered =
            u128::from(await_weight) * u128::from(busy) / u128::from(woken_at - since).max(1);
        let entered = u64::try_from(entered).unwrap_or(0);
        await_weight = await_weight.saturating_sub(busy);
        delay_weight = delay_weight.saturating_sub(delayed_busy);
        let is_idle = await_weight + delay_weight > 0;
        if !is_idle && entered == 0 {
            return;
        }
        let Some(outermost) = spans.outermost_of(&span) else { return };
        let is_old = spans.is_old_await(&span, since, now);
        let since = since + busy;
        if !is_old && !is_idle {
            return;
        }
        if !is_old {
            let weights = [await_weight, delay_weight];
            let new = Carried::new([span, outermost], woke, [since, woken_at], weights);
            let before = place.carried.take().filter(|it| it.outermost.key == outermost.key);
            place.carry(before, new);
            return;
        }
        let is_inside = |carried: &mut Carried| carried.outermost.key == outermost.key;
        let lost = awaits.inbox.counters().dropped_memory;
        let carried = place.take_carried(is_inside, lost);
        let leaves = place.leaves.duplicate(woke, lost);
        drop(place);
        _ = carried.map(|carried| awaits.send(carried));
        let last = last_long_segment(span.layer);
        let took_most = |(began, ended): (u64, u64), from: u64, to: u64| {
            let overlap = ended.min(to).saturating_sub(began.max(from));
            to - from >= awaits.sample && overlap > (to - from) / 2
        };
        let behind = last.filter(|last| took_most((last.from, last.to), woken_at, now));
        // Who left the thread just before woke it, or had kept the thread from seeing that it was ready, or from running it.
        let has_left = |last: &LongSegment| {
            woken_at.abs_diff(last.to) <= (last.to - last.from) / 50
                && took_most((last.from, last.to), since, woken_at)
        };
        let own = [span.key, outermost.key];
        let is_own = |last: &LongSegment| last.span.is_some_and(|it| own.contains(&it.key));
        let on_waker = waking.as_ref().and_then(|waking| waking.after);
        let on_waker = on_waker.filter(|last| has_left(last) && !is_own(last));
        let after = last.filter(has_left).or(on_waker);
        let is_other = |waking: &Waking| waking.span.is_none_or(|(_, root)| root != outermost.key);
        let Waking { span: waker, mut stack, .. } = waking.filter(is_other).unwrap_or_default();
        let amounts = [(since, await_weight), (woken_at, delay_weight)];
        let mut amounts = amounts.map(|(at, it)| (at, awaits.weight_ns(it)));
        let entered_ns = awaits.weight_ns(entered);
        if !is_idle && let [(_, await_ns), _] = &mut amounts {
            *await_ns = 1;
        }
        Counters::add(&awaits.inbox.all_counters.awaits.dropped_branches, leaves.left_out());
        let span_of = |it: InnermostSpan| if spans.is_open(it.id, it.key) { it } else { span };
        for mut leaves in leaves.into_samples(woke, span, span_of) {
            if spans.report_await(&leaves.span) {
                let [after, behind] = [after, behind].map(|last| last.and_then(|last| last.span));
                leaves.stacks.waker = stack.take();
                awaits.push(CopiedSample {
                    after,
                    woken_in: waker.map(|(span, _)| span),
                    behind,
                    entered_ns,
                    ..await_sample(leaves, amounts)
                });
            }
        }
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
