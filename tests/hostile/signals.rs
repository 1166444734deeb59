//! A program with signals of its own, among them the one that profilers use.

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

/// Calls of the program's handler, by who sent the signal.
static BY_RAISE: AtomicU64 = AtomicU64::new(0);
static BY_ITIMER: AtomicU64 = AtomicU64::new(0);
static FOREIGN: AtomicU64 = AtomicU64::new(0);

extern "C" fn handler(_: c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel gives a handler with SA_SIGINFO a whole one.
    let counter = match unsafe { (*info).si_code } {
        libc::SI_TKILL | libc::SI_USER => &BY_RAISE,
        libc::SI_KERNEL => &BY_ITIMER,
        _ => &FOREIGN,
    };
    counter.fetch_add(1, Ordering::Relaxed);
}

/// What the program does with SIGPROF from now on.
fn dispose(what: libc::sighandler_t) {
    dispose_of(libc::SIGPROF, what);
}

fn dispose_of(signal: c_int, what: libc::sighandler_t) {
    // SAFETY: a handler that does nothing but count, or a constant; the rest of a `sigaction` may
    // be 0.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = what;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
        libc::sigemptyset(&raw mut action.sa_mask);
        assert_eq!(libc::sigaction(signal, &raw const action, ptr::null_mut()), 0);
    }
}

fn install_handler() {
    let handler: extern "C" fn(_, _, _) = handler;
    dispose(handler as libc::sighandler_t);
}

/// For each signal that a profiler could think of.
fn install_all_handlers() {
    let handler: extern "C" fn(_, _, _) = handler;
    for signal in (libc::SIGRTMIN()..=libc::SIGRTMAX()).chain([libc::SIGPROF]) {
        dispose_of(signal, handler as libc::sighandler_t);
    }
}

/// Has the kernel send SIGPROF each so often of the process's CPU time; never if that is 0.
fn set_itimer(every: Duration) {
    let every = libc::timeval { tv_sec: 0, tv_usec: every.as_micros().try_into().unwrap() };
    let value = libc::itimerval { it_interval: every, it_value: every };
    // SAFETY: a structure of ours, which the call reads.
    assert_eq!(unsafe { libc::setitimer(libc::ITIMER_PROF, &raw const value, ptr::null_mut()) }, 0);
}

fn print_counts(when: &str) {
    println!("{when}: {BY_RAISE:?} by raise, {BY_ITIMER:?} by the itimer, {FOREIGN:?} foreign");
}

/// Raises signals on two threads, and holds that each of them arrives.
fn none_is_lost() {
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

/// The program had SIGPROF before there was a layer: it is the program's.
pub(crate) fn handler_installed_first() {
    install_handler();
    sampled(|_| {
        set_itimer(10 * MS);
        none_is_lost();
        let count = || BY_ITIMER.load(Ordering::Relaxed);
        let before = count();
        while count() == before {
            info_span!("waits for its timer").in_scope(|| burn(10 * MS));
        }
        set_itimer(Duration::ZERO);
        print_counts("at the end");
        assert_eq!(FOREIGN.load(Ordering::Relaxed), 0);
    });
}

/// No signal is left: no thread is sampled by a timer, and the program's handler has all that are the program's.
pub(crate) fn every_handler_installed_first() {
    install_all_handlers();
    sampled(|_| {
        set_itimer(10 * MS);
        none_is_lost();
        set_itimer(Duration::ZERO);
        print_counts("at the end");
        assert_eq!(FOREIGN.load(Ordering::Relaxed), 0);
    });
}

/// The same, but the layer had a signal before: it is taken from it.
pub(crate) fn every_handler_installed_later() {
    sampled(|host| {
        install_all_handlers();
        until_it_is_quiet();
        println!("threads are sampled: {}", host.is_sampling());
        let quiet = FOREIGN.load(Ordering::Relaxed);
        none_is_lost();
        print_counts("at the end");
        assert_eq!(FOREIGN.load(Ordering::Relaxed), quiet);
    });
}

/// Until the program's handler is called for nothing that is not its own.
fn until_it_is_quiet() {
    let start = Instant::now();
    let foreign = || FOREIGN.load(Ordering::Relaxed);
    // Of the program's CPU time: a busy machine makes it longer, and nothing else. And long enough
    // for one second to pass, in which the layer looks.
    loop {
        let before = foreign();
        info_span!("is it quiet").in_scope(|| burn(300 * MS));
        if foreign() == before {
            break;
        }
        assert!(start.elapsed() < PLENTY, "{} foreign signals so far", foreign());
    }
    print_counts(&format!("quiet after {:?}", start.elapsed()));
}

/// The program takes SIGPROF when the layer may be using it. The layer must see that and go: the
/// handler is called for signals that are not its own for some time, and then never again.
pub(crate) fn handler_installed_later() {
    sampled(|host| {
        install_handler();
        let foreign = || FOREIGN.load(Ordering::Relaxed);
        until_it_is_quiet();
        println!("threads are sampled: {}", host.is_sampling());
        let quiet = foreign();
        set_itimer(10 * MS);
        none_is_lost();
        set_itimer(Duration::ZERO);
        info_span!("still quiet").in_scope(|| burn(100 * MS));
        print_counts("at the end");
        assert_eq!(foreign(), quiet);
    });
}

/// A signal that comes now ends the process.
pub(crate) fn reset_to_default() {
    sampled(|_| {
        dispose(libc::SIG_DFL);
        info_span!("without a handler").in_scope(|| burn(500 * MS));
    });
}

pub(crate) fn ignored() {
    sampled(|host| {
        dispose(libc::SIG_IGN);
        info_span!("ignores").in_scope(|| burn(500 * MS));
        println!("threads are sampled: {}", host.is_sampling());
    });
}

/// Blocks every signal on the calling thread, as a program does that has a thread for signals.
fn block_all(how: c_int) {
    let mut all = MaybeUninit::uninit();
    // SAFETY: the first call makes the set that the second one reads.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        assert_eq!(libc::pthread_sigmask(how, all.as_ptr(), ptr::null_mut()), 0);
    }
}

/// Blocks one on the calling thread.
pub(crate) fn block(signal: c_int) {
    let mut set = MaybeUninit::uninit();
    // SAFETY: the first call makes the set that the others change and read.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), signal);
        assert_eq!(libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), ptr::null_mut()), 0);
    }
}

/// Signals that wait for this thread, which blocks all of them.
fn waiting_signals() -> Vec<c_int> {
    let mut all = MaybeUninit::uninit();
    let no_time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let mut found = Vec::new();
    loop {
        // SAFETY: the first call makes the set that the second one reads.
        let signal = unsafe {
            libc::sigfillset(all.as_mut_ptr());
            libc::sigtimedwait(all.as_ptr(), ptr::null_mut(), &raw const no_time)
        };
        // Where there are ever more of them, some are enough.
        if signal < 0 || found.len() == 10 {
            return found;
        }
        found.push(signal);
    }
}

/// Threads that block all signals, before they are first sampled or after that. What then waits for
/// them is only printed: it does no harm to a program that does not ask for it.
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
            println!("blocked first: {first}; waiting signals: {:?}", waiting_signals());
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

/// The process may have no more signals in a queue, of which each timer needs one.
pub(crate) fn no_room_for_signals() {
    setrlimit(Resource::Sigpending, Rlimit { current: Some(0), maximum: Some(0) }).unwrap();
    sampled(|_| {
        info_span!("goes on").in_scope(|| burn(100 * MS));
    });
}
