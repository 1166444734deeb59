//! The modules of the stacks that the collector holds.

use super::heap::Heap;
use super::parked::SampledThreads;
use super::pending::Pending;
use super::sampled::SampledThread;
use crate::unwind::Unwinder;

/// Updates the list of libraries, if stacks may be unwound soon, and forgets those that nothing refers to.
pub(super) fn refresh(
    unwinder: &mut Unwinder,
    sampled: &SampledThreads,
    pending: &Pending,
    heap: &Heap,
) {
    let waiting = sampled.iter().filter_map(SampledThread::waiting).map(|wait| &wait.stack);
    let stacks = pending.stacks().chain(heap.stacks()).chain(waiting);
    unwinder.forget_modules(stacks.flat_map(|stack| stack.all_frames()));
    if !sampled.is_empty() || sampled.has_parked() {
        unwinder.refresh();
    }
    unwinder.begin_reading();
}
