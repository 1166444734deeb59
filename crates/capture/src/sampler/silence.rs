//! Whether the sources give samples at all: the system may allow all calls, and they have no effect.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::session::SamplingSession;
use super::thread::ThreadShared;
use crate::sys;

/// Of perf and of timers.
#[derive(Debug)]
pub(super) struct NoSamplesWatch {
    of_each: Mutex<[SourceWatch; 2]>,
    is_any: AtomicBool,
}

impl NoSamplesWatch {
    /// Whether perf takes samples in user code only.
    pub(super) fn new(in_user_code: bool) -> Self {
        let of_each = Mutex::new([SourceWatch::new(in_user_code), SourceWatch::new(false)]);
        Self { of_each, is_any: AtomicBool::new(false) }
    }

    /// Whether the last check found a source that gives no samples.
    pub(super) fn is_any(&self) -> bool {
        self.is_any.load(Ordering::Relaxed)
    }

    pub(super) fn note_signal(&self) {
        let [_, timers] = &mut *self.of_each.lock();
        timers.note_samples();
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
    /// Samples are taken in user code only, so only time there is counted.
    in_user_code: bool,
    /// The user time of threads at the first check of their session, which is known by its address.
    user_ns: HashMap<u32, (usize, u64)>,
}

/// Of a source with such a period in this time, or with a longer one in as many periods, nothing is to be expected.
const LONG_ENOUGH: Duration = Duration::from_secs(1);
const PERIODS: u64 = 20;

impl SourceWatch {
    fn new(in_user_code: bool) -> Self {
        Self { in_user_code, ..Self::default() }
    }

    fn note_samples(&mut self) {
        self.has_samples = true;
        self.user_ns = HashMap::new();
    }

    fn note_ended(&mut self, session: &SamplingSession) {
        self.look_at(session);
        // How much of it was in user code is not known.
        if !self.in_user_code {
            self.ended_ns += session.all_sampled_ns();
        }
    }

    fn look_at(&mut self, session: &SamplingSession) {
        if session.ring.as_ref().is_some_and(|ring| ring.position() > 0) {
            self.note_samples();
        }
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
            ran_ns += self.ran_ns(thread, session).unwrap_or(0);
        }
        let ran = Duration::from_nanos(ran_ns);
        let least = Duration::from_nanos(self.longest_period_ns.saturating_mul(PERIODS));
        (ran >= least.max(LONG_ENOUGH)).then_some(ran)
    }

    fn ran_ns(&mut self, thread: &ThreadShared, session: &SamplingSession) -> Option<u64> {
        let tid = thread.tid();
        if !self.in_user_code {
            return Some(session.sampled_ns(sys::cpu_ns_of(tid)?));
        }
        let user_ns = sys::stat_of(tid).ok()?.user_ns?;
        let session = std::ptr::from_ref(session).addr();
        let (known, since_ns) = self.user_ns.entry(tid).or_insert((session, user_ns));
        if *known != session {
            (*known, *since_ns) = (session, user_ns);
        }
        Some(user_ns.saturating_sub(*since_ns))
    }
}
