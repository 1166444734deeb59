//! Rules, state and profiles over HTTP.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "a test")]

mod support;
#[path = "live_control/typical.rs"]
mod typical;

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, SystemTime};

use axum::Router;
use axum::body::Body;
use axum::http::{HeaderMap, Request, StatusCode, header};
use http_body_util::BodyExt;
use serde_json::Value;
use support::{HAS_STACKS, PLENTY, Setup, burn};
use tower::ServiceExt;
use tracing::{Instrument, info_span};
use tracing_profiling::export::{ExportError, Exported, Exporter, Memory};
use tracing_profiling::profile::Profile;
use tracing_profiling::{
    Directory, Handle, NoProfile, ProfiledExt, ProfilingLayer, Reason, Rules, Source,
};
use tracing_subscriber::prelude::*;

const MS: Duration = Duration::from_millis(1);

struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    body: Vec<u8>,
}

impl Answer {
    fn text(&self) -> &str {
        str::from_utf8(&self.body).unwrap()
    }

    fn json(&self) -> Value {
        assert_eq!(self.headers[header::CONTENT_TYPE], "application/json");
        serde_json::from_slice(&self.body).unwrap()
    }
}

/// Sends a request to the routes, nested as a program would mount them.
async fn ask(handle: &Handle, method: &str, path: &str, body: impl Into<Body>) -> Answer {
    let app = Router::new().nest("/profiling", tracing_profiling_server::router(handle));
    let uri = format!("/profiling{path}");
    let request = Request::builder().method(method).uri(uri).body(body.into()).unwrap();
    let (parts, body) = app.oneshot(request).await.unwrap().into_parts();
    let body = body.collect().await.unwrap().to_bytes().to_vec();
    Answer { status: parts.status, headers: parts.headers, body }
}

async fn get(handle: &Handle, path: &str) -> Answer {
    ask(handle, "GET", path, "").await
}

/// A request may want to know what fills the pool.
#[test]
fn routes_answer_while_the_pool_of_blocking_threads_is_full() {
    let setup = Setup::new("0ms");
    // As a program that mounts the routes when it starts.
    _ = tracing_profiling_server::router(&setup.handle);
    setup.run(|| info_span!("kept").in_scope(|| _ = burn(5 * MS)));
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.max_blocking_threads(1).build().unwrap();
    let (release, wait) = mpsc::channel::<()>();
    runtime.spawn_blocking(move || _ = wait.recv());
    let answer = runtime.block_on(get(&setup.handle, "/kept"));
    assert_eq!(answer.json()["kept"][0]["span"], "kept");
    drop(release);
}

async fn get_as(handle: &Handle, path: &str, accept: &str) -> Answer {
    let app = Router::new().nest("/profiling", tracing_profiling_server::router(handle));
    let request = Request::get(format!("/profiling{path}")).header(header::ACCEPT, accept);
    let answer = app.oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
    let (parts, body) = answer.into_parts();
    let body = body.collect().await.unwrap().to_bytes().to_vec();
    Answer { status: parts.status, headers: parts.headers, body }
}

async fn put_rules(handle: &Handle, rules: impl Into<Body>) -> Answer {
    ask(handle, "PUT", "/rules", rules).await
}

fn in_dir(dir: &Path, rules: &str) -> Setup {
    let directory = Directory::new(dir);
    Setup::with(rules, |builder| builder.exporter(directory))
}

#[tokio::test]
async fn the_state_has_every_counter() {
    let setup = Setup::new("0ms|error,noisy=off");
    setup.run(|| info_span!("one").in_scope(|| burn(30 * MS)));
    for path in ["", "/rules"] {
        let answer = get(&setup.handle, path).await;
        assert_eq!(answer.status, StatusCode::OK);
        assert_eq!(answer.headers[header::X_CONTENT_TYPE_OPTIONS], "nosniff");
        assert_eq!(answer.headers[header::CACHE_CONTROL], "no-store");
    }
    assert_eq!(get(&setup.handle, "/rules").await.text(), "0s|error,noisy=off");
    let state = get(&setup.handle, "").await.json();
    assert_eq!(state["enabled"], true);
    assert_eq!(state["rules"], "0s|error,noisy=off");
    assert_eq!(state["source"], setup.handle.source());
    assert_eq!(state["kept"].as_object().unwrap().len(), Reason::all().count());
    assert_eq!(state["kept"]["latency"], 1);
    assert_eq!(state["kept"]["error"], 0);
    let stats = state["stats"].as_object().unwrap();
    let names: Vec<_> = setup.handle.stats().iter().map(|(name, _)| name).collect();
    assert_eq!(stats.len(), names.len());
    assert!(names.iter().all(|name| stats[*name].is_u64()));
    assert_eq!(state["stats"]["spans.seen"], 1);
    assert_eq!(state["stats"]["spans.kept"], 1);
}

#[tokio::test]
async fn put_changes_what_is_kept() {
    let setup = Setup::new("1h");
    let spans = || {
        info_span!("cart").in_scope(|| ());
        info_span!("list").in_scope(|| ());
    };
    setup.run(spans);
    let answer = put_rules(&setup.handle, "[cart]=0ms\n").await;
    assert_eq!((answer.status, answer.text()), (StatusCode::OK, "[cart]=0s"));
    setup.run(spans);
    assert_eq!(setup.kept_names(), [["cart"]]);
}

#[tokio::test]
async fn invalid_rules_change_nothing() {
    let setup = Setup::new("1h");
    let answer = put_rules(&setup.handle, "250ms,shop=fast").await;
    assert_eq!(answer.status, StatusCode::BAD_REQUEST);
    assert!(answer.text().contains("250ms,shop=fast\n             ^"), "{}", answer.text());
    assert!(answer.headers[header::CONTENT_TYPE].to_str().unwrap().starts_with("text/plain"));
    for body in [&b"\xff\xfe"[..], b"", b" \n", b"0ms\0"] {
        assert_eq!(put_rules(&setup.handle, body).await.status, StatusCode::BAD_REQUEST);
    }
    let many = "a=1h,".repeat(64 * 1024 / 5 + 1);
    let answer = put_rules(&setup.handle, many).await;
    assert_eq!(answer.status, StatusCode::PAYLOAD_TOO_LARGE);
    assert_eq!(get(&setup.handle, "/rules").await.text(), "1h");
    assert_eq!(ask(&setup.handle, "POST", "/rules", "0ms").await.status, 405);
    setup.run(|| info_span!("any").in_scope(|| ()));
    assert!(setup.kept().is_empty());
}

#[tokio::test]
async fn the_continuous_profile_is_switched() {
    let setup = Setup::new("1h");
    let text = |answer: Answer| answer.text().to_owned();
    assert_eq!(text(get(&setup.handle, "/continuous").await), "off");
    for (body, rate, shown) in [("on", 49, "49"), ("97\n", 97, "97"), ("off", 0, "off")] {
        let answer = ask(&setup.handle, "PUT", "/continuous", body).await;
        let (status, answered, now) = (answer.status, text(answer), setup.handle.continuous());
        // Where nothing can be sampled, it goes off again by itself.
        let is_off = |is_so| !HAS_STACKS && is_so;
        assert_eq!(status, StatusCode::OK, "{answered}");
        assert!(answered == shown || is_off(answered == "off"), "{answered}, {shown}");
        assert!(now == rate || is_off(now == 0), "{now}, {rate}");
    }
    for body in ["", "0", "1001", "maybe"] {
        let answer = ask(&setup.handle, "PUT", "/continuous", body).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{body}");
    }
    setup.handle.shutdown(PLENTY).unwrap();
    let answer = ask(&setup.handle, "PUT", "/continuous", "on").await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
}

