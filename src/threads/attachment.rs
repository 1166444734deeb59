//! Whether a thread is sampled: that begins, goes on at another rate, and ends.
//!
//! Attaching takes 150 µs, so a session goes on for 10 ms after the thread has left such spans, up to 0.64 s if it
//! comes back. An event is opened disabled, its session is published, and only then is it enabled: hooks know the
//! session before they can miss a sample.

use std::time::{Duration, Instant};

use super::sampled::SampledThread;
use super::waits::CAPTURES;
use crate::budget::CpuBudget;
use crate::drain::{Cost, Demand, DemandBudgets, Why};
use crate::sampler::{AttachThreads as _, Periods, Rate, Sampler, SwitchRing};

pub(crate) struct Attachment {
    phase: Phase,
    demand: Option<Demand>,
    /// Whether one of its spans was past its sampling delay then, so that its waits are captured.
    pub(super) is_slow: bool,
    /// When a check last found a demand, and who pays: the last one.
    wanted: Option<Instant>,
    payer: Why,
    attached: Option<Instant>,
    /// How long it stays attached without a demand.
    linger: Duration,
    /// The thread attached itself for one span alone, and does not stay attached after that.
    is_brief: bool,
    timing: Timing,
    /// The thread cannot be sampled by a timer: that was refused, or timers do not see its stack.
    needs_perf: bool,
    /// The last check left it out only because no thread might be attached.
    is_left_out: bool,
    budgets: DemandBudgets,
}

enum Phase {
    Detached {
        failed: Option<Instant>,
    },
    Attached,
    /// No longer sampled; detached once all of it is drained.
    Ending {
        why: EndReason,
        since: Instant,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EndReason {
    Unused,
    /// The thread is attached again at another rate.
    OtherRate,
}

#[derive(Clone, Copy)]
pub(crate) struct Check<'a> {
    pub(crate) at: Instant,
    /// In ticks.
    pub(crate) now: u64,
    /// `CLOCK_MONOTONIC_RAW` in nanoseconds.
    pub(crate) now_ns: u64,
    pub(crate) may_attach: bool,
    pub(crate) may_change: bool,
    /// The factor by which the CPU budget lengthens sampling periods.
    pub(crate) times: f64,
    /// How often the thread is to be sampled for a profile of the process, and for which.
    pub(crate) process: Option<(Why, Periods)>,
    pub(crate) source: &'a Sampler,
}

/// A thread that is attached again within [`SOON`] stays attached for twice as long, up to [`LONGEST_LINGER`]. Attaching
/// then takes at most 2 % of a core.
const SOON: Duration = Duration::from_secs(1);
const LONGEST_LINGER: Duration = Duration::from_millis(640);

#[derive(Clone, Copy, Debug)]
pub(crate) struct Timing {
    /// How long a thread stays attached without a demand, at first.
    pub(crate) linger: Duration,
    /// How long a thread that attaches itself stays attached without a demand, at first.
    pub(crate) own_linger: Duration,
    pub(crate) attaching: CpuBudget,
    pub(crate) captures: CpuBudget,
    /// The longest interval between scans while a thread is in a span.
    pub(crate) longest_scan_interval: Duration,
    /// When to say that there was no span.
    pub(crate) first_look: Duration,
}

impl Timing {
    /// Attaching a thread takes the collector some 150 µs, and 300 can be attached at once. Each context switch of an
    /// attached thread costs it 3 to 15 µs more.
    pub(crate) const USUAL: Self = Self {
        linger: Duration::from_millis(10),
        own_linger: LONGEST_LINGER,
        attaching: CpuBudget::new(2, 50_000_000),
        captures: CAPTURES,
        longest_scan_interval: Duration::MAX,
        first_look: Duration::from_secs(30),
    };

    /// As fast as possible: only threads that attach themselves stay attached.
    #[cfg(test)]
    pub(crate) const FASTEST: Self = Self {
        linger: Duration::ZERO,
        own_linger: Duration::MAX,
        attaching: CpuBudget::new(100, i64::MAX),
        captures: CpuBudget::new(100, i64::MAX),
        longest_scan_interval: Duration::from_micros(100),
        first_look: Duration::ZERO,
    };
}

/// How long a thread that waits to be attached at another rate may go without samples.
const LONGEST_PAUSE: Duration = Duration::from_millis(10);
/// The pause before another attempt to attach a thread. Others may have released resources by then.
const RETRY: Duration = Duration::from_secs(10);

impl Attachment {
    pub(crate) fn new(timing: Timing, is_attached: bool) -> Self {
        Self {
            phase: if is_attached { Phase::Attached } else { Phase::Detached { failed: None } },
            demand: None,
            is_slow: false,
            wanted: None,
            // A thread attaches itself for its spans alone.
            payer: Why::SlowSpan,
            attached: is_attached.then(Instant::now),
            linger: timing.linger,
            is_brief: false,
            timing,
            needs_perf: false,
            is_left_out: false,
            budgets: DemandBudgets::new(1),
        }
    }

