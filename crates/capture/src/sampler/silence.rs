//! Whether the sources give samples at all: the system may allow all calls, and they have no effect.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::session::SamplingSession;
use super::thread::ThreadShared;
use crate::sys;

/// Of perf and of timers.
#[derive(Debug, Default)]
pub(super) struct NoSamplesWatch {
    of_each: Mutex<[SourceWatch; 2]>,
    is_any: AtomicBool,
}

impl NoSamplesWatch {
    /// Whether the last check found a source that gives no samples.
    pub(super) fn is_any(&self) -> bool {
        self.is_any.load(Ordering::Relaxed)
    }

    pub(super) fn note_signal(&self) {
        let [_, timers] = &mut *self.of_each.lock();
        timers.has_samples = true;
    }

    pub(super) fn note_ended(&self, session: &SamplingSession) {
        let [perf, timers] = &mut *self.of_each.lock();
        let silence = if session.has_switch_records() { perf } else { timers };
        if !silence.has_samples {
            silence.note_ended(session);
        }
    }

    /// Calls `report` for each source that gives no samples, with whether it is perf and for how long threads have run in
    /// vain. `attached` are the threads that are sampled now.
    pub(super) fn check<'a>(
        &self,
        attached: impl Iterator<Item = (&'a ThreadShared, &'a SamplingSession)> + Clone,
        mut report: impl FnMut(bool, Duration),
    ) {
        let mut is_any = false;
        for (silence, by_perf) in self.of_each.lock().iter_mut().zip([true, false]) {
            let attached = attached.clone().filter(|(_, session)| {
                session.ring.is_some() && session.has_switch_records() == by_perf
            });
            if !silence.has_samples
                && let Some(ran) = silence.check(attached)
            {
                is_any = true;
                report(by_perf, ran);
            }
        }
        self.is_any.store(is_any, Ordering::Relaxed);
    }
}

/// The time in which threads ran while a source sampled them, until it has given a sample.
#[derive(Debug, Default)]
struct SourceWatch {
    has_samples: bool,
    /// In sessions that have ended.
    ended_ns: u64,
    longest_period_ns: u64,
}

/// Of a source with such a period in this time, or with a longer one in as many periods, nothing is to be expected.
const LONG_ENOUGH: Duration = Duration::from_secs(1);
const PERIODS: u64 = 20;

impl SourceWatch {
    fn note_ended(&mut self, session: &SamplingSession) {
        self.look_at(session);
        self.ended_ns += session.all_sampled_ns();
    }

    fn look_at(&mut self, session: &SamplingSession) {
        self.has_samples |= session.ring.as_ref().is_some_and(|ring| ring.position() > 0);
        self.longest_period_ns = self.longest_period_ns.max(session.rate.period_ns);
    }

    /// Returns for how long threads have run in vain, if that is too long. `attached` are those that are sampled now.
    fn check<'a>(
        &mut self,
        attached: impl Iterator<Item = (&'a ThreadShared, &'a SamplingSession)>,
    ) -> Option<Duration> {
        let mut ran_ns = self.ended_ns;
        for (thread, session) in attached {
            self.look_at(session);
            if self.has_samples {
                return None;
            }
            let cpu_ns = sys::cpu_ns_of(thread.tid());
            ran_ns += cpu_ns.map_or(0, |cpu_ns| session.sampled_ns(cpu_ns));
        }
        let ran = Duration::from_nanos(ran_ns);
        let least = Duration::from_nanos(self.longest_period_ns.saturating_mul(PERIODS));
        (ran >= least.max(LONG_ENOUGH)).then_some(ran)
    }
}
