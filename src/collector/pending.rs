//! Samples that wait for the verdict on their span.

use std::collections::{HashMap, HashSet};

use super::pending_span::{BYTES_A_SPAN, SHOWN_IF_LOST};
pub(super) use super::pending_span::{PendingSample, PendingSpan, PendingState, PendingWait};
use super::stack::Stack;
use crate::profile::SampleKind;
use crate::span::{SpanInfo, SpanKey};
use crate::sys::OsThread;

/// The samples of all spans.
#[derive(Debug)]
pub(super) struct Pending {
    spans: HashMap<SpanKey, PendingSpan>,
    /// The spans of each local root, including the root.
    roots: HashMap<SpanKey, Vec<SpanKey>>,
    bytes: usize,
    budget_bytes: usize,
    most_samples: usize,
    most_spans: usize,
    refused: HashMap<SpanKey, Refused>,
    /// A sample was lost, and memory has been short since.
    has_lost: bool,
    /// Whether some spans may be held although a profile has them.
    has_exported: bool,
}

/// What happened to an added sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Added {
    Kept,
    /// The sample was merged into others, or others into it.
    Downsampled(u64),
    /// Out of memory: only its CPU time is kept.
    Lost,
    /// Too many spans: its CPU time goes to the root of its span.
    Refused,
}

/// A span beyond the limit of pending spans.
#[derive(Debug, Default)]
struct Refused {
    known: Option<SpanInfo>,
    /// The round in which the span was first refused.
    round: u64,
    lost: u64,
    lost_ns: u64,
}

/// A closed span with all closed spans inside it.
#[derive(Default)]
struct ClosedTree {
    /// The time of the last sample in these spans.
    last_ns: u64,
    /// Each span with its root.
    spans: Vec<(SpanKey, SpanKey)>,
    /// The span around all of them.
    around: Option<SpanKey>,
    /// Whether some of their samples are in no profile.
    has_new: bool,
}

/// Losses are recorded for this many times the limit of pending spans.
const REFUSED_TIMES: usize = 4;

impl Pending {
    pub(super) fn stacks(&self) -> impl Iterator<Item = &Stack> {
        self.spans.values().flat_map(|span| span.stacks.iter())
    }

    pub(super) fn new(budget_bytes: usize, most_samples: usize, most_spans: usize) -> Self {
        Self {
            spans: HashMap::new(),
            roots: HashMap::new(),
            bytes: 0,
            budget_bytes,
            most_samples: most_samples.max(2),
            most_spans: most_spans.max(1),
            refused: HashMap::new(),
            has_lost: false,
            has_exported: false,
        }
    }

    /// Adds a sample to a span. `round` is the current one.
    pub(super) fn add(
        &mut self,
        span: SpanKey,
        time_ns: u64,
        weight_ns: u64,
        thread: OsThread,
        stack: &Stack,
        round: u64,
    ) -> Added {
        let Some(span) = self.place_of(span) else {
            if let Some(refused) = self.refused_entry(span, round) {
                refused.lost += 1;
                refused.lost_ns += weight_ns;
            }
            return Added::Refused;
        };
        let pending = span_of(&mut self.spans, &mut self.bytes, span, round);
        pending.last_ns = pending.last_ns.max(time_ns);
        pending.skipped += 1;
        pending.skipped_ns = pending.skipped_ns.saturating_add(weight_ns);
        if pending.skipped < pending.keep_every {
            pending.losses.downsampled += 1;
            return Added::Downsampled(1);
        }
        pending.skipped = 0;
        let weight_ns = std::mem::take(&mut pending.skipped_ns);
        let needed = size_of::<PendingSample>()
            + pending.stacks.cost(stack)
            + pending.stacks.thread_cost(thread);
        if self.bytes + needed > self.budget_bytes {
            // The samples that were merged into it are already counted as downsampled.
            pending.losses.lost += 1;
            self.has_lost = true;
            pending.lost_ns += weight_ns;
            return Added::Lost;
        }
        self.bytes += needed;
        let (stack, thread) = (pending.stacks.add(stack), pending.stacks.add_thread(thread));
        pending.samples.push(PendingSample { time_ns, stack, thread, weight_ns });
        if pending.samples.len() <= self.most_samples {
            return Added::Kept;
        }
        let before = pending.samples.len();
        pending.downsample();
        let downsampled = before - pending.samples.len();
        pending.losses.downsampled += downsampled as u64;
        self.bytes -= downsampled * size_of::<PendingSample>();
        Added::Downsampled(downsampled as u64)
    }

