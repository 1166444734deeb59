//! The collector's state of one sampled thread: when and how often it is sampled.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::budget::Share;
use super::waits::{ScanResult, Scanner, WaitingThread, Watch};
use super::watchdog::CpuTimes;
use crate::sampler::{Allowance, Level, Sampler, Spent, SwitchRing, switches_between};
use crate::sampler::{ArmThreads as _, Arming, Rate, SampledThread, SpanInterval};
use crate::sys::{self, TimerRing};

/// A sampled thread.
#[derive(Debug)]
pub(super) struct Sampled {
    pub(super) sampled_thread: Arc<SampledThread>,
    /// The oldest of its armings that has not been drained completely.
    pub(super) arming: Arc<Arming>,
    /// Span intervals beyond the last sample that was read.
    pub(super) intervals: VecDeque<SpanInterval>,
    /// Since when the thread was in no profiled span at each check.
    unused_since: Option<Instant>,
    watch: Watch,
    /// Whether the last scan found it in an old span.
    pub(super) is_old: bool,
    /// When a scan last found it in an old span.
    old: Option<Instant>,
    /// When it was last armed, and when arming it last failed.
    armed: Option<Instant>,
    tried: Option<Instant>,
    /// How long it stays armed outside old spans.
    hold: Duration,
    least_hold: Duration,
    /// The same for a thread that arms itself.
    own_hold: Duration,
    /// It is no longer sampled, and its arming ends once all of it is drained.
    closing: Option<DisarmReason>,
    paused: Option<Instant>,
    is_left_out: bool,
    /// It is sampled by a timer although perf is possible, because it is switched so often.
    pub(super) has_timer_for_switches: bool,
    /// It cannot be sampled by a timer: that was refused, or the thread runs on other stacks than its own.
    pub(super) needs_perf: bool,
    /// It is being rearmed at another rate, so how soon it is armed again says nothing about its old spans.
    is_rearmed: bool,
    allowance: Allowance,
    level: Level,
    /// Samples that were read since the last [`spend`](Self::spend).
    pub(super) unspent: u64,
    /// The position up to which context switches were counted.
    switched: u64,
    pub(super) cpu_times: CpuTimes,
    /// Earlier armings that are drained, but whose samples its hooks have not all counted.
    uncounted: Vec<Arc<Arming>>,
    /// The position up to which samples are drained, as hooks see positions.
    pub(super) drained: u64,
    /// How many samples of the open interval were drained, and where that interval begins.
    pub(super) counted: u64,
    pub(super) counted_from: u64,
}

/// The inputs for checking whether a thread's spans are old.
#[derive(Clone, Copy)]
pub(super) struct AgeCheck<'a> {
    pub(super) at: Instant,
    /// In ticks.
    pub(super) now: u64,
    /// `CLOCK_MONOTONIC_RAW` in nanoseconds.
    pub(super) now_ns: u64,
    pub(super) may_arm: bool,
    /// Whether a thread may be rearmed at another rate.
    pub(super) may_change: bool,
    /// The factor by which the CPU budget lengthens sampling periods.
    pub(super) times: f64,
    /// The level of the common allowance: no thread is sampled more often than that.
    pub(super) level: Level,
    pub(super) source: &'a Sampler,
}

/// Why an arming ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DisarmReason {
    /// The thread was in no old span for a while.
    Unused,
    /// The thread is rearmed at another rate.
    OtherRate,
}

/// A thread that is armed again within [`SOON`] stays armed for twice as long, up to [`MOST_HOLD`]. Arming then takes
/// at most 2 % of a core.
const SOON: Duration = Duration::from_secs(1);
const MOST_HOLD: Duration = Duration::from_millis(640);
/// How fast threads are armed and disarmed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    /// How long a thread stays armed outside old spans, at first.
    pub(super) hold: Duration,
    /// The same for a thread that arms itself.
    pub(super) own_hold: Duration,
    /// The CPU budget for arming threads.
    pub(super) arming: Share,
    /// The longest interval between scans while a thread is in a span.
    pub(super) longest_scan_interval: Duration,
    /// When to say that there was no span.
    pub(super) first_look: Duration,
}

