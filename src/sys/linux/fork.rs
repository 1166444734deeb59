//! What concerns forks of the process: the child has none of our threads, rings and timers, and all memory as it
//! was.
#![allow(unsafe_code, reason = "registers handlers with pthread_atfork, and sets the signal mask")]

use std::cell::Cell;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{
    Mutex, MutexGuard, Once, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
};
use std::time::{Duration, Instant};

use super::modules::lock_loader;
use super::signal::{block, lock_signal};
use super::thread::process_id;
use super::timer::lock_targets;

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

/// The process in which something was made that a child of it does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HomeProcess(u32);

impl HomeProcess {
    pub(super) fn current() -> Self {
        Self(process_id())
    }

    pub(super) fn is_current(self) -> bool {
        self == Self::current()
    }
}

/// A lock that is held over forks, so that the child does not find it taken by a thread that is gone.
///
/// Of the standard library: in the child it is given back by a store. One of `parking_lot` on which others wait is
/// given back by way of a table, of which another thread may have had a part locked when the process was forked.
pub(super) struct ForkSafe<T>(Mutex<T>);

pub(super) type ForkSafeGuard<T> = MutexGuard<'static, T>;

impl<T> ForkSafe<T> {
    pub(super) const fn new(value: T) -> Self {
        Self(Mutex::new(value))
    }

    pub(super) fn lock(&'static self) -> ForkSafeGuard<T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Read by threads of ours that log, and written by forks. The program's logger has locks, and the child that finds
/// one held by a thread that is gone waits for ever when it logs.
static LOGGING: RwLock<()> = RwLock::new(());
/// A fork has waited in vain for a thread that still logs: further ones do not.
static IS_STUCK: AtomicBool = AtomicBool::new(false);
const LONGEST_WAIT: Duration = Duration::from_millis(200);

thread_local! {
    /// What logs may fork.
    static LOGS: Cell<bool> = const { Cell::new(false) };
}

/// Tries until it is there; not for ever, since what it waits for may wait for what the caller holds.
fn wait_for<T>(mut attempt: impl FnMut() -> Option<T>) -> Option<T> {
    let start = Instant::now();
    loop {
        let found = attempt();
        if found.is_some() || start.elapsed() >= LONGEST_WAIT {
            return found;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Runs `log` while no thread forks, and keeps forks waiting meanwhile; neither for more than 0.2 s.
pub(crate) fn log_between_forks(log: impl FnOnce()) {
    struct Logging {
        _guard: Option<RwLockReadGuard<'static, ()>>,
    }

    impl Drop for Logging {
        fn drop(&mut self) {
            LOGS.set(false);
            IS_STUCK.store(false, Ordering::Relaxed);
        }
    }

    let _logging = Logging { _guard: wait_for(|| LOGGING.try_read().ok()) };
    LOGS.set(true);
    log();
}

/// Waits for threads that log. Who forks may hold what they wait for, so this ends in any case: at worst it is as
/// if there were no such thing.
fn wait_for_logs() -> Option<RwLockWriteGuard<'static, ()>> {
    if LOGS.get() || IS_STUCK.load(Ordering::Relaxed) {
        return None;
    }
    let guard = wait_for(|| LOGGING.try_write().ok());
    IS_STUCK.store(guard.is_none(), Ordering::Relaxed);
    guard
}

/// What a thread that forks has for that time.
struct Held {
    _logging: Option<RwLockWriteGuard<'static, ()>>,
    _locks: (ForkSafeGuard<libc::c_int>, ForkSafeGuard<super::timer::Pool>, ForkSafeGuard<()>),
    /// The thread's mask, if it was changed.
    mask: Option<libc::sigset_t>,
    /// Forks by handlers of this fork.
    inner_forks: u32,
}

thread_local! {
    // Never dropped by the end of the thread: then it has no destructor, and is there to the very end.
    static HELD: Cell<Option<ManuallyDrop<Held>>> = const { Cell::new(None) };
}

/// Holds the timers' signal back, for a fork that is interrupted begins anew, and with a fast timer never ends; and
/// our locks and what logs, or the child could find locks held by a thread that is gone.
extern "C" fn before() {
    if let Some(mut held) = HELD.take() {
        held.inner_forks += 1;
        HELD.set(Some(held));
        return;
    }
    // First, for what logs may need one of the others.
    let logging = wait_for_logs();
    let (signal, targets, loader) = (lock_signal(), lock_targets(), lock_loader());
    let mask = (*signal != 0).then(|| block(*signal));
    let held = Held { _logging: logging, _locks: (signal, targets, loader), mask, inner_forks: 0 };
    HELD.set(Some(ManuallyDrop::new(held)));
}

/// In parent and child.
extern "C" fn parent() {
    let Some(mut held) = HELD.take() else { return };
    if held.inner_forks > 0 {
        held.inner_forks -= 1;
        HELD.set(Some(held));
        return;
    }
    let held = ManuallyDrop::into_inner(held);
    let mask = held.mask;
    drop(held);
    if let Some(mask) = mask {
        // SAFETY: reads a set that the kernel has filled, and changes the calling thread's mask.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const mask, std::ptr::null_mut()) };
    }
}

extern "C" fn child() {
    parent();
    GENERATION.fetch_add(1, Ordering::Relaxed);
    if let Some(handler) = HANDLER.get() {
        handler();
    }
}

#[cfg(test)]
mod tests {
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
                let ended = (child > 0).then(|| wait_for_end(child)).flatten();
                stop.store(ended != Some(0), Ordering::Relaxed);
                assert_eq!(ended, Some(0));
            }
            stop.store(true, Ordering::Relaxed);
        });
    }

    /// The status with which it ended, unless it hangs.
    fn wait_for_end(child: libc::pid_t) -> Option<i32> {
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
