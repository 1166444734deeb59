//! A web shop that is mostly fast, and a client that sends it requests over loopback for some seconds. Among several
//! hundred requests a few are slow, each for another reason. Only those leave a profile.
//!
//! ```sh
//! cargo run --release --example slow_requests
//! ```
//!
//! Profiles and spans go to a collector if the usual variables name one:
//!
//! ```sh
//! OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318 \
//!     cargo run --release --features otlp-http,otlp-grpc --example slow_requests
//! ```
#![allow(clippy::print_stdout, reason = "an example, run by hand")]

use std::io::IsTerminal;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use opentelemetry::trace::TracerProvider;
#[cfg(feature = "opentelemetry-otlp")]
use opentelemetry_otlp::SpanExporter;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{
    InMemorySpanExporter, SdkTracerProvider, SimpleSpanProcessor, SpanData,
};
use tracing_profiling::profile::SampleKind;
use tracing_profiling::{Handle, Kept, ProfilingAllocator, ProfilingLayer, TimeBreakdown};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::prelude::*;

mod shop;

use shop::AnyError;

/// Counts what each request allocates.
#[global_allocator]
static ALLOCATOR: ProfilingAllocator = ProfilingAllocator::system();

/// The longest that the end may take: until everything is written or sent.
const PATIENCE: Duration = Duration::from_secs(60);

fn main() -> Result<(), AnyError> {
    let builder = ProfilingLayer::builder().heap(true).with_env()?;
    let kept = Arc::new(Mutex::new(Vec::new()));
    let reports = Arc::clone(&kept);
    let resource = Resource::builder().with_service_name("shop").build();
    let profiling = builder
        .resource(resource.clone())
        .on_kept(move |one| {
            reports.lock().unwrap_or_else(PoisonError::into_inner).push(one.clone())
        })
        .build()?;
    let handle = profiling.handle();
    // The shop runs on it, and the gRPC span exporter must be built inside a runtime.
    let runtime = tokio::runtime::Runtime::new()?;
    let _inside = runtime.enter();
    // Only for what is printed at the end: a service has no exporter into memory.
    let spans = InMemorySpanExporter::default();
    let provider = SdkTracerProvider::builder()
        .with_resource(resource)
        .with_span_processor(SimpleSpanProcessor::new(spans.clone()));
    #[cfg(feature = "opentelemetry-otlp")]
    let provider = match std::env::var_os("OTEL_EXPORTER_OTLP_ENDPOINT") {
        // It reads the same variables as the profiling layer.
        Some(_) => provider.with_batch_exporter(SpanExporter::builder().build()?),
        None => provider,
    };
    let provider = provider.build();
    tracing_subscriber::registry()
        .with(
            tracing_subscriber::fmt::layer()
                .with_writer(std::io::stderr)
                .with_ansi(std::io::stderr().is_terminal())
                .with_filter(Targets::new().with_target("tracing_profiling", LevelFilter::INFO)),
        )
        .with(profiling.with_filter(LevelFilter::INFO))
        // After the profiling layer, which sets attributes on a span before it ends. Both at INFO: the HTTP and gRPC
        // clients' own spans are below that.
        .with(
            tracing_opentelemetry::layer()
                .with_tracer(provider.tracer("shop"))
                .with_filter(LevelFilter::INFO),
        )
        .init();

    let requests = runtime.block_on(shop::run())?;
    let grown = what_has_grown(&handle);

    let flushed = handle.flush(PATIENCE);
    let kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
    print_table(requests, &kept);
    match handle.stats().profiles.delivered {
        0 => print_files(&kept),
        sent => println!("\n{sent} profiles were sent by OTLP."),
    }
    print_spans(&spans.get_finished_spans()?);
    print_grown(&grown);
    provider.shutdown_with_timeout(PATIENCE)?;
    Ok(flushed?)
}

/// The functions whose memory in use has grown, with the bytes.
fn what_has_grown(handle: &Handle) -> Vec<(String, u64)> {
    let grown = handle.heap_growth();
    grown.map(|profile| profile.functions_by(SampleKind::InUseBytes)).unwrap_or_default()
}

// The results.

