use std::time::{Duration, Instant};

use tracing_profiling::{ProfilingLayer, profiled};
use tracing_subscriber::prelude::*;

fn main() -> Result<(), tracing_profiling::Error> {
    let profiling = ProfilingLayer::from_env()?;
    let _flush = profiling.handle().flush_on_drop();
    tracing_subscriber::registry()
        .with(tracing_subscriber::fmt::layer())
        .with(profiling)
        .init();
    checkout(7);
    Ok(())
}

#[profiled(threshold = "50ms")]
fn checkout(user: u64) -> u64 {
    work_it_out(user)
}

#[inline(never)]
fn work_it_out(mut sum: u64) -> u64 {
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(500) {
        for n in 0..10_000 {
            sum = std::hint::black_box(sum.wrapping_mul(31).wrapping_add(n));
        }
    }
    sum
}
