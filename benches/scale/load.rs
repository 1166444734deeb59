//! The load of one point, in a process of its own.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use cpu_time::{ProcessTime, ThreadTime};
use tracing::{Dispatch, dispatcher, error, info_span};
use tracing_profiling::export::Memory;
use tracing_profiling::profile::{FrameKind, Profile, Sample, SampleKind};
use tracing_profiling::{Handle, ProfilingLayer, Stats};
use tracing_subscriber::layer::Identity;
use tracing_subscriber::prelude::*;

use crate::process::{open_files, resident_kib};

/// The quantity that grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Axis {
    /// The number of threads, which together create [`SPANS_OF_THREADS`] spans per second.
    Threads,
    /// The number of empty spans per second, on two threads.
    Rate,
    /// The length of spans in milliseconds, on one busy thread and on one that blocks repeatedly.
    Length,
}

/// One measurement.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Point {
    pub(crate) axis: Axis,
    pub(crate) number: u64,
    pub(crate) has_layer: bool,
    /// How long to measure.
    pub(crate) time: Duration,
}

const AXES: [(&str, Axis); 3] =
    [("threads", Axis::Threads), ("rate", Axis::Rate), ("length", Axis::Length)];
const SPANS_OF_THREADS: u32 = 500;
const THREADS_OF_RATE: u32 = 2;
/// Until all threads have started and are sampled.
const WARM_UP: Duration = Duration::from_millis(500);
/// How long the blocking thread sleeps each time.
const WAIT: Duration = Duration::from_millis(20);

impl Point {
    pub(crate) fn to_arguments(self) -> [String; 4] {
        let (name, _) =
            AXES.iter().find(|(_, axis)| *axis == self.axis).expect("every axis is listed");
        let time = self.time.as_millis().to_string();
        [(*name).to_owned(), self.number.to_string(), self.has_layer.to_string(), time]
    }

    pub(crate) fn read(arguments: &mut impl Iterator<Item = String>) -> Self {
        let mut next = || arguments.next().expect("an argument");
        let name = next();
        let (_, axis) = AXES.iter().find(|(known, _)| *known == name).expect("an axis");
        let number = next().parse().expect("a number");
        let has_layer = next().parse().expect("true or false");
        let time = Duration::from_millis(next().parse().expect("milliseconds"));
        Self { axis: *axis, number, has_layer, time }
    }
}

impl Point {
    /// Whether a single span lasts for the whole measurement.
    fn is_one_span(self) -> bool {
        self.axis == Axis::Length && u128::from(self.number) >= self.time.as_millis()
    }
}

/// The layer or its absence, and what it exports.
struct Setup {
    dispatch: Dispatch,
    layer: Option<(Handle, Memory)>,
    /// Samples of the kept span of the busy thread.
    samples: Arc<AtomicU64>,
}

impl Setup {
    fn new(has_layer: bool) -> Self {
        let samples = Arc::default();
        if !has_layer {
            let dispatch = Dispatch::new(tracing_subscriber::registry().with(Identity::new()));
            return Self { dispatch, layer: None, samples };
        }
        let (memory, reports) = (Memory::new(), Arc::clone(&samples));
        // The defaults, except that no span is kept for being slow: profiles are not measured here.
        let layer = ProfilingLayer::builder()
            .rules("24h|error|hung=off".parse().expect("rules"))
            .rate(200)
            .cpu_budget(1)
            .exporter(memory.clone())
            .on_kept(move |kept| {
                let busy = kept.spans.iter().find(|span| span.name() == "busy");
                reports.fetch_add(busy.map_or(0, |span| span.samples()), Ordering::Relaxed);
            })
            .build()
            .expect("threads");
        let handle = layer.handle();
        let dispatch = Dispatch::new(tracing_subscriber::registry().with(layer));
        Self { dispatch, layer: Some((handle, memory)), samples }
    }

    fn stats(&self) -> Stats {
        self.layer.as_ref().map(|(handle, _)| handle.stats()).unwrap_or_default()
    }

