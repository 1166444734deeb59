//! What samples of a thread are in.

use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};

use super::platform::{PerfRing, RingMemory, TimerRing};
use super::types::WhyRefused;

/// The ring of a thread's samples, by what fills it.
#[derive(Debug)]
pub(crate) enum SampleRing {
    Perf(PerfRing),
    Timer(TimerRing),
}

impl SampleRing {
    /// Begins to sample, or goes on.
    pub(crate) fn start(&self) -> Result<(), WhyRefused> {
        match self {
            Self::Perf(ring) => ring.start(),
            Self::Timer(ring) => ring.start(),
        }
    }

    /// Stops, until it is started again.
    pub(crate) fn pause(&self) {
        match self {
            Self::Perf(ring) => ring.pause(),
            Self::Timer(ring) => ring.pause(),
        }
    }

    /// Samples no more, and gives back all that it takes but the position that hooks see.
    pub(crate) fn retire(&self) {
        match self {
            Self::Perf(ring) => ring.retire(),
            Self::Timer(ring) => ring.retire(),
        }
    }

    /// What moves when a sample is taken.
    pub(super) fn position_word(&self) -> &AtomicU64 {
        match self {
            Self::Perf(ring) => ring.head_word(),
            Self::Timer(ring) => ring.position_word(),
        }
    }

    /// The position that hooks see now.
    pub(crate) fn position(&self) -> u64 {
        self.position_word().load(Ordering::Acquire)
    }

    pub(crate) fn has_kernel_chains(&self) -> bool {
        matches!(self, Self::Perf(ring) if ring.has_kernel_chains())
    }

    /// One that a test fills, in steps of that length.
    #[cfg(test)]
    pub(crate) fn scripted(data_size: usize, step: u64) -> std::io::Result<Self> {
        TimerRing::scripted(data_size, step).map(Self::Timer)
    }

    /// That of a timer. There hooks see other positions than those of the records, which say them.
    pub(crate) fn timer(&self) -> Option<&TimerRing> {
        match self {
            Self::Perf(_) => None,
            Self::Timer(ring) => Some(ring),
        }
    }
}

impl Deref for SampleRing {
    type Target = RingMemory;

    fn deref(&self) -> &RingMemory {
        match self {
            Self::Perf(ring) => ring,
            Self::Timer(ring) => ring,
        }
    }
}
