//! What threads allocate: samples with the stacks that allocated, of old spans and, for the live heap, of all threads.
//!
//! [`ProfilingAllocator`](crate::ProfilingAllocator) decides by random numbers when a sample is due. It is taken on the
//! allocating thread, inside the allocator, so nothing here waits for a lock that the program may hold at that moment.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::inbox::{Branch, CopiedSample, HeapUse, Inbox, InboxCounters, KindWeight, LeafStacks};
use crate::layers::Layers;
use crate::profile::SampleKind;
use crate::span::{InnermostSpan, Spans, find_sampled_span, is_ignored};
use crate::stats::Counters;
use crate::sys::{self, SampledAllocation, Waker};

/// Threads take fewer samples when about this many are waiting.
const MANY_SAMPLES: usize = 256;
const MOST_BYTES: usize = 8 << 20;

#[derive(Debug)]
pub(crate) struct LayerAllocations {
    spans: Arc<Spans>,
    pub(crate) inbox: Inbox,
    is_active: AtomicBool,
    is_over_budget: AtomicBool,
    settings: AllocationSettings,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct AllocationSettings {
    /// Between two samples in the mean; 0 for none.
    pub(crate) sample_bytes: u64,
    pub(crate) stack_bytes: usize,
    /// Tracks the live heap.
    pub(crate) tracks_heap: bool,
}

static LAYERS: Layers<LayerAllocations> = Layers::new();

fn own_counters(Counters { allocations, .. }: &Counters) -> InboxCounters<'_> {
    InboxCounters {
        held: &allocations.sampled,
        unreadable: &allocations.off_stack,
        dropped_memory: &allocations.dropped_memory,
        dropped_queue_full: &allocations.dropped_queue_full,
        dropped_over_budget: &allocations.dropped_over_budget,
        dropped_pending_full: &allocations.dropped_pending_full,
    }
}

/// The number of the layer that tracks the live heap, or 0.
static HEAP_LAYER: AtomicU32 = AtomicU32::new(0);
/// Instead of a layer's number: one begins or ends at this moment.
const CHANGING: u32 = u32::MAX;

fn change_heap_layer(from: u32, to: u32) -> bool {
    HEAP_LAYER.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok()
}

/// Takes a sample of an allocation on this thread, unless it is of no use. Returns how far the collector is behind, 0 to 1.
fn take(allocation: &SampledAllocation) -> Option<f64> {
    if is_ignored() {
        return None;
    }
    let of_span = find_sampled_span(|span, samples_from| {
        let layer = LAYERS.get(span.layer)?;
        layer.is_of_use(&span, samples_from).then_some((layer, span))
    });
    let heap = match HEAP_LAYER.load(Ordering::Relaxed) {
        0 => None,
        number => LAYERS.get(number).filter(|layer| layer.is_active()),
    };
    let heap_use = match &heap {
        None => HeapUse::None,
        Some(_) => allocation.track().map_or(HeapUse::NotTracked, HeapUse::Tracked),
    };
    let (layer, span) = of_span.unzip();
    let is_heap = |layer: &Arc<_>| heap.as_ref().is_some_and(|heap| Arc::ptr_eq(layer, heap));
    let is_one = layer.as_ref().is_some_and(is_heap);
    if let Some(layer) = &layer {
        layer.take(span, if is_one { heap_use } else { HeapUse::None }, allocation);
    }
    if let Some(heap) = heap.as_ref().filter(|_| !is_one) {
        heap.take(None, heap_use, allocation);
    }
    layer.or(heap).map(|layer| layer.behind())
}

/// The shortest gap that one of the layers wants applies.
fn choose_sample_bytes() {
    let shortest = || {
        let wanted = LAYERS.all().map(|layer| layer.settings.sample_bytes);
        wanted.filter(|bytes| *bytes > 0).min().unwrap_or(0)
    };
    let mut bytes = shortest();
    loop {
        SampledAllocation::take_each(bytes, take);
        // Another layer may have come or gone, and have chosen before.
        let now = shortest();
        if now == bytes {
            return;
        }
        bytes = now;
    }
}

impl Drop for LayerAllocations {
    fn drop(&mut self) {
        choose_sample_bytes();
    }
}

/// Called in the child of a fork, so it only stores to memory.
pub(crate) fn forget_all() {
    HEAP_LAYER.store(0, Ordering::Relaxed);
}

impl LayerAllocations {
    pub(crate) fn new(
        (spans, counters, waker): (Arc<Spans>, Arc<Counters>, Waker),
        settings: AllocationSettings,
    ) -> Arc<Self> {
        let new = Arc::new(Self {
            inbox: Inbox::new((counters, own_counters), (waker, Waker::wake), MOST_BYTES),
            is_active: AtomicBool::new(false),
            is_over_budget: AtomicBool::new(false),
            settings,
            spans,
        });
        LAYERS.add(new.spans.layer, &new);
        choose_sample_bytes();
        new
    }

    pub(crate) fn set_active(&self, is_active: bool) {
        self.is_active.store(is_active, Ordering::SeqCst);
        if is_active {
            self.claim_heap();
        } else {
            self.release_heap();
        }
    }

