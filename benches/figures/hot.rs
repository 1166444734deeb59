//! The cost of a profiled span that is not kept, and of a span that no rule matches.

use std::hint::black_box;
use std::time::{Duration, Instant};

use opentelemetry::trace::TracerProvider;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tracing::{Dispatch, dispatcher};
use tracing_flame::FlameLayer;
use tracing_profiling::export::Memory;
use tracing_profiling::{ProfilingLayer, Source};
use tracing_subscriber::layer::Identity;
use tracing_subscriber::prelude::*;

use crate::allocator;
use crate::measure::{added, child, figure, interleave, median, time_each};

const RULES: &str = "matched=10s|error";

fn ours() -> ProfilingLayer {
    with_source(Source::Auto)
}

fn with_source(source: Source) -> ProfilingLayer {
    let rules = RULES.parse().expect("rules of this bench");
    ProfilingLayer::builder().rules(rules).source(source).build().expect("threads")
}

/// Spans are sampled from their first enter, and may be kept after 16 µs.
fn of_old_spans(source: Source) -> Dispatch {
    let rules = "matched=1ms".parse().expect("rules of this bench");
    let builder = ProfilingLayer::builder().rules(rules).source(source).exporter(Memory::new());
    let layer = builder.sampling_delay(Duration::ZERO).build().expect("threads");
    Dispatch::new(tracing_subscriber::registry().with(layer))
}

/// Runs `body` with a span of a target that the rules match, or of one that they do not.
macro_rules! with_target {
    ($matched:expr, $body:expr) => {
        if $matched {
            $body(&|| tracing::info_span!(target: "matched", "hot"))
        } else {
            $body(&|| tracing::info_span!(target: "unmatched", "hot"))
        }
    };
}

type Run = fn(&Dispatch, bool) -> f64;
type New<'a> = &'a dyn Fn() -> tracing::Span;

fn enter_exit(dispatch: &Dispatch, is_matched: bool) -> f64 {
    dispatcher::with_default(dispatch, || {
        with_target!(is_matched, |new: New<'_>| {
            let span = new();
            time_each(20_000, || span.in_scope(|| black_box(())))
        })
    })
}

fn whole_life(dispatch: &Dispatch, is_matched: bool) -> f64 {
    dispatcher::with_default(dispatch, || {
        with_target!(is_matched, |new: New<'_>| {
            time_each(20_000, || new().in_scope(|| black_box(())))
        })
    })
}

/// The same for a span with two fields whose values are shown, and one whose value is not.
fn named_life(dispatch: &Dispatch) -> f64 {
    let new = || {
        let method = tracing::field::display("GET");
        tracing::info_span!(target: "matched", "hot", method, http.route = "/cart/{id}", user = 7)
    };
    dispatcher::with_default(dispatch, || time_each(20_000, || new().in_scope(|| black_box(()))))
}

/// One enter and exit every 200 µs, with accesses to other memory in between.
fn enter_exit_cold(dispatch: &Dispatch, is_matched: bool) -> f64 {
    let mut other = vec![0_u8; 256 * 1024];
    dispatcher::with_default(dispatch, || {
        with_target!(is_matched, |new: New<'_>| {
            let span = new();
            let mut times = Vec::with_capacity(200);
            for round in 0..200_usize {
                let start = Instant::now();
                while start.elapsed() < Duration::from_micros(200) {
                    other.iter_mut().step_by(64).for_each(|byte| *byte = round as u8);
                }
                let start = Instant::now();
                span.in_scope(|| black_box(()));
                times.push(start.elapsed().as_nanos() as f64);
            }
            median(&times)
        })
    })
}

fn allocations(dispatch: &Dispatch) -> usize {
    whole_life(dispatch, true);
    allocator::allocations(|| _ = whole_life(dispatch, true))
}

