//! The collector's state of each thread, and which of them it looks at.

use std::collections::HashMap;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::attachment::{Attachment, Timing};
use super::cpu_times::CpuTimes;
use super::run_delay::RunDelayReader;
use super::waits::{BlockDetector, ScanResult, Scanner, WaitingThread};
use crate::drain::ThreadCursor;
use crate::intake::Intake;
use crate::sampler::ThreadShared;
use crate::span::SpanKey;

pub(crate) struct SampledThread {
    pub(crate) cursor: ThreadCursor,
    pub(crate) attachment: Attachment,
    pub(crate) detector: BlockDetector,
    pub(crate) cpu_times: CpuTimes,
    pub(super) run_delay: RunDelayReader,
    /// The thread was over when the present round began.
    pub(super) was_over: bool,
    /// Since when the thread was in no profiled span at each check.
    unused_since: Option<Instant>,
}

impl SampledThread {
    pub(crate) fn new(thread: Arc<ThreadShared>, timing: Timing) -> Self {
        let cursor = ThreadCursor::new(thread);
        let is_attached = cursor.is_attached();
        Self {
            attachment: Attachment::new(timing, is_attached),
            cursor,
            detector: BlockDetector::new(is_attached),
            cpu_times: CpuTimes::default(),
            run_delay: RunDelayReader::default(),
            was_over: false,
            unused_since: None,
        }
    }

    pub(crate) fn thread(&self) -> &ThreadShared {
        &self.cursor.thread
    }

    pub(crate) fn drain(&mut self, intake: &mut Intake) -> Option<SpanKey> {
        self.go_to_next_session();
        let elsewhere =
            |intake: &Intake| intake.counters.stacks.on_other_stacks.load(Ordering::Relaxed);
        let before = elsewhere(intake);
        let (reader, mut sink) = intake.parts();
        let span = self.cursor.drain(reader, &mut sink);
        if elsewhere(intake) > before {
            // Perf copies such a stack.
            self.prefer_perf();
        }
        self.cursor.drop_ended();
        span
    }

    pub(crate) fn scan(&mut self, scanner: &mut Scanner<'_>) -> ScanResult {
        if self.thread().is_over() {
            self.detector.end(&self.cursor, scanner);
            return ScanResult::OutsideSpans;
        }
        let is_slow = self.attachment.is_slow;
        let runs = if is_slow { self.run_delay.read(&self.cursor, scanner) } else { 0 };
        self.detector.scan(&self.cursor, is_slow, runs, scanner)
    }

    pub(crate) fn waiting(&self) -> Option<&WaitingThread> {
        self.detector.waiting.as_ref()
    }

    pub(super) fn waiting_mut(&mut self) -> Option<&mut WaitingThread> {
        self.detector.waiting.as_mut()
    }

    /// Whether none of its spans was past its sampling delay at the last scan, and it is not sampled for one.
    pub(crate) fn is_unwanted(&self) -> bool {
        !self.attachment.is_slow && !self.attachment.is_for_spans()
    }

    /// Whether checking it takes a system call.
    pub(crate) fn is_checked_by_clock(&self) -> bool {
        self.attachment.is_slow
            && !self.cursor.session.has_switch_records()
            && self.thread().span().is_some()
    }

    pub(crate) fn note_over(&mut self) {
        self.was_over = self.thread().is_over();
    }

    /// Whether it is in no span, and has met no hook for a while.
    pub(super) fn is_idle(&self, now: u64, park_after: u64) -> bool {
        let thread = self.thread();
        now.saturating_sub(thread.last_hook_at()) >= park_after
            && thread.span().is_none()
            && !thread.is_in_hook()
    }