impl Pace {
    /// Arming a thread takes the collector some 150 µs, and 300 can be armed at once. Each context switch of an armed
    /// thread costs it 3 to 15 µs more.
    pub(crate) const USUAL: Self = Self {
        hold: Duration::from_millis(10),
        own_hold: MOST_HOLD,
        arming: Share::new(2, 50_000_000),
        longest_scan_interval: Duration::MAX,
        first_look: Duration::from_secs(30),
    };

    /// As fast as possible: only threads that arm themselves stay armed.
    #[cfg(test)]
    pub(crate) const FASTEST: Self = Self {
        hold: Duration::ZERO,
        own_hold: Duration::MAX,
        arming: Share::new(100, i64::MAX),
        longest_scan_interval: Duration::from_micros(100),
        first_look: Duration::ZERO,
    };
}

/// How long a thread that waits to be rearmed at another rate may go without samples.
const LONGEST_PAUSE: Duration = Duration::from_millis(10);
/// How many ended armings may have samples that hooks have not counted.
const MOST_UNCOUNTED: usize = 16;
/// The pause before another attempt to arm a thread. Others may have released resources by then.
const RETRY: Duration = Duration::from_secs(10);

/// How soon half of a ring may be full. The kernel could wake the collector instead, but that takes a file, and the
/// program may close all files.
pub(super) fn fill_time(sampled: &[Sampled]) -> Duration {
    const SHORTEST: Duration = Duration::from_micros(250);
    let soonest = sampled.iter().filter_map(Sampled::fill_time).min();
    soonest.map_or(Duration::MAX, |soonest| soonest.max(SHORTEST))
}

impl Sampled {
    pub(super) fn new(
        sampled_thread: Arc<SampledThread>,
        Pace { hold, own_hold, .. }: Pace,
    ) -> Self {
        let arming = sampled_thread.last();
        Self {
            armed: arming.ring.is_some().then(Instant::now),
            arming,
            sampled_thread,
            intervals: VecDeque::new(),
            unused_since: None,
            watch: Watch::default(),
            is_old: false,
            old: None,
            tried: None,
            hold,
            least_hold: hold,
            own_hold,
            closing: None,
            paused: None,
            is_left_out: false,
            has_timer_for_switches: false,
            needs_perf: false,
            is_rearmed: false,
            allowance: Allowance::of_a_thread(Instant::now()),
            level: Level::First,
            unspent: 0,
            switched: 0,
            cpu_times: CpuTimes::default(),
            uncounted: Vec::new(),
            drained: 0,
            counted: 0,
            counted_from: 0,
        }
    }

    /// How long until half of its ring is full if the thread runs all the time, or all of it if the thread is
    /// blocked.
    fn fill_time(&self) -> Option<Duration> {
        let ring = self.arming.ring.as_ref()?;
        let whole = (ring.data_size() as u64).checked_div(self.arming.sample_size())?;
        // The ring of a blocked thread is empty, and a scan notices that the thread continues before more than one
        // sample is lost. Earlier scans are not worth their wake-ups.
        let samples = if self.watch.waiting().is_some() { whole + 1 } else { (whole / 2).max(1) };
        let interval_ns =
            ring.timer().map_or(self.arming.period_ns(), TimerRing::least_interval_ns);
        Some(Duration::from_nanos(samples.saturating_mul(interval_ns)))
    }

    /// Whether half of its ring is full.
    pub(super) fn is_half_full(&self) -> bool {
        self.arming.ring.as_ref().is_some_and(|ring| {
            let used = ring.head().saturating_sub(ring.tail());
            used >= ring.data_size() as u64 / 2
        })
    }

