//! Profiles sent by OTLP: all arrive or are counted as lost, and no thread of the program waits for the delivery.

#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test"
)]

#[path = "otlp_export/failures.rs"]
mod failures;
#[path = "otlp_export/profile_ids.rs"]
mod profile_ids;
#[path = "support/receiver.rs"]
mod receiver;
mod support;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use receiver::{Behavior, Receiver, Speaks, free_address, resource_attribute};
use support::{HAS_STACKS, PLENTY, Setup, burn, is_child, run_child};
use tracing::info_span;
use tracing_profiling::{
    Builder, Compression, OtlpBuilder, OtlpExporter, ProfilingLayer, Protocol, Stats,
};
use tracing_profiling::{Directory, Resource};
use tracing_subscriber::prelude::*;

const BOTH: [Speaks; 2] = [Speaks::Http, Speaks::Grpc];
const MS: Duration = Duration::from_millis(1);

/// An exporter to that address.
fn to(speaks: Speaks, address: SocketAddr) -> OtlpBuilder {
    let protocol = match speaks {
        Speaks::Http => Protocol::HttpProtobuf,
        Speaks::Grpc => Protocol::Grpc,
    };
    OtlpExporter::builder()
        .protocol(protocol)
        .endpoint(format!("http://{address}"))
        .timeout(PLENTY)
        // A delay on a busy machine does not mean that the receiver is unavailable.
        .grace_period(Duration::MAX)
        .resource(Resource::new().with("service.name", "shop"))
}

fn setup(exporter: OtlpBuilder) -> Setup {
    // A rate that is set explicitly is not lowered on a busy machine, and a ring has room for more than a quarter of a
    // second: each span has samples.
    setup_with(exporter, |builder| builder.rate(100).stack_bytes(8_192))
}

fn setup_with(exporter: OtlpBuilder, set: impl FnOnce(Builder) -> Builder) -> Setup {
    Setup::with("0ms", |builder| {
        set(builder).profiles_per_minute(1000).exporter(exporter.build().unwrap())
    })
}

/// Makes `profiles` profiles in turn.
fn keep(setup: &Setup, profiles: usize) {
    tracing::dispatcher::with_default(&setup.dispatch, || {
        for _ in 0..profiles {
            info_span!("request").in_scope(|| burn(60 * MS));
        }
    });
}

/// The profile ids that spans were given.
fn given_ids(setup: &Setup) -> BTreeSet<String> {
    let kept = setup.kept();
    let ids = kept.iter().flat_map(|kept| &kept.spans).filter_map(|span| span.profile().ok());
    ids.map(|id| id.to_string()).collect()
}

/// The ids of the profiles that have arrived, each of them once.
fn arrived(receiver: &Receiver, setup: &Setup) -> BTreeSet<String> {
    let all = receiver.ids();
    let set: BTreeSet<_> = all.iter().collect();
    assert_eq!(all.len(), set.len(), "{all:?}");
    arrived_at_least_once(receiver, setup)
}

/// The ids of the profiles that have arrived. The same profile may arrive twice if an answer comes too late. Profiles
/// of waits are left out; their ids differ from the span's in the last bit.
fn arrived_at_least_once(receiver: &Receiver, setup: &Setup) -> BTreeSet<String> {
    assert_one_body(receiver);
    let all: BTreeSet<_> = receiver.ids().into_iter().collect();
    all.intersection(&given_ids(setup)).cloned().collect()
}

/// Asserts that a profile that was sent several times was the same each time.
fn assert_one_body(receiver: &Receiver) {
    for (id, bodies) in receiver.bodies() {
        assert_eq!(bodies.len(), 1, "{id}: {bodies:?}");
    }
}

/// The number of spans that have a profile id or are about to get one, whatever happens to the profile later.
fn spans_with_ids(stats: &Stats) -> u64 {
    let without = stats.spans.no_profile_no_samples
        + stats.spans.no_profile_rate_limit
        + stats.spans.no_profile_queue_full
        + stats.spans.no_profile_exporter_fails
        + stats.spans.no_profile_no_memory
        + stats.spans.no_profile_no_id;
    stats.spans.kept - without
}

/// Waits until the exporter has taken the profile of every span that has an id, one profile each.
fn wait_for_taken(setup: &Setup) {
    let start = Instant::now();
    let stats = || setup.handle.stats();
    while stats().profiles.exported < spans_with_ids(&stats()) {
        assert!(start.elapsed() < PLENTY, "{:?}", stats());
        _ = setup.handle.flush(10 * MS);
    }
}