    /// Whether it is to track the live heap and no other layer does.
    pub(crate) fn can_claim_heap(&self) -> bool {
        self.wants_heap() && HEAP_LAYER.load(Ordering::Relaxed) == 0 && self.is_active()
    }

    /// Tracks the live heap from now on, if it is to do that and no other layer does.
    pub(crate) fn claim_heap(&self) {
        if self.can_claim_heap() && change_heap_layer(0, CHANGING) {
            sys::TrackedBlock::track(true);
            HEAP_LAYER.store(self.spans.layer, Ordering::SeqCst);
            // It may have ended in the meantime.
            if !self.is_active.load(Ordering::SeqCst) {
                self.release_heap();
            }
        }
    }

    fn release_heap(&self) {
        if change_heap_layer(self.spans.layer, CHANGING) {
            sys::TrackedBlock::track(false);
            HEAP_LAYER.store(0, Ordering::SeqCst);
        }
    }

    fn is_active(&self) -> bool {
        self.is_active.load(Ordering::Relaxed) && self.inbox.pool.is_here()
    }

    /// Whether it is to track the live heap.
    pub(crate) fn wants_heap(&self) -> bool {
        self.settings.tracks_heap
            && self.settings.sample_bytes > 0
            && SampledAllocation::can_be_taken()
    }

    pub(crate) fn tracks_heap(&self) -> bool {
        HEAP_LAYER.load(Ordering::SeqCst) == self.spans.layer
    }

    fn is_of_use(&self, span: &InnermostSpan, samples_from: u64) -> bool {
        if self.settings.sample_bytes == 0 || !self.is_active() {
            return false;
        }
        // This thread may be the one that changes the overflow.
        if !self.spans.can_look_up() {
            Counters::add(&self.inbox.all_counters.allocations.dropped_table_busy, 1);
            return false;
        }
        self.spans.samples_allocations(span, samples_from)
    }

    /// How far the collector is behind, from 0 to 1.
    fn behind(&self) -> f64 {
        match self.is_over_budget.load(Ordering::Relaxed) {
            true => 1.0,
            false => (self.inbox.samples.len() as f64 / MANY_SAMPLES as f64).min(1.0),
        }
    }

    /// Sets whether unwinding has used up its share of a core: threads take fewer samples then, which represent more.
    pub(crate) fn set_over_budget(&self, is_over: bool) {
        self.is_over_budget.store(is_over, Ordering::Relaxed);
    }

    fn take(&self, span: Option<InnermostSpan>, heap: HeapUse, allocation: &SampledAllocation) {
        let dropped = self.inbox.counters().dropped_queue_full;
        // Checked before: a span must not be promised samples that it will not have.
        let promised =
            span.filter(|span| !self.inbox.samples.is_full() && self.spans.report_allocation(span));
        if promised.is_none() && span.is_some() {
            Counters::add(dropped, 1);
            if heap == HeapUse::None {
                return;
            }
        }
        let live = allocation.stack(self.settings.stack_bytes);
        let last = self.inbox.copy(None, live.as_ref(), usize::MAX);
        let at = self.spans.clock.now();
        let amounts = [
            KindWeight { kind: SampleKind::AllocatedBytes, at, weight: allocation.bytes },
            KindWeight { kind: SampleKind::Allocations, at, weight: allocation.count },
        ];
        let stacks = LeafStacks { last, ..LeafStacks::default() };
        let sample = CopiedSample::new(promised, amounts, (stacks, Branch::ONLY));
        let is_pushed = self.inbox.push(CopiedSample { heap, ..sample });
        if !is_pushed {
            // Once for each sample.
            Counters::add(dropped, u64::from(promised == span));
            if matches!(heap, HeapUse::Tracked(_)) {
                allocation.untrack();
            }
        }
        // Samples are rare then, and the collector has to see that it no longer is.
        if self.is_over_budget.load(Ordering::Relaxed) {
            self.inbox.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    /// In a process of its own, since other tests have layers.
    // Elsewhere there are no stacks, so nothing is sampled.
    #[cfg(not(tracing_profiling_unsupported))]
    #[test]
    fn the_gap_between_samples_is_the_shortest_of_the_layers_that_there_are() {
        use std::time::{Duration, Instant};

        use crate::ProfilingLayer;
        use crate::sys::sample_bytes;

        let name = "allocations::tests::the_gap_between_samples_is_the_shortest_of_the_layers_that_there_are";
        if !tracing_profiling_capture::testing::is_alone(name) {
            return;
        }
        let layer = |bytes| ProfilingLayer::builder().alloc_sample_interval(bytes).build().unwrap();
        // The threads of a layer that was dropped end some time later.
        let becomes = |bytes: u64| {
            let start = Instant::now();
            while sample_bytes() != bytes {
                assert!(start.elapsed() < Duration::from_secs(60), "{} {bytes}", sample_bytes());
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        becomes(0);
        let [long, none, short] = [500_000, 0, 10_000].map(layer);
        becomes(10_000);
        drop(short);
        becomes(500_000);
        let shorter = layer(2_000);
        becomes(2_000);
        drop(long);
        becomes(2_000);
        drop((shorter, none));
        becomes(0);
    }
}
