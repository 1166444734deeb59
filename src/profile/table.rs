//! A table in which each value stands once.

use std::borrow::Borrow;
use std::collections::HashMap;
use std::fmt::Debug;
use std::hash::Hash;
use std::marker::PhantomData;
use std::sync::Arc;

/// The place of a value in its table.
pub(crate) trait TableId: Copy {
    fn new(number: u32) -> Self;
    fn number(self) -> u32;
}

/// Declares a handle.
macro_rules! handle {
    ($(#[doc = $doc:literal])+ $name:ident) => {
        $(#[doc = $doc])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(u32);

        impl $crate::profile::table::TableId for $name {
            fn new(number: u32) -> Self {
                Self(number)
            }

            fn number(self) -> u32 {
                self.0
            }
        }
    };
}
pub(crate) use handle;

/// Values in the order in which they came, each once.
pub(crate) struct Table<H, T: ?Sized> {
    values: Vec<Arc<T>>,
    places: HashMap<Arc<T>, u32>,
    bytes: usize,
    handle: PhantomData<H>,
}

/// What a value takes beside itself: two counts, and its places in the list and in the map, both of which may
/// have grown just now.
const BYTES_BESIDE: usize = 96;

impl<H, T: ?Sized> Default for Table<H, T> {
    fn default() -> Self {
        Self { values: Vec::new(), places: HashMap::new(), bytes: 0, handle: PhantomData }
    }
}

// Not derived: that would ask for `T: Clone`.
impl<H, T: ?Sized> Clone for Table<H, T> {
    fn clone(&self) -> Self {
        let Self { values, places, bytes, handle } = self;
        Self { values: values.clone(), places: places.clone(), bytes: *bytes, handle: *handle }
    }
}

impl<H, T: Debug + ?Sized> Debug for Table<H, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(&self.values).finish()
    }
}

impl<H: TableId, T: Hash + Eq + ?Sized> Table<H, T> {
    /// The place of a value, which is added if it is new.
    pub(crate) fn add<V>(&mut self, value: V) -> H
    where
        V: Into<Arc<T>> + Borrow<T>,
    {
        if let Some(place) = self.places.get(value.borrow()) {
            return H::new(*place);
        }
        let value = value.into();
        // More than four milliards of values do not fit in memory.
        let place = u32::try_from(self.values.len()).unwrap_or(u32::MAX);
        self.bytes += size_of_val(&*value) + BYTES_BESIDE;
        self.values.push(Arc::clone(&value));
        self.places.insert(value, place);
        H::new(place)
    }

    pub(crate) fn get(&self, handle: H) -> Option<&T> {
        self.values.get(handle.number() as usize).map(AsRef::as_ref)
    }

    pub(crate) fn len(&self) -> usize {
        self.values.len()
    }

    /// What it takes, roughly, without what its values point to.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn iter(&self) -> impl ExactSizeIterator<Item = (H, &T)> {
        self.values.iter().enumerate().map(|(place, value)| (H::new(place as u32), &**value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type TestId = crate::profile::StringId;

    #[test]
    fn a_value_stands_once() {
        let mut table = Table::<TestId, str>::default();
        let a = table.add("a");
        let b = table.add("b");
        assert_eq!(table.add("a"), a);
        assert_ne!(a, b);
        assert_eq!(table.get(b), Some("b"));
        assert_eq!(table.iter().map(|(_, value)| value).collect::<Vec<_>>(), ["a", "b"]);
    }
}
