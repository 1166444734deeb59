//! The messages to the collector and the exporting thread.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam::channel::{self, Sender};

use super::engine::Engine;
use super::heap::{HeapRequest, make_heap};
use super::open_spans::{OpenSpan, find_open};
use super::room::TakenRoom;
use super::run::Collector;
use crate::keep::KeptSpan;
use crate::log::LogEvent;
use crate::profile::{MappingId, Profile};
use crate::span::is_ignored;
use crate::unwind::Module;

/// A caller that waits until a deadline.
#[derive(Debug)]
pub(super) struct FlushRequest {
    /// Receives whether everything was delivered.
    pub(super) done: Sender<bool>,
    pub(super) deadline: Instant,
}

/// A message to the collector.
#[derive(Debug)]
pub(super) enum Command {
    /// Export everything that has been kept so far, then acknowledge.
    Flush(FlushRequest),
    /// The same, then stop.
    Shutdown(Option<FlushRequest>),
    /// List the open spans.
    FindOpen { older_than: Duration, reply: Sender<Vec<OpenSpan>> },
    /// Make the profile of the live heap.
    Heap(HeapRequest),
}

impl Command {
    /// Whether the caller waits for an answer.
    pub(super) fn is_waited_for(&self) -> bool {
        !matches!(self, Self::Shutdown(None))
    }

    /// The job that answers a question, if it is one.
    pub(super) fn answer(self, collector: &mut Collector) -> Option<Job> {
        match self {
            Self::FindOpen { older_than, reply } => Some(find_open(collector, older_than, reply)),
            Self::Heap(request) => Some(make_heap(collector, request)),
            Self::Flush(_) | Self::Shutdown(_) => None,
        }
    }
}

/// What to do with a profile once it is symbolized.
pub(super) struct ReplyWith(pub(super) Box<dyn FnOnce(Profile) + Send>);

impl std::fmt::Debug for ReplyWith {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ReplyWith")
    }
}

/// A message to the exporting thread.
#[derive(Debug)]
pub(super) enum Job {
    Log(Box<LogEvent>),
    /// Symbolize and export a profile.
    Export {
        profile: Box<Profile>,
        modules: HashMap<MappingId, Arc<Module>>,
        kept: Vec<KeptSpan>,
        room: TakenRoom,
    },
    /// Symbolize a profile for a caller that waits for it.
    Reply {
        profile: Box<Profile>,
        modules: HashMap<MappingId, Arc<Module>>,
        then: ReplyWith,
    },
    /// Report kept spans that have no profile.
    Report(Vec<KeptSpan>),
    /// Acknowledge once all earlier jobs are done.
    Done(FlushRequest),
    /// Stop, then acknowledge.
    Stop(Vec<FlushRequest>),
}

impl Engine {
    /// Exports what has been kept so far. Returns whether that was done before the deadline.
    pub(crate) fn flush(&self, deadline: Instant) -> bool {
        let (done, wait) = channel::bounded(1);
        let waiting = FlushRequest { done, deadline };
        self.ask(Command::Flush(waiting)) && wait.recv_deadline(deadline) == Ok(true)
    }

    /// The same as [`flush`](Self::flush) with that deadline, then reports what is lost and stops everything. Waits for
    /// that until `return_by`.
    pub(crate) fn shutdown(&self, deadline: Instant, return_by: Instant) -> bool {
        let (done, wait) = channel::bounded(1);
        let waiting = FlushRequest { done, deadline };
        self.ask(Command::Shutdown(Some(waiting))) && wait.recv_deadline(return_by) == Ok(true)
    }

    /// Stops everything once the kept spans are exported, without waiting for that.
    pub(crate) fn shutdown_later(&self) {
        self.ask(Command::Shutdown(None));
    }

    pub(super) fn ask(&self, command: Command) -> bool {
        // In a forked child no thread would answer, and the layer's own threads would wait for themselves.
        if !self.is_running() || (is_ignored() && command.is_waited_for()) {
            return false;
        }
        let sent = self.commands.send(command).is_ok();
        self.waker.wake();
        sent
    }
}
