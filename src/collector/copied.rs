//! Reads samples that the threads of the program take themselves: awaits and allocations, each with a copy of the stack.

use std::sync::Arc;

use super::allocations::AllocationReader;
use super::awaits::AwaitReader;
use super::budget::Share;
use super::limits::Limits;
use super::pending::Pending;
use crate::allocations::{AllocationSettings, LayerAllocations};
use crate::awaits::LayerAwaits;
use crate::span::Spans;
use crate::stacks::CopiedStack;
use crate::stats::Counters;
use crate::sys::{self, Striped, Waker};
use crate::unwind::{ModuleAddress, UnwindEnd, Unwinder};

/// Where the threads of the program leave these samples.
#[derive(Debug)]
pub(super) struct CopiedSamples {
    pub(super) awaits: Arc<Striped<LayerAwaits>>,
    pub(super) allocations: Arc<LayerAllocations>,
}

impl CopiedSamples {
    pub(super) fn new(
        spans: &Arc<Spans>,
        counters: &Arc<Counters>,
        waker: &Waker,
        limits: Limits,
    ) -> Self {
        let Limits { await_bytes, alloc_sample_bytes, stack_bytes, tracks_heap, .. } = limits;
        let settings =
            AllocationSettings { sample_bytes: alloc_sample_bytes, stack_bytes, tracks_heap };
        let shared = || (Arc::clone(spans), Arc::clone(counters), waker.clone());
        Self {
            awaits: LayerAwaits::new(shared(), await_bytes),
            allocations: LayerAllocations::new(shared(), settings),
        }
    }

    pub(super) fn set_active(&self, is_active: bool) {
        self.awaits.set_active(is_active);
        self.allocations.set_active(is_active);
    }
}

/// The collector's side of them.
#[derive(Debug)]
pub(super) struct CopiedReader {
    pub(super) awaits: AwaitReader,
    pub(super) allocations: AllocationReader,
}

impl CopiedReader {
    /// With a budget of CPU time, or without.
    pub(super) fn new(is_limited: bool) -> Self {
        Self { awaits: AwaitReader::new(), allocations: AllocationReader::new(is_limited) }
    }

    /// Reads all that have been sent.
    pub(super) fn read(&mut self, samples: &CopiedSamples, target: &mut ReadTarget<'_>) {
        self.awaits.read(&samples.awaits, target);
        self.allocations.read(&samples.allocations, target);
    }
}

/// Where they are read to.
pub(super) struct ReadTarget<'a> {
    pub(super) unwinder: &'a mut Unwinder,
    pub(super) pending: &'a mut Pending,
    pub(super) counters: &'a Counters,
    pub(super) most_frames: usize,
    pub(super) round: u64,
    /// `CLOCK_MONOTONIC_RAW` in nanoseconds.
    pub(super) now_ns: u64,
}

/// The CPU budget for unwinding the samples of a kind: 50 ms at once, and 2 % of a core after that.
pub(super) const UNWINDING: Share = Share::new(2, 50_000_000);
/// The assumed cost where CPU time cannot be read.
const A_STACK_NS: u64 = 20_000;

impl ReadTarget<'_> {
    /// Reads the samples that are `waiting`; those that are sent from now on are read in the next round. `add` gets each
    /// of them, and whether there is any budget left to unwind it.
    pub(super) fn read_all<T>(
        &mut self,
        waiting: usize,
        next: impl Fn() -> Option<T>,
        left: &mut Share,
        mut add: impl FnMut(&T, bool, &mut Self),
    ) {
        if waiting == 0 {
            return;
        }
        self.unwinder.refresh();
        let mut start = sys::thread_cpu_ns();
        for sample in std::iter::from_fn(next).take(waiting) {
            add(&sample, left.has_budget(self.now_ns), self);
            let now = sys::thread_cpu_ns();
            let took = now.zip(start).and_then(|(now, start)| now.checked_sub(start));
            left.spend(took.unwrap_or(A_STACK_NS));
            Counters::add(&self.counters.sampling.collector_cpu_ns, took.unwrap_or(0));
            start = now;
        }
    }
}

/// The frames above the function that copied the stack.
pub(super) fn unwind_copy(
    copy: &CopiedStack,
    unwinder: &mut Unwinder,
    most_frames: usize,
    frames: &mut Vec<ModuleAddress>,
) -> UnwindEnd {
    let end = unwinder.unwind(copy.registers(), copy.words(), most_frames, frames);
    if !frames.is_empty() {
        frames.remove(0);
    }
    end
}
