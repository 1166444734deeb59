//! A log, a callback or an exporter that blocks stops nothing but itself.

#![allow(clippy::expect_used, clippy::unwrap_used, clippy::indexing_slicing, reason = "a test")]

mod support;

use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::{Duration, Instant};

use support::{HAS_STACKS, PLENTY, burn};
use tracing::{Dispatch, info_span};
use tracing_profiling::export::{ExportError, Exported, Exporter, Memory};
use tracing_profiling::profile::Profile;
use tracing_profiling::{Builder, Directory, Handle, Kept, ProfilingLayer};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::prelude::*;

const MS: Duration = Duration::from_millis(1);

/// Blocks those who pass while it is shut.
#[derive(Clone, Default)]
struct Door(Arc<(Mutex<bool>, Condvar)>);

impl Door {
    fn set_shut(&self, is_shut: bool) {
        *self.0.0.lock().unwrap() = is_shut;
        self.0.1.notify_all();
    }

    fn pass(&self) {
        let guard = self.0.0.lock().unwrap();
        drop(self.0.1.wait_while(guard, |is_shut| *is_shut).unwrap());
    }
}

/// Opens the door at the end, so that a test that fails ends.
struct Opens<'a>(&'a Door);

impl Drop for Opens<'_> {
    fn drop(&mut self) {
        self.0.set_shut(false);
    }
}

/// A log behind a door.
#[derive(Clone, Default)]
struct Log {
    door: Door,
    text: Arc<Mutex<Vec<u8>>>,
    /// The lines.
    count: Arc<AtomicUsize>,
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.door.pass();
        self.text.lock().unwrap().extend_from_slice(bytes);
        self.count.fetch_add(1, Ordering::Relaxed);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for Log {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        self.clone()
    }
}

impl Log {
    /// The number of lines about a span of that name.
    fn lines_of(&self, name: &str) -> usize {
        let text = String::from_utf8(self.text.lock().unwrap().clone()).unwrap();
        text.lines().filter(|line| line.contains(&format!("kept `{name}`"))).count()
    }

    fn text(&self) -> String {
        String::from_utf8(self.text.lock().unwrap().clone()).unwrap()
    }
}

/// An exporter behind a door.
struct Exports {
    door: Door,
    memory: Memory,
}

impl Exporter for Exports {
    fn export(&mut self, profile: &Profile) -> Result<Exported, ExportError> {
        self.door.pass();
        self.memory.export(profile)
    }
}

/// A layer of which each part that can block has a door.
struct Stage {
    handle: Handle,
    dispatch: Dispatch,
    log: Log,
    exporter: Door,
    memory: Memory,
    callback: Door,
    kept: Arc<Mutex<Vec<Kept>>>,
}

impl Stage {
    fn new(set: impl FnOnce(Builder) -> Builder) -> Self {
        let (log, memory) = (Log::default(), Memory::new());
        let (exporter, callback) = (Door::default(), Door::default());
        let kept = Arc::new(Mutex::new(Vec::new()));
        let on_kept = {
            let (callback, kept) = (callback.clone(), Arc::clone(&kept));
            move |one: &Kept| {
                callback.pass();
                kept.lock().unwrap().push(one.clone());
            }
        };
        let builder = ProfilingLayer::builder()
            .rules("always".parse().unwrap())
            .sampling_delay(Duration::ZERO)
            // So that a ring covers the time in which the collector waits for a CPU.
            .rate(100)
            .stack_bytes(8_192)
            .cpu_budget(0)
            .profiles_per_minute(1_000_000)
            .exporter(Exports { door: exporter.clone(), memory: memory.clone() })
            .on_kept(on_kept);
        let layer = set(builder).build().unwrap();
        let handle = layer.handle();
        let lines = tracing_subscriber::fmt::layer().with_ansi(false).with_writer(log.clone());
        let lines = lines.with_filter(tracing_subscriber::filter::LevelFilter::INFO);
        let subscriber = tracing_subscriber::registry().with(lines).with(layer);
        let dispatch = Dispatch::new(subscriber);
        Self { handle, dispatch, log, exporter, memory, callback, kept }
    }

    fn run<R>(&self, action: impl FnOnce() -> R) -> R {
        tracing::dispatcher::with_default(&self.dispatch, action)
    }

