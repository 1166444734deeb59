//! From pending samples to a profile.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use opentelemetry::{SpanId, TraceId};

use super::pending::{Pending, PendingSpan, Stack, Waited};
use super::report;
use crate::keep::{Callsites, Epoch};
use crate::profile::{
    FrameKind, Link, LinkId, Location, LocationId, Mapping, MappingId, Point, Profile, ProfileId,
    SampleKind, StackId,
};
use crate::redact::Redaction;
use crate::span::{SpanKey, TraceIds};
use crate::symbols::hex;
use crate::sys::Call;
use crate::unwind::{End, Frame, Module, Modules};

/// What a profile is built from.
pub(super) struct Builder<'a> {
    pub(super) pending: &'a Pending,
    pub(super) modules: &'a Modules,
    pub(super) callsites: &'a Callsites,
    /// What makes a Unix time of `CLOCK_MONOTONIC_RAW`.
    pub(super) unix_offset_ns: i128,
    pub(super) period_ns: u64,
    pub(super) most_samples: usize,
    /// What is in no sample is time in the kernel.
    pub(super) hides_kernel: bool,
    pub(super) redaction: &'a Redaction,
}

/// A profile without symbols, and what it takes to get them.
pub(super) struct Built {
    pub(super) profile: Profile,
    pub(super) modules: HashMap<MappingId, Arc<Module>>,
    /// The spans whose samples it has.
    pub(super) spans: Vec<SpanKey>,
    /// Samples that were left out here, and for which others stand.
    pub(super) thinned: u64,
}

impl Builder<'_> {
    /// The profile of an epoch: what fell in its spans and in the spans inside them.
    pub(super) fn build(&self, id: ProfileId, epoch: &Epoch) -> Built {
        let inside = inside(self.pending, epoch);
        let of_root = self.pending.of_root(epoch.root).iter();
        let spans: Vec<SpanKey> = of_root.filter(|span| inside.contains(span)).copied().collect();

        let total: usize =
            spans.iter().filter_map(|s| self.pending.get(*s)).map(|s| s.exported().0.len()).sum();
        let mut tables = Tables {
            profile: Profile::new(id, self.period_ns),
            modules: HashMap::new(),
            mappings: HashMap::new(),
            locations: HashMap::new(),
            links: HashMap::new(),
            kept_ids: epoch.kept.iter().filter_map(|span| Some((span.key, span.trace?))).collect(),
            builder: self,
        };
        let every = total.div_ceil(self.most_samples).max(1);
        let mut losses = report::Losses::default();
        let (mut number, mut thinned, mut skipped_ns) = (0_usize, 0, 0);
        for span in &spans {
            let Some(pending) = self.pending.get(*span).filter(|pending| !pending.is_empty())
            else {
                continue;
            };
            let link = tables.link(*span, &inside);
            losses.lost += pending.lost;
            losses.thinned += pending.thinned;
            losses.ring_full += pending.ring_full;
            losses.lowered += pending.lowered;
            skipped_ns += pending.skipped_ns;
            for sample in pending.exported().0 {
                number += 1;
                skipped_ns += sample.weight_ns;
                let Some(stack) = pending.stack(sample.stack) else {
                    continue;
                };
                losses.cut += u64::from(stack.end == End::Cut);
                losses.incomplete += u64::from(stack.end == End::Lost);
                // The last one in any case, so that all of the CPU time is in the profile.
                if number.is_multiple_of(every) || number == total {
                    tables.add(sample.time_ns, std::mem::take(&mut skipped_ns), stack, link);
                } else {
                    thinned += 1;
                }
            }
            tables.add_lost(pending, link);
            tables.add_waits(pending, link);
        }
        losses.thinned += thinned;
        if tables.profile.samples().is_empty() {
            losses.missing = tables.add_missing(epoch, &inside);
        }
        if self.hides_kernel {
            tables.add_kernel(epoch, &self.topmost(epoch), &losses, &inside);
        }
        let Tables { mut profile, modules, .. } = tables;
        self.place_in_time(&mut profile, epoch);
        report::describe(&mut profile, epoch, &self.topmost(epoch), &losses, self.redaction);
        Built { profile, modules, spans, thinned }
    }

    /// The kept spans that are inside no other. Of those in which no sample fell nobody knows where
    /// they are, but for the root: they do not count.
    fn topmost(&self, epoch: &Epoch) -> Vec<SpanKey> {
        let is_known = |span: &SpanKey| {
            let pending = self.pending.get(*span);
            *span == epoch.root || pending.is_some_and(|pending| pending.known.is_some())
        };
        let kept = epoch.kept.iter().map(|span| span.key).filter(is_known).collect();
        self.pending.topmost(&kept)
    }

    fn unix_ns(&self, raw_ns: u64) -> u64 {
        u64::try_from(i128::from(raw_ns) + self.unix_offset_ns).unwrap_or(0)
    }

    /// From the first kept span's beginning to the last one's end, and in any case so that each
    /// sample lies inside.
    fn place_in_time(&self, profile: &mut Profile, epoch: &Epoch) {
        let kept = &epoch.kept;
        let begins = kept.iter().map(|span| self.unix_ns(span.opened_ns));
        let ends = kept.iter().map(|span| self.unix_ns(span.opened_ns + span.account.wall_ns));
        let points = || profile.samples().iter().flat_map(|sample| &sample.points);
        let first = begins.chain(points().map(|p| p.time_unix_ns)).min().unwrap_or(0);
        let last = ends.chain(points().map(|p| p.time_unix_ns + 1)).max().unwrap_or(0);
        (profile.start_unix_ns, profile.duration_ns) = (first, last - first);
    }
}

