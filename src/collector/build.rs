//! Builds profiles from pending samples.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::awaits::PresentAwait;
use super::engine::Engine;
use super::links::Links;
use super::pending::{Pending, PendingSpan};
use super::report;
use super::stack::{Stack, Waited};
use super::waits::{SHORTEST, WaitingThread};
use crate::ids::{SpanId, TraceId};
use crate::keep::{Callsites, Epoch, KeptSpan};
use crate::profile::{
    CALLERS_NOT_COPIED, FrameKind, Link, LinkId, Location, LocationId, Mapping, MappingId, Point,
    Profile, ProfileId, ProfiledSpan, ProfiledThread, SampleKind, StackId, ThreadId, capped,
    delay_frame,
};
use crate::redact::Redaction;
use crate::span::{SampleCounts, SpanKey};
use crate::symbols::hex;
use crate::sys::{Call, OsThread};
use crate::unwind::{Module, ModuleAddress, Modules, UnwindEnd};

/// The inputs of a profile.
pub(super) struct ProfileAssembler<'a> {
    pub(super) pending: &'a Pending,
    /// Waits that have not ended.
    pub(super) waiting: Vec<&'a WaitingThread>,
    /// Awaits that have not ended.
    pub(super) awaiting: Vec<PresentAwait>,
    pub(super) modules: &'a Modules,
    pub(super) callsites: &'a Callsites,
    /// Converts `CLOCK_MONOTONIC_RAW` to Unix time.
    pub(super) unix_offset_ns: i128,
    pub(super) period_ns: u64,
    pub(super) most_samples: usize,
    /// The limit for the profile's memory.
    pub(super) most_bytes: usize,
    /// Whether on-CPU time without samples is kernel time.
    pub(super) hides_kernel: bool,
    pub(super) redaction: &'a Redaction,
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

/// How many kept spans a profile lists.
const MOST_LISTED: usize = 64;
/// Marks a wait during which its span grew old. Its start is known, but not whether it contains shorter waits.
const HOLDS_OTHERS: &str = "[and shorter waits before it]";

