//! Room for the stacks of futures while most of the memory for them is in use, as with thousands of idle connections.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::sys::BlockPool;

/// With more than this part of the memory in use, copies are small.
const TIGHT_PERCENT: u64 = 50;
/// With more than this, stacks are taken back.
const FULL_PERCENT: u64 = 75;
/// What a small copy has: the leaf, and in most cases the function that awaits it.
const SMALL_BYTES: usize = 2 << 10;
/// Futures that have been pending for longer lose their stacks, at most once in the other time.
pub(super) const LONG: Duration = Duration::from_secs(5);
pub(super) const PASS_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub(super) struct StackRoom {
    is_tight: AtomicBool,
    /// A stack was not copied since the last pass.
    is_wanted: AtomicBool,
    /// When that was, in ticks.
    passed_at: AtomicU64,
}

impl StackRoom {
    pub(super) fn is_tight(&self) -> bool {
        self.is_tight.load(Ordering::Relaxed)
    }

    /// How much of a stack may be copied.
    pub(super) fn most_bytes(&self) -> usize {
        if self.is_tight() { SMALL_BYTES } else { usize::MAX }
    }

    /// A stack was not copied. Returns whether that is new since the last pass.
    pub(super) fn note_full(&self) -> bool {
        self.is_tight.store(true, Ordering::Relaxed);
        !self.is_wanted.swap(true, Ordering::Relaxed)
    }

    /// Whether enough of the memory is free.
    pub(super) fn has_enough(&self, pool: &BlockPool) -> bool {
        let is_tight = pool.is_fuller_than(TIGHT_PERCENT);
        self.is_tight.store(is_tight, Ordering::Relaxed);
        !is_tight
    }

    /// Whether a pass begins now.
    pub(super) fn begin_pass(&self, pool: &BlockPool, now: u64, interval: u64) -> bool {
        if self.has_enough(pool) {
            self.is_wanted.store(false, Ordering::Relaxed);
            return false;
        }
        let is_wanted = self.is_wanted.load(Ordering::Relaxed) || pool.is_fuller_than(FULL_PERCENT);
        if !is_wanted || self.until_due(now, interval) > 0 {
            return false;
        }
        self.passed_at.store(now, Ordering::Relaxed);
        self.is_wanted.store(false, Ordering::Relaxed);
        true
    }

    /// The ticks until a pass that is wanted.
    pub(super) fn until_wanted(&self, now: u64, interval: u64) -> Option<u64> {
        self.is_wanted.load(Ordering::Relaxed).then(|| self.until_due(now, interval))
    }

    fn until_due(&self, now: u64, interval: u64) -> u64 {
        let passed_at = self.passed_at.load(Ordering::Relaxed);
        if passed_at == 0 { 0 } else { passed_at.saturating_add(interval).saturating_sub(now) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::Blocks;

    const BLOCK: usize = BlockPool::BLOCK_BYTES;

    #[test]
    fn passes_are_made_while_the_memory_is_full_and_not_too_often() {
        let (pool, room) = (BlockPool::new(8 * BLOCK), StackRoom::default());
        let _half = Blocks::take(&pool, 4 * BLOCK).unwrap();
        assert!(!room.begin_pass(&pool, 1, 10) && !room.is_tight());
        let more = Blocks::take(&pool, 2 * BLOCK).unwrap();
        assert!(!room.begin_pass(&pool, 2, 10) && room.is_tight(), "three quarters");
        assert_eq!(room.most_bytes(), SMALL_BYTES);
        let most = Blocks::take(&pool, BLOCK).unwrap();
        assert!(room.begin_pass(&pool, 3, 10) && !room.begin_pass(&pool, 12, 10));
        drop(most);
        assert!(!room.begin_pass(&pool, 13, 10), "three quarters");
        // A larger copy does not fit.
        assert_eq!([room.note_full(), room.note_full()], [true, false]);
        assert_eq!(room.until_wanted(11, 10), Some(2));
        assert!(room.begin_pass(&pool, 13, 10) && room.until_wanted(13, 10).is_none());
        drop(more);
        assert!(!room.begin_pass(&pool, 30, 10) && !room.is_tight());
    }
}
