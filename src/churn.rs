//! An end-to-end test of attribution: samples of each function are on the span that the function ran in, also while the
//! collector attaches and detaches threads as fast as possible.

#![cfg(not(tracing_profiling_unsupported))]

use std::collections::VecDeque;
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tracing::{Dispatch, Span, dispatcher, info_span};
use tracing_subscriber::prelude::*;

use crate::export::Memory;
use crate::layer::ProfilingLayer;
use crate::profile::{Profile, SampleKind};
use crate::sampler::Source;
use crate::threads::Timing;

const THREADS: usize = 3;
const SPANS: usize = 5;
/// Of each span. Its functions run for some 20 to 500 µs at a time: short enough for frequent sessions, long enough for
/// samples.
const SEGMENTS: usize = 400;
const ROUNDS: (u64, u64) = (5_000, 120_000);
const WANTED: usize = 100_000;
const ARMINGS: u64 = 3_000;
/// For the CI run that repeats all tests, which sets a short stress time.
const WANTED_AGAIN: usize = 20_000;

type Kind = (&'static str, fn(u64), fn() -> Span);

macro_rules! kinds {
    ($($name:ident)+) => {
        $(
            #[inline(never)]
            fn $name(rounds: u64) {
                // The name keeps the compiler from merging the functions.
                let mut x = black_box(stringify!($name)).len() as u64;
                for i in 0..rounds {
                    x = black_box((x ^ i) * 3 % 1_000_003);
                }
            }
        )+
        const KINDS: &[Kind] = &[$((stringify!($name), $name, || info_span!(stringify!($name)))),+];
    };
}

kinds! { churned0 churned1 churned2 churned3 churned4 churned5 churned6 churned7 }

/// Work outside all spans.
#[inline(never)]
fn churned_outside(rounds: u64) {
    let mut x = black_box("outside").len() as u64;
    for i in 0..rounds {
        x = black_box((x ^ i) * 3 % 1_000_003);
    }
}

/// A span that moves from thread to thread.
struct Task {
    kind: Kind,
    span: Span,
    left: usize,
}

impl Task {
    fn new(number: usize) -> Option<Self> {
        let kind = *KINDS.get(number % KINDS.len())?;
        Some(Self { kind, span: (kind.2)(), left: SEGMENTS })
    }
}

/// Takes spans from the queue, works inside and outside of them, inside `times` as long, and puts them back.
fn work(seed: u64, times: u64, tasks: &Mutex<VecDeque<Task>>, is_over: &AtomicBool) {
    let mut random = seed;
    let mut rounds = move || {
        // A linear congruential generator.
        random =
            random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ROUNDS.0 + (random >> 33) % (ROUNDS.1 - ROUNDS.0)
    };
    let mut next = usize::try_from(seed).unwrap_or(0);
    while !is_over.load(Ordering::Relaxed) {
        let task = tasks.lock().ok().and_then(|mut tasks| tasks.pop_front());
        let Some(mut task) = task else { continue };
        task.span.in_scope(|| task.kind.1(rounds() * times));
        task.left -= 1;
        if task.left == 0 {
            next += 1;
            let Some(another) = Task::new(next) else { return };
            task = another;
        }
        if let Ok(mut tasks) = tasks.lock() {
            tasks.push_back(task);
        }
        // Long enough for the thread to be detached.
        let outside = rounds();
        match outside % 3 {
            0 => churned_outside(outside),
            _ => std::thread::sleep(Duration::from_micros(outside / 100)),
        }
    }
}

/// Returns the number of these functions' samples that are on their span, and describes those that are not.
fn check(profile: &Profile) -> (usize, Vec<String>) {
    let (mut right, mut wrong) = (0, Vec::new());
    for sample in profile.of_kind(SampleKind::OnCpu) {
        let lines = profile.stack(sample.stack).flat_map(|location| &location.lines);
        let names = lines
            .filter_map(|line| profile.function(line.function))
            .map(|function| function.name.as_str());
        let mut last_parts = names.filter_map(|name| name.rsplit("::").next());
        let Some(function) = last_parts.find(|name| name.starts_with("churned")) else { continue };
        let path = profile.span_path(sample.link);
        if path == [function] {
            right += sample.points.len();
        } else {
            wrong.extend(sample.points.iter().map(|_| format!("{function} under {path:?}")));
        }
    }
    (right, wrong)
}

fn wanted(source: Source) -> usize {
    let seconds = std::env::var("PROFILING_TEST_STRESS_SECONDS");
    let wanted = match seconds.ok().and_then(|seconds| seconds.parse().ok()) {
        Some(0..10) => WANTED_AGAIN,
        Some(10_u64..) | None => WANTED,
    };
    // A timer samples a quarter as often, at the usual 250 ticks a second.
    if source == Source::Timer { wanted / 4 } else { wanted }
}

/// Each of these tests keeps all cores busy; together, their collectors would starve.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn all_are_right(source: Source) {
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let memory = Memory::new();
    let mut builder = ProfilingLayer::builder()
        .rules("0ms".parse().unwrap())
        .source(source)
        .sampling_delay(Duration::from_millis(1))
        // A small stack and a high rate: only the number of samples matters here.
        .rate(10_000)
        .stack_bytes(2_048)
        .cpu_budget(0)
        .profiles_per_minute(1_000_000)
        .exporter(memory.clone());
    builder.timing = Timing::FASTEST;
    let layer = builder.build().unwrap();
    let handle = layer.handle();
    let dispatch = Dispatch::new(tracing_subscriber::registry().with(layer));
    let tasks = Mutex::new(dispatcher::with_default(&dispatch, || {
        (0..SPANS).filter_map(Task::new).collect::<VecDeque<_>>()
    }));
    let is_over = AtomicBool::new(false);
    // A timer samples only at the kernel's tick.
    let times = if source == Source::Timer { 8 } else { 1 };
    let (mut right, mut wrong) = (0, Vec::new());
    let start = Instant::now();
    // How much of what is wanted there is, and since when.
    let mut progress = ((0, 0), start);
    std::thread::scope(|scope| {
        for seed in 0..THREADS as u64 {
            let (tasks, is_over, dispatch) = (&tasks, &is_over, &dispatch);
            scope.spawn(move || {
                dispatcher::with_default(dispatch, || work(seed, times, tasks, is_over))
            });
        }
        let is_refused = || handle.stats().threads.unsampled > 0;
        let is_enough =
            |samples| samples >= wanted(source) && handle.stats().threads.attached >= ARMINGS;
        while !is_enough(right + wrong.len())
            && progress.1.elapsed() < Duration::from_secs(60)
            && start.elapsed() < Duration::from_secs(3_600)
            && !is_refused()
        {
            std::thread::sleep(Duration::from_millis(200));
            for profile in memory.take() {
                let (more_right, more_wrong) = check(&profile);
                right += more_right;
                wrong.extend(more_wrong);
            }
            let attached = handle.stats().threads.attached;
            let now = ((right + wrong.len()).min(wanted(source)), attached.min(ARMINGS));
            if now != progress.0 {
                progress = (now, Instant::now());
            }
        }
        is_over.store(true, Ordering::Relaxed);
    });
    let stats = handle.stats();
    let (seconds, attached) = (start.elapsed().as_secs_f64(), stats.threads.attached);
    println!(
        "{source:?}: {right} samples, {} on a wrong span; attached {attached} times in {seconds:.1} s; {stats:?}",
        wrong.len(),
    );
    assert!(wrong.is_empty(), "{wrong:#?}");
    if stats.threads.unsampled > 0 {
        println!("skipped: threads cannot be sampled here");
        return;
    }
    assert!(right >= wanted(source), "too few samples: {right}, {stats:?}");
    assert!(attached >= ARMINGS, "too few sessions: {attached}");
    assert_eq!(stats.samples.dropped_unknown_span + stats.sampling.records_malformed, 0);
    dispatcher::with_default(&dispatch, || drop(tasks));
}

#[test]
fn no_sample_of_perf_is_on_a_wrong_span() {
    let is_allowed =
        perf_event::Builder::new().kind(perf_event::events::Software::CPU_CLOCK).build().is_ok();
    if is_allowed {
        all_are_right(Source::Perf);
    }
}

#[test]
fn no_sample_of_a_timer_is_on_a_wrong_span() {
    all_are_right(Source::Timer);
}