    /// Adds a wait to a span. `round` is the current one. Returns false if there is no memory for it; then only its
    /// time is kept.
    pub(super) fn add_wait(
        &mut self,
        span: SpanKey,
        wait: PendingWait,
        thread: Option<OsThread>,
        stack: &Stack,
        round: u64,
    ) -> bool {
        let Some(span) = self.place_of(span) else { return false };
        let pending = span_of(&mut self.spans, &mut self.bytes, span, round);
        pending.last_ns = pending.last_ns.max(wait.time_ns);
        let needed = size_of::<PendingWait>()
            + pending.stacks.cost(stack)
            + thread.map_or(0, |thread| pending.stacks.thread_cost(thread));
        // The others leave half of the memory to what ran and was blocked.
        let budget_bytes = match wait.kind {
            SampleKind::OnCpu | SampleKind::OffCpu => self.budget_bytes,
            _ => self.budget_bytes / 2,
        };
        let of_kind = pending.of_kinds.entry(wait.kind).or_default();
        if self.bytes + needed > budget_bytes || of_kind.count >= self.most_samples {
            of_kind.lost += if SHOWN_IF_LOST.contains(&wait.kind) { wait.weight } else { 0 };
            return false;
        }
        of_kind.count += 1;
        self.bytes += needed;
        let stack = pending.stacks.add(stack);
        let thread = thread.map_or(u32::MAX, |thread| pending.stacks.add_thread(thread));
        pending.waits.push(PendingWait { stack, thread, ..wait });
        true
    }

    fn has_place(&self, span: SpanKey) -> bool {
        self.spans.len() < self.most_spans || self.spans.contains_key(&span)
    }

    /// The span that has the samples of `span`: itself, or where there is no room for it the nearest one around it.
    fn place_of(&self, span: SpanKey) -> Option<SpanKey> {
        if self.has_place(span) {
            return Some(span);
        }
        let parent = |span: &SpanKey| self.refused.get(span)?.known?.parent;
        std::iter::successors(parent(&span), parent).find(|around| self.spans.contains_key(around))
    }

    fn refused_entry(&mut self, span: SpanKey, round: u64) -> Option<&mut Refused> {
        self.has_lost = true;
        let has_room = self.refused.len() < self.most_spans.saturating_mul(REFUSED_TIMES);
        if !has_room && !self.refused.contains_key(&span) {
            return None;
        }
        Some(self.refused.entry(span).or_insert_with(|| Refused { round, ..Refused::default() }))
    }

    /// Charges the losses of refused spans to their roots.
    pub(super) fn charge_refused(&mut self) {
        for refused in self.refused.values_mut() {
            let root = refused.known.and_then(|known| self.spans.get_mut(&known.root));
            if let Some(root) = root {
                root.losses.lost += std::mem::take(&mut refused.lost);
                root.lost_ns += std::mem::take(&mut refused.lost_ns);
            }
        }
    }

    /// Updates a span, if it is pending.
    pub(super) fn note(&mut self, span: SpanKey, note: impl FnOnce(&mut PendingSpan)) {
        _ = self.spans.get_mut(&span).map(note);
    }

    /// Registers a span. Several threads may register the same one.
    pub(super) fn register(&mut self, span: SpanKey, known: SpanInfo, round: u64) {
        // A root is never refused: it holds the losses of the spans inside it.
        if !self.has_place(span) && span != known.root {
            if let Some(refused) = self.refused_entry(span, round) {
                refused.known = Some(known);
            }
            return;
        }
        let refused = self.refused.remove(&span).unwrap_or_default();
        let pending = span_of(&mut self.spans, &mut self.bytes, span, round);
        // The span is no longer refused.
        pending.losses.lost += refused.lost;
        pending.lost_ns += refused.lost_ns;
        if pending.known.replace(known).is_none() {
            self.roots.entry(known.root).or_default().push(span);
        }
    }

