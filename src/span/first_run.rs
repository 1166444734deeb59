//! When futures and closures that were handed over to an executor run for the first time.

use std::cell::Cell;
use std::time::{Duration, Instant};

use super::SpanKey;

/// Shorter delays are not noted.
const LEAST: Duration = Duration::from_millis(10);

/// When something was made that runs later, and the span that its thread was in then.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SpawnedAt {
    at: Instant,
    within: Option<SpanKey>,
}

/// How long it had waited when it began to run.
#[derive(Clone, Copy, Debug)]
pub(super) struct FirstPoll {
    pub(super) waited: Duration,
    pub(super) began: Instant,
}

thread_local! {
    static RUN: Cell<Option<FirstPoll>> = const { Cell::new(None) };
}

/// While it lives, what was handed over runs for the first time on the calling thread.
#[derive(Debug)]
pub(crate) struct PollingFirst {
    before: Option<FirstPoll>,
}

impl SpawnedAt {
    pub(crate) fn now(within: Option<SpanKey>) -> Self {
        Self { at: Instant::now(), within }
    }

    /// The future or closure begins to run. `None` if it did not wait for long, or if this thread is still or again in
    /// the span in which it was made: then that one runs it itself, and did other things before.
    pub(crate) fn begin(self, is_in_span: impl FnOnce(SpanKey) -> bool) -> Option<PollingFirst> {
        let began = Instant::now();
        let waited = began.saturating_duration_since(self.at);
        if waited < LEAST || self.within.is_some_and(is_in_span) {
            return None;
        }
        Some(PollingFirst { before: RUN.replace(Some(FirstPoll { waited, began })) })
    }
}

impl PollingFirst {
    /// What runs now on the calling thread.
    pub(super) fn here() -> Option<FirstPoll> {
        RUN.get()
    }
}

impl Drop for PollingFirst {
    fn drop(&mut self) {
        RUN.set(self.before);
    }
}
