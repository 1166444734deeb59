//! What the layer does to its process. Each test that changes or counts resources of the process runs in a process of
//! its own.

#![cfg(target_os = "linux")]
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stdout,
    unsafe_code,
    reason = "a test"
)]

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use opentelemetry_proto::tonic::profiles::v1development::ProfilesData;
use prost::Message as _;
use support::Nanos as _;
use support::{Burning, HAS_STACKS, PLENTY, Setup, burn, has_perf, is_child, points_in, run_child};
use tracing::{Dispatch, info_span};
use tracing_profiling::export::Memory;
use tracing_profiling::{Directory, Handle, ProfilingLayer, Source};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::prelude::*;

const MS: Duration = Duration::from_millis(1);

/// Declares a test whose body runs in a process of its own.
macro_rules! in_child {
    ($(#[$attribute:meta])* fn $name:ident() $body:block) => {
        $(#[$attribute])*
        #[test]
        fn $name() {
            if is_child(stringify!($name)) {
                let body = || $body;
                body();
                println!("child is done");
                return;
            }
            let output = run_child(stringify!($name), &[]);
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(
                output.status.success() && text.contains("child is done"),
                "{text}\n{}",
                String::from_utf8_lossy(&output.stderr)
            );
        }
    };
}

/// Threads, files and caught signals of this process.
#[derive(Debug, PartialEq, Eq)]
struct Belongings {
    threads: usize,
    files: usize,
    caught_signals: String,
}

impl Belongings {
    fn now() -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let caught = status.lines().find(|line| line.starts_with("SigCgt:")).unwrap();
        Self {
            threads: fs::read_dir("/proc/self/task").unwrap().count(),
            files: fs::read_dir("/proc/self/fd").unwrap().count(),
            caught_signals: caught.to_owned(),
        }
    }
}

/// The number of mapped perf rings.
fn ring_mappings() -> usize {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains("[perf_event]")).count()
}

in_child! {
    fn off_creates_no_threads_files_or_signal_handlers() {
        // SAFETY: the child has no other thread that could read the environment.
        unsafe { std::env::set_var("TRACING_PROFILING", "off") };
        let before = Belongings::now();
        let layer = ProfilingLayer::from_env().unwrap();
        let handle = layer.handle();
        let dispatch = Dispatch::new(tracing_subscriber::registry().with(layer));
        tracing::dispatcher::with_default(&dispatch, || {
            let _span = info_span!("a span").entered();
            tracing::error!("an error");
            burn(10 * MS);
            assert_eq!(Belongings::now(), before);
            assert_eq!(ring_mappings(), 0);
        });
        handle.flush(PLENTY).unwrap();
        handle.shutdown(PLENTY).unwrap();
        assert_eq!(handle.stats(), tracing_profiling::Stats::default());
        assert_eq!(Belongings::now(), before);
    }
}

in_child! {
    fn where_perf_is_allowed_no_signal_handler_is_installed() {
        if !has_perf() {
            return;
        }
        let before = Belongings::now().caught_signals;
        let setup = Setup::new("0ms");
        setup.run(|| info_span!("a span").in_scope(|| burn(10 * MS)));
        assert_eq!(Belongings::now().caught_signals, before);
    }
}

in_child! {
    fn shutdown_releases_everything() {
        prime_timers();
        let before = Belongings::now();
        let setup = Setup::new("0ms");
        setup.run(|| info_span!("a span").in_scope(|| burn(10 * MS)));
        setup.handle.shutdown(PLENTY).unwrap();
        wait_until(|| Belongings::now() == before && ring_mappings() == 0);
    }
}

/// The handler of the timer signal stays installed once a timer was used, so this installs it first.
fn prime_timers() {
    let setup = Setup::with("0ms", |builder| builder.source(Source::Timer));
    setup.run(|| info_span!("a span").in_scope(|| burn(10 * MS)));
    setup.handle.shutdown(PLENTY).unwrap();
    // The layer's threads end shortly after the shutdown.
    wait_until(|| fs::read_dir("/proc/self/task").unwrap().count() <= 2);
}

fn wait_until(is_so: impl Fn() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PLENTY, "{:?}, {} rings", Belongings::now(), ring_mappings());
        std::thread::sleep(5 * MS);
    }
}

