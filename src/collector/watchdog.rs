//! Spans that hang or stay open for too long. Their profile is a snapshot of what they did so far, and takes nothing
//! from the profile that is made when they close.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

use super::run::Collector;
use super::sampled::SampledThread;
use super::scan::passed;
use super::store::SpanSamples;
use super::waits::WaitingThread;
use crate::facts::{Reason, Reasons};
use crate::refresh::refresh_interest;
use crate::span::{OpenSlot, RegistryId, SpanKey};
use crate::stats::Counters;
use crate::sys;

/// The shortest and longest interval between checks of open spans.
const SOONEST: Duration = Duration::from_millis(50);
const LATEST: Duration = Duration::from_secs(1);
/// How many open spans are kept in one check. Each takes a profile or a report.
const MOST_AT_ONCE: usize = 64;

/// What is known of open spans from one check to the next.
#[derive(Debug)]
pub(super) struct Watchdog {
    pub(super) checked: Instant,
    /// The reasons for which open spans were kept: once for each reason.
    kept: HashMap<SpanKey, Reasons>,
    /// Spans that the hooks may not have registered, so their close is found by polling.
    polled: HashMap<SpanKey, RegistryId>,
    /// CPU time of the last check. Checks take 1 % of a core at most.
    cost: Duration,
    /// The generation of the rules at the last sweep of replaced rules, and its time.
    swept: (u64, Instant),
    absences: Absences,
}

/// When the collector did not run although it had something to do: the process was stopped, or the machine paused. No
/// span hangs in that time.
#[derive(Debug, Default)]
pub(super) struct Absences {
    /// When it was last there, and its CPU time then.
    present: Option<(u64, Option<u64>)>,
    /// When each ended, and how long it was, oldest first.
    all: VecDeque<(u64, u64)>,
}

/// A busy machine delays the collector, too.
const LEAST_ABSENCE_NS: u64 = 100_000_000;
const MOST_ABSENCES: usize = 64;

impl Absences {
    /// The collector is there. Since the last time it meant to sleep for `slept_ns`.
    fn note_present(&mut self, now_ns: u64, cpu_ns: Option<u64>, slept_ns: u64) {
        if let Some((before_ns, before_cpu_ns)) = self.present.replace((now_ns, cpu_ns)) {
            let worked_ns = passed(before_cpu_ns, cpu_ns).unwrap_or(0);
            let known_ns = slept_ns.saturating_add(worked_ns);
            let absent_ns = now_ns.saturating_sub(before_ns).saturating_sub(known_ns);
            if absent_ns >= LEAST_ABSENCE_NS {
                if self.all.len() == MOST_ABSENCES {
                    self.all.pop_front();
                }
                self.all.push_back((now_ns, absent_ns));
            }
        }
    }

    /// The part of an interval up to now in which the collector was not there.
    fn since(&self, since_ns: u64) -> u64 {
        let within = self.all.iter().filter(|(end_ns, _)| *end_ns > since_ns);
        within.map(|(end_ns, absent_ns)| (*absent_ns).min(end_ns - since_ns)).sum()
    }
}

/// The pause between checks, in multiples of the time that a check takes.
const PAUSE_TIMES: u32 = 100;

/// Readings of a thread's CPU clock, oldest first.
#[derive(Debug, Default)]
pub(super) struct CpuTimes(VecDeque<CpuTime>);

#[derive(Clone, Copy, Debug)]
struct CpuTime {
    time_ns: u64,
    cpu_ns: u64,
    /// For how long the thread had been sampled in armings that its hooks have not finished with.
    sampled_ns: u64,
}

/// How a thread spent an interval.
#[derive(Default, PartialEq)]
struct Ran {
    on_ns: u64,
    off_ns: u64,
    sampled_ns: u64,
}

const MOST_CPU_TIMES: usize = 32;

impl CpuTimes {
    fn note(&mut self, time: CpuTime) {
        if self.0.len() == MOST_CPU_TIMES {
            // Drops every other reading, so that the rest covers twice the time.
            let mut keeps = false;
            self.0.retain(|_| {
                keeps = !keeps;
                keeps
            });
        }
        self.0.push_back(time);
    }

    /// The thread's on-CPU, off-CPU and sampled time since its first reading at or after `since_ns`.
    fn since(&self, since_ns: u64) -> Ran {
        let first = self.0.iter().find(|time| time.time_ns >= since_ns);
        let Some((first, last)) = first.zip(self.0.back()) else {
            return Ran::default();
        };
        let on_ns = last.cpu_ns.saturating_sub(first.cpu_ns);
        Ran {
            on_ns,
            off_ns: last.time_ns.saturating_sub(first.time_ns).saturating_sub(on_ns),
            sampled_ns: last.sampled_ns.saturating_sub(first.sampled_ns).min(on_ns),
        }
    }

