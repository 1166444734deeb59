//! Reading one thread's ring.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use super::overdue::CpuTimes;
use super::pending::{Added, Pending};
use super::stack::Stack;
use super::waits::{Looker, Seen, Watch};
use crate::sampler::record::{Layout, Place, Record, Records, read_sample, said_position};
use crate::sampler::{Allowance, Sampler, stretched, switched_out, switches_between};
use crate::span::{ArmThreads as _, Arming, Mark, Rate, Recording, SpanKey, Stretch};
use crate::stats::Counters;
use crate::sys::{self, Ring};
use crate::unwind::{End, Frame, Unwinder};

/// A thread that is sampled.
#[derive(Debug)]
pub(super) struct Sampled {
    pub(super) recording: Arc<Recording>,
    /// The oldest of its armings that is not read to its end.
    pub(super) arming: Arc<Arming>,
    /// Marks of what lies beyond what has been read.
    marks: VecDeque<Mark>,
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
    closing: Option<Closing>,
    paused: Option<Instant>,
    is_shed: bool,
    /// It is sampled by a timer although perf could, because it is switched so often.
    has_timer_for_switches: bool,
    /// A timer cannot sample it: it was refused, or the thread is on other stacks than its own.
    needs_perf: bool,
    /// It is armed anew at once, which says nothing of how often it is in old spans.
    is_armed_anew: bool,
    allowance: Allowance,
    /// Samples that were read since that was last asked.
    unspent: u64,
    /// Up to where records of context switches were counted.
    switched: u64,
    pub(super) cpu_times: CpuTimes,
    /// Up to where samples are read, as hooks see positions.
    drained: u64,
    /// The samples that were read of the open stretch, and where that begins.
    counted: u64,
    counted_from: u64,
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
    pub(super) source: &'a Sampler,
}

/// Why a thread is not sampled any more by what it is armed with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Closing {
    /// It was in no old span for a while.
    Unused,
    /// It is armed anew, at another rate.
    OtherRate,
}

/// For how long a thread stays armed outside old spans, at first. To arm it takes some 150 µs of the collector, and as
/// long as it is armed each context switch costs it 3 to 15 µs.
pub(super) const HOLD: Duration = Duration::from_millis(10);
/// Who is armed again within this stays armed for twice as long, up to that: it takes 2 % of a core at most.
const SOON: Duration = Duration::from_secs(1);
pub(super) const MOST_HOLD: Duration = Duration::from_millis(640);
/// For how long a thread that is to have another rate may have no samples until a hook of its has seen the last one.
const LONGEST_PAUSE: Duration = Duration::from_millis(10);
/// When it is tried again to arm a thread that could not be: others may have given back what they took.
const RETRY: Duration = Duration::from_secs(10);

/// How soon half of a ring may be full that the kernel fills. Nobody says when: to be woken by it would
/// take a file, and a program may close all files.
pub(super) fn fill_time(sampled: &[Sampled]) -> Duration {
    const SHORTEST: Duration = Duration::from_micros(250);
    let soonest = sampled.iter().filter_map(Sampled::fill_time).min();
    soonest.map_or(Duration::MAX, |soonest| soonest.max(SHORTEST))
}

/// What draining needs, and what it fills.
pub(super) struct Drain<'a> {
    pub(super) unwinder: &'a mut Unwinder,
    pub(super) pending: &'a mut Pending,
    pub(super) counters: &'a Counters,
    pub(super) most_frames: usize,
    pub(super) round: u64,
    pub(super) stack: &'a mut Stack,
    /// The rate is lowered because reading samples takes too much.
    pub(super) is_lowered: bool,
}

