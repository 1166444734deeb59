//! Use together with `tracing-opentelemetry`: attributes on exported spans, and trace ids in profiles.

#![cfg(feature = "opentelemetry-sdk")]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "a test")]

mod support;

#[path = "opentelemetry/links.rs"]
mod links;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use opentelemetry::trace::{
    SpanContext, SpanId, TraceContextExt, TraceFlags, TraceId, TraceState, Tracer, TracerProvider,
};
use opentelemetry::{Context, Value};
use opentelemetry_sdk::trace::{
    InMemorySpanExporter, Sampler, SdkTracer, SdkTracerProvider, SimpleSpanProcessor, SpanData,
};
use support::Nanos as _;
use support::{HAS_STACKS, PLENTY, burn};
use tracing::{Dispatch, info_span};
use tracing_opentelemetry::{OpenTelemetryLayer, OpenTelemetrySpanExt};
use tracing_profiling::export::{ExportError, Exported, Exporter, Memory};
use tracing_profiling::{Builder, Handle, Kept, Profile, ProfilingLayer, Stats};
use tracing_subscriber::filter::{FilterFn, LevelFilter};
use tracing_subscriber::prelude::*;
use tracing_subscriber::{Layer, Registry, reload};

const MS: Duration = Duration::from_millis(1);

type Otel<S = Registry> = OpenTelemetryLayer<S, SdkTracer>;

/// A subscriber with both layers, combined in the way that is tested.
struct Scene {
    handle: Handle,
    dispatch: Dispatch,
    profiles: Memory,
    spans: InMemorySpanExporter,
    provider: SdkTracerProvider,
    kept: Arc<Mutex<Vec<Kept>>>,
}

impl Scene {
    fn new(combine: impl FnOnce(ProfilingLayer, SdkTracer) -> Dispatch) -> Self {
        Self::with(|builder| builder, Sampler::AlwaysOn, combine)
    }

    fn with(
        set: impl FnOnce(Builder) -> Builder,
        sampler: Sampler,
        combine: impl FnOnce(ProfilingLayer, SdkTracer) -> Dispatch,
    ) -> Self {
        let profiles = Memory::new();
        let kept = Arc::new(Mutex::new(Vec::new()));
        let received = Arc::clone(&kept);
        let builder = ProfilingLayer::builder()
            .rules(
                "20ms|error,fast=1h,[failing]=error,[failed]=error,[fine]=error".parse().unwrap(),
            )
            // So that a ring covers the time in which the collector waits for a CPU.
            .rate(100)
            .stack_bytes(8_192)
            .sampling_delay(Duration::ZERO)
            .exporter(profiles.clone())
            .on_kept(move |one| received.lock().unwrap().push(one.clone()));
        let layer = set(builder).build().unwrap();
        let handle = layer.handle();
        let spans = InMemorySpanExporter::default();
        let provider = SdkTracerProvider::builder()
            .with_sampler(sampler)
            .with_span_processor(SimpleSpanProcessor::new(spans.clone()))
            .build();
        let dispatch = combine(layer, provider.tracer("test"));
        Self { handle, dispatch, profiles, spans, provider, kept }
    }

    fn run<R>(&self, action: impl FnOnce() -> R) -> R {
        let result = tracing::dispatcher::with_default(&self.dispatch, action);
        self.handle.flush(PLENTY).unwrap();
        self.provider.force_flush().unwrap();
        result
    }

    /// The exported spans by name, which must be unique.
    fn spans(&self) -> HashMap<String, SpanData> {
        let spans = self.spans.get_finished_spans().unwrap();
        let count = spans.len();
        let by_name: HashMap<_, _> =
            spans.into_iter().map(|span| (span.name.to_string(), span)).collect();
        assert_eq!(by_name.len(), count);
        by_name
    }

    fn profiles(&self) -> Vec<Profile> {
        self.profiles.profiles()
    }

    fn stats(&self) -> Stats {
        self.handle.stats()
    }
}

fn otel<S>(tracer: SdkTracer) -> Otel<S>
where
    S: tracing::Subscriber + for<'a> tracing_subscriber::registry::LookupSpan<'a>,
{
    tracing_opentelemetry::layer().with_tracer(tracer)
}

fn in_order(profiling: ProfilingLayer, tracer: SdkTracer) -> Dispatch {
    Dispatch::new(tracing_subscriber::registry().with(profiling).with(otel(tracer)))
}

