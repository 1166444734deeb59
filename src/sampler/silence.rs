//! Whether the sources give samples at all: the system may allow all calls, and they have no effect.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::arming::Arming;
use super::thread::ThreadShared;
use crate::sys;

/// Of perf and of timers.
#[derive(Debug)]
pub(super) struct Silences {
    of_each: Mutex<[Silence; 2]>,
    is_any: AtomicBool,
}

impl Silences {
    /// Whether perf takes samples in user code only.
    pub(super) fn new(in_user_code: bool) -> Self {
        let of_each = Mutex::new([Silence::new(in_user_code), Silence::new(false)]);
        Self { of_each, is_any: AtomicBool::new(false) }
    }

    /// Whether the last check found a source that gives no samples.
    pub(super) fn is_any(&self) -> bool {
        self.is_any.load(Ordering::Relaxed)
    }

    /// A signal of a timer has come.
    pub(super) fn note_signal(&self) {
        let [_, timers] = &mut *self.of_each.lock();
        timers.note_given();
    }

    /// An arming ends.
    pub(super) fn note_ended(&self, arming: &Arming) {
        let [perf, timers] = &mut *self.of_each.lock();
        let silence = if arming.has_switch_records() { perf } else { timers };
        if !silence.has_given {
            silence.note_ended(arming);
        }
    }

    /// Calls `report` for each source that gives no samples, with whether it is perf and for how long threads have run in
    /// vain. `armed` are the threads that are sampled now.
    pub(super) fn check<'a>(
        &self,
        armed: impl Iterator<Item = (&'a ThreadShared, &'a Arming)> + Clone,
        mut report: impl FnMut(bool, Duration),
    ) {
        let mut is_any = false;
        for (silence, by_perf) in self.of_each.lock().iter_mut().zip([true, false]) {
            let armed = armed.clone().filter(|(_, arming)| {
                arming.ring.is_some() && arming.has_switch_records() == by_perf
            });
            if !silence.has_given
                && let Some(ran) = silence.check(armed)
            {
                is_any = true;
                report(by_perf, ran);
            }
        }
        self.is_any.store(is_any, Ordering::Relaxed);
    }
}

/// The time in which threads ran while a source sampled them, until it has given a sample.
#[derive(Debug)]
struct Silence {
    has_given: bool,
    /// In armings that have ended.
    ended_ns: u64,
    longest_period_ns: u64,
    /// Samples are taken in user code only, so only time there is counted.
    in_user_code: bool,
    /// The user time of threads at the first check of their arming, which is known by its address.
    user_ns: HashMap<u32, (usize, u64)>,
}

/// Of a source with such a period in this time, or with a longer one in as many periods, nothing is to be expected.
const LONG_ENOUGH: Duration = Duration::from_secs(1);
const PERIODS: u64 = 20;

impl Silence {
    fn new(in_user_code: bool) -> Self {
        Self {
            has_given: false,
            ended_ns: 0,
            longest_period_ns: 0,
            in_user_code,
            user_ns: HashMap::new(),
        }
    }

    fn note_given(&mut self) {
        self.has_given = true;
        self.user_ns = HashMap::new();
    }

    /// An arming of the source ends.
    fn note_ended(&mut self, arming: &Arming) {
        self.look_at(arming);
        // How much of it was in user code is not known.
        if !self.in_user_code {
            self.ended_ns += arming.all_sampled_ns();
        }
    }

    fn look_at(&mut self, arming: &Arming) {
        if has_record(arming) {
            self.note_given();
        }
        self.longest_period_ns = self.longest_period_ns.max(arming.period_ns());
    }

    /// Returns for how long threads have run in vain, if that is too long. `armed` are the threads that the source samples
    /// now.
    fn check<'a>(
        &mut self,
        armed: impl Iterator<Item = (&'a ThreadShared, &'a Arming)>,
    ) -> Option<Duration> {
        let mut ran_ns = self.ended_ns;
        for (thread, arming) in armed {
            self.look_at(arming);
            if self.has_given {
                return None;
            }
            ran_ns += self.ran_ns(thread, arming).unwrap_or(0);
        }
        let ran = Duration::from_nanos(ran_ns);
        let least = Duration::from_nanos(self.longest_period_ns.saturating_mul(PERIODS));
        (ran >= least.max(LONG_ENOUGH)).then_some(ran)
    }

    fn ran_ns(&mut self, thread: &ThreadShared, arming: &Arming) -> Option<u64> {
        let tid = thread.tid();
        if !self.in_user_code {
            return Some(arming.sampled_ns(sys::cpu_ns_of(tid)?));
        }
        let user_ns = sys::user_ns_of(tid)?;
        let arming = std::ptr::from_ref(arming).addr();
        let (known, since_ns) = self.user_ns.entry(tid).or_insert((arming, user_ns));
        if *known != arming {
            (*known, *since_ns) = (arming, user_ns);
        }
        Some(user_ns.saturating_sub(*since_ns))
    }
}

fn has_record(arming: &Arming) -> bool {
    arming.ring.as_ref().is_some_and(|ring| ring.position() > 0)
}
