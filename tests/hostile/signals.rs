//! A program that uses signals itself, including the one that profilers use.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, setrlimit};
use tracing::info_span;

use crate::host::{Host, sampled};
use crate::support::{PLENTY, burn};

const MS: Duration = Duration::from_millis(1);

/// Calls of the program's handler, by the signal's sender.
static BY_RAISE: AtomicU64 = AtomicU64::new(0);
static BY_ITIMER: AtomicU64 = AtomicU64::new(0);
static UNEXPECTED: AtomicU64 = AtomicU64::new(0);

extern "C" fn handler(_: c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: with SA_SIGINFO, the kernel passes a valid `siginfo_t`.
    let counter = match unsafe { (*info).si_code } {
        libc::SI_TKILL | libc::SI_USER => &BY_RAISE,
        libc::SI_KERNEL => &BY_ITIMER,
        _ => &UNEXPECTED,
    };
    counter.fetch_add(1, Ordering::Relaxed);
}

/// Sets the program's disposition of SIGPROF.
fn set_disposition(disposition: libc::sighandler_t) {
    set_disposition_of(libc::SIGPROF, disposition);
}

fn set_disposition_of(signal: c_int, disposition: libc::sighandler_t) {
    // SAFETY: `disposition` is a constant, or a handler that only counts. The remaining fields of a `sigaction` may be
    // 0.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = disposition;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
        libc::sigemptyset(&raw mut action.sa_mask);
        assert_eq!(libc::sigaction(signal, &raw const action, ptr::null_mut()), 0);
    }
}

fn install_handler() {
    let handler: extern "C" fn(_, _, _) = handler;
    set_disposition(handler as libc::sighandler_t);
}

/// For every signal that a profiler might use.
fn install_all_handlers() {
    let handler: extern "C" fn(_, _, _) = handler;
    for signal in (libc::SIGRTMIN()..=libc::SIGRTMAX()).chain([libc::SIGPROF]) {
        set_disposition_of(signal, handler as libc::sighandler_t);
    }
}

/// Makes the kernel send SIGPROF once per `every` of the process's CPU time; never if that is 0.
fn set_itimer(every: Duration) {
    let every = libc::timeval { tv_sec: 0, tv_usec: every.as_micros().try_into().unwrap() };
    let value = libc::itimerval { it_interval: every, it_value: every };
    // SAFETY: the call reads a local variable.
    assert_eq!(unsafe { libc::setitimer(libc::ITIMER_PROF, &raw const value, ptr::null_mut()) }, 0);
}

fn print_counts(when: &str) {
    println!(
        "{when}: {BY_RAISE:?} by raise, {BY_ITIMER:?} by the itimer, {UNEXPECTED:?} unexpected"
    );
}

/// Raises signals on two threads, and asserts that each of them arrives.
fn assert_none_is_lost() {
    const EACH: u64 = 1_000;
    let before = BY_RAISE.load(Ordering::Relaxed);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..EACH {
                    info_span!("raises").in_scope(|| {
                        burn(Duration::from_micros(50));
                        signal_hook::low_level::raise(libc::SIGPROF).unwrap();
                        burn(Duration::from_micros(50));
                    });
                }
            });
        }
    });
    // A signal that a thread raises has been handled when `raise` returns.
    assert_eq!(BY_RAISE.load(Ordering::Relaxed), before + 2 * EACH);
}

/// The program used SIGPROF before the layer was made, so the layer must not.
pub(crate) fn handler_installed_first() {
    install_handler();
    sampled(|_| {
        set_itimer(10 * MS);
        assert_none_is_lost();
        let count = || BY_ITIMER.load(Ordering::Relaxed);
        let before = count();
        while count() == before {
            info_span!("waits for its timer").in_scope(|| burn(10 * MS));
        }
        set_itimer(Duration::ZERO);
        print_counts("at the end");
        assert_eq!(UNEXPECTED.load(Ordering::Relaxed), 0);
    });
}

/// No signal is free: no thread is sampled by a timer, and the program's handler gets all signals of the program.
pub(crate) fn every_handler_installed_first() {
    install_all_handlers();
    sampled(|_| {
        set_itimer(10 * MS);
        assert_none_is_lost();
        set_itimer(Duration::ZERO);
        print_counts("at the end");
        assert_eq!(UNEXPECTED.load(Ordering::Relaxed), 0);
    });
}

