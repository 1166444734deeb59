//! What the system counts for a thread, as its hooks last read it.

use crate::facts::Usage;
use crate::sampler::RunDelay;

/// What was last read of what the system counts for the thread.
#[derive(Debug, Default)]
pub(super) struct UsageRead {
    pub(super) usage: Usage,
    /// When, in ticks.
    pub(super) at: u64,
    pub(super) run_delay: Option<RunDelay>,
    /// When the one before that was read, in ticks.
    pub(super) run_delay_since: u64,
    pub(super) switches: Option<SwitchCounts>,
}

/// The usage of a thread, and its CPU clock when that was read.
#[derive(Clone, Copy, Debug)]
pub(super) struct SwitchCounts {
    /// In ticks.
    pub(super) at: u64,
    pub(super) cpu_ns: u64,
    /// Each read of the records of switches adds one nanosecond: 0 says that there are none.
    pub(super) usage: Usage,
    /// The number of the session.
    pub(super) turn: u32,
}
