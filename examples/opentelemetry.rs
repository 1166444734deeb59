//! From a slow span to its profile: the exported OpenTelemetry spans of one trace, and the profile that their
//! attributes name.
//!
//! ```sh
//! cargo run --release --example opentelemetry
//! ```
#![allow(clippy::print_stdout, reason = "an example, run by hand")]

use std::error::Error;
use std::hint::black_box;
use std::time::{Duration, Instant};

use opentelemetry::trace::TracerProvider;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{InMemorySpanExporter, SdkTracerProvider, SimpleSpanProcessor};
use tracing::{info_span, instrument};
use tracing_profiling::ProfilingLayer;
use tracing_profiling::export::Memory;
use tracing_subscriber::prelude::*;

fn main() -> Result<(), Box<dyn Error>> {
    // The same resource for both, so that a backend can correlate them.
    let resource = Resource::builder().with_service_name("shop").build();
    // A service uses an exporter of `opentelemetry-otlp` and writes profiles to a directory.
    let (spans, profiles) = (InMemorySpanExporter::default(), Memory::new());

    let profiling = ProfilingLayer::builder()
        .with_env()?
        .resource(resource.clone())
        .exporter(profiles.clone())
        .build()?;
    let handle = profiling.handle();
    let provider = SdkTracerProvider::builder()
        .with_resource(resource)
        .with_span_processor(SimpleSpanProcessor::new(spans.clone()))
        .build();
    let opentelemetry = tracing_opentelemetry::layer().with_tracer(provider.tracer("shop"));
    tracing_subscriber::registry().with(profiling).with(opentelemetry).init();

    info_span!("request").in_scope(|| {
        load_basket();
        price_basket();
    });

    handle.flush(Duration::from_secs(20))?;
    provider.force_flush()?;
    for span in spans.get_finished_spans()? {
        let context = &span.span_context;
        println!("trace {} span {} {}", context.trace_id(), context.span_id(), span.name);
        for attribute in span.attributes.iter().filter(|a| a.key.as_str().contains("profile.")) {
            println!("    {} = {}", attribute.key, attribute.value);
        }
    }
    for profile in profiles.profiles() {
        println!("\nprofile {}: {}", profile.id, profile.title);
        for note in &profile.notes {
            println!("    {note}");
        }
        println!("    {}", profile.headline);
    }
    Ok(())
}

#[instrument]
fn load_basket() {
    std::thread::sleep(Duration::from_millis(100));
}

#[instrument]
fn price_basket() {
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(300) {
        apply_discounts();
    }
}

#[inline(never)]
fn apply_discounts() {
    (0..10_000_u64).fold(0, |sum, n| black_box(sum ^ (n * 31)));
}
