//! A profile of the process: from the request of a caller to its answer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, RecvTimeoutError};
use crossbeam::queue::SegQueue;

use crate::error::ProfileError;
use crate::profile::Profile;
use crate::publish::Question;
use crate::span::{SpanKey, SpanSnapshot};
use crate::stats::Counters;
use crate::sys::{Uncounted, Waker};

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

/// A request for a profile of the process.
#[derive(Debug)]
pub(crate) struct ProcessRequest {
    pub(crate) kind: ProfileKind,
    /// CPU time between two samples, or the time between two scans of all threads.
    pub(crate) period_ns: u64,
    pub(crate) duration: Duration,
    pub(crate) reply: Question<Profile>,
    /// The caller no longer waits. The collector is woken after it is set.
    pub(crate) is_canceled: Arc<AtomicBool>,
}

/// What the callers of such requests, the hooks and the collector share.
#[derive(Debug, Default)]
pub(crate) struct ProcessRequests {
    /// One at a time.
    pub(super) is_running: Arc<AtomicBool>,
    /// Whether the fields of local roots are wanted, in which a sample fell.
    wants_roots: AtomicBool,
    /// Those that have closed.
    roots: SegQueue<(SpanKey, RootFields)>,
    /// Samples per second of CPU time for the continuous profile; 0 for none.
    continuous_rate: AtomicU32,
}

/// How many local roots may wait for the collector.
const MOST_ROOTS: usize = 4_096;

impl ProcessRequests {
    pub(crate) fn continuous_rate(&self) -> u32 {
        self.continuous_rate.load(Ordering::Relaxed)
    }

    /// The collector must be woken after that.
    pub(crate) fn set_continuous_rate(&self, rate: u32) {
        self.continuous_rate.store(rate, Ordering::Relaxed);
    }

    /// It cannot be made at that rate, so it is off.
    pub(crate) fn refuse_continuous(&self, rate: u32) {
        let relaxed = Ordering::Relaxed;
        _ = self.continuous_rate.compare_exchange(rate, 0, relaxed, relaxed);
    }

    pub(crate) fn set_wants_roots(&self, wants: bool) {
        self.wants_roots.store(wants, Ordering::Relaxed);
    }

    /// A span closes.
    pub(super) fn note_closing(
        &self,
        closing: &SpanSnapshot,
        counters: &Counters,
        fields: impl FnOnce() -> RootFields,
    ) {
        let is_wanted = closing.is_registered
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

/// That a profile of the process is being made, until it is dropped.
#[derive(Debug)]
pub(super) struct RunningRequest(Arc<AtomicBool>);

impl RunningRequest {
    /// `None` if another one is.
    pub(super) fn begin(is_running: &Arc<AtomicBool>) -> Option<Self> {
        let was_running = is_running.swap(true, Ordering::AcqRel);
        (!was_running).then(|| Self(Arc::clone(is_running)))
    }
}

impl Drop for RunningRequest {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// A profile of the process that is being made. It does not keep the layer alive.
#[derive(Debug)]
pub(crate) struct StartedProfile {
    answer: Receiver<Profile>,
    deadline: Instant,
    _running: RunningRequest,
}

/// How long after its end the caller waits for it: the layer's threads read symbols.
const LONGEST: Duration = Duration::from_secs(60);

impl StartedProfile {
    pub(super) fn new(answer: Receiver<Profile>, until: Instant, running: RunningRequest) -> Self {
        Self { answer, deadline: until + LONGEST, _running: running }
    }

    /// Waits until it is made.
    pub(crate) fn wait(self) -> Result<Profile, ProfileError> {
        let _uncounted = Uncounted::begin();
        self.answer.recv_deadline(self.deadline).map_err(|error| match error {
            RecvTimeoutError::Timeout => ProfileError::NoAnswer,
            RecvTimeoutError::Disconnected => ProfileError::Ended,
        })
    }
}

/// Ends the profile of the process when it is dropped, if it has not ended.
#[derive(Debug)]
pub(crate) struct CancelProfile {
    is_canceled: Arc<AtomicBool>,
    waker: Waker,
}

impl CancelProfile {
    pub(super) fn new(is_canceled: &Arc<AtomicBool>, waker: &Waker) -> Self {
        Self { is_canceled: Arc::clone(is_canceled), waker: waker.clone() }
    }
}

impl Drop for CancelProfile {
    fn drop(&mut self) {
        self.is_canceled.store(true, Ordering::Release);
        self.waker.wake();
    }
}

impl ProcessRequest {
    pub(crate) fn is_canceled(&self) -> bool {
        self.is_canceled.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_profile_is_made_at_a_time() {
        let is_running = Arc::default();
        let first = RunningRequest::begin(&is_running).unwrap();
        assert!(RunningRequest::begin(&is_running).is_none());
        drop(first);
        assert!(RunningRequest::begin(&is_running).is_some());
        assert!(RunningRequest::begin(&is_running).is_some(), "it was dropped");
    }
}
