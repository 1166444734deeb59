//! Builds the engine, the collector and the publisher. Each is given what it needs of the others here.

use std::sync::Arc;
use std::time::Duration;

use crossbeam::channel;
use parking_lot::Mutex;

use super::command::Commands;
use super::copied::CopiedSamples;
use super::engine::{Engine, spawn};
use super::gate::Gate;
use super::limits::Limits;
use super::run::Collector;
use super::running_source::RunningSource;
use crate::error::Error;
use crate::export::AnyExporter;
use crate::keep::{Callsites, OnKept, ProfileAdmission};
use crate::log::{LogEvent, LogKind};
use crate::otel::{OtelSettings, UnreachedSpans};
use crate::publish::{PublishState, PublisherParts, Reporter};
use crate::redact::Redaction;
use crate::sampler::{Sampler, SourceSettings};
use crate::span::Spans;
use crate::stats::Counters;
use crate::symbols::SymbolSettings;
use crate::sys::{Owning, Poller};

/// Everything that a layer is made of.
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
    pub(crate) source_settings: SourceSettings,
    pub(crate) exporter: AnyExporter,
    /// An error of the exporter, if it has one.
    pub(crate) problem: Option<String>,
    /// What is wrong with the settings.
    pub(crate) warnings: Vec<LogEvent>,
    pub(crate) on_kept: Option<OnKept>,
    pub(crate) otel: OtelSettings,
    pub(crate) redaction: Redaction,
    pub(crate) symbols: SymbolSettings,
}

/// How long the collector's thread may take to begin on a busy machine.
const LONGEST_START: Duration = Duration::from_secs(1);

/// Builds all of it and starts the threads.
///
/// # Errors
///
/// If the system refuses to create a thread.
pub(crate) fn start(parts: Parts) -> Result<Arc<Engine>, Error> {
    let (engine, collector, publisher) = assemble(parts);
    publisher.start().map_err(Error::thread)?;
    let (begins, has_begun) = channel::bounded::<()>(0);
    spawn("profiling-drain", move || collector.run(begins))?;
    // The layer's files are open when this returns.
    _ = has_begun.recv_timeout(LONGEST_START);
    Ok(engine)
}

/// The engine, and the state of the threads before they start.
pub(super) fn assemble(parts: Parts) -> (Arc<Engine>, Collector, PublisherParts) {
    let (commands, received) = channel::unbounded();
    let (jobs, to_do) = channel::unbounded();
    let gate = parts.gate;
    let problem = parts.problem.clone();
    let (mut source_line, is_warning) = parts.source.describe();
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
    let failure = parts.problem.map(|problem| LogEvent {
        error: Some(problem.clone()),
        ..LogEvent::warning(LogKind::ExportFails, problem)
    });
    let (spans, waker) = (Arc::new(parts.spans), parts.poller.waker());
    let copied = CopiedSamples::new(&spans, &parts.counters, &waker, parts.limits);
    let (redaction, admission) = (Arc::new(parts.redaction), Arc::new(parts.admission));
    let has_callback = parts.on_kept.is_some();
    let reporter = Reporter::new(Arc::clone(&parts.counters), has_callback);
    let shared = PublishState {
        counters: Arc::clone(&parts.counters),
        health: Arc::clone(&admission.health),
        reporter: Arc::new(reporter),
        redaction: Arc::clone(&redaction),
    };
    let engine = Arc::new(Engine {
        spans,
        copied,
        callsites: parts.callsites,
        admission,
        counters: parts.counters,
        waker,
        source: RunningSource {
            settings: parts.source_settings,
            line: source_line,
            sampler: parts.source.clone(),
        },
        otel: parts.otel,
        redaction,
        publish: shared.clone(),
        warnings: Mutex::new(parts.warnings.into_iter().chain(failure).collect()),
        unreached: parts.unreached,
        commands: Commands::new(commands),
        gate,
    });
    let publisher = PublisherParts {
        shared,
        jobs: to_do,
        exporter: Owning::new(parts.exporter, parts.poller.files()),
        files: Arc::clone(parts.poller.files()),
        on_kept: parts.on_kept,
        symbols: parts.symbols,
        problem,
    };
    let collector = Collector::new(
        Arc::clone(&engine),
        parts.source,
        parts.poller,
        received,
        jobs,
        parts.limits,
    );
    (engine, collector, publisher)
}
