//! Checks that the layer's threads do not wake up while no profiled span is open.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

use tracing::{dispatcher, info_span};
use tracing_profiling::{Builder, Source};

use crate::measure::{Setup, figure, work};

/// From the last span until nothing more happens. Threads are sampled for up to 20 seconds without a span, and symbols
/// are cached for 30.
const QUIET_AFTER: Duration = Duration::from_secs(40);
const WATCHED: Duration = Duration::from_secs(10);
const THREADS: usize = 3;
/// The length of kept spans.
const SLOW: Duration = Duration::from_millis(30);
/// Printed when the spans are over.
const BEGUN: &str = "begun";

/// Processes that sleep while other figures are measured, since this takes nearly a minute.
#[derive(Debug)]
pub(crate) struct Idle(Vec<(Child, BufReader<ChildStdout>)>);

impl Idle {
    /// Returns once they have had all their spans. With `all`, also starts the process that takes minutes.
    pub(crate) fn begin(all: bool) -> Self {
        let mut children = Vec::new();
        let slow = (all && cfg!(feature = "otlp-http")).then_some("idle_otlp");
        for part in ["idle_perf", "idle_timer"].into_iter().chain(slow) {
            let this = std::env::current_exe().expect("the path of this program");
            let mut child = Command::new(this)
                .args(["--child", part])
                .stdout(Stdio::piped())
                .spawn()
                .expect("a process");
            let mut lines = BufReader::new(child.stdout.take().expect("its output"));
            let mut line = String::new();
            lines.read_line(&mut line).expect("its output");
            assert_eq!(line.trim(), BEGUN, "{part}");
            children.push((child, lines));
        }
        Self(children)
    }

    /// Waits for the processes and prints their results.
    pub(crate) fn end(self) {
        for (mut child, mut lines) in self.0 {
            let mut found = String::new();
            lines.read_to_string(&mut found).expect("figures");
            assert!(child.wait().expect("its end").success(), "{found}");
            print!("{found}");
        }
    }
}

pub(crate) fn by_perf() {
    idle("idle", QUIET_AFTER, |builder| builder.source(Source::Perf));
}

pub(crate) fn by_timer() {
    idle("idle.timer", QUIET_AFTER, |builder| builder.source(Source::Timer));
}

/// An unused connection is closed after 90 seconds, or at the next check 90 seconds later.
#[cfg(feature = "otlp-http")]
pub(crate) fn with_otlp() {
    use tracing_profiling::{OtlpExporter, Protocol};
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("its number");
    _ = std::thread::spawn(move || serve(&listener));
    let exporter = OtlpExporter::builder()
        .protocol(Protocol::HttpProtobuf)
        .endpoint(format!("http://{address}"))
        .build()
        .expect("an exporter");
    let quiet_after = Duration::from_secs(200);
    idle("idle.otlp", quiet_after, |builder| builder.exporter(exporter));
}

/// Accepts every request.
#[cfg(feature = "otlp-http")]
fn serve(listener: &std::net::TcpListener) {
    use std::io::Write;
    for stream in listener.incoming() {
        let mut lines = BufReader::new(stream.expect("a connection"));
        let (mut line, mut length) = (String::new(), 0);
        while lines.read_line(&mut line).is_ok_and(|bytes| bytes > 0) {
            if let Some(number) = line.to_lowercase().strip_prefix("content-length:") {
                length = number.trim().parse().expect("a number");
            }
            if line == "\r\n" {
                lines.read_exact(&mut vec![0; length]).expect("the body");
                let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n";
                lines.get_mut().write_all(answer).expect("sent");
            }
            line.clear();
        }
    }
}

/// A process that was busy once: threads with profiled spans, kept and not. Some threads have ended, others live on
/// without a span.
fn idle(name: &str, quiet_after: Duration, set: impl FnOnce(Builder) -> Builder) {
    let setup = Setup::new("20ms|hung>1s", set);
    some_spans(&setup);
    let (are_done, may_end) = (Barrier::new(THREADS + 1), Barrier::new(THREADS + 1));
    std::thread::scope(|scope| {
        scope.spawn(|| some_spans(&setup)).join().expect("no panic");
        for _ in 0..THREADS {
            scope.spawn(|| {
                some_spans(&setup);
                are_done.wait();
                may_end.wait();
            });
        }
        are_done.wait();
        let last_span = Instant::now();
        println!("{BEGUN}");
        assert!(setup.handle.stats().threads.sampled > 0, "{:?}", setup.handle.stats());
        let last_wakeup = last_change(last_span, quiet_after);
        // The measurement is void unless there was work to finish.
        let stats = setup.handle.stats();
        assert!(stats.spans.kept > 0 && stats.profiles.exported > 0, "{stats:?}");
        assert_eq!(stats.threads.sampled, 0, "{stats:?}");
        let before = switches();
        std::thread::sleep(WATCHED);
        let after = switches();
        assert!(before.len() >= 2 && after.len() == before.len(), "{before:?} {after:?}");
        for (thread, count) in &after {
            let more = count - before.get(thread).copied().unwrap_or(0);
            if more > 0 {
                eprintln!("{} has woken up {more} times", thread.1);
            }
        }
        let woken = after.values().sum::<u64>() - before.values().sum::<u64>();
        figure(&format!("{name}.quiet_after"), last_wakeup.as_secs_f64(), "s");
        figure(&format!("{name}.wakeups"), woken as f64, "count");
        may_end.wait();
    });
}

fn some_spans(setup: &Setup) {
    dispatcher::with_default(&setup.dispatch, || {
        for _ in 0..10 {
            info_span!("fast").in_scope(work);
        }
        let _slow = info_span!("slow").entered();
        let start = Instant::now();
        while start.elapsed() < SLOW {
            work();
        }
        // A wait, too.
        let held = Mutex::new(());
        std::thread::scope(|scope| {
            let held = &held;
            let guard = held.lock().expect("no panic");
            let other = scope.spawn(move || drop(held.lock()));
            std::thread::sleep(SLOW);
            drop(guard);
            other.join().expect("no panic");
        });
    });
}

/// Waits that long, and returns when a thread of the layer last woke up, relative to `start`.
fn last_change(start: Instant, quiet_after: Duration) -> Duration {
    let (mut last, mut seen) = (Duration::ZERO, switches());
    while start.elapsed() < quiet_after {
        std::thread::sleep(Duration::from_secs(1));
        let now = switches();
        if now != seen {
            last = start.elapsed();
        }
        seen = now;
    }
    last
}

/// The number of context switches of each thread of the layer, by thread id and name.
fn switches() -> BTreeMap<(u32, String), u64> {
    let tasks = std::fs::read_dir("/proc/self/task").expect("procfs");
    let of_task = |task: std::fs::DirEntry| {
        let status = std::fs::read_to_string(task.path().join("status")).ok()?;
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
        let name = field("Name:")?.trim().to_owned();
        let number = |name| field(name)?.trim().parse::<u64>().ok();
        let count = number("voluntary_ctxt_switches:")? + number("nonvoluntary_ctxt_switches:")?;
        let tid = task.file_name().to_str()?.parse().ok()?;
        name.starts_with("profiling-").then_some(((tid, name), count))
    };
    tasks.filter_map(|task| of_task(task.ok()?)).collect()
}
