//! The running layers of this process.

use std::sync::{Arc, OnceLock, Weak};

/// Values that are never freed: the first and those after it. A list without a lock can be used in an allocator, and in the
/// child of a fork.
#[derive(Debug)]
pub(crate) struct List<T: 'static>(OnceLock<&'static (T, Self)>);

impl<T> List<T> {
    pub(crate) const fn new() -> Self {
        Self(OnceLock::new())
    }

    pub(crate) fn push(&self, value: T) -> &'static T {
        let added: &'static (T, Self) = Box::leak(Box::new((value, Self::new())));
        let mut rest = self;
        while rest.0.set(added).is_err() {
            rest = rest.0.get().map_or(rest, |(_, rest)| rest);
        }
        &added.0
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &'static T> {
        let all = std::iter::successors(self.0.get().copied(), |(_, rest)| rest.0.get().copied());
        all.map(|(value, _)| value)
    }
}

/// What layers share with threads that know only a layer's number.
#[derive(Debug)]
pub(crate) struct Layers<T: 'static>(List<(u32, Weak<T>)>);

impl<T> Layers<T> {
    pub(crate) const fn new() -> Self {
        Self(List::new())
    }

    pub(crate) fn add(&self, number: u32, of_layer: &Arc<T>) {
        self.0.push((number, Arc::downgrade(of_layer)));
    }

    /// Returns what the layer with this number shares, unless the layer has been dropped.
    pub(crate) fn get(&self, number: u32) -> Option<Arc<T>> {
        self.0.iter().find(|(other, _)| *other == number)?.1.upgrade()
    }

    /// Returns what the layers share that have not been dropped.
    pub(crate) fn all(&self) -> impl Iterator<Item = Arc<T>> {
        self.0.iter().filter_map(|(_, of_layer)| of_layer.upgrade())
    }
}
