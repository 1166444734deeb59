//! The rings that hold the samples of threads.

use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};

use super::platform::{PerfRing, RingMemory, TimerRing};
use super::types::WhyRefused;

/// The ring of a thread's samples, filled by perf or by a timer's handler.
#[derive(Debug)]
pub enum SampleRing {
    Perf(PerfRing),
    Timer(TimerRing),
}

impl SampleRing {
    pub(crate) fn start(&self) -> Result<(), WhyRefused> {
        match self {
            Self::Perf(ring) => ring.start(),
            Self::Timer(ring) => ring.start(),
        }
    }

    pub(crate) fn pause(&self) {
        match self {
            Self::Perf(ring) => ring.pause(),
            Self::Timer(ring) => ring.pause(),
        }
    }

    /// Stops sampling and releases everything except the position that hooks read.
    pub(crate) fn retire(&self) {
        match self {
            Self::Perf(ring) => ring.retire(),
            Self::Timer(ring) => ring.retire(),
        }
    }

    pub(super) fn position_word(&self) -> &AtomicU64 {
        match self {
            Self::Perf(ring) => ring.head_word(),
            Self::Timer(ring) => ring.position_word(),
        }
    }

    pub fn position(&self) -> u64 {
        self.position_word().load(Ordering::Acquire)
    }

    /// The timer's ring, if it is one. Hooks then read other positions than those of the records, which contain both.
    pub fn timer(&self) -> Option<&TimerRing> {
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
