//! A table of unique values.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash};
use std::marker::PhantomData;

/// The index of a value in its table.
pub(crate) trait TableId: Copy {
    fn new(number: u32) -> Self;
    fn number(self) -> u32;
}

/// Declares the type of an index.
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

/// Unique values, in the order in which they were added.
#[derive(Clone, Debug)]
pub(crate) struct Table<H, T> {
    values: Vec<T>,
    /// Indexes by hash; if another value has the same hash, by the next free number.
    places: HashMap<u64, u32>,
    bytes: usize,
    handle: PhantomData<H>,
}

/// The memory of an entry besides the value: in the list and in the map, both of which may just have grown.
const BYTES_BESIDE: usize = 64;

impl<H, T> Default for Table<H, T> {
    fn default() -> Self {
        Self { values: Vec::new(), places: HashMap::new(), bytes: 0, handle: PhantomData }
    }
}

impl<H: TableId, T: Hash + Eq> Table<H, T> {
    /// The memory of a value, without what it points to.
    pub(super) const BYTES_A_VALUE: usize = size_of::<T>() + BYTES_BESIDE;

    /// The index of a value, which is added if it is new. `bytes_elsewhere` is the memory that it points to.
    pub(crate) fn add(&mut self, value: T, bytes_elsewhere: usize) -> H {
        let mut hash = self.places.hasher().hash_one(&value);
        while let Some(place) = self.places.get(&hash) {
            if self.values.get(*place as usize) == Some(&value) {
                return H::new(*place);
            }
            hash = hash.wrapping_add(1);
        }
        self.insert(hash, value, bytes_elsewhere)
    }

    /// The index of a value that is added even if it is not new.
    pub(crate) fn add_distinct(&mut self, value: T, bytes_elsewhere: usize) -> H {
        let mut hash = self.places.hasher().hash_one(&value);
        while self.places.contains_key(&hash) {
            hash = hash.wrapping_add(1);
        }
        self.insert(hash, value, bytes_elsewhere)
    }

    fn insert(&mut self, hash: u64, value: T, bytes_elsewhere: usize) -> H {
        // More than four billion values do not fit into memory.
        let place = u32::try_from(self.values.len()).unwrap_or(u32::MAX);
        self.bytes += Self::BYTES_A_VALUE + bytes_elsewhere;
        self.values.push(value);
        self.places.insert(hash, place);
        H::new(place)
    }

    pub(crate) fn get(&self, handle: H) -> Option<&T> {
        self.values.get(handle.number() as usize)
    }

    /// The approximate memory use.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn iter(&self) -> impl ExactSizeIterator<Item = (H, &T)> {
        self.values.iter().enumerate().map(|(place, value)| (H::new(place as u32), value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type TestId = crate::profile::FunctionId;

    #[test]
    fn equal_values_share_an_entry() {
        let mut table = Table::<TestId, &str>::default();
        let a = table.add("a", 0);
        let b = table.add("b", 0);
        assert_eq!(table.add("a", 0), a);
        assert_ne!(a, b);
        assert_eq!(table.get(b), Some(&"b"));
        assert_eq!(table.iter().map(|(_, value)| *value).collect::<Vec<_>>(), ["a", "b"]);
    }

    #[test]
    fn equal_values_can_have_entries_of_their_own() {
        let mut table = Table::<TestId, &str>::default();
        let ids = [0; 3].map(|_| table.add_distinct("a", 0));
        assert_eq!(table.iter().map(|(id, _)| id).collect::<Vec<_>>(), ids);
        assert_eq!(table.add("a", 0), ids[0]);
    }

    #[test]
    fn values_with_the_same_hash_are_distinct() {
        #[derive(Debug, PartialEq, Eq)]
        struct Alike(u8);
        impl Hash for Alike {
            fn hash<S: std::hash::Hasher>(&self, _: &mut S) {}
        }
        let mut table = Table::<TestId, Alike>::default();
        let places: Vec<_> = (0..5).map(|number| table.add(Alike(number), 0)).collect();
        for (number, place) in (0..).zip(&places) {
            assert_eq!(table.add(Alike(number), 0), *place);
            assert_eq!(table.get(*place), Some(&Alike(number)));
        }
    }
}
