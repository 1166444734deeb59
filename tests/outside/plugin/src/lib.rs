//! A library that profiles itself with timers, and ends that before it is unloaded.

use std::time::{Duration, Instant};

use tracing_profiling::{ProfilingLayer, Source};
use tracing_subscriber::prelude::*;

#[unsafe(no_mangle)]
pub extern "C" fn run_with_timers() -> bool {
    let builder = ProfilingLayer::builder().rules("1h".parse().unwrap()).sampling_delay(Duration::ZERO);
    let layer = builder.source(Source::Timer).build().unwrap();
    let handle = layer.handle();
    let dispatch = tracing::Dispatch::new(tracing_subscriber::registry().with(layer));
    let start = Instant::now();
    while handle.stats().samples.taken == 0 && start.elapsed() < Duration::from_secs(60) {
        tracing::dispatcher::with_default(&dispatch, || {
            let _span = tracing::info_span!("in a plugin").entered();
            let start = Instant::now();
            while start.elapsed() < Duration::from_millis(50) {
                std::hint::spin_loop();
            }
        });
    }
    handle.stats().samples.taken > 0 && handle.shutdown(Duration::from_secs(60)).is_ok()
}