    /// Whether a sample was lost and memory has been short since.
    pub(super) fn is_memory_short(&mut self) -> bool {
        let has_room = self.bytes + SOME_STACKS <= self.budget_bytes;
        self.has_lost &= !has_room || self.spans.len() >= self.most_spans;
        self.has_lost
    }

    pub(super) fn get(&self, span: SpanKey) -> Option<&PendingSpan> {
        self.spans.get(&span)
    }

    /// The spans of a root, including the root.
    pub(super) fn of_root(&self, root: SpanKey) -> &[SpanKey] {
        self.roots.get(&root).map_or(&[], Vec::as_slice)
    }

    /// A span's ancestors, innermost first.
    pub(super) fn ancestors(&self, span: SpanKey) -> impl Iterator<Item = SpanKey> {
        let parent = |span: &SpanKey| self.spans.get(span)?.known?.parent;
        std::iter::successors(parent(&span), move |span| parent(span))
    }

    /// The spans in `kept` that are inside no other span in `kept`.
    pub(super) fn topmost(&self, kept: &HashSet<SpanKey>) -> Vec<SpanKey> {
        let inside = |span: &&SpanKey| self.ancestors(**span).any(|above| kept.contains(&above));
        kept.iter().filter(|span| !inside(span)).copied().collect()
    }

    /// The kept spans of a root, and the spans inside them.
    pub(super) fn inside(
        &self,
        root: SpanKey,
        kept: impl IntoIterator<Item = SpanKey>,
    ) -> HashSet<SpanKey> {
        let mut inside: HashSet<_> = kept.into_iter().collect();
        let mut outside = HashSet::new();
        for span in self.of_root(root) {
            // Each span is decided once, together with all spans on the way up to a decided one.
            let mut undecided = Vec::new();
            let up = std::iter::once(*span).chain(self.ancestors(*span)).find(|span| {
                let is_decided = inside.contains(span) || outside.contains(span);
                undecided.extend((!is_decided).then_some(*span));
                is_decided
            });
            let is_inside = up.is_some_and(|up| inside.contains(&up));
            if is_inside { &mut inside } else { &mut outside }.extend(undecided);
        }
        inside
    }

    /// A profile has the samples of a closed span. They are held for the profiles of spans around it.
    pub(super) fn note_exported(&mut self, span: SpanKey) {
        self.note(span, |pending| pending.state = PendingState::Exported);
        self.has_exported = true;
    }

    /// Marks a span as closed.
    pub(super) fn close(&mut self, span: SpanKey) {
        self.refused.remove(&span);
        self.note(span, |pending| {
            if pending.state == PendingState::Open {
                pending.state = PendingState::Closed;
            }
        });
    }

