//! A host program with its own allocator. The other hostile programs are in `tests/hostile/`.

#![cfg(target_os = "linux")]
#![allow(
    dead_code,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stdout,
    unsafe_code,
    reason = "a test, which uses only some of the shared helpers"
)]

#[path = "hostile/host.rs"]
mod host;
#[path = "hostile/runner.rs"]
mod runner;
mod support;
#[path = "hostile/threads.rs"]
mod threads;

use tracing_profiling::ProfilingAllocator;

#[global_allocator]
static ALLOCATOR: ProfilingAllocator<mimalloc::MiMalloc> =
    ProfilingAllocator::new(mimalloc::MiMalloc);

fn scenario() {
    host::sampled(|_| {
        threads::allocate(8, 500);
        for _ in 0..100 {
            threads::eight_short_threads();
        }
    });
}

#[test]
fn perf() {
    runner::play("perf", "perf", scenario);
}

#[test]
fn timer() {
    runner::play("timer", "timer", scenario);
}