in_child! {
    fn ten_thousand_short_threads_leak_nothing() {
        prime_timers();
        let setup = Setup::new("1h");
        let before = Belongings::now();
        for _ in 0..1_250 {
            std::thread::scope(|scope| {
                for _ in 0..8 {
                    scope.spawn(|| {
                        let _default = tracing::dispatcher::set_default(&setup.dispatch);
                        info_span!("short").in_scope(|| burn(Duration::from_micros(20)));
                    });
                }
            });
        }
        // Timers are visible from outside only through the statistics.
        let is_sampled = || setup.handle.stats().threads.sampled > 0;
        wait_until(|| Belongings::now() == before && ring_mappings() == 0 && !is_sampled());
        assert_eq!(setup.handle.stats().sampling.records_malformed, 0);
    }
}

in_child! {
    fn more_threads_than_may_be_sampled_are_counted_and_timed() {
        let setup = Setup::new("0ms");
        // File descriptors for only a few sampled threads.
        let limit = libc::rlimit { rlim_cur: 256, rlim_max: 256 };
        // SAFETY: a plain structure, read by the call.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
        let limited = Setup::new("0ms");
        drop(setup);
        let barrier = std::sync::Barrier::new(64);
        std::thread::scope(|scope| {
            for _ in 0..64 {
                scope.spawn(|| {
                    let _default = tracing::dispatcher::set_default(&limited.dispatch);
                    let span = info_span!("one of many").entered();
                    barrier.wait();
                    burn(MS);
                    drop(span);
                });
            }
        });
        limited.flush();
        let stats = limited.handle.stats();
        if has_perf() {
            assert!(stats.threads.refused_open_files > 0, "{stats:?}");
        }
        assert_eq!(stats.spans.kept, 64);
        for kept in limited.kept() {
            assert_eq!(kept.spans[0].times().on_cpu().ns() > 0, HAS_STACKS);
        }
    }
}

/// A layer whose log messages go to `lines`.
fn with_lines(source: Source, lines: &Lines, memory: &Memory) -> (Handle, Dispatch) {
    let layer = ProfilingLayer::builder()
        .rules("0ms".parse().unwrap())
        .source(source)
        .exporter(memory.clone())
        .build()
        .unwrap();
    let handle = layer.handle();
    let dispatch = Dispatch::new(tracing_subscriber::registry().with(lines.clone()).with(layer));
    (handle, dispatch)
}

#[test]
fn kept_spans_without_a_log_line_are_counted_and_logged_together() {
    let lines = Lines::default();
    let layer = ProfilingLayer::builder()
        .rules("error".parse().unwrap())
        .profiles_per_minute(3)
        .exporter(Memory::new())
        .build()
        .unwrap();
    let handle = layer.handle();
    let dispatch = Dispatch::new(tracing_subscriber::registry().with(lines.clone()).with(layer));
    tracing::dispatcher::with_default(&dispatch, || {
        for _ in 0..10 {
            info_span!("failing").in_scope(|| tracing::error!("an error"));
        }
    });
    handle.flush(PLENTY).unwrap();
    let stats = handle.stats();
    assert_eq!((stats.spans.kept, stats.spans.kept_unreported), (10, 7));
    let lines = lines.0.lock().unwrap();
    let count = |text| lines.iter().filter(|line| line.contains(text)).count();
    assert_eq!((count("kept `failing`"), count("kept 7 more spans")), (3, 1), "{lines:?}");
}

