//! What threads in old spans allocate: samples with the stacks that allocated.
//!
//! [`ProfilingAllocator`](crate::ProfilingAllocator) decides by random numbers when a sample is due. It is taken on the
//! allocating thread, inside the allocator, so nothing here takes a lock that is ever held while something allocates.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crossbeam::queue::ArrayQueue;

use crate::layers::Layers;
use crate::span::{InnermostSpan, Spans, innermost_aging_span, is_ignored};
use crate::stacks::{CopiedStack, StackBuffers};
use crate::stats::Counters;
use crate::sys::{self, SampledAllocation, Waker};

/// Samples that the collector has not read.
const MOST_SAMPLES: usize = 1_024;
/// Threads take fewer samples when about this many are waiting.
const MANY_SAMPLES: usize = 256;
/// The collector is woken when this many are waiting.
const WAKE_AT: usize = 64;
/// The memory for their stacks.
const MOST_BYTES: usize = 8 << 20;

/// An allocation in an old span, for the collector.
#[derive(Debug)]
pub(crate) struct AllocationSample {
    pub(crate) span: InnermostSpan,
    /// `CLOCK_MONOTONIC_RAW` in nanoseconds.
    pub(crate) time_ns: u64,
    /// The allocations that it represents, and their bytes.
    pub(crate) count: u64,
    pub(crate) bytes: u64,
    pub(crate) stack: Option<CopiedStack>,
}

/// The state of a layer that the allocator uses.
#[derive(Debug)]
pub(crate) struct LayerAllocations {
    spans: Arc<Spans>,
    counters: Arc<Counters>,
    buffers: Arc<StackBuffers>,
    samples: ArrayQueue<AllocationSample>,
    waker: Waker,
    is_active: AtomicBool,
    /// How much of a stack is copied.
    stack_bytes: usize,
}

static LAYERS: Layers<LayerAllocations> = Layers::new();

/// Takes a sample of an allocation on the calling thread, unless it is of no use. Returns how far the collector is behind,
/// from 0 to 1.
fn take(allocation: &SampledAllocation) -> Option<f64> {
    let (span, old_at) = innermost_aging_span().filter(|_| !is_ignored())?;
    let layer = LAYERS.get(span.layer).filter(|layer| layer.is_of_use(&span, old_at))?;
    layer.take(span, allocation);
    Some((layer.waiting() as f64 / MANY_SAMPLES as f64).min(1.0))
}

impl LayerAllocations {
    /// With a sample of `sample_bytes` in the mean, or none if that is 0. At most `stack_bytes` of each stack are copied.
    pub(crate) fn new(
        (spans, counters, waker): (Arc<Spans>, Arc<Counters>, Waker),
        sample_bytes: u64,
        stack_bytes: usize,
    ) -> Arc<Self> {
        let new = Arc::new(Self {
            buffers: Arc::new(StackBuffers::new(MOST_BYTES)),
            samples: ArrayQueue::new(MOST_SAMPLES),
            waker,
            is_active: AtomicBool::new(false),
            stack_bytes,
            counters,
            spans,
        });
        LAYERS.add(new.spans.layer(), &new);
        sys::sample_allocations(sample_bytes, take);
        new
    }

    pub(crate) fn set_active(&self, is_active: bool) {
        self.is_active.store(is_active, Ordering::Relaxed);
    }

    fn is_of_use(&self, span: &InnermostSpan, old_at: u64) -> bool {
        self.is_active.load(Ordering::Relaxed)
            && self.buffers.are_here()
            && self.spans.samples_allocations(span, old_at)
    }

    fn take(&self, span: InnermostSpan, allocation: &SampledAllocation) {
        let counters = &self.counters.allocations;
        // Checked before: a span must not be promised samples that it will not have.
        if self.samples.is_full() || !self.spans.report_allocation(&span) {
            Counters::add(&counters.dropped_queue_full, 1);
            return;
        }
        let live = allocation.stack(self.stack_bytes);
        let stack = live.as_ref().and_then(|live| CopiedStack::new(&self.buffers, None, live));
        if stack.is_none() {
            let why = if live.is_none() { &counters.off_stack } else { &counters.dropped_memory };
            Counters::add(why, 1);
        }
        let clock = self.spans.clock();
        let sample = AllocationSample {
            span,
            time_ns: clock.raw_ns(clock.now()),
            count: allocation.count,
            bytes: allocation.bytes,
            stack,
        };
        if self.samples.push(sample).is_err() {
            Counters::add(&counters.dropped_queue_full, 1);
        }
        if self.samples.len() >= WAKE_AT {
            self.waker.wake();
        }
    }

    /// How many samples the collector has not read.
    pub(crate) fn waiting(&self) -> usize {
        self.samples.len()
    }

    /// The next sample for the collector.
    pub(crate) fn next(&self) -> Option<AllocationSample> {
        self.samples.pop()
    }
}
