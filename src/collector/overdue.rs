//! Spans that hang, or are open for too long: they have a profile of what they did so far, which takes nothing from the
//! one that they have when they close.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

use super::look::passed;
use super::pending::PendingSpan;
use super::run::Collector;
use super::sampled::Sampled;
use super::waits::WaitingThread;
use crate::keep::{Reason, Reasons};
use crate::span::{OpenSpan, RegistryId, SpanKey};
use crate::stats::Counters;
use crate::sys;

/// How often to look at open spans at most, and at least.
const SOONEST: Duration = Duration::from_millis(50);
const LATEST: Duration = Duration::from_secs(1);
/// Open spans that are kept in one look: each takes a profile or a report.
const MOST_AT_ONCE: usize = 64;

/// What is known of open spans from one look to the next.
#[derive(Debug)]
pub(super) struct Overdue {
    pub(super) looked: Instant,
    /// Why open spans were kept: once for each reason.
    kept: HashMap<SpanKey, Reasons>,
    /// Spans that hooks may not have announced: whether they are open must be asked.
    ours: HashMap<SpanKey, RegistryId>,
    /// CPU time of the last look: these take 1 % of a core at most.
    cost: Duration,
    /// Under which rules, and when, those that were replaced were last looked after.
    swept: (u64, Instant),
}

/// So many times as long as a look takes there is none.
const PAUSE_TIMES: u32 = 100;

/// Moments at which the CPU clock of a thread was read, the oldest first.
#[derive(Debug, Default)]
pub(super) struct CpuTimes(VecDeque<CpuTime>);

#[derive(Clone, Copy, Debug)]
struct CpuTime {
    time_ns: u64,
    cpu_ns: u64,
    /// For how long the thread had been sampled, as far as its hooks have not heard of it.
    sampled_ns: u64,
}

/// What became of a thread's time.
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
            // Half as many for twice as long.
            let mut keeps = false;
            self.0.retain(|_| {
                keeps = !keeps;
                keeps
            });
        }
        self.0.push_back(time);
    }

    /// For how long the thread ran, and how long it did not, from the first moment after `since_ns` on.
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
}

impl Overdue {
    pub(super) fn new() -> Self {
        Self {
            looked: Instant::now(),
            kept: HashMap::new(),
            ours: HashMap::new(),
            cost: Duration::ZERO,
            swept: (0, Instant::now()),
        }
    }

    /// The span is closed.
    pub(super) fn forget(&mut self, span: SpanKey) {
        self.kept.remove(&span);
        self.ours.remove(&span);
    }
}

impl Collector {
    /// How soon to look at open spans again; `None` if no rule asks for it.
    pub(super) fn until_overdue(&self) -> Option<Duration> {
        let limit = self.engine.callsites.least_limit()?;
        let every = (limit / 8).clamp(SOONEST, LATEST).max(self.overdue.cost * PAUSE_TIMES);
        Some(every.saturating_sub(self.overdue.looked.elapsed()))
    }

    /// Whether a span is open of which only a look tells that it closes.
    pub(super) fn watches_spans(&self) -> bool {
        !self.overdue.ours.is_empty() || self.engine.spans.has_watched()
    }

    /// Looks for open spans that must be kept, after everything was drained, and makes their profiles.
    pub(super) fn look_for_overdue(&mut self) {
        if self.until_overdue().is_none_or(|left| !left.is_zero()) {
            return;
        }
        let start = sys::thread_cpu_ns();
        self.look_at_open();
        if let Some(took) = passed(start, sys::thread_cpu_ns()) {
            Counters::add(&self.engine.counters.sampling.collector_cpu_ns, took);
            self.overdue.cost = Duration::from_nanos(took);
        }
        self.overdue.looked = Instant::now();
        for snapshot in self.engine.keeper.take_snapshots() {
            self.export(snapshot);
        }
    }

    fn look_at_open(&mut self) {
        let closed = |(key, id): (&SpanKey, &RegistryId)| {
            (!self.engine.spans.is_open(*id, *key)).then_some(*key)
        };
        self.closed.extend(self.overdue.ours.iter().filter_map(closed));
        let clock = self.engine.spans.clock();
        let now_ns = clock.raw_ns(clock.now());
        // Before the slots: a span in which a thread is seen to be shows that it is entered.
        let innermost: HashSet<_> = self
            .sampled
            .iter_mut()
            .filter_map(|sampled| {
                let span = sampled.recording.span()?;
                if let Some(cpu_ns) = sys::cpu_ns_of(sampled.recording.tid) {
                    let sampled_ns = sampled.sampled_ns(cpu_ns);
                    sampled.cpu_times.note(CpuTime { time_ns: now_ns, cpu_ns, sampled_ns });
                }
                Some(span)
            })
            .collect();
        if innermost.is_empty() && !self.engine.spans.has_watched() {
            return;
        }
        let (ids, mut found) = self.find_overdue(&innermost);
        if found.is_empty() {
            return;
        }
        for (key, id) in ids {
            self.make_known(id, key);
        }
        // The outermost first, so that what lies inside another is kept together with it.
        found.sort_by_key(|(open, _)| u64::MAX - open.open_ns);
        let mut kept = 0;
        for (open, mut reasons) in found {
            // What hangs has a thread in it.
            if !self.sampled.iter().any(|sampled| self.is_inside(sampled, open.key)) {
                reasons = reasons.iter().filter(|reason| *reason != Reason::Hung).collect();
            }
            if !reasons.is_empty() && kept < MOST_AT_ONCE {
                kept += 1;
                self.keep_open(&open, reasons, now_ns);
            }
        }
    }

