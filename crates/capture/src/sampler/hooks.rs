//! The interface between a thread's hooks and the source that samples it.

use std::fmt::Debug;
use std::sync::Arc;

use super::session::SamplingSession;
use super::thread::ThreadShared;
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
    /// The number of samples between two positions. `None` if they cannot be counted, and must be estimated.
    fn count_samples(&self, _session: &SamplingSession, _from: u64, _until: u64) -> Option<u64> {
        None
    }
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
