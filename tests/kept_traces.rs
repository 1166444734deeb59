//! Whole traces of what was kept, and one in *n* of the others: all of a trace, or nothing.

#![cfg(feature = "opentelemetry-sdk")]
#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test"
)]

#[path = "kept_traces/services.rs"]
mod services;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use opentelemetry::trace::{
    Span as _, SpanContext, Status, TraceContextExt, TraceFlags, TraceId, TraceState, Tracer,
    TracerProvider,
};
use opentelemetry::{Context, KeyValue};
use opentelemetry_sdk::error::{OTelSdkError, OTelSdkResult};
use opentelemetry_sdk::trace::{
    BatchSpanProcessor, Sampler, SdkTracer, SdkTracerProvider, Span, SpanData, SpanExporter,
    SpanProcessor,
};
use tracing::{Dispatch, dispatcher, info_span};
use tracing_opentelemetry::OpenTelemetrySpanExt as _;
use tracing_profiling::export::Memory;
use tracing_profiling::{KeptTraces, ProfilingLayer, Reason, Stats};
use tracing_subscriber::prelude::*;

/// Counters are those of the process.
static IN_TURN: Mutex<()> = Mutex::new(());

fn in_turn() -> MutexGuard<'static, ()> {
    IN_TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What was passed on, or exported.
#[derive(Clone, Debug, Default)]
struct Out(Arc<Mutex<Vec<SpanData>>>);

impl Out {
    fn traces(&self) -> BTreeMap<u128, BTreeSet<u64>> {
        let mut traces = BTreeMap::<_, BTreeSet<_>>::new();
        for span in &*self.0.lock().unwrap() {
            let (trace, number) = numbers(&span.span_context);
            let is_new = traces.entry(trace).or_default().insert(number);
            assert!(is_new, "a span was passed on twice");
        }
        traces
    }

    fn names(&self) -> Vec<String> {
        let mut names: Vec<_> =
            self.0.lock().unwrap().iter().map(|span| span.name.to_string()).collect();
        names.sort();
        names
    }

    fn thresholds(&self) -> BTreeSet<String> {
        let spans = self.0.lock().unwrap();
        let states = spans.iter().map(|span| span.span_context.trace_state());
        states.map(|state| state.get("ot").unwrap_or_default().to_owned()).collect()
    }
}

impl SpanProcessor for Out {
    fn on_start(&self, _: &mut Span, _: &Context) {}

    fn on_end(&self, span: SpanData) {
        self.0.lock().unwrap().push(span);
    }

    fn force_flush(&self) -> OTelSdkResult {
        Ok(())
    }

    fn shutdown_with_timeout(&self, _: Duration) -> OTelSdkResult {
        Ok(())
    }
}

impl SpanExporter for Out {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        self.0.lock().unwrap().extend(batch);
        Ok(())
    }
}

/// The ids of a trace and a span, which have no order.
fn numbers(span: &SpanContext) -> (u128, u64) {
    let trace = u128::from_be_bytes(span.trace_id().to_bytes());
    (trace, u64::from_be_bytes(span.span_id().to_bytes()))
}

fn provider(processor: impl SpanProcessor + 'static) -> SdkTracerProvider {
    SdkTracerProvider::builder()
        .with_sampler(Sampler::AlwaysOn)
        .with_span_processor(processor)
        .build()
}

/// One that passes on ordinary traces as well: one in that number.
fn kept(one_in: u32) -> (Out, SdkTracerProvider) {
    let out = Out::default();
    (out.clone(), provider(KeptTraces::new(out).one_in(one_in)))
}

fn tracer(provider: &SdkTracerProvider) -> SdkTracer {
    provider.tracer("test")
}

fn stats() -> Stats {
    let layer = ProfilingLayer::builder().exporter(Memory::new()).build().unwrap();
    layer.handle().stats()
}

fn child(tracer: &SdkTracer, name: &'static str, parent: &Context) -> Context {
    Context::new().with_span(tracer.start_with_context(name, parent))
}

fn root(tracer: &SdkTracer, name: &'static str) -> Context {
    child(tracer, name, &Context::new())
}

/// A caller in another process.
fn remote(trace: u128, flags: TraceFlags, state: &str) -> Context {
    let state = state.parse().unwrap_or_else(|_| TraceState::default());
    let context = SpanContext::new(trace.into(), 77.into(), flags, true, state);
    Context::new().with_remote_span_context(context)
}

