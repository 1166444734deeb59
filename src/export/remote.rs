//! What delivery asks of an exporter that sends over a network.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use crossbeam::channel::Sender;

use super::Directory;
use crate::profile::Profile;

/// An exporter that sends from a thread of its own, one request at a time. It neither queues nor retries.
pub trait Remote {
    /// Limits of what waits to be sent.
    fn limits(&self) -> QueueLimits;

    /// Starts the thread. Each request gets one answer; the channel is closed if the thread panics.
    ///
    /// # Errors
    ///
    /// If the system does not let us.
    fn start(&mut self, answers: Sender<Answer>) -> io::Result<()>;

    /// The message that is sent.
    fn encoded(&mut self, profile: &Profile) -> Encoded;

    /// Sends a message; an empty one asks whether the receiver would take any.
    fn send(&self, message: Arc<[u8]>);

    /// Where profiles go that cannot be sent.
    fn fallback(&self) -> Option<&Directory>;

    /// Where the receiver is, to be shown.
    fn endpoint(&self) -> &str;
}

impl fmt::Debug for dyn Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Remote").field("endpoint", &self.endpoint()).finish_non_exhaustive()
    }
}

/// Limits of what waits to be sent.
#[derive(Clone, Copy, Debug)]
pub struct QueueLimits {
    pub(crate) profiles: usize,
    pub(crate) bytes: usize,
    /// How long requests may fail before the receiver counts as away.
    pub(crate) patience: Duration,
}

/// A profile as it is sent: it takes a fraction of the memory of the model.
#[derive(Debug)]
pub struct Encoded {
    /// What its files would be called.
    pub(crate) stem: String,
    pub(crate) message: Vec<u8>,
}

/// What a receiver said.
#[derive(Debug)]
pub enum Answer {
    /// It has the profiles, but for so many; and may have said why.
    Accepted {
        /// How many it has not.
        rejected: u64,
        /// Why, or whatever else it says.
        message: String,
    },
    /// Not now.
    NotNow {
        /// When it wants to be asked again, if it said so.
        after: Option<Duration>,
        /// What is wrong.
        problem: String,
    },
    /// Never.
    Never {
        /// What it does not want.
        what: Never,
        /// Why.
        problem: String,
    },
}

/// What a receiver does not want.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Never {
    /// Anything from us.
    All,
    /// That request.
    Request,
}
