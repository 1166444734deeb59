//! Waits: the error of their measured durations, and the cost of detecting them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

use cpu_time::ProcessTime;
use tracing::{dispatcher, info_span};
use tracing_profiling::Source;
use tracing_profiling::profile::Profile;

use crate::measure::{Setup, child, figure, median, work};

const WAITS: usize = 20;
const HELD: Duration = Duration::from_millis(100);
const THREADS: usize = 8;
const WATCHED: Duration = Duration::from_secs(1);

pub(crate) fn run() {
    for (name, source) in [("perf", Source::Perf), ("timer", Source::Timer)] {
        let errors = wait_errors(source);
        let seen: Vec<f64> = errors.iter().copied().flatten().collect();
        assert!(!seen.is_empty(), "no wait was captured of {}", errors.len());
        let most = seen.iter().copied().fold(0.0, f64::max);
        figure(&format!("off_cpu.{name}.wait_error"), most, "ms");
        figure(&format!("off_cpu.{name}.wait_error_median"), median(&seen), "ms");
        let missed = errors.len() - seen.len();
        figure(&format!("off_cpu.{name}.waits_missed"), missed as f64, "count");
    }
    print!("{}", child("watch_perf", &[]));
    print!("{}", child("watch_timer", &[]));
}

/// The difference between the length of a wait for a lock in the profile and by the clock of the blocked thread; none
/// if the profile does not have the wait.
fn wait_errors(source: Source) -> Vec<Option<f64>> {
    let setup = Setup::new("0ms", |builder| builder.source(source).profiles_per_minute(10_000));
    (0..WAITS)
        .map(|number| {
            let waited = wait_for_a_lock(&setup);
            setup.flush();
            let seen: Duration = setup.memory.take().iter().map(Profile::waited).sum();
            if seen.is_zero() {
                eprintln!("{source:?} missed wait {number} of {waited:?}");
            }
            (!seen.is_zero()).then(|| seen.abs_diff(waited).as_secs_f64() * 1e3)
        })
        .collect()
}

fn wait_for_a_lock(setup: &Setup) -> Duration {
    let (lock, is_held) = (Mutex::new(()), Barrier::new(2));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _held = lock.lock().expect("no panic");
            is_held.wait();
            std::thread::sleep(HELD);
        });
        is_held.wait();
        dispatcher::with_default(&setup.dispatch, || {
            let _span = info_span!("waits").entered();
            some_work();
            let start = Instant::now();
            drop(lock.lock().expect("no panic"));
            let waited = start.elapsed();
            some_work();
            waited
        })
    })
}

/// About a millisecond, so that the wait is neither the first nor the last activity of the span.
fn some_work() {
    for _ in 0..10 {
        work();
    }
}

pub(crate) fn watch_by_perf() {
    watch("perf", Source::Perf);
}

pub(crate) fn watch_by_timer() {
    watch("timer", Source::Timer);
}

/// The cost of the collector for threads in profiled spans, as a share of one core.
fn watch(name: &str, source: Source) {
    // Samples do not matter here.
    let setup = Setup::new("1h", |builder| builder.source(source).rate(1));
    let lock = Mutex::new(());
    let held = lock.lock().expect("no panic");
    let blocked = in_spans(&setup, || drop(lock.lock().expect("no panic")), || drop(held));
    figure(&format!("off_cpu.{name}.watch_cost"), blocked.collector, "%");
    // Blocked threads run nothing else, so the difference is the cost of waking up and going back to sleep.
    figure(&format!("off_cpu.{name}.watch_cost_with_wakeups"), blocked.process, "%");
    let is_over = AtomicBool::new(false);
    let spin = || {
        while !is_over.load(Ordering::Relaxed) {
            work();
        }
    };
    let busy = in_spans(&setup, spin, || is_over.store(true, Ordering::Relaxed));
    figure(&format!("off_cpu.{name}.watch_cost_busy"), busy.collector, "%");
}

/// Shares of a core, in percent.
struct Shares {
    collector: f64,
    process: f64,
}

/// Polls threads that each do `action` in a span, until `end` returns.
fn in_spans(setup: &Setup, action: impl Fn() + Sync, end: impl FnOnce()) -> Shares {
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                dispatcher::with_default(&setup.dispatch, || info_span!("in").in_scope(&action));
            });
        }
        // Until all threads have started; the collector finds them when it next wakes up.
        std::thread::sleep(Duration::from_millis(100));
        setup.flush();
        std::thread::sleep(Duration::from_millis(200));
        let collector = || Duration::from_nanos(setup.handle.stats().sampling.collector_cpu_ns);
        let (start, before, process) = (Instant::now(), collector(), ProcessTime::now());
        std::thread::sleep(WATCHED);
        let share = |spent: Duration| spent.as_secs_f64() / start.elapsed().as_secs_f64() * 100.0;
        let shares =
            Shares { collector: share(collector() - before), process: share(process.elapsed()) };
        assert_eq!(setup.handle.stats().threads.unsampled, 0, "all are attached");
        end();
        shares
    })
}