    /// Forgets the plans of rules that were replaced, but not too often.
    pub(super) fn sweep_plans(&mut self) {
        let callsites = &self.engine.callsites;
        let (generation, when) = self.overdue.swept;
        let is_due = generation != callsites.generation() || when.elapsed() >= LATEST;
        if !callsites.has_replaced() || !is_due {
            return;
        }
        let known = self.pending.known_spans();
        let mut in_use: HashSet<_> = known.into_iter().map(|(_, known)| known.plan).collect();
        self.engine.spans.look_at_open(|span| {
            in_use.insert(span.plan);
        });
        self.overdue.swept = (callsites.generation(), Instant::now());
        callsites.sweep(&in_use);
    }

    /// The ids of spans in which threads are, and the spans over a limit for which they were not kept.
    fn find_overdue(
        &self,
        innermost: &HashSet<SpanKey>,
    ) -> (HashMap<SpanKey, RegistryId>, Vec<(OpenSpan, Reasons)>) {
        let (mut ids, mut found) = (HashMap::new(), Vec::new());
        self.engine.spans.look_at_open(|open| {
            if innermost.contains(&open.key) {
                ids.insert(open.key, open.id);
            }
            let Some(site) = self.engine.callsites.get(open.plan) else { return };
            let before = self.overdue.kept.get(&open.key).copied().unwrap_or_default();
            let over = [
                (open.entered_ns, site.hung_ns, Reason::Hung),
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
        (ids, found)
    }

    fn make_known(&mut self, id: RegistryId, key: SpanKey) {
        let around = self.engine.spans.describe(id, key).unwrap_or_default();
        for (key, known) in around {
            if self.pending.get(key).is_none_or(|pending| pending.known.is_none()) {
                self.overdue.ours.insert(key, known.id);
            }
            self.pending.know(key, known, self.round);
        }
    }

    fn keep_open(&mut self, open: &OpenSpan, reasons: Reasons, now_ns: u64) {
        let OpenSpan { id, key, entered_ns, .. } = *open;
        self.make_known(id, key);
        let Some((mut open, segment_ns)) = self.engine.spans.as_closing(id, key) else { return };
        let before = self.overdue.kept.entry(key).or_default();
        *before = before.and(reasons);
        // Whoever is in it still has not said so. If several threads are, the first one is taken for the one that entered
        // it.
        let since_ns = now_ns.saturating_sub(entered_ns.unwrap_or(0));
        let inside = self.sampled.iter().filter(|sampled| self.is_inside(sampled, key));
        let ran = inside.map(|sampled| {
            let ran = sampled.cpu_times.since(since_ns);
            let waited_ns = sampled.waiting().map_or(0, WaitingThread::waited_ns);
            Ran { off_ns: ran.off_ns.max(waited_ns), ..ran }
        });
        let Ran { on_ns, off_ns, sampled_ns } =
            ran.into_iter().find(|ran| *ran != Ran::default()).unwrap_or_default();
        open.account = match sys::thread_cpu_ns() {
            Some(_) => open.account.with_segment(segment_ns, on_ns, off_ns, sampled_ns),
            None => open.account.without_cpu_time(),
        };
        // What the profile has, and not what hooks have heard of.
        let inside = self.pending.inside(open.root, [key]);
        let pending = inside.iter().filter_map(|span| self.pending.get(*span));
        let waiting = self.sampled.iter().filter_map(Sampled::waiting);
        open.samples = pending.map(PendingSpan::count).sum::<u64>()
            + waiting.filter(|wait| inside.contains(&wait.span)).count() as u64;
        self.engine.keep_open(&open, reasons);
    }

    fn is_inside(&self, sampled: &Sampled, span: SpanKey) -> bool {
        let innermost = sampled.recording.span();
        innermost.is_some_and(|innermost| {
            innermost == span || self.pending.ancestors(innermost).any(|around| around == span)
        })
    }
}
