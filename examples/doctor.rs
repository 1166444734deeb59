//! Says whether samples, stacks, names and waits work on this system: it profiles a load that is known.
//!
//! `cargo run --example doctor`; `TRACING_PROFILING_SOURCE=timer` tries the other source.

#![allow(clippy::print_stdout, reason = "an example")]

use std::time::{Duration, Instant};

use tracing::info_span;
use tracing::level_filters::LevelFilter;
use tracing_profiling::ProfilingLayer;
use tracing_profiling::export::Memory;
use tracing_profiling::profile::{FrameKind, Profile, Sample, SampleKind};
use tracing_subscriber::prelude::*;

const ASLEEP: Duration = Duration::from_millis(200);
const DEADLINE: Duration = Duration::from_secs(60);

#[inline(never)]
fn busy() -> u64 {
    let start = Instant::now();
    let mut x = 1_u64;
    while start.elapsed() < Duration::from_millis(300) {
        x = (0..1_000).fold(x, |x, number| (x ^ number).wrapping_mul(6_364_136_223_846_793_005));
    }
    x
}

/// Whether the stack of a sample has that function, with a line.
fn is_in(profile: &Profile, sample: &Sample, function: &str) -> bool {
    let mut lines = profile.stack(sample.stack).flat_map(|location| &location.lines);
    lines.any(|line| {
        let name = profile.function(line.function).map(|function| &*function.name);
        name.is_some_and(|name| name.ends_with(function)) && line.line > 0
    })
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let memory = Memory::new();
    let builder = ProfilingLayer::builder().with_env()?;
    let profiling = builder.rules("0ms".parse()?).exporter(memory.clone()).build()?;
    let handle = profiling.handle();
    // It wants the span below, without which the layer would not, and shows warnings that name causes.
    let log = tracing_subscriber::fmt::layer().with_filter(LevelFilter::INFO);
    tracing_subscriber::registry().with(log).with(profiling).init();
    info_span!("load").in_scope(|| {
        std::hint::black_box(busy());
        std::thread::sleep(ASLEEP);
    });
    handle.flush(DEADLINE)?;
    println!("{}", handle.source());
    let profiles = memory.profiles();
    let profile = profiles.first().ok_or("the span was kept without a profile")?;
    let times = &profile.spans.first().ok_or("the profile has no span")?.times;
    let (mut sampled, mut named, mut whole) = (Duration::ZERO, Duration::ZERO, Duration::ZERO);
    for sample in profile.samples().iter().filter(|sample| sample.kind == SampleKind::OnCpu) {
        let weight: u64 = sample.points.iter().map(|point| point.weight).sum();
        let weight = Duration::from_nanos(weight);
        let mut frames = profile.stack(sample.stack);
        sampled += weight;
        named += if is_in(profile, sample, "busy") { weight } else { Duration::ZERO };
        let is_whole = frames.all(|location| location.kind != FrameKind::Remark);
        whole += if is_whole { weight } else { Duration::ZERO };
    }
    let waits = profile.samples().iter().filter(|sample| sample.kind == SampleKind::OffCpu);
    let waits = waits.flat_map(|sample| sample.points.iter().map(|point| point.weight));
    let waited = Duration::from_nanos(waits.max().unwrap_or(0));
    println!("on-CPU {:.0?}, sampled {sampled:.0?}", times.on_cpu());
    println!("whole stacks {whole:.0?}, in a function with name and line {named:.0?}");
    println!("a wait of {ASLEEP:.0?} was seen as {waited:.0?}");
    let works = sampled * 2 > times.on_cpu() && named * 2 > sampled && whole * 2 > sampled;
    if !works || waited < ASLEEP / 2 {
        return Err("something does not work: see above, and docs/guide/platforms.md".into());
    }
    println!("all of it works");
    Ok(())
}
