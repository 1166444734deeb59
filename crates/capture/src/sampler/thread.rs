//! The state that a thread and the collector share.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering, compiler_fence};

use parking_lot::Mutex;

use super::rate::Rate;
use super::session::SamplingSession;
use crate::sys::{self, OsThread, Tag, ThreadStack, WhyRefused};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenInterval {
    pub span: Option<Tag>,
    pub from: u64,
    /// The thread is inside a hook, so it is not known yet whether samples from `from` on are of this span or the next.
    pub is_in_hook: bool,
}

/// Set in the span's key, which never uses this bit, while the thread is inside a hook.
const IN_HOOK: u64 = 1 << 63;

pub const NEVER: u64 = u64::MAX;

/// The thread attaches itself when it enters spans of some rule.
const ATTACHES_AT_ENTER: u8 = 1;
/// The thread has attached itself for one span alone.
const IS_BRIEF: u8 = 2;

/// A thread, from its first profiled segment until it ends or has been in no profiled span for long.
///
/// The thread writes and the collector reads, without locks: see [`open_interval`](Self::open_interval).
///
/// What each hook touches is in the first cache line, with what else only the thread writes.
#[derive(Debug)]
#[repr(C, align(128))]
pub struct ThreadShared {
    span: AtomicU64,
    /// When one of the thread's spans becomes old if the thread stays in it; [`NEVER`] if it is in none.
    samples_from: AtomicU64,
    last_hook_at: AtomicU64,
    /// When a hook last read the thread's CPU clock, and its value.
    synced: [AtomicU64; 2],
    /// When a hook last counted a wait, in ticks.
    claimed_at: AtomicU64,
    /// The number of sessions after the first.
    turn: AtomicU32,
    life: AtomicU8,
    /// [`ATTACHES_AT_ENTER`] and [`IS_BRIEF`].
    at_enter: AtomicU8,
    /// A span in which the collector found the thread blocked, until a hook of the thread counts it; 0 for none.
    waited: AtomicU64,

    /// The rate at which the thread is sampled when it is attached next: see [`Rate::word`].
    rate: AtomicU64,
    is_refused: AtomicBool,
    /// How often the thread had been switched out at [`Self::synced`], plus 1; 0 if that was not read.
    synced_switches: AtomicU64,
    pub thread: OsThread,
    /// The bounds of the thread's stack, or why no timer may copy it.
    pub(crate) stack: Result<ThreadStack, WhyRefused>,
    /// The latest session. Held for long only by the thread that appends one.
    last: Mutex<Arc<SamplingSession>>,
}

const _: () = assert!(std::mem::offset_of!(ThreadShared, rate) == 64);

impl ThreadShared {
    /// The state of `thread`. `rate` applies when it is attached; `stack` is needed if a timer may have to copy it.
    pub fn new(
        thread: OsThread,
        stack: Result<ThreadStack, WhyRefused>,
        rate: Rate,
        first: Arc<SamplingSession>,
    ) -> Self {
        Self {
            // A hook creates this.
            span: AtomicU64::new(IN_HOOK),
            samples_from: AtomicU64::new(NEVER),
            last_hook_at: AtomicU64::new(0),
            turn: AtomicU32::new(0),
            life: AtomicU8::new(USED),
            waited: AtomicU64::new(0),
            synced: [0, 0].map(AtomicU64::new),
            rate: AtomicU64::new(rate.word()),
            claimed_at: AtomicU64::new(0),
            is_refused: AtomicBool::new(false),
            synced_switches: AtomicU64::new(0),
            at_enter: AtomicU8::new(0),
            thread,
            stack,
            last: Mutex::new(first),
        }
    }

    pub fn own_stack(thread: Option<&Self>) -> Range<u64> {
        let stack = thread.and_then(|thread| thread.stack.as_ref().ok());
        stack.map_or(sys::ANY_STACK, |stack| stack.bounds.clone())
    }

    /// The state of a thread that has met no hook, and so is in no span.
    pub fn without_hooks(thread: OsThread, rate: Rate) -> Self {
        // The bounds of its stack are known to the thread itself alone.
        let stack = Ok(ThreadStack::ANY);
        let shared = Self::new(thread, stack, rate, Arc::new(SamplingSession::none()));
        shared.set_span(0);
        shared
    }

    pub fn tid(&self) -> u32 {
        self.thread.tid
    }

    pub fn last(&self) -> Arc<SamplingSession> {
        Arc::clone(&self.last.lock())
    }

