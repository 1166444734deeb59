//! Builds the engine, the collector and the publisher. Each is given what it needs of the others here.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crossbeam::channel;
use parking_lot::Mutex;

use crate::allocations::{AllocationSettings, LayerAllocations};
use crate::awaits::LayerAwaits;
use crate::collect::{Collector, ContinuousSettings, Logged, ProcessProfiler, ProfileOutput};
use crate::engine::{Commands, Engine, Gate, RunningSource};
use crate::error::Error;
use crate::intake::{Intake, IntakeSettings};
use crate::keep::{Callsites, ProfileAdmission, SpanNames, observe_panics};
use crate::log::{LogEvent, LogKind};
use crate::otel::UnreachedSpans;
use crate::publish::{PublishSettings, PublishState, PublisherParts, Reporter, ShutdownResult};
use crate::references::References;
use crate::report;
use crate::sampler::Sampler;
use crate::sinks::{Heap, Sinks, Store};
use crate::span::{Spans, spawn_ignored};
use crate::stats::Counters;
use crate::sys::{Poller, SuspendCounting};
use crate::threads::{ThreadSettings, Threads};
use crate::watch::Watchdog;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) memory: usize,
    pub(crate) samples_per_profile: usize,
    pub(crate) pending_spans: usize,
    pub(crate) threads: ThreadSettings,
    pub(crate) intake: IntakeSettings,
    pub(crate) allocations: AllocationSettings,
}

pub(crate) struct Parts {
    pub(crate) spans: Spans,
    pub(crate) callsites: Callsites,
    pub(crate) admission: ProfileAdmission,
    pub(crate) counters: Arc<Counters>,
    pub(crate) source: Sampler,
    pub(crate) poller: Poller,
    pub(crate) limits: Limits,
    /// Belongs to this engine only.
    pub(crate) gate: &'static Gate,
    pub(crate) unreached: Arc<UnreachedSpans>,
    pub(crate) continuous: ContinuousSettings,
    pub(crate) publishing: PublishSettings,
    pub(crate) warnings: Vec<LogEvent>,
    pub(crate) names: SpanNames,
    pub(crate) references: References,
}

/// How long the collector's thread may take to begin on a busy machine.
const LONGEST_START: Duration = Duration::from_secs(1);

/// Builds all of it and starts the threads.
///
/// # Errors
///
/// If the system refuses to create a thread.
pub(crate) fn start(parts: Parts) -> Result<Arc<Engine>, Error> {
    observe_panics();
    let (engine, collector, publisher) = build(parts);
    publisher.start().map_err(Error::thread)?;
    let (begins, has_begun) = channel::bounded::<()>(0);
    spawn_ignored("profiling-drain", move || collector.run(begins)).map_err(Error::thread)?;
    // The layer's files are open when this returns.
    let _uncounted = SuspendCounting::begin();
    _ = has_begun.recv_timeout(LONGEST_START);
    Ok(engine)
}

/// The engine, and the state of the threads before they start.
pub(crate) fn build(parts: Parts) -> (Arc<Engine>, Collector, PublisherParts) {
    let (commands, received) = channel::unbounded();
    let (jobs, to_do) = channel::unbounded();
    let gate = parts.gate;
    let publishing = parts.publishing;
    let (mut source_line, is_warning) = report::source::source(&parts.source);
    if cfg!(not(feature = "symbols")) {
        source_line += "; addresses have no names because the feature `symbols` is off";
    }
    let source_line = LogEvent {
        value: Some(parts.source.name().to_owned()),
        ..match is_warning {
            true => LogEvent::warning(LogKind::Source, source_line),
            false => LogEvent::info(LogKind::Source, source_line),
        }
    };
    let failure = publishing.problem.clone();
    let failure = failure.map(|it| LogEvent::failure(LogKind::ExportFails, it.clone(), it));
    let (spans, waker) = (Arc::new(parts.spans), parts.poller.waker());
    let Limits { memory, samples_per_profile, pending_spans, threads, intake, allocations } =
        parts.limits;
    let sampling = (Arc::clone(&spans), Arc::clone(&parts.counters), parts.source.clone());
    let shared = || (Arc::clone(&spans), Arc::clone(&parts.counters), waker.clone());
    let awaits = LayerAwaits::new(shared(), memory / 8);
    let allocations = LayerAllocations::new(shared(), allocations);
    let (names, admission) = (Arc::new(parts.names), Arc::new(parts.admission));
    let has_callback = publishing.on_kept.is_some();
    let dispatch = Arc::clone(&names.dispatch);
    let reporter = Arc::new(Reporter::new(Arc::clone(&parts.counters), dispatch, has_callback));
    let (ending, delivers) = ShutdownResult::new(Arc::downgrade(&reporter));
    let to_publish = PublishState {
        counters: Arc::clone(&parts.counters),
        health: Arc::clone(&admission.health),
        ending: Arc::new(ending),
        reporter,
        redaction: Arc::clone(&names.redaction),
        references: Arc::new(parts.references),
    };
    let engine = Arc::new(Engine {
        spans,
        awaits,
        allocations,
        callsites: parts.callsites,
        admission,
        counters: parts.counters,
        waker,
        source: RunningSource { line: source_line, sampler: parts.source },
        names: Arc::clone(&names),
        publish: to_publish.clone(),
        warnings: Mutex::new(parts.warnings.into_iter().chain(failure).collect()),
        unreached: parts.unreached,
        commands: Commands::new(commands),
        gate,
    });
    let continuous = parts.continuous;
    engine.commands.process.continuous_rate.store(continuous.rate, Ordering::Relaxed);
    let files = Arc::clone(parts.poller.files());
    let (shared, settings) = (to_publish, publishing);
    let publisher = PublisherParts { shared, jobs: to_do, files, settings, delivers };
    let mut store = Store::new(memory / 4, samples_per_profile, pending_spans);
    store.names = names;
    let sinks = Sinks::new(store, Heap::default());
    let collector = Collector {
        engine: Arc::clone(&engine),
        poller: parts.poller,
        commands: received,
        intake: Intake::new(sampling, sinks, intake),
        threads: Threads::new(threads),
        watchdog: Watchdog::new(),
        output: ProfileOutput::new(jobs, memory / 2, samples_per_profile),
        logged: Logged::new(threads.timing.first_look),
        process: ProcessProfiler::new(continuous.interval),
    };
    (engine, collector, publisher)
}
