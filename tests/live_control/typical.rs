//! What is typical of routes: over HTTP, in files, and on the command line.

use std::path::Path;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, StatusCode, header};
use http_body_util::BodyExt;
use opentelemetry_proto::tonic::profiles::v1development::ProfilesData;
use prost::Message as _;
use serde_json::Value;
use tower::ServiceExt;
use tracing::info_span;
use tracing_profiling::{Directory, Handle, Redaction, Resource, RouteHistory};

use super::support::{HAS_STACKS, PLENTY, Setup, burn};
use super::{Answer, MS, get};

#[allow(dead_code, reason = "its `main` is another one")]
#[path = "../../examples/compare.rs"]
mod compare;

const SIMILAR: &str = "request{http.route=/similar}";
const QUERY: &str = "route=request%7Bhttp.route%3D%2Fsimilar%7D";

fn version(dir: &Path, version: &'static str, rules: &str) -> Setup {
    let resource = Resource::new().with("service.version", version);
    Setup::with(rules, |builder| {
        let builder = builder.references(1, 100.0).span_fields(["http.route"]);
        let redaction = Redaction::new().hide("secret").unwrap();
        builder.resource(resource).redact(redaction).exporter(Directory::new(dir))
    })
}

/// Requests that wait, and whose wall time is at least that, whatever else the machine does.
fn serve(setup: &Setup, route: &str, requests: u64, wait: Duration) {
    tracing::dispatcher::with_default(&setup.dispatch, || {
        for _ in 0..requests {
            info_span!("request", http.route = route).in_scope(|| {
                burn(2 * MS);
                std::thread::sleep(wait);
            });
        }
    });
}

/// Until all reference spans that have closed are known, or were dropped.
fn wait_for_references(setup: &Setup) {
    let start = std::time::Instant::now();
    loop {
        setup.flush();
        let stats = setup.handle.stats().references;
        if stats.added + stats.dropped_cohorts_full + stats.dropped_busy == stats.chosen {
            return;
        }
        assert!(start.elapsed() < PLENTY, "{stats:?}");
    }
}

/// As a browser asks.
async fn page(handle: &Handle, path: &str) -> Answer {
    let app = Router::new().nest("/profiling", tracing_profiling_server::router(handle));
    let request = Request::builder().uri(format!("/profiling{path}"));
    let request = request.header(header::ACCEPT, "text/html").body(Body::empty()).unwrap();
    let (parts, body) = app.oneshot(request).await.unwrap().into_parts();
    let body = body.collect().await.unwrap().to_bytes().to_vec();
    Answer { status: parts.status, headers: parts.headers, body }
}

fn compare(arguments: &[&str]) -> u8 {
    compare::status(arguments.iter().map(|&argument| argument.to_owned()))
}

