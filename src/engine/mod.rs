//! The state that the hooks, the handle and the collector share.

mod command;
mod gate;
mod process;

use std::sync::Arc;
use std::time::{Instant, SystemTime};

use parking_lot::Mutex;
use tracing::Dispatch;
use tracing::field::Visit;

pub(crate) use command::{Command, Commands, LONGEST_ANSWER, not_listed};
pub(crate) use gate::Gate;
pub(crate) use process::ProcessRequest;
pub use process::ProfileKind;
pub use process::{CancelProfile, StartedProfile};

use crate::allocations::{self, LayerAllocations};
use crate::awaits::{self, LayerAwaits};
use crate::error::Error;
use crate::facts::format::place_of;
use crate::facts::{Allocations, Facts, Reason, Reasons, TimeBreakdown};
use crate::ids::hash_of;
use crate::keep::{
    Callsite, Callsites, FieldValues, KeptSpan, NoProfile, ProfileAdmission, Rules, SpanLink,
    SpanNames, judge,
};
use crate::log::LogEvent;
use crate::otel::{
    OtelSpan, UnreachedSpans, attributes_of, keep_trace, keep_traces_begun_in, trace_stats,
};
use crate::profile::ProfileId;
use crate::publish::PublishState;
use crate::references::{ClosedReference, CohortHash, Moment, Throw};
use crate::refresh::refresh_interest;
use crate::report;
use crate::sampler::Sampler;
use crate::span::{
    ADDED_UP, Ancestor, CHOSEN, FAILED, LONG_SEGMENT_NS, OtherSpan, REGISTERED, RegistryId,
    SAMPLED_ITSELF, SHOWS_FIELDS, SpanSnapshot, Spans, TraceIds, Verdict, forget_this_thread,
    has_woken,
};
use crate::stats::{Counters, Stats};
use crate::sys::{self, Striped, SuspendCounting, Waker};
use crate::text::beginning;

/// Finds the OpenTelemetry span of a closing span, or of one around it that was entered.
pub(crate) type FindOtel<'a> = &'a dyn Fn(RegistryId) -> Option<OtelSpan>;

#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Engine {
    pub(crate) spans: Arc<Spans>,
    pub(crate) callsites: Callsites,
    /// Where the threads of the program leave samples that they take themselves.
    pub(crate) awaits: Arc<Striped<LayerAwaits>>,
    pub(crate) allocations: Arc<LayerAllocations>,
    pub(crate) admission: Arc<ProfileAdmission>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) waker: Waker,
    pub(crate) source: RunningSource,
    pub(crate) names: Arc<SpanNames>,
    pub(crate) publish: PublishState,
    pub(crate) unreached: Arc<UnreachedSpans>,
    /// What is wrong with the settings, the exporter or how the layer was added, until it is logged.
    pub(crate) warnings: Mutex<Vec<LogEvent>>,
    pub(crate) commands: Commands,
    pub(crate) gate: &'static Gate,
}

impl Engine {
    /// From now on, forked children close the gates of all layers.
    pub(crate) fn disable_in_children() {
        sys::Forks::on_each(|| {
            forget_this_thread();
            Gate::close_all();
            awaits::forget_all();
            allocations::forget_all();
        });
    }

    /// False after shutdown, and in a forked child, where locks may be held forever. The hooks must do nothing then.
    #[inline(always)]
    pub(crate) fn is_running(&self) -> bool {
        self.gate.is_open()
    }

    pub(crate) fn stop(&self) {
        self.gate.close();
        self.set_active(false);
        // From now on the layer wants nothing.
        if let Some(own) = self.dispatch() {
            refresh_interest(Some(own), || {});
        }
    }

    /// Called once hooks can find the engine.
    pub(crate) fn open(&self) {
        self.gate.open();
        self.gate.set_counts_allocations(true);
        self.set_active(true);
    }

    fn set_active(&self, is_active: bool) {
        self.awaits.set_active(is_active);
        self.allocations.set_active(is_active);
    }

    pub(crate) fn is_heap_tracked(&self) -> bool {
        self.allocations.tracks_heap() && Allocations::are_counted()
    }

