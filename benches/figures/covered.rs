//! How much of the on-CPU time is sampled with the default settings.

use std::time::{Duration, Instant};

use cpu_time::ThreadTime;
use tracing::{dispatcher, info_span};
use tracing_profiling::{Builder, Source};

use crate::measure::{Setup, figure, median, work};

const SPANS: u32 = 9;
/// Enough for the root to be kept, with the shortest work, too.
const THREADS: u32 = 150;

fn late(rules: &str, set: impl FnOnce(Builder) -> Builder) -> Setup {
    Setup::late(rules, |builder| set(builder.profiles_per_minute(u32::MAX)))
}

fn weight_ns(setup: &Setup) -> f64 {
    setup.flush();
    setup.memory.take().iter().map(|profile| profile.weight().as_nanos() as f64).sum()
}

/// The share of its on-CPU time that the samples of a busy span represent, in percent. The span is kept at 1.2 times
/// its threshold.
fn of_busy_spans(threshold_ms: u64, source: Source) -> f64 {
    let setup = late(&format!("{threshold_ms}ms"), |builder| builder.source(source));
    let length = Duration::from_millis(threshold_ms) * 6 / 5;
    let shares: Vec<f64> = (0..SPANS)
        .map(|_| {
            // On a thread that was not attached for the previous span.
            let busy = || {
                dispatcher::with_default(&setup.dispatch, || {
                    info_span!("busy").in_scope(|| {
                        let (start, cpu) = (Instant::now(), ThreadTime::now());
                        while start.elapsed() < length {
                            work();
                        }
                        cpu.elapsed()
                    })
                })
            };
            let ran = std::thread::scope(|scope| scope.spawn(busy).join().expect("it ends"));
            100.0 * weight_ns(&setup) / ran.as_nanos() as f64
        })
        .collect();
    median(&shares)
}

/// The same for threads that each work for that long below one root, in a span of their own.
fn of_short_threads(work_ms: u64, source: Source, hertz: Option<u32>) -> f64 {
    let setup = late("250ms", |builder| {
        let builder = builder.source(source);
        hertz.into_iter().fold(builder, Builder::rate)
    });
    let mut ran = Duration::ZERO;
    dispatcher::with_default(&setup.dispatch, || {
        let root = info_span!("root");
        for _ in 0..THREADS {
            let thread = || {
                dispatcher::with_default(&setup.dispatch, || {
                    let cpu = ThreadTime::now();
                    info_span!(parent: &root, "task").in_scope(|| {
                        let cpu = ThreadTime::now();
                        while cpu.elapsed() < Duration::from_millis(work_ms) {
                            work();
                        }
                    });
                    cpu.elapsed()
                })
            };
            ran += std::thread::scope(|scope| scope.spawn(thread).join().expect("it ends"));
        }
    });
    let sampled_ns = weight_ns(&setup);
    assert!(sampled_ns > 0.0, "the root is kept: {:?}", setup.handle.stats());
    100.0 * sampled_ns / ran.as_nanos() as f64
}

pub(crate) fn run() {
    for (source, name) in [(Source::Perf, "sampling"), (Source::Timer, "sampling.timer")] {
        figure(&format!("{name}.covered"), of_busy_spans(250, source), "%");
        for threshold_ms in [100, 50, 20] {
            let covered = of_busy_spans(threshold_ms, source);
            figure(&format!("{name}.covered_{threshold_ms}ms"), covered, "%");
        }
        figure(&format!("{name}.short_threads"), of_short_threads(4, source, None), "%");
        for work_ms in [2, 4, 16] {
            let covered = of_short_threads(work_ms, source, Some(1_000));
            figure(&format!("{name}.short_threads_{work_ms}ms_1000hz"), covered, "%");
        }
    }
}
