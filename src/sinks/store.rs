//! Samples that wait for the verdict on their span.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::ledger::{ClosedChild, Ledger};
use super::losses::Losses;
use super::span_samples::{
    Added, BYTES_A_SPAN, Lost, NewSample, PendingState, SampleTables, SpanSamples, StoredSample,
};
use crate::keep::SpanNames;
use crate::profile::SampleKind;
use crate::span::{SpanInfo, SpanKey};

#[derive(Default)]
pub(crate) struct Store {
    spans: HashMap<SpanKey, SpanSamples>,
    /// The stacks and threads of all samples.
    pub(crate) tables: SampleTables,
    pub(crate) names: Arc<SpanNames>,
    /// The spans of each local root, including the root.
    roots: HashMap<SpanKey, Vec<SpanKey>>,
    /// The memory of all spans, without these.
    bytes: usize,
    budget_bytes: usize,
    most_samples: usize,
    most_spans: usize,
    refused: HashMap<SpanKey, Refused>,
    /// A sample was lost, and memory has been short since.
    has_lost: bool,
    /// No span was found that can be downsampled to make room, in this round.
    none_is_large: bool,
    /// When the close of a child span of any span was last lost: `CLOCK_MONOTONIC_RAW` in nanoseconds.
    pub(crate) child_lost_ns: u64,
}

/// A span beyond the limit of pending spans.
#[derive(Debug, Default)]
struct Refused {
    known: Option<SpanInfo>,
    /// The round in which the span was first refused.
    round: u64,
    /// CPU time.
    lost: Lost,
}

/// A closed span with all closed spans inside it.
#[derive(Default)]
struct ClosedTree {
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

impl Store {
    pub(crate) fn new(budget_bytes: usize, most_samples: usize, most_spans: usize) -> Self {
        Self {
            budget_bytes,
            most_samples: most_samples.max(2),
            most_spans: most_spans.max(1),
            ..Self::default()
        }
    }

    pub(crate) fn add(&mut self, span: SpanKey, sample: NewSample<'_>, round: u64) -> Added {
        let NewSample { kind, time_ns, weight, .. } = sample;
        let is_on_cpu = kind == SampleKind::OnCpu;
        let inside = span;
        let Some(span) = self.place_of(span) else {
            if is_on_cpu && let Some(refused) = self.refused_entry(span, round) {
                refused.lost += Lost { count: 1, weight };
            }
            return Added::Refused;
        };
        let pending = span_of(&mut self.spans, &mut self.bytes, span, round);
        pending.last_ns = pending.last_ns.max(time_ns);
        pending.losses.folded += u64::from(span != inside);
        let of_kind = pending.of_kind(kind, &mut self.bytes);
        let weight = match of_kind.admit(kind, weight, self.most_samples) {
            Ok(weight) => weight,
            Err(added) => return added,
        };
        // The others leave half of the memory to what ran and was blocked.
        let budget_bytes = match kind {
            SampleKind::OnCpu | SampleKind::OffCpu => self.budget_bytes,
            _ => self.budget_bytes / 2,
        };
        let new = NewSample { weight, ..sample };
        let mut downsampled = 0;
        let stored = loop {
            let used = self.used_bytes() + size_of::<StoredSample>();
            let left = budget_bytes.checked_sub(used);
            if let Some(stored) = left.and_then(|left| self.tables.add(new, left)) {
                break Some(stored);
            }
            match if is_on_cpu && !self.none_is_large { self.halve_largest() } else { 0 } {
                0 => {
                    // Until a round has passed: to search is work.
                    self.none_is_large |= is_on_cpu;
                    break None;
                }
                halved => downsampled += halved,
            }
        };
        let of_kind = self.spans.get_mut(&span).map(|span| span.of_kind(kind, &mut self.bytes));
        let added = match (of_kind, stored) {
            (Some(of_kind), Some(stored)) => {
                let stored = if span == inside { stored } else { stored.in_span_around() };
                of_kind.push(stored, self.most_samples, &mut self.tables, &mut self.bytes)
            }
            (of_kind, _) => {
                // The samples that were merged into it are already counted as downsampled.
                of_kind.into_iter().for_each(|it| it.lose(kind, Lost { count: 1, weight }));
                self.has_lost |= is_on_cpu;
                Added::Lost
            }
        };
        match added {
            Added::Kept if downsampled > 0 => Added::Downsampled(downsampled),
            Added::Downsampled(more) => Added::Downsampled(downsampled + more),
            added => added,
        }
    }

