//! Sums of what the system counts for threads.

use std::array;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::facts::Usage;

/// Sums of [`Usage`] over threads.
#[derive(Debug, Default)]
pub(crate) struct UsageSums([AtomicU64; Usage::COUNTS]);

impl UsageSums {
    pub(crate) fn add(&self, more: &Usage) {
        for (sum, more) in self.0.iter().zip(more.counts()) {
            if more != 0 {
                sum.fetch_add(more, Ordering::Relaxed);
            }
        }
    }

    pub(crate) fn get(&self) -> Usage {
        let mut sums = self.0.iter();
        let next = |_| sums.next().map_or(0, |sum| sum.load(Ordering::Relaxed));
        Usage::from_counts(array::from_fn(next))
    }

    pub(crate) fn clear(&self) {
        self.0.iter().for_each(|sum| sum.store(0, Ordering::Relaxed));
    }
}