    /// All profiles.
    fn profiles(&self) -> Vec<Profile> {
        let Some((handle, memory)) = &self.layer else { return Vec::new() };
        handle.flush(Duration::from_secs(60)).expect("flushed");
        memory.take()
    }
}

/// State shared by the threads of a load.
struct Shared {
    is_over: AtomicBool,
    /// Spans, or units of work.
    done: AtomicU64,
    /// CPU time in the span that has a profile, in nanoseconds.
    busy_ns: AtomicU64,
}

/// Runs the load and prints the results.
pub(crate) fn run(point: &Point) {
    let before_kib = resident_kib();
    let files_before = open_files();
    let setup = Setup::new(point.has_layer);
    let shared = Shared {
        is_over: AtomicBool::new(false),
        done: AtomicU64::new(0),
        busy_ns: AtomicU64::new(0),
    };
    let each = point.number as f64 / f64::from(THREADS_OF_RATE);
    // A long span is open until the end.
    let length = Duration::from_millis(point.number);
    let length = if point.is_one_span() { Duration::MAX } else { length };
    std::thread::scope(|scope| {
        match point.axis {
            Axis::Threads => {
                let count = u32::try_from(point.number).expect("fits in 32 bits");
                for number in 0..count {
                    let shared = &shared;
                    let dispatch = &setup.dispatch;
                    scope.spawn(move || {
                        dispatcher::with_default(dispatch, || one_of_many(shared, number, count));
                    });
                }
            }
            Axis::Rate => {
                for _ in 0..THREADS_OF_RATE {
                    scope.spawn(|| {
                        dispatcher::with_default(&setup.dispatch, || at_a_rate(&shared, each));
                    });
                }
            }
            Axis::Length => {
                scope.spawn(|| {
                    dispatcher::with_default(&setup.dispatch, || busy(&shared, length));
                });
                scope.spawn(|| {
                    dispatcher::with_default(&setup.dispatch, || waiting(&shared, length));
                });
            }
        }
        std::thread::sleep(WARM_UP);
        let (start, cpu, done) = (Instant::now(), ProcessTime::now(), shared.done());
        // The warm-up is part of a long span.
        let begun = if point.is_one_span() { WARM_UP } else { Duration::ZERO };
        std::thread::sleep(point.time - begun);
        let (cpu, done) = (cpu.elapsed(), shared.done() - done);
        let seconds = start.elapsed().as_secs_f64();
        let stats = setup.stats();
        println!("cpu_ms {}", cpu.as_secs_f64() * 1e3 / seconds);
        println!("done {}", done as f64 / seconds);
        println!("memory_mib {}", (resident_kib() - before_kib) / 1024.0);
        println!("files {}", open_files() - files_before);
        println!("sampled {}", stats.threads.sampled);
        println!("by_timer {}", stats.threads.sampled_by_timer);
        shared.is_over.store(true, Ordering::Relaxed);
    });
    if point.axis == Axis::Length {
        print_profile(&setup, &shared);
    }
}

impl Shared {
    fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    fn goes_on(&self) -> bool {
        !self.is_over.load(Ordering::Relaxed)
    }
}

/// Spans of a millisecond at a fixed interval: some work, and a sleep.
fn one_of_many(shared: &Shared, number: u32, count: u32) {
    let pause = Duration::from_secs(1) * count / SPANS_OF_THREADS;
    let start = Instant::now();
    // Threads start in turn.
    let mut due = Duration::from_secs(1) * number / SPANS_OF_THREADS;
    // All threads are sampled from the beginning.
    info_span!("first").in_scope(|| ());
    while shared.goes_on() {
        std::thread::sleep(due.saturating_sub(start.elapsed()));
        due += pause;
        info_span!("request").in_scope(|| {
            work(30_000);
            std::thread::sleep(Duration::from_millis(1));
        });
        shared.done.fetch_add(1, Ordering::Relaxed);
    }
}

