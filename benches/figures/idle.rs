//! That nothing of ours wakes up while no profiled span is open.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

use tracing::{dispatcher, info_span};
use tracing_profiling::{Builder, Source};

use crate::measure::{Setup, figure, work};

/// After the last span. Threads are sampled for up to 20 seconds without one, and what was read of symbols is
/// held for 30.
const SETTLES: Duration = Duration::from_secs(40);
const WATCHED: Duration = Duration::from_secs(10);
const THREADS: usize = 3;
/// Of spans that are kept.
const SLOW: Duration = Duration::from_millis(30);
/// What says that nothing is left to do but to wait.
const BEGUN: &str = "begun";

/// Processes that sleep while other figures are measured: this takes nearly a minute.
#[derive(Debug)]
pub(crate) struct Idle(Vec<(Child, BufReader<ChildStdout>)>);

impl Idle {
    /// Returns when they have had all their spans. With `all`, also that which takes minutes.
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

    /// Waits for them, and prints what they found.
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
    idle("idle", SETTLES, |builder| builder.source(Source::Perf));
}

pub(crate) fn by_timer() {
    idle("idle.timer", SETTLES, |builder| builder.source(Source::Timer));
}

/// A connection that nobody uses is given up after 90 seconds, or at the next look 90 seconds later.
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
    let settles = Duration::from_secs(200);
    idle("idle.otlp", settles, |builder| {
        #[cfg(feature = "sighup")]
        let builder = builder.reload_on_sighup();
        builder.exporter(exporter)
    });
}

/// Takes everything.
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

/// A process that was busy once: threads with profiled spans, kept and not, of which some have ended and some
/// live on without one.
fn idle(name: &str, settles: Duration, set: impl FnOnce(Builder) -> Builder) {
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
        let settled = last_change(last_span, settles);
        // None of it was measured where there was nothing to settle.
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
        figure(&format!("{name}.settled_after"), settled.as_secs_f64(), "s");
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

/// Waits for so long, and returns how long after `start` a thread of ours last woke up.
fn last_change(start: Instant, settles: Duration) -> Duration {
    let (mut last, mut seen) = (Duration::ZERO, switches());
    while start.elapsed() < settles {
        std::thread::sleep(Duration::from_secs(1));
        let now = switches();
        if now != seen {
            last = start.elapsed();
        }
        seen = now;
    }
    last
}

/// How often each thread of ours, by its number and name, was switched from a CPU.
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
