//! From pending samples to a profile.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::pending::{Pending, PendingSpan};
use super::report;
use super::stack::{Stack, Waited};
use super::waits::WaitingThread;
use crate::ids::{SpanId, TraceId};
use crate::keep::{Callsites, Epoch};
use crate::profile::{
    CALLERS_NOT_COPIED, FrameKind, Link, LinkId, Location, LocationId, Mapping, MappingId, Point,
    Profile, ProfileId, SampleKind, StackId, capped,
};
use crate::redact::Redaction;
use crate::span::SpanKey;
use crate::symbols::hex;
use crate::sys::Call;
use crate::unwind::{Module, ModuleAddress, Modules, UnwindEnd};

/// What a profile is built from.
pub(super) struct ProfileAssembler<'a> {
    pub(super) pending: &'a Pending,
    /// Waits that go on.
    pub(super) waiting: Vec<&'a WaitingThread>,
    pub(super) modules: &'a Modules,
    pub(super) callsites: &'a Callsites,
    /// What makes a Unix time of `CLOCK_MONOTONIC_RAW`.
    pub(super) unix_offset_ns: i128,
    pub(super) period_ns: u64,
    pub(super) most_samples: usize,
    /// That the profile may take.
    pub(super) most_bytes: usize,
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

/// Of the wait in which a span grew old: since when nobody looked is known, and not what was in between.
const HOLDS_OTHERS: &str = "[and shorter waits before it]";

