//! The signal of timers: one that the program does not wait for, and that does not stop it in a debugger.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use seccompiler::{SeccompAction, apply_filter};
use tracing_profiling::Source;
use tracing_profiling::export::Memory;

use super::filters::program;
use super::signals::{block, set_of};
use super::{Host, MS, alone, in_child};
use crate::support::{PLENTY, burn};

/// The layer's first choice, if it is free.
fn highest() -> c_int {
    libc::SIGRTMAX() - 1
}

fn send(signal: c_int) {
    // SAFETY: the signal goes to this process, where all threads but sampled ones of a wrong layer block it.
    assert_eq!(unsafe { libc::kill(libc::getpid(), signal) }, 0);
}

/// Runs `action` while four threads are sampled.
fn beside_workers(host: &Host, action: impl FnOnce()) {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    host.span(|| _ = burn(2 * MS));
                }
            });
        }
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let start = Instant::now();
            while host.handle.stats().samples.taken == 0 {
                assert!(start.elapsed() < PLENTY);
                std::thread::sleep(MS);
            }
            action();
        }));
        over.store(true, Ordering::Relaxed);
        ended.unwrap();
    });
}

/// Reads one signal of `file`.
fn read_signal(file: c_int) -> u32 {
    let mut poll = libc::pollfd { fd: file, events: libc::POLLIN, revents: 0 };
    // SAFETY: `poll` is one local structure.
    assert_eq!(unsafe { libc::poll(&raw mut poll, 1, 20_000) }, 1, "the signal is lost");
    let mut info = MaybeUninit::<libc::signalfd_siginfo>::uninit();
    let size = size_of::<libc::signalfd_siginfo>();
    // SAFETY: `size` is the length of the structure, which the call fills.
    unsafe {
        assert_eq!(libc::read(file, info.as_mut_ptr().cast(), size), size as isize);
        info.assume_init().ssi_signo
    }
}

/// The program blocks signals of its own, before it starts threads, and reads them from a signalfd.
#[test]
fn a_signalfd_of_the_program_gets_each_signal() {
    in_child(module_path!(), "a_signalfd_of_the_program_gets_each_signal", &[], || {
        for own in [vec![highest()], (highest() - 4..=highest()).collect()] {
            alone(|| {
                block(&own);
                let set = set_of(&own);
                // SAFETY: `set` is a local variable.
                let file = unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC) };
                assert!(file >= 0);
                let host = Host::new(Source::Timer, Memory::new());
                beside_workers(&host, || {
                    for (number, signal) in (0..1_000).zip(own.iter().cycle()) {
                        send(*signal);
                        assert_eq!(read_signal(file), *signal as u32, "signal {number} of 1,000");
                    }
                });
            });
        }
    });
}

/// A signalfd is enough, if its signals are blocked with all others.
#[test]
fn a_signalfd_of_a_program_that_blocks_all_signals_gets_each_signal() {
    let test = "a_signalfd_of_a_program_that_blocks_all_signals_gets_each_signal";
    in_child(module_path!(), test, &[], || {
        let all: Vec<_> = (1..=libc::SIGRTMAX()).collect();
        block(&all);
        let set = set_of(&[highest()]);
        // SAFETY: `set` is a local variable.
        let file = unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC) };
        let host = Host::new(Source::Timer, Memory::new());
        // All real-time signals are blocked, and the threads are sampled nonetheless.
        beside_workers(&host, || {
            for number in 0..1_000 {
                send(highest());
                assert_eq!(read_signal(file), highest() as u32, "signal {number} of 1,000");
            }
        });
    });
}

/// One thread waits for a signal; it alone blocks it, as do those that it started.
#[test]
fn a_thread_that_waits_for_a_signal_gets_it() {
    in_child(module_path!(), "a_thread_that_waits_for_a_signal_gets_it", &[], || {
        let signal = highest();
        block(&[signal]);
        let host = Host::new(Source::Timer, Memory::new());
        beside_workers(&host, || {
            for _ in 0..1_000 {
                send(signal);
                let (set, limit) = (set_of(&[signal]), libc::timespec { tv_sec: 20, tv_nsec: 0 });
                // SAFETY: both are local variables.
                let taken = unsafe {
                    libc::sigtimedwait(&raw const set, std::ptr::null_mut(), &raw const limit)
                };
                assert_eq!(taken, signal);
            }
        });
    });
}