#[tokio::test]
async fn delete_stops_and_post_resumes() {
    let setup = Setup::new("0ms");
    setup.run(|| info_span!("before").in_scope(|| ()));
    let state = ask(&setup.handle, "DELETE", "", "").await.json();
    assert_eq!((&state["enabled"], &state["rules"]), (&false.into(), &"0s|hung=off".into()));
    setup.run(|| info_span!("stopped").in_scope(|| ()));
    let state = ask(&setup.handle, "POST", "", "").await.json();
    assert_eq!((&state["enabled"], &state["rules"]), (&true.into(), &"0s|hung=off".into()));
    setup.run(|| info_span!("after").in_scope(|| ()));
    assert_eq!(setup.kept_names(), [["before"], ["after"]]);
}

#[tokio::test]
async fn changes_are_logged() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let log = Arc::new(file.reopen().unwrap());
    let rules: Rules = "0ms".parse().unwrap();
    let profiling = ProfilingLayer::builder().rules(rules).exporter(Memory::new()).build().unwrap();
    let handle = profiling.handle();
    let subscriber = tracing_subscriber::registry()
        .with(tracing_subscriber::fmt::layer().json().with_writer(log))
        .with(profiling);
    // Requests have a span, which the events are not in.
    let _default = tracing::subscriber::set_default(subscriber);
    let _span = info_span!("request").entered();
    assert_eq!(ask(&handle, "DELETE", "", "").await.status, StatusCode::OK);
    assert_eq!(put_rules(&handle, "7ms").await.status, StatusCode::OK);
    assert_eq!(put_rules(&handle, "fast").await.status, StatusCode::BAD_REQUEST);
    assert_eq!(ask(&handle, "POST", "", "").await.status, StatusCode::OK);
    let lines = fs::read_to_string(file.path()).unwrap();
    let events = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let events = events.filter(|event| event["target"] == "tracing_profiling").map(|event| {
        assert!(event.get("span").is_none() && event.get("spans").is_none(), "{event}");
        event["fields"].clone()
    });
    let events = events.filter(|fields| fields["message"].as_str().unwrap().contains("HTTP: "));
    let enabled = serde_json::json!({
        "message": "HTTP: the rules are now `7ms`", "kind": "rules", "reason": "changed", "rules": "7ms",
    });
    let disabled = serde_json::json!({
        "message": "HTTP: profiling is disabled", "kind": "rules", "reason": "disabled", "rules": "0s",
    });
    assert_eq!(events.collect::<Vec<_>>(), [disabled, enabled.clone(), enabled], "{lines}");
}

#[tokio::test]
async fn post_starts_profiling_that_was_off() {
    let setup = Setup::new("off");
    let state = get(&setup.handle, "").await.json();
    assert_eq!((&state["enabled"], &state["rules"]), (&false.into(), &"off".into()));
    let answer = ask(&setup.handle, "POST", "", "").await;
    assert_eq!(answer.status, StatusCode::OK);
    assert_eq!(answer.json()["rules"], "250ms|error");
    setup.run(|| info_span!("fails").in_scope(|| tracing::error!("on purpose")));
    assert_eq!(setup.kept_names(), [["fails"]]);
}

#[tokio::test]
async fn put_starts_profiling_that_was_off() {
    let setup = Setup::new("off");
    assert_eq!(put_rules(&setup.handle, "0ms").await.status, StatusCode::OK);
    setup.run(|| info_span!("any").in_scope(|| ()));
    assert_eq!(setup.kept_names(), [["any"]]);
    assert_eq!(put_rules(&setup.handle, "off").await.text(), "off");
    assert_eq!(get(&setup.handle, "").await.json()["enabled"], false);
}

async fn assert_has_ended(handle: &Handle) {
    for (method, path) in [("POST", ""), ("PUT", "/rules")] {
        let answer = ask(handle, method, path, "0ms").await;
        assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE, "{method}");
        assert!(answer.text().contains("gone"), "{}", answer.text());
    }
    for (method, path) in [("GET", ""), ("DELETE", "")] {
        let answer = ask(handle, method, path, "").await;
        assert_eq!((answer.status, &answer.json()["enabled"]), (StatusCode::OK, &false.into()));
    }
    assert_eq!(get(handle, "/profiles").await.status, StatusCode::OK);
}

#[tokio::test]
async fn an_ended_layer_is_reported() {
    let setup = Setup::new("0ms");
    setup.handle.shutdown(PLENTY).unwrap();
    assert_has_ended(&setup.handle).await;
    let Setup { handle, dispatch, .. } = setup;
    drop(dispatch);
    assert_has_ended(&handle).await;
}

#[tokio::test]
async fn files_of_the_continuous_profile_are_listed_and_fetched_apart() {
    let temporary = tempfile::tempdir().unwrap();
    let setup = in_dir(temporary.path(), "1h");
    let list = async |path| get(&setup.handle, path).await.json();
    assert_eq!(list("/process").await, Value::Array(Vec::new()));
    let dir = temporary.path().join("process");
    fs::create_dir(&dir).unwrap();
    let (file, secret) = (name("process", "pb.gz"), temporary.path().join("secret.txt"));
    fs::write(dir.join(&file), "a minute").unwrap();
    fs::write(secret, "secret").unwrap();
    assert_eq!(list("/process").await[0]["name"], *file);
    assert_eq!(list("/profiles").await, Value::Array(Vec::new()));
    let answer = get(&setup.handle, &format!("/process/{file}")).await;
    assert_eq!((answer.status, &answer.body[..]), (StatusCode::OK, &b"a minute"[..]));
    for path in [format!("/profiles/{file}"), "/process/..%2Fsecret.txt".to_owned()] {
        assert_eq!(get(&setup.handle, &path).await.status, StatusCode::NOT_FOUND, "{path}");
    }
}

#[tokio::test]
async fn profiles_are_listed_and_fetched() {
    let temporary = tempfile::tempdir().unwrap();
    let dir = temporary.path().join("profiles");
    let setup = in_dir(&dir, "0ms");
    assert_eq!(get(&setup.handle, "/profiles").await.json(), Value::Array(Vec::new()));
    setup.run(|| info_span!("GET /a b").in_scope(|| burn(60 * MS)));
    if !HAS_STACKS {
        return;
    }
    let list = get(&setup.handle, "/profiles").await.json();
    let list = list.as_array().unwrap();
    assert_eq!(list.len(), 3, "{list:?}");
    for file in list {
        let name = file["name"].as_str().unwrap();
        let answer = get(&setup.handle, &format!("/profiles/{name}")).await;
        assert_eq!(answer.status, StatusCode::OK, "{name}");
        assert_eq!(answer.body, fs::read(dir.join(name)).unwrap());
        assert_eq!(file["bytes"], answer.body.len());
        humantime::parse_rfc3339(file["time"].as_str().unwrap()).unwrap();
        let expected = match name.split_once('-').unwrap().1.rsplit_once('.').unwrap().1 {
            "html" => "text/html; charset=utf-8",
            "otlp" => "application/x-protobuf",
            _ => "application/octet-stream",
        };
        assert_eq!(answer.headers[header::CONTENT_TYPE], expected);
        assert_eq!(answer.headers.get(header::CONTENT_ENCODING), None);
        assert_eq!(answer.headers[header::X_CONTENT_TYPE_OPTIONS], "nosniff");
        let policy = answer.headers[header::CONTENT_SECURITY_POLICY].to_str().unwrap();
        let directives: Vec<_> = policy.split(';').map(str::trim).collect();
        let sandbox = directives.iter().find(|directive| directive.starts_with("sandbox"));
        match expected {
            "text/html; charset=utf-8" => {
                let allows = "sandbox allow-scripts allow-popups allow-popups-to-escape-sandbox";
                assert_eq!(*sandbox.unwrap(), allows);
                let script =
                    directives.iter().find(|directive| directive.starts_with("script-src"));
                // The report itself allows only its own script. The hash of an earlier release is another one.
                assert_eq!(*script.unwrap(), "script-src 'unsafe-inline'");
                assert!(
                    answer.text().contains("content=\"default-src 'none'; script-src 'sha256-")
                );
            }
            _ => assert_eq!(*sandbox.unwrap(), "sandbox"),
        }
        assert!(directives.contains(&"default-src 'none'"));
    }
}

