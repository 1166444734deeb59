//! State of which each thread uses a part of its own, so that threads do not write to the same line of memory.

use std::array;
use std::cell::Cell;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The number of parts. With more threads than that, some share one.
pub const STRIPES: usize = 64;

static NEXT: AtomicUsize = AtomicUsize::new(0);

pub(super) fn stripes_in_use() -> usize {
    NEXT.load(Ordering::Relaxed).min(STRIPES)
}

/// The number of the calling thread's part. Without a destructor, it can be used as long as the thread allocates.
#[inline]
pub fn own_stripe() -> usize {
    thread_local! {
        static OWN: Cell<usize> = const { Cell::new(usize::MAX) };
    }
    match OWN.get() {
        usize::MAX => {
            // In turn, so that threads which run at the same time rarely share one.
            let own = NEXT.fetch_add(1, Ordering::Relaxed) % STRIPES;
            OWN.set(own);
            own
        }
        own => own,
    }
}

/// A shared value that many things keep alive which come and go: they are counted where their thread is, not in one word.
#[derive(Debug)]
pub struct Striped<T>([Arc<Stripe<T>>; STRIPES]);

/// What keeps the value alive, of one part. The counts before it are in lines of their own, too.
#[derive(Debug)]
#[repr(align(128))]
pub struct Stripe<T> {
    value: Arc<T>,
    pub(super) number: usize,
}

impl<T> Striped<T> {
    pub fn new(value: T) -> Self {
        let value = Arc::new(value);
        Self(array::from_fn(|number| Arc::new(Stripe { value: Arc::clone(&value), number })))
    }

    #[inline]
    pub fn own(&self) -> &Arc<Stripe<T>> {
        let [first, ..] = &self.0;
        self.0.get(own_stripe()).unwrap_or(first)
    }
}

impl<T> Deref for Striped<T> {
    type Target = T;

    fn deref(&self) -> &T {
        let [first, ..] = &self.0;
        first
    }
}

impl<T> Deref for Stripe<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What threads count is in different pairs of lines, and the value lives until the last of it is gone.
    #[test]
    fn references_of_threads_are_counted_apart() {
        let striped = Striped::new(7);
        let whole = Arc::downgrade(&striped.own().value);
        let users = whole.strong_count();
        let hold = || {
            let hold = || (own_stripe(), Arc::clone(striped.own()));
            std::thread::scope(|scope| scope.spawn(hold).join().unwrap())
        };
        let (stripe, first) = hold();
        // Threads of other tests take numbers, too.
        let other =
            std::iter::repeat_with(hold).take(2 * STRIPES).find(|(other, _)| *other != stripe);
        let held = [first, other.unwrap().1];
        let counts = held.iter().map(|held| (Arc::as_ptr(held).addr() - 16) / 128);
        let mut counts: Vec<_> = counts.collect();
        counts.dedup();
        assert_eq!((counts.len(), held.len()), (2, 2));
        assert_eq!(whole.strong_count(), users, "the common count does not change");
        drop(striped);
        assert_eq!((**held[0], whole.strong_count()), (7, 2));
        drop(held);
        assert!(whole.upgrade().is_none());
    }

    #[test]
    fn a_thread_keeps_its_number() {
        let own = own_stripe();
        assert!(own < STRIPES);
        assert_eq!(own_stripe(), own);
    }
}