impl ProfileAssembler<'_> {
    /// Builds the profile of an epoch from the samples of its kept spans and the spans inside them. Downsamples if it
    /// would exceed its limits.
    pub(super) fn build(&self, id: ProfileId, epoch: &Epoch) -> Built {
        let inside = self.pending.inside(epoch.root, epoch.kept.iter().map(|span| span.key));
        let of_root = self.pending.of_root(epoch.root).iter();
        let spans: Vec<SpanKey> = of_root.filter(|span| inside.contains(span)).copied().collect();

        let pending = || spans.iter().filter_map(|span| self.pending.get(*span));
        let samples: usize = pending().map(|span| span.samples.len()).sum();
        let waits_of = |kind| {
            let waits = pending().flat_map(|span| &span.waits);
            waits.filter(|wait| wait.kind == kind).count()
        };
        let waits = [
            waits_of(SampleKind::OffCpu) + self.waiting_in(&inside).count(),
            waits_of(SampleKind::Await),
            waits_of(SampleKind::Delay),
        ];
        let most_waits = waits.iter().copied().max().unwrap_or(0);
        let mut every = samples.div_ceil(self.most_samples).max(1);
        let Filled { tables, mut losses, downsampled } = loop {
            // At least one sample is taken, whatever its size.
            let most_bytes =
                if every < samples.max(most_waits) { self.most_bytes } else { usize::MAX };
            let samples = Downsampling::new(every, samples);
            let waits = waits.map(|waits| Downsampling::new(every, waits));
            match self.fill(id, epoch, &inside, &spans, samples, waits, most_bytes) {
                Some(filled) => break filled,
                // Each attempt delays draining.
                None => every = every.saturating_mul(4),
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
        report::describe(&mut profile, epoch, &topmost, &losses, self.redaction);
        profile.spans = self.profiled_spans(epoch, &topmost);
        Built { profile, modules, spans, downsampled, losses }
    }

    /// A profile that only contains these stacks, each linked to a span whose name is its number.
    pub(super) fn profile_of_stacks(
        pending: &Pending,
        modules: &Modules,
        engine: &Engine,
        stacks: &[Stack],
    ) -> (Profile, HashMap<MappingId, Arc<Module>>) {
        let assembler = ProfileAssembler {
            pending,
            waiting: Vec::new(),
            awaiting: Vec::new(),
            modules,
            callsites: &engine.callsites,
            unix_offset_ns: 0,
            period_ns: 1,
            most_samples: usize::MAX,
            most_bytes: usize::MAX,
            hides_kernel: false,
            redaction: &engine.redaction,
        };
        let epoch = Epoch::empty();
        let mut tables = Tables::new(&assembler, ProfileId::NONE, &epoch);
        for (number, stack) in stacks.iter().enumerate() {
            let stack = tables.stack(stack);
            let link = tables.profile.add_link(Link::named(number.to_string(), None));
            tables.add(SampleKind::Await, 0, 1, None, stack, Some(link));
        }
        (tables.profile, tables.modules)
    }

    /// Returns `None` if the profile would exceed `most_bytes`.
    fn fill<'a>(
        &'a self,
        id: ProfileId,
        epoch: &'a Epoch,
        inside: &HashSet<SpanKey>,
        spans: &[SpanKey],
        mut samples: Downsampling,
        [mut waits, mut awaits, mut delays]: [Downsampling; 3],
        most_bytes: usize,
    ) -> Option<Filled<'a>> {
        let mut tables = Tables::new(self, id, epoch);
        let mut losses = report::Losses::default();
        for span in spans {
            let Some(pending) = self.pending.get(*span).filter(|pending| !pending.is_empty())
            else {
                continue;
            };
            let link = tables.link(*span, inside);
            let linked = link.and_then(|link| tables.profile.link(link)?.linked);
            losses += pending.losses;
            samples.skipped_ns += pending.skipped_ns;
            let mut stacks = HashMap::new();
            for sample in &pending.samples {
                let stack = pending.stack(sample.stack);
                losses.cut += u64::from(stack.is_some_and(|stack| stack.end == UnwindEnd::Cut));
                losses.incomplete +=
                    u64::from(stack.is_some_and(|stack| stack.end == UnwindEnd::Lost));
                if let Some(weight_ns) = samples.take(sample.weight_ns, linked)
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
                let of_kind = match wait.kind {
                    SampleKind::Await => &mut awaits,
                    SampleKind::Delay => &mut delays,
                    SampleKind::OnCpu | SampleKind::OffCpu => &mut waits,
                };
                if let Some(weight_ns) = of_kind.take(wait.duration_ns, linked)
                    && let Some(stack) = pending.stack(wait.stack)
                {
                    let stack = *stacks.entry(wait.stack).or_insert_with(|| tables.stack(stack));
                    let thread = pending.thread(wait.thread);
                    tables.add(wait.kind, wait.time_ns, weight_ns, thread, stack, link);
                }
                if tables.profile.bytes() > most_bytes {
                    return None;
                }
            }
            tables.add_lost(pending, link);
        }
        for wait in self.waiting_in(inside) {
            let link = tables.link(wait.span, inside);
            if let Some(weight_ns) = waits.take(wait.waited_ns(), None) {
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
        let waits = waits.downsampled + awaits.downsampled + delays.downsampled;
        let downsampled = samples.downsampled + waits;
        Some(Filled { tables, losses, downsampled })
    }

    fn waiting_in(&self, inside: &HashSet<SpanKey>) -> impl Iterator<Item = &WaitingThread> {
        self.waiting.iter().copied().filter(|wait| inside.contains(&wait.span))
    }

    /// The upper bound of the spans' off-CPU time, if their waits exceed it slightly. The kernel writes a switch
    /// record when the thread's CPU clock already runs, 10 to 20 µs later if it had to program a timer.
    fn off_cpu_of_waits(&self, epoch: &Epoch, topmost: &[SpanKey], waited_ns: u64) -> Option<u64> {
        let accounts = || {
            let spans = epoch.kept.iter().filter(|span| topmost.contains(&span.key));
            spans.map(|span| &span.account)
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
            let pending = self.pending.get(*span);
            *span == epoch.root || pending.is_some_and(|pending| pending.known.is_some())
        };
        let kept = epoch.kept.iter().map(|span| span.key).filter(is_known).collect();
        self.pending.topmost(&kept)
    }

    fn profiled_spans(&self, epoch: &Epoch, topmost: &[SpanKey]) -> Vec<ProfiledSpan> {
        let kept = report::outermost_first(&epoch.kept).into_iter().take(MOST_LISTED);
        let profiled = kept.map(|span| {
            let known = self.pending.get(span.key).and_then(|pending| pending.known);
            let rule = known.and_then(|known| self.callsites.get(known.plan));
            ProfiledSpan {
                name: report::full_name(&span, self.redaction),
                span: self.redaction.redact_span(span.name()).into_owned(),
                target: self.redaction.redact_function(span.target()).into_owned(),
                fields: span.values.to_vec(),
                reasons: span.reasons.to_string(),
                rule: rule.map_or_else(String::new, |callsite| {
                    self.redaction.redact_span(&callsite.keep.to_string()).into_owned()
                }),
                is_open: span.is_open,
                is_topmost: topmost.contains(&span.key),
                times: span.account,
                ids: span.trace_ids(),
                start_unix_ns: self.unix_ns(span.opened_ns),
            }
        });
        profiled.collect()
    }

    fn unix_ns(&self, raw_ns: u64) -> u64 {
        u64::try_from(i128::from(raw_ns) + self.unix_offset_ns).unwrap_or(0)
    }

    /// From the start of the first kept span to the end of the last, extended so that it contains all samples.
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

/// The maximum depth of nested spans in a profile.
const DEEPEST: usize = 128;

/// The tables of the profile, with the lookups from collector ids.
struct Tables<'a> {
    profile: Profile,
    modules: HashMap<MappingId, Arc<Module>>,
    mappings: HashMap<crate::unwind::ModuleId, MappingId>,
    links: HashMap<SpanKey, LinkId>,
    threads: HashMap<OsThread, ThreadId>,
    kept: HashMap<SpanKey, &'a KeptSpan>,
    linked: Links<'a>,
    builder: &'a ProfileAssembler<'a>,
}

/// Filled tables, and what they lack.
struct Filled<'a> {
    tables: Tables<'a>,
    losses: report::Losses,
    downsampled: u64,
}