    /// Whether no scan has to look at the thread until it says so. It was in no span for a while at the last scan, too,
    /// so all that it did before is visible here.
    pub(crate) fn is_parked(&mut self, now: u64, park_after: u64) -> bool {
        let is_idle = self.is_idle(now, park_after);
        let thread = &self.cursor.thread;
        let is_at_rest =
            self.attachment.is_detached() && self.waiting().is_none() && self.cursor.is_at_rest();
        if !is_idle || !is_at_rest {
            return false;
        }
        let was_parked = thread.is_parked();
        if thread.park() {
            self.unused_since = Some(Instant::now());
        }
        was_parked
    }

    /// Ends the sampling of a thread that was in no profiled span for a while. Returns whether it did.
    pub(crate) fn end_if_idle(&mut self, now: Instant, idle: Duration) -> bool {
        if self.thread().span().is_some() {
            self.unused_since = None;
            return false;
        }
        match self.unused_since {
            Some(since) if now.duration_since(since) >= idle => {
                self.unused_since = None;
                self.thread().end_if_unused()
            }
            Some(_) => false,
            None => {
                self.thread().note_unused();
                self.unused_since = Some(now);
                false
            }
        }
    }
}

/// A thread that was in no span for this long is parked. Its next enter wakes the collector.
pub(crate) const PARK_AFTER: Duration = Duration::from_secs(1);

/// The sampled threads that scans and rounds look at, and beside them those that are parked, which would take a core if
/// there are ten thousand.
#[derive(Default)]
pub(crate) struct SampledThreads {
    active: Vec<SampledThread>,
    /// By the addresses of their [`ThreadShared`]s.
    parked: HashMap<usize, SampledThread>,
}

impl SampledThreads {
    pub(crate) fn park(&mut self, mut is_parked: impl FnMut(&mut SampledThread) -> bool) {
        let parked = self.active.extract_if(.., |sampled| is_parked(sampled));
        let parked = parked.map(|it| (Arc::as_ptr(&it.cursor.thread).addr(), it));
        self.parked.extend(parked);
    }

    /// Looks at these threads again. Returns whether there are any.
    pub(crate) fn bring_back(&mut self, threads: &[Arc<ThreadShared>]) -> bool {
        let found = threads.iter().filter_map(|it| self.parked.remove(&Arc::as_ptr(it).addr()));
        self.active.extend(found);
        !threads.is_empty()
    }

    pub(crate) fn has_parked(&self) -> bool {
        !self.parked.is_empty()
    }

    /// Brings back the parked threads that have ended, and ends those that were in no span for `idle`. Returns whether
    /// there are any.
    pub(crate) fn sweep(&mut self, now: Instant, idle: Duration) -> bool {
        let over = self
            .parked
            .extract_if(|_, sampled| sampled.thread().is_over() || sampled.end_if_idle(now, idle));
        let before = self.active.len();
        self.active.extend(over.map(|(_, sampled)| sampled));
        self.active.len() > before
    }

    pub(crate) fn by_tid(&self) -> HashMap<u32, &SampledThread> {
        // The id of one that is over may be that of another thread by now.
        let all = self.active.iter().filter(|one| !one.thread().is_over());
        all.map(|one| (one.thread().tid(), one)).collect()
    }

    pub(crate) fn bring_all_back(&mut self) {
        self.active.extend(std::mem::take(&mut self.parked).into_values());
    }
}

impl Deref for SampledThreads {
    type Target = Vec<SampledThread>;

    fn deref(&self) -> &Vec<SampledThread> {
        &self.active
    }
}