/// Asserts that every profile that was taken is accounted for, and none is pending.
fn assert_adds_up(stats: &Stats) {
    assert_eq!(waiting(stats), 0, "{stats:?}");
}

/// The number of profiles that were taken and have no outcome yet.
fn waiting(stats: &Stats) -> u64 {
    let ends = stats.profiles.delivered
        + stats.profiles.stored_as_fallback
        + stats.profiles.dropped_refused
        + stats.profiles.dropped_too_old
        + stats.profiles.dropped_at_shutdown;
    (stats.profiles.exported + stats.profiles.resent_from_fallback).checked_sub(ends).unwrap()
}

#[test]
fn every_profile_arrives_once() {
    for speaks in BOTH {
        for compression in [Compression::None, Compression::Gzip] {
            let receiver = Receiver::new(speaks);
            let exporter = to(speaks, receiver.address)
                .compression(compression)
                // The last one states the format, so it is not the program's to choose.
                .headers([
                    ("authorization", "Bearer of-the-shop"),
                    ("otlp-profiles-development-version", "7"),
                ]);
            let setup = setup(exporter);
            keep(&setup, 5);
            setup.flush();
            assert_eq!(arrived(&receiver, &setup), given_ids(&setup), "{speaks:?}");
            let stats = setup.handle.stats();
            assert_eq!(given_ids(&setup).len(), if HAS_STACKS { 5 } else { 0 });
            assert_eq!(stats.profiles.delivered, given_ids(&setup).len() as u64);
            assert_eq!(stats.profiles.requests_retried, 0);
            assert_adds_up(&stats);
            for got in receiver.got() {
                assert_eq!(resource_attribute(&got, "service.name").unwrap(), "shop");
                assert_eq!(got.headers["authorization"], "Bearer of-the-shop");
                assert_eq!(got.headers["otlp-profiles-development-version"], "1");
                assert!(got.headers["user-agent"].starts_with("tracing-profiling/"), "{got:?}");
                let encoding = match speaks {
                    Speaks::Http => got.headers.get("content-encoding"),
                    Speaks::Grpc => got.headers.get("grpc-encoding"),
                };
                let is_gzip = encoding.is_some_and(|encoding| encoding == "gzip");
                assert_eq!(is_gzip, compression == Compression::Gzip);
                if speaks == Speaks::Http {
                    assert_eq!(got.path, "/v1development/profiles");
                    assert_eq!(got.headers["content-type"], "application/x-protobuf");
                }
            }
        }
    }
}

/// The program continues while the receiver does not answer: if one of its threads waited, this test would hang.
#[test]
fn no_thread_waits_for_the_receiver_and_each_profile_is_a_request() {
    for speaks in BOTH {
        let receiver = Receiver::new(speaks);
        receiver.will([Behavior::Hold]);
        let setup = setup(to(speaks, receiver.address));
        keep(&setup, 1);
        if !HAS_STACKS {
            continue;
        }
        receiver.wait_for(1);
        keep(&setup, 6);
        assert!(setup.handle.flush(50 * MS).is_err(), "the flush must time out");
        assert_eq!(receiver.got().len(), 1);
        let start = Instant::now();
        while setup.handle.stats().profiles.exported < 7 {
            assert!(start.elapsed() < PLENTY);
            std::thread::sleep(MS);
        }
        receiver.release();
        setup.flush();
        assert_eq!(receiver.got().len(), 7);
        assert_eq!(arrived(&receiver, &setup), given_ids(&setup));
        assert_adds_up(&setup.handle.stats());
    }
}

#[test]
fn a_request_without_an_answer_is_repeated() {
    for speaks in BOTH {
        let receiver = Receiver::new(speaks);
        receiver.will([Behavior::Hang]);
        let setup = setup(to(speaks, receiver.address).timeout(2000 * MS));
        keep(&setup, 1);
        setup.flush();
        assert_eq!(arrived(&receiver, &setup), given_ids(&setup), "{speaks:?}");
        assert_eq!(setup.handle.stats().profiles.requests_retried > 0, HAS_STACKS);
        assert_adds_up(&setup.handle.stats());
    }
}

