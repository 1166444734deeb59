//! Kept spans are named so that a person knows which request each was.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "a test")]

mod support;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use axum::Router;
use axum::body::Body;
use axum::extract::{MatchedPath, Request};
use axum::http::StatusCode;
use axum::routing::{get, post};
use serde_json::Value;
use support::{HAS_STACKS, Log, PLENTY, Setup, burn};
use tower::ServiceExt as _;
use tower_http::trace::{DefaultMakeSpan, TraceLayer};
use tracing::field::Empty;
use tracing::{Dispatch, Instrument as _, info_span};
use tracing_profiling::profile::SampleKind;
use tracing_profiling::tower::AwaitsLayer;
use tracing_profiling::{Directory, Kept, ProfiledExt as _, ProfilingLayer, Reason, Redaction};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::prelude::*;

const MS: Duration = Duration::from_millis(1);

/// The fields of the events of kept spans at DEBUG, which have everything.
fn events(log: &Log) -> Vec<Value> {
    all_events(log).into_iter().filter(|fields| fields["kind"] == "kept").collect()
}

/// The fields of the lines of kept spans.
fn lines(log: &Log) -> Vec<Value> {
    all_events(log).into_iter().filter(|fields| fields["kind"].is_null()).collect()
}

/// The fields of a line besides its message.
const OF_A_LINE: [&str; 7] =
    ["span", "reason", "wall_ms", "spans", "trace_id", "profile_id", "file"];

fn all_events(log: &Log) -> Vec<Value> {
    let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    let events = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let events = events.filter(|event| event["target"] == "tracing_profiling");
    let fields = events.map(|event| {
        let is_outside = event.get("span").is_none() && event.get("spans").is_none();
        let fields = &event["fields"];
        let mut names = fields.as_object().unwrap().keys().filter(|name| *name != "message");
        let is_line = fields["kind"].is_null();
        let level = event["level"].as_str().unwrap();
        assert!(is_outside && fields["reason"].is_string(), "{event}");
        assert!(!is_line || names.all(|name| OF_A_LINE.contains(&name.as_str())), "{event}");
        assert_eq!(level == "DEBUG", fields["kind"] == "kept", "{event}");
        assert!(!is_line || level == "INFO", "{event}");
        fields.clone()
    });
    fields.collect()
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1_000.0
}

fn of_kept(kept: &Kept) -> Vec<(&'static str, String)> {
    kept.spans[0].fields().map(|(name, value)| (name, value.to_owned())).collect()
}

/// A service, with a subscriber that logs JSON as with that `RUST_LOG`. Returns its log, its files and what was kept.
fn serve(app: &Router, paths: &[&str], filter: &str) -> (Log, Vec<String>, Vec<Kept>) {
    let directory = tempfile::tempdir().unwrap();
    let (log, kept) = (Log::default(), Arc::new(Mutex::new(Vec::new())));
    let layer = ProfilingLayer::builder()
        .rules("20ms".parse().unwrap())
        .sampling_delay(Duration::ZERO)
        .cpu_budget(0)
        .exporter(Directory::new(directory.path()))
        .on_kept({
            let kept = Arc::clone(&kept);
            move |one| kept.lock().unwrap().push(one.clone())
        })
        .build()
        .unwrap();
    let handle = layer.handle();
    let writer = log.clone();
    let json = tracing_subscriber::fmt::layer().json().with_writer(move || writer.clone());
    let dispatch = Dispatch::new(
        tracing_subscriber::registry().with(json.with_filter(EnvFilter::new(filter))).with(layer),
    );
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    tracing::dispatcher::with_default(&dispatch, || {
        for path in paths {
            let request = Request::get(*path).body(Body::empty()).unwrap();
            assert!(runtime.block_on(app.clone().oneshot(request)).unwrap().status().is_success());
        }
        drop(runtime);
    });
    handle.flush(PLENTY).unwrap();
    let files = std::fs::read_dir(directory.path()).unwrap();
    let files = files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
    let kept = std::mem::take(&mut *kept.lock().unwrap());
    (log, files, kept)
}

