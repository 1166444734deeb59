//! Counters of what was done and of each loss by cause.

use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam::utils::CachePadded;

use crate::facts::{Allocations, Reason, Reasons};
use crate::sampler::ThreadCounters;
use crate::sys::{STRIPES, own_stripe};

/// Counters of the layer itself; those of threads are the sampler's.
macro_rules! own_counters {
    (ThreadCounters $($name:ident)+) => {};
    ($counters:ident $($name:ident)+) => {
        #[derive(Debug, Default)]
        pub(crate) struct $counters {
            $(pub(crate) $name: AtomicU64,)+
        }
    };
}

macro_rules! counters {
    ($(
        $(#[doc = $group_doc:literal])+
        $group:ident: $stats:ident as $counters:ident {
            $($(#[doc = $doc:literal])+ $name:ident,)+
        }
    )+) => {
        /// Counters since the layer was built, grouped; [`Handle::stats`](crate::Handle::stats) returns them.
        ///
        /// Each way to lose data has its own counter.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Stats {
            $($(#[doc = $group_doc])+ pub $group: $stats,)+
            kept_for: KeptFor<u64>,
        }

        $(
            $(#[doc = $group_doc])+
            #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
            #[non_exhaustive]
            pub struct $stats {
                $($(#[doc = $doc])+ pub $name: u64,)+
            }

            own_counters!($counters $($name)+);

            impl From<&$counters> for $stats {
                fn from(counters: &$counters) -> Self {
                    Self { $($name: counters.$name.load(Ordering::Relaxed),)+ }
                }
            }
        )+

        impl Stats {
            /// All counters with their names, `group.field` (`samples.taken`), in the order of declaration, and then
            /// those of [`kept_for`](Self::kept_for), as `spans.kept_for_latency`. Names may be added; none changes
            /// its meaning.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
                let stats = *self;
                let kept_for = move |reason: Reason| (reason.counter(), stats.kept_for(reason));
                [$($((concat!(stringify!($group), ".", stringify!($name)), self.$group.$name),)+)+]
                    .into_iter()
                    .chain(Reason::all().map(kept_for))
            }
        }

        /// The live counters behind [`Stats`].
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub(crate) $group: $counters,)+
            kept_for: KeptFor<AtomicU64>,
            roots: AllocatedByRoots,
        }

        impl Counters {
            pub(crate) fn snapshot(&self) -> Stats {
                let mut stats = Stats {
                    $($group: (&self.$group).into(),)+
                    kept_for: KeptFor(self.kept_for.0.each_ref().map(|count| count.load(Ordering::Relaxed))),
                };
                self.roots.add_to(&mut stats.allocations);
                stats
            }
        }
    };
}

/// By the numbers of reasons.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct KeptFor<T>([T; Reason::COUNT]);

impl<T: Default> Default for KeptFor<T> {
    fn default() -> Self {
        Self(std::array::from_fn(|_| T::default()))
    }
}

impl Stats {
    /// How many spans were kept for that reason. A span kept for several reasons counts for each of them.
    pub fn kept_for(&self, reason: Reason) -> u64 {
        self.kept_for.0.get(reason.number()).copied().unwrap_or(0)
    }

    /// The share of the on-CPU time of kept spans in which their threads were sampled, from 0 to 1. The rest is the
    /// time before the spans were old, and of threads that could not be sampled.
    pub fn share_covered(&self) -> f64 {
        match self.spans.kept_on_cpu_ns {
            0 => 1.0,
            all_ns => self.spans.kept_sampled_ns as f64 / all_ns as f64,
        }
    }
}

impl Counters {
    /// Counts a span that was kept for these reasons.
    pub(crate) fn add_kept(&self, reasons: Reasons) {
        Self::add(&self.spans.kept, 1);
        let counters = reasons.iter().filter_map(|reason| self.kept_for.0.get(reason.number()));
        counters.for_each(|counter| Self::add(counter, 1));
    }

    /// Profiles with an id that reached neither the receiver nor a directory.
    pub(crate) fn profiles_lost(&self) -> u64 {
        let lost = [
            &self.profiles.dropped_export_failed,
            &self.profiles.dropped_refused,
            &self.profiles.dropped_too_old,
            &self.profiles.dropped_at_shutdown,
        ];
        lost.map(|counter| counter.load(Ordering::Relaxed)).iter().sum()
    }

    /// Adds what a local root has allocated.
    pub(crate) fn add_allocations(&self, more: Allocations) {
        let Allocations { allocated_bytes, allocations, freed_bytes, frees } = more;
        let own = self.roots.0.get(own_stripe());
        let each = [allocated_bytes, allocations, freed_bytes, frees];
        for (count, more) in own.into_iter().flat_map(|own| own.iter()).zip(each) {
            Self::add(count, more);
        }
    }

    #[inline]
    pub(crate) fn add(counter: &AtomicU64, count: u64) {
        counter.fetch_add(count, Ordering::Relaxed);
    }
}

/// What local roots have allocated, by the part of the thread on which they closed: most requests allocate. In the order
/// of the fields of [`Allocations`].
#[derive(Debug)]
struct AllocatedByRoots(Box<[CachePadded<[AtomicU64; 4]>]>);

impl Default for AllocatedByRoots {
    fn default() -> Self {
        Self((0..STRIPES).map(|_| CachePadded::default()).collect())
    }
}

impl AllocatedByRoots {
    fn add_to(&self, stats: &mut AllocationStats) {
        for part in &self.0 {
            let [allocated_bytes, allocations, freed_bytes, frees] =
                part.each_ref().map(|count| count.load(Ordering::Relaxed));
            stats.allocated_bytes += allocated_bytes;
            stats.allocations += allocations;
            stats.freed_bytes += freed_bytes;
            stats.frees += frees;
        }
    }
}

counters! {
    /// Spans that a rule matches, and which of them were kept.
    spans: SpanStats as SpanCounters {
        /// Spans created that a rule matches.
        seen,
        /// Spans kept, for any reason. One that was kept while open and again at its close counts twice.
        kept,
        /// On-CPU time of kept spans at their close, in nanoseconds, also of those inside others.
        kept_on_cpu_ns,
        /// Part of `kept_on_cpu_ns` in which the threads were sampled, in nanoseconds.
        kept_sampled_ns,
        /// Kept spans without a profile because no sample fell in them.
        no_profile_no_samples,
        /// Kept spans without a profile because the rate limit of their rule was used up.
        no_profile_rate_limit,
        /// Kept spans without a profile because too many profiles were pending.
        no_profile_queue_full,
        /// Kept spans that are not reported because 1,024 spans of their local root had been kept.
        no_profile_too_many_spans,
        /// Kept spans without a profile because the exporter was failing.
        no_profile_exporter_fails,
        /// Kept spans without a profile because the memory budget was used up.
        no_profile_no_memory,
        /// Kept spans without a profile because the system returned no random bytes for its id.
        no_profile_no_id,
        /// Kept spans without a profile that are in no log line and callback: too many a minute.
        kept_unreported,
        /// Spans that were not created for this layer, since 256 others were around them.
        declined_too_deep,
        /// Times that a hook passed time to the nearest 64 ancestors only.
        ancestors_left_out,
        /// Panics of the callback given to [`Builder::on_kept`](crate::Builder::on_kept).
        on_kept_panics,
    }

    /// Profiles of kept spans and their delivery.
    profiles: ProfileStats as ProfileCounters {
        /// Profiles that the exporter accepted. A network exporter delivers them later.
        exported,
        /// Exported profiles that the receiver acknowledged.
        delivered,
        /// Exported profiles written to the fallback directory because the receiver was unavailable.
        stored_as_fallback,
        /// Profiles in the fallback directory that were due to be sent again, and count once more.
        resent_from_fallback,
        /// Exported profiles that the receiver refused permanently.
        dropped_refused,
        /// Exported profiles that could not be delivered within an hour: receivers accept nothing older.
        dropped_too_old,
        /// Exported profiles that were not delivered before the exporter ended.
        dropped_at_shutdown,
        /// Requests sent again after a timeout, or because the receiver asked for it.
        requests_retried,
        /// Profiles that could not be exported, also not by retries; the log states the cause.
        dropped_export_failed,
        /// Local roots whose fields a profile of the process lacks, because 4,096 others had closed since the collector ran.
        root_fields_left_out,
        /// Object files whose symbols were not read because they exceed [`Builder::memory`](crate::Builder::memory).
        symbols_over_limit,
    }

    /// Reports of kept spans and of the layer itself.
    reports: ReportStats as ReportCounters {
        /// Log events that were dropped because the subscriber had not taken 8,192 others.
        dropped_log_full,
        /// Kept spans that the callback was not called for, as it had not returned for 8,192 others.
        dropped_callback_full,
    }

    /// Samples, and why samples were dropped.
    samples: SampleStats as SampleCounters {
        /// Samples that fell in a profiled span, or anywhere while a profile of the process was made, and were unwound.
        taken,
        /// Other samples that fell in no profiled span. They are dropped before unwinding.
        outside_spans,
        /// Samples that found their ring full because the collector did not run in time.
        dropped_ring_full,
        /// Samples of timers that came to an alternate signal stack without room for the handler.
        dropped_signal_stack_full,
        /// Samples of a timer that came late, as the program blocked the signal. Only the last has a stack.
        dropped_late,
        /// Samples outside spans because the thread had too many span intervals.
        dropped_intervals_full,
        /// Samples outside spans because the collector is thousands of spans behind.
        dropped_span_events_full,
        /// Samples whose span was never registered with the collector.
        dropped_unknown_span,
        /// Samples without a stack because the memory budget was used up: one frame of the profile.
        dropped_memory,
        /// Samples and waits that others represent, since the profile had too many or became too large.
        downsampled,
        /// Samples without a stack because too many spans awaited their verdict: one frame of their root.
        dropped_pending_spans_full,
    }

    /// Spans that show what is typical; see [`Builder::references`](crate::Builder::references).
    references: ReferenceStats as ReferenceCounters {
        /// Spans that were chosen as references when they were created.
        chosen,
        /// Reference spans that were added to what is typical.
        added,
        /// Spans that chance had chosen and that became no references, because there would have been more than the limit.
        refused_limit,
        /// Reference spans that were dropped when they closed, because too many were waiting.
        dropped_busy,
        /// Reference spans that were dropped because reading their symbols failed.
        dropped_failed,
        /// Reference spans that were dropped because there are too many names and values of such spans.
        dropped_cohorts_full,
        /// Names, with their values, that were forgotten for others that are more frequent.
        cohorts_evicted,
        /// How often spans of a name and its values were found to have become slower.
        drifted,
        /// Stored hours that could not be read.
        history_unreadable,
        /// How often an hour could not be stored.
        history_unwritten,
    }
    /// Child spans that kept spans and references count: see [`Facts::children`](crate::Facts::children).
    children: ChildStats as ChildCounters {
        /// Child spans that were counted: in each span that counts them.
        counted,
        /// Child spans that were not, because the collector could not keep up.
        dropped_queue_full,
        /// Child spans that were not counted, because they were too deep inside other spans.
        dropped_too_deep,
        /// Child spans that were not counted, because of the limits of memory or spans.
        dropped_memory,
    }
    /// The continuous profile of the process; see [`Builder::continuous`](crate::Builder::continuous). Its samples are among
    /// those of [`SampleStats`].
    continuous: ContinuousStats as ContinuousCounters {
        /// Samples in it.
        taken,
        /// Profiles made.
        profiles,
        /// Profiles that were lost: refused, too old, left at the end, or made while the one before was not exported.
        dropped_export_failed,
    }

    /// Unwound stacks that are incomplete.
    stacks: StackStats as StackCounters {
        /// Stacks deeper than the copied bytes or the frame limit: their outer frames are missing.
        truncated,
        /// Stacks whose unwinding ended early for another reason.
        incomplete,
        /// Stacks whose outermost callers are on another one, as of a coroutine or a signal handler.
        on_other_stacks,
    }

    /// Waits (off-CPU intervals) of threads in profiled spans.
    waits: WaitStats as WaitCounters {
        /// Waits of threads in profiled spans that were captured.
        captured,
        /// Captured waits without a stack, because the system refuses to show it.
        without_stack,
        /// Waits that were not captured because captures may use 2 % of a core.
        dropped_over_budget,
        /// Times that no holder of a lock was sought: over 1 % of a core, or over 1,000 threads.
        holders_not_sought,
        /// Captured waits that were dropped because the memory budget was used up.
        dropped_memory,
        /// Times that it was not read for how long a thread had waited for a CPU.
        run_delays_unread,
        /// Context switch records that found their ring full. Off-CPU time is then the rest of wall time.
        switches_dropped_ring_full,
    }

    /// What futures in old spans await; see [`Profiled`](crate::Profiled).
    awaits: AwaitStats as AwaitCounters {
        /// Awaits and scheduling delays that became samples.
        captured,
        /// Stacks that were not copied, or taken back after 5 seconds, for lack of memory for pending futures.
        dropped_memory,
        /// Stacks that were not copied because they were larger than 64 KiB, or those of a coroutine.
        unreadable,
        /// Samples that were dropped because the collector had not read those before.
        dropped_queue_full,
        /// Samples without a stack because unwinding may use 2 % of a core.
        dropped_over_budget,
        /// Samples that were dropped because half of the memory budget was used up, or a span had too many.
        dropped_pending_full,
        /// Branches of a `select!` or `join!` that a sample does not show: more than 8, or 2 if memory is tight.
        dropped_branches,
    }

    /// What closed spans have allocated and freed, each call once, and samples of it; see
    /// [`ProfilingAllocator`](crate::ProfilingAllocator).
    allocations: AllocationStats as AllocationCounters {
        /// Bytes allocated.
        allocated_bytes,
        /// Allocations.
        allocations,
        /// Bytes freed.
        freed_bytes,
        /// Frees.
        frees,
        /// Samples of what old spans allocated.
        sampled,
        /// Samples whose blocks are tracked for the live heap until they are freed.
        tracked,
        /// Samples whose blocks are not tracked because some ten thousand are in use.
        dropped_not_tracked,
        /// Samples that were dropped because the collector was behind. The account has all.
        dropped_queue_full,
        /// Samples that were dropped because the overflow of the table of spans was changing.
        dropped_table_busy,
        /// Samples without a stack because the memory for waiting stacks was used up.
        dropped_memory,
        /// Samples without a stack because the thread was on a stack that is not its own: that of a coroutine.
        off_stack,
        /// Samples without a stack because unwinding may use 2 % of a core.
        dropped_over_budget,
        /// Samples that were dropped because half of the memory was used up, or a span had too many.
        dropped_pending_full,
    }

    /// Sampled threads, and why others are not sampled.
    threads: ThreadStats as ThreadCounters {
        /// Times that a thread was not attached at once: that may use 2 % of a core, for the process 10 %.
        attach_deferred,
        /// Times that a thread was attached, or attached again at another rate.
        attached,
        /// Threads that are sampled now.
        sampled,
        /// Threads that are sampled now by a timer and a signal.
        sampled_by_timer,
        /// Threads in old spans that could not be sampled at the last attempt, or because none can be.
        unsampled,
        /// Attempts to sample a thread that failed because perf events are refused.
        refused_perf,
        /// Attempts to use perf that failed because no memory may be locked for its ring.
        refused_locked_memory,
        /// Attempts to use a timer that failed: a limit of pending signals, or a call that is refused.
        refused_timers,
        /// Attempts to use a timer that failed because an alternate signal stack is too small.
        refused_signal_stack,
        /// Attempts to use a timer that were not made because a debugger was attached.
        refused_traced,
        /// Attempts to use perf that failed at the limit of open files.
        refused_open_files,
        /// Attempts to sample a thread that failed for another reason.
        refused_other,
        /// Times that a profile of the process could not list its threads, as without `/proc`.
        unlisted,
    }

    /// The sampler and the collector thread.
    sampling: SamplingStats as SamplingCounters {
        /// Times that the rate was reduced because of [`Builder::cpu_budget`](crate::Builder::cpu_budget).
        rate_reduced,
        /// Ring records that contradict themselves.
        records_malformed,
        /// Times that the kernel paused sampling because it used too much CPU.
        throttled,
        /// CPU time that reading and unwinding samples took, in nanoseconds.
        collector_cpu_ns,
    }

    /// Spans of the traces that all `KeptTraces` of the process hold.
    traces: TraceStats as TraceCounters {
        /// Spans that are held now.
        held,
        /// Spans that were passed on.
        passed,
        /// Spans of ordinary traces, which were dropped.
        dropped,
        /// Times that a span started when a trace that had gone on had no open span any more. It follows.
        late,
        /// Spans that were dropped because too many were held, or whose start was not seen.
        dropped_over_bound,
        /// Spans of traces that were not decided at the shutdown, and those that went on but not within its time.
        dropped_at_shutdown,
    }

    /// Limits of the rules.
    rules: RuleStats as RuleCounters {
        /// Callsites whose spans a rule would profile, and which are left out because [no other layer wants
        /// them](crate::guide::subscriber#what-it-enables). A log event names them.
        declined,
        /// Names of spans, by rule, whose percentile is not tracked because there are too many. The other conditions of
        /// their rule apply.
        percentiles_dropped,
        /// Spans that were compared with all of their name and rule, because there are too many routes for each to have a
        /// percentile of its own.
        percentiles_shared,
        /// Rules that were not applied to a callsite because they need more than 64 of its field values.
        skipped,
        /// How many times new rules were [refused](crate::Handle::set_rules), because there had been too many.
        refused,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each thread has counters of its own, and their sum is what was allocated.
    #[test]
    fn allocations_of_roots_are_counted_by_thread() {
        let counters = Counters::default();
        let more =
            Allocations { allocated_bytes: 1, allocations: 20, freed_bytes: 300, frees: 4_000 };
        let add = || {
            counters.add_allocations(more);
            own_stripe()
        };
        let own = add();
        while std::thread::scope(|scope| scope.spawn(add).join().unwrap()) == own {}
        let used = |part: &&CachePadded<[AtomicU64; 4]>| part[0].load(Ordering::Relaxed) > 0;
        assert!(counters.roots.0.iter().filter(used).count() > 1);
        let AllocationStats { allocated_bytes: times, allocations, freed_bytes, frees, .. } =
            counters.snapshot().allocations;
        assert!(times >= 2);
        assert_eq!([allocations, freed_bytes, frees], [20 * times, 300 * times, 4_000 * times]);
    }
}
