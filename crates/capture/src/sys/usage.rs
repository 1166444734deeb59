//! What the system and the allocator count for a thread.

macro_rules! counts {
    ($(#[doc = $of:literal])+ $name:ident: $($(#[doc = $doc:literal])+ $count:ident)+) => {
        $(#[doc = $of])+
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $name {
            $($(#[doc = $doc])+ pub $count: u64,)+
        }

        impl $name {
            /// The number of counts.
            pub const COUNTS: usize = [$(stringify!($count)),+].len();

            /// All counts, in the order of the fields.
            #[inline]
            pub fn counts(self) -> [u64; Self::COUNTS] {
                [$(self.$count),+]
            }

            /// From all counts, in the order of the fields.
            #[inline]
            pub fn from_counts([$($count),+]: [u64; Self::COUNTS]) -> Self {
                Self { $($count),+ }
            }

            /// The difference to an earlier count.
            pub fn since(self, before: Self) -> Self {
                Self { $($count: self.$count.saturating_sub(before.$count)),+ }
            }

            /// The sum of both.
            pub fn and(self, more: Self) -> Self {
                Self { $($count: self.$count.saturating_add(more.$count)),+ }
            }
        }
    };
}

counts! {
    /// What the system counts for a thread since it started, or the part of it that a span had.
    Usage:
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
    /// For how long it could have run and others had its CPU, in nanoseconds; 0 if that is unknown.
    preempted_ns
    /// For how long it could have run and had no CPU, as the kernel counted it over `run_delay_read_ns` of that time.
    run_delay_ns
    /// The time over which `run_delay_ns` was counted, in nanoseconds.
    run_delay_read_ns
}

impl Usage {
    /// Without the count that starts at 0 when the thread is attached.
    pub fn without_session(self) -> Self {
        Self { preempted_ns: 0, ..self }
    }
}

counts! {
    /// What was allocated and freed, in bytes as they were requested and in calls.
    ///
    /// A reallocation counts as an allocation of the new size and a free of the old one. A failed allocation does not count.
    Allocations:
    /// Bytes allocated.
    allocated_bytes
    /// The number of allocations.
    allocations
    /// Bytes freed, wherever they were allocated.
    freed_bytes
    /// The number of frees.
    frees
}
