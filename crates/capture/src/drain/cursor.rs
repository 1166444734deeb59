//! How far the collector has read what a thread wrote.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::demand::Cost;
use crate::sampler::record::{Machine, Record, Records, read_sample};
use crate::sampler::{
    Sampler, SamplingSession, SwitchRing, TagInterval, ThreadShared, switches_between,
};
use crate::sys::{self, OsThread};

/// The position of reading a thread's rings, and what attributes samples to spans from there on.
#[derive(Debug)]
pub struct ThreadCursor {
    pub thread: Arc<ThreadShared>,
    /// What its samples are stored under.
    pub named: OsThread,
    /// The oldest of its sessions that has not been drained completely.
    pub session: Arc<SamplingSession>,
    /// Span intervals beyond the last sample that was read.
    pub intervals: VecDeque<TagInterval>,
    /// The position up to which samples are drained, as hooks see positions.
    pub drained: u64,
    /// How many samples of the open interval were drained, and where that interval begins.
    pub counted: u64,
    pub counted_from: u64,
    /// Earlier sessions, to which the thread may still refer; and whether hooks had counted all of their samples.
    ended: Vec<(Arc<SamplingSession>, bool)>,
    /// Samples that were read since the last [`take_cost`](Self::take_cost).
    pub uncharged: u64,
    /// CPU time without samples that the next one represents, too.
    pub unsampled_ns: u64,
    /// The CPU time of the session that its samples represent.
    pub represented_ns: u64,
    /// The position up to which context switches were taken into the cost.
    switched: u64,
}

/// How many ended sessions may have samples that hooks have not counted.
const MAX_UNCOUNTED: usize = 16;

impl ThreadCursor {
    pub fn new(thread: Arc<ThreadShared>) -> Self {
        Self {
            session: thread.last(),
            named: thread.thread,
            thread,
            intervals: VecDeque::new(),
            drained: 0,
            counted: 0,
            counted_from: 0,
            ended: Vec::new(),
            uncharged: 0,
            unsampled_ns: 0,
            represented_ns: 0,
            switched: 0,
        }
    }

    pub fn is_attached(&self) -> bool {
        self.session.ring.is_some()
    }

    pub fn switches(&self) -> Option<&SwitchRing> {
        self.session.switches.as_deref()
    }

    /// Moves on to the next session if the present one has no ring. Returns whether that one has a ring.
    pub fn go_to_next_session(&mut self) -> bool {
        let was_attached = self.is_attached();
        while !self.is_attached()
            && let Some(next) = self.session.next().cloned()
        {
            self.begin(next);
        }
        !was_attached && self.is_attached()
    }

    /// Switches to a session, whose positions start at 0. Returns the previous one.
    fn begin(&mut self, session: Arc<SamplingSession>) -> Arc<SamplingSession> {
        self.intervals.clear();
        (self.drained, self.counted, self.counted_from, self.switched) = (0, 0, 0, 0);
        self.represented_ns = 0;
        std::mem::replace(&mut self.session, session)
    }

    /// Ends the session, which is drained completely and paused. Returns false if another one is being appended right now.
    pub fn end(&mut self, source: &Sampler) -> bool {
        let is_counted = self.is_counted();
        let (from, samples) = self.left_of(&self.session);
        let Some(none) = self.thread.append_session(|_| Some(SamplingSession::none())) else {
            return false;
        };
        let session = self.begin(none);
        source.retire(&session, from, samples);
        self.ended.push((session, is_counted));
        true
    }

    /// Ends the sampling of a thread that is over. Returns the sessions to which it may still refer.
    pub fn give_back(&mut self, source: &Sampler) -> impl Iterator<Item = Arc<SamplingSession>> {
        let last = self.thread.last();
        let (from, samples) = self.left_of(&last);
        source.give_back(&self.thread, &last, from, samples);
        self.ended.drain(..).map(|(session, _)| session).chain([last])
    }

    pub fn is_drained(&self) -> bool {
        self.session.ring.as_ref().is_none_or(|ring| ring.tail() == ring.head())
    }

