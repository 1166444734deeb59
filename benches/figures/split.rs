//! Where the wall time went, against what the kernel says and what is known.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cpu_time::ThreadTime;
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, apply_filter};
use tracing::{Span, dispatcher, info_span};
use tracing_profiling::Account;

use crate::measure::{Setup, child, figure, median, work_for};

/// What was measured of one span beside its account.
#[derive(Default)]
struct Known {
    /// Of the thread, from just after each enter to just before the exit.
    on_cpu: Duration,
    /// Of the thread, from just before each enter to just after the exit.
    on_cpu_around: Duration,
    /// Of one sleep.
    asleep: Duration,
}

const SPANS: usize = 40;

/// Does something in `span`, and adds the thread's CPU time to what is known.
fn segment(span: &Span, known: &mut Known, action: impl FnOnce()) {
    let around = ThreadTime::now();
    let entered = span.enter();
    let inside = ThreadTime::now();
    action();
    known.on_cpu += inside.elapsed();
    drop(entered);
    known.on_cpu_around += around.elapsed();
}

/// Spans with short segments and a long one, and a sleep.
fn accounts() -> Vec<(Account, Known)> {
    let accounts = Arc::new(Mutex::new(Vec::new()));
    let sink = Arc::clone(&accounts);
    let setup = Setup::new("0ms", |builder| {
        builder.profiles_per_minute(10_000).on_kept(move |kept| {
            sink.lock().expect("no panic").push(*kept.spans[0].account());
        })
    });
    let known: Vec<Known> = dispatcher::with_default(&setup.dispatch, || {
        (0..SPANS)
            .map(|_| {
                let mut known = Known::default();
                let span = info_span!("span");
                // As a task is polled: shorter than the least time between two looks at a CPU
                // clock, with other work between.
                for _ in 0..400 {
                    segment(&span, &mut known, || _ = work_for(10_000));
                    work_for(5_000);
                }
                segment(&span, &mut known, || {
                    for _ in 0..40 {
                        work_for(400_000);
                        std::thread::yield_now();
                    }
                });
                let mut asleep = Duration::ZERO;
                segment(&span, &mut known, || {
                    let start = Instant::now();
                    std::thread::sleep(Duration::from_millis(20));
                    asleep = start.elapsed();
                });
                known.asleep = asleep;
                drop(span);
                // One epoch a span, so that the reports come in order.
                setup.flush();
                known
            })
            .collect()
    });
    let accounts = accounts.lock().expect("no panic").clone();
    assert_eq!(accounts.len(), SPANS);
    accounts.into_iter().zip(known).collect()
}

fn on_cpu_error(accounts: &[(Account, Known)]) -> f64 {
    let errors: Vec<f64> = accounts
        .iter()
        .map(|(account, known)| {
            let truth = known.on_cpu.as_nanos() as f64;
            (account.on_cpu_ns as f64 - truth).abs() / truth * 100.0
        })
        .collect();
    median(&errors)
}

fn off_cpu_error(accounts: &[(Account, Known)]) -> f64 {
    let errors: Vec<f64> = accounts
        .iter()
        .map(|(account, known)| {
            // Beside the sleep the thread may have been preempted: that is not wrong.
            let least = known.asleep.as_nanos() as f64;
            let entered = account.wall_ns - account.idle_ns;
            let most = entered as f64 - known.on_cpu.as_nanos() as f64;
            let off = account.off_cpu_ns as f64;
            (least - off).max(off - most).max(0.0) / 1e6
        })
        .collect();
    median(&errors)
}

pub(crate) fn run() {
    let accounts = accounts();
    figure("split.on_cpu_error", on_cpu_error(&accounts), "%");
    figure("split.off_cpu_error", off_cpu_error(&accounts), "ms");
    let sums: Vec<f64> = accounts
        .iter()
        .map(|(account, _)| {
            let parts = account.on_cpu_ns + account.off_cpu_ns + account.idle_ns;
            (parts as f64 - account.wall_ns as f64).abs() / account.wall_ns as f64 * 100.0
        })
        .collect();
    figure("split.sum_error", median(&sums), "%");
    print!("{}", child("split_without_perf", &[]));
}

/// The same where perf is refused.
pub(crate) fn without_perf() {
    let rules = BTreeMap::from([(libc::SYS_perf_event_open, Vec::new())]);
    let refuse = SeccompAction::Errno(libc::EPERM as u32);
    let architecture = std::env::consts::ARCH.try_into().expect("a known machine");
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, refuse, architecture);
    let program: BpfProgram = filter.expect("a filter").try_into().expect("a program");
    apply_filter(&program).expect("the kernel takes it");
    let accounts = accounts();
    figure("split.on_cpu_error_without_perf", on_cpu_error(&accounts), "%");
    // `Source::Auto` takes timers there.
    figure("split.timer.off_cpu_error", off_cpu_error(&accounts), "ms");
    let broken = accounts.iter().filter(|(account, known)| {
        let Account { on_cpu_ns, on_cpu_error_ns, .. } = account;
        known.on_cpu.as_nanos() > u128::from(on_cpu_ns + on_cpu_error_ns)
            || known.on_cpu_around.as_nanos() < u128::from(on_cpu_ns - on_cpu_error_ns)
    });
    figure("split.bounds_broken_without_perf", broken.count() as f64, "count");
}
