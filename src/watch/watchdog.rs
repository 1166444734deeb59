//! Spans that hang or stay open for too long. Their profile is a snapshot of what they did so far, and takes nothing
//! from the profile that is made when they close.
//!
//! Time in which the collector did not run although it was due does not count: the process was stopped.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::deadlock::Deadlock;
use super::throttling::Throttling;
use crate::budget::passed;
use crate::engine::Engine;
use crate::facts::format::nanoseconds;
use crate::facts::{Reason, Reasons};
use crate::inbox::CopiedSample;
use crate::intake::Intake;
use crate::keep::Callsites;
use crate::sinks::{SpanSamples, Store};
use crate::span::{InnermostSpan, OpenSlot, RegistryId, SpanKey, Spans, with_segment};
use crate::stats::Counters;
use crate::sys::{self, KernelFile};
use crate::text::escaped;
use crate::threads::{CpuTime, Ran, SampledThread, Threads, WaitingThread};

/// The shortest and longest interval between checks of open spans.
const MIN_INTERVAL: Duration = Duration::from_millis(50);
const MAX_INTERVAL: Duration = Duration::from_secs(1);
/// How many open spans are kept in one check. Each takes a profile or a report.
const MAX_AT_ONCE: usize = 64;

pub(crate) struct Watchdog {
    pub(crate) checked: Instant,
    /// The reasons for which open spans were kept: once for each reason.
    kept: HashMap<SpanKey, Reasons>,
    /// Spans that the hooks may not have registered, so their close is found by polling.
    pub(crate) polled: HashMap<SpanKey, RegistryId>,
    /// CPU time of the last check. Checks take 1 % of a core at most.
    cost: Duration,
    absences: CollectorStalls,
    /// Of the collector's thread, if it can be read.
    own_schedstat: Option<KernelFile>,
    pub(crate) throttling: Throttling,
    /// What futures await now, for the snapshots of open spans.
    pub(crate) present: Vec<(InnermostSpan, CopiedSample)>,
}

/// When the collector did not run although it had something to do: the process was stopped, or the machine paused. No
/// span hangs in that time.
#[derive(Debug, Default)]
struct CollectorStalls {
    /// When it was last there, and for how long it had run or waited for a CPU by then.
    present: Option<(u64, Option<u64>)>,
    /// When each ended, and how long it was, the latest first.
    all: VecDeque<(u64, u64)>,
}

/// A busy machine delays the collector, too.
const MIN_ABSENCE_NS: u64 = 100_000_000;
const MAX_ABSENCES: usize = 64;

impl CollectorStalls {
    /// The collector is there. It has run or waited for a CPU for `could_run_ns` in all, and since the last time it meant to
    /// sleep for `slept_ns`. `throttled_ns` is for how long its control group was throttled between two times. Spans do hang
    /// while others have the CPU.
    fn note_present(
        &mut self,
        now_ns: u64,
        could_run_ns: Option<u64>,
        slept_ns: u64,
        throttled_ns: impl FnOnce(u64, u64) -> u64,
    ) {
        let before = self.present.replace((now_ns, could_run_ns));
        let Some((before_ns, could_before_ns)) = before else { return };
        let worked_ns = passed(could_before_ns, could_run_ns).unwrap_or(0);
        let known_ns = slept_ns.saturating_add(worked_ns);
        let mut absent_ns = now_ns.saturating_sub(before_ns).saturating_sub(known_ns);
        if absent_ns >= MIN_ABSENCE_NS {
            absent_ns = absent_ns.saturating_sub(throttled_ns(before_ns, now_ns));
        }
        if absent_ns >= MIN_ABSENCE_NS {
            self.all.truncate(MAX_ABSENCES - 1);
            self.all.push_front((now_ns, absent_ns));
        }
    }

    /// The part of an interval up to now in which the collector was not there.
    fn since(&self, since_ns: u64) -> u64 {
        let within = self.all.iter().filter(|(end_ns, _)| *end_ns > since_ns);
        within.map(|(end_ns, absent_ns)| (*absent_ns).min(end_ns - since_ns)).sum()
    }
}

const PAUSE_TIMES: u32 = 100;

impl Watchdog {
    pub(crate) fn new() -> Self {
        Self {
            checked: Instant::now(),
            kept: HashMap::new(),
            polled: HashMap::new(),
            cost: Duration::ZERO,
            absences: CollectorStalls::default(),
            own_schedstat: None,
            throttling: Throttling::new(),
            present: Vec::new(),
        }
    }

    pub(crate) fn forget(&mut self, span: SpanKey) {
        self.kept.remove(&span);
        self.polled.remove(&span);
    }
    pub(crate) fn until_next_check(&self, callsites: &Callsites) -> Option<Duration> {
        let limit = callsites.least_limit()?;
        let every = (limit / 8).clamp(MIN_INTERVAL, MAX_INTERVAL).max(self.cost * PAUSE_TIMES);
        Some(every.saturating_sub(self.checked.elapsed()))
    }

