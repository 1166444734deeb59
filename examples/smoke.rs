use std::time::{Duration, Instant};
use tracing_profiling::ProfilingLayer;
use tracing_subscriber::prelude::*;

#[inline(never)]
fn guilty(until: Instant) -> u64 {
    let mut x = 1u64;
    while Instant::now() < until {
        for i in 0..10000u64 { x = x.wrapping_mul(31).wrapping_add(i ^ (x >> 7)); }
    }
    x
}

fn main() -> Result<(), tracing_profiling::Error> {
    let layer = ProfilingLayer::builder().with_env()?.on_kept(|k| println!("{k:#?}")).build()?;
    let h = layer.handle();
    let _g = h.flush_on_drop();
    tracing_subscriber::registry().with(tracing_subscriber::fmt::layer()).with(layer).init();
    for i in 0..3 {
        let _s = tracing::info_span!("outer", i).entered();
        let _t = tracing::info_span!("inner").entered();
        std::hint::black_box(guilty(Instant::now() + Duration::from_millis(if i == 1 { 600 } else { 60 })));
        if i == 1 { std::thread::sleep(Duration::from_millis(100)); }
    }
    println!("{}", h.flush(Duration::from_secs(5)));
    println!("{:#?}", h.stats());
    Ok(())
}
