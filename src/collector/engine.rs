//! What the hooks, the handle and the collector share.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};
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
use crate::keep::{
    Callsite, Callsites, Keeper, KeptSpan, NoProfile, OnKept, Reason, Reasons, Rules,
};
use crate::otel::{AttributeNames, Close, LayerOrder, Meeting, Order, OtelSpan};
use crate::profile::ProfileId;
use crate::redact::Redaction;
use crate::sampler::{Sampler, SourceSettings};
use crate::span::{
    Account, Closing, Described, Plan, RegistryId, SAMPLED_ITSELF, Spans, TraceIds, Verdict,
    forget_this_thread, is_ignored, spawn_ignored,
};
use crate::stats::{Counters, Stats};
use crate::symbols::SymbolSettings;
use crate::sys::{self, Owning, Poller, Waker};

/// Finds the OpenTelemetry span of a span that closes.
pub(crate) type FindOtel<'a> = &'a mut dyn FnMut() -> Option<OtelSpan<'a>>;

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
    pub(crate) order: Arc<LayerOrder>,
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
    pub(crate) order: Arc<LayerOrder>,
    /// If a processor sees OpenTelemetry's spans end.
    pub(super) meeting: OnceLock<Meeting>,
    /// What was wrong with the exporter from the beginning, until it is said.
    problem: Mutex<Option<String>>,
    pub(super) commands: Sender<Command>,
    pub(crate) gate: &'static Gate,
    /// The fork generation of the process in which our threads run.
    #[cfg(feature = "opentelemetry-sdk")]
    pub(super) made_in: u32,
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
            order: parts.order,
            meeting: OnceLock::new(),
            commands,
            gate,
            #[cfg(feature = "opentelemetry-sdk")]
            made_in: sys::fork_generation(),
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
        Stats { spans_seen: self.spans.seen(), ..self.counters.snapshot() }
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

    /// A span has closed. `otel` finds the OpenTelemetry span that it is exported as.
    #[inline]
    pub(crate) fn close(&self, id: RegistryId, otel: FindOtel<'_>) {
        match self.meeting.get() {
            None => self.close_with(id, otel, None),
            Some(meeting) => self.close_and_meet(id, otel, meeting),
        }
    }

    #[inline]
    pub(super) fn close_with(&self, id: RegistryId, otel: FindOtel<'_>, close: Option<&mut Close>) {
        let mut must_know = false;
        let is_judged = self.spans.close(id, |closing| {
            let verdict = self.judge(closing, otel, close);
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

    pub(super) fn take_problem(&self) -> Option<String> {
        self.problem.lock().take()
    }

    /// Whether the layers are in an order in which OpenTelemetry's spans cannot be reached, and no
    /// processor makes up for it. True only once.
    pub(super) fn must_warn_of_order(&self) -> bool {
        self.meeting.get().is_none() && self.order.take_wrong()
    }

    /// Decides on a span that has closed. Where its OpenTelemetry span cannot be reached now but
    /// `close` can meet it, what was to be said and told goes there.
    #[cold]
    fn judge(&self, closing: &Closing, otel: FindOtel<'_>, close: Option<&mut Close>) -> Verdict {
        let Some(callsite) = self.callsites.get(closing.plan) else {
            return Verdict::default();
        };
        let is_rare = |wall_ns| self.callsites.is_rare(&callsite, wall_ns);
        let reasons = Reasons::judge(&callsite.keep, closing, is_rare);
        if reasons.is_empty() && !closing.announced {
            return Verdict::default();
        }
        // Samples of this span may be in the profile of one around it: there they name it.
        let mut otel = otel();
        let ids = otel.as_ref().map(OtelSpan::ids);
        let meeting = self.meeting.get();
        match (&otel, meeting) {
            (None, None) if self.order.suspect() => self.gate.set_look(true),
            (Some(otel), Some(meeting)) if otel.is_open() => meeting.note_direct(),
            _ => {}
        }
        // Where theirs closes first, a span without an end is of a trace that is not exported.
        let has_no_end =
            ids.is_none() && meeting.is_some_and(|meeting| meeting.order() == Order::Theirs);
        let close = close.filter(|_| otel.is_none());
        let mut verdict = Verdict { is_told_later: close.is_some(), ids, ..Verdict::default() };
        let mut kept = None;
        let is_sampled = ids.map_or(!has_no_end, |ids| ids.is_sampled);
        let is_left_out = self.only_sampled_traces && !is_sampled;
        if !reasons.is_empty() && is_left_out {
            Counters::add(&self.counters.spans_left_out_unsampled, 1);
        } else if !reasons.is_empty() {
            let (span, must_know) = self.keep(closing, &callsite, reasons, ids);
            verdict.must_know = must_know;
            kept = Some(span);
        }
        match (&mut otel, close) {
            (Some(otel), _) => {
                if let Some(kept) = kept {
                    otel.set_attributes(self.attributes.of(&kept));
                }
            }
            (None, Some(close)) => {
                let is_of_interest = closing.announced || verdict.must_know;
                close.untold = is_of_interest.then_some(closing.key);
                close.kept = kept.map(Box::new);
            }
            (None, None) => {}
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
            is_open: false,
        };
        let is_due = self.permit(&mut span);
        (span, is_due)
    }

    /// A span is kept while it is open. If the collector has something to do, returns how many of its
    /// samples no profile has had.
    pub(super) fn keep_open(
        &self,
        span: &Described,
        reason: Reason,
        account: Account,
        samples: u64,
    ) -> Option<u64> {
        // Whether its trace is exported is not known as long as it is open.
        let callsite = self.callsites.get(span.plan).filter(|_| !self.only_sampled_traces)?;
        let clock = self.spans.clock();
        let mut span = KeptSpan {
            key: span.key,
            root: span.root,
            metadata: callsite.metadata,
            rule: callsite.rule,
            reasons: [reason].into_iter().collect(),
            opened_ns: clock.raw_ns(clock.now()).saturating_sub(account.wall_ns),
            opened: before_now(account.wall_ns),
            samples,
            // Its attributes are said when it closes.
            is_sampled_itself: false,
            profile: Err(self.without_samples),
            earlier: Vec::new(),
            account,
            trace: None,
            is_open: true,
        };
        self.permit(&mut span).then_some(span.samples)
    }

    fn permit(&self, span: &mut KeptSpan) -> bool {
        let is_due = self.keeper.keep(span, || ProfileId::random().ok());
        self.count(span);
        is_due
    }

    fn count(&self, span: &KeptSpan) {
        let counters = &self.counters;
        counters.add_kept(span.reasons);
        if !span.is_open() {
            Counters::add(&counters.kept_on_cpu_ns, span.account.on_cpu_ns);
            Counters::add(&counters.kept_sampled_ns, span.account.sampled_ns);
        }
        let without = match span.profile {
            Ok(_) => return,
            Err(NoProfile::NoSamples | NoProfile::NoStacksHere) => {
                &counters.spans_kept_without_samples
            }
            Err(NoProfile::RateLimit) => &counters.spans_kept_over_rate_limit,
            Err(NoProfile::ExporterBusy) => &counters.spans_kept_exporter_busy,
            Err(NoProfile::TreeFull) => &counters.spans_kept_tree_full,
            Err(NoProfile::ExporterFails) => &counters.spans_kept_exporter_fails,
            Err(NoProfile::NoMemory) => &counters.spans_kept_no_memory,
            Err(NoProfile::NoId) => &counters.spans_kept_without_id,
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
