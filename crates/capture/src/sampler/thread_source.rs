//! The source on one thread, which only that thread calls.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::hooks::ThreadSource;
use super::record::{Record, Records};
use super::session::SamplingSession;
use super::source::Sampler;
use super::thread::ThreadShared;
use super::thread_counters::ThreadCounters;
use crate::sys::{self, Usage};

/// One thread, sampled or with its CPU clock only.
#[derive(Debug)]
pub(super) struct ThreadSampler {
    pub(super) sampler: Sampler,
    /// The counters of unsampled threads, if it will not be sampled.
    pub(super) unsampled: Option<ThreadCounters>,
    /// The thread's alternate signal stack was too small when the thread was set up.
    pub(super) has_small_signal_stack: bool,
}

impl Drop for ThreadSampler {
    fn drop(&mut self) {
        match &self.unsampled {
            Some(counters) => _ = counters.unsampled.fetch_sub(1, Ordering::Relaxed),
            // This is how the collector learns that a thread has ended.
            None => self.sampler.waker().wake_soon(),
        }
    }
}

impl ThreadSource for ThreadSampler {
    fn on_session_start(&self, session: &SamplingSession) {
        if session.ring.is_some() && !session.has_switch_records() && !sys::has_small_signal_stack()
        {
            // The thread may have been set up when no thread had a timer.
            self.sampler.timers().iter().for_each(|timers| timers.unblock());
        }
    }

    /// Reads the records one by one, since samples in the kernel are longer than others, and other records occur. The
    /// collector may have released them, but only this thread's own samples overwrite them.
    fn count_samples(&self, session: &SamplingSession, from: u64, until: u64) -> Option<u64> {
        let ring = session.ring.as_ref().filter(|ring| ring.timer().is_none())?;
        let fits = |head: u64| head.saturating_sub(from) <= ring.data_size() as u64;
        if !fits(until) {
            return None;
        }
        let records = Records::between(&***ring, from, until);
        let samples = records.filter(|record| matches!(record, Ok(Record::Sample(_)))).count();
        fits(ring.head()).then_some(samples as u64)
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
            self.sampler.timers().iter().for_each(|timers| timers.block());
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
        self.sampler.waker().wake();
    }
}
