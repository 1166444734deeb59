//! Two processes: one calls the other by gRPC, and passes the trace on. Both hold their spans.

#![allow(clippy::print_stdout, reason = "how the processes report")]

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use opentelemetry::Context;
use opentelemetry::propagation::TextMapPropagator;
use opentelemetry::trace::{Link, SpanKind, TraceContextExt, TraceId, TraceState, TracerProvider};
use opentelemetry_proto::tonic::collector::profiles::v1development::profiles_service_client::ProfilesServiceClient;
use opentelemetry_proto::tonic::collector::profiles::v1development::profiles_service_server::{
    ProfilesService, ProfilesServiceServer,
};
use opentelemetry_proto::tonic::collector::profiles::v1development::{
    ExportProfilesServiceRequest as Question, ExportProfilesServiceResponse as Answer,
};
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{
    BatchSpanProcessor, SamplingDecision, SamplingResult, SdkTracerProvider, ShouldSample,
};
use tonic::{Request, Response, Status};
use tracing::{Instrument as _, info_span};
use tracing_opentelemetry::OpenTelemetrySpanExt as _;
use tracing_profiling::export::Memory;
use tracing_profiling::{KeptTraces, ProfilingLayer};
use tracing_subscriber::prelude::*;

use crate::{Out, in_turn, numbers};

/// Makes this test the callee. The value is whether the sampled flag of callers counts.
const CALLEE: &str = "KEPT_TRACES_CALLEE";
const REQUESTS: u32 = 60;
const ONE_IN: u32 = 4;

/// Records all spans, with the sampled flag or without it.
#[derive(Clone, Debug)]
struct Records(SamplingDecision);

impl ShouldSample for Records {
    fn should_sample(
        &self,
        parent: Option<&Context>,
        _: TraceId,
        _: &str,
        _: &SpanKind,
        _: &[opentelemetry::KeyValue],
        _: &[Link],
    ) -> SamplingResult {
        let trace_state = parent.map(|parent| parent.span().span_context().trace_state().clone());
        SamplingResult {
            decision: self.0.clone(),
            attributes: Vec::new(),
            trace_state: trace_state.unwrap_or(TraceState::NONE),
        }
    }
}

/// What a service has in its `main`.
fn start(decision: SamplingDecision, sampled_parents: bool) -> (Out, SdkTracerProvider) {
    let out = Out::default();
    let batches = BatchSpanProcessor::builder(out.clone()).build();
    let kept = KeptTraces::new(batches).one_in(ONE_IN).sampled_parents(sampled_parents);
    let provider = SdkTracerProvider::builder()
        .with_sampler(Records(decision))
        .with_span_processor(kept)
        .build();
    let builder = ProfilingLayer::builder().rules("400ms|hung=off".parse().unwrap());
    let profiling = builder.exporter(Memory::new()).build().unwrap();
    let otel = tracing_opentelemetry::layer().with_tracer(provider.tracer("service"));
    let otel = otel.with_filter(tracing_subscriber::filter::LevelFilter::INFO);
    let subscriber = tracing_subscriber::registry().with(profiling).with(otel);
    tracing::subscriber::set_global_default(subscriber).unwrap();
    (out, provider)
}

struct Callee;

#[tonic::async_trait]
impl ProfilesService for Callee {
    async fn export(&self, request: Request<Question>) -> Result<Response<Answer>, Status> {
        let metadata = request.metadata();
        let text = |key: &str| metadata.get(key).and_then(|value| value.to_str().ok());
        let headers = ["traceparent", "tracestate"].into_iter();
        let headers = headers.filter_map(|key| Some((key.to_owned(), text(key)?.to_owned())));
        let headers: HashMap<String, String> = headers.collect();
        let span = info_span!("serve");
        span.set_parent(TraceContextPropagator::new().extract(&headers)).unwrap();
        let is_slow = text("slow").is_some();
        async {
            info_span!("query").in_scope(|| {
                thread::sleep(Duration::from_millis(if is_slow { 600 } else { 0 }));
            });
            info_span!("render").in_scope(|| {});
        }
        .instrument(span)
        .await;
        Ok(Response::new(Answer::default()))
    }
}

/// Serves until the end of its input, and prints its spans.
fn serve(sampled_parents: bool) {
    let (out, provider) = start(SamplingDecision::RecordAndSample, sampled_parents);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
    println!("\nat {}", listener.local_addr().unwrap());
    let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
    let server =
        tonic::transport::Server::builder().add_service(ProfilesServiceServer::new(Callee));
    runtime.spawn(server.serve_with_incoming(incoming));
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
    provider.shutdown().unwrap();
    for span in &*out.0.lock().unwrap() {
        let (trace, number) = numbers(&span.span_context);
        let parent = u64::from_be_bytes(span.parent_span_id.to_bytes());
        println!("span {trace:x} {number:x} {parent:x} {}", span.name);
    }
}

