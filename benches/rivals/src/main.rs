//! The hooks compared with the tracing layer of dial9, interleaved in one run, as `cargo bench --bench figures -- hot`
//! does with other rivals.

#![allow(dead_code, reason = "the shared module has more than this needs")]

#[path = "../../figures/measure.rs"]
mod measure;

use std::hint::black_box;

use dial9_tokio_telemetry::telemetry::{NullWriter, TracedRuntime};
use dial9_tokio_telemetry::tracing_layer::Dial9TokioLayer;
use tracing::{Dispatch, dispatcher, info_span};
use tracing_profiling::ProfilingLayer;
use tracing_subscriber::layer::Identity;
use tracing_subscriber::prelude::*;

use measure::{added, figure, interleave, median, time_each};

const ROUNDS: usize = 41;
const EACH: u32 = 20_000;

fn enter_exit() -> f64 {
    let span = info_span!("hot");
    time_each(EACH, || span.in_scope(|| black_box(())))
}

fn whole_life() -> f64 {
    time_each(EACH, || info_span!("hot").in_scope(|| black_box(())))
}

fn main() {
    // dial9 records only threads of its own runtime. Its output is discarded.
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_all();
    let (runtime, _guard) =
        TracedRuntime::builder().build_and_start(builder, NullWriter).expect("a runtime");
    let rules = "10s|error".parse().expect("rules of this bench");
    let ours = ProfilingLayer::builder().rules(rules).build().expect("threads");
    let dispatches = [
        Dispatch::new(tracing_subscriber::registry().with(Identity::new())),
        Dispatch::new(tracing_subscriber::registry().with(ours)),
        Dispatch::new(tracing_subscriber::registry().with(Dial9TokioLayer::new())),
    ];
    runtime.block_on(async {
        for (name, run) in [("enter_exit", enter_exit as fn() -> f64), ("span", whole_life)] {
            let [bare, ours, dial9] = &dispatches;
            let with = |dispatch| dispatcher::with_default(dispatch, run);
            let times = interleave(
                ROUNDS,
                &mut [&mut || with(bare), &mut || with(ours), &mut || with(dial9)],
            );
            figure(&format!("hot.{name}.bare"), median(&times[0]), "ns");
            figure(&format!("hot.{name}.added"), added(&times[0], &times[1]), "ns");
            figure(&format!("hot.{name}.added_by_dial9"), added(&times[0], &times[2]), "ns");
        }
    });
}
