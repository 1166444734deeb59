//! The signal that timers send.
#![allow(unsafe_code, reason = "installs a signal handler, and changes signal masks")]

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;

use super::fork::{ForkSafe, ForkSafeGuard};
use crate::sys::types::WhyRefused;

/// What a handler is called with.
pub(super) type Handler = extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);

/// The signal that new timers use; 0 before the first.
static CHOSEN: ForkSafe<c_int> = ForkSafe::new(0);

pub(super) fn lock_signal() -> ForkSafeGuard<c_int> {
    CHOSEN.lock()
}

/// The signal to use now, with `handler` installed.
///
/// A real-time signal that nobody handles, the highest there is. Not `SIGPROF`, if there is a choice:
/// other profilers take it and give it back to its default, which would end the process with our next
/// signal. Once installed a handler stays: a signal may be on its way.
pub(super) fn signal_for(handler: Handler) -> Result<c_int, WhyRefused> {
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

/// Whether nobody else handles it.
fn is_free(action: &libc::sigaction, handler: Handler) -> bool {
    [libc::SIG_DFL, libc::SIG_IGN, handler as usize].contains(&action.sa_sigaction)
}

/// Whether a timer takes the signal: an emulator of another processor takes a few of the highest for itself.
fn can_be_sent(signal: c_int) -> bool {
    let mut event = MaybeUninit::<libc::sigevent>::zeroed();
    let mut timer: libc::timer_t = std::ptr::null_mut();
    // SAFETY: writes fields of a structure of ours, of which all zeros is a valid rest; the timer is
    // never set, and deleted at once.
    unsafe {
        (*event.as_mut_ptr()).sigev_signo = signal;
        (*event.as_mut_ptr()).sigev_notify = libc::SIGEV_SIGNAL;
        if libc::timer_create(libc::CLOCK_MONOTONIC, event.as_mut_ptr(), &raw mut timer) == 0 {
            libc::timer_delete(timer);
            return true;
        }
    }
    // If it is for want of timers no other signal would help.
    last_error() != libc::EINVAL
}

/// The function that handles a signal, `SIG_DFL` or `SIG_IGN`.
pub(super) fn handled_by(signal: c_int) -> Option<usize> {
    action_of(signal).map(|action| action.sa_sigaction)
}

fn action_of(signal: c_int) -> Option<libc::sigaction> {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: asks only; the kernel fills the structure.
    let result = unsafe { libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) };
    // SAFETY: zeroed and perhaps filled: plain integers and a pointer.
    (result == 0).then(|| unsafe { action.assume_init() })
}

/// Returns whether it is: false if somebody else was faster.
fn install(signal: c_int, handler: Handler) -> Result<bool, WhyRefused> {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    let action_pointer = action.as_mut_ptr();
    // SAFETY: writes fields of a structure of ours; all zeros is a valid rest (an empty mask).
    unsafe {
        (*action_pointer).sa_sigaction = handler as usize;
        // On the alternate stack where a thread has one (Rust gives one to each of its threads): the
        // handler must not be what makes a deep stack overflow.
        (*action_pointer).sa_flags = libc::SA_SIGINFO | libc::SA_RESTART | libc::SA_ONSTACK;
        // No other handler on top of ours: alternate stacks are small. But for those of faults, which
        // cannot wait.
        libc::sigfillset(&raw mut (*action_pointer).sa_mask);
        for fault in FAULTS {
            libc::sigdelset(&raw mut (*action_pointer).sa_mask, fault);
        }
    }
    let mut before = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: both structures are valid, and the handler is a function that lives as long as the
    // program and may be called at any time.
    if unsafe { libc::sigaction(signal, action_pointer, before.as_mut_ptr()) } != 0 {
        return Err(WhyRefused::Other(last_error()));
    }
    // SAFETY: zeroed and filled: plain integers and a pointer.
    let before = unsafe { before.assume_init() };
    let was_free = is_free(&before, handler);
    if !was_free {
        // SAFETY: gives back what was there a moment ago.
        unsafe { libc::sigaction(signal, &raw const before, std::ptr::null_mut()) };
    }
    Ok(was_free)
}

/// Lets the calling thread have `signal`: programs that wait for signals in one place block all of
/// them in each thread. Nobody waits for one that is ours.
pub(super) fn unblock(signal: c_int) {
    set_mask(libc::SIG_UNBLOCK, signal);
}

/// Holds a signal back from the calling thread; returns its mask before.
pub(super) fn block(signal: c_int) -> libc::sigset_t {
    set_mask(libc::SIG_BLOCK, signal)
}

/// Changes the calling thread's mask; returns the one before.
fn set_mask(how: c_int, signal: c_int) -> libc::sigset_t {
    let mut set = MaybeUninit::<libc::sigset_t>::zeroed();
    let mut before = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: fills and reads sets of ours, and changes the calling thread's mask.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), signal);
        libc::pthread_sigmask(how, set.as_ptr(), before.as_mut_ptr());
        before.assume_init()
    }
}

/// Signals that an instruction of the thread itself brings about: blocked, they would end the process
/// without the program's handler.
const FAULTS: [c_int; 6] =
    [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP, libc::SIGSYS];

/// Runs `action` with all signals blocked on the calling thread but those of faults. A thread that it
/// starts inherits that.
pub(crate) fn with_signals_blocked<R>(action: impl FnOnce() -> R) -> R {
    let mut set = MaybeUninit::<libc::sigset_t>::zeroed();
    let mut before = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: fills and reads sets of ours, and changes the calling thread's mask. Signals of the C
    // library's own are not in a full set.
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