#[test]
fn a_restarted_receiver_gets_every_profile() {
    for speaks in BOTH {
        let mut receiver = Receiver::new(speaks);
        let setup = setup(to(speaks, receiver.address));
        for round in 0..3 {
            keep(&setup, 2);
            setup.flush();
            receiver.kill();
            keep(&setup, 2);
            assert!(setup.handle.flush(100 * MS).is_err() || !HAS_STACKS, "round {round}");
            receiver.start();
            setup.flush();
        }
        assert_eq!(arrived(&receiver, &setup), given_ids(&setup), "{speaks:?}");
        assert_eq!(given_ids(&setup).len(), if HAS_STACKS { 12 } else { 0 });
        assert_adds_up(&setup.handle.stats());
    }
}

/// One invalid profile does not affect the others.
#[test]
fn a_refused_profile_is_lost_alone() {
    for speaks in BOTH {
        let receiver = Receiver::new(speaks);
        // The first request keeps the receiver busy; one of the four queued behind it is refused.
        receiver.will([Behavior::Hold, Behavior::Refuse(413, None)]);
        let setup = setup(to(speaks, receiver.address));
        keep(&setup, 1);
        if !HAS_STACKS {
            return;
        }
        receiver.wait_for(1);
        keep(&setup, 4);
        let start = Instant::now();
        while setup.handle.stats().profiles.exported < 5 {
            assert!(start.elapsed() < PLENTY);
            std::thread::sleep(MS);
        }
        receiver.release();
        assert!(setup.handle.flush(PLENTY).is_err(), "one is lost");
        let stats = setup.handle.stats();
        assert_eq!((stats.profiles.dropped_refused, stats.profiles.delivered), (1, 4));
        assert_eq!(arrived(&receiver, &setup).len(), 4);
        assert_eq!(receiver.got().len(), 5, "it is not sent again");
        assert_adds_up(&stats);
    }
}

#[test]
fn profiles_refused_in_a_success_are_counted() {
    for speaks in BOTH {
        let receiver = Receiver::new(speaks);
        receiver.will([Behavior::Accept(1)]);
        let setup = setup(to(speaks, receiver.address));
        keep(&setup, 1);
        let one = u64::from(HAS_STACKS);
        assert_eq!(u64::from(setup.handle.flush(PLENTY).is_ok()), 1 - one);
        setup.flush();
        let stats = setup.handle.stats();
        assert_eq!((stats.profiles.dropped_refused, stats.profiles.delivered), (one, 0));
        assert_eq!(receiver.got().len() as u64, one, "it is not sent again");
        assert_adds_up(&stats);
    }
}

/// Keeps spans until one has no profile because the exporter fails.
fn keep_until_exporter_fails(setup: &Setup) {
    let start = Instant::now();
    while setup.handle.stats().spans.no_profile_exporter_fails == 0 {
        assert!(start.elapsed() < PLENTY);
        keep(setup, 1);
    }
}

#[test]
fn an_unavailable_receiver_costs_bounded_memory_and_gets_every_profile_later() {
    for speaks in BOTH {
        let mut receiver = Receiver::offline(speaks, free_address());
        let setup = setup(to(speaks, receiver.address).grace_period(Duration::ZERO));
        if !HAS_STACKS {
            return;
        }
        keep_until_exporter_fails(&setup);
        // The limit of permits in use, plus what was queued before the first request failed.
        assert!(given_ids(&setup).len() <= 64);
        assert!(setup.handle.flush(100 * MS).is_err());
        receiver.start();
        let start = Instant::now();
        // The worker passes on what it holds once the exporter works again.
        while arrived(&receiver, &setup) != given_ids(&setup) || setup.handle.flush(PLENTY).is_err()
        {
            assert!(start.elapsed() < PLENTY);
            std::thread::sleep(10 * MS);
        }
        let stats = setup.handle.stats();
        assert_eq!(stats.profiles.dropped_export_failed, 0);
        assert_adds_up(&stats);
    }
}

#[test]
fn a_shutdown_has_a_deadline_and_counts_what_is_left() {
    for speaks in BOTH {
        let receiver = Receiver::offline(speaks, free_address());
        let setup = setup(to(speaks, receiver.address));
        keep(&setup, 3);
        let start = Instant::now();
        while HAS_STACKS && setup.handle.stats().profiles.exported < 3 {
            assert!(start.elapsed() < PLENTY);
            std::thread::sleep(MS);
        }
        let is_done = setup.handle.shutdown(200 * MS).is_ok();
        if !HAS_STACKS {
            continue;
        }
        assert!(!is_done);
        // The shutdown returns at the deadline; the counters follow when the exporter has ended.
        let start = Instant::now();
        while setup.handle.stats().profiles.dropped_at_shutdown == 0
            || waiting(&setup.handle.stats()) > 0
        {
            assert!(start.elapsed() < PLENTY);
            std::thread::sleep(MS);
        }
        assert_eq!(setup.handle.stats().profiles.exported, 3);
        assert_adds_up(&setup.handle.stats());
    }
}

