//! What sampling costs the sampled thread, and how much of it arrives.

use std::time::{Duration, Instant};

use cpu_time::ThreadTime;
use perf_event::Builder as PerfBuilder;
use perf_event::events::Software;
use tracing::{dispatcher, info_span};

use crate::measure::{Setup, added, child, figure, interleave, median, ratio, unprivileged, work};

/// The CPU time of some work on a thread of its own, in nanoseconds, with `around` it.
fn cpu_of_work(units: u32, around: impl FnOnce(&mut dyn FnMut()) + Send) -> f64 {
    let mut ns = 0.0;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            around(&mut || {
                let start = ThreadTime::now();
                for _ in 0..units {
                    work();
                }
                ns = start.elapsed().as_nanos() as f64;
            });
        });
    });
    ns
}

fn sampled(setup: &Setup, units: u32) -> f64 {
    cpu_of_work(units, |run| {
        dispatcher::with_default(&setup.dispatch, || info_span!("busy").in_scope(run));
    })
}

pub(crate) fn run() {
    let bare = |units| cpu_of_work(units, |run| run());
    const UNITS: u32 = 1_000;
    let low = Setup::new("1h", |builder| builder.rate(99));
    let high = Setup::new("1h", |builder| builder.rate(999));
    let floor = |units| {
        cpu_of_work(units, |run| {
            let mut event = PerfBuilder::new().kind(Software::CPU_CLOCK);
            event.sample_period(1_000_000_000 / 999);
            let mut event = event.build().expect("perf events");
            event.enable().expect("perf events");
            run();
        })
    };
    let times = interleave(
        31,
        &mut [
            &mut || bare(UNITS),
            &mut || sampled(&low, UNITS),
            &mut || sampled(&high, UNITS),
            &mut || floor(UNITS),
        ],
    );
    let samples = median(&times[0]) / 1e9 * 999.0;
    let microseconds = |ns: f64| ns / samples / 1e3;
    figure("sampling.cost", microseconds(added(&times[0], &times[2])), "us");
    figure("sampling.cost_of_floor", microseconds(added(&times[0], &times[3])), "us");
    figure("sampling.cost_above_floor", microseconds(added(&times[3], &times[2])), "us");
    let percent = |base: &[f64], with: &[f64]| (ratio(base, with) - 1.0) * 100.0;
    figure("sampling.slowdown_99hz", percent(&times[0], &times[1]), "%");
    figure("sampling.slowdown_999hz", percent(&times[0], &times[2]), "%");
    print!("{}", child("delivered", unprivileged()));
}

/// As many busy threads as cores, sampled 999 times a second, with nothing set.
pub(crate) fn delivered() {
    let setup = Setup::new("1h", |builder| builder.rate(999));
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let busy = || {
        dispatcher::with_default(&setup.dispatch, || {
            let _span = info_span!("busy").entered();
            let start = ThreadTime::now();
            let end = Instant::now() + Duration::from_secs(5);
            while Instant::now() < end {
                work();
            }
            start.elapsed().as_secs_f64()
        })
    };
    let cpu_s: f64 = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..cores).map(|_| scope.spawn(busy)).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).sum()
    });
    setup.flush();
    let stats = setup.handle.stats();
    let due = cpu_s * 999.0;
    figure("sampling.delivered_999hz", stats.samples_taken as f64 / due * 100.0, "%");
    let lost = stats.samples_dropped_ring_full as f64 / due * 100.0;
    figure("sampling.lost_to_full_ring_999hz", lost, "%");
}
