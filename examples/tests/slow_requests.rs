//! The shop of the example together with OpenTelemetry: every exported id has a file, and every file has an exported
//! id.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test"
)]

#[path = "../shop/mod.rs"]
mod shop;
#[path = "../../tests/support/mod.rs"]
mod support;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::sync::{Arc, Mutex};

use axum::body::Body;
use axum::http::{Request, header};
use http_body_util::BodyExt as _;
use opentelemetry::trace::TracerProvider;
use opentelemetry_proto::tonic::profiles::v1development::ProfilesData;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{
    InMemorySpanExporter, SdkTracerProvider, SimpleSpanProcessor, SpanData,
};
use prost::Message as _;
use support::Nanos as _;
use support::{HAS_STACKS, Log, PLENTY};
use tower::ServiceExt as _;
use tracing::Dispatch;
use tracing_profiling::profile::SampleKind;
use tracing_profiling::{
    Directory, Handle, Kept, Measure, ProfileId, ProfilingAllocator, ProfilingLayer,
};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::prelude::*;

#[global_allocator]
static ALLOCATOR: ProfilingAllocator = ProfilingAllocator::system();

fn text(span: &SpanData, key: &str) -> Option<String> {
    let found = span.attributes.iter().find(|attribute| attribute.key.as_str() == key);
    found.map(|attribute| attribute.value.to_string())
}

#[test]
fn exported_ids_match_the_files() {
    let directory = tempfile::tempdir().unwrap();
    let reports = Arc::new(Mutex::new(Vec::new()));
    let resource = Resource::builder().with_service_name("shop").build();
    let profiling = ProfilingLayer::builder()
        // A request that takes ten seconds on a busy machine has no other line.
        .rules("250ms|error|hung=off".parse().unwrap())
        .resource(resource.clone())
        .exporter(Directory::new(directory.path()))
        .on_kept({
            let reports = Arc::clone(&reports);
            move |kept| reports.lock().unwrap().push(kept.clone())
        })
        .build()
        .unwrap();
    let handle = profiling.handle();
    // As a program that mounts the routes when it starts.
    _ = tracing_profiling_server::router(&handle);
    let spans = InMemorySpanExporter::default();
    let provider = SdkTracerProvider::builder()
        .with_resource(resource)
        .with_span_processor(SimpleSpanProcessor::new(spans.clone()))
        .build();
    let otel = tracing_opentelemetry::layer().with_tracer(provider.tracer("shop"));
    let log = Log::default();
    let writer = log.clone();
    let lines = tracing_subscriber::fmt::layer()
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .with_filter(Targets::new().with_target("tracing_profiling", LevelFilter::INFO));
    let dispatch =
        Dispatch::new(tracing_subscriber::registry().with(lines).with(profiling).with(otel));

    // The shop closes spans on every thread of its runtime, through the default subscriber of that thread.
    let for_threads = dispatch.clone();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        // Another worker could take what `report` has woken, at once or when it gets a CPU.
        .worker_threads(1)
        .enable_all()
        .on_thread_start(move || {
            // For the lifetime of the thread.
            std::mem::forget(tracing::dispatcher::set_default(&for_threads));
        })
        .build()
        .unwrap();
    let requests = runtime.block_on(async { tokio::spawn(shop::run()).await }).unwrap().unwrap();
    drop(runtime);
    handle.flush(PLENTY).unwrap();
    provider.force_flush().unwrap();

    let spans = spans.get_finished_spans().unwrap();
    assert!(spans.len() >= requests, "{} spans of {requests} requests", spans.len());
    let kept: Vec<_> = spans.iter().filter(|span| text(span, "profile.reason").is_some()).collect();
    let names: BTreeSet<_> = kept.iter().map(|span| span.name.as_ref()).collect();
    for name in
        ["bundles", "similar", "prices", "checkout", "legacy", "upstream", "report", "broken"]
    {
        assert!(names.contains(name), "{names:?}");
    }

    println!("{:?}", handle.stats());
    check_guilty(&reports.lock().unwrap());
    let log = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    check_lines(&log, &reports.lock().unwrap());
    check_markdown(&handle);

    // The ids on spans are exactly those of the files.
    let ids: BTreeSet<_> = spans.iter().filter_map(|span| text(span, "profile.id")).collect();
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(directory.path()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "otlp") {
            let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
            let id = name.rsplit('-').next().unwrap().to_owned();
            files.insert(id, ProfilesData::decode(&*fs::read(path).unwrap()).unwrap());
        }
    }
    assert_eq!(ids, files.keys().cloned().collect());
    if HAS_STACKS {
        assert!(ids.len() >= 6, "all except the span that fails immediately");
    }

    // Every sample links to a span of the trace whose span refers to the profile.
    let by_id: HashMap<_, _> =
        spans.iter().map(|span| (span.span_context.span_id().to_bytes().to_vec(), span)).collect();
    for (id, data) in &files {
        let leads = kept.iter().find(|span| text(span, "profile.id").as_ref() == Some(id)).unwrap();
        let trace = leads.span_context.trace_id().to_bytes().to_vec();
        let links = &data.dictionary.as_ref().unwrap().link_table;
        let profiles = &data.resource_profiles[0].scope_profiles[0].profiles;
        let first: [u8; 16] = profiles[0].profile_id.as_slice().try_into().unwrap();
        let expected = id.parse::<ProfileId>().unwrap();
        let waits = SampleKind::OffCpu.id_of(expected);
        let kinds = [SampleKind::Await, SampleKind::Delay].map(|kind| kind.id_of(expected));
        let kinds = [&[expected, waits], &kinds[..]].concat();
        assert!(kinds.contains(&ProfileId::from_bytes(first)), "{id}");
        let off_cpu_id = text(leads, "profile.off_cpu_id");
        assert!(off_cpu_id.is_none_or(|id| id == waits.to_string()), "{id}");
        for sample in profiles.iter().flat_map(|profile| &profile.samples) {
            let link = &links[usize::try_from(sample.link_index).unwrap()];
            assert_eq!(link.trace_id, trace);
            assert!(by_id.contains_key(&link.span_id), "a span that was exported");
        }
    }
}

