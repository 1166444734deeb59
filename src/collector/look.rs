//! Scans of threads between rounds.

use std::time::{Duration, Instant};

use super::run::Collector;
use super::sampled::{LookAtAge, Sampled};
use super::waits::{IDLE_LOOK, LOOK, LookResult, Looker, next_look};
use crate::stats::Counters;
use crate::sys;

/// A wake-up takes some 16 µs and scanning a thread 0.2 to 1 µs: together 1 % of a core or a little more.
const SOONEST: Duration = Duration::from_millis(1);
const SOONEST_OF_A_THREAD: Duration = Duration::from_micros(20);
/// How long one scan may spend on arming threads, which takes some 150 µs each.
const MOST_ARMING: Duration = Duration::from_millis(5);
/// How many threads may be rearmed at another rate in one scan. More would not fit into [`MOST_ARMING`].
const MOST_CHANGING: usize = 16;

pub(super) fn passed(start_ns: Option<u64>, end_ns: Option<u64>) -> Option<u64> {
    start_ns.zip(end_ns).and_then(|(start_ns, end_ns)| end_ns.checked_sub(start_ns))
}

impl Collector {
    /// How long until the next scan for blocked threads.
    pub(super) fn look_interval(&self) -> Duration {
        // Where scanning a thread takes a system call, all scans together may take 1 % of the time.
        const A_THREAD: Duration = Duration::from_micros(100);
        let by_clock = self.sampled.iter().filter(|sampled| sampled.is_looked_at_by_clock());
        let least = u32::try_from(by_clock.count()).map_or(LOOK, |count| A_THREAD * count);
        self.look_interval.max(least)
    }

    pub(super) fn until_look(&self) -> Duration {
        self.look_interval().saturating_sub(self.looked.elapsed())
    }

