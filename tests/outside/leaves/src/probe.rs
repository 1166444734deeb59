//! A future whose waker records the stack when a leaf clones it inside of the future's own poll.

use std::future::Future;
use std::mem::ManuallyDrop;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, RawWaker, RawWakerVTable, Waker};
use std::thread::ThreadId;

use backtrace::Backtrace;

/// Whether a poll has the waker of the previous poll, so that `will_wake` lets a leaf keep its clone.
#[derive(Clone, Copy, PartialEq)]
pub enum Identity {
    Same,
    New,
}

/// A poll that returned `Pending`.
pub struct Pending {
    /// The first poll, or one after a wake-up; else the wrapper repeated the previous poll, like a spurious wake-up.
    pub is_woken: bool,
    /// One stack for each clone.
    pub stacks: Vec<Backtrace>,
}

#[derive(Clone)]
pub struct Probe {
    identity: Identity,
    polls: Arc<Mutex<Vec<Pending>>>,
}

impl Probe {
    pub fn new(identity: Identity) -> Self {
        Self { identity, polls: Arc::default() }
    }

    pub fn watch<T>(&self, future: impl Future<Output = T> + Send + 'static) -> Watched<T> {
        // The allocation makes the poll of the future a function of its own.
        Watched { future: Box::pin(future), probe: self.clone(), wake: None }
    }

    pub fn take(&self) -> Vec<Pending> {
        std::mem::take(&mut lock(&self.polls))
    }
}

pub struct Watched<T> {
    future: Pin<Box<dyn Future<Output = T> + Send>>,
    probe: Probe,
    wake: Option<Arc<Wake>>,
}

impl<T> Watched<T> {
    fn poll_once(&mut self, inner: &Waker, is_woken: bool) -> Poll<T> {
        let wake = match self.wake.take() {
            Some(wake) if self.probe.identity == Identity::Same => wake,
            _ => Arc::default(),
        };
        *lock(&wake.inner) = Some(inner.clone());
        *lock(&wake.polled_by) = Some(std::thread::current().id());
        let poll = self.future.as_mut().poll(&mut Context::from_waker(&waker(wake.clone())));
        *lock(&wake.polled_by) = None;
        if poll.is_pending() {
            let stacks = std::mem::take(&mut *lock(&wake.stacks));
            lock(&self.probe.polls).push(Pending { is_woken, stacks });
        }
        self.wake = Some(wake);
        poll
    }
}

impl<T> Future for Watched<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        match self.poll_once(context.waker(), true) {
            Poll::Pending => self.poll_once(context.waker(), false),
            ready => ready,
        }
    }
}

#[derive(Default)]
struct Wake {
    inner: Mutex<Option<Waker>>,
    /// Set during the future's poll.
    polled_by: Mutex<Option<ThreadId>>,
    stacks: Mutex<Vec<Backtrace>>,
}

impl Wake {
    fn on_clone(&self) {
        if *lock(&self.polled_by) == Some(std::thread::current().id()) {
            lock(&self.stacks).push(Backtrace::new_unresolved());
        }
    }

    fn wake(&self) {
        let inner = lock(&self.inner).clone();
        if let Some(inner) = inner {
            inner.wake();
        }
    }
}

fn waker(wake: Arc<Wake>) -> Waker {
    // SAFETY: the functions of the table keep the contract, since `Arc<Wake>` is `Send` and `Sync` and owns the data.
    unsafe { Waker::from_raw(raw(wake)) }
}

fn raw(wake: Arc<Wake>) -> RawWaker {
    RawWaker::new(Arc::into_raw(wake).cast(), &TABLE)
}

/// # Safety
/// `data` is from `raw`, and the caller owns it.
unsafe fn owned(data: *const ()) -> Arc<Wake> {
    // SAFETY: `raw` made it of such an `Arc`.
    unsafe { Arc::from_raw(data.cast()) }
}

/// # Safety
/// `data` is from `raw`, and lives for as long as the result.
unsafe fn borrowed(data: *const ()) -> ManuallyDrop<Arc<Wake>> {
    // SAFETY: it is not dropped here.
    ManuallyDrop::new(unsafe { owned(data) })
}

// SAFETY, for all four: a waker calls them with its own data, and with data that it owns in `wake` and `drop`.
static TABLE: RawWakerVTable = RawWakerVTable::new(
    |data| {
        let wake = unsafe { borrowed(data) };
        wake.on_clone();
        raw(Arc::clone(&wake))
    },
    |data| unsafe { owned(data) }.wake(),
    |data| unsafe { borrowed(data) }.wake(),
    |data| drop(unsafe { owned(data) }),
);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap()
}
