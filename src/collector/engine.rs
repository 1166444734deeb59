//! What the hooks, the handle and the collector share.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use crossbeam::channel::{self, Sender};
use parking_lot::{Mutex, RwLock};
use tracing::Dispatch;
use tracing::dispatcher::WeakDispatch;
use tracing::field::Visit;

use super::command::{Command, FlushRequest};
use super::gate::Gate;
use super::run::Collector;
use super::sampled::Pace;
use super::shed::ShedLimits;
use super::worker::{Worker, WorkerParts};
use crate::error::Error;
use crate::export::Exporter;
use crate::keep::{Callsite, Callsites, Keeper, KeptSpan, NoProfile, OnKept, Reasons, Rules};
use crate::otel::{AttributeNames, OtelSpan, Pairing};
use crate::profile::ProfileId;
use crate::redact::Redaction;
use crate::sampler::{Sampler, SourceSettings};
use crate::span::{
    Closing, Plan, RegistryId, SAMPLED_ITSELF, Spans, TraceIds, Verdict, forget_this_thread,
    is_ignored, spawn_ignored,
};
use crate::stats::{Counters, Stats};
use crate::symbols::SymbolSettings;
use crate::sys::{self, Owning, Poller, Waker};

/// Finds the OpenTelemetry span of a span that closes.
pub(crate) type FindOtel<'a> = &'a mut dyn FnMut() -> Option<OtelSpan>;

/// How much may be held, and how much may be made of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) memory_bytes: usize,
    pub(crate) samples_per_profile: usize,
    pub(crate) pending_spans: usize,
    /// That profiles may take on their way from there to where they belong.
    pub(crate) export_bytes: usize,
    /// Of one core, that reading samples may take.
    pub(crate) cpu_percent: Option<u32>,
    pub(crate) frames_per_stack: usize,
    /// That are copied of a stack.
    pub(crate) stack_bytes: usize,
    pub(crate) shed: ShedLimits,
    pub(crate) pace: Pace,
}

/// What an engine is made of.
pub(crate) struct Parts {
    pub(crate) spans: Spans,
    pub(crate) callsites: Callsites,
    pub(crate) keeper: Keeper,
    pub(crate) counters: Arc<Counters>,
    pub(crate) source: Sampler,
    pub(crate) poller: Poller,
    pub(crate) limits: Limits,
    /// The engine's own, which no other has.
    pub(crate) gate: &'static Gate,
    pub(crate) pairing: Arc<Pairing>,
    pub(crate) source_settings: SourceSettings,
    pub(crate) exporter: Box<dyn Exporter>,
    /// What is wrong with it, if something is.
    pub(crate) problem: Option<String>,
    pub(crate) on_kept: Option<OnKept>,
    pub(crate) only_sampled_traces: bool,
    pub(crate) attributes: AttributeNames,
    pub(crate) redaction: Redaction,
    pub(crate) symbols: SymbolSettings,
}

/// A layer's spans, rules and threads.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) spans: Spans,
    pub(crate) callsites: Callsites,
    pub(super) keeper: Keeper,
    pub(super) counters: Arc<Counters>,
    pub(super) waker: Waker,
    /// Why a span without samples has none.
    without_samples: NoProfile,
    only_sampled_traces: bool,
    pub(crate) source_settings: SourceSettings,
    /// What the source is and cannot see, and whether that is less than was asked for.
    pub(crate) source_line: (String, bool),
    pub(super) attributes: AttributeNames,
    pub(super) redaction: Redaction,
    pub(crate) pairing: Arc<Pairing>,
    /// What was wrong with the exporter from the beginning, until it is said.
    problem: Mutex<Option<String>>,
    pub(super) commands: Sender<Command>,
    pub(crate) gate: &'static Gate,
    dispatch: RwLock<Option<WeakDispatch>>,
}

/// For the collector's thread to begin, on a machine that has other things to do.
const LONGEST_START: Duration = Duration::from_secs(1);

impl Engine {
    /// Starts the two threads.
    ///
    /// # Errors
    ///
    /// If the system does not let us.
    pub(crate) fn start(parts: Parts) -> Result<Arc<Self>, Error> {
        let (engine, collector, worker) = Self::assemble(parts);
        spawn("profiling-export", move || Worker::new(worker).run())?;
        let (begins, has_begun) = channel::bounded::<()>(0);
        spawn("profiling-drain", move || collector.run(begins))?;
        // Files that are ours are open when this returns.
        _ = has_begun.recv_timeout(LONGEST_START);
        Ok(engine)
    }

