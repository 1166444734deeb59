//! Builds profiles from pending samples.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::awaits::PresentAwait;
use super::engine::Engine;
use super::pending::Pending;
use super::stack::Stack;
use super::tables::{SpanDetail, Tables};
use super::waits::WaitingThread;
use crate::facts::Facts;
use crate::ids::{SpanId, TraceId};
use crate::keep::{Callsites, Epoch, KeptSpan};
use crate::profile::{MappingId, Point, Profile, ProfileId, SampleKind, is_of_dependency};
use crate::publish::report;
use crate::span::SpanKey;
use crate::unwind::{Module, Modules, UnwindEnd, Unwinder};

/// Where the names and times of a profile come from.
#[derive(Clone, Copy)]
pub(super) struct ProfileInputs<'a> {
    pub(super) pending: &'a Pending,
    pub(super) modules: &'a Modules,
    pub(super) callsites: &'a Callsites,
    /// Converts `CLOCK_MONOTONIC_RAW` to Unix time.
    pub(super) unix_offset_ns: i128,
    pub(super) period_ns: u64,
}

/// Builds the profile of an epoch.
pub(super) struct ProfileAssembler<'a> {
    pub(super) inputs: ProfileInputs<'a>,
    /// Waits that have not ended.
    pub(super) waiting: Vec<&'a WaitingThread>,
    /// Awaits that have not ended.
    pub(super) awaiting: Vec<PresentAwait>,
    pub(super) most_samples: usize,
    /// The limit for the profile's memory.
    pub(super) most_bytes: usize,
    /// Whether on-CPU time without samples is kernel time.
    pub(super) hides_kernel: bool,
}

/// A profile without symbols, and the modules that symbolization needs.
pub(super) struct Built {
    pub(super) profile: Profile,
    pub(super) modules: HashMap<MappingId, Arc<Module>>,
    /// The spans whose samples it contains.
    pub(super) spans: Vec<SpanKey>,
    /// Samples that were merged into others here.
    pub(super) downsampled: u64,
    pub(super) losses: report::Losses,
}

/// A stack outside of spans, and what is known of it.
pub(super) struct StackWeight<'a> {
    pub(super) stack: &'a Stack,
    pub(super) time_unix_ns: u64,
    pub(super) kind: SampleKind,
    pub(super) weight: u64,
}

/// How many kept spans a profile lists.
const MOST_LISTED: usize = 64;

impl<'a> ProfileInputs<'a> {
    /// Those of a profile that no span has.
    pub(super) fn of_stacks(
        engine: &'a Engine,
        pending: &'a Pending,
        unwinder: &'a Unwinder,
    ) -> Self {
        let (modules, callsites) = (unwinder.modules(), &engine.callsites);
        Self { pending, modules, callsites, unix_offset_ns: 0, period_ns: 0 }
    }

    pub(super) fn unix_ns(&self, raw_ns: u64) -> u64 {
        u64::try_from(i128::from(raw_ns) + self.unix_offset_ns).unwrap_or(0)
    }

    /// The stacks as a profile, for symbolization. No span has them.
    pub(super) fn profile_of_stacks<'b>(
        self,
        id: ProfileId,
        stacks: impl IntoIterator<Item = StackWeight<'b>>,
    ) -> (Profile, HashMap<MappingId, Arc<Module>>) {
        let mut tables = Tables::new(self, id, None, SpanDetail::All);
        for StackWeight { stack, time_unix_ns, kind, weight } in stacks {
            let stack = tables.stack(stack);
            tables.add_point(kind, stack, None, Point { time_unix_ns, weight, thread: None });
        }
        (tables.profile, tables.modules)
    }
}

