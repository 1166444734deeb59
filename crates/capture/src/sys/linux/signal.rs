//! The signal that timers send.
#![allow(
    unsafe_code,
    reason = "installs a signal handler, keeps its library loaded, and changes signal masks"
)]

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ops::BitOr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::clock::{create_timer, delete_timer};
use super::fork::{ForkSafe, ForkSafeGuard};
use super::modules::is_in_program;
use super::texts::mask_in;
use super::thread::current_tid;
use crate::sys::types::{FilteredSyscall, WhyRefused};

pub(super) type Handler = extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);

/// The signal of new timers; 0 before the first one.
static CHOSEN: ForkSafe<c_int> = ForkSafe::new(0);

pub(super) fn lock_signal() -> ForkSafeGuard<c_int> {
    CHOSEN.lock()
}

/// Returns the signal to use, with `handler` installed: `wanted`, if that is given.
///
/// Otherwise it is the highest real-time signal without a handler that the program does not [wait for](claimed).
/// `SIGPROF` is the last choice: other profilers use it, and their reset would let the next signal kill the process. A
/// handler stays installed, since a signal may still be pending.
pub(super) fn signal_for(handler: Handler, wanted: Option<c_int>) -> Result<c_int, WhyRefused> {
    // Before the lock, since it waits for the loader, which may run code of the program that forks.
    keep_loaded();
    let mut chosen = lock_signal();
    let present = wanted.unwrap_or(*chosen);
    if present != 0 && handled_by(present) == Some(handler as usize) {
        return Ok(present);
    }
    let claimed = CLAIMED.load(Ordering::Relaxed);
    let all = all_signals().filter(|signal| match wanted {
        Some(wanted) => *signal == wanted,
        None => claimed & bit(*signal) == 0,
    });
    for signal in all {
        let is_usable = action_of(signal).is_some_and(|action| is_free(&action, handler));
        if is_usable && can_be_sent(signal) && install(signal, handler)? {
            *chosen = signal;
            return Ok(signal);
        }
    }
    // If this one cannot be sent either, it is not for want of a signal.
    match can_be_sent(libc::SIGALRM) {
        true => Err(WhyRefused::NoSignal),
        false => Err(WhyRefused::Failed(FilteredSyscall::TimerCreate, libc::EINVAL)),
    }
}

/// Keeps this code loaded until the process ends: the handler stays installed, and the program could unload a plugin that
/// contains it. Loaded again, it would be another one, which takes another signal.
fn keep_loaded() {
    static IS_KEPT: AtomicBool = AtomicBool::new(false);
    let here = keep_loaded as *const c_void;
    if IS_KEPT.swap(true, Ordering::Relaxed) || is_in_program(here.addr() as u64) {
        return;
    }
    let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: fills the structure.
    let is_known = unsafe { libc::dladdr(here, info.as_mut_ptr()) } != 0;
    // SAFETY: zeroed, and then filled: plain pointers.
    let name = unsafe { info.assume_init() }.dli_fname;
    if is_known && !name.is_null() {
        // If it fails, nothing is kept.
        // SAFETY: the name that the loader has for this library. It is already loaded, so no code of it runs. The handle
        // is never closed.
        unsafe { libc::dlopen(name, libc::RTLD_LAZY | libc::RTLD_NOLOAD | libc::RTLD_NODELETE) };
    }
}

/// All that timers may send, the first choice first.
fn all_signals() -> impl Iterator<Item = c_int> {
    (libc::SIGRTMIN()..libc::SIGRTMAX()).rev().chain([libc::SIGPROF])
}

/// In the masks of `/proc`.
pub(super) fn bit(signal: c_int) -> u64 {
    1 << (signal - 1)
}

/// Signals that the program waits for, as far as was known when a layer was built.
static CLAIMED: AtomicU64 = AtomicU64::new(0);

/// Notes which signals the program waits for by `sigwait` or a signalfd. They have no handler, but must not be taken.
pub(crate) fn note_claimed_signals() {
    CLAIMED.fetch_or(claimed(), Ordering::Relaxed);
}