/// Chooses which samples, or which waits, are kept.
struct Downsampling {
    every: usize,
    total: usize,
    number: usize,
    /// The weight of the skipped samples, which goes to the next one that is kept.
    skipped_ns: u64,
    downsampled: u64,
    /// The links of samples so far.
    linked: HashSet<(TraceId, SpanId)>,
}

impl Downsampling {
    fn new(every: usize, total: usize) -> Self {
        Self { every, total, number: 0, skipped_ns: 0, downsampled: 0, linked: HashSet::new() }
    }

    /// The total weight for the next sample, if it is kept. The last one is always kept, so that the profile has all
    /// of the time, and the first one with a link, since an attribute of a span may refer to it.
    fn take(&mut self, weight_ns: u64, linked: Option<(TraceId, SpanId)>) -> Option<u64> {
        self.number += 1;
        self.skipped_ns += weight_ns;
        let is_first = linked.is_some_and(|linked| self.linked.insert(linked));
        let is_last = self.number == self.total;
        let is_taken = self.number.is_multiple_of(self.every) || is_first || is_last;
        self.downsampled += u64::from(!is_taken);
        is_taken.then(|| std::mem::take(&mut self.skipped_ns))
    }
}

impl<'a> Tables<'a> {
    fn new(builder: &'a ProfileAssembler<'a>, id: ProfileId, epoch: &'a Epoch) -> Self {
        let mut tables = Self {
            profile: Profile::new(id, builder.period_ns),
            modules: HashMap::new(),
            mappings: HashMap::new(),
            links: HashMap::new(),
            threads: HashMap::new(),
            kept: epoch.kept.iter().map(|span| (span.key, span)).collect(),
            linked: Links::new(builder.pending, epoch),
            builder,
        };
        if let Some(program) = builder.modules.program() {
            tables.mapping(program);
        }
        tables
    }

    fn add(
        &mut self,
        kind: SampleKind,
        time_ns: u64,
        weight_ns: u64,
        thread: Option<OsThread>,
        stack: StackId,
        link: Option<LinkId>,
    ) {
        let time_unix_ns = self.builder.unix_ns(time_ns);
        let thread = thread.map(|thread| self.thread(thread));
        self.profile.add_sample(kind, stack, link, Point { time_unix_ns, weight_ns, thread });
    }

    fn thread(&mut self, thread: OsThread) -> ThreadId {
        *self.threads.entry(thread).or_insert_with(|| {
            self.profile.add_thread(ProfiledThread { name: thread.name(), tid: thread.tid })
        })
    }

