//! The wrapper of futures and streams, and that of closures that wait for a thread.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures_core::Stream;
use pin_project_lite::pin_project;
use tracing::Span;

use super::observed::{Observed, begin_to_run, hand_over};
use super::shared::activity;

/// Makes futures and streams show what they await.
///
/// ```
/// use tracing_profiling::ProfiledExt;
///
/// # async fn handle() {}
/// # fn main() {
/// # let runtime = tokio::runtime::Runtime::new().unwrap();
/// # let _entered = runtime.enter();
/// tokio::spawn(handle().profiled());
/// # }
/// ```
///
/// ```compile_fail
/// use tracing_profiling::ProfiledExt;
///
/// 5.profiled();
/// ```
pub trait ProfiledExt: Sized {
    /// Wraps the future, so that the profiles of kept spans inside it show where it awaits; see [`Profiled`].
    fn profiled(self) -> Profiled<Self>
    where
        Self: Future,
    {
        Profiled { inner: self, observed: Observed::new() }
    }

    /// Wraps the stream, so that the profiles of kept spans inside it show where it awaits; see [`Profiled`].
    fn profiled_stream(self) -> Profiled<Self>
    where
        Self: Stream,
    {
        Profiled { inner: self, observed: Observed::new() }
    }
}

impl<T> ProfiledExt for T {}

pin_project! {
    /// A future or stream whose idle time is explained.
    ///
    /// While it is pending, it knows the stack of the leaf future that it waits for. A span that is kept, and that was
    /// entered inside of it or around it when that leaf was polled, gets that stack in its profile, with how long the
    /// leaf was awaited, and how long the future was not polled after it had been woken.
    ///
    /// The time from the wrapping to the first poll is a scheduling delay, too, from 10 ms on: of spans that are first
    /// entered in or around that poll, from when they were opened. So wrap where you spawn. It does not count if the poll
    /// is in the span in which the future was wrapped, or in another wrapper: then the same task did other things before.
    ///
    /// One wrapper around a task is enough for all futures and spans in it. A future that is polled with a waker of its
    /// own (in `FuturesUnordered`, `join_all` and similar) needs its own wrapper, otherwise the stack ends there.
    ///
    /// A poll that is not observed, because no layer is running or because the future was in no profiled span, costs a
    /// load and a branch.
    #[derive(Debug)]
    #[must_use = "futures do nothing unless they are awaited"]
    pub struct Profiled<T> {
        #[pin]
        inner: T,
        observed: Observed,
    }

    impl<T> PinnedDrop for Profiled<T> {
        fn drop(this: Pin<&mut Self>) {
            // Before the future and its spans are dropped.
            this.project().observed.begin_drop();
        }
    }
}

impl<T: Future> Future for Profiled<T> {
    type Output = T::Output;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T::Output> {
        let this = self.project();
        this.observed.poll(context, |context| this.inner.poll(context))
    }
}

impl<T: Stream> Stream for Profiled<T> {
    type Item = T::Item;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<T::Item>> {
        let this = self.project();
        this.observed.poll(context, |context| this.inner.poll_next(context))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.inner.size_hint()
    }
}

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
    let handed_over = hand_over();
    move || {
        let _running = handed_over.filter(|_| activity().0).and_then(begin_to_run);
        span.in_scope(run)
    }
}
