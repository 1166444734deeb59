//! Wakers that forward to the executor's, and report when they are cloned and woken.
//!
//! The executor's waker keeps its task alive, which owns the future, which owns this waker. So it holds a clone of the
//! former only while it is cloned itself.
#![allow(unsafe_code, reason = "the functions of wakers")]

use std::mem::ManuallyDrop;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, RawWaker, RawWakerVTable, Waker};

use parking_lot::Mutex;

use super::live_stack::{LiveStack, Registers, live_registers};

pub trait WakerObserver: Send + Sync + Sized + 'static {
    /// Made by [`waker_vtable`]. A static, since wakers are equal only if their vtables have the same address.
    fn vtable() -> &'static RawWakerVTable;

    /// The waker is cloned inside the poll, on the polling thread. The stack is `None` if it cannot be read. The clone
    /// `is_only` if there are no others. Returns the tag of the clone; `None` for that of the waker which is cloned.
    fn on_clone(&self, stack: Option<&LiveStack>, is_only: bool) -> Option<usize>;

    /// A clone with that tag is dropped inside the poll, on the polling thread.
    fn on_drop(&self, tag: usize);

    /// The waker with that tag is woken, on any thread. `stack` has the innermost part of that thread's stack.
    fn on_wake(&self, tag: usize, stack: impl FnOnce() -> Option<LiveStack>);

    /// The waker is woken inside the poll, on the polling thread. Arguments as of [`on_clone`](Self::on_clone).
    fn on_own_wake(&self, stack: Option<&LiveStack>, is_only: bool);
}

/// The waker of one future. It outlives the future if clones of it are held elsewhere, and then still forwards.
#[derive(Debug)]
#[repr(align(32))]
pub struct TaskWaker<T> {
    forward: Mutex<Forward>,
    /// The identity of the waker in `forward`, null without one. Only a poll stores another one.
    data: AtomicPtr<()>,
    vtable: AtomicPtr<RawWakerVTable>,
    /// During a poll: the executor's waker, the thread, and an address in the stack frame of the poll.
    polled_with: AtomicPtr<Waker>,
    thread: AtomicUsize,
    frame: AtomicU64,
    pub observer: T,
}

/// The bytes of the stack of what wakes a future.
const MOST_OF_WAKER: usize = 16 << 10;

/// Pointers to it have room for a tag.
pub const TAGS: usize = 32;

/// Where wakes go. Locked while the executor's waker is cloned for a wake. An executor that takes a lock of its own
/// there cannot hold it where it wakes or drops wakers: without this layer, they would be its own.
#[derive(Debug, Default)]
struct Forward {
    clones: usize,
    waker: Option<Waker>,
}

/// A number of the calling thread that no other living thread has, and not 0.
fn thread_number() -> usize {
    thread_local! {
        static HERE: u8 = const { 0 };
    }
    HERE.try_with(|here| ptr::from_ref(here).addr()).unwrap_or(0)
}

impl<T: WakerObserver> TaskWaker<T> {
    pub fn new(observer: T) -> Arc<Self> {
        Arc::new(Self {
            forward: Mutex::default(),
            data: AtomicPtr::default(),
            vtable: AtomicPtr::default(),
            polled_with: AtomicPtr::default(),
            thread: AtomicUsize::new(0),
            frame: AtomicU64::new(0),
            observer,
        })
    }

    /// Calls `poll` with a context whose waker is this one. Wakers of polls with equal tags are equal; the tag is taken
    /// modulo [`TAGS`]. There must be one poll at a time.
    pub fn poll<R>(
        self: &Arc<Self>,
        tag: usize,
        context: &Context<'_>,
        poll: impl FnOnce(&mut Context<'_>) -> R,
    ) -> R {
        /// Ends the poll, also if it panics.
        struct Polling<'a>(&'a AtomicPtr<Waker>, &'a AtomicUsize);
        impl Drop for Polling<'_> {
            fn drop(&mut self) {
                self.0.store(ptr::null_mut(), Ordering::Relaxed);
                self.1.store(0, Ordering::Relaxed);
            }
        }
        let here = 0_u8;
        self.forward_to(context.waker());
        let waker = ptr::from_ref(context.waker()).cast_mut();
        self.polled_with.store(waker, Ordering::Relaxed);
        self.thread.store(thread_number(), Ordering::Relaxed);
        self.frame.store((&raw const here).expose_provenance() as u64, Ordering::Relaxed);
        let _polling = Polling(&self.polled_with, &self.thread);
        let data = Arc::as_ptr(self).wrapping_byte_add(tag % TAGS).cast();
        // SAFETY: the functions of the vtable are those below. The waker is not dropped, and owns nothing; `self` keeps
        // its data alive.
        let waker = ManuallyDrop::new(unsafe { Waker::new(data, T::vtable()) });
        poll(&mut Context::from_waker(&waker))
    }

    /// If the calling thread is polling the future: its stack up to the frame of the poll, if it can be read.
    fn polling_stack(&self, registers: Option<Registers>) -> Option<Option<LiveStack>> {
        self.is_polled_here().then(|| {
            let frame = self.frame.load(Ordering::Relaxed);
            registers.and_then(|registers| LiveStack::up_to(registers, frame))
        })
    }

    fn is_polled_here(&self) -> bool {
        self.thread.load(Ordering::Relaxed) == thread_number()
    }

    fn report_wake(&self, registers: Option<Registers>, tag: usize) {
        if let Some(stack) = self.polling_stack(registers) {
            let is_only = self.forward.lock().clones == 0;
            self.observer.on_own_wake(stack.as_ref(), is_only);
        } else {
            let stack = || registers.and_then(|it| LiveStack::at_most(it, MOST_OF_WAKER));
            self.observer.on_wake(tag, stack);
        }
    }