    pub(crate) fn is_for_spans(&self) -> bool {
        !self.is_detached() && self.payer == Why::SlowSpan
    }

    pub(crate) fn is_detached(&self) -> bool {
        matches!(self.phase, Phase::Detached { .. })
    }

    /// Whether it has just attached itself for one span alone, which is over.
    pub(crate) fn is_to_end(&self, at: Instant) -> bool {
        // In another span, it may have to stay attached until its next hook.
        const LONGEST: Duration = Duration::from_millis(20);
        let is_recent = |attached| at.saturating_duration_since(attached) < LONGEST;
        self.is_brief
            && self.demand.is_none()
            && matches!(self.phase, Phase::Attached)
            && self.attached.is_some_and(is_recent)
    }

    pub(crate) fn changes_rate(&self) -> bool {
        matches!(self.phase, Phase::Ending { why: EndReason::OtherRate, .. })
    }

    /// The rate for a demand with these periods, according to the thread's own budget and to that of all threads.
    fn rate(
        &mut self,
        (why, periods): (Why, Periods),
        check: &Check<'_>,
        all: &mut DemandBudgets,
    ) -> Rate {
        let own = self.budgets.of(why).frequency(check.now_ns);
        let frequency = own.max(all.of(why).frequency(check.now_ns));
        let rate = why.rate(frequency, periods);
        let by_timer = rate.by_timer && check.source.may_have_timers() && !self.needs_perf;
        Rate { by_timer, ..rate.slowed(check.times) }
    }

    /// `is_brief` if it attached itself for one span alone.
    fn note_attached(&mut self, is_brief: bool) {
        let now = Instant::now();
        let before = self.attached.replace(now);
        self.is_brief = is_brief;
        let is_soon = before.is_some_and(|before| now.duration_since(before) < SOON);
        let longer = (2 * self.linger).clamp(self.timing.linger, LONGEST_LINGER);
        self.linger = match (is_brief, is_soon) {
            (true, _) => Duration::ZERO,
            (_, true) => longer,
            (_, false) => self.timing.linger,
        };
        self.phase = Phase::Attached;
    }
}

impl SampledThread {
    /// Moves on to the next session if the present one has ended: the thread may have attached itself.
    pub(crate) fn go_to_next_session(&mut self) {
        if self.cursor.go_to_next_session() {
            let session = &self.cursor.session;
            self.attachment.needs_perf |= session.rate.by_timer && session.has_switch_records();
            let is_brief = self.cursor.thread.take_brief();
            self.attachment.note_attached(is_brief);
        }
    }

    /// Attaches the thread if there is a demand, and begins to detach it if there was none for a while. Returns whether its
    /// session is to end.
    pub(crate) fn check(&mut self, check: &Check<'_>, all: &mut DemandBudgets) -> bool {
        self.go_to_next_session();
        let attachment = &mut self.attachment;
        let mut demand = |why, periods| {
            let rate = attachment.rate((why, periods), check, all);
            Demand { rate, why }
        };
        let slow_span = demand(Why::SlowSpan, check.source.periods());
        let process = check.process.map(|(why, periods)| demand(why, periods));
        attachment.is_slow = self.cursor.thread.samples_from() <= check.now;
        let slow = attachment.is_slow.then_some(slow_span);
        attachment.demand = Demand::highest(slow.into_iter().chain(process));
        // Of the thread, too, if it attaches itself: for its spans.
        let own = attachment.demand.filter(|demand| demand.why == Why::Process);
        self.cursor.thread.set_rate(own.unwrap_or(slow_span).rate);
        let last = attachment.wanted.max(attachment.attached);
        let own = self.cursor.thread.attaches_at_enter().then_some(attachment.timing.own_linger);
        let own = own.filter(|_| !attachment.is_brief);
        let linger = own.unwrap_or(attachment.linger);
        if let Some(Demand { rate, why }) = attachment.demand {
            // It goes on for as long as without the profile.
            let lingers = why == Why::Continuous
                && attachment.payer != why
                && matches!(attachment.phase, Phase::Attached)
                && !check.is_after(last, linger);
            if lingers {
                return false;
            }
            (attachment.wanted, attachment.payer) = (Some(check.at), why);
            self.go_on(check);
            if check.may_change && self.has_other_rate(rate) && !self.is_enough(why, rate) {
                self.begin_to_end(EndReason::OtherRate);
            }
            self.attach(check);
        } else if check.is_after(last, linger) {
            self.begin_to_end(EndReason::Unused);
        }
        matches!(self.attachment.phase, Phase::Ending { .. })
    }

    /// Continues a session that was about to end, also if the thread is blocked or could not be attached again.
    fn go_on(&mut self, check: &Check<'_>) {
        let Phase::Ending { why, since } = self.attachment.phase else { return };
        let is_late = || check.is_after(Some(since), LONGEST_PAUSE) && !self.can_end(why);
        if why == EndReason::Unused || !check.may_attach || is_late() {
            self.attachment.phase = Phase::Attached;
            check.source.start_again(&self.cursor.thread, &self.cursor.session);
            self.detector.skip_records(&self.cursor, check.now_ns);
        }
    }

