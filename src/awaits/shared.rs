//! What the futures of a layer share with its collector.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use crossbeam::queue::ArrayQueue;
use parking_lot::Mutex;

use super::record::{FutureRecord, LeafStacks};
use crate::layers::Layers;
use crate::profile::SampleKind;
use crate::span::{InnermostSpan, Spans};
use crate::stacks::CopiedStack;
use crate::stats::Counters;
use crate::sys::{BlockPool, LiveStack, TaskWaker, Uncounted, Waker};

/// An await of this length becomes a sample of its own. A shorter one becomes a sample of this length with the
/// probability of its share in it.
const SAMPLE_NS: u64 = 10_000_000;
const SAMPLE: Duration = Duration::from_nanos(SAMPLE_NS);
/// Idle time is added to the accounts of spans in portions of at least this length.
const PORTION: Duration = Duration::from_micros(50);
/// Awaits that the collector has not read.
const MOST_SAMPLES: usize = 512;
/// The collector is woken when this many are waiting. Their number makes the wake rare.
const WAKE_AT: usize = 64;
/// Of more, the stacks are not read at once.
const MOST_PRESENT: usize = 1_000;
const SHARDS: usize = 16;

/// An await of a future in an old span, for the collector.
#[derive(Debug)]
pub(crate) struct AwaitSample {
    pub(crate) span: InnermostSpan,
    /// When the await began: `CLOCK_MONOTONIC_RAW` in nanoseconds.
    pub(crate) since_ns: u64,
    /// The time that it represents as an await; 0 if none.
    pub(crate) await_ns: u64,
    /// When it was woken.
    pub(crate) woken_ns: u64,
    /// The time that it represents as a scheduling delay; 0 if none.
    pub(crate) delay_ns: u64,
    pub(crate) stacks: LeafStacks,
    /// It represents several awaits, of which some may be long.
    pub(crate) is_merged: bool,
    /// The plan of the span that was on the thread that polled it too late.
    pub(crate) behind: Option<u64>,
}

impl AwaitSample {
    /// The await and the delay, as far as there are such: the kind, the start and the time that it represents.
    pub(crate) fn parts(&self) -> impl Iterator<Item = (SampleKind, u64, u64)> + use<> {
        let parts = [
            (SampleKind::Await, self.since_ns, self.await_ns),
            (SampleKind::Delay, self.woken_ns, self.delay_ns),
        ];
        // What represents others is no longer than [`SAMPLE`], so that it is not taken for a long one.
        let is_merged = self.is_merged;
        parts.into_iter().filter(|(_, _, all_ns)| *all_ns > 0).flat_map(
            move |(kind, at_ns, all_ns)| {
                const MOST: u64 = 1_000;
                let count = if is_merged { all_ns.div_ceil(SAMPLE_NS).min(MOST) } else { 1 };
                let each_ns = all_ns / count.max(1);
                (0..count).map(move |number| {
                    let rest_ns = if number == 0 { all_ns - each_ns * count } else { 0 };
                    (kind, at_ns, each_ns + rest_ns)
                })
            },
        )
    }
}

/// The state of a layer that its wrapped futures use.
#[derive(Debug)]
pub(crate) struct LayerAwaits {
    pub(super) spans: Arc<Spans>,
    pub(super) counters: Arc<Counters>,
    pool: Arc<BlockPool>,
    samples: ArrayQueue<AwaitSample>,
    pending: [Mutex<Listed>; SHARDS],
    waker: Waker,
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

/// The place of a pending future.
#[derive(Clone, Copy, Debug)]
pub(super) struct ListedAt {
    shard: usize,
    index: usize,
}

impl Listed {
    fn add(&mut self, future: Weak<TaskWaker<FutureRecord>>) -> usize {
        let index = self.free.pop().unwrap_or(self.futures.len());
        match self.futures.get_mut(index) {
            Some(place) => *place = Some(future),
            None => self.futures.push(Some(future)),
        }
        index
    }

