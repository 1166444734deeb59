//! A table of unique values.

use std::hash::Hash;
use std::marker::PhantomData;

use indexmap::IndexSet;

/// The index of a value in its table.
pub(crate) trait TableId: Copy {
    fn new(number: u32) -> Self;
    fn number(self) -> u32;
}

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
    values: IndexSet<T>,
    bytes: usize,
    handle: PhantomData<H>,
}

/// The memory of an entry besides the value: in the list and in the map, both of which may just have grown.
pub(super) const BYTES_BESIDE: usize = 64;

impl<H, T> Default for Table<H, T> {
    fn default() -> Self {
        Self { values: IndexSet::new(), bytes: 0, handle: PhantomData }
    }
}

impl<H: TableId, T: Hash + Eq> Table<H, T> {
    /// The index of a value, which is added if it is new. `bytes_elsewhere` is the memory that it points to.
    pub(crate) fn add(&mut self, value: T, bytes_elsewhere: usize) -> H {
        let (place, is_new) = self.values.insert_full(value);
        let bytes = size_of::<T>() + BYTES_BESIDE + bytes_elsewhere;
        self.bytes += if is_new { bytes } else { 0 };
        // More than four billion values do not fit into memory.
        H::new(u32::try_from(place).unwrap_or(u32::MAX))
    }

    pub(crate) fn get(&self, handle: H) -> Option<&T> {
        self.values.get_index(handle.number() as usize)
    }

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
