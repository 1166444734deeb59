//! No sample of one task's function under another task's span, however the tasks migrate.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test")]

mod support;

use std::collections::{HashMap, HashSet};
use std::hint::black_box;
use std::sync::Mutex;
use std::thread::ThreadId;

use support::{Setup, functions};
use tracing::{Instrument, Span, info_span};

type Task = (&'static str, fn(u64) -> u64, fn() -> Span);

/// For each name a function that burns CPU, and a span.
macro_rules! tasks {
    ($($name:ident)*) => {
        $(
            #[inline(never)]
            fn $name(rounds: u64) -> u64 {
                let mut x = rounds;
                let mut i = 0;
                while i < rounds {
                    x = black_box((x ^ i) * 3 % 1_000_003);
                    i += 1;
                }
                x
            }
        )*
        const TASKS: &[Task] =
            &[$((stringify!($name), $name, || info_span!(stringify!($name)))),*];
    };
}

tasks! {
    t00 t01 t02 t03 t04 t05 t06 t07 t08 t09 t10 t11 t12 t13 t14 t15
    t16 t17 t18 t19 t20 t21 t22 t23 t24 t25 t26 t27 t28 t29 t30 t31
    t32 t33 t34 t35 t36 t37 t38 t39 t40 t41 t42 t43 t44 t45 t46 t47
    t48 t49 t50 t51 t52 t53 t54 t55 t56 t57 t58 t59 t60 t61 t62 t63
}

/// A segment of a task takes a fraction of the sampling period, so most hold no sample at all.
const ROUNDS: u64 = 20_000;
const SEGMENTS: usize = 400;

#[test]
fn samples_stay_with_their_task() {
    let setup = Setup::with("0ms", |builder| builder.rate(1_000));
    let threads: Mutex<HashMap<&str, HashSet<ThreadId>>> = Mutex::default();
    let threads: &'static Mutex<_> = Box::leak(Box::new(threads));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(4).build().unwrap();
    // Global: a span's parent is closed on the default subscriber of whichever thread drops it.
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
    assert!(migrated > 0, "a test of migrating tasks needs some that migrate");
    if !setup.has_perf() {
        return;
    }
    let profiles = setup.profiles();
    assert_eq!(profiles.len(), 1);
    let profile = &profiles[0];
    let (mut right, mut wrong) = (0, Vec::new());
    for sample in profile.samples() {
        let path = profile.span_path(sample.link);
        for function in functions(profile, sample) {
            let Some(name) = function.strip_prefix("attribution::") else {
                continue;
            };
            if !TASKS.iter().any(|(task, ..)| *task == name) {
                continue;
            }
            if path == ["root", name] {
                right += sample.points.len();
            } else {
                wrong.push(format!("{name} under {path:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(right > 500, "{right} samples are too few to say anything");
}
