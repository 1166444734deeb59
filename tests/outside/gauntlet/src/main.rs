//! Does everything in turn, in one process, that has once crashed, bloated or misled a host program. Exits with 0 if
//! both the profiler and the program survive.

mod deep;

use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tracing::{Dispatch, info_span};
use tracing_profiling::export::Directory;
use tracing_profiling::{Builder, Handle, ProfilingLayer, Stats};
use tracing_subscriber::prelude::*;

const MS: Duration = Duration::from_millis(1);
const MIB: u64 = 1024 * 1024;
const PLENTY: Duration = Duration::from_secs(120);
/// Set in the copy whose debug information is in a separate file.
const COPY: &str = "GAUNTLET_COPY";

fn main() {
    let Some(copy) = std::env::var_os(COPY).map(PathBuf::from) else {
        let directory = tempfile::tempdir().unwrap();
        let copy = separate_debug_file(directory.path());
        let status = Command::new(&copy).env(COPY, &copy).current_dir(&directory).status().unwrap();
        drop(directory);
        assert!(status.success(), "the host was terminated: {status}");
        println!("the host survived");
        return;
    };
    let profiles = copy.with_file_name("profiles");
    let host = Host::new(|builder| builder.exporter(Directory::new(&profiles)));
    step("a recursion 1,000 deep, with 24 inlined functions in each frame", || recursion(&host));
    step("SIGTERM, received by sigwait in a thread created after the layer", sigterm);
    step("20,000 samples of different deep stacks", || different_stacks(&host));
    step("the debug file is truncated while profiles are built", || truncated(&host, &copy));
    step("RLIMIT_FSIZE of 1,000 bytes", || limited_files(&host));
    step("a C++ symbol that demangles to gigabytes", || demangled(&host));
    step("a store over its quota", || over_quota(&profiles.with_file_name("small")));
    host.handle.shutdown(PLENTY).unwrap();
    println!("{:#?}", host.handle.stats());
}

fn thread_cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is valid.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) }, 0);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn step(name: &str, action: impl FnOnce()) {
    println!("--- {name}");
    let start = Instant::now();
    action();
    println!("    survived, in {:.1?}", start.elapsed());
}

/// A copy of this program without debug information, which is in a file beside it.
fn separate_debug_file(directory: &Path) -> PathBuf {
    let program = std::env::current_exe().unwrap();
    let (copy, debug) = (directory.join("gauntlet"), directory.join("gauntlet.debug"));
    let run = |arguments: &[&std::ffi::OsStr]| {
        let status = Command::new("objcopy").args(arguments).status();
        assert!(status.expect("objcopy of binutils is installed").success());
    };
    run(&["--only-keep-debug".as_ref(), program.as_ref(), debug.as_ref()]);
    let mut link = std::ffi::OsString::from("--add-gnu-debuglink=");
    link.push(&debug);
    run(&["--strip-debug".as_ref(), &link, program.as_ref(), copy.as_ref()]);
    copy
}

/// A layer and its subscriber.
struct Host {
    handle: Handle,
    dispatch: Dispatch,
}

impl Host {
    fn new(set: impl FnOnce(Builder) -> Builder) -> Self {
        let builder = ProfilingLayer::builder()
            .rules("50ms".parse().unwrap())
            .rate(1_000)
            .stack_bytes(65_448)
            .profiles_per_minute(10_000);
        let layer = set(builder).build().unwrap();
        let handle = layer.handle();
        let log = tracing_subscriber::fmt::layer().without_time();
        let dispatch = Dispatch::new(tracing_subscriber::registry().with(log).with(layer));
        Self { handle, dispatch }
    }

    /// Runs the action in a span that is kept, and waits until its profile is stored.
    fn keep(&self, name: &'static str, action: impl FnOnce()) -> bool {
        tracing::dispatcher::with_default(&self.dispatch, || {
            info_span!("step", otel.name = name).in_scope(action);
        });
        self.handle.flush(PLENTY).is_ok()
    }

    fn stats(&self) -> Stats {
        self.handle.stats()
    }
}

fn recursion(host: &Host) {
    let before = host.stats().profiles.exported;
    let kept = host.keep("recursion", || {
        let start = Instant::now();
        while start.elapsed() < 800 * MS {
            deep::alternate(1_000, 7);
        }
    });
    assert!(kept && host.stats().profiles.exported > before);
}

fn sigterm() {
    let signals = unsafe {
        let mut signals = std::mem::zeroed();
        libc::sigemptyset(&mut signals);
        libc::sigaddset(&mut signals, libc::SIGTERM);
        assert_eq!(libc::pthread_sigmask(libc::SIG_BLOCK, &signals, std::ptr::null_mut()), 0);
        signals
    };
    let receiver = std::thread::spawn(move || {
        let mut taken = 0;
        assert_eq!(unsafe { libc::sigwait(&signals, &mut taken) }, 0);
        taken
    });
    for _ in 0..20 {
        std::thread::sleep(5 * MS);
        if receiver.is_finished() {
            break;
        }
        assert_eq!(unsafe { libc::kill(libc::getpid(), libc::SIGTERM) }, 0);
    }
    assert_eq!(receiver.join().unwrap(), libc::SIGTERM);
}

