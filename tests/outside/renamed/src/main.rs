use std::time::{Duration, Instant};

use tracing_subscriber::prelude::*;

/// Re-exports the macro, as a utility crate might.
mod prelude {
    pub use why_slow::profiled as watched;
}

fn main() -> Result<(), why_slow::Error> {
    let profiling = why_slow::ProfilingLayer::builder()
        .rules("off,[other]=1h".parse()?)
        .on_kept(|kept| println!("kept {}", kept.spans[0].name()))
        .build()?;
    let handle = profiling.handle();
    tracing_subscriber::registry().with(profiling).init();
    waits();
    works();
    handle.flush(Duration::from_secs(30)).unwrap();
    Ok(())
}

#[prelude::watched(threshold = "10ms")]
fn waits() {
    std::thread::sleep(Duration::from_millis(30));
}

/// Without the feature `symbols` its frames are addresses.
#[prelude::watched(threshold = "100ms")]
fn works() {
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(300) {
        std::hint::spin_loop();
    }
}
