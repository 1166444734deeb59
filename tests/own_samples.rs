//! The reported number of samples of each span equals the number in its profile, wherever the samples fell.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "a test")]

mod support;

use std::collections::HashMap;
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use support::{HAS_STACKS, Setup, has_perf, taken_samples};
use tracing::info_span;
use tracing_profiling::profile::{Sample, SampleKind};
use tracing_profiling::{Kept, Profile, Source};

const NAMES: [&str; 4] = ["a", "b", "c", "d"];
const TIME: Duration = Duration::from_secs(10);

/// A chain of nested spans that are entered and exited continuously: nearly all samples fall in hooks, right at the end
/// of one span or at the beginning of another.
fn tree(rounds: u32) {
    let a = info_span!("a");
    let b = info_span!(parent: &a, "b");
    let c = info_span!(parent: &b, "c");
    let d = info_span!(parent: &c, "d");
    for round in 0..rounds {
        a.in_scope(|| {
            b.in_scope(|| c.in_scope(|| d.in_scope(|| black_box(round))));
            // In the kernel, where samples take longer.
            b.in_scope(|| (0..round % 8).for_each(|_| drop(std::fs::metadata("/proc/self/stat"))));
            c.in_scope(|| black_box(round));
        });
    }
}

/// The number of samples in each span itself.
fn counts<'a>(
    profile: &'a Profile,
    samples: impl Iterator<Item = &'a Sample>,
) -> HashMap<&'a str, u64> {
    let mut counts = HashMap::new();
    for sample in samples {
        let link = profile.link(sample.link.unwrap()).unwrap();
        *counts.entry(link.span.as_ref()).or_default() += sample.points.len() as u64;
    }
    counts
}

/// Compares the reported numbers of samples of one tree's spans with its profile.
fn compare(kept: &Kept, profile: &Profile) -> Option<String> {
    // Samples of a span also count for the spans around it.
    let reported: HashMap<_, _> =
        kept.spans.iter().map(|span| (span.name(), (span.samples(), span.profile()))).collect();
    let found = counts(profile, taken_samples(profile));
    // Where a thread was preempted outside of a span that is open.
    let idle = counts(profile, profile.of_kind(SampleKind::Await));
    let mut wrong = Vec::new();
    let mut inside = 0;
    for name in NAMES.iter().rev() {
        let own = found.get(name).copied().unwrap_or(0);
        inside += own;
        let (reported, id) = reported[name];
        if reported != inside || id.is_ok() != (inside > 0) {
            wrong.push(format!(
                "{name}: reported {reported} ({id:?}), found {inside}, {own} of them its own"
            ));
        }
        // It is a sample of the spans around the one that is idle.
        inside += idle.get(name).copied().unwrap_or(0);
    }
    (!wrong.is_empty()).then(|| wrong.join("; "))
}

/// For that time, and until there are samples.
fn agree(source: Source, hertz: u32) {
    let setup = Setup::with("0ms", |builder| {
        builder.rate(hertz).source(source).profiles_per_minute(1_000_000)
    });
    let has_ended = AtomicBool::new(false);
    let is_lossless = || {
        let stats = setup.handle.stats();
        // (Records for which the ring has no room are not counted here.)
        stats.samples.dropped_memory
            + stats.samples.dropped_intervals_full
            + stats.samples.dropped_span_events_full
            == 0
    };
    let start = Instant::now();
    let (mut compared, mut samples, mut wrong) = (0, 0, Vec::new());
    std::thread::scope(|scope| {
        // Load, so that threads are preempted where they are sampled.
        for _ in 0..4 {
            scope.spawn(|| {
                while !has_ended.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        while start.elapsed() < TIME || samples == 0 && start.elapsed() < support::PLENTY {
            let burst = || {
                let _default = tracing::dispatcher::set_default(&setup.dispatch);
                (0..8).for_each(|_| tree(1_000));
            };
            let threads = [scope.spawn(burst), scope.spawn(burst)];
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            setup.handle.flush(support::PLENTY).unwrap();
            let profiles = setup.memory.profiles();
            for kept in setup.kept.lock().unwrap().drain(..) {
                let Some(id) = kept.profile else { continue };
                let profile = profiles.iter().find(|profile| profile.id == id).unwrap();
                let waits = profile.of_kind(SampleKind::OffCpu).count();
                if !is_lossless() || waits > 0 || kept.spans.len() != NAMES.len() {
                    continue;
                }
                compared += 1;
                samples += counts(profile, taken_samples(profile)).values().sum::<u64>();
                wrong.extend(compare(&kept, profile));
            }
        }
        has_ended.store(true, Ordering::Relaxed);
    });
    assert_eq!(wrong, [""; 0], "of {compared} profiles with {samples} samples");
    assert!(samples > 0);
}

#[test]
fn by_perf() {
    if has_perf() {
        agree(Source::Perf, 1_000);
    }
}

#[test]
fn by_timers() {
    if HAS_STACKS {
        agree(Source::Timer, 1_000);
    }
}
