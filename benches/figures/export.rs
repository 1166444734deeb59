//! The time from the close of a kept span to its profile on disk.

use std::sync::mpsc;
use std::time::Instant;

use tracing::{dispatcher, info_span};
use tracing_profiling::Directory;

use crate::measure::{Setup, figure, median, work};

pub(crate) fn run() {
    let directory = tempfile::tempdir().expect("a directory");
    let resource = tracing_profiling::resource_from_env();
    let (sender, written) = mpsc::channel();
    let store = Directory::new(directory.path());
    let setup = Setup::new("0ms", |builder| {
        builder.resource(resource).exporter(store).on_kept(move |kept| {
            assert!(!kept.files.is_empty(), "perf events are needed");
            _ = sender.send(Instant::now());
        })
    });
    let mut times = (0..12).map(|_| {
        dispatcher::with_default(&setup.dispatch, || {
            let span = info_span!("kept").entered();
            for _ in 0..300 {
                work();
            }
            drop(span);
        });
        let closed = Instant::now();
        written.recv().expect("a profile").duration_since(closed).as_secs_f64() * 1e3
    });
    let first = times.next().unwrap_or_default();
    figure("export.close_to_file_first", first, "ms");
    figure("export.close_to_file_warm", median(&times.collect::<Vec<_>>()), "ms");
}
