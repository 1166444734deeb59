//! The shop of `slow_requests`, of which only the traces of kept requests go out, and one in a hundred others: whole.
//!
//! ```sh
//! cargo run --release --example kept_traces
//! ```
//!
//! They also go to a collector if the usual variables name one:
//!
//! ```sh
//! OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318 OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf \
//!     cargo run --release --features otlp-http --example kept_traces
//! ```
#![allow(clippy::print_stdout, reason = "an example, run by hand")]

use std::collections::HashMap;
use std::time::Duration;

use opentelemetry::trace::{TraceId, TracerProvider};
#[cfg(feature = "opentelemetry-otlp")]
use opentelemetry_otlp::SpanExporter;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{
    BatchSpanProcessor, InMemorySpanExporter, Sampler, SdkTracerProvider, SimpleSpanProcessor,
    SpanData,
};
use tracing_profiling::{KeptTraces, ProfilingLayer};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::prelude::*;

mod shop;

use shop::AnyError;

fn main() -> Result<(), AnyError> {
    let resource = Resource::builder().with_service_name("shop").build();
    let profiling = ProfilingLayer::builder().with_env()?.resource(resource.clone()).build()?;
    let handle = profiling.handle();
    let runtime = tokio::runtime::Runtime::new()?;
    let _inside = runtime.enter();
    // Only for what is printed at the end: a service has neither of them in memory.
    let (all, out) = (InMemorySpanExporter::default(), InMemorySpanExporter::default());
    let batches = BatchSpanProcessor::builder(out.clone()).build();
    let provider = SdkTracerProvider::builder()
        .with_sampler(Sampler::AlwaysOn)
        .with_resource(resource)
        .with_span_processor(SimpleSpanProcessor::new(all.clone()))
        .with_span_processor(KeptTraces::new(batches).one_in(100));
    #[cfg(feature = "opentelemetry-otlp")]
    let provider = match std::env::var_os("OTEL_EXPORTER_OTLP_ENDPOINT") {
        Some(_) => {
            let batches = BatchSpanProcessor::builder(SpanExporter::builder().build()?).build();
            provider.with_span_processor(KeptTraces::new(batches).one_in(100))
        }
        None => provider,
    };
    let provider = provider.build();
    let opentelemetry = tracing_opentelemetry::layer().with_tracer(provider.tracer("shop"));
    tracing_subscriber::registry()
        .with(profiling.with_filter(LevelFilter::INFO))
        .with(opentelemetry.with_filter(LevelFilter::INFO))
        .init();

    let requests = runtime.block_on(shop::run())?;

    provider.force_flush()?;
    let is_whole = print_traces(requests, &all.get_finished_spans()?, &out.get_finished_spans()?);
    let traces = handle.stats().traces;
    println!("\n{} spans were passed on, {} dropped.", traces.passed, traces.dropped);
    handle.flush(Duration::from_secs(60))?;
    provider.shutdown()?;
    if is_whole { Ok(()) } else { Err("a trace has a hole".into()) }
}

/// Prints the traces that went out, and returns whether each is whole.
fn print_traces(requests: usize, all: &[SpanData], out: &[SpanData]) -> bool {
    let (made, passed) = (by_trace(all), by_trace(out));
    println!("{requests} requests, {} traces, {} of them went out:\n", made.len(), passed.len());
    println!("{:<32}  {:<14} {:<10} {:<14} spans", "trace", "request", "kept for", "threshold");
    let mut ids: Vec<_> = passed.keys().collect();
    ids.sort_by_key(|trace| {
        passed.get(*trace).and_then(|spans| spans.iter().map(|it| it.start_time).min())
    });
    let mut is_whole = true;
    for trace in ids {
        let count = |of: &HashMap<_, Vec<_>>| of.get(trace).map_or(0, Vec::len);
        let spans = passed.get(trace).into_iter().flatten();
        let request =
            spans.clone().find(|span| span.parent_span_id == opentelemetry::SpanId::INVALID);
        let reason = spans.clone().find_map(|span| attribute(span, "profile.reason"));
        let state =
            request.map(|span| span.span_context.trace_state().header()).unwrap_or_default();
        println!(
            "{trace}  {:<14} {:<10} {:<14} {} of {}",
            request.map_or("", |span| &span.name),
            reason.unwrap_or_else(|| "-".to_owned()),
            state.trim_start_matches("ot=th:"),
            count(&passed),
            count(&made),
        );
        is_whole &= count(&passed) == count(&made);
    }
    is_whole
}

fn by_trace(spans: &[SpanData]) -> HashMap<TraceId, Vec<&SpanData>> {
    let mut traces = HashMap::<_, Vec<_>>::new();
    for span in spans {
        traces.entry(span.span_context.trace_id()).or_default().push(span);
    }
    traces
}

fn attribute(span: &SpanData, key: &str) -> Option<String> {
    let found = span.attributes.iter().find(|attribute| attribute.key.as_str() == key)?;
    Some(found.value.to_string())
}
