//! Sampling threads with timers and signals.

use std::sync::Arc;

use parking_lot::Mutex;

use super::quota::Quota;
use super::rate::{Periods, Rate};
use super::record::Machine;
use super::session::SamplingSession;
use crate::sys::{self, SampleRequest, SampleRing, ThreadStack, Waker, WhyRefused};

#[derive(Debug)]
pub struct Timers {
    request: SampleRequest,
    pub(super) taken: Quota,
}

/// The layer may use one in this many of the signals that may be pending for the user: each timer reserves one.
const SHARE_OF_SIGNALS: u64 = 8;

/// A thread writes at most one interval per sample, and few samples are shorter than this.
const SHORT_SAMPLE: u64 = 1024;

/// The ring of a thread with few samples. It is larger if two of the largest samples would not fit.
const SMALL_RING_BYTES: usize = 64 * 1024;

fn most_timers() -> u64 {
    sys::pending_signal_limit() / SHARE_OF_SIGNALS
}

impl Timers {
    pub(super) fn new(request: SampleRequest) -> Self {
        let position_step = Machine::NATIVE.sample_size(request.stack_bytes);
        let request = SampleRequest { position_step, ..request };
        Self { request, taken: Quota::default() }
    }

    pub fn signal(&self) -> Result<i32, WhyRefused> {
        sys::signal_of_timers(self.request.signal)
    }

    /// Lets the calling thread receive the signals of its timer.
    pub(super) fn unblock(&self) {
        // A failure is reported when a timer is created.
        sys::unblock_timers(self.request.signal);
    }

    /// Lets the calling thread receive no more of them.
    pub(super) fn block(&self) {
        sys::block_timers(self.request.signal);
    }

    /// Probes whether threads can have timers. No signal is sent.
    pub(super) fn probe(&self, other: u32) -> Result<(), WhyRefused> {
        self.lacking().map_or(Ok(()), Err)?;
        sys::probe_timers(self.request, other)
    }

    /// Why no thread can have one now, if the limit of the process says so.
    pub fn lacking(&self) -> Option<WhyRefused> {
        (most_timers() == 0).then_some(WhyRefused::NoTimers)
    }

    /// Creates the timer and the ring of thread `tid`, whose stack is `stack`. They are inactive until started.
    pub(super) fn open(
        &self,
        tid: u32,
        stack: Result<ThreadStack, WhyRefused>,
        rate: Rate,
        waker: &Waker,
    ) -> Result<SamplingSession, WhyRefused> {
        let mut request = SampleRequest { period_ns: rate.period_ns, ..self.request };
        if rate.period_ns > Periods::USUAL.low_ns {
            // All threads may have one, for as long as they live.
            let least = 2 * (request.stack_bytes as usize).next_power_of_two();
            request.ring_bytes = request.ring_bytes.min(SMALL_RING_BYTES.max(least));
        }
        let share = self.taken.take(1, most_timers()).ok_or(WhyRefused::NoTimers)?;
        let ring = sys::open_timer_ring(request, tid, stack?, waker)?;
        let ring = Arc::new(SampleRing::Timer(ring));
        let position_step = request.position_step;
        let mut session = SamplingSession::new(Some(ring), rate, position_step, SHORT_SAMPLE);
        session.shares = Mutex::new(vec![share]);
        Ok(session)
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::super::record::{Record, Records};
    use super::*;
    use crate::sys::{MAX_STACK_COPIED, Poller};

    #[inline(never)]
    fn burn_deep_in_the_stack(ring: &SampleRing) -> u64 {
        let deep = std::hint::black_box([1_u8; 128 * 1024]);
        let begun = Instant::now();
        while ring.head() == 0 && begun.elapsed() < Duration::from_secs(30) {}
        std::hint::black_box(deep);
        ring.head()
    }

    #[test]
    fn the_largest_sample_is_a_record_and_fits_twice() {
        let request = SampleRequest {
            stack_bytes: MAX_STACK_COPIED,
            ring_bytes: 1 << 20,
            ..Default::default()
        };
        let run = move || {
            let (timers, poller) = (Timers::new(request), Poller::new().unwrap());
            if timers.signal().is_err() || timers.lacking().is_some() {
                return;
            }
            timers.unblock();
            let stack = sys::thread_stack().ok_or(WhyRefused::NoStack);
            let rate = Rate::of(Periods::USUAL.low_ns + 1);
            let session = timers.open(sys::current_tid(), stack, rate, &poller.waker()).unwrap();
            let ring = session.ring.as_ref().unwrap();
            session.start().unwrap();
            let head = burn_deep_in_the_stack(ring);
            session.pause(0);
            let records: Vec<_> = Records::between(&***ring, 0, head).collect();
            let Some(Ok(Record::Sample(place))) = records.first() else { panic!("{records:?}") };
            assert!(place.size > 65_000 && 2 * usize::from(place.size) <= ring.data_size());
        };
        std::thread::spawn(run).join().unwrap();
    }
}
