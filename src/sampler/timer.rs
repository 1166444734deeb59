//! Sampling threads with timers and signals.

use std::io;
use std::sync::Arc;

use super::perf::software_usage;
use super::record::Machine;
use crate::span::{Armed, Recording, ThreadSource, Usage};
use crate::sys::{self, Position, Ring, SampleRequest, TimerClock, Waker, WhyRefused};

/// Makes timers for threads.
#[derive(Debug)]
pub(super) struct Timers {
    request: SampleRequest,
    clock: TimerClock,
    waker: Waker,
}

/// A thread writes at most a mark a sample, and of samples this short are few.
const SHORT_SAMPLE: u64 = 1024;

impl Timers {
    pub(super) fn new(request: SampleRequest, clock: TimerClock, waker: Waker) -> Self {
        let position_step = Machine::NATIVE.sample_size(request.stack_bytes);
        Self { request: SampleRequest { position_step, ..request }, clock, waker }
    }

    pub(super) fn clock(&self) -> TimerClock {
        self.clock
    }

    /// Tries it out on the calling thread.
    pub(super) fn probe(&self) -> Result<(), WhyRefused> {
        self.open()?.stop_timer();
        Ok(())
    }

    fn open(&self) -> Result<Ring, WhyRefused> {
        sys::open_timer_ring(self.request, self.clock, &self.waker)
    }

    /// Begins to sample the calling thread.
    pub(super) fn arm(&self) -> Result<Armed, WhyRefused> {
        let ring = Arc::new(self.open()?);
        let recording = Recording::new(
            sys::current_tid(),
            Some(Arc::clone(&ring)),
            None,
            self.request.period_ns,
            SHORT_SAMPLE,
        );
        let recording = Arc::new(recording.with_steps(self.request.position_step));
        Ok(Armed {
            recording: Some(recording),
            samples: Position::of_ring(Arc::clone(&ring)),
            sample_size: self.request.position_step,
            may_retry: false,
            source: Box::new(TimerThread { ring, waker: self.waker.clone() }),
        })
    }
}

/// One thread with its timer.
#[derive(Debug)]
struct TimerThread {
    ring: Arc<Ring>,
    waker: Waker,
}

impl ThreadSource for TimerThread {
    fn usage(&mut self) -> Usage {
        software_usage()
    }

    fn set_period_ns(&mut self, period_ns: u64) -> io::Result<()> {
        self.ring.set_period_ns(period_ns)
    }
}

impl Drop for TimerThread {
    fn drop(&mut self) {
        // On the thread itself, before it gives up its share of the ring: so no handler is writing
        // to it, and none will. Also when it ends, when it is armed anew and when its layer is gone.
        self.ring.stop_timer();
        // Nothing else tells the collector that a thread has ended.
        self.waker.wake();
    }
}
