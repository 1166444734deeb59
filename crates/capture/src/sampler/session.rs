//! One session: a period in which a thread is sampled.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use crossbeam::queue::ArrayQueue;
use parking_lot::Mutex;

use super::quota::Share;
use super::rate::Rate;
use super::record::{Record, Records};
use super::switches::SwitchRing;
use crate::sys::{Position, SampleRing, Tag, WhyRefused};

/// An interval of a thread's ring, and the profiled span that was innermost throughout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TagInterval {
    pub span: Tag,
    /// Samples at positions in `from..to` fell in `span`.
    pub from: u64,
    pub to: u64,
}

/// The event or timer and the ring of a thread while it is attached, or an empty one for a thread that is not sampled.
///
/// The sessions of a thread form a chain. The thread moves on in a hook, the collector when it has read one completely.
#[derive(Debug)]
pub struct SamplingSession {
    from: AtomicU64,
    /// As it was asked for: the CPU time that each sample represents, and whether by a timer although perf is possible.
    pub rate: Rate,
    intervals: ArrayQueue<TagInterval>,
    /// The minimum by which a sample moves the position that hooks read.
    pub sample_size: u64,
    /// The ring with the samples; none if the thread is not sampled.
    pub ring: Option<Arc<SampleRing>>,
    pub switches: Option<Arc<SwitchRing>>,
    /// What it takes of the limits of the process, until the rings are closed.
    pub(super) shares: Mutex<Vec<Share>>,
    /// The thread's CPU clock at the start or at the end of the last pause; `u64::MAX` during a pause.
    since_cpu_ns: AtomicU64,
    sampled_before_ns: AtomicU64,
    /// For how long the thread has waited for a CPU, as the collector last read it.
    pub run_delay: RunDelayCell,
    /// What the thread may still have to count when the session has been read completely and is released: the samples from
    /// a position on.
    rest: OnceLock<(u64, u64)>,
    pub(super) next: OnceLock<Arc<Self>>,
}

/// For how long a thread could have run since it started, and had no CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunDelay {
    /// When that was read, in ticks: not later.
    pub at: u64,
    pub ns: u64,
    /// The thread ran then or later, but not later than `at`. It may have waited since, which counts when that ends.
    pub ran_at: u64,
}

/// What was read of a thread, by the collector for the thread's hooks: first since its last hook, and latest.
#[derive(Debug, Default)]
pub struct RunDelayCell(Mutex<Option<[RunDelay; 2]>>);

impl RunDelayCell {
    /// `last_hook_at` is when the thread's last hook ended, in ticks. Does nothing while a hook is reading: its thread may
    /// not run for long, and the next reading has this time, too.
    pub fn set(&self, latest: RunDelay, last_hook_at: u64) {
        let Some(mut read) = self.0.try_lock() else { return };
        let first = read.map(|[first, _]| first).filter(|first| first.at > last_hook_at);
        *read = Some([first.unwrap_or(latest), latest]);
    }

    /// First and latest, unless they are being written.
    pub fn get(&self) -> Option<[RunDelay; 2]> {
        *self.0.try_lock()?
    }
}

/// Beyond one per sample of a full ring: the collector releases the ring piece by piece, and takes the intervals once.
pub(crate) const SPARE_INTERVALS: usize = 8;

impl SamplingSession {
    pub fn none() -> Self {
        Self::new(None, Rate::of(0), 1, 1)
    }

    /// `sample_size` is the least by which a sample moves the position, `least_record` the length of frequent short ones.
    pub fn new(
        ring: Option<Arc<SampleRing>>,
        rate: Rate,
        sample_size: u64,
        least_record: u64,
    ) -> Self {
        // A thread writes at most one interval per sample.
        let data_size = ring.as_ref().map_or(0, |ring| ring.data_size());
        let samples = data_size / usize::try_from(least_record.max(1)).unwrap_or(usize::MAX);
        Self {
            from: AtomicU64::new(0),
            rate,
            intervals: ArrayQueue::new(2 * samples + SPARE_INTERVALS),
            sample_size: sample_size.max(1),
            ring,
            switches: None,
            shares: Mutex::default(),
            since_cpu_ns: AtomicU64::new(0),
            sampled_before_ns: AtomicU64::new(0),
            run_delay: RunDelayCell::default(),
            rest: OnceLock::new(),
            next: OnceLock::new(),
        }
    }

    pub(crate) fn note_since(&self, cpu_ns: u64) {
        self.since_cpu_ns.store(cpu_ns, Ordering::Release);
    }

    /// For how much CPU time the thread has been sampled, given its current CPU clock, or 0 once it is not sampled any more.
    pub fn sampled_ns(&self, cpu_ns: u64) -> u64 {
        loop {
            let since_ns = self.since_cpu_ns.load(Ordering::Acquire);
            let before_ns = self.sampled_before_ns.load(Ordering::Acquire);
            // A pause moves time from one value to the other: both must be of the same moment.
            if self.since_cpu_ns.load(Ordering::Relaxed) == since_ns {
                let now_ns = before_ns + cpu_ns.saturating_sub(since_ns);
                return self.ring.as_ref().map_or(0, |_| now_ns);
            }
        }
    }

