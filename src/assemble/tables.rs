//! The tables of a profile that is built.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::build::ProfileInputs;
use super::links::Links;
use crate::keep::{KeptSpan, ProfileGroup};
use crate::profile::{
    BEFORE_ERROR, CALLERS_NOT_COPIED, CALLERS_WITHOUT_TABLES, FrameKind, Leaf, LeafId, LeafMark,
    Link, LinkId, Location, LocationId, LockHolder, Mapping, MappingId, Point, Profile, ProfileId,
    ProfiledThread, SampleKind, StackId, ThreadId, capped,
};
use crate::sinks::{Losses, Lost, SHORTEST_WAIT, SpanSamples, StackEntry, StackLeaf};
use crate::span::{SampleCounts, SpanKey};
use crate::symbols::hex;
use crate::sys::{Call, OsThread};
use crate::unwind::{Module, ModuleAddress, UnwindEnd};

/// Marks a wait during which its span grew old, after shorter waits that are part of its time.
const HOLDS_OTHERS: &str = "[and shorter waits before it]";
/// Has the place of spans that are not distinguished.
const SPANS_INSIDE: &str = "[in spans inside, too many to tell apart]";
/// The maximum depth of nested spans in a profile.
const DEEPEST: usize = 128;

pub(crate) struct Tables<'a> {
    pub(crate) profile: Profile,
    pub(crate) modules: HashMap<MappingId, Arc<Module>>,
    mappings: HashMap<crate::unwind::ModuleId, MappingId>,
    links: HashMap<SpanKey, LinkId>,
    threads: HashMap<OsThread, ThreadId>,
    kept: HashMap<SpanKey, &'a KeptSpan>,
    linked: Option<Links<'a>>,
    detail: SpanDetail,
    pub(super) builder: ProfileInputs<'a>,
}

/// Which spans a profile tells apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SpanDetail {
    All,
    /// Spans inside kept spans are one where they have the same name and the same spans around them.
    Names,
    /// Spans inside kept spans belong to these.
    KeptSpans,
}

impl SpanDetail {
    /// The next one, with fewer spans.
    pub(crate) fn less(self) -> Option<Self> {
        match self {
            Self::All => Some(Self::Names),
            Self::Names => Some(Self::KeptSpans),
            Self::KeptSpans => None,
        }
    }

    pub(crate) fn note(self) -> Option<&'static str> {
        match self {
            Self::All => None,
            Self::Names => {
                Some("spans of one name are shown as one: there were too many for the profile")
            }
            Self::KeptSpans => Some(
                "spans that were not kept are shown as one in those around them: there were too many for the profile",
            ),
        }
    }
}

impl<'a> Tables<'a> {
    pub(crate) fn new(
        builder: ProfileInputs<'a>,
        id: ProfileId,
        group: Option<&'a ProfileGroup>,
        detail: SpanDetail,
    ) -> Self {
        let kept = group.into_iter().flat_map(|group| &group.kept);
        let mut tables = Self {
            profile: Profile::new(id, builder.period_ns),
            modules: HashMap::new(),
            mappings: HashMap::new(),
            links: HashMap::new(),
            threads: HashMap::new(),
            kept: kept.map(|span| (span.key, span)).collect(),
            linked: group.map(|group| Links::new(builder.pending, group)),
            detail,
            builder,
        };
        if let Some(program) = builder.modules.program() {
            tables.mapping(program);
        }
        tables
    }

    pub(crate) fn add(
        &mut self,
        kind: SampleKind,
        time_ns: u64,
        weight: u64,
        thread: Option<OsThread>,
        (stack, leaf): (StackId, Option<LeafId>),
        link: Option<LinkId>,
    ) {
        let time_unix_ns = self.builder.unix_ns(time_ns);
        let thread = thread.map(|thread| self.thread(thread));
        let point = Point { time_unix_ns, weight, thread };
        match leaf {
            Some(leaf) => self.profile.add_sample_at(kind, (stack, leaf), link, point),
            None => self.profile.add_sample(kind, stack, link, point),
        }
    }

    fn add_without_stack(
        &mut self,
        kind: SampleKind,
        time_ns: u64,
        weight: u64,
        remark: &str,
        link: Option<LinkId>,
    ) {
        let remark = self.profile.add_remark(remark);
        let stack = self.profile.add_stack(vec![remark]);
        self.add(kind, time_ns, weight, None, (stack, None), link);
    }

    fn thread(&mut self, thread: OsThread) -> ThreadId {
        *self.threads.entry(thread).or_insert_with(|| {
            self.profile.add_thread(ProfiledThread { name: thread.name(), tid: thread.tid })
        })
    }