    /// Keeps `count` spans of that name, in turn, with samples.
    fn keep(&self, name: &str, count: usize) {
        self.run(|| {
            for _ in 0..count {
                match name {
                    "before" => info_span!("before").in_scope(|| burn(20 * MS)),
                    _ => info_span!("during").in_scope(|| burn(20 * MS)),
                };
            }
        });
    }

    fn exported(&self) -> usize {
        self.memory.profiles().len()
    }

    fn called(&self, name: &str) -> usize {
        let kept = self.kept.lock().unwrap();
        kept.iter().filter(|kept| kept.spans[0].name() == name).count()
    }
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PLENTY, "timed out waiting until {what}");
        std::thread::sleep(MS);
    }
}

/// The threads that answer are others than the one that calls it.
#[test]
fn the_callback_may_ask_what_is_open_and_where_all_threads_are() {
    let (handle, answers) = (Arc::new(OnceLock::<Handle>::new()), Arc::default());
    let (own, all): (_, Arc<Mutex<Vec<_>>>) = (Arc::clone(&handle), Arc::clone(&answers));
    let stage = Stage::new(|builder| {
        builder.on_kept(move |_| {
            let handle = own.get().unwrap();
            let names = handle
                .open_spans(Duration::ZERO)
                .unwrap_or_default()
                .into_iter()
                .map(|span| span.name);
            all.lock().unwrap().push((names.collect::<Vec<_>>(), handle.threads().is_ok()));
        })
    });
    handle.set(stage.handle.clone()).unwrap();
    let open = stage.run(|| info_span!("open"));
    stage.run(|| info_span!("during").in_scope(|| ()));
    stage.handle.flush(PLENTY).unwrap();
    let answers = std::mem::take(&mut *answers.lock().unwrap());
    assert_eq!(answers, [(vec!["open".to_owned()], HAS_STACKS)]);
    drop(open);
}

/// The list is empty where the thread that reads symbols, of a debug build, takes more than ten seconds.
fn wait_until_open_is_listed(handle: &Handle) {
    wait_until("the open span is listed", || {
        let open = handle.open_spans(Duration::ZERO).unwrap();
        open.iter().map(|it| it.name.as_str()).eq(["open"])
    });
}

/// The callers are answered: open spans are listed, and a flush and, at the end, a shutdown return at their deadlines.
fn assert_answers(stage: &Stage, why: &str) {
    let open = stage.run(|| info_span!("open").entered());
    wait_until_open_is_listed(&stage.handle);
    drop(open);
    let start = Instant::now();
    assert!(stage.handle.flush(50 * MS).is_err(), "{why}");
    assert!(start.elapsed() < PLENTY, "{why}");
}

#[test]
fn what_blocks_stops_only_itself() {
    const COUNT: usize = 20;
    for (why, blocks) in [("log", 0), ("callback", 1), ("exporter", 2), ("log and callback", 3)] {
        // Nothing reaches the exporter without stacks.
        if blocks == 2 && !HAS_STACKS {
            continue;
        }
        let stage = Stage::new(|builder| builder);
        stage.keep("before", 1);
        stage.handle.flush(PLENTY).unwrap();
        let before = (stage.log.lines_of("before"), stage.called("before"));
        assert_eq!(before, (1, 1), "{why}: a flush waits for the log and the callback");
        let (log, callback, exporter) = (&stage.log.door, &stage.callback, &stage.exporter);
        let _opens = [Opens(log), Opens(callback), Opens(exporter)];
        let (log_blocks, callback_blocks) =
            (blocks == 0 || blocks == 3, blocks == 1 || blocks == 3);
        let exporter_blocks = blocks == 2;
        log.set_shut(log_blocks);
        callback.set_shut(callback_blocks);
        exporter.set_shut(exporter_blocks);
        stage.keep("during", COUNT);
        assert_answers(&stage, why);
        // Without a profile there is nothing to wait for. (A sample can fall in one of these.)
        stage.run(|| (0..10).for_each(|_| info_span!("short").in_scope(|| ())));
        if !log_blocks {
            wait_until("others are logged", || stage.log.lines_of("short") > 0);
        }
        if !callback_blocks {
            wait_until("the callback is called for others", || stage.called("short") > 0);
        }
        if !exporter_blocks && HAS_STACKS {
            wait_until("profiles are exported", || stage.exported() > COUNT);
        }
        if !exporter_blocks && !log_blocks {
            wait_until("all are logged", || stage.log.lines_of("during") == COUNT);
        }
        if !exporter_blocks && !callback_blocks {
            wait_until("the callback is called for all", || stage.called("during") == COUNT);
        }
        // Nothing is lost once it goes on.
        drop(_opens);
        stage.handle.flush(PLENTY).unwrap();
        let after = (stage.log.lines_of("during"), stage.called("during"));
        assert_eq!(after, (COUNT, COUNT), "{why}");
        let reports = stage.handle.stats().reports;
        assert_eq!((reports.dropped_log_full, reports.dropped_callback_full), (0, 0), "{why}");
        stage.handle.shutdown(PLENTY).unwrap();
    }
}

