//! The cost of sampling for the sampled thread, and the share of samples that arrive, for each source and its
//! alternatives.

use std::hint::black_box;
use std::time::{Duration, Instant};

use cpu_time::ThreadTime;
use tracing::{dispatcher, info_span};
use tracing_profiling::profile::Profile;
use tracing_profiling::{Builder, Source};

use crate::measure::{Setup, added, child, figure, interleave, median, ratio, unprivileged, work};
use crate::rivals::{self, Pprof, Recorder};

/// Units of work per round, of some 100 to 250 µs each.
const UNITS: u32 = 700;
const ROUNDS: usize = 7;
/// Frames of over a kilobyte each between the work and the start of its thread. The cost of a sample depends on the
/// stack that is copied or unwound, and stacks of services are deep.
const FRAMES: u32 = 32;
/// The CPU time of a round's work on a thread of its own, in nanoseconds, with `around` it.
pub(crate) fn cpu_of_work(around: impl FnOnce(&mut dyn FnMut()) + Send) -> f64 {
    let mut ns = 0.0;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            around(&mut || {
                let start = ThreadTime::now();
                deep(FRAMES, &mut || (0..UNITS).for_each(|_| _ = work()));
                ns = start.elapsed().as_nanos() as f64;
            });
        });
    });
    ns
}

/// Runs something below that many frames.
#[inline(never)]
pub(crate) fn deep(frames: u32, run: &mut dyn FnMut()) {
    let room = black_box([0_u8; 1024]);
    match frames {
        0 => run(),
        _ => deep(frames - 1, run),
    }
    black_box(&room);
}

/// The layer with a source and a rate.
fn ours(set: fn(Builder) -> Builder, hertz: u32) -> Setup {
    Setup::new("1h", |builder| set(builder).rate(hertz))
}

fn perf(builder: Builder) -> Builder {
    builder.source(Source::Perf)
}

fn timer(builder: Builder) -> Builder {
    builder.source(Source::Timer)
}

fn sampled(setup: &Setup) -> f64 {
    cpu_of_work(|run| {
        dispatcher::with_default(&setup.dispatch, || info_span!("busy").in_scope(run));
    })
}

/// The average number of samples per round so far; the first round is the warm-up.
fn samples_a_round(setup: &Setup) -> f64 {
    setup.flush();
    let stats = setup.handle.stats();
    assert!(stats.samples.taken > 0, "needed: {stats:?}");
    (stats.samples.taken + stats.samples.dropped_ring_full) as f64 / (ROUNDS + 1) as f64
}