fn fail(span: &Context) {
    span.span().set_status(Status::error("no"));
}

/// Random numbers that are the same in each run.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

#[test]
fn of_random_trees_over_threads_each_is_whole_or_absent() {
    let _in_turn = in_turn();
    const TREES: u64 = 10_000;
    const THREADS: u64 = 4;
    let (out, provider) = kept(10);
    let made = Mutex::new(BTreeMap::<u128, (BTreeSet<u64>, bool)>::new());
    // Each thread grows trees, and passes spans to others, which end them.
    let (senders, receivers): (Vec<_>, Vec<_>) =
        (0..THREADS).map(|_| mpsc::channel::<Context>()).unzip();
    thread::scope(|scope| {
        for (number, ends) in (0..).zip(receivers) {
            let (senders, made, tracer) = (senders.clone(), &made, tracer(&provider));
            scope.spawn(move || {
                let mut random = Random(number);
                for _ in 0..TREES / THREADS {
                    let root = match random.below(3) {
                        0 => child(
                            &tracer,
                            "root",
                            &remote(random.below(u64::MAX).into(), TraceFlags::SAMPLED, ""),
                        ),
                        _ => self::root(&tracer, "root"),
                    };
                    let mut open = vec![root];
                    let (mut spans, mut is_failed) = (BTreeSet::new(), false);
                    let trace = numbers(open[0].span().span_context()).0;
                    for _ in 0..random.below(30) {
                        let parent = &open[random.below(open.len() as u64) as usize];
                        open.push(child(&tracer, "child", parent));
                    }
                    for span in &open {
                        spans.insert(numbers(span.span().span_context()).1);
                        if random.below(200) == 0 {
                            fail(span);
                            is_failed = true;
                        }
                    }
                    // Another call of the same trace may have been in this process.
                    let mut made = made.lock().unwrap();
                    let known = made.entry(trace).or_default();
                    assert!(known.0.is_empty(), "random ids are alike");
                    *known = (spans, is_failed);
                    drop(made);
                    while !open.is_empty() {
                        let span = open.swap_remove(random.below(open.len() as u64) as usize);
                        match random.below(3) {
                            0 => senders[random.below(THREADS) as usize].send(span).unwrap(),
                            _ => span.span().end(),
                        }
                    }
                    ends.try_iter().for_each(|span| span.span().end());
                }
                drop(senders);
                ends.iter().for_each(|span| span.span().end());
            });
        }
        drop(senders);
    });
    provider.force_flush().unwrap();
    let (made, passed) = (made.into_inner().unwrap(), out.traces());
    assert_eq!(made.len() as u64, TREES);
    let threshold = (1 << 56) - (1_u64 << 56) / 10;
    for (trace, (spans, is_failed)) in &made {
        let randomness = *trace as u64 & (u64::MAX >> 8);
        let goes_on = *is_failed || randomness >= threshold;
        let expected = if goes_on { spans.clone() } else { BTreeSet::new() };
        let got = passed.get(trace).cloned().unwrap_or_default();
        assert_eq!(got, expected, "{trace:x}: failed {is_failed}, {randomness:x}");
    }
    assert!((1_000..6_000).contains(&passed.len()), "{}", passed.len());
}

/// A subscriber with a layer of those rules, and one that passes on the traces of what it keeps.
fn with_layer(rules: &str, is_layer_first: bool) -> (Out, SdkTracerProvider, Dispatch) {
    let layer = || {
        let builder = ProfilingLayer::builder();
        builder.rules(rules.parse().unwrap()).exporter(Memory::new()).build().unwrap()
    };
    let early = is_layer_first.then(layer);
    let (out, provider) = kept(0);
    let otel = tracing_opentelemetry::layer().with_tracer(tracer(&provider));
    let layer = early.unwrap_or_else(layer);
    let otel = otel.with_filter(tracing_subscriber::filter::filter_fn(|it| it.name() != "hidden"));
    let dispatch = Dispatch::new(tracing_subscriber::registry().with(layer).with(otel));
    (out, provider, dispatch)
}