/// With any source and any privileges, the same requests are kept for the same reasons, with the same functions.
fn check_guilty(reports: &[Kept]) {
    let of = |name: &str| {
        let mut found = reports.iter().filter(|kept| kept.spans[0].name() == name);
        found.next().expect(name)
    };
    for (name, reason) in [
        ("GET /bundles", "latency"),
        ("GET /similar", "latency"),
        ("GET /prices", "latency"),
        ("GET /checkout", "latency"),
        ("GET /legacy", "latency"),
        ("GET /upstream", "latency"),
        ("GET /report", "latency"),
        ("GET /broken", "error"),
    ] {
        assert_eq!(of(name).spans[0].reasons().to_string(), reason, "{name}");
    }
    for kept in reports {
        let name = kept.spans[0].name();
        let all = kept.spans[0].times().allocations.expect("counted");
        // A price list has 5,000 names of some 11 bytes.
        let is_large = all.allocated_bytes > 10_000_000 && all.allocations > 100_000;
        assert_eq!(is_large, name == "GET /prices", "{name}: {all:?}");
    }
    if !HAS_STACKS {
        return;
    }
    check_awaits(reports);
    let similar = of("GET /similar").hotspot(SampleKind::OnCpu).unwrap();
    assert_eq!(similar.leaf.as_ref().unwrap().name, "sqlite3VdbeExec");
    for (name, guilty, call) in [
        ("GET /checkout", "reserve", "[futex 0x"),
        ("GET /legacy", "ask_the_old_system", "[sleep]"),
    ] {
        let waits = &of(name).waits;
        let longest = waits.longest.clone().unwrap();
        assert!(longest.function.ends_with(guilty), "{name}: {waits:?}");
        assert!(longest.call.starts_with(call), "{name}: {waits:?}");
        // Both functions are async, so their blocking is reported where the stack shows the executor. Those of a debug
        // build are longer than the copies.
        let blocked_ns = waits.in_async_total.ns();
        assert!(cfg!(debug_assertions) || blocked_ns > 1_000_000_000, "{name}: {waits:?}");
        let span = &of(name).spans[0];
        let (account, off_cpu_ns) = (span.times(), span.times().off_cpu().ns());
        // On a busy machine it also waits for a CPU, before, in between and after.
        let runnable = [Measure::Runnable, Measure::RunnableError];
        let runnable_ns: u64 = runnable.iter().filter_map(|it| span.facts.get(*it)).sum();
        let least_ns = off_cpu_ns.saturating_sub(runnable_ns + off_cpu_ns / 20);
        let possible = least_ns..=off_cpu_ns + off_cpu_ns / 20;
        assert!(possible.contains(&waits.total.ns()), "{name}: {waits:?} {account:?}");
    }
}

/// The function of the shop that most of the time of a request is in.
const GUILTY: [(&str, &str); 7] = [
    ("bundles", "count_cheap_bundles"),
    ("similar", "similar"),
    ("prices", "cheapest_of_own_list"),
    ("checkout", "reserve"),
    ("legacy", "ask_the_old_system"),
    ("upstream", "ask_upstream"),
    ("report", "report"),
];

