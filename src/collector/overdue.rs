//! Spans that hang, or are open for too long: they are kept while they are open.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

use super::pending::KnownSpan;
use super::run::Collector;
use super::sampled::Sampled;
use crate::keep::{Epoch, Reason};
use crate::span::{Described, OpenSpan, RegistryId, SpanKey, Told};
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
    looked: Instant,
    /// Of spans that were kept while open, and whose epoch has not been exported yet.
    kept: HashMap<SpanKey, KeptOpen>,
    /// Roots whose epochs end in the next round.
    roots: Vec<SpanKey>,
    /// Spans that hooks may not have announced: whether they are open must be asked.
    ours: HashMap<SpanKey, RegistryId>,
    /// CPU time of the last look: these take 1 % of a core at most.
    cost: Duration,
    /// Under which rules, and when, those that were replaced were last looked after.
    swept: (u64, Instant),
}

/// So many times as long as a look takes there is none.
const PAUSE_TIMES: u32 = 100;

#[derive(Clone, Copy, Debug)]
struct KeptOpen {
    id: RegistryId,
    /// The samples that earlier profiles have had.
    before: u64,
}

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
            return Ran { on_ns: 0, off_ns: 0, sampled_ns: 0 };
        };
        let on_ns = last.cpu_ns.saturating_sub(first.cpu_ns);
        Ran {
            on_ns,
            off_ns: last.time_ns.saturating_sub(first.time_ns).saturating_sub(on_ns),
            sampled_ns: last.sampled_ns.saturating_sub(first.sampled_ns).min(on_ns),
        }
    }
}

/// A span that is kept now.
struct KeptWhileOpen {
    open: OpenSpan,
    told: Told,
}

