//! Starting threads of ours.

use std::io;
use std::thread::{Builder, JoinHandle};

use super::platform::with_signals_blocked;

/// The stack of each thread of ours, whatever `RUST_MIN_STACK` says. To symbolize takes most of it:
/// debug information nests (types in types, inlined calls in inlined calls, C++ names), and in a debug
/// build a level is some KiB. It is address space: what is never used takes no memory.
pub(crate) const STACK_BYTES: usize = 2 * 1024 * 1024;

/// Starts a thread of ours. It leaves every signal to the threads of the program, but for those that
/// an instruction of its own brings about. So the program finds signals where it waits for them, and a
/// write that is refused is an error (`SIGXFSZ`, `SIGPIPE`). Threads that it starts inherit that.
///
/// # Errors
///
/// If the system does not let us.
pub(crate) fn spawn<T: Send + 'static>(
    name: &str,
    run: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    let builder = Builder::new().name(name.to_owned()).stack_size(STACK_BYTES);
    // From its very first instruction on.
    with_signals_blocked(|| builder.spawn(run))
}
