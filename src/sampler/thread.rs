//! What a thread and the collector share.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering, compiler_fence};

use parking_lot::Mutex;

use super::arming::Arming;
use super::rate::Rate;
use crate::ids::SpanKey;

/// The interval that a thread is in now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OpenInterval {
    pub(crate) span: Option<SpanKey>,
    pub(crate) from: u64,
    /// The thread is inside a hook: whether samples from `from` on are those of this span or of the next is
    /// not known yet.
    pub(crate) is_in_hook: bool,
}

/// Beside the key of the span, which never has that bit: the thread is inside a hook.
const IN_HOOK: u64 = 1 << 63;

/// Later than all that happens.
pub(crate) const NEVER: u64 = u64::MAX;

/// One thread from its first profiled segment until it ends or is in no profiled span for long.
///
/// The thread writes, the collector reads. See [`open_interval`](Self::open_interval) for why neither waits.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct SampledThread {
    span: AtomicU64,
    /// When a span that the thread is in is old, if the thread goes on in it; [`NEVER`] if it is in none.
    old_at: AtomicU64,
    /// When its last hook ended, in ticks.
    hooked_at: AtomicU64,
    /// How many armings have followed the first.
    turn: AtomicU32,
    life: AtomicU8,
    /// A span in which the thread was seen to wait, of which its hooks have not heard yet; 0 if there
    /// is none.
    waited: AtomicU64,
    /// When a hook last read the thread's CPU clock, and what it said.
    synced_ns: AtomicU64,
    synced_cpu_ns: AtomicU64,
    /// How it is sampled from when it is armed next: see [`Rate::word`].
    rate: AtomicU64,
    /// When a hook last heard of a wait, in ticks.
    heard_at: AtomicU64,
    is_refused: AtomicBool,
    arms_itself: AtomicBool,
    pub(crate) tid: u32,
    /// Where its stack is, if a timer may have to copy it.
    pub(crate) stack: Option<Range<u64>>,
    last: Mutex<Arc<Arming>>,
}

impl SampledThread {
    /// Of the thread of that number, which is sampled so often when it is armed; `stack` is where its stack
    /// is, if a timer may have to copy it.
    pub(crate) fn new(tid: u32, stack: Option<Range<u64>>, rate: Rate, first: Arc<Arming>) -> Self {
        Self {
            // It is made by a hook.
            span: AtomicU64::new(IN_HOOK),
            old_at: AtomicU64::new(NEVER),
            hooked_at: AtomicU64::new(0),
            turn: AtomicU32::new(0),
            life: AtomicU8::new(USED),
            waited: AtomicU64::new(0),
            synced_ns: AtomicU64::new(0),
            synced_cpu_ns: AtomicU64::new(0),
            rate: AtomicU64::new(rate.word()),
            heard_at: AtomicU64::new(0),
            is_refused: AtomicBool::new(false),
            arms_itself: AtomicBool::new(false),
            tid,
            stack,
            last: Mutex::new(first),
        }
    }

    /// The latest of its armings.
    pub(crate) fn last(&self) -> Arc<Arming> {
        Arc::clone(&self.last.lock())
    }

    /// Makes another arming follow the last one, if `make` does. Nothing happens if somebody else is at it
    /// this very moment.
    pub(crate) fn follow(
        &self,
        make: impl FnOnce(&Arming) -> Option<Arming>,
    ) -> Option<Arc<Arming>> {
        let mut last = self.last.try_lock()?;
        let next = Arc::new(make(&last)?);
        last.set_next(Arc::clone(&next));
        *last = Arc::clone(&next);
        // Release: who sees it sees what follows.
        self.turn.store(self.turn.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release);
        Some(next)
    }

    /// Notes whether the thread could not be armed when that was last tried. Returns what was noted before.
    pub(crate) fn note_refused(&self, is_refused: bool) -> bool {
        self.is_refused.swap(is_refused, Ordering::Relaxed)
    }

    /// Whether the thread could not be armed when that was last tried.
    pub(crate) fn is_refused(&self) -> bool {
        self.is_refused.load(Ordering::Relaxed)
    }

    /// How it is sampled from when it is armed next.
    pub(crate) fn set_rate(&self, rate: Rate) {
        self.rate.store(rate.word(), Ordering::Relaxed);
    }

    /// How it is sampled from when it is armed next.
    pub(crate) fn rate(&self) -> Rate {
        Rate::from_word(self.rate.load(Ordering::Relaxed))
    }

    /// How many armings have followed the first.
    #[inline(always)]
    pub(crate) fn turn(&self) -> u32 {
        self.turn.load(Ordering::Acquire)
    }