/// What `GET /kept` lists, by name.
async fn kept(handle: &Handle, name: &str) -> Value {
    let list = get(handle, "/kept").await.json();
    let list = list["kept"].as_array().unwrap().clone();
    let found: Vec<_> = list.iter().filter(|entry| entry["name"] == name).cloned().collect();
    let [found] = found.as_slice() else { panic!("{name} in {list:?}") };
    found.clone()
}

#[tokio::test]
async fn kept_spans_are_listed_with_and_without_a_profile() {
    let temporary = tempfile::tempdir().unwrap();
    let directory = Directory::new(temporary.path());
    let setup = Setup::with("[GET /a]=20ms,[fails]=error", |builder| builder.exporter(directory));
    // As a program that mounts the routes when it starts.
    _ = tracing_profiling_server::router(&setup.handle);
    setup.run(|| {
        // First, so that its thread is not sampled yet.
        info_span!("fails").in_scope(|| tracing::error!("no"));
        info_span!("GET /a", http.route = "/a/{id}").in_scope(|| burn(60 * MS));
    });
    let fails = kept(&setup.handle, "fails").await;
    assert_eq!((&fails["reasons"], &fails["rule"]), (&"error".into(), &"error".into()));
    assert_eq!((&fails["reasons"], &fails["files"]), (&"error".into(), &Value::Array(vec![])));
    let all = setup.kept();
    let span_of = |name| all.iter().flat_map(|one| &one.spans).find(|one| one.name() == name);
    let failed = span_of("fails").unwrap();
    let fallback = match HAS_STACKS {
        // Where others had the CPU in between, it says so.
        true if failed.times().wall() >= 10 * MS => {
            assert_eq!(failed.profile(), Err(NoProfile::NoSamples));
            fails["no_profile"].as_str().unwrap()
        }
        true => "no sample fell in it",
        false => "sampling is unavailable",
    };
    assert_eq!(fails["no_profile"], fallback);
    // It has no report, but the short forms.
    let path = format!("/kept/{}", fails["id"].as_str().unwrap());
    for accept in ["text/markdown", "*/*", "text/html"] {
        let markdown = get_as(&setup.handle, &path, accept).await;
        assert_eq!(markdown.headers[header::CONTENT_TYPE], "text/markdown; charset=utf-8");
        let text = markdown.text();
        assert!(text.starts_with("# `fails`: ") && text.contains("kept for error"), "{text}");
        assert!(text.contains("**In short:** `error at tests/live_control.rs:"), "{text}");
        let missing = fallback.replace('`', "'");
        assert!(text.contains(&format!("Missing: `a profile: {missing}`")), "{text}");
    }
    let json = get_as(&setup.handle, &path, "application/json").await.json();
    for member in ["id", "name", "headline"] {
        assert_eq!(json[member], fails[member], "{member}");
    }
    let slow = kept(&setup.handle, "GET /a{http.route=/a/{id}}").await;
    assert_eq!((&slow["span"], &slow["reasons"]), (&"GET /a".into(), &"latency".into()));
    assert_eq!(slow["fields"]["http.route"], "/a/{id}");
    assert!(slow["wall_ms"].as_f64().unwrap() >= 60.0, "{slow}");
    if !HAS_STACKS {
        return;
    }
    let files = slow["files"].as_array().unwrap();
    assert_eq!(files.len(), 3, "{slow}");
    let report = files[0].as_str().unwrap();
    assert!(report.ends_with(".html"));
    let top = &slow["hotspots"][0]["functions"][0]["name"];
    assert!(top.as_str().unwrap().contains("burn"), "{slow}");
    // Where others had the CPU for more than nine tenths of the time, that explains it.
    let times = span_of("GET /a").unwrap().times();
    let is_starved = times.subtree_on_cpu() <= times.wall() / 10;
    let guilty = if is_starved { " waiting for a CPU" } else { "burn" };
    assert!(slow["headline"].as_str().unwrap().contains(guilty), "{slow}");

    // The same in short forms.
    let path = format!("/kept/{}", slow["id"].as_str().unwrap());
    for accept in ["", "*/*", "text/html,application/json;q=0.9", "image/png"] {
        let answer = get_as(&setup.handle, &path, accept).await;
        assert_eq!(answer.headers[header::CONTENT_TYPE], "text/html; charset=utf-8");
        assert!(answer.text().starts_with("<!doctype html>"), "{accept}");
        let policy = answer.headers[header::CONTENT_SECURITY_POLICY].to_str().unwrap();
        assert!(policy.starts_with("sandbox allow-scripts "), "{policy}");
    }
    let markdown = get_as(&setup.handle, &path, "text/markdown, text/html").await;
    assert_eq!(markdown.headers[header::CONTENT_TYPE], "text/markdown; charset=utf-8");
    let text = markdown.text();
    assert!(text.starts_with("# `GET /a{http.route=/a/{id}}`: ") && text.len() <= 2_048, "{text}");
    // It may name other threads that had the CPU.
    let headline = slow["headline"].as_str().unwrap().replace('`', "'");
    assert!(text.contains(guilty) && text.contains(&headline), "{text}");
    let json = get_as(&setup.handle, &path, "Application/JSON;q=1").await;
    assert_eq!((&json.json()["id"], &json.json()["headline"]), (&slow["id"], &slow["headline"]));
    for id in ["00000000000000000000000000000000", "..%2Fsecret", "x"] {
        let answer = get_as(&setup.handle, &format!("/kept/{id}"), "text/markdown").await;
        assert_eq!(answer.status, StatusCode::NOT_FOUND, "{id}");
    }

    // After a restart, a report says the same of itself.
    let restarted = in_dir(temporary.path(), "20ms");
    let stored = kept(&restarted.handle, "GET /a{http.route=/a/{id}}").await;
    assert_eq!((&stored["rule"], stored == slow), (&"20ms".into(), true), "{stored} {slow}");
    assert_eq!(get(&restarted.handle, "/kept").await.json()["kept"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn open_spans_are_listed_with_where_they_await() {
    let setup = Setup::new("1h");
    let span = tracing::dispatcher::with_default(&setup.dispatch, || {
        info_span!("GET /cart", method = "GET")
    });
    // Does not end while this test runs.
    let sleep = async { tokio::time::sleep(Duration::from_secs(3_600)).await };
    let mut request = Box::pin(sleep.instrument(span.clone()).profiled());
    tracing::dispatcher::with_default(&setup.dispatch, || {
        let waker = std::task::Waker::from(std::sync::Arc::new(NoWake));
        let mut context = std::task::Context::from_waker(&waker);
        assert!(request.as_mut().poll(&mut context).is_pending());
    });
    let open = get(&setup.handle, "/open?older_than=0s").await.json();
    let [request] = open.as_array().unwrap().as_slice() else { panic!("{open}") };
    assert_eq!(request["span"], "GET /cart");
    assert_eq!(request["fields"], serde_json::json!({"method": "GET"}));
    assert!(request["open_ms"].as_f64().unwrap() > 0.0, "{request}");
    assert_eq!(request["state"], "awaiting");
    assert!(request["state_ms"].is_f64(), "{request}");
    if HAS_STACKS {
        let stack = request["stack"].to_string();
        assert!(stack.contains("open_spans_are_listed_with_where_they_await"), "{stack}");
    }
    assert_eq!(get(&setup.handle, "/open?older_than=1h").await.json(), serde_json::json!([]));
    assert_eq!(get(&setup.handle, "/open").await.status, StatusCode::OK);
    let bad = get(&setup.handle, "/open?older_than=soon").await;
    assert_eq!(bad.status, StatusCode::BAD_REQUEST);
    assert!(bad.text().contains("`older_than` must be a duration"), "{}", bad.text());
}

struct NoWake;

impl std::task::Wake for NoWake {
    fn wake(self: std::sync::Arc<Self>) {}
}

#[tokio::test]
async fn a_browser_gets_a_page_that_can_only_use_these_routes() {
    let setup = Setup::new("1h");
    let app =
        Router::new().nest("/admin/profiling", tracing_profiling_server::router(&setup.handle));
    let request = |path: &str, accept: &str| {
        Request::get(path).header(header::ACCEPT, accept).body(Body::empty()).unwrap()
    };
    let accept = "text/html,application/xhtml+xml,*/*;q=0.8";
    let answer = app.clone().oneshot(request("/admin/profiling", accept)).await.unwrap();
    assert_eq!(answer.headers()[header::CONTENT_TYPE], "text/html; charset=utf-8");
    assert_eq!(answer.headers()[header::VARY], "accept");
    let policy = answer.headers()[header::CONTENT_SECURITY_POLICY].to_str().unwrap().to_owned();
    assert!(
        policy.starts_with("default-src 'none'; script-src 'self'; style-src 'self';"),
        "{policy}"
    );
    let body = answer.into_body().collect().await.unwrap().to_bytes();
    let page = str::from_utf8(&body).unwrap();
    assert!(page.contains("/admin/profiling/index.js") && !page.contains("{{base}}"), "{page}");
    for (path, kind) in [("index.js", "text/javascript"), ("index.css", "text/css")] {
        let path = format!("/admin/profiling/{path}");
        let answer = app.clone().oneshot(request(&path, "*/*")).await.unwrap();
        assert_eq!(answer.headers()[header::CONTENT_TYPE], kind);
    }
    let answer = app.oneshot(request("/admin/profiling", "*/*")).await.unwrap();
    assert_eq!(answer.headers()[header::CONTENT_TYPE], "application/json");
}

#[tokio::test]
async fn only_an_exporter_with_a_directory_has_files() {
    let temporary = tempfile::tempdir().unwrap();
    fs::write(temporary.path().join(name("a", "html")), "<p>").unwrap();
    // Profiles of an earlier run are listed even while profiling is off.
    let builder = ProfilingLayer::builder().rules("off".parse().unwrap());
    let layer = builder.exporter(Directory::new(temporary.path())).build().unwrap();
    let list = get(&layer.handle(), "/profiles").await.json();
    assert_eq!(list[0]["name"], name("a", "html"));

    let elsewhere = Setup::new("0ms");
    assert_eq!(get(&elsewhere.handle, "/profiles").await.json(), Value::Array(Vec::new()));
    let path = format!("/profiles/{}", name("a", "html"));
    assert_eq!(get(&elsewhere.handle, &path).await.status, StatusCode::NOT_FOUND);
}

/// The file name of a profile.
fn name(span: &str, extension: &str) -> String {
    format!("20231114T221320.123Z-1-{span}-01010101010101010101010101010101.{extension}")
}

const SECRET: &str = "this must stay unread";

/// A profile directory with files inside and around it that must not be served.
fn trapped(root: &Path) -> Setup {
    let dir = root.join("profiles");
    fs::create_dir(&dir).unwrap();
    let secrets = [
        root.join("secret.txt"),
        root.join(name("outside", "html")),
        dir.join("notes.html"),
        dir.join(name("unfinished", "tmp")),
        dir.join(format!("{}\\..\\b", name("back", "html"))),
    ];
    for secret in secrets {
        fs::write(secret, SECRET).unwrap();
    }
    fs::create_dir(dir.join(name("subdirectory", "html"))).unwrap();
    fs::write(dir.join(name("subdirectory", "html")).join("secret.txt"), SECRET).unwrap();
    for (age, span) in ["newest", "a..b", "oldest"].into_iter().enumerate() {
        let path = dir.join(name(span, "html"));
        fs::write(&path, "<p>").unwrap();
        let time = SystemTime::now() - Duration::from_secs(60 * age as u64);
        fs::File::options().write(true).open(path).unwrap().set_modified(time).unwrap();
    }
    in_dir(&dir, "off")
}

#[tokio::test]
async fn only_listed_files_can_be_fetched() {
    let root = tempfile::tempdir().unwrap();
    let setup = trapped(root.path());
    let list = get(&setup.handle, "/profiles").await.json();
    let names: Vec<_> = list.as_array().unwrap().iter().map(|file| &file["name"]).collect();
    assert_eq!(names, ["newest", "a..b", "oldest"].map(|span| name(span, "html")).each_ref());
    for name in names {
        let answer = get(&setup.handle, &format!("/profiles/{}", name.as_str().unwrap())).await;
        assert_eq!((answer.status, answer.text()), (StatusCode::OK, "<p>"));
    }
    let outside = root.path().join("secret.txt");
    let absolute = outside.to_str().unwrap().replace('/', "%2F");
    let newest = name("newest", "html");
    for path in [
        "../secret.txt",
        "..%2fsecret.txt",
        "..%2Fsecret.txt",
        "%2e%2e/secret.txt",
        "%2e%2e%2fsecret.txt",
        "%252e%252e%252fsecret.txt",
        "..%5csecret.txt",
        "..%5Csecret.txt",
        "..%c0%afsecret.txt",
        "..%ef%bc%8fsecret.txt",
        ".%2fnotes.html",
        "%2fetc%2fpasswd",
        "/etc/passwd",
        &absolute,
        ".",
        "..",
        "%2e%2e",
        "%00",
        "%ff",
        "",
        "notes.html",
        &name("unfinished", "tmp"),
        &name("subdirectory", "html"),
        &format!("{}/secret.txt", name("subdirectory", "html")),
        &format!("{}%2fsecret.txt", name("subdirectory", "html")),
        &format!("../{}", name("outside", "html")),
        &format!("..%2f{}", name("outside", "html")),
        &format!("{}%5c..%5cb", name("back", "html")),
        &format!("{newest}%00"),
        &format!("{newest}%00.html"),
        &format!("..%2fsecret.txt%00{newest}"),
        &format!("{newest}%2f..%2f..%2fsecret.txt"),
        &format!("{newest}%2f"),
        &format!("{newest}%20"),
        &format!("{newest}."),
        &format!("./{newest}/."),
        &name("%2f..%2f..%2fx%2f", "html"),
        &name("missing", "html"),
    ] {
        let answer = get(&setup.handle, &format!("/profiles/{path}")).await;
        assert!(
            [StatusCode::NOT_FOUND, StatusCode::BAD_REQUEST].contains(&answer.status),
            "{path}: {}",
            answer.status
        );
        assert!(!String::from_utf8_lossy(&answer.body).contains(SECRET), "{path}");
    }
}

#[cfg(unix)]
#[tokio::test]
async fn links_are_not_followed_and_only_regular_files_are_opened() {
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    let root = tempfile::tempdir().unwrap();
    let setup = trapped(root.path());
    let dir = root.path().join("profiles");
    symlink("../secret.txt", dir.join(name("relative", "html"))).unwrap();
    symlink(root.path().join("secret.txt"), dir.join(name("absolute", "html"))).unwrap();
    symlink("notes.html", dir.join(name("inside", "html"))).unwrap();
    symlink(name("loop", "html"), dir.join(name("loop", "html"))).unwrap();
    symlink("..", dir.join(name("up", "html"))).unwrap();
    // It has no writer: opening it for reading blocks forever.
    let pipe = dir.join(name("pipe", "html"));
    assert!(std::process::Command::new("mkfifo").arg(pipe).status().unwrap().success());
    // The path of a socket is limited in length.
    let short = tempfile::tempdir_in("/tmp").unwrap();
    let _listener = UnixListener::bind(short.path().join("s")).unwrap();
    fs::rename(short.path().join("s"), dir.join(name("socket", "html"))).unwrap();

    let list = get(&setup.handle, "/profiles").await;
    assert_eq!(list.json().as_array().unwrap().len(), 3, "{}", list.text());
    for span in ["relative", "absolute", "inside", "loop", "up", "pipe", "socket"] {
        let path = format!("/profiles/{}", name(span, "html"));
        assert_eq!(get(&setup.handle, &path).await.status, StatusCode::NOT_FOUND, "{span}");
    }
    let path = format!("/profiles/{}%2fsecret.txt", name("up", "html"));
    assert_eq!(get(&setup.handle, &path).await.status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn an_unreadable_directory_is_reported() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let setup = in_dir(file.path(), "off");
    let answer = get(&setup.handle, "/profiles").await;
    assert_eq!(answer.status, StatusCode::INTERNAL_SERVER_ERROR);
    assert!(answer.text().contains("directory"), "{}", answer.text());
}

/// Headers that a browser sends beside the host: `(name, value)`.
type Headers = &'static [(&'static str, &'static str)];

/// Sends a request as over HTTP/1.1, where the host is a header.
async fn ask_as(handle: &Handle, method: &str, path: &str, headers: &[(&str, &str)]) -> Answer {
    let app = Router::new()
        .nest("/profiling", tracing_profiling_server::router_for(handle, ["Shop.internal"]));
    let mut request = Request::builder().method(method).uri(format!("/profiling{path}"));
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let body = Body::from(if path == "/rules" && method == "PUT" { "7ms" } else { "" });
    let (parts, body) = app.oneshot(request.body(body).unwrap()).await.unwrap().into_parts();
    let body = body.collect().await.unwrap().to_bytes().to_vec();
    Answer { status: parts.status, headers: parts.headers, body }
}

/// Every request that changes something.
const CHANGES: [(&str, &str); 3] = [("PUT", "/rules"), ("POST", ""), ("DELETE", "")];
const READS: [&str; 4] = ["", "/rules", "/profiles", "/profiles/nothing.html"];

const CHROME: (&str, &str) = (
    "user-agent",
    "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/142.0.0.0 Safari/537.36",
);
const FIREFOX: (&str, &str) =
    ("user-agent", "Mozilla/5.0 (X11; Linux x86_64; rv:145.0) Gecko/20100101 Firefox/145.0");
const SAFARI: (&str, &str) = (
    "user-agent",
    "Mozilla/5.0 (Macintosh; Intel Mac OS X 10_15_7) AppleWebKit/605.1.15 (KHTML, like Gecko) Version/18.6 Safari/605.1.15",
);
const LOCAL: (&str, &str) = ("host", "127.0.0.1:9999");

/// What browsers send for `fetch` and for a form on a page of the same origin.
const FROM_SAME_ORIGIN: [Headers; 4] = [
    &[
        LOCAL,
        CHROME,
        ("origin", "http://127.0.0.1:9999"),
        ("sec-ch-ua", "\"Chromium\";v=\"142\", \"Not_A Brand\";v=\"99\""),
        ("sec-ch-ua-mobile", "?0"),
        ("sec-ch-ua-platform", "\"Linux\""),
        ("sec-fetch-site", "same-origin"),
        ("sec-fetch-mode", "cors"),
        ("sec-fetch-dest", "empty"),
        ("referer", "http://127.0.0.1:9999/"),
        ("content-type", "text/plain;charset=UTF-8"),
        ("accept", "*/*"),
    ],
    &[
        LOCAL,
        FIREFOX,
        ("accept", "*/*"),
        ("referer", "http://127.0.0.1:9999/"),
        ("content-type", "text/plain;charset=UTF-8"),
        ("origin", "http://127.0.0.1:9999"),
        ("sec-fetch-dest", "empty"),
        ("sec-fetch-mode", "cors"),
        ("sec-fetch-site", "same-origin"),
        ("priority", "u=0"),
    ],
    &[
        LOCAL,
        SAFARI,
        ("origin", "http://127.0.0.1:9999"),
        ("sec-fetch-site", "same-origin"),
        ("sec-fetch-mode", "cors"),
        ("sec-fetch-dest", "empty"),
        ("content-type", "text/plain;charset=UTF-8"),
    ],
    // A host name without TLS is not a secure context, so browsers send no `Sec-Fetch-*`. This is also what arrives
    // behind a proxy that terminates TLS.
    &[("host", "shop.internal"), CHROME, ("origin", "https://shop.internal")],
];

/// What browsers send for pages of other origins.
const FROM_OTHER_ORIGINS: [(&str, Headers); 12] = [
    (
        "Chrome, a form that posts",
        &[
            LOCAL,
            CHROME,
            ("origin", "https://evil.example"),
            ("content-type", "application/x-www-form-urlencoded"),
            ("upgrade-insecure-requests", "1"),
            ("sec-fetch-site", "cross-site"),
            ("sec-fetch-mode", "navigate"),
            ("sec-fetch-user", "?1"),
            ("sec-fetch-dest", "document"),
            ("referer", "https://evil.example/"),
        ],
    ),
    (
        "Chrome, fetch without cors",
        &[
            LOCAL,
            CHROME,
            ("origin", "https://evil.example"),
            ("content-type", "text/plain;charset=UTF-8"),
            ("sec-fetch-site", "cross-site"),
            ("sec-fetch-mode", "no-cors"),
            ("sec-fetch-dest", "empty"),
        ],
    ),
    (
        "Firefox, a form that posts",
        &[
            LOCAL,
            FIREFOX,
            ("content-type", "text/plain"),
            ("origin", "https://evil.example"),
            ("sec-fetch-dest", "document"),
            ("sec-fetch-mode", "navigate"),
            ("sec-fetch-site", "cross-site"),
            ("sec-fetch-user", "?1"),
            ("priority", "u=0, i"),
        ],
    ),
    (
        "Firefox, fetch without cors",
        &[
            LOCAL,
            FIREFOX,
            ("content-type", "text/plain;charset=UTF-8"),
            ("origin", "https://evil.example"),
            ("sec-fetch-dest", "empty"),
            ("sec-fetch-mode", "no-cors"),
            ("sec-fetch-site", "cross-site"),
        ],
    ),
    (
        "Safari, a form that posts",
        &[
            LOCAL,
            SAFARI,
            ("origin", "https://evil.example"),
            ("content-type", "application/x-www-form-urlencoded"),
            ("sec-fetch-site", "cross-site"),
            ("sec-fetch-mode", "navigate"),
            ("sec-fetch-dest", "document"),
        ],
    ),
    (
        "Safari before 16.4, which has no Sec-Fetch",
        &[
            LOCAL,
            SAFARI,
            ("origin", "https://evil.example"),
            ("referer", "https://evil.example/"),
            ("content-type", "text/plain"),
        ],
    ),
    (
        "a sandboxed frame, or after a redirect",
        &[LOCAL, CHROME, ("origin", "null"), ("content-type", "text/plain")],
    ),
    (
        "another port of the same machine",
        &[
            LOCAL,
            CHROME,
            ("origin", "http://127.0.0.1:3000"),
            ("sec-fetch-site", "same-site"),
            ("sec-fetch-mode", "no-cors"),
        ],
    ),
    ("the same without Sec-Fetch", &[LOCAL, SAFARI, ("origin", "http://127.0.0.1:3000")]),
    (
        "an extension",
        &[
            LOCAL,
            CHROME,
            ("origin", "chrome-extension://abcdefghijklmnop"),
            ("sec-fetch-site", "none"),
        ],
    ),
    (
        "an origin with this one as a prefix",
        &[LOCAL, CHROME, ("origin", "http://127.0.0.1:9999.evil.example")],
    ),
    (
        "two origins",
        &[LOCAL, ("origin", "http://127.0.0.1:9999"), ("origin", "https://evil.example")],
    ),
];

#[tokio::test]
async fn a_same_origin_page_may_make_changes() {
    let setup = Setup::new("1h");
    for headers in FROM_SAME_ORIGIN {
        for (method, path) in CHANGES {
            let answer = ask_as(&setup.handle, method, path, headers).await;
            assert_eq!(answer.status, StatusCode::OK, "{method} {headers:?}: {}", answer.text());
        }
    }
}

#[tokio::test]
async fn a_cross_origin_page_changes_nothing() {
    let setup = Setup::new("1h");
    for (client, headers) in FROM_OTHER_ORIGINS {
        for (method, path) in CHANGES {
            let answer = ask_as(&setup.handle, method, path, headers).await;
            assert_eq!(answer.status, StatusCode::FORBIDDEN, "{method}, {client}");
            assert!(answer.text().contains("another origin"), "{}", answer.text());
            assert!(!answer.headers.contains_key(header::ACCESS_CONTROL_ALLOW_ORIGIN));
        }
        // Also for a method without a route.
        let answer = ask_as(&setup.handle, "PATCH", "", headers).await;
        assert_eq!(answer.status, StatusCode::FORBIDDEN, "{client}");
    }
    assert!(setup.handle.is_enabled());
    assert_eq!(setup.handle.rules().to_string(), "1h");
    // Chrome's preflight for a cross-origin `PUT`: no answer allows it.
    let preflight = [
        LOCAL,
        ("origin", "https://evil.example"),
        ("access-control-request-method", "PUT"),
        ("access-control-request-private-network", "true"),
        ("sec-fetch-site", "cross-site"),
        ("sec-fetch-mode", "cors"),
    ];
    let answer = ask_as(&setup.handle, "OPTIONS", "/rules", &preflight).await;
    assert!(!answer.status.is_success(), "{}", answer.status);
    assert!(!answer.headers.keys().any(|name| name.as_str().starts_with("access-control")));
}

#[tokio::test]
async fn a_link_on_another_site_can_open_a_flame_graph() {
    let setup = Setup::new("1h");
    let navigation = [
        LOCAL,
        CHROME,
        ("sec-fetch-site", "cross-site"),
        ("sec-fetch-mode", "navigate"),
        ("sec-fetch-user", "?1"),
        ("sec-fetch-dest", "document"),
        ("referer", "https://grafana.example/"),
    ];
    let answer = ask_as(&setup.handle, "GET", "/profiles", &navigation).await;
    assert_eq!(answer.status, StatusCode::OK);
    // Other sites cannot embed it.
    assert_eq!(answer.headers["cross-origin-resource-policy"], "same-origin");
}

/// What browsers send for what a page of another site embeds or fetches.
const READ_BY_OTHERS: [(&str, Headers); 6] = [
    (
        "an image",
        &[
            LOCAL,
            CHROME,
            ("sec-fetch-site", "cross-site"),
            ("sec-fetch-mode", "no-cors"),
            ("sec-fetch-dest", "image"),
        ],
    ),
    (
        "a frame",
        &[
            LOCAL,
            FIREFOX,
            ("sec-fetch-site", "cross-site"),
            ("sec-fetch-mode", "navigate"),
            ("sec-fetch-dest", "iframe"),
        ],
    ),
    (
        "fetch without cors",
        &[
            LOCAL,
            CHROME,
            ("sec-fetch-site", "cross-site"),
            ("sec-fetch-mode", "no-cors"),
            ("sec-fetch-dest", "empty"),
        ],
    ),
    (
        "a script of another port of the same machine",
        &[
            LOCAL,
            SAFARI,
            ("sec-fetch-site", "same-site"),
            ("sec-fetch-mode", "no-cors"),
            ("sec-fetch-dest", "script"),
        ],
    ),
    ("fetch with cors, without Sec-Fetch", &[LOCAL, SAFARI, ("origin", "https://evil.example")]),
    (
        "a page that claims to be opened and does not say for what",
        &[LOCAL, ("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate")],
    ),
];

#[tokio::test]
async fn the_list_has_the_newest_and_says_how_many_there_are() {
    let setup =
        Setup::with("always", |builder| builder.source(Source::None).profiles_per_minute(100_000));
    // As a program that mounts the routes when it starts.
    _ = tracing_profiling_server::router(&setup.handle);
    setup.run(|| (0..150).for_each(|_| info_span!("request").in_scope(|| ())));
    setup.flush();
    for (query, count) in [("", 100), ("?limit=7", 7), ("?limit=1000", 150), ("?limit=99999", 150)]
    {
        let list = get(&setup.handle, &format!("/kept{query}")).await.json();
        let kept = list["kept"].as_array().unwrap();
        assert_eq!((kept.len(), &list["total"]), (count, &150.into()), "{query}");
    }
    let refused = get(&setup.handle, "/kept?limit=x").await;
    assert_eq!(refused.status, StatusCode::BAD_REQUEST);
}

/// Takes seconds.
const SLOW: [&str; 5] =
    ["/kept", "/open", "/debug/pprof/heap", "/debug/pprof/allocs", "/debug/pprof/threads"];
/// It lasts, and only one is made at a time.
const LASTING: [&str; 1] = ["/debug/pprof/profile?seconds=1"];

#[tokio::test]
async fn a_cross_origin_page_causes_no_work() {
    let setup = Setup::new("1h");
    for (client, headers) in READ_BY_OTHERS.into_iter().chain(FROM_OTHER_ORIGINS) {
        for path in READS.into_iter().chain(SLOW).chain(LASTING) {
            for method in ["GET", "HEAD"] {
                let answer = ask_as(&setup.handle, method, path, headers).await;
                assert_eq!(answer.status, StatusCode::FORBIDDEN, "{client}: {method} {path}");
            }
        }
    }
    // Not even a link, which a page can follow by itself.
    let link = [
        LOCAL,
        CHROME,
        ("sec-fetch-site", "cross-site"),
        ("sec-fetch-mode", "navigate"),
        ("sec-fetch-dest", "document"),
    ];
    for path in SLOW {
        let answer = ask_as(&setup.handle, "GET", path, &link).await;
        assert_eq!(answer.status, StatusCode::FORBIDDEN, "{path}");
        let own = [link[0], link[1], ("sec-fetch-site", "same-origin")];
        for headers in [&own[..], &link[..2]] {
            let answer = ask_as(&setup.handle, "GET", path, headers).await;
            assert_ne!(answer.status, StatusCode::FORBIDDEN, "{path}");
        }
    }
}

/// Waits before it exports, and says that it does.
struct Waiting(mpsc::Sender<()>, mpsc::Receiver<()>);

impl Exporter for Waiting {
    fn export(&mut self, _: &Profile) -> Result<Exported, ExportError> {
        self.0.send(()).unwrap();
        _ = self.1.recv();
        Ok(Exported::default())
    }
}

/// Whatever becomes of the clients.
#[test]
fn no_more_than_two_slow_requests_are_answered_at_once() {
    if !HAS_STACKS {
        return;
    }
    let ((begin, begun), (release, blocked)) = (mpsc::channel(), mpsc::channel());
    let setup = Setup::with("always", |builder| builder.exporter(Waiting(begin, blocked)));
    let work = || info_span!("work").in_scope(|| burn(30 * MS));
    tracing::dispatcher::with_default(&setup.dispatch, work);
    begun.recv().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        let app = tracing_profiling_server::router(&setup.handle);
        let ask = |path: &str| {
            let request = Request::builder().uri(path).body(Body::empty()).unwrap();
            tokio::spawn(app.clone().oneshot(request))
        };
        // They are answered by the thread that exports.
        let waiting = ["/debug/pprof/threads"; 2].map(ask);
        for path in SLOW {
            let answer = ask(path).await.unwrap().unwrap();
            assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE, "{path}");
            let text = answer.into_body().collect().await.unwrap().to_bytes();
            assert!(str::from_utf8(&text).unwrap().contains("try again"), "{text:?}");
        }
        waiting.iter().for_each(tokio::task::JoinHandle::abort);
        for one in waiting {
            assert!(one.await.unwrap_err().is_cancelled());
        }
        let answer = ask("/kept").await.unwrap().unwrap();
        assert_eq!(
            answer.status(),
            StatusCode::SERVICE_UNAVAILABLE,
            "the work is still to be done"
        );
        drop(release);
        while ask("/kept").await.unwrap().unwrap().status() != StatusCode::OK {
            tokio::task::yield_now().await;
        }
    });
}

#[tokio::test]
async fn rules_are_logged_in_one_line_of_bounded_length() {
    let log = support::Log::default();
    let writer = log.clone();
    let rules: Rules = "0ms".parse().unwrap();
    let profiling = ProfilingLayer::builder().rules(rules).exporter(Memory::new()).build().unwrap();
    let handle = profiling.handle();
    let lines = tracing_subscriber::fmt::layer().with_ansi(false);
    let subscriber = tracing_subscriber::registry()
        .with(lines.with_writer(move || writer.clone()))
        .with(profiling);
    let _default = tracing::subscriber::set_default(subscriber);
    let long = "x".repeat(40_000);
    for name in ["a\nINFO forged: everything is well", "a\r\u{1b}forged", long.as_str()] {
        let answer = put_rules(&handle, format!("[{name}]=7ms")).await;
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    }
    let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    let about: Vec<_> = text.lines().filter(|line| line.contains("the rules are now")).collect();
    assert_eq!(about.len(), 3, "{text}");
    assert!(!text.contains('\u{1b}') && !text.contains('\r'));
    assert!(!text.lines().any(|line| line.starts_with("INFO forged")), "{text}");
    assert!(about.iter().all(|line| line.len() < 8_000), "{text}");
}

#[tokio::test]
async fn dns_rebinding_reads_nothing() {
    let setup = Setup::new("1h");
    for host in [
        "evil.example",
        "evil.example:9999",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "evil.localhost:9999",
        "localhost@evil.example",
        "evil.example@127.0.0.1",
        "0.0.0.0:9999",
        "10.0.0.8",
        "localhost:99999",
        "localhost:",
        "::1",
        "[::1]evil",
        "",
    ] {
        let origin = format!("http://{host}");
        // What a browser sends if it takes the page for same-origin.
        let headers =
            [("host", host), CHROME, ("origin", &origin), ("sec-fetch-site", "same-origin")];
        for path in READS {
            for headers in [&headers[..], &headers[..2]] {
                let answer = ask_as(&setup.handle, "GET", path, headers).await;
                assert_eq!(answer.status, StatusCode::MISDIRECTED_REQUEST, "{host} {path}");
                assert!(answer.text().contains("router_for"), "{}", answer.text());
            }
        }
        for (method, path) in CHANGES {
            let answer = ask_as(&setup.handle, method, path, &headers).await;
            assert_eq!(answer.status, StatusCode::MISDIRECTED_REQUEST, "{host}");
        }
    }
    for hosts in [["127.0.0.1", "evil.example"], ["evil.example", "127.0.0.1"]] {
        let headers = hosts.map(|host| ("host", host));
        let answer = ask_as(&setup.handle, "GET", "/rules", &headers).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST);
    }
    assert_eq!(setup.handle.rules().to_string(), "1h");
}

