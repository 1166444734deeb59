//! Use together with `tracing-opentelemetry`: attributes on exported spans, and trace ids in profiles.

#![cfg(feature = "opentelemetry-sdk")]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "a test")]

mod support;

#[path = "opentelemetry/links.rs"]
mod links;

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use opentelemetry::trace::{
    SpanContext, SpanId, SpanKind, TraceContextExt, TraceFlags, TraceId, TraceState, Tracer,
    TracerProvider,
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

#[derive(Clone, Copy, PartialEq)]
enum Processor {
    Plain,
    Wrapping,
}

impl Scene {
    fn new(
        processor: Processor,
        combine: impl FnOnce(ProfilingLayer, SdkTracer) -> Dispatch,
    ) -> Self {
        Self::with(processor, |builder| builder, Sampler::AlwaysOn, combine)
    }

    fn with(
        processor: Processor,
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
            // At this rate a ring covers more time than at 1,000, in case the collector has to wait for a CPU.
            .rate(200)
            .arm_after(Duration::ZERO)
            .exporter(profiles.clone())
            .on_kept(move |one| received.lock().unwrap().push(one.clone()));
        let layer = set(builder).build().unwrap();
        let handle = layer.handle();
        let spans = InMemorySpanExporter::default();
        let exporting = SimpleSpanProcessor::new(spans.clone());
        let provider = SdkTracerProvider::builder().with_sampler(sampler);
        let provider = match processor {
            Processor::Plain => provider.with_span_processor(exporting),
            Processor::Wrapping => provider.with_span_processor(handle.span_processor(exporting)),
        };
        let provider = provider.build();
        let dispatch = combine(layer, provider.tracer("test"));
        Self { handle, dispatch, profiles, spans, provider, kept }
    }

    fn run<R>(&self, action: impl FnOnce() -> R) -> R {
        let result = tracing::dispatcher::with_default(&self.dispatch, action);
        assert!(self.handle.flush(PLENTY));
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
    let scene = Scene::new(Processor::Plain, |profiling, tracer| {
        Dispatch::new(tracing_subscriber::registry().with(profiling).with(otel(tracer)))
    });
    scene.run(requests);
    check_requests(&scene);
}

#[test]
fn with_opentelemetry_combines_them_in_order() {
    let scene = Scene::new(Processor::Plain, |profiling, tracer| {
        Dispatch::new(
            tracing_subscriber::registry().with(profiling.with_opentelemetry(otel(tracer))),
        )
    });
    scene.run(requests);
    check_requests(&scene);
}

#[test]
fn boxed() {
    let scene = Scene::new(Processor::Plain, |profiling, tracer| {
        let layers: Vec<Box<dyn Layer<Registry> + Send + Sync>> =
            vec![profiling.boxed(), otel(tracer).boxed()];
        Dispatch::new(tracing_subscriber::registry().with(layers))
    });
    scene.run(requests);
    check_requests(&scene);
}

#[test]
fn inside_a_reload_layer() {
    let scene = Scene::new(Processor::Plain, |profiling, tracer| {
        let (profiling, _) = reload::Layer::new(profiling);
        Dispatch::new(tracing_subscriber::registry().with(profiling).with(otel(tracer)))
    });
    scene.run(requests);
    check_requests(&scene);
}

#[test]
fn under_per_layer_filters() {
    let scene = Scene::new(Processor::Plain, |profiling, tracer| {
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
    assert_eq!(hidden.spans[0].trace_ids(), None);
    let slow = kept.iter().find(|kept| kept.spans[0].name() == "slow").unwrap();
    assert!(slow.spans[0].trace_ids().is_some());
}

#[test]
fn a_processor_works_in_any_order() {
    let combine: [fn(ProfilingLayer, SdkTracer) -> Dispatch; 4] = [
        |profiling, tracer| {
            Dispatch::new(tracing_subscriber::registry().with(profiling).with(otel(tracer)))
        },
        |profiling, tracer| {
            Dispatch::new(tracing_subscriber::registry().with(otel(tracer)).with(profiling))
        },
        // Where the OpenTelemetry layer cannot be reached.
        |profiling, tracer| {
            let (otel, _) = reload::Layer::new(otel(tracer));
            Dispatch::new(tracing_subscriber::registry().with(profiling).with(otel))
        },
        |profiling, tracer| {
            let (otel, _) = reload::Layer::new(otel(tracer));
            Dispatch::new(tracing_subscriber::registry().with(otel).with(profiling))
        },
    ];
    for (number, combine) in combine.into_iter().enumerate() {
        println!("combination {number}");
        let scene = Scene::new(Processor::Wrapping, combine);
        scene.run(requests);
        check_requests(&scene);
    }
}

#[test]
fn a_processor_forwards_unprofiled_spans_at_once() {
    let scene = Scene::new(Processor::Wrapping, |profiling, tracer| {
        Dispatch::new(tracing_subscriber::registry().with(otel(tracer)).with(profiling))
    });
    let tracer = scene.provider.tracer("by hand");
    scene.run(|| {
        drop(tracer.span_builder("by hand").with_kind(SpanKind::Client).start(&tracer));
        requests();
        drop(tracer.start("the last"));
    });
    let spans = scene.spans();
    assert_eq!(spans.len(), 7);
    for name in ["by hand", "the last"] {
        assert!(spans[name].attributes.is_empty());
    }
    // Also without a flush.
    scene.spans.reset();
    drop(tracer.start("at once"));
    assert_eq!(scene.spans.get_finished_spans().unwrap().len(), 1);
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
    for processor in [Processor::Plain, Processor::Wrapping] {
        let scene = Scene::new(processor, |profiling, tracer| {
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
}

#[test]
fn spans_of_unsampled_traces_are_marked_or_left_out() {
    let right: fn(ProfilingLayer, SdkTracer) -> Dispatch = |profiling, tracer| {
        Dispatch::new(tracing_subscriber::registry().with(profiling).with(otel(tracer)))
    };
    let scenes = [
        (Processor::Plain, right),
        (Processor::Wrapping, right),
        (Processor::Wrapping, NEED_A_PROCESSOR[0]),
        (Processor::Wrapping, NEED_A_PROCESSOR[1]),
    ];
    let scenes = scenes.into_iter().flat_map(|scene| [(scene, false), (scene, true)]);
    for ((processor, combine), only_sampled) in scenes {
        let set = |builder: Builder| builder.only_sampled_traces(only_sampled);
        let scene = Scene::with(processor, set, Sampler::AlwaysOff, combine);
        scene.run(requests);
        assert!(scene.spans().is_empty());
        let kept = scene.kept.lock().unwrap().clone();
        if only_sampled {
            assert!(kept.is_empty(), "{kept:?}");
            assert_eq!(scene.stats().spans.dropped_unsampled_trace, 2);
            continue;
        }
        assert_eq!(kept[0].spans[0].trace_is_sampled(), Some(false));
        if HAS_STACKS {
            let profile = &scene.profiles()[0];
            let sampled = profile.attributes.iter().find(|a| a.key == "profile.trace_sampled");
            assert_eq!(sampled.unwrap().value, tracing_profiling::profile::Value::Bool(false));
        }
    }
}

#[test]
fn attributes_can_be_renamed_and_removed() {
    let names = |builder: Builder| {
        builder.span_attributes(|name| match name {
            "profile.reason" => Some("why".to_owned()),
            "profile.idle_ns" => Some(name.to_owned()),
            _ => None,
        })
    };
    let scene = Scene::with(Processor::Plain, names, Sampler::AlwaysOn, |profiling, tracer| {
        Dispatch::new(tracing_subscriber::registry().with(profiling).with(otel(tracer)))
    });
    scene.run(requests);
    let spans = scene.spans();
    let slow = &spans["slow"];
    assert_eq!(text(slow, "why").as_deref(), Some("latency"));
    assert!(attribute(slow, "profile.idle_ns").is_some());
    for name in ["profile.id", "profile.reason", "profile.on_cpu_ns", "pyroscope.profile.id"] {
        assert_eq!(attribute(slow, name), None, "{name}");
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
        |builder| builder.memory_bytes(1).rate(1_000),
    ];
    for set in sets {
        for processor in [Processor::Plain, Processor::Wrapping] {
            let scene = Scene::with(processor, set, Sampler::AlwaysOn, |profiling, tracer| {
                let both = profiling.with_opentelemetry(otel(tracer));
                Dispatch::new(tracing_subscriber::registry().with(both))
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
}

#[test]
fn over_the_rate_limit_there_is_no_id() {
    let one = |builder: Builder| builder.profiles_per_minute(1);
    let scene = Scene::with(Processor::Plain, one, Sampler::AlwaysOn, |profiling, tracer| {
        Dispatch::new(tracing_subscriber::registry().with(profiling).with(otel(tracer)))
    });
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
    // One has a profile, one is reported without, and one shows that no tokens are left; the others have no attributes.
    let with_reason = spans.iter().filter(|span| attribute(span, "profile.reason").is_some());
    assert_eq!(with_reason.count(), 2 + usize::from(HAS_STACKS));
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

#[test]
fn only_the_wrong_order_is_logged_once() {
    type Combine = fn(ProfilingLayer, SdkTracer, Warnings) -> Dispatch;
    let wrong: [Combine; 3] = [
        |profiling, tracer, warnings| {
            Dispatch::new(
                tracing_subscriber::registry().with(warnings).with(otel(tracer)).with(profiling),
            )
        },
        |profiling, tracer, warnings| {
            let both = otel(tracer).and_then(profiling);
            Dispatch::new(tracing_subscriber::registry().with(warnings).with(both))
        },
        |profiling, tracer, warnings| {
            let otel = otel(tracer).with_filter(LevelFilter::INFO).boxed();
            Dispatch::new(tracing_subscriber::registry().with(warnings).with(otel).with(profiling))
        },
    ];
    let right: [Combine; 3] = [
        |profiling, tracer, warnings| {
            Dispatch::new(
                tracing_subscriber::registry().with(warnings).with(profiling).with(otel(tracer)),
            )
        },
        // Without OpenTelemetry.
        |profiling, _, warnings| {
            Dispatch::new(tracing_subscriber::registry().with(warnings).with(profiling))
        },
        // With a filter that hides a kept span from OpenTelemetry.
        |profiling, tracer, warnings| {
            let otel =
                otel(tracer).with_filter(FilterFn::new(|metadata| metadata.name() != "slow"));
            Dispatch::new(tracing_subscriber::registry().with(warnings).with(profiling).with(otel))
        },
    ];
    let warnings_of = |processor, combine: Combine| {
        let warnings = Warnings::default();
        let scene =
            Scene::new(processor, |profiling, tracer| combine(profiling, tracer, warnings.clone()));
        for _ in 0..3 {
            scene.run(requests);
        }
        let warnings = warnings.0.lock().unwrap();
        warnings.iter().filter(|warning| warning.contains(".with(profiling)")).count()
    };
    for (number, combine) in wrong.into_iter().enumerate() {
        assert_eq!(warnings_of(Processor::Plain, combine), 1, "{number}");
        assert_eq!(warnings_of(Processor::Wrapping, combine), 0, "{number}, with a processor");
    }
    for (number, combine) in right.into_iter().enumerate() {
        assert_eq!(warnings_of(Processor::Plain, combine), 0, "{number}");
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
    for processor in [Processor::Plain, Processor::Wrapping] {
        // Spans over the limits of their rule get no attributes.
        let all = |builder: Builder| {
            builder.rules("0ms".parse().unwrap()).rate(1_000).profiles_per_minute(u32::MAX)
        };
        let scene = Scene::with(processor, all, Sampler::AlwaysOn, |profiling, tracer| {
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
}

/// Combinations in which the OpenTelemetry layer cannot be reached or comes first: attributes need a processor.
const NEED_A_PROCESSOR: [fn(ProfilingLayer, SdkTracer) -> Dispatch; 2] = [
    |profiling, tracer| {
        Dispatch::new(tracing_subscriber::registry().with(otel(tracer)).with(profiling))
    },
    |profiling, tracer| {
        let (otel, _) = reload::Layer::new(otel(tracer));
        Dispatch::new(tracing_subscriber::registry().with(profiling).with(otel))
    },
];

/// The reasons on the exported spans, in the order in which the spans ended.
fn reasons(spans: &InMemorySpanExporter) -> Vec<(String, Option<String>)> {
    let spans = spans.get_finished_spans().unwrap();
    spans.iter().map(|span| (span.name.to_string(), text(span, "profile.reason"))).collect()
}

fn reason(name: &str, reason: &str) -> (String, Option<String>) {
    (name.to_owned(), (!reason.is_empty()).then(|| reason.to_owned()))
}

#[test]
fn manual_and_hidden_spans_are_paired_with_no_other() {
    let right: fn(ProfilingLayer, SdkTracer) -> Dispatch = |profiling, tracer| {
        Dispatch::new(tracing_subscriber::registry().with(profiling).with(otel(tracer)))
    };
    let hiding: fn(ProfilingLayer, SdkTracer) -> Dispatch = |profiling, tracer| {
        let quiet = FilterFn::new(|metadata| !metadata.target().starts_with("quiet"));
        Dispatch::new(
            tracing_subscriber::registry().with(profiling).with(otel(tracer).with_filter(quiet)),
        )
    };
    for combine in NEED_A_PROCESSOR.into_iter().chain([right, hiding]) {
        let hides = std::ptr::fn_addr_eq(combine, hiding);
        let scene = Scene::new(Processor::Wrapping, combine);
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
fn a_processor_forwards_after_the_layer_has_ended() {
    for by_handle in [false, true] {
        let Scene { handle, dispatch, spans, provider, .. } =
            Scene::new(Processor::Wrapping, NEED_A_PROCESSOR[0]);
        if by_handle {
            assert!(handle.shutdown(PLENTY));
        } else {
            drop(dispatch);
        }
        drop(provider.tracer("by hand").start("by hand"));
        assert_eq!(reasons(&spans), [reason("by hand", "")]);
    }
}

#[test]
fn a_span_that_is_idle_after_its_last_exit_has_its_attributes() {
    for combine in NEED_A_PROCESSOR {
        let scene = Scene::new(Processor::Wrapping, combine);
        scene.run(|| {
            let slow = info_span!("slow");
            slow.in_scope(|| ());
            std::thread::sleep(40 * MS);
        });
        assert_eq!(reasons(&scene.spans), [reason("slow", "latency")]);
    }
}

#[test]
fn below_a_remote_parent_spans_are_paired() {
    let parent = SpanContext::new(
        TraceId::from(7_u128),
        SpanId::from(9_u64),
        TraceFlags::SAMPLED,
        true,
        TraceState::NONE,
    );
    for combine in NEED_A_PROCESSOR {
        let scene = Scene::new(Processor::Wrapping, combine);
        scene.run(|| {
            let _attached = Context::new().with_remote_span_context(parent.clone()).attach();
            info_span!("failing").in_scope(|| tracing::error!("failed"));
        });
        let failing = &scene.spans()["failing"];
        assert_eq!(failing.parent_span_id, parent.span_id());
        assert_eq!(text(failing, "profile.reason").as_deref(), Some("error"));
    }
}

/// An OpenTelemetry span that is active around a span is the current one at its enter or exit, as the span's own may
/// be.
#[test]
fn a_manually_activated_span_is_paired_with_no_other() {
    for (number, combine) in NEED_A_PROCESSOR.into_iter().enumerate() {
        let scene = Scene::new(Processor::Wrapping, combine);
        let tracer = scene.provider.tracer("by hand");
        let failing = || info_span!("failing").in_scope(|| tracing::error!("failed"));
        scene.run(|| {
            tracer.in_span("by hand", |_| failing());
            failing();
            tracer.in_span("by hand", |_| failing());
        });
        // Where the layer cannot be reached, the first span does not yet show the order of the layers.
        let first = if number == 0 { "error" } else { "" };
        let expected = [
            reason("failing", first),
            reason("by hand", ""),
            reason("failing", "error"),
            reason("failing", "error"),
            reason("by hand", ""),
        ];
        assert_eq!(reasons(&scene.spans), expected);
    }
}

#[test]
fn a_span_that_is_never_entered_is_exported_without_attributes_and_one_warning() {
    for combine in
        [|tracer| otel(tracer).boxed(), |tracer| reload::Layer::new(otel(tracer)).0.boxed()]
    {
        let warnings = Warnings::default();
        let scene = Scene::new(Processor::Wrapping, |profiling, tracer| {
            let registry = tracing_subscriber::registry().with(combine(tracer));
            Dispatch::new(registry.with(profiling).with(warnings.clone()))
        });
        scene.run(|| info_span!("failing").in_scope(|| tracing::error!("failed")));
        for _ in 0..2 {
            scene.run(|| {
                let _never_entered = info_span!("waiting");
                std::thread::sleep(40 * MS);
            });
        }
        let waiting = reason("waiting", "");
        assert_eq!(reasons(&scene.spans), [reason("failing", "error"), waiting.clone(), waiting]);
        assert_eq!(scene.stats().spans.kept, 3);
        let warnings = warnings.0.lock().unwrap();
        let found = warnings.iter().filter(|warning| warning.contains("gets no attributes"));
        assert_eq!(found.count(), 1, "{warnings:?}");
    }
}

/// Ends the OpenTelemetry span between two enters.
#[test]
fn a_span_that_the_program_ends_while_it_is_idle_is_kept_once() {
    for (before, after, reason_of_span) in [(0, 40, ""), (40, 0, "latency"), (40, 40, "latency")] {
        for combine in NEED_A_PROCESSOR {
            let scene = Scene::new(Processor::Wrapping, combine);
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
            // The first one ends before the order of the layers is known.
            let reasons = reasons(&scene.spans);
            assert_eq!(reasons.last(), Some(&reason("slow", reason_of_span)), "{before} {after}");
        }
    }
}

#[test]
fn a_span_that_the_program_ends_early_is_profiled_until_its_close() {
    for combine in NEED_A_PROCESSOR {
        let scene = Scene::new(Processor::Wrapping, combine);
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
}

#[test]
fn both_of_two_processors_get_the_attributes() {
    for combine in NEED_A_PROCESSOR {
        let layer = ProfilingLayer::builder()
            .rules("error".parse().unwrap())
            .exporter(Memory::new())
            .build()
            .unwrap();
        let handle = layer.handle();
        let exporters = [InMemorySpanExporter::default(), InMemorySpanExporter::default()];
        let mut provider = SdkTracerProvider::builder();
        for exporter in &exporters {
            let exporting = SimpleSpanProcessor::new(exporter.clone());
            provider = provider.with_span_processor(handle.span_processor(exporting));
        }
        let provider = provider.build();
        let dispatch = combine(layer, provider.tracer("test"));
        tracing::dispatcher::with_default(&dispatch, || {
            for _ in 0..5 {
                info_span!("failing").in_scope(|| tracing::error!("failed"));
            }
        });
        provider.force_flush().unwrap();
        for exporter in &exporters {
            assert_eq!(reasons(exporter), vec![reason("failing", "error"); 5]);
        }
    }
}

/// Panics on the layer's threads.
#[derive(Debug)]
struct OnlyProgramThreads;

impl opentelemetry_sdk::trace::SpanProcessor for OnlyProgramThreads {
    fn on_start(&self, _: &mut opentelemetry_sdk::trace::Span, _: &Context) {}

    fn on_end(&self, _: SpanData) {
        let thread = std::thread::current();
        assert!(
            !thread.name().unwrap_or_default().starts_with("profiling-"),
            "a thread of the layer"
        );
    }

    fn force_flush(&self) -> opentelemetry_sdk::error::OTelSdkResult {
        Ok(())
    }

    fn shutdown_with_timeout(&self, _: Duration) -> opentelemetry_sdk::error::OTelSdkResult {
        Ok(())
    }
}

#[test]
fn spans_are_forwarded_on_the_thread_that_ends_them() {
    let layer = ProfilingLayer::builder()
        .rules("error".parse().unwrap())
        .exporter(Memory::new())
        .build()
        .unwrap();
    let handle = layer.handle();
    let processor = handle.span_processor(OnlyProgramThreads);
    let provider = SdkTracerProvider::builder().with_span_processor(processor).build();
    let dispatch = NEED_A_PROCESSOR[0](layer, provider.tracer("test"));
    drop(provider.tracer("by hand").start("by hand"));
    tracing::dispatcher::with_default(&dispatch, || {
        info_span!("failing").in_scope(|| tracing::error!("failed"));
    });
    assert!(handle.flush(PLENTY));
    assert_eq!(handle.stats().spans.kept, 1);
}

/// Must not be entered twice by one thread, like the simple processor, which holds a lock. It makes a `tracing` span in
/// the meantime.
#[derive(Debug, Default, Clone)]
struct Locks(Arc<Mutex<Vec<String>>>);

impl opentelemetry_sdk::trace::SpanProcessor for Locks {
    fn on_start(&self, _: &mut opentelemetry_sdk::trace::Span, _: &Context) {}

    fn on_end(&self, span: SpanData) {
        thread_local! {
            static IS_INSIDE: Cell<bool> = const { Cell::new(false) };
        }
        assert!(!IS_INSIDE.replace(true), "it would deadlock");
        info_span!("exports").in_scope(|| tracing::error!("failed"));
        IS_INSIDE.set(false);
        self.0.lock().unwrap().push(span.name.into_owned());
    }

    fn force_flush(&self) -> opentelemetry_sdk::error::OTelSdkResult {
        Ok(())
    }

    fn shutdown_with_timeout(&self, _: Duration) -> opentelemetry_sdk::error::OTelSdkResult {
        Ok(())
    }
}

#[test]
fn no_span_is_forwarded_inside_another() {
    let layer = ProfilingLayer::builder().rules("error".parse().unwrap()).exporter(Memory::new());
    let layer = layer.build().unwrap();
    let handle = layer.handle();
    let locks = Locks::default();
    let processor = handle.span_processor(locks.clone());
    let provider = SdkTracerProvider::builder().with_span_processor(processor).build();
    let tracer = provider.tracer("by hand");
    let dispatch = Dispatch::new(tracing_subscriber::registry().with(layer));
    let names = ["first", "second", "third", "fourth"];
    tracing::dispatcher::with_default(&dispatch, || {
        for name in names {
            drop(tracer.start(name));
        }
    });
    // Without a flush.
    assert_eq!(*locks.0.lock().unwrap(), names);
}

#[test]
fn flushes_of_the_provider_lose_no_attributes() {
    use std::sync::atomic::{AtomicBool, Ordering};
    for combine in NEED_A_PROCESSOR {
        // Spans over the limits of their rule get no attributes.
        let all =
            |builder: Builder| builder.rules("0ms".parse().unwrap()).profiles_per_minute(u32::MAX);
        let scene = Scene::with(Processor::Wrapping, all, Sampler::AlwaysOn, combine);
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
}

#[test]
fn detecting_the_order_does_not_start_spans() {
    let parent = SpanContext::new(
        TraceId::from(7_u128),
        SpanId::from(9_u64),
        TraceFlags::SAMPLED,
        true,
        TraceState::NONE,
    );
    let remote = || Context::new().with_remote_span_context(parent.clone());
    let scene = Scene::new(Processor::Plain, |profiling, tracer| {
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

/// A layer with the name that the one of another release has.
mod other_release {
    pub(crate) mod tracing_opentelemetry {
        pub(crate) mod layer {
            pub(crate) struct OpenTelemetryLayer<S>(pub(crate) std::marker::PhantomData<fn(S)>);

            impl<S: tracing::Subscriber, T: 'static> tracing_subscriber::Layer<S> for OpenTelemetryLayer<T> {}
        }
    }
}

#[test]
fn a_layer_of_another_release_gets_one_warning_that_names_the_remedy() {
    use other_release::tracing_opentelemetry::layer::OpenTelemetryLayer as Other;

    fn warnings(
        combine: impl FnOnce(ProfilingLayer, support::Log) -> (Dispatch, Handle),
    ) -> Vec<String> {
        let log = support::Log::default();
        let layer = ProfilingLayer::builder()
            .rules("always".parse().unwrap())
            .exporter(Memory::new())
            .build()
            .unwrap();
        let (dispatch, handle) = combine(layer, log.clone());
        tracing::dispatcher::with_default(&dispatch, || {
            for _ in 0..20 {
                info_span!("kept").in_scope(|| {});
            }
        });
        assert!(handle.flush(PLENTY) && handle.shutdown(PLENTY));
        let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
        text.lines().filter(|line| line.contains("not_linked")).map(str::to_owned).collect()
    }

    let fmt = |log: support::Log| {
        tracing_subscriber::fmt::layer().with_ansi(false).with_writer(move || log.clone())
    };
    let other = warnings(|layer, log| {
        let handle = layer.handle();
        let both = layer.with_opentelemetry(Other::<()>(std::marker::PhantomData));
        (Dispatch::new(tracing_subscriber::registry().with(fmt(log)).with(both)), handle)
    });
    assert_eq!(other.len(), 1, "{other:?}");
    assert!(other[0].contains("cargo tree -i tracing-opentelemetry"), "{other:?}");
    assert!(!other[0].contains("comes after"), "{other:?}");
    let provider = SdkTracerProvider::default();
    let same = warnings(|layer, log| {
        let handle = layer.handle();
        let tracer = provider.tracer("test");
        let both = layer.with_opentelemetry(tracing_opentelemetry::layer().with_tracer(tracer));
        (Dispatch::new(tracing_subscriber::registry().with(fmt(log)).with(both)), handle)
    });
    assert_eq!(same, Vec::<String>::new());
    let none = warnings(|layer, log| {
        let handle = layer.handle();
        (Dispatch::new(tracing_subscriber::registry().with(fmt(log)).with(layer)), handle)
    });
    assert_eq!(none, Vec::<String>::new());
}