impl Overdue {
    pub(super) fn new() -> Self {
        Self {
            looked: Instant::now(),
            kept: HashMap::new(),
            roots: Vec::new(),
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

    /// That epoch is exported.
    pub(super) fn forget_epoch(&mut self, epoch: &Epoch) {
        for span in epoch.kept.iter().filter(|span| span.is_open) {
            self.kept.remove(&span.key);
        }
    }
}

impl Collector {
    /// How soon to look at open spans again; `None` if no rule asks for it.
    pub(super) fn until_overdue(&self) -> Option<Duration> {
        let limit = self.engine.callsites.least_limit()?;
        let every = (limit / 8).clamp(SOONEST, LATEST).max(self.overdue.cost * PAUSE_TIMES);
        Some(every.saturating_sub(self.overdue.looked.elapsed()))
    }

    /// The roots whose epochs are to be exported at once.
    pub(super) fn take_overdue_roots(&mut self) -> Vec<SpanKey> {
        std::mem::take(&mut self.overdue.roots)
    }

    /// Whether a span is open of which only a look tells that it closes.
    pub(super) fn watches_spans(&self) -> bool {
        !self.overdue.ours.is_empty() || self.engine.spans.has_watched()
    }

    /// Looks for open spans that must be kept, after everything was drained. Returns whether there were
    /// some: then another round must follow.
    pub(super) fn look_for_overdue(&mut self) -> bool {
        if self.until_overdue().is_none_or(|left| !left.is_zero()) {
            return false;
        }
        let start = sys::thread_cpu_ns();
        let is_kept = self.look_at_open();
        let end = sys::thread_cpu_ns();
        if let Some(took) = start.zip(end).and_then(|(start, end)| end.checked_sub(start)) {
            Counters::add(&self.engine.counters.draining_cpu_ns, took);
            self.overdue.cost = Duration::from_nanos(took);
        }
        self.overdue.looked = Instant::now();
        is_kept
    }

    fn look_at_open(&mut self) -> bool {
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
                let cpu_ns = sys::cpu_ns_of(sampled.recording.tid)?;
                let sampled_ns = sampled.sampled_ns(cpu_ns);
                sampled.cpu_times.note(CpuTime { time_ns: now_ns, cpu_ns, sampled_ns });
                Some(span)
            })
            .collect();
        if innermost.is_empty() && !self.engine.spans.has_watched() {
            return false;
        }
        let (ids, mut found) = self.find_overdue(&innermost);
        if found.is_empty() {
            return false;
        }
        for (key, id) in ids {
            self.make_known(id, key);
        }
        // What hangs has a thread in it.
        found.retain(|found| {
            found.told == Told::Open
                || self.sampled.iter().any(|sampled| self.is_inside(sampled, found.open.key))
        });
        // The outermost first, so that what lies inside another is kept together with it.
        found.sort_by_key(|found| u64::MAX - found.open.open_ns);
        let (mut is_kept, mut cuts) = (false, HashMap::new());
        for found in found.into_iter().take(MOST_AT_ONCE) {
            if self.engine.spans.tell_of(found.open.id, found.open.key, found.told) {
                is_kept |= self.keep_open(&found, now_ns, &mut cuts);
            }
        }
        is_kept
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

    /// The ids of spans in which threads are, and the spans over a limit of which that was not said.
    fn find_overdue(
        &self,
        innermost: &HashSet<SpanKey>,
    ) -> (HashMap<SpanKey, RegistryId>, Vec<KeptWhileOpen>) {
        let (mut ids, mut found) = (HashMap::new(), Vec::new());
        let spans = &self.engine.spans;
        spans.look_at_open(|open| {
            if innermost.contains(&open.key) {
                ids.insert(open.key, open.id);
            }
            let Some(site) = self.engine.callsites.get(open.plan) else { return };
            let over = [
                (open.entered_ns, site.hung_ns, Told::Hung),
                (Some(open.open_ns), site.open_ns, Told::Open),
            ];
            for (ns, limit_ns, told) in over {
                let is_over = ns.zip(limit_ns).is_some_and(|(ns, limit_ns)| ns > limit_ns);
                if is_over && !spans.was_told_of(open.id, open.key, told) {
                    found.push(KeptWhileOpen { open: *open, told });
                }
            }
        });
        (ids, found)
    }

    fn make_known(&mut self, id: RegistryId, key: SpanKey) -> Option<Described> {
        let around = self.engine.spans.describe(id, key)?;
        for Described { id, key, parent, root, plan } in &around {
            if self.pending.get(*key).is_none_or(|pending| pending.known.is_none()) {
                self.overdue.ours.insert(*key, *id);
            }
            let known = KnownSpan { parent: *parent, root: *root, id: *id, plan: *plan };
            self.pending.know(*key, known, self.round);
        }
        around.last().copied()
    }

    /// `cuts` are the waits that this look has cut already, by thread.
    fn keep_open(
        &mut self,
        found: &KeptWhileOpen,
        now_ns: u64,
        cuts: &mut HashMap<usize, u64>,
    ) -> bool {
        let OpenSpan { id, key, entered_ns, .. } = found.open;
        let Some(described) = self.make_known(id, key) else { return false };
        let mut waits = 0;
        let mut parts = (0, 0);
        let mut sampled_ns = 0;
        let since_ns = now_ns.saturating_sub(entered_ns.unwrap_or(0));
        for number in 0..self.sampled.len() {
            let Some(sampled) =
                self.sampled.get(number).filter(|sampled| self.is_inside(sampled, key))
            else {
                continue;
            };
            // If several threads are inside, the first one is taken for the one that entered it.
            let of_clock = sampled.cpu_times.since(since_ns);
            let is_first = parts == (0, 0) && entered_ns.is_some();
            let cut_ns = match cuts.get(&number) {
                Some(cut_ns) => Some(*cut_ns),
                None => self.cut_wait(number, now_ns),
            };
            cuts.extend(cut_ns.map(|cut_ns| (number, cut_ns)));
            waits += u64::from(cut_ns.is_some());
            if is_first {
                parts = (of_clock.on_ns, of_clock.off_ns.max(cut_ns.unwrap_or(0)));
                sampled_ns = of_clock.sampled_ns;
            }
        }
        let Some((account, segment_ns)) = self.engine.spans.account_of(id, key) else {
            return false;
        };
        // Whoever is in it still has not said so.
        let account = match sys::thread_cpu_ns() {
            Some(_) => account.with_segment(segment_ns, parts.0, parts.1, sampled_ns),
            None => account.without_cpu_time(),
        };
        let Some(samples) = self.samples_so_far(id, key) else { return false };
        let reason = match found.told {
            Told::Hung => Reason::Hung,
            Told::Open => Reason::Open,
        };
        // A wait that goes on counts as a sample here, and what is left of it will count again.
        let all = samples + waits;
        let Some(new) = self.engine.keep_open(&described, reason, account, all) else {
            return false;
        };
        self.overdue.kept.insert(key, KeptOpen { id, before: all.saturating_sub(new) });
        self.overdue.roots.push(described.root);
        true
    }

    fn is_inside(&self, sampled: &Sampled, span: SpanKey) -> bool {
        let innermost = sampled.recording.span();
        innermost.is_some_and(|innermost| {
            innermost == span || self.pending.ancestors(innermost).any(|around| around == span)
        })
    }

    /// The samples in an open span and inside it, of those that were read: those that hooks have seen, and
    /// those that they will.
    fn samples_so_far(&self, id: RegistryId, key: SpanKey) -> Option<u64> {
        let seen = self.engine.spans.samples_of(id, key)?;
        let inside = self.sampled.iter().filter(|sampled| self.is_inside(sampled, key));
        Some(seen + inside.map(Sampled::samples_unseen).sum::<u64>())
    }

    /// The samples that the profile of an epoch that ends now takes from each of its spans; and if some of
    /// these are open, all samples so far of each open span inside them, themselves among these.
    pub(super) fn samples_of_epoch(
        &self,
        epoch: &Epoch,
    ) -> (HashMap<SpanKey, u64>, HashMap<SpanKey, u64>) {
        let mut kept: HashMap<_, _> =
            epoch.kept.iter().map(|span| (span.key, span.samples)).collect();
        let mut inside = HashMap::new();
        if !epoch.kept.iter().any(|span| span.is_open) {
            return (kept, inside);
        }
        for span in super::build::inside(&self.pending, epoch) {
            let id = self.pending.get(span).and_then(|pending| Some(pending.known?.id));
            let so_far = id.and_then(|id| self.samples_so_far(id, span));
            inside.extend(so_far.map(|samples| (span, samples)));
        }
        for (span, open) in &self.overdue.kept {
            // It may have closed meanwhile, and then it is judged like any other.
            let so_far = self.samples_so_far(open.id, *span);
            if let Some((samples, so_far)) = kept.get_mut(span).zip(so_far) {
                *samples = so_far.saturating_sub(open.before);
            }
        }
        (kept, inside)
    }
}
