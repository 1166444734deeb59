//! The time breakdown of a span.

use std::time::Duration;

use super::Usage;
use crate::facts::Allocations;

/// Where the wall time of a span went, and its resource usage.
///
/// On-CPU time is measured with the threads' CPU clocks, each read at most once per millisecond of a thread's wall
/// time, every 100 µs in a span that has been entered for 1/64 of its rule's threshold, and at each enter and exit if
/// the rule judges CPU time. That of a segment that begins or ends between two reads is known within bounds: the
/// account is their middle, and `on_cpu_error` the possible error. Off-CPU time is the rest of the time in which the
/// span was entered, and idle time is the rest of its wall time, less that [in other spans](Self::other_spans).
///
/// While a span is entered on two threads at once, both count: on-CPU and off-CPU time together can then exceed wall
/// time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "methods of the same names say what they are")]
pub struct TimeBreakdown {
    pub wall_ns: u64,
    pub on_cpu_ns: u64,
    pub on_cpu_error_ns: u64,
    /// The part of `on_cpu` that certainly ran on sampled threads. A span is sampled only after it
    /// has been entered for `Builder::sampling_delay`.
    pub sampled_ns: u64,
    pub subtree_on_cpu_ns: u64,
    /// The possible error of `subtree_on_cpu`.
    pub subtree_on_cpu_error_ns: u64,
    /// The part of `subtree_on_cpu` that certainly ran on sampled threads.
    pub subtree_sampled_ns: u64,
    pub off_cpu_ns: u64,
    pub idle_ns: u64,
    pub await_ns: u64,
    pub delay_ns: u64,
    /// How many times its future was pending, a sum of several futures. Known as `awaiting` is: those that took less than
    /// 50 µs together can be missing, or count for the span after.
    pub awaits: u64,
    pub after_last_exit_ns: u64,
    pub other_spans_ns: u64,
    /// Page faults, context switches and others, read when a sample falls, or at most once per millisecond.
    pub usage: Usage,
    /// The part of [`allocations`](Self::allocations) that is in no profiled span inside it.
    pub own_allocations: Option<Allocations>,
    /// What was allocated and freed on threads that were in the span or in a profiled span inside it, on the same or on
    /// other threads and in other tasks. Exact once the span is closed: each call counts for the innermost profiled span
    /// that its thread was in, and for those around that span. In an open span, what its threads allocated since their
    /// last enter or exit is missing, and so is what open spans inside it allocated.
    ///
    /// `None` unless the program's global allocator is a `ProfilingAllocator`.
    pub allocations: Option<Allocations>,
    /// The CPU times are unknown, because the system has no per-thread CPU clock or does not allow reading it.
    /// `on_cpu`, `on_cpu_error` and `off_cpu` are then 0 and meaningless.
    pub is_cpu_time_unknown: bool,
}

macro_rules! durations {
    ($($(#[doc = $doc:literal])+ $name:ident = $ns:ident;)+) => {
        $(
            $(#[doc = $doc])+
            pub fn $name(&self) -> Duration {
                Duration::from_nanos(self.$ns)
            }
        )+
    };
}

impl TimeBreakdown {
    durations! {
        /// From the span's creation to its close.
        wall = wall_ns;
        /// Time in which threads ran on a CPU inside the span, including child spans on the same thread.
        on_cpu = on_cpu_ns;
        /// The possible error of `on_cpu` and `off_cpu`.
        on_cpu_error = on_cpu_error_ns;
        /// `on_cpu` plus the on-CPU time of descendants on other threads, with which the samples of a profile compare.
        subtree_on_cpu = subtree_on_cpu_ns;
        /// Time in which the span was entered while its thread did not run (blocked or preempted).
        off_cpu = off_cpu_ns;
        /// Time in which the span was open and not entered (awaiting).
        idle = idle_ns;
        /// Time in which the span was entered while its thread was in other spans above it on its stack that are not
        /// inside it, as when a thread of `rayon` that waits for a part of one request runs parts of others. That time
        /// belongs to the other spans.
        other_spans = other_spans_ns;
        /// The part of `idle` in which its future awaited something and had not been woken. Known of futures that
        /// are polled through `Profiled`, but for less than 50 µs each time their innermost span changes.
        awaiting = await_ns;
        /// The part of `idle` in which its future had been woken and not been polled yet, or had not been polled for the first
        /// time. Known as [`awaiting`](Self::awaiting) is. Of several futures in the span, both are sums, and together at most `idle`.
        scheduling_delay = delay_ns;
        /// The last part of `idle`, from the last exit to the close: a child was open, or a handle to it existed.
        after_last_exit = after_last_exit_ns;
    }

    /// The part of `idle` that wrapped futures explain.
    pub fn explained_idle_ns(&self) -> u64 {
        self.await_ns + self.delay_ns
    }

    /// The account with its CPU times marked as unknown.
    pub fn without_cpu_time(self) -> Self {
        Self {
            on_cpu_ns: 0,
            on_cpu_error_ns: 0,
            sampled_ns: 0,
            subtree_on_cpu_ns: 0,
            subtree_on_cpu_error_ns: 0,
            subtree_sampled_ns: 0,
            off_cpu_ns: 0,
            is_cpu_time_unknown: true,
            ..self
        }
    }

    /// On-CPU time of the subtree that is certain, in nanoseconds.
    pub(crate) fn least_on_cpu_ns(&self) -> u64 {
        self.subtree_on_cpu_ns.saturating_sub(self.subtree_on_cpu_error_ns)
    }

    /// On-CPU time of the subtree that certainly ran on unsampled threads.
    pub(crate) fn unsampled_ns(&self) -> u64 {
        self.least_on_cpu_ns().saturating_sub(self.subtree_sampled_ns)
    }

    /// Whether it ran for long enough to have samples, but not on a thread that was sampled.
    pub fn has_no_sampled_time(&self) -> bool {
        const LONG_ENOUGH_NS: u64 = 1_000_000;
        self.subtree_sampled_ns == 0 && self.least_on_cpu_ns() >= LONG_ENOUGH_NS
    }

    /// Whether no descendant was on a thread that was not in the span, so that it covers all of its subtree.
    pub fn covers_subtree(&self) -> bool {
        self.subtree_on_cpu_ns == self.on_cpu_ns
            && self.subtree_on_cpu_error_ns == self.on_cpu_error_ns
    }

    /// On-CPU time of descendants on other threads, in nanoseconds.
    pub fn inside_on_cpu_ns(&self) -> u64 {
        self.subtree_on_cpu_ns.saturating_sub(self.on_cpu_ns)
    }

    /// The time that the span took while it was entered, on or off CPU.
    pub fn busy_ns(&self) -> u64 {
        self.wall_ns.saturating_sub(self.idle_ns).saturating_sub(self.other_spans_ns)
    }

    /// The account of an open span, with what its future awaits now added.
    pub fn with_await(self, await_ns: u64, delay_ns: u64) -> Self {
        let delay_ns = self.delay_ns.saturating_add(delay_ns).min(self.idle_ns);
        let await_ns = self.await_ns.saturating_add(await_ns).min(self.idle_ns - delay_ns);
        Self { await_ns, delay_ns, ..self }
    }
}
