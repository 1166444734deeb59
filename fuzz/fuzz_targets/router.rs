//! Requests to the router with arbitrary method, path, host, origin, site and body, one per line.
#![no_main]

use std::sync::LazyLock;

use axum::body::Body;
use axum::http::{Request, StatusCode};
use http_body_util::BodyExt;
use tokio::runtime::{Builder, Runtime};
use tower::ServiceExt;
use tracing_profiling::{Directory, Handle, ProfilingLayer};

/// Disabled until a request enables it.
static LAYER: LazyLock<ProfilingLayer> = LazyLock::new(|| {
    let rules = "off".parse().expect("rules");
    ProfilingLayer::builder().rules(rules).exporter(Directory::new("/nowhere/profiles")).build().expect("a layer")
});
static RUNTIME: LazyLock<Runtime> =
    LazyLock::new(|| Builder::new_current_thread().build().expect("a runtime"));

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let mut lines = bytes.splitn(6, |byte| *byte == b'\n');
    let mut line = || lines.next().unwrap_or_default();
    let mut request = Request::builder();
    request = match line() {
        b"" => request.method("PUT"),
        method => request.method(method),
    };
    request = match line() {
        b"" => request.uri("/rules"),
        path => request.uri(path),
    };
    let (host, origin, site) = (line(), line(), line());
    for (name, value) in [("host", host), ("origin", origin), ("sec-fetch-site", site)] {
        if !value.is_empty() {
            request = request.header(name, value);
        }
    }
    let Ok(request) = request.body(Body::from(line().to_vec())) else { return };
    let is_safe = request.method().is_safe();
    let handle: Handle = LAYER.handle();
    let before = handle.rules();
    let status = RUNTIME.block_on(async {
        let answer = tracing_profiling_server::router_for(&handle, ["shop.internal"]).oneshot(request).await;
        let answer = answer.unwrap_or_else(|never| match never {});
        assert!(answer.headers().contains_key("content-security-policy"));
        let status = answer.status();
        answer.into_body().collect().await.expect("a body");
        status
    });
    assert_ne!(status, StatusCode::INTERNAL_SERVER_ERROR);
    let is_refused = [StatusCode::FORBIDDEN, StatusCode::MISDIRECTED_REQUEST].contains(&status);
    if is_safe || is_refused || !status.is_success() {
        assert_eq!(handle.rules(), before, "{status}");
    }
    if !site.is_empty() && ![&b"none"[..], b"same-origin"].contains(&site) && !is_safe {
        assert!(!status.is_success(), "{status}");
    }
});