    /// Tracks the heap if no other layer does. Once rules are off and all spans closed, nothing counts allocations.
    pub(crate) fn update_counting(&self) {
        if self.allocations.can_claim_heap() {
            // Blocks are tracked only while all frees are counted.
            self.gate.set_counts_allocations(true);
            self.allocations.claim_heap();
        }
        let is_counting = self.gate.counts_allocations() && !self.is_heap_tracked();
        if is_counting && self.callsites.are_off() && !self.spans.has_any_open() {
            self.gate.set_counts_allocations(false);
            // New rules may have been set in the meantime.
            if !self.callsites.are_off() {
                self.gate.set_counts_allocations(true);
            }
        }
    }

    pub(crate) fn stats(&self) -> Stats {
        let mut stats = self.counters.snapshot();
        stats.spans.seen = self.spans.seen();
        stats.traces = trace_stats();
        stats
    }

    /// Applies new rules to spans that are created from now on. Open spans keep theirs.
    pub(crate) fn replace_rules(&self, rules: Rules) -> Result<(), Error> {
        // Before spans of these rules can be created, and afterwards: the collector may just have found all rules off.
        let is_on = !rules.is_off();
        let count = || {
            if is_on {
                self.gate.set_counts_allocations(true);
            }
        };
        count();
        let replaced = self.callsites.replace(rules);
        count();
        self.awaits.check_again();
        self.waker.wake();
        replaced
    }

    /// A new span is inside no other request. It may become a reference, if this throw is one.
    #[inline]
    pub(crate) fn note_request(&self, id: RegistryId) -> Option<Throw> {
        let references = &self.publish.references;
        if references.totals.are_on() {
            self.spans.mark(id, ADDED_UP);
        }
        references.choice.throw()
    }

    #[cold]
    pub(crate) fn choose_reference(&self, id: RegistryId, throw: Throw, cohort: CohortHash) {
        let chosen = self.publish.references.choice.choose(throw, cohort, Moment::now);
        if let Some(halvings) = chosen {
            self.spans.make_reference(id, halvings);
        }
    }

    /// Chooses the plan of an open span again, because values were recorded.
    #[cold]
    pub(crate) fn record_values(&self, id: RegistryId, record: impl FnOnce(&mut dyn Visit)) {
        let _uncounted = SuspendCounting::begin();
        let mut is_chosen = false;
        let is_first = self.spans.replan(id, |before, bits| {
            let (callsite, bits) = self.callsites.choose_again(before, bits, record)?;
            is_chosen = callsite.plan.number != before && callsite.is_chosen();
            Some((callsite.plan, bits))
        });
        if is_first {
            self.waker.wake();
        }
        if is_chosen {
            self.spans.mark(id, CHOSEN);
        }
    }

    pub(crate) fn dispatch(&self) -> Option<Dispatch> {
        self.publish.reporter.dispatch()
    }

    /// A span has closed. `reach` finds the OpenTelemetry span that it is exported as.
    #[inline]
    pub(crate) fn close(&self, id: RegistryId, reach: FindOtel<'_>) {
        let (mut must_notify, mut is_reference) = (false, false);
        let may_wake = self.spans.close(id, |closing| {
            let _uncounted = SuspendCounting::begin();
            let verdict = self.judge(closing, reach);
            (must_notify, is_reference) = (verdict.must_notify, closing.represents().is_some());
            verdict
        });
        if !may_wake {
            return;
        }
        // After the collector has been notified. Sampled threads of a reference pay microseconds for each context switch.
        if is_reference || self.spans.has_many_span_events() {
            self.waker.wake();
        } else if must_notify {
            self.waker.wake_soon();
        }
    }