impl Sampled {
    pub(super) fn new(recording: Arc<Recording>, hold: Duration, own_hold: Duration) -> Self {
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
            is_shed: false,
            has_timer_for_switches: false,
            needs_perf: false,
            is_armed_anew: false,
            allowance: Allowance::new(Instant::now()),
            unspent: 0,
            switched: 0,
            cpu_times: CpuTimes::default(),
            drained: 0,
            counted: 0,
            counted_from: 0,
        }
    }

    /// How long until half of a ring that the kernel fills is full, if the thread runs all the time, or all of it
    /// if it waits.
    fn fill_time(&self) -> Option<Duration> {
        let ring = self.arming.ring.as_ref().filter(|_| self.arming.has_switch_records())?;
        let whole = (ring.data_size() as u64).checked_div(self.arming.sample_size())?;
        // Of a thread that waits it is empty, and when it goes on that is seen before it loses more than one: to
        // look sooner would take more wake-ups than that is worth.
        let samples = if self.watch.is_waiting() { whole + 1 } else { (whole / 2).max(1) };
        Some(Duration::from_nanos(samples.saturating_mul(self.arming.period_ns())))
    }

    /// Whether half of such a ring is full.
    pub(super) fn is_half_full(&self) -> bool {
        let ring = self.arming.ring.as_ref().filter(|_| self.arming.has_switch_records());
        ring.is_some_and(|ring| {
            let used = ring.head().saturating_sub(ring.tail());
            used >= ring.data_size() as u64 / 2
        })
    }

    /// Looks whether the thread waits.
    pub(super) fn look(&mut self, looker: &mut Looker<'_>) -> Seen {
        if self.recording.is_over() {
            self.watch.end(&self.recording, &self.arming, looker);
            return Seen::OutsideSpans;
        }
        if !self.is_old && !self.watch.is_waiting() {
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
        let rate = self.wanted_rate(at, look.times, source);
        self.recording.set_rate(rate);
        self.is_old = self.recording.old_at() <= look.now;
        if self.is_old {
            self.old = Some(at);
            let goes_on = match self.closing {
                Some(Closing::Unused) => true,
                // It has had a sample meanwhile of which its hooks do not hear, or could not be armed anew.
                Some(Closing::OtherRate) => {
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
                self.begin_to_close(Closing::OtherRate);
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
                self.begin_to_close(Closing::Unused);
            }
        }
        self.closing.is_some()
    }

    /// Whether it is about to be armed anew, at another rate.
    pub(super) fn changes_rate(&self) -> bool {
        self.closing == Some(Closing::OtherRate)
    }

    /// Whether it is in an old span now as it was not at the last look, and is not sampled only because nobody is.
    pub(super) fn note_shed(&mut self, sheds: bool) -> bool {
        let is_shed = sheds && self.is_old && self.is_unarmed() && !self.recording.is_refused();
        !std::mem::replace(&mut self.is_shed, is_shed) && is_shed
    }

    /// How the thread is to be sampled by what it has had since the last look.
    fn wanted_rate(&mut self, at: Instant, times: f64, source: &Sampler) -> Rate {
        let samples = std::mem::take(&mut self.unspent);
        let switched = self.arming.switches.as_ref().map_or(0, |ring| ring.head());
        let (switches, until) = switches_between(self.switched, switched);
        self.switched = until;
        let rate = self.allowance.spend(samples, switches, at, source.periods());
        let by_timer = rate.by_timer && source.may_have_timers() && !self.needs_perf;
        Rate { period_ns: stretched(rate.period_ns, times), by_timer }
    }

    fn begin_to_close(&mut self, why: Closing) {
        if self.closing.is_none() && self.can_close() {
            self.closing = Some(why);
            self.paused = Some(Instant::now());
            self.arming.pause();
        }
    }

    /// Whether it is to be sampled at a rate that is another one by half, and is not just about to wait: that has to
    /// be seen by what it is armed with.
    fn has_other_rate(&self, Rate { period_ns, by_timer }: Rate) -> bool {
        let now_ns = self.arming.period_ns();
        let is_other = now_ns.abs_diff(period_ns) > now_ns.min(period_ns) / 2
            || by_timer && self.arming.has_switch_records()
            || !by_timer && self.has_timer_for_switches;
        let is_out = |ring: &Arc<Ring>| switched_out(ring).is_some_and(|out| !out.preempted);
        !self.is_unarmed() && is_other && !self.arming.switches.as_ref().is_some_and(is_out)
    }

    /// Whether the thread will ask for nothing more of what it is armed with.
    fn can_close(&self) -> bool {
        let is_left = self.arming.is_settled() || self.recording.span().is_none();
        is_left && !self.recording.is_in_hook() && !self.watch.is_waiting()
    }

    pub(super) fn is_unarmed(&self) -> bool {
        self.arming.ring.is_none()
    }

    /// Ends an arming of which all is read, `now_ns` by `CLOCK_MONOTONIC_RAW`. Returns it: the thread may still look at
    /// it.
    pub(super) fn close(&mut self, now_ns: u64, source: &Sampler) -> Option<Arc<Arming>> {
        let is_read = self.arming.ring.as_ref().is_none_or(|ring| ring.tail() == ring.head());
        if self.closing.is_none() || !is_read || !self.can_close() {
            return None;
        }
        let none = self.recording.follow(|_| Some(Arming::none()))?;
        self.is_armed_anew = self.closing.take() == Some(Closing::OtherRate);
        if self.is_armed_anew {
            self.watch.begin_by_clock(&self.recording, now_ns);
        }
        let closed = self.begin(none);
        source.retire(&closed);
        Some(closed)
    }

    /// If the thread waits, takes what it has waited so far for a wait of its own. Returns how long that
    /// is.
    pub(super) fn cut_wait(&mut self, looker: &mut Looker<'_>) -> Option<u64> {
        self.watch.cut(&self.recording, &self.arming, looker)
    }

    /// Of the samples that were read, and of the waits, those of which no hook knows.
    pub(super) fn samples_unseen(&self) -> u64 {
        // One that goes on will be heard of as what is left of it.
        let has_waited = self.recording.has_unheard_wait() && !self.watch.is_waiting();
        let from = self.arming.from();
        let says_positions = self.arming.ring.as_ref().is_none_or(|ring| ring.says_positions());
        let samples = match says_positions {
            true => self
                .drained
                .saturating_sub(from)
                .checked_div(self.arming.sample_size())
                .unwrap_or(0),
            // One by one, as its thread will.
            false if from == self.counted_from => self.counted,
            false => 0,
        };
        samples + u64::from(has_waited)
    }

    /// Whether looking at it takes a system call.
    pub(super) fn is_looked_at_by_clock(&self) -> bool {
        self.is_old && !self.arming.has_switch_records() && self.recording.span().is_some()
    }

    /// Goes on with the next arming where there is nothing to be read of the one before.
    fn follow(&mut self) {
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

    /// Reads everything that is in the ring. Returns the span that the thread is in.
    pub(super) fn drain(&mut self, drain: &mut Drain<'_>) -> Option<SpanKey> {
        self.follow();
        let Some(ring) = self.arming.ring.clone() else { return self.recording.span() };
        // In this order: see `Recording::stretch`.
        let head = ring.head();
        let stretch = self.recording.stretch(&self.arming);
        while let Some(mark) = self.arming.take_mark() {
            self.marks.push_back(mark);
        }
        if self.counted_from != stretch.from {
            (self.counted_from, self.counted) = (stretch.from, 0);
        }
        // Then it is read for the last time.
        let is_over = self.recording.is_over();
        let mut end = head;
        for record in Records::between(&*ring, ring.tail(), head) {
            if let Ok(Record::Sample(place) | Record::Lost { place, .. }) = record
                && stretch.is_in_hook
                && !is_over
                && position_of(&ring, place) >= stretch.from
            {
                // Read again when it is known where the thread goes on.
                end = place.position;
                break;
            }
            match record {
                Ok(Record::Sample(place)) => {
                    let position = position_of(&ring, place);
                    self.drained = position + self.arming.sample_size();
                    self.counted += u64::from(position >= self.counted_from);
                    self.unspent += 1;
                    match owner(&mut self.marks, stretch, position) {
                        Some(span) => {
                            let period_ns = self.arming.period_ns();
                            drain.sample(&ring, self.recording.tid, place, span, period_ns);
                        }
                        None => count(&drain.counters.samples_outside_spans, 1),
                    }
                    // Room for the next sample, before this round has read them all.
                    ring.release_to(place.position + u64::from(place.size));
                }
                Ok(Record::Lost { count: samples, place }) => {
                    let position = position_of(&ring, place);
                    count(&drain.counters.samples_dropped_ring_full, samples);
                    if let Some(span) = owner(&mut self.marks, stretch, position) {
                        drain.pending.note(span, |pending| pending.ring_full += samples);
                    }
                }
                Ok(Record::Throttled) => count(&drain.counters.sampling_throttled, 1),
                Ok(_) => {}
                Err(_) => count(&drain.counters.records_malformed, 1),
            }
        }
        ring.release_to(end);
        if !ring.says_positions() {
            self.drained = end;
        }
        let foreign = ring.take_foreign();
        self.needs_perf |= foreign > 0 && self.has_timer_for_switches;
        count(&drain.counters.samples_dropped_foreign_stack, foreign);
        stretch.span
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

/// Where the hooks of the ring's thread saw a record.
fn position_of(ring: &Ring, place: Place) -> u64 {
    if ring.says_positions() { said_position(ring, place) } else { place.position }
}

fn count(counter: &AtomicU64, count: u64) {
    Counters::add(counter, count);
}

/// The span that a sample at `position` belongs to. Positions are asked for in order: marks that lie before are
/// dropped.
pub(super) fn owner(
    marks: &mut VecDeque<Mark>,
    stretch: Stretch,
    position: u64,
) -> Option<SpanKey> {
    while marks.front().is_some_and(|mark| mark.to <= position) {
        marks.pop_front();
    }
    if let Some(mark) = marks.front().filter(|mark| mark.from <= position) {
        return Some(mark.span);
    }
    let is_open = stretch.from <= position;
    stretch.span.filter(|_| is_open)
}

/// From here on the entries of a chain are not addresses but say whose the next ones are
/// (`PERF_CONTEXT_KERNEL` and the like).
const FIRST_CONTEXT: u64 = u64::MAX - 4094;

impl Drain<'_> {
    /// What a sample stands for, and how many others are lost with it. A timer says it, but if its signal was held back for long (the program had
    /// blocked it), most of that time was spent elsewhere, and nobody knows where.
    fn weight_of(&self, said_ns: Option<u64>, period_ns: u64) -> (u64, u64) {
        const TOO_MANY: u64 = 16;
        let Some(said_ns) = said_ns else { return (period_ns, 0) };
        let usual_ns = period_ns.max(sys::tick_ns().unwrap_or(0)).max(1);
        if said_ns <= TOO_MANY * usual_ns {
            return (said_ns, 0);
        }
        (usual_ns, said_ns / usual_ns - 1)
    }

    fn sample(&mut self, ring: &Ring, tid: u32, place: Place, span: SpanKey, period_ns: u64) {
        let read = read_sample(ring, place, Layout::of(ring));
        let Some(sample) = read.ok().filter(|sample| sample.tid == tid) else {
            count(&self.counters.records_malformed, 1);
            return;
        };
        self.stack.end = self.unwinder.unwind(
            sample.registers,
            |offset| sample.stack.word(offset),
            self.most_frames,
            &mut self.stack.frames,
        );
        if sample.in_kernel {
            let chain = sample.kernel_chain.filter(|address| *address < FIRST_CONTEXT);
            let mut chain: Vec<_> = chain.map(Frame::in_kernel).collect();
            if chain.is_empty() {
                chain.push(Frame::KERNEL);
            }
            self.stack.frames.splice(0..0, chain);
        }
        let (period_ns, late) = self.weight_of(sample.weight_ns, period_ns);
        match self.stack.end {
            End::Root => {}
            End::Cut => count(&self.counters.stacks_truncated, 1),
            End::Lost => count(&self.counters.stacks_incomplete, 1),
        }
        count(&self.counters.samples_taken, 1);
        match self.pending.add(span, sample.time_ns, period_ns, self.stack, self.round) {
            Added::Kept => {}
            Added::Thinned(samples) => count(&self.counters.samples_thinned, samples),
            Added::Lost => count(&self.counters.samples_dropped_memory, 1),
            Added::Refused => count(&self.counters.samples_dropped_spans_full, 1),
        }
        if self.is_lowered {
            self.pending.note(span, |pending| pending.lowered += 1);
        }
        if late > 0 {
            count(&self.counters.samples_dropped_late, late);
            self.pending.note(span, |pending| pending.late += late);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: SpanKey = SpanKey::new(1).unwrap();
    const B: SpanKey = SpanKey::new(2).unwrap();

    fn mark(span: SpanKey, from: u64, to: u64) -> Mark {
        Mark { span, from, to }
    }

    fn owners(
        marks: &[Mark],
        open: Option<SpanKey>,
        from: u64,
        positions: &[u64],
    ) -> Vec<Option<SpanKey>> {
        let mut marks: VecDeque<_> = marks.iter().copied().collect();
        let stretch = Stretch { span: open, from, is_in_hook: false };
        positions.iter().map(|position| owner(&mut marks, stretch, *position)).collect()
    }

    #[test]
    fn a_sample_belongs_to_the_stretch_that_holds_its_position() {
        let marks = [mark(A, 0, 32), mark(B, 64, 96)];
        let found = owners(&marks, Some(A), 128, &[0, 16, 32, 64, 95, 96, 128, 999]);
        assert_eq!(found, [Some(A), Some(A), None, Some(B), Some(B), None, Some(A), Some(A)]);
    }

    #[test]
    fn a_mark_that_is_pushed_late_wins_over_an_open_stretch_that_began_before() {
        // The stretch was read before the thread ended it: both say the same.
        assert_eq!(owners(&[mark(A, 32, 64)], Some(A), 32, &[32, 64]), [Some(A), Some(A)]);
    }

    #[test]
    fn outside_all_stretches_a_sample_belongs_to_nobody() {
        assert_eq!(owners(&[], None, 0, &[0, 32]), [None, None]);
        assert_eq!(owners(&[], Some(A), 64, &[32]), [None]);
    }
}