fn routes() -> Router {
    Router::new()
        .route("/cart/{id}", get(|| async { _ = burn(30 * MS) }))
        .route("/search", get(|| async { _ = burn(60 * MS) }))
        .route("/report", get(|| async { _ = burn(120 * MS) }))
        .route("/users/{id}/orders", get(|| async { std::thread::sleep(30 * MS) }))
}

#[test]
fn each_slow_route_has_its_name_in_log_and_files() {
    let app = routes().layer(TraceLayer::new_for_http().make_span_with(|request: &Request| {
        let route = request.extensions().get::<MatchedPath>().map(MatchedPath::as_str);
        info_span!("request", method = %request.method(), uri = %request.uri(), http.route = route)
    }));
    let paths = ["/cart/secret7", "/search?q=secret7", "/report", "/users/secret7/orders"];
    let (log, files, mut kept) = serve(&app, &paths, "info,tracing_profiling=debug");
    let (mut events, mut lines) = (events(&log), lines(&log));
    assert_eq!((events.len(), lines.len()), (4, 4));
    let text = |event: &Value, name: &str| event[name].as_str().unwrap().to_owned();
    // One without samples, as on a busy machine, need not wait for names, and is said first.
    events.sort_by_key(|event| text(event, "http.route"));
    lines.sort_by_key(|line| text(line, "message"));
    kept.sort_by_key(|kept| of_kept(kept)[1].1.clone());
    let routes: Vec<_> = events.iter().map(|event| text(event, "http.route")).collect();
    assert_eq!(routes, ["/cart/{id}", "/report", "/search", "/users/{id}/orders"]);
    for ((event, line), kept) in events.iter().zip(&lines).zip(&kept) {
        assert_eq!(OF_A_LINE.map(|name| &line[name]), OF_A_LINE.map(|name| &event[name]));
        let route = text(event, "http.route");
        let name = format!("GET {route}");
        assert!(text(line, "message").starts_with(&format!("kept `{name}`")), "{line}");
        assert_eq!(
            (text(event, "span"), text(event, "reason")),
            ("request".into(), "latency".into())
        );
        let times = kept.spans[0].times();
        assert!((event["wall_ms"].as_f64().unwrap() - ms(times.wall())).abs() < 0.001);
        assert!((event["idle_ms"].as_f64().unwrap() - ms(times.idle())).abs() < 0.001);
        assert_eq!(of_kept(kept), [("method", "GET".to_owned()), ("http.route", route)]);
        if !HAS_STACKS {
            continue;
        }
        assert!((event["on_cpu_ms"].as_f64().unwrap() - ms(times.on_cpu())).abs() < 0.001);
        assert!((event["off_cpu_ms"].as_f64().unwrap() - ms(times.off_cpu())).abs() < 0.001);
        assert_eq!(event["samples"].as_u64().unwrap_or(0), kept.samples as u64);
        let known = |name: &str| event[name].as_str().map(str::to_owned);
        assert_eq!(known("profile_id"), kept.profile.map(|id| id.to_string()));
        assert_eq!(known("file"), kept.files.first().map(|file| file.display().to_string()));
        if let Some(hotspot) = kept.hotspot(SampleKind::OnCpu) {
            assert!(text(event, "top").starts_with(&hotspot.functions[0].name), "{hotspot:?}");
        }
        assert_eq!(event["waits"].as_u64().unwrap_or(0), kept.waits.count as u64);
    }
    assert!(!HAS_STACKS || kept.iter().any(|kept| kept.profile.is_some()), "all without samples");
    // What `jq` would find.
    let slowest = |values: Vec<f64>| {
        let numbered = values.into_iter().enumerate();
        numbered.max_by(|one, other| one.1.total_cmp(&other.1)).map(|(number, _)| number)
    };
    assert_eq!(
        slowest(events.iter().map(|event| event["wall_ms"].as_f64().unwrap()).collect()),
        slowest(kept.iter().map(|kept| ms(kept.spans[0].times().wall())).collect())
    );
    let log = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    assert!(!log.contains("secret7") && !files.iter().any(|file| file.contains("secret7")));
    if HAS_STACKS {
        let is_there =
            |part: &str| files.iter().any(|file| file.contains(part) && file.ends_with(".html"));
        assert!(is_there("cart") && is_there("search") && is_there("report"), "{files:?}");
    }
}

