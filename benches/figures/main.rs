//! All figures, one per line: `figure NAME VALUE UNIT`. `docs/performance.md` has those with a goal.
//!
//! `cargo bench --bench figures` prints them all; `-- hot split` prints those whose names begin with these words.
//! Differences and ratios are medians over interleaved rounds of one run.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stderr,
    clippy::print_stdout,
    reason = "a bench, run by hand"
)]

mod alloc;
mod allocator;
mod attribution;
mod awaits;
mod cold;
mod covered;
#[path = "../../tests/support/deep.rs"]
mod deep;
mod export;
mod export_memory;
mod hosts;
mod hot;
mod idle;
mod interest;
mod ledger;
mod measure;
mod memory;
mod off_cpu;
#[path = "../common/process.rs"]
mod process;
mod rivals;
mod sampling;
mod service;
mod shared;
#[path = "../../tests/support/sleeps.rs"]
mod sleeps;
mod split;
mod switch;
mod symbols;
mod syscalls;
#[path = "../../tests/support/tasks.rs"]
mod tasks;
mod traces;
mod unwind;
mod whole_process;
mod wire;

#[path = "../../examples/shop/mod.rs"]
mod shop;

use std::time::Instant;

use idle::Idle;

#[global_allocator]
static ALLOCATOR: allocator::Counting = allocator::Counting;

type Part = (&'static str, fn());

/// In the order in which they are printed.
const PARTS: &[Part] = &[
    ("hot", hot::run),
    ("ledger", ledger::run),
    ("cold", cold::run),
    ("shared", shared::run),
    ("interest", interest::run),
    ("await", awaits::run),
    ("alloc", alloc::run),
    ("switch", switch::run),
    ("sampling", sampling::run),
    ("sampling.covered", covered::run),
    ("unwind", unwind::run),
    ("attribution", attribution::run),
    // Its processes wait for half a minute, while others are measured.
    ("symbols", symbols::run),
    ("split", split::run),
    ("off_cpu", off_cpu::run),
    ("memory", memory::run),
    ("export", export::run),
    ("export.memory", export_memory::run),
    ("wire", wire::run),
    ("traces", traces::run),
    ("symbols_given_back", symbols::given_back),
    ("process", whole_process::run),
    ("service", service::run),
];

/// Parts that must run in a process of their own.
const CHILDREN: &[Part] = &[
    ("awaits_off", awaits::off),
    ("syscalls", syscalls::child),
    ("shared", shared::child),
    ("attribution", attribution::counted),
    ("busy", rivals::busy),
    ("delivered", sampling::delivered_by_perf),
    ("delivered_timer", sampling::delivered_by_timer),
    ("delivered_pprof_rs", rivals::delivered_by_pprof),
    ("process_perf", whole_process::by_perf),
    ("process_timer", whole_process::by_timer),
    ("watch_perf", off_cpu::watch_by_perf),
    ("watch_timer", off_cpu::watch_by_timer),
    ("service", service::server::child),
    ("symbols", symbols::child),
    ("symbols_without", symbols::child_without),
    ("idle_perf", idle::by_perf),
    ("idle_timer", idle::by_timer),
    #[cfg(feature = "otlp-http")]
    ("idle_otlp", idle::with_otlp),
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
    // The loads of the service are parts of that part.
    let is_of = |name: &str, wanted: &str| {
        name.starts_with(wanted) || name == "service" && wanted.starts_with("service.")
    };
    let is_named = |name: &str| wanted.iter().any(|wanted| is_of(name, wanted));
    let is_wanted = |name: &str| wanted.is_empty() || is_named(name);
    let idle = is_wanted("idle").then(|| Idle::begin(is_named("idle")));
    for (name, run) in PARTS.iter().filter(|(name, _)| is_wanted(name)) {
        let start = Instant::now();
        run();
        eprintln!("# {name}: {:.0} s", start.elapsed().as_secs_f64());
    }
    if let Some(idle) = idle {
        idle.end();
    }
}