#[tokio::test]
async fn routes_have_what_is_typical_of_them() {
    if !HAS_STACKS {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let setup = version(dir.path(), "1.4.2", "[request]=off_cpu>300ms");
    // As a program that mounts the routes when it starts.
    _ = tracing_profiling_server::router(&setup.handle);
    let hostile = "/secret/<script>&\"'";
    serve(&setup, "/similar", 12, 5 * MS);
    serve(&setup, hostile, 3, MS);
    // None waits for as long by chance.
    serve(&setup, "/similar", 1, 400 * MS);
    wait_for_references(&setup);

    let all = get(&setup.handle, "/routes").await.json();
    assert!(!all.to_string().contains("secret"), "{all}");
    let stored = RouteHistory::read(dir.path()).unwrap();
    let names: Vec<_> = stored.routes().collect();
    assert!(names.len() == 2 && names.iter().all(|name| !name.contains("secret")), "{names:?}");
    assert_eq!(all["version"], "1.4.2");
    let routes = all["routes"].as_array().unwrap();
    assert_eq!(routes.len(), 2, "{all}");
    let similar = &routes[0];
    assert_eq!(similar["name"], SIMILAR, "the one with the most time is first");
    let number = |of: &Value| of.as_f64().unwrap_or_else(|| panic!("{similar}"));
    assert_eq!((&similar["references"], &similar["requests_estimated"]), (&13.into(), &13.into()));
    assert!(number(&similar["p50_ms"]) >= 5.0 && similar["p95_ms"].is_null(), "{similar}");
    let mean_ms = number(&similar["mean_wall_ms"]);
    assert!(mean_ms >= 35.0, "{similar}");
    let split = similar["mean_wall_split_ms"].as_object().unwrap();
    let sum_ms: f64 = split.values().map(number).sum();
    assert!((sum_ms - mean_ms).abs() < 0.01 && number(&split["off_cpu"]) >= 30.0, "{similar}");
    assert!(similar["drift"].is_null());
    let kept = similar["kept"].as_array().unwrap();
    assert!(kept.len() == 1 && number(&kept[0]["wall_ms"]) >= 400.0, "{similar}");
    assert!(routes[1]["p50_ms"].is_null() && routes[1]["kept"] == serde_json::json!([]), "{all}");
    let one = get(&setup.handle, &format!("/routes?{QUERY}")).await.json();
    assert_eq!(one["routes"], serde_json::json!([similar]));

    let list = page(&setup.handle, "/routes").await;
    assert_eq!(list.status, StatusCode::OK);
    let policy = list.headers[header::CONTENT_SECURITY_POLICY].to_str().unwrap();
    assert!(policy.contains("script-src 'self'") && !policy.contains("unsafe"), "{policy}");
    // The script of the page asks for the same address.
    let text = list.text();
    assert!(text.contains("<meta name=\"base\" content=\"/profiling/\">"), "{text}");
    assert!(text.contains("src=\"/profiling/index.js\"") && !text.contains("{{"), "{text}");
    for of_route in [format!("/routes?{QUERY}"), format!("/compare?{QUERY}")] {
        assert_eq!(page(&setup.handle, &of_route).await.text(), text);
    }
    assert_eq!(kept[0]["reasons"], "off_cpu");
    assert!(page(&setup.handle, "").await.text().contains("href=\"/profiling/routes\""));

    let of_typical = format!("/routes/profile?{QUERY}");
    let pprof = get(&setup.handle, &of_typical).await;
    assert!(pprof.status == StatusCode::OK && pprof.body.starts_with(&[0x1f, 0x8b]));
    let html = get(&setup.handle, &format!("{of_typical}&format=html")).await;
    assert!(html.text().contains("the typical request{http.route=/similar}"));
    let otlp = get(&setup.handle, &format!("{of_typical}&format=otlp")).await;
    let message = ProfilesData::decode(otlp.body.as_slice()).unwrap();
    let dictionary = message.dictionary.unwrap();
    let strings = &dictionary.string_table;
    for expected in ["typical.id", "typical.route"] {
        assert!(strings.iter().any(|string| string == expected), "{strings:?}");
    }
    let profiles = &message.resource_profiles[0].scope_profiles[0].profiles;
    let id_of_kept = kept[0]["id"].as_str().unwrap();
    let ids: Vec<String> = profiles
        .iter()
        .map(|profile| profile.profile_id.iter().map(|byte| format!("{byte:02x}")).collect())
        .collect();
    assert!(!ids.is_empty() && ids.iter().all(|id| id != id_of_kept), "{ids:?}");
    for (path, status) in [
        ("/routes/profile", StatusCode::NOT_FOUND),
        ("/routes/profile?route=none", StatusCode::NOT_FOUND),
        (&*format!("{of_typical}&format=pdf"), StatusCode::BAD_REQUEST),
        ("/compare", StatusCode::BAD_REQUEST),
        (&*format!("/compare?{QUERY}"), StatusCode::NOT_FOUND),
    ] {
        assert_eq!(get(&setup.handle, path).await.status, status, "{path}");
    }
    let none = get(&setup.handle, "/routes?route=none").await.json();
    assert_eq!(none["routes"], serde_json::json!([]));
}

#[tokio::test]
async fn versions_are_compared_over_http_and_on_the_command_line() {
    if !HAS_STACKS {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (mut last, mut wait) = (None, 2 * MS);
    for name in ["1.4.1", "1.4.2"] {
        let setup = version(dir.path(), name, "[request]=1h");
        let start = std::time::Instant::now();
        serve(&setup, "/similar", 12, wait);
        // Far more than each of the first has taken.
        wait = 60 * MS + start.elapsed() / 4;
        wait_for_references(&setup);
        setup.handle.shutdown(PLENTY).unwrap();
        last = Some(setup);
    }
    let setup = last.unwrap();
    let path = format!("/compare?{QUERY}");
    let compared = get(&setup.handle, &path).await.json();
    let recent = &compared["wall_ms"]["after"];
    let compared = get(&setup.handle, &format!("{path}&after=1.4.2")).await.json();
    assert_eq!(recent, &compared["wall_ms"]["after"], "all of it is stored");
    assert_eq!(compared["before"], serde_json::json!({"version": "1.4.1", "references": 12}));
    assert_eq!(compared["after"], serde_json::json!({"version": "1.4.2", "references": 12}));
    assert_eq!(compared["versions"], serde_json::json!(["1.4.2", "1.4.1"]));
    let wall = &compared["wall_ms"];
    // Not rounded.
    let extra = |of: &Value| (of["extra"].as_f64().unwrap() * 1e6).round() as i64;
    let rows = compared["rows"].as_array().unwrap();
    assert_eq!(rows.iter().map(extra).sum::<i64>(), extra(wall), "{compared}");
    assert!(
        rows.iter().any(|row| row["what"] == "off_cpu" && row["extra"].as_f64().unwrap() > 10.0),
        "{compared}"
    );
    assert_eq!(rows[0]["unit"], "ms");
    let other = get(&setup.handle, &format!("{path}&before=1.4.2&after=1.4.1")).await.json();
    assert_eq!(extra(&other["wall_ms"]), -extra(wall));
    for query in ["before=0.9", "before=2001-01-01T00", "after=0.9"] {
        let missing = get(&setup.handle, &format!("{path}&{query}")).await;
        assert_eq!(missing.status, StatusCode::NOT_FOUND, "{query}: {}", missing.text());
    }

    let root = dir.path().to_str().unwrap();
    assert_eq!(compare(&["1.4.1", "1.4.2", "--dir", root]), 0);
    // Where the machine was busy for a part of it, this may be chance.
    let is_slower = wall["interval"][0].as_f64().unwrap() > 0.0;
    let status = compare(&["1.4.1", "1.4.2", "--dir", root, "--fail-above", "10%"]);
    assert_eq!(status, u8::from(is_slower), "{compared}");
    assert_eq!(compare(&["1.4.1", "1.4.2", "--fail-above", "100000", "--dir", root]), 0);
    assert_eq!(compare(&["1.4.2", "1.4.1", "--dir", root, "--fail-above", "10%"]), 0);
    assert_eq!(compare(&["1.4.1", "2.0", "--dir", root]), 2);
    assert_eq!(compare(&["1.4.1"]), 2);
    assert_eq!(compare(&["1.4.1", "1.4.2", "--dir", root, "--fail-above", "much"]), 2);
    // As files.
    let typical = dir.path().join("typical");
    let mut files: Vec<_> = std::fs::read_dir(&typical)
        .unwrap()
        .map(|entry| entry.unwrap().path().to_str().unwrap().to_owned())
        .collect();
    files.sort_by_key(|file| RouteHistory::read(file).unwrap().references(SIMILAR));
    assert!(files.len() >= 2, "one for each version and hour: {files:?}");
    assert_eq!(compare(&[typical.to_str().unwrap(), &files[0], "--fail-above", "100000%"]), 0);
}

#[tokio::test]
async fn invented_routes_are_bounded_and_without_references_there_are_none() {
    if !HAS_STACKS {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let setup = version(dir.path(), "1", "[request]=1h");
    for number in 0..300 {
        let route = format!("/{number}");
        tracing::dispatcher::with_default(&setup.dispatch, || {
            info_span!("request", http.route = route).in_scope(|| ());
        });
        if number % 10 == 0 {
            // Fewer wait at a time than there is room for.
            wait_for_references(&setup);
        }
    }
    wait_for_references(&setup);
    let routes = get(&setup.handle, "/routes").await.json();
    let number = routes["routes"].as_array().unwrap().len();
    assert!((1..=64).contains(&number), "{number}");
    let stats = setup.handle.stats().references;
    assert!(stats.dropped_cohorts_full > 0, "{stats:?}");

    let off = Setup::with("[request]=0ms", |builder| builder.references(0, 0.0));
    off.run(|| info_span!("request").in_scope(|| ()));
    let routes = get(&off.handle, "/routes").await.json();
    assert_eq!(routes["routes"], serde_json::json!([]));
    let compared = get(&off.handle, &format!("/compare?{QUERY}")).await;
    assert_eq!(compared.status, StatusCode::NOT_FOUND, "it has no directory");
}