    pub(crate) fn start(&self) -> Result<(), WhyRefused> {
        self.switches.iter().try_for_each(|ring| ring.start())?;
        self.ring.iter().try_for_each(|ring| ring.start())
    }

    /// Stops sampling until the next start. `cpu_ns` is the thread's CPU clock. Samples in the ring can still be read.
    pub fn pause(&self, cpu_ns: u64) {
        self.switches.iter().for_each(|ring| ring.pause());
        self.ring.iter().for_each(|ring| ring.pause());
        // Between the two, the sum is too small, never too large.
        let since_ns = self.since_cpu_ns.swap(u64::MAX, Ordering::AcqRel);
        self.sampled_before_ns.fetch_add(cpu_ns.saturating_sub(since_ns), Ordering::Release);
    }

    /// Releases everything except the position that hooks read. The session must have been read completely, and must no
    /// longer sample its thread. `samples` is the number of samples from position `from` on.
    pub(crate) fn retire(&self, from: u64, samples: u64) {
        // Before the ring, in which hooks would count the samples, is released.
        _ = self.rest.set((from, samples));
        self.switches.iter().for_each(|ring| ring.retire());
        self.ring.iter().for_each(|ring| ring.retire());
        self.shares.lock().clear();
    }

    pub fn samples(&self) -> Position {
        self.ring.clone().map(Position::of_ring).unwrap_or_default()
    }

    /// Whether context switches are recorded: true for perf, false for a timer.
    pub fn has_switch_records(&self) -> bool {
        self.switches.is_some()
    }

    /// Where the open interval begins.
    pub fn from(&self) -> u64 {
        self.from.load(Ordering::Acquire)
    }

    /// Closes the open interval at `to` and begins the next one. Only the thread itself may call it. Returns false if
    /// the interval was lost because the collector is behind.
    pub fn close_interval(&self, span: Option<Tag>, to: u64) -> bool {
        let stored = match span {
            Some(span) => {
                let from = self.from.load(Ordering::Relaxed);
                self.intervals.push(TagInterval { span, from, to }).is_ok()
            }
            None => true,
        };
        // After the push, so that the interval is in the queue before it stops being the open one.
        self.from.store(to, Ordering::Release);
        stored
    }

    /// For the thread itself: the number of samples between two positions, if they must be counted and can be.
    ///
    /// Reads the records one by one, since samples in the kernel are longer than others, and other records occur. The
    /// collector may have released them, but only this thread's own samples overwrite them.
    pub fn count_samples(&self, from: u64, until: u64) -> Option<u64> {
        let ring = self.ring.as_ref().filter(|ring| ring.timer().is_none())?;
        let fits = |head: u64| head.saturating_sub(from) <= ring.data_size() as u64;
        if !fits(until) {
            return None;
        }
        let records = Records::between(&***ring, from, until);
        let samples = records.filter(|record| matches!(record, Ok(Record::Sample(_)))).count();
        fits(ring.head()).then_some(samples as u64)
    }

    /// The number of samples in the open interval, if there will be no more.
    pub fn samples_left(&self) -> Option<u64> {
        let (from, samples) = *self.rest.get()?;
        Some(if from == self.from() { samples } else { 0 })
    }

    /// Whether an interval that is closed now would be stored. Only for the thread itself, the only producer.
    pub fn has_room(&self) -> bool {
        !self.intervals.is_full()
    }

    pub fn take_interval(&self) -> Option<TagInterval> {
        self.intervals.pop()
    }

    pub fn next(&self) -> Option<&Arc<Self>> {
        self.next.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Option<Tag> = Tag::new(1);

    #[test]
    fn closing_an_interval_records_its_span() {
        let session = SamplingSession::none();
        assert!(session.close_interval(A, 32));
        let interval = session.take_interval().unwrap();
        assert_eq!(interval, TagInterval { span: A.unwrap(), from: 0, to: 32 });
        assert_eq!(session.take_interval(), None);
        assert_eq!(session.from(), 32);
    }

    #[test]
    fn outside_any_span_there_is_no_interval() {
        let session = SamplingSession::none();
        assert!(session.close_interval(None, 32));
        assert_eq!(session.take_interval(), None);
        assert_eq!(session.from(), 32);
    }

    #[test]
    fn a_full_queue_reports_a_lost_interval() {
        let session = SamplingSession::none();
        for position in 1..=SPARE_INTERVALS as u64 {
            assert!(session.close_interval(A, position));
        }
        assert!(!session.close_interval(A, 1_000));
        assert_eq!(session.from(), 1_000);
    }
}
