//! The CPU time of the collector's own thread.

use crate::budget::passed;
use crate::sys;

/// The thread's CPU clock, read where one piece of work ends and the next begins, as each reading is a system call.
#[derive(Debug, Default)]
pub(crate) struct OwnCpu {
    /// The CPU time at the last reading.
    pub(crate) last_ns: Option<u64>,
}

impl OwnCpu {
    /// The CPU time since the last reading, which is for no budget if that is ignored. `None` if the clock cannot be read.
    pub(crate) fn lap(&mut self) -> Option<u64> {
        let now_ns = sys::thread_cpu_ns();
        passed(std::mem::replace(&mut self.last_ns, now_ns), now_ns)
    }
}