pub(crate) fn run() {
    let [perf_low, perf_high] = [99, 999].map(|hertz| ours(perf, hertz));
    let [timer_low, timer_high] = [99, 999].map(|hertz| ours(timer, hertz));
    let (mut pprof_low, mut pprof_high) = (Pprof::new(99), Pprof::new(999));
    let recorder = Recorder::find();
    let record = |hertz: Option<u32>| match &recorder {
        Some(recorder) => recorder.cpu_of_work(hertz),
        None => f64::NAN,
    };
    let times = interleave(
        ROUNDS,
        &mut [
            &mut || cpu_of_work(|run| run()),
            &mut || sampled(&perf_low),
            &mut || sampled(&perf_high),
            &mut rivals::perf_floor,
            &mut || sampled(&timer_low),
            &mut || sampled(&timer_high),
            &mut rivals::timer_floor,
            // The baseline again in the middle, since the machine drifts during a round.
            &mut || cpu_of_work(|run| run()),
            &mut || pprof_low.cpu_of_work(),
            &mut || pprof_high.cpu_of_work(),
            &mut || record(None),
            &mut || record(Some(99)),
            &mut || record(Some(999)),
        ],
    );
    let percent = |base: &[f64], with: &[f64]| (ratio(base, with) - 1.0) * 100.0;
    let (first, second) = (&times[0], &times[7]);
    let bare: Vec<f64> = first.iter().zip(second).map(|(a, b)| (a + b) / 2.0).collect();
    // The noise: smaller differences, in either direction, are not significant.
    figure("sampling.slowdown_by_nothing", percent(first, second), "%");
    let slowdowns = |name: &str, base: &[f64], [low, high]: [&[f64]; 2]| {
        figure(&format!("{name}.slowdown_99hz"), percent(base, low), "%");
        figure(&format!("{name}.slowdown_999hz"), percent(base, high), "%");
    };
    let costs = |name: &str, samples: f64, of: &[Vec<f64>]| {
        let microseconds = |base: &[f64], with: &[f64]| added(base, with) / samples / 1e3;
        figure(&format!("{name}.cost"), microseconds(&bare, &of[1]), "us");
        figure(&format!("{name}.cost_of_floor"), microseconds(&bare, &of[2]), "us");
        figure(&format!("{name}.cost_above_floor"), microseconds(&of[2], &of[1]), "us");
        slowdowns(name, &bare, [&of[0], &of[1]]);
    };
    costs("sampling", median(&bare) / 1e9 * 999.0, &times[1..4]);
    costs("sampling.timer", samples_a_round(&timer_high), &times[4..7]);
    let samples = pprof_high.samples as f64 / (ROUNDS + 1) as f64;
    figure("sampling.pprof_rs.cost", added(&bare, &times[9]) / samples / 1e3, "us");
    slowdowns("sampling.pprof_rs", &bare, [&times[8], &times[9]]);
    if recorder.is_some() {
        slowdowns("sampling.perf_record", &times[10], [&times[11], &times[12]]);
    }
    print!("{}", child("delivered", unprivileged()));
    print!("{}", child("delivered_timer", unprivileged()));
    print!("{}", child("delivered_pprof_rs", unprivileged()));
}

/// Keeps as many threads busy as there are cores, with `around` each. Returns the CPU time used, in seconds.
pub(crate) fn keep_busy(seconds: u64, around: impl Fn(&mut dyn FnMut()) + Sync) -> f64 {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let busy = || {
        let mut cpu_s = 0.0;
        around(&mut || {
            let start = ThreadTime::now();
            let end = Instant::now() + Duration::from_secs(seconds);
            while Instant::now() < end {
                work();
            }
            cpu_s = start.elapsed().as_secs_f64();
        });
        cpu_s
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..cores).map(|_| scope.spawn(busy)).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).sum()
    })
}

/// Keeps all cores busy in a span each, which is kept, and sampled 999 times per second.
fn deliver(set: fn(Builder) -> Builder, seconds: u64) -> (Setup, f64) {
    let setup = Setup::new("0ms", |builder| set(builder).rate(999).samples_per_profile(1_000_000));
    let cpu_s = keep_busy(seconds, |run| {
        dispatcher::with_default(&setup.dispatch, || info_span!("busy").in_scope(run));
    });
    setup.flush();
    (setup, cpu_s)
}

/// With the default settings.
pub(crate) fn delivered_by_perf() {
    let (setup, cpu_s) = deliver(perf, 3);
    let stats = setup.handle.stats();
    let due = cpu_s * 999.0;
    figure("sampling.delivered_999hz", stats.samples.taken as f64 / due * 100.0, "%");
    let lost = stats.samples.dropped_ring_full as f64 / due * 100.0;
    figure("sampling.lost_to_full_ring_999hz", lost, "%");
}

/// Where the kernel's tick yields fewer samples than requested, each has more weight.
pub(crate) fn delivered_by_timer() {
    let (setup, cpu_s) = deliver(timer, 2);
    let weight: Duration = setup.memory.profiles().iter().map(Profile::weight).sum();
    figure("sampling.timer.delivered_999hz", weight.as_secs_f64() / cpu_s * 100.0, "%");
    let samples = setup.handle.stats().samples.taken as f64;
    figure("sampling.timer.samples_999hz", samples / cpu_s, "1/s");
}