    /// Checks whether the thread is blocked.
    pub(super) fn scan(&mut self, scanner: &mut Scanner<'_>) -> ScanResult {
        if self.sampled_thread.is_over() {
            self.watch.end(&self.sampled_thread, &self.arming, scanner);
            return ScanResult::OutsideSpans;
        }
        let span = self.sampled_thread.span();
        self.count_missed(span, scanner.pending, scanner.counters);
        if !self.is_old && self.watch.waiting().is_none() {
            return self.watch.pass(&self.sampled_thread, &self.arming, scanner);
        }
        self.watch.scan(&self.sampled_thread, &self.arming, scanner)
    }

    /// Arms the thread if it is in an old span, and begins to disarm it if it was in none for a while. Returns
    /// whether its arming is to end.
    pub(super) fn check_age(&mut self, check: &AgeCheck<'_>) -> bool {
        let AgeCheck { at, source, .. } = *check;
        let since = |then: Option<Instant>| then.map(|then| at.saturating_duration_since(then));
        // The thread may have armed itself.
        self.follow();
        let rate = self.wanted_rate(check);
        self.sampled_thread.set_rate(rate);
        self.is_old = self.sampled_thread.old_at() <= check.now;
        if self.is_old {
            self.old = Some(at);
            let goes_on = match self.closing {
                Some(DisarmReason::Unused) => true,
                // The thread is blocked, or could not be rearmed.
                Some(DisarmReason::OtherRate) => {
                    let is_late = since(self.paused).is_none_or(|since| since > LONGEST_PAUSE);
                    (is_late && !self.can_close()) || !check.may_arm
                }
                None => false,
            };
            if goes_on {
                self.closing = None;
                source.start_again(&self.sampled_thread, &self.arming);
                self.watch.skip_records(&self.sampled_thread, &self.arming, check.now_ns);
            }
            if check.may_change && self.has_other_rate(rate) {
                self.start_closing(DisarmReason::OtherRate);
            }
            let is_due = since(self.tried).is_none_or(|since| since >= RETRY);
            if check.may_arm && self.is_unarmed() && is_due {
                source.arm(&self.sampled_thread);
                self.follow();
                if self.is_unarmed() {
                    self.tried = Some(at);
                }
                self.has_timer_for_switches = rate.by_timer && !self.arming.has_switch_records();
                self.needs_perf |= rate.by_timer && self.arming.has_switch_records();
            }
        } else if self.is_unarmed() {
            self.is_rearmed = false;
        } else {
            let hold = if self.sampled_thread.arms_itself() { self.own_hold } else { self.hold };
            if since(self.old.max(self.armed)).is_none_or(|last| last > hold) {
                self.start_closing(DisarmReason::Unused);
            }
        }
        self.closing.is_some()
    }

    /// Whether it is about to be rearmed at another rate.
    pub(super) fn changes_rate(&self) -> bool {
        self.closing == Some(DisarmReason::OtherRate)
    }

    /// Whether it is newly found in an old span and is not sampled only because no thread may be armed.
    pub(super) fn is_newly_shed(&mut self, may_not_be_armed: bool) -> bool {
        let could_be = self.is_old && self.is_unarmed() && !self.sampled_thread.is_refused();
        let is_left_out = may_not_be_armed && could_be;
        !std::mem::replace(&mut self.is_left_out, is_left_out) && is_left_out
    }

    /// Takes what the thread has used since the last scan from its allowance. Returns the part that counts for the
    /// common allowance.
    pub(super) fn spend(&mut self, at: Instant) -> Spent {
        let samples = std::mem::take(&mut self.unspent);
        let switched = self.arming.switches.as_ref().map_or(0, |ring| ring.head());
        let (switches, until) = switches_between(self.switched, switched);
        self.switched = until;
        let spent = Spent::new(samples, switches, self.arming.period_ns());
        self.level = self.allowance.spend(spent, at);
        match self.level < Level::Last {
            true => spent,
            false => spent.without_samples(),
        }
    }

    /// Samples that have not been taken from an allowance.
    pub(super) fn unspent(&mut self) -> Spent {
        Spent::new(std::mem::take(&mut self.unspent), 0, self.arming.period_ns())
    }

