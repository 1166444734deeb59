//! A thread that is sampled: from when on and how often, until it is not.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::budget::Share;
use super::overdue::CpuTimes;
use super::waits::{LookResult, Looker, WaitingThread, Watch};
use crate::sampler::{Allowance, Level, Sampler, Spent, switched_out, switches_between};
use crate::sampler::{ArmThreads as _, Arming, Rate, SampledThread, SpanInterval};
use crate::sys::{self, PerfRing, TimerRing};

/// A thread that is sampled.
#[derive(Debug)]
pub(super) struct Sampled {
    pub(super) recording: Arc<SampledThread>,
    /// The oldest of its armings that is not read to its end.
    pub(super) arming: Arc<Arming>,
    /// Marks of what lies beyond what has been read.
    pub(super) marks: VecDeque<SpanInterval>,
    /// Since when it was in no profiled span whenever we looked.
    unused_since: Option<Instant>,
    watch: Watch,
    /// Whether the last look found it in an old span.
    pub(super) is_old: bool,
    /// When one did.
    old: Option<Instant>,
    /// When it was last armed, and when that was last tried.
    armed: Option<Instant>,
    tried: Option<Instant>,
    /// For how long it stays armed outside old spans.
    hold: Duration,
    least_hold: Duration,
    /// The same if it arms itself.
    own_hold: Duration,
    /// It is not sampled any more, and its arming ends when all of it is read.
    closing: Option<DisarmReason>,
    paused: Option<Instant>,
    is_left_out: bool,
    /// It is sampled by a timer although perf could, because it is switched so often.
    pub(super) has_timer_for_switches: bool,
    /// A timer cannot sample it: it was refused, or the thread is on other stacks than its own.
    pub(super) needs_perf: bool,
    /// It is armed anew at once, which says nothing of how often it is in old spans.
    is_armed_anew: bool,
    allowance: Allowance,
    level: Level,
    /// Samples that were read since that was last asked.
    pub(super) unspent: u64,
    /// Up to where records of context switches were counted.
    switched: u64,
    pub(super) cpu_times: CpuTimes,
    /// What it was armed with before and that is read to its end, of which its hooks have not heard.
    unheard: Vec<Arc<Arming>>,
    /// Up to where samples are read, as hooks see positions.
    pub(super) drained: u64,
    /// The samples that were read of the open stretch, and where that begins.
    pub(super) counted: u64,
    pub(super) counted_from: u64,
}

/// What a look at the ages of spans needs.
#[derive(Clone, Copy)]
pub(super) struct LookAtAge<'a> {
    pub(super) at: Instant,
    /// In ticks.
    pub(super) now: u64,
    /// `CLOCK_MONOTONIC_RAW` in nanoseconds.
    pub(super) now_ns: u64,
    pub(super) may_arm: bool,
    /// Whether a thread may be armed anew at another rate.
    pub(super) may_change: bool,
    /// How many times as long the time between samples is.
    pub(super) times: f64,
    /// No thread is sampled more than that.
    pub(super) level: Level,
    pub(super) source: &'a Sampler,
}

/// Why a thread is not sampled any more by what it is armed with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DisarmReason {
    /// It was in no old span for a while.
    Unused,
    /// It is armed anew, at another rate.
    OtherRate,
}

/// Who is armed again within this stays armed for twice as long, up to that: it takes 2 % of a core at most.
const SOON: Duration = Duration::from_secs(1);
const MOST_HOLD: Duration = Duration::from_millis(640);
/// How fast threads are armed and let go of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    /// For how long a thread stays armed outside old spans, at first.
    pub(super) hold: Duration,
    /// The same if it arms itself.
    pub(super) own_hold: Duration,
    /// What arming threads may take.
    pub(super) arming: Share,
    /// From a look at threads to the next, at most, while there is something to be seen.
    pub(super) longest_look: Duration,
}

impl Pace {
    /// To arm a thread takes some 150 µs of the collector, 300 of them at once, and as long as it is armed each context
    /// switch costs it 3 to 15 µs.
    pub(crate) const USUAL: Self = Self {
        hold: Duration::from_millis(10),
        own_hold: MOST_HOLD,
        arming: Share::new(2, 50_000_000),
        longest_look: Duration::MAX,
    };

