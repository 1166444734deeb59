//! Memory use of the export of deep stacks.

#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test"
)]

#[path = "../benches/figures/allocator.rs"]
mod allocator;
#[path = "support/deep.rs"]
mod deep;
mod support;

use std::sync::mpsc;
use std::time::Duration;

use deep::{Inlined, walk_often};
use support::HAS_STACKS;
use tracing::{Dispatch, info_span};
use tracing_profiling::{Directory, ProfilingLayer};
use tracing_subscriber::prelude::*;

#[global_allocator]
static ALLOCATOR: allocator::Counting = allocator::Counting;

const MIB: usize = 1 << 20;

/// The peak of allocated bytes above the level before the span closed, after symbols have been read once.
fn peak(stacks: u64, frames: u32, inlined: Inlined) -> usize {
    let directory = tempfile::tempdir().unwrap();
    let store = Directory::new(directory.path());
    let (sender, written) = mpsc::channel();
    let layer = ProfilingLayer::builder()
        .rules("0ms".parse().unwrap())
        .exporter(store)
        .rate(1_000)
        .stack_bytes(65_528)
        .cpu_budget(0)
        .on_kept(move |kept| _ = sender.send(kept.clone()))
        .build()
        .unwrap();
    let handle = layer.handle();
    let dispatch = Dispatch::new(tracing_subscriber::registry().with(layer));
    let peak_of = |stacks| {
        let (peak, kept) = tracing::dispatcher::with_default(&dispatch, || {
            let span = info_span!("deep").entered();
            walk_often(stacks, frames, inlined, Duration::from_micros(1_050));
            allocator::peak(|| {
                drop(span);
                written.recv_timeout(Duration::from_secs(600)).unwrap()
            })
        });
        assert!(kept.samples > 0 && !kept.files.is_empty(), "{kept:?}");
        handle.flush(Duration::from_secs(60)).unwrap();
        println!("{stacks} x {frames} x {inlined:?}: {} KiB, {} samples", peak >> 10, kept.samples);
        peak
    };
    // Reads the symbols, which have their own limit.
    peak_of(100);
    peak_of(stacks)
}

/// There is only one test, since the allocator counts for the whole process.
#[test]
fn an_export_stays_within_its_budget() {
    if !HAS_STACKS {
        return;
    }
    for (stacks, frames, inlined) in [
        (500, 250, Inlined::Eight),
        (2_000, 250, Inlined::Eight),
        (500, 1_000, Inlined::TwentyFour),
    ] {
        let peak = peak(stacks, frames, inlined);
        assert!(peak <= 96 * MIB, "{stacks} x {frames} x {inlined:?}: {} MiB", peak / MIB);
    }
}