/// The resident memory of the process, and its peak since the last call, in bytes.
fn resident() -> (u64, u64) {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let field = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name)).unwrap();
        let kib: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
        kib * 1024
    };
    let found = (field("VmRSS:"), field("VmHWM:"));
    OpenOptions::new().write(true).open("/proc/self/clear_refs").unwrap().write_all(b"5").unwrap();
    found
}

fn different_stacks(_: &Host) {
    let directory = PathBuf::from("deep");
    let host = Host::new(|builder| {
        builder.exporter(Directory::new(&directory)).rate(10_000).cpu_budget(0).samples_per_profile(100_000)
    });
    // Warms up the memory that every profile needs.
    assert!(host.keep("warm", || _ = deep::spin(100 * MS)));
    let (before, _) = resident();
    let taken = || host.stats().samples.taken;
    let (first, mut number) = (taken(), 0_u64);
    let kept = host.keep("stacks", || {
        let start = Instant::now();
        // Timers tick less often than perf samples.
        while taken() - first < 20_000 && start.elapsed() < 100_000 * MS {
            number = number.wrapping_add(0x9E37_79B9_7F4A_7C15);
            deep::path(number, 0, 250);
        }
    });
    assert!(kept);
    let (_, peak) = resident();
    let (samples, added) = (taken() - first, peak.saturating_sub(before));
    println!("    {samples} samples, at most {} MiB more than before", added / MIB);
    assert!(added <= 96 * MIB, "{} MiB", added / MIB);
    host.handle.shutdown(PLENTY).unwrap();
}

fn truncated(host: &Host, copy: &Path) {
    let debug = copy.with_extension("debug");
    let whole = fs::read(&debug).unwrap();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut length = 0_u64;
            while !is_over.load(Ordering::Relaxed) {
                let file = OpenOptions::new().write(true).open(&debug).unwrap();
                length = (length + 7_777_777) % (whole.len() as u64);
                file.set_len(length).unwrap();
                std::thread::sleep(3 * MS);
                fs::write(&debug, &whole).unwrap();
                std::thread::sleep(3 * MS);
            }
        });
        for _ in 0..20 {
            assert!(host.keep("truncated", || _ = deep::spin(100 * MS)));
        }
        is_over.store(true, Ordering::Relaxed);
    });
}

fn limited_files(host: &Host) {
    let mut before = unsafe { std::mem::zeroed() };
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &mut before) }, 0);
    let limit = libc::rlimit { rlim_cur: 1_000, ..before };
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &limit) }, 0);
    tracing::dispatcher::with_default(&host.dispatch, || {
        info_span!("limited").in_scope(|| _ = deep::spin(200 * MS));
    });
    // No file can be written, so the flush fails.
    let is_stored = host.handle.flush(2_000 * MS).is_ok();
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &before) }, 0);
    assert!(!is_stored, "no file could be written");
    host.handle.flush(PLENTY).unwrap();
}

fn demangled(host: &Host) {
    let kept = host.keep("demangled", || _ = deep::bomb(300));
    assert!(kept);
}

fn over_quota(directory: &Path) {
    const QUOTA: u64 = 300 * 1024;
    let used = || -> (usize, u64) {
        let files: Vec<_> = fs::read_dir(directory).unwrap().map(|file| file.unwrap()).collect();
        (files.len(), files.iter().map(|file| file.metadata().unwrap().len()).sum())
    };
    let resource = tracing_profiling::resource_from_env();
    let host = Host::new(|builder| {
        let week = Duration::from_secs(7 * 24 * 60 * 60);
        builder.resource(resource).exporter(Directory::new(directory).with_quota(QUOTA, week))
    });
    for _ in 0..30 {
        assert!(host.keep("small", || _ = deep::spin(60 * MS)));
    }
    let (files, bytes) = used();
    assert!(files >= 3 && bytes <= QUOTA, "{files} files, {bytes} bytes");
    // A profile larger than the quota: the others stay. CPU time, since the number of samples decides how large it is.
    host.keep("large", || {
        let start = thread_cpu_time();
        let mut number = 1_u64;
        while thread_cpu_time() - start < 4_000 * MS {
            number = number.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(1);
            deep::path(number, 0, 200);
        }
    });
    let (left, bytes) = used();
    assert!(left >= 3 && bytes <= QUOTA, "{left} files of {files}, {bytes} bytes");
    assert_eq!(host.stats().profiles.dropped_export_failed, 1);
    _ = host.handle.shutdown(PLENTY);
}
