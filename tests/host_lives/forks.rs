//! A program that forks: its children have the layer of their parent, and no threads of it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use tracing::{Dispatch, Event, Subscriber};
use tracing_profiling::export::Memory;
use tracing_profiling::{FlushError, ProfilingLayer, Source};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::{Context, SubscriberExt as _};

use super::{Host, MS, alone, in_child};
use crate::support::{PLENTY, burn};

/// The parent continues, and so does its profiling.
#[test]
fn a_child_with_a_live_parent_logs_nothing() {
    in_child(module_path!(), "a_child_with_a_live_parent_logs_nothing", &[], || {
        let host = Host::new(Source::Auto, Memory::new());
        host.span(|| _ = burn(5 * MS));
        alone(|| {
            alone(|| {
                let logged = || host.lines_with("").len();
                let before = logged();
                (0..1_000).for_each(|_| host.span(|| {}));
                assert_eq!(logged(), before);
                assert_eq!(host.handle.flush(MS), Err(FlushError::Forked));
                assert_eq!(host.handle.shutdown(MS), Err(FlushError::Forked));
            });
        });
        host.span(|| _ = burn(5 * MS));
        host.handle.flush(PLENTY).unwrap();
        assert_eq!(host.handle.stats().spans.kept, 2);
    });
}

/// Other threads start and end spans, so that locks of `KeptTraces` may be held in the child forever.
#[cfg(feature = "opentelemetry-sdk")]
#[test]
fn a_child_of_a_process_that_holds_traces_does_not_hang_and_those_stay_whole() {
    use std::collections::BTreeSet;

    use opentelemetry::trace::{Tracer as _, TracerProvider as _};
    use opentelemetry_sdk::trace::{
        BatchSpanProcessor, InMemorySpanExporter, Sampler, SdkTracerProvider,
    };
    use tracing::dispatcher::with_default;
    use tracing::info_span;
    use tracing_profiling::KeptTraces;

    const FORKS: usize = 50;
    let test = "a_child_of_a_process_that_holds_traces_does_not_hang_and_those_stay_whole";
    in_child(module_path!(), test, &[], || {
        let exporter = InMemorySpanExporter::default();
        let batches = BatchSpanProcessor::builder(exporter.clone()).build();
        let provider = SdkTracerProvider::builder()
            .with_sampler(Sampler::AlwaysOn)
            .with_span_processor(KeptTraces::new(batches).one_in(0))
            .build();
        let layer = ProfilingLayer::builder()
            .source(Source::None)
            .rules("off,[kept]=0ms".parse().unwrap())
            .exporter(Memory::new())
            .profiles_per_minute(1_000_000);
        let layer = layer.build().unwrap();
        let handle = layer.handle();
        let otel = tracing_opentelemetry::layer().with_tracer(provider.tracer("test"));
        let dispatch = Dispatch::new(tracing_subscriber::registry().with(layer).with(otel));
        let trace = |kept: bool| {
            let _root = info_span!("root").entered();
            (0..9).for_each(|_| info_span!("step").in_scope(|| {}));
            if kept {
                info_span!("kept").in_scope(|| {});
            }
        };
        let tracer = provider.tracer("test");
        let open: Vec<_> = (0..20_000).map(|_| tracer.start("open")).collect();
        let is_over = AtomicBool::new(false);
        let is_on = || !is_over.load(Ordering::SeqCst);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                with_default(&dispatch, || {
                    while is_on() {
                        (0..99).for_each(|_| trace(false));
                        trace(true);
                    }
                });
            });
            // Nearly always under the lock of some of the many traces.
            scope.spawn(|| {
                while is_on() {
                    handle.stats();
                }
            });
            for _ in 0..FORKS {
                with_default(&dispatch, || {
                    let _root = info_span!("forks").entered();
                    info_span!("step").in_scope(|| {});
                    alone(|| {
                        info_span!("kept").in_scope(|| {});
                        (0..100).for_each(|number| trace(number % 2 == 0));
                    });
                    info_span!("kept").in_scope(|| {});
                });
            }
            is_over.store(true, Ordering::SeqCst);
        });
        drop(open);
        provider.force_flush().unwrap();
        let mut traces = std::collections::BTreeMap::<_, Vec<_>>::new();
        for span in exporter.get_finished_spans().unwrap() {
            traces.entry(span.span_context.trace_id().to_bytes()).or_default().push(span);
        }
        for spans in traces.values() {
            let ids: BTreeSet<_> =
                spans.iter().map(|span| span.span_context.span_id().to_bytes()).collect();
            let is_there = |id: opentelemetry::SpanId| ids.contains(&id.to_bytes());
            let is_root = |id| id == opentelemetry::SpanId::INVALID;
            assert!(
                spans
                    .iter()
                    .all(|span| { is_root(span.parent_span_id) || is_there(span.parent_span_id) })
            );
            assert!([3, 11].contains(&ids.len()) && ids.len() == spans.len(), "{spans:?}");
        }
        let forks = traces.values().filter(|spans| spans.len() == 3).count();
        assert_eq!(forks, FORKS);
        assert!(traces.len() > FORKS);
    });
}

/// The layer's threads log, but the logger's lock belongs to the program: it must be free in the child.
#[test]
fn a_child_can_log_whenever_it_was_forked() {
    /// A logger with a lock, as any logger that writes to one destination has.
    #[derive(Clone, Default)]
    struct Log(Arc<(Mutex<()>, AtomicBool)>);

    impl<S: Subscriber> Layer<S> for Log {
        fn on_event(&self, _: &Event<'_>, _: Context<'_, S>) {
            let (lock, is_locked) = &*self.0;
            let _locked = lock.lock().unwrap();
            is_locked.store(true, Ordering::SeqCst);
            std::thread::sleep(50 * MS);
        }
    }

    in_child(module_path!(), "a_child_can_log_whenever_it_was_forked", &[], || {
        for _ in 0..5 {
            let log = Log::default();
            let layer = ProfilingLayer::builder()
                .source(Source::None)
                .exporter(Memory::new())
                .build()
                .unwrap();
            let dispatch =
                Dispatch::new(tracing_subscriber::registry().with(log.clone()).with(layer));
            // The layer logs which features are available.
            let start = Instant::now();
            while !log.0.1.load(Ordering::SeqCst) {
                assert!(start.elapsed() < PLENTY, "nothing is logged");
                std::thread::sleep(MS);
            }
            alone(|| {
                tracing::dispatcher::with_default(&dispatch, || tracing::info!("in the child"))
            });
        }
    });
}
