//! Compares the time breakdown of each span with the kernel's clocks, read just inside and just outside of each of its
//! segments.

use std::collections::HashMap;
use std::fmt::Debug;
use std::hint::black_box;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tracing::instrument::Instrumented;
use tracing::{Instrument, Span, info_span};
use tracing_profiling::TimeBreakdown;

use crate::Sampled;
use crate::clocks::{Bounds, Reading, wall_ns};
use crate::support::Nanos as _;
use crate::support::Setup;

const ROUNDS: usize = 3;

/// The bounds of one span's times.
#[derive(Clone, Debug, Default)]
pub(crate) struct Known {
    wall_ns: Bounds,
    /// From the thread's CPU clock.
    pub(crate) on_cpu_ns: Bounds,
    off_cpu_ns: Bounds,
    idle_ns: Bounds,
    segments: u64,
}

/// The readings of one segment, in order.
#[derive(Clone, Copy)]
pub(crate) struct Segment {
    pub(crate) before: Reading,
    pub(crate) begun: Reading,
    pub(crate) ended: Reading,
    pub(crate) after: Reading,
}

/// All readings of one span.
pub(crate) struct Log {
    /// The wall time right before and after the span was made.
    pub(crate) made: [u64; 2],
    pub(crate) segments: Vec<Segment>,
}

impl Log {
    /// Computes the bounds. The span closes at the end of the last segment.
    pub(crate) fn known(&self) -> Known {
        let [before, after] = self.made;
        let mut known = Known { segments: self.segments.len() as u64, ..Known::default() };
        // When the span was last exited, or made.
        let mut left = Bounds { least: before, most: after };
        for Segment { before, begun, ended, after } in &self.segments {
            let (outer, inner) = (*after - *before, *ended - *begun);
            known.on_cpu_ns.add(inner.cpu_ns, outer.cpu_ns);
            // The wall interval of an inner pair of readings lies inside its CPU interval, and that of an outer pair
            // around it, so the differences are bounds of the off-CPU time.
            let [least, most] =
                [inner, outer].map(|passed| passed.wall_ns.saturating_sub(passed.cpu_ns));
            known.off_cpu_ns.add(least, most);
            known.idle_ns.add(before.wall_ns.saturating_sub(left.most), begun.wall_ns - left.least);
            left = Bounds { least: ended.wall_ns, most: after.wall_ns };
        }
        known.idle_ns.add(0, left.most - left.least);
        known.wall_ns.add(left.least - self.made[1], left.most - self.made[0]);
        known
    }
}

/// The bounds of each span, by name.
type All = Mutex<HashMap<&'static str, Known>>;

/// Reads the clocks inside the span.
struct Inside<F> {
    future: Pin<Box<F>>,
    /// The readings of the current segment.
    readings: Arc<Mutex<[Option<Reading>; 2]>>,
}

impl<F: Future> Future for Inside<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let begun = Reading::wall_last();
        let result = self.future.as_mut().poll(context);
        let ended = Reading::wall_first();
        *self.readings.lock().unwrap() = [Some(begun), Some(ended)];
        result
    }
}

/// Reads the clocks outside the span.
struct Outside<F> {
    future: Option<Pin<Box<Instrumented<Inside<F>>>>>,
    readings: Arc<Mutex<[Option<Reading>; 2]>>,
    name: &'static str,
    log: Log,
    all: Arc<All>,
}

impl<F: Future> Future for Outside<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let this = &mut *self;
        let before = Reading::wall_first();
        let result = this.future.as_mut().unwrap().as_mut().poll(context);
        if result.is_ready() {
            // Dropping the future enters the span once more, and closes it.
            this.future = None;
        }
        let after = Reading::wall_last();
        let [begun, ended] = this.readings.lock().unwrap().map(Option::unwrap);
        this.log.segments.push(Segment { before, begun, ended, after });
        let result = ready!(result);
        this.all.lock().unwrap().insert(this.name, this.log.known());
        Poll::Ready(result)
    }
}

/// A future in a span of that name.
macro_rules! measured {
    ($all:expr, $name:literal, $future:expr) => {
        measure($all, $name, || info_span!($name), $future)
    };
}

fn measure<F: Future>(
    all: &Arc<All>,
    name: &'static str,
    span: fn() -> Span,
    future: F,
) -> Outside<F> {
    let readings = Arc::default();
    let inside = Inside { future: Box::pin(future), readings: Arc::clone(&readings) };
    let before = wall_ns();
    let span = span();
    let made = [before, wall_ns()];
    let log = Log { made, segments: Vec::with_capacity(4_096) };
    let future = Some(Box::pin(inside.instrument(span)));
    Outside { future, readings, name, log, all: Arc::clone(all) }
}

#[inline(never)]
pub(crate) fn work(rounds: u64) {
    let mut x = 1_u64;
    let mut i = 0;
    while i < rounds {
        x = black_box((x ^ i) * 3 % 1_000_003);
        i += 1;
    }
}

/// Alternates `count` times between work in the span and other tasks on the thread.
async fn segments(count: u64, rounds: u64) {
    for n in 0..count {
        // Irregular, to avoid any fixed rhythm.
        work(rounds / 2 + rounds * (n * 37 % 101) / 101);
        tokio::task::yield_now().await;
    }
}

const MS: Duration = Duration::from_millis(1);