    /// Makes room by halving the on-CPU samples of the span with most of them: a span that has filled the memory shows
    /// all of its time nevertheless. Returns how many were merged; 0 if no span has many.
    fn halve_largest(&mut self) -> u64 {
        let count = |span: &SpanSamples| span.samples(SampleKind::OnCpu).len();
        let largest = self.spans.values_mut().max_by_key(|span| count(span));
        let largest = largest.filter(|span| count(span) >= LEAST_TO_HALVE);
        let of_kind = largest.and_then(|span| span.kinds.get_mut(&SampleKind::OnCpu));
        of_kind.map_or(0, |of_kind| of_kind.halve(&mut self.tables, &mut self.bytes))
    }

    /// Counts a span that has closed inside `span`. Returns false if there is no room. `round` is the current one.
    pub(crate) fn add_child(&mut self, span: SpanKey, child: ClosedChild, round: u64) -> bool {
        // Closed spans of long-lived roots may have three quarters of the memory.
        let has_room = self.used_bytes() + Ledger::MOST_GROWTH <= self.budget_bytes / 8 * 7;
        let is_counted = has_room && self.has_place(span);
        if !is_counted {
            self.note(span, |pending| {
                pending.children.iter_mut().for_each(|it| it.has_lost = true)
            });
            return false;
        }
        let pending = span_of(&mut self.spans, &mut self.bytes, span, round);
        let before = pending.children.as_ref().map_or(0, |children| children.bytes);
        let children = pending.children.get_or_insert_with(|| Box::new(Ledger::new()));
        children.add(child);
        self.bytes = self.bytes + children.bytes - before;
        true
    }

    fn used_bytes(&self) -> usize {
        self.bytes + self.tables.bytes()
    }

    fn has_place(&self, span: SpanKey) -> bool {
        self.spans.len() < self.most_spans || self.spans.contains_key(&span)
    }

    /// The span that has the samples of `span`: itself, or where there is no room for it the nearest known one around it.
    fn place_of(&self, span: SpanKey) -> Option<SpanKey> {
        if self.has_place(span) {
            return Some(span);
        }
        let known = self.refused.get(&span)?.known?;
        let parent = |span: &SpanKey| self.refused.get(span)?.known?.parent;
        let mut around = std::iter::successors(known.parent, parent).chain([known.root]);
        around.find(|around| self.spans.contains_key(around))
    }

    fn refused_entry(&mut self, span: SpanKey, round: u64) -> Option<&mut Refused> {
        self.has_lost = true;
        let has_room = self.refused.len() < self.most_spans.saturating_mul(REFUSED_TIMES);
        if !has_room && !self.refused.contains_key(&span) {
            return None;
        }
        Some(self.refused.entry(span).or_insert_with(|| Refused { round, ..Refused::default() }))
    }

    pub(crate) fn note(&mut self, span: SpanKey, note: impl FnOnce(&mut SpanSamples)) {
        _ = self.spans.get_mut(&span).map(note);
    }

    /// Registers a span. Several threads may register the same one.
    pub(crate) fn register(&mut self, span: SpanKey, known: SpanInfo, round: u64) {
        // A root is never refused: it holds the losses of the spans inside it.
        if !self.has_place(span) && span != known.root {
            let Some(refused) = self.refused_entry(span, round) else { return };
            refused.known = Some(known);
            // The root was registered before the spans inside it. If it has closed, no profile can say so any more.
            let lost = std::mem::take(&mut refused.lost);
            return self.lose(known.root, lost);
        }
        let pending = span_of(&mut self.spans, &mut self.bytes, span, round);
        if pending.known.replace(known).is_none() {
            self.roots.entry(known.root).or_default().push(span);
        }
        // It is no longer refused.
        let refused = self.refused.remove(&span).unwrap_or_default();
        self.lose(span, refused.lost);
    }

