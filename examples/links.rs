//! From spans to their profiles: six kinds of requests, and what the attributes of their spans lead to. It prints a line
//! of JSON for each kept span. `.ci/pyroscope` asks Pyroscope for what they name.
//!
//! ```sh
//! OTEL_EXPORTER_OTLP_PROFILES_ENDPOINT=http://127.0.0.1:4040/v1development/profiles \
//!     cargo run --release --features otlp-http --example links links
//! ```
//!
//! The argument is the name of the service. Without the endpoint, profiles are written to a directory.
#![allow(clippy::print_stdout, reason = "an example, run by hand")]

use std::error::Error;
use std::hint::black_box;
use std::thread::sleep;
use std::time::{Duration, Instant};

use opentelemetry::trace::TracerProvider;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{
    InMemorySpanExporter, SdkTracerProvider, SimpleSpanProcessor, SpanData,
};
use serde_json::{Map, Value};
use tracing::info_span;
use tracing_profiling::ProfilingLayer;
use tracing_subscriber::prelude::*;

const MS: Duration = Duration::from_millis(1);

macro_rules! busy {
    ($($name:ident)+) => {
        $(
            /// Keeps its thread busy.
            #[inline(never)]
            fn $name(time: Duration) {
                let start = Instant::now();
                // The name keeps the compiler from merging the functions.
                let mut x = black_box(stringify!($name)).len() as u64;
                while start.elapsed() < time {
                    for number in 0..1_000 {
                        x = black_box((x ^ number).wrapping_mul(3));
                    }
                }
            }
        )+
    };
}

busy! { run_query serve_alone load_early render_late load_orphan serve_stream_a serve_stream_b }

fn main() -> Result<(), Box<dyn Error>> {
    let service = std::env::args().nth(1).unwrap_or_else(|| "links".to_owned());
    let resource = Resource::builder().with_service_name(service).build();
    let spans = InMemorySpanExporter::default();
    let profiling = ProfilingLayer::builder()
        // Spans of the target `fast` are never slow.
        .rules("100ms|hung=off,fast=1h".parse()?)
        .with_env()?
        .resource(resource.clone())
        .build()?;
    let handle = profiling.handle();
    let provider = SdkTracerProvider::builder()
        .with_resource(resource)
        .with_span_processor(SimpleSpanProcessor::new(spans.clone()))
        .build();
    let opentelemetry = tracing_opentelemetry::layer().with_tracer(provider.tracer("links"));
    tracing_subscriber::registry().with(profiling).with(opentelemetry).init();

    requests();

    if handle.shutdown(60_000 * MS).is_err() {
        return Err("not all profiles were exported".into());
    }
    for span in spans.get_finished_spans()? {
        if let Some(line) = described(&span) {
            println!("{line}");
        }
    }
    Ok(())
}

fn requests() {
    // Short child spans, none of which is kept.
    info_span!("short children").in_scope(|| {
        for _ in 0..10 {
            info_span!(target: "fast", "query").in_scope(|| run_query(60 * MS));
        }
    });
    info_span!("alone").in_scope(|| serve_alone(300 * MS));
    // The child span's profile is exported two seconds after it is kept, while the root is open.
    info_span!("root of an early child").in_scope(|| {
        info_span!("early child").in_scope(|| load_early(200 * MS));
        sleep(3_000 * MS);
        render_late(200 * MS);
    });
    info_span!(target: "fast", "root that is not kept").in_scope(|| {
        info_span!("child of no kept root").in_scope(|| load_orphan(200 * MS));
    });
    // Open for longer than ten seconds when its first stream begins.
    info_span!("connection").in_scope(|| {
        sleep(10_200 * MS);
        let part = || info_span!(target: "fast", "part");
        info_span!("stream a").in_scope(|| part().in_scope(|| serve_stream_a(200 * MS)));
        info_span!("stream b").in_scope(|| part().in_scope(|| serve_stream_b(200 * MS)));
    });
    info_span!("only waits").in_scope(|| sleep(300 * MS));
}

/// A kept span: its ids and the ids of its profiles.
fn described(span: &SpanData) -> Option<String> {
    let ids = span.attributes.iter().filter(|attribute| {
        let key = attribute.key.as_str();
        key == "profile.reason" || key.ends_with("profile.id") || key == "profile.off_cpu_id"
    });
    let ids = ids.map(|id| (id.key.to_string(), Value::from(id.value.to_string())));
    let mut line: Map<_, _> = ids.collect();
    line.remove("profile.reason")?;
    let context = &span.span_context;
    for (key, value) in [
        ("name", span.name.to_string()),
        ("trace", context.trace_id().to_string()),
        ("span", context.span_id().to_string()),
    ] {
        line.insert(key.to_owned(), Value::from(value));
    }
    Some(Value::from(line).to_string())
}
