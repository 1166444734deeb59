//! The messages to the collector.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use crossbeam::channel::Sender;

use super::Engine;
use crate::profile::Profile;
use crate::publish::{FlushRequest, OpenSpan, Question, Questions};
use crate::sinks::HeapPart;
use crate::span::is_ignored;

/// A message to the collector.
#[derive(Debug)]
pub(crate) enum Command {
    /// Export everything that has been kept so far, then acknowledge.
    Flush(FlushRequest),
    /// The same, then stop.
    Shutdown(Option<FlushRequest>),
    /// List the open spans.
    FindOpen(OpenRequest),
    /// Make the profile of the live heap.
    Heap(HeapRequest),
}

/// A request for the spans that have been open for longer than `older_than`.
#[derive(Debug)]
pub(crate) struct OpenRequest {
    pub(crate) older_than: Duration,
    pub(crate) reply: Question<Vec<OpenSpan>>,
}

/// A request for the profile of the live heap.
#[derive(Debug)]
pub(crate) struct HeapRequest {
    pub(crate) part: HeapPart,
    pub(crate) reply: Question<Profile>,
    /// Whether the caller has the answer. Set by the caller, whose next request may come right after that.
    pub(crate) is_taken: Arc<AtomicBool>,
}

/// What callers ask the collector.
#[derive(Debug)]
pub(crate) struct Commands {
    pub(crate) to_collector: Sender<Command>,
    /// Of callers that wait.
    pub(crate) questions: Questions,
    /// Of those that wait for a flush. Apart, since an exporter that blocks leaves them without an answer.
    flushes: Questions,
}

impl Commands {
    pub(crate) fn new(to_collector: Sender<Command>) -> Self {
        Self { to_collector, questions: Questions::default(), flushes: Questions::default() }
    }
}

impl Engine {
    /// Exports and reports what has been kept so far. Returns whether that was done before the deadline.
    pub(crate) fn flush(&self, deadline: Instant) -> bool {
        let Some((done, wait)) = self.commands.flushes.ask() else { return false };
        let waiting = FlushRequest { done, deadline };
        if !self.ask(Command::Flush(waiting)) {
            return false;
        }
        let is_delivered = wait.recv_deadline(deadline) == Ok(true);
        self.publish.reporter.wait(deadline) && is_delivered
    }

    /// The same as [`flush`](Self::flush) with that deadline, then reports what is lost and stops everything. Waits for
    /// that until `return_by`.
    pub(crate) fn shutdown(&self, deadline: Instant, return_by: Instant) -> bool {
        // Not limited: there is one.
        let Some((done, wait)) = Questions::default().ask() else { return false };
        let waiting = FlushRequest { done, deadline };
        if !self.ask(Command::Shutdown(Some(waiting))) {
            return false;
        }
        let is_delivered = wait.recv_deadline(return_by) == Ok(true);
        self.publish.reporter.wait(return_by) && is_delivered
    }

    /// Stops everything once the kept spans are exported, without waiting for that.
    pub(crate) fn shutdown_later(&self) {
        self.ask(Command::Shutdown(None));
    }

    pub(super) fn ask(&self, command: Command) -> bool {
        let is_waited_for = !matches!(command, Command::Shutdown(None));
        // In a forked child no thread would answer, and the layer's own threads would wait for themselves.
        if !self.is_running() || (is_ignored() && is_waited_for) {
            return false;
        }
        let sent = self.commands.to_collector.send(command).is_ok();
        self.waker.wake();
        sent
    }
}
