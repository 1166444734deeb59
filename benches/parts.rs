//! The cost of each stage that a sample passes through: `cargo bench --features _parts --bench parts`.
//!
//! The stages of the collector run on samples of this program, some thirty in a ring. The bench `figures` measures the
//! whole, and compares it with other profilers.

#![allow(missing_docs, clippy::expect_used, clippy::unwrap_used, reason = "a bench")]

use std::hint::black_box;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use divan::Bencher;
use divan::counter::ItemsCount;
use tracing::{Dispatch, info_span};
use tracing_profiling::export::Memory;
use tracing_profiling::parts::{NameLookup, Samples, Stacks};
use tracing_profiling::{Profile, ProfilingLayer, encode};
use tracing_subscriber::prelude::*;

fn main() {
    // Global, so that spans of all threads of a bench go to it.
    let rules = "matched=10s|error".parse().expect("rules of this bench");
    let layer = ProfilingLayer::builder().rules(rules).build().expect("threads");
    tracing_subscriber::registry().with(layer).init();
    divan::main();
}

mod hooks {
    use super::*;

    const THREADS: [usize; 3] = [1, 2, 4];

    #[divan::bench(threads = THREADS)]
    fn enter_and_exit(bencher: Bencher<'_, '_>) {
        bencher.with_inputs(|| info_span!(target: "matched", "hot")).bench_local_values(|span| {
            for _ in 0..100 {
                span.in_scope(|| black_box(()));
            }
            span
        });
    }

    /// New, enter, exit, close.
    #[divan::bench(threads = THREADS)]
    fn whole_life() {
        for _ in 0..100 {
            info_span!(target: "matched", "hot").in_scope(|| black_box(()));
        }
    }

    #[divan::bench(threads = THREADS)]
    fn whole_life_of_a_span_that_no_rule_matches() {
        for _ in 0..100 {
            info_span!(target: "unmatched", "cold").in_scope(|| black_box(()));
        }
    }
}

/// Works under some thirty frames.
#[inline(never)]
fn under(frames: u32) -> u64 {
    if frames > 0 {
        return black_box(under(black_box(frames - 1))).wrapping_add(1);
    }
    let start = Instant::now();
    let mut x = 1_u64;
    while start.elapsed() < Duration::from_millis(1) {
        x = black_box(x).wrapping_mul(31);
    }
    x
}

fn samples() -> &'static Samples {
    static SAMPLES: OnceLock<Samples> = OnceLock::new();
    SAMPLES.get_or_init(|| {
        let samples = Samples::take(|| _ = black_box(under(30))).expect("perf events are needed");
        assert!(samples.count() > 20);
        samples
    })
}

mod collector {
    use super::*;

    #[divan::bench]
    fn drain(bencher: Bencher<'_, '_>) {
        let samples = samples();
        bencher.counter(ItemsCount::new(samples.count())).bench_local(|| samples.drain());
    }

    #[divan::bench]
    fn attribute(bencher: Bencher<'_, '_>) {
        let samples = samples();
        bencher.counter(ItemsCount::new(samples.count())).bench_local(|| samples.attribute());
    }

    #[divan::bench]
    fn unwind(bencher: Bencher<'_, '_>) {
        let (samples, mut stacks) = (samples(), Stacks::new());
        bencher
            .counter(ItemsCount::new(samples.count()))
            .bench_local(|| samples.unwind(&mut stacks));
    }

    /// No unwind tables of the program are cached.
    #[divan::bench]
    fn unwind_for_the_first_time(bencher: Bencher<'_, '_>) {
        let samples = samples();
        bencher
            .counter(ItemsCount::new(samples.count()))
            .with_inputs(Stacks::new)
            .bench_local_refs(|stacks| samples.unwind(stacks));
    }

    /// The loaded modules, from the list of the dynamic linker.
    #[divan::bench]
    fn modules() -> Stacks {
        Stacks::new()
    }
}

mod symbols {
    use super::*;

    #[divan::bench(sample_count = 10)]
    fn symbolize_for_the_first_time(bencher: Bencher<'_, '_>) {
        let frames = samples().frames_of_all(&mut Stacks::new());
        bencher
            .counter(ItemsCount::new(frames.count()))
            .with_inputs(NameLookup::new)
            .bench_local_refs(|names| assert!(names.find(&frames) > 0));
    }

    #[divan::bench]
    fn symbolize(bencher: Bencher<'_, '_>) {
        let frames = samples().frames_of_all(&mut Stacks::new());
        let mut names = NameLookup::new();
        names.find(&frames);
        bencher.counter(ItemsCount::new(frames.count())).bench_local(|| names.find(&frames));
    }
}

/// Half a second at 999 Hz.
fn profile() -> &'static Profile {
    static PROFILE: OnceLock<Profile> = OnceLock::new();
    PROFILE.get_or_init(|| {
        let memory = Memory::new();
        let rules = "0ms".parse().expect("rules of this bench");
        let builder = ProfilingLayer::builder().rules(rules).rate(999).exporter(memory.clone());
        let layer = builder.build().expect("threads");
        let handle = layer.handle();
        let dispatch = Dispatch::new(tracing_subscriber::registry().with(layer));
        tracing::dispatcher::with_default(&dispatch, || {
            info_span!("encoded").in_scope(|| {
                let start = Instant::now();
                while start.elapsed() < Duration::from_millis(500) {
                    black_box(under(start.elapsed().subsec_millis() % 30));
                }
            });
        });
        handle.flush(Duration::from_secs(60)).expect("flushed");
        memory.profiles().pop().expect("perf events are needed")
    })
}

mod encoders {
    use super::*;

    #[divan::bench]
    fn otlp(bencher: Bencher<'_, '_>) {
        let resource = tracing_profiling::Resource::new();
        let profile = profile();
        bencher.bench_local(|| encode::otlp(profile, &resource));
    }

    #[divan::bench]
    fn pprof(bencher: Bencher<'_, '_>) {
        let profile = profile();
        bencher.bench_local(|| encode::pprof(profile));
    }

    #[divan::bench]
    fn html(bencher: Bencher<'_, '_>) {
        let (profile, context) = (profile(), encode::HtmlContext::default());
        bencher.bench_local(|| encode::html(profile, &context));
    }

    #[divan::bench]
    fn folded(bencher: Bencher<'_, '_>) {
        let profile = profile();
        bencher.bench_local(|| encode::folded(profile));
    }
}