impl ProfileAssembler<'_> {
    /// Builds the profile of an epoch from the samples of its kept spans and the spans inside them. Downsamples if it
    /// would exceed its limits.
    pub(super) fn build(&self, id: ProfileId, epoch: &Epoch) -> Built {
        let pending = self.inputs.pending;
        let inside = pending.inside(epoch.root, epoch.kept.iter().map(|span| span.key));
        let of_root = pending.of_root(epoch.root).iter();
        let spans: Vec<SpanKey> = of_root.filter(|span| inside.contains(span)).copied().collect();

        let pending = || spans.iter().filter_map(|span| pending.get(*span));
        let samples: usize = pending().map(|span| span.samples.len()).sum();
        let mut counts: HashMap<SampleKind, usize> = HashMap::from([
            (SampleKind::OnCpu, samples),
            (SampleKind::OffCpu, self.waiting_in(&inside).count()),
        ]);
        for wait in pending().flat_map(|span| &span.waits) {
            *counts.entry(wait.kind).or_default() += 1;
        }
        let most = counts.values().copied().max().unwrap_or(0);
        let mut every = samples.div_ceil(self.most_samples).max(1);
        let mut detail = SpanDetail::All;
        let Filled { tables, mut losses, downsampled } = loop {
            // At least one sample is taken, whatever its size.
            let most_bytes = if every < most { self.most_bytes } else { usize::MAX };
            let mut taking = Taking::new(every, &counts);
            match self.fill(id, epoch, &inside, &spans, &mut taking, (detail, most_bytes)) {
                Some(filled) => break filled,
                // No sample is left out for the records of spans. Each attempt delays draining.
                None => match detail.less() {
                    Some(less) => detail = less,
                    None => every = every.saturating_mul(4),
                },
            }
        };
        let mut tables = tables;
        losses.downsampled += downsampled;
        let topmost = self.topmost(epoch);
        if let Some(off_cpu_ns) = self.off_cpu_of_waits(epoch, &topmost, tables.profile.waited_ns())
        {
            tables.profile.shorten_waits(off_cpu_ns);
        }
        losses.missing = tables.add_missing(epoch, &inside);
        if self.hides_kernel {
            tables.add_kernel(epoch, &topmost, &losses, &inside);
        }
        let Tables { mut profile, modules, .. } = tables;
        self.place_in_time(&mut profile, epoch);
        report::describe(&mut profile, epoch, &topmost, &losses);
        profile.notes.extend(detail.note().map(str::to_owned));
        profile.losses.extend(detail.note().map(str::to_owned));
        profile.spans = self.facts(epoch, &topmost);
        Built { profile, modules, spans, downsampled, losses }
    }

    /// Returns `None` if the profile would exceed `most_bytes`.
    fn fill<'a>(
        &'a self,
        id: ProfileId,
        epoch: &'a Epoch,
        inside: &HashSet<SpanKey>,
        spans: &[SpanKey],
        taking: &mut Taking,
        (detail, most_bytes): (SpanDetail, usize),
    ) -> Option<Filled<'a>> {
        let mut tables = Tables::new(self.inputs, id, Some(epoch), detail);
        let mut losses = report::Losses::default();
        for span in spans {
            let Some(pending) =
                self.inputs.pending.get(*span).filter(|pending| !pending.is_empty())
            else {
                continue;
            };
            let link = tables.link(*span, inside);
            let linked = link.and_then(|link| tables.profile.link(link)?.linked);
            losses += pending.losses;
            taking.of(SampleKind::OnCpu).skipped += pending.skipped_ns;
            let mut stacks = HashMap::new();
            for sample in &pending.samples {
                let stack = pending.stack(sample.stack);
                losses.cut += u64::from(stack.is_some_and(|stack| stack.end == UnwindEnd::Cut));
                let is_incomplete =
                    |stack: &Stack| matches!(stack.end, UnwindEnd::WithoutTables | UnwindEnd::Lost);
                losses.incomplete += u64::from(stack.is_some_and(is_incomplete));
                let taken = taking.of(SampleKind::OnCpu).take(sample.weight_ns, linked);
                if let Some(weight_ns) = taken
                    && let Some(stack) = stack
                {
                    let stack = *stacks.entry(sample.stack).or_insert_with(|| tables.stack(stack));
                    let thread = pending.thread(sample.thread);
                    tables.add(SampleKind::OnCpu, sample.time_ns, weight_ns, thread, stack, link);
                }
                if tables.profile.bytes() > most_bytes {
                    return None;
                }
            }
            for wait in &pending.waits {
                if let Some(weight) = taking.of(wait.kind).take(wait.weight, linked)
                    && let Some(stack) = pending.stack(wait.stack)
                {
                    let stack = *stacks.entry(wait.stack).or_insert_with(|| tables.stack(stack));
                    let thread = pending.thread(wait.thread);
                    tables.add(wait.kind, wait.time_ns, weight, thread, stack, link);
                }
                if tables.profile.bytes() > most_bytes {
                    return None;
                }
            }
            tables.add_lost(pending, link);
        }
        for wait in self.waiting_in(inside) {
            let link = tables.link(wait.span, inside);
            if let Some(weight_ns) = taking.of(SampleKind::OffCpu).take(wait.waited_ns(), None) {
                let stack = tables.stack(&wait.stack);
                let thread = Some(wait.thread);
                tables.add(SampleKind::OffCpu, wait.since_ns, weight_ns, thread, stack, link);
            }
        }
        for present in self.awaiting.iter().filter(|present| inside.contains(&present.span)) {
            let PresentAwait { span, kind, since_ns, duration_ns, stack } = present;
            let (link, stack) = (tables.link(*span, inside), tables.stack(stack));
            tables.add(*kind, *since_ns, *duration_ns, None, stack, link);
        }
        Some(Filled { tables, losses, downsampled: taking.downsampled() })
    }

    fn waiting_in(&self, inside: &HashSet<SpanKey>) -> impl Iterator<Item = &WaitingThread> {
        self.waiting.iter().copied().filter(|wait| inside.contains(&wait.span))
    }

    /// The upper bound of the spans' off-CPU time, if their waits exceed it slightly. The kernel writes a switch
    /// record when the thread's CPU clock already runs, 10 to 20 µs later if it had to program a timer.
    fn off_cpu_of_waits(&self, epoch: &Epoch, topmost: &[SpanKey], waited_ns: u64) -> Option<u64> {
        let accounts = || {
            let spans = epoch.kept.iter().filter(|span| topmost.contains(&span.key));
            spans.map(KeptSpan::times)
        };
        // These accounts do not include waits on other threads.
        let is_all =
            accounts().all(|account| account.covers_subtree() && !account.is_cpu_time_unknown);
        let off_cpu_ns: u64 =
            accounts().map(|account| account.off_cpu_ns + account.on_cpu_error_ns).sum();
        let little_ns = off_cpu_ns / 100 + 1_000_000;
        let is_longer = (off_cpu_ns + 1..=off_cpu_ns + little_ns).contains(&waited_ns);
        (is_all && is_longer).then_some(off_cpu_ns)
    }

    /// The kept spans that are inside no other. A span without samples counts only if it is the root, as its position
    /// in the tree is not known.
    fn topmost(&self, epoch: &Epoch) -> Vec<SpanKey> {
        let is_known = |span: &SpanKey| {
            let pending = self.inputs.pending.get(*span);
            *span == epoch.root || pending.is_some_and(|pending| pending.known.is_some())
        };
        let kept = epoch.kept.iter().map(|span| span.key).filter(is_known).collect();
        self.inputs.pending.topmost(&kept)
    }

    /// The facts of the kept spans, with what only their tree says.
    fn facts(&self, epoch: &Epoch, topmost: &[SpanKey]) -> Vec<Facts> {
        let kept = report::outermost_first(&epoch.kept).into_iter().take(MOST_LISTED);
        let own_file =
            |span: &KeptSpan| span.metadata.file().filter(|file| !is_of_dependency(file));
        let facts = kept.map(|span| Facts {
            is_topmost: topmost.contains(&span.key),
            own_file: own_file(&span).unwrap_or_default(),
            start_unix_ns: self.inputs.unix_ns(span.opened_ns),
            ..span.facts
        });
        facts.collect()
    }

    /// From the start of the first kept span to the end of the last, extended so that it contains all samples.
    fn place_in_time(&self, profile: &mut Profile, epoch: &Epoch) {
        let kept = &epoch.kept;
        let begins = kept.iter().map(|span| self.inputs.unix_ns(span.opened_ns));
        let ends =
            kept.iter().map(|span| self.inputs.unix_ns(span.opened_ns + span.times().wall_ns));
        let points = || profile.samples().iter().flat_map(|sample| &sample.points);
        let first = begins.chain(points().map(|p| p.time_unix_ns)).min().unwrap_or(0);
        let last = ends.chain(points().map(|p| p.time_unix_ns + 1)).max().unwrap_or(0);
        (profile.start_unix_ns, profile.duration_ns) = (first, last - first);
    }
}

