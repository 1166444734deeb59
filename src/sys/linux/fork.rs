//! Telling that we are the child of a fork.
#![allow(unsafe_code, reason = "registers a handler with pthread_atfork")]

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Once, OnceLock};
use std::time::{Duration, Instant};

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

/// Threads of ours that log. The program's logger has locks, and the child that finds one held by a thread that is
/// gone waits for ever when it logs.
static LOGGING: AtomicU32 = AtomicU32::new(0);
/// Threads that fork.
static FORKING: AtomicU32 = AtomicU32::new(0);
/// A fork has waited in vain for a thread that still logs: further ones do not.
static IS_STUCK: AtomicBool = AtomicBool::new(false);
const LONGEST_WAIT: Duration = Duration::from_millis(200);

thread_local! {
    /// What logs may fork.
    static LOGS: Cell<bool> = const { Cell::new(false) };
}

/// Counts as long as it lives.
pub(super) struct Counted(&'static AtomicU32);

impl Counted {
    fn new(count: &'static AtomicU32) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Self(count)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Runs `log` while no thread forks, and keeps forks waiting meanwhile; neither for more than 0.2 s.
pub(crate) fn log_between_forks(log: impl FnOnce()) {
    struct Logging(#[expect(dead_code, reason = "for its drop")] Counted);

    impl Drop for Logging {
        fn drop(&mut self) {
            LOGS.set(false);
            IS_STUCK.store(false, Ordering::Relaxed);
        }
    }

    let start = Instant::now();
    let logging = loop {
        let logging = Counted::new(&LOGGING);
        if FORKING.load(Ordering::SeqCst) == 0 || start.elapsed() >= LONGEST_WAIT {
            break Logging(logging);
        }
        drop(logging);
        std::thread::sleep(Duration::from_millis(1));
    };
    LOGS.set(true);
    log();
    drop(logging);
}

/// Waits for threads that log. Who forks may hold what they wait for, so this ends in any case: at worst it is as
/// if there were no such thing.
pub(super) fn begin_fork() -> Counted {
    let forking = Counted::new(&FORKING);
    let start = Instant::now();
    while LOGGING.load(Ordering::SeqCst) > 0 && !LOGS.get() && !IS_STUCK.load(Ordering::Relaxed) {
        if start.elapsed() >= LONGEST_WAIT {
            IS_STUCK.store(true, Ordering::Relaxed);
        } else {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    forking
}

extern "C" fn before() {
    before_fork();
}

extern "C" fn parent() {
    after_fork();
}

extern "C" fn child() {
    after_fork();
    // Of the threads that were counted there is at most this one.
    LOGGING.store(u32::from(LOGS.get()), Ordering::Relaxed);
    FORKING.store(0, Ordering::Relaxed);
    IS_STUCK.store(false, Ordering::Relaxed);
    GENERATION.fetch_add(1, Ordering::Relaxed);
    if let Some(handler) = HANDLER.get() {
        handler();
    }
}

#[cfg(test)]
mod tests {
    use super::super::timer::lock_targets;
    use super::*;
    use std::sync::atomic::AtomicBool;

    /// Whoever waits for a lock of ours when the process forks is not in the child, and the child does
    /// not wait for them.
    #[test]
    fn children_are_free_of_those_who_waited() {
        on_fork(|| {});
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for seed in 0..8_u64 {
                let stop = &stop;
                scope.spawn(move || {
                    let mut x = seed;
                    while !stop.load(Ordering::Relaxed) {
                        // At any time, so that some begin to wait in the very middle of a fork.
                        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                        for _ in 0..x >> 50 {
                            std::hint::spin_loop();
                        }
                        drop(lock_targets());
                    }
                });
            }
            for _ in 0..300 {
                // SAFETY: the child calls nothing but `_exit`.
                let child = unsafe { libc::fork() };
                if child == 0 {
                    // SAFETY: ends the process at once.
                    unsafe { libc::_exit(0) };
                }
                let ended = (child > 0).then(|| wait_for(child)).flatten();
                stop.store(ended != Some(0), Ordering::Relaxed);
                assert_eq!(ended, Some(0));
            }
            stop.store(true, Ordering::Relaxed);
        });
    }

    /// The status with which it ended, unless it hangs.
    fn wait_for(child: libc::pid_t) -> Option<i32> {
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(60) {
            let mut status = 0;
            // SAFETY: a child of ours; the pointer is to an integer of ours.
            if unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) } == child {
                return Some(status);
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        // SAFETY: a child of ours that was not waited for yet.
        unsafe { libc::kill(child, libc::SIGKILL) };
        None
    }
}
