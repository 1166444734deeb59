//! The modules of the stacks that the collector holds.

use super::run::Collector;
use super::sampled::Sampled;
use super::stack::StackEntry;

/// Updates the list of libraries, if stacks may be unwound soon, and forgets those that nothing refers to.
pub(super) fn refresh(collector: &mut Collector) {
    let waiting = collector.sampled.iter().filter_map(Sampled::waiting);
    let waiting = waiting.flat_map(|wait| wait.stack.entries());
    let stored = [&collector.pending.stacks, &collector.copied.heap.stacks].into_iter();
    let stored = stored.flat_map(|stacks| stacks.nodes().map(|(_, entry)| entry));
    collector.unwinder.forget_modules(waiting.chain(stored).filter_map(StackEntry::code));
    if !collector.sampled.is_empty() || collector.sampled.has_parked() {
        collector.unwinder.refresh();
    }
    collector.unwinder.begin_reading();
}

/// Whether libraries were loaded or unloaded. The sooner they are read, the fewer samples may be of either.
pub(super) fn are_outdated(collector: &Collector) -> bool {
    !collector.sampled.is_empty() && collector.unwinder.is_outdated()
}