    /// A hook begins that may end with another span; [`set_span`](Self::set_span) must follow. Only the
    /// thread itself may call it.
    ///
    /// A sample that falls in the hook, after that has looked for samples, is seen by the next one, and is
    /// counted for the span that the thread is in by then. Where the thread is preempted here, the collector
    /// may come by in between: it must not take the sample for one of the span before.
    #[inline(always)]
    pub(crate) fn begin_hook(&self) {
        self.begin_hook_in(self.span.load(Ordering::Relaxed));
    }

    /// The same, in the span of that key; 0 for none.
    #[inline(always)]
    pub(crate) fn begin_hook_in(&self, key: u64) {
        self.span.store(key | IN_HOOK, Ordering::Release);
        // What interrupts this thread happens in the order of its instructions: only the compiler could
        // look for samples before.
        compiler_fence(Ordering::SeqCst);
    }

    /// The thread is now in the span of that key; 0 for none. Only the thread itself may call it.
    #[inline(always)]
    pub(crate) fn set_span(&self, key: u64) {
        // Release: whoever sees the span sees the `from` that was stored before it.
        self.span.store(key, Ordering::Release);
    }

    /// A hook ends at `now`; from `old_at` on a span that the thread is in is old, if it goes on in it. Both in
    /// ticks. Only the thread itself may call it, right before [`set_span`](Self::set_span).
    #[inline(always)]
    pub(crate) fn set_times(&self, now: u64, old_at: u64) {
        self.hooked_at.store(now, Ordering::Relaxed);
        self.old_at.store(old_at, Ordering::Relaxed);
    }

    /// When its last hook ended, in ticks.
    pub(crate) fn hooked_at(&self) -> u64 {
        self.hooked_at.load(Ordering::Relaxed)
    }

    /// The thread arms itself when it enters a span that is sampled from there on.
    pub(crate) fn note_arms_itself(&self) {
        self.arms_itself.store(true, Ordering::Relaxed);
    }

    pub(crate) fn arms_itself(&self) -> bool {
        self.arms_itself.load(Ordering::Relaxed)
    }

    /// When a span that the thread is in is old, in ticks: to be compared with now.
    pub(crate) fn old_at(&self) -> u64 {
        self.old_at.load(Ordering::Relaxed)
    }

    /// The interval that is open now. The collector calls it after it has read the ring's head and
    /// before it takes the intervals; then each sample before that head is in this interval or in one
    /// of the intervals:
    ///
    /// Say a sample lies at `p`, before that head. Then the thread had, before the sample, stored
    /// the span it was in, and the head that we read makes that store visible. From there the
    /// thread may have gone on to another span, but only after it had seen the ring's head move
    /// beyond `p`, so it ended the interval first: pushed the interval, then stored a `from` greater
    /// than `p`, then stored a span. So if the `from` that we read is not greater than `p`, and
    /// was the same before and after we read the span, then that span is the one of `p`;
    /// otherwise the interval is in the queue.
    ///
    /// But if `p` fell in a hook that had looked for samples already, that hook went on to another span
    /// all the same, and `p` is counted for that one. Then we see that the thread is in a hook, or we see
    /// the span that the hook ended with.
    ///
    /// For a thread that has not taken up the arming yet `from` is 0, and is written by no other.
    pub(crate) fn open_interval(&self, arming: &Arming) -> OpenInterval {
        loop {
            let from = arming.from();
            let span = self.span.load(Ordering::Acquire);
            if arming.from() == from {
                let is_in_hook = span & IN_HOOK != 0;
                return OpenInterval { span: SpanKey::new(span & !IN_HOOK), from, is_in_hook };
            }
            std::hint::spin_loop();
        }
    }

    /// The innermost profiled span that the thread is in, or was in before a hook that goes on.
    pub(crate) fn span(&self) -> Option<SpanKey> {
        SpanKey::new(self.span.load(Ordering::Acquire) & !IN_HOOK)
    }