#[tokio::test]
async fn loopback_and_allowed_hosts_are_answered() {
    let setup = Setup::new("1h");
    for host in [
        "localhost",
        "LocalHost.:9999",
        "127.0.0.1:9999",
        "127.9.9.9",
        "[::1]:9999",
        "[0:0:0:0:0:0:0:1]",
        "shop.internal",
        "SHOP.INTERNAL.:1",
    ] {
        for path in READS.iter().take(3) {
            let answer = ask_as(&setup.handle, "GET", path, &[("host", host)]).await;
            assert_eq!(answer.status, StatusCode::OK, "{host} {path}");
        }
        // As curl sends it: neither `Origin` nor `Sec-Fetch-Site`.
        for (method, path) in CHANGES {
            let form = [("host", host), ("content-type", "application/x-www-form-urlencoded")];
            let answer = ask_as(&setup.handle, method, path, &form).await;
            assert_eq!(answer.status, StatusCode::OK, "{host} {method}");
        }
    }
    // As typed into a browser's address bar.
    let typed = [("host", "localhost:9999"), FIREFOX, ("sec-fetch-site", "none")];
    assert_eq!(ask_as(&setup.handle, "GET", "", &typed).await.status, StatusCode::OK);
    // `router()` allows no host name but loopback.
    let app = Router::new().nest("/profiling", tracing_profiling_server::router(&setup.handle));
    let request = Request::get("/profiling").header("host", "shop.internal").body(Body::empty());
    let answer = app.oneshot(request.unwrap()).await.unwrap();
    assert_eq!(answer.status(), StatusCode::MISDIRECTED_REQUEST);
}