    /// As fast as can be: nothing is held but by threads that arm themselves.
    #[cfg(test)]
    pub(crate) const FASTEST: Self = Self {
        hold: Duration::ZERO,
        own_hold: Duration::MAX,
        arming: Share::new(100, i64::MAX),
        longest_look: Duration::from_micros(100),
    };
}

/// For how long a thread that is to have another rate may have no samples until it can be armed anew.
const LONGEST_PAUSE: Duration = Duration::from_millis(10);
/// How many armings a thread may not have heard of that are over.
const MOST_UNHEARD: usize = 16;
/// When it is tried again to arm a thread that could not be: others may have given back what they took.
const RETRY: Duration = Duration::from_secs(10);

/// How soon half of a ring may be full. Nobody says when: to be woken by the kernel would take a file, and a program
/// may close all files.
pub(super) fn fill_time(sampled: &[Sampled]) -> Duration {
    const SHORTEST: Duration = Duration::from_micros(250);
    let soonest = sampled.iter().filter_map(Sampled::fill_time).min();
    soonest.map_or(Duration::MAX, |soonest| soonest.max(SHORTEST))
}

impl Sampled {
    pub(super) fn new(recording: Arc<SampledThread>, Pace { hold, own_hold, .. }: Pace) -> Self {
        let arming = recording.last();
        Self {
            armed: arming.ring.is_some().then(Instant::now),
            arming,
            recording,
            marks: VecDeque::new(),
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
            is_armed_anew: false,
            allowance: Allowance::of_a_thread(Instant::now()),
            level: Level::First,
            unspent: 0,
            switched: 0,
            cpu_times: CpuTimes::default(),
            unheard: Vec::new(),
            drained: 0,
            counted: 0,
            counted_from: 0,
        }
    }

