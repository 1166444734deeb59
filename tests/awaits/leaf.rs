//! Leaf futures and executors of the tests' own.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};

/// An event that has a place for one waker, which is kept if it will wake, as in most leaf futures.
#[derive(Clone, Default)]
pub(crate) struct Event(Arc<Inner>);

#[derive(Default)]
struct Inner {
    has_happened: AtomicBool,
    waker: Mutex<Option<Waker>>,
    clones: AtomicUsize,
}

impl Event {
    pub(crate) fn wait(&self) -> Wait<'_> {
        Wait(self)
    }

    pub(crate) fn happen(&self) {
        self.0.has_happened.store(true, Ordering::SeqCst);
        if let Some(waker) = self.waker() {
            waker.wake();
        }
    }

    /// Takes the waker out.
    pub(crate) fn waker(&self) -> Option<Waker> {
        self.0.waker.lock().unwrap().take()
    }

    /// How often a waker was cloned.
    pub(crate) fn clones(&self) -> usize {
        self.0.clones.load(Ordering::SeqCst)
    }
}

pub(crate) struct Wait<'a>(&'a Event);

impl Future for Wait<'_> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let Event(inner) = self.0;
        let mut held = inner.waker.lock().unwrap();
        if inner.has_happened.swap(false, Ordering::SeqCst) {
            return Poll::Ready(());
        }
        if !held.as_ref().is_some_and(|held| held.will_wake(context.waker())) {
            inner.clones.fetch_add(1, Ordering::SeqCst);
            *held = Some(context.waker().clone());
        }
        Poll::Pending
    }
}

/// Wakes itself without a clone, as the `yield_now` of `futures-lite` does.
pub(crate) fn yield_now() -> impl Future<Output = ()> {
    let mut has_yielded = false;
    std::future::poll_fn(move |context| {
        if std::mem::replace(&mut has_yielded, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
}

/// Polls once, and drops the future if it is pending.
pub(crate) async fn poll_once<T>(future: impl Future<Output = T>) -> Option<T> {
    let mut future = pin!(future);
    std::future::poll_fn(|context| {
        Poll::Ready(match future.as_mut().poll(context) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        })
    })
    .await
}

/// The waker of a task, which counts wakes.
#[derive(Default)]
pub(crate) struct Task(AtomicUsize);

impl Task {
    pub(crate) fn wakes(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }

    pub(crate) fn poll<F: Future + ?Sized>(
        self: &Arc<Self>,
        future: Pin<&mut F>,
    ) -> Poll<F::Output> {
        future.poll(&mut Context::from_waker(&Waker::from(Arc::clone(self))))
    }
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}
