//! What was done, and what was lost and why.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $name:ident,)+) => {
        /// Numbers since the layer was made; [`Handle::stats`](crate::Handle::stats) takes them.
        ///
        /// Each way to lose something has a number of its own, so that nothing is lost silently.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Stats {
            $($(#[doc = $doc])+ pub $name: u64,)+
        }

        /// [`Stats`] that are counting.
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub(crate) $name: AtomicU64,)+
        }

        impl Counters {
            pub(crate) fn snapshot(&self) -> Stats {
                Stats { $($name: self.$name.load(Ordering::Relaxed),)+ }
            }
        }
    };
}

impl Stats {
    /// The share of threads with profiled spans that is sampled at present, from 0 to 1.
    pub fn share_sampled(&self) -> f64 {
        let all = self.threads_sampled + self.threads_unsampled;
        if all == 0 { 1.0 } else { self.threads_sampled as f64 / all as f64 }
    }
}

impl Counters {
    #[inline]
    pub(crate) fn add(counter: &AtomicU64, count: u64) {
        counter.fetch_add(count, Ordering::Relaxed);
    }
}

counters! {
    /// Spans that were kept, for whatever reason.
    spans_kept,
    /// Of these: no sample had fallen in them, so there is no profile, only the times.
    spans_kept_without_samples,
    /// Of these: no profile because the rule's rate limit was used up.
    spans_kept_over_rate_limit,
    /// Of these: no profile because too many were waiting to be exported.
    spans_kept_exporter_busy,
    /// Of these: no profile because the exporter was failing.
    spans_kept_exporter_fails,
    /// Of these: no profile because the memory budget was used up.
    spans_kept_no_memory,
    /// Of these: no profile because the system gave no random bytes for its id.
    spans_kept_without_id,
    /// Spans that would have been kept, but their trace is not exported; see
    /// [`Builder::only_sampled_traces`](crate::Builder::only_sampled_traces).
    spans_left_out_unsampled,
    /// Profiles that an exporter has taken.
    profiles_exported,
    /// Profiles that could not be exported, also after a while; the log says why.
    profiles_dropped_export_failed,

    /// Samples that fell in a profiled span and were unwound.
    samples_taken,
    /// Samples that fell in no profiled span. They cost their interrupt and nothing else.
    samples_outside_spans,
    /// Samples that found their ring full: the collector did not get a CPU in time.
    samples_dropped_ring_full,
    /// Samples for which a timer found its thread on a stack that is not its own: that of a coroutine
    /// or of another signal handler.
    samples_dropped_foreign_stack,
    /// Samples of a timer that came late, because the program had blocked its signal: for all of them but
    /// the last it is not known where the thread was.
    samples_dropped_late,
    /// Samples that are not known to belong to a span because the thread had too many stretches.
    /// They are among those outside spans too.
    samples_dropped_marks_full,
    /// Samples of a span that could not be made known to the collector: it is thousands of spans
    /// behind. They are among those outside spans too.
    samples_dropped_notices_full,
    /// Samples whose span the collector never heard of.
    samples_dropped_unknown_span,
    /// Samples whose stack was given up because the memory budget was used up. The profile shows
    /// them as one frame that says so.
    samples_dropped_memory,
    /// Samples that were thinned out because the profile had more than it may have. Those that
    /// are left stand for them.
    samples_thinned,
    /// Waits of threads in profiled spans whose stack was taken.
    waits_seen,
    /// Of these: the system does not let us see where the thread waited, only for how long.
    waits_without_stack,
    /// Waits that were not looked at because there were too many: looking takes 2 % of a core at most.
    waits_not_looked_at,
    /// Waits that were seen and given up because the memory budget was used up.
    waits_dropped_memory,
    /// Records in a ring that contradicted themselves.
    records_malformed,
    /// Times that the kernel paused sampling because it took too much of the CPU.
    sampling_throttled,
    /// Context switches that found their ring full. Off-CPU time is then the rest of wall time.
    switches_dropped_ring_full,

    /// Stacks that were deeper than the bytes that are copied of them, or than the most frames
    /// that are kept: the frames near the root are missing.
    stacks_truncated,
    /// Stacks whose unwinding ended early for another reason.
    stacks_incomplete,
    /// CPU time that went into reading and unwinding samples, in nanoseconds.
    draining_cpu_ns,

    /// Threads that are sampled at present.
    threads_sampled,
    /// Of these, those that are sampled by a timer and a signal.
    threads_sampled_by_timer,
    /// Threads with profiled spans that are not sampled at present; what follows says why.
    threads_unsampled,
    /// Times that a thread could not be sampled because perf is refused.
    threads_refused_perf,
    /// Times that a thread could not be sampled by perf because no memory may be locked for its ring. It
    /// may be sampled by a timer.
    threads_refused_locked_memory,
    /// Times that a thread could not be sampled because of the limit of pending signals, of which
    /// each timer takes one.
    threads_refused_timers,
    /// Times that a thread could not be sampled by perf because of the limit of open files. It may be
    /// sampled by a timer.
    threads_refused_open_files,
    /// Times that a thread could not be sampled for another reason.
    threads_refused_other,
}
