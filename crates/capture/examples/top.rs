//! A program without `tracing` profiles itself for two seconds with each source, and prints where its time went.
//! `cargo run --release -p tracing-profiling-capture --example top`

#![allow(clippy::print_stdout, reason = "a program")]

use std::collections::HashMap;
use std::hint::black_box;
use std::thread;
use std::time::{Duration, Instant};

use blazesym::symbolize::source::{Elf, Source as Symbols};
use blazesym::symbolize::{Input, Symbolizer};
use tracing_profiling_capture::{ModuleAddress, Profiler, Sample, Settings, Sink, Source};

/// CPU time by the innermost frame.
#[derive(Default)]
struct Top(HashMap<ModuleAddress, u64>);

impl Sink for Top {
    fn take(&mut self, sample: Sample<'_>) {
        if let Some(frame) = sample.frames.first() {
            *self.0.entry(*frame).or_default() += sample.weight_ns;
        }
    }
}

#[inline(never)]
fn count_primes(below: u64) -> usize {
    (2..below).filter(|n| (2..*n).take_while(|d| d * d <= *n).all(|d| n % d != 0)).count()
}

#[inline(never)]
fn collatz_steps(mut n: u64) -> u64 {
    let mut steps = 0;
    while n != 1 {
        n = if n.is_multiple_of(2) { n / 2 } else { 3 * n + 1 };
        steps += 1;
    }
    steps
}

fn name_of(symbolizer: &Symbolizer, profiler: &Profiler, frame: ModuleAddress) -> String {
    let Some((path, address)) = profiler.locate(frame) else { return "[kernel]".to_owned() };
    let found =
        symbolizer.symbolize_single(&Symbols::Elf(Elf::new(path)), Input::VirtOffset(address)).ok();
    found
        .and_then(|it| Some(it.into_sym()?.name.into_owned()))
        .unwrap_or_else(|| path.display().to_string())
}

fn main() -> std::io::Result<()> {
    thread::spawn(|| {
        loop {
            black_box(count_primes(black_box(20_000)));
        }
    });
    thread::spawn(|| {
        loop {
            (1..10_000).for_each(|n| _ = black_box(collatz_steps(black_box(n))));
        }
    });
    for source in [Source::Perf, Source::Timer] {
        let mut profiler = match Profiler::new(Settings { source, ..Settings::default() }) {
            Ok(profiler) => profiler,
            Err(error) => {
                println!("{error}");
                continue;
            }
        };
        let (mut top, start) = (Top::default(), Instant::now());
        while let Some(left) = Duration::from_secs(2).checked_sub(start.elapsed()) {
            profiler.poll(left, &mut top);
        }
        let symbolizer = Symbolizer::new();
        let mut functions: HashMap<String, u64> = HashMap::new();
        for (frame, ns) in top.0 {
            *functions.entry(name_of(&symbolizer, &profiler, frame)).or_default() += ns;
        }
        let mut functions: Vec<_> = functions.into_iter().collect();
        functions.sort_by_key(|(_, ns)| std::cmp::Reverse(*ns));
        println!("{}:", profiler.source());
        for (name, ns) in functions.into_iter().take(5) {
            println!("{:>8.3} s  {name}", Duration::from_nanos(ns).as_secs_f64());
        }
    }
    Ok(())
}