    /// How long until half of its ring is full, if the thread runs all the time, or all of it if it waits.
    fn fill_time(&self) -> Option<Duration> {
        let ring = self.arming.ring.as_ref()?;
        let whole = (ring.data_size() as u64).checked_div(self.arming.sample_size())?;
        // Of a thread that waits it is empty, and when it goes on that is seen before it loses more than one: to
        // look sooner would take more wake-ups than that is worth.
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

    /// Looks whether the thread waits.
    pub(super) fn look(&mut self, looker: &mut Looker<'_>) -> LookResult {
        if self.recording.is_over() {
            self.watch.end(&self.recording, &self.arming, looker);
            return LookResult::OutsideSpans;
        }
        if !self.is_old && self.watch.waiting().is_none() {
            return self.watch.pass(&self.recording, &self.arming, looker);
        }
        self.watch.look(&self.recording, &self.arming, looker)
    }

    /// Arms the thread if it is in an old span, and lets go of it if it was in none for a while. Returns whether its
    /// arming can end when all of it is read.
    pub(super) fn look_at_age(&mut self, look: &LookAtAge<'_>) -> bool {
        let LookAtAge { at, source, .. } = *look;
        let since = |then: Option<Instant>| then.map(|then| at.saturating_duration_since(then));
        // It may have armed itself.
        self.follow();
        let rate = self.wanted_rate(look);
        self.recording.set_rate(rate);
        self.is_old = self.recording.old_at() <= look.now;
        if self.is_old {
            self.old = Some(at);
            let goes_on = match self.closing {
                Some(DisarmReason::Unused) => true,
                // It waits, or could not be armed anew.
                Some(DisarmReason::OtherRate) => {
                    let is_late = since(self.paused).is_none_or(|since| since > LONGEST_PAUSE);
                    (is_late && !self.can_close()) || !look.may_arm
                }
                None => false,
            };
            if goes_on {
                self.closing = None;
                source.start_again(&self.recording, &self.arming);
                self.watch.skip_records(&self.recording, &self.arming, look.now_ns);
            }
            if look.may_change && self.has_other_rate(rate) {
                self.begin_to_close(DisarmReason::OtherRate);
            }
            let is_due = since(self.tried).is_none_or(|since| since >= RETRY);
            if look.may_arm && self.is_unarmed() && is_due {
                source.arm(&self.recording);
                self.follow();
                if self.is_unarmed() {
                    self.tried = Some(at);
                }
                self.has_timer_for_switches = rate.by_timer && !self.arming.has_switch_records();
                self.needs_perf |= rate.by_timer && self.arming.has_switch_records();
            }
        } else if self.is_unarmed() {
            self.is_armed_anew = false;
        } else {
            let hold = if self.recording.arms_itself() { self.own_hold } else { self.hold };
            if since(self.old.max(self.armed)).is_none_or(|last| last > hold) {
                self.begin_to_close(DisarmReason::Unused);
            }
        }
        self.closing.is_some()
    }

    /// Whether it is about to be armed anew, at another rate.
    pub(super) fn changes_rate(&self) -> bool {
        self.closing == Some(DisarmReason::OtherRate)
    }

    /// Whether it is in an old span now as it was not at the last look, and is not sampled only because nobody is to be
    /// armed.
    pub(super) fn note_left_out(&mut self, may_not_be_armed: bool) -> bool {
        let could_be = self.is_old && self.is_unarmed() && !self.recording.is_refused();
        let is_left_out = may_not_be_armed && could_be;
        !std::mem::replace(&mut self.is_left_out, is_left_out) && is_left_out
    }

    /// Takes what it has had since the last look from its allowance, and returns that.
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

    /// What it has had that was not asked for.
    pub(super) fn unspent(&mut self) -> Spent {
        Spent::new(std::mem::take(&mut self.unspent), 0, self.arming.period_ns())
    }

    /// How the thread is to be sampled by what it, and all, have had.
    fn wanted_rate(&self, look: &LookAtAge<'_>) -> Rate {
        let rate = look.source.periods().rate(self.level.max(look.level));
        let by_timer = rate.by_timer && look.source.may_have_timers() && !self.needs_perf;
        Rate { by_timer, ..rate.slowed(look.times) }
    }

    fn begin_to_close(&mut self, why: DisarmReason) {
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

    /// It is not sampled for now.
    pub(super) fn pause(&self) {
        self.arming.pause(sys::cpu_ns_of(self.recording.tid).unwrap_or(0));
    }

    /// Of its last arming, how many samples hooks have not counted, and from where on.
    pub(super) fn left_of(&self, last: &Arc<Arming>) -> (u64, u64) {
        // In this order: a hook that counts them meanwhile moves on from there.
        let from = last.from();
        let is_read = Arc::ptr_eq(last, &self.arming);
        (from, if is_read { self.samples_uncounted() } else { 0 })
    }

    /// Whether it is to be sampled at a rate that is another one by half, and is not just about to wait: that has to
    /// be seen by what it is armed with.
    fn has_other_rate(&self, Rate { period_ns, by_timer }: Rate) -> bool {
        let now_ns = self.arming.period_ns();
        let is_other = now_ns.abs_diff(period_ns) > now_ns.min(period_ns) / 2
            || by_timer && self.arming.has_switch_records()
            || !by_timer && self.has_timer_for_switches;
        let is_out = |ring: &Arc<PerfRing>| switched_out(ring).is_some_and(|out| !out.preempted);
        !self.is_unarmed() && is_other && !self.arming.switches.as_ref().is_some_and(is_out)
    }

    /// Whether its arming can be ended. Hooks that have not seen all samples ask for them later: they may be far away,
    /// and a thread that stays in one span has the rate that it should have all the same.
    fn can_close(&self) -> bool {
        let is_heard = self.has_heard();
        let may_be_unheard =
            self.closing != Some(DisarmReason::Unused) && self.unheard.len() < MOST_UNHEARD;
        (is_heard || may_be_unheard)
            && !self.recording.is_in_hook()
            && self.watch.waiting().is_none()
    }

    /// Whether the thread will ask for nothing more of what it is armed with.
    fn has_heard(&self) -> bool {
        self.arming.has_seen_all() || self.recording.span().is_none()
    }

    pub(super) fn is_unarmed(&self) -> bool {
        self.arming.ring.is_none()
    }

    /// Whether the last look found it in no old span, and it is not sampled.
    pub(super) fn is_young(&self) -> bool {
        self.is_unarmed() && !self.is_old
    }

    /// Ends an arming of which all is read, `now_ns` by `CLOCK_MONOTONIC_RAW`. Returns it: the thread may still look at
    /// it.
    pub(super) fn close(&mut self, now_ns: u64, source: &Sampler) -> Option<Arc<Arming>> {
        let is_read = self.arming.ring.as_ref().is_none_or(|ring| ring.tail() == ring.head());
        if self.closing.is_none() || !is_read || !self.can_close() {
            return None;
        }
        let has_heard = self.has_heard();
        let (from, samples) = self.left_of(&self.arming);
        let none = self.recording.follow(|_| Some(Arming::none()))?;
        self.is_armed_anew = self.closing.take() == Some(DisarmReason::OtherRate);
        if self.is_armed_anew {
            self.watch.begin_by_clock(&self.recording, now_ns);
        }
        let closed = self.begin(none);
        source.retire(&closed, from, samples);
        if has_heard {
            return Some(closed);
        }
        self.unheard.push(closed);
        None
    }

    /// Forgets armings of whose end the thread has heard meanwhile: nobody else has them.
    pub(super) fn forget_heard(&mut self) {
        self.unheard.retain(|arming| Arc::strong_count(arming) > 1);
    }

    /// For how long it ran and was sampled by what its hooks have not heard the end of, now that its CPU clock says that.
    pub(super) fn sampled_ns(&self, cpu_ns: u64) -> u64 {
        let before = self.unheard.iter().map(|arming| arming.all_sampled_ns());
        before.sum::<u64>() + self.arming.sampled_ns(cpu_ns)
    }

    /// The wait that goes on, if the last look saw one.
    pub(super) fn waiting(&self) -> Option<&WaitingThread> {
        self.watch.waiting()
    }

    /// Those that were read of its arming and that no hook has counted.
    fn samples_uncounted(&self) -> u64 {
        let from = self.arming.from();
        let says_positions = self.arming.ring.as_ref().is_none_or(|ring| ring.timer().is_some());
        match says_positions {
            true => self
                .drained
                .saturating_sub(from)
                .checked_div(self.arming.sample_size())
                .unwrap_or(0),
            // One by one, as its thread will.
            false if from == self.counted_from => self.counted,
            false => 0,
        }
    }

    /// Whether looking at it takes a system call.
    pub(super) fn is_looked_at_by_clock(&self) -> bool {
        self.is_old && !self.arming.has_switch_records() && self.recording.span().is_some()
    }

    /// Goes on with the next arming where there is nothing to be read of the one before.
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

    /// Positions begin anew. Returns the arming before.
    fn begin(&mut self, arming: Arc<Arming>) -> Arc<Arming> {
        self.marks.clear();
        (self.drained, self.counted, self.counted_from, self.switched) = (0, 0, 0, 0);
        std::mem::replace(&mut self.arming, arming)
    }

    /// Who is armed again soon stays armed for longer.
    fn note_armed(&mut self) {
        let now = Instant::now();
        let before = self.armed.replace(now);
        if std::mem::take(&mut self.is_armed_anew) {
            return;
        }
        let is_soon = before.is_some_and(|armed| now.duration_since(armed) < SOON);
        self.hold = if is_soon { (2 * self.hold).min(MOST_HOLD) } else { self.least_hold };
    }

    /// Ends the recording of a thread that has been in no profiled span for a while: its ring
    /// takes memory and its samples take time. Returns whether it was ended.
    pub(super) fn end_if_idle(&mut self, now: Instant, idle: std::time::Duration) -> bool {
        if self.recording.span().is_some() {
            self.unused_since = None;
            return false;
        }
        match self.unused_since {
            Some(since) if now.duration_since(since) >= idle => {
                self.unused_since = None;
                self.recording.end_if_unused()
            }
            Some(_) => false,
            None => {
                self.recording.note_unused();
                self.unused_since = Some(now);
                false
            }
        }
    }
}
