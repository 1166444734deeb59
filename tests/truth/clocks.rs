//! Clock readings of the calling thread, and bounds computed from them.

use std::ops::Sub;

use nix::time::{ClockId, clock_gettime};

fn read(clock: ClockId) -> u64 {
    let time = clock_gettime(clock).unwrap();
    (time.tv_sec() * 1_000_000_000 + time.tv_nsec()).cast_unsigned()
}

/// `CLOCK_MONOTONIC_RAW`, which is neither set nor slewed, in nanoseconds.
pub(crate) fn wall_ns() -> u64 {
    read(ClockId::CLOCK_MONOTONIC_RAW)
}

/// The CPU time of the calling thread, in nanoseconds.
pub(crate) fn cpu_ns() -> u64 {
    read(ClockId::CLOCK_THREAD_CPUTIME_ID)
}

/// Both clocks of the calling thread, read in immediate succession.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reading {
    pub(crate) wall_ns: u64,
    pub(crate) cpu_ns: u64,
}

impl Reading {
    /// Reads the wall clock first. The wall time from such a reading to one by [`wall_last`](Self::wall_last) covers
    /// all of the CPU time between them.
    pub(crate) fn wall_first() -> Self {
        let wall_ns = wall_ns();
        Self { wall_ns, cpu_ns: cpu_ns() }
    }

    pub(crate) fn wall_last() -> Self {
        let cpu_ns = cpu_ns();
        Self { wall_ns: wall_ns(), cpu_ns }
    }
}

/// The bounds of a value that is not known exactly.
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

    /// How far a value is outside the bounds, negative if it is below.
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

/// The time between two readings.
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