#[test]
fn the_trace_of_a_kept_span_goes_on_whole() {
    let _in_turn = in_turn();
    for is_layer_first in [true, false] {
        let (out, provider, dispatch) = with_layer("400ms|hung=off", is_layer_first);
        dispatcher::with_default(&dispatch, || {
            for request in 0..20 {
                let _request = info_span!("request").entered();
                info_span!("before").in_scope(|| {});
                info_span!("step").in_scope(|| {
                    let slow = if request == 7 { 500 } else { 0 };
                    thread::sleep(Duration::from_millis(slow));
                });
                info_span!("after").in_scope(|| {});
            }
        });
        provider.force_flush().unwrap();
        assert_eq!(out.names(), ["after", "before", "request", "step"]);
        assert_eq!(out.traces().len(), 1);
        assert_eq!(out.thresholds(), ["th:0".to_owned()].into());
    }
}

#[test]
fn a_kept_span_that_opentelemetry_does_not_have_keeps_the_trace_around_it() {
    let _in_turn = in_turn();
    let (out, provider, dispatch) = with_layer("10s,[hidden]=always", true);
    dispatcher::with_default(&dispatch, || {
        let _request = info_span!("request").entered();
        info_span!("before").in_scope(|| {});
        info_span!("hidden").in_scope(|| {});
    });
    provider.force_flush().unwrap();
    assert_eq!(out.names(), ["before", "request"]);
}

/// Where the threads in a span are not known, none hangs.
const CAN_HANG: bool = cfg!(not(tracing_profiling_unsupported));

/// Waits until these spans were passed on, and no others.
fn wait_for(out: &Out, provider: &SdkTracerProvider, expected: &[&str]) {
    let start = Instant::now();
    while out.names() != expected {
        assert!(start.elapsed() < Duration::from_secs(60), "{:?}", out.names());
        thread::sleep(Duration::from_millis(10));
        provider.force_flush().unwrap();
    }
}

#[test]
fn what_ended_in_the_trace_of_a_span_that_hangs_goes_on_when_it_is_kept() {
    if !CAN_HANG {
        return;
    }
    let _in_turn = in_turn();
    // The span that hangs is the root of its trace, or inside it, or OpenTelemetry does not have it.
    for hangs in ["request", "hung", "hidden"] {
        let (out, provider, dispatch) = with_layer(&format!("10s,[{hangs}]=hung>100ms"), true);
        let (end, is_to_end) = mpsc::channel::<()>();
        dispatcher::with_default(&dispatch, || {
            // Another trace is not kept with it.
            let other = info_span!("other");
            other.in_scope(|| info_span!("not kept").in_scope(|| {}));
            let work = move || {
                let _request = info_span!("request").entered();
                info_span!("before").in_scope(|| {});
                let _inside = match hangs {
                    "request" => None,
                    "hung" => Some(info_span!("hung").entered()),
                    _ => Some(info_span!("hidden").entered()),
                };
                _ = is_to_end.recv();
            };
            let own = dispatch.clone();
            let hung = thread::spawn(move || dispatcher::with_default(&own, work));
            wait_for(&out, &provider, &["before"]);
            end.send(()).unwrap();
            hung.join().unwrap();
            drop(other);
        });
        provider.force_flush().unwrap();
        let all: &[&str] =
            if hangs == "hung" { &["before", "hung", "request"] } else { &["before", "request"] };
        assert_eq!(out.names(), all, "{hangs}");
    }
}

#[test]
fn a_span_that_hangs_in_what_is_open_for_long_keeps_no_trace_that_began_there() {
    if !CAN_HANG {
        return;
    }
    let _in_turn = in_turn();
    // The hidden one, as `main`, after half a second.
    let rules = "10s,[hidden]=on_cpu>50ms,[hung]=hung>100ms";
    let (out, provider, dispatch) = with_layer(rules, true);
    let (end, is_to_end) = mpsc::channel::<()>();
    dispatcher::with_default(&dispatch, || {
        let main = info_span!("hidden");
        let other = main.in_scope(|| {
            let other = info_span!("other");
            // Its trace begins now.
            assert!(other.context().span().span_context().is_valid());
            other
        });
        other.in_scope(|| info_span!("not kept").in_scope(|| {}));
        thread::sleep(Duration::from_secs(1));
        let work = move || {
            let _main = main.entered();
            let _request = info_span!("request").entered();
            info_span!("before").in_scope(|| {});
            let _hung = info_span!("hung").entered();
            _ = is_to_end.recv();
        };
        let own = dispatch.clone();
        let hung = thread::spawn(move || dispatcher::with_default(&own, work));
        wait_for(&out, &provider, &["before"]);
        end.send(()).unwrap();
        hung.join().unwrap();
        drop(other);
    });
    provider.force_flush().unwrap();
    assert_eq!(out.names(), ["before", "hung", "request"]);
}

