//! Makes `tracing` ask all layers again which callsites they want.

use tracing::Dispatch;
use tracing::subscriber::NoSubscriber;

use crate::sys;

/// Asks on a thread of its own, so that it can be called in a hook, and calls `then` on it.
pub(crate) fn refresh_interest(then: impl FnOnce() + Send + 'static) {
    let refresh = move || {
        sys::log_between_forks(|| {
            // As long as `tracing` knows of one subscriber, it asks the default of the calling thread instead, which need
            // not be that one: with none, it would switch off all callsites. A second one makes it ask all.
            drop(Dispatch::new(NoSubscriber::new()));
            tracing::callsite::rebuild_interest_cache();
        });
        then();
    };
    // Without memory for a thread, callsites that are wanted now stay as they are.
    _ = sys::spawn("profiling-rules", refresh);
}
