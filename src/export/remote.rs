//! The interface between delivery and an exporter that sends over a network.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use crossbeam::channel::Sender;

use super::Directory;
use crate::profile::Profile;

/// An exporter that sends from its own thread, one request at a time. It neither queues nor retries.
pub trait Remote {
    /// Limits of the queue.
    fn limits(&self) -> QueueLimits;

    /// Starts the thread. Each request has one answer; the channel is closed if the thread panics.
    ///
    /// # Errors
    ///
    /// If the system refuses to start it.
    fn start(&mut self, answers: Sender<Answer>) -> io::Result<()>;

    /// The message to send.
    fn encoded(&mut self, profile: &Profile) -> Encoded;

    /// Sends a message. An empty one checks whether the receiver would accept any.
    fn send(&self, message: Arc<[u8]>);

    /// Where profiles go that cannot be sent.
    fn fallback(&self) -> Option<&Directory>;

    /// The receiver's address, for display.
    fn endpoint(&self) -> &str;
}

impl fmt::Debug for dyn Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Remote").field("endpoint", &self.endpoint()).finish_non_exhaustive()
    }
}

/// Limits of the queue of profiles to send.
#[derive(Clone, Copy, Debug)]
pub struct QueueLimits {
    pub(crate) profiles: usize,
    pub(crate) bytes: usize,
    /// How long requests may fail before the receiver is considered unavailable.
    pub(crate) grace_period: Duration,
}

/// An encoded profile: it takes a fraction of the memory of the model.
#[derive(Debug)]
pub struct Encoded {
    /// The stem of its file names.
    pub(crate) stem: String,
    pub(crate) message: Vec<u8>,
}

/// The answer of a receiver.
#[derive(Debug)]
pub enum Answer {
    /// The receiver has accepted the profiles, except for `rejected` of them.
    Accepted {
        /// The number of rejected profiles.
        rejected: u64,
        /// The reason, or another message.
        message: String,
    },
    /// The receiver cannot accept the profiles now.
    NotNow {
        /// When to retry, if the receiver stated it.
        after: Option<Duration>,
        /// The problem.
        problem: String,
    },
    /// The receiver will not accept the profiles.
    Refused {
        /// What it refuses.
        what: RefusedScope,
        /// The reason.
        problem: String,
    },
}

/// What a receiver refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusedScope {
    /// All requests.
    All,
    /// This request.
    Request,
}
