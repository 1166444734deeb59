//! What the hooks, the handle and the collector share.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use crossbeam::channel::{self, Sender};
use parking_lot::{Mutex, RwLock};
use tracing::Dispatch;
use tracing::dispatcher::WeakDispatch;

use super::command::Command;
use super::gate::Gate;
use super::run::Collector;
use super::worker::{Worker, WorkerParts};
use crate::error::Error;
use crate::export::Exporter;
use crate::keep::{Callsite, Callsites, Keeper, KeptSpan, NoProfile, OnKept, Reasons};
use crate::otel::{
    AttributeNames, Close, ClosingSpan, Ended, EndedSpan, Found, FoundClose, LayerOrder, Meeting,
    Order, OtelSpan, SpanEnds, TOO_LONG,
};
use crate::profile::ProfileId;
use crate::sampler::{Sampler, SourceSettings};
use crate::span::{Closing, RegistryId, Spans, TraceIds, Verdict, forget_this_thread, is_ignored};
use crate::stats::{Counters, Stats};
use crate::sys::{self, Poller, Waker};

/// Finds the OpenTelemetry span of a span that closes.
pub(crate) type FindOtel<'a> = &'a mut dyn FnMut() -> Option<OtelSpan<'a>>;

/// How much may be held, and how much may be made of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) memory_bytes: usize,
    pub(crate) samples_per_profile: usize,
    pub(crate) frames_per_stack: usize,
    /// That are copied of a stack.
    pub(crate) stack_bytes: usize,
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
    pub(crate) base_period_ns: u64,
    pub(crate) source_settings: SourceSettings,
    pub(crate) exporter: Box<dyn Exporter>,
    /// What is wrong with it, if something is.
    pub(crate) problem: Option<String>,
    pub(crate) on_kept: Option<OnKept>,
    pub(crate) only_sampled_traces: bool,
    pub(crate) attributes: AttributeNames,
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
    attributes: AttributeNames,
    pub(crate) order: LayerOrder,
    /// If a processor sees OpenTelemetry's spans end.
    meeting: OnceLock<Meeting>,
    /// What was wrong with the exporter from the beginning, until it is said.
    problem: Mutex<Option<String>>,
    commands: Sender<Command>,
    pub(crate) gate: &'static Gate,
    /// The fork generation of the process in which our threads run.
    made_in: u32,
    dispatch: RwLock<Option<WeakDispatch>>,
}

