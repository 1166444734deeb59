//! Reads samples of what threads have allocated.

use super::budget::Share;
use super::copied::{ReadTarget, unwind_copy};
use super::heap::Heap;
use super::pending::PendingWait;
use super::stack::{Stack, Waited};
use crate::allocations::{AllocationSample, LayerAllocations};
use crate::profile::SampleKind;
use crate::stats::Counters;
use crate::sys;

/// The CPU budget for unwinding them: 50 ms at once, and 2 % of a core after that, unless the budget for samples is
/// unlimited.
const UNWINDING: Share = Share::new(2, 50_000_000);
const UNLIMITED: Share = Share::new(100, i64::MAX);
/// The assumed cost where CPU time cannot be read.
const A_STACK_NS: u64 = 20_000;

/// Unwinds the stacks of allocations.
#[derive(Debug)]
pub(super) struct AllocationReader {
    left: Share,
    pub(super) heap: Heap,
}

impl AllocationReader {
    pub(super) fn new(is_limited: bool) -> Self {
        Self { left: if is_limited { UNWINDING } else { UNLIMITED }, heap: Heap::default() }
    }

    /// Reads all that have been sent.
    pub(super) fn read(&mut self, allocations: &LayerAllocations, target: &mut ReadTarget<'_>) {
        // Those that are sent from now on are read in the next round.
        let mut left = allocations.waiting();
        if left > 0 {
            target.unwinder.refresh();
        }
        let mut start = sys::thread_cpu_ns();
        while left > 0
            && let Some(sample) = allocations.next()
        {
            left -= 1;
            self.add(&sample, allocations.time_ns(&sample), target);
            let now = sys::thread_cpu_ns();
            let took = now.zip(start).and_then(|(now, start)| now.checked_sub(start));
            self.left.spend(took.unwrap_or(A_STACK_NS));
            Counters::add(&target.counters.sampling.collector_cpu_ns, took.unwrap_or(0));
            start = now;
        }
        allocations.set_over_budget(!self.left.has_budget(target.now_ns));
    }

    fn add(&mut self, sample: &AllocationSample, time_ns: u64, target: &mut ReadTarget<'_>) {
        let counters = &target.counters.allocations;
        let mut stack = Stack::new();
        let has_budget = sample.stack.is_none() || self.left.has_budget(target.now_ns);
        match sample.stack.as_ref().filter(|_| has_budget) {
            Some(copy) => {
                stack.end =
                    unwind_copy(copy, target.unwinder, target.most_frames, &mut stack.frames);
            }
            None => stack.waited = Some(Waited::AllocationNotCopied),
        }
        if !has_budget {
            Counters::add(&counters.dropped_over_budget, 1);
        }
        self.heap.add(sample, &stack, target.counters);
        let Some(span) = sample.span.map(|span| span.key) else { return };
        let parts =
            [(SampleKind::AllocatedBytes, sample.bytes), (SampleKind::Allocations, sample.count)];
        let mut is_kept = true;
        for (kind, weight) in parts {
            let wait = PendingWait { kind, time_ns, weight, stack: 0, thread: u32::MAX };
            is_kept &= target.pending.add_wait(span, wait, None, &stack, target.round);
        }
        let counter = if is_kept { &counters.sampled } else { &counters.dropped_pending_full };
        Counters::add(counter, 1);
    }
}
