//! Resident memory that the layer adds. Each in a process of its own, against one without it.

use std::sync::Barrier;

use tracing::{Dispatch, dispatcher, info_span};
use tracing_subscriber::layer::Identity;
use tracing_subscriber::prelude::*;

use crate::measure::{Setup, child, figure};

const THREADS: usize = 32;

/// Resident bytes, and bytes of perf rings, which the kernel does not count as resident.
fn resident() -> f64 {
    let status = std::fs::read_to_string("/proc/self/smaps_rollup").expect("procfs");
    let rss = status.lines().find_map(|line| line.strip_prefix("Rss:")).expect("a field");
    let kib: f64 = rss.trim().trim_end_matches(" kB").parse().expect("a number");
    let maps = std::fs::read_to_string("/proc/self/maps").expect("procfs");
    let rings = maps.lines().filter(|line| line.contains("[perf_event]")).map(|line| {
        let (start, end) = line.split(' ').next().and_then(|r| r.split_once('-')).expect("a range");
        let number = |hex| u64::from_str_radix(hex, 16).expect("an address");
        number(end) - number(start)
    });
    kib + rings.sum::<u64>() as f64 / 1024.0
}

fn bare_dispatch() -> Dispatch {
    Dispatch::new(tracing_subscriber::registry().with(Identity::new()))
}

fn one_span(dispatch: &Dispatch) {
    dispatcher::with_default(dispatch, || info_span!("one").in_scope(|| ()));
}

pub(crate) fn bare() {
    let before = resident();
    one_span(&bare_dispatch());
    println!("{}", resident() - before);
}

pub(crate) fn layer() {
    let before = resident();
    let setup = Setup::new("1h", |builder| builder);
    dispatcher::with_default(&setup.dispatch, || drop(info_span!("one")));
    println!("{}", resident() - before);
}

/// What each of many threads takes that do `action` and then wait.
fn each_thread(dispatch: &Dispatch, action: impl Fn() + Sync) -> f64 {
    dispatcher::with_default(dispatch, &action);
    let before = resident();
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
        after = resident();
        measured.wait();
    });
    (after - before) / THREADS as f64
}

pub(crate) fn threads_bare() {
    println!("{}", each_thread(&bare_dispatch(), || info_span!("one").in_scope(|| ())));
}

/// Threads that have a profiled span and have not entered one: no sample can fall.
pub(crate) fn threads() {
    let setup = Setup::new("1h", |builder| builder);
    println!("{}", each_thread(&setup.dispatch, || drop(info_span!("one"))));
}

pub(crate) fn threads_armed() {
    let setup = Setup::new("1h", |builder| builder);
    println!("{}", each_thread(&setup.dispatch, || info_span!("one").in_scope(|| ())));
    assert!(setup.handle.stats().threads_sampled > 0, "perf events are needed");
}

pub(crate) fn run() {
    let kib = |part| child(part, &[]).trim().parse::<f64>().expect("a number");
    figure("memory.idle", (kib("memory_layer") - kib("memory_bare")) / 1024.0, "MiB");
    let bare = kib("memory_threads_bare");
    figure("memory.per_thread", kib("memory_threads") - bare, "KiB");
    figure("memory.per_thread_armed", kib("memory_threads_armed") - bare, "KiB");
}
