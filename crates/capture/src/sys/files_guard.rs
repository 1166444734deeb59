//! Values that own file descriptors of the layer.
#![allow(unsafe_code, reason = "drops a value only if its file descriptors are still its own")]

use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use super::platform::Files;

/// A value that may own file descriptors. It is never dropped if the program closed them: others may have their numbers.
#[derive(Debug)]
pub struct FilesGuard<T> {
    value: ManuallyDrop<T>,
    files: Arc<Files>,
}

impl<T> FilesGuard<T> {
    pub fn new(value: T, files: &Arc<Files>) -> Self {
        Self { value: ManuallyDrop::new(value), files: Arc::clone(files) }
    }
}

impl<T> Deref for FilesGuard<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for FilesGuard<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T> Drop for FilesGuard<T> {
    fn drop(&mut self) {
        if self.files.still_owned() {
            // SAFETY: the value is dropped here alone, and not used after it.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}