#[test]
fn the_trace_of_a_span_that_was_kept_while_open_goes_on_when_it_ends() {
    if !CAN_HANG {
        return;
    }
    let _in_turn = in_turn();
    let (out, provider, dispatch) = with_layer("10s,[hung]=hung>100ms", true);
    let handle = dispatch.downcast_ref::<ProfilingLayer>().unwrap().handle();
    dispatcher::with_default(&dispatch, || {
        // Asked for its context before it is entered, it began in no profiled span.
        let request = info_span!("request");
        assert!(request.context().span().span_context().is_valid());
        let _request = request.entered();
        info_span!("before").in_scope(|| {});
        // Its rule keeps no closed span.
        info_span!("hung").in_scope(|| {
            let start = Instant::now();
            while handle.stats().kept_for(Reason::Hung) == 0 {
                assert!(start.elapsed() < Duration::from_secs(60));
            }
        });
        provider.force_flush().unwrap();
        assert_eq!(out.names(), ["before", "hung"], "the request is still open");
    });
    provider.force_flush().unwrap();
    assert_eq!(out.names(), ["before", "hung", "request"]);
}

#[test]
fn a_failed_span_decides_at_once_and_others_follow() {
    let _in_turn = in_turn();
    let (out, provider) = kept(0);
    let tracer = tracer(&provider);
    let request = root(&tracer, "request");
    let detached = child(&tracer, "detached", &request);
    child(&tracer, "before", &request).span().end();
    let failed = child(&tracer, "failed", &request);
    fail(&failed);
    failed.span().end();
    provider.force_flush().unwrap();
    assert_eq!(out.names(), ["before", "failed"]);
    request.span().end();
    detached.span().end();
    // Nothing of it is open any more.
    child(&tracer, "late", &request).span().end();
    provider.force_flush().unwrap();
    assert_eq!(out.names(), ["before", "detached", "failed", "late", "request"]);
    assert_eq!(out.traces().len(), 1);
}

#[test]
fn a_detached_span_that_fails_after_its_root_has_ended_keeps_the_trace() {
    let _in_turn = in_turn();
    let (out, provider) = kept(0);
    let tracer = tracer(&provider);
    let request = root(&tracer, "request");
    let detached = child(&tracer, "detached", &request);
    request.span().end();
    provider.force_flush().unwrap();
    assert_eq!(out.names(), [""; 0]);
    fail(&detached);
    detached.span().end();
    provider.force_flush().unwrap();
    assert_eq!(out.names(), ["detached", "request"]);
}

#[test]
fn what_starts_after_a_trace_was_dropped_is_decided_by_itself() {
    let _in_turn = in_turn();
    let (out, provider) = kept(0);
    let tracer = tracer(&provider);
    let request = root(&tracer, "request");
    request.span().end();
    child(&tracer, "ordinary", &request).span().end();
    let job = child(&tracer, "job", &request);
    child(&tracer, "step", &job).span().end();
    fail(&job);
    job.span().end();
    provider.force_flush().unwrap();
    assert_eq!(out.names(), ["job", "step"]);
}

#[test]
fn several_local_roots_of_a_trace_are_decided_together_while_they_overlap() {
    let _in_turn = in_turn();
    let (out, provider) = kept(0);
    let tracer = tracer(&provider);
    let caller = remote(1, TraceFlags::SAMPLED, "");
    let outer = child(&tracer, "outer", &caller);
    // Another process calls back.
    let inner = child(&tracer, "inner", &caller);
    inner.span().end();
    child(&tracer, "step", &outer).span().end();
    fail(&outer);
    outer.span().end();
    // A later call of the same trace, soon after.
    child(&tracer, "next", &caller).span().end();
    provider.force_flush().unwrap();
    assert_eq!(out.names(), ["inner", "next", "outer", "step"]);
}

