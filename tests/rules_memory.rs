//! Replaced rules leak no memory.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

mod support;

use std::alloc::System;
use std::time::{Duration, Instant};

use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use support::{PLENTY, Setup};
use tracing::info_span;

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// The maximum number of directives of a set, in 64 KiB.
fn rules(set: usize) -> String {
    let value = "v".repeat(206);
    let rule =
        |number| format!("[{{tenant=\"{set}-{number}-{value}\"}}]=1h|p99|open>{}s", 60 + set);
    (0..256).map(rule).collect::<Vec<_>>().join(",")
}

fn live() -> isize {
    let stats = ALLOCATOR.stats();
    stats.bytes_allocated as isize - stats.bytes_deallocated as isize
}

fn spans() {
    info_span!("cart", tenant = 1).in_scope(|| info_span!("price", tenant = "x").in_scope(|| ()));
    info_span!("list", tenant = tracing::field::Empty).in_scope(|| ());
}

#[test]
fn replaced_rule_sets_leak_nothing() {
    let setup = Setup::new("1h");
    let open = setup.run(|| info_span!("open all the time", tenant = 7));
    let mut after_some = 0;
    for set in 0..60 {
        let text = rules(set);
        assert!((60_000..70_000).contains(&text.len()), "{} bytes", text.len());
        setup.handle.set_rules(text.parse().unwrap()).unwrap();
        setup.run(spans);
        if set == 15 {
            after_some = live();
        }
        // The collector frees them, which waits for a CPU on a busy machine.
        let start = Instant::now();
        while set > 15 && live() - after_some > 512 * 1024 {
            let grown = live() - after_some;
            assert!(start.elapsed() < PLENTY, "grew by {grown} bytes after {set} more sets");
            std::thread::sleep(Duration::from_millis(10));
            setup.run(spans);
        }
    }
    // The last set is in force.
    setup.handle.set_rules("[list]=0ms".parse().unwrap()).unwrap();
    setup.run(spans);
    drop(open);
    assert_eq!(setup.kept_names(), [["list"]]);
}
