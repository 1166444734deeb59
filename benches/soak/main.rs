//! The layer under a changing load, with every verdict known in advance and every counter checked.
//!
//! `cargo bench --bench soak -- 600` runs for 600 seconds: cycles of the same phases, with a line for each cycle, then
//! figures. To narrow down a failure, `-- 60 flood rules no-symbols` runs only those phases. Fails if a verdict is
//! wrong, if a loss is not counted, or if mappings or threads grow from cycle to cycle.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stderr,
    clippy::print_stdout,
    reason = "a bench, run by hand"
)]

mod counts;
mod phases;
#[path = "../common/process.rs"]
mod process;
mod resident;

use std::alloc::System;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use phases::{PHASES, Stage};
use process::Usage;
use resident::Resident;
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// The default duration.
const SECONDS: u64 = 20;
/// The longest that a phase takes; shorter if that allows more cycles.
const LONGEST_PHASE: Duration = Duration::from_secs(2);
const CYCLES: u32 = 3;
/// With fewer cycles than this, memory growth is not judged.
const CYCLES_FOR_A_TREND: usize = 7;
/// After this many cycles everything rests until no thread is sampled any more, if time allows.
const CYCLES_UNTIL_REST: u32 = 4;
const REST: Duration = Duration::from_secs(40);
const MOST_GROWTH_MIB: f64 = 4.0;
/// Growth of what is allocated and not freed: excludes what the allocator retains.
const MOST_HEAP_GROWTH_MIB: f64 = 1.0;
/// Lines of `/proc/self/maps`: those of the allocator vary.
const MOST_GROWTH_MAPPINGS: f64 = 16.0;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let is_named = |name: &str| arguments.iter().any(|argument| argument == name);
    let seconds = arguments.iter().find_map(|argument| argument.parse().ok());
    let whole = Duration::from_secs(seconds.unwrap_or(SECONDS));
    let mut wanted: Vec<_> = PHASES.iter().filter(|(name, _)| is_named(name)).collect();
    if wanted.is_empty() {
        wanted = PHASES.iter().collect();
    }
    let phases = u32::try_from(wanted.len()).expect("fits in 32 bits");
    let phase = (whole / (CYCLES * (phases + 1))).min(LONGEST_PHASE);
    process::allow_many_files();
    let stage = Stage::new(phase, !is_named("no-symbols"));
    let start = Instant::now();
    let (mut usages, mut heaps, mut wrong) = (Vec::new(), Vec::new(), Vec::new());
    std::thread::scope(|scope| {
        let resident = Resident::start(scope, &stage);
        let threads = Usage::now().threads;
        let mut cycle = 0;
        // No cycle that would far exceed the duration.
        while cycle < CYCLES || start.elapsed() + phase * phases <= whole {
            cycle += 1;
            if cycle % CYCLES_UNTIL_REST == 0 && start.elapsed() + REST + phase * phases <= whole {
                rest(&stage, &mut wrong);
            }
            let resident_ends = resident.begin();
            for (name, run) in &wanted {
                let before = stage.problems();
                run(&stage, &resident);
                if stage.problems() > before {
                    eprintln!("in phase {name} of cycle {cycle}");
                }
            }
            resident_ends();
            let (reported, usage) = stage.end_cycle(threads, &mut wrong);
            let (time, heap) = (start.elapsed(), heap_mib());
            println!("cycle {cycle}, {time:.0?}: {reported}; {usage}, {heap:.2} MiB allocated");
            usages.push(usage);
            heaps.push(heap);
        }
    });
    wrong.extend(stage.take_problems());
    judge_growth(&usages, &heaps, &mut wrong);
    println!("figure soak.seconds {:.0} s", start.elapsed().as_secs_f64());
    println!("figure soak.cycles {} count", usages.len());
    stage.print_figures();
    println!("figure soak.violations {} count", wrong.len());
    for what in &wrong {
        println!("WRONG: {what}");
    }
    if wrong.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Sleeps for long enough that every thread is detached and symbols are freed.
fn rest(stage: &Stage, wrong: &mut Vec<String>) {
    std::thread::sleep(REST);
    let stats = stage.handle().stats();
    if stats.threads.sampled > 0 {
        wrong.push(format!("{} threads are sampled after {REST:?}", stats.threads.sampled));
    }
    println!("rested for {REST:?}: {}, {:.2} MiB of them allocated", Usage::now(), heap_mib());
}

/// Bytes allocated and not freed, in MiB.
fn heap_mib() -> f64 {
    let stats = ALLOCATOR.stats();
    // Growth by `realloc` counts as allocated, shrinkage as freed.
    stats.bytes_allocated.wrapping_sub(stats.bytes_deallocated) as f64 / (1 << 20) as f64
}

/// Compares the last third of the cycles with the first third; the very first cycle is left out.
fn judge_growth(usages: &[Usage], heaps: &[f64], wrong: &mut Vec<String>) {
    let Some(rest @ [second, ..]) = usages.get(1..) else { return };
    for (number, usage) in rest.iter().enumerate() {
        let same = [
            ("perf events", second.events, usage.events),
            ("other files", second.files - second.events, usage.files - usage.events),
            ("threads", second.threads, usage.threads),
            ("perf rings", second.rings, usage.rings),
        ];
        for (what, expected, found) in same {
            if found != expected {
                wrong.push(format!("{found} {what} after cycle {}, not {expected}", number + 2));
            }
        }
    }
    let growth_of = |of: &dyn Fn(&Usage) -> f64| growth(&rest.iter().map(of).collect::<Vec<_>>());
    let mib = growth_of(&|usage| usage.mib);
    let heap_mib = growth(&heaps[1..]);
    let mappings = growth_of(&|usage| usage.mappings as f64);
    println!("figure soak.memory_growth {mib:.2} MiB");
    println!("figure soak.heap_growth {heap_mib:.2} MiB");
    println!("figure soak.mapping_growth {mappings:.0} count");
    println!("figure soak.file_growth {:.0} count", growth_of(&|usage| usage.files as f64));
    println!("figure soak.thread_growth {:.0} count", growth_of(&|usage| usage.threads as f64));
    if usages.len() < CYCLES_FOR_A_TREND {
        return;
    }
    if mib > MOST_GROWTH_MIB {
        wrong.push(format!("memory has grown by {mib:.1} MiB"));
    }
    if heap_mib > MOST_HEAP_GROWTH_MIB {
        wrong.push(format!("allocated memory has grown by {heap_mib:.1} MiB"));
    }
    if mappings > MOST_GROWTH_MAPPINGS {
        wrong.push(format!("mappings have grown by {mappings:.0}"));
    }
}

/// From the median of the first third to that of the last.
fn growth(values: &[f64]) -> f64 {
    let median = |values: &[f64]| {
        let mut values = values.to_vec();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    let third = (values.len() / 3).max(1);
    median(&values[values.len() - third..]) - median(&values[..third])
}