    /// Adds placeholders if samples or waits were lost (and counted) after they were promised: the attributes of kept
    /// spans already refer to them. Returns how many were lost.
    pub(crate) fn add_missing(&mut self, group: &ProfileGroup, inside: &HashSet<SpanKey>) -> u64 {
        let mut missing = 0;
        let links = self.profile.of_kind(SampleKind::OnCpu).map(|sample| sample.link);
        let linked = links.filter_map(|link| self.profile.link(link?)?.linked);
        let mut linked: HashSet<_> = linked.collect();
        for span in group.kept.iter().filter(|span| span.link.has_on_cpu) {
            let ids = span.link.ids.map(|ids| (ids.trace, ids.span));
            if ids.is_some_and(|ids| linked.insert(ids)) {
                missing += self.add_placeholder(span, SampleKind::OnCpu, inside);
            }
        }
        let closed =
            || group.kept.iter().filter(|span| !span.facts.is_open && span.profile.is_ok());
        let has = |tables: &Self, kind| tables.profile.of_kind(kind).next().is_some();
        if let Some(span) = closed().find(|span| span.samples.waits > 0)
            && !has(self, SampleKind::OffCpu)
        {
            missing += self.add_placeholder(span, SampleKind::OffCpu, inside);
        }
        if let Some(span) = closed().find(|span| span.samples.awaits > 0)
            && !has(self, SampleKind::Await)
        {
            if has(self, SampleKind::Delay) {
                // Each was too short to have a sample.
                let (kind, ns) = (SampleKind::Await, span.times().await_ns.max(1));
                let link = self.link(span.key, inside);
                self.add_without_stack(kind, span.opened_ns, ns, "[without samples]", link);
            } else {
                missing += self.add_placeholder(span, SampleKind::Await, inside);
            }
        }
        if let Some(span) = closed().find(|span| span.samples.allocations > 0)
            && !has(self, SampleKind::AllocatedBytes)
        {
            missing += self.add_placeholder(span, SampleKind::AllocatedBytes, inside);
            _ = self.add_placeholder(span, SampleKind::Allocations, inside);
        }
        if self.profile.samples().is_empty()
            && let Some(span) = group.kept.iter().max_by_key(|span| span.samples.on_cpu)
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
        let remark = "[samples lost before they were read]";
        let link = self.link(span.key, inside);
        // No wait is shorter.
        let shortest_ns = u64::try_from(SHORTEST_WAIT.as_nanos()).unwrap_or(0);
        let missing = span.samples.saturating_sub(self.known_in(span.key, inside));
        let (count, each) = match kind {
            SampleKind::OnCpu => (missing.on_cpu.max(1), self.builder.period_ns),
            SampleKind::OffCpu => (missing.waits.max(1), shortest_ns),
            SampleKind::Await | SampleKind::Delay => (missing.awaits.max(1), shortest_ns),
            // As much as can be said of it.
            _ => (missing.allocations.max(1), 1),
        };
        self.add_without_stack(kind, span.opened_ns, count * each, remark, link);
        count
    }

    /// The samples of a span and of those inside it that have reached the collector.
    fn known_in(&self, span: SpanKey, inside: &HashSet<SpanKey>) -> SampleCounts {
        let pending = self.builder.pending;
        let is_in = |inner: &SpanKey| {
            *inner == span || pending.ancestors(*inner).any(|around| around == span)
        };
        let spans = inside.iter().filter(|inner| is_in(inner));
        spans.filter_map(|inner| pending.get(*inner)).map(SpanSamples::count).sum()
    }

    /// Adds placeholders for samples and waits that did not fit into memory.
    pub(crate) fn add_lost(&mut self, pending: &SpanSamples, link: Option<LinkId>) {
        let no_memory = "[stacks dropped: memory budget used up]";
        let no_room = "[stacks of waits dropped: no room for more]";
        for (kind, remark) in [
            (SampleKind::OnCpu, no_memory),
            (SampleKind::OffCpu, no_room),
            (SampleKind::AllocatedBytes, no_memory),
            (SampleKind::Allocations, no_memory),
        ] {
            let Lost { count, weight } = pending.lost(kind);
            if count > 0 {
                self.add_without_stack(kind, pending.last_ns, weight, remark, link);
            }
        }
    }