    /// Call first on the collector's thread, while the layer is being built: opens a file.
    pub(crate) fn begin(&mut self, now_ns: u64) {
        self.own_schedstat = sys::Schedstat::open(sys::current_tid()).ok();
        self.note_present(now_ns, Duration::ZERO);
    }

    pub(crate) fn note_present(&mut self, now_ns: u64, slept: Duration) {
        let counted = self.own_schedstat.as_ref().and_then(|file| sys::Schedstat::read(file).ok());
        let waited_ns = counted.map_or(0, |counted| counted.run_delay_ns);
        let could_run_ns = sys::thread_cpu_ns().map(|cpu_ns| cpu_ns.saturating_add(waited_ns));
        let throttled_ns = |from_ns, to_ns| {
            self.throttling.read(to_ns, true, std::iter::empty());
            self.throttling.between(from_ns, to_ns).unwrap_or(0)
        };
        self.absences.note_present(now_ns, could_run_ns, nanoseconds(slept), throttled_ns);
    }

    /// For how long the process was stopped, or the machine paused, between two times.
    pub(crate) fn stopped_ns(&self, from_ns: u64, to_ns: u64) -> u64 {
        self.absences.since(from_ns).saturating_sub(self.absences.since(to_ns))
    }

    /// Finds open spans that must be kept, if that is due. Returns whether it was: they get snapshots then. Call after
    /// draining.
    pub(crate) fn check_open_spans(
        &mut self,
        engine: &Engine,
        intake: &mut Intake,
        threads: &mut Threads,
    ) -> bool {
        if self.until_next_check(&engine.callsites).is_none_or(|left| !left.is_zero()) {
            return false;
        }
        _ = intake.own_cpu.lap();
        self.note_present(intake.now_ns(), Duration::ZERO);
        self.keep_open_spans(engine, intake, threads);
        if let Some(took) = intake.own_cpu.lap() {
            Counters::add(&engine.counters.sampling.collector_cpu_ns, took);
            self.cost = Duration::from_nanos(took);
        }
        self.checked = Instant::now();
        true
    }

    fn keep_open_spans(&mut self, engine: &Engine, intake: &mut Intake, threads: &mut Threads) {
        let closed =
            |(key, id): (&SpanKey, &RegistryId)| (!engine.spans.is_open(*id, *key)).then_some(*key);
        intake.closed.extend(self.polled.iter().filter_map(closed));
        let now_ns = intake.now_ns();
        // Read before the slots, so that the slot of a span in which a thread is found shows it as entered.
        let innermost: HashSet<_> = threads
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
        if innermost.is_empty() && !engine.spans.has_watched() {
            return;
        }
        engine.spans.forget_watched();
        let (ids, mut found) = self.find_over_limit(engine, intake, &innermost);
        if found.is_empty() {
            return;
        }
        for (key, id) in ids {
            self.register(&engine.spans, intake, (id, key));
        }
        let over: HashSet<_> = found.iter().map(|(open, _)| open.key).collect();
        self.present = engine.awaits.present(|span| engine.spans.is_in_any(span, &over));
        let present: Vec<_> = self.present.iter().map(|(span, _)| *span).collect();
        for span in present {
            self.register(&engine.spans, intake, (span.id, span.key));
        }
        // Outermost first, so that spans inside another one are kept together with it.
        found.sort_by_key(|(open, _)| u64::MAX - open.open_ns);
        let mut deadlocks = None;
        let mut kept = 0;
        for (open, mut reasons) in found {
            // A span hangs only if a thread is in it.
            let store = &intake.sinks.store;
            if !threads.sampled.iter().any(|sampled| is_inside(store, sampled, open.key)) {
                reasons = reasons.iter().filter(|reason| *reason != Reason::Hung).collect();
            }
            if !reasons.is_empty() && kept < MAX_AT_ONCE {
                kept += 1;
                let is_hung = reasons.contains(Reason::Hung);
                let deadlocks = match is_hung {
                    true => deadlocks.get_or_insert_with(Deadlock::find_all).as_slice(),
                    false => &[],
                };
                let deadlock = deadlock_of(engine, store, threads, (open.key, deadlocks));
                self.keep_open(engine, intake, threads, (&open, reasons, now_ns), deadlock);
            }
        }
    }

