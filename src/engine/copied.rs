//! Samples that the threads of the program take themselves.

use std::sync::Arc;

use crate::allocations::{AllocationSettings, LayerAllocations};
use crate::awaits::LayerAwaits;
use crate::span::Spans;
use crate::stats::Counters;
use crate::sys::{Striped, Waker};

/// Where the threads of the program leave these samples.
#[derive(Debug)]
pub(crate) struct CopiedSamples {
    pub(crate) awaits: Arc<Striped<LayerAwaits>>,
    pub(crate) allocations: Arc<LayerAllocations>,
}

impl CopiedSamples {
    pub(crate) fn new(
        spans: &Arc<Spans>,
        counters: &Arc<Counters>,
        waker: &Waker,
        await_bytes: usize,
        settings: AllocationSettings,
    ) -> Self {
        let shared = || (Arc::clone(spans), Arc::clone(counters), waker.clone());
        Self {
            awaits: LayerAwaits::new(shared(), await_bytes),
            allocations: LayerAllocations::new(shared(), settings),
        }
    }

    pub(crate) fn set_active(&self, is_active: bool) {
        self.awaits.set_active(is_active);
        self.allocations.set_active(is_active);
    }
}