/// Filled tables, and what they lack.
struct Filled<'a> {
    tables: Tables<'a>,
    losses: report::Losses,
    downsampled: u64,
}

/// Chooses which samples of each kind are kept.
struct Taking {
    every: usize,
    of_kinds: HashMap<SampleKind, Downsampling>,
}

impl Taking {
    fn new(every: usize, counts: &HashMap<SampleKind, usize>) -> Self {
        let of_kind =
            |(kind, count): (&SampleKind, &usize)| (*kind, Downsampling::new(every, *count));
        Self { every, of_kinds: counts.iter().map(of_kind).collect() }
    }

    fn of(&mut self, kind: SampleKind) -> &mut Downsampling {
        self.of_kinds.entry(kind).or_insert_with(|| Downsampling::new(self.every, 0))
    }

    /// Samples that were left out. Allocations have two values each.
    fn downsampled(&self) -> u64 {
        let kinds = self.of_kinds.iter().filter(|(kind, _)| **kind != SampleKind::Allocations);
        kinds.map(|(_, of_kind)| of_kind.downsampled).sum()
    }
}

/// Chooses which samples of a kind are kept.
struct Downsampling {
    every: usize,
    total: usize,
    number: usize,
    /// The weight of the skipped samples, which goes to the next one that is kept.
    skipped: u64,
    downsampled: u64,
    /// The links of samples so far.
    linked: HashSet<(TraceId, SpanId)>,
}