fn print_grown(grown: &[(String, u64)]) {
    println!("\nMemory in use, by the function that allocated it, estimated:\n");
    for (function, bytes) in grown.iter().take(3) {
        println!("{:>8.1} MB  {function}", *bytes as f64 / 1e6);
    }
}

fn print_table(requests: usize, kept: &[Kept]) {
    println!("\n{requests} requests, {} of them kept:\n", kept.len());
    let row = |cells: [&str; 9]| {
        let [name, reason, wall, on_cpu, off_cpu, idle, allocated, samples, function] = cells;
        println!(
            "{name:<14} {reason:<8} {wall:>8} {on_cpu:>8} {off_cpu:>8} {idle:>8} {allocated:>9} {samples:>7}  \
             {function}"
        );
    };
    row([
        "request",
        "reason",
        "wall",
        "on-CPU",
        "off-CPU",
        "idle",
        "allocated",
        "samples",
        "most of it in",
    ]);
    for one in kept {
        let Some(span) = one.spans.first() else {
            continue;
        };
        let times = span.times();
        let function = guilty(one);
        let bytes = times.allocations.map_or(0, |all| all.allocated_bytes);
        let allocated = format!("{:.1} MB", bytes as f64 / 1e6);
        row([
            span.name(),
            &span.reasons().to_string(),
            &milliseconds(times.wall()),
            &milliseconds(times.on_cpu()),
            &milliseconds(times.off_cpu()),
            &milliseconds(times.idle()),
            &allocated,
            &one.samples.to_string(),
            &function,
        ]);
    }
}

fn print_files(kept: &[Kept]) {
    let files: Vec<_> = kept.iter().filter_map(|one| one.files.first()).collect();
    if files.is_empty() {
        println!("\nNo profiles: see the line about the source above.");
    } else {
        println!("\nReports, to be opened in a browser:");
        files.iter().for_each(|file| println!("  {}", file.display()));
        println!("\nEach is also there as .pb.gz (`go tool pprof -http=: FILE`) and .otlp.");
    }
}

/// What the larger part of a request's time is in.
fn guilty(kept: &Kept) -> String {
    let times = kept.spans.first().map(|span| *span.times()).unwrap_or_default();
    let parts = [
        (times.on_cpu(), kept.hotspot(SampleKind::OnCpu).map(ToString::to_string)),
        (kept.waits.total, kept.hotspot(SampleKind::OffCpu).map(ToString::to_string)),
        (times.awaiting(), kept.hotspot(SampleKind::Await).map(ToString::to_string)),
        (times.scheduling_delay(), delayed(kept, times)),
    ];
    let largest = parts.into_iter().max_by_key(|(time, _)| *time);
    let error = kept.spans.first().and_then(|span| span.facts.error_at.as_ref());
    let error = error.map(|place| format!("error at {place}"));
    largest.and_then(|(_, place)| place).or(error).unwrap_or_else(|| "-".to_owned())
}

/// The span that was on the thread while a request was ready to continue.
fn delayed(kept: &Kept, times: TimeBreakdown) -> Option<String> {
    let share = times.scheduling_delay().as_secs_f64() / times.wall().as_secs_f64();
    let behind = kept.awaits.delayed_by.as_ref();
    behind.map(|span| format!("{:.0} % behind `{span}`", share * 100.0))
}

/// The exported OpenTelemetry spans that refer to a profile.
fn print_spans(spans: &[SpanData]) {
    let of = |span: &SpanData, key: &str| {
        let found = span.attributes.iter().find(|attribute| attribute.key.as_str() == key);
        found.map(|attribute| attribute.value.to_string())
    };
    let kept = spans.iter().filter(|span| of(span, "profile.reason").is_some()).count();
    println!("\n{} spans were exported to OpenTelemetry, {kept} of them kept:\n", spans.len());
    for span in spans {
        if let Some(id) = of(span, "profile.id") {
            let context = &span.span_context;
            let (trace, number) = (context.trace_id(), context.span_id());
            println!("trace {trace} span {number} {:<12} profile.id={id}", span.name);
        }
    }
}

fn milliseconds(time: Duration) -> String {
    format!("{:.1} ms", time.as_secs_f64() * 1e3)
}