impl DerefMut for SampledThreads {
    fn deref_mut(&mut self) -> &mut Vec<SampledThread> {
        &mut self.active
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampler::{Rate, SamplingSession, ThreadUse};
    use crate::sys::{OsThread, WhyRefused};

    const SECOND: u64 = 1_000;

    fn thread() -> Arc<ThreadShared> {
        let (os, stack) = (OsThread::new(1, b""), Err(WhyRefused::NotAsked));
        let thread = ThreadShared::new(os, stack, Rate::of(1), Arc::new(SamplingSession::none()));
        thread.set_times(0, crate::sampler::NEVER);
        thread.set_span(0);
        Arc::new(thread)
    }

    fn threads(threads: &[Arc<ThreadShared>]) -> SampledThreads {
        let mut all = SampledThreads::default();
        all.extend(
            threads.iter().map(|thread| SampledThread::new(Arc::clone(thread), Timing::USUAL)),
        );
        all
    }

    fn park(all: &mut SampledThreads, now: u64) -> (usize, usize) {
        all.park(|sampled| sampled.is_parked(now, SECOND));
        (all.active.len(), all.parked.len())
    }

    #[test]
    fn idle_threads_are_parked_at_the_second_scan_and_come_back_when_they_are_used() {
        let three = [thread(), thread(), thread()];
        let mut all = threads(&three);
        assert_eq!(park(&mut all, SECOND - 1), (3, 0));
        assert_eq!(park(&mut all, SECOND), (3, 0));
        assert!(three.iter().all(|thread| thread.is_parked()));
        // One is used between the two scans, and one after them.
        assert_eq!(three[1].note_used(), ThreadUse::WasParked);
        three[1].set_times(SECOND, crate::sampler::NEVER);
        assert_eq!(park(&mut all, SECOND), (1, 2));
        assert!(all.bring_back(&three[1..2]), "it was not parked in the end");
        assert_eq!((all.active.len(), all.parked.len()), (1, 2));
        assert_eq!(three[2].note_used(), ThreadUse::WasParked);
        assert_eq!(three[2].note_used(), ThreadUse::Used);
        assert!(all.bring_back(&three[2..]));
        assert_eq!((all.active.len(), all.parked.len()), (2, 1));
        assert_eq!(three[0].note_used(), ThreadUse::WasParked);
        all.bring_all_back();
        assert_eq!((all.active.len(), all.parked.len()), (3, 0));
    }

    /// A round notes which threads have ended, then scans, which parks others.
    #[test]
    fn a_thread_is_found_again_after_others_were_parked() {
        let three = [thread(), thread(), thread()];
        let mut all = threads(&three);
        three[0].park();
        three[1].end();
        three[2].set_span(7);
        all.iter_mut().for_each(SampledThread::note_over);
        assert_eq!(park(&mut all, SECOND), (2, 1));
        let left: Vec<_> = all.iter().filter(|one| !one.was_over).collect();
        assert!(left.len() == 1 && Arc::ptr_eq(&left[0].cursor.thread, &three[2]));
    }

    #[test]
    fn threads_in_spans_or_hooks_are_not_parked() {
        let (in_span, in_hook) = (thread(), thread());
        in_span.set_span(7);
        in_hook.begin_hook();
        let mut all = threads(&[Arc::clone(&in_span), Arc::clone(&in_hook)]);
        assert_eq!(park(&mut all, 9 * SECOND), (2, 0));
        assert_eq!(park(&mut all, 9 * SECOND), (2, 0));
        assert_eq!((in_span.note_used(), in_hook.note_used()), (ThreadUse::Used, ThreadUse::Used));
    }

    #[test]
    fn parked_threads_that_end_or_stay_idle_are_brought_back_as_ended() {
        let two = [thread(), thread()];
        let mut all = threads(&two);
        park(&mut all, SECOND);
        assert_eq!(park(&mut all, SECOND), (0, 2));
        two[0].end();
        assert!(all.sweep(Instant::now(), Duration::MAX));
        assert_eq!((all.active.len(), all.parked.len()), (1, 1));
        let later = Instant::now() + Duration::from_secs(10);
        assert!(!all.sweep(later, Duration::from_secs(60)));
        assert!(all.sweep(later + Duration::from_secs(60), Duration::from_secs(60)));
        assert_eq!((all.active.len(), all.parked.len()), (2, 0));
        assert!(two.iter().all(|thread| thread.is_over() && thread.note_used() == ThreadUse::Over));
    }
}
