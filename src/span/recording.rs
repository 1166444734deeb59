//! What a sampled thread shows the collector.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering, compiler_fence};

use crossbeam::queue::ArrayQueue;
use parking_lot::Mutex;

use super::SpanKey;
use crate::sys::{HardwareCounters, Ring};

/// A stretch of a thread's ring, and the innermost profiled span that the thread was in all along.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark {
    pub(crate) span: SpanKey,
    /// A sample whose position is at least `from` and less than `to` fell in `span`.
    pub(crate) from: u64,
    pub(crate) to: u64,
    /// The time that each sample stands for.
    pub(crate) period_ns: u64,
}

/// The stretch that a thread is in now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stretch {
    pub(crate) span: Option<SpanKey>,
    pub(crate) from: u64,
    pub(crate) period_ns: u64,
    /// The thread is inside a hook: whether samples from `from` on are those of this span or of the next is
    /// not known yet.
    pub(crate) is_in_hook: bool,
}

/// Beside the key of the span, which never has that bit: the thread is inside a hook.
const IN_HOOK: u64 = 1 << 63;

/// One thread from the time it is armed until it ends or is disarmed.
///
/// The thread writes, the collector reads. See [`stretch`](Self::stretch) for why neither waits.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Recording {
    from: AtomicU64,
    span: AtomicU64,
    period_ns: AtomicU64,
    life: AtomicU8,
    /// A span in which the thread was seen to wait, of which its hooks have not heard yet; 0 if there
    /// is none.
    waited: AtomicU64,
    /// When a hook last read the thread's CPU clock, and what it said.
    settled_ns: AtomicU64,
    settled_cpu_ns: AtomicU64,
    marks: ArrayQueue<Mark>,
    /// By how much the position that hooks see moves with a sample, at least.
    sample_size: Option<NonZeroU64>,
    pub(crate) tid: u32,
    /// Where the samples are.
    pub(crate) ring: Option<Arc<Ring>>,
    /// The other ring of the thread, for its end.
    pub(crate) switches: Option<Arc<Ring>>,
    /// The same, where the hardware counts.
    pub(crate) hardware: Mutex<Option<HardwareCounters>>,
}

/// Marks beside those of a full ring: a round of the collector gives the ring back bit by bit, and
/// takes the marks once.
const SPARE_MARKS: usize = 8;

impl Recording {
    pub(crate) fn new(
        tid: u32,
        ring: Option<Arc<Ring>>,
        switches: Option<Arc<Ring>>,
        period_ns: u64,
        sample_size: u64,
    ) -> Self {
        // A thread writes at most a mark a sample.
        let ring_bytes = ring.as_ref().map_or(0, |ring| ring.data_size());
        let samples = ring_bytes / usize::try_from(sample_size.max(1)).unwrap_or(usize::MAX);
        Self {
            from: AtomicU64::new(0),
            // It is made by a hook.
            span: AtomicU64::new(IN_HOOK),
            period_ns: AtomicU64::new(period_ns),
            life: AtomicU8::new(USED),
            waited: AtomicU64::new(0),
            settled_ns: AtomicU64::new(0),
            settled_cpu_ns: AtomicU64::new(0),
            marks: ArrayQueue::new(2 * samples + SPARE_MARKS),
            sample_size: None,
            tid,
            ring,
            switches,
            hardware: Mutex::new(None),
        }
    }

    /// A hook begins that may end with another span; [`set_span`](Self::set_span) must follow. Only the
    /// thread itself may call it.
    ///
    /// A sample that falls in the hook, after that has looked for samples, is seen by the next one, and is
    /// counted for the span that the thread is in by then. Where the thread is preempted here, the collector
    /// may come by in between: it must not take the sample for one of the span before.
    #[inline(always)]
    pub(super) fn begin_hook(&self) {
        self.begin_hook_in(self.span.load(Ordering::Relaxed));
    }

    /// The same, in the span of that key; 0 for none.
    #[inline(always)]
    pub(super) fn begin_hook_in(&self, key: u64) {
        self.span.store(key | IN_HOOK, Ordering::Release);
        // What interrupts this thread happens in the order of its instructions: only the compiler could
        // look for samples before.
        compiler_fence(Ordering::SeqCst);
    }

    /// The thread is now in the span of that key; 0 for none. Only the thread itself may call it.
    #[inline(always)]
    pub(super) fn set_span(&self, key: u64) {
        // Release: whoever sees the span sees the `from` that was stored before it.
        self.span.store(key, Ordering::Release);
    }

    /// Ends the present stretch at `to` and begins the next. Only the thread itself may call it.
    /// Returns false if the stretch was lost because the collector is behind.
    pub(super) fn cut(&self, span: Option<SpanKey>, to: u64) -> bool {
        let stored = match span {
            Some(span) => {
                let from = self.from.load(Ordering::Relaxed);
                let period_ns = self.period_ns.load(Ordering::Relaxed);
                self.marks.push(Mark { span, from, to, period_ns }).is_ok()
            }
            None => true,
        };
        // After the mark: a stretch is in the queue before it is not open any more.
        self.from.store(to, Ordering::Release);
        stored
    }

