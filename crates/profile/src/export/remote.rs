//! The interface between delivery and an exporter that sends over a network.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::Directory;
use crate::profile::Profile;

/// Takes the answers to requests.
pub type AnswerTo = Box<dyn Fn(Answer) + Send + Sync>;

/// An exporter that sends from its own thread, one request at a time. It neither queues nor retries.
pub trait Remote {
    fn limits(&self) -> QueueLimits;

    /// Starts the thread. Each request has one answer; `answer` is dropped if the thread panics. `on_thread` runs first on
    /// each thread that is started.
    ///
    /// # Errors
    ///
    /// If the system refuses to start it.
    fn start(&mut self, answer: AnswerTo, on_thread: fn()) -> io::Result<()>;

    /// The message to send: it takes a fraction of the memory of the model.
    fn message(&mut self, profile: &Profile) -> Vec<u8>;

    /// Sends a message. An empty one checks whether the receiver would accept any.
    fn send(&self, message: Arc<[u8]>);

    /// Where profiles go that cannot be sent.
    fn fallback(&self) -> Option<&Directory>;

    /// The receiver's address, for display.
    fn endpoint(&self) -> &str;
}

/// Limits of the queue of profiles to send.
#[derive(Clone, Copy, Debug)]
pub struct QueueLimits {
    pub profiles: usize,
    pub bytes: usize,
    /// How long requests may fail before the receiver is considered unavailable.
    pub grace_period: Duration,
}

impl QueueLimits {
    /// The limits of an exporter that queues nothing.
    pub const NONE: Self =
        Self { profiles: usize::MAX, bytes: usize::MAX, grace_period: Duration::ZERO };
}

/// The answer of a receiver.
#[derive(Debug)]
pub enum Answer {
    /// The receiver has accepted the profile, and replied this.
    Accepted { message: String },
    /// The receiver cannot accept the profile now, and may have stated when to retry.
    NotNow { after: Option<Duration>, problem: String },
    /// The receiver will not accept the profile, or a part of it.
    Refused { what: RefusedScope, problem: String },
}

/// What a receiver refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusedScope {
    /// All requests.
    All,
    /// This request.
    Request,
}