#[test]
fn the_signal_can_be_set() {
    in_child(module_path!(), "the_signal_can_be_set", &[], || {
        let number = libc::SIGRTMIN() + 3;
        alone(|| {
            let host =
                Host::with(Source::Timer, Memory::new(), |builder| builder.timer_signal(number));
            beside_workers(&host, || {});
            _ = host.handle.flush(PLENTY);
            let named = format!("handle SIG{number} nostop noprint pass");
            assert_eq!(host.lines_with(&named).len(), 1);
        });
        // Where the program handles it, or it is no signal for that.
        for taken in [number, libc::SIGUSR1, libc::SIGKILL] {
            alone(|| {
                extern "C" fn handler(_: c_int) {}
                let handler: extern "C" fn(_) = handler;
                // SAFETY: a function that does nothing.
                unsafe { libc::signal(taken, handler as libc::sighandler_t) };
                let host =
                    Host::with(Source::Timer, Memory::new(), |builder| builder.timer_signal(taken));
                host.span(|| _ = burn(20 * MS));
                _ = host.handle.flush(PLENTY);
                assert_eq!(host.handle.stats().samples.taken, 0);
                assert_eq!(host.lines_with("TRACING_PROFILING_SIGNAL").len(), 1);
            });
        }
    });
}

/// Attaches a process that continues this one at each stop, as `strace` does, and runs `action`. Returns how often
/// the signal of timers stopped it.
fn traced(action: impl FnOnce()) -> usize {
    // SAFETY: a page shared with the child.
    let count = unsafe {
        let (access, kind) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
        let page = libc::mmap(std::ptr::null_mut(), 4096, access, kind, -1, 0);
        assert_ne!(page, libc::MAP_FAILED);
        &*page.cast::<[AtomicUsize; 2]>()
    };
    let [attached, stops] = count;
    // SAFETY: this process has one thread, and its child only makes system calls.
    unsafe {
        let this = libc::getpid();
        libc::prctl(libc::PR_SET_PTRACER, libc::PR_SET_PTRACER_ANY);
        let tracer = libc::fork();
        if tracer == 0 {
            const OPTIONS: c_int = libc::PTRACE_O_TRACECLONE;
            let seized = libc::ptrace(libc::PTRACE_SEIZE, this, 0, OPTIONS);
            attached.store(if seized == 0 { 1 } else { 2 }, Ordering::SeqCst);
            let mut status = 0;
            loop {
                let thread = libc::waitpid(-1, &raw mut status, libc::__WALL);
                if thread < 0 {
                    libc::_exit(0);
                }
                if libc::WIFSTOPPED(status) {
                    let is_event = status >> 16 != 0;
                    let signal = if is_event { 0 } else { libc::WSTOPSIG(status) };
                    if signal == highest() {
                        stops.fetch_add(1, Ordering::SeqCst);
                    }
                    libc::ptrace(libc::PTRACE_CONT, thread, 0, signal);
                }
            }
        }
        while attached.load(Ordering::SeqCst) == 0 {
            libc::usleep(1_000);
        }
        assert_eq!(attached.load(Ordering::SeqCst), 1, "the tracer attached");
        action();
        libc::kill(tracer, libc::SIGKILL);
        libc::waitpid(tracer, std::ptr::null_mut(), 0);
    }
    stops.load(Ordering::SeqCst)
}

/// A debugger stops at each signal.
#[test]
fn with_auto_no_timer_runs_while_a_tracer_is_attached() {
    in_child(module_path!(), "with_auto_no_timer_runs_while_a_tracer_is_attached", &[], || {
        let refuse_perf = || {
            let errno = SeccompAction::Errno(libc::EPERM as u32);
            apply_filter(&program(&[libc::SYS_perf_event_open], errno)).unwrap();
        };
        for (source, is_sampled) in [(Source::Auto, false), (Source::Timer, true)] {
            alone(|| {
                refuse_perf();
                let stops = traced(|| {
                    let host = Host::new(source, Memory::new());
                    host.span(|| _ = burn(100 * MS));
                    _ = host.handle.flush(PLENTY);
                    let stats = host.handle.stats();
                    assert_eq!(stats.samples.taken > 0, is_sampled, "{source:?} {stats:?}");
                    assert_eq!(stats.threads.refused_traced > 0, !is_sampled);
                    let said = host.lines_with("a debugger or another tracer is attached");
                    assert_eq!(said.len(), usize::from(!is_sampled));
                    _ = host.handle.shutdown(PLENTY);
                });
                assert_eq!(stops > 0, is_sampled, "{source:?}: {stops}");
            });
        }
        // One that attaches and leaves later is noticed within a second or two.
        alone(|| {
            refuse_perf();
            let host = Host::new(Source::Auto, Memory::new());
            host.span(|| _ = burn(100 * MS));
            let sampled = |is_sampled: bool| {
                let start = Instant::now();
                loop {
                    assert!(start.elapsed() < PLENTY, "{is_sampled} {:?}", host.handle.stats());
                    _ = host.handle.flush(PLENTY);
                    let before = host.handle.stats().samples.taken;
                    host.span(|| _ = burn(100 * MS));
                    _ = host.handle.flush(PLENTY);
                    if (host.handle.stats().samples.taken > before) == is_sampled {
                        break;
                    }
                }
            };
            sampled(true);
            traced(|| sampled(false));
            sampled(true);
        });
    });
}
