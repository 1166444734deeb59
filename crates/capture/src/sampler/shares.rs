//! How much of the process's limits a layer takes.

use std::sync::atomic::{AtomicU64, Ordering};

/// What is taken of a limit.
#[derive(Debug, Default)]
pub(super) struct Taken(AtomicU64);

impl Taken {
    /// Takes `count` more, unless that would be more than `most` in total. Returns whether it did.
    pub(super) fn take(&self, count: u64, most: u64) -> bool {
        let more = |taken: u64| taken.checked_add(count).filter(|taken| *taken <= most);
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    pub(super) fn is_none(&self) -> bool {
        self.0.load(Ordering::Relaxed) == 0
    }

    pub(super) fn give(&self, count: u64) {
        self.0.fetch_sub(count, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_is_taken_than_the_limit_at_that_time_allows() {
        let taken = Taken::default();
        assert!(taken.take(6, 10));
        assert!(!taken.take(5, 10));
        assert!(taken.take(4, 10));
        assert!(!taken.take(1, 5), "the limit was lowered");
        assert!(!taken.take(u64::MAX, u64::MAX));
        taken.give(6);
        assert!(taken.take(1, 5));
        assert!(!taken.is_none());
        taken.give(5);
        assert!(taken.is_none());
    }
}