    /// The ids of the spans that threads are in, and the spans over a limit for which they have not been kept yet.
    fn find_over_limit(
        &mut self,
        engine: &Engine,
        intake: &Intake,
        innermost: &HashSet<SpanKey>,
    ) -> (HashMap<SpanKey, RegistryId>, Vec<(OpenSlot, Reasons)>) {
        let (mut ids, mut over, mut has_watched) = (HashMap::new(), Vec::new(), false);
        let is_over = |ns: Option<u64>, limit_ns: Option<u64>| {
            ns.zip(limit_ns).is_some_and(|(ns, limit_ns)| ns > limit_ns)
        };
        engine.spans.for_each_open(|open| {
            if innermost.contains(&open.key) {
                ids.insert(open.key, open.id);
            }
            let Some(callsite) = engine.callsites.get(open.plan) else { return };
            let (hung_ns, open_ns) = (callsite.rule.hung_ns, callsite.rule.open_ns);
            has_watched |= open_ns.is_some();
            if is_over(open.entered_ns, hung_ns) || is_over(Some(open.open_ns), open_ns) {
                over.push((*open, hung_ns, open_ns));
            }
        });
        // The process may have been stopped in the meantime, also while the slots were read.
        let now_ns = intake.now_ns();
        self.note_present(now_ns, Duration::ZERO);
        let found = over.into_iter().filter_map(|(open, hung_ns, open_ns)| {
            let since_entered = |ns: u64| self.absences.since(now_ns.saturating_sub(ns));
            let entered_ns = open.entered_ns.map(|ns| ns.saturating_sub(since_entered(ns)));
            let over = [
                (Reason::Hung, is_over(entered_ns, hung_ns)),
                (Reason::Open, is_over(Some(open.open_ns), open_ns)),
            ];
            let before = self.kept.get(&open.key).copied().unwrap_or_default();
            let new = over.into_iter().filter(|(reason, over)| *over && !before.contains(*reason));
            let reasons: Reasons = new.map(|(reason, _)| reason).collect();
            (!reasons.is_empty()).then_some((open, reasons))
        });
        let found = found.collect();
        if has_watched {
            engine.spans.keep_watching();
        }
        (ids, found)
    }

    fn register(&mut self, spans: &Spans, intake: &mut Intake, (id, key): (RegistryId, SpanKey)) {
        let store = &mut intake.sinks.store;
        let around = spans.describe(id, key).unwrap_or_default();
        for (key, known) in around {
            if store.get(key).is_none_or(|pending| pending.known.is_none()) {
                self.polled.insert(key, known.id);
            }
            store.register(key, known, intake.round);
        }
    }

    fn keep_open(
        &mut self,
        engine: &Engine,
        intake: &mut Intake,
        threads: &Threads,
        (open, reasons, now_ns): (&OpenSlot, Reasons, u64),
        deadlock: Option<Arc<str>>,
    ) {
        let OpenSlot { id, key, entered_ns, .. } = *open;
        self.register(&engine.spans, intake, (id, key));
        let store = &intake.sinks.store;
        let Some((mut open, segment_ns)) = engine.spans.as_closing(id, key) else { return };
        let before = self.kept.entry(key).or_default();
        *before = before.and(reasons);
        // The thread that is still in the span has not added its open segment to the account. If several threads are
        // in it, the first one that has any time is taken for the one that entered it.
        let since_ns = now_ns.saturating_sub(entered_ns.unwrap_or(0));
        let inside = threads.sampled.iter().filter(|sampled| is_inside(store, sampled, key));
        let ran = inside.map(|sampled| {
            let synced = sampled.thread().synced();
            let by_sync = sampled.cpu_times.since_sync(since_ns, synced);
            let ran = sampled.cpu_times.between(since_ns, now_ns).or(by_sync);
            let waited_ns = sampled.waiting().map_or(0, WaitingThread::waited_ns);
            Ran { off_ns: ran.off_ns.max(waited_ns), ..ran }
        });
        let Ran { on_ns, off_ns, sampled_ns } =
            ran.into_iter().find(|ran| *ran != Ran::default()).unwrap_or_default();
        open.account = match intake.own_cpu.last_ns {
            Some(_) => with_segment(open.account, segment_ns, on_ns, off_ns, sampled_ns),
            None => open.account.without_cpu_time(),
        };
        // What the profile will contain, and not what hooks have counted so far.
        let inside = store.inside(open.root, [key]);
        let pending = inside.iter().filter_map(|span| store.get(*span));
        open.samples = pending.map(SpanSamples::count).sum();
        open.samples.waits +=
            threads.waiting().filter(|wait| inside.contains(&wait.span)).count() as u64;
        let present = self.present.iter();
        let present: Vec<_> = present.filter(|(span, _)| inside.contains(&span.key)).collect();
        open.samples.awaits += present.len() as u64;
        // Of several tasks in it, the one that has awaited for longest.
        // One in another task may be in a span inside, without this one being idle for it.
        let own = present.iter().filter(|(span, _)| {
            let outermost = engine.spans.outermost_of(span);
            span.key == key || outermost.is_some_and(|outermost| outermost.key == key)
        });
        let own = own.map(|(_, sample)| sample.amounts.map(|amount| amount.weight));
        if let Some([await_ns, delay_ns]) = own.max_by_key(|[await_ns, _]| *await_ns)
            && entered_ns.is_none()
        {
            open.account = open.account.with_await(await_ns, delay_ns);
        }
        engine.keep_open(&open, reasons, deadlock);
    }
}