pub(crate) fn run() {
    // A registry closes spans only if it has a layer.
    let bare = Dispatch::new(tracing_subscriber::registry().with(Identity::new()));
    let with_ours = Dispatch::new(tracing_subscriber::registry().with(ours()));
    let provider = SdkTracerProvider::builder().build();
    let tracer = || provider.tracer("bench");
    let with_otel = Dispatch::new(
        tracing_subscriber::registry().with(tracing_opentelemetry::layer().with_tracer(tracer())),
    );
    let with_both = Dispatch::new(
        tracing_subscriber::registry()
            .with(ours())
            .with(tracing_opentelemetry::layer().with_tracer(tracer())),
    );
    // The output is discarded.
    let flame = FlameLayer::new(std::io::sink());
    let by_source =
        |source| Dispatch::new(tracing_subscriber::registry().with(with_source(source)));
    let (with_timer, with_none) = (by_source(Source::Timer), by_source(Source::None));
    let with_flame = Dispatch::new(tracing_subscriber::registry().with(flame));

    let compare = |rounds, run: Run| {
        interleave(
            rounds,
            &mut [
                &mut || run(&bare, true),
                &mut || run(&with_ours, true),
                &mut || run(&with_ours, false),
                &mut || run(&with_otel, true),
                &mut || run(&with_both, true),
                &mut || run(&with_flame, true),
                &mut || run(&with_timer, true),
                &mut || run(&with_none, true),
            ],
        )
    };
    let times = compare(41, enter_exit);
    figure("hot.enter_exit.bare", median(&times[0]), "ns");
    figure("hot.enter_exit.added", added(&times[0], &times[1]), "ns");
    figure("hot.timer.enter_exit.added", added(&times[0], &times[6]), "ns");
    figure("hot.none.enter_exit.added", added(&times[0], &times[7]), "ns");
    figure("hot.enter_exit.added_by_tracing_opentelemetry", added(&times[0], &times[3]), "ns");
    figure("hot.enter_exit.added_by_tracing_flame", added(&times[0], &times[5]), "ns");
    figure("hot.unmatched.enter_exit.added", added(&times[0], &times[2]), "ns");
    let old = [Source::Auto, Source::Timer, Source::None].map(of_old_spans);
    let old = interleave(
        21,
        &mut [
            &mut || enter_exit(&bare, true),
            &mut || enter_exit(&old[0], true),
            &mut || enter_exit(&old[1], true),
            &mut || enter_exit(&old[2], true),
        ],
    );
    figure("hot.old.enter_exit.added", added(&old[0], &old[1]), "ns");
    figure("hot.old.timer.enter_exit.added", added(&old[0], &old[2]), "ns");
    figure("hot.old.none.enter_exit.added", added(&old[0], &old[3]), "ns");
    let cold = interleave(
        11,
        &mut [&mut || enter_exit_cold(&bare, true), &mut || enter_exit_cold(&with_ours, true)],
    );
    figure("hot.enter_exit.added_200us_apart", added(&cold[0], &cold[1]), "ns");
    print!("{}", child("syscalls", &[]));
    let times = compare(41, whole_life);
    let by_otel = added(&times[0], &times[3]);
    let beside_otel = added(&times[3], &times[4]);
    figure("hot.span.bare", median(&times[0]), "ns");
    figure("hot.span.added", added(&times[0], &times[1]), "ns");
    figure("hot.timer.span.added", added(&times[0], &times[6]), "ns");
    figure("hot.none.span.added", added(&times[0], &times[7]), "ns");
    figure("hot.span.added_by_tracing_opentelemetry", by_otel, "ns");
    figure("hot.span.added_by_tracing_flame", added(&times[0], &times[5]), "ns");
    figure("hot.span.added_beside_otel", beside_otel, "ns");
    figure("hot.span.ratio_to_tracing_opentelemetry", beside_otel / by_otel, "x");
    figure("hot.unmatched.span.added", added(&times[0], &times[2]), "ns");
    let more = allocations(&with_ours).saturating_sub(allocations(&bare));
    figure("hot.span.allocations", more as f64 / 20_000.0, "count");
    let named = interleave(21, &mut [&mut || named_life(&bare), &mut || named_life(&with_ours)]);
    figure("hot.named.span.added", added(&named[0], &named[1]), "ns");
    clock();
}

/// The lower bound: an enter and exit reads the time stamp counter twice, the life of a span four times.
fn clock() {
    let clock = quanta::Clock::new();
    let times = interleave(11, &mut [&mut || time_each(200_000, || _ = black_box(clock.raw()))]);
    figure("floor.clock_read", median(&times[0]), "ns");
}
