//! Signals of the program, which the layer's threads must leave to it, and limits that make the kernel send a signal.

use std::ffi::c_int;
use std::fs;
use std::mem::MaybeUninit;
use std::time::Duration;

use tracing_profiling::export::Memory;
use tracing_profiling::{Directory, Source};

use super::{Host, MS, in_child};
use crate::support::{PLENTY, burn};

const PROGRAM_SIGNALS: [c_int; 5] =
    [libc::SIGTERM, libc::SIGINT, libc::SIGUSR1, libc::SIGHUP, libc::SIGCHLD];
/// Signals that a thread causes itself.
const FAULTS: [c_int; 6] =
    [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGSYS];
const ROUNDS: usize = 20;

pub(super) fn set_of(signals: &[c_int]) -> libc::sigset_t {
    let mut set = MaybeUninit::uninit();
    // SAFETY: `set` is a local variable, and `sigemptyset` initializes it.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        for signal in signals {
            libc::sigaddset(set.as_mut_ptr(), *signal);
        }
        set.assume_init()
    }
}

/// Blocks the signals on the calling thread.
pub(super) fn block(signals: &[c_int]) {
    let set = set_of(signals);
    // SAFETY: `set` is a local variable.
    let result =
        unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) };
    assert_eq!(result, 0);
}

fn send(signal: c_int) {
    // SAFETY: the signal goes to this process, which handles it.
    assert_eq!(unsafe { libc::kill(libc::getpid(), signal) }, 0);
}

/// As in a program that blocks and waits for its signals only after it has made the layer.
fn with_each_source(act: impl Fn(c_int)) {
    for source in [Source::Perf, Source::Timer] {
        let host = Host::new(source, Memory::new());
        host.span(|| _ = burn(20 * MS));
        block(&PROGRAM_SIGNALS);
        for signal in PROGRAM_SIGNALS {
            for _ in 0..ROUNDS {
                act(signal);
            }
        }
        host.span(|| _ = burn(20 * MS));
        host.handle.shutdown(PLENTY).unwrap();
    }
}

#[test]
fn sigwait_receives_the_signals_of_the_program() {
    in_child(module_path!(), "sigwait_receives_the_signals_of_the_program", &[], || {
        with_each_source(|signal| {
            let wait_site = std::thread::spawn(move || {
                let (set, limit) = (set_of(&[signal]), libc::timespec { tv_sec: 60, tv_nsec: 0 });
                // SAFETY: both are local variables.
                unsafe {
                    libc::sigtimedwait(&raw const set, std::ptr::null_mut(), &raw const limit)
                }
            });
            std::thread::sleep(MS);
            send(signal);
            assert_eq!(wait_site.join().unwrap(), signal);
        });
    });
}

#[test]
fn a_signalfd_receives_the_signals_of_the_program() {
    in_child(module_path!(), "a_signalfd_receives_the_signals_of_the_program", &[], || {
        with_each_source(|signal| {
            let set = set_of(&[signal]);
            // SAFETY: `set` is a local variable.
            let file = unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC) };
            assert!(file >= 0);
            send(signal);
            let mut poll = libc::pollfd { fd: file, events: libc::POLLIN, revents: 0 };
            // SAFETY: `poll` is one local structure.
            assert_eq!(unsafe { libc::poll(&raw mut poll, 1, 60_000) }, 1, "the signal is lost");
            let mut info = MaybeUninit::<libc::signalfd_siginfo>::uninit();
            let size = size_of::<libc::signalfd_siginfo>();
            // SAFETY: `size` is the length of the structure.
            let read = unsafe { libc::read(file, info.as_mut_ptr().cast(), size) };
            assert_eq!(read, size as isize);
            // SAFETY: `read` has filled it.
            assert_eq!(unsafe { info.assume_init() }.ssi_signo, signal as u32);
            // SAFETY: `file` was opened above and is not used again.
            unsafe { libc::close(file) };
        });
    });
}

#[test]
fn blocked_signals_stay_pending() {
    in_child(module_path!(), "blocked_signals_stay_pending", &[], || {
        with_each_source(|signal| {
            send(signal);
            std::thread::sleep(Duration::from_micros(100));
            let (mut set, mut taken) = (set_of(&[]), 0);
            // SAFETY: all pointers are to local variables.
            unsafe {
                assert_eq!(libc::sigpending(&raw mut set), 0);
                assert_eq!(libc::sigismember(&raw const set, signal), 1);
                let one = set_of(&[signal]);
                libc::sigwait(&raw const one, &raw mut taken);
            }
            assert_eq!(taken, signal);
        });
    });
}