    /// If memory or spans run short, drops closed spans of long-lived roots (a connection, `main`) until half of both
    /// is free. What a profile has already goes first, and sooner, since it would leave no room for awaits: where half is
    /// used, until three quarters are free. Of each, those that were sampled longest ago go first. Their samples go to the
    /// span around them or, if memory is short, their CPU time goes there as lost. In roots for which `is_reserved` returns
    /// true, only what a profile has is dropped. Returns how many samples were dropped that are in no profile, and whether
    /// memory was the reason.
    pub(super) fn evict_closed(&mut self, is_reserved: impl Fn(SpanKey) -> bool) -> (u64, bool) {
        let is_memory_short = self.bytes > self.budget_bytes / 4 * 3;
        let is_over = self.is_over(3);
        if !(is_over || self.has_exported && self.is_over(2)) {
            return (0, is_memory_short);
        }
        let is_half_used = self.bytes > self.budget_bytes / 2;
        let reserved: HashSet<_> =
            self.roots.keys().copied().filter(|root| is_reserved(*root)).collect();
        let goes = |pending: &PendingSpan| match pending.state {
            PendingState::Open => false,
            PendingState::Closed => {
                is_over && pending.known.is_some_and(|known| !reserved.contains(&known.root))
            }
            PendingState::Exported => true,
        };
        // A span goes with all spans inside it, so that none loses its parent.
        let mut trees: HashMap<SpanKey, ClosedTree> = HashMap::new();
        for (span, pending) in self.spans.iter().filter(|(_, pending)| goes(pending)) {
            let Some(root) = pending.known.map(|known| known.root) else { continue };
            if root != *span {
                let goes = |above: &SpanKey| self.spans.get(above).is_some_and(goes);
                let outermost = self.ancestors(*span).take_while(goes).last();
                let outermost = outermost.unwrap_or(*span);
                let tree = trees.entry(outermost).or_default();
                tree.around = self.ancestors(outermost).next();
                tree.last_ns = tree.last_ns.max(pending.last_ns);
                tree.has_new |= pending.state != PendingState::Exported;
                tree.spans.push((*span, root));
            }
        }
        let mut trees: Vec<_> = trees.into_values().collect();
        trees.sort_unstable_by_key(|tree| (tree.has_new, tree.last_ns));
        let mut samples = 0;
        for tree in trees {
            if !self.is_over(if tree.has_new { 2 } else { 1 }) {
                continue;
            }
            let must_free = if tree.has_new { is_memory_short } else { is_half_used };
            let around = tree.around.filter(|around| self.spans.contains_key(around));
            for (span, root) in tree.spans {
                samples += match around {
                    Some(around) if !must_free => self.fold(span, around),
                    _ => self.evict(span, around.unwrap_or(root)),
                };
            }
        }
        self.has_exported = self.spans.values().any(|it| it.state == PendingState::Exported);
        let spans = &self.spans;
        self.roots.values_mut().for_each(|root| root.retain(|span| spans.contains_key(span)));
        (samples, is_memory_short)
    }

    /// Whether more than `quarters` quarters of the memory or of the span limit are used.
    fn is_over(&self, quarters: usize) -> bool {
        self.bytes > self.budget_bytes / 4 * quarters
            || self.spans.len() > self.most_spans / 4 * quarters
    }

    /// Moves what a span has into one around it. Returns how many samples were lost that are in no profile.
    fn fold(&mut self, span: SpanKey, around: SpanKey) -> u64 {
        let Some(from) = self.spans.remove(&span) else { return 0 };
        self.bytes -= from.bytes();
        let mut lost = 0;
        for sample in &from.samples {
            let (thread, stack) = (from.thread(sample.thread), from.stack(sample.stack));
            if let Some((thread, stack)) = thread.zip(stack) {
                let added = self.add(around, sample.time_ns, sample.weight_ns, thread, stack, 0);
                lost += u64::from(added == Added::Lost && from.state != PendingState::Exported);
            }
        }
        for wait in &from.waits {
            if let Some(stack) = from.stack(wait.stack) {
                self.add_wait(around, *wait, from.thread(wait.thread), stack, 0);
            }
        }
        self.note(around, |around| {
            around.losses += from.losses;
            around.lost_ns += from.lost_ns;
            around.skipped_ns = around.skipped_ns.saturating_add(from.skipped_ns);
            for (kind, of_kind) in &from.of_kinds {
                around.of_kinds.entry(*kind).or_default().lost += of_kind.lost;
            }
        });
        lost
    }

    /// Drops what a span has. Its time is lost to the span around it.
    fn evict(&mut self, span: SpanKey, around: SpanKey) -> u64 {
        let Some(pending) = self.spans.remove(&span) else { return 0 };
        self.bytes -= pending.bytes();
        let weights = pending.samples.iter().map(|sample| sample.weight_ns);
        let lost_ns = pending.lost_ns + pending.skipped_ns + weights.sum::<u64>();
        let samples = pending.samples.len() as u64;
        if let Some(around) = self.spans.get_mut(&around) {
            around.losses += pending.losses;
            around.losses.lost += samples;
            around.lost_ns += lost_ns;
            for kind in SHOWN_IF_LOST {
                let lost = pending.lost(kind) + pending.weight_of(kind);
                around.of_kinds.entry(kind).or_default().lost += lost;
            }
            around.last_ns = around.last_ns.max(pending.last_ns);
        }
        if pending.state == PendingState::Exported { 0 } else { samples }
    }

