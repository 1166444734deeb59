//! What the system and the allocator count for a thread, and sums of it.

use std::array;
use std::sync::atomic::{AtomicU64, Ordering};

/// Sums of [`Usage`] over threads.
#[derive(Debug, Default)]
pub struct UsageSums([AtomicU64; Usage::COUNTS]);

impl UsageSums {
    pub fn add(&self, more: &Usage) {
        for (sum, more) in self.0.iter().zip(more.counts()) {
            if more != 0 {
                sum.fetch_add(more, Ordering::Relaxed);
            }
        }
    }

    pub fn get(&self) -> Usage {
        let mut sums = self.0.iter();
        let next = |_| sums.next().map_or(0, |sum| sum.load(Ordering::Relaxed));
        Usage::from_counts(array::from_fn(next))
    }

    pub fn clear(&self) {
        self.0.iter().for_each(|sum| sum.store(0, Ordering::Relaxed));
    }
}

macro_rules! usage {
    ($($(#[doc = $doc:literal])* $count:ident)+) => {
        /// What the system counts for a thread since it started, or the part of it that a span had.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Usage {
            $($(#[doc = $doc])* pub $count: u64,)+
        }

        impl Usage {
            /// The number of counts.
            pub const COUNTS: usize = [$(stringify!($count)),+].len();

            /// All counts, in the order of the fields.
            pub fn counts(&self) -> [u64; Self::COUNTS] {
                [$(self.$count),+]
            }

            /// From all counts, in the order of the fields.
            pub fn from_counts([$($count),+]: [u64; Self::COUNTS]) -> Self {
                Self { $($count),+ }
            }
        }
    };
}

usage! {
    /// Page faults without disk I/O.
    minor_faults
    /// Page faults with disk I/O.
    major_faults
    /// Bytes; 0 also where the kernel does not count them.
    disk_read
    /// Times the thread blocked.
    voluntary_switches
    /// Times the scheduler preempted the thread.
    involuntary_switches
    /// CPU cycles while the span was sampled, as the next two; 0 without hardware counters.
    cycles
    /// Instructions.
    instructions
    /// Misses of the last cache.
    cache_misses
    /// For how long it could have run and others had its CPU, in nanoseconds; 0 if that is unknown.
    preempted_ns
    /// For how long it could have run and had no CPU, as the kernel counted it over `run_delay_read_ns` of that time.
    run_delay_ns
    /// The time over which `run_delay_ns` was counted, in nanoseconds.
    run_delay_read_ns
}

impl Usage {
    /// The usage since `before`.
    pub fn since(&self, before: &Self) -> Self {
        let mut counts = self.counts();
        for (count, before) in counts.iter_mut().zip(before.counts()) {
            *count = count.saturating_sub(before);
        }
        Self::from_counts(counts)
    }

    /// Without the counts that start at 0 when the thread is attached.
    pub fn without_session(self) -> Self {
        Self { cycles: 0, instructions: 0, cache_misses: 0, preempted_ns: 0, ..self }
    }
}

/// What was allocated and freed, in bytes as they were requested and in calls.
///
/// A reallocation counts as an allocation of the new size and a free of the old one. A failed allocation does not count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Allocations {
    /// Bytes allocated.
    pub allocated_bytes: u64,
    /// The number of allocations.
    pub allocations: u64,
    /// Bytes freed, wherever they were allocated.
    pub freed_bytes: u64,
    /// The number of frees.
    pub frees: u64,
}

impl Allocations {
    /// The difference to an earlier count.
    pub fn since(self, before: Self) -> Self {
        Self {
            allocated_bytes: self.allocated_bytes.saturating_sub(before.allocated_bytes),
            allocations: self.allocations.saturating_sub(before.allocations),
            freed_bytes: self.freed_bytes.saturating_sub(before.freed_bytes),
            frees: self.frees.saturating_sub(before.frees),
        }
    }

    /// The sum of both.
    pub fn and(self, more: Self) -> Self {
        Self {
            allocated_bytes: self.allocated_bytes.saturating_add(more.allocated_bytes),
            allocations: self.allocations.saturating_add(more.allocations),
            freed_bytes: self.freed_bytes.saturating_add(more.freed_bytes),
            frees: self.frees.saturating_add(more.frees),
        }
    }
}