    /// The verdict on a span that has closed.
    #[cold]
    fn judge(&self, closing: &SpanSnapshot, reach: FindOtel<'_>) -> Verdict {
        let Some(callsite) = self.callsites.get(closing.plan) else { return Verdict::default() };
        let route = || self.read_values(closing, FieldValues::route_hash).flatten();
        let is_rare = |wall_ns| self.callsites.is_rare(callsite, route, wall_ns);
        let reasons = judge(&callsite.rule.keep, closing, is_rare);
        if closing.has(ADDED_UP) {
            self.add_request(closing, callsite, route());
        }
        let entered_ns = closing.account.wall_ns.saturating_sub(closing.account.idle_ns);
        let may_be_named = entered_ns >= LONG_SEGMENT_NS || has_woken(closing.key);
        if closing.has(SHOWS_FIELDS) && may_be_named {
            self.names.note_closing(closing.id, closing.key);
        }
        let represents = closing.represents();
        let must_notify = represents.is_some();
        if let Some(weight) = represents {
            self.close_reference(closing, callsite, weight);
        }
        let unkept = Verdict { must_notify, ..Verdict::default() };
        if reasons.is_empty() && !closing.has(REGISTERED) {
            return unkept;
        }
        self.commands
            .process
            .note_closing(closing, &self.counters, || self.values_of(closing).into_vec());
        // Before everything that takes time: in an outage most kept spans are over their limit.
        let is_over = !reasons.is_empty() && self.is_over_limit(closing, callsite, reasons);
        if is_over && !closing.has(REGISTERED) {
            return unkept;
        }
        // The profile of an enclosing span may have samples of this span, and links them to these ids.
        let otel = reach(closing.id);
        self.unreached.note(otel.is_some());
        let ids = otel.as_ref().map(OtelSpan::ids);
        let mut verdict = Verdict { ids, ..unkept };
        if reasons.is_empty() || is_over {
            keep_trace(|| {
                let was_kept = self.admission.was_kept_open(closing.key);
                was_kept.then(|| self.trace_of(closing, ids, reach)).flatten()
            });
            return verdict;
        }
        let link = self.link(closing, ids, reach);
        let mut closing = closing.clone();
        closing.samples.awaits += self.awaits.send_carried(closing.key);
        let mut span = KeptSpan { link, ..self.describe(&closing, callsite, reasons, ids) };
        let is_due = self.keep(&closing, callsite, &mut span);
        verdict.must_notify |= is_due;
        if let Some(otel) = otel {
            otel.set_attributes(attributes_of(&span));
        }
        keep_trace(|| self.trace_of(&closing, ids, reach));
        verdict
    }

    /// The trace of a closing span. One that OpenTelemetry does not have is in that of those around it.
    fn trace_of(
        &self,
        closing: &SpanSnapshot,
        ids: Option<TraceIds>,
        reach: FindOtel<'_>,
    ) -> Option<TraceIds> {
        ids.or_else(|| {
            let around = self.spans.enclosing(closing.id, closing.closed_at).into_iter().skip(1);
            let mut around = around.filter(|span| span.was_entered);
            around.find_map(|span| reach(span.id)).map(|otel| otel.ids())
        })
    }

    fn add_request(&self, closing: &SpanSnapshot, callsite: &Callsite, route: Option<u64>) {
        let name = callsite.metadata.name();
        let hash = hash_of((name, route));
        let facts = Facts { times: closing.account, ..Facts::default() };
        self.publish.references.totals.add(hash, &facts, || {
            let values = self.values_of(closing);
            (self.names.redaction.redact_span(beginning(name)).into(), values.to_route())
        });
    }

    /// Whether a kept span gets neither a profile nor a report, as far as that is certain. Counts it then.
    fn is_over_limit(&self, closing: &SpanSnapshot, callsite: &Callsite, reasons: Reasons) -> bool {
        if reasons.contains(Reason::Forced) {
            return false;
        }
        let account = &closing.account;
        // What its future carries becomes samples if it is kept.
        let has_samples =
            closing.samples.total() > 0 || account.await_ns > 0 || account.delay_ns > 0;
        let of = (callsite.rule.id, self.name_hash(closing, callsite), closing.root);
        let is_over = self.admission.is_over_limit(of, has_samples);
        if is_over {
            let why = if has_samples { NoProfile::RateLimit } else { NoProfile::NoSamples };
            count(&self.counters, reasons, Some(account), Err(why));
            Counters::add(&self.counters.spans.kept_unreported, 1);
        }
        is_over
    }

    /// A hash of a span's name and values, by which its limits are known.
    fn name_hash(&self, closing: &SpanSnapshot, callsite: &Callsite) -> u64 {
        let values = self.read_values(closing, |values| hash_of(values));
        hash_of((callsite.metadata.name(), values))
    }