    /// Adds `[kernel]` where kernel time is not sampled: the on-CPU time without samples while the kept spans and
    /// those inside them were sampled. Adds nothing if something else may be missing.
    pub(crate) fn add_kernel(
        &mut self,
        group: &ProfileGroup,
        topmost: &[SpanKey],
        losses: &Losses,
        inside: &HashSet<SpanKey>,
    ) {
        let of_topmost = group.kept.iter().filter(|span| topmost.contains(&span.key));
        if losses.ring_full > 0 || losses.missing > 0 {
            return;
        }
        // The lower bound.
        let sampled_ns: u64 = of_topmost.clone().map(|span| span.times().subtree_sampled_ns).sum();
        // The longest period in the profile.
        let period_ns = self.profile.largest_weight_ns().max(self.builder.period_ns).max(1);
        // A thread can end in the middle of its last period, or of its only one: each span may have been on one of its own.
        let others = if of_topmost.clone().all(|span| span.times().covers_subtree()) {
            0
        } else {
            inside.len()
        };
        let without_samples_ns = sampled_ns.saturating_sub(self.profile.total(SampleKind::OnCpu));
        let periods = (without_samples_ns / period_ns).saturating_sub(others as u64);
        let Some(span) = of_topmost.max_by_key(|span| span.times().on_cpu_ns) else { return };
        // Up to one sample more or less at each end is normal.
        if periods < 2 {
            return;
        }
        let location = self.location(ModuleAddress::KERNEL, false);
        let stack = self.profile.add_stack(vec![location]);
        let link = self.link(span.key, inside);
        // A multiple of the period, like the other weights. When the time was spent is not known.
        let weight_ns = periods * period_ns;
        self.add(SampleKind::OnCpu, span.opened_ns, weight_ns, None, (stack, None), link);
    }

    /// Adds a stack: its code, and what is known of its end. Returns also how it ended.
    pub(crate) fn stack(
        &mut self,
        entries: impl Iterator<Item = StackEntry>,
    ) -> ((StackId, Option<LeafId>), UnwindEnd) {
        let (mut locations, mut leaf, mut end) = (Vec::new(), None, UnwindEnd::Root);
        let (mut name, mut span, mut holder) = (Vec::new(), None, None);
        for entry in entries {
            locations.push(match entry {
                StackEntry::StackLeaf(waited) => {
                    let waited = match (self.leaf(waited), holder.take()) {
                        (Leaf::Blocked(call), Some(holder)) => Leaf::BlockedBy(call, holder),
                        (waited, _) => waited,
                    };
                    leaf = Some(self.profile.add_leaf(waited));
                    continue;
                }
                StackEntry::HolderName(half) => {
                    name.extend(half);
                    continue;
                }
                StackEntry::HolderSpan(number) => {
                    span = self.builder.span_name(number);
                    continue;
                }
                StackEntry::Holder { tid, is_inferred } => {
                    let thread = OsThread::new(tid, &std::mem::take(&mut name)).name();
                    let span = span.take();
                    holder = Some(LockHolder { thread, tid, span, at: String::new(), is_inferred });
                    continue;
                }
                StackEntry::Code(address) => self.location(address, false),
                StackEntry::Inferred(address) => self.location(address, true),
                StackEntry::OtherLeaf => self.profile.add_leaf_mark(LeafMark::Other),
                StackEntry::Elsewhere => self.profile.add_leaf_mark(LeafMark::Elsewhere),
                StackEntry::WokenLeaf => self.profile.add_leaf_mark(LeafMark::Woken),
                StackEntry::BeforeError => self.profile.add_remark(BEFORE_ERROR),
                StackEntry::HoldsOthers => self.profile.add_remark(HOLDS_OTHERS),
                StackEntry::End(how) => {
                    end = how;
                    self.profile.add_remark(match how {
                        UnwindEnd::Root => continue,
                        UnwindEnd::Cut => CALLERS_NOT_COPIED,
                        UnwindEnd::WithoutTables => CALLERS_WITHOUT_TABLES,
                        UnwindEnd::OtherStack => "[callers on another stack]",
                        UnwindEnd::TooFar => "[callers beyond what can be copied]",
                        UnwindEnd::Lost => "[callers not found]",
                    })
                }
            });
        }
        ((self.profile.add_stack(locations), leaf), end)
    }

