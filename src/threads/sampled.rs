//! The collector's state of one thread.

use std::sync::Arc;
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
        let (reader, mut sink) = intake.parts();
        let span = self.cursor.drain(reader, &mut sink);
        self.cursor.drop_ended();
        span
    }

    pub(crate) fn scan(&mut self, scanner: &mut Scanner<'_>) -> ScanResult {
        if self.thread().is_over() {
            self.detector.end(&self.cursor, scanner);
            return ScanResult::OutsideSpans;
        }
        if self.attachment.is_slow {
            self.run_delay.read(&self.cursor, scanner);
        } else if !self.attachment.is_for_spans() {
            self.run_delay.is_left_out = false;
        }
        self.detector.scan(&self.cursor, self.attachment.is_slow, scanner)
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
