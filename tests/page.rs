//! The report and the list in a real browser. `.ci/page` runs this; it needs Chromium and Node.js.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test")]

mod support;

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use axum::Router;
use support::{HAS_STACKS, PLENTY, burn};
use tracing::info_span;
use tracing_profiling::encode::{HtmlContext, html};
use tracing_profiling::profile::{Profile, SampleKind};
use tracing_profiling::{Directory, Facts, Handle, ProfilingLayer, Resource};
use tracing_subscriber::prelude::*;

const MS: Duration = Duration::from_millis(1);

fn context() -> HtmlContext {
    HtmlContext::new(Resource::new().with("service.name", "shop").with("host.name", "web-1"))
        .trace_url("https://tempo.internal/trace/{trace_id}")
        .source_url("vscode://file/{file}:{line}")
}

/// As many samples as a profile can have, in stacks of 60 functions.
fn large() -> Profile {
    let names: Vec<_> =
        (0..400).map(|n| format!("shop::module_{}::function_{n}", n % 17)).collect();
    let mut profile = Profile::builder("GET /large").duration(Duration::from_secs(16));
    let mut random = 1_u64;
    for number in 0..16_000_u32 {
        let mut stack = Vec::new();
        for depth in 0..60_usize {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            // The outermost calls are always the same.
            let choices = depth.saturating_sub(40).max(1);
            let choice = usize::try_from(random >> 33).unwrap() % choices;
            stack.push(names[(depth * 6 + choice) % names.len()].as_str());
        }
        stack.reverse();
        let spans = ["GET /large", ["load", "render", "query"][number as usize % 3]];
        profile = profile.sample(SampleKind::OnCpu, &spans, &stack, number * MS, MS);
    }
    profile.build()
}

/// Every name tries to run a script or to break the page.
fn hostile() -> Profile {
    let long = "x".repeat(10_000);
    let attacks = [
        "<img src=x onerror=\"window.hacked=1;alert(1)\">",
        "</script><script>window.hacked=1</script>",
        "\"'><svg onload=window.hacked=1>",
        "javascript:window.hacked=1",
        "\u{202e}evil\u{2066}\r\n\0name",
        "{{base}} ${window.hacked=1}",
        long.as_str(),
    ];
    let mut profile = Profile::builder(attacks[0]).duration(Duration::from_secs(1));
    for (number, attack) in (0..).zip(attacks) {
        let at = 100 * number * MS;
        profile = profile
            .sample(SampleKind::OnCpu, &[attacks[0], attack], &[attack, "main"], at, 50 * MS)
            .sample(SampleKind::OffCpu, &[attack], &[attack, "main"], at + 50 * MS, 30 * MS);
    }
    let mut profile = profile.build();
    profile.title = attacks[1].to_owned();
    profile.notes = attacks.map(str::to_owned).to_vec();
    profile.losses = attacks.map(str::to_owned).to_vec();
    for attack in attacks {
        profile.spans.push(Facts {
            span: attack.to_owned().into(),
            target: attack.to_owned().into(),
            rule: Some(attack.into()),
            fields: vec![("http.route", attack.to_owned())],
            ..Facts::default()
        });
    }
    profile
}

/// Runs spans of all kinds. Their reports are in the directory afterwards.
fn run_spans() {
    info_span!("GET /cart", http.route = "/cart/{id}").in_scope(|| {
        burn(40 * MS);
        info_span!("query").in_scope(|| burn(60 * MS));
        std::thread::sleep(40 * MS);
        let render = info_span!("render");
        std::thread::scope(|scope| {
            let render = &render;
            scope.spawn(move || render.in_scope(|| burn(60 * MS)));
        });
        info_span!("query").in_scope(|| burn(30 * MS));
    });
    info_span!("GET /lock", http.route = "/lock").in_scope(|| std::thread::sleep(200 * MS));
    info_span!("GET /broken", http.route = "/broken").in_scope(|| tracing::error!("no"));
}

#[inline(never)]
fn render() {
    burn(3 * MS);
}

#[inline(never)]
fn count_cheap_bundles() {
    let since = Instant::now();
    while since.elapsed() < 150 * MS {
        std::hint::black_box((0..1_000).sum::<u64>());
    }
}

#[inline(never)]
fn request(is_slow: bool) {
    info_span!("request", http.route = "/similar").in_scope(|| {
        render();
        std::thread::sleep(12 * MS);
        if is_slow {
            count_cheap_bundles();
            info_span!("query").in_scope(|| std::thread::sleep(40 * MS));
        }
    });
}

/// Requests of one route: many that are alike, and a slow one.
fn run_typical_and_slow(handle: &Handle) {
    let since = Instant::now();
    while handle.stats().references.added < 30 {
        assert!(since.elapsed() < PLENTY, "{:?}", handle.stats().references);
        for _ in 0..10 {
            request(false);
        }
        handle.flush(PLENTY).unwrap();
    }
    request(true);
    handle.flush(PLENTY).unwrap();
}

#[test]
#[ignore = "needs Chromium and Node.js: `.ci/page` runs it"]
fn the_pages_work_in_a_browser() {
    if !HAS_STACKS {
        return;
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let temporary = tempfile::tempdir().unwrap();
    let (stored, reports) = (temporary.path().join("stored"), temporary.path().join("reports"));
    fs::create_dir(&reports).unwrap();
    let layer = ProfilingLayer::builder()
        .rules("100ms|error".parse().unwrap())
        .trace_url("https://tempo.internal/trace/{trace_id}")
        .resource(Resource::new().with("service.name", "shop").with("host.name", "web-1"))
        .exporter(Directory::new(&stored))
        .build()
        .unwrap();
    let handle = layer.handle();
    let dispatch = tracing::Dispatch::new(tracing_subscriber::registry().with(layer));
    tracing::dispatcher::with_default(&dispatch, run_spans);
    handle.flush(PLENTY).unwrap();
    let layer = ProfilingLayer::builder()
        .rules("100ms".parse().unwrap())
        .references(1, 100.0)
        .resource(Resource::new().with("service.name", "shop"))
        .exporter(Directory::new(&stored))
        .build()
        .unwrap();
    let comparing = layer.handle();
    let dispatch = tracing::Dispatch::new(tracing_subscriber::registry().with(layer));
    tracing::dispatcher::with_default(&dispatch, || run_typical_and_slow(&comparing));
    for file in fs::read_dir(&stored).unwrap() {
        let path = file.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        let kind = match name {
            _ if name.contains("cart") => "normal.html",
            _ if name.contains("request") => "similar.html",
            _ => "waits.html",
        };
        if name.ends_with(".html") {
            fs::copy(&path, reports.join(kind)).unwrap();
        }
    }
    fs::write(reports.join("large.html"), html(&large(), &context())).unwrap();
    fs::write(reports.join("hostile.html"), html(&hostile(), &context())).unwrap();

    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
    let base = format!("http://{}/profiling", listener.local_addr().unwrap());
    let app = Router::new().nest("/profiling", tracing_profiling_server::router(&handle));
    runtime.spawn(async move { axum::serve(listener, app).await });
    let pictures = root.join("target/page/pictures");
    let checked = Command::new("node")
        .arg(root.join(".ci/page.mjs"))
        .args([reports.as_os_str(), base.as_ref(), pictures.as_os_str()])
        .status()
        .unwrap();
    assert!(checked.success());
}
