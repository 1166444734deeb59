//! What samples are attributed to.

use std::num::NonZeroU64;

/// The program's own number of what a thread does, for instance of a span. Samples have that of their moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tag(NonZeroU64);

impl Tag {
    /// The lowest.
    pub const MIN: Self = Self(NonZeroU64::MIN);

    /// `None` for 0.
    pub const fn new(number: u64) -> Option<Self> {
        match NonZeroU64::new(number) {
            Some(number) => Some(Self(number)),
            None => None,
        }
    }

    /// The number.
    pub const fn get(self) -> u64 {
        self.0.get()
    }
}
