//! Limits of the collector's memory and time.

use super::attachment::Pace;
use super::shed::ShedLimits;

/// Limits on memory, CPU time and sizes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) memory_bytes: usize,
    pub(crate) samples_per_profile: usize,
    pub(crate) pending_spans: usize,
    /// For profiles that have not been exported yet.
    pub(crate) export_bytes: usize,
    /// The share of one core that reading samples may take.
    pub(crate) cpu_percent: Option<u32>,
    pub(crate) frames_per_stack: usize,
    /// How many bytes of a stack are copied.
    pub(crate) stack_bytes: usize,
    /// For the copied stacks of pending futures.
    pub(crate) await_bytes: usize,
    /// Between two samples of allocations in the mean; 0 for none.
    pub(crate) alloc_sample_interval: u64,
    pub(crate) tracks_heap: bool,
    pub(crate) shed: ShedLimits,
    pub(crate) pace: Pace,
}
