//! What a wrapper does at each poll of its future.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};

use super::idle::Idle;
use super::record::{CARRIER, FutureRecord, VTABLE};
use super::shared::{LayerAwaits, activity};
use crate::span::{
    ObservedPoll, PollingFirst, SpawnedAt, innermost_span, is_ignored, is_in_span, spans_created,
    take_first_entered,
};
use crate::sys::{SuspendCounting, TaskWaker};

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
    /// Until the first poll.
    handed_over: Option<SpawnedAt>,
    /// While the future is dropped. The spans in it are entered once more then, and their idle time is explained.
    dropping: Option<ObservedPoll>,
}

/// Of a future that was in no profiled span, fewer and fewer polls are observed, but at least one in 64.
const MOST_UNOBSERVED: u8 = 63;

/// For what is about to be handed over to an executor, if any layer needs to know.
pub(super) fn hand_over() -> Option<SpawnedAt> {
    activity().0.then(|| SpawnedAt::now(innermost_span().map(|span| span.key)))
}

/// What was handed over begins to run, if it waited for long.
pub(super) fn begin_to_run(handed_over: SpawnedAt) -> Option<PollingFirst> {
    let running = handed_over.begin(is_in_span)?;
    if let Some(entered) = take_first_entered()
        && let Some(awaits) = LayerAwaits::of_layer(entered.span.layer)
    {
        awaits.spans.note_first_run(&entered);
    }
    Some(running)
}

impl Observed {
    pub(super) fn new() -> Self {
        Self { handed_over: hand_over(), ..Self::default() }
    }

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
        if self.waker.as_ref().is_some_and(|waker| waker.observer.has_layer_stopped()) {
            self.end();
        }
        // A future around this one is observed. Its stacks contain those of this one.
        if std::ptr::eq(context.waker().vtable(), &VTABLE) || is_ignored() {
            self.handed_over = None;
            if let Some(waker) = &self.waker {
                self.idle.end_await(&waker.observer);
            }
            return poll(context);
        }
        let running_first = self.handed_over.take().and_then(begin_to_run);
        let waker = self.waker.get_or_insert_with(|| {
            let _uncounted = SuspendCounting::begin();
            TaskWaker::new(FutureRecord::default())
        });
        self.idle.end_await(&waker.observer);
        if waker.observer.is_taken_back.load(Ordering::Relaxed) {
            // Leaves that are still awaited clone this waker again, so that their stacks are copied again.
            self.idle.tag = waker.observer.tags.unused();
            self.idle.is_tag_in_use = false;
        }
        waker.observer.tags.begin(self.idle.tag, !self.idle.is_tag_in_use);
        self.idle.is_tag_in_use = true;
        waker.observer.is_unsure.store(false, Ordering::Relaxed);
        waker.observer.has_cloned.store(false, Ordering::Relaxed);
        let own = waker.observer.awaits.get().map(|_| Arc::clone(waker));
        let carrier =
            own.map(|own| CARRIER.try_with(|cell| cell.replace(Some(own))).ok().flatten());
        // A future that handles one request after another may be in none of their spans when it is pending.
        let created = carrier.is_none().then(spans_created);
        let observed = ObservedPoll::begin();
        let polled = waker.poll(usize::from(self.idle.tag), context, poll);
        drop((observed, running_first));
        _ = carrier.map(|before| CARRIER.try_with(|cell| cell.set(before)));
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
        self.handed_over = None;
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

    /// Returns whether it was ever observed in a span. Then what is idle until it is dropped, which may enter its span, is no
    /// await.
    fn end(&mut self) -> bool {
        let Some(waker) = self.waker.take() else { return false };
        // Declared before what is dropped here, so that it is freed for no span.
        let _uncounted = SuspendCounting::begin();
        let (waker, mut idle) = (waker, std::mem::take(&mut self.idle));
        // Not in the child of a fork, where locks may be held forever.
        let Some(awaits) = waker.observer.awaits.get().filter(|awaits| awaits.is_here()) else {
            return false;
        };
        idle.end_await(&waker.observer);
        idle.report_rest(&waker.observer, awaits);
        if let Some(place) = idle.listed {
            awaits.remove_future(place);
        }
        // Wakers may outlive the future.
        let mut place = waker.observer.place.lock();
        place.end(&awaits.spans);
        let has_carried = place.carried.is_some() || place.before_error.is_some();
        drop(place);
        // The spans around the future may be about to close.
        if has_carried {
            _ = CARRIER.try_with(|carrier| carrier.set(Some(waker)));
        }
        true
    }
}