    fn lose(&mut self, span: SpanKey, lost: Lost) {
        if let Some(pending) = self.spans.get_mut(&span)
            && lost != Lost::default()
        {
            pending.of_kind(SampleKind::OnCpu, &mut self.bytes).lost += lost;
        }
    }

    pub(crate) fn is_memory_short(&mut self) -> bool {
        let has_room = self.used_bytes() + SOME_STACKS <= self.budget_bytes;
        self.has_lost &= !has_room || self.spans.len() >= self.most_spans;
        self.has_lost
    }

    pub(crate) fn get(&self, span: SpanKey) -> Option<&SpanSamples> {
        self.spans.get(&span)
    }

    pub(crate) fn of_root(&self, root: SpanKey) -> &[SpanKey] {
        self.roots.get(&root).map_or(&[], Vec::as_slice)
    }

    /// A span's ancestors, innermost first.
    pub(crate) fn ancestors(&self, span: SpanKey) -> impl Iterator<Item = SpanKey> {
        let parent = |span: &SpanKey| self.spans.get(span)?.known?.parent;
        std::iter::successors(parent(&span), move |span| parent(span))
    }

    /// The kept spans of a root, and the spans inside them.
    pub(crate) fn inside(
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
    pub(crate) fn note_exported(&mut self, span: SpanKey) {
        self.note(span, |pending| pending.state = PendingState::Exported);
    }

    pub(crate) fn close(&mut self, span: SpanKey) {
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
    pub(crate) fn evict_closed(&mut self, is_reserved: impl Fn(SpanKey) -> bool) -> (u64, bool) {
        self.none_is_large = false;
        let is_memory_short = self.used_bytes() > self.budget_bytes / 4 * 3;
        let is_over = self.is_over(3);
        if !self.is_over(2) {
            return (0, is_memory_short);
        }
        let is_half_used = self.used_bytes() > self.budget_bytes / 2;
        let reserved: HashSet<_> =
            self.roots.keys().copied().filter(|root| is_reserved(*root)).collect();
        let goes = |pending: &SpanSamples| match pending.state {
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
                let has_room = !must_free && around.is_some();
                samples += self.fold(span, around.unwrap_or(root), has_room);
            }
        }
        let spans = &self.spans;
        self.roots.values_mut().for_each(|root| root.retain(|span| spans.contains_key(span)));
        (samples, is_memory_short)
    }

    /// Whether more than `quarters` quarters of the memory or of the span limit are used.
    fn is_over(&self, quarters: usize) -> bool {
        self.used_bytes() > self.budget_bytes / 4 * quarters
            || self.spans.len() > self.most_spans / 4 * quarters
    }

    /// Moves what a span has into one around it: unless that `has_room`, only how much time it is. Returns how many
    /// samples were dropped that are in no profile.
    fn fold(&mut self, span: SpanKey, around: SpanKey, has_room: bool) -> u64 {
        let Some(from) = self.spans.remove(&span) else { return 0 };
        self.bytes -= from.bytes();
        let is_lost = !has_room && from.state != PendingState::Exported;
        let dropped = if is_lost { from.samples(SampleKind::OnCpu).len() as u64 } else { 0 };
        let (bytes, tables, most) = (&mut self.bytes, &mut self.tables, self.most_samples);
        let Some(around) = self.spans.get_mut(&around) else {
            from.release(tables);
            return dropped;
        };
        // Its samples have them.
        around.losses += Losses { folded: 0, ..from.losses };
        around.last_ns = around.last_ns.max(from.last_ns);
        for (kind, moved) in from.kinds {
            let count = moved.samples.len() as u64;
            around.losses.folded += if has_room { count } else { 0 };
            let of_kind = around.of_kind(kind, bytes);
            of_kind.downsampled += moved.downsampled;
            of_kind.lost += moved.lost;
            let skipped = moved.downsampling.skipped_weight;
            if !has_room {
                let weights = moved.samples.iter().map(|sample| sample.weight);
                of_kind.lose(kind, Lost { count, weight: skipped + weights.sum::<u64>() });
                moved.samples.iter().for_each(|sample| tables.remove(sample));
                continue;
            }
            let skipped_there = &mut of_kind.downsampling.skipped_weight;
            *skipped_there = skipped_there.saturating_add(skipped);
            for sample in moved.samples {
                let Ok(weight) = of_kind.admit(kind, sample.weight, most) else {
                    tables.remove(&sample);
                    continue;
                };
                let moved = StoredSample { weight, ..sample }.in_span_around();
                of_kind.push(moved, most, tables, bytes);
            }
        }
        dropped
    }

    pub(crate) fn remove_root(&mut self, root: SpanKey) {
        for span in self.roots.remove(&root).unwrap_or_default() {
            _ = self.remove_span(span);
        }
    }

    fn remove_span(&mut self, span: SpanKey) -> Option<SpanSamples> {
        let pending = self.spans.remove(&span)?;
        self.bytes -= pending.bytes();
        pending.release(&mut self.tables);
        Some(pending)
    }

    /// All registered spans, so that the caller can check whether they are still open.
    pub(crate) fn registered_spans(&self) -> Vec<(SpanKey, SpanInfo)> {
        let pending = self.spans.iter().map(|(span, pending)| (*span, pending.known));
        let refused = self.refused.iter().map(|(span, refused)| (*span, refused.known));
        pending.chain(refused).filter_map(|(span, known)| Some((span, known?))).collect()
    }

    /// Drops spans first seen before `round` that are not registered, nor in `entered`. Returns the number of their samples.
    pub(crate) fn remove_unregistered(&mut self, round: u64, entered: &HashSet<SpanKey>) -> u64 {
        self.refused.retain(|span, refused| {
            refused.known.is_some() || refused.round >= round || entered.contains(span)
        });
        let unknown = self.spans.iter().filter(|(span, pending)| {
            pending.known.is_none() && pending.first_round < round && !entered.contains(span)
        });
        let unknown: Vec<_> = unknown.map(|(span, _)| *span).collect();
        let removed = unknown.into_iter().filter_map(|span| self.remove_span(span));
        removed.map(|pending| pending.samples(SampleKind::OnCpu).len() as u64).sum()
    }
}

/// The entry of a span, which is created if the span is new in this `round`.
fn span_of<'a>(
    spans: &'a mut HashMap<SpanKey, SpanSamples>,
    bytes: &mut usize,
    span: SpanKey,
    round: u64,
) -> &'a mut SpanSamples {
    spans.entry(span).or_insert_with(|| {
        *bytes += BYTES_A_SPAN;
        SpanSamples::new(round)
    })
}

