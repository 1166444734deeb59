//! The interface between delivery and an exporter that sends over a network.

#[cfg(feature = "_otlp")]
use std::any::Any;
use std::io;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Duration;

use crossbeam::channel::Sender;

#[cfg(feature = "_otlp")]
use super::OtlpExporter;
use super::{Directory, Exporter};
use crate::profile::Profile;

/// An exporter that sends from its own thread, one request at a time. It neither queues nor retries.
pub(crate) trait Remote: Exporter {
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

/// The exporter of a layer.
pub(crate) enum AnyExporter {
    /// One that has exported a profile when it returns.
    Direct(Box<dyn Exporter>),
    Remote(Box<dyn Remote>),
}

impl AnyExporter {
    /// `Some` for each exporter.
    pub(crate) fn new(exporter: impl Exporter + 'static) -> Option<Self> {
        #[cfg_attr(not(feature = "_otlp"), allow(unused_mut, reason = "nothing takes it"))]
        let mut exporter = Some(exporter);
        #[cfg(feature = "_otlp")]
        {
            let any: &mut dyn Any = &mut exporter;
            if let Some(otlp) = any.downcast_mut::<Option<OtlpExporter>>() {
                return otlp.take().map(Self::otlp);
            }
        }
        exporter.map(|exporter| Self::Direct(Box::new(exporter)))
    }

    #[cfg(feature = "_otlp")]
    pub(crate) fn otlp(exporter: OtlpExporter) -> Self {
        Self::Remote(Box::new(exporter))
    }

    pub(crate) fn remote(&mut self) -> Option<&mut dyn Remote> {
        match self {
            Self::Direct(_) => None,
            Self::Remote(remote) => Some(&mut **remote),
        }
    }
}

impl Deref for AnyExporter {
    type Target = dyn Exporter;

    fn deref(&self) -> &Self::Target {
        match self {
            Self::Direct(exporter) => &**exporter,
            Self::Remote(remote) => &**remote,
        }
    }
}

impl DerefMut for AnyExporter {
    fn deref_mut(&mut self) -> &mut Self::Target {
        match self {
            Self::Direct(exporter) => &mut **exporter,
            Self::Remote(remote) => &mut **remote,
        }
    }
}

/// Limits of the queue of profiles to send.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueueLimits {
    pub(crate) profiles: usize,
    pub(crate) bytes: usize,
    /// How long requests may fail before the receiver is considered unavailable.
    pub(crate) grace_period: Duration,
}

/// An encoded profile: it takes a fraction of the memory of the model.
#[derive(Debug)]
pub(crate) struct Encoded {
    /// The stem of its file names.
    pub(crate) stem: String,
    pub(crate) message: Vec<u8>,
}

/// The answer of a receiver.
#[derive(Debug)]
pub(crate) enum Answer {
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
pub(crate) enum RefusedScope {
    /// All requests.
    All,
    /// This request.
    Request,
}
