//! Instructions per hook, beyond those of a bare registry. Unlike times, instruction counts are repeatable, so this
//! benchmark enforces limits on them.
//!
//! `cargo bench --bench instructions` needs valgrind, perf events and `cargo install gungraun-runner --version
//! 0.20.0`. It fails if a count exceeds its limit.

#![allow(missing_docs, clippy::expect_used, reason = "a bench")]

use std::hint::black_box;
use std::time::Duration;

use gungraun::{
    Callgrind, EventKind, LibraryBenchmarkConfig, library_benchmark, library_benchmark_group, main,
};
use tracing::{Dispatch, Span};
use tracing_profiling::ProfilingLayer;
use tracing_subscriber::layer::Identity;
use tracing_subscriber::prelude::*;

/// Iterations per count: enough that a context switch of some thousand instructions does not matter.
const ROUNDS: u64 = 10_000;

fn matched() -> Span {
    tracing::info_span!(target: "matched", "hot")
}

fn unmatched() -> Span {
    tracing::info_span!(target: "unmatched", "hot")
}

/// Which spans are created, and in which subscriber.
#[derive(Clone, Copy)]
enum Kind {
    Bare,
    Matched,
    Unmatched,
}

type New = fn() -> Span;

/// Creates spans of that kind on a thread that has already had some. Each count has a process of its own.
fn new(kind: Kind) -> New {
    let new = if let Kind::Unmatched = kind { unmatched } else { matched };
    let dispatch = if let Kind::Bare = kind { bare() } else { ours() };
    tracing::dispatcher::set_global_default(dispatch).expect("the first");
    // Attaches the thread and runs all one-time initialization.
    for _ in 0..1_000 {
        new().in_scope(|| ());
    }
    new
}

fn made(kind: Kind) -> Span {
    new(kind)()
}

fn bare() -> Dispatch {
    // A registry closes spans only if it has a layer.
    Dispatch::new(tracing_subscriber::registry().with(Identity::new()))
}

fn ours() -> Dispatch {
    let rules = "matched=10s|error".parse().expect("rules of this bench");
    // So low a rate that no sample falls into a count; and spans stay young, however slow valgrind is.
    let builder =
        ProfilingLayer::builder().rules(rules).rate(1).sampling_delay(Duration::from_secs(3600));
    let layer = builder.build().expect("threads");
    Dispatch::new(tracing_subscriber::registry().with(layer))
}

/// Two percent more than was measured when the limit was set, since another compiler lays out some code differently.
fn at_most(instructions: u64) -> LibraryBenchmarkConfig {
    let mut config = LibraryBenchmarkConfig::default();
    let limit = (EventKind::Ir, instructions * ROUNDS);
    config.tool(Callgrind::default().hard_limits([limit]));
    config
}

#[library_benchmark]
#[bench::bare(args = (Kind::Bare), setup = new)]
#[bench::matched(args = (Kind::Matched), setup = new, config = at_most(1_284))]
#[bench::unmatched(args = (Kind::Unmatched), setup = new, config = at_most(64))]
fn new_and_close(new: New) {
    for _ in 0..ROUNDS {
        drop(black_box(new()));
    }
}

#[library_benchmark]
#[bench::bare(args = (Kind::Bare), setup = made)]
#[bench::matched(args = (Kind::Matched), setup = made, config = at_most(609))]
#[bench::unmatched(args = (Kind::Unmatched), setup = made, config = at_most(29))]
fn enter_and_exit(span: Span) -> Span {
    for _ in 0..ROUNDS {
        black_box(&span).in_scope(|| ());
    }
    span
}

library_benchmark_group!(name = hooks, benchmarks = [new_and_close, enter_and_exit]);
main!(library_benchmark_groups = hooks);