    /// Adds placeholders if samples or waits were lost (and counted) after they were promised: the attributes of kept
    /// spans already refer to them. Returns how many were lost.
    fn add_missing(&mut self, epoch: &Epoch, inside: &HashSet<SpanKey>) -> u64 {
        let mut missing = 0;
        let links = self.profile.of_kind(SampleKind::OnCpu).map(|sample| sample.link);
        let linked = links.filter_map(|link| self.profile.link(link?)?.linked);
        let mut linked: HashSet<_> = linked.collect();
        for span in epoch.kept.iter().filter(|span| span.link.has_on_cpu) {
            let ids = span.link.ids.map(|ids| (ids.trace, ids.span));
            if ids.is_some_and(|ids| linked.insert(ids)) {
                missing += self.add_placeholder(span, SampleKind::OnCpu, inside);
            }
        }
        let mut closed = epoch.kept.iter().filter(|span| !span.is_open && span.profile.is_ok());
        let has_waits =
            self.profile.samples().iter().any(|sample| sample.kind != SampleKind::OnCpu);
        if let Some(span) = closed.find(|span| span.samples.waits > 0 && !has_waits) {
            missing += self.add_placeholder(span, SampleKind::OffCpu, inside);
        }
        if self.profile.samples().is_empty()
            && let Some(span) = epoch.kept.iter().max_by_key(|span| span.samples.on_cpu)
        {
            missing += self.add_placeholder(span, SampleKind::OnCpu, inside);
        }
        missing
    }

    fn add_placeholder(
        &mut self,
        span: &KeptSpan,
        kind: SampleKind,
        inside: &HashSet<SpanKey>,
    ) -> u64 {
        let remark = self.profile.add_remark("[samples lost before they were read]");
        let stack = self.profile.add_stack(vec![remark]);
        let link = self.link(span.key, inside);
        let time_unix_ns = self.builder.unix_ns(span.opened_ns);
        // No wait is shorter.
        let shortest_ns = u64::try_from(SHORTEST.as_nanos()).unwrap_or(0);
        let missing = span.samples.saturating_sub(self.known_in(span.key, inside));
        let (count, each_ns) = match kind {
            SampleKind::OnCpu => (missing.on_cpu.max(1), self.builder.period_ns),
            SampleKind::OffCpu | SampleKind::Await | SampleKind::Delay => {
                (missing.waits.max(1), shortest_ns)
            }
        };
        let point = Point { time_unix_ns, weight_ns: count * each_ns, thread: None };
        self.profile.add_sample(kind, stack, link, point);
        count
    }

    /// The samples of a span and of those inside it that have reached the collector.
    fn known_in(&self, span: SpanKey, inside: &HashSet<SpanKey>) -> SampleCounts {
        let pending = self.builder.pending;
        let is_in = |inner: &SpanKey| {
            *inner == span || pending.ancestors(*inner).any(|around| around == span)
        };
        let spans = inside.iter().filter(|inner| is_in(inner));
        spans.filter_map(|inner| pending.get(*inner)).map(PendingSpan::count).sum()
    }

    /// Adds placeholders for samples and waits that did not fit into memory.
    fn add_lost(&mut self, pending: &PendingSpan, link: Option<LinkId>) {
        let no_memory = "[stacks dropped: memory budget used up]";
        let no_room = "[stacks of waits dropped: no room for more]";
        let samples = (pending.losses.lost > 0).then_some(pending.lost_ns);
        let waits = Some(pending.lost_waits_ns).filter(|ns| *ns > 0);
        for (kind, remark, lost_ns) in
            [(SampleKind::OnCpu, no_memory, samples), (SampleKind::OffCpu, no_room, waits)]
        {
            let Some(weight_ns) = lost_ns else { continue };
            let remark = self.profile.add_remark(remark);
            let stack = self.profile.add_stack(vec![remark]);
            let time_unix_ns = self.builder.unix_ns(pending.last_ns);
            self.profile.add_sample(
                kind,
                stack,
                link,
                Point { time_unix_ns, weight_ns, thread: None },
            );
        }
    }

