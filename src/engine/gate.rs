//! The check that each hook makes first.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::facts::Allocations;
use crate::layers::List;

/// One word that tells the hooks of a layer whether they have anything to do.
///
/// A gate is never freed. The child of a fork must take no locks, and can close the gates of all layers with stores.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Gate {
    /// The layer's threads run in this process.
    is_open: AtomicBool,
    /// Whether there may be profiled spans, so that allocations are counted.
    counts_allocations: AtomicBool,
}

static ALL: List<Gate> = List::new();

impl Gate {
    /// Creates a closed gate.
    pub(crate) fn new() -> &'static Self {
        ALL.push(Self {
            is_open: AtomicBool::new(false),
            counts_allocations: AtomicBool::new(false),
        })
    }

    /// Call once the engine can be found.
    pub(crate) fn open(&self) {
        // Release: a hook that finds the gate open also finds the engine.
        self.is_open.store(true, Ordering::Release);
    }

    #[inline(always)]
    pub(crate) fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Relaxed)
    }

    /// Sets whether what spans allocate is counted. Not after the gate is closed.
    pub(crate) fn set_counts_allocations(&self, counts: bool) {
        match (self.counts_allocations.swap(counts, Ordering::SeqCst), counts) {
            (false, true) => Allocations::begin_counting(),
            (true, false) => Allocations::end_counting(),
            _ => {}
        }
        if counts && !self.is_open.load(Ordering::SeqCst) {
            self.set_counts_allocations(false);
        }
    }

    pub(crate) fn counts_allocations(&self) -> bool {
        self.counts_allocations.load(Ordering::Relaxed)
    }

    pub(crate) fn close(&self) {
        self.is_open.store(false, Ordering::SeqCst);
        self.set_counts_allocations(false);
    }

    /// Called in the child of a fork, so it only stores to memory.
    pub(crate) fn close_all() {
        for gate in ALL.iter() {
            gate.counts_allocations.store(false, Ordering::Relaxed);
            gate.is_open.store(false, Ordering::Relaxed);
        }
    }
}
