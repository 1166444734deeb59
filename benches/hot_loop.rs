use tracing_profiling::ProfilingLayer;
use tracing_subscriber::prelude::*;
use std::hint::black_box;
fn main() {
    let mode = std::env::args().nth(1).unwrap();
    let rules = if mode.contains("un") { "nothing_here=10s" } else { "10s|error" };
    let layer = ProfilingLayer::builder().rules(rules.parse().unwrap()).rate(100).build().unwrap();
    let d = tracing::Dispatch::new(tracing_subscriber::registry().with(layer));
    let n: u64 = std::env::args().nth(2).unwrap().parse().unwrap();
    tracing::dispatcher::with_default(&d, || {
        if mode.starts_with("enter") {
            let span = tracing::info_span!("hot");
            for _ in 0..n { span.in_scope(|| black_box(())) }
        } else {
            for _ in 0..n { tracing::info_span!("hot").in_scope(|| black_box(())) }
        }
    });
}
