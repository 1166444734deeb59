//! Builds profiles from pending samples.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::tables::{SpanDetail, Tables};
use crate::facts::Facts;
use crate::ids::{SpanId, TraceId};
use crate::keep::{Callsites, KeptSpan, ProfileGroup};
use crate::profile::{
    Link, LinkId, MappingId, Profile, ProfileId, SampleKind, Selection, is_of_dependency,
};
use crate::report;
use crate::sinks::{Losses, NewSample, SpanSamples, StackEntry, Store, StoredSample};
use crate::span::SpanKey;
use crate::sys::OsThread;
use crate::unwind::{Module, Modules, Unwinder};

/// Where the names and times of a profile come from.
#[derive(Clone, Copy)]
pub(crate) struct ProfileInputs<'a> {
    pub(crate) pending: &'a Store,
    pub(crate) modules: &'a Modules,
    pub(crate) callsites: &'a Callsites,
    /// Converts `CLOCK_MONOTONIC_RAW` to Unix time.
    pub(crate) unix_offset_ns: i128,
    pub(crate) period_ns: u64,
}

pub(crate) struct ProfileAssembler<'a> {
    pub(crate) inputs: ProfileInputs<'a>,
    /// Waits and awaits that have not ended, each with its span.
    pub(crate) unfinished: Vec<(SpanKey, NewSample<'a>)>,
    pub(crate) most_samples: usize,
    pub(crate) most_bytes: usize,
    /// Whether on-CPU time without samples is kernel time.
    pub(crate) hides_kernel: bool,
}

/// A profile without symbols, and the modules that symbolization needs.
pub(crate) struct BuiltProfile {
    pub(crate) profile: Profile,
    pub(crate) modules: HashMap<MappingId, Arc<Module>>,
    pub(crate) spans: Vec<SpanKey>,
    /// Samples that were merged into others here.
    pub(crate) downsampled: u64,
    pub(crate) losses: Losses,
}

/// The thread and the span of a stack.
type StackOwner = (Option<OsThread>, Option<Link>);

const MOST_LISTED: usize = 64;

impl<'a> ProfileInputs<'a> {
    /// Without times, as for stacks that no span has.
    pub(crate) fn new(
        callsites: &'a Callsites,
        pending: &'a Store,
        unwinder: &'a Unwinder,
    ) -> Self {
        let modules = unwinder.modules();
        Self { pending, modules, callsites, unix_offset_ns: 0, period_ns: 0 }
    }

    /// The name with a [number](crate::keep::SpanNames::number_of), redacted.
    pub(super) fn span_name(&self, number: u64) -> Option<String> {
        self.pending.names.name_of(number, |plan| self.callsites.name_of(plan))
    }

    pub(crate) fn unix_ns(&self, raw_ns: u64) -> u64 {
        u64::try_from(i128::from(raw_ns) + self.unix_offset_ns).unwrap_or(0)
    }

    /// The stacks as a profile, for symbolization: each with its thread and span, and what it has of each kind.
    pub(crate) fn profile_of_stacks(
        self,
        id: ProfileId,
        stacks: impl IntoIterator<
            Item = (impl Iterator<Item = StackEntry>, StackOwner, Vec<(SampleKind, u64)>),
        >,
    ) -> (Profile, HashMap<MappingId, Arc<Module>>) {
        let mut tables = Tables::new(self, id, None, SpanDetail::All);
        for (entries, (thread, link), weights) in stacks {
            let (place, _) = tables.stack(entries);
            let link = link.map(|link| tables.profile.add_link(link));
            for (kind, weight) in weights {
                tables.add(kind, 0, weight, thread, place, link);
            }
        }
        (tables.profile, tables.modules)
    }
}