fn deadlock_of(
    engine: &Engine,
    store: &Store,
    threads: &Threads,
    (span, deadlocks): (SpanKey, &[Deadlock]),
) -> Option<Arc<str>> {
    let is_of = |deadlock: &&Deadlock| {
        let inside = threads.sampled.iter().filter(|sampled| is_inside(store, sampled, span));
        inside.into_iter().any(|sampled| deadlock.has(sampled.thread().tid()))
    };
    let name = |tid: u32| {
        let mut sampled = threads.sampled.iter().filter(|sampled| sampled.thread().tid() == tid);
        let span = sampled.find_map(|sampled| {
            let key = sampled.thread().span()?;
            let known = store.get(key)?.known?;
            Some(escaped(&engine.name_of(known.span(key))).to_string())
        });
        let thread = || sys::OsThread::of(tid).name();
        let thread = || escaped(&engine.names.redaction.redact_span(&thread())).to_string();
        format!("`{}` (thread {tid})", span.unwrap_or_else(thread))
    };
    deadlocks.iter().find(is_of).map(|deadlock| deadlock.in_words(name).into())
}

fn is_inside(store: &Store, sampled: &SampledThread, span: SpanKey) -> bool {
    let innermost = sampled.thread().span();
    innermost.is_some_and(|innermost| {
        innermost == span || store.ancestors(innermost).any(|around| around == span)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// A thread has the CPU to which this one is bound, too.
    #[cfg(target_os = "linux")]
    #[test]
    fn time_in_which_the_collector_waits_for_a_cpu_is_no_absence() {
        use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
        if sys::Schedstat::open(sys::current_tid()).is_err() {
            return;
        }
        let ran_for = |ns| {
            let start_ns = sys::thread_cpu_ns().unwrap();
            while sys::thread_cpu_ns().unwrap() < start_ns + ns {}
        };
        let allowed = sched_getaffinity(None).unwrap();
        let mut one = CpuSet::new();
        one.set((0..CpuSet::MAX_CPU).find(|number| allowed.is_set(*number)).unwrap());
        let collects = move || {
            sched_setaffinity(None, &one).unwrap();
            let (start, mut watchdog) = (Instant::now(), Watchdog::new());
            let now_ns = || u64::try_from(start.elapsed().as_nanos()).unwrap();
            watchdog.begin(now_ns());
            std::thread::spawn(move || ran_for(400 * MS));
            ran_for(400 * MS);
            let now_ns = now_ns();
            watchdog.note_present(now_ns, Duration::ZERO);
            assert_eq!(watchdog.stopped_ns(0, now_ns), 0, "in {now_ns} ns");
        };
        std::thread::spawn(collects).join().unwrap();
    }

    #[test]
    fn time_in_which_the_collector_did_not_run_is_absence() {
        let mut absences = CollectorStalls::default();
        let never = |_, _| 0;
        absences.note_present(0, Some(0), 0, never);
        // It slept as long as it meant to, and a busy machine let it wait.
        absences.note_present(1_050 * MS, Some(MS), 1_000 * MS, never);
        // It worked.
        absences.note_present(2_050 * MS, Some(900 * MS), 20 * MS, never);
        assert_eq!(absences.since(0), 0);
        // It meant to sleep for 5 ms, and was stopped for two seconds.
        absences.note_present(4_060 * MS, Some(902 * MS), 5 * MS, never);
        let absent = 2_003 * MS;
        assert_eq!(absences.since(2_000 * MS), absent);
        // A span that was entered in the meantime had less of it, and a later one none.
        assert_eq!(absences.since(4_000 * MS), 60 * MS);
        assert_eq!(absences.since(4_060 * MS), 0);
        // Its control group was throttled, which a hung span does not get back.
        absences.note_present(5_060 * MS, Some(902 * MS), 5 * MS, |from_ns, to_ns| {
            assert_eq!((from_ns, to_ns), (4_060 * MS, 5_060 * MS));
            960 * MS
        });
        assert_eq!(absences.since(2_000 * MS), absent);
        absences.note_present(6_060 * MS, None, 0, never);
        assert_eq!(absences.since(0), absent + 1_000 * MS);
        for second in 7..7 + 2 * MAX_ABSENCES as u64 {
            absences.note_present(second * 1_000 * MS, None, 0, never);
        }
        assert_eq!(absences.all.len(), MAX_ABSENCES);
    }
}
