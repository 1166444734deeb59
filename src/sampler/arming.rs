//! One time of sampling a thread.

use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use crossbeam::queue::ArrayQueue;
use parking_lot::Mutex;

use crate::ids::SpanKey;
use crate::sys::{HardwareCounters, PerfRing, Position, SampleRing, WhyRefused};

/// A interval of a thread's ring, and the innermost profiled span that the thread was in all along.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SpanInterval {
    pub(crate) span: SpanKey,
    /// A sample whose position is at least `from` and less than `to` fell in `span`.
    pub(crate) from: u64,
    pub(crate) to: u64,
}

/// What a thread is sampled with, from when it is armed until it is disarmed; or that it is not sampled.
///
/// Those of a thread are a chain: the thread takes up the next one in a hook, the collector when it has read
/// the one before to its end.
#[derive(Debug)]
pub(crate) struct Arming {
    from: AtomicU64,
    /// The time that each sample stands for.
    period_ns: u64,
    intervals: ArrayQueue<SpanInterval>,
    /// By how much the position that hooks see moves with a sample, at least.
    sample_size: NonZeroU64,
    /// Where the samples are; none if the thread is not sampled.
    pub(crate) ring: Option<Arc<SampleRing>>,
    /// Where context switches are recorded.
    pub(crate) switches: Option<Arc<PerfRing>>,
    /// Where the hardware counts.
    pub(crate) hardware: Mutex<Option<HardwareCounters>>,
    /// What the thread's CPU clock said when it began, or went on after a pause; `u64::MAX` during one.
    since_cpu_ns: AtomicU64,
    /// For how long the thread ran before that and was sampled.
    sampled_before_ns: AtomicU64,
    /// Set when it is read to its end.
    rest: OnceLock<Rest>,
    next: OnceLock<Arc<Self>>,
}

/// What a thread may still have to hear of an arming that is read to its end.
#[derive(Clone, Copy, Debug)]
struct Rest {
    from: u64,
    samples: u64,
}

/// Intervals beside those of a full ring: a round of the collector gives the ring back bit by bit, and
/// takes the intervals once.
pub(crate) const SPARE_INTERVALS: usize = 8;

impl Arming {
    /// The thread is not sampled.
    pub(crate) fn none() -> Self {
        Self::with_intervals(None, 0, NonZeroU64::MIN, 0)
    }

    /// `sample_size` is by how much a sample moves the position that hooks see, at least, and
    /// `least_record` how long the shortest sample is that there are many of.
    pub(crate) fn new(
        ring: Arc<SampleRing>,
        period_ns: u64,
        sample_size: u64,
        least_record: u64,
    ) -> Self {
        // A thread writes at most a interval a sample.
        let samples = ring.data_size() / usize::try_from(least_record.max(1)).unwrap_or(usize::MAX);
        let sample_size = NonZeroU64::new(sample_size).unwrap_or(NonZeroU64::MIN);
        Self::with_intervals(Some(ring), period_ns, sample_size, samples)
    }

    fn with_intervals(
        ring: Option<Arc<SampleRing>>,
        period_ns: u64,
        sample_size: NonZeroU64,
        samples: usize,
    ) -> Self {
        Self {
            from: AtomicU64::new(0),
            period_ns,
            intervals: ArrayQueue::new(2 * samples + SPARE_INTERVALS),
            sample_size,
            ring,
            switches: None,
            hardware: Mutex::new(None),
            since_cpu_ns: AtomicU64::new(0),
            sampled_before_ns: AtomicU64::new(0),
            rest: OnceLock::new(),
            next: OnceLock::new(),
        }
    }

    /// It begins when the thread's CPU clock says that.
    pub(crate) fn note_since(&self, cpu_ns: u64) {
        self.since_cpu_ns.store(cpu_ns, Ordering::Release);
    }

    /// For how long the thread ran and was sampled, now that its CPU clock says that.
    pub(crate) fn sampled_ns(&self, cpu_ns: u64) -> u64 {
        loop {
            let since_ns = self.since_cpu_ns.load(Ordering::Acquire);
            let before_ns = self.sampled_before_ns.load(Ordering::Acquire);
            // What is added there after a pause is not counted here as well.
            if self.since_cpu_ns.load(Ordering::Relaxed) == since_ns {
                let now_ns = before_ns + cpu_ns.saturating_sub(since_ns);
                return self.ring.as_ref().map_or(0, |_| now_ns);
            }
        }
    }

    /// The same of one that is paused for good.
    pub(crate) fn all_sampled_ns(&self) -> u64 {
        self.sampled_ns(0)
    }

    /// The scheduler's doings are recorded there.
    pub(crate) fn with_switches(self, switches: Option<Arc<PerfRing>>) -> Self {
        Self { switches, ..self }
    }

