//! Sampling threads with timers and signals.

use std::ops::Range;
use std::sync::Arc;

use super::arming::Arming;
use super::record::Machine;
use crate::sys::{self, SampleRequest, SampleRing, TimerClock, TimerRing, WhyRefused};

/// Creates timers for threads.
#[derive(Debug)]
pub(super) struct Timers {
    request: SampleRequest,
    clock: TimerClock,
}

/// A thread writes at most one interval per sample, and few samples are shorter than this.
const SHORT_SAMPLE: u64 = 1024;

impl Timers {
    pub(super) fn new(request: SampleRequest, clock: TimerClock) -> Self {
        let position_step = Machine::NATIVE.sample_size(request.stack_bytes);
        Self { request: SampleRequest { position_step, ..request }, clock }
    }

    pub(super) fn clock(&self) -> TimerClock {
        self.clock
    }

    /// Probes on the calling thread whether timers are allowed.
    pub(super) fn probe(&self) -> Result<(), WhyRefused> {
        let stack = sys::stack_bounds().ok_or(WhyRefused::NotAsked);
        let ring = self.open_ring(sys::current_tid(), stack, self.request)?;
        // The timer must not send a signal that does not fit.
        if sys::has_small_signal_stack() {
            return Ok(());
        }
        sys::unblock_timers()?;
        ring.start()
    }

    fn open_ring(
        &self,
        tid: u32,
        stack: Result<Range<u64>, WhyRefused>,
        request: SampleRequest,
    ) -> Result<TimerRing, WhyRefused> {
        sys::open_timer_ring(request, self.clock, tid, stack?)
    }

    /// Creates the timer and the ring of thread `tid`, whose stack is `stack`. They are inactive until started.
    pub(super) fn open(
        &self,
        tid: u32,
        stack: Result<Range<u64>, WhyRefused>,
        period_ns: u64,
    ) -> Result<Arming, WhyRefused> {
        let request = SampleRequest { period_ns, ..self.request };
        let ring = Arc::new(SampleRing::Timer(self.open_ring(tid, stack, request)?));
        let position_step = request.position_step;
        Ok(Arming::new(ring, period_ns, position_step, SHORT_SAMPLE))
    }
}