#[test]
fn one_in_n_is_the_same_in_all_processes() {
    let _in_turn = in_turn();
    let chosen = |one_in, state: &str| {
        let (out, provider) = kept(one_in);
        let tracer = tracer(&provider);
        let mut random = Random(5);
        for _ in 0..4_000 {
            let trace =
                u128::from(random.below(u64::MAX)) << 60 ^ u128::from(random.below(u64::MAX)) << 26;
            let request = child(&tracer, "request", &remote(trace | 1, TraceFlags::SAMPLED, state));
            child(&tracer, "step", &request).span().end();
            request.span().end();
        }
        provider.force_flush().unwrap();
        (out.traces(), out.thresholds())
    };
    let (ten, thresholds) = chosen(10, "");
    assert_eq!(thresholds, ["th:e6666666666667".to_owned()].into());
    assert!((300..500).contains(&ten.len()), "{}", ten.len());
    assert_eq!(chosen(10, "").0.keys().collect::<Vec<_>>(), ten.keys().collect::<Vec<_>>());
    let (hundred, thresholds) = chosen(100, "a=b");
    assert_eq!(thresholds, ["th:fd70a3d70a3d71".to_owned()].into());
    assert!((20..70).contains(&hundred.len()), "{}", hundred.len());
    assert!(hundred.keys().all(|trace| ten.contains_key(trace)), "fewer of the same");
    // What the caller has said holds: its randomness, and that it passes on fewer.
    assert_eq!(chosen(10, "ot=rv:e6666666666666").0.len(), 0);
    let (all, thresholds) = chosen(10, "ot=th:f;rv:f0000000000000;x:1");
    assert_eq!((all.len(), thresholds), (4_000, ["th:f;rv:f0000000000000;x:1".to_owned()].into()));
    assert!(all.values().all(|spans| spans.len() == 2));
    assert_eq!(chosen(0, "").0.len(), 0);
    // All, which are not held.
    assert_eq!((chosen(1, "").0.len(), chosen(1, "").1), (4_000, [String::new()].into()));
}

#[test]
fn the_sampled_flag_of_a_caller_counts_only_if_it_is_asked_for() {
    let _in_turn = in_turn();
    for (is_asked, flags, goes_on) in [
        (false, TraceFlags::SAMPLED, false),
        (true, TraceFlags::SAMPLED, true),
        (true, TraceFlags::default(), false),
    ] {
        let out = Out::default();
        let provider = provider(KeptTraces::new(out.clone()).one_in(0).sampled_parents(is_asked));
        let tracer = tracer(&provider);
        let request = child(&tracer, "request", &remote(3, flags, "ot=th:8"));
        child(&tracer, "step", &request).span().end();
        request.span().end();
        // A root has no caller.
        root(&tracer, "root").span().end();
        provider.force_flush().unwrap();
        let expected: &[&str] = if goes_on { &["request", "step"] } else { &[] };
        assert_eq!(out.names(), expected, "{is_asked} {flags:?}");
        // Why the caller has chosen it is known only to the caller.
        assert!(out.thresholds().iter().all(|threshold| threshold == "th:8"));
    }
}

#[test]
fn a_trace_of_100_000_spans_passes_a_batch_processor_whole() {
    let _in_turn = in_turn();
    const SPANS: usize = 100_000;
    let out = Out::default();
    // Its queue has room for 2,048.
    let batches = BatchSpanProcessor::builder(out.clone()).build();
    let provider = provider(KeptTraces::new(batches).one_in(0).bounds(200_000, 512 << 20));
    let tracer = tracer(&provider);
    let job = root(&tracer, "job");
    for _ in 0..SPANS - 1 {
        child(&tracer, "step", &job).span().end();
    }
    fail(&job);
    job.span().end();
    provider.shutdown_with_timeout(Duration::from_secs(60)).unwrap();
    assert_eq!(out.traces().into_values().map(|spans| spans.len()).collect::<Vec<_>>(), [SPANS]);
}

#[test]
fn at_the_bound_the_largest_trace_is_dropped_whole_and_others_are_not() {
    let _in_turn = in_turn();
    let out = Out::default();
    let provider = provider(KeptTraces::new(out.clone()).one_in(0).bounds(1_000, 64 << 20));
    let tracer = tracer(&provider);
    let before = stats().traces;
    let endless = root(&tracer, "endless");
    let small: Vec<_> = (0..10).map(|_| root(&tracer, "request")).collect();
    for request in &small {
        child(&tracer, "step", request).span().end();
    }
    for _ in 0..5_000 {
        child(&tracer, "step", &endless).span().end();
    }
    let held = stats().traces.held - before.held;
    assert!(held <= 1_000, "{held}");
    // Too late.
    fail(&endless);
    child(&tracer, "step", &endless).span().end();
    endless.span().end();
    for request in &small {
        fail(request);
        request.span().end();
    }
    provider.force_flush().unwrap();
    let traces = out.traces();
    assert_eq!(traces.len(), 10);
    assert!(traces.values().all(|spans| spans.len() == 2));
    let after = stats().traces;
    assert_eq!(after.dropped_over_bound - before.dropped_over_bound, 5_002);
    assert_eq!(after.passed - before.passed, 20);
    assert_eq!(after.held, before.held);
}

