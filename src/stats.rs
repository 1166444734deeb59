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

        impl Stats {
            /// Each number with the name of its field, in the order in which they are declared.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
                [$((stringify!($name), self.$name),)+].into_iter()
            }
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
    /// Of the on-CPU time of kept spans the share for which their threads were sampled, from 0 to 1. What is missing
    /// is their beginning, and threads that could not be sampled.
    pub fn share_covered(&self) -> f64 {
        match self.kept_on_cpu_ns {
            0 => 1.0,
            all_ns => self.kept_sampled_ns as f64 / all_ns as f64,
        }
    }
}

impl Counters {
    /// Profiles that were promised and are nowhere.
    pub(crate) fn profiles_lost(&self) -> u64 {
        let lost = [
            &self.profiles_dropped_export_failed,
            &self.profiles_dropped_refused,
            &self.profiles_dropped_too_old,
            &self.profiles_dropped_at_shutdown,
        ];
        lost.map(|counter| counter.load(Ordering::Relaxed)).iter().sum()
    }

    #[inline]
    pub(crate) fn add(counter: &AtomicU64, count: u64) {
        counter.fetch_add(count, Ordering::Relaxed);
    }
}

counters! {
    /// Spans that were made and that a rule matches.
    spans_seen,
    /// Spans that were kept, for whatever reason. One that was kept while it hung, and again when it
    /// closed, counts twice.
    spans_kept,
    /// Spans that were kept because they took too long. (One that was kept for several reasons counts for
    /// each of them; [`kept_for`](Self::kept_for) asks by reason.)
    spans_kept_for_latency,
    /// Spans that were kept because they were left for the last time too late.
    spans_kept_for_last_exit,
    /// Spans that were kept because they failed.
    spans_kept_for_error,
    /// Spans that were kept because they ran for too long.
    spans_kept_for_on_cpu,
    /// Spans that were kept because they were blocked or preempted for too long.
    spans_kept_for_off_cpu,
    /// Spans that were kept because they were not entered for too long.
    spans_kept_for_idle,
    /// Spans that were kept because nearly all of their name are faster.
    spans_kept_for_percentile,
    /// Spans that were kept because their rule keeps all.
    spans_kept_for_always,
    /// Spans that were kept as one of many.
    spans_kept_for_one_in,
    /// Spans that were kept while they hung.
    spans_kept_for_hung,
    /// Spans that were kept while they were open for too long.
    spans_kept_for_open,
    /// Spans that were kept because the program asked for it.
    spans_kept_for_forced,
    /// On-CPU time of these when they closed, in nanoseconds; that of a kept span inside another one counts for both.
    kept_on_cpu_ns,
    /// Of that the time for which their threads were surely sampled, in nanoseconds.
    kept_sampled_ns,
    /// Of these: no sample had fallen in them, so there is no profile, only the times.
    spans_kept_without_samples,
    /// Of these: no profile because the rule's rate limit was used up.
    spans_kept_over_rate_limit,
    /// Of these: no profile because too many were waiting to be exported.
    spans_kept_exporter_busy,
    /// Of these: neither named nor with a profile, because 1,024 spans inside the same local root were kept
    /// already.
    spans_kept_tree_full,
    /// Of these: no profile because the exporter was failing.
    spans_kept_exporter_fails,
    /// Of these: no profile because the memory budget was used up.
    spans_kept_no_memory,
    /// Of these: no profile because the system gave no random bytes for its id.
    spans_kept_without_id,
    /// Spans that would have been kept, but their trace is not exported; see
    /// [`Builder::only_sampled_traces`](crate::Builder::only_sampled_traces).
    spans_left_out_unsampled,
    /// Profiles that an exporter has taken. One that delivers later, as `OtlpExporter` does, says in the
    /// numbers that follow what became of them; what is left of these waits to be delivered.
    profiles_exported,
    /// Of these: the receiver has acknowledged them.
    profiles_delivered,
    /// Of these: they were written to the fallback directory, because the receiver was away, or did not
    /// want them.
    profiles_stored_meanwhile,
    /// Of those in the fallback directory: they were to be sent after all, and are a second time among the
    /// delivered, the refused, or those that are too old.
    profiles_sent_after_all,
    /// Of these: the receiver has refused them for good.
    profiles_dropped_refused,
    /// Of these: they could not be delivered for so long that no receiver would take them any more.
    profiles_dropped_too_old,
    /// Of these: they could not be delivered before the exporter had to end.
    profiles_dropped_at_shutdown,
    /// Requests that were sent once more, because the receiver did not answer or asked for it.
    requests_repeated,
    /// Profiles that could not be exported, also after a while; the log says why.
    profiles_dropped_export_failed,
    /// Times that what was given to [`Builder::on_kept`](crate::Builder::on_kept) panicked.
    on_kept_panicked,

    /// Files of code of which no lines, or no names at all, were read, because their symbols are larger than
    /// may be held: see [`Builder::symbol_bytes`](crate::Builder::symbol_bytes).
    symbols_over_limit,

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
    /// Samples and waits that were thinned out because the profile had more than it may have, or would have
    /// taken more memory ([`Builder::export_bytes`](crate::Builder::export_bytes)). Those that
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
    /// Times that the rate was lowered because reading samples took more than its share of a core; see
    /// [`Builder::cpu_budget`](crate::Builder::cpu_budget).
    rate_lowered,
    /// Times that a thread was found in an old span, as it was not before, and not sampled because the machine had too
    /// much to do; see
    /// [`Builder::shed_above_cpu`](crate::Builder::shed_above_cpu).
    threads_shed,
    /// Times that a thread in an old span was not sampled at once because many had just begun to be: to begin takes 2 % of
    /// a core at most, after a first 50 ms.
    threads_put_off,
    /// Samples whose stack was given up because too many spans waited for their verdict. The profile of
    /// their root shows them as one frame that says so.
    samples_dropped_spans_full,
    /// Callsites with a rule for a percentile for which none is kept, because there are too many: the
    /// rule's other conditions keep their spans.
    percentiles_not_kept,
    /// Rules that are not looked at for spans of a callsite, because more than 64 values of its fields are
    /// asked for.
    rules_left_out,
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

    /// Times that a thread began to be sampled, or went on at another rate.
    threads_armed,
    /// Threads that are sampled at present.
    threads_sampled,
    /// Of these, those that are sampled by a timer and a signal.
    threads_sampled_by_timer,
    /// Threads in old spans that could not be sampled when that was last tried, or no thread at all can be; what follows
    /// says why.
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
