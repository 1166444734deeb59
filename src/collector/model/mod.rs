//! The layer against a model of it.
//!
//! Scripts are generated: spans on threads, samples, waits, errors, the passing of time and rounds
//! of the collector. Each is played twice: on the [`stage`], where all is real but the kernel and
//! the clock, and to the [`oracle`], which keeps a diary of everything and reads all of it again
//! whenever it is asked. What both tell of kept spans and their profiles must be the same.
//!
//! Two definitions that the oracle holds: a span that is entered on two threads at once has the
//! time of both, so that on-CPU, off-CPU and idle time can be more than wall time; a span that is
//! entered twice on one thread has its time once.
//!
//! `.ci/mutations` shows that this finds errors.

mod oracle;
mod script;
mod source;
mod stage;
mod tests;

/// An engine without threads.
pub(super) fn engine() -> std::sync::Arc<super::Engine> {
    stage::Stage::new(false, false, |_| tracing::Dispatch::none()).into_engine()
}