in_child! {
    #[cfg_attr(tracing_profiling_unsupported, ignore = "there is no perf to refuse")]
    fn where_perf_is_refused_timers_are_used_and_it_is_logged_once() {
        refuse_perf();
        let lines = Lines::default();
        let memory = Memory::new();
        let (handle, dispatch) = with_lines(Source::Auto, &lines, &memory);
        // Read while the span is open, because the thread is disarmed afterwards.
        let mut open = handle.stats();
        for _ in 0..3 {
            tracing::dispatcher::with_default(&dispatch, || {
                info_span!("busy").in_scope(|| {
                    for _ in 0..100 {
                        burn(50 * MS);
                        open = handle.stats();
                        if open.threads.sampled_by_timer == 1 {
                            break;
                        }
                    }
                });
            });
        }
        assert_eq!((open.threads.sampled, open.threads.sampled_by_timer), (1, 1), "{open:?}");
        handle.flush(PLENTY).unwrap();
        assert_eq!(memory.profiles().len(), 3);
        assert!(memory.profiles().iter().all(|profile| points_in(profile, "burn") > 0));
        let lines = lines.0.lock().unwrap();
        let logged: Vec<_> = lines.iter().filter(|line| line.contains("source ")).collect();
        assert_eq!(logged.len(), 1, "{lines:#?}");
        for part in ["source timer: ", "in the kernel", "CAP_PERFMON"] {
            let found = logged[0].contains(part) || part == "CAP_PERFMON" && logged[0].contains("PERFMON");
            assert!(found, "{part}: {}", logged[0]);
        }
        let stats = handle.stats();
        let covered = stats.share_covered();
        assert!(covered > 0.0 && covered <= 1.0, "{covered}: {stats:?}");

        // The thread's own CPU clock, read inside each span and around it.
        let setup = Setup::new("0ms");
        let mut inside = Vec::new();
        let mut around = Vec::new();
        setup.run(|| {
            for work in [|| _ = burn(50 * MS), || std::thread::sleep(50 * MS)] {
                let before = thread_cpu_ns();
                let span = info_span!("span").entered();
                let start = thread_cpu_ns();
                work();
                inside.push(thread_cpu_ns() - start);
                drop(span);
                around.push(thread_cpu_ns() - before);
            }
        });
        let kept = setup.kept();
        assert_eq!(kept.len(), 2);
        for (n, kept) in kept.iter().enumerate() {
            let account = *kept.spans[0].times();
            assert!(account.on_cpu().ns() + account.on_cpu_error().ns() >= inside[n], "{account:?}");
            assert!(account.on_cpu().ns() <= around[n] + account.on_cpu_error().ns(), "{account:?}");
            let parts = account.on_cpu().ns() + account.off_cpu().ns() + account.idle().ns();
            assert!(parts.abs_diff(account.wall().ns()) < 1_000, "{account:?}");
        }
        let asleep = *kept[1].spans[0].times();
        assert!(asleep.on_cpu_error().ns() < asleep.wall().ns() / 10, "{asleep:?}");
    }
}

in_child! {
    #[cfg_attr(tracing_profiling_unsupported, ignore = "there is no perf to refuse")]
    fn without_any_source_there_are_times_and_no_profiles() {
        refuse_perf();
        for (source, text) in [
            (Source::Perf, "perf_event_open is refused"),
            (Source::None, "source none, as configured"),
        ] {
            let (lines, memory) = (Lines::default(), Memory::new());
            let (handle, dispatch) = with_lines(source, &lines, &memory);
            tracing::dispatcher::with_default(&dispatch, || {
                info_span!("busy").in_scope(|| burn(50 * MS));
            });
            handle.flush(PLENTY).unwrap();
            assert!(memory.profiles().is_empty());
            let lines = lines.0.lock().unwrap();
            let count = lines.iter().filter(|line| line.contains(text)).count();
            assert_eq!(count, 1, "{lines:#?}");
            let no_profile = "no profile: sampling is unavailable";
            assert!(lines.iter().any(|line| line.contains(no_profile)), "{lines:#?}");
            let stats = handle.stats();
            assert_eq!((stats.threads.sampled, stats.threads.unsampled), (0, 1), "{stats:?}");
        }
    }
}

fn thread_cpu_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a local variable, which the call fills.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) }, 0);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Makes `perf_event_open` fail with `EPERM`, as the default filter of containers does.
fn refuse_perf() {
    use seccompiler::{SeccompAction, SeccompFilter, apply_filter};
    let rules = BTreeMap::from([(libc::SYS_perf_event_open, Vec::new())]);
    let filter = SeccompFilter::new(
        rules,
        SeccompAction::Allow,
        SeccompAction::Errno(libc::EPERM as u32),
        std::env::consts::ARCH.try_into().unwrap(),
    );
    let program: seccompiler::BpfProgram = filter.unwrap().try_into().unwrap();
    apply_filter(&program).unwrap();
}

/// A layer that collects the messages of the layer's own events.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<String>>>);

