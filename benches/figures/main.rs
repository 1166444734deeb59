//! Every figure of `docs/performance.md`, one a line: `figure NAME VALUE UNIT`.
//!
//! `cargo bench --bench figures` prints them all; `-- hot split` prints those whose names begin
//! so. Differences and ratios are medians over interleaved rounds of one run.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stderr,
    clippy::print_stdout,
    reason = "a bench, run by hand"
)]

mod attribution;
mod export;
mod hot;
mod measure;
mod memory;
mod off_cpu;
mod rivals;
mod sampling;
mod split;
mod syscalls;
#[path = "../../tests/support/tasks.rs"]
mod tasks;
mod unwind;

#[path = "../../examples/shop/mod.rs"]
mod shop;

use std::alloc::System;

use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

type Part = (&'static str, fn());

/// In the order in which they are printed.
const PARTS: &[Part] = &[
    ("hot", hot::run),
    ("sampling", sampling::run),
    ("unwind", unwind::run),
    ("attribution", attribution::run),
    ("split", split::run),
    ("off_cpu", off_cpu::run),
    ("memory", memory::run),
    ("export", export::run),
];

/// What must run in a process of its own.
const CHILDREN: &[Part] = &[
    ("syscalls", syscalls::child),
    ("attribution", attribution::counted),
    ("busy", rivals::busy),
    ("delivered", sampling::delivered_by_perf),
    ("delivered_timer", sampling::delivered_by_timer),
    ("delivered_fine_timer", sampling::delivered_by_fine_timer),
    ("delivered_pprof_rs", rivals::delivered_by_pprof),
    ("split_without_perf", split::without_perf),
    ("watch_perf", off_cpu::watch_by_perf),
    ("watch_timer", off_cpu::watch_by_timer),
    ("memory_bare", memory::bare),
    ("memory_layer", memory::layer),
    ("memory_threads_bare", memory::threads_bare),
    ("memory_threads", memory::threads),
    ("memory_threads_armed", memory::threads_armed),
];

fn main() {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Some(at) = arguments.iter().position(|argument| argument == "--child") {
        let wanted = arguments.remove(at + 1);
        let (_, run) = CHILDREN.iter().find(|(name, _)| *name == wanted).expect("a child");
        return run();
    }
    let wanted: Vec<_> = arguments.iter().filter(|argument| !argument.starts_with("--")).collect();
    for (name, run) in PARTS {
        if wanted.is_empty() || wanted.iter().any(|wanted| name.starts_with(wanted.as_str())) {
            run();
        }
    }
}