    /// Adds `[kernel]` where kernel time is not sampled: the on-CPU time without samples while the kept spans and
    /// those inside them were sampled. Adds nothing if something else may be missing or is in an earlier profile.
    fn add_kernel(
        &mut self,
        epoch: &Epoch,
        topmost: &[SpanKey],
        losses: &report::Losses,
        inside: &HashSet<SpanKey>,
    ) {
        let of_topmost = epoch.kept.iter().filter(|span| topmost.contains(&span.key));
        let is_incomplete = losses.ring_full > 0 || losses.missing > 0;
        if is_incomplete || of_topmost.clone().any(|span| span.earlier.samples.total() > 0) {
            return;
        }
        // The lower bound.
        let sampled_ns: u64 = of_topmost.clone().map(|span| span.account.subtree_sampled_ns).sum();
        // The longest period in the profile.
        let period_ns = self.profile.largest_weight_ns().max(self.builder.period_ns).max(1);
        let periods = sampled_ns.saturating_sub(self.profile.weight_ns()) / period_ns;
        let Some(span) = of_topmost.max_by_key(|span| span.account.on_cpu_ns) else { return };
        // Up to one sample more or less at each end is normal.
        if periods < 2 {
            return;
        }
        let location = self.location(ModuleAddress::KERNEL, false);
        let stack = self.profile.add_stack(vec![location]);
        let link = self.link(span.key, inside);
        // A multiple of the period, like the other weights. When the time was spent is not known.
        let time_unix_ns = self.builder.unix_ns(span.opened_ns);
        let point = Point { time_unix_ns, weight_ns: periods * period_ns, thread: None };
        self.profile.add_sample(SampleKind::OnCpu, stack, link, point);
    }

    fn stack(&mut self, stack: &Stack) -> StackId {
        let waited = stack.waited.map(|waited| self.profile.add_wait(&self.name_of(waited)));
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

    /// The innermost frame of a wait: what the thread was blocked in. A futex has its address, so that waits for the
    /// same lock are recognizable.
    fn name_of(&self, waited: Waited) -> String {
        match waited {
            Waited::In(Call::Futex(lock)) => format!("[futex {lock:#x}]"),
            Waited::In(Call::Named(name)) => format!("[{name}]"),
            Waited::In(Call::Numbered(number)) => format!("[system call {number}]"),
            Waited::In(Call::PageFault) => "[page fault]".to_owned(),
            Waited::Unknown => "[waiting: location unknown]".to_owned(),
            Waited::NotObserved => "[awaiting: not `.profiled()`]".to_owned(),
            Waited::NotCopied => "[awaiting: stack not copied]".to_owned(),
            Waited::Scheduling(behind) => {
                let behind = behind.and_then(|plan| self.builder.callsites.get(plan));
                let names = self.builder.redaction;
                let span = behind.map(|callsite| names.redact_span(callsite.metadata.name()));
                delay_frame(span.as_deref())
            }
        }
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

    /// The link of a span, without its parent.
    fn new_link(&mut self, span: SpanKey) -> Option<Link> {
        let pending = self.builder.pending.get(span)?;
        let known = pending.known?;
        let callsite = self.builder.callsites.get(known.plan)?;
        let fields = self.kept.get(&span).map(|kept| kept.values.to_vec());
        Some(Link {
            ids: self.linked.ids_of(span),
            linked: self.linked.of_samples_in(span),
            fields: fields.unwrap_or_default(),
            start_unix_ns: self.builder.unix_ns(known.opened_ns),
            end_unix_ns: pending.closed_ns.map_or(0, |closed_ns| self.builder.unix_ns(closed_ns)),
            ..Link::named(capped(callsite.metadata.name()), None)
        })
    }

    /// The link of a span, including its ancestors up to [`DEEPEST`] levels: span trees can be thousands of levels
    /// deep.
    fn link(&mut self, span: SpanKey, inside: &HashSet<SpanKey>) -> Option<LinkId> {
        if let Some(known) = self.links.get(&span) {
            return Some(*known);
        }
        let around =
            self.builder.pending.ancestors(span).take_while(|above| inside.contains(above));
        let mut path: Vec<_> = std::iter::once(span).chain(around).collect();
        path.reverse();
        // Drops the spans just below the outermost one.
        let left_out = path.len().saturating_sub(DEEPEST);
        path.drain(1..1 + left_out);
        let mut parent = None;
        for span in path {
            let link = match self.links.get(&span) {
                Some(link) => *link,
                None => {
                    let new = Link { parent, ..self.new_link(span)? };
                    let link = self.profile.add_link(new);
                    // In a cut path the inner spans have other parents than in full paths.
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