impl Downsampling {
    fn new(every: usize, total: usize) -> Self {
        Self { every, total, number: 0, skipped: 0, downsampled: 0, linked: HashSet::new() }
    }

    /// The total weight for the next sample, if it is kept. The last one is always kept, so that the profile has all
    /// of the time, and the first one with a link, since an attribute of a span may refer to it.
    fn take(&mut self, weight: u64, linked: Option<(TraceId, SpanId)>) -> Option<u64> {
        self.number += 1;
        self.skipped += weight;
        let is_first = linked.is_some_and(|linked| self.linked.insert(linked));
        let is_last = self.number == self.total;
        let is_taken = self.number.is_multiple_of(self.every) || is_first || is_last;
        self.downsampled += u64::from(!is_taken);
        is_taken.then(|| std::mem::take(&mut self.skipped))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_sample_of_each_link_is_not_downsampled() {
        let linked = |span| Some((TraceId::from_bytes([1; 16]), SpanId::from_bytes([span; 8])));
        let mut samples = Downsampling::new(100, 9);
        let links = [1, 1, 1, 2, 1, 3, 3, 2, 1].map(linked);
        let taken = links.map(|link| samples.take(10, link).unwrap_or(0));
        assert_eq!(taken, [10, 0, 0, 30, 0, 20, 0, 0, 30]);
        assert_eq!(samples.downsampled, 5);
    }
}