    /// Appends the session that `make` returns, if any. Does nothing if another thread is appending one right now.
    pub fn append_session(
        &self,
        make: impl FnOnce(&SamplingSession) -> Option<SamplingSession>,
    ) -> Option<Arc<SamplingSession>> {
        const MAX_TRIES: usize = 64;
        // Others only read it, for some nanoseconds. A hook does not wait for one that is preempted there, and makes no system
        // call, which a filter of the program could refuse.
        let mut last = (0..MAX_TRIES).find_map(|_| {
            let last = self.last.try_lock();
            if last.is_none() {
                std::hint::spin_loop();
            }
            last
        })?;
        let next = Arc::new(make(&last)?);
        _ = last.next.set(Arc::clone(&next));
        *last = Arc::clone(&next);
        // Release: a thread that reads the new turn finds the next session.
        self.turn.fetch_add(1, Ordering::Release);
        Some(next)
    }

    /// Notes whether the last attempt to attach the thread failed. Returns the previous value.
    pub(crate) fn note_refused(&self, is_refused: bool) -> bool {
        self.is_refused.swap(is_refused, Ordering::Relaxed)
    }

    pub fn is_refused(&self) -> bool {
        self.is_refused.load(Ordering::Relaxed)
    }

    /// Sets the rate at which the thread is sampled when it is attached next. Only one thread may call it. It is called at
    /// each scan, and a store takes the line from the hooks of the thread, so there is one only for another rate.
    pub fn set_rate(&self, rate: Rate) {
        let word = rate.word();
        if self.rate.load(Ordering::Relaxed) != word {
            self.rate.store(word, Ordering::Relaxed);
        }
    }

    pub fn rate(&self) -> Rate {
        Rate::from_word(self.rate.load(Ordering::Relaxed))
    }

    #[inline(always)]
    pub fn turn(&self) -> u32 {
        self.turn.load(Ordering::Acquire)
    }

    /// Begins a hook that may end in another span; [`set_span`](Self::set_span) must follow. Only for the thread itself.
    ///
    /// A sample that falls in the hook after it has read the ring head is counted by the next hook, for the span of then. If
    /// the thread is preempted here, the collector must not attribute the sample to the previous span.
    #[inline(always)]
    pub fn begin_hook(&self) {
        self.begin_hook_in(self.span.load(Ordering::Relaxed));
    }

    #[inline(always)]
    pub fn begin_hook_in(&self, key: u64) {
        self.span.store(key | IN_HOOK, Ordering::Release);
        // Interrupts observe a thread in program order, so only the compiler could read the ring head before this store.
        compiler_fence(Ordering::SeqCst);
    }

    /// The thread is now in the span with that key; 0 for none. Only the thread itself may call it.
    #[inline(always)]
    pub fn set_span(&self, key: u64) {
        // Release: a reader of the span sees the `from` that was stored before.
        self.span.store(key, Ordering::Release);
    }

    /// Sets when the hook ended, and from when on one of the thread's spans is old, both in ticks. Only the thread
    /// itself may call it, right before [`set_span`](Self::set_span).
    #[inline(always)]
    pub fn set_times(&self, now: u64, samples_from: u64) {
        self.last_hook_at.store(now, Ordering::Relaxed);
        self.samples_from.store(samples_from, Ordering::Relaxed);
    }

    pub fn last_hook_at(&self) -> u64 {
        self.last_hook_at.load(Ordering::Relaxed)
    }

    /// The thread attaches itself when it enters a span that is sampled from its enter on.
    pub fn set_attaches_at_enter(&self) {
        self.at_enter.fetch_or(ATTACHES_AT_ENTER, Ordering::Relaxed);
    }

    /// The thread attaches itself for a span of which few are sampled from their enter on.
    pub fn note_brief(&self) {
        self.at_enter.fetch_or(IS_BRIEF, Ordering::Relaxed);
    }

    /// Whether that was why it attached itself, since this was last asked.
    pub fn take_brief(&self) -> bool {
        self.at_enter.load(Ordering::Relaxed) & IS_BRIEF != 0
            && self.at_enter.fetch_and(!IS_BRIEF, Ordering::Relaxed) & IS_BRIEF != 0
    }

    pub fn attaches_at_enter(&self) -> bool {
        self.at_enter.load(Ordering::Relaxed) & ATTACHES_AT_ENTER != 0
    }

    pub fn samples_from(&self) -> u64 {
        self.samples_from.load(Ordering::Relaxed)
    }