    /// The rate at which the thread should be sampled, according to its own and the common allowance.
    fn wanted_rate(&self, check: &AgeCheck<'_>) -> Rate {
        let rate = check.source.periods().rate(self.level.max(check.level));
        let by_timer = rate.by_timer && check.source.may_have_timers() && !self.needs_perf;
        Rate { by_timer, ..rate.slowed(check.times) }
    }

    fn start_closing(&mut self, why: DisarmReason) {
        if self.closing.is_some() {
            return;
        }
        self.closing = Some(why);
        if self.can_close() {
            self.paused = Some(Instant::now());
            self.pause();
        } else {
            self.closing = None;
        }
    }

    /// Stops sampling the thread for now.
    pub(super) fn pause(&self) {
        self.arming.pause(sys::cpu_ns_of(self.sampled_thread.tid()).unwrap_or(0));
    }

    /// Where the open interval of the last arming begins, and how many samples from there on hooks have not counted.
    pub(super) fn left_of(&self, last: &Arc<Arming>) -> (u64, u64) {
        // The order matters: a hook that counts samples in between moves the beginning.
        let from = last.from();
        let is_read = Arc::ptr_eq(last, &self.arming);
        (from, if is_read { self.samples_uncounted() } else { 0 })
    }

    /// Whether its rate should change by more than half. Not while it is switched out to wait: the present arming has
    /// to record that wait.
    fn has_other_rate(&self, Rate { period_ns, by_timer }: Rate) -> bool {
        let now_ns = self.arming.period_ns();
        let is_other = now_ns.abs_diff(period_ns) > now_ns.min(period_ns) / 2
            || by_timer && self.arming.has_switch_records()
            || !by_timer && self.has_timer_for_switches;
        let is_out = |ring: &Arc<SwitchRing>| ring.switched_out().is_some_and(|out| !out.preempted);
        !self.is_unarmed() && is_other && !self.arming.switches.as_ref().is_some_and(is_out)
    }

    /// Whether its arming can end. If it ends for another rate, hooks may count the remaining samples later: the next
    /// hook may be far away, and a thread that stays in one span needs its new rate too.
    fn can_close(&self) -> bool {
        let is_counted = self.is_counted();
        let may_be_uncounted =
            self.closing != Some(DisarmReason::Unused) && self.uncounted.len() < MOST_UNCOUNTED;
        (is_counted || may_be_uncounted)
            && !self.sampled_thread.is_in_hook()
            && self.watch.waiting().is_none()
    }

    /// Whether hooks have counted all samples of the arming.
    fn is_counted(&self) -> bool {
        self.arming.has_seen_all() || self.sampled_thread.span().is_none()
    }

    pub(super) fn is_unarmed(&self) -> bool {
        self.arming.ring.is_none()
    }

    /// Whether it is not sampled and was in no old span at the last scan.
    pub(super) fn is_young(&self) -> bool {
        self.is_unarmed() && !self.is_old
    }

    /// Ends an arming that is completely drained. `now_ns` is `CLOCK_MONOTONIC_RAW`. Returns the arming, which the
    /// thread may still read.
    pub(super) fn close(&mut self, now_ns: u64, source: &Sampler) -> Option<Arc<Arming>> {
        let is_read = self.arming.ring.as_ref().is_none_or(|ring| ring.tail() == ring.head());
        if self.closing.is_none() || !is_read || !self.can_close() {
            return None;
        }
        let is_counted = self.is_counted();
        let (from, samples) = self.left_of(&self.arming);
        let none = self.sampled_thread.follow(|_| Some(Arming::none()))?;
        self.is_rearmed = self.closing.take() == Some(DisarmReason::OtherRate);
        if self.is_rearmed {
            self.watch.begin_by_clock(&self.sampled_thread, now_ns);
        }
        let closed = self.begin(none);
        source.retire(&closed, from, samples);
        if is_counted {
            return Some(closed);
        }
        self.uncounted.push(closed);
        None
    }

    /// Drops armings that hooks have finished counting: the thread no longer refers to them.
    pub(super) fn drop_counted(&mut self) {
        self.uncounted.retain(|arming| Arc::strong_count(arming) > 1);
    }