/// The kept spans and those inside them.
pub(super) fn inside(pending: &Pending, epoch: &Epoch) -> HashSet<SpanKey> {
    let mut inside: HashSet<_> = epoch.kept.iter().map(|span| span.key).collect();
    let mut outside = HashSet::new();
    for span in pending.of_root(epoch.root) {
        // Each span is decided once, with all on the way to one that is decided already.
        let mut undecided = Vec::new();
        let above = pending.ancestors(*span);
        let up = std::iter::once(*span).chain(above).find(|span| {
            let is_decided = inside.contains(span) || outside.contains(span);
            undecided.extend((!is_decided).then_some(*span));
            is_decided
        });
        let is_inside = up.is_some_and(|up| inside.contains(&up));
        if is_inside { &mut inside } else { &mut outside }.extend(undecided);
    }
    inside
}

/// What a thread waited for, as the innermost frame of its stack. A lock has its address, so that
/// waits for the same lock show as such wherever they are.
fn name_of(waited: Waited) -> String {
    match waited {
        Waited::In(Call::Futex(lock)) => format!("[futex {lock:#x}]"),
        Waited::In(Call::Named(name)) => format!("[{name}]"),
        Waited::In(Call::Numbered(number)) => format!("[system call {number}]"),
        Waited::In(Call::PageFault) => "[page fault]".to_owned(),
        Waited::Somewhere => "[waiting: where is not known]".to_owned(),
    }
}

/// Spans inside each other that a profile shows.
const DEEPEST: usize = 128;

/// The profile's tables, found from our own numbers.
struct Tables<'a> {
    profile: Profile,
    modules: HashMap<MappingId, Arc<Module>>,
    mappings: HashMap<crate::unwind::ModuleId, MappingId>,
    locations: HashMap<(Frame, bool), LocationId>,
    links: HashMap<SpanKey, LinkId>,
    /// Of kept spans, whose close may be told a moment later.
    kept_ids: HashMap<SpanKey, TraceIds>,
    builder: &'a Builder<'a>,
}

