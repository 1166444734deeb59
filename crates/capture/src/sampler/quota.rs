//! How much of the process's limits a layer takes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What is taken of a limit.
#[derive(Debug, Default)]
pub(super) struct Quota(Arc<AtomicU64>);

/// A part of it, which is given back when this is dropped.
#[derive(Debug)]
pub(super) struct Share {
    of: Arc<AtomicU64>,
    count: u64,
}

impl Quota {
    /// Takes `count` more, unless that would be more than `most` in total.
    pub(super) fn take(&self, count: u64, most: u64) -> Option<Share> {
        let more = |taken: u64| taken.checked_add(count).filter(|taken| *taken <= most);
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()?;
        Some(Share { of: Arc::clone(&self.0), count })
    }

    pub(super) fn is_none(&self) -> bool {
        self.0.load(Ordering::Relaxed) == 0
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.of.fetch_sub(self.count, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_is_taken_than_the_limit_at_that_time_allows() {
        let taken = Quota::default();
        let six = taken.take(6, 10).unwrap();
        assert!(taken.take(5, 10).is_none());
        let four = taken.take(4, 10).unwrap();
        assert!(taken.take(1, 5).is_none(), "the limit was lowered");
        assert!(taken.take(u64::MAX, u64::MAX).is_none());
        drop(six);
        let one = taken.take(1, 5).unwrap();
        assert!(!taken.is_none());
        drop((four, one));
        assert!(taken.is_none());
    }
}