#[test]
fn a_shutdown_returns_at_its_deadline_whatever_blocks() {
    for blocks in 0..if HAS_STACKS { 3 } else { 2 } {
        let stage = Stage::new(|builder| builder);
        let doors = [&stage.log.door, &stage.callback, &stage.exporter];
        let _opens = doors.map(Opens);
        doors[blocks].set_shut(true);
        stage.keep("during", 2);
        let start = Instant::now();
        assert!(stage.handle.shutdown(50 * MS).is_err(), "{blocks}");
        assert!(start.elapsed() < PLENTY, "{blocks}");
        // What could be done was done.
        if blocks != 2 && HAS_STACKS {
            wait_until("the profiles are exported", || stage.exported() == 2);
        }
    }
}

#[test]
fn what_a_blocked_log_or_callback_does_not_take_is_bounded_and_counted() {
    /// More than are held, in parts that the other one has taken before the next.
    const PARTS: u64 = 12;
    const PART: u64 = 1_000;
    const COUNT: u64 = PARTS * PART;
    for blocks_log in [true, false] {
        // Without samples, spans cost little.
        let stage = Stage::new(|builder| builder.source(tracing_profiling::Source::None));
        stage.run(|| info_span!("before").in_scope(|| ()));
        stage.handle.flush(PLENTY).unwrap();
        let door = if blocks_log { &stage.log.door } else { &stage.callback };
        let opens = Opens(door);
        door.set_shut(true);
        let lines = stage.log.count.load(Ordering::Relaxed) as u64;
        for part in 1..=PARTS {
            stage.run(|| (0..PART).for_each(|_| info_span!("during").in_scope(|| ())));
            wait_until("the other one has taken all", || {
                let taken = match blocks_log {
                    true => stage.kept.lock().unwrap().len() as u64 - 1,
                    false => stage.log.count.load(Ordering::Relaxed) as u64 - lines,
                };
                taken >= part * PART
            });
        }
        let dropped = || {
            let reports = stage.handle.stats().reports;
            let dropped = [reports.dropped_log_full, reports.dropped_callback_full];
            if blocks_log { dropped } else { [dropped[1], dropped[0]] }
        };
        assert!(dropped()[0] > PART, "{:?}", dropped());
        drop(opens);
        stage.handle.flush(PLENTY).unwrap();
        let [dropped, of_other] = dropped();
        assert_eq!(of_other, 0);
        let (said, called) = (stage.log.lines_of("during") as u64, stage.called("during") as u64);
        assert_eq!(stage.handle.stats().spans.kept_unreported, 0);
        match blocks_log {
            true => {
                assert_eq!((said + dropped, called), (COUNT, COUNT));
                let line = format!("{dropped} events of this layer were not logged");
                assert!(stage.log.text().contains(&line), "{}", stage.log.text());
            }
            false => assert_eq!((said, called + dropped), (COUNT, COUNT)),
        }
    }
}

const STALLED: &str = "PROFILING_TEST_STALLED";