    /// How long the thread was sampled, in armings that its hooks have not finished counting. `cpu_ns` is its CPU
    /// clock now.
    pub(super) fn sampled_ns(&self, cpu_ns: u64) -> u64 {
        let before = self.uncounted.iter().map(|arming| arming.all_sampled_ns());
        before.sum::<u64>() + self.arming.sampled_ns(cpu_ns)
    }

    /// The present wait, if the last scan found one.
    pub(super) fn waiting(&self) -> Option<&WaitingThread> {
        self.watch.waiting()
    }

    /// The drained samples of the arming that no hook has counted.
    fn samples_uncounted(&self) -> u64 {
        let from = self.arming.from();
        let states_positions = self.arming.ring.as_ref().is_none_or(|ring| ring.timer().is_some());
        match states_positions {
            true => self
                .drained
                .saturating_sub(from)
                .checked_div(self.arming.sample_size())
                .unwrap_or(0),
            // Counted one by one, as the thread does.
            false if from == self.counted_from => self.counted,
            false => 0,
        }
    }

    /// Whether checking it takes a system call.
    pub(super) fn is_checked_by_clock(&self) -> bool {
        self.is_old && !self.arming.has_switch_records() && self.sampled_thread.span().is_some()
    }

    /// Moves on to the next arming if the present one has no ring.
    pub(super) fn follow(&mut self) {
        while self.arming.ring.is_none()
            && let Some(next) = self.arming.next().cloned()
        {
            self.begin(next);
            if !self.is_unarmed() {
                self.note_armed();
            }
        }
    }

    /// Switches to an arming, whose positions start at 0. Returns the previous one.
    fn begin(&mut self, arming: Arc<Arming>) -> Arc<Arming> {
        self.intervals.clear();
        (self.drained, self.counted, self.counted_from, self.switched) = (0, 0, 0, 0);
        std::mem::replace(&mut self.arming, arming)
    }

    /// A thread that is armed again soon stays armed for longer.
    fn note_armed(&mut self) {
        let now = Instant::now();
        let before = self.armed.replace(now);
        if std::mem::take(&mut self.is_rearmed) {
            return;
        }
        let is_soon = before.is_some_and(|armed| now.duration_since(armed) < SOON);
        self.hold = if is_soon { (2 * self.hold).min(MOST_HOLD) } else { self.least_hold };
    }

    /// Identifies the thread while it is in the collector's list.
    pub(super) fn address(&self) -> usize {
        Arc::as_ptr(&self.sampled_thread).addr()
    }

    /// Whether no scan has to look at the thread until it says so. It was in no span for a while at the last scan, too,
    /// so all that it did before is visible here.
    pub(super) fn is_parked(&mut self, now: u64, park_after: u64) -> bool {
        let thread = &self.sampled_thread;
        let is_idle = now.saturating_sub(thread.hooked_at()) >= park_after
            && thread.span().is_none()
            && !thread.is_in_hook();
        let is_at_rest = self.is_unarmed()
            && self.closing.is_none()
            && self.uncounted.is_empty()
            && self.watch.waiting().is_none()
            && thread.last().ring.is_none();
        if !is_idle || !is_at_rest {
            return false;
        }
        let was_parked = thread.is_parked();
        if thread.park() {
            self.unused_since = Some(Instant::now());
        }
        was_parked
    }

    /// Ends the sampling of a thread that was in no profiled span for a while, since its ring takes memory. Returns
    /// whether it was ended.
    pub(super) fn end_if_idle(&mut self, now: Instant, idle: std::time::Duration) -> bool {
        if self.sampled_thread.span().is_some() {
            self.unused_since = None;
            return false;
        }
        match self.unused_since {
            Some(since) if now.duration_since(since) >= idle => {
                self.unused_since = None;
                self.sampled_thread.end_if_unused()
            }
            Some(_) => false,
            None => {
                self.sampled_thread.note_unused();
                self.unused_since = Some(now);
                false
            }
        }
    }
}