impl ProfileAssembler<'_> {
    /// The profile of an epoch: what fell in its spans and in the spans inside them. If all of it would take
    /// more than it may, with fewer samples that stand for the others.
    pub(super) fn build(&self, id: ProfileId, epoch: &Epoch) -> Built {
        let inside = self.pending.inside(epoch.root, epoch.kept.iter().map(|span| span.key));
        let of_root = self.pending.of_root(epoch.root).iter();
        let spans: Vec<SpanKey> = of_root.filter(|span| inside.contains(span)).copied().collect();

        let pending = || spans.iter().filter_map(|span| self.pending.get(*span));
        let samples: usize = pending().map(|span| span.samples.len()).sum();
        let waits = pending().map(|span| span.waits.len()).sum::<usize>();
        let waits = waits + self.waiting_in(&inside).count();
        let mut every = samples.div_ceil(self.most_samples).max(1);
        let Filled { tables, mut losses, thinned } = loop {
            // One sample is taken however large it is.
            let most_bytes = if every < samples.max(waits) { self.most_bytes } else { usize::MAX };
            let of_kind = [Thinning::new(every, samples), Thinning::new(every, waits)];
            match self.fill(id, &inside, &spans, of_kind, most_bytes) {
                Some(filled) => break filled,
                // Each try takes the time of the thread that reads the rings.
                None => every = every.saturating_mul(4),
            }
        };
        let mut tables = tables;
        losses.thinned += thinned;
        let topmost = self.topmost(epoch);
        if let Some(off_cpu_ns) = self.off_cpu_of_waits(epoch, &topmost, tables.profile.waited_ns())
        {
            tables.profile.shorten_waits(off_cpu_ns);
        }
        if tables.profile.samples().is_empty() {
            losses.missing = tables.add_missing(epoch, &inside);
        }
        if self.hides_kernel {
            tables.add_kernel(epoch, &topmost, &losses, &inside);
        }
        let Tables { mut profile, modules, .. } = tables;
        self.place_in_time(&mut profile, epoch);
        report::describe(&mut profile, epoch, &topmost, &losses, self.redaction);
        Built { profile, modules, spans, thinned }
    }

    /// None if that would take more than it may.
    fn fill(
        &self,
        id: ProfileId,
        inside: &HashSet<SpanKey>,
        spans: &[SpanKey],
        [mut samples, mut waits]: [Thinning; 2],
        most_bytes: usize,
    ) -> Option<Filled<'_>> {
        let mut tables = Tables {
            profile: Profile::new(id, self.period_ns),
            modules: HashMap::new(),
            mappings: HashMap::new(),
            links: HashMap::new(),
            builder: self,
        };
        if let Some(program) = self.modules.program() {
            tables.mapping(program);
        }
        let mut losses = report::Losses::default();
        for span in spans {
            let Some(pending) = self.pending.get(*span).filter(|pending| !pending.is_empty())
            else {
                continue;
            };
            let link = tables.link(*span, inside);
            losses += pending.losses;
            samples.skipped_ns += pending.skipped_ns;
            let mut stacks = HashMap::new();
            for sample in &pending.samples {
                let stack = pending.stack(sample.stack);
                losses.cut += u64::from(stack.is_some_and(|stack| stack.end == UnwindEnd::Cut));
                losses.incomplete +=
                    u64::from(stack.is_some_and(|stack| stack.end == UnwindEnd::Lost));
                if let Some(weight_ns) = samples.take(sample.weight_ns)
                    && let Some(stack) = stack
                {
                    let stack = *stacks.entry(sample.stack).or_insert_with(|| tables.stack(stack));
                    tables.add(SampleKind::OnCpu, sample.time_ns, weight_ns, stack, link);
                }
                if tables.profile.bytes() > most_bytes {
                    return None;
                }
            }
            for wait in &pending.waits {
                if let Some(weight_ns) = waits.take(wait.duration_ns)
                    && let Some(stack) = pending.stack(wait.stack)
                {
                    let stack = *stacks.entry(wait.stack).or_insert_with(|| tables.stack(stack));
                    tables.add(SampleKind::OffCpu, wait.time_ns, weight_ns, stack, link);
                }
                if tables.profile.bytes() > most_bytes {
                    return None;
                }
            }
            tables.add_lost(pending, link);
        }
        for wait in self.waiting_in(inside) {
            let link = tables.link(wait.span, inside);
            if let Some(weight_ns) = waits.take(wait.waited_ns()) {
                let stack = tables.stack(&wait.stack);
                tables.add(SampleKind::OffCpu, wait.since_ns, weight_ns, stack, link);
            }
        }
        Some(Filled { tables, losses, thinned: samples.thinned + waits.thinned })
    }

    fn waiting_in(&self, inside: &HashSet<SpanKey>) -> impl Iterator<Item = &WaitingThread> {
        self.waiting.iter().copied().filter(|wait| inside.contains(&wait.span))
    }

    /// For how long the spans were off the CPU at most, if the waits in them are a little longer than that: a record of a
    /// switch is written when the thread's CPU clock goes already, 10 to 20 µs later where the kernel had to program a
    /// timer.
    fn off_cpu_of_waits(&self, epoch: &Epoch, topmost: &[SpanKey], waited_ns: u64) -> Option<u64> {
        let accounts = || {
            let spans = epoch.kept.iter().filter(|span| topmost.contains(&span.key));
            spans.map(|span| &span.account)
        };
        // What waits on other threads is in no account of these.
        let is_all = accounts().all(|account| {
            let is_own = account.subtree_on_cpu_ns == account.on_cpu_ns
                && account.subtree_on_cpu_error_ns == account.on_cpu_error_ns;
            is_own && !account.is_cpu_time_unknown
        });
        let off_cpu_ns: u64 =
            accounts().map(|account| account.off_cpu_ns + account.on_cpu_error_ns).sum();
        let little_ns = off_cpu_ns / 100 + 1_000_000;
        let is_longer = (off_cpu_ns + 1..=off_cpu_ns + little_ns).contains(&waited_ns);
        (is_all && is_longer).then_some(off_cpu_ns)
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
    links: HashMap<SpanKey, LinkId>,
    builder: &'a ProfileAssembler<'a>,
}

/// Tables with all that falls in the spans, and what they lack.
struct Filled<'a> {
    tables: Tables<'a>,
    losses: report::Losses,
    thinned: u64,
}

/// Which of the samples, or of the waits, are taken.
struct Thinning {
    every: usize,
    total: usize,
    number: usize,
    /// What the next one that is taken stands for too.
    skipped_ns: u64,
    thinned: u64,
}

impl Thinning {
    fn new(every: usize, total: usize) -> Self {
        Self { every, total, number: 0, skipped_ns: 0, thinned: 0 }
    }

    /// What the next one stands for, if it is taken. The last one is in any case, so that all of the time is
    /// in the profile.
    fn take(&mut self, weight_ns: u64) -> Option<u64> {
        self.number += 1;
        self.skipped_ns += weight_ns;
        let is_taken = self.number.is_multiple_of(self.every) || self.number == self.total;
        self.thinned += u64::from(!is_taken);
        is_taken.then(|| std::mem::take(&mut self.skipped_ns))
    }
}

