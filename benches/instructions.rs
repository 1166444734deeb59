//! How many instructions each hook takes, over those of a bare registry: unlike times they repeat, so
//! a limit on them is a test.
//!
//! `cargo bench --bench instructions` needs valgrind, perf events and
//! `cargo install gungraun-runner --version 0.20.0`. It fails if a limit is passed.

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

/// So often in each count: a switch of the thread in between, which takes some thousand instructions, is
/// nothing then.
const ROUNDS: u64 = 10_000;

fn matched() -> Span {
    tracing::info_span!(target: "matched", "hot")
}

fn unmatched() -> Span {
    tracing::info_span!(target: "unmatched", "hot")
}

/// Which spans there are, and in which subscriber.
#[derive(Clone, Copy)]
enum Kind {
    Bare,
    Matched,
    Unmatched,
}

type New = fn() -> Span;

/// What makes spans of that kind, on a thread that has had some. Each count is of a process of its own.
fn new(kind: Kind) -> New {
    let new = if let Kind::Unmatched = kind { unmatched } else { matched };
    let dispatch = if let Kind::Bare = kind { bare() } else { ours() };
    tracing::dispatcher::set_global_default(dispatch).expect("the first");
    // Arms the thread, and makes what is made once.
    for _ in 0..1_000 {
        new().in_scope(|| ());
    }
    new
}

fn made(kind: Kind) -> Span {
    new(kind)()
}

fn bare() -> Dispatch {
    // A registry without any layer never closes a span; with one that does nothing it does.
    Dispatch::new(tracing_subscriber::registry().with(Identity::new()))
}

fn ours() -> Dispatch {
    let rules = "matched=10s|error".parse().expect("rules of this bench");
    // Rarely enough that no sample falls into a count; and spans stay young, however slow valgrind is.
    let builder =
        ProfilingLayer::builder().rules(rules).rate(1).arm_after(Duration::from_secs(3600));
    let layer = builder.build().expect("threads");
    Dispatch::new(tracing_subscriber::registry().with(layer))
}

/// A fiftieth more than there were when this was written, in each round: another compiler lays some code out
/// in another way.
fn at_most(instructions: u64) -> LibraryBenchmarkConfig {
    let mut config = LibraryBenchmarkConfig::default();
    let limit = (EventKind::Ir, instructions * ROUNDS);
    config.tool(Callgrind::default().hard_limits([limit]));
    config
}

#[library_benchmark]
#[bench::bare(args = (Kind::Bare), setup = new)]
#[bench::matched(args = (Kind::Matched), setup = new, config = at_most(1_109))]
#[bench::unmatched(args = (Kind::Unmatched), setup = new, config = at_most(802))]
fn new_and_close(new: New) {
    for _ in 0..ROUNDS {
        drop(black_box(new()));
    }
}

#[library_benchmark]
#[bench::bare(args = (Kind::Bare), setup = made)]
#[bench::matched(args = (Kind::Matched), setup = made, config = at_most(580))]
#[bench::unmatched(args = (Kind::Unmatched), setup = made, config = at_most(252))]
fn enter_and_exit(span: Span) -> Span {
    for _ in 0..ROUNDS {
        black_box(&span).in_scope(|| ());
    }
    span
}

library_benchmark_group!(name = hooks, benchmarks = [new_and_close, enter_and_exit]);
main!(library_benchmark_groups = hooks);
