//! Samples of code that unwind tables do not describe, or only in part: hand-written assembly, C without tables, generated
//! code. For each case and source: how many stacks are whole, and how many end early and say so. Fails if one has a frame
//! that cannot be true: the callers of the case's function are not those that they are, a caller is not the end of a call
//! instruction, or a stack ends early and does not say so.

mod cases;
mod check;

use std::process::ExitCode;
use std::time::Duration;

use check::Checked;
use tracing::{Dispatch, info_span};
use tracing_profiling::export::Memory;
use tracing_profiling::{ProfilingLayer, Redaction, Source};
use tracing_subscriber::prelude::*;

fn main() -> ExitCode {
    println!("| case | source | samples | waits | whole | end early and say so | false |");
    println!("|---|---|--:|--:|--:|--:|--:|");
    let mut is_right = true;
    for source in [Source::Perf, Source::Timer] {
        for (name, case) in cases::all() {
            is_right &= run(source, name, &*case);
        }
    }
    if is_right { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn run(source: Source, name: &'static str, case: &dyn Fn()) -> bool {
    let memory = Memory::new();
    let layer = ProfilingLayer::builder()
        .rules("0ms|hung=off".parse().expect("rules"))
        .source(source)
        .rate(500)
        .sampling_delay(Duration::ZERO)
        .cpu_budget(0)
        // The code is read from the files.
        .redact(Redaction::new().full_paths(true))
        .exporter(memory.clone())
        .build()
        .expect("threads");
    let handle = layer.handle();
    let dispatch = Dispatch::new(tracing_subscriber::registry().with(layer));
    tracing::dispatcher::with_default(&dispatch, || in_span(case));
    handle.flush(Duration::from_secs(60)).unwrap();
    let profiles = memory.profiles();
    let checked = Checked::of(&profiles[0]);
    let Checked { samples, waits, whole, early, .. } = checked;
    let percent = |part: usize| 100.0 * part as f64 / (samples + waits).max(1) as f64;
    let (whole, early) = (percent(whole), percent(early));
    let wrong = checked.wrong.len();
    println!(
        "| {name} | {source:?} | {samples} | {waits} | {whole:.1} % | {early:.1} % | {wrong} |"
    );
    checked.wrong.iter().take(3).for_each(|stack| println!("\n{stack}\n"));
    let stats = handle.stats();
    let is_sampled = samples > 0;
    if !is_sampled {
        println!("no sample: {stats:#?}");
    }
    _ = handle.shutdown(Duration::from_secs(60));
    wrong == 0 && is_sampled
}

/// All callers of this function are the same in each stack.
#[inline(never)]
fn in_span(case: &dyn Fn()) {
    let _span = info_span!("case").entered();
    cases::burn(Duration::from_millis(50));
    case();
    cases::burn(Duration::from_millis(10));
}
