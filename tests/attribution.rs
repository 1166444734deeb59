//! No sample of one task's function is under another task's span, however the tasks migrate.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test")]

mod support;

use std::collections::{HashMap, HashSet};
use std::hint::black_box;
use std::sync::Mutex;
use std::thread::ThreadId;

use support::tasks::{TASKS, check};
use support::{HAS_STACKS, Setup, has_perf};
use tracing::{Instrument, info_span};

/// A segment of a task takes a fraction of the sampling period, so most hold no sample at all.
const ROUNDS: u64 = 20_000;
const SEGMENTS: usize = 400;

#[test]
fn samples_stay_with_their_task() {
    // Keeps only the root. If tasks were kept too, the profile would not wait long after the first of them.
    let setup = Setup::with("1h,[root]=0ms|hung=off", |builder| builder.rate(1_000));
    let threads: Mutex<HashMap<&str, HashSet<ThreadId>>> = Mutex::default();
    let threads: &'static Mutex<_> = Box::leak(Box::new(threads));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(4).build().unwrap();
    // Global: a span's parent is closed on the default subscriber of the thread that drops it.
    tracing::dispatcher::set_global_default(setup.dispatch.clone()).unwrap();
    setup.run(|| {
        let root = info_span!("root");
        let all = TASKS.iter().map(|(name, work, span)| {
            let task = async move {
                for _ in 0..SEGMENTS {
                    black_box(work(ROUNDS));
                    let here = std::thread::current().id();
                    threads.lock().unwrap().entry(*name).or_default().insert(here);
                    tokio::task::yield_now().await;
                }
            };
            let span = root.in_scope(span);
            runtime.spawn(task.instrument(span))
        });
        let all: Vec<_> = all.collect();
        drop(root);
        for task in all {
            runtime.block_on(task).unwrap();
        }
    });

    let migrated = threads.lock().unwrap().values().filter(|threads| threads.len() > 1).count();
    assert!(migrated > 0, "no task has migrated");
    if !HAS_STACKS {
        return;
    }
    let profiles = setup.profiles();
    assert_eq!(profiles.len(), 1);
    let (right, wrong) = check(&profiles[0]);
    assert!(wrong.is_empty(), "{wrong:#?}");
    // On a busy machine, timers rarely find a thread running.
    let enough = if has_perf() { 500 } else { 50 };
    assert!(right > enough, "only {right} samples");
}