    fn remove(&mut self, index: usize) {
        if self.futures.get_mut(index).and_then(Option::take).is_some() {
            self.free.push(index);
        }
    }
}

/// The number of active layers in the lower half, and in the upper half the number of changes that could make a span
/// matter that did not: rules were replaced, or a layer was started.
static ACTIVE: AtomicU64 = AtomicU64::new(0);
const ONE_CHANGE: u64 = 1 << 32;

static LAYERS: Layers<LayerAwaits> = Layers::new();

/// Whether any layer needs to know what futures await, and a value that changes when that may have changed for a span.
#[inline(always)]
pub(super) fn activity() -> (bool, u64) {
    let word = ACTIVE.load(Ordering::Relaxed);
    (!word.is_multiple_of(ONE_CHANGE), word)
}

/// Called in the child of a fork, so it only stores to memory.
pub(crate) fn forget_all() {
    ACTIVE.store(0, Ordering::Relaxed);
}

impl LayerAwaits {
    /// `most_bytes` limits the memory of copied stacks.
    pub(crate) fn new(
        (spans, counters, waker): (Arc<Spans>, Arc<Counters>, Waker),
        most_bytes: usize,
    ) -> Arc<Self> {
        let clock = spans.clock();
        let awaits = Arc::new(Self {
            pool: Arc::new(BlockPool::new(most_bytes)),
            samples: ArrayQueue::new(MOST_SAMPLES),
            pending: Default::default(),
            waker,
            is_active: AtomicBool::new(false),
            sample: clock.ticks(SAMPLE),
            portion: clock.ticks(PORTION),
            counters,
            spans,
        });
        LAYERS.add(awaits.spans.layer(), &awaits);
        awaits
    }

    pub(super) fn of_layer(number: u32) -> Option<Arc<Self>> {
        LAYERS.get(number).filter(|awaits| awaits.is_active())
    }

    /// Sets whether futures report to this layer.
    pub(crate) fn set_active(&self, is_active: bool) {
        // The number of the child of a fork is not that of its parent.
        if !self.is_here() || self.is_active.swap(is_active, Ordering::Relaxed) == is_active {
            return;
        }
        if is_active {
            ACTIVE.fetch_add(ONE_CHANGE + 1, Ordering::Relaxed);
        } else {
            let less = |word: u64| (!word.is_multiple_of(ONE_CHANGE)).then(|| word - 1);
            _ = ACTIVE.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        }
    }

    #[inline]
    pub(super) fn is_active(&self) -> bool {
        self.is_active.load(Ordering::Relaxed)
    }

    /// False in the child of a fork, where its locks may be held forever.
    pub(super) fn is_here(&self) -> bool {
        self.pool.is_here()
    }

    /// The rules have changed: futures outside of all profiled spans check again.
    pub(crate) fn check_again(&self) {
        ACTIVE.fetch_add(ONE_CHANGE, Ordering::Relaxed);
    }

    /// The time that a sample of that weight in ticks represents: exactly [`SAMPLE`] if it represents short awaits.
    pub(super) fn weight_ns(&self, weight: u64) -> u64 {
        match weight == self.sample {
            true => SAMPLE_NS,
            false => self.spans.clock().ns(weight),
        }
    }

    #[inline]
    pub(super) fn now(&self) -> u64 {
        self.spans.clock().now()
    }

    pub(super) fn copy(
        &self,
        reused: Option<CopiedStack>,
        stack: &LiveStack,
    ) -> Option<CopiedStack> {
        let copy = CopiedStack::new(&self.pool, reused, stack);
        if copy.is_none() {
            Counters::add(&self.counters.awaits.dropped_memory, 1);
        }
        copy
    }

    pub(super) fn push(&self, sample: AwaitSample) {
        if self.samples.push(sample).is_err() {
            Counters::add(&self.counters.awaits.dropped_queue_full, 1);
        }
        if self.samples.len() >= WAKE_AT {
            self.waker.wake_soon();
        }
    }

    /// How many samples the collector has not read.
    pub(crate) fn waiting(&self) -> usize {
        self.samples.len()
    }

    /// The next sample for the collector.
    pub(crate) fn take(&self) -> Option<AwaitSample> {
        self.samples.pop()
    }

    /// A future is pending in a span, and can be asked what it awaits from now on.
    pub(super) fn add_future(&self, waker: &Arc<TaskWaker<FutureRecord>>) -> ListedAt {
        // Neighbouring allocations are in different lists.
        let shard = (Arc::as_ptr(waker).addr() >> 8) % SHARDS;
        let Some(list) = self.pending.get(shard) else {
            return ListedAt { shard, index: usize::MAX };
        };
        let _uncounted = Uncounted::begin();
        let index = list.lock().add(Arc::downgrade(waker));
        ListedAt { shard, index }
    }

    pub(super) fn remove_future(&self, ListedAt { shard, index }: ListedAt) {
        let _uncounted = Uncounted::begin();
        _ = self.pending.get(shard).map(|list| list.lock().remove(index));
    }

    /// What pending futures await now whose spans are wanted, at most [`MOST_PRESENT`].
    pub(crate) fn present(&self, is_wanted: impl Fn(&InnermostSpan) -> bool) -> Vec<AwaitSample> {
        let futures = self.pending.iter().flat_map(|shard| {
            let list = shard.lock();
            list.futures.iter().flatten().filter_map(Weak::upgrade).collect::<Vec<_>>()
        });
        let present = futures.filter_map(|future| future.observer.present(self, &is_wanted));
        present.take(MOST_PRESENT).collect()
    }
}
