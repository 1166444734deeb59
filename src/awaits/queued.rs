//! Closures that wait for a thread.

use tracing::Span;

use super::observed::begin_to_run;
use super::shared::activity;
use crate::span::{SpawnedAt, innermost_span};

/// A closure that runs `run` in `span`. How long it waited for a thread until then is a scheduling delay of the span, from
/// 10 ms on.
///
/// ```
/// use tracing::info_span;
/// use tracing_profiling::queued;
///
/// # fn resize() {}
/// # let runtime = tokio::runtime::Runtime::new().unwrap();
/// # let _entered = runtime.enter();
/// tokio::task::spawn_blocking(queued(info_span!("resize"), || resize()));
/// ```
///
/// Without the delay, `move || span.in_scope(run)` does the same.
pub fn queued<R>(span: Span, run: impl FnOnce() -> R) -> impl FnOnce() -> R {
    let handed_over = activity().0.then(|| SpawnedAt::now(innermost_span().map(|span| span.key)));
    move || {
        let _running = handed_over.filter(|_| activity().0).and_then(begin_to_run);
        span.in_scope(run)
    }
}