    /// What samples in a closing span link to. `reach` finds OpenTelemetry spans.
    fn link(&self, closing: &SpanSnapshot, ids: Option<TraceIds>, reach: FindOtel<'_>) -> SpanLink {
        let has_on_cpu = closing.has(SAMPLED_ITSELF);
        let first = self.admission.first_link(closing.root);
        let at = first.as_ref().map_or(closing.closed_at, |first| first.at);
        let own = SpanLink { ids, at, has_on_cpu, ..SpanLink::default() };
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
        let ids_of = |span: &Ancestor| match span.key == closing.key {
            true => ids,
            // If OpenTelemetry does not know the span, it may not have started those around it.
            false => {
                let own = ids?;
                // A message can have a trace of its own inside a consumer.
                // Otherwise a program could still set its parent.
                let around = span.was_entered.then(|| reach(span.id)).flatten()?.ids();
                (around.trace == own.trace).then_some(around)
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

    /// Keeps a span. Returns whether the collector has work to do.
    fn keep(&self, closing: &SpanSnapshot, callsite: &Callsite, span: &mut KeptSpan) -> bool {
        let around = self.spans.enclosing(closing.id, closing.closed_at).into_iter().skip(1);
        span.around = around.map(|around| around.key).collect();
        let name = self.name_hash(closing, callsite);
        // A system call, and therefore not under admission's lock.
        let id = if span.samples.total() > 0 { ProfileId::random().ok() } else { None };
        let is_due = self.admission.keep(span, name, id);
        let times = Some(span.times()).filter(|_| !span.is_open());
        count(&self.counters, span.reasons(), times, span.profile);
        if !is_due {
            Counters::add(&self.counters.spans.kept_unreported, 1);
        }
        is_due
    }

    /// Not a part of the verdict, for which a thread may have little stack.
    #[inline(never)]
    fn close_reference(&self, closing: &SpanSnapshot, callsite: &Callsite, weight: u64) {
        let span = self.describe(closing, callsite, Reasons::default(), None);
        let (since, spent_ns) = (Instant::now(), 0);
        self.publish.references.close(ClosedReference { span, weight, since, spent_ns });
    }

    /// What is known of a span that closes or that is kept while it is open.
    fn describe(
        &self,
        closing: &SpanSnapshot,
        callsite: &Callsite,
        reasons: Reasons,
        trace: Option<TraceIds>,
    ) -> KeptSpan {
        let clock = &self.spans.clock;
        let open_ns = clock.raw_ns(clock.now()).saturating_sub(closing.opened_ns);
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let (redaction, now_unix_ns) =
            (&self.names.redaction, u64::try_from(now.as_nanos()).unwrap_or(0));
        let (error_at, error) = self.error_of(closing);
        let answered = self.callsites.answered.of(closing.key).flatten().map(|at| clock.raw_ns(at));
        KeptSpan {
            key: closing.key,
            root: closing.root,
            metadata: callsite.metadata,
            facts: Facts {
                span: redaction.redact_span(beginning(callsite.metadata.name())),
                target: redaction.redact_function(callsite.metadata.target()),
                fields: self.values_of(closing).into_vec(),
                reasons,
                rule: Some(callsite.rule.text(redaction)),
                times: closing.account,
                trace,
                error_at,
                // Not by its wall time: the thread may have been preempted since the close.
                start_unix_ns: now_unix_ns.saturating_sub(open_ns),
                ..Facts::default()
            },
            rule: callsite.rule.id,
            error,
            opened_ns: closing.opened_ns,
            answered_ns: answered.map(|ns| ns.saturating_sub(closing.opened_ns)),
            stopped_ns: 0,
            samples: closing.samples,
            profile: Err(self.source.without_samples(&closing.account)),
            earlier: Vec::new(),
            around: Vec::new(),
            link: SpanLink::default(),
        }
    }

    /// Where the first error in a span was logged, which is unknown of the crate `log`, and what it says.
    #[inline(never)]
    fn error_of(&self, closing: &SpanSnapshot) -> (Option<String>, Option<(Arc<str>, bool)>) {
        let known = || self.callsites.logged_errors.of(closing.key);
        let Some(error) = closing.has(FAILED).then(known).flatten() else { return (None, None) };
        let (redaction, place) = (&self.names.redaction, error.place.as_ref());
        let place = place.map(|(file, line)| place_of(&redaction.redact_source(file), *line));
        (place, Some((error.line(redaction), error.is_panic)))
    }

    /// Reads the values of the span's fields that are shown, if there are any.
    fn read_values<T>(
        &self,
        closing: &SpanSnapshot,
        read: impl Fn(&FieldValues) -> T,
    ) -> Option<T> {
        closing.has(SHOWS_FIELDS).then(|| self.names.read(closing.id, read)).flatten()
    }

    /// The values themselves, redacted.
    fn values_of(&self, closing: &SpanSnapshot) -> FieldValues {
        let is_any = closing.has(SHOWS_FIELDS);
        if is_any { self.names.values_of(closing.id) } else { FieldValues::default() }
    }

    /// The name of a span, with its route if that is known.
    pub(crate) fn name_of(&self, span: OtherSpan) -> String {
        self.name_by(self.names.number_of(&self.spans, span)).unwrap_or_default()
    }

    /// The name with that number, or of the spans with that plan.
    pub(crate) fn name_by(&self, number: u64) -> Option<String> {
        self.names.name_of(number, |plan| self.callsites.name_of(plan))
    }

    pub(crate) fn keep_open(
        &self,
        open: &SpanSnapshot,
        reasons: Reasons,
        deadlock: Option<Arc<str>>,
    ) {
        if let Some(callsite) = self.callsites.get(open.plan) {
            let mut span = self.describe(open, callsite, reasons, None);
            (span.facts.is_open, span.facts.deadlock) = (true, deadlock);
            let is_due = self.keep(open, callsite, &mut span);
            if is_due && let Some(request) = self.spans.request_of(open.id, open.key) {
                // Asking for its OpenTelemetry span is possible only on the thread that closes it.
                keep_traces_begun_in(|span| {
                    span.layer == self.spans.layer && request.contains(&span.key)
                });
            }
        }
    }
}

#[derive(Debug)]
pub(crate) struct RunningSource {
    /// Describes it and what it cannot see; a warning if that is less than was requested.
    pub(crate) line: LogEvent,
    pub(crate) sampler: Sampler,
}

impl RunningSource {
    pub(crate) fn describe(&self) -> String {
        let found = &self.line.message;
        let more = self.sampler.unsampled().map(report::source::unsampled);
        more.map_or_else(|| found.clone(), |why| format!("{found}; {why}"))
    }

    /// Why a span has no samples.
    pub(crate) fn without_samples(&self, account: &TimeBreakdown) -> NoProfile {
        if self.sampler.is_refused() {
            NoProfile::SamplingUnavailable
        } else if account.has_no_sampled_time() && self.sampler.unsampled().is_some() {
            NoProfile::ThreadsNotSampled
        } else {
            NoProfile::NoSamples
        }
    }
}

/// Counts a kept span, with its times if it has closed, and why it has no profile.
fn count(
    counters: &Counters,
    reasons: Reasons,
    times: Option<&TimeBreakdown>,
    profile: Result<ProfileId, NoProfile>,
) {
    counters.add_kept(reasons);
    if let Some(times) = times {
        Counters::add(&counters.spans.kept_on_cpu_ns, times.on_cpu_ns);
        Counters::add(&counters.spans.kept_sampled_ns, times.sampled_ns);
    }
    let without = match profile {
        Ok(_) => return,
        Err(
            NoProfile::NoSamples | NoProfile::SamplingUnavailable | NoProfile::ThreadsNotSampled,
        ) => &counters.spans.no_profile_no_samples,
        Err(NoProfile::RateLimit) => &counters.spans.no_profile_rate_limit,
        Err(NoProfile::ExporterBusy) => &counters.spans.no_profile_queue_full,
        Err(NoProfile::TreeFull) => &counters.spans.no_profile_too_many_spans,
        Err(NoProfile::ExporterFails) => &counters.spans.no_profile_exporter_fails,
        Err(NoProfile::NoMemory) => &counters.spans.no_profile_no_memory,
        Err(NoProfile::NoId) => &counters.spans.no_profile_no_id,
    };
    Counters::add(without, 1);
}
