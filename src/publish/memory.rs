//! Memory for profiles that have not been exported yet.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::sys;

/// The memory of all profiles on their way to the exporter.
#[derive(Clone, Debug)]
pub(crate) struct MemoryBudget {
    budget_bytes: usize,
    taken: Arc<AtomicUsize>,
}

/// The memory reserved for one profile, until it is dropped.
#[derive(Debug)]
pub(crate) struct MemoryReservation {
    /// The limit for the profile while it is built or symbolized, and its size while it waits.
    pub(crate) most_bytes: usize,
    room: MemoryBudget,
}

/// How many times its own size a profile can need in total: copies with symbols and redacted, and tables of formats.
const TIMES: usize = 8;
/// The minimum, however little memory is left.
const LEAST: usize = 64 * 1024;

pub(crate) fn waiting_profiles(budget_bytes: usize) -> usize {
    (budget_bytes / 2 / LEAST).max(1)
}

impl MemoryBudget {
    pub(crate) fn new(budget_bytes: usize) -> Self {
        Self { budget_bytes, taken: Arc::default() }
    }

    /// Reserves memory for another profile. The more memory waiting profiles take, the less it gets, so this never
    /// fails.
    pub(crate) fn take(&self) -> MemoryReservation {
        let most_bytes = self.free();
        self.taken.fetch_add(most_bytes, Ordering::Relaxed);
        MemoryReservation { most_bytes, room: self.clone() }
    }

    pub(crate) fn is_free(&self) -> bool {
        self.taken.load(Ordering::Relaxed) == 0
    }

    fn free(&self) -> usize {
        let left = sys::address_space_left().and_then(|left| usize::try_from(left / 2).ok());
        let budget_bytes = self.budget_bytes.min(left.unwrap_or(usize::MAX));
        let half = budget_bytes / 2;
        let left = half.saturating_sub(self.taken.load(Ordering::Relaxed));
        (budget_bytes / TIMES).min(left / 4).max(LEAST)
    }
}

impl MemoryReservation {
    pub(crate) fn shrink(&mut self, bytes: usize) {
        let rest = self.most_bytes.saturating_sub(bytes);
        self.most_bytes -= rest;
        self.room.taken.fetch_sub(rest, Ordering::Relaxed);
    }

    /// Reserves memory again for a profile that waited and becomes larger now.
    pub(crate) fn grow(&mut self) {
        let more = self.room.free().saturating_sub(self.most_bytes);
        self.most_bytes += more;
        self.room.taken.fetch_add(more, Ordering::Relaxed);
    }
}

impl Drop for MemoryReservation {
    fn drop(&mut self) {
        self.room.taken.fetch_sub(self.most_bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_profiles_take_at_most_half_of_the_budget() {
        let room = MemoryBudget::new(64 << 20);
        let mut waiting = vec![room.take()];
        assert_eq!(waiting[0].most_bytes, 8 << 20);
        for _ in 0..32 {
            waiting.push(room.take());
        }
        let all: usize = waiting.iter().map(|taken| taken.most_bytes).sum();
        assert!(all <= 34 << 20, "{all}");
        assert!(waiting.iter().all(|taken| taken.most_bytes >= LEAST));
        waiting.iter_mut().for_each(|taken| taken.shrink(1_000));
        assert_eq!(room.taken.load(Ordering::Relaxed), 33_000);
        drop(waiting);
        assert_eq!(room.take().most_bytes, 8 << 20);
    }

    /// While the first profile waits for the debug information of a large program, many others come.
    #[test]
    fn small_profiles_that_wait_leave_the_room_for_their_symbols() {
        let room = MemoryBudget::new(64 << 20);
        let mut waiting: Vec<_> = (0..100).map(|_| room.take()).collect();
        for taken in &mut waiting {
            taken.shrink(10_000);
        }
        let symbolized = waiting.iter_mut().map(|taken| {
            taken.grow();
            let most_bytes = taken.most_bytes;
            taken.shrink(40_000);
            most_bytes
        });
        assert!(symbolized.min() > Some(4 << 20));
        assert_eq!(room.taken.load(Ordering::Relaxed), 100 * 40_000);
    }
}