    /// Drops a root and all its spans.
    pub(super) fn remove_root(&mut self, root: SpanKey) {
        for span in self.roots.remove(&root).unwrap_or_default() {
            self.remove_span(span);
        }
    }

    fn remove_span(&mut self, span: SpanKey) {
        if let Some(pending) = self.spans.remove(&span) {
            self.bytes -= pending.bytes();
        }
    }

    /// All registered spans, so that the caller can check whether they are still open.
    pub(super) fn registered_spans(&self) -> Vec<(SpanKey, SpanInfo)> {
        let pending = self.spans.iter().map(|(span, pending)| (*span, pending.known));
        let refused = self.refused.iter().map(|(span, refused)| (*span, refused.known));
        pending.chain(refused).filter_map(|(span, known)| Some((span, known?))).collect()
    }

    /// Drops spans that were first seen before `round` and have not been registered, except those in `entered`.
    /// Returns the number of their samples.
    pub(super) fn remove_unregistered(&mut self, round: u64, entered: &HashSet<SpanKey>) -> u64 {
        self.refused.retain(|span, refused| {
            refused.known.is_some() || refused.round >= round || entered.contains(span)
        });
        let unknown: Vec<_> = self
            .spans
            .iter()
            .filter(|(span, pending)| {
                pending.known.is_none() && pending.first_round < round && !entered.contains(span)
            })
            .map(|(span, _)| *span)
            .collect();
        let mut samples = 0;
        for span in unknown {
            samples += self.spans.get(&span).map_or(0, |pending| pending.samples.len() as u64);
            self.remove_span(span);
        }
        samples
    }
}

/// The entry of a span, which is created if the span is new in this `round`.
fn span_of<'a>(
    spans: &'a mut HashMap<SpanKey, PendingSpan>,
    bytes: &mut usize,
    span: SpanKey,
    round: u64,
) -> &'a mut PendingSpan {
    spans.entry(span).or_insert_with(|| {
        *bytes += BYTES_A_SPAN;
        PendingSpan::new(round)
    })
}