    /// Whether a stretch that ends now is not lost. For the thread itself, which alone adds some.
    pub(super) fn has_room(&self) -> bool {
        !self.marks.is_full()
    }

    #[inline]
    pub(super) fn period_ns(&self) -> u64 {
        self.period_ns.load(Ordering::Relaxed)
    }

    /// Only the thread itself may call it, right after [`cut`](Self::cut).
    pub(super) fn set_period_ns(&self, period_ns: u64) {
        self.period_ns.store(period_ns, Ordering::Release);
    }

    /// The stretch that is open now. The collector calls it after it has read the ring's head and
    /// before it takes the marks; then each sample before that head is in this stretch or in one
    /// of the marks:
    ///
    /// Say a sample lies at `p`, before that head. Then the thread had, before the sample, stored
    /// the span it was in, and the head that we read makes that store visible. From there the
    /// thread may have gone on to another span, but only after it had seen the ring's head move
    /// beyond `p`, so it ended the stretch first: pushed the mark, then stored a `from` greater
    /// than `p`, then stored a span. So if the `from` that we read is not greater than `p`, and
    /// was the same before and after we read the span, then that span is the one of `p`;
    /// otherwise the mark is in the queue.
    ///
    /// But if `p` fell in a hook that had looked for samples already, that hook went on to another span
    /// all the same, and `p` is counted for that one. Then we see that the thread is in a hook, or we see
    /// the span that the hook ended with.
    pub(crate) fn stretch(&self) -> Stretch {
        loop {
            let from = self.from.load(Ordering::Acquire);
            let period_ns = self.period_ns.load(Ordering::Acquire);
            let span = self.span.load(Ordering::Acquire);
            if self.from.load(Ordering::Acquire) == from {
                let is_in_hook = span & IN_HOOK != 0;
                return Stretch {
                    span: SpanKey::new(span & !IN_HOOK),
                    from,
                    period_ns,
                    is_in_hook,
                };
            }
            std::hint::spin_loop();
        }
    }

    /// With the least by which the position that hooks see moves with a sample.
    pub(crate) fn with_steps(self, sample_size: u64) -> Self {
        Self { sample_size: NonZeroU64::new(sample_size), ..self }
    }

    /// By how much the position moves with a sample, at least; `None` if that is not known.
    pub(crate) fn sample_size(&self) -> Option<NonZeroU64> {
        self.sample_size
    }

    /// Whether the thread has not heard yet of a wait in which it was seen.
    pub(crate) fn has_unheard_wait(&self) -> bool {
        self.waited.load(Ordering::Acquire) != 0
    }

    /// The collector takes the thread to wait in that span. Returns what it must
    /// [take back](Self::take_back_waited) if that turns out to be over.
    pub(crate) fn note_waited(&self, span: SpanKey) -> Option<SpanKey> {
        SpanKey::new(self.waited.swap(span.get(), Ordering::AcqRel))
    }

    /// The thread did not wait in that span any more; `before` is what it has not heard of either. False if
    /// it has heard of it, and has counted it.
    pub(crate) fn take_back_waited(&self, span: SpanKey, before: Option<SpanKey>) -> bool {
        let before = before.map_or(0, SpanKey::get);
        let (acquire, relaxed) = (Ordering::AcqRel, Ordering::Relaxed);
        self.waited.compare_exchange(span.get(), before, acquire, relaxed).is_ok()
    }

    /// For the thread itself: the span in which it was seen to wait.
    pub(super) fn take_waited(&self) -> Option<SpanKey> {
        if self.waited.load(Ordering::Relaxed) == 0 {
            return None;
        }
        SpanKey::new(self.waited.swap(0, Ordering::Acquire))
    }

    /// For the thread itself: it has read its CPU clock at that moment
    /// (`CLOCK_MONOTONIC_RAW` in nanoseconds).
    pub(super) fn note_settled(&self, time_ns: u64, cpu_ns: u64) {
        self.settled_ns.store(0, Ordering::Release);
        self.settled_cpu_ns.store(cpu_ns, Ordering::Release);
        self.settled_ns.store(time_ns, Ordering::Release);
    }

    /// When a hook last read the thread's CPU clock, and what it said.
    pub(crate) fn settled(&self) -> Option<(u64, u64)> {
        let time_ns = self.settled_ns.load(Ordering::Acquire);
        let cpu_ns = self.settled_cpu_ns.load(Ordering::Acquire);
        let is_whole = time_ns != 0 && self.settled_ns.load(Ordering::Acquire) == time_ns;
        is_whole.then_some((time_ns, cpu_ns))
    }

    /// Whether the scheduler's doings are recorded: then by perf, else by a timer.
    pub(crate) fn has_switch_records(&self) -> bool {
        self.switches.is_some()
    }

    /// Takes the oldest mark.
    pub(crate) fn take_mark(&self) -> Option<Mark> {
        self.marks.pop()
    }