/// Calls, and prints its spans and which requests were slow.
fn call(address: &str, is_sampled: bool) {
    let decision =
        if is_sampled { SamplingDecision::RecordAndSample } else { SamplingDecision::RecordOnly };
    let (out, provider) = start(decision, false);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let mut client = ProfilesServiceClient::connect(format!("http://{address}")).await.unwrap();
        for request in 0..REQUESTS {
            let span = info_span!("request");
            let context = span.context();
            let mut headers = HashMap::new();
            TraceContextPropagator::new().inject_context(&context, &mut headers);
            let mut question = Request::new(Question::default());
            for (key, value) in headers {
                let key: tonic::metadata::AsciiMetadataKey = key.parse().unwrap();
                question.metadata_mut().insert(key, value.parse().unwrap());
            }
            let is_slow = request % 20 == 7;
            if is_slow {
                question.metadata_mut().insert("slow", "1".parse().unwrap());
            }
            let (trace, _) = numbers(context.span().span_context());
            println!("\nmade {trace:x} {is_slow}");
            client.export(question).instrument(span).await.unwrap();
        }
    });
    provider.shutdown().unwrap();
    for span in &*out.0.lock().unwrap() {
        let (trace, number) = numbers(&span.span_context);
        println!("span {trace:x} {number:x} 0 {}", span.name);
    }
}

/// Run by the test below, in processes of their own.
#[test]
#[ignore = "a part of another test"]
fn a_service() {
    let Ok(part) = std::env::var(CALLEE) else { return };
    match part.split_once(' ') {
        Some((address, is_sampled)) => call(address, is_sampled == "true"),
        None => serve(part == "true"),
    }
}

fn process(part: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "--nocapture", "services::a_service"]);
    command.env(CALLEE, part).stdin(Stdio::piped()).stdout(Stdio::piped());
    command
}

/// The names of a trace's spans, and the number and parent of each.
type Traces = BTreeMap<u128, BTreeMap<String, (u64, u64)>>;

fn spans_in(text: &str) -> Traces {
    let mut traces = Traces::new();
    for line in text.lines().filter_map(|line| line.strip_prefix("span ")) {
        let words: Vec<_> = line.split(' ').collect();
        let number = |at: usize| u64::from_str_radix(words[at], 16).unwrap();
        let trace = traces.entry(u128::from_str_radix(words[0], 16).unwrap()).or_default();
        trace.insert(words[3].to_owned(), (number(1), number(2)));
    }
    traces
}

#[test]
fn both_halves_of_a_kept_trace_go_out_of_two_processes() {
    let _in_turn = in_turn();
    for (is_sampled, sampled_parents) in
        [(true, false), (false, false), (true, true), (false, true)]
    {
        let mut callee = process(&sampled_parents.to_string()).spawn().unwrap();
        let mut lines = BufReader::new(callee.stdout.take().unwrap());
        let mut line = String::new();
        while !line.starts_with("at ") {
            line.clear();
            assert!(lines.read_line(&mut line).unwrap() > 0, "it ended");
        }
        let address = line.trim_start_matches("at ").trim();
        let output = process(&format!("{address} {is_sampled}")).output().unwrap();
        assert!(output.status.success());
        let output = String::from_utf8(output.stdout).unwrap();
        drop(callee.stdin.take().map(|mut input| input.flush()));
        let mut rest = String::new();
        lines.read_to_string(&mut rest).unwrap();
        assert!(callee.wait().unwrap().success());

        let made = output.lines().filter_map(|line| line.strip_prefix("made ")?.split_once(' '));
        let made: BTreeMap<_, _> = made
            .map(|(trace, slow)| (u128::from_str_radix(trace, 16).unwrap(), slow == "true"))
            .collect();
        assert_eq!(made.len(), REQUESTS as usize);
        let (caller, callee) = (spans_in(&output), spans_in(&rest));
        let threshold = (1 << 56) - (1_u64 << 56) / u64::from(ONE_IN);
        let chosen = |trace: &u128| *trace as u64 & (u64::MAX >> 8) >= threshold;
        let expected = made.iter().filter(|(trace, slow)| **slow || chosen(trace));
        let expected: BTreeSet<_> = expected.map(|(trace, _)| *trace).collect();
        assert_eq!(caller.keys().copied().collect::<BTreeSet<_>>(), expected);
        let all = is_sampled && sampled_parents;
        let expected = if all { made.keys().copied().collect() } else { expected };
        assert_eq!(callee.keys().copied().collect::<BTreeSet<_>>(), expected);
        for (trace, spans) in &callee {
            assert_eq!(spans.keys().collect::<Vec<_>>(), ["query", "render", "serve"]);
            let request = caller.get(trace).and_then(|spans| spans.get("request"));
            assert!(request.is_none_or(|(number, _)| spans["serve"].1 == *number));
        }
    }
}