/// The name and fields of a span, and whether it has failed.
type NamedSpan = (String, Vec<(&'static str, String)>, bool);

/// The names and reasons of what is kept of requests to `/broken`, the first one, `/fast` and two methods of gRPC, each made
/// twice.
fn kept_of(app: impl FnOnce(Router) -> Router) -> Vec<NamedSpan> {
    let grpc_failed = || async { ([("grpc-status", "13")], "") };
    let refused = || async { ([("grpc-status", "5")], "") };
    let routes = Router::new()
        .route("/fast/{id}", get(|| async {}))
        .route("/broken", get(|| async { StatusCode::BAD_GATEWAY }))
        .route("/reset/{token}", post(|| async { StatusCode::BAD_GATEWAY }))
        .route("/shop.Cart/Get", post(grpc_failed))
        .route("/shop.Cart/Find", post(refused));
    let app = app(routes);
    let received = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&received);
    let layer = ProfilingLayer::builder()
        .exporter(tracing_profiling::export::Memory::new())
        .rules("error".parse().unwrap())
        .on_kept(move |one| kept.lock().unwrap().extend(one.spans.clone()))
        .build()
        .unwrap();
    let handle = layer.handle();
    // A log at INFO wants no span of TraceLayer's default level.
    let said = Log::default();
    let writer = said.clone();
    let log = tracing_subscriber::fmt::layer().with_writer(move || writer.clone());
    let log = log.with_filter(tracing::level_filters::LevelFilter::INFO);
    let dispatch = Dispatch::new(tracing_subscriber::registry().with(log).with(layer));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    tracing::dispatcher::with_default(&dispatch, || {
        // Any client can say that it calls a service.
        let paths = ["/broken", "/fast/1", "/reset/secret", "/shop.Cart/Get", "/shop.Cart/Find"];
        for path in paths.repeat(2) {
            let request = match path.starts_with("/shop") || path.starts_with("/reset") {
                true => Request::post(path).header("content-type", "application/grpc+proto"),
                false => Request::get(path),
            };
            runtime.block_on(app.clone().oneshot(request.body(Body::empty()).unwrap())).unwrap();
        }
    });
    handle.flush(PLENTY).unwrap();
    let said = String::from_utf8(said.0.lock().unwrap().clone()).unwrap();
    for failure in ["502 Bad Gateway\"", "error \"grpc-status 13\""] {
        assert!(said.contains(failure), "{said}");
    }
    let spans = std::mem::take(&mut *received.lock().unwrap()).into_iter();
    let kept = spans.map(|span: tracing_profiling::KeptSpan| {
        let fields = span.fields().map(|(name, value)| (name, value.to_owned())).collect();
        (span.name().to_owned(), fields, span.reasons().contains(Reason::Error))
    });
    let mut kept: Vec<_> = kept.collect();
    // Reports have no order.
    kept.sort();
    kept
}

#[test]
fn requests_without_a_profiled_span_get_one_and_responses_say_whether_they_failed() {
    let own = |fields: &[(&'static str, &str)]| {
        let fields = fields.iter().map(|(name, value)| (*name, (*value).to_owned()));
        ("request".to_owned(), fields.collect(), true)
    };
    let of_each = [
        own(&[("http.request.method", "GET"), ("http.route", "/broken")]),
        own(&[("http.request.method", "POST"), ("http.route", "/reset/{token}")]),
        own(&[("rpc.service", "shop.Cart"), ("rpc.method", "Get")]),
    ];
    let mut expected = [&of_each[..]; 2].concat();
    expected.sort();
    let debug = || TraceLayer::new_for_http();
    assert_eq!(kept_of(|app| app.layer(AwaitsLayer::new())), expected);
    assert_eq!(kept_of(|app| app.layer(AwaitsLayer::new()).layer(debug())), expected);
    assert_eq!(kept_of(|app| app.layer(debug()).layer(AwaitsLayer::new())), expected);
}

#[test]
fn requests_with_a_profiled_span_get_no_other_one() {
    let spans = || DefaultMakeSpan::new().level(tracing::Level::INFO);
    let info = || TraceLayer::new_for_http().make_span_with(spans()).on_failure(());
    let of = |fields: &[(&'static str, &str)]| {
        let fields = fields.iter().map(|(name, value)| (*name, (*value).to_owned()));
        ("request".to_owned(), fields.collect(), true)
    };
    // They have no route of their own.
    let http = of(&[("method", "GET"), ("http.route", "/broken")]);
    let grpc = of(&[("method", "POST"), ("rpc.service", "shop.Cart"), ("rpc.method", "Get")]);
    let posted = of(&[("method", "POST"), ("http.route", "/reset/{token}")]);
    let of_each = [http, posted, grpc];
    let mut expected = [&of_each[..]; 2].concat();
    expected.sort();
    assert_eq!(kept_of(|app| app.layer(AwaitsLayer::new()).layer(info())), expected);
    // Outside of it there is another one of the first request, which the response fails.
    let names = kept_of(|app| app.layer(info()).layer(AwaitsLayer::new()));
    let routes = names.iter().map(|(_, fields, _)| fields.last().unwrap().1.as_str());
    assert_eq!(routes.collect::<Vec<_>>(), ["/broken", "/reset/{token}", "Get"]);
}

/// A task that the handler has spawned keeps the span open.
#[test]
fn a_request_that_was_answered_long_before_its_end_says_so() {
    let sends = || async {
        let later = async { tokio::time::sleep(150 * MS).await };
        tokio::spawn(later.instrument(tracing::Span::current()).profiled());
    };
    let spans = || DefaultMakeSpan::new().level(tracing::Level::INFO);
    let waits = || async { tokio::time::sleep(150 * MS).await };
    let app = Router::new().route("/sends", get(sends)).route("/waits", get(waits));
    let app =
        app.layer(AwaitsLayer::new()).layer(TraceLayer::new_for_http().make_span_with(spans()));
    let setup = Setup::new("100ms");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    tracing::dispatcher::with_default(&setup.dispatch, || {
        runtime.block_on(async {
            for path in ["/sends", "/waits"] {
                let request = Request::get(path).body(Body::empty()).unwrap();
                app.clone().oneshot(request).await.unwrap();
                tokio::time::sleep(200 * MS).await;
            }
        });
    });
    setup.flush();
    let headlines: Vec<_> = setup.profiles().into_iter().map(|it| it.headline).collect();
    let is_said = headlines.iter().map(|it| it.starts_with("its response was ready after "));
    assert_eq!(is_said.collect::<Vec<_>>(), [true, false], "{headlines:?}");
    assert!(headlines[0].contains(" before its end; ") && headlines[0].contains(" awaiting"));
}

/// `uri` is shown only if it is asked for, and one log line says how.
#[test]
fn without_a_route_one_line_says_what_to_set() {
    let spans = DefaultMakeSpan::new().level(tracing::Level::INFO);
    let app = routes().layer(TraceLayer::new_for_http().make_span_with(spans));
    let (log, _, kept) = serve(&app, &["/report"; 7], "info");
    assert_eq!(kept.len(), 7);
    assert!(kept.iter().all(|kept| of_kept(kept) == [("method", "GET".to_owned())]));
    assert_eq!((lines(&log).len(), events(&log).len()), (7, 0));
    let hints = all_events(&log);
    let mut hints = hints.iter().filter(|fields| fields["reason"] == "ambiguous_names");
    let hint = hints.next().unwrap();
    assert!(hints.next().is_none());
    assert!(hint["message"].as_str().unwrap().contains("=method,uri also shows"), "{hint}");
    assert_eq!(
        [&hint["variable"], &hint["value"]],
        ["TRACING_PROFILING_SPAN_FIELDS", "method,uri"]
    );
    let log = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    assert!(
        !log.lines().any(|line| line.contains("tracing_profiling") && line.contains("/report"))
    );
}

#[test]
fn values_are_those_at_the_close_after_redaction() {
    let setup = Setup::with("0ms,open=open>50ms", |builder| {
        let redaction = Redaction::new().hide(r"acme\w*").unwrap();
        builder.span_fields(["tenant", "http.route", "size"]).redact(redaction)
    });
    setup.run(|| {
        let span =
            info_span!("request", tenant = "acme7", http.route = Empty, size = 1, method = "GET");
        span.in_scope(|| burn(20 * MS));
        span.record("http.route", "/a");
        span.record("size", 2).record("method", "PUT");
    });
    let expected = [("tenant", "[redacted]"), ("size", "2"), ("http.route", "/a")];
    assert_eq!(of_kept(&setup.kept()[0]), expected.map(|(name, value)| (name, value.to_owned())));
    if HAS_STACKS {
        let profile = &setup.profiles()[0];
        assert_eq!(profile.name, "request{tenant=[redacted] size=2 http.route=/a}");
        assert!(profile.title.starts_with(&profile.name), "{}", profile.title);
        let attributes: BTreeMap<_, _> =
            profile.attributes.iter().map(|one| (one.key, format!("{:?}", one.value))).collect();
        assert_eq!(attributes["http.route"], "String(\"/a\")");
        assert_eq!(attributes["profile.span.name"], "String(\"request\")");
    }
}

/// A value whose `Display` logs, in the span that it is recorded in.
struct Chatty;

impl std::fmt::Display for Chatty {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        tracing::info!("a value is printed");
        f.write_str("chatty")
    }
}

/// Another layer reads the extensions of the current span at each event, as `fmt` does.
struct Reading;

impl<S> tracing_subscriber::Layer<S> for Reading
where
    S: tracing::Subscriber + for<'a> tracing_subscriber::registry::LookupSpan<'a>,
{
    fn on_event(&self, _: &tracing::Event<'_>, ctx: tracing_subscriber::layer::Context<'_, S>) {
        let current = ctx.lookup_current();
        assert!(current.is_none_or(|span| span.extensions().get::<Chatty>().is_none()));
    }
}

#[test]
fn a_value_may_log_while_it_is_printed() {
    let kept = Arc::new(Mutex::new(Vec::new()));
    let received = Arc::clone(&kept);
    let layer = ProfilingLayer::builder()
        .exporter(tracing_profiling::export::Memory::new())
        .rules("0ms".parse().unwrap())
        .on_kept(move |one| received.lock().unwrap().push(of_kept(one)))
        .build()
        .unwrap();
    let handle = layer.handle();
    let dispatch = Dispatch::new(tracing_subscriber::registry().with(Reading).with(layer));
    tracing::dispatcher::with_default(&dispatch, || {
        let span = info_span!("request", method = %Chatty, http.route = Empty);
        span.in_scope(|| _ = span.record("http.route", tracing::field::display(Chatty)));
        drop(span);
        handle.flush(PLENTY).unwrap();
    });
    let expected = [("method", "chatty"), ("http.route", "chatty")];
    assert_eq!(*kept.lock().unwrap(), [expected.map(|(name, value)| (name, value.to_owned()))]);
}

/// The values of an open span are read by the thread that finds it open.
#[test]
fn an_open_span_has_its_values() {
    let setup = Setup::of_rules("open>50ms", |builder| builder);
    tracing::dispatcher::with_default(&setup.dispatch, || {
        let _span = info_span!("stream", http.route = "/events").entered();
        let start = std::time::Instant::now();
        while setup.kept().is_empty() {
            assert!(start.elapsed() < PLENTY, "it was not kept");
            burn(10 * MS);
        }
        let kept = &setup.kept()[0];
        assert!(kept.spans[0].is_open());
        assert_eq!(of_kept(kept), [("http.route", "/events".to_owned())]);
    });
}

#[test]
fn each_log_event_has_a_kind_and_is_in_no_span_of_the_program() {
    let log = Log::default();
    let writer = log.clone();
    let json = tracing_subscriber::fmt::layer().json().with_writer(move || writer.clone());
    let layer = ProfilingLayer::builder()
        .exporter(tracing_profiling::export::Memory::new())
        .rules("[kept]=0ms".parse().unwrap())
        .continuous(2_000)
        .on_kept(|_| panic!("as the test wants"))
        .build()
        .unwrap();
    let handle = layer.handle();
    let dispatch = Dispatch::new(tracing_subscriber::registry().with(json).with(layer));
    tracing::dispatcher::with_default(&dispatch, || {
        let _current = info_span!("request of a user").entered();
        info_span!("kept").in_scope(|| ());
        handle.flush(PLENTY).unwrap();
    });
    let events = all_events(&log);
    let of = |kind: &str, reason: &str| {
        let is_one = |event: &&Value| event["kind"] == kind && event["reason"] == reason;
        events.iter().find(is_one).unwrap()
    };
    let source = of("source", "start");
    assert!(["perf", "timer", "none"].contains(&source["value"].as_str().unwrap()));
    let clamped = of("configuration", "clamped");
    assert_eq!((&clamped["variable"], &clamped["value"]), (&"continuous".into(), &"2000".into()));
    assert_eq!(clamped["limit"], 1_000);
    assert!(
        clamped["message"]
            .as_str()
            .unwrap()
            .ends_with("see `configuration` in the guide's page `log`")
    );
    assert_eq!(of("kept", "latency")["span"], "kept");
    assert!(of("reports", "on_kept_panicked")["message"].is_string());
}

/// This program has another allocator.
#[test]
fn what_needs_counted_allocations_says_what_is_missing() {
    let warnings = |rules: &str, heap: bool, sample_bytes: u32| {
        let log = Log::default();
        let writer = log.clone();
        let json = tracing_subscriber::fmt::layer().json().with_writer(move || writer.clone());
        let layer = ProfilingLayer::builder()
            .exporter(tracing_profiling::export::Memory::new())
            .rules(rules.parse().unwrap())
            .heap(heap)
            .alloc_sample_interval(sample_bytes)
            .build()
            .unwrap();
        let handle = layer.handle();
        let dispatch = Dispatch::new(tracing_subscriber::registry().with(json).with(layer));
        tracing::dispatcher::with_default(&dispatch, || {
            info_span!("counted").in_scope(|| ());
            handle.flush(PLENTY).unwrap();
        });
        let events = all_events(&log).into_iter().filter(|event| event["reason"] == "not_counted");
        events.map(|event| event["message"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let (by_default, none) = (512 * 1024, Vec::<String>::new());
    assert_eq!(warnings("1h", false, by_default), none);
    assert_eq!(warnings("1h", false, 0), none);
    let of_rules = warnings("1h|alloc>1GB", false, by_default);
    assert!(of_rules.len() == 1 && of_rules[0].contains("#[global_allocator]"), "{of_rules:?}");
    let of_heap = warnings("1h", true, by_default);
    if !HAS_STACKS {
        assert!(of_heap.len() == 1 && of_heap[0].contains("needs Linux"), "{of_heap:?}");
        return;
    }
    assert!(of_heap.len() == 1 && of_heap[0].contains("#[global_allocator]"), "{of_heap:?}");
    let without_samples = warnings("1h", true, 0);
    assert!(
        without_samples.len() == 1 && without_samples[0].contains("ALLOC_SAMPLE_INTERVAL is 0"),
        "{without_samples:?}"
    );
}

/// Requests in one open connection share a profile: one is slow, one fails at once before it, one after it.
#[test]
fn each_of_the_requests_in_a_connection_has_its_own_times_and_line() {
    let directory = tempfile::tempdir().unwrap();
    let log = Log::default();
    let layer = ProfilingLayer::builder()
        .rules("500ms|error|hung=off,connection=hung=off|1h".parse().unwrap())
        .exporter(Directory::new(directory.path()))
        .cpu_budget(0)
        .build()
        .unwrap();
    let handle = layer.handle();
    let writer = log.clone();
    let json = tracing_subscriber::fmt::layer().json().with_writer(move || writer.clone());
    let dispatch = Dispatch::new(tracing_subscriber::registry().with(json).with(layer));
    tracing::dispatcher::with_default(&dispatch, || {
        let _connection = info_span!(target: "connection", "connection").entered();
        info_span!("request", http.route = "/bad").in_scope(|| tracing::error!("no such item"));
        info_span!("request", http.request.method = "GET", http.route = "/slow")
            .in_scope(|| burn(600 * MS));
        // The collector knows the connection now.
        info_span!("request", http.route = "/late").in_scope(|| tracing::error!("no such item"));
        handle.flush(PLENTY).unwrap();
    });
    let events = events(&log);
    let of = |route: &str| events.iter().find(|event| event["http.route"] == route).unwrap();
    assert_eq!(events.len(), 3);
    let (bad, slow) = (of("/bad"), of("/slow"));
    assert!(slow["wall_ms"].as_f64().unwrap() >= 600.0, "{slow}");
    assert_eq!([&bad["reason"], &slow["reason"]], ["error", "latency"]);
    if !HAS_STACKS {
        return;
    }
    assert!(slow["samples"].as_u64().unwrap() > 0 && bad["samples"].is_null(), "{bad} {slow}");
    assert!(slow["top"].as_str().unwrap().ends_with("burn"), "{slow}");
    let messages: Vec<_> = lines(&log).iter().map(|line| line["message"].to_string()).collect();
    for name in ["request{http.route=/bad}", "GET /slow", "request{http.route=/late}"] {
        let start = format!("\"kept `{name}`");
        let of_route = messages.iter().filter(|line| line.starts_with(&start));
        assert_eq!(of_route.count(), 1, "{name}: {messages:?}");
    }
    let of_bad = messages.iter().find(|line| line.contains("/bad")).unwrap();
    assert!(of_bad.contains(r#": error \"no such item\", logged at tests/names.rs:"#), "{of_bad}");
    assert!(bad["top"].is_null());
    // The profile, its title and its file are named by the request that it explains.
    let files: Vec<_> =
        std::fs::read_dir(directory.path()).unwrap().map(|file| file.unwrap().path()).collect();
    // Those that failed at once may have been reported before it, in a report of their own.
    let is_of = |file: &std::path::Path, route: &str| {
        file.extension().is_some_and(|name| name == "html")
            && file.to_str().unwrap().contains(route)
    };
    let report = files.iter().find(|file| is_of(file, "_slow-")).unwrap();
    assert!(!is_of(report, "_bad"), "{files:?}");
    let text = std::fs::read_to_string(report).unwrap();
    let title =
        ["", " and 1 more", " and 2 more"].map(|more| format!("GET /slow{more} · kept: latency"));
    assert!(title.iter().any(|title| text.contains(title)), "{report:?}");
}

#[test]
fn a_profile_has_its_spans_and_threads() {
    let setup = Setup::new("20ms");
    setup.run(|| {
        let dispatch = tracing::dispatcher::get_default(Clone::clone);
        let work = move || {
            let _default = tracing::dispatcher::set_default(&dispatch);
            info_span!("outer", http.route = "/x").in_scope(|| {
                info_span!("inner").in_scope(|| burn(60 * MS));
                burn(20 * MS);
            });
        };
        std::thread::Builder::new().name("burner-7".into()).spawn(work).unwrap().join().unwrap();
    });
    if !HAS_STACKS {
        return;
    }
    let profiles = setup.profiles();
    let [profile] = profiles.as_slice() else { panic!("{profiles:?}") };
    let [outer, inner] = profile.spans.as_slice() else { panic!("{:?}", profile.spans) };
    assert_eq!((outer.name().as_str(), &*outer.span), ("outer{http.route=/x}", "outer"));
    assert_eq!(
        (inner.name().as_str(), inner.rule.as_deref().unwrap_or_default()),
        ("inner", "20ms")
    );
    assert_eq!(outer.fields, [("http.route", "/x".to_owned())]);
    assert!(outer.times.wall() >= 80 * MS && outer.start().unwrap() <= inner.start().unwrap());
    for sample in profile.samples() {
        let link = profile.link(sample.link.unwrap()).unwrap();
        let expected = if link.span == "outer" { outer } else { inner };
        // The same moments; the clock's rate may have become more precise in between.
        let between = |one: SystemTime, other: SystemTime| {
            one.duration_since(other).unwrap_or_else(|error| error.duration())
        };
        assert!(between(link.start().unwrap(), expected.start().unwrap()) < MS);
        let end = expected.start().unwrap() + expected.times.wall();
        assert!(between(link.end().unwrap(), end) < MS);
        for point in &sample.points {
            let thread = profile.thread(point.thread.unwrap()).unwrap();
            assert_eq!(thread.name, "burner-7");
        }
    }
}