fn attribute(span: &SpanData, key: &str) -> Option<Value> {
    let found = span.attributes.iter().filter(|attribute| attribute.key.as_str() == key);
    let mut values: Vec<_> = found.map(|attribute| attribute.value.clone()).collect();
    assert!(values.len() <= 1, "{key} once: {values:?}");
    values.pop()
}

fn text(span: &SpanData, key: &str) -> Option<String> {
    attribute(span, key).map(|value| value.as_str().into_owned())
}

/// One slow request with a fast child and a child on another thread, one fast request, and one failed request.
fn requests() {
    let request = info_span!("slow");
    request.in_scope(|| {
        burn(60 * MS);
        info_span!(target: "fast", "child").in_scope(|| burn(60 * MS));
    });
    let elsewhere = info_span!(target: "fast", parent: &request, "elsewhere");
    std::thread::scope(|scope| {
        let dispatch = tracing::dispatcher::get_default(Dispatch::clone);
        scope.spawn(move || {
            tracing::dispatcher::with_default(&dispatch, || {
                elsewhere.in_scope(|| burn(60 * MS));
                drop(elsewhere);
            });
        });
    });
    drop(request);
    info_span!(target: "fast", "fine").in_scope(|| burn(MS));
    info_span!("failed").in_scope(|| tracing::error!("it failed"));
}

/// Asserts what must hold in any order of the layers.
fn check_requests(scene: &Scene) {
    let spans = scene.spans();
    assert_eq!(spans.len(), 5, "{:?}", spans.keys());
    let slow = &spans["slow"];
    assert_eq!(text(slow, "profile.reason").as_deref(), Some("latency"));
    let times = ["profile.on_cpu_ns", "profile.off_cpu_ns", "profile.idle_ns"];
    let times = times.map(|key| match attribute(slow, key) {
        Some(Value::I64(ns)) => Some(ns),
        _ => None,
    });
    // On systems other than Linux, on-CPU time is unknown.
    assert_eq!(times.map(|time| time.is_some()), [HAS_STACKS, HAS_STACKS, true]);
    let sum: i64 = times.into_iter().flatten().sum();
    assert!(!HAS_STACKS || sum > 60_000_000, "{times:?}");
    for name in ["child", "elsewhere", "fine"] {
        let added = spans[name].attributes.iter().filter(|a| a.key.as_str().contains("profile."));
        assert_eq!(added.count(), 0, "{name}");
    }
    assert_eq!(text(&spans["failed"], "profile.reason").as_deref(), Some("error"));

    let profiles = scene.profiles();
    if !HAS_STACKS {
        assert!(profiles.is_empty());
        assert_eq!(attribute(slow, "profile.id"), None);
        return;
    }
    // Each id belongs to a profile, and each profile is referenced by a span.
    let mut ids: Vec<_> = spans.values().filter_map(|span| text(span, "profile.id")).collect();
    let mut of_profiles: Vec<_> = profiles.iter().map(|p| p.id.to_string()).collect();
    ids.sort();
    of_profiles.sort();
    assert_eq!(ids, of_profiles);
    let profile = profiles.iter().find(|profile| profile.name == "slow").unwrap();
    assert_eq!(text(slow, "profile.id"), Some(profile.id.to_string()));
    let grafana = text(slow, "pyroscope.profile.id").unwrap();
    assert_eq!(grafana, slow.span_context.span_id().to_string());

    // Each sample links to its own span of that trace.
    let mut named: Vec<&str> = Vec::new();
    for sample in profile.samples() {
        let link = sample.link.and_then(|link| profile.link(link));
        let link = link.unwrap_or_else(|| panic!("{sample:?} of {:?}", profile.notes));
        let (trace, span) = link.ids.unwrap_or_else(|| panic!("`{}` has ids", link.span));
        let exported = &spans[&link.span];
        assert_eq!(trace, exported.span_context.trace_id().into());
        assert_eq!(span, exported.span_context.span_id().into());
        named.push(&link.span);
    }
    for name in ["slow", "child", "elsewhere"] {
        assert!(named.contains(&name), "{named:?}");
    }
}

#[test]
fn before_the_opentelemetry_layer() {
    let scene = Scene::new(in_order);
    scene.run(requests);
    check_requests(&scene);
}

