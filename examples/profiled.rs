//! A function as a profiled span, without a server.
//!
//! ```sh
//! cargo run --release --example profiled
//! ```

use std::hint::black_box;

use tracing_profiling::{ProfilingLayer, profiled};
use tracing_subscriber::prelude::*;

fn main() -> Result<(), tracing_profiling::Error> {
    let profiling = ProfilingLayer::from_env()?;
    let _flush = profiling.handle().flush_on_drop();
    tracing_subscriber::registry().with(tracing_subscriber::fmt::layer()).with(profiling).init();
    for limit in [1_000, 3_000_000] {
        count_primes(limit);
    }
    Ok(())
}

/// Only a call that takes longer than this leaves a profile.
#[profiled(threshold = "50ms")]
fn count_primes(limit: u64) -> usize {
    (2..limit).filter(|n| is_prime(*n)).count()
}

#[inline(never)]
fn is_prime(n: u64) -> bool {
    (2..).take_while(|d| d * d <= n).all(|d| !black_box(n).is_multiple_of(d))
}