    /// Whether the thread is inside a hook.
    pub(crate) fn is_in_hook(&self) -> bool {
        self.span.load(Ordering::Acquire) & IN_HOOK != 0
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

    /// For the thread itself, in a hook at `now` in ticks: the span in which it was seen to wait.
    pub(crate) fn take_waited(&self, now: u64) -> Option<SpanKey> {
        if self.waited.load(Ordering::Relaxed) == 0 {
            return None;
        }
        // Before it is heard of: who finds that finds this.
        self.heard_at.store(now, Ordering::Relaxed);
        SpanKey::new(self.waited.swap(0, Ordering::AcqRel))
    }

    /// When a hook last heard of a wait, in ticks: it was over by then.
    pub(crate) fn heard_at(&self) -> u64 {
        self.heard_at.load(Ordering::Acquire)
    }

    /// For the thread itself: it has read its CPU clock at that moment
    /// (`CLOCK_MONOTONIC_RAW` in nanoseconds).
    pub(crate) fn note_synced(&self, time_ns: u64, cpu_ns: u64) {
        self.synced_ns.store(0, Ordering::Release);
        self.synced_cpu_ns.store(cpu_ns, Ordering::Release);
        self.synced_ns.store(time_ns, Ordering::Release);
    }

    /// When a hook last read the thread's CPU clock, and what it said.
    pub(crate) fn synced(&self) -> Option<(u64, u64)> {
        let time_ns = self.synced_ns.load(Ordering::Acquire);
        let cpu_ns = self.synced_cpu_ns.load(Ordering::Acquire);
        let is_whole = time_ns != 0 && self.synced_ns.load(Ordering::Acquire) == time_ns;
        is_whole.then_some((time_ns, cpu_ns))
    }

    /// For the thread itself, in the first hook after a millisecond:
    /// says that it is in use. False if it has been ended: then the thread must be
    /// armed anew.
    pub(crate) fn is_used(&self) -> bool {
        let taken = self.life.compare_exchange(UNUSED, USED, Ordering::AcqRel, Ordering::Acquire);
        taken != Err(OVER)
    }

    /// The collector finds the thread in no profiled span.
    pub(crate) fn note_unused(&self) {
        _ = self.life.compare_exchange(USED, UNUSED, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// Ends it if the thread has not looked since [`note_unused`](Self::note_unused).
    ///
    /// If that was longer ago than a millisecond, and the thread is in no profiled span, then it
    /// will look before it does anything else with it.
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

    fn thread() -> (SampledThread, Arc<Arming>) {
        let arming = Arc::new(Arming::none());
        (SampledThread::new(1, None, Rate::of(1), Arc::clone(&arming)), arming)
    }

    fn interval(span: Option<SpanKey>, from: u64) -> OpenInterval {
        OpenInterval { span, from, is_in_hook: false }
    }

    #[test]
    fn a_hook_shows_until_it_says_the_span() {
        let (thread, arming) = thread();
        let in_hook = |span| OpenInterval { is_in_hook: true, ..interval(span, 0) };
        assert_eq!(thread.open_interval(&arming), in_hook(None), "a hook has made it");
        thread.set_span(1);
        assert_eq!(thread.open_interval(&arming), interval(A, 0));
        thread.begin_hook();
        assert_eq!(thread.open_interval(&arming), in_hook(A));
        thread.begin_hook_in(2);
        assert_eq!(thread.open_interval(&arming), in_hook(B));
        thread.set_span(0);
        assert_eq!(thread.open_interval(&arming), interval(None, 0));
    }

    #[test]
    fn closing_an_interval_opens_the_next() {
        let (thread, arming) = thread();
        thread.set_span(1);
        assert!(arming.close_interval(A, 32));
        thread.set_span(2);
        assert_eq!(thread.open_interval(&arming), interval(B, 32));
    }

    /// What is read while the thread goes from span to span is a interval that there was, and all others are
    /// among the intervals.
    #[test]
    fn a_stretch_is_read_as_it_is_while_the_thread_goes_on() {
        const STEP: u64 = 10;
        let hooks = if cfg!(miri) { 40 } else { 20_000 };
        let (thread, arming) = thread();
        thread.set_span(0);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut marked = 1;
                while marked < hooks {
                    let OpenInterval { span, from, is_in_hook, .. } = thread.open_interval(&arming);
                    let key = span.map_or(0, SpanKey::get);
                    assert!(from == STEP * key || is_in_hook && from == STEP * (key + 1));
                    while let Some(interval) = arming.take_interval() {
                        assert_eq!((interval.span.get(), interval.from), (marked, STEP * marked));
                        assert_eq!(interval.to, STEP * (marked + 1));
                        marked += 1;
                    }
                    assert!(marked >= key, "what is not open any more is among the intervals");
                }
            });
            for number in 1..=hooks {
                while !arming.has_room() && !reader.is_finished() {
                    std::thread::yield_now();
                }
                thread.begin_hook();
                arming.close_interval(SpanKey::new(number - 1), STEP * number);
                thread.set_span(number);
            }
        });
    }

    #[test]
    fn only_a_recording_without_use_is_ended() {
        let (thread, _) = thread();
        assert!(!thread.end_if_unused());
        thread.note_unused();
        assert!(thread.is_used());
        assert!(!thread.end_if_unused());
        thread.note_unused();
        assert!(thread.end_if_unused());
        assert!(!thread.is_used());
        assert!(thread.is_over());
    }
}
