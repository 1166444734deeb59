//! What it costs to hold spans until their trace is decided, beside a batch processor alone.

use std::collections::VecDeque;
use std::hint::black_box;
use std::sync::Barrier;

use opentelemetry::trace::{Span as _, TraceContextExt, Tracer, TracerProvider};
use opentelemetry::{Context, KeyValue};
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{
    BatchSpanProcessor, SdkTracer, SdkTracerProvider, SpanData, SpanExporter, SpanProcessor,
};
use tracing_profiling::KeptTraces;

use crate::allocator;
use crate::measure::{added, figure, interleave, median, time_each};

/// Of a request.
const SPANS: u32 = 20;
/// What the queue of a batch processor has room for.
const REQUESTS: u32 = 100;

#[derive(Debug)]
struct Discard;

impl SpanExporter for Discard {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        drop(black_box(batch));
        Ok(())
    }
}

struct Setup {
    provider: SdkTracerProvider,
    tracer: SdkTracer,
}

impl Setup {
    fn new(processor: impl SpanProcessor + 'static) -> Self {
        let provider = SdkTracerProvider::builder().with_span_processor(processor).build();
        let tracer = provider.tracer("bench");
        Self { provider, tracer }
    }

    /// A request without its end.
    fn begin(&self) -> Context {
        let root =
            Context::new().with_span(self.tracer.start_with_context("request", &Context::new()));
        for number in 1..SPANS {
            let mut span = self.tracer.start_with_context("step", &root);
            span.set_attributes([
                KeyValue::new("code.file.path", "src/shop/cart.rs"),
                KeyValue::new("code.line.number", i64::from(number)),
                KeyValue::new("code.module.name", "shop::cart"),
                KeyValue::new("thread.name", "worker"),
                KeyValue::new("http.route", "/cart/{id}"),
                KeyValue::new("user", format!("user {number}")),
            ]);
            span.end();
        }
        root
    }

    /// Nanoseconds a span.
    fn requests(&self) -> f64 {
        let each = time_each(REQUESTS, || self.begin().span().end());
        self.provider.force_flush().expect("flushed");
        each / f64::from(SPANS)
    }

    /// The same on each of two threads at the same time.
    fn requests_on_two_threads(&self) -> f64 {
        let start = Barrier::new(2);
        let one = || {
            start.wait();
            time_each(REQUESTS / 2, || self.begin().span().end()) / f64::from(SPANS)
        };
        let (this, other) = std::thread::scope(|scope| {
            let other = scope.spawn(one);
            (one(), other.join().expect("no panic"))
        });
        self.provider.force_flush().expect("flushed");
        f64::midpoint(this, other)
    }

    /// The peak of memory in MB while 1,000 requests a second take 100 ms each.
    fn memory(&self) -> f64 {
        let (bytes, ()) = allocator::peak(|| {
            let mut open = VecDeque::new();
            for number in 0..2_000 {
                open.push_back(self.begin());
                if let Some(first) = (open.len() > 100).then(|| open.pop_front()).flatten() {
                    first.span().end();
                }
                if number % REQUESTS == 0 {
                    self.provider.force_flush().expect("flushed");
                }
            }
        });
        bytes as f64 / 1e6
    }
}

pub(crate) fn run() {
    let batches = || BatchSpanProcessor::builder(Discard).build();
    let (alone, held) = (Setup::new(batches()), Setup::new(KeptTraces::new(batches())));
    let times = interleave(101, &mut [&mut || alone.requests(), &mut || held.requests()]);
    figure("traces.batch.span", median(&times[0]), "ns");
    figure("traces.held.span_added", added(&times[0], &times[1]), "ns");
    let times = interleave(
        101,
        &mut [&mut || alone.requests_on_two_threads(), &mut || held.requests_on_two_threads()],
    );
    figure("traces.batch.span_on_two_threads", median(&times[0]), "ns");
    figure("traces.held.span_added_on_two_threads", added(&times[0], &times[1]), "ns");
    figure("traces.held.memory_added", held.memory() - alone.memory(), "MB");
}
