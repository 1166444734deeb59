//! Counters of the threads that are sampled, and of those that cannot be.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// Counters of threads, shared by all clones.
pub type ThreadCounters = Arc<ThreadCounts>;

/// One counter for each cause. `attached` and `attach_deferred` count times, `sampled` and `unsampled` threads.
#[derive(Debug, Default)]
#[allow(missing_docs, reason = "`ThreadStats` of `tracing-profiling` has them")]
pub struct ThreadCounts {
    pub attach_deferred: AtomicU64,
    pub attached: AtomicU64,
    pub sampled: AtomicU64,
    pub sampled_by_timer: AtomicU64,
    pub unsampled: AtomicU64,
    pub refused_perf: AtomicU64,
    pub refused_locked_memory: AtomicU64,
    pub refused_timers: AtomicU64,
    pub refused_signal_stack: AtomicU64,
    pub refused_traced: AtomicU64,
    pub refused_open_files: AtomicU64,
    pub refused_other: AtomicU64,
    pub unlisted: AtomicU64,
}
