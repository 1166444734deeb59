//! Replaced rules take bounded memory.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

mod support;

use std::alloc::System;

use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use support::Setup;
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
fn replaced_rule_sets_take_bounded_memory() {
    let setup = Setup::new("1h");
    let open = setup.run(|| info_span!("open all the time", tenant = 7));
    let (before, set_rules) = (live(), |text: &str| setup.handle.set_rules(text.parse().unwrap()));
    (0..5).for_each(|set| set_rules(&rules(set)).unwrap());
    // The last set is in force.
    set_rules("[list]=0ms").unwrap();
    setup.run(spans);
    let mut accepted = 5;
    let error = loop {
        let text = rules(accepted);
        assert!((60_000..70_000).contains(&text.len()), "{} bytes", text.len());
        match set_rules(&text) {
            Ok(()) => accepted += 1,
            Err(error) => break error,
        }
        setup.run(spans);
    };
    assert!((20..1_000).contains(&accepted), "{accepted}");
    assert!(error.to_string().contains("too many different rules"), "{error}");
    assert_eq!(setup.handle.stats().rules.refused, 1);
    let after = live();
    assert!(after - before < 64 << 20, "{} bytes for {accepted} sets", after - before);
    // Those that were in force before can be again, which takes no more.
    for set in 0..20 {
        set_rules(&rules(set % 10)).unwrap();
        setup.run(spans);
        set_rules("off").unwrap();
    }
    let grown = live() - after;
    assert!(grown < 512 * 1024, "grew by {grown} bytes");
    set_rules("1h").unwrap();
    drop(open);
    assert_eq!(setup.kept_names(), [["list"]]);
}