/// A span with fewer samples is not downsampled to make room for others.
const LEAST_TO_HALVE: usize = 200;
/// Memory is short if less than this is free.
const SOME_STACKS: usize = 16 * 1024;

#[cfg(test)]
mod tests {
    use super::super::stack::Stack;
    use super::*;
    use crate::profile::Downsampling;
    use crate::span::RegistryId;
    use crate::sys::OsThread;
    use crate::unwind::ModuleAddress;

    const SPAN: SpanKey = SpanKey::new(5).unwrap();
    const PLENTY: usize = 1 << 20;
    const SPANS: usize = 10_000;

    fn stack(address: u64) -> Stack {
        Stack { frames: vec![ModuleAddress::new(None, address)], ..Stack::new() }
    }

    fn ran(time_ns: u64, weight: u64, stack: &Stack) -> NewSample<'_> {
        let thread = Some(OsThread::new(1, b""));
        NewSample { kind: SampleKind::OnCpu, time_ns, weight, thread, stack }
    }

    fn samples(span: &SpanSamples) -> &[StoredSample] {
        span.samples(SampleKind::OnCpu)
    }

    fn weight(span: &SpanSamples) -> u64 {
        samples(span).iter().map(|sample| sample.weight).sum()
    }

    fn lost(span: &SpanSamples) -> Lost {
        span.lost(SampleKind::OnCpu)
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
        let mut pending = Store::new(64 * 1024, 1_000, SPANS);
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
                assert_eq!(pending.add(span, ran(number, 3, &stack), 1), Added::Kept);
                weight_ns += 3;
                pending.close(span);
            }
            assert_eq!(pending.evict_closed(|_| true).0, 0, "promised samples stay");
            given_up += pending.evict_closed(|_| false).0;
            assert!(pending.bytes <= pending.budget_bytes);
        }
        let spans = pending.of_root(root).to_vec();
        assert_eq!(spans.len(), pending.spans.len());
        let left: u64 = spans.iter().filter_map(|span| pending.get(*span)).map(weight).sum();
        let lost = lost(pending.get(root).unwrap());
        assert_eq!((lost.count, lost.weight + left), (given_up, weight_ns));
        let whole = |span: &SpanKey| pending.ancestors(*span).last() == spans.first().copied();
        assert!(spans.iter().skip(1).all(whole));
    }

    #[test]
    fn equal_stacks_are_held_once() {
        let mut pending = Store::new(PLENTY, 100, SPANS);
        for time in 0..10 {
            pending.add(SPAN, ran(time, 1, &stack(7)), 0);
        }
        pending.add(SPAN, ran(11, 1, &stack(8)), 0);
        let span = pending.get(SPAN).unwrap();
        assert_eq!(samples(span).len(), 11);
        assert_eq!(pending.bytes, span.bytes());
        assert_eq!(pending.tables.stacks.len(), 2);
    }

    #[test]
    fn too_many_samples_are_downsampled_and_keep_their_total_weight() {
        let mut pending = Store::new(PLENTY, 100, SPANS);
        let mut downsampled = 0;
        for time in 0..1_000 {
            if let Added::Downsampled(count) = pending.add(SPAN, ran(time, 3, &stack(7)), 0) {
                downsampled += count;
            }
        }
        let span = pending.get(SPAN).unwrap();
        let samples = samples(span);
        assert!(samples.len() <= 100 && samples.len() > 40);
        let Downsampling { every, skipped_weight, .. } =
            &span.kinds[&SampleKind::OnCpu].downsampling;
        assert_eq!(weight(span) + skipped_weight, 3_000);
        let uniform = 3 * *every as u64;
        assert!(samples.iter().all(|sample| sample.weight == uniform));
        assert_eq!(downsampled + samples.len() as u64, 1_000);
        // They are spread evenly.
        let half = samples.iter().filter(|s| s.time_ns < 500).count();
        assert!(half.abs_diff(samples.len() / 2) <= 2);
        assert_eq!(pending.bytes, span.bytes());
    }

    #[test]
    fn without_memory_the_cpu_time_is_kept() {
        let mut pending = Store::new(1_000, 100, SPANS);
        let mut add = |i: u64| pending.add(SPAN, ran(i, 3, &stack(i)), 0);
        let count = (0..100).filter(|i| add(*i) == Added::Lost).count() as u64;
        assert!(count > 50);
        let span = pending.get(SPAN).unwrap();
        assert_eq!(lost(span), Lost { count, weight: count * 3 });
        assert!(pending.bytes <= 1_000);
    }

    #[test]
    fn a_span_that_has_filled_the_memory_is_downsampled_and_has_all_of_its_time() {
        let mut pending = Store::new(256 * 1024, 100_000, SPANS);
        let (mut kept, mut downsampled, mut lost) = (0, 0, 0);
        let mut add = |pending: &mut Store, span, number: u64| {
            let deep = Stack {
                frames: (0..40)
                    .map(|frame| ModuleAddress::new(None, number * 100 + frame))
                    .collect(),
                ..Stack::new()
            };
            match pending.add(span, ran(number, 3, &deep), 0) {
                Added::Kept => kept += 1,
                Added::Downsampled(count) => downsampled += count,
                _ => lost += 1,
            }
        };
        (0..20_000).for_each(|number| add(&mut pending, SPAN, number));
        // What another span does in the meantime has room, too.
        (20_000..20_050).for_each(|number| add(&mut pending, key(6), number));
        assert_eq!((lost, pending.is_memory_short()), (0, false));
        assert!(pending.used_bytes() <= pending.budget_bytes);
        let (large, small) = (pending.get(SPAN).unwrap(), pending.get(key(6)).unwrap());
        let waiting =
            |span: &SpanSamples| span.kinds[&SampleKind::OnCpu].downsampling.skipped_weight;
        assert_eq!(weight(large) + waiting(large), 60_000);
        assert_eq!((samples(small).len(), weight(small)), (50, 150));
        assert!(samples(large).len() >= LEAST_TO_HALVE / 2, "{}", samples(large).len());
        let left = (samples(large).len() + samples(small).len()) as u64;
        assert!(kept >= left && downsampled + left >= 20_050, "{kept} {downsampled} {left}");
    }

    /// A connection that is idle again and again stays open.
    #[test]
    fn awaits_leave_half_of_the_memory_to_samples() {
        let mut pending = Store::new(64 * 1024, 1 << 20, SPANS);
        let span = SpanKey::new(1).unwrap();
        let stack = stack(7);
        let wait = |kind| NewSample { kind, time_ns: 0, weight: 1, thread: None, stack: &stack };
        let add = |pending: &mut Store, kind| pending.add(span, wait(kind), 1) == Added::Kept;
        let awaits = (0..10_000).take_while(|_| add(&mut pending, SampleKind::Await)).count();
        assert!(awaits > 100 && pending.bytes <= pending.budget_bytes / 2, "{awaits}");
        assert!(!add(&mut pending, SampleKind::Delay));
        assert!(add(&mut pending, SampleKind::OffCpu));
        assert_eq!(pending.add(span, ran(0, 3, &stack), 1), Added::Kept);
        let lost = pending.get(span).unwrap().lost(SampleKind::OffCpu);
        assert_eq!(lost, Lost::default(), "awaits are no waits");
    }

    #[test]
    fn a_span_beyond_the_limit_leaves_its_time_to_its_root() {
        let mut pending = Store::new(PLENTY, 100, 4);
        pending.register(key(1), known(1, None), 0);
        for span in 2..10 {
            // The sample may be drained before or after the span is registered.
            if span % 2 == 0 {
                pending.add(key(span), ran(0, 3, &stack(1)), 0);
            }
            pending.register(key(span), known(1, Some(1)), 0);
            pending.add(key(span), ran(0, 3, &stack(1)), 0);
        }
        assert_eq!(pending.spans.len(), 4);
        let left: u64 = pending.spans.values().map(weight).sum();
        assert_eq!(left + lost(pending.get(key(1)).unwrap()).weight, 12 * 3);
        // A span that is registered later keeps its earlier losses.
        pending.most_spans = 5;
        pending.add(key(30), ran(0, 3, &stack(1)), 0);
        pending.register(key(30), known(1, Some(1)), 0);
        assert_eq!(samples(pending.get(key(30)).unwrap()).len(), 1);
        assert_eq!(pending.add(key(31), ran(0, 3, &stack(1)), 0), Added::Refused);
        pending.most_spans = 6;
        pending.register(key(31), known(1, Some(1)), 0);
        assert_eq!(lost(pending.get(key(31)).unwrap()).weight, 3);
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
        let mut pending = Store::new(PLENTY, 100_000, 100);
        pending.register(key(1), known(1, None), 0);
        pending.register(key(2), known(1, Some(1)), 0);
        let (waiting, mut count) = (stack(8), 0);
        for round in 0..50 {
            let mut closed = Vec::new();
            // In each round ten times three spans inside each other, and more than there is room for in the last ones.
            for tree in 0..if round < 40 { 10 } else { 70 } {
                let first = 100 + round * 1_000 + tree * 3;
                for (span, parent) in [(first, 2), (first + 1, first), (first + 2, first + 1)] {
                    pending.register(key(span), known(1, Some(parent)), round);
                    let added = pending.add(key(span), ran(round, 3, &stack(span % 7)), round);
                    assert_eq!(added, Added::Kept, "{round} {tree}");
                    let kind = SampleKind::OffCpu;
                    let wait = NewSample { kind, ..ran(round, 5, &waiting) };
                    assert_eq!(pending.add(key(span), wait, round), Added::Kept);
                    count += 1;
                    closed.push(key(span));
                }
            }
            closed.into_iter().for_each(|span| pending.close(span));
            assert_eq!(pending.evict_closed(|_| false), (0, false));
        }
        let spans = || pending.spans.values();
        assert!(spans().count() <= 100);
        let taken: usize = spans().map(|span| samples(span).len()).sum();
        let waits: usize = spans().map(|span| span.samples(SampleKind::OffCpu).len()).sum();
        assert_eq!((taken, waits), (count, count));
        assert!(spans().all(|span| lost(span) == Lost::default()));
        let nearest = pending.get(key(2)).unwrap();
        assert!(samples(nearest).len() > 1_000, "the nearest one that is open");
        let of_nearest = samples(nearest).len() + nearest.samples(SampleKind::OffCpu).len();
        assert_eq!(nearest.losses.folded, of_nearest as u64, "none is its own");
        assert!(samples(nearest).iter().all(StoredSample::is_of_span_inside));
        assert_eq!(samples(pending.get(key(1)).unwrap()).len(), 0);
        let bytes: usize = spans().map(SpanSamples::bytes).sum();
        assert_eq!(pending.bytes, bytes);
    }

    #[test]
    fn a_root_is_forgotten_with_all_its_spans() {
        let mut pending = Store::new(PLENTY, 100, SPANS);
        for (span, parent) in [(1, None), (2, Some(1)), (3, Some(2))] {
            pending.register(key(span), known(1, parent), 0);
            pending.add(key(span), ran(0, 1, &stack(span)), 0);
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
    fn unregistered_spans_are_forgotten_in_the_next_round() {
        let mut pending = Store::new(PLENTY, 100, SPANS);
        pending.add(key(1), ran(0, 1, &stack(1)), 5);
        pending.add(key(2), ran(0, 1, &stack(1)), 5);
        let entered = HashSet::from([key(2)]);
        assert_eq!(pending.remove_unregistered(5, &entered), 0);
        assert_eq!(pending.remove_unregistered(6, &entered), 1);
        assert!(pending.get(key(1)).is_none());
        assert!(pending.get(key(2)).is_some());
    }

    /// In an outage a root such as `main` always has spans that are kept, so that it is always reserved.
    #[test]
    fn what_a_profile_has_makes_room_also_in_a_reserved_root() {
        let mut pending = Store::new(64 * 1024, 1_000, SPANS);
        pending.register(key(1), known(1, None), 1);
        for number in 2..5_000 {
            pending.register(key(number), known(1, Some(1)), 1);
            assert_eq!(pending.add(key(number), ran(number, 3, &stack(7)), 1), Added::Kept);
            pending.close(key(number));
            // It stays for the spans around it.
            pending.note_exported(key(number));
            assert_eq!(pending.evict_closed(|_| true).0, 0, "all are in a profile");
            assert_eq!(samples(pending.get(key(number)).unwrap()).len(), 1);
            // The rest is for what other spans await and allocate.
            assert!(pending.used_bytes() <= pending.budget_bytes / 2, "{number}");
        }
        let root = pending.get(key(1)).unwrap();
        assert!(lost(root).count > 0, "the profile of the root says what it lacks");
        pending.remove_root(key(1));
        assert_eq!(pending.used_bytes(), 0);
    }

    /// A request in `main` with a child that a profile has, beside a sample that none has and that is older.
    #[test]
    fn what_a_profile_has_goes_first_and_is_missing_in_the_span_around_it() {
        let mut pending = Store::new(64 * 1024, 10_000, SPANS);
        pending.register(key(1), known(1, None), 1);
        pending.register(key(2), known(1, Some(1)), 1);
        pending.register(key(3), known(1, Some(1)), 1);
        pending.register(key(4), known(1, Some(2)), 1);
        pending.add(key(3), ran(0, 3, &stack(7)), 1);
        pending.close(key(3));
        for time in 1..1_600 {
            assert_eq!(pending.add(key(4), ran(time, 3, &stack(7)), 1), Added::Kept);
        }
        pending.close(key(4));
        pending.note_exported(key(4));
        assert!(pending.used_bytes() > pending.budget_bytes / 2);
        assert_eq!(pending.evict_closed(|_| false), (0, false));
        assert_eq!(samples(pending.get(key(3)).unwrap()).len(), 1);
        assert!(pending.get(key(4)).is_none());
        let lost = |span| lost(pending.get(key(span)).unwrap()).weight;
        assert_eq!((lost(2), lost(1)), (1_599 * 3, 0), "the request says what it lacks");
    }
}