impl<S: tracing::Subscriber> Layer<S> for Lines {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        struct Message(String);
        impl tracing::field::Visit for Message {
            fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                if field.name() == "message" {
                    self.0 = format!("{value:?}");
                }
            }
        }
        if event.metadata().target() == "tracing_profiling" {
            let mut message = Message(String::new());
            event.record(&mut message);
            self.0.lock().unwrap().push(message.0);
        }
    }
}

in_child! {
    fn a_store_that_cannot_be_written_logs_one_warning() {
        let lines = Lines::default();
        let file = tempfile::NamedTempFile::new().unwrap();
        let layer = ProfilingLayer::builder()
            .rules("0ms".parse().unwrap())
            .exporter(Directory::new(file.path().join("below a file")))
            .build()
            .unwrap();
        let handle = layer.handle();
        let dispatch =
            Dispatch::new(tracing_subscriber::registry().with(lines.clone()).with(layer));
        for _ in 0..3 {
            tracing::dispatcher::with_default(&dispatch, || {
                info_span!("busy").in_scope(|| burn(50 * MS));
            });
            handle.flush(PLENTY).unwrap();
        }
        let stats = handle.stats();
        if !HAS_STACKS {
            assert_eq!(stats.spans.no_profile_no_samples, 3);
            return;
        }
        assert_eq!(stats.spans.no_profile_exporter_fails, 3);
        let lines = lines.0.lock().unwrap();
        let warnings: Vec<_> = lines.iter().filter(|line| line.contains("cannot write")).collect();
        assert_eq!(warnings.len(), 1, "{lines:#?}");
        assert!(warnings[0].contains("TRACING_PROFILING_DIR"));
    }
}

in_child! {
    fn a_forked_child_can_use_spans() {
        let setup = Setup::new("0ms");
        let mut statuses = Vec::new();
        setup.run(|| {
            let _outer = info_span!("outer").entered();
            burn(20 * MS);
            for _ in 0..20 {
                // SAFETY: the child runs only code of this test. It uses no lock that another thread of the parent
                // could hold except the allocator's, which glibc handles, and ends with `_exit`.
                match unsafe { libc::fork() } {
                    0 => {
                        for _ in 0..100 {
                            let span = info_span!("in the child").entered();
                            tracing::error!("an error there");
                            drop(span);
                        }
                        // Also on a new thread.
                        let other = std::thread::spawn(|| info_span!("other").in_scope(|| ()));
                        let status = i32::from(other.join().is_err());
                        // SAFETY: ends the process immediately.
                        unsafe { libc::_exit(status) };
                    }
                    child => {
                        let mut status = 0;
                        // SAFETY: waits for a child of this process; the pointer is to a local variable.
                        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
                        statuses.push(status);
                    }
                }
            }
        });
        assert!(statuses.iter().all(|status| *status == 0), "{statuses:?}");
        assert_eq!(setup.kept_names(), [["outer"]]);
        if HAS_STACKS {
            assert!(points_in(&setup.profiles()[0], "burn") > 0);
        }
    }
}

in_child! {
    fn a_layer_made_in_a_forked_child_works_there() {
        let outer = Setup::new("0ms|hung=off");
        let status = outer.run(|| {
            let _outer = info_span!("outer").entered();
            burn(20 * MS);
            // SAFETY: as above. The test checks that the locks of the layer's threads do no harm.
            let child = unsafe { libc::fork() };
            if child == 0 {
                let works = std::panic::catch_unwind(|| {
                    let setup = Setup::new("0ms");
                    setup.run(|| info_span!("in the child").in_scope(|| burn(60 * MS)));
                    assert_eq!(setup.kept_names(), [["in the child"]]);
                    if HAS_STACKS {
                        assert!(points_in(&setup.profiles()[0], "burn") > 0);
                    }
                });
                // SAFETY: ends the process immediately.
                unsafe { libc::_exit(i32::from(works.is_err())) };
            }
            let mut status = 0;
            // SAFETY: waits for a child of this process; the pointer is to a local variable.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            status
        });
        assert_eq!(status, 0);
        assert_eq!(outer.kept_names(), [["outer"]]);
    }
}

