//! What the kernel says of the calling thread, and bounds made of it.

use std::ops::Sub;

use nix::time::{ClockId, clock_gettime};

fn read(clock: ClockId) -> u64 {
    let time = clock_gettime(clock).unwrap();
    (time.tv_sec() * 1_000_000_000 + time.tv_nsec()).cast_unsigned()
}

/// Of the clock that nobody sets or slews, in nanoseconds.
pub(crate) fn wall_ns() -> u64 {
    read(ClockId::CLOCK_MONOTONIC_RAW)
}

/// The CPU time of the calling thread, in nanoseconds.
pub(crate) fn cpu_ns() -> u64 {
    read(ClockId::CLOCK_THREAD_CPUTIME_ID)
}

/// The calling thread at one moment, or rather at two right after each other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reading {
    pub(crate) wall_ns: u64,
    pub(crate) cpu_ns: u64,
}

impl Reading {
    /// At the outer end of something: between two of these, first this one and then
    /// [`wall_last`](Self::wall_last), there is all that the CPU clock saw.
    pub(crate) fn wall_first() -> Self {
        let wall_ns = wall_ns();
        Self { wall_ns, cpu_ns: cpu_ns() }
    }

    pub(crate) fn wall_last() -> Self {
        let cpu_ns = cpu_ns();
        Self { wall_ns: wall_ns(), cpu_ns }
    }
}

/// A value that is not known any better.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Bounds {
    pub(crate) least: u64,
    pub(crate) most: u64,
}

impl Bounds {
    pub(crate) fn add(&mut self, least: u64, most: u64) {
        self.least += least;
        self.most += most;
    }

    /// By how much a value is outside.
    pub(crate) fn miss(self, value: u64) -> i64 {
        let [below, above] = [self.least.saturating_sub(value), value.saturating_sub(self.most)];
        above.cast_signed() - below.cast_signed()
    }

    pub(crate) fn middle(self) -> f64 {
        f64::midpoint(self.least as f64, self.most as f64)
    }

    pub(crate) fn widened(self, by: u64) -> Self {
        Self { least: self.least.saturating_sub(by), most: self.most + by }
    }
}

/// What passed between two readings.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Passed {
    pub(crate) wall_ns: u64,
    pub(crate) cpu_ns: u64,
}

impl Sub for Reading {
    type Output = Passed;

    fn sub(self, earlier: Self) -> Passed {
        Passed { wall_ns: self.wall_ns - earlier.wall_ns, cpu_ns: self.cpu_ns - earlier.cpu_ns }
    }
}