/// Spends time in every way a task can, with a span for each.
async fn tasks(all: &Arc<All>) {
    let lock = Arc::new(Mutex::new(()));
    let (locked, next_locked) = (Arc::clone(&lock), Arc::clone(&lock));
    let (sender, mut receiver) = tokio::sync::mpsc::channel(1);
    let inner = Arc::clone(all);
    let all_tasks = [
        // As a task that is polled: shorter than the minimum interval between two reads of the CPU clock.
        tokio::spawn(measured!(all, "short segments", segments(1_000, 2_000))),
        tokio::spawn(measured!(all, "long segments", segments(20, 1_000_000))),
        tokio::spawn(measured!(all, "some of each", async {
            for rounds in [5_000, 300_000, 20_000, 1_000_000] {
                segments(40, rounds).await;
            }
        })),
        // Blocked on its thread.
        tokio::spawn(measured!(all, "sleeps", async {
            for n in 1..=8 {
                work(200_000);
                std::thread::sleep(MS * n * 3);
                tokio::task::yield_now().await;
            }
        })),
        tokio::spawn(measured!(all, "holds a lock", async move {
            for _ in 0..10 {
                let guard = locked.lock().unwrap();
                std::thread::sleep(5 * MS);
                work(100_000);
                drop(guard);
                tokio::task::yield_now().await;
            }
        })),
        tokio::spawn(measured!(all, "waits for the lock", async move {
            for _ in 0..10 {
                drop(next_locked.lock().unwrap());
                work(50_000);
                tokio::task::yield_now().await;
            }
        })),
        // Idle, on no thread.
        tokio::spawn(measured!(all, "awaits time", async {
            for n in 1..=10 {
                tokio::time::sleep(MS * n * 2).await;
                work(100_000);
            }
        })),
        tokio::spawn(measured!(all, "sends", async move {
            for n in 0..50 {
                work(20_000);
                sender.send(n).await.unwrap();
            }
        })),
        tokio::spawn(measured!(all, "receives", async move {
            while let Some(n) = receiver.recv().await {
                work(10_000 * (n % 5));
            }
        })),
        // Spans inside spans, in the same task and in another.
        tokio::spawn(measured!(all, "outer", async move {
            segments(10, 100_000).await;
            let child = tokio::spawn(measured!(&inner, "child", segments(30, 50_000)));
            measured!(&inner, "inner", async {
                segments(10, 100_000).await;
                std::thread::sleep(10 * MS);
                tokio::time::sleep(10 * MS).await;
            })
            .await;
            segments(200, 3_000).await;
            child.await.unwrap();
        })),
    ];
    for task in all_tasks {
        task.await.unwrap();
    }
}

/// The permitted error beyond the bounds. The rate of the clock for wall time is initially known to 50 ppm. The thread
/// can be switched or interrupted between the two readings of one moment: by up to 5 µs each without being read again,
/// at the beginning and at the end.
fn slack_ns(account: &TimeBreakdown, known: &Known) -> u64 {
    account.wall().ns() / 10_000
        + 1_000 * (known.segments + account.usage.involuntary_switches)
        + 10_000
}

/// Asserts that a value of the account is within the bounds, widened by the slack.
fn assert_within(what: &str, value: u64, bounds: Bounds, slack_ns: u64, of: &dyn Debug) {
    assert_eq!(
        bounds.widened(slack_ns).miss(value),
        0,
        "{what}: {value} {bounds:?} ±{slack_ns} of {of:?}"
    );
}

/// On-CPU time has bounds in the account, which must hold with every source.
pub(crate) fn judge(account: &TimeBreakdown, known: &Known, of: &dyn Debug) {
    let slack_ns = slack_ns(account, known);
    assert_within("wall", account.wall().ns(), known.wall_ns, slack_ns, of);
    assert_within("idle", account.idle().ns(), known.idle_ns, slack_ns, of);
    let wall_ns = account.wall().ns();
    let (on_cpu_ns, off_cpu_ns) = (account.on_cpu().ns(), account.off_cpu().ns());
    let sum = on_cpu_ns + off_cpu_ns + account.idle().ns() + account.other_spans().ns();
    assert_within("sum", sum, Bounds { least: wall_ns, most: wall_ns }, slack_ns, of);
    let slack_ns = slack_ns + account.on_cpu_error().ns();
    assert_within("on-CPU", on_cpu_ns, known.on_cpu_ns, slack_ns, of);
    assert_within("off-CPU", off_cpu_ns, known.off_cpu_ns, slack_ns, of);
}

pub(crate) fn scenario(sampled: Sampled) {
    let setup = Setup::with("0ms", |builder| sampled.set(builder).profiles_per_minute(1_000_000));
    tracing::dispatcher::set_global_default(setup.dispatch.clone()).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(3)
        .enable_time()
        .build()
        .unwrap();
    for _ in 0..ROUNDS {
        let all = Arc::default();
        runtime.block_on(tasks(&all));
        setup.flush();
        let kept = std::mem::take(&mut *setup.kept.lock().unwrap());
        let spans: Vec<_> = kept.iter().flat_map(|kept| &kept.spans).collect();
        println!("{:?}", setup.handle.stats());
        let all = all.lock().unwrap();
        assert_eq!(spans.len(), all.len());
        for span in spans {
            let (account, known) = (span.times(), &all[span.name()]);
            let of = (span.name(), account, known);
            println!("{of:?}");
            judge(account, known, &of);
            // Hooks read the CPU clock every 100 µs at most. The uncertain time is less than that per read, with two
            // reads per segment plus one, and the error is half of it.
            let most_ns = 150_000 * known.segments;
            assert!(account.on_cpu_error().ns() <= most_ns, "the bounds are too wide: {of:?}");
        }
    }
}
