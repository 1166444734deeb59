//! What the futures of a layer share with its collector.

use std::array;
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use crossbeam::utils::CachePadded;
use parking_lot::Mutex;

use super::record::FutureRecord;
use super::room::{LONG, PASS_INTERVAL, StackRoom};
use crate::inbox::{CopiedSample, CopiedStack, Inbox, InboxCounters};
use crate::layers::Layers;
use crate::span::{InnermostSpan, Spans};
use crate::stats::Counters;
use crate::sys::{
    LiveStack, STRIPES, Stripe, Striped, SuspendCounting, TaskWaker, WORDS, Waker, own_stripe,
};

/// An await of this length becomes a sample; a shorter one becomes one of this length with the probability of its share.
pub(super) const SAMPLE_NS: u64 = 10_000_000;
const SAMPLE: Duration = Duration::from_nanos(SAMPLE_NS);
/// Idle time is added to the accounts of spans in portions of at least this length.
const PORTION: Duration = Duration::from_micros(50);
/// Of more, the stacks are not read at once.
const MOST_PRESENT: usize = 1_000;

/// The state of a layer that its wrapped futures use.
#[derive(Debug)]
pub(crate) struct LayerAwaits {
    pub(super) spans: Arc<Spans>,
    pub(crate) inbox: Inbox,
    pub(super) room: StackRoom,
    /// By the part of the thread on which a future was first pending.
    pending: [CachePadded<Mutex<Listed>>; STRIPES],
    is_active: AtomicBool,
    /// The constants of these names, in ticks.
    pub(super) sample: u64,
    pub(super) portion: u64,
}

/// Pending futures, which keep their places.
#[derive(Debug, Default)]
struct Listed {
    futures: Vec<Option<Weak<TaskWaker<FutureRecord>>>>,
    free: Vec<usize>,
}

fn all(list: &Mutex<Listed>) -> Vec<Arc<TaskWaker<FutureRecord>>> {
    list.lock().futures.iter().flatten().filter_map(Weak::upgrade).collect()
}

/// One in the upper half of [`WORDS`]' word.
const ONE_CHANGE: u64 = 1 << 32;

static LAYERS: Layers<Striped<LayerAwaits>> = Layers::new();

fn own_counters(Counters { awaits, .. }: &Counters) -> InboxCounters<'_> {
    InboxCounters {
        held: &awaits.captured,
        unreadable: &awaits.unreadable,
        dropped_memory: &awaits.dropped_memory,
        dropped_queue_full: &awaits.dropped_queue_full,
        dropped_over_budget: &awaits.dropped_over_budget,
        dropped_pending_full: &awaits.dropped_pending_full,
    }
}

/// The state of a layer, as a future keeps it.
pub(super) type SharedAwaits = Arc<Stripe<LayerAwaits>>;

thread_local! {
    /// The number and the state of the layer that a future on this thread was last in.
    static LAST: Cell<Option<(u32, Weak<Stripe<LayerAwaits>>)>> = const { Cell::new(None) };
}

/// Whether any layer needs to know what futures await, and a value that changes when that may have changed for a span.
#[inline(always)]
pub(super) fn activity() -> (bool, u64) {
    let word = WORDS.awaits.load(Ordering::Relaxed);
    (!word.is_multiple_of(ONE_CHANGE), word)
}

/// Called in the child of a fork, so it only stores to memory.
pub(crate) fn forget_all() {
    WORDS.awaits.store(0, Ordering::Relaxed);
}

impl LayerAwaits {
    /// `most_bytes` limits the memory of copied stacks.
    pub(crate) fn new(
        (spans, counters, waker): (Arc<Spans>, Arc<Counters>, Waker),
        most_bytes: usize,
    ) -> Arc<Striped<Self>> {
        let clock = &spans.clock;
        let awaits = Arc::new(Striped::new(Self {
            inbox: Inbox::new((counters, own_counters), (waker, Waker::wake_soon), most_bytes),
            room: StackRoom::default(),
            pending: array::from_fn(|_| CachePadded::default()),
            is_active: AtomicBool::new(false),
            sample: clock.ticks(SAMPLE),
            portion: clock.ticks(PORTION),
            spans,
        }));
        LAYERS.add(awaits.spans.layer, &awaits);
        awaits
    }

    pub(super) fn of_layer(number: u32) -> Option<SharedAwaits> {
        let last = LAST.try_with(Cell::take).ok().flatten().filter(|(last, _)| *last == number);
        let (found, last) = match last {
            Some((_, last)) => (last.upgrade()?, last),
            None => {
                let found = Arc::clone(LAYERS.get(number)?.own());
                let last = Arc::downgrade(&found);
                (found, last)
            }
        };
        _ = LAST.try_with(|cell| cell.set(Some((number, last))));
        Some(found).filter(|awaits| awaits.is_active())
    }

