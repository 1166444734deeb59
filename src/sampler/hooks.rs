//! What the hooks of a thread need of what samples it.

use std::fmt::Debug;
use std::sync::Arc;

use super::arming::Arming;
use super::counters::Usage;
use super::thread::SampledThread;
use crate::sys;

/// Where raw samples and the scheduler's doings come from.
pub(crate) trait ArmThreads: Send + Sync + Debug {
    /// Begins with the calling thread: on its first profiled segment, and again on the first one after its
    /// sampling was ended.
    fn begin(&self) -> Begun;
    /// Samples the thread from now on, if it can be and is not.
    fn arm(&self, thread: &SampledThread);
}

/// A thread that [`ArmThreads`] has begun with.
#[derive(Debug)]
pub(crate) struct Begun {
    /// What the collector was given, with its first arming; none if the thread will not be sampled.
    pub(crate) sampled: Option<(Arc<SampledThread>, Arc<Arming>)>,
    pub(crate) source: Box<dyn ThreadSource>,
}

/// A source on one thread; called by that thread only, and only where something moved.
pub(crate) trait ThreadSource: Debug {
    /// From now on the thread is sampled with that.
    fn took_up(&self, _arming: &Arming) {}
    /// The samples between two positions, if they can be counted; else their number follows from their
    /// least size.
    fn count_samples(&self, _arming: &Arming, _from: u64, _until: u64) -> Option<u64> {
        None
    }
    /// The thread's CPU clock in nanoseconds.
    fn cpu_ns(&mut self) -> Option<u64> {
        sys::thread_cpu_ns()
    }
    /// What the thread has used since it started; counts of the hardware since it was armed.
    fn usage(&mut self, arming: Option<&Arming>) -> Usage;
    /// The collector is to look sooner than it means to.
    fn wake_collector(&self) {}
}