#[test]
fn roots_that_never_end_do_not_keep_others_out() {
    let _in_turn = in_turn();
    let out = Out::default();
    let provider = provider(KeptTraces::new(out.clone()).one_in(0).bounds(500, 64 << 20));
    let tracer = tracer(&provider);
    let mut leaked = Vec::new();
    for number in 0..2_000 {
        let endless = root(&tracer, "endless");
        child(&tracer, "step", &endless).span().end();
        leaked.push(endless);
        let request = root(&tracer, "request");
        child(&tracer, "step", &request).span().end();
        fail(&request);
        request.span().end();
        // Those that wait to be passed on take a half of the bound.
        if number % 50 == 0 {
            provider.force_flush().unwrap();
        }
    }
    provider.force_flush().unwrap();
    assert_eq!(out.traces().values().filter(|spans| spans.len() == 2).count(), 2_000);
}

#[test]
fn a_shutdown_passes_on_what_is_decided_and_chosen() {
    let _in_turn = in_turn();
    let before = stats().traces;
    let out = Out::default();
    let batches = BatchSpanProcessor::builder(out.clone()).build();
    let provider = provider(KeptTraces::new(batches).one_in(2));
    let tracer = tracer(&provider);
    let open: Vec<_> = [u128::from(u64::MAX), 1, 2]
        .map(|trace| {
            let request = child(&tracer, "request", &remote(trace, TraceFlags::SAMPLED, ""));
            child(&tracer, "ended", &request).span().end();
            request
        })
        .into();
    let failed = child(&tracer, "failed", &open[1]);
    fail(&failed);
    failed.span().end();
    provider.shutdown().unwrap();
    assert_eq!(out.names(), ["ended", "ended", "failed"]);
    let traces: Vec<_> = out.traces().into_keys().collect();
    assert_eq!(traces, [1, u128::from(u64::MAX)]);
    assert!(provider.shutdown().is_err(), "it is shut down");
    open.iter().for_each(|request| request.span().end());
    let after = stats().traces;
    assert_eq!(after.dropped_at_shutdown - before.dropped_at_shutdown, 1);
}

#[test]
fn a_span_whose_start_was_not_seen_is_counted() {
    let _in_turn = in_turn();
    let ended = Out::default();
    let provider = provider(ended.clone());
    root(&tracer(&provider), "request").span().end();
    let span = ended.0.lock().unwrap().remove(0);
    let out = Out::default();
    let kept = KeptTraces::new(out.clone()).one_in(0);
    let before = stats().traces;
    kept.on_end(span);
    kept.force_flush().unwrap();
    assert_eq!(out.names(), [""; 0]);
    assert_eq!(stats().traces.dropped_over_bound - before.dropped_over_bound, 1);
}

/// An exporter that hangs until it is freed.
#[derive(Clone, Debug, Default)]
struct Hangs {
    is_free: Arc<AtomicBool>,
    exports: Arc<AtomicUsize>,
    out: Out,
}

impl SpanExporter for Hangs {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        self.exports.fetch_add(1, Ordering::Relaxed);
        while !self.is_free.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(1));
        }
        self.out.export(batch).await
    }
}

#[test]
fn a_receiver_that_hangs_blocks_nothing_and_gets_whole_traces_when_it_works_again() {
    let _in_turn = in_turn();
    let exporter = Hangs::default();
    let batches = BatchSpanProcessor::builder(exporter.clone()).build();
    let provider = provider(KeptTraces::new(batches).one_in(0).bounds(20_000, 64 << 20));
    let tracer = tracer(&provider);
    let before = stats().traces;
    let (mut longest, start) = (Duration::ZERO, Instant::now());
    for _ in 0..3_000 {
        let request = root(&tracer, "request");
        for _ in 0..9 {
            let step = child(&tracer, "step", &request);
            let start = Instant::now();
            step.span().end();
            longest = longest.max(start.elapsed());
        }
        fail(&request);
        request.span().end();
    }
    // Not a measurement: a wait would be of seconds.
    assert!(longest < Duration::from_secs(2), "{longest:?}");
    assert!(start.elapsed() < Duration::from_secs(60));
    assert!(exporter.exports.load(Ordering::Relaxed) <= 1);
    let waiting = stats().traces;
    let lost = waiting.dropped_over_bound - before.dropped_over_bound;
    assert!((15_000..30_000).contains(&lost), "half of the bound waits: {lost}");
    exporter.is_free.store(true, Ordering::Relaxed);
    provider.shutdown_with_timeout(Duration::from_secs(60)).unwrap();
    let traces = exporter.out.traces();
    assert!(traces.values().all(|spans| spans.len() == 10), "each is whole");
    assert_eq!(traces.len() as u64 * 10, 30_000 - lost);
}