    fn attach(&mut self, check: &Check<'_>) {
        let Phase::Detached { failed } = self.attachment.phase else { return };
        if !check.may_attach || !check.is_after(failed, RETRY) {
            return;
        }
        check.source.attach(&self.cursor.thread);
        self.go_to_next_session();
        if let Phase::Detached { failed } = &mut self.attachment.phase {
            *failed = Some(check.at);
        }
    }

    fn begin_to_end(&mut self, why: EndReason) {
        if matches!(self.attachment.phase, Phase::Attached) && self.can_end(why) {
            self.attachment.phase = Phase::Ending { why, since: Instant::now() };
            self.cursor.pause();
        }
    }

    /// Ends a session that is completely drained. `now_ns` is `CLOCK_MONOTONIC_RAW`. Returns whether the thread is to be
    /// attached again.
    pub(crate) fn end_session(&mut self, now_ns: u64, source: &Sampler) -> bool {
        let Phase::Ending { why, .. } = self.attachment.phase else { return false };
        if !self.cursor.is_drained() || !self.can_end(why) || !self.cursor.end(source) {
            return false;
        }
        let changes_rate = why == EndReason::OtherRate;
        self.attachment.phase = Phase::Detached { failed: None };
        if changes_rate {
            self.detector.begin_by_clock(&self.cursor, now_ns);
        }
        changes_rate
    }

    /// Whether the session can end. If it ends for another rate, hooks may count the remaining samples later: the next hook
    /// may be far away, and a thread that stays in one span needs its new rate too. The same if it was for a profile of the
    /// process: that thread may stay in a span that is never sampled.
    fn can_end(&self, why: EndReason) -> bool {
        let may_be_later = why == EndReason::OtherRate || self.attachment.payer != Why::SlowSpan;
        let may_be_uncounted = may_be_later && self.cursor.may_be_uncounted();
        (may_be_uncounted || self.cursor.is_counted())
            && !self.cursor.thread.is_in_hook()
            && self.waiting().is_none()
    }

    /// Whether its rate should change by more than half. Not while it is switched out to wait: the present session has
    /// to record that wait.
    fn has_other_rate(&self, Rate { period_ns, by_timer }: Rate) -> bool {
        let session = &self.cursor.session;
        let now_ns = session.rate.period_ns;
        let is_other = now_ns.abs_diff(period_ns) > now_ns.min(period_ns) / 2
            || by_timer && session.has_switch_records()
            || !by_timer && self.has_timer_for_switches();
        let out = self.cursor.switches().and_then(SwitchRing::switched_out);
        self.cursor.is_attached() && is_other && out.is_none_or(|out| out.preempted)
    }

    /// Whether a session at a higher rate goes on for a profile of the process, as long as the budget allows: a thread that
    /// is in a slow span now and then would have no samples while its rate changes.
    fn is_enough(&mut self, why: Why, rate: Rate) -> bool {
        why == Why::Process
            && !rate.by_timer
            && self.cursor.session.rate.period_ns < rate.period_ns
            && self.attachment.budgets.of(why).is_full()
    }

    /// Whether it is sampled by a timer although perf is possible, because it is switched so often.
    fn has_timer_for_switches(&self) -> bool {
        self.cursor.session.rate.by_timer && !self.cursor.session.has_switch_records()
    }

    /// Samples of its timer had no callers.
    pub(crate) fn prefer_perf(&mut self) {
        self.attachment.needs_perf |= self.has_timer_for_switches();
    }

    /// Whether the thread is newly found to be wanted, and is not attached only because no thread may be.
    pub(crate) fn is_newly_left_out(&mut self, check: &Check<'_>) -> bool {
        let may_be_tried = match self.attachment.phase {
            Phase::Detached { failed } => check.is_after(failed, RETRY),
            Phase::Attached | Phase::Ending { .. } => false,
        };
        let is_wanted = self.attachment.demand.is_some() && !self.cursor.thread.is_refused();
        let is_out = !check.may_attach && may_be_tried && is_wanted;
        !std::mem::replace(&mut self.attachment.is_left_out, is_out) && is_out
    }

    /// Takes what sampling the thread has cost since the last call from its budget and from that of all threads.
    pub(crate) fn charge(&mut self, all: &mut DemandBudgets) {
        let (why, cost) = (self.attachment.payer, self.cursor.take_cost());
        let own = self.attachment.budgets.of(why);
        // At the low rate its samples take nothing that others could have.
        let samples_ns = if own.is_full() { cost.samples_ns } else { 0 };
        own.charge(cost);
        all.of(why).charge(Cost { samples_ns, ..cost });
    }
}

impl Check<'_> {
    fn is_after(&self, then: Option<Instant>, duration: Duration) -> bool {
        then.is_none_or(|then| self.at.saturating_duration_since(then) > duration)
    }
}
