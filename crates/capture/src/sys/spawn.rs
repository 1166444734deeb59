//! Starting the layer's threads.

use std::io;
use std::thread::{Builder, JoinHandle};

use super::platform::with_signals_blocked;

/// The stack size of each of the layer's threads, independent of `RUST_MIN_STACK`. Symbolization needs most of it:
/// debug information nests (types in types, inlined calls in inlined calls, C++ names), and in a debug build each level
/// takes some KiB. This is address space: unused pages take no memory.
pub const STACK_BYTES: usize = 2 * 1024 * 1024;

/// Starts a thread of the layer. All signals except those that the thread's own instructions raise are blocked on it,
/// so the program receives its signals on its own threads, and a refused write is an error instead of `SIGXFSZ` or
/// `SIGPIPE`. Threads that it starts inherit the mask.
pub fn spawn<T: Send + 'static>(
    name: &str,
    run: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    let builder = Builder::new().name(name.to_owned()).stack_size(STACK_BYTES);
    // From its first instruction on.
    with_signals_blocked(|| builder.spawn(run))
}
