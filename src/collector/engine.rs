//! The state that the hooks, the handle and the collector share.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use crossbeam::channel;
use parking_lot::Mutex;
use tracing::Dispatch;
use tracing::dispatcher::WeakDispatch;
use tracing::field::Visit;

use super::command::Commands;
use super::copied::CopiedSamples;
use super::gate::Gate;
use super::limits::Limits;
use super::over_limit::{count, is_over_limit, name_hash};
use super::run::Collector;
use super::running_source::RunningSource;
use crate::allocations;
use crate::awaits;
use crate::error::Error;
use crate::export::Exporter;
use crate::facts::{Facts, Reasons};
use crate::keep::{
    Callsite, Callsites, ExportedWhileOpen, FieldValues, KeptSpan, OnKept, ProfileAdmission, Rules,
    SpanLink,
};
use crate::log::{LogEvent, LogKind};
use crate::otel::{EarlyVerdict, LinkTo, OtelSettings, OtelSpan, Pairing};
use crate::profile::ProfileId;
use crate::publish::{PublishState, PublisherParts, Reporter};
use crate::redact::Redaction;
use crate::refresh::refresh_interest;
use crate::sampler::{Sampler, SourceSettings};
use crate::span::{
    Closing, Enclosing, Plan, RegistryId, SAMPLED_ITSELF, SHOWS_FIELDS, Spans, TraceIds, Verdict,
    forget_this_thread, spawn_ignored,
};
use crate::stats::{Counters, Stats};
use crate::symbols::SymbolSettings;
use crate::sys::{self, Owning, Poller, Uncounted, Waker};
use crate::text::beginning;

/// Finds the OpenTelemetry span of a closing span, or of one around it that was entered.
pub(crate) type FindOtel<'a> = &'a dyn Fn(RegistryId) -> Option<OtelSpan>;

/// The one of the closing span, and those around it.
type Reach<'a> = (&'a dyn Fn() -> Option<OtelSpan>, FindOtel<'a>);

/// Everything that an [`Engine`] is made of.
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
    pub(crate) pairing: Arc<Pairing>,
    pub(crate) source_settings: SourceSettings,
    pub(crate) exporter: Box<dyn Exporter>,
    /// An error of the exporter, if it has one.
    pub(crate) problem: Option<String>,
    /// What is wrong with the settings.
    pub(crate) warnings: Vec<LogEvent>,
    pub(crate) on_kept: Option<OnKept>,
    pub(crate) otel: OtelSettings,
    pub(crate) redaction: Redaction,
    pub(crate) symbols: SymbolSettings,
}

/// A layer's spans, rules and threads.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Engine {
    pub(crate) spans: Arc<Spans>,
    pub(crate) callsites: Callsites,
    pub(super) copied: CopiedSamples,
    pub(super) admission: Arc<ProfileAdmission>,
    pub(super) counters: Arc<Counters>,
    pub(super) waker: Waker,
    pub(crate) source: RunningSource,
    pub(super) otel: OtelSettings,
    pub(super) redaction: Arc<Redaction>,
    pub(crate) publish: PublishState,
    pub(crate) pairing: Arc<Pairing>,
    /// What is wrong with the settings or the exporter from the start, until it is logged.
    warnings: Mutex<Vec<LogEvent>>,
    pub(super) commands: Commands,
    pub(crate) gate: &'static Gate,
}

/// How long the collector's thread may take to begin on a busy machine.
const LONGEST_START: Duration = Duration::from_secs(1);

impl Engine {
    /// Starts the threads.
    ///
    /// # Errors
    ///
    /// If the system refuses to create a thread.
    pub(crate) fn start(parts: Parts) -> Result<Arc<Self>, Error> {
        let (engine, collector, publisher) = Self::assemble(parts);
        publisher.start().map_err(Error::thread)?;
        let (begins, has_begun) = channel::bounded::<()>(0);
        spawn("profiling-drain", move || collector.run(begins))?;
        // The layer's files are open when this returns.
        _ = has_begun.recv_timeout(LONGEST_START);
        Ok(engine)
    }