in_child! {
    fn a_library_that_is_loaded_later_is_found() {
        let setup = Setup::new("0ms");
        // A first profile, so that the layer has already read the list of modules.
        setup.run(|| info_span!("before").in_scope(|| burn(30 * MS)));
        let directory = tempfile::tempdir().unwrap();
        let library = build_library(directory.path());
        // SAFETY: built by this test; it runs no code when it is loaded.
        let library = unsafe { libloading::Library::new(library) }.unwrap();
        // SAFETY: the function has this signature, see below.
        let burn_there: libloading::Symbol<'_, unsafe extern "C" fn(u64) -> u64> =
            unsafe { library.get(b"burn_in_the_library") }.unwrap();
        setup.run(|| {
            info_span!("after").in_scope(|| {
                let burning = Burning::new(100 * MS);
                while burning.goes_on() {
                    // SAFETY: pure arithmetic.
                    std::hint::black_box(unsafe { burn_there(100_000) });
                }
            });
        });
        if !HAS_STACKS {
            return;
        }
        let profile = &setup.profiles()[1];
        assert!(points_in(profile, "burn_in_the_library") > 0);
        assert_eq!(support::points_with_remark(profile), 0, "all stacks are complete");
    }
}

/// As libfaketime does: the program's clocks are five days behind. The kernel's records are not.
#[test]
#[cfg_attr(tracing_profiling_unsupported, ignore = "there are no waits")]
fn a_preloaded_library_with_another_time_loses_no_wait() {
    const TEST: &str = "a_preloaded_library_with_another_time_loses_no_wait";
    if is_child(TEST) {
        // SAFETY: fills a local variable.
        let now = |get: &dyn Fn(*mut libc::timespec) -> libc::c_long| unsafe {
            let mut time: libc::timespec = std::mem::zeroed();
            assert_eq!(get(&raw mut time), 0);
            time.tv_sec
        };
        let clock = libc::CLOCK_MONOTONIC_RAW;
        // SAFETY: as above.
        let real = now(&|time| unsafe { libc::syscall(libc::SYS_clock_gettime, clock, time) });
        // SAFETY: as above.
        let other = now(&|time| unsafe { libc::clock_gettime(clock, time).into() });
        assert!(real - other > 400_000, "the library is loaded");
        let sources = [Source::Perf, Source::Timer].into_iter();
        for source in sources.filter(|source| *source == Source::Timer || has_perf()) {
            let setup = Setup::with("0ms", |builder| builder.source(source));
            // The collector may get no CPU during a wait.
            let is_captured = [100, 400, 1_600, 6_400].into_iter().any(|time| {
                let start = Instant::now();
                setup.run(|| {
                    info_span!("work").in_scope(|| {
                        burn(20 * MS);
                        std::thread::sleep(time * MS);
                    });
                });
                let took = start.elapsed();
                let profile = setup.profiles().pop().unwrap();
                assert!(profile.duration() <= took, "{source:?}: {took:?} {profile:?}");
                let account = *setup.kept().pop().unwrap().spans[0].times();
                assert!(account.off_cpu() >= time * MS - MS, "{source:?}: {account:?}");
                profile.wait_count() > 0
            });
            assert!(is_captured, "{source:?}");
        }
        println!("child is done");
        return;
    }
    if cfg!(target_env = "musl") {
        println!("a static program loads no library");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let code = "#define _GNU_SOURCE
                #include <time.h>
                #include <unistd.h>
                #include <sys/syscall.h>
                int clock_gettime(clockid_t clock, struct timespec *time) {
                    long result = syscall(SYS_clock_gettime, clock, time);
                    if (clock != CLOCK_PROCESS_CPUTIME_ID && clock != CLOCK_THREAD_CPUTIME_ID && clock >= 0)
                        time->tv_sec -= 5 * 24 * 60 * 60;
                    return result;
                }";
    let library = compile_library(directory.path(), "other_time", code);
    let output = run_child(TEST, &[("LD_PRELOAD", library.to_str().unwrap())]);
    let texts = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    let text = texts.concat();
    assert!(output.status.success() && text.contains("child is done"), "{text}");
}

fn build_library(directory: &Path) -> PathBuf {
    let code = "unsigned long burn_in_the_library(unsigned long rounds) {
                    volatile unsigned long x = rounds;
                    for (unsigned long i = 0; i < rounds; i++) x = (x ^ i) * 3 % 1000003;
                    return x;
                }";
    compile_library(directory, "late", code)
}

