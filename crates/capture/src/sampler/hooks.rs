//! The interface between a thread's hooks and the source that samples it.

use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::session::SamplingSession;
use super::source::Sampler;
use super::thread::ThreadShared;
use super::timer::Timers;
use crate::sys::{self, Usage};

pub trait AttachThreads: Send + Sync + Debug {
    /// Sets up the calling thread: on its first profiled segment, and on the first one after its sampling was ended.
    fn begin(&self) -> ThreadSetup;
    fn attach(&self, thread: &ThreadShared);
}

#[derive(Debug)]
pub struct ThreadSetup {
    /// The state shared with the collector, with its first session; none if the thread will not be sampled.
    pub sampled: Option<(Arc<ThreadShared>, Arc<SamplingSession>)>,
    pub source: Box<dyn ThreadSource>,
}

/// A source on one thread. Only that thread calls it.
pub trait ThreadSource: Debug {
    fn on_session_start(&self, _session: &SamplingSession) {}
    fn cpu_ns(&mut self) -> Option<u64> {
        sys::thread_cpu_ns()
    }
    /// The thread's resource usage since it started.
    fn usage(&mut self, session: Option<&SamplingSession>) -> Usage;
    /// Whether what was found when the thread was set up is no longer so. Called in the periodic check.
    fn is_outdated(&self) -> bool {
        false
    }
    /// A sample of the thread was lost, and no profile says so.
    fn note_loss(&self) {}
    /// The thread was parked, and may be about to enter a span: the collector must scan it again.
    fn return_to_scans(&self, _thread: &Arc<ThreadShared>) {}
    fn wake_collector(&self) {}
}

/// One thread, sampled or with its CPU clock only.
#[derive(Debug)]
pub(super) struct ThreadSampler {
    pub(super) sampler: Sampler,
    /// Whether it will not be sampled, and is counted as such.
    pub(super) is_unsampled: bool,
    /// The thread's alternate signal stack was too small when the thread was set up.
    pub(super) has_small_signal_stack: bool,
}

impl Drop for ThreadSampler {
    fn drop(&mut self) {
        if self.is_unsampled {
            self.sampler.counters().unsampled.fetch_sub(1, Ordering::Relaxed);
        } else {
            // This is how the collector learns that a thread has ended.
            self.sampler.0.waker.wake_soon();
        }
    }
}

impl ThreadSource for ThreadSampler {
    fn on_session_start(&self, session: &SamplingSession) {
        if session.ring.is_some() && !session.has_switch_records() && !sys::has_small_signal_stack()
        {
            // The thread may have been set up when no thread had a timer.
            self.sampler.0.probed.timers.iter().for_each(Timers::unblock);
        }
    }

    fn usage(&mut self, session: Option<&SamplingSession>) -> Usage {
        let used = sys::try_thread_usage().unwrap_or_default();
        let switches = session.and_then(|session| session.switches.as_ref());
        let preempted_ns = switches.map_or(0, |ring| ring.preempted_ns());
        Usage { preempted_ns, ..used }
    }

    fn is_outdated(&self) -> bool {
        if !self.sampler.watches_signal_stacks() {
            return false;
        }
        let is_small = sys::has_small_signal_stack();
        if is_small && !self.has_small_signal_stack {
            // At once: a timer may be running.
            self.sampler.0.probed.timers.iter().for_each(Timers::block);
        }
        is_small != self.has_small_signal_stack
    }

    fn note_loss(&self) {
        self.sampler.note_loss();
    }

    fn return_to_scans(&self, thread: &Arc<ThreadShared>) {
        self.sampler.return_to_scans(thread);
    }

    fn wake_collector(&self) {
        self.sampler.0.waker.wake();
    }
}