#[test]
fn a_shutdown_does_not_wait_for_a_receiver_that_hangs_for_longer_than_it_may() {
    let _in_turn = in_turn();
    let before = stats().traces;
    let exporter = Hangs::default();
    let batches = BatchSpanProcessor::builder(exporter.clone()).build();
    let provider = provider(KeptTraces::new(batches).one_in(0));
    let tracer = tracer(&provider);
    for _ in 0..2_000 {
        let request = root(&tracer, "request");
        fail(&request);
        request.span().end();
    }
    let start = Instant::now();
    assert!(provider.shutdown_with_timeout(Duration::from_millis(500)).is_err());
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    exporter.is_free.store(true, Ordering::Relaxed);
    let counted = || {
        let after = stats().traces;
        after.passed + after.dropped_at_shutdown - before.passed - before.dropped_at_shutdown
    };
    while counted() < 2_000 {
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(counted(), 2_000, "each is counted once");
}

/// One that panics at the first span.
#[derive(Debug, Default)]
struct Panics(AtomicBool, Out);

impl SpanProcessor for Panics {
    fn on_start(&self, span: &mut Span, _: &Context) {
        span.set_attribute(KeyValue::new("started", true));
    }

    fn on_end(&self, span: SpanData) {
        assert!(self.0.swap(true, Ordering::Relaxed), "for the test");
        self.1.on_end(span);
    }

    fn force_flush(&self) -> OTelSdkResult {
        Err(OTelSdkError::InternalFailure("for the test".into()))
    }

    fn shutdown_with_timeout(&self, _: Duration) -> OTelSdkResult {
        Ok(())
    }
}

#[test]
fn a_processor_that_panics_or_fails_is_used_further() {
    let _in_turn = in_turn();
    let out = Out::default();
    let provider = provider(KeptTraces::new(Panics(AtomicBool::new(false), out.clone())).one_in(0));
    let tracer = tracer(&provider);
    for _ in 0..2_000 {
        let request = root(&tracer, "request");
        fail(&request);
        request.span().end();
    }
    assert!(provider.force_flush().is_err());
    assert_eq!(out.traces().len(), 1_999);
    let spans = out.0.lock().unwrap();
    assert!(spans.iter().all(|span| span.attributes == [KeyValue::new("started", true)]));
}

#[test]
fn spans_that_are_only_recorded_count_as_sampled_if_they_go_on() {
    let _in_turn = in_turn();
    #[derive(Clone, Debug)]
    struct RecordOnly;
    impl opentelemetry_sdk::trace::ShouldSample for RecordOnly {
        fn should_sample(
            &self,
            _: Option<&Context>,
            _: TraceId,
            _: &str,
            _: &opentelemetry::trace::SpanKind,
            _: &[KeyValue],
            _: &[opentelemetry::trace::Link],
        ) -> opentelemetry_sdk::trace::SamplingResult {
            opentelemetry_sdk::trace::SamplingResult {
                decision: opentelemetry_sdk::trace::SamplingDecision::RecordOnly,
                attributes: Vec::new(),
                trace_state: TraceState::default(),
            }
        }
    }
    let out = Out::default();
    let simple = opentelemetry_sdk::trace::SimpleSpanProcessor::new(out.clone());
    let provider = SdkTracerProvider::builder()
        .with_sampler(RecordOnly)
        .with_span_processor(KeptTraces::new(simple).one_in(0))
        .build();
    let request = root(&tracer(&provider), "request");
    assert!(!request.span().span_context().is_sampled());
    fail(&request);
    request.span().end();
    provider.force_flush().unwrap();
    assert_eq!(out.names(), ["request"]);
}
