//! Forks of the process. The child has none of the layer's threads, rings and timers, but a copy of all memory.
#![allow(unsafe_code, reason = "registers handlers with pthread_atfork, and sets the signal mask")]

use std::cell::Cell;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{
    Mutex, MutexGuard, Once, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
};
use std::time::{Duration, Instant};

use super::modules::lock_loader;
use super::signal::{block, change_mask, lock_signal};
use super::timer::lock_targets;
use crate::sys::allocator::forget_counting;
use crate::sys::words::{Forks, WORDS};

static REGISTER: Once = Once::new();
static HANDLER: OnceLock<fn()> = OnceLock::new();

impl Forks {
    /// Runs `in_child` on the only thread of a forked child, before `fork` returns there. It may only store to memory. Only
    /// the first function that is passed here is used.
    pub fn on_each(in_child: fn()) {
        _ = HANDLER.set(in_child);
        Self::watch();
    }

    /// Counts forks from now on: [`Self::generation`].
    pub fn watch() {
        REGISTER.call_once(|| {
            // SAFETY: the handlers are plain functions that live as long as the program. The child's handler only stores to
            // memory and sets the thread's signal mask, which is allowed in the child of a process with threads. On failure
            // (no memory) there are no handlers, as if the program never forked.
            unsafe { libc::pthread_atfork(Some(before), Some(parent), Some(child)) };
        });
    }
}

/// A lock that is held across forks, so that the child does not find it held by a thread that does not exist there.
///
/// The lock is one of the standard library, which the child releases by a store. To release a contended `parking_lot`
/// lock, the child would need a global table, a part of which another thread may have locked during the fork.
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

/// Read-locked by the layer's threads while they log, and write-locked by forks. The program's logger has locks; a
/// child that finds one held by a thread that does not exist there would block forever when it logs.
static LOGGING: RwLock<()> = RwLock::new(());
/// Set after a fork has timed out waiting for a thread that still logs: further forks do not wait. In the child of such
/// a fork it stays set, as the lock stays held.
static HAS_TIMED_OUT: AtomicBool = AtomicBool::new(false);
/// Set in a child if a thread of the parent held `LOGGING` during the fork.
static IS_LOST: AtomicBool = AtomicBool::new(false);
const MAX_WAIT: Duration = Duration::from_millis(200);

thread_local! {
    /// Set on a thread that is logging, whose logger may fork.
    static LOGS: Cell<bool> = const { Cell::new(false) };
}

/// Retries until `attempt` succeeds, or until a timeout: the thread it waits for may itself wait for the caller.
fn wait_for<T>(mut attempt: impl FnMut() -> Option<T>) -> Option<T> {
    let start = Instant::now();
    loop {
        let found = attempt();
        if found.is_some() || start.elapsed() >= MAX_WAIT {
            return found;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

impl Forks {
    /// Runs `log` while no thread forks, and makes forks wait for it. Both waits end after 0.2 s.
    pub fn log_between(log: impl FnOnce()) {
        struct Logging {
            _guard: Option<RwLockReadGuard<'static, ()>>,
        }

        impl Drop for Logging {
            fn drop(&mut self) {
                LOGS.set(false);
                if !IS_LOST.load(Ordering::Relaxed) {
                    HAS_TIMED_OUT.store(false, Ordering::Relaxed);
                }
            }
        }

        let _logging = Logging { _guard: wait_for(|| LOGGING.try_read().ok()) };
        LOGS.set(true);
        log();
    }
}

/// Waits for threads that log, until a timeout: the forking thread may hold what they wait for.
fn wait_for_logs() -> Option<RwLockWriteGuard<'static, ()>> {
    if LOGS.get() || HAS_TIMED_OUT.load(Ordering::Relaxed) {
        return None;
    }
    let guard = wait_for(|| LOGGING.try_write().ok());
    // If another fork held the lock, no thread still logs.
    let is_logging = guard.is_none() && LOGGING.try_read().is_ok();
    HAS_TIMED_OUT.store(is_logging, Ordering::Relaxed);
    guard
}

struct Held {
    _logging: Option<RwLockWriteGuard<'static, ()>>,
    _locks: (ForkSafeGuard<libc::c_int>, ForkSafeGuard<super::timer::Pool>, ForkSafeGuard<()>),
    mask: Option<libc::sigset_t>,
    /// Forks by fork handlers that run during this fork.
    inner_forks: u32,
}

thread_local! {
    // Without a destructor, so that it can be accessed until the very end of the thread.
    static HELD: Cell<Option<ManuallyDrop<Held>>> = const { Cell::new(None) };
}

/// Blocks the timers' signal, since an interrupted fork restarts, and would never end with a fast timer. Takes the
/// layer's locks and waits for threads that log: the child has none of the threads that hold them.
extern "C" fn before() {
    if let Some(mut held) = HELD.take() {
        held.inner_forks += 1;
        HELD.set(Some(held));
        return;
    }
    // First, since a thread that logs may need one of the other locks.
    let logging = wait_for_logs();
    let (signal, targets, loader) = (lock_signal(), lock_targets(), lock_loader());
    let mask = (*signal != 0).then(|| block(*signal));
    let locks = (signal, targets, loader);
    let held = Held { _logging: logging, _locks: locks, mask, inner_forks: 0 };
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
        change_mask(libc::SIG_SETMASK, &mask);
    }
}

extern "C" fn child() {
    parent();
    if LOGGING.try_write().is_err() {
        IS_LOST.store(true, Ordering::Relaxed);
        HAS_TIMED_OUT.store(true, Ordering::Relaxed);
    }
    WORDS.fork_generation.fetch_add(1, Ordering::Relaxed);
    forget_counting();
    if let Some(handler) = HANDLER.get() {
        handler();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    /// Threads that wait for one of the layer's locks during a fork do not exist in the child, and the child does not
    /// wait for them.
    #[test]
    fn a_child_does_not_wait_for_threads_of_the_parent() {
        Forks::on_each(|| {});
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for seed in 0..8_u64 {
                let stop = &stop;
                scope.spawn(move || {
                    let mut x = seed;
                    while !stop.load(Ordering::Relaxed) {
                        // At random times, so that some start to wait in the middle of a fork.
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

    /// The exit status, unless the child hangs.
    fn wait_for_end(child: libc::pid_t) -> Option<i32> {
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(60) {
            let mut status = 0;
            // SAFETY: the child created above; the pointer is to a local integer.
            if unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) } == child {
                return Some(status);
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        // SAFETY: the child created above, which has not been reaped.
        unsafe { libc::kill(child, libc::SIGKILL) };
        None
    }
}