    /// Begins to sample, or goes on after a [`pause`](Self::pause).
    pub(crate) fn start(&self) -> Result<(), WhyRefused> {
        self.switches.iter().try_for_each(|ring| ring.start())?;
        self.ring.iter().try_for_each(|ring| ring.start())
    }

    /// Samples no more, now that the thread's CPU clock says that, until it is started again; what there is stays to be
    /// read.
    pub(crate) fn pause(&self, cpu_ns: u64) {
        self.switches.iter().for_each(|ring| ring.pause());
        self.ring.iter().for_each(|ring| ring.pause());
        // In between it is too short, and never too long.
        let since_ns = self.since_cpu_ns.swap(u64::MAX, Ordering::AcqRel);
        self.sampled_before_ns.fetch_add(cpu_ns.saturating_sub(since_ns), Ordering::Release);
    }

    /// Whether the thread has seen all samples that there are.
    pub(crate) fn has_seen_all(&self) -> bool {
        self.ring.as_ref().is_none_or(|ring| ring.position() == self.from())
    }

    /// Gives back all that this takes but the position that hooks see, once it is read and its thread is not sampled by it
    /// any more. From `from` on there were so many samples.
    pub(crate) fn retire(&self, from: u64, samples: u64) {
        // Before what they are counted in is gone.
        _ = self.rest.set(Rest { from, samples });
        self.switches.iter().for_each(|ring| ring.retire());
        self.ring.iter().for_each(|ring| ring.retire());
        // Closed without the lock, which hooks take.
        let hardware = self.hardware.lock().take();
        drop(hardware);
    }

    /// Moves when a sample is taken.
    pub(crate) fn samples(&self) -> Position {
        self.ring.as_ref().map_or(Position::fixed(), |ring| Position::of_ring(Arc::clone(ring)))
    }

    /// By how much that moves with a sample, at least.
    pub(crate) fn sample_size(&self) -> u64 {
        self.sample_size.get()
    }

    /// Whether the scheduler's doings are recorded: then by perf, else by a timer.
    pub(crate) fn has_switch_records(&self) -> bool {
        self.switches.is_some()
    }

    /// Where the open interval begins.
    pub(crate) fn from(&self) -> u64 {
        self.from.load(Ordering::Acquire)
    }

    pub(crate) fn period_ns(&self) -> u64 {
        self.period_ns
    }

    /// Ends the present interval at `to` and begins the next. Only the thread itself may call it.
    /// Returns false if the interval was lost because the collector is behind.
    pub(crate) fn close_interval(&self, span: Option<SpanKey>, to: u64) -> bool {
        let stored = match span {
            Some(span) => {
                let from = self.from.load(Ordering::Relaxed);
                self.intervals.push(SpanInterval { span, from, to }).is_ok()
            }
            None => true,
        };
        // After the interval: a interval is in the queue before it is not open any more.
        self.from.store(to, Ordering::Release);
        stored
    }

    /// How many samples there were in the open interval, if it is known that there will be no more.
    pub(crate) fn samples_left(&self) -> Option<u64> {
        let rest = self.rest.get()?;
        Some(if rest.from == self.from() { rest.samples } else { 0 })
    }

    /// Whether it is read to its end and given back.
    pub(crate) fn is_retired(&self) -> bool {
        self.rest.get().is_some()
    }

    /// Whether a interval that ends now is not lost. For the thread itself, which alone adds some.
    pub(crate) fn has_room(&self) -> bool {
        !self.intervals.is_full()
    }

    /// Takes the oldest interval.
    pub(crate) fn take_interval(&self) -> Option<SpanInterval> {
        self.intervals.pop()
    }

    /// The one that followed, if one did.
    pub(crate) fn next(&self) -> Option<&Arc<Self>> {
        self.next.get()
    }

    /// Makes `next` follow. Only one may ever do.
    pub(crate) fn set_next(&self, next: Arc<Self>) {
        _ = self.next.set(next);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Option<SpanKey> = SpanKey::new(1);

    #[test]
    fn a_cut_makes_a_mark_of_the_span() {
        let arming = Arming::none();
        assert!(arming.close_interval(A, 32));
        let interval = arming.take_interval().unwrap();
        assert_eq!(interval, SpanInterval { span: A.unwrap(), from: 0, to: 32 });
        assert_eq!(arming.take_interval(), None);
        assert_eq!(arming.from(), 32);
    }

    #[test]
    fn outside_any_span_there_is_no_mark() {
        let arming = Arming::none();
        assert!(arming.close_interval(None, 32));
        assert_eq!(arming.take_interval(), None);
        assert_eq!(arming.from(), 32);
    }

    #[test]
    fn a_full_queue_loses_the_stretch_and_says_so() {
        let arming = Arming::none();
        for position in 1..=SPARE_INTERVALS as u64 {
            assert!(arming.close_interval(A, position));
        }
        assert!(!arming.close_interval(A, 1_000));
        assert_eq!(arming.from(), 1_000);
    }
}