#[test]
fn boxed() {
    let scene = Scene::new(|profiling, tracer| {
        let layers: Vec<Box<dyn Layer<Registry> + Send + Sync>> =
            vec![profiling.boxed(), otel(tracer).boxed()];
        Dispatch::new(tracing_subscriber::registry().with(layers))
    });
    scene.run(requests);
    check_requests(&scene);
}

#[test]
fn inside_a_reload_layer() {
    let scene = Scene::new(|profiling, tracer| {
        let (profiling, _) = reload::Layer::new(profiling);
        Dispatch::new(tracing_subscriber::registry().with(profiling).with(otel(tracer)))
    });
    scene.run(requests);
    check_requests(&scene);
}

#[test]
fn under_per_layer_filters() {
    let scene = Scene::new(|profiling, tracer| {
        let quiet = FilterFn::new(|metadata| !metadata.target().starts_with("quiet"));
        Dispatch::new(
            tracing_subscriber::registry()
                .with(profiling.with_filter(LevelFilter::INFO))
                .with(otel(tracer).with_filter(quiet)),
        )
    });
    scene.run(|| {
        requests();
        // Hidden from OpenTelemetry, but profiled.
        info_span!(target: "quiet", "hidden").in_scope(|| burn(30 * MS));
    });
    check_requests_beside_hidden(&scene);
}

fn check_requests_beside_hidden(scene: &Scene) {
    assert_eq!(scene.spans().len(), 5);
    let kept = scene.kept.lock().unwrap();
    let hidden = kept.iter().find(|kept| kept.spans[0].name() == "hidden").unwrap();
    assert_eq!(hidden.spans[0].facts.ids(), None);
    let slow = kept.iter().find(|kept| kept.spans[0].name() == "slow").unwrap();
    assert!(slow.spans[0].facts.ids().is_some());
}

#[test]
fn the_parent_of_a_span_can_be_set_as_late_as_without_the_layer() {
    let parent = SpanContext::new(
        TraceId::from(7_u128),
        SpanId::from(9_u64),
        TraceFlags::SAMPLED,
        true,
        TraceState::NONE,
    );
    let scene = Scene::new(|profiling, tracer| {
        let lazy = otel(tracer).with_context_activation(false);
        Dispatch::new(tracing_subscriber::registry().with(profiling).with(lazy))
    });
    scene.run(|| {
        let span = info_span!("slow");
        // Sampled and exited: the OpenTelemetry span has not been started yet.
        span.in_scope(|| burn(40 * MS));
        let context = Context::new().with_remote_span_context(parent.clone());
        span.set_parent(context).unwrap();
    });
    let slow = &scene.spans()["slow"];
    assert_eq!(slow.span_context.trace_id(), parent.trace_id());
    assert_eq!(slow.parent_span_id, parent.span_id());
    assert_eq!(text(slow, "profile.reason").as_deref(), Some("latency"));
}

#[test]
fn spans_of_unsampled_traces_are_marked() {
    let scene = Scene::with(|builder| builder, Sampler::AlwaysOff, in_order);
    scene.run(requests);
    assert!(scene.spans().is_empty());
    let kept = scene.kept.lock().unwrap().clone();
    assert_eq!(kept[0].spans[0].facts.trace.map(|ids| ids.is_sampled), Some(false));
    if HAS_STACKS {
        let profile = &scene.profiles()[0];
        let sampled = profile.attributes.iter().find(|a| a.key == "profile.trace_sampled");
        assert_eq!(sampled.unwrap().value, tracing_profiling::profile::Value::Bool(false));
    }
}

/// An exporter that always fails.
struct Broken;

impl Exporter for Broken {
    fn export(&mut self, _: &Profile) -> Result<Exported, ExportError> {
        Err("broken".into())
    }

    fn check(&mut self) -> Result<(), ExportError> {
        Err("broken".into())
    }
}

#[test]
fn without_a_profile_there_is_no_id() {
    let sets: [fn(Builder) -> Builder; 2] = [
        |builder| builder.exporter(Broken),
        // Memory is exhausted once a sample has been dropped.
        |builder| builder.memory(1).rate(1_000),
    ];
    for set in sets {
        let scene = Scene::with(set, Sampler::AlwaysOn, |profiling, tracer| {
            Dispatch::new(tracing_subscriber::registry().with(profiling).with(otel(tracer)))
        });
        scene.run(|| info_span!("first").in_scope(|| burn(300 * MS)));
        let profiles = scene.profiles().len();
        scene.run(|| info_span!("slow").in_scope(|| burn(30 * MS)));
        let slow = &scene.spans()["slow"];
        assert_eq!(text(slow, "profile.reason").as_deref(), Some("latency"));
        assert_eq!(attribute(slow, "profile.id"), None);
        assert_eq!(attribute(slow, "pyroscope.profile.id"), None);
        assert_eq!(scene.profiles().len(), profiles);
    }
}