    /// The open interval. The collector calls this after it has read the ring's head and before it takes the intervals.
    /// Each sample before that head is then in this interval or in one of the queued intervals:
    ///
    /// Say a sample lies at `p`, before that head. Before the sample, the thread had stored the span that it was in,
    /// and reading the head makes that store visible. The thread may since have moved on to another span, but only
    /// after it had observed a head beyond `p`. It then closed the interval first: it pushed the interval, then stored
    /// a `from` greater than `p`, then stored a span. So if the `from` read here is not greater than `p`, and was the
    /// same before and after reading the span, then that span is the span of `p`. Otherwise the interval is in the
    /// queue.
    ///
    /// If `p` fell in a hook that had already read the head, that hook moved on to another span without closing the
    /// interval, and `p` counts for the new span. This then says so, or has the span with which the hook ended.
    ///
    /// Until the thread takes up the session, `from` is 0 and not written.
    pub fn open_interval(&self, session: &SamplingSession) -> OpenInterval {
        loop {
            let from = session.from();
            let span = self.span.load(Ordering::Acquire);
            if session.from() == from {
                let is_in_hook = span & IN_HOOK != 0;
                return OpenInterval { span: Tag::new(span & !IN_HOOK), from, is_in_hook };
            }
            std::hint::spin_loop();
        }
    }

    /// The innermost profiled span that the thread is in, or was in before the current hook.
    pub fn span(&self) -> Option<Tag> {
        Tag::new(self.span.load(Ordering::Acquire) & !IN_HOOK)
    }

    pub fn is_in_hook(&self) -> bool {
        self.span.load(Ordering::Acquire) & IN_HOOK != 0
    }

    /// Notes that the collector found the thread blocked in that span. Returns the value to
    /// [restore](Self::retract_wait) if the wait turns out to be over.
    pub fn report_wait(&self, span: Tag) -> Option<Tag> {
        Tag::new(self.waited.swap(span.get(), Ordering::AcqRel))
    }

    /// Restores `before`, as the thread is not blocked in that span any more. Returns false if a hook has counted the wait.
    pub fn retract_wait(&self, span: Tag, before: Option<Tag>) -> bool {
        let before = before.map_or(0, Tag::get);
        let (acquire, relaxed) = (Ordering::AcqRel, Ordering::Relaxed);
        self.waited.compare_exchange(span.get(), before, acquire, relaxed).is_ok()
    }

    /// For the thread itself, in a hook at `now` in ticks: the span in which the collector found it blocked.
    pub fn take_waited(&self, now: u64) -> Option<Tag> {
        if self.waited.load(Ordering::Relaxed) == 0 {
            return None;
        }
        // Stored first, so that a reader that finds the wait taken finds this time.
        self.claimed_at.store(now, Ordering::Relaxed);
        Tag::new(self.waited.swap(0, Ordering::AcqRel))
    }

    /// The wait was over by then.
    pub fn claimed_at(&self) -> u64 {
        self.claimed_at.load(Ordering::Acquire)
    }

    /// For the thread itself: it read its CPU clock at `time_ns` (`CLOCK_MONOTONIC_RAW` in nanoseconds), and at the same
    /// hook, if that is known, how often it had been switched out.
    pub fn note_synced(&self, time_ns: u64, cpu_ns: u64, switches: Option<u64>) {
        let [synced_ns, synced_cpu_ns] = &self.synced;
        synced_ns.store(0, Ordering::Release);
        self.synced_switches.store(switches.map_or(0, |switches| switches + 1), Ordering::Release);
        synced_cpu_ns.store(cpu_ns, Ordering::Release);
        synced_ns.store(time_ns, Ordering::Release);
    }

    pub fn synced(&self) -> Option<(u64, u64)> {
        let [synced_ns, synced_cpu_ns] = &self.synced;
        let time_ns = synced_ns.load(Ordering::Acquire);
        let cpu_ns = synced_cpu_ns.load(Ordering::Acquire);
        let is_whole = time_ns != 0 && synced_ns.load(Ordering::Acquire) == time_ns;
        is_whole.then_some((time_ns, cpu_ns))
    }

    /// How often it had been switched out at [`synced`](Self::synced), of a thread that has not run since it was asked for that.
    pub fn synced_switches(&self) -> Option<u64> {
        self.synced_switches.load(Ordering::Acquire).checked_sub(1)
    }

