//! Reads samples of what threads have allocated.

use super::budget::Share;
use super::copied::{ReadTarget, UNWINDING, unwind_copy};
use super::heap::Heap;
use super::pending::PendingWait;
use super::stack::{Stack, Waited};
use crate::allocations::{AllocationSample, LayerAllocations};
use crate::profile::SampleKind;
use crate::stats::Counters;

/// Where the budget for samples is unlimited.
const UNLIMITED: Share = Share::new(100, i64::MAX);

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
        let Self { left, heap } = self;
        let add = |sample: &AllocationSample, has_budget: bool, target: &mut ReadTarget<'_>| {
            add(sample, allocations.time_ns(sample), has_budget, heap, target);
        };
        target.read_all(allocations.waiting(), || allocations.next(), left, add);
        allocations.set_over_budget(!left.has_budget(target.now_ns));
    }
}

fn add(
    sample: &AllocationSample,
    time_ns: u64,
    has_budget: bool,
    heap: &mut Heap,
    target: &mut ReadTarget<'_>,
) {
    let counters = &target.counters.allocations;
    let mut stack = Stack::new();
    let has_budget = has_budget || sample.stack.is_none();
    match sample.stack.as_ref().filter(|_| has_budget) {
        Some(copy) => {
            stack.end = unwind_copy(copy, target.unwinder, target.most_frames, &mut stack.frames);
        }
        None => stack.waited = Some(Waited::AllocationNotCopied),
    }
    if !has_budget {
        Counters::add(&counters.dropped_over_budget, 1);
    }
    heap.add(sample, &stack, target.counters);
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