#[test]
fn over_the_rate_limit_there_is_no_id() {
    let one = |builder: Builder| builder.profiles_per_minute(1);
    let scene = Scene::with(one, Sampler::AlwaysOn, in_order);
    scene.run(|| {
        for _ in 0..4 {
            info_span!("slow").in_scope(|| burn(30 * MS));
        }
    });
    let spans = scene.spans.get_finished_spans().unwrap();
    assert_eq!(spans.len(), 4);
    let ids: Vec<_> = spans.iter().filter_map(|span| text(span, "profile.id")).collect();
    let profiles: Vec<_> = scene.profiles().iter().map(|p| p.id.to_string()).collect();
    assert_eq!(ids, profiles);
    assert_eq!(ids.len(), usize::from(HAS_STACKS));
    // One has a profile, and one is reported without; the others have no attributes.
    let with_reason = spans.iter().filter(|span| attribute(span, "profile.reason").is_some());
    assert_eq!(with_reason.count(), 1 + usize::from(HAS_STACKS));
}

/// Collects the warnings of `tracing_profiling`.
#[derive(Clone, Default)]
struct Warnings(Arc<Mutex<Vec<String>>>);

impl<S: tracing::Subscriber> Layer<S> for Warnings {
    fn on_event(&self, event: &tracing::Event<'_>, _: tracing_subscriber::layer::Context<'_, S>) {
        struct Message(String);
        impl tracing::field::Visit for Message {
            fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                if field.name() == "message" {
                    self.0 = format!("{value:?}");
                }
            }
        }
        let metadata = event.metadata();
        if metadata.target() == "tracing_profiling" && *metadata.level() == tracing::Level::WARN {
            let mut message = Message(String::new());
            event.record(&mut message);
            self.0.lock().unwrap().push(message.0);
        }
    }
}

type Combine = fn(ProfilingLayer, SdkTracer, Warnings) -> Dispatch;

/// Keeps pairs of spans, one inside the other, and one span with samples.
fn keeps(combine: Combine) -> (Scene, Vec<String>) {
    let warnings = Warnings::default();
    let all =
        |builder: Builder| builder.rules("0ms".parse().unwrap()).profiles_per_minute(u32::MAX);
    let scene = Scene::with(all, Sampler::AlwaysOn, |profiling, tracer| {
        combine(profiling, tracer, warnings.clone())
    });
    for _ in 0..2 {
        scene.run(|| {
            for _ in 0..8 {
                info_span!("outer").in_scope(|| info_span!("inner").in_scope(|| ()));
            }
        });
    }
    scene.run(|| info_span!("slow").in_scope(|| burn(60 * MS)));
    let warnings = warnings.0.lock().unwrap().clone();
    let of_opentelemetry = |warning: &String| warning.contains("tracing-opentelemetry");
    (scene, warnings.into_iter().filter(of_opentelemetry).collect())
}

/// A layer with the name that the one of another release has.
mod other_release {
    pub(crate) mod tracing_opentelemetry {
        pub(crate) mod layer {
            pub(crate) struct OpenTelemetryLayer<S>(pub(crate) std::marker::PhantomData<fn(S)>);

            impl<S: tracing::Subscriber, T: 'static> tracing_subscriber::Layer<S> for OpenTelemetryLayer<T> {}
        }
    }
}