    /// What is certain of the thread's time since `since_ns` if its hooks read the clock at that time before.
    fn since_sync(&self, since_ns: u64, synced: Option<(u64, u64)>) -> Ran {
        let synced = synced.filter(|(time_ns, _)| *time_ns <= since_ns);
        let Some(((synced_ns, synced_cpu_ns), last)) = synced.zip(self.0.back()) else {
            return Ran::default();
        };
        let ran_ns = last.cpu_ns.saturating_sub(synced_cpu_ns);
        let interval_ns = last.time_ns.saturating_sub(since_ns);
        Ran {
            on_ns: ran_ns.saturating_sub(since_ns - synced_ns).min(interval_ns),
            off_ns: interval_ns.saturating_sub(ran_ns),
            sampled_ns: 0,
        }
    }
}

impl Ran {
    /// What is certain by either.
    fn or(self, other: Self) -> Self {
        Self {
            on_ns: self.on_ns.max(other.on_ns),
            off_ns: self.off_ns.max(other.off_ns),
            sampled_ns: self.sampled_ns.max(other.sampled_ns),
        }
    }
}

impl Watchdog {
    pub(super) fn new() -> Self {
        Self {
            checked: Instant::now(),
            kept: HashMap::new(),
            polled: HashMap::new(),
            cost: Duration::ZERO,
            swept: (0, Instant::now()),
            absences: Absences::default(),
        }
    }

    /// The span has closed.
    pub(super) fn forget(&mut self, span: SpanKey) {
        self.kept.remove(&span);
        self.polled.remove(&span);
    }
}

impl Collector {
    /// How long until the next check of open spans; `None` if no rule needs one.
    pub(super) fn until_next_check(&self) -> Option<Duration> {
        let limit = self.engine.callsites.least_limit()?;
        let every = (limit / 8).clamp(SOONEST, LATEST).max(self.watchdog.cost * PAUSE_TIMES);
        Some(every.saturating_sub(self.watchdog.checked.elapsed()))
    }

    /// Notes that the collector is there, after it meant to sleep for that long.
    pub(super) fn note_present(&mut self, slept: Duration) {
        let clock = self.engine.spans.clock();
        let now_ns = clock.raw_ns(clock.now());
        let slept_ns = u64::try_from(slept.as_nanos()).unwrap_or(u64::MAX);
        self.watchdog.absences.note_present(now_ns, sys::thread_cpu_ns(), slept_ns);
    }

    /// Whether an open span must be polled.
    pub(super) fn must_check_spans(&self) -> bool {
        !self.watchdog.polled.is_empty() || self.engine.spans.has_watched()
    }

    /// Finds open spans that must be kept and makes their snapshots. Call after draining.
    pub(super) fn check_open_spans(&mut self) {
        if self.until_next_check().is_none_or(|left| !left.is_zero()) {
            return;
        }
        let start = sys::thread_cpu_ns();
        self.note_present(Duration::ZERO);
        self.keep_open_spans();
        if let Some(took) = passed(start, sys::thread_cpu_ns()) {
            Counters::add(&self.engine.counters.sampling.collector_cpu_ns, took);
            self.watchdog.cost = Duration::from_nanos(took);
        }
        self.watchdog.checked = Instant::now();
        for snapshot in self.engine.admission.take_snapshots() {
            self.export(snapshot);
        }
        self.copied.present.clear();
    }

    fn keep_open_spans(&mut self) {
        let closed = |(key, id): (&SpanKey, &RegistryId)| {
            (!self.engine.spans.is_open(*id, *key)).then_some(*key)
        };
        self.closed.extend(self.watchdog.polled.iter().filter_map(closed));
        let clock = self.engine.spans.clock();
        let now_ns = clock.raw_ns(clock.now());
        // Read before the slots, so that the slot of a span in which a thread is found shows it as entered.
        let innermost: HashSet<_> = self
            .sampled
            .iter_mut()
            .filter_map(|sampled| {
                let span = sampled.thread().span()?;
                if let Some(cpu_ns) = sys::cpu_ns_of(sampled.thread().tid()) {
                    let sampled_ns = sampled.cursor.sampled_ns(cpu_ns);
                    sampled.cpu_times.note(CpuTime { time_ns: now_ns, cpu_ns, sampled_ns });
                }
                Some(span)
            })
            .collect();
        if innermost.is_empty() && !self.engine.spans.has_watched() {
            return;
        }
        self.engine.spans.forget_watched();
        let (ids, mut found) = self.find_over_limit(&innermost, now_ns);
        if found.is_empty() {
            return;
        }
        for (key, id) in ids {
            self.register(id, key);
        }
        let over: HashSet<_> = found.iter().map(|(open, _)| open.key).collect();
        let spans = &self.engine.spans;
        self.copied.present =
            self.engine.copied.awaits.present(|span| spans.is_in_any(span, &over));
        let present: Vec<_> = self.copied.present.iter().map(|(span, _)| *span).collect();
        for span in present {
            self.register(span.id, span.key);
        }
        // Outermost first, so that spans inside another one are kept together with it.
        found.sort_by_key(|(open, _)| u64::MAX - open.open_ns);
        let mut kept = 0;
        for (open, mut reasons) in found {
            // A span hangs only if a thread is in it.
            if !self.sampled.iter().any(|sampled| self.is_inside(sampled, open.key)) {
                reasons = reasons.iter().filter(|reason| *reason != Reason::Hung).collect();
            }
            if !reasons.is_empty() && kept < MOST_AT_ONCE {
                kept += 1;
                self.keep_open(&open, reasons, now_ns);
            }
        }
    }

