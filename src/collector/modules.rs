//! The modules of the stacks that the collector holds.

use super::run::Collector;
use super::sampled::SampledThread;

/// Updates the list of libraries, if stacks may be unwound soon, and forgets those that nothing refers to.
pub(super) fn refresh(collector: &mut Collector) {
    let waiting =
        collector.sampled.iter().filter_map(SampledThread::waiting).map(|wait| &wait.stack);
    let stacks =
        collector.pending.stacks().chain(collector.copied.allocations.heap.stacks()).chain(waiting);
    collector.unwinder.forget_modules(stacks.flat_map(|stack| stack.all_frames()));
    if !collector.sampled.is_empty() || collector.sampled.has_parked() {
        collector.unwinder.refresh();
    }
    collector.unwinder.begin_reading();
}

/// Whether libraries were loaded or unloaded. The sooner they are read, the fewer samples may be of either.
pub(super) fn are_outdated(collector: &Collector) -> bool {
    !collector.sampled.is_empty() && collector.unwinder.is_outdated()
}