/// Uses the C compiler, which linking Rust programs needs anyway.
fn compile_library(directory: &Path, name: &str, code: &str) -> PathBuf {
    let source = directory.join(format!("{name}.c"));
    fs::write(&source, code).unwrap();
    let library = directory.join(format!("lib{name}.so"));
    let built = Command::new("cc")
        .args(["-shared", "-fPIC", "-O2", "-g", "-o"])
        .args([&library, &source])
        .status()
        .unwrap();
    assert!(built.success());
    library
}

/// Tests a span that is kept right before the process ends: for each way to end, the child writes to a directory.
/// Returns the child's exit code and the names of the files.
fn end_of_process(test: &str, end: impl FnOnce()) -> Option<(Option<i32>, Vec<String>)> {
    if is_child(test) {
        let directory = std::env::var_os("DIRECTORY").unwrap();
        let resource = tracing_profiling::resource_from_env();
        let layer = ProfilingLayer::builder()
            .rules("0ms".parse().unwrap())
            .resource(resource)
            .exporter(Directory::new(directory))
            .build()
            .unwrap();
        let guard = layer.handle().flush_on_drop();
        tracing_subscriber::registry().with(layer).init();
        info_span!("last").in_scope(|| burn(60 * MS));
        end();
        drop(guard);
        return None;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_str().unwrap();
    let output = run_child(test, &[("DIRECTORY", path)]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!stderr.contains("tracing_profiling::"), "no code of the layer panicked: {stderr}");
    let mut names = Vec::new();
    for entry in fs::read_dir(path).unwrap() {
        let path = entry.unwrap().path();
        let bytes = fs::read(&path).unwrap();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        // A file under its final name is complete.
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("otlp") => {
                let data = ProfilesData::decode(&*bytes).unwrap();
                assert_eq!(data.resource_profiles.len(), 1);
            }
            Some("gz") => {
                let mut text = Vec::new();
                flate2::read::GzDecoder::new(&*bytes).read_to_end(&mut text).unwrap();
                assert!(!text.is_empty());
            }
            Some("html") => assert!(bytes.ends_with(b"</html>\n")),
            // A temporary file, not yet renamed.
            extension => assert_eq!(extension, Some("tmp"), "{name}"),
        }
        names.push(name);
    }
    Some((output.status.code(), names))
}

#[test]
fn the_guard_flushes_when_main_returns() {
    let ended = end_of_process("the_guard_flushes_when_main_returns", || ());
    if let Some((code, files)) = ended {
        assert_eq!(code, Some(0));
        assert_eq!(files.len(), if HAS_STACKS { 3 } else { 0 }, "{files:?}");
    }
}

#[test]
fn the_guard_flushes_when_main_panics() {
    let panic = || panic!("on purpose");
    if let Some((code, files)) = end_of_process("the_guard_flushes_when_main_panics", panic) {
        assert_eq!(code, Some(101), "the exit code of a test program with a failed test");
        assert_eq!(files.len(), if HAS_STACKS { 3 } else { 0 }, "{files:?}");
    }
}

#[test]
fn after_exit_each_file_is_complete_or_absent() {
    let exit = || std::process::exit(7);
    // The exporting thread races with the exit: files under their final names are complete.
    if let Some((code, _)) = end_of_process("after_exit_each_file_is_complete_or_absent", exit) {
        assert_eq!(code, Some(7));
    }
}

/// Records each span and event that it receives.
#[derive(Clone, Default)]
struct Witness(Arc<Mutex<Vec<&'static str>>>);

impl<S: tracing::Subscriber> Layer<S> for Witness {
    fn on_new_span(
        &self,
        attributes: &tracing::span::Attributes<'_>,
        _: &tracing::span::Id,
        _: Context<'_, S>,
    ) {
        self.0.lock().unwrap().push(attributes.metadata().name());
    }

    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        if event.metadata().target() == "witnessed" {
            self.0.lock().unwrap().push(event.metadata().target());
        }
    }
}

