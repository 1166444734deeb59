//! How many samples a span has, by what they show.

use std::iter::Sum;

/// How many samples fell in a span and its descendants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SampleCounts {
    pub(crate) on_cpu: u64,
    /// Captured waits.
    pub(crate) waits: u64,
    /// Awaits, each with its scheduling delay.
    pub(crate) awaits: u64,
    pub(crate) allocations: u64,
}

impl SampleCounts {
    pub(crate) const WAIT: Self = Self { waits: 1, ..Self::of_on_cpu(0) };
    pub(crate) const AWAIT: Self = Self { awaits: 1, ..Self::of_on_cpu(0) };
    pub(crate) const ALLOCATION: Self = Self { allocations: 1, ..Self::of_on_cpu(0) };

    pub(crate) const fn of_on_cpu(on_cpu: u64) -> Self {
        Self { on_cpu, waits: 0, awaits: 0, allocations: 0 }
    }

    /// All counts, in the order of the fields.
    pub(super) fn counts(self) -> [u64; 4] {
        [self.on_cpu, self.waits, self.awaits, self.allocations]
    }

    pub(super) fn from_counts([on_cpu, waits, awaits, allocations]: [u64; 4]) -> Self {
        Self { on_cpu, waits, awaits, allocations }
    }

    pub(crate) fn total(self) -> u64 {
        self.counts().iter().sum()
    }

    pub(crate) fn saturating_sub(self, other: Self) -> Self {
        Self {
            on_cpu: self.on_cpu.saturating_sub(other.on_cpu),
            waits: self.waits.saturating_sub(other.waits),
            awaits: self.awaits.saturating_sub(other.awaits),
            allocations: self.allocations.saturating_sub(other.allocations),
        }
    }
}

impl Sum for SampleCounts {
    fn sum<I: Iterator<Item = Self>>(counts: I) -> Self {
        counts.fold(Self::default(), |sum, more| Self {
            on_cpu: sum.on_cpu + more.on_cpu,
            waits: sum.waits + more.waits,
            awaits: sum.awaits + more.awaits,
            allocations: sum.allocations + more.allocations,
        })
    }
}