    /// Drops the plans of replaced rules, at most once in [`LATEST`] unless the rules have changed.
    pub(super) fn sweep_plans(&mut self) {
        let callsites = &self.engine.callsites;
        let (generation, when) = self.watchdog.swept;
        let is_due = generation != callsites.generation() || when.elapsed() >= LATEST;
        if !callsites.has_replaced() || !is_due {
            return;
        }
        let known = self.sinks.store.registered_spans();
        let mut in_use: HashSet<_> = known.into_iter().map(|(_, known)| known.plan).collect();
        self.engine.spans.for_each_open(|span| {
            in_use.insert(span.plan);
        });
        self.watchdog.swept = (callsites.generation(), Instant::now());
        if callsites.sweep(&in_use) {
            refresh_interest(self.engine.dispatch(), || {});
        }
    }

    /// The ids of the spans that threads are in, and the spans over a limit for which they have not been kept yet.
    fn find_over_limit(
        &self,
        innermost: &HashSet<SpanKey>,
        now_ns: u64,
    ) -> (HashMap<SpanKey, RegistryId>, Vec<(OpenSlot, Reasons)>) {
        let (mut ids, mut found, mut has_watched) = (HashMap::new(), Vec::new(), false);
        self.engine.spans.for_each_open(|open| {
            if innermost.contains(&open.key) {
                ids.insert(open.key, open.id);
            }
            let Some(site) = self.engine.callsites.get(open.plan) else { return };
            has_watched |= site.open_ns.is_some();
            let before = self.watchdog.kept.get(&open.key).copied().unwrap_or_default();
            // The process may have been stopped in the meantime.
            let seen_ns = open.entered_ns.map(|entered_ns| {
                let absent_ns = self.watchdog.absences.since(now_ns.saturating_sub(entered_ns));
                entered_ns.saturating_sub(absent_ns)
            });
            let over = [
                (seen_ns, site.hung_ns, Reason::Hung),
                (Some(open.open_ns), site.open_ns, Reason::Open),
            ];
            let is_over = |(ns, limit_ns, reason): (Option<u64>, Option<u64>, _)| {
                let is_over = ns.zip(limit_ns).is_some_and(|(ns, limit_ns)| ns > limit_ns);
                (is_over && !before.contains(reason)).then_some(reason)
            };
            let reasons: Reasons = over.into_iter().filter_map(is_over).collect();
            if !reasons.is_empty() {
                found.push((*open, reasons));
            }
        });
        if has_watched {
            self.engine.spans.keep_watching();
        }
        (ids, found)
    }

    fn register(&mut self, id: RegistryId, key: SpanKey) {
        let around = self.engine.spans.describe(id, key).unwrap_or_default();
        for (key, known) in around {
            if self.sinks.store.get(key).is_none_or(|pending| pending.known.is_none()) {
                self.watchdog.polled.insert(key, known.id);
            }
            self.sinks.store.register(key, known, self.round);
        }
    }