#[test]
fn no_callsite_is_disabled_for_another_layer() {
    for rules in ["250ms|error", "off", "nothing=1s", "witnessed=off"] {
        let ours = || ProfilingLayer::builder().rules(rules.parse().unwrap()).build().unwrap();
        let witness = Witness::default();
        let subscribers = [
            Dispatch::new(tracing_subscriber::registry().with(witness.clone()).with(ours())),
            Dispatch::new(tracing_subscriber::registry().with(ours()).with(witness.clone())),
        ];
        for subscriber in subscribers {
            tracing::dispatcher::with_default(&subscriber, || {
                let _error = tracing::error_span!(target: "witnessed", "error").entered();
                let _trace = tracing::trace_span!(target: "witnessed", "trace").entered();
                tracing::trace!(target: "witnessed", "an event");
                assert!(tracing::enabled!(target: "witnessed", tracing::Level::TRACE));
            });
        }
        let seen = std::mem::take(&mut *witness.0.lock().unwrap());
        assert_eq!(seen, ["error", "trace", "witnessed", "error", "trace", "witnessed"], "{rules}");
    }
}

/// Enters a span when its thread ends.
struct EntersAtTheEnd;

impl Drop for EntersAtTheEnd {
    fn drop(&mut self) {
        info_span!("at the end").in_scope(|| info_span!("inside").in_scope(|| burn(MS)));
    }
}

in_child! {
    /// Such as a connection of a pool that is closed with its thread: a panic there aborts the process.
    fn destructors_of_thread_locals_may_enter_spans() {
        thread_local! {
            static BETWEEN: EntersAtTheEnd = const { EntersAtTheEnd };
            static AFTER: EntersAtTheEnd = const { EntersAtTheEnd };
        }
        let setup = Setup::new("0ms");
        let span = || setup.run(|| info_span!("busy").in_scope(|| burn(MS)));
        let in_a_thread = || {
            let dispatch = &setup.dispatch;
            let body = || tracing::dispatcher::with_default(dispatch, || {
                // From here on the registry works until the thread-locals below are destroyed.
                info_span!("first").in_scope(|| ());
                BETWEEN.with(|_| ());
                info_span!("second").in_scope(|| ());
                AFTER.with(|_| ());
            });
            std::thread::scope(|scope| scope.spawn(body).join().unwrap());
        };
        tracing::dispatcher::set_global_default(setup.dispatch.clone()).unwrap();
        in_a_thread();
        // For a while from now on, each enter searches for an OpenTelemetry span.
        span();
        in_a_thread();
        for _ in 0..300 {
            span();
        }
        in_a_thread();
        assert!(setup.handle.stats().spans.kept > 300, "{:?}", setup.handle.stats());
    }
}

in_child! {
    /// Reserved profiles are still built, and the collector does not spin.
    fn a_collector_whose_pipe_was_closed_stops() {
        if !HAS_STACKS {
            return;
        }
        let pipes = || -> Vec<i32> {
            let is_pipe = |file: &fs::DirEntry| {
                fs::read_link(file.path()).is_ok_and(|to| to.to_string_lossy().starts_with("pipe:"))
            };
            let files = fs::read_dir("/proc/self/fd").unwrap().flatten().filter(is_pipe);
            files.map(|file| file.file_name().to_str().unwrap().parse().unwrap()).collect()
        };
        let before = pipes();
        let setup = Setup::new("0ms");
        setup.run(|| info_span!("first").in_scope(|| burn(60 * MS)));
        let ours: Vec<i32> = pipes().into_iter().filter(|file| !before.contains(file)).collect();
        let [ours] = ours[..] else { panic!("{ours:?}") };
        tracing::dispatcher::with_default(&setup.dispatch, || {
            info_span!("second").in_scope(|| burn(60 * MS));
            // SAFETY: only the collector uses this file, and the test checks that it handles the error.
            assert_eq!(unsafe { libc::close(ours) }, 0);
            let start = Instant::now();
            while setup.handle.is_enabled() {
                assert!(start.elapsed() < PLENTY, "{:?}", setup.handle.stats());
                info_span!("more").in_scope(|| burn(30 * MS));
            }
        });
        let start = Instant::now();
        while !setup.profiles().iter().any(|profile| profile.name == "second") {
            assert!(start.elapsed() < PLENTY, "{:?}", setup.kept_names());
            std::thread::sleep(MS);
        }
        info_span!("after").in_scope(|| burn(MS));
        setup.handle.shutdown(PLENTY).unwrap();
    }
}