    /// Creates an engine and the state of its threads.
    pub(super) fn assemble(parts: Parts) -> (Arc<Self>, Collector, PublisherParts) {
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
            admission: Arc::clone(&admission),
            reporter: Arc::new(reporter),
            redaction: Arc::clone(&redaction),
        };
        let engine = Arc::new(Self {
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
            pairing: parts.pairing,
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

    /// From now on, forked children close the gates of all layers.
    pub(crate) fn disable_in_children() {
        sys::on_fork(|| {
            forget_this_thread();
            Gate::close_all();
            awaits::forget_all();
            allocations::forget_all();
        });
    }

    /// False after shutdown, and in a forked child, where the layer's locks may be held forever. The hooks must do
    /// nothing then.
    #[inline(always)]
    pub(crate) fn is_running(&self) -> bool {
        self.gate.is_open()
    }

    pub(super) fn stop(&self) {
        self.gate.close();
        self.copied.set_active(false);
        // From now on the layer wants nothing.
        if let Some(own) = self.dispatch() {
            refresh_interest(Some(own), || {});
        }
    }

    /// Called once hooks can find the engine.
    pub(crate) fn open(&self) {
        self.gate.open();
        self.gate.set_counts_allocations(true);
        self.copied.set_active(true);
    }

    /// Whether every promised profile was delivered or is still in flight.
    pub(crate) fn lost_none(&self) -> bool {
        self.counters.profiles_lost() == 0
    }

    pub(crate) fn stats(&self) -> Stats {
        let mut stats = self.counters.snapshot();
        stats.spans.seen = self.spans.seen();
        stats
    }

    /// Applies new rules to spans that are created from now on. Open spans keep theirs.
    pub(crate) fn replace_rules(&self, rules: Rules) {
        // Before spans of these rules can be created, and again afterwards: the collector may just have found that all
        // rules are off.
        let is_on = !rules.is_off();
        let count = || {
            if is_on {
                self.gate.set_counts_allocations(true);
            }
        };
        count();
        self.callsites.replace(rules);
        count();
        self.copied.awaits.check_again();
        self.waker.wake();
    }

    /// Wakes the collector for an open span whose open time is limited: it may be asleep, and no other event may wake
    /// it.
    #[cold]
    pub(crate) fn start_watchdog(&self) {
        self.waker.wake();
    }

    /// See [`Callsites::choose`].
    #[cold]
    pub(crate) fn plan_by_values(
        &self,
        plan: Plan,
        record: impl FnOnce(&mut dyn Visit),
    ) -> Option<(Plan, u64)> {
        let _uncounted = Uncounted::begin();
        self.callsites.choose(plan.number, record)
    }

    /// Whether a new span with this plan is the one in *n* that is kept.
    #[cold]
    pub(crate) fn is_chosen(&self, plan: &Plan) -> bool {
        self.callsites.is_chosen(plan.number)
    }

    /// Chooses the plan of an open span again, because values were recorded.
    #[cold]
    pub(crate) fn record_values(&self, id: RegistryId, record: impl FnOnce(&mut dyn Visit)) {
        let _uncounted = Uncounted::begin();
        let mut is_chosen = false;
        let is_first = self.spans.replan(id, |before, bits| {
            let chosen = self.callsites.choose_again(before, bits, record)?;
            is_chosen = chosen.0.number != before && self.callsites.is_chosen(chosen.0.number);
            Some(chosen)
        });
        if is_first {
            self.start_watchdog();
        }
        if is_chosen {
            self.spans.choose(id);
        }
    }

    /// Sets the subscriber that receives the layer's log events.
    pub(crate) fn set_dispatch(&self, dispatch: WeakDispatch) {
        self.publish.reporter.set_dispatch(dispatch);
        // The collector logs its source as soon as there is a subscriber.
        self.waker.wake();
    }

    /// The subscriber that the layer is part of, if it is known.
    pub(crate) fn dispatch(&self) -> Option<Dispatch> {
        self.publish.reporter.dispatch()
    }

    /// A span is exited while the layer order is being determined or spans are being paired. `reach` finds its
    /// OpenTelemetry span.
    #[cold]
    pub(crate) fn observe_exit(&self, id: RegistryId, reach: impl FnOnce() -> Option<TraceIds>) {
        let is_profiled = self.spans.is_entered(id).is_some();
        if !self.pairing.exit(id, is_profiled, reach) {
            self.gate.set_observe_exits(false);
        }
    }

    /// A span has closed. `reach` finds the OpenTelemetry span that it is exported as.
    #[inline]
    pub(crate) fn close(&self, id: RegistryId, reach: FindOtel<'_>) {
        let must_take = self.gate.must_observe_exits() && self.spans.is_entered(id).is_some();
        let paired = if must_take { self.pairing.take(id) } else { None };
        let mut must_notify = false;
        let is_judged = self.spans.close(id, |closing| {
            let _uncounted = Uncounted::begin();
            let busy_ns = closing.account.busy_ns();
            let early = paired.and_then(|paired| paired.early);
            let allocated = closing.account.allocations;
            let is_same =
                |early: &EarlyVerdict| (early.busy_ns, early.allocated) == (busy_ns, allocated);
            let holds = |early: &EarlyVerdict| early.verdict.is_decided || is_same(early);
            let verdict = match early.filter(holds) {
                Some(early) => early.verdict,
                None => {
                    let ids = paired.map(|paired| paired.ids);
                    self.judge(closing, &|| self.find_otel(reach, id, ids), reach)
                }
            };
            must_notify = verdict.must_notify;
            verdict
        });
        if !is_judged {
            return;
        }
        // After the collector has been notified.
        if self.spans.has_many_span_events() {
            self.waker.wake();
        } else if must_notify {
            self.waker.wake_soon();
        }
    }

    /// OpenTelemetry has ended a span. If it is paired with a profiled span, that span is usually about to close, and is
    /// judged now, while attributes can still be added.
    #[cfg(feature = "opentelemetry-sdk")]
    pub(crate) fn ended(&self, ids: TraceIds) {
        if !self.gate.must_observe_exits() {
            return;
        }
        let paired = self.pairing.paired_with(ids.span);
        // A program can end the OpenTelemetry span itself while it is still in the `tracing` span, or before it enters
        // that again: then the verdict at the close counts, unless the span is kept already.
        if let Some(id) = paired.filter(|id| self.spans.is_entered(*id) == Some(false)) {
            self.spans.judge_open(id, |closing| {
                let reach = |around: RegistryId| {
                    OtelSpan::find(&tracing::span::Id::from_non_zero_u64(around), &self.dispatch()?)
                };
                let _uncounted = Uncounted::begin();
                let verdict = self.judge(closing, &|| Some(OtelSpan::Paired(ids)), &reach);
                let (busy_ns, allocated) = (closing.account.busy_ns(), closing.account.allocations);
                self.pairing.note_judged(id, EarlyVerdict { verdict, busy_ns, allocated });
            });
        }
    }

    /// The OpenTelemetry span of a closing span: the one that `reach` finds, otherwise the paired one.
    fn find_otel(
        &self,
        reach: FindOtel<'_>,
        id: RegistryId,
        paired: Option<TraceIds>,
    ) -> Option<OtelSpan> {
        let reached = reach(id);
        self.pairing.note_kept(reached.is_some());
        if reached.is_some() && self.gate.must_observe_exits() {
            self.pairing.note_direct();
            self.gate.set_observe_exits(false);
        }
        let otel = reached.or(paired.map(OtelSpan::Paired));
        if otel.is_none() && self.pairing.suspect() {
            self.gate.set_observe_exits(true);
        }
        otel
    }

    /// It is logged with what is wrong with the settings.
    pub(crate) fn add_warning(&self, warning: LogEvent) {
        self.warnings.lock().push(warning);
        self.waker.wake();
    }

    pub(super) fn take_warnings(&self) -> Vec<LogEvent> {
        std::mem::take(&mut self.warnings.lock())
    }

    /// The verdict on a span that has closed. `otel` finds its OpenTelemetry span, and `reach` those of spans around it.
    #[cold]
    fn judge(
        &self,
        closing: &Closing,
        otel: &dyn Fn() -> Option<OtelSpan>,
        reach: FindOtel<'_>,
    ) -> Verdict {
        let judge = |site: &Callsite| Some(self.judge_by(site, closing, (otel, reach)));
        self.callsites.get_here(closing.plan, judge).unwrap_or_default()
    }

    fn judge_by(
        &self,
        callsite: &Callsite,
        closing: &Closing,
        (otel, reach): Reach<'_>,
    ) -> Verdict {
        let values = || self.inspect_values(closing, FieldValues::hash_of);
        let is_rare = |wall_ns| self.callsites.is_rare(callsite, values, wall_ns);
        let reasons = Reasons::judge(&callsite.keep, closing, is_rare);
        if reasons.is_empty() && !closing.is_registered {
            return Verdict::default();
        }
        // Before everything that takes time: in an outage most kept spans are over their limit.
        let is_over = !reasons.is_empty() && is_over_limit(self, closing, callsite, reasons);
        if is_over && !closing.is_registered {
            return Verdict { is_decided: true, ..Verdict::default() };
        }
        // The profile of an enclosing span may have samples of this span, and links them to these ids.
        let otel = otel();
        let ids = otel.as_ref().map(OtelSpan::ids);
        let mut verdict = Verdict { ids, is_decided: is_over, ..Verdict::default() };
        if reasons.is_empty() || is_over {
            return verdict;
        }
        verdict.is_decided = true;
        if self.otel.only_sampled_traces && ids.is_some_and(|ids| !ids.is_sampled) {
            Counters::add(&self.counters.spans.dropped_unsampled_trace, 1);
            return verdict;
        }
        let link = self.link(closing, ids, reach);
        let mut closing = closing.clone();
        closing.samples.awaits += self.copied.awaits.send_carried(closing.key);
        let (span, must_notify) = self.keep(&closing, callsite, reasons, ids, Some(link));
        verdict.must_notify = must_notify;
        match otel {
            Some(otel) => otel.set_attributes(self.otel.attributes.of(&span)),
            None => self.pairing.note_unpaired(),
        }
        verdict
    }

    /// What samples in a closing span link to. `reach` finds OpenTelemetry spans.
    fn link(&self, closing: &Closing, ids: Option<TraceIds>, reach: FindOtel<'_>) -> SpanLink {
        let has_on_cpu = closing.has(SAMPLED_ITSELF);
        let first = self.admission.first_link(closing.root);
        let at = first.as_ref().map_or(closing.closed_at, |first| first.at);
        let own = SpanLink { ids, at, has_on_cpu, ..SpanLink::default() };
        if self.otel.link_to == LinkTo::Innermost {
            return own;
        }
        // Usually it is the local root, which then holds for the whole tree.
        let is_same = |first: &SpanLink| {
            let (trace, first_trace) = (ids.map(|ids| ids.trace), first.ids.map(|ids| ids.trace));
            first.to == Some(closing.root) && (trace.is_none() || trace == first_trace)
        };
        if let Some(first) = first.filter(is_same) {
            return SpanLink { has_on_cpu, ..first };
        }
        let enclosing = self.spans.enclosing(closing.id, at);
        let outermost = enclosing.iter().rposition(|span| !span.is_long).unwrap_or(0);
        let ids_of = |span: &Enclosing| match span.key == closing.key {
            true => ids,
            // If OpenTelemetry does not know the span, it may not have started those around it.
            false => {
                let own = ids?;
                // A message can have a trace of its own inside a consumer.
                self.ids_around(span, reach).filter(|around| around.trace == own.trace)
            }
        };
        let known = enclosing.iter().enumerate().take(outermost + 1).rev();
        let known = known.filter_map(|(place, span)| Some((place, ids_of(span)?))).next();
        let to = known.map_or(outermost, |(place, _)| place);
        SpanLink {
            to: enclosing.get(to).map(|span| span.key),
            ids: known.map(|(_, ids)| ids),
            outside: enclosing.iter().skip(to + 1).map(|span| span.key).collect(),
            ..own
        }
    }

    /// The ids of a span around one that is closing, if they are known already.
    fn ids_around(&self, span: &Enclosing, reach: FindOtel<'_>) -> Option<TraceIds> {
        // Otherwise a program could still set its parent.
        let reached = if span.was_entered { reach(span.id) } else { None };
        reached.map(|otel| otel.ids()).or_else(|| self.pairing.paired_ids(span.id))
    }

    /// Keeps a span, which is open if `link` is `None`. Returns its report, and whether the collector has work to do.
    fn keep(
        &self,
        closing: &Closing,
        callsite: &Callsite,
        reasons: Reasons,
        trace: Option<TraceIds>,
        link: Option<SpanLink>,
    ) -> (KeptSpan, bool) {
        let clock = self.spans.clock();
        let open_ns = clock.raw_ns(clock.now()).saturating_sub(closing.opened_ns);
        let (redaction, values) = (&self.redaction, self.inspect_values(closing, FieldValues::of));
        let mut span = KeptSpan {
            key: closing.key,
            root: closing.root,
            metadata: callsite.metadata,
            facts: Facts {
                span: redaction.redact_span(beginning(callsite.metadata.name())),
                target: redaction.redact_function(callsite.metadata.target()),
                fields: values.map(|value| redaction.redact_span(value).into()).into_vec(),
                reasons,
                rule: callsite.rule_text(redaction),
                is_open: link.is_none(),
                times: closing.account,
                trace,
                // Not by its wall time: the thread may have been preempted since the close.
                start_unix_ns: unix_ns_ago(open_ns),
                ..Facts::default()
            },
            rule: callsite.rule,
            opened_ns: closing.opened_ns,
            samples: closing.samples,
            profile: Err(self.source.without_samples(&closing.account)),
            earlier: ExportedWhileOpen::default(),
            link: link.unwrap_or_default(),
        };
        let name = name_hash(self, closing, callsite);
        let is_due = self.admission.keep(&mut span, name, || ProfileId::random().ok());
        count(self, &span);
        if !is_due {
            Counters::add(&self.counters.spans.kept_unreported, 1);
        }
        (span, is_due)
    }

    /// Reads the values of the span's fields that are shown.
    pub(super) fn inspect_values<T: Default>(
        &self,
        closing: &Closing,
        read: impl Fn(RegistryId, &Dispatch) -> T,
    ) -> T {
        if !closing.has(SHOWS_FIELDS) {
            return T::default();
        }
        self.with_dispatch(|dispatch| read(closing.id, dispatch))
    }

    pub(super) fn with_dispatch<T>(&self, read: impl Fn(&Dispatch) -> T) -> T {
        match self.dispatch() {
            Some(dispatch) => read(&dispatch),
            // Some combinations of layers do not pass on their subscriber.
            None => tracing::dispatcher::get_default(read),
        }
    }

    /// Keeps a span while it is open.
    pub(super) fn keep_open(&self, open: &Closing, reasons: Reasons) {
        // Whether its trace will be exported is not known while it is open.
        let callsite = self.callsites.get(open.plan).filter(|_| !self.otel.only_sampled_traces);
        if let Some(callsite) = callsite {
            self.keep(open, &callsite, reasons, None, None);
        }
    }
}

fn unix_ns_ago(ns: u64) -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX).saturating_sub(ns)
}

/// Starts a thread that is never profiled.
pub(crate) fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<(), Error> {
    spawn_ignored(name, run).map_err(Error::thread)
}