/// A program whose output is not read. `PROFILING_TEST_STALL_SECONDS` is how long it serves 100 requests a second.
#[test]
fn a_log_that_is_not_read_costs_no_profile() {
    if std::env::var_os(STALLED).is_some() {
        return serve_unread();
    }
    let dir = tempfile::tempdir().unwrap();
    let (mut reader, mut writer) = std::io::pipe().unwrap();
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_log_that_is_not_read_costs_no_profile", "--nocapture"])
        .env(STALLED, dir.path())
        .stdout(writer.try_clone().unwrap())
        .spawn();
    let mut child = child.unwrap();
    // Once the test harness has printed its line, the pipe is full and stays so.
    wait_until("the child has started", || dir.path().join("started").exists());
    let fills = std::thread::spawn(move || writer.write_all(&vec![b'\n'; 1 << 20]));
    let result = dir.path().join("result");
    let start = Instant::now();
    let longest = PLENTY + stall();
    while !result.exists() && start.elapsed() < longest {
        assert!(child.try_wait().unwrap().is_none(), "the child has failed");
        std::thread::sleep(10 * MS);
    }
    let is_there = result.exists();
    // Now it is read.
    let text = std::thread::spawn(move || std::io::read_to_string(&mut reader).unwrap());
    fills.join().unwrap().unwrap();
    assert!(is_there, "the child is stuck");
    assert!(child.wait().unwrap().success());
    let text = text.join().unwrap();
    let result = std::fs::read_to_string(&result).unwrap();
    println!("{result}");
    let kept = text.lines().filter(|line| line.contains("kept `request`")).count();
    assert!(kept > 0 || !HAS_STACKS, "the lines are there in the end");
}

fn stall() -> Duration {
    let seconds = std::env::var("PROFILING_TEST_STALL_SECONDS");
    Duration::from_secs(seconds.map_or(3, |seconds| seconds.parse().unwrap()))
}

fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.map_or(0, |line| line.trim().trim_end_matches(" kB").parse().unwrap())
}

fn serve_unread() {
    let dir = std::path::PathBuf::from(std::env::var_os(STALLED).unwrap());
    let profiles = dir.join("profiles");
    std::fs::write(dir.join("started"), "").unwrap();
    let layer = ProfilingLayer::builder()
        .rules("always".parse().unwrap())
        .sampling_delay(Duration::ZERO)
        .exporter(Directory::new(&profiles))
        .build()
        .unwrap();
    let handle = layer.handle();
    let dispatch = Dispatch::new(
        tracing_subscriber::registry()
            .with(tracing_subscriber::fmt::layer().with_writer(std::io::stdout))
            .with(layer),
    );
    let _default = tracing::dispatcher::set_default(&dispatch);
    let (start, mut slowest, mut requests) = (Instant::now(), Duration::ZERO, 0_u32);
    let mut memory = Vec::new();
    while start.elapsed() < stall() {
        let open = info_span!("request").entered();
        support::burn(5 * MS);
        let closing = Instant::now();
        drop(open);
        slowest = slowest.max(closing.elapsed());
        requests += 1;
        if requests % 100 == 0 {
            memory.push(resident_kib());
        }
        std::thread::sleep(5 * MS);
    }
    let open = info_span!("open").entered();
    wait_until_open_is_listed(&handle);
    drop(open);
    assert!(handle.flush(100 * MS).is_err(), "the log has not taken the lines");
    let mut stats = handle.stats();
    wait_until("profiles are written", || {
        stats = handle.stats();
        let spans = stats.spans;
        let with = spans.kept - spans.no_profile_no_samples - spans.no_profile_rate_limit;
        stats.profiles.exported == with - spans.no_profile_queue_full
    });
    let files = std::fs::read_dir(&profiles).map_or(0, |files| {
        // Beside the directory of what is typical.
        let is_report = |path: &Path| path.extension().is_some_and(|extension| extension == "html");
        files.filter(|file| is_report(&file.as_ref().unwrap().path())).count()
    });
    assert_eq!(files as u64, stats.profiles.exported);
    assert!(files > 0 || !HAS_STACKS);
    assert_eq!(stats.reports.dropped_log_full, 0);
    let text = format!(
        "{requests} requests, {files} profiles, KiB each 100 requests: {memory:?}, slowest close {slowest:?}, {:?}",
        stats.spans
    );
    std::fs::write(dir.join("result.new"), text).unwrap();
    std::fs::rename(dir.join("result.new"), dir.join("result")).unwrap();
    handle.flush(PLENTY).unwrap();
}