/// Where OpenTelemetry spans cannot be reached, kept spans lack their ids and attributes and nothing else, and one warning
/// names the remedy.
#[test]
fn spans_that_are_not_reached_get_one_warning_that_names_the_remedy() {
    use other_release::tracing_opentelemetry::layer::OpenTelemetryLayer as Other;

    const REMEDY: &str = "`cargo tree -i tracing-opentelemetry`";
    let unlinked: [(usize, Combine); 3] = [
        (33, |profiling, tracer, warnings| {
            let registry = tracing_subscriber::registry().with(warnings);
            Dispatch::new(registry.with(otel(tracer)).with(profiling))
        }),
        (33, |profiling, tracer, warnings| {
            let registry = tracing_subscriber::registry().with(warnings);
            Dispatch::new(registry.with(reload::Layer::new(otel(tracer)).0).with(profiling))
        }),
        (0, |profiling, _, warnings| {
            let registry = tracing_subscriber::registry().with(warnings);
            Dispatch::new(registry.with(Other::<()>(std::marker::PhantomData)).with(profiling))
        }),
    ];
    for (number, (unreached, combine)) in unlinked.into_iter().enumerate() {
        let (scene, warnings) = keeps(combine);
        assert_eq!(warnings.len(), 1, "{number}: {warnings:?}");
        assert!(warnings[0].contains(REMEDY), "{number}: {warnings:?}");
        let kept = scene.kept.lock().unwrap();
        let kept: Vec<_> = kept.iter().flat_map(|kept| &kept.spans).collect();
        assert_eq!(kept.len(), 33, "{number}");
        assert!(kept.iter().all(|span| span.facts.ids().is_none()), "{number}: {kept:?}");
        let spans = scene.spans.get_finished_spans().unwrap();
        assert_eq!(spans.len(), unreached, "{number}");
        let attributes = spans.iter().flat_map(|span| &span.attributes);
        assert_eq!(attributes.filter(|a| a.key.as_str().contains("profile")).count(), 0);
        if HAS_STACKS {
            let profiles = scene.profiles();
            let slow = profiles.iter().find(|profile| profile.name == "slow").unwrap();
            assert!(!slow.samples().is_empty(), "{number}");
        }
    }
}

#[test]
fn nothing_is_logged_of_spans_that_are_reached_or_are_not_there() {
    let linked: [(u64, Combine); 5] = [
        (33, |profiling, tracer, warnings| {
            let registry = tracing_subscriber::registry().with(warnings);
            Dispatch::new(registry.with(profiling).with(otel(tracer)))
        }),
        // As the warning of a layer inside a `reload::Layer` recommends.
        (33, |profiling, tracer, warnings| {
            let otel = otel(tracer).with_filter(reload::Layer::new(LevelFilter::INFO).0);
            Dispatch::new(tracing_subscriber::registry().with(warnings).with(profiling).with(otel))
        }),
        // A filter hides kept spans from OpenTelemetry.
        (17, |profiling, tracer, warnings| {
            let otel =
                otel(tracer).with_filter(FilterFn::new(|metadata| metadata.name() != "outer"));
            Dispatch::new(tracing_subscriber::registry().with(warnings).with(profiling).with(otel))
        }),
        (17, |profiling, tracer, warnings| {
            let otel =
                otel(tracer).with_filter(FilterFn::new(|metadata| metadata.name() != "inner"));
            Dispatch::new(tracing_subscriber::registry().with(warnings).with(profiling).with(otel))
        }),
        // Without OpenTelemetry.
        (0, |profiling, _, warnings| {
            Dispatch::new(tracing_subscriber::registry().with(warnings).with(profiling))
        }),
    ];
    for (number, (reached, combine)) in linked.into_iter().enumerate() {
        let (scene, warnings) = keeps(combine);
        assert_eq!(warnings, Vec::<String>::new(), "{number}");
        assert_eq!(scene.stats().spans.kept, 33);
        let spans = scene.spans.get_finished_spans().unwrap();
        let with_reason = spans.iter().filter(|span| attribute(span, "profile.reason").is_some());
        assert_eq!(with_reason.count() as u64, reached, "{number}");
    }
}