#[tokio::test]
async fn the_host_may_be_in_the_uri_as_in_http_2() {
    let setup = Setup::new("1h");
    let ask = async |method: &str, authority: &str, headers: &[(&str, &str)]| {
        let app = Router::new().nest("/profiling", tracing_profiling_server::router(&setup.handle));
        let uri = format!("http://{authority}/profiling");
        let mut request = Request::builder().method(method).uri(uri);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        app.oneshot(request.body(Body::empty()).unwrap()).await.unwrap().status()
    };
    assert_eq!(ask("GET", "localhost:9999", &[]).await, StatusCode::OK);
    assert_eq!(ask("GET", "[::1]:9999", &[]).await, StatusCode::OK);
    assert_eq!(ask("GET", "evil.example", &[]).await, StatusCode::MISDIRECTED_REQUEST);
    assert_eq!(ask("GET", "a:b@localhost", &[]).await, StatusCode::MISDIRECTED_REQUEST);
    let local = [("host", "localhost")];
    assert_eq!(ask("GET", "evil.example", &local).await, StatusCode::MISDIRECTED_REQUEST);
    let evil = [("host", "evil.example")];
    assert_eq!(ask("GET", "localhost", &evil).await, StatusCode::MISDIRECTED_REQUEST);
    let same_origin = [("origin", "http://localhost:9999")];
    assert_eq!(ask("POST", "localhost:9999", &same_origin).await, StatusCode::OK);
    assert_eq!(ask("POST", "localhost:9998", &same_origin).await, StatusCode::FORBIDDEN);
    assert_eq!(ask("POST", "127.0.0.1:9999", &same_origin).await, StatusCode::FORBIDDEN);
}