    fn keep_open(&mut self, open: &OpenSlot, reasons: Reasons, now_ns: u64) {
        let OpenSlot { id, key, entered_ns, .. } = *open;
        self.register(id, key);
        let Some((mut open, segment_ns)) = self.engine.spans.as_closing(id, key) else { return };
        let before = self.watchdog.kept.entry(key).or_default();
        *before = before.and(reasons);
        // The thread that is still in the span has not added its open segment to the account. If several threads are
        // in it, the first one that has any time is taken for the one that entered it.
        let since_ns = now_ns.saturating_sub(entered_ns.unwrap_or(0));
        let inside = self.sampled.iter().filter(|sampled| self.is_inside(sampled, key));
        let ran = inside.map(|sampled| {
            let synced = sampled.thread().synced();
            let by_sync = sampled.cpu_times.since_sync(since_ns, synced);
            let ran = sampled.cpu_times.since(since_ns).or(by_sync);
            let waited_ns = sampled.waiting().map_or(0, WaitingThread::waited_ns);
            Ran { off_ns: ran.off_ns.max(waited_ns), ..ran }
        });
        let Ran { on_ns, off_ns, sampled_ns } =
            ran.into_iter().find(|ran| *ran != Ran::default()).unwrap_or_default();
        open.account = match sys::thread_cpu_ns() {
            Some(_) => open.account.with_segment(segment_ns, on_ns, off_ns, sampled_ns),
            None => open.account.without_cpu_time(),
        };
        // What the profile will contain, and not what hooks have counted so far.
        let inside = self.sinks.store.inside(open.root, [key]);
        let pending = inside.iter().filter_map(|span| self.sinks.store.get(*span));
        let waiting = self.sampled.iter().filter_map(SampledThread::waiting);
        open.samples = pending.map(SpanSamples::count).sum();
        open.samples.waits += waiting.filter(|wait| inside.contains(&wait.span)).count() as u64;
        let present = self.copied.present.iter();
        let present: Vec<_> = present.filter(|(span, _)| inside.contains(&span.key)).collect();
        open.samples.awaits += present.len() as u64;
        // Of several tasks in it, the one that has awaited for longest.
        // One in another task may be in a span inside, without this one being idle for it.
        let own = present.iter().filter(|(span, _)| {
            let outermost = self.engine.spans.outermost_of(span);
            span.key == key || outermost.is_some_and(|outermost| outermost.key == key)
        });
        let own = own.map(|(_, sample)| sample.amounts.map(|amount| amount.weight));
        if let Some([await_ns, delay_ns]) = own.max_by_key(|[await_ns, _]| *await_ns)
            && entered_ns.is_none()
        {
            open.account = open.account.with_await(await_ns, delay_ns);
        }
        self.engine.keep_open(&open, reasons);
    }

    fn is_inside(&self, sampled: &SampledThread, span: SpanKey) -> bool {
        let innermost = sampled.thread().span();
        innermost.is_some_and(|innermost| {
            innermost == span || self.sinks.store.ancestors(innermost).any(|around| around == span)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn time_in_which_the_collector_did_not_run_is_absence() {
        let mut absences = Absences::default();
        absences.note_present(0, Some(0), 0);
        // It slept as long as it meant to, and a busy machine let it wait.
        absences.note_present(1_050 * MS, Some(MS), 1_000 * MS);
        // It worked.
        absences.note_present(2_050 * MS, Some(900 * MS), 20 * MS);
        assert_eq!(absences.since(0), 0);
        // It meant to sleep for 5 ms, and was stopped for two seconds.
        absences.note_present(4_060 * MS, Some(902 * MS), 5 * MS);
        let absent = 2_003 * MS;
        assert_eq!(absences.since(2_000 * MS), absent);
        // A span that was entered in the meantime had less of it, and a later one none.
        assert_eq!(absences.since(4_000 * MS), 60 * MS);
        assert_eq!(absences.since(4_060 * MS), 0);
        absences.note_present(6_060 * MS, None, 0);
        assert_eq!(absences.since(0), absent + 2_000 * MS);
        for second in 7..7 + 2 * MOST_ABSENCES as u64 {
            absences.note_present(second * 1_000 * MS, None, 0);
        }
        assert_eq!(absences.all.len(), MOST_ABSENCES);
    }

    #[test]
    fn the_last_sync_says_for_how_long_a_thread_ran_and_did_not_run() {
        let mut times = CpuTimes::default();
        let last = CpuTime { time_ns: 14_200 * MS, cpu_ns: 162 * MS, sampled_ns: 0 };
        times.note(last);
        let certain = |synced| {
            let ran = times.since(0).or(times.since_sync(0, None));
            assert!(ran == Ran::default(), "one reading says nothing");
            let Ran { on_ns, off_ns, .. } = times.since_sync(200 * MS, synced);
            (on_ns, off_ns)
        };
        // It entered the span 1 ms after the sync, and ran for 62 ms since that.
        let (on_ns, off_ns) = certain(Some((199 * MS, 100 * MS)));
        assert_eq!((on_ns, off_ns), (61 * MS, 13_938 * MS));
        assert_eq!(certain(Some((201 * MS, 100 * MS))), (0, 0), "not before the span");
        assert_eq!(certain(None), (0, 0));
    }
}
