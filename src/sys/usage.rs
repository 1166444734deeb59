//! What the system counts for a thread.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! usage {
    ($($(#[doc = $doc:literal])* $count:ident)+) => {
        /// What the system counts for a thread since it started, or the part of it that a span had.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub(crate) struct Usage {
            $($(#[doc = $doc])* pub(crate) $count: u64,)+
        }

        /// Sums of it over threads.
        #[derive(Debug, Default)]
        pub(crate) struct UsageSums {
            $($count: AtomicU64,)+
        }

        impl Usage {
            /// The usage since `before`.
            pub(crate) fn since(&self, before: &Self) -> Self {
                Self { $($count: self.$count.saturating_sub(before.$count),)+ }
            }
        }

        impl UsageSums {
            pub(crate) fn add(&self, more: &Usage) {
                $(if more.$count != 0 {
                    self.$count.fetch_add(more.$count, Ordering::Relaxed);
                })+
            }

            pub(crate) fn get(&self) -> Usage {
                Usage { $($count: self.$count.load(Ordering::Relaxed),)+ }
            }

            pub(crate) fn clear(&self) {
                $(self.$count.store(0, Ordering::Relaxed);)+
            }
        }
    };
}

usage! {
    minor_faults
    major_faults
    /// Bytes; 0 also where the kernel does not count them.
    disk_read
    /// Times the thread blocked.
    voluntary_switches
    /// Times the scheduler preempted the thread.
    involuntary_switches
    cycles
    instructions
    cache_misses
    /// For how long it could have run and others had its CPU, in nanoseconds; 0 if that is unknown.
    preempted_ns
    /// For how long it could have run and had no CPU, as the kernel counted it over `run_delay_read_ns` of that time.
    run_delay_ns
    run_delay_read_ns
}

impl Usage {
    /// Without the counts that start at 0 when the thread is attached.
    pub(crate) fn without_session(self) -> Self {
        Self { cycles: 0, instructions: 0, cache_misses: 0, preempted_ns: 0, ..self }
    }
}