#[tokio::test]
async fn the_heap_is_not_served_if_it_is_not_tracked() {
    // The allocator of this program is another one.
    let setup = Setup::with("1h", |builder| builder.heap(true));
    for (method, path) in [
        ("GET", "/debug/pprof/heap"),
        ("GET", "/debug/pprof/heap?seconds=1"),
        ("GET", "/debug/pprof/allocs"),
        ("POST", "/debug/pprof/heap"),
    ] {
        let answer = ask(&setup.handle, method, path, "").await;
        assert_eq!(answer.status, StatusCode::NOT_FOUND);
        assert!(answer.text().contains("TRACING_PROFILING_HEAP=on"), "{}", answer.text());
    }
}

/// Decompressed, it has its strings as they are.
fn strings_of(file: &[u8]) -> String {
    use std::io::Read as _;
    let mut bytes = Vec::new();
    flate2::read::GzDecoder::new(file).read_to_end(&mut bytes).unwrap();
    String::from_utf8_lossy(&bytes).into_owned()
}

#[tokio::test]
async fn threads_are_served_as_go_serves_goroutines() {
    let setup = Setup::new("1h");
    let (begun, begins) = mpsc::channel();
    let (release, waits) = mpsc::channel::<()>();
    let waiting = std::thread::Builder::new().name("waits for it".to_owned());
    let wait = move || {
        begun.send(()).unwrap();
        waits.recv().unwrap();
    };
    let waiting = waiting.spawn(wait).unwrap();
    // It has its name from here on.
    begins.recv().unwrap();
    let profile = get(&setup.handle, "/debug/pprof/threads").await;
    let text = get(&setup.handle, "/debug/pprof/threads?debug=1").await;
    release.send(()).unwrap();
    waiting.join().unwrap();
    if !HAS_STACKS {
        assert_eq!(text.status, StatusCode::INTERNAL_SERVER_ERROR);
        assert!(text.text().contains("/proc"), "{}", text.text());
        return;
    }
    assert_eq!(profile.headers[header::CONTENT_TYPE], "application/octet-stream");
    let strings = strings_of(&profile.body);
    for string in ["threads", "count", "thread", "tid", "state", "waits for it", "blocked"] {
        assert!(strings.contains(string), "{string}: {strings}");
    }
    assert_eq!(text.headers[header::CONTENT_TYPE], "text/plain; charset=utf-8");
    let text = text.text();
    assert!(text.contains("\n`waits for it`, thread "), "{text}");
    setup.handle.shutdown(PLENTY).unwrap();
    let answer = get(&setup.handle, "/debug/pprof/threads").await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
}