/// The signals that a thread blocks, or that a signalfd reads. A mask with all real-time signals says nothing of any of
/// them: many programs block all signals, on all threads or on some.
fn claimed() -> u64 {
    let all =
        all_signals().filter(|signal| *signal != libc::SIGPROF).map(bit).fold(0, BitOr::bitor);
    let masks = blocked_masks().chain(signalfd_masks());
    masks.filter(|mask| mask & all != all).fold(0, BitOr::bitor)
}

/// More threads and files are not read.
const MAX_READ: usize = 4096;

fn blocked_masks() -> impl Iterator<Item = u64> {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().take(MAX_READ);
    tasks.flatten().filter_map(|task| {
        mask_in(&std::fs::read_to_string(task.path().join("status")).ok()?, "SigBlk:")
    })
}

fn signalfd_masks() -> impl Iterator<Item = u64> {
    let files = std::fs::read_dir("/proc/self/fd").into_iter().flatten().take(MAX_READ);
    let signalfds = files.flatten().filter(|file| {
        let target = std::fs::read_link(file.path()).unwrap_or_default();
        target.as_os_str() == "anon_inode:[signalfd]"
    });
    signalfds.filter_map(|file| {
        let path = std::path::Path::new("/proc/self/fdinfo").join(file.file_name());
        mask_in(&std::fs::read_to_string(path).ok()?, "sigmask:")
    })
}

fn is_free(action: &libc::sigaction, handler: Handler) -> bool {
    [libc::SIG_DFL, libc::SIG_IGN, handler as usize].contains(&action.sa_sigaction)
}

/// Whether a timer can send the signal: emulators of other processors reserve a few of the highest ones.
fn can_be_sent(signal: c_int) -> bool {
    match create_timer(signal, current_tid(), 0) {
        Ok(timer) => {
            _ = delete_timer(timer);
            true
        }
        // If no timer is available, another signal does not help.
        Err(errno) => errno != libc::EINVAL,
    }
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
        // On the alternate stack if the thread has one, as Rust's have: the handler must not overflow a deep stack.
        (*action_pointer).sa_flags = libc::SA_SIGINFO | libc::SA_RESTART | libc::SA_ONSTACK;
        // No other handler may interrupt this one, since alternate stacks are small, except for those of faults.
        (*action_pointer).sa_mask = all_but_faults();
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

/// Unblocks `signal` on the calling thread: programs that wait for signals block all of them on each thread.
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
    // SAFETY: fills a local set.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), signal);
        change_mask(how, &set.assume_init())
    }
}

/// Changes the calling thread's mask by a set of signals; returns the previous one.
pub(super) fn change_mask(how: c_int, set: &libc::sigset_t) -> libc::sigset_t {
    let mut before = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: reads and fills sets, and changes the calling thread's mask.
    unsafe {
        libc::pthread_sigmask(how, set, before.as_mut_ptr());
        before.assume_init()
    }
}

/// All signals that can be blocked. A full set excludes those that the C library uses internally.
fn all_but_faults() -> libc::sigset_t {
    let mut set = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: fills a local set.
    unsafe {
        libc::sigfillset(set.as_mut_ptr());
        for fault in FAULTS {
            libc::sigdelset(set.as_mut_ptr(), fault);
        }
        set.assume_init()
    }
}

/// Signals that a thread's own instructions raise. Blocked, they would kill the process without its handler.
const FAULTS: [c_int; 6] =
    [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP, libc::SIGSYS];

/// Runs `action` with all signals except faults blocked on the calling thread. Threads that it starts inherit the mask.
pub(crate) fn with_signals_blocked<R>(action: impl FnOnce() -> R) -> R {
    let before = change_mask(libc::SIG_BLOCK, &all_but_faults());
    let result = action();
    change_mask(libc::SIG_SETMASK, &before);
    result
}

pub(super) fn last_error() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}