    pub fn is_counted(&self) -> bool {
        let (ring, from) = (&self.session.ring, self.session.from());
        ring.as_ref().is_none_or(|ring| ring.position() == from) || self.thread.span().is_none()
    }

    /// Whether the session may end although hooks have not counted all of its samples.
    pub fn may_be_uncounted(&self) -> bool {
        self.uncounted().count() < MAX_UNCOUNTED
    }

    fn uncounted(&self) -> impl Iterator<Item = &SamplingSession> {
        self.ended.iter().filter(|(_, is_counted)| !is_counted).map(|(session, _)| &**session)
    }

    pub fn drop_ended(&mut self) {
        self.ended.retain(|(session, _)| Arc::strong_count(session) > 1);
    }

    /// Whether nothing is left to be read, and hooks have counted all.
    pub fn is_at_rest(&self) -> bool {
        !self.is_attached()
            && self.uncounted().next().is_none()
            && self.thread.last().ring.is_none()
    }

    /// Where the open interval of the last session begins, and how many samples from there on hooks have not counted.
    fn left_of(&self, last: &Arc<SamplingSession>) -> (u64, u64) {
        // The order matters: a hook that counts samples in between moves the beginning.
        let from = last.from();
        let is_read = Arc::ptr_eq(last, &self.session);
        (from, if is_read { self.samples_uncounted() } else { 0 })
    }

    fn samples_uncounted(&self) -> u64 {
        let from = self.session.from();
        let states_positions = self.session.ring.as_ref().is_none_or(|ring| ring.timer().is_some());
        match states_positions {
            true => {
                self.drained.saturating_sub(from).checked_div(self.session.sample_size).unwrap_or(0)
            }
            // Counted one by one, as the thread does.
            false if from == self.counted_from => self.counted,
            false => 0,
        }
    }

    /// How long the thread was sampled in sessions that its hooks have not counted. `cpu_ns` is its CPU clock now.
    pub fn sampled_ns(&self, cpu_ns: u64) -> u64 {
        let before = self.uncounted().map(|ended| ended.sampled_ns(0));
        before.sum::<u64>() + self.session.sampled_ns(cpu_ns)
    }

    pub fn pause(&self) {
        self.session.pause(sys::cpu_ns_of(self.thread.tid()).unwrap_or(0));
    }

    pub fn take_cost(&mut self) -> Cost {
        let (switches, until) =
            switches_between(self.switched, self.switches().map_or(0, |ring| ring.head()));
        self.switched = until;
        Cost::new(std::mem::take(&mut self.uncharged), switches, self.session.rate.period_ns)
    }

    /// How long until half of its ring is full if the thread runs all the time, or all of it if the thread is
    /// blocked. That of a timer wakes the collector.
    pub fn fill_time(&self, is_blocked: bool) -> Option<Duration> {
        let ring = self.session.ring.as_ref().filter(|ring| ring.timer().is_none())?;
        let whole = (ring.data_size() as u64).checked_div(self.session.sample_size)?;
        // The ring of a blocked thread is empty, and a scan notices that the thread continues before more than one
        // sample is lost. Earlier scans are not worth their wake-ups.
        let samples = if is_blocked { whole + 1 } else { (whole / 2).max(1) };
        Some(Duration::from_nanos(samples.saturating_mul(self.session.rate.period_ns)))
    }

    /// What `read` finds in the newest sample of its ring: when it was taken, and the words of its stack.
    pub fn newest_stack<R>(
        &self,
        read: impl FnOnce(u64, &mut dyn Iterator<Item = u64>) -> R,
    ) -> Option<R> {
        let ring = self.session.ring.as_ref()?;
        let samples = Records::between(&***ring, ring.tail(), ring.head()).filter_map(|record| {
            let Ok(Record::Sample(place)) = record else { return None };
            Some(place)
        });
        let sample = read_sample(&***ring, samples.last()?, Machine::NATIVE).ok()?;
        Some(read(sample.time_ns, &mut sample.stack.iter()))
    }

    pub fn is_half_full(&self) -> bool {
        self.session.ring.as_ref().is_some_and(|ring| {
            let used = ring.head().saturating_sub(ring.tail());
            used >= ring.data_size() as u64 / 2
        })
    }
}