#[tokio::test(flavor = "multi_thread")]
async fn wall_time_is_served_as_pprof() {
    let setup = Setup::of_rules("1h", |builder| builder);
    for query in ["hz=101", "hz=0", "seconds=3601", "seconds=1&format=html"] {
        let refused = get(&setup.handle, &format!("/debug/pprof/wall?{query}")).await;
        assert_eq!(refused.status, StatusCode::BAD_REQUEST, "{query}: {}", refused.text());
    }
    let answer = get(&setup.handle, "/debug/pprof/wall?seconds=1&hz=40").await;
    if !HAS_STACKS {
        assert_eq!(answer.status, StatusCode::INTERNAL_SERVER_ERROR);
        assert!(answer.text().contains("/proc/self/task"), "{}", answer.text());
        return;
    }
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    assert_eq!(answer.headers[header::CONTENT_TYPE], "application/octet-stream");
    let strings = strings_of(&answer.body);
    for string in ["wall", "nanoseconds", "samples", "count", "thread_name", "standard error"] {
        assert!(strings.contains(string), "{string}: {strings}");
    }
}

#[tokio::test]
async fn a_page_links_to_the_profiles_of_the_process() {
    let setup = Setup::new("1h");
    let page = get(&setup.handle, "/debug/pprof/").await;
    assert_eq!(page.headers[header::CONTENT_TYPE], "text/html; charset=utf-8");
    for profile in ["profile", "wall", "threads", "heap", "allocs"] {
        assert!(page.text().contains(&format!("<a href=\"{profile}")), "{profile}");
    }
    let short = get(&setup.handle, "/debug/pprof").await;
    assert_eq!(short.headers[header::LOCATION], "pprof/");
}