    /// An engine, and what its two threads are to do.
    pub(super) fn assemble(parts: Parts) -> (Arc<Self>, Collector, WorkerParts) {
        let (commands, received) = channel::unbounded();
        let (jobs, to_do) = channel::unbounded();
        let gate = parts.gate;
        let problem = parts.problem.clone();
        let (mut source_line, is_warning) = parts.source.describe();
        if cfg!(not(feature = "symbols")) {
            source_line += "; addresses without names, for the feature `symbols` is off";
        }
        let source_line = (source_line, is_warning);
        let engine = Arc::new(Self {
            spans: parts.spans,
            callsites: parts.callsites,
            keeper: parts.keeper,
            counters: parts.counters,
            waker: parts.poller.waker(),
            without_samples: match parts.source.is_refused() {
                true => NoProfile::NoStacksHere,
                false => NoProfile::NoSamples,
            },
            only_sampled_traces: parts.only_sampled_traces,
            source_settings: parts.source_settings,
            source_line,
            attributes: parts.attributes,
            redaction: parts.redaction,
            problem: Mutex::new(parts.problem),
            pairing: parts.pairing,
            commands,
            gate,
            dispatch: RwLock::new(None),
        });
        let worker = WorkerParts {
            engine: Arc::clone(&engine),
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
        (engine, collector, worker)
    }

    /// From now on all layers of this process are shut in children of forks.
    pub(crate) fn shut_in_children() {
        sys::on_fork(|| {
            forget_this_thread();
            Gate::close_all();
        });
    }

    /// False once everything has ended, and in the child of a fork, where locks of ours may be held
    /// for ever: then the hooks must do nothing.
    #[inline(always)]
    pub(crate) fn is_running(&self) -> bool {
        self.gate.is_open()
    }

    pub(super) fn stop(&self) {
        self.gate.close();
    }

    /// Whether every profile that was promised was delivered, or may be yet.
    pub(crate) fn has_lost_none(&self) -> bool {
        self.counters.profiles_lost() == 0
    }

    pub(crate) fn stats(&self) -> Stats {
        let mut stats = self.counters.snapshot();
        stats.spans.seen = self.spans.seen();
        stats
    }

    /// From now on spans that are made have these rules. Spans that are open keep theirs.
    pub(crate) fn replace_rules(&self, rules: Rules) {
        self.callsites.replace(rules);
        self.waker.wake();
    }

    /// A span is open that is looked at for how long it is so, and nothing else may wake who looks.
    #[cold]
    pub(crate) fn begin_to_watch(&self) {
        self.waker.wake();
    }

    /// Which plan a span has by the values that it is made with, if the callsite's rules depend on them.
    #[cold]
    pub(crate) fn by_values(
        &self,
        plan: Plan,
        record: impl FnOnce(&mut dyn Visit),
    ) -> Option<(Plan, u64)> {
        let choice = self.callsites.get(plan.number)?.fields.as_ref()?.choose(record)?;
        Some((self.callsites.get(choice.number)?.plan, choice.bits))
    }

    /// Whether a span that is made with that plan is the one of so many that is kept.
    #[cold]
    pub(crate) fn is_the_one(&self, plan: &Plan) -> bool {
        self.callsites.get(plan.number).is_some_and(|callsite| callsite.is_the_one())
    }

    /// The same for a span that is open, of which values are recorded now.
    #[cold]
    pub(crate) fn record_values(&self, id: RegistryId, record: impl FnOnce(&mut dyn Visit)) {
        let mut is_chosen = false;
        let is_first = self.spans.replan(id, |plan, bits| {
            let choice = self.callsites.get(plan)?.fields.as_ref()?.choose_anew(bits, record);
            let callsite = self.callsites.get(choice.number)?;
            is_chosen = choice.number != plan && callsite.is_the_one();
            Some((callsite.plan, choice.bits))
        });
        if is_first {
            self.begin_to_watch();
        }
        if is_chosen {
            self.spans.choose(id);
        }
    }

    /// Where our own events go.
    pub(crate) fn set_dispatch(&self, dispatch: WeakDispatch) {
        *self.dispatch.write() = Some(dispatch);
        // It says what it can see here, as soon as somebody listens.
        self.waker.wake();
    }

    /// Logs with our subscriber as the default. What panics there is not ours.
    pub(super) fn log(&self, event: impl FnOnce()) {
        let log = || match self.dispatch() {
            Some(dispatch) => tracing::dispatcher::with_default(&dispatch, event),
            None => event(),
        };
        _ = catch_unwind(AssertUnwindSafe(|| sys::log_between_forks(log)));
    }

    /// The subscriber that the layer is part of, if it was told of it.
    pub(crate) fn dispatch(&self) -> Option<Dispatch> {
        self.dispatch.read().as_ref().and_then(WeakDispatch::upgrade)
    }

    /// Whether somebody hears what we say.
    pub(super) fn has_dispatch(&self) -> bool {
        self.dispatch.read().is_some() || tracing::dispatcher::has_been_set()
    }

    /// A span is left while the order of the layers is looked for, or spans are paired. `reach`
    /// asks for its OpenTelemetry span.
    #[cold]
    pub(crate) fn look_at_exit(&self, id: RegistryId, reach: impl FnOnce() -> Option<TraceIds>) {
        let is_profiled = self.spans.is_entered(id).is_some();
        if !self.pairing.exit(id, is_profiled, reach) {
            self.gate.set_look(false);
        }
    }

    /// A span has closed. `reach` asks for the OpenTelemetry span that it is exported as.
    #[inline]
    pub(crate) fn close(&self, id: RegistryId, reach: FindOtel<'_>) {
        let paired = if self.gate.must_look() { self.pairing.take(id) } else { None };
        self.close_with(id, &mut || self.find_otel(reach, paired));
    }

    /// OpenTelemetry ends a span. If it is the one of a span of ours then that closes in a moment,
    /// and is judged now.
    #[cfg(feature = "opentelemetry-sdk")]
    pub(crate) fn ended(&self, ids: TraceIds) {
        if !self.gate.must_look() {
            return;
        }
        let paired = self.pairing.paired_with(ids.span);
        // A program can end it itself while it is in the span.
        if let Some(id) = paired.filter(|id| self.spans.is_entered(*id) == Some(false)) {
            self.close_with(id, &mut || Some(OtelSpan::Paired(ids)));
        }
    }

    #[inline]
    fn close_with(&self, id: RegistryId, otel: FindOtel<'_>) {
        let mut must_know = false;
        let is_judged = self.spans.close(id, |closing| {
            let verdict = self.judge(closing, otel);
            must_know = verdict.must_know;
            verdict
        });
        if !is_judged {
            return;
        }
        // Now that the collector has been told.
        if self.spans.has_many_notices() {
            self.waker.wake();
        } else if must_know {
            self.waker.wake_soon();
        }
    }

    /// The OpenTelemetry span of a span that closes: the one that is reached, else the paired one.
    fn find_otel(&self, reach: FindOtel<'_>, paired: Option<TraceIds>) -> Option<OtelSpan> {
        let reached = reach();
        if reached.is_some() && self.gate.must_look() {
            self.pairing.note_direct();
            self.gate.set_look(false);
        }
        let otel = reached.or(paired.map(OtelSpan::Paired));
        if otel.is_none() && self.pairing.suspect() {
            self.gate.set_look(true);
        }
        otel
    }

    pub(super) fn take_problem(&self) -> Option<String> {
        self.problem.lock().take()
    }

    /// Decides on a span that has closed.
    #[cold]
    fn judge(&self, closing: &Closing, otel: FindOtel<'_>) -> Verdict {
        let Some(callsite) = self.callsites.get(closing.plan) else {
            return Verdict::default();
        };
        let is_rare = |wall_ns| self.callsites.is_rare(&callsite, wall_ns);
        let reasons = Reasons::judge(&callsite.keep, closing, is_rare);
        if reasons.is_empty() && !closing.announced {
            return Verdict::default();
        }
        // Samples of this span may be in the profile of one around it: there they name it.
        let otel = otel();
        let ids = otel.as_ref().map(OtelSpan::ids);
        let mut verdict = Verdict { ids, ..Verdict::default() };
        if reasons.is_empty() {
            return verdict;
        }
        if self.only_sampled_traces && ids.is_some_and(|ids| !ids.is_sampled) {
            Counters::add(&self.counters.spans.dropped_unsampled_trace, 1);
            return verdict;
        }
        let (span, must_know) = self.keep(closing, &callsite, reasons, ids, false);
        verdict.must_know = must_know;
        match otel {
            Some(otel) => otel.set_attributes(self.attributes.of(&span)),
            None => self.pairing.note_unpaired(),
        }
        verdict
    }

    /// A span is kept. Returns what is known of it, and whether the collector has something to do.
    fn keep(
        &self,
        closing: &Closing,
        callsite: &Callsite,
        reasons: Reasons,
        trace: Option<TraceIds>,
        is_open: bool,
    ) -> (KeptSpan, bool) {
        let mut span = KeptSpan {
            key: closing.key,
            root: closing.root,
            metadata: callsite.metadata,
            rule: callsite.rule,
            reasons,
            opened_ns: closing.opened_ns,
            opened: before_now(closing.account.wall_ns),
            samples: closing.samples,
            is_sampled_itself: closing.has(SAMPLED_ITSELF),
            profile: Err(self.without_samples),
            earlier: Vec::new(),
            account: closing.account,
            trace,
            is_open,
        };
        let is_due = self.keeper.keep(&mut span, || ProfileId::random().ok());
        self.count(&span);
        (span, is_due)
    }

    /// A span is kept while it is open.
    pub(super) fn keep_open(&self, open: &Closing, reasons: Reasons) {
        // Whether its trace is exported is not known as long as it is open.
        let callsite = self.callsites.get(open.plan).filter(|_| !self.only_sampled_traces);
        if let Some(callsite) = callsite {
            self.keep(open, &callsite, reasons, None, true);
        }
    }

    fn count(&self, span: &KeptSpan) {
        let counters = &self.counters;
        counters.add_kept(span.reasons);
        if !span.is_open() {
            Counters::add(&counters.spans.kept_on_cpu_ns, span.account.on_cpu_ns);
            Counters::add(&counters.spans.kept_sampled_ns, span.account.sampled_ns);
        }
        let without = match span.profile {
            Ok(_) => return,
            Err(NoProfile::NoSamples | NoProfile::NoStacksHere) => {
                &counters.spans.kept_without_samples
            }
            Err(NoProfile::RateLimit) => &counters.spans.kept_over_rate_limit,
            Err(NoProfile::ExporterBusy) => &counters.spans.kept_exporter_busy,
            Err(NoProfile::TreeFull) => &counters.spans.kept_tree_full,
            Err(NoProfile::ExporterFails) => &counters.spans.kept_exporter_fails,
            Err(NoProfile::NoMemory) => &counters.spans.kept_no_memory,
            Err(NoProfile::NoId) => &counters.spans.kept_without_id,
        };
        Counters::add(without, 1);
    }

    /// Exports what has been kept until now. Returns whether that was done before the deadline.
    pub(crate) fn flush(&self, deadline: Instant) -> bool {
        let (done, wait) = channel::bounded(1);
        let waiting = FlushRequest { done, deadline };
        self.ask(Command::Flush(waiting)) && wait.recv_deadline(deadline) == Ok(true)
    }

    /// The same, and then ends everything.
    pub(crate) fn shutdown(&self, deadline: Instant) -> bool {
        let (done, wait) = channel::bounded(1);
        let waiting = FlushRequest { done, deadline };
        self.ask(Command::Shutdown(Some(waiting))) && wait.recv_deadline(deadline) == Ok(true)
    }

    /// Ends everything after what has been kept is exported, without waiting.
    pub(crate) fn shutdown_later(&self) {
        self.ask(Command::Shutdown(None));
    }

    fn ask(&self, command: Command) -> bool {
        // In the child of a fork nobody is there to answer, and our own threads would wait for
        // themselves.
        if !self.is_running() || (is_ignored() && command.is_waited_for()) {
            return false;
        }
        let sent = self.commands.send(command).is_ok();
        self.waker.wake();
        sent
    }
}

fn before_now(ns: u64) -> SystemTime {
    SystemTime::now().checked_sub(Duration::from_nanos(ns)).unwrap_or(SystemTime::UNIX_EPOCH)
}

/// Starts a thread that is never profiled.
pub(crate) fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<(), Error> {
    spawn_ignored(name, run).map_err(Error::thread)
}