/// The queue is limited by number or bytes. The request in flight counts, and the last profile may exceed the limit.
#[test]
fn a_full_queue_takes_no_more() {
    for speaks in BOTH {
        for (profiles, bytes, taken) in [(2, usize::MAX, 2), (usize::MAX, 1, 1)] {
            let receiver = Receiver::new(speaks);
            receiver.will([Behavior::Hold]);
            let setup = setup(to(speaks, receiver.address).queue(profiles, bytes));
            if !HAS_STACKS {
                return;
            }
            keep_until_exporter_fails(&setup);
            receiver.wait_for(1);
            let exported = setup.handle.stats().profiles.exported;
            assert_eq!(exported, taken, "the worker holds the others");
            receiver.release();
            let start = Instant::now();
            while arrived(&receiver, &setup) != given_ids(&setup)
                || setup.handle.flush(PLENTY).is_err()
            {
                assert!(start.elapsed() < PLENTY);
                std::thread::sleep(10 * MS);
            }
            assert_adds_up(&setup.handle.stats());
        }
    }
}

#[test]
fn the_fallback_directory_takes_over_and_is_sent_later() {
    for speaks in BOTH {
        let dir = tempfile::tempdir().unwrap();
        let mut receiver = Receiver::offline(speaks, free_address());
        let exporter = to(speaks, receiver.address)
            .grace_period(Duration::ZERO)
            .fallback_directory(Directory::new(dir.path()));
        let setup = setup(exporter);
        if !HAS_STACKS {
            return;
        }
        let start = Instant::now();
        while setup.handle.stats().profiles.stored_as_fallback < 3 {
            assert!(start.elapsed() < PLENTY);
            keep(&setup, 1);
        }
        assert_eq!(setup.handle.stats().spans.no_profile_exporter_fails, 0, "all have profiles");
        let files = std::fs::read_dir(dir.path()).unwrap().count();
        assert!(files >= 9, "{files}");
        receiver.start();
        let start = Instant::now();
        while setup.handle.stats().profiles.delivered < setup.handle.stats().profiles.exported
            || setup.handle.flush(PLENTY).is_err()
        {
            assert!(start.elapsed() < PLENTY);
            std::thread::sleep(10 * MS);
        }
        assert_eq!(arrived(&receiver, &setup), given_ids(&setup));
        assert_adds_up(&setup.handle.stats());
    }
}