/// The same, but the layer was using a signal before, which the program takes over.
pub(crate) fn every_handler_installed_later() {
    sampled(|host| {
        install_all_handlers();
        wait_until_quiet();
        println!("threads are sampled: {}", host.is_sampling());
        let quiet = UNEXPECTED.load(Ordering::Relaxed);
        assert_none_is_lost();
        print_counts("at the end");
        assert_eq!(UNEXPECTED.load(Ordering::Relaxed), quiet);
    });
}

/// Waits until the program's handler is no longer called for signals that are not the program's.
fn wait_until_quiet() {
    let start = Instant::now();
    let unexpected = || UNEXPECTED.load(Ordering::Relaxed);
    // Measured in CPU time, so that a busy machine only prolongs it. It is long enough that the layer's check, once per
    // second, has run.
    loop {
        let before = unexpected();
        info_span!("is it quiet").in_scope(|| burn(300 * MS));
        if unexpected() == before {
            break;
        }
        assert!(start.elapsed() < PLENTY, "{} unexpected signals so far", unexpected());
    }
    print_counts(&format!("quiet after {:?}", start.elapsed()));
}

/// The program installs a SIGPROF handler while the layer may be using the signal. The layer must detect that and stop
/// using it: the handler is called for the layer's signals for some time, and then never again.
pub(crate) fn handler_installed_later() {
    sampled(|host| {
        install_handler();
        let unexpected = || UNEXPECTED.load(Ordering::Relaxed);
        wait_until_quiet();
        println!("threads are sampled: {}", host.is_sampling());
        let quiet = unexpected();
        set_itimer(10 * MS);
        assert_none_is_lost();
        set_itimer(Duration::ZERO);
        info_span!("still quiet").in_scope(|| burn(100 * MS));
        print_counts("at the end");
        assert_eq!(unexpected(), quiet);
    });
}

/// From then on, a signal would end the process.
pub(crate) fn reset_to_default() {
    sampled(|_| {
        set_disposition(libc::SIG_DFL);
        info_span!("without a handler").in_scope(|| burn(500 * MS));
    });
}

pub(crate) fn ignored() {
    sampled(|host| {
        set_disposition(libc::SIG_IGN);
        info_span!("ignores").in_scope(|| burn(500 * MS));
        println!("threads are sampled: {}", host.is_sampling());
    });
}

/// Blocks or unblocks every signal on the calling thread, as in a program with a dedicated signal thread.
fn block_all(how: c_int) {
    let mut all = MaybeUninit::uninit();
    // SAFETY: the first call initializes the set that the second one reads.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        assert_eq!(libc::pthread_sigmask(how, all.as_ptr(), ptr::null_mut()), 0);
    }
}

/// Blocks one signal on the calling thread.
pub(crate) fn block(signal: c_int) {
    let mut set = MaybeUninit::uninit();
    // SAFETY: the first call initializes the set that the others change and read.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), signal);
        assert_eq!(libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), ptr::null_mut()), 0);
    }
}

/// The signals that are pending for this thread, which blocks all of them.
fn pending_signals() -> Vec<c_int> {
    let mut all = MaybeUninit::uninit();
    let no_time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let mut found = Vec::new();
    loop {
        // SAFETY: the first call initializes the set that the second one reads.
        let signal = unsafe {
            libc::sigfillset(all.as_mut_ptr());
            libc::sigtimedwait(all.as_ptr(), ptr::null_mut(), &raw const no_time)
        };
        // Signals may keep coming, so some are enough.
        if signal < 0 || found.len() == 10 {
            return found;
        }
        found.push(signal);
    }
}

/// Threads that block all signals, before or after they are first sampled. The signals that are then pending are only
/// printed: they do not harm a program that does not ask for them.
pub(crate) fn all_blocked(_: &Host) {
    let thread = |first: bool| {
        move || {
            if first {
                block_all(libc::SIG_BLOCK);
            }
            for _ in 0..20 {
                info_span!("blocks").in_scope(|| burn(5 * MS));
                block_all(libc::SIG_BLOCK);
            }
            println!("blocked first: {first}; pending signals: {:?}", pending_signals());
            info_span!("unblocks").in_scope(|| {
                burn(20 * MS);
                block_all(libc::SIG_UNBLOCK);
                burn(20 * MS);
            });
        }
    };
    for first in [true, false] {
        std::thread::spawn(thread(first)).join().unwrap();
    }
}

/// The limit of pending signals is 0, and each timer needs one.
pub(crate) fn no_room_for_signals() {
    setrlimit(Resource::Sigpending, Rlimit { current: Some(0), maximum: Some(0) }).unwrap();
    sampled(|_| {
        info_span!("goes on").in_scope(|| burn(100 * MS));
    });
}
