//! How many samples a span has, by what they show.

use std::iter::Sum;
use std::ops::AddAssign;
use std::sync::atomic::{AtomicU32, Ordering};

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

    pub(crate) fn total(self) -> u64 {
        self.on_cpu + self.waits + self.awaits + self.allocations
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

impl AddAssign for SampleCounts {
    fn add_assign(&mut self, more: Self) {
        self.on_cpu += more.on_cpu;
        self.waits += more.waits;
        self.awaits += more.awaits;
        self.allocations += more.allocations;
    }
}

impl Sum for SampleCounts {
    fn sum<I: Iterator<Item = Self>>(counts: I) -> Self {
        counts.fold(Self::default(), |mut sum, counts| {
            sum += counts;
            sum
        })
    }
}

#[derive(Debug, Default)]
pub(super) struct AtomicSampleCounts {
    on_cpu: AtomicU32,
    waits: AtomicU32,
    awaits: AtomicU32,
    allocations: AtomicU32,
}

impl AtomicSampleCounts {
    fn all(&self) -> [&AtomicU32; 4] {
        let Self { on_cpu, waits, awaits, allocations } = self;
        [on_cpu, waits, awaits, allocations]
    }

    pub(super) fn clear(&self) {
        self.all().into_iter().for_each(|count| count.store(0, Ordering::Relaxed));
    }

    pub(super) fn load(&self) -> SampleCounts {
        let [on_cpu, waits, awaits, allocations] =
            self.all().map(|count| count.load(Ordering::Relaxed).into());
        SampleCounts { on_cpu, waits, awaits, allocations }
    }

    pub(super) fn add(&self, more: SampleCounts) {
        let SampleCounts { on_cpu, waits, awaits, allocations } = more;
        for (count, more) in self.all().into_iter().zip([on_cpu, waits, awaits, allocations]) {
            if more > 0 {
                let add = |sum: u32| sum.saturating_add(u32::try_from(more).unwrap_or(u32::MAX));
                _ = count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |sum| Some(add(sum)));
            }
        }
    }
}