#[test]
fn profiles_left_at_shutdown_go_to_the_fallback_directory() {
    let dir = tempfile::tempdir().unwrap();
    let address = free_address();
    let setup = setup(to(Speaks::Http, address).fallback_directory(Directory::new(dir.path())));
    keep(&setup, 2);
    _ = setup.handle.shutdown(200 * MS);
    if !HAS_STACKS {
        return;
    }
    let start = Instant::now();
    while setup.handle.stats().profiles.stored_as_fallback < 2 {
        assert!(start.elapsed() < PLENTY);
        std::thread::sleep(MS);
    }
    assert_eq!(setup.handle.stats().profiles.dropped_at_shutdown, 0);
    let names: Vec<_> = std::fs::read_dir(dir.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    for id in given_ids(&setup) {
        assert!(names.iter().any(|name| name.ends_with(&format!("{id}.otlp"))), "{names:?}");
    }
}

/// Also in a runtime whose only thread is blocked by this test.
#[tokio::test]
async fn works_inside_a_runtime() {
    for speaks in BOTH {
        let receiver = Receiver::new(speaks);
        let setup = setup(to(speaks, receiver.address));
        keep(&setup, 2);
        setup.flush();
        assert_eq!(arrived(&receiver, &setup), given_ids(&setup), "{speaks:?}");
        setup.handle.shutdown(PLENTY).unwrap();
        assert_adds_up(&setup.handle.stats());
        // A runtime must not be dropped in an asynchronous context.
        tokio::task::spawn_blocking(move || drop(receiver)).await.unwrap();
    }
}

/// Records the targets of all spans and events.
struct Targets(Arc<Mutex<Vec<String>>>);

impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for Targets {
    fn on_new_span(
        &self,
        attributes: &tracing::span::Attributes<'_>,
        _: &tracing::span::Id,
        _: tracing_subscriber::layer::Context<'_, S>,
    ) {
        self.0.lock().unwrap().push(attributes.metadata().target().to_owned());
    }

    fn on_event(&self, event: &tracing::Event<'_>, _: tracing_subscriber::layer::Context<'_, S>) {
        self.0.lock().unwrap().push(event.metadata().target().to_owned());
    }
}

const SUPPRESSED: &str = "spans_and_events_of_the_exporter_are_suppressed";

/// The subscriber is global, so the exporter's threads use it as well.
#[test]
fn spans_and_events_of_the_exporter_are_suppressed() {
    if is_child(SUPPRESSED) {
        let targets = Arc::new(Mutex::new(Vec::new()));
        let address: SocketAddr = std::env::var("RECEIVER").unwrap().parse().unwrap();
        let layer = ProfilingLayer::builder()
            .rules("0ms".parse().unwrap())
            .exporter(to(Speaks::Grpc, address).build().unwrap())
            .build()
            .unwrap();
        let handle = layer.handle();
        tracing_subscriber::registry().with(layer).with(Targets(Arc::clone(&targets))).init();
        for _ in 0..3 {
            info_span!("request").in_scope(|| burn(60 * MS));
            handle.flush(PLENTY).unwrap();
        }
        let targets = targets.lock().unwrap();
        let expected = ["otlp_export", "tracing_profiling"];
        assert!(targets.iter().all(|target| expected.contains(&target.as_str())), "{targets:?}");
        let stats = handle.stats();
        assert_eq!(stats.spans.kept, 3, "none of the exporter's spans");
        return;
    }
    let receiver = Receiver::new(Speaks::Grpc);
    let output = run_child(SUPPRESSED, &[("RECEIVER", &receiver.address.to_string())]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(receiver.ids().is_empty(), !HAS_STACKS);
}

const BY_ENVIRONMENT: &str = "the_environment_alone_is_enough";

#[test]
fn the_environment_alone_is_enough() {
    if is_child(BY_ENVIRONMENT) {
        let layer = ProfilingLayer::from_env().unwrap();
        let handle = layer.handle();
        tracing_subscriber::registry().with(layer).init();
        info_span!("request").in_scope(|| burn(60 * MS));
        handle.flush(PLENTY).unwrap();
        println!("delivered: {}", handle.stats().profiles.delivered);
        return;
    }
    let receiver = Receiver::new(Speaks::Http);
    let whole = format!("{}/api/x/v1/profiles", receiver.endpoint());
    let grpc = Receiver::new(Speaks::Grpc);
    let dir = tempfile::tempdir().unwrap();
    let of_all = [
        ("TRACING_PROFILING", "0ms"),
        ("OTEL_SERVICE_NAME", "of-the-variable"),
        ("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=of%20all"),
    ];
    let endpoint = grpc.endpoint();
    let of_http = [
        ("OTEL_EXPORTER_OTLP_PROFILES_ENDPOINT", whole.as_str()),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1"),
    ];
    let of_grpc = [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.as_str()),
    ];
    for (receiver, variables) in [(&receiver, of_http), (&grpc, of_grpc)] {
        let mut variables = variables.to_vec();
        variables.extend(of_all);
        let output = run_child(BY_ENVIRONMENT, &variables);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let got = receiver.got();
        assert_eq!(got.len(), usize::from(HAS_STACKS));
        let Some(got) = got.first() else { continue };
        assert_eq!(resource_attribute(got, "service.name").unwrap(), "of-the-variable");
        assert_eq!(resource_attribute(got, "deployment.environment.name").unwrap(), "test");
        assert_eq!(got.headers["x-tenant"], "of all");
    }
    if HAS_STACKS {
        assert_eq!(receiver.got()[0].path, "/api/x/v1/profiles");
    }
    // `OTEL_PROFILES_EXPORTER` takes precedence.
    let dir_path = dir.path().to_str().unwrap();
    for (switch, has_files) in [("none", false), ("directory", HAS_STACKS)] {
        let mut variables = of_http.to_vec();
        variables.extend(of_all);
        variables.extend([("OTEL_PROFILES_EXPORTER", switch), ("TRACING_PROFILING_DIR", dir_path)]);
        let output = run_child(BY_ENVIRONMENT, &variables);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(std::fs::read_dir(&dir).unwrap().count() > 0, has_files, "{switch}");
    }
    assert_eq!(receiver.got().len(), usize::from(HAS_STACKS));
}