/// Checks all threads that the layer has in this build.
#[test]
fn no_thread_of_the_layer_takes_a_signal() {
    in_child(module_path!(), "no_thread_of_the_layer_takes_a_signal", &[], || {
        #[cfg(all(feature = "otlp-grpc", feature = "otlp-http"))]
        let exporter = tracing_profiling::OtlpExporter::builder()
            .endpoint("http://127.0.0.1:9")
            .build()
            .unwrap();
        #[cfg(not(all(feature = "otlp-grpc", feature = "otlp-http")))]
        let exporter = Memory::new();
        let host = Host::new(Source::Auto, exporter);
        host.span(|| _ = burn(20 * MS));
        _ = host.handle.flush(MS);
        let mut seen = 0;
        for task in fs::read_dir("/proc/self/task").unwrap() {
            let path = task.unwrap().path();
            let Ok(status) = fs::read_to_string(path.join("status")) else { continue };
            let field = |name: &str| {
                let line = status.lines().find_map(|line| line.strip_prefix(name));
                line.unwrap().trim().to_owned()
            };
            if !field("Name:").starts_with("profiling") && !field("Name:").starts_with("tokio") {
                continue;
            }
            seen += 1;
            let blocked = u64::from_str_radix(&field("SigBlk:"), 16).unwrap();
            // The numbers in between are reserved by the C library.
            for signal in (1..32).chain(libc::SIGRTMIN()..=libc::SIGRTMAX()) {
                let must_be =
                    !FAULTS.contains(&signal) && ![libc::SIGKILL, libc::SIGSTOP].contains(&signal);
                let is = blocked >> (signal - 1) & 1 == 1;
                assert_eq!(is, must_be, "signal {signal} of {}", field("Name:"));
            }
        }
        assert!(seen >= 2, "{seen}");
    });
}

/// `RUST_MIN_STACK` is as small as possible: the layer's threads must not use it for their stacks.
#[test]
fn threads_of_the_layer_set_their_own_stack_size() {
    let test = "threads_of_the_layer_set_their_own_stack_size";
    for bytes in ["16384", "65536"] {
        in_child(module_path!(), test, &[("RUST_MIN_STACK", bytes)], || {
            // The stack of the test thread is as small, so the work needs a thread with more.
            let thread = std::thread::Builder::new().stack_size(8 << 20);
            thread.spawn(one_profile_in_a_directory).unwrap().join().unwrap();
        });
    }
}

fn one_profile_in_a_directory() {
    let dir = tempfile::tempdir().unwrap();
    let directory = Directory::new(dir.path());
    let host = Host::new(Source::Auto, directory);
    host.span(|| deep(100));
    host.handle.flush(PLENTY).unwrap();
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 3);
}

#[inline(never)]
fn deep(depth: u32) {
    if depth == 0 {
        burn(100 * MS);
    } else {
        deep(depth - 1);
    }
    std::hint::black_box(depth);
}

#[test]
fn a_file_size_limit_does_not_end_the_process() {
    in_child(module_path!(), "a_file_size_limit_does_not_end_the_process", &[], || {
        let limit = libc::rlimit { rlim_cur: 1_000, rlim_max: 1_000 };
        // SAFETY: a plain structure, read by the call.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) }, 0);
        let dir = tempfile::tempdir().unwrap();
        let directory = Directory::new(dir.path());
        let host = Host::new(Source::Auto, directory);
        for _ in 0..3 {
            host.span(|| _ = burn(50 * MS));
            assert!(host.handle.flush(500 * MS).is_err(), "nothing can be stored");
        }
        // The first profile is written once its symbols are read.
        let start = std::time::Instant::now();
        while host.lines_with("could not be exported").is_empty() && start.elapsed() < PLENTY {
            std::thread::sleep(MS);
        }
        let warnings = host.lines_with("could not be exported");
        assert_eq!(warnings.len(), 1, "{warnings:?}");
        assert!(warnings[0].contains("ulimit -f"), "{warnings:?}");
        assert_eq!(host.handle.stats().spans.kept, 3);
        assert!(host.handle.shutdown(500 * MS).is_err());
        // The times of the spans are logged nonetheless.
        let start = std::time::Instant::now();
        while host.lines_with("kept `kept`").len() < 3 && start.elapsed() < PLENTY {
            std::thread::sleep(MS);
        }
        assert_eq!(host.lines_with("kept `kept`").len(), 3);
        // Checked only after the last retry, since a retry leaves an unfinished file while it runs.
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "incomplete files");
    });
}
