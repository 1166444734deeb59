//! Memory use of exporting deep stacks.

use std::sync::mpsc;
use std::time::Duration;

use tracing::{dispatcher, info_span};
use tracing_profiling::Directory;

use crate::allocator;
use crate::deep::{Inlined, walk_often};
use crate::measure::{Setup, figure};

const MIB: f64 = (1 << 20) as f64;

pub(crate) fn run() {
    figure("export.memory_peak_deep", peak_mib(500), "MiB");
    figure("export.memory_peak_deep_10000", peak_mib(10_000), "MiB");
}

/// The peak of live memory relative to the moment before the span closes, with stacks that all differ.
fn peak_mib(stacks: u64) -> f64 {
    let directory = tempfile::tempdir().expect("a directory");
    let store = Directory::new(directory.path());
    let (sender, written) = mpsc::channel();
    let setup = Setup::new("0ms", |builder| {
        let builder = builder.exporter(store).rate(1_000).cpu_budget(0).stack_bytes(65_528);
        builder.on_kept(move |kept| {
            let why = kept.spans.first().map(tracing_profiling::KeptSpan::profile);
            _ = sender.send((kept.samples, kept.files.len(), why));
        })
    });
    let peak = dispatcher::with_default(&setup.dispatch, || {
        let span = info_span!("deep").entered();
        walk_often(stacks, 250, Inlined::Eight, Duration::from_micros(1_050));
        allocator::peak(|| {
            drop(span);
            written.recv().expect("a profile")
        })
    });
    assert!(peak.1.1 > 0, "a profile is exported: {peak:?}");
    println!("# {stacks} stacks: {} samples exported, {:?}", peak.1.0, setup.handle.stats());
    peak.0 as f64 / MIB
}
