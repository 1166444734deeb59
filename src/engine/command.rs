//! The messages to the collector.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use crossbeam::channel::Sender;

use crate::profile::Profile;
use crate::publish::{FlushRequest, OpenSpan, Question, Questions};
use crate::sinks::HeapPart;

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

/// Why there is no profile of the live heap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoHeap {
    NotTracked,
    /// The layer's threads did not answer in time.
    NoAnswer,
}

/// What callers ask the collector.
#[derive(Debug)]
pub(crate) struct Commands {
    pub(crate) to_collector: Sender<Command>,
    /// Of callers that wait.
    pub(crate) questions: Questions,
    /// Of those that wait for a flush. Apart, since an exporter that blocks leaves them without an answer.
    pub(super) flushes: Questions,
}

impl Commands {
    pub(crate) fn new(to_collector: Sender<Command>) -> Self {
        Self { to_collector, questions: Questions::default(), flushes: Questions::default() }
    }
}
