//! Resident memory that the layer adds. Each case runs in a process of its own, and is compared with one without the
//! layer.

use std::sync::Barrier;

use tracing::{Dispatch, dispatcher, info_span};
use tracing_subscriber::layer::Identity;
use tracing_subscriber::prelude::*;

use crate::measure::{Setup, child, figure};
use crate::process::{anonymous_kib, resident_kib};

const THREADS: usize = 32;

fn bare_dispatch() -> Dispatch {
    Dispatch::new(tracing_subscriber::registry().with(Identity::new()))
}

fn one_span(dispatch: &Dispatch) {
    dispatcher::with_default(dispatch, || info_span!("one").in_scope(|| ()));
}

/// All, and what of it is anonymous.
fn added_by(action: impl FnOnce()) {
    let [resident, anonymous] = [resident_kib(), anonymous_kib()];
    action();
    println!("{} {}", resident_kib() - resident, anonymous_kib() - anonymous);
}

pub(crate) fn bare() {
    added_by(|| one_span(&bare_dispatch()));
}

pub(crate) fn layer() {
    added_by(|| {
        let setup = Setup::new("1h", |builder| builder);
        dispatcher::with_default(&setup.dispatch, || drop(info_span!("one")));
        // The layer is there until the process ends.
        std::mem::forget(setup);
    });
}

/// The memory of each of many threads that run `action` and then wait.
fn each_thread(dispatch: &Dispatch, action: impl Fn() + Sync) -> f64 {
    dispatcher::with_default(dispatch, &action);
    let before = resident_kib();
    let (there, measured) = (Barrier::new(THREADS + 1), Barrier::new(THREADS + 1));
    let mut after = 0.0;
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                dispatcher::with_default(dispatch, &action);
                there.wait();
                measured.wait();
            });
        }
        there.wait();
        after = resident_kib();
        measured.wait();
    });
    (after - before) / THREADS as f64
}

pub(crate) fn threads_bare() {
    println!("{}", each_thread(&bare_dispatch(), || info_span!("one").in_scope(|| ())));
}

/// Threads that have a profiled span and have not entered one, so that no sample can fall.
pub(crate) fn threads() {
    let setup = Setup::new("1h", |builder| builder);
    println!("{}", each_thread(&setup.dispatch, || drop(info_span!("one"))));
}

pub(crate) fn threads_armed() {
    let setup = Setup::new("1h", |builder| builder);
    println!("{}", each_thread(&setup.dispatch, || info_span!("one").in_scope(|| ())));
    assert!(setup.handle.stats().threads.sampled > 0, "perf events are needed");
}

pub(crate) fn run() {
    let kib = |part| child(part, &[]).trim().parse::<f64>().expect("a number");
    let idle = |part| -> Vec<f64> {
        let text = child(part, &[]);
        text.split_whitespace().map(|kib| kib.parse().expect("a number")).collect()
    };
    let (layer, bare) = (idle("memory_layer"), idle("memory_bare"));
    figure("memory.idle", (layer[0] - bare[0]) / 1024.0, "MiB");
    figure("memory.idle_anonymous", (layer[1] - bare[1]) / 1024.0, "MiB");
    let bare = kib("memory_threads_bare");
    figure("memory.per_thread", kib("memory_threads") - bare, "KiB");
    figure("memory.per_thread_armed", kib("memory_threads_armed") - bare, "KiB");
}