    /// A futex has its address, so that waits for the same lock are recognizable.
    fn leaf(&self, waited: StackLeaf) -> Leaf {
        match waited {
            StackLeaf::In(Call::Futex(lock) | Call::PlainFutex(lock)) => {
                Leaf::Blocked(format!("futex {lock:#x}"))
            }
            StackLeaf::In(Call::Named(name)) => Leaf::Blocked((*name).to_owned()),
            StackLeaf::In(Call::Numbered(number)) => Leaf::Blocked(format!("system call {number}")),
            StackLeaf::In(Call::PageFault) => Leaf::Blocked("page fault".to_owned()),
            StackLeaf::Unknown => Leaf::Unknown("waiting: location unknown"),
            StackLeaf::Running => Leaf::Unknown("running: stack not known"),
            StackLeaf::WhileEntered(ms) => Leaf::AwaitingWhileEntered(ms),
            StackLeaf::OneOf(count) => Leaf::AwaitingOneOf { count, others: String::new() },
            StackLeaf::NotBegun => Leaf::Unknown("scheduling delay before it began"),
            StackLeaf::NotObserved => Leaf::Unknown("in no thread: not `.profiled()`"),
            StackLeaf::NotCopied => Leaf::Unknown("awaiting: stack not copied"),
            StackLeaf::OtherStacks => Leaf::Unknown("other stacks: no memory for more"),
            StackLeaf::NotSampled => {
                Leaf::Unknown("not sampled: in the kernel, or in threads that were not sampled")
            }
            StackLeaf::AllocationNotCopied => Leaf::Unknown("allocated: stack not copied"),
            StackLeaf::Scheduling => Leaf::Delayed { behind: None },
            StackLeaf::SchedulingBehind(span) => {
                Leaf::Delayed { behind: self.builder.span_name(span) }
            }
            StackLeaf::AwaitingUntil(number) | StackLeaf::WokenIn(number) => {
                let woke = matches!(waited, StackLeaf::WokenIn(_));
                match self.builder.span_name(number) {
                    None if !woke => Leaf::Awaiting,
                    span => Leaf::AwaitingUntil { span, woke, at: String::new() },
                }
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
        let mapping = self.profile.add_distinct_mapping(Mapping {
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

    fn new_link(&mut self, span: SpanKey, parent: Option<LinkId>) -> Option<Link> {
        let pending = self.builder.pending.get(span)?;
        let known = pending.known?;
        let callsite = self.builder.callsites.get(known.plan)?;
        let name = capped(callsite.metadata.name());
        if self.detail == SpanDetail::Names && !self.kept.contains_key(&span) {
            let linked = parent.and_then(|parent| self.profile.link(parent)?.linked);
            return Some(Link { linked, ..Link::named(name, parent) });
        }
        let kept = self.kept.get(&span).map(|kept| &kept.facts);
        // The clock may have been refined since the span was opened, and a kept span is found by its start.
        let start = || self.builder.unix_ns(known.opened_ns);
        let start_unix_ns = kept.map_or_else(start, |kept| kept.start_unix_ns);
        let fields = kept.map(|kept| kept.fields.clone());
        let linked = self.linked.as_mut()?;
        Some(Link {
            ids: linked.ids_of(span),
            linked: linked.of_samples_in(span),
            fields: fields.unwrap_or_default(),
            start_unix_ns,
            end_unix_ns: pending.closed_ns.map_or(0, |closed_ns| self.builder.unix_ns(closed_ns)),
            ..Link::named(name, parent)
        })
    }

    /// The link of what is in spans inside one, which are not distinguished: it is not that span's own.
    pub(crate) fn inside(&mut self, around: LinkId) -> LinkId {
        let linked = self.profile.link(around).and_then(|around| around.linked);
        self.profile.add_link(Link { linked, ..Link::named(SPANS_INSIDE, Some(around)) })
    }

    /// The link of a span, including its ancestors up to [`DEEPEST`] levels: trees can be thousands of levels deep.
    pub(crate) fn link(&mut self, span: SpanKey, inside: &HashSet<SpanKey>) -> Option<LinkId> {
        if let Some(known) = self.links.get(&span) {
            return Some(*known);
        }
        let around =
            self.builder.pending.ancestors(span).take_while(|above| inside.contains(above));
        let mut path: Vec<_> = std::iter::once(span).chain(around).collect();
        path.reverse();
        let is_shown = self.detail != SpanDetail::KeptSpans || self.kept.contains_key(&span);
        if self.detail == SpanDetail::KeptSpans {
            path.retain(|span| self.kept.contains_key(span));
        }
        // Drops the spans just below the outermost one.
        let left_out = path.len().saturating_sub(DEEPEST);
        path.drain(left_out.min(1)..left_out + left_out.min(1));
        let mut parent = None;
        for span in path {
            let link = match self.links.get(&span) {
                Some(link) => *link,
                None => {
                    let new = self.new_link(span, parent)?;
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
        if is_shown { parent } else { parent.map(|around| self.inside(around)) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::build::ProfileAssembler;
    use super::*;
    use crate::facts::Facts;
    use crate::keep::{Callsites, Rules};
    use crate::sinks::{NewSample, Stack, Store};
    use crate::span::{RegistryId, SpanInfo};
    use crate::unwind::Unwinder;

    #[test]
    fn the_link_of_a_kept_span_starts_when_its_facts_say() {
        let key = SpanKey::new(1).unwrap();
        let kept = KeptSpan {
            opened_ns: 7,
            facts: Facts { start_unix_ns: 1_007, ..Facts::default() },
            ..KeptSpan::for_test(key, key, 1)
        };
        let rules: Rules = "0ms".parse().unwrap();
        let callsites = Callsites::for_test(rules);
        let plan = callsites.find(kept.metadata).unwrap().plan.number;
        let mut pending = Store::new(1 << 20, 100, 100);
        let info = SpanInfo { parent: None, root: key, id: RegistryId::MIN, plan, opened_ns: 5 };
        pending.register(key, info, 0);
        let group = ProfileGroup::for_test(key, vec![kept]);
        let unwinder = Unwinder::default();
        let inputs = ProfileInputs::new(&callsites, &pending, &unwinder);
        let inputs = ProfileInputs { unix_offset_ns: 1_000, ..inputs };
        let other = ProfileGroup::for_test(key, Vec::new());
        let start_in = |group| {
            let id = ProfileId::for_test(1);
            let mut tables = Tables::new(inputs, id, Some(group), SpanDetail::All);
            let link = tables.link(key, &HashSet::from([key])).unwrap();
            tables.profile.link(link).unwrap().start_unix_ns
        };
        assert_eq!(start_in(&other), 1_005);
        assert_eq!(start_in(&group), 1_007);
    }

    #[test]
    fn what_is_in_spans_that_are_not_distinguished_is_not_the_own_of_the_span_around_them() {
        let key = |number| SpanKey::new(number).unwrap();
        let kept = KeptSpan::for_test(key(1), key(1), 1);
        let callsites = Callsites::for_test("0ms".parse().unwrap());
        let plan = callsites.find(kept.metadata).unwrap().plan.number;
        let name = kept.metadata.name();
        let mut pending = Store::new(1 << 20, 100, 8);
        let stack = Stack::new();
        // The last one has no place, and the others leave theirs.
        for number in 1..=9 {
            let parent = SpanKey::new(1).filter(|_| number > 1);
            let info = SpanInfo { parent, root: key(1), id: RegistryId::MIN, plan, opened_ns: 5 };
            pending.register(key(number), info, 0);
            let kind = SampleKind::OnCpu;
            let ran = NewSample { kind, time_ns: 6, weight: 10, thread: None, stack: &stack };
            pending.add(key(number), ran, 0);
        }
        (2..=9).for_each(|number| pending.close(key(number)));
        assert_eq!(pending.evict_closed(|_| false), (0, false));
        let group = ProfileGroup::for_test(key(1), vec![kept]);
        let unwinder = Unwinder::default();
        let inputs = ProfileInputs::new(&callsites, &pending, &unwinder);
        let assembler = ProfileAssembler {
            inputs,
            unfinished: Vec::new(),
            most_samples: 100,
            most_bytes: usize::MAX,
            hides_kernel: false,
        };
        let profile = assembler.build(ProfileId::for_test(1), &group).profile;
        let mut in_spans = HashMap::<_, u64>::new();
        for sample in profile.samples() {
            *in_spans.entry(profile.span_path(sample.link)).or_default() += sample.total();
        }
        let inside_ns = in_spans.get([name, SPANS_INSIDE].as_slice()).copied();
        assert_eq!(in_spans.get([name].as_slice()), Some(&10), "its own: {in_spans:?}");
        assert!(inside_ns >= Some(50), "{in_spans:?}");
        assert_eq!(in_spans.values().sum::<u64>(), 90, "{in_spans:?}");
        // As where a profile has no room for the links of all spans.
        let detail = SpanDetail::KeptSpans;
        let mut tables = Tables::new(inputs, ProfileId::for_test(1), Some(&group), detail);
        let all = HashSet::from_iter(pending.of_root(key(1)).iter().copied());
        let inner = *pending.of_root(key(1)).last().unwrap();
        for (span, path) in [(key(1), [name].as_slice()), (inner, &[name, SPANS_INSIDE])] {
            let link = tables.link(span, &all);
            assert_eq!(tables.profile.span_path(link), path);
        }
    }
}