    fn change_life(&self, from: u8, to: u8) -> Result<u8, u8> {
        self.life.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire)
    }

    /// For the thread itself, in its periodic check: marks the thread as in use.
    pub fn note_used(&self) -> ThreadUse {
        match self.change_life(UNUSED, USED) {
            Err(PARKED) if self.change_life(PARKED, USED).is_ok() => ThreadUse::WasParked,
            Err(PARKED | OVER) => ThreadUse::Over,
            Ok(_) | Err(_) => ThreadUse::Used,
        }
    }

    /// The collector finds the thread in no profiled span for a while, and is about to look at it no more: its next hook runs
    /// the periodic check, as for [`end_if_unused`](Self::end_if_unused). Returns false if it is over, or parked already.
    pub fn park(&self) -> bool {
        self.change_life(USED, PARKED).is_ok() || self.change_life(UNUSED, PARKED).is_ok()
    }

    /// Whether it was parked, and has not been used since.
    pub fn is_parked(&self) -> bool {
        self.life.load(Ordering::Acquire) == PARKED
    }

    /// The collector finds the thread in no profiled span.
    pub fn note_unused(&self) {
        _ = self.change_life(USED, UNUSED);
    }

    /// Ends the sampling if the thread has not marked itself as in use since [`note_unused`](Self::note_unused).
    ///
    /// If that was more than a millisecond ago, the next hook of a thread in no profiled span runs the periodic check first.
    pub fn end_if_unused(&self) -> bool {
        self.change_life(UNUSED, OVER).is_ok() || self.change_life(PARKED, OVER).is_ok()
    }

    /// The thread or the layer has ended: nothing is written any more.
    pub fn end(&self) {
        self.life.store(OVER, Ordering::Release);
    }

    pub fn is_over(&self) -> bool {
        self.life.load(Ordering::Acquire) == OVER
    }
}

const USED: u8 = 0;
const UNUSED: u8 = 1;
const OVER: u8 = 2;
const PARKED: u8 = 3;

/// What a thread finds in its periodic check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThreadUse {
    Used,
    /// The collector does not scan it, and must be woken.
    WasParked,
    /// The sampling of the thread was ended: the thread must be set up again.
    Over,
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Option<Tag> = Tag::new(1);
    const B: Option<Tag> = Tag::new(2);

    fn thread() -> (ThreadShared, Arc<SamplingSession>) {
        let session = Arc::new(SamplingSession::none());
        (
            ThreadShared::new(
                OsThread::new(1, b""),
                Err(WhyRefused::NotAsked),
                Rate::of(1),
                Arc::clone(&session),
            ),
            session,
        )
    }

    fn interval(span: Option<Tag>, from: u64) -> OpenInterval {
        OpenInterval { span, from, is_in_hook: false }
    }

    #[test]
    fn a_hook_is_visible_until_it_sets_the_span() {
        let (thread, session) = thread();
        let in_hook = |span| OpenInterval { is_in_hook: true, ..interval(span, 0) };
        assert_eq!(thread.open_interval(&session), in_hook(None), "a hook creates it");
        thread.set_span(1);
        assert_eq!(thread.open_interval(&session), interval(A, 0));
        thread.begin_hook();
        assert_eq!(thread.open_interval(&session), in_hook(A));
        thread.begin_hook_in(2);
        assert_eq!(thread.open_interval(&session), in_hook(B));
        thread.set_span(0);
        assert_eq!(thread.open_interval(&session), interval(None, 0));
    }

    #[test]
    fn closing_an_interval_opens_the_next() {
        let (thread, session) = thread();
        thread.set_span(1);
        assert!(session.close_interval(A, 32));
        thread.set_span(2);
        assert_eq!(thread.open_interval(&session), interval(B, 32));
    }

    /// What is read while the thread moves from span to span is an interval that existed, and all others are in the
    /// queue.
    #[test]
    fn an_interval_is_read_consistently_while_the_thread_moves_on() {
        const STEP: u64 = 10;
        let hooks = if cfg!(miri) { 40 } else { 20_000 };
        let (thread, session) = thread();
        thread.set_span(0);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut next = 1;
                while next < hooks {
                    let OpenInterval { span, from, is_in_hook, .. } =
                        thread.open_interval(&session);
                    let key = span.map_or(0, Tag::get);
                    assert!(from == STEP * key || is_in_hook && from == STEP * (key + 1));
                    while let Some(interval) = session.take_interval() {
                        assert_eq!((interval.span.get(), interval.from), (next, STEP * next));
                        assert_eq!(interval.to, STEP * (next + 1));
                        next += 1;
                    }
                    assert!(next >= key, "closed intervals are in the queue");
                }
            });
            for number in 1..=hooks {
                while !session.has_room() && !reader.is_finished() {
                    std::thread::yield_now();
                }
                thread.begin_hook();
                session.close_interval(Tag::new(number - 1), STEP * number);
                thread.set_span(number);
            }
        });
    }

    #[test]
    fn only_an_unused_thread_is_ended() {
        let (thread, _) = thread();
        assert!(!thread.end_if_unused());
        thread.note_unused();
        assert_eq!(thread.note_used(), ThreadUse::Used);
        assert!(!thread.end_if_unused());
        thread.note_unused();
        assert!(thread.end_if_unused());
        assert_eq!(thread.note_used(), ThreadUse::Over);
        assert!(thread.is_over());
    }
}