#[test]
fn closes_under_load_and_under_locks_do_not_deadlock() {
    // A layer that borrows a span's extensions while it drops another span.
    struct Borrows;
    struct Inner(Mutex<Option<tracing::Span>>);
    impl<S> Layer<S> for Borrows
    where
        S: tracing::Subscriber + for<'a> tracing_subscriber::registry::LookupSpan<'a>,
    {
        fn on_new_span(
            &self,
            attributes: &tracing::span::Attributes<'_>,
            id: &tracing::Id,
            context: tracing_subscriber::layer::Context<'_, S>,
        ) {
            if attributes.metadata().name() == "outer" {
                let inner = Inner(Mutex::new(None));
                context.span(id).unwrap().extensions_mut().insert(inner);
            }
        }

        fn on_enter(&self, id: &tracing::Id, context: tracing_subscriber::layer::Context<'_, S>) {
            let span = context.span(id).unwrap();
            if span.name() == "outer" {
                let inner = info_span!(parent: None, "inner");
                inner.in_scope(|| burn(MS));
                *span.extensions().get::<Inner>().unwrap().0.lock().unwrap() = Some(inner);
            }
        }

        fn on_exit(&self, id: &tracing::Id, context: tracing_subscriber::layer::Context<'_, S>) {
            let span = context.span(id).unwrap();
            let extensions = span.extensions();
            if let Some(inner) = extensions.get::<Inner>() {
                // The inner span closes while these extensions are borrowed.
                drop(inner.0.lock().unwrap().take());
            }
        }
    }
    // Spans over the limits of their rule get no attributes.
    let all = |builder: Builder| {
        builder.rules("0ms".parse().unwrap()).rate(1_000).profiles_per_minute(u32::MAX)
    };
    let scene = Scene::with(all, Sampler::AlwaysOn, |profiling, tracer| {
        Dispatch::new(
            tracing_subscriber::registry().with(Borrows).with(profiling).with(otel(tracer)),
        )
    });
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let _default = tracing::dispatcher::set_default(&scene.dispatch);
                for _ in 0..50 {
                    let outer = info_span!("outer");
                    outer.in_scope(|| burn(MS));
                    // One span on two threads at once, with children that follow each other.
                    let child = info_span!(parent: &outer, "child");
                    child.follows_from(&outer);
                    std::thread::scope(|scope| {
                        scope.spawn(|| {
                            let _default = tracing::dispatcher::set_default(&scene.dispatch);
                            outer.in_scope(|| child.in_scope(|| burn(MS)));
                        });
                        outer.in_scope(|| tracing::error!("on two threads"));
                    });
                }
            });
        }
    });
    scene.run(|| ());
    let spans = scene.spans.get_finished_spans().unwrap();
    // Each thread makes 50 of each, and an inner span for each enter of an outer one.
    let count = |name: &str| spans.iter().filter(|span| span.name == name).count();
    assert_eq!((count("outer"), count("child")), (200, 200));
    assert!(spans.iter().all(|span| attribute(span, "profile.reason").is_some()));
}

/// The reasons on the exported spans, in the order in which the spans ended.
fn reasons(spans: &InMemorySpanExporter) -> Vec<(String, Option<String>)> {
    let spans = spans.get_finished_spans().unwrap();
    spans.iter().map(|span| (span.name.to_string(), text(span, "profile.reason"))).collect()
}

fn reason(name: &str, reason: &str) -> (String, Option<String>) {
    (name.to_owned(), (!reason.is_empty()).then(|| reason.to_owned()))
}

#[test]
fn manual_and_hidden_spans_get_no_attributes() {
    let hiding: fn(ProfilingLayer, SdkTracer) -> Dispatch = |profiling, tracer| {
        let quiet = FilterFn::new(|metadata| !metadata.target().starts_with("quiet"));
        Dispatch::new(
            tracing_subscriber::registry().with(profiling).with(otel(tracer).with_filter(quiet)),
        )
    };
    for (hides, combine) in [(false, in_order as _), (true, hiding)] {
        let scene = Scene::new(combine);
        let tracer = scene.provider.tracer("by hand");
        scene.run(|| {
            for _ in 0..3 {
                info_span!("request").in_scope(|| {
                    drop(tracer.start("by hand"));
                    burn(30 * MS);
                });
                if hides {
                    info_span!(target: "quiet", "hidden").in_scope(|| tracing::error!("failed"));
                }
                info_span!("fine").in_scope(|| ());
                info_span!("failing").in_scope(|| tracing::error!("failed"));
            }
        });
        let once = [
            reason("by hand", ""),
            reason("request", "latency"),
            reason("fine", ""),
            reason("failing", "error"),
        ];
        let mut expected = [once.clone(), once.clone(), once].concat();
        let mut seen = reasons(&scene.spans);
        expected.sort();
        seen.sort();
        assert_eq!(seen, expected);
    }
}

#[test]
fn a_span_that_is_idle_after_its_last_exit_has_its_attributes() {
    let scene = Scene::new(in_order);
    scene.run(|| {
        let slow = info_span!("slow");
        slow.in_scope(|| ());
        std::thread::sleep(40 * MS);
    });
    assert_eq!(reasons(&scene.spans), [reason("slow", "latency")]);
}