/// The requests of Grafana Alloy (`pyroscope.scrape` with `path_prefix`), Parca and the pprof receiver of the
/// OpenTelemetry Collector, as the Go client sends them.
#[tokio::test(flavor = "multi_thread")]
async fn scrapers_get_profiles_by_address_and_by_name() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    let setup = Setup::new("1h");
    let admin = Router::new()
        .nest("/profiling", tracing_profiling_server::router_for(&setup.handle, ["shop.internal"]));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = tokio::spawn(async move { axum::serve(listener, admin).await });
    let is_over = Arc::new(AtomicBool::new(false));
    let burning = std::thread::spawn({
        let is_over = Arc::clone(&is_over);
        move || {
            while !is_over.load(Ordering::Relaxed) {
                burn(MS);
            }
        }
    });
    let port = address.port();
    for (host, agent, query) in [
        (format!("127.0.0.1:{port}"), "Alloy/v1.11.3 (linux; docker)", "seconds=1"),
        (format!("shop.internal:{port}"), "conprof/0.24.2", "seconds=1"),
        (format!("localhost:{port}"), "otelcol-contrib/0.160.0 (linux/amd64)", "seconds=1&hz=50"),
    ] {
        let request = format!(
            "GET /profiling/debug/pprof/profile?{query} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: {agent}\r\n\
             Accept-Encoding: gzip\r\nConnection: close\r\n\r\n"
        );
        let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.unwrap();
        let end = answer.windows(4).position(|window| window == b"\r\n\r\n").unwrap();
        let (head, body) = answer.split_at(end + 4);
        let head = str::from_utf8(head).unwrap();
        if !HAS_STACKS {
            assert!(head.starts_with("HTTP/1.1 500 "), "{agent}: {head}");
            continue;
        }
        assert!(head.starts_with("HTTP/1.1 200 "), "{agent}: {head}");
        assert!(!head.to_lowercase().contains("content-encoding"), "{agent}: {head}");
        let strings = strings_of(body);
        for string in ["cpu", "nanoseconds", "samples", "count", "live_control::support::burn"] {
            assert!(strings.contains(string), "{agent}, {string}: {strings}");
        }
    }
    is_over.store(true, Ordering::Relaxed);
    burning.join().unwrap();
    server.abort();
}

/// As Go's `net/http/pprof` answers.
#[tokio::test(flavor = "multi_thread")]
async fn a_cpu_profile_of_the_process_is_served_and_ends_if_its_client_goes_away() {
    let setup = Setup::of_rules("1h", |builder| builder);
    let handle = setup.handle.clone();
    let refused = |answer: &Answer, status: StatusCode, text: &str| {
        assert_eq!((answer.status, answer.text()), (status, text));
        assert_eq!(answer.headers["x-go-pprof"], "1");
        assert_eq!(answer.headers[header::CONTENT_TYPE], "text/plain; charset=utf-8");
        assert!(!answer.headers.contains_key(header::CONTENT_DISPOSITION));
    };
    let answer = get(&handle, "/debug/pprof/profile?seconds=1&hz=many").await;
    refused(&answer, StatusCode::BAD_REQUEST, "`hz` must be a number of samples per second\n");
    if !HAS_STACKS {
        return;
    }
    let of_client = handle.clone();
    let client = tokio::spawn(async move {
        _ = get(&of_client, "/debug/pprof/profile?seconds=3000").await;
    });
    let start = std::time::Instant::now();
    while handle.stats().threads.attached == 0 {
        assert!(start.elapsed() < PLENTY);
        tokio::time::sleep(MS).await;
    }
    let answer = get(&handle, "/debug/pprof/profile?seconds=1").await;
    let text = "Could not enable CPU profiling: cpu profiling already in use\n";
    refused(&answer, StatusCode::INTERNAL_SERVER_ERROR, text);
    client.abort();
    let answer = loop {
        let answer = get(&handle, "/debug/pprof/profile?seconds=1&hz=250").await;
        if answer.status == StatusCode::OK {
            break answer;
        }
        assert!(start.elapsed() < PLENTY, "{}", answer.text());
        tokio::time::sleep(MS).await;
    };
    assert_eq!(answer.headers[header::CONTENT_TYPE], "application/octet-stream");
    let disposition = &answer.headers[header::CONTENT_DISPOSITION];
    assert_eq!(disposition, "attachment; filename=\"profile.pb.gz\"");
    assert!(!answer.headers.contains_key(header::CONTENT_ENCODING));
    assert_eq!(answer.body[..2], [0x1f, 0x8b], "gzip");
    let report = get(&handle, "/debug/pprof/profile?seconds=1&format=html").await;
    assert_eq!(report.headers[header::CONTENT_TYPE], "text/html; charset=utf-8");
    let policy = report.headers[header::CONTENT_SECURITY_POLICY].to_str().unwrap();
    assert!(policy.starts_with("sandbox allow-scripts"), "{policy}");
    assert!(report.text().starts_with("<!doctype html>"));
}