    /// For the thread itself, at least once every `LOOK_INTERVAL` in which it has hooks at all:
    /// says that the recording is in use. False if it has been ended: then the thread must be
    /// armed anew.
    pub(super) fn is_used(&self) -> bool {
        let taken = self.life.compare_exchange(UNUSED, USED, Ordering::AcqRel, Ordering::Acquire);
        taken != Err(OVER)
    }

    /// The collector finds the thread in no profiled span.
    pub(crate) fn note_unused(&self) {
        _ = self.life.compare_exchange(USED, UNUSED, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// Ends the recording if the thread has not looked since [`note_unused`](Self::note_unused).
    ///
    /// If that was longer ago than `LOOK_INTERVAL`, and the thread is in no profiled span, then it
    /// will look before it does anything else with the recording.
    pub(crate) fn end_if_unused(&self) -> bool {
        self.life.compare_exchange(UNUSED, OVER, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// The thread has ended, or everything has: nothing is written any more.
    pub(crate) fn end(&self) {
        self.life.store(OVER, Ordering::Release);
    }

    pub(crate) fn is_over(&self) -> bool {
        self.life.load(Ordering::Acquire) == OVER
    }
}

const USED: u8 = 0;
const UNUSED: u8 = 1;
const OVER: u8 = 2;

#[cfg(test)]
mod tests {
    use super::*;

    const A: Option<SpanKey> = SpanKey::new(1);
    const B: Option<SpanKey> = SpanKey::new(2);

    fn stretch(span: Option<SpanKey>, from: u64) -> Stretch {
        Stretch { span, from, period_ns: 5, is_in_hook: false }
    }

    #[test]
    fn a_hook_shows_until_it_says_the_span() {
        let recording = Recording::new(1, None, None, 5, 1);
        let in_hook = |span| Stretch { is_in_hook: true, ..stretch(span, 0) };
        assert_eq!(recording.stretch(), in_hook(None), "a hook has made it");
        recording.set_span(1);
        assert_eq!(recording.stretch(), stretch(A, 0));
        recording.begin_hook();
        assert_eq!(recording.stretch(), in_hook(A));
        recording.begin_hook_in(2);
        assert_eq!(recording.stretch(), in_hook(B));
        recording.set_span(0);
        assert_eq!(recording.stretch(), stretch(None, 0));
    }

    #[test]
    fn a_cut_makes_a_mark_of_the_span_and_opens_the_next_stretch() {
        let recording = Recording::new(1, None, None, 5, 1);
        recording.set_span(1);
        assert!(recording.cut(A, 32));
        recording.set_span(2);
        assert_eq!(recording.stretch(), stretch(B, 32));
        let mark = recording.take_mark().unwrap();
        assert_eq!(mark, Mark { span: A.unwrap(), from: 0, to: 32, period_ns: 5 });
        assert_eq!(recording.take_mark(), None);
    }

    #[test]
    fn outside_any_span_there_is_no_mark() {
        let recording = Recording::new(1, None, None, 5, 1);
        recording.set_span(0);
        assert!(recording.cut(None, 32));
        assert_eq!(recording.take_mark(), None);
        assert_eq!(recording.stretch(), stretch(None, 32));
    }

    /// What is read while the thread goes from span to span is a stretch that there was, and all others are
    /// among the marks.
    #[test]
    fn a_stretch_is_read_as_it_is_while_the_thread_goes_on() {
        const STEP: u64 = 10;
        let hooks = if cfg!(miri) { 40 } else { 20_000 };
        let recording = Recording::new(1, None, None, 5, 1);
        recording.set_span(0);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut marked = 1;
                while marked < hooks {
                    let Stretch { span, from, is_in_hook, .. } = recording.stretch();
                    let key = span.map_or(0, SpanKey::get);
                    assert!(from == STEP * key || is_in_hook && from == STEP * (key + 1));
                    while let Some(mark) = recording.take_mark() {
                        assert_eq!((mark.span.get(), mark.from), (marked, STEP * marked));
                        assert_eq!(mark.to, STEP * (marked + 1));
                        marked += 1;
                    }
                    assert!(marked >= key, "what is not open any more is among the marks");
                }
            });
            for number in 1..=hooks {
                while !recording.has_room() && !reader.is_finished() {
                    std::thread::yield_now();
                }
                recording.begin_hook();
                recording.cut(SpanKey::new(number - 1), STEP * number);
                recording.set_span(number);
            }
        });
    }

    #[test]
    fn only_a_recording_without_use_is_ended() {
        let recording = Recording::new(1, None, None, 5, 1);
        assert!(!recording.end_if_unused());
        recording.note_unused();
        assert!(recording.is_used());
        assert!(!recording.end_if_unused());
        recording.note_unused();
        assert!(recording.end_if_unused());
        assert!(!recording.is_used());
        assert!(recording.is_over());
    }

    #[test]
    fn a_full_queue_loses_the_stretch_and_says_so() {
        let recording = Recording::new(1, None, None, 5, 1);
        for position in 1..=SPARE_MARKS as u64 {
            assert!(recording.cut(A, position));
        }
        assert!(!recording.cut(A, 1_000));
        assert_eq!(recording.stretch().from, 1_000);
    }
}