/// Memory is short if less than this is free.
const SOME_STACKS: usize = 16 * 1024;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::span::RegistryId;
    use crate::unwind::ModuleAddress;

    const THREAD: OsThread = OsThread::unnamed(1);
    const SPAN: SpanKey = SpanKey::new(5).unwrap();
    const PLENTY: usize = 1 << 20;
    const SPANS: usize = 10_000;

    fn stack(address: u64) -> Stack {
        Stack { frames: vec![ModuleAddress::new(None, address)], ..Stack::new() }
    }

    fn key(number: u64) -> SpanKey {
        SpanKey::new(number).unwrap()
    }

    fn known(root: u64, parent: Option<u64>) -> SpanInfo {
        let id = RegistryId::MIN;
        SpanInfo { parent: parent.map(key), root: key(root), id, plan: 0, opened_ns: 0 }
    }

    #[test]
    fn a_long_lived_root_does_not_fill_the_memory() {
        let mut pending = Pending::new(64 * 1024, 1_000, SPANS);
        let root = SpanKey::new(1).unwrap();
        let known = |parent| {
            let id = RegistryId::new(1).unwrap();
            SpanInfo { parent, root, id, plan: 0, opened_ns: 0 }
        };
        pending.register(root, known(None), 1);
        let stack = Stack { frames: vec![ModuleAddress::new(None, 7)], ..Stack::new() };
        let (mut weight_ns, mut given_up) = (0, 0);
        for number in 2..5_000 {
            let child = SpanKey::new(number).unwrap();
            let grandchild = SpanKey::new(number + 10_000).unwrap();
            pending.register(child, known(Some(root)), 1);
            pending.register(grandchild, known(Some(child)), 1);
            for span in [child, grandchild] {
                assert_eq!(pending.add(span, number, 3, THREAD, &stack, 1), Added::Kept);
                weight_ns += 3;
                pending.close(span);
            }
            assert_eq!(pending.evict_closed(|_| true).0, 0, "promised samples stay");
            given_up += pending.evict_closed(|_| false).0;
            assert!(pending.bytes <= pending.budget_bytes);
        }
        let spans = pending.of_root(root).to_vec();
        assert_eq!(spans.len(), pending.spans.len());
        let left: u64 = spans
            .iter()
            .filter_map(|span| pending.get(*span))
            .flat_map(|span| &span.samples)
            .map(|sample| sample.weight_ns)
            .sum();
        let root = pending.get(root).unwrap();
        assert_eq!(root.losses.lost, given_up);
        assert_eq!(root.lost_ns + left, weight_ns);
        let whole = |span: &SpanKey| pending.ancestors(*span).last() == spans.first().copied();
        assert!(spans.iter().skip(1).all(whole));
    }

    #[test]
    fn equal_stacks_are_held_once() {
        let mut pending = Pending::new(PLENTY, 100, SPANS);
        for time in 0..10 {
            pending.add(SPAN, time, 1, THREAD, &stack(7), 0);
        }
        pending.add(SPAN, 11, 1, THREAD, &stack(8), 0);
        let span = pending.get(SPAN).unwrap();
        assert_eq!(span.samples.len(), 11);
        assert_eq!(span.stacks.count(), 2);
        assert_eq!(pending.bytes, span.bytes());
    }

    #[test]
    fn too_many_samples_are_downsampled_and_keep_their_total_weight() {
        let mut pending = Pending::new(PLENTY, 100, SPANS);
        let mut downsampled = 0;
        for time in 0..1_000 {
            if let Added::Downsampled(count) = pending.add(SPAN, time, 3, THREAD, &stack(7), 0) {
                downsampled += count;
            }
        }
        let span = pending.get(SPAN).unwrap();
        assert!(span.samples.len() <= 100 && span.samples.len() > 40);
        let weight: u64 = span.samples.iter().map(|s| s.weight_ns).sum();
        assert_eq!(weight + span.skipped_ns, 3_000);
        let uniform = 3 * u64::from(span.keep_every);
        assert!(span.samples.iter().all(|sample| sample.weight_ns == uniform));
        assert_eq!(downsampled + span.samples.len() as u64, 1_000);
        // They are spread evenly.
        let half = span.samples.iter().filter(|s| s.time_ns < 500).count();
        assert!(half.abs_diff(span.samples.len() / 2) <= 2);
        assert_eq!(pending.bytes, span.bytes());
    }

    #[test]
    fn without_memory_the_cpu_time_is_kept() {
        let mut pending = Pending::new(1_000, 100, SPANS);
        let lost =
            (0..100).filter(|i| pending.add(SPAN, *i, 3, THREAD, &stack(*i), 0) == Added::Lost);
        let lost = lost.count() as u64;
        assert!(lost > 50);
        let span = pending.get(SPAN).unwrap();
        assert_eq!((span.losses.lost, span.lost_ns), (lost, lost * 3));
        assert!(pending.bytes <= 1_000);
    }

    /// A connection that is idle again and again stays open.
    #[test]
    fn awaits_leave_half_of_the_memory_to_samples() {
        let mut pending = Pending::new(64 * 1024, 1 << 20, SPANS);
        let span = SpanKey::new(1).unwrap();
        let wait = |kind| PendingWait { kind, time_ns: 0, weight: 1, stack: 0, thread: 0 };
        let add =
            |pending: &mut Pending, kind| pending.add_wait(span, wait(kind), None, &stack(7), 1);
        let awaits = (0..10_000).take_while(|_| add(&mut pending, SampleKind::Await)).count();
        assert!(awaits > 100 && pending.bytes <= pending.budget_bytes / 2, "{awaits}");
        assert!(!add(&mut pending, SampleKind::Delay));
        assert!(add(&mut pending, SampleKind::OffCpu));
        assert_eq!(pending.add(span, 0, 3, THREAD, &stack(7), 1), Added::Kept);
        assert_eq!(pending.get(span).unwrap().lost(SampleKind::OffCpu), 0, "awaits are no waits");
    }

    #[test]
    fn a_span_beyond_the_limit_leaves_its_time_to_its_root() {
        let mut pending = Pending::new(PLENTY, 100, 4);
        pending.register(key(1), known(1, None), 0);
        for span in 2..10 {
            // The sample may be drained before or after the span is registered.
            if span % 2 == 0 {
                pending.add(key(span), 0, 3, THREAD, &stack(1), 0);
            }
            pending.register(key(span), known(1, Some(1)), 0);
            pending.add(key(span), 0, 3, THREAD, &stack(1), 0);
        }
        pending.charge_refused();
        assert_eq!(pending.spans.len(), 4);
        let left: u64 = pending
            .spans
            .values()
            .flat_map(|span| &span.samples)
            .map(|sample| sample.weight_ns)
            .sum();
        let root = pending.get(key(1)).unwrap();
        assert_eq!(left + root.lost_ns, 12 * 3);
        // A span that is registered later keeps its earlier losses.
        pending.most_spans = 5;
        pending.add(key(30), 0, 3, THREAD, &stack(1), 0);
        pending.register(key(30), known(1, Some(1)), 0);
        assert_eq!(pending.get(key(30)).unwrap().samples.len(), 1);
        assert_eq!(pending.add(key(31), 0, 3, THREAD, &stack(1), 0), Added::Refused);
        pending.most_spans = 6;
        pending.register(key(31), known(1, Some(1)), 0);
        assert_eq!(pending.get(key(31)).unwrap().lost_ns, 3);
        for span in 2..10 {
            pending.close(key(span));
        }
        assert!(pending.refused.is_empty());
        // Another root is never refused.
        pending.register(key(20), known(20, None), 0);
        assert!(pending.get(key(20)).is_some());
    }

    /// A long request with more spans than there is room for.
    #[test]
    fn many_small_spans_leave_their_samples_to_those_around_them() {
        let mut pending = Pending::new(PLENTY, 100_000, 100);
        pending.register(key(1), known(1, None), 0);
        pending.register(key(2), known(1, Some(1)), 0);
        let mut samples = 0;
        for round in 0..50 {
            let mut closed = Vec::new();
            // In each round ten times three spans inside each other, and more than there is room for in the last ones.
            for tree in 0..if round < 40 { 10 } else { 70 } {
                let first = 100 + round * 1_000 + tree * 3;
                for (span, parent) in [(first, 2), (first + 1, first), (first + 2, first + 1)] {
                    pending.register(key(span), known(1, Some(parent)), round);
                    let added = pending.add(key(span), round, 3, THREAD, &stack(span % 7), round);
                    assert_eq!(added, Added::Kept, "{round} {tree}");
                    let kind = SampleKind::OffCpu;
                    let wait = PendingWait { kind, time_ns: round, weight: 5, stack: 0, thread: 0 };
                    assert!(pending.add_wait(key(span), wait, Some(THREAD), &stack(8), round));
                    samples += 1;
                    closed.push(key(span));
                }
            }
            pending.charge_refused();
            closed.into_iter().for_each(|span| pending.close(span));
            assert_eq!(pending.evict_closed(|_| false), (0, false));
        }
        let spans = || pending.spans.values();
        assert!(spans().count() <= 100);
        let taken: u64 = spans().map(|span| span.samples.len() as u64).sum();
        let waits: u64 = spans().map(|span| span.waits.len() as u64).sum();
        assert_eq!((taken, waits), (samples, samples));
        assert_eq!(spans().map(|span| span.losses.lost).sum::<u64>(), 0);
        assert!(pending.get(key(2)).unwrap().samples.len() > 1_000, "the nearest one that is open");
        assert_eq!(pending.get(key(1)).unwrap().samples.len(), 0);
        let bytes: usize = spans().map(PendingSpan::bytes).sum();
        assert_eq!(pending.bytes, bytes);
    }

    #[test]
    fn a_root_is_forgotten_with_all_its_spans() {
        let mut pending = Pending::new(PLENTY, 100, SPANS);
        for (span, parent) in [(1, None), (2, Some(1)), (3, Some(2))] {
            pending.register(key(span), known(1, parent), 0);
            pending.add(key(span), 0, 1, THREAD, &stack(span), 0);
        }
        pending.register(key(9), known(9, None), 0);
        assert_eq!(pending.of_root(key(1)), [key(1), key(2), key(3)]);
        assert_eq!(pending.ancestors(key(3)).collect::<Vec<_>>(), [key(2), key(1)]);
        pending.remove_root(key(1));
        assert!(pending.get(key(2)).is_none());
        assert!(pending.get(key(9)).is_some());
        pending.remove_root(key(9));
        assert_eq!(pending.bytes, 0);
    }

    #[test]
    fn the_topmost_of_kept_spans_cover_the_others() {
        let mut pending = Pending::new(PLENTY, 100, SPANS);
        for (span, parent) in [(1, None), (2, Some(1)), (3, Some(2)), (4, Some(1))] {
            pending.register(key(span), known(1, parent), 0);
        }
        let mut topmost = pending.topmost(&HashSet::from([key(2), key(3), key(4)]));
        topmost.sort();
        assert_eq!(topmost, [key(2), key(4)]);
    }

    #[test]
    fn unregistered_spans_are_forgotten_in_the_next_round() {
        let mut pending = Pending::new(PLENTY, 100, SPANS);
        pending.add(key(1), 0, 1, THREAD, &stack(1), 5);
        pending.add(key(2), 0, 1, THREAD, &stack(1), 5);
        let entered = HashSet::from([key(2)]);
        assert_eq!(pending.remove_unregistered(5, &entered), 0);
        assert_eq!(pending.remove_unregistered(6, &entered), 1);
        assert!(pending.get(key(1)).is_none());
        assert!(pending.get(key(2)).is_some());
    }

    /// In an outage a root such as `main` always has spans that are kept, so that it is always reserved.
    #[test]
    fn what_a_profile_has_makes_room_also_in_a_reserved_root() {
        let mut pending = Pending::new(64 * 1024, 1_000, SPANS);
        pending.register(key(1), known(1, None), 1);
        for number in 2..5_000 {
            pending.register(key(number), known(1, Some(1)), 1);
            assert_eq!(pending.add(key(number), number, 3, THREAD, &stack(7), 1), Added::Kept);
            pending.close(key(number));
            // It stays for the spans around it.
            pending.note_exported(key(number));
            assert_eq!(pending.evict_closed(|_| true).0, 0, "all are in a profile");
            assert_eq!(pending.get(key(number)).unwrap().samples.len(), 1);
            // The rest is for what other spans await and allocate.
            assert!(pending.bytes <= pending.budget_bytes / 2, "{number}");
        }
        let root = pending.get(key(1)).unwrap();
        assert!(root.losses.lost > 0, "the profile of the root says what it lacks");
        pending.remove_root(key(1));
        assert_eq!(pending.bytes, 0);
    }

    /// A request in `main` with a child that a profile has, beside a sample that none has and that is older.
    #[test]
    fn what_a_profile_has_goes_first_and_is_missing_in_the_span_around_it() {
        let mut pending = Pending::new(64 * 1024, 10_000, SPANS);
        pending.register(key(1), known(1, None), 1);
        pending.register(key(2), known(1, Some(1)), 1);
        pending.register(key(3), known(1, Some(1)), 1);
        pending.register(key(4), known(1, Some(2)), 1);
        pending.add(key(3), 0, 3, THREAD, &stack(7), 1);
        pending.close(key(3));
        for time in 1..1_300 {
            assert_eq!(pending.add(key(4), time, 3, THREAD, &stack(7), 1), Added::Kept);
        }
        pending.close(key(4));
        pending.note_exported(key(4));
        assert!(pending.bytes > pending.budget_bytes / 2);
        assert_eq!(pending.evict_closed(|_| false), (0, false));
        assert_eq!(pending.get(key(3)).unwrap().samples.len(), 1);
        assert!(pending.get(key(4)).is_none());
        let lost = |span| pending.get(key(span)).unwrap().lost_ns;
        assert_eq!((lost(2), lost(1)), (1_299 * 3, 0), "the request says what it lacks");
    }
}
