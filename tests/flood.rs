//! An excessive number of spans.

#![allow(clippy::expect_used, clippy::unwrap_used, clippy::indexing_slicing, reason = "a test")]

mod support;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use support::{HAS_STACKS, Setup, has_perf, is_child, run_child};
use tracing::{error, info_span};
use tracing_profiling::Reason;

/// Spans per second, on both threads together.
const WANTED: u64 = 1_000_000;
/// One of this number of requests fails.
const FAILS: u64 = 1_000;

fn resident_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() / 1024
}

/// Two threads make as many spans as they can for a while: no verdict is wrong, every loss is counted, and memory stays
/// within its budget.
#[test]
fn a_flood_of_spans_on_two_threads() {
    let test = "a_flood_of_spans_on_two_threads";
    if !is_child(test) {
        let output = run_child(test, &[]);
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
        println!("{text}");
        return;
    }
    let seconds = std::env::var("PROFILING_TEST_STRESS_SECONDS");
    let seconds = seconds.map_or(2, |seconds| seconds.parse().unwrap());
    let budget_mib = 8;
    let setup = Setup::with("[request]=1h|error|hung=off,[query]=1h|error=self", |builder| {
        // Symbols have their own limit, and their size depends on the program.
        builder.memory((4 * budget_mib) << 20).rate(200).symbols(false)
    });
    let before_mib = resident_mib();
    let (made, failed) = (AtomicU64::new(0), AtomicU64::new(0));
    let ran_ns = AtomicU64::new(0);
    let start = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let _default = tracing::dispatcher::set_default(&setup.dispatch);
                let before = cpu_time::ThreadTime::now();
                let mut number = 0;
                while start.elapsed() < Duration::from_secs(seconds) {
                    for _ in 0..FAILS {
                        let request = info_span!("request").entered();
                        info_span!("query").in_scope(|| {});
                        if number % FAILS == 0 {
                            error!(parent: &*request, "oh");
                        }
                        number += 1;
                    }
                }
                ran_ns.fetch_add(before.elapsed().as_nanos() as u64, Ordering::Relaxed);
                made.fetch_add(2 * number, Ordering::Relaxed);
                failed.fetch_add(number.div_ceil(FAILS), Ordering::Relaxed);
            });
        }
    });
    let took = start.elapsed();
    let added_mib = resident_mib().saturating_sub(before_mib);
    setup.flush();
    let (made, failed) = (made.into_inner(), failed.into_inner());
    let per_second = made as f64 / took.as_secs_f64();
    println!("{per_second:.0} spans per second for {took:.1?}, {added_mib} MiB more memory");
    let stats = setup.handle.stats();
    assert_eq!(stats.spans.seen, made);
    assert_eq!((stats.spans.kept, stats.kept_for(Reason::Error)), (failed, failed), "{stats:?}");
    // Each kept span has a profile, or a counter states why not.
    let with_id = stats.profiles.exported + stats.profiles.dropped_export_failed;
    let without = stats.spans.no_profile_no_samples
        + stats.spans.no_profile_rate_limit
        + stats.spans.no_profile_queue_full
        + stats.spans.no_profile_exporter_fails
        + stats.spans.no_profile_no_memory
        + stats.spans.no_profile_no_id;
    assert_eq!(with_id + without, failed, "{stats:?}");
    assert_eq!(stats.sampling.records_malformed, 0);
    if HAS_STACKS {
        // Each sample is counted under one of these.
        let taken = stats.samples.taken
            + stats.samples.outside_spans
            + stats.samples.dropped_ring_full
            + stats.samples.dropped_late;
        assert!(taken > 0, "{stats:?}");
        // With timers, a sample represents more or less than 5 ms. Between two spans a session can end, and the next one begin
        // only when the collector has a CPU, so there is no lower bound: tests/truth has those of spans that are open.
        let (ms, ran_ms) = (taken * 5, ran_ns.into_inner() / 1_000_000);
        let is_possible = ms <= ran_ms / 10 * 13 + 50;
        println!("samples of {ms} of {ran_ms} ms; {:?}", stats.threads);
        assert!(!has_perf() || is_possible, "{ms} of {ran_ms} ms: {stats:?}");
    }
    // Two armed threads, tables, and the budget.
    assert!(added_mib < budget_mib as u64 + 16, "{added_mib} MiB");
    // The rate depends on the machine, so it is only reported.
    if per_second < WANTED as f64 {
        println!("fewer than {WANTED} spans per second in this build");
    }
}