impl Tables<'_> {
    fn add(
        &mut self,
        kind: SampleKind,
        time_ns: u64,
        weight_ns: u64,
        stack: StackId,
        link: Option<LinkId>,
    ) {
        let time_unix_ns = self.builder.unix_ns(time_ns);
        self.profile.add_sample(kind, stack, link, Point { time_unix_ns, weight_ns });
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

    /// What is left of samples and waits for which there was no memory.
    fn add_lost(&mut self, pending: &PendingSpan, link: Option<LinkId>) {
        let no_memory = "[stacks given up: memory budget used up]";
        let no_room = "[stacks of waits given up: no room for more]";
        let samples = (pending.losses.lost > 0).then_some(pending.lost_ns);
        let waits = Some(pending.lost_waits_ns).filter(|ns| *ns > 0);
        for (kind, remark, lost_ns) in
            [(SampleKind::OnCpu, no_memory, samples), (SampleKind::OffCpu, no_room, waits)]
        {
            let Some(weight_ns) = lost_ns else { continue };
            let remark = self.profile.add_remark(remark);
            let stack = self.profile.add_stack(vec![remark]);
            let time_unix_ns = self.builder.unix_ns(pending.last_ns);
            self.profile.add_sample(kind, stack, link, Point { time_unix_ns, weight_ns });
        }
    }

    /// Where the kernel's part is not sampled: what of the on-CPU time, as long as the span and those inside it were
    /// sampled, is in no sample. Only if that is known: not if something else may be missing, or is in an earlier
    /// profile.
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
        // What is sure of it.
        let sampled_ns: u64 = of_topmost.clone().map(|span| span.account.subtree_sampled_ns).sum();
        // Of the rarest samples in it.
        let period_ns = self.profile.largest_weight_ns().max(self.builder.period_ns).max(1);
        let periods = sampled_ns.saturating_sub(self.profile.weight_ns()) / period_ns;
        let Some(span) = of_topmost.max_by_key(|span| span.account.on_cpu_ns) else { return };
        // One more or less at each end is how samples fall.
        if periods < 2 {
            return;
        }
        let location = self.location(ModuleAddress::KERNEL, false);
        let stack = self.profile.add_stack(vec![location]);
        let link = self.link(span.key, inside);
        // Whole periods, so that it is a multiple of what the others stand for. When it was is not known.
        let time_unix_ns = self.builder.unix_ns(span.opened_ns);
        let point = Point { time_unix_ns, weight_ns: periods * period_ns };
        self.profile.add_sample(SampleKind::OnCpu, stack, link, point);
    }

    fn stack(&mut self, stack: &Stack) -> StackId {
        let waited = stack.waited.map(|waited| self.profile.add_wait(&name_of(waited)));
        let mut locations: Vec<_> = waited.into_iter().collect();
        for (number, frame) in stack.frames.iter().enumerate() {
            let is_inferred = stack.inferred_from.is_some_and(|from| number >= from);
            locations.push(self.location(*frame, is_inferred));
        }
        match stack.end {
            UnwindEnd::Root => {}
            UnwindEnd::Cut => locations.push(self.profile.add_remark(CALLERS_NOT_COPIED)),
            UnwindEnd::Lost => locations.push(self.profile.add_remark("[callers not found]")),
        }
        if stack.holds_others {
            locations.push(self.profile.add_remark(HOLDS_OTHERS));
        }
        self.profile.add_stack(locations)
    }

    fn location(&mut self, frame: ModuleAddress, is_inferred: bool) -> LocationId {
        let mapping = frame.module().and_then(|id| self.mapping(id));
        let (kind, address) = match frame.kernel_address() {
            Some(address) => (FrameKind::Kernel, address),
            None => (FrameKind::Native, frame.address()),
        };
        let lines = Vec::new();
        self.profile.add_location(Location { mapping, address, kind, lines, is_inferred })
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
        let ids = self.builder.pending.get(span)?.ids?;
        Some((ids.trace, ids.span))
    }

    /// The link of a span, and those of all around it, not deeper than [`DEEPEST`]: trees of spans can be
    /// thousands deep.
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
                    let name = capped(callsite.metadata.name()).into_owned();
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
