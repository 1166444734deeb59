//! Telling that we are the child of a fork.
#![allow(unsafe_code, reason = "registers a handler with pthread_atfork")]

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Once, OnceLock};

use super::signal::{after_fork, before_fork};

static GENERATION: AtomicU32 = AtomicU32::new(0);
static REGISTER: Once = Once::new();
static HANDLER: OnceLock<fn()> = OnceLock::new();

/// A number that is greater in the child of a fork than in its parent, once
/// [`on_fork`] was called.
///
/// In a child neither our threads nor the rings exist: the kernel does not copy a ring's mapping,
/// and the locks of threads that are gone may be held for ever. Who sees another number than the
/// one it was made under must touch neither.
///
/// A child made by a bare `clone` system call that shares no memory is not seen.
#[inline(always)]
pub(crate) fn fork_generation() -> u32 {
    GENERATION.load(Ordering::Relaxed)
}

/// Runs `in_child` on the one thread that the child of a fork has, before `fork` returns there. It
/// may do no more than store to memory. Only the first one that this is called with is run.
pub(crate) fn on_fork(in_child: fn()) {
    REGISTER.call_once(|| {
        _ = HANDLER.set(in_child);
        // SAFETY: the handlers are plain functions that live as long as the program. What is called in
        // the child only stores to memory and sets the thread's signal mask, which is allowed in the
        // child of a process with threads. A failure (no memory) leaves us without them, as if the
        // program never forked.
        unsafe { libc::pthread_atfork(Some(before), Some(parent), Some(child)) };
    });
}

extern "C" fn before() {
    before_fork();
}

extern "C" fn parent() {
    after_fork();
}

extern "C" fn child() {
    after_fork();
    GENERATION.fetch_add(1, Ordering::Relaxed);
    if let Some(handler) = HANDLER.get() {
        handler();
    }
}
