//! A profile of the process: from the request of a caller to its answer.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, RecvTimeoutError};
use crossbeam::queue::SegQueue;
use parking_lot::Mutex;

use crate::error::ProfileError;
use crate::profile::Profile;
use crate::publish::Reply;
use crate::span::{REGISTERED, SpanKey, SpanSnapshot};
use crate::stats::Counters;
use crate::sys::{SuspendCounting, Waker};

/// The shown fields of a local root, with their values.
pub(crate) type RootFields = Vec<(&'static str, String)>;

/// What a profile of the process shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ProfileKind {
    /// Where its threads run.
    Cpu,
    /// Where its threads are, running or blocked: an estimate from observations.
    Wall,
}

#[derive(Debug)]
pub(crate) struct ProcessRequest {
    pub(crate) kind: ProfileKind,
    /// CPU time between two samples, or the time between two scans of all threads.
    pub(crate) period_ns: u64,
    pub(crate) duration: Duration,
    pub(crate) reply: Reply<Profile>,
    /// The caller no longer waits. The collector is woken after it is set.
    pub(super) is_canceled: Arc<AtomicBool>,
}

impl ProcessRequest {
    pub(crate) fn is_canceled(&self) -> bool {
        self.is_canceled.load(Ordering::Acquire)
    }
}

/// What the callers of such requests, the hooks and the collector share.
#[derive(Debug, Default)]
pub(crate) struct ProcessRequests {
    /// The present one, as long as its caller waits.
    running: Mutex<Weak<()>>,
    /// Whether the fields of local roots are wanted, in which a sample fell.
    pub(crate) wants_roots: AtomicBool,
    /// The local roots that have closed, with their fields.
    roots: SegQueue<(SpanKey, RootFields)>,
    /// Samples per second of CPU time for the continuous profile; 0 for none. The collector must be woken after a change.
    pub(crate) continuous_rate: AtomicU32,
}

/// How many local roots may wait for the collector.
const MOST_ROOTS: usize = 4_096;

impl ProcessRequests {
    /// Begins a request, unless the caller of another one waits for that.
    pub(super) fn begin(&self) -> Option<Arc<()>> {
        let mut running = self.running.lock();
        let new = (running.strong_count() == 0).then(Arc::default)?;
        *running = Arc::downgrade(&new);
        Some(new)
    }

    pub(super) fn note_closing(
        &self,
        closing: &SpanSnapshot,
        counters: &Counters,
        fields: impl FnOnce() -> RootFields,
    ) {
        let is_wanted = closing.has(REGISTERED)
            && closing.key == closing.root
            && self.wants_roots.load(Ordering::Relaxed);
        if !is_wanted {
            return;
        }
        if self.roots.len() < MOST_ROOTS {
            self.roots.push((closing.key, fields()));
        } else {
            Counters::add(&counters.profiles.root_fields_left_out, 1);
        }
    }

    /// The local roots that have closed so far.
    pub(crate) fn take_roots(&self) -> Vec<(SpanKey, RootFields)> {
        let so_far = self.roots.len();
        std::iter::from_fn(|| self.roots.pop()).take(so_far).collect()
    }
}

/// A profile of the process that is being made; see [`Handle::begin_profile`](crate::Handle::begin_profile). It does not
/// keep the layer alive. Dropping it ends the profile.
#[derive(Debug)]
#[must_use = "dropping it ends the profile"]
pub struct StartedProfile {
    pub(super) answer: Receiver<Profile>,
    pub(super) deadline: Instant,
    pub(super) _running: Arc<()>,
    pub(super) cancel: CancelProfile,
}

/// How long after its end the caller waits for it: the layer's threads read symbols.
pub(super) const LONGEST: Duration = Duration::from_secs(60);

impl StartedProfile {
    /// Waits until the profile is made. This blocks; in async code call it from `spawn_blocking`.
    ///
    /// # Errors
    ///
    /// If the layer's threads do not answer within a minute after its end. `Ended` if the layer has ended, or if the profile
    /// was canceled.
    pub fn wait(self) -> Result<Profile, ProfileError> {
        let _uncounted = SuspendCounting::begin();
        self.answer.recv_deadline(self.deadline).map_err(ProfileError::from)
    }

    /// What ends the profile when it is dropped, while another thread waits for it.
    pub fn canceler(&self) -> CancelProfile {
        self.cancel.clone()
    }
}

impl From<RecvTimeoutError> for ProfileError {
    fn from(error: RecvTimeoutError) -> Self {
        match error {
            RecvTimeoutError::Timeout => Self::NoAnswer,
            RecvTimeoutError::Disconnected => Self::Ended,
        }
    }
}

/// Ends a profile of the process when it is dropped, if it has not ended.
#[derive(Clone, Debug)]
#[must_use = "dropping it ends the profile"]
pub struct CancelProfile {
    pub(super) is_canceled: Arc<AtomicBool>,
    pub(super) waker: Waker,
}

impl Drop for CancelProfile {
    fn drop(&mut self) {
        self.is_canceled.store(true, Ordering::Release);
        self.waker.wake();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_profile_is_made_at_a_time() {
        let requests = ProcessRequests::default();
        let first = requests.begin().unwrap();
        assert!(requests.begin().is_none());
        drop(first);
        assert!(requests.begin().is_some());
        assert!(requests.begin().is_some(), "it was dropped");
    }
}
