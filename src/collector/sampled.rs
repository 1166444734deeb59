//! The collector's state of one thread.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::attachment::{Attachment, Pace};
use super::cursor::ThreadCursor;
use super::drain::Drain;
use super::sinks::Sinks;
use super::waits::{BlockDetector, ScanResult, Scanner, WaitingThread};
use super::watchdog::CpuTimes;
use crate::sampler::{Sampler, ThreadShared};
use crate::span::SpanKey;
use crate::stats::Counters;

/// A thread that enters profiled spans.
#[derive(Debug)]
pub(super) struct SampledThread {
    pub(super) cursor: ThreadCursor,
    pub(super) attachment: Attachment,
    pub(super) detector: BlockDetector,
    pub(super) cpu_times: CpuTimes,
    /// Since when the thread was in no profiled span at each check.
    unused_since: Option<Instant>,
}

/// How soon half of a ring may be full. The kernel could wake the collector instead, but that takes a file, and the
/// program may close all files.
pub(super) fn fill_time(sampled: &[SampledThread]) -> Duration {
    const SHORTEST: Duration = Duration::from_micros(250);
    let of_each = sampled.iter().filter_map(|one| one.cursor.fill_time(one.waiting().is_some()));
    of_each.min().map_or(Duration::MAX, |soonest| soonest.max(SHORTEST))
}

impl SampledThread {
    pub(super) fn new(thread: Arc<ThreadShared>, pace: Pace) -> Self {
        let cursor = ThreadCursor::new(thread);
        Self {
            attachment: Attachment::new(pace, cursor.is_attached()),
            cursor,
            detector: BlockDetector::default(),
            cpu_times: CpuTimes::default(),
            unused_since: None,
        }
    }

    pub(super) fn thread(&self) -> &ThreadShared {
        &self.cursor.thread
    }

    /// Reads everything in the ring. Returns the span that the thread is in.
    pub(super) fn drain(&mut self, drain: &mut Drain<'_>) -> Option<SpanKey> {
        self.follow();
        let span = self.cursor.drain(drain);
        self.count_missed(span, drain.sinks, drain.counters, drain.source);
        self.cursor.drop_ended();
        span
    }

    fn count_missed(
        &mut self,
        span: Option<SpanKey>,
        sinks: &mut Sinks,
        counters: &Counters,
        source: &Sampler,
    ) {
        if self.cursor.count_missed(span, sinks, counters) {
            self.note_missed_signals();
            source.note_missed_signals();
        }
    }

    /// Checks whether the thread is blocked.
    pub(super) fn scan(&mut self, scanner: &mut Scanner<'_>) -> ScanResult {
        if self.thread().is_over() {
            self.detector.end(&self.cursor, scanner);
            return ScanResult::OutsideSpans;
        }
        let span = self.thread().span();
        self.count_missed(span, scanner.sinks, scanner.counters, scanner.source);
        if !self.attachment.is_wanted() && self.waiting().is_none() {
            return self.detector.pass(&self.cursor, scanner);
        }
        self.detector.scan(&self.cursor, scanner)
    }

    /// The present wait, if the last scan found one.
    pub(super) fn waiting(&self) -> Option<&WaitingThread> {
        self.detector.waiting()
    }

    /// Whether it is not sampled, and none of its spans was past its sampling delay at the last scan.
    pub(super) fn is_unwanted(&self) -> bool {
        self.attachment.is_detached() && !self.attachment.is_wanted()
    }

    /// Whether checking it takes a system call.
    pub(super) fn is_checked_by_clock(&self) -> bool {
        self.attachment.is_wanted()
            && !self.cursor.arming.has_switch_records()
            && self.thread().span().is_some()
    }

    /// Identifies the thread while it is in the collector's list.
    pub(super) fn address(&self) -> usize {
        Arc::as_ptr(&self.cursor.thread).addr()
    }

    /// Whether no scan has to look at the thread until it says so. It was in no span for a while at the last scan, too,
    /// so all that it did before is visible here.
    pub(super) fn is_parked(&mut self, now: u64, park_after: u64) -> bool {
        let thread = &self.cursor.thread;
        let is_idle = now.saturating_sub(thread.last_hook_at()) >= park_after
            && thread.span().is_none()
            && !thread.is_in_hook();
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

    /// Ends the sampling of a thread that was in no profiled span for a while, since its ring takes memory. Returns
    /// whether it was ended.
    pub(super) fn end_if_idle(&mut self, now: Instant, idle: Duration) -> bool {
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
