//! The signal that timers send.
#![allow(unsafe_code, reason = "installs a signal handler, and changes signal masks")]

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;

use super::fork::{ForkSafe, ForkSafeGuard};
use super::resident::keep_loaded;
use crate::sys::types::WhyRefused;

/// The type of a signal handler.
pub(super) type Handler = extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);

/// The signal of new timers; 0 before the first one.
static CHOSEN: ForkSafe<c_int> = ForkSafe::new(0);

pub(super) fn lock_signal() -> ForkSafeGuard<c_int> {
    CHOSEN.lock()
}

/// Returns the signal to use, with `handler` installed.
///
/// It is the highest real-time signal without a handler. `SIGPROF` is the last choice: other profilers use it and then
/// reset it to its default, so that the next signal would kill the process. A handler stays installed, since a signal
/// may still be pending, and so does the library that contains it.
pub(super) fn signal_for(handler: Handler) -> Result<c_int, WhyRefused> {
    // Before the lock, since it waits for the loader, which may run code of the program that forks.
    keep_loaded();
    let mut chosen = lock_signal();
    if *chosen != 0 && handled_by(*chosen) == Some(handler as usize) {
        return Ok(*chosen);
    }
    for signal in (libc::SIGRTMIN()..libc::SIGRTMAX()).rev().chain([libc::SIGPROF]) {
        let is_usable = action_of(signal).is_some_and(|action| is_free(&action, handler));
        if is_usable && can_be_sent(signal) && install(signal, handler)? {
            *chosen = signal;
            return Ok(signal);
        }
    }
    Err(WhyRefused::Other(libc::EBUSY))
}

/// Whether the signal has no other handler.
fn is_free(action: &libc::sigaction, handler: Handler) -> bool {
    [libc::SIG_DFL, libc::SIG_IGN, handler as usize].contains(&action.sa_sigaction)
}

/// Whether a timer can send the signal: emulators of other processors reserve a few of the highest ones.
fn can_be_sent(signal: c_int) -> bool {
    let mut event = MaybeUninit::<libc::sigevent>::zeroed();
    let mut timer: libc::timer_t = std::ptr::null_mut();
    // SAFETY: writes fields of a local structure, of which all zeros is a valid rest; the timer is never armed, and
    // deleted at once.
    unsafe {
        (*event.as_mut_ptr()).sigev_signo = signal;
        (*event.as_mut_ptr()).sigev_notify = libc::SIGEV_SIGNAL;
        if libc::timer_create(libc::CLOCK_MONOTONIC, event.as_mut_ptr(), &raw mut timer) == 0 {
            libc::timer_delete(timer);
            return true;
        }
    }
    // If no timer is available, another signal does not help.
    last_error() != libc::EINVAL
}

/// The function that handles a signal, `SIG_DFL` or `SIG_IGN`.
pub(super) fn handled_by(signal: c_int) -> Option<usize> {
    action_of(signal).map(|action| action.sa_sigaction)
}

fn action_of(signal: c_int) -> Option<libc::sigaction> {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: only queries; the kernel fills the structure.
    let result = unsafe { libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) };
    // SAFETY: zeroed and possibly filled: plain integers and a pointer.
    (result == 0).then(|| unsafe { action.assume_init() })
}

/// Installs the handler. Returns false if the program installed another one concurrently.
fn install(signal: c_int, handler: Handler) -> Result<bool, WhyRefused> {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    let action_pointer = action.as_mut_ptr();
    // SAFETY: writes fields of a local structure; all zeros is a valid rest (an empty mask).
    unsafe {
        (*action_pointer).sa_sigaction = handler as usize;
        // On the alternate stack if the thread has one, as Rust's threads do: the handler must not cause the overflow
        // of a deep stack.
        (*action_pointer).sa_flags = libc::SA_SIGINFO | libc::SA_RESTART | libc::SA_ONSTACK;
        // No other handler may interrupt this one, since alternate stacks are small, except for those of faults, which
        // cannot be delayed.
        libc::sigfillset(&raw mut (*action_pointer).sa_mask);
        for fault in FAULTS {
            libc::sigdelset(&raw mut (*action_pointer).sa_mask, fault);
        }
    }
    let mut before = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: both structures are valid, and the handler is a function that lives as long as the program and may be
    // called at any time.
    if unsafe { libc::sigaction(signal, action_pointer, before.as_mut_ptr()) } != 0 {
        return Err(WhyRefused::Other(last_error()));
    }
    // SAFETY: zeroed and filled: plain integers and a pointer.
    let before = unsafe { before.assume_init() };
    let was_free = is_free(&before, handler);
    if !was_free {
        // SAFETY: restores the previous action.
        unsafe { libc::sigaction(signal, &raw const before, std::ptr::null_mut()) };
    }
    Ok(was_free)
}

/// Unblocks `signal` on the calling thread. Programs that wait for signals in one place block all of them on each
/// thread, but none waits for this one.
pub(super) fn unblock(signal: c_int) {
    set_mask(libc::SIG_UNBLOCK, signal);
}

/// Blocks a signal on the calling thread; returns the previous mask.
pub(super) fn block(signal: c_int) -> libc::sigset_t {
    set_mask(libc::SIG_BLOCK, signal)
}

/// Changes the calling thread's mask; returns the previous one.
fn set_mask(how: c_int, signal: c_int) -> libc::sigset_t {
    let mut set = MaybeUninit::<libc::sigset_t>::zeroed();
    let mut before = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: fills and reads local sets, and changes the calling thread's mask.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), signal);
        libc::pthread_sigmask(how, set.as_ptr(), before.as_mut_ptr());
        before.assume_init()
    }
}

/// Signals that a thread's own instructions raise. If they were blocked, they would kill the process without calling
/// the program's handler.
const FAULTS: [c_int; 6] =
    [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP, libc::SIGSYS];

/// Runs `action` with all signals except faults blocked on the calling thread. Threads that it starts inherit the mask.
pub(crate) fn with_signals_blocked<R>(action: impl FnOnce() -> R) -> R {
    let mut set = MaybeUninit::<libc::sigset_t>::zeroed();
    let mut before = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: fills and reads local sets, and changes the calling thread's mask. A full set excludes the signals that
    // the C library uses internally.
    let before = unsafe {
        libc::sigfillset(set.as_mut_ptr());
        for fault in FAULTS {
            libc::sigdelset(set.as_mut_ptr(), fault);
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), before.as_mut_ptr());
        before.assume_init()
    };
    let result = action();
    // SAFETY: a set that the kernel has filled.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut()) };
    result
}

pub(super) fn last_error() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}
