//! The modules of the stacks that the collector holds.

use super::heap::Heap;
use super::parked::SampledThreads;
use super::pending::Pending;
use super::sampled::SampledThread;
use super::stack::StackEntry;
use super::stack_tree::StackTree;
use crate::unwind::Unwinder;

/// Updates the list of libraries, if stacks may be unwound soon, and forgets those that nothing refers to.
pub(super) fn refresh(
    unwinder: &mut Unwinder,
    sampled: &SampledThreads,
    pending: &Pending,
    heap: &Heap,
) {
    let waiting = sampled.iter().filter_map(SampledThread::waiting);
    let waiting = waiting.flat_map(|wait| wait.stack.entries());
    let stored = [&pending.tables.stacks, &heap.stacks].into_iter();
    let stored = stored.flat_map(StackTree::all_frames);
    unwinder.forget_modules(waiting.chain(stored).filter_map(StackEntry::code));
    if !sampled.is_empty() || sampled.has_parked() {
        unwinder.refresh();
    }
    unwinder.begin_reading();
}
