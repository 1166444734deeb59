//! Samples on a wrong span, out of 100,000, while tasks migrate between threads.

use std::hint::black_box;

use tracing::{Instrument, dispatcher, info_span};

use crate::measure::{Setup, child, figure};
use crate::tasks::{TASKS, check};

const WANTED: usize = 100_000;

pub(crate) fn run() {
    print!("{}", child("attribution", &[]));
}

pub(crate) fn counted() {
    // A small stack copy and a high rate, to get many samples.
    let setup = Setup::new("root=0ms,1h", |builder| {
        builder.rate(10_000).stack_bytes(2_048).samples_per_profile(WANTED * 4)
    });
    // A parent is closed through the default dispatcher of the thread on which its last child closes.
    dispatcher::set_global_default(setup.dispatch.clone()).expect("no other global default");
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(4).build().expect("a runtime");
    let (mut right, mut wrong) = (0, Vec::new());
    while right + wrong.len() < WANTED {
        one_second(&runtime);
        setup.flush();
        let profiles = setup.memory.take();
        assert!(!profiles.is_empty(), "perf events are needed: {:?}", setup.handle.stats());
        for profile in profiles {
            let (more_right, more_wrong) = check(&profile);
            right += more_right;
            wrong.extend(more_wrong);
        }
    }
    figure("attribution.samples", (right + wrong.len()) as f64, "count");
    figure("attribution.wrong", wrong.len() as f64, "count");
    wrong.iter().take(5).for_each(|wrong| eprintln!("{wrong}"));
}

fn one_second(runtime: &tokio::runtime::Runtime) {
    let root = info_span!(target: "root", "root");
    let tasks: Vec<_> = TASKS
        .iter()
        .map(|(_, work, span)| {
            let task = async move {
                for _ in 0..300 {
                    black_box(work(20_000));
                    tokio::task::yield_now().await;
                }
            };
            runtime.spawn(task.instrument(root.in_scope(span)))
        })
        .collect();
    for task in tasks {
        runtime.block_on(task).expect("no panic");
    }
}