    /// Scans threads in profiled spans: whether the spans are old by now, and whether the threads are blocked.
    pub(super) fn look_at_threads(&mut self) {
        self.looked = Instant::now();
        if std::mem::take(&mut self.hooks_wake) && !self.engine.spans.looks_late() {
            self.woken = Some(self.looked);
        }
        self.look_at_load(self.looked);
        let clock = self.engine.spans.clock();
        let now = clock.now();
        let now_ns = clock.raw_ns(now);
        let mut until_old = Duration::MAX;
        let sheds = self.shed.is_over();
        let may_arm = !sheds && self.arming.has_some(now_ns);
        let start = sys::thread_cpu_ns();
        let mut has_armed = false;
        let mut spent = std::mem::take(&mut self.unspent);
        self.sampled.iter_mut().for_each(|sampled| spent.add(sampled.spend(self.looked)));
        let mut look = LookAtAge {
            at: self.looked,
            now,
            now_ns,
            may_arm,
            may_change: may_arm,
            times: self.budget.times(),
            level: self.allowance.spend(spent, self.looked),
            source: &self.source,
        };
        let mut changing = 0;
        // Starts at a different thread each time, as there may not be time for all.
        let first = self.first_look.checked_rem(self.sampled.len()).unwrap_or(0);
        self.first_look = self.first_look.wrapping_add(7);
        let (later, sooner) = self.sampled.split_at_mut(first);
        for sampled in sooner.iter_mut().chain(later) {
            // The rings of other threads fill while threads are armed.
            look.may_arm = may_arm && self.looked.elapsed() < MOST_ARMING;
            look.may_change = look.may_arm && changing < MOST_CHANGING;
            let was_unarmed = sampled.is_unarmed();
            self.can_close |= sampled.look_at_age(&look);
            has_armed |= was_unarmed && !sampled.is_unarmed();
            changing += usize::from(sampled.changes_rate());
            if sampled.note_left_out(!look.may_arm) {
                let counters = &self.engine.counters;
                let counter =
                    if sheds { &counters.threads_shed } else { &counters.threads_put_off };
                Counters::add(counter, 1);
            }
            if sampled.is_unarmed() {
                let left = sampled.recording.old_at().saturating_sub(now);
                // An old thread that could not be armed is checked again at the usual interval, or at once if only
                // this scan ran out of time.
                let is_known = left == 0 && (look.may_arm || !may_arm);
                let left = if is_known { LOOK } else { Duration::from_nanos(clock.ns(left)) };
                until_old = until_old.min(left);
            }
        }
        // Arming a thread costs the same at any sampling rate, so it does not count towards lowering the rate.
        let armed = sys::thread_cpu_ns();
        if has_armed && let Some(took) = passed(start, armed) {
            self.arming.spend(took);
        }
        let threads = u32::try_from(self.sampled.len()).unwrap_or(u32::MAX);
        let soonest_old = SOONEST.max(SOONEST_OF_A_THREAD.saturating_mul(threads)).min(LOOK);
        let least_age = self.engine.callsites.least_age();
        let young_look = Duration::from_nanos(clock.ns(least_age)).clamp(LOOK, IDLE_LOOK);
        let (next, is_in_span) = self.with_looker(now_ns, |looker, threads| {
            let (later, sooner) = threads.split_at_mut(first);
            let (mut soonest, mut is_in_span) = (None, false);
            for sampled in sooner.iter_mut().chain(later) {
                let seen = sampled.look(looker);
                let soonest_look = if sampled.is_young() { young_look } else { LOOK };
                let unchanged_ns = match seen {
                    LookResult::OutsideSpans => looker.since_hook_ns(&sampled.recording),
                    LookResult::Busy => 0,
                    LookResult::StillWaiting { waited_ns } => waited_ns,
                };
                is_in_span |= seen != LookResult::OutsideSpans;
                // A thread in no span may enter one at any time, and must be found before that span is old.
                let next = match seen {
                    LookResult::OutsideSpans if sampled.is_young() => young_look,
                    _ => {
                        next_look(seen, unchanged_ns, soonest_look, sampled.is_looked_at_by_clock())
                    }
                };
                soonest = Some(soonest.map_or(next, |soonest: Duration| soonest.min(next)));
            }
            (soonest.unwrap_or(IDLE_LOOK), is_in_span)
        });
        self.is_in_span = is_in_span;
        let longest = self.limits.pace.longest_look;
        self.look_interval = next.min(until_old.max(soonest_old)).min(longest);
        self.let_hooks_wake(may_arm);
        if let Some(took) = passed(armed, sys::thread_cpu_ns()) {
            Counters::add(&self.engine.counters.draining_cpu_ns, took);
        }
    }

    /// If the next scan is late, lets a thread that enters an old span wake the collector. Not while no thread may be
    /// armed. If a hook woke the collector within the last scan interval, scans early instead.
    fn let_hooks_wake(&mut self, may_arm: bool) {
        let is_late = may_arm && self.look_interval() > LOOK && !self.sampled.is_empty();
        let is_soon = self.woken.is_some_and(|woken| woken.elapsed() < LOOK);
        if is_late && is_soon {
            self.look_interval = LOOK;
        }
        self.hooks_wake = is_late && !is_soon;
        self.engine.spans.set_looks_late(self.hooks_wake);
    }

    /// Runs `action` with a [`Looker`] that borrows from the collector.
    fn with_looker<R>(
        &mut self,
        now_ns: u64,
        action: impl FnOnce(&mut Looker<'_>, &mut [Sampled]) -> R,
    ) -> R {
        let mut looker = Looker {
            unwinder: &mut self.unwinder,
            pending: &mut self.pending,
            counters: &self.engine.counters,
            most_frames: self.limits.frames_per_stack,
            stack_bytes: self.limits.stack_bytes,
            round: self.round,
            clock: self.engine.spans.clock(),
            now_ns,
            bytes: &mut self.stack_bytes,
            captures: &mut self.captures,
            waits: self.engine.source_settings.waits,
        };
        action(&mut looker, &mut self.sampled)
    }
}
