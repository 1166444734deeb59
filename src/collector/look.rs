//! Looks at threads between rounds.

use std::time::{Duration, Instant};

use super::drain::{LookAtAge, Sampled};
use super::run::Collector;
use super::waits::{IDLE_LOOK, LOOK, Looker, Seen, next_look};
use crate::stats::Counters;
use crate::sys;

/// A wake-up takes some 16 µs.
const SOONEST: Duration = Duration::from_millis(1);
/// For how long threads are armed in one look: it takes some 150 µs each.
const MOST_ARMING: Duration = Duration::from_millis(5);
/// So many threads are armed anew at once because of another rate: no more than can be in one look.
const MOST_CHANGING: usize = 16;

impl Collector {
    /// How long until the next look at threads that may be waiting.
    pub(super) fn look_interval(&self) -> Duration {
        // Where a look at a thread is a system call, all of them together may take 1 % of the time.
        const A_THREAD: Duration = Duration::from_micros(100);
        let by_clock = self.sampled.iter().filter(|sampled| sampled.is_looked_at_by_clock());
        let least = u32::try_from(by_clock.count()).map_or(LOOK, |count| A_THREAD * count);
        self.look_interval.max(least)
    }

    pub(super) fn until_look(&self) -> Duration {
        self.look_interval().saturating_sub(self.looked.elapsed())
    }

    /// Looks at threads in profiled spans: whether the spans are old by now, and whether the threads wait.
    pub(super) fn look_at_threads(&mut self) {
        self.looked = Instant::now();
        self.look_at_load(self.looked);
        let clock = self.engine.spans.clock();
        let now = clock.now();
        let now_ns = clock.raw_ns(now);
        let mut until_old = Duration::MAX;
        let sheds = self.shed.is_over();
        let mut look = LookAtAge {
            at: self.looked,
            now,
            now_ns,
            may_arm: !sheds,
            may_change: !sheds,
            times: self.budget.times(),
            source: &self.source,
        };
        let mut changing = 0;
        for sampled in &mut self.sampled {
            // Meanwhile the rings of others fill.
            look.may_arm = !sheds && self.looked.elapsed() < MOST_ARMING;
            look.may_change = look.may_arm && changing < MOST_CHANGING;
            self.can_close |= sampled.look_at_age(&look);
            changing += usize::from(sampled.changes_rate());
            if sampled.note_shed(sheds) {
                Counters::add(&self.engine.counters.threads_shed, 1);
            }
            if sampled.is_unarmed() {
                let left = sampled.recording.old_at().saturating_sub(now);
                // Of one that was not armed although it is old it is known since when.
                let is_known = left == 0 && (look.may_arm || sheds);
                let left = if is_known { LOOK } else { Duration::from_nanos(clock.ns(left)) };
                until_old = until_old.min(left);
            }
        }
        // To arm a thread takes no less time where there are fewer samples.
        let start = sys::thread_cpu_ns();
        // Not always the same first: there may not be time for all.
        let first = self.first_look.checked_rem(self.sampled.len()).unwrap_or(0);
        self.first_look = self.first_look.wrapping_add(7);
        let (next, is_in_span) = self.with_looker(now_ns, |looker, threads| {
            let (later, first) = threads.split_at_mut(first);
            let (mut soonest, mut is_in_span) = (None, false);
            for sampled in first.iter_mut().chain(later) {
                let seen = sampled.look(looker);
                let unchanged_ns = match seen {
                    Seen::OutsideSpans => looker.since_hook_ns(&sampled.recording),
                    Seen::Busy => 0,
                    Seen::StillWaiting { waited_ns } => waited_ns,
                };
                is_in_span |= seen != Seen::OutsideSpans;
                let next = next_look(seen, unchanged_ns);
                // Whoever was in none for long wakes us when it is in one again.
                if seen != Seen::OutsideSpans || next < IDLE_LOOK {
                    soonest = Some(soonest.map_or(next, |soonest: Duration| soonest.min(next)));
                }
            }
            (soonest.unwrap_or(IDLE_LOOK), is_in_span)
        });
        self.is_in_span = is_in_span;
        self.look_interval = next.min(until_old.max(SOONEST));
        // Where there is none, whoever is the first wakes us anyhow.
        let looks_late = self.look_interval > LOOK && !self.sampled.is_empty();
        self.engine.spans.set_looks_late(looks_late);
        let end = sys::thread_cpu_ns();
        if let Some(took) = start.zip(end).and_then(|(start, end)| end.checked_sub(start)) {
            Counters::add(&self.engine.counters.draining_cpu_ns, took);
        }
    }

    /// If that thread waits, takes what it has waited so far for a wait of its own. Returns how long that
    /// is.
    pub(super) fn cut_wait(&mut self, thread: usize, now_ns: u64) -> Option<u64> {
        self.with_looker(now_ns, |looker, threads| threads.get_mut(thread)?.cut_wait(looker))
    }

    /// What looks at threads that wait.
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
