//! What is said of kept spans: in the log, to the program's callback, and for `Handle::recently_kept`.
//!
//! The log and the callback are the program's and may block: on a full pipe, on a lock, forever. Each has a thread and a
//! bounded queue of its own, so that neither stops the other, nor profiles, nor a caller. What finds a queue full is
//! dropped and counted.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tracing::Dispatch;
use tracing::dispatcher::WeakDispatch;
use tracing::level_filters::LevelFilter;

use super::queue::Queue;
use super::recent::Recent;
use crate::keep::{Kept, OnKept, OwnDispatch};
use crate::log::{LogEvent, LogKind};
use crate::report::kept_event::{self, NameHint};
use crate::stats::Counters;
use crate::sys;

/// The events and kept spans that wait for the log, and the kept spans that wait for the callback.
const MAX_WAITING: usize = 8_192;
/// At most one line in this time states how many were dropped, while others wait.
const LOST_INTERVAL: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(crate) enum LogItem {
    Event(Box<LogEvent>),
    Kept(Arc<Kept>),
}

/// Passes on what is to be said, without waiting.
#[derive(Debug)]
pub(crate) struct Reporter {
    counters: Arc<Counters>,
    pub(crate) recent: Recent,
    dispatch: OwnDispatch,
    log: Queue<LogItem>,
    callback: Option<Queue<Arc<Kept>>>,
}

impl Reporter {
    pub(crate) fn new(counters: Arc<Counters>, dispatch: OwnDispatch, has_callback: bool) -> Self {
        Self {
            counters,
            recent: Recent::default(),
            dispatch,
            log: Queue::new(MAX_WAITING),
            callback: has_callback.then(|| Queue::new(MAX_WAITING)),
        }
    }

    /// The subscriber that the layer is part of, if it is known.
    pub(crate) fn dispatch(&self) -> Option<Dispatch> {
        self.dispatch.read().as_ref().and_then(WeakDispatch::upgrade)
    }

    pub(crate) fn has_dispatch(&self) -> bool {
        self.dispatch.read().is_some() || tracing::dispatcher::has_been_set()
    }

    pub(crate) fn log(&self, event: LogEvent) {
        self.add_to_log(LogItem::Event(Box::new(event)), 1);
    }

    fn add_to_log(&self, item: LogItem, size: usize) {
        if !self.log.add(item, size) {
            Counters::add(&self.counters.reports.dropped_log_full, size as u64);
        }
    }

    pub(crate) fn report(&self, kept: Kept) {
        let spans = kept.spans.len();
        let kept = Arc::new(kept);
        self.recent.add(&kept);
        if let Some(callback) = &self.callback
            && !callback.add(Arc::clone(&kept), spans)
        {
            Counters::add(&self.counters.reports.dropped_callback_full, spans as u64);
        }
        self.add_to_log(LogItem::Kept(kept), spans);
    }

    /// Waits until everything that was reported before is logged and the callback has returned. Returns whether that is so.
    pub(crate) fn wait(&self, deadline: Instant) -> bool {
        // The callback can log, too: that it panicked.
        let has_returned = self.callback.as_ref().is_none_or(|callback| callback.wait(deadline));
        self.log.wait(deadline) && has_returned
    }

    pub(crate) fn wait_for_log(&self, deadline: Instant) {
        self.log.wait(deadline);
    }

    /// Ends the threads once they have done what waits.
    pub(crate) fn close(&self) {
        self.log.close();
        self.callback.iter().for_each(Queue::close);
    }

    pub(crate) fn run_log(&self) {
        let (mut hint, mut is_missing) = (NameHint::default(), false);
        // How many lines were dropped when that was last said, and when.
        let (mut said, mut said_at) = (0, None::<Instant>);
        while let Some(item) = self.log.next() {
            match item {
                LogItem::Event(event) => {
                    is_missing = is_missing || !wait_for_level(event.level);
                    self.emit(&event);
                }
                LogItem::Kept(kept) => {
                    self.write(|| kept_event::log(&kept));
                    if let Some(event) = hint.event(&kept) {
                        self.emit(&event);
                    }
                }
            }
            let all = self.counters.reports.dropped_log_full.load(Ordering::Relaxed);
            let is_due = || said_at.is_none_or(|at| at.elapsed() >= LOST_INTERVAL);
            if all > said && (is_due() || self.log.is_empty()) {
                let more = all - said;
                (said, said_at) = (all, Some(Instant::now()));
                let message = format!(
                    "{more} events of this layer were not logged, since the log did not take them for too long (does \
                     anything read the program's output?); no profile was lost by that"
                );
                let event = LogEvent::warning(LogKind::LogBlocked, message);
                self.emit(&LogEvent { count: Some(more), ..event });
            }
        }
    }

    pub(crate) fn run_callback(&self, on_kept: &OnKept) {
        let Some(callback) = &self.callback else { return };
        while let Some(kept) = callback.next() {
            // Foreign code, which may panic.
            let reported = catch_unwind(AssertUnwindSafe(|| on_kept(&kept)));
            let panicked = &self.counters.spans.on_kept_panics;
            if reported.is_err() && panicked.fetch_add(1, Ordering::Relaxed) == 0 {
                let line = "the `on_kept` callback panicked; further panics are only counted";
                self.log(LogEvent::warning(LogKind::OnKeptPanicked, line));
            }
        }
    }

    fn emit(&self, event: &LogEvent) {
        self.write(|| event.emit());
    }

    /// Logs with the layer's subscriber as the default. Panics of the subscriber are ignored.
    fn write(&self, event: impl FnOnce()) {
        let write = || match self.dispatch() {
            Some(dispatch) => tracing::dispatcher::with_default(&dispatch, event),
            None => event(),
        };
        _ = catch_unwind(AssertUnwindSafe(|| sys::Forks::log_between(write)));
    }

    #[cfg(test)]
    pub(crate) fn take_log(&self) -> Vec<LogItem> {
        self.log.take_all()
    }
}

/// A layer gets its dispatcher just before the maximum level is set, and events in between are lost. Waits up to 200 ms for
/// the level, in case it is still to be set. Returns whether it is.
fn wait_for_level(level: LevelFilter) -> bool {
    (0..20).any(|_| {
        let is_set = LevelFilter::current() >= level;
        if !is_set {
            std::thread::sleep(Duration::from_millis(10));
        }
        is_set
    })
}