impl Tables<'_> {
    fn add(&mut self, time_ns: u64, weight_ns: u64, stack: &Stack, link: Option<LinkId>) {
        let stack = self.stack(stack);
        let time_unix_ns = self.builder.unix_ns(time_ns);
        self.profile.add_sample(SampleKind::OnCpu, stack, link, Point { time_unix_ns, weight_ns });
    }

    /// All that a profile can say of which no sample is left: they were lost (and counted) after
    /// it was promised. Whoever was given its id finds it.
    /// Returns how many they were.
    fn add_missing(&mut self, epoch: &Epoch, inside: &HashSet<SpanKey>) -> u64 {
        let Some(span) = epoch.kept.iter().max_by_key(|span| span.samples) else { return 0 };
        let remark = self.profile.add_remark("[samples lost before they were read]");
        let stack = self.profile.add_stack(vec![remark]);
        let link = self.link(span.key, inside);
        let time_unix_ns = self.builder.unix_ns(span.opened_ns);
        let weight_ns = span.samples * self.builder.period_ns;
        self.profile.add_sample(SampleKind::OnCpu, stack, link, Point { time_unix_ns, weight_ns });
        span.samples
    }

    /// What is left of samples for which there was no memory.
    fn add_lost(&mut self, pending: &PendingSpan, link: Option<LinkId>) {
        if pending.lost == 0 {
            return;
        }
        let remark = self.profile.add_remark("[stacks given up: memory budget used up]");
        let stack = self.profile.add_stack(vec![remark]);
        let time_unix_ns = self.builder.unix_ns(pending.last_ns);
        self.profile.add_sample(
            SampleKind::OnCpu,
            stack,
            link,
            Point { time_unix_ns, weight_ns: pending.lost_ns },
        );
    }

    /// Where the kernel's part is not sampled: what of the on-CPU time is in no sample. Only if that is
    /// known: not if something else may be missing, or is in an earlier profile. As the account knows
    /// nothing of spans inside on other threads, whose samples count, it can be too little.
    fn add_kernel(
        &mut self,
        epoch: &Epoch,
        topmost: &[SpanKey],
        losses: &report::Losses,
        inside: &HashSet<SpanKey>,
    ) {
        let of_topmost = epoch.kept.iter().filter(|span| topmost.contains(&span.key));
        let is_incomplete = losses.ring_full > 0 || losses.missing > 0;
        if is_incomplete || of_topmost.clone().any(|span| !span.earlier.is_empty()) {
            return;
        }
        let on_cpu_ns: u64 = of_topmost.clone().map(|span| span.account.on_cpu_ns).sum();
        let period_ns = self.builder.period_ns.max(1);
        let periods = on_cpu_ns.saturating_sub(self.profile.weight_ns()) / period_ns;
        let Some(span) = of_topmost.max_by_key(|span| span.account.on_cpu_ns) else { return };
        // One more or less at each end is how samples fall.
        if periods < 2 {
            return;
        }
        let location = self.location(Frame::KERNEL, false);
        let stack = self.profile.add_stack(vec![location]);
        let link = self.link(span.key, inside);
        // Whole periods, so that it is a multiple of what the others stand for. When it was is not known.
        let time_unix_ns = self.builder.unix_ns(span.opened_ns);
        let point = Point { time_unix_ns, weight_ns: periods * period_ns };
        self.profile.add_sample(SampleKind::OnCpu, stack, link, point);
    }

    /// Waits, and what is left of those for which there was no memory.
    fn add_waits(&mut self, pending: &PendingSpan, link: Option<LinkId>) {
        for wait in pending.exported().1 {
            let Some(stack) = pending.stack(wait.stack) else { continue };
            let stack = self.stack(stack);
            let time_unix_ns = self.builder.unix_ns(wait.time_ns);
            let point = Point { time_unix_ns, weight_ns: wait.duration_ns };
            self.profile.add_sample(SampleKind::OffCpu, stack, link, point);
        }
        if pending.lost_waits_ns > 0 {
            let remark = self.profile.add_remark("[stacks of waits given up: no room for more]");
            let stack = self.profile.add_stack(vec![remark]);
            let time_unix_ns = self.builder.unix_ns(pending.last_ns);
            let point = Point { time_unix_ns, weight_ns: pending.lost_waits_ns };
            self.profile.add_sample(SampleKind::OffCpu, stack, link, point);
        }
    }

    fn stack(&mut self, stack: &Stack) -> StackId {
        let waited = stack.waited.map(|waited| self.profile.add_wait(&name_of(waited)));
        let mut locations: Vec<_> = waited.into_iter().collect();
        for (number, frame) in stack.frames.iter().enumerate() {
            let is_inferred = stack.inferred_from.is_some_and(|from| number >= from);
            locations.push(self.location(*frame, is_inferred));
        }
        match stack.end {
            End::Root => {}
            End::Cut => locations.push(self.profile.add_remark("[callers not copied]")),
            End::Lost => locations.push(self.profile.add_remark("[callers not found]")),
        }
        self.profile.add_stack(locations)
    }

    fn location(&mut self, frame: Frame, is_inferred: bool) -> LocationId {
        if let Some(known) = self.locations.get(&(frame, is_inferred)) {
            return *known;
        }
        let mapping = frame.module().and_then(|id| self.mapping(id));
        let (kind, address) = match frame.kernel_address() {
            Some(address) => (FrameKind::Kernel, address),
            None => (FrameKind::Native, frame.address()),
        };
        let lines = Vec::new();
        let id = self.profile.add_location(Location { mapping, address, kind, lines, is_inferred });
        self.locations.insert((frame, is_inferred), id);
        id
    }

    fn mapping(&mut self, id: crate::unwind::ModuleId) -> Option<MappingId> {
        if let Some(known) = self.mappings.get(&id) {
            return Some(*known);
        }
        let module = self.builder.modules.get(id)?;
        let gnu = |id: &Vec<u8>| ("process.executable.build_id.gnu".to_owned(), hex(id));
        let mapping = self.profile.add_mapping(Mapping {
            file: module.name.clone(),
            start: module.start,
            end: module.end,
            file_offset: module.file_offset,
            build_ids: module.build_id.iter().map(gnu).collect(),
        });
        self.modules.insert(mapping, Arc::clone(module));
        self.mappings.insert(id, mapping);
        Some(mapping)
    }

    fn ids_of(&self, span: SpanKey) -> Option<(TraceId, SpanId)> {
        let of_kept = || self.kept_ids.get(&span).copied();
        let ids = self.builder.pending.get(span).and_then(|pending| pending.ids).or_else(of_kept);
        ids.map(|ids| (ids.trace, ids.span))
    }

    /// The link of a span, and those of all around it. Without recursion, and not deeper than
    /// [`DEEPEST`]: trees of spans can be thousands deep, and what follows is drawn by recursion.
    fn link(&mut self, span: SpanKey, inside: &HashSet<SpanKey>) -> Option<LinkId> {
        if let Some(known) = self.links.get(&span) {
            return Some(*known);
        }
        let around =
            self.builder.pending.ancestors(span).take_while(|above| inside.contains(above));
        let mut path: Vec<_> = std::iter::once(span).chain(around).collect();
        path.reverse();
        // Of a deeper path the spans between the outermost and the innermost are left out.
        let left_out = path.len().saturating_sub(DEEPEST);
        path.drain(1..1 + left_out);
        let mut parent = None;
        for span in path {
            let link = match self.links.get(&span) {
                Some(link) => *link,
                None => {
                    let known = self.builder.pending.get(span)?.known?;
                    let callsite = self.builder.callsites.get(known.plan)?;
                    let name = callsite.metadata.name().to_owned();
                    let ids = self.ids_of(span);
                    let link = self.profile.add_link(Link { span: name, parent, ids });
                    // Those in the middle have another place in paths that are not cut.
                    if left_out == 0 || parent.is_none() {
                        self.links.insert(span, link);
                    }
                    link
                }
            };
            parent = Some(link);
        }
        parent
    }
}
