//! What the futures of a layer share with its collector.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use crossbeam::queue::ArrayQueue;
use parking_lot::{Mutex, RwLock};

use super::buffers::{Buffers, StackCopy};
use super::record::Record;
use crate::span::{SpanKey, Spans};
use crate::stats::Counters;
use crate::sys::{LiveStack, TaskWaker, Waker};

/// An await of this length becomes a sample of its own. A shorter one becomes a sample of this length with the
/// probability of its share in it.
const SAMPLE: Duration = Duration::from_millis(10);
/// Idle time is added to the accounts of spans in portions of at least this length.
const PORTION: Duration = Duration::from_micros(50);
/// Awaits that the collector has not read.
const MOST_SAMPLES: usize = 512;
/// The collector is woken when this many are waiting. Their number makes the wake rare.
const WAKE_AT: usize = 64;
const SHARDS: usize = 16;

/// An await of a future in an old span, for the collector.
#[derive(Debug)]
pub(crate) struct AwaitSample {
    pub(crate) span: SpanKey,
    /// When the await began: `CLOCK_MONOTONIC_RAW` in nanoseconds.
    pub(crate) since_ns: u64,
    /// The time that it represents as an await; 0 if none.
    pub(crate) await_ns: u64,
    /// When it was woken.
    pub(crate) woken_ns: u64,
    /// The time that it represents as a scheduling delay; 0 if none.
    pub(crate) delay_ns: u64,
    pub(crate) stack: Option<StackCopy>,
    /// The plan of the span that was on the thread that polled it too late.
    pub(crate) behind: Option<u64>,
}

/// A part of the pending futures, by their addresses.
type Shard = Mutex<HashMap<usize, Weak<TaskWaker<Record>>>>;

/// The state of a layer that its wrapped futures use.
#[derive(Debug)]
pub(crate) struct Awaits {
    pub(super) spans: Arc<Spans>,
    pub(super) counters: Arc<Counters>,
    buffers: Arc<Buffers>,
    samples: ArrayQueue<AwaitSample>,
    pending: [Shard; SHARDS],
    waker: Waker,
    is_active: AtomicBool,
    /// The constants of these names, in ticks.
    pub(super) sample: u64,
    pub(super) portion: u64,
}

/// The number of active layers in the lower half, and in the upper half the number of changes that could make a span
/// matter that did not: rules were replaced, or a layer was started.
static ACTIVE: AtomicU64 = AtomicU64::new(0);
const ONE_CHANGE: u64 = 1 << 32;

/// By the number of the layer.
static LAYERS: RwLock<Vec<(u32, Weak<Awaits>)>> = RwLock::new(Vec::new());

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

impl Awaits {
    /// `most_bytes` limits the memory of copied stacks.
    pub(crate) fn new(
        spans: Arc<Spans>,
        counters: Arc<Counters>,
        waker: Waker,
        most_bytes: usize,
    ) -> Arc<Self> {
        let clock = spans.clock();
        let awaits = Arc::new(Self {
            buffers: Arc::new(Buffers::new(most_bytes)),
            samples: ArrayQueue::new(MOST_SAMPLES),
            pending: Default::default(),
            waker,
            is_active: AtomicBool::new(false),
            sample: clock.ticks(SAMPLE),
            portion: clock.ticks(PORTION),
            counters,
            spans,
        });
        let mut layers = LAYERS.write();
        layers.retain(|(_, awaits)| awaits.strong_count() > 0);
        layers.push((awaits.spans.layer(), Arc::downgrade(&awaits)));
        drop(layers);
        awaits
    }

    pub(super) fn of_layer(layer: u32) -> Option<Arc<Self>> {
        let layers = LAYERS.read();
        let (_, awaits) = layers.iter().find(|(number, _)| *number == layer)?;
        awaits.upgrade().filter(|awaits| awaits.is_active())
    }

    /// Sets whether futures report to this layer.
    pub(crate) fn set_active(&self, is_active: bool) {
        if self.is_active.swap(is_active, Ordering::Relaxed) == is_active {
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
        self.buffers.are_here()
    }

    /// The rules have changed: futures outside of all profiled spans check again.
    pub(crate) fn check_again(&self) {
        ACTIVE.fetch_add(ONE_CHANGE, Ordering::Relaxed);
    }

    #[inline]
    pub(super) fn now(&self) -> u64 {
        self.spans.clock().now()
    }

    pub(super) fn copy(&self, reused: Option<StackCopy>, stack: &LiveStack) -> Option<StackCopy> {
        let copy = StackCopy::new(&self.buffers, reused, stack);
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

    /// The next sample for the collector.
    pub(crate) fn take(&self) -> Option<AwaitSample> {
        self.samples.pop()
    }

    fn shard(&self, waker: &Arc<TaskWaker<Record>>) -> (usize, &Shard) {
        let address = Arc::as_ptr(waker).addr();
        let [first, ..] = &self.pending;
        // Spreads neighbouring allocations.
        let number = (address >> 6).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 60;
        (address, self.pending.get(number % SHARDS).unwrap_or(first))
    }

    /// A future is pending in a span, and can be asked what it awaits from now on.
    pub(super) fn add_future(&self, waker: &Arc<TaskWaker<Record>>) {
        let (address, shard) = self.shard(waker);
        shard.lock().insert(address, Arc::downgrade(waker));
    }

    pub(super) fn remove_future(&self, waker: &Arc<TaskWaker<Record>>) {
        let (address, shard) = self.shard(waker);
        shard.lock().remove(&address);
    }

    /// What all pending futures await now.
    pub(crate) fn present(&self) -> Vec<AwaitSample> {
        let futures = self
            .pending
            .iter()
            .flat_map(|shard| shard.lock().values().filter_map(Weak::upgrade).collect::<Vec<_>>());
        futures.filter_map(|future| future.observer.present(self)).collect()
    }
}
