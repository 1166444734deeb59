//! A reference that is set once, without a lock.
#![allow(
    unsafe_code,
    reason = "a `OnceLock` can wait, and other atomic cells lose the provenance of a reference"
)]

use std::marker::PhantomData;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// A reference that is set once. No method waits.
#[derive(Debug)]
pub(crate) struct OnceRef<T: 'static> {
    /// Null or made from a reference.
    pointer: AtomicPtr<T>,
    is_shared: PhantomData<&'static T>,
}

impl<T> OnceRef<T> {
    pub(crate) const fn new() -> Self {
        Self { pointer: AtomicPtr::new(ptr::null_mut()), is_shared: PhantomData }
    }

    pub(crate) fn get(&self) -> Option<&'static T> {
        // SAFETY: null or made from a `&'static T`, and never written through. Acquire pairs with the release below.
        unsafe { self.pointer.load(Ordering::Acquire).as_ref() }
    }

    /// The reference that is set, which is this one if there was none.
    pub(crate) fn get_or_set(&self, value: &'static T) -> &'static T {
        let new = ptr::from_ref(value).cast_mut();
        let (release, acquire) = (Ordering::Release, Ordering::Acquire);
        match self.pointer.compare_exchange(ptr::null_mut(), new, release, acquire) {
            Ok(_) => value,
            // SAFETY: not null, so made from a `&'static T`, and never written through.
            Err(known) => unsafe { known.as_ref() }.unwrap_or(value),
        }
    }
}