#[test]
fn below_a_remote_parent_spans_have_their_attributes() {
    let parent = SpanContext::new(
        TraceId::from(7_u128),
        SpanId::from(9_u64),
        TraceFlags::SAMPLED,
        true,
        TraceState::NONE,
    );
    let scene = Scene::new(in_order);
    scene.run(|| {
        let _attached = Context::new().with_remote_span_context(parent.clone()).attach();
        info_span!("failing").in_scope(|| tracing::error!("failed"));
    });
    let failing = &scene.spans()["failing"];
    assert_eq!(failing.parent_span_id, parent.span_id());
    assert_eq!(text(failing, "profile.reason").as_deref(), Some("error"));
}

/// Ends the OpenTelemetry span between two enters.
#[test]
fn a_span_that_the_program_ends_while_it_is_idle_is_kept_once() {
    for (before, after) in [(0, 40), (40, 0), (40, 40)] {
        let scene = Scene::new(in_order);
        scene.run(|| {
            for _ in 0..2 {
                let span = info_span!("slow");
                let context = span.in_scope(|| {
                    burn(before * MS);
                    Context::current()
                });
                context.span().end();
                span.in_scope(|| burn(after * MS));
            }
        });
        let kept = scene.kept.lock().unwrap();
        let kept: Vec<_> = kept.iter().flat_map(|kept| &kept.spans).collect();
        assert_eq!(kept.len(), 2, "{before} {after}");
        // OpenTelemetry takes no attributes after the end.
        assert_eq!(reasons(&scene.spans), vec![reason("slow", ""); 2], "{before} {after}");
    }
}

#[test]
fn a_span_that_the_program_ends_early_is_profiled_until_its_close() {
    let scene = Scene::new(in_order);
    scene.run(|| {
        for _ in 0..2 {
            info_span!("slow").in_scope(|| {
                Context::current().span().end();
                burn(40 * MS);
            });
        }
    });
    assert_eq!(reasons(&scene.spans), vec![reason("slow", ""); 2]);
    let kept = scene.kept.lock().unwrap();
    let kept: Vec<_> = kept.iter().flat_map(|kept| &kept.spans).collect();
    assert_eq!(kept.len(), 2);
    assert!(kept.iter().all(|span| span.times().wall().ns() >= 40_000_000), "{kept:?}");
}

#[test]
fn flushes_of_the_provider_lose_no_attributes() {
    use std::sync::atomic::{AtomicBool, Ordering};
    // Spans over the limits of their rule get no attributes.
    let all =
        |builder: Builder| builder.rules("0ms".parse().unwrap()).profiles_per_minute(u32::MAX);
    let scene = Scene::with(all, Sampler::AlwaysOn, in_order);
    let has_ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !has_ended.load(Ordering::Relaxed) {
                scene.provider.force_flush().unwrap();
            }
        });
        tracing::dispatcher::with_default(&scene.dispatch, || {
            (0..5_000).for_each(|_| info_span!("kept").in_scope(|| ()));
        });
        has_ended.store(true, Ordering::Relaxed);
    });
    scene.provider.force_flush().unwrap();
    let seen = reasons(&scene.spans);
    assert_eq!(seen.len(), 5_000);
    let lacking = seen.iter().enumerate().filter(|(_, one)| **one != reason("kept", "latency"));
    let lacking: Vec<_> = lacking.map(|(number, _)| number).collect();
    assert!(lacking.is_empty(), "{lacking:?} of {}", scene.stats().spans.kept);
}

#[test]
fn a_span_that_is_not_reached_starts_no_other() {
    let parent = SpanContext::new(
        TraceId::from(7_u128),
        SpanId::from(9_u64),
        TraceFlags::SAMPLED,
        true,
        TraceState::NONE,
    );
    let remote = || Context::new().with_remote_span_context(parent.clone());
    let scene = Scene::new(|profiling, tracer| {
        let quiet = FilterFn::new(|metadata| !metadata.target().starts_with("quiet"));
        let lazy = otel(tracer).with_context_activation(false).with_filter(quiet);
        Dispatch::new(tracing_subscriber::registry().with(profiling).with(lazy))
    });
    scene.run(|| {
        // It has no OpenTelemetry span when it closes.
        info_span!(target: "quiet", "hidden").in_scope(|| tracing::error!("failed"));
        let _attached = remote().attach();
        info_span!("fine").in_scope(|| {
            tracing::Span::current().set_parent(remote()).unwrap();
        });
    });
    assert_eq!(scene.spans()["fine"].parent_span_id, parent.span_id());
}
