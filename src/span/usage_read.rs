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

/// The context switches of a thread, and its CPU clock when these were read.
#[derive(Clone, Copy, Debug)]
pub(super) struct SwitchCounts {
    /// In ticks.
    pub(super) at: u64,
    pub(super) cpu_ns: u64,
    pub(super) voluntary: u64,
    pub(super) involuntary: u64,
    /// The number of the session, and whether it records switches.
    pub(super) turn: u32,
    pub(super) records: bool,
}
