//! The modules of the stacks that the collector holds.

use super::parked::SampledThreads;
use super::sampled::SampledThread;
use super::sinks::Sinks;
use super::stack::StackEntry;
use crate::unwind::Unwinder;

/// Updates the list of libraries, if stacks may be unwound soon, and forgets those that nothing refers to.
pub(super) fn refresh(unwinder: &mut Unwinder, sampled: &SampledThreads, sinks: &Sinks) {
    let waiting = sampled.iter().filter_map(SampledThread::waiting);
    let waiting = waiting.flat_map(|wait| wait.stack.entries());
    unwinder.forget_modules(waiting.chain(sinks.entries()).filter_map(StackEntry::code));
    if !sampled.is_empty() || sampled.has_parked() {
        unwinder.refresh();
    }
    unwinder.begin_reading();
}