/// Whether a text says that most of the time was spent waiting for a CPU, as on a busy machine.
fn is_starved(text: &str) -> bool {
    let first = text.split(';').next();
    first.is_some_and(|first| first.contains(" waiting for a CPU"))
}

/// The line of each slow request names the function of the shop that most of its time is in, with its share.
fn check_lines(log: &str, reports: &[Kept]) {
    if !HAS_STACKS {
        return;
    }
    for (request, function) in GUILTY {
        let line = log.lines().find(|line| line.contains(&format!("kept `GET /{request}`")));
        let line = line.unwrap_or_else(|| panic!("{request}: {log}"));
        let place = format!(" in slow_requests::shop::{function} (shop/mod.rs:");
        let Some((before, _)) = line.split_once(&place) else {
            assert!(is_starved(line), "{line}");
            continue;
        };
        // A long line does not say that it is all.
        let share = before.strip_suffix(" %").and_then(|before| before.rsplit(' ').next());
        let share: u64 = share.map_or(100, |share| share.parse().unwrap());
        // A collector that waits for a CPU loses samples.
        let is_it = |kept: &&Kept| kept.spans[0].facts.name() == format!("GET /{request}");
        let left = reports.iter().find(is_it).and_then(|kept| kept.coverage).unwrap_or(1.0);
        assert!(share as f64 >= 50.0 * left.min(1.0) - 1.0 && share <= 100, "{left}: {line}");
    }
    if let Some(line) = log.lines().find(|line| line.contains("kept `GET /news`")) {
        assert!(line.contains(" scheduling delay behind `report`"), "{line}");
    }
}

/// Each request has a short form that says what was slow, also the one that failed before a sample fell in it.
fn check_markdown(handle: &Handle) {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let get = |path: String| {
        let request = Request::get(path).header(header::ACCEPT, "text/markdown");
        let answer =
            tracing_profiling_server::router(handle).oneshot(request.body(Body::empty()).unwrap());
        let body = async { answer.await.unwrap().into_body().collect().await.unwrap().to_bytes() };
        String::from_utf8(runtime.block_on(body).to_vec()).unwrap()
    };
    let list: serde_json::Value = serde_json::from_str(&get("/kept".to_owned())).unwrap();
    let ids = list["kept"].as_array().unwrap().iter().map(|entry| entry["id"].as_str().unwrap());
    let texts: Vec<_> = ids.map(|id| get(format!("/kept/{id}"))).collect();
    assert!(texts.iter().all(|text| text.len() <= 2_048), "{texts:?}");
    let of = |request: &str| {
        let title = format!("# `GET /{request}");
        let text = texts.iter().find(|text| text.starts_with(&title));
        text.unwrap_or_else(|| panic!("{request}: {texts:?}"))
    };
    assert!(of("broken").contains("**In short:** `error at shop/mod.rs:"), "{}", of("broken"));
    for (request, function) in GUILTY.iter().filter(|_| HAS_STACKS) {
        let text = of(request);
        let (_, short) = text.split_once("**In short:** `").unwrap();
        let sentence = short.lines().next().unwrap();
        let is_named = sentence.contains(&format!("slow_requests::shop::{function} "));
        assert!(is_named || is_starved(sentence), "{text}");
    }
}

fn check_awaits(reports: &[Kept]) {
    let upstream = reports.iter().find(|kept| kept.spans[0].name() == "GET /upstream").unwrap();
    let hotspot = upstream.hotspot(SampleKind::Await).unwrap();
    let (function, leaf) = (&hotspot.functions[0], hotspot.leaf.as_ref().unwrap());
    assert!(function.name.ends_with("ask_upstream"), "{hotspot:?}");
    assert!(function.location.starts_with("shop/mod.rs:"), "{hotspot:?}");
    assert!(leaf.name.starts_with("tokio::time::"), "{hotspot:?}");
    let times = upstream.spans[0].times();
    let explained = times.awaiting() + times.scheduling_delay();
    // The deadline is set in a poll, so that the rest of this poll is part of it. After the last one the span is idle until
    // the body is sent; nothing is awaited then.
    let busy = times.wall() - times.idle();
    let little = shop::SLOW / 100 + std::time::Duration::from_millis(1);
    assert!(explained <= times.idle() && explained + busy + little > shop::SLOW, "{times:?}");
    // On a busy machine it may come too late to wait for the report; then it is not kept.
    if let Some(news) = reports.iter().find(|kept| kept.spans[0].name() == "GET /news") {
        assert_eq!(news.awaits.delayed_by.as_deref(), Some("report"), "{:?}", news.awaits);
    }
}