    /// If clones are held elsewhere, they wake this task from now on.
    fn forward_to(&self, waker: &Waker) {
        let data = self.data.load(Ordering::Relaxed);
        let is_same = ptr::eq(data, waker.data())
            && ptr::eq(self.vtable.load(Ordering::Relaxed), waker.vtable());
        if !is_same && !self.vtable.load(Ordering::Relaxed).is_null() {
            self.replace(waker);
        }
    }

    #[cold]
    fn replace(&self, waker: &Waker) {
        let new = waker.clone();
        let mut forward = self.forward.lock();
        let old = if forward.waker.is_some() {
            self.note(Some(&new));
            forward.waker.replace(new)
        } else {
            Some(new)
        };
        drop(forward);
        // Dropping a waker can run any code.
        drop(old);
    }

    fn note(&self, waker: Option<&Waker>) {
        let data = waker.map_or(ptr::null(), Waker::data);
        let vtable = waker.map_or(ptr::null(), |waker| ptr::from_ref(waker.vtable()));
        self.data.store(data.cast_mut(), Ordering::Relaxed);
        self.vtable.store(vtable.cast_mut(), Ordering::Relaxed);
    }

    /// Returns how many there are then.
    fn add_clone(&self) -> usize {
        // Dropped after the lock if it is not used.
        let mut new;
        let mut forward = self.forward.lock();
        if forward.waker.is_none() {
            drop(forward);
            // SAFETY: without a clone, the only waker is that of the poll, which lives as long as it.
            new = unsafe { self.polled_with.load(Ordering::Relaxed).as_ref() }.cloned();
            forward = self.forward.lock();
            if forward.waker.is_none() {
                self.note(new.as_ref());
                forward.waker = new.take();
            }
        }
        forward.clones += 1;
        forward.clones
    }

    /// A clone is dropped. Returns the executor's waker if it was the last one, or if it `wakes`.
    fn remove_clone(&self, wakes: bool) -> Option<Waker> {
        let mut forward = self.forward.lock();
        forward.clones -= 1;
        if forward.clones == 0 {
            self.note(None);
            forward.waker.take()
        } else if wakes {
            forward.waker.clone()
        } else {
            None
        }
    }
}

fn tag_of(data: *const ()) -> usize {
    data.addr() & (TAGS - 1)
}

fn untagged<T>(data: *const ()) -> *const TaskWaker<T> {
    data.map_addr(|address| address & !(TAGS - 1)).cast()
}

/// The functions of the wakers that report to such an observer.
pub const fn waker_vtable<T: WakerObserver>() -> RawWakerVTable {
    RawWakerVTable::new(clone::<T>, wake::<T>, wake_by_ref::<T>, drop_waker::<T>)
}

/// # Safety
///
/// For all four: `data` must be that of a waker of [`TaskWaker::poll`] of the same type, or a clone of one. Only wakers
/// call them.
unsafe fn clone<T: WakerObserver>(data: *const ()) -> RawWaker {
    let registers = live_registers!();
    // SAFETY: a waker is alive as long as it can be cloned, and holds a reference or is that of a poll.
    let this = unsafe { &*untagged::<T>(data) };
    let clones = this.add_clone();
    let stack = this.polling_stack(registers);
    let tag = stack.and_then(|stack| this.observer.on_clone(stack.as_ref(), clones == 1));
    // SAFETY: the pointer is from `Arc::as_ptr`, and the waker that is cloned keeps it alive.
    unsafe { Arc::increment_strong_count(untagged::<T>(data)) };
    let tag = tag.unwrap_or(tag_of(data)) % TAGS;
    RawWaker::new(untagged::<T>(data).wrapping_byte_add(tag).cast(), T::vtable())
}

/// # Safety
///
/// As for [`clone`]; the waker must not be used any more.
unsafe fn wake<T: WakerObserver>(data: *const ()) {
    let registers = live_registers!();
    // SAFETY: takes over the reference of the waker, which is a clone: that of a poll is only lent.
    let this = unsafe { Arc::from_raw(untagged::<T>(data)) };
    this.report_wake(registers, tag_of(data));
    let waker = this.remove_clone(true);
    drop(this);
    if let Some(waker) = waker {
        waker.wake();
    }
}

/// # Safety
///
/// As for [`clone`].
unsafe fn wake_by_ref<T: WakerObserver>(data: *const ()) {
    let registers = live_registers!();
    // SAFETY: as in `clone`.
    let this = unsafe { &*untagged::<T>(data) };
    this.report_wake(registers, tag_of(data));
    let waker = this.forward.lock().waker.clone();
    if let Some(waker) = waker {
        return waker.wake();
    }
    // SAFETY: without a clone, this is the waker of the poll, during which the executor's waker is alive.
    let polled_with = unsafe { this.polled_with.load(Ordering::Relaxed).as_ref() };
    if let Some(waker) = polled_with {
        waker.wake_by_ref();
    }
}

/// # Safety
///
/// As for [`wake`].
unsafe fn drop_waker<T: WakerObserver>(data: *const ()) {
    // SAFETY: as in `wake`.
    let this = unsafe { Arc::from_raw(untagged::<T>(data)) };
    if this.is_polled_here() {
        this.observer.on_drop(tag_of(data));
    }
    let waker = this.remove_clone(false);
    drop(this);
    // Can run any code.
    drop(waker);
}

#[cfg(test)]
mod tests;
