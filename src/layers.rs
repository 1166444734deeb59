//! The running layers of this process.

use std::sync::{Arc, OnceLock, Weak};

/// What layers share with threads that know only a layer's number. A list without a lock can be used in an allocator,
/// and in the child of a fork. Its entries are never freed, as gates are.
#[derive(Debug)]
pub(crate) struct Layers<T: 'static> {
    first: OnceLock<&'static Entry<T>>,
}

#[derive(Debug)]
struct Entry<T: 'static> {
    number: u32,
    of_layer: Weak<T>,
    next: OnceLock<&'static Self>,
}

impl<T: Send + Sync> Layers<T> {
    pub(crate) const fn new() -> Self {
        Self { first: OnceLock::new() }
    }

    pub(crate) fn add(&self, number: u32, of_layer: &Arc<T>) {
        let of_layer = Arc::downgrade(of_layer);
        let entry: &Entry<T> =
            Box::leak(Box::new(Entry { number, of_layer, next: OnceLock::new() }));
        let end = || self.entries().last().map_or(&self.first, |last| &last.next);
        while end().set(entry).is_err() {}
    }

    /// Returns what the layer with this number shares, unless the layer has been dropped.
    pub(crate) fn get(&self, number: u32) -> Option<Arc<T>> {
        self.entries().find(|entry| entry.number == number)?.of_layer.upgrade()
    }

    /// Returns what the layers share that have not been dropped.
    pub(crate) fn all(&self) -> impl Iterator<Item = Arc<T>> {
        self.entries().filter_map(|entry| entry.of_layer.upgrade())
    }

    fn entries(&self) -> impl Iterator<Item = &'static Entry<T>> {
        std::iter::successors(self.first.get().copied(), |entry| entry.next.get().copied())
    }
}