    /// Sets whether futures report to this layer.
    pub(crate) fn set_active(&self, is_active: bool) {
        // The number of the child of a fork is not that of its parent.
        if !self.is_here() || self.is_active.swap(is_active, Ordering::Relaxed) == is_active {
            return;
        }
        if is_active {
            WORDS.awaits.fetch_add(ONE_CHANGE + 1, Ordering::Relaxed);
        } else {
            let less = |word: u64| (!word.is_multiple_of(ONE_CHANGE)).then(|| word - 1);
            _ = WORDS.awaits.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        }
    }

    #[inline]
    pub(super) fn is_active(&self) -> bool {
        self.is_active.load(Ordering::Relaxed)
    }

    /// False in the child of a fork, where its locks may be held forever.
    pub(super) fn is_here(&self) -> bool {
        self.inbox.pool.is_here()
    }

    /// The rules have changed: futures outside of all profiled spans check again.
    pub(crate) fn check_again(&self) {
        WORDS.awaits.fetch_add(ONE_CHANGE, Ordering::Relaxed);
    }

    /// The time that a sample of that weight in ticks represents: exactly [`SAMPLE`] if it represents short awaits.
    pub(super) fn weight_ns(&self, weight: u64) -> u64 {
        if weight == self.sample { SAMPLE_NS } else { self.spans.clock.ns(weight) }
    }

    #[inline]
    pub(super) fn now(&self) -> u64 {
        self.spans.clock.now()
    }

    pub(super) fn copy(
        &self,
        reused: Option<CopiedStack>,
        stack: Option<&LiveStack>,
    ) -> Option<CopiedStack> {
        let copy = self.inbox.copy(reused, stack, self.room.most_bytes());
        if copy.is_none() && stack.is_some() && self.room.note_full() {
            self.inbox.wake();
        }
        copy
    }

    /// While most of the memory for stacks is in use, takes back those of futures that have been pending for long.
    pub(crate) fn make_room(&self) {
        let clock = &self.spans.clock;
        let now = clock.now();
        if !self.room.begin_pass(&self.inbox.pool, now, clock.ticks(PASS_INTERVAL)) {
            return;
        }
        let before = now.saturating_sub(clock.ticks(LONG));
        for list in &self.pending {
            if self.room.has_enough(&self.inbox.pool) {
                break;
            }
            let taken = all(list).iter().map(|future| future.observer.take_back(before)).sum();
            Counters::add(self.inbox.counters().dropped_memory, taken);
        }
    }

    /// How long until the next call of [`Self::make_room`] has something to do, if it is needed.
    pub(crate) fn until_room(&self) -> Option<Duration> {
        let clock = &self.spans.clock;
        let ticks = self.room.until_wanted(clock.now(), clock.ticks(PASS_INTERVAL))?;
        Some(Duration::from_nanos(clock.ns(ticks)))
    }

    /// Sends a sample of an await and of the delay after it, in ticks.
    pub(super) fn push(&self, sample: CopiedSample) {
        if !self.inbox.push(sample) {
            Counters::add(self.inbox.counters().dropped_queue_full, 1);
        }
    }

    /// A future is pending in a span, and can be asked what it awaits from now on. Returns the part and its place there.
    pub(super) fn add_future(
        &self,
        waker: &Arc<TaskWaker<FutureRecord>>,
    ) -> Option<(usize, usize)> {
        let (_uncounted, part) = (SuspendCounting::begin(), own_stripe());
        let Listed { futures, free } = &mut *self.pending.get(part)?.lock();
        let index = free.pop().unwrap_or(futures.len());
        futures.resize(futures.len().max(index + 1), None);
        *futures.get_mut(index)? = Some(Arc::downgrade(waker));
        Some((part, index))
    }

    pub(super) fn remove_future(&self, (part, index): (usize, usize)) {
        let _uncounted = SuspendCounting::begin();
        let Some(list) = self.pending.get(part) else { return };
        let Listed { futures, free } = &mut *list.lock();
        if futures.get_mut(index).and_then(Option::take).is_some() {
            free.push(index);
        }
    }

    /// How many futures are pending in open spans.
    pub(crate) fn count_pending(&self) -> usize {
        let futures = self.pending.iter().flat_map(|list| all(list));
        futures.filter(|future| future.observer.is_pending(self)).count()
    }

    /// What pending futures await now whose spans are wanted, at most [`MOST_PRESENT`].
    pub(crate) fn present(
        &self,
        is_wanted: impl Fn(&InnermostSpan) -> bool,
    ) -> Vec<(InnermostSpan, CopiedSample)> {
        let futures = self.pending.iter().flat_map(|list| all(list));
        let present = futures.filter_map(|future| future.observer.present(self, &is_wanted));
        present.flatten().take(MOST_PRESENT).collect()
    }
}