impl ProfileAssembler<'_> {
    /// Builds the profile of a group from the samples of its kept spans and those inside, fewer if it would be too large.
    pub(crate) fn build(&self, id: ProfileId, group: &ProfileGroup) -> BuiltProfile {
        let pending = self.inputs.pending;
        let inside = pending.inside(group.root, group.kept.iter().map(|span| span.key));
        let of_root = pending.of_root(group.root).iter();
        let all: Vec<SpanKey> = of_root.filter(|span| inside.contains(span)).copied().collect();
        let (mut detail, mut times) = (SpanDetail::All, 1);
        let (mut tables, spans, mut losses, downsampled) = loop {
            if let Some(fitting) = self.with_samples(id, group, (&all, &inside), (detail, times)) {
                break fitting;
            }
            // No sample is left out for the records of spans.
            match detail.less() {
                Some(less) => detail = less,
                None => times *= 2,
            }
        };
        for SampledSpan { pending, link, .. } in &spans {
            losses += pending.losses;
            losses.lost += pending.lost(SampleKind::OnCpu).count;
            losses.downsampled += pending.kinds.values().map(|it| it.downsampled).sum::<u64>();
            tables.add_lost(pending, *link);
        }
        for (span, new) in self.unfinished.iter().filter(|(span, _)| inside.contains(span)) {
            let NewSample { kind, time_ns, weight, thread, stack } = *new;
            let (link, (place, _)) = (tables.link(*span, &inside), tables.stack(stack.entries()));
            tables.add(kind, time_ns, weight, thread, place, link);
        }
        losses.downsampled += downsampled;
        let topmost = self.topmost(group);
        if let Some(off_cpu_ns) =
            self.off_cpu_of_waits(group, &topmost, tables.profile.total(SampleKind::OffCpu))
        {
            tables.profile.shorten_waits(off_cpu_ns);
        }
        losses.missing = tables.add_missing(group, &inside);
        if self.hides_kernel {
            tables.add_kernel(group, &topmost, &losses, &inside);
        }
        let Tables { mut profile, modules, .. } = tables;
        self.place_in_time(&mut profile, group);
        report::describe(&mut profile, group, &topmost, &losses);
        profile.notes.extend(detail.note().map(str::to_owned));
        profile.losses.extend(detail.note().map(str::to_owned));
        profile.spans = self.facts(group, &topmost);
        BuiltProfile { profile, modules, spans: all, downsampled, losses }
    }

    /// The tables with one in `times` of the samples, and at least one of each kind; `None` if that does not fit into a profile
    /// and less is possible. Returns also the spans that a profile shows something of, how the stacks ended, and how many
    /// samples were left out.
    fn with_samples<'b>(
        &'b self,
        id: ProfileId,
        group: &'b ProfileGroup,
        (all, inside): (&[SpanKey], &HashSet<SpanKey>),
        (detail, times): (SpanDetail, usize),
    ) -> Option<(Tables<'b>, Vec<SampledSpan<'b>>, Losses, u64)> {
        let pending = self.inputs.pending;
        let mut tables = Tables::new(self.inputs, id, Some(group), detail);
        let spans = all.iter().filter_map(|span| Some((*span, pending.get(*span)?)));
        let spans = spans.filter(|(_, pending)| !pending.is_empty());
        let spans = spans.map(|(span, pending)| {
            let link = tables.link(span, inside);
            let linked = link.and_then(|link| tables.profile.link(link)?.linked);
            SampledSpan { pending, link, linked }
        });
        let spans: Vec<_> = spans.collect();
        let mut counts: HashMap<SampleKind, usize> = HashMap::new();
        for (kind, of_kind) in spans.iter().flat_map(|span| &span.pending.kinds) {
            *counts.entry(*kind).or_default() += of_kind.samples.len();
        }
        let is_least = detail.less().is_none() && counts.values().all(|count| times >= *count);
        // Symbols come later: the records of all spans must not take their room.
        let most_bytes = self.most_bytes / if detail.less().is_some() { 2 } else { 1 };
        let mut selection = Selection::new(counts.into_iter().map(|(kind, count)| {
            // A wait that represented others would be taken for a long one.
            let is_limited = kind == SampleKind::OnCpu;
            let every = if is_limited { count.div_ceil(self.most_samples).max(1) } else { 1 };
            (kind, count, every.saturating_mul(times))
        }));
        let (mut losses, mut stacks) = (Losses::default(), HashMap::new());
        for (span, kind, sample, weight) in chosen(&spans, &mut selection) {
            let (thread, stack) = (pending.tables.thread(sample), sample.stack);
            let (place, end) = *stacks
                .entry(stack)
                .or_insert_with(|| tables.stack(pending.tables.stacks.frames(stack)));
            if kind == SampleKind::OnCpu {
                losses.add_end(end);
            }
            let mut inside = || span.link.map(|link| tables.inside(link));
            let link = if sample.is_of_span_inside() { inside() } else { span.link };
            tables.add(kind, sample.time_ns, weight, thread, place, link);
            if !is_least && tables.profile.bytes() > most_bytes {
                return None;
            }
        }
        let downsampled = selection.downsampled as u64;
        Some((tables, spans, losses, downsampled))
    }

    /// The upper bound of the spans' off-CPU time, if their waits exceed it slightly. The kernel writes a switch
    /// record when the thread's CPU clock already runs, 10 to 20 µs later if it had to program a timer.
    fn off_cpu_of_waits(
        &self,
        group: &ProfileGroup,
        topmost: &[SpanKey],
        waited_ns: u64,
    ) -> Option<u64> {
        let accounts = || {
            let spans = group.kept.iter().filter(|span| topmost.contains(&span.key));
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

    fn topmost(&self, group: &ProfileGroup) -> Vec<SpanKey> {
        let kept: HashMap<_, _> = group.kept.iter().map(|span| (span.key, span)).collect();
        let is_inside = |span: &&KeptSpan| {
            let mut around =
                self.inputs.pending.ancestors(span.key).chain(span.around.iter().copied());
            around.any(|above| kept.contains_key(&above))
        };
        kept.values().filter(|span| !is_inside(span)).map(|span| span.key).collect()
    }

    /// The facts of the kept spans, with what only their tree says.
    fn facts(&self, group: &ProfileGroup, topmost: &[SpanKey]) -> Vec<Facts> {
        let kept = report::outermost_first(&group.kept).into_iter().take(MOST_LISTED);
        let own_file =
            |span: &KeptSpan| span.metadata.file().filter(|file| !is_of_dependency(file));
        let facts = kept.map(|span| Facts {
            is_topmost: topmost.contains(&span.key),
            own_file: own_file(&span).unwrap_or_default(),
            ..span.facts
        });
        facts.collect()
    }

    /// From the start of the first kept span to the end of the last, extended so that it contains all samples.
    fn place_in_time(&self, profile: &mut Profile, group: &ProfileGroup) {
        let kept = &group.kept;
        let begins = kept.iter().map(|span| self.inputs.unix_ns(span.opened_ns));
        let ends =
            kept.iter().map(|span| self.inputs.unix_ns(span.opened_ns + span.times().wall_ns));
        let points = || profile.samples().iter().flat_map(|sample| &sample.points);
        let first = begins.chain(points().map(|p| p.time_unix_ns)).min().unwrap_or(0);
        let last = ends.chain(points().map(|p| p.time_unix_ns + 1)).max().unwrap_or(0);
        (profile.start_unix_ns, profile.duration_ns) = (first, last - first);
    }
}

struct SampledSpan<'a> {
    pending: &'a SpanSamples,
    link: Option<LinkId>,
    linked: Option<(TraceId, SpanId)>,
}

/// The samples of the spans that are selected, each with its kind and the weight that it represents.
fn chosen<'a>(
    spans: &'a [SampledSpan<'a>],
    selection: &'a mut Selection,
) -> impl Iterator<Item = (&'a SampledSpan<'a>, SampleKind, &'a StoredSample, u64)> {
    let all = spans.iter().flat_map(|span| {
        span.pending.kinds.iter().flat_map(move |(kind, of_kind)| {
            // The first one has the weight of those that were skipped last.
            let skipped = std::iter::once(of_kind.downsampling.skipped_weight);
            let skipped = skipped.chain(std::iter::repeat(0));
            let samples = of_kind.samples.iter().zip(skipped);
            samples.map(move |(sample, skipped)| (span, *kind, sample, sample.weight + skipped))
        })
    });
    all.filter_map(move |(span, kind, sample, weight)| {
        Some((span, kind, sample, selection.take(kind, weight, span.linked)?))
    })
}