impl Engine {
    /// Starts the two threads.
    ///
    /// # Errors
    ///
    /// If the system does not let us.
    pub(crate) fn start(parts: Parts) -> Result<Arc<Self>, Error> {
        let (commands, received) = channel::unbounded();
        let (jobs, to_do) = channel::unbounded();
        sys::on_fork(|| {
            forget_this_thread();
            Gate::close_all();
        });
        let gate = Gate::new();
        let is_failing = parts.problem.is_some();
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
            source_line: parts.source.describe(parts.base_period_ns),
            attributes: parts.attributes,
            problem: Mutex::new(parts.problem),
            order: LayerOrder::default(),
            meeting: OnceLock::new(),
            commands,
            gate,
            made_in: sys::fork_generation(),
            dispatch: RwLock::new(None),
        });
        let worker = WorkerParts {
            engine: Arc::clone(&engine),
            jobs: to_do,
            exporter: parts.exporter,
            on_kept: parts.on_kept,
            is_failing,
        };
        let collector = Collector::new(
            Arc::clone(&engine),
            parts.source,
            parts.poller,
            received,
            jobs,
            parts.limits,
            parts.base_period_ns,
        );
        spawn("profiling-export", move || Worker::new(worker).run())?;
        spawn("profiling-drain", move || collector.run())?;
        Ok(engine)
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

    pub(crate) fn stats(&self) -> Stats {
        self.counters.snapshot()
    }

    /// Where our own events go.
    pub(crate) fn set_dispatch(&self, dispatch: &Dispatch) {
        *self.dispatch.write() = Some(dispatch.downgrade());
        // It says what it can see here, as soon as somebody listens.
        self.waker.wake();
    }

    /// Runs `action` with our subscriber as the default.
    pub(super) fn with_dispatch(&self, action: impl FnOnce()) {
        match self.dispatch() {
            Some(dispatch) => tracing::dispatcher::with_default(&dispatch, action),
            None => action(),
        }
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
    fn close_with(&self, id: RegistryId, otel: FindOtel<'_>, close: Option<&mut Close>) {
        let mut must_know = false;
        self.spans.close(id, |closing| {
            let verdict = self.judge(closing, otel, close);
            must_know = verdict.must_know;
            verdict
        });
        // Now that the collector has been told.
        if must_know || self.spans.has_many_notices() {
            self.waker.wake();
        }
    }

    /// The same where a processor sees OpenTelemetry's spans end, on this thread just before or in
    /// a moment.
    #[cold]
    fn close_and_meet(&self, id: RegistryId, otel: FindOtel<'_>, meeting: &Meeting) {
        if meeting.is_direct() {
            self.close_with(id, otel, None);
            return;
        }
        let span = self.closing_span(id);
        match meeting.take(span.as_ref()) {
            Found::End(ended) => {
                ended.with(|data| {
                    self.close_with(id, &mut || Some(OtelSpan::Ended(data)), None);
                });
                return;
            }
            Found::OtherEnd(other) => other.hand_on(),
            Found::OtherClose(other) => self.conclude(other, None),
            Found::Nothing => {}
        }
        let Some(span) = span.filter(|_| meeting.order() != Order::Theirs) else {
            self.close_with(id, otel, None);
            return;
        };
        let mut close = Close::new(span);
        self.close_with(id, otel, Some(&mut close));
        let is_plain = close.is_plain();
        if meeting.is_direct() {
            // Another thread has just found that out: no end will ask for this.
            self.conclude(close, None);
        } else if meeting.order() == Order::Unknown || !is_plain {
            meeting.leave_close(close);
            if !is_plain {
                self.watch(meeting);
            }
        }
    }

    fn closing_span(&self, id: RegistryId) -> Option<ClosingSpan> {
        let (opened, plan) = self.spans.opened(id)?;
        let metadata = self.callsites.callsite(plan)?.metadata;
        Some(ClosingSpan { metadata, opened })
    }

    /// A close whose end has come, or will not come.
    fn conclude(&self, close: Close, ids: Option<TraceIds>) {
        if let Some(key) = close.untold {
            self.spans.tell_closed(key, ids);
            self.waker.wake();
        }
    }

    fn watch(&self, meeting: &Meeting) {
        if meeting.needs_watching() {
            self.waker.wake();
        }
    }

    /// Ends what has waited too long for its other half. Returns what is to be handed on, and how
    /// soon to look again, if that must be.
    pub(super) fn look_after_meeting(&self) -> (Vec<EndedSpan>, Option<Duration>) {
        let Some(meeting) = self.meeting.get().filter(|meeting| meeting.is_watched()) else {
            return (Vec::new(), None);
        };
        // One for the moment in which they are nowhere.
        meeting.send_off(1);
        let (ended, closes) = meeting.give_up(TOO_LONG);
        meeting.send_off(ended.len());
        meeting.arrive();
        closes.into_iter().for_each(|close| self.conclude(close, None));
        (ended, meeting.is_watched().then_some(TOO_LONG))
    }

    /// Nothing waits any more. Returns what is to be handed on.
    pub(super) fn end_meeting(&self) -> Vec<EndedSpan> {
        let Some(meeting) = self.meeting.get() else { return Vec::new() };
        let ended = meeting.end();
        meeting.send_off(ended.len());
        ended
    }

    /// Hands on what [`look_after_meeting`](Self::look_after_meeting) gave.
    pub(super) fn hand_on_later(&self, ended: Vec<EndedSpan>) {
        for span in ended {
            // A processor is not ours.
            _ = catch_unwind(AssertUnwindSafe(|| span.hand_on()));
            if let Some(meeting) = self.meeting.get() {
                meeting.arrive();
            }
        }
    }

    /// From now on a processor will see OpenTelemetry's spans end.
    pub(crate) fn expect_ends(&self) {
        self.meeting.get_or_init(Meeting::default);
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
        let Some(callsite) = self.callsites.callsite(closing.plan) else {
            return Verdict::default();
        };
        let reasons = Reasons::judge(&callsite.keep, closing);
        if reasons.is_empty() && !closing.announced {
            return Verdict::default();
        }
        // Samples of this span may be in the profile of one around it: there they name it.
        let mut otel = otel();
        let ids = otel.as_ref().map(OtelSpan::ids);
        let meeting = self.meeting.get();
        match (&otel, meeting) {
            (None, None) if self.order.suspect() => self.gate.set_look(true),
            (Some(OtelSpan::Open(_)), Some(meeting)) => meeting.note_direct(),
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
            opened: SystemTime::now()
                .checked_sub(Duration::from_nanos(closing.account.wall_ns))
                .unwrap_or(SystemTime::UNIX_EPOCH),
            samples: closing.samples,
            profile: Err(self.without_samples),
            earlier: Vec::new(),
            account: closing.account,
            trace,
        };
        let is_due = self.keeper.keep(&mut span, || ProfileId::random().ok());
        self.count(&span);
        (span, is_due)
    }

    fn count(&self, span: &KeptSpan) {
        let counters = &self.counters;
        Counters::add(&counters.spans_kept, 1);
        let without = match span.profile {
            Ok(_) => return,
            Err(NoProfile::NoSamples | NoProfile::NoStacksHere) => {
                &counters.spans_kept_without_samples
            }
            Err(NoProfile::RateLimit) => &counters.spans_kept_over_rate_limit,
            Err(NoProfile::ExporterBusy) => &counters.spans_kept_exporter_busy,
            Err(NoProfile::ExporterFails) => &counters.spans_kept_exporter_fails,
            Err(NoProfile::NoMemory) => &counters.spans_kept_no_memory,
            Err(NoProfile::NoId) => &counters.spans_kept_without_id,
        };
        Counters::add(without, 1);
    }

    /// Exports what has been kept until now. Returns whether that was done before the deadline.
    pub(crate) fn flush(&self, deadline: Instant) -> bool {
        let (done, wait) = channel::bounded(1);
        self.ask(Command::Flush(done)) && wait.recv_deadline(deadline).is_ok()
    }

    /// The same, and then ends everything.
    pub(crate) fn shutdown(&self, deadline: Instant) -> bool {
        let (done, wait) = channel::bounded(1);
        self.ask(Command::Shutdown(Some(done))) && wait.recv_deadline(deadline).is_ok()
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

impl SpanEnds for Engine {
    fn ended(&self, mut ended: Ended) {
        let meeting = self.meeting.get().filter(|meeting| !meeting.is_direct());
        let Some(meeting) = meeting.filter(|_| self.is_running()) else {
            ended.hand_on();
            return;
        };
        match meeting.take_close(&mut ended) {
            FoundClose::Same(mut close) => {
                let ids = ended.ids();
                let kept = close.kept.take().map(|kept| KeptSpan { trace: Some(ids), ..*kept });
                self.conclude(close, Some(ids));
                let attributes = kept.map(|kept| self.attributes.of(&kept)).unwrap_or_default();
                meeting.leave_said(ids.span, attributes.clone());
                ended.hand_on_with(attributes);
                return;
            }
            FoundClose::Said => {
                ended.hand_on();
                return;
            }
            FoundClose::Other(other) => self.conclude(other, None),
            FoundClose::Nothing => {}
        }
        if meeting.order() == Order::Ours {
            ended.hand_on();
            return;
        }
        if let Some(other) = meeting.leave_ended(ended) {
            other.hand_on();
        }
        self.watch(meeting);
    }

    fn hand_on(&self) {
        // In the child of a fork another thread may hold a lock for ever, and what waits is the
        // parent's.
        let meeting = self.meeting.get().filter(|_| self.made_in == sys::fork_generation());
        if let Some(meeting) = meeting.filter(|meeting| !meeting.is_direct()) {
            let (ended, closes) = meeting.give_up_for_flush();
            closes.into_iter().for_each(|close| self.conclude(close, None));
            ended.into_iter().for_each(EndedSpan::hand_on);
            // Those that the collector has given up just before. (Our own thread would wait for
            // itself.)
            if !is_ignored() {
                meeting.wait_for_arrivals(Duration::from_secs(1));
            }
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if self.made_in == sys::fork_generation() {
            let ended = self.end_meeting();
            self.hand_on_later(ended);
        }
    }
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<(), Error> {
    let run = move || {
        crate::span::ignore_this_thread();
        run();
    };
    let spawned = thread::Builder::new().name(name.to_owned()).spawn(run);
    spawned.map(drop).map_err(Error::thread)
}
