//! The hooks where nothing of them is in the caches of the core, as in a service that does something between two spans.

use std::hint::black_box;
use std::time::Instant;

use opentelemetry::trace::TracerProvider;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tracing::{Dispatch, Span, dispatcher};
use tracing_profiling::ProfilingLayer;
use tracing_subscriber::layer::Identity;
use tracing_subscriber::prelude::*;

use crate::measure::{added, figure, interleave, median};

/// More than the second level of usual cores.
const DATA: usize = 2 << 20;
const SPANS: usize = 150;
const ROUNDS: usize = 15;

/// Some 300 bytes of code of its own for each number, whose constants keep the linker from merging it with others.
#[inline(never)]
fn code<const NUMBER: u64>(mut x: u64) -> u64 {
    macro_rules! steps {
        ($($step:literal)*) => {
            $(x = black_box(x ^ const { (NUMBER * 64 + $step).wrapping_mul(0x9e37_79b9_7f4a_7c15) });)*
        };
    }
    steps!(1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16);
    x
}

macro_rules! codes {
    ($($of_64:literal)*) => { [$(codes!(@8 $of_64, 0 8 16 24 32 40 48 56)),*] };
    (@8 $of_64:literal, $($of_8:literal)*) => { [$([
        code::<{ $of_64 * 64 + $of_8 }>,
        code::<{ $of_64 * 64 + $of_8 + 1 }>,
        code::<{ $of_64 * 64 + $of_8 + 2 }>,
        code::<{ $of_64 * 64 + $of_8 + 3 }>,
        code::<{ $of_64 * 64 + $of_8 + 4 }>,
        code::<{ $of_64 * 64 + $of_8 + 5 }>,
        code::<{ $of_64 * 64 + $of_8 + 6 }>,
        code::<{ $of_64 * 64 + $of_8 + 7 }>,
    ]),*] };
}

type Code = fn(u64) -> u64;

/// 1,024 functions, of more code than the first level holds.
static CODE: [[[Code; 8]; 8]; 16] = codes!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);

/// Replaces what the core's caches hold, and what it has learnt of branches.
fn evict(data: &mut [u8]) {
    for byte in data.iter_mut().step_by(64) {
        *byte = byte.wrapping_add(1);
    }
    let code = CODE.iter().flatten().flatten();
    black_box(code.fold(1, |x, code| black_box(*code)(x)));
}

/// The median time of an action in nanoseconds, with what reading the clock takes.
fn time_cold(dispatch: &Dispatch, mut action: impl FnMut()) -> f64 {
    let mut data = vec![0; DATA];
    dispatcher::with_default(dispatch, || {
        let mut times = Vec::with_capacity(SPANS);
        for _ in 0..SPANS {
            evict(&mut data);
            let start = Instant::now();
            action();
            times.push(start.elapsed().as_nanos() as f64);
        }
        median(&times)
    })
}

fn new() -> Span {
    tracing::info_span!(target: "matched", "cold")
}

fn enter_exit(dispatch: &Dispatch) -> f64 {
    let span = dispatcher::with_default(dispatch, new);
    time_cold(dispatch, || span.in_scope(|| black_box(())))
}

fn whole_life(dispatch: &Dispatch) -> f64 {
    time_cold(dispatch, || new().in_scope(|| black_box(())))
}

pub(crate) fn run() {
    // A registry closes spans only if it has a layer.
    let bare = Dispatch::new(tracing_subscriber::registry().with(Identity::new()));
    let rules = "matched=10s|error".parse().expect("rules of this bench");
    let ours = ProfilingLayer::builder().rules(rules).build().expect("threads");
    let ours = Dispatch::new(tracing_subscriber::registry().with(ours));
    let tracer = SdkTracerProvider::builder().build().tracer("bench");
    let otel = tracing_opentelemetry::layer().with_tracer(tracer);
    let otel = Dispatch::new(tracing_subscriber::registry().with(otel));
    for (name, run) in [("enter_exit", enter_exit as fn(&Dispatch) -> f64), ("span", whole_life)] {
        let times =
            interleave(ROUNDS, &mut [&mut || run(&bare), &mut || run(&ours), &mut || run(&otel)]);
        let (by_ours, by_otel) = (added(&times[0], &times[1]), added(&times[0], &times[2]));
        figure(&format!("cold.{name}.bare"), median(&times[0]), "ns");
        figure(&format!("cold.{name}.added"), by_ours, "ns");
        figure(&format!("cold.{name}.added_by_tracing_opentelemetry"), by_otel, "ns");
        figure(&format!("cold.{name}.ratio_to_tracing_opentelemetry"), by_ours / by_otel, "x");
    }
}
