//! The check that each hook makes first.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::facts::Allocations;

/// One word that tells the hooks of a layer whether they have anything to do.
///
/// A gate is never freed. The child of a fork must take no locks, and can close the gates of all layers with stores.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Gate {
    state: AtomicU32,
    /// Whether there may be profiled spans, so that allocations are counted.
    counts_allocations: AtomicBool,
    next: OnceLock<&'static Self>,
}

/// The layer's threads run in this process.
const OPEN: u32 = 1;
/// The gate was open in the process that this one was forked from, and this process has not taken over yet.
const FORKED: u32 = 1 << 1;
/// Counts hook calls since the fork.
const ONE_HOOK: u32 = 1 << 2;
/// How many hook calls are counted.
const LAST_CHECK: u32 = 1 << 16;

static FIRST: OnceLock<&'static Gate> = OnceLock::new();

impl Gate {
    /// Creates a closed gate.
    pub(crate) fn new() -> &'static Self {
        let gate: &'static Self = Box::leak(Box::new(Self {
            state: AtomicU32::new(0),
            counts_allocations: AtomicBool::new(false),
            next: OnceLock::new(),
        }));
        let mut place = &FIRST;
        loop {
            match place.get() {
                Some(other) => place = &other.next,
                None if place.set(gate).is_ok() => return gate,
                None => {}
            }
        }
    }

    /// Call once the engine can be found.
    pub(crate) fn open(&self) {
        // Release: a hook that finds the gate open also finds the engine.
        self.state.fetch_or(OPEN, Ordering::Release);
    }

    /// Called by a hook that finds the gate closed. Whether it should check if this forked process has taken over
    /// from its parent, as a daemon does. True only for some calls (those whose number is a power of two), and no more
    /// after [`LAST_CHECK`]: a child that lives on beside its parent must not pay for that forever.
    #[inline(always)]
    pub(crate) fn must_check_fork(&self) -> bool {
        let state = self.state.load(Ordering::Relaxed);
        state & FORKED != 0 && state / ONE_HOOK < LAST_CHECK && self.count_hook()
    }

    #[cold]
    fn count_hook(&self) -> bool {
        let count = self.state.fetch_add(ONE_HOOK, Ordering::Relaxed) / ONE_HOOK + 1;
        count.is_power_of_two()
    }

    /// This process takes over from its parent. Returns true for the first caller only.
    pub(crate) fn take_forked(&self) -> bool {
        self.state.swap(0, Ordering::Relaxed) & FORKED != 0
    }

    #[inline(always)]
    pub(crate) fn is_open(&self) -> bool {
        self.state.load(Ordering::Relaxed) & OPEN != 0
    }

    /// Sets whether what spans allocate is counted. Not after the gate is closed.
    pub(crate) fn set_counts_allocations(&self, counts: bool) {
        match (self.counts_allocations.swap(counts, Ordering::SeqCst), counts) {
            (false, true) => Allocations::begin_counting(),
            (true, false) => Allocations::end_counting(),
            _ => {}
        }
        if counts && self.state.load(Ordering::SeqCst) & OPEN == 0 {
            self.set_counts_allocations(false);
        }
    }

    pub(crate) fn counts_allocations(&self) -> bool {
        self.counts_allocations.load(Ordering::Relaxed)
    }

    pub(crate) fn close(&self) {
        self.state.store(0, Ordering::SeqCst);
        self.set_counts_allocations(false);
    }

    /// Called in the child of a fork, so it only stores to memory.
    pub(crate) fn close_all() {
        let mut place = &FIRST;
        while let Some(gate) = place.get() {
            gate.counts_allocations.store(false, Ordering::Relaxed);
            // Open, or already in a forked child.
            let was_open = gate.state.load(Ordering::Relaxed) & (OPEN | FORKED) != 0;
            gate.state.store(if was_open { FORKED } else { 0 }, Ordering::Relaxed);
            place = &gate.next;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The checks become rare and end, and so do the writes to the word that all threads read.
    #[test]
    fn a_forked_child_does_not_count_its_hooks_forever() {
        let gate = Gate::new();
        assert!(!gate.must_check_fork(), "not forked");
        gate.state.store(FORKED, Ordering::Relaxed);
        let checks: Vec<_> = (1..=200_000_u32).filter(|_| gate.must_check_fork()).collect();
        assert_eq!(checks, (0..=16).map(|power| 1 << power).collect::<Vec<u32>>());
        let before = gate.state.load(Ordering::Relaxed);
        assert!(!gate.must_check_fork());
        assert_eq!(gate.state.load(Ordering::Relaxed), before, "a plain read");
        assert!(gate.take_forked() && !gate.take_forked());
    }
}