/// Empty spans at this rate.
fn at_a_rate(shared: &Shared, rate: f64) {
    /// The number of spans between two clock reads.
    const AT_ONCE: u64 = 256;
    let (start, mut made) = (Instant::now(), 0_u64);
    while shared.goes_on() {
        let due = (start.elapsed().as_secs_f64() * rate) as u64;
        if made >= due {
            let next = Duration::from_secs_f64((made + 1) as f64 / rate);
            let pause = next.saturating_sub(start.elapsed());
            std::thread::sleep(pause.clamp(Duration::from_micros(500), Duration::from_millis(100)));
            continue;
        }
        let count = (due - made).min(AT_ONCE);
        for _ in 0..count {
            info_span!("request").in_scope(|| ());
        }
        made += count;
        shared.done.fetch_add(count, Ordering::Relaxed);
    }
}

/// Spans of that length in which the thread always runs, with nearly every sample in another stack. The last one
/// fails.
fn busy(shared: &Shared, length: Duration) {
    let mut random = 1_u64;
    while shared.goes_on() {
        let (start, cpu) = (Instant::now(), ThreadTime::now());
        let span = info_span!("busy").entered();
        while start.elapsed() < length && shared.goes_on() {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            descend(random >> 16, 24);
            shared.done.fetch_add(1, Ordering::Relaxed);
        }
        shared.busy_ns.store(cpu.elapsed().as_nanos() as u64, Ordering::Relaxed);
        if !shared.goes_on() {
            error!(parent: &*span, "so that there is a profile");
        }
    }
}

/// Spans of that length in which the thread blocks repeatedly. The last one fails.
fn waiting(shared: &Shared, length: Duration) {
    while shared.goes_on() {
        let span = info_span!("waiting").entered();
        let start = Instant::now();
        while start.elapsed() < length && shared.goes_on() {
            std::thread::sleep(WAIT.min(length));
        }
        if !shared.goes_on() {
            error!(parent: &*span, "so that there is a profile");
        }
    }
}

/// Calls one of two functions, recursively down to this depth, and works.
fn descend(way: u64, depth: u32) -> u64 {
    match (depth, way & 1) {
        (0, _) => work(3_000),
        (_, 0) => left(way >> 1, depth - 1),
        _ => right(way >> 1, depth - 1),
    }
}

#[inline(never)]
fn left(way: u64, depth: u32) -> u64 {
    black_box(descend(way, depth)) + 1
}

#[inline(never)]
fn right(way: u64, depth: u32) -> u64 {
    black_box(descend(way, depth)) + 2
}

#[inline(never)]
fn work(rounds: u64) -> u64 {
    let mut x = 1_u64;
    let mut i = 0;
    while i < rounds {
        x = black_box((x ^ i) * 3 % 1_000_003);
        i += 1;
    }
    x
}

/// For the last span of each thread: its samples, how many of them are in its profile, and their total weight.
fn print_profile(setup: &Setup, shared: &Shared) {
    let profiles = setup.profiles();
    let (mut points, mut weight, mut waits) = (0, Duration::ZERO, 0);
    for profile in &profiles {
        waits += profile.wait_count();
        for sample in profile.of_kind(SampleKind::OnCpu).filter(|sample| is_of(profile, sample)) {
            points += sample.points.len();
            weight += Duration::from_nanos(sample.points.iter().map(|point| point.weight).sum());
        }
    }
    let busy_ns = shared.busy_ns.load(Ordering::Relaxed).max(1);
    println!("samples {}", setup.samples.load(Ordering::Relaxed));
    println!("samples_kept {points}");
    println!("weight_percent {}", weight.as_nanos() as f64 / busy_ns as f64 * 100.0);
    println!("waits_kept {waits}");
}

/// Whether the sample is of the busy span and has a real stack, not only a remark of the layer.
fn is_of(profile: &Profile, sample: &Sample) -> bool {
    let mut locations = profile.stack(sample.stack);
    profile.span_path(sample.link).first() == Some(&"busy")
        && locations.any(|location| location.kind != FrameKind::Remark)
}
