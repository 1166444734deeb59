//! Samples that wait for a verdict.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::stack::Stack;
use crate::span::{RegistryId, SpanKey, TraceIds};

/// One sample of a span that is open still, or whose root is: 24 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PendingSample {
    /// `CLOCK_MONOTONIC_RAW` in nanoseconds.
    pub(super) time_ns: u64,
    pub(super) stack: u32,
    /// CPU time that the sample stands for.
    pub(super) weight_ns: u64,
}

/// One wait of a thread in a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PendingWait {
    /// When it began: `CLOCK_MONOTONIC_RAW` in nanoseconds.
    pub(super) time_ns: u64,
    pub(super) duration_ns: u64,
    pub(super) stack: u32,
}

/// A stack with how it ends, each once.
#[derive(Debug, Default)]
struct Stacks {
    by_number: Vec<Arc<Stack>>,
    numbers: HashMap<Arc<Stack>, u32>,
}

/// What is known of a span in which samples fell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct KnownSpan {
    pub(super) parent: Option<SpanKey>,
    pub(super) root: SpanKey,
    pub(super) id: RegistryId,
    pub(super) plan: u64,
}

/// The samples of one span.
#[derive(Debug, Default)]
pub(super) struct PendingSpan {
    pub(super) known: Option<KnownSpan>,
    /// Under what it is exported; known when it has closed.
    pub(super) ids: Option<TraceIds>,
    pub(super) samples: Vec<PendingSample>,
    pub(super) waits: Vec<PendingWait>,
    /// The time of waits for which there was no memory.
    pub(super) lost_waits_ns: u64,
    stacks: Stacks,
    /// Every so many samples, one is taken.
    thinning: u32,
    /// Samples since the last one that was taken, and the CPU time that they stood for.
    skipped: u32,
    pub(super) skipped_ns: u64,
    /// Samples of which only this is left, and the CPU time that they stood for.
    pub(super) lost: u64,
    pub(super) lost_ns: u64,
    /// Samples for which others stand.
    pub(super) thinned: u64,
    /// Samples that were lost on its threads before one that fell in it: they may have fallen in
    /// it too, or in a span before.
    pub(super) ring_full: u64,
    /// Samples that were taken at a lower rate than usual.
    pub(super) lowered: u64,
    /// Those for which one came that was too late to stand for them.
    pub(super) late: u64,
    /// How many of its samples and waits the next profile takes, if not all.
    mark: Option<(usize, usize)>,
    /// When the last sample was taken.
    pub(super) last_ns: u64,
    /// The round in which its first sample came.
    first_round: u64,
    /// It closed, and is here only for the spans around it.
    is_closed: bool,
}

/// A local root and its spans.
#[derive(Debug, Default)]
struct PendingRoot {
    spans: Vec<SpanKey>,
}

/// All of them.
#[derive(Debug)]
pub(super) struct Pending {
    spans: HashMap<SpanKey, PendingSpan>,
    roots: HashMap<SpanKey, PendingRoot>,
    bytes: usize,
    budget_bytes: usize,
    most_samples: usize,
    most_spans: usize,
    refused: HashMap<SpanKey, Refused>,
    /// A sample was lost, and there has been no room since.
    has_lost: bool,
}

/// What became of a sample that was added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Added {
    Kept,
    /// It stands for others, or others for it.
    Thinned(u64),
    /// No memory: only its CPU time is kept.
    Lost,
    /// Too many spans: its CPU time goes to the root of its span.
    Refused,
}

/// A span for which there was no place.
#[derive(Debug, Default)]
struct Refused {
    known: Option<KnownSpan>,
    /// The round in which that began.
    round: u64,
    lost: u64,
    lost_ns: u64,
}

/// For so many times as many spans as may be pending it is known what they lost.
const REFUSED_TIMES: usize = 4;

impl Pending {
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
        }
    }

    /// Adds a sample to a span. `round` is the present one.
    pub(super) fn add(
        &mut self,
        span: SpanKey,
        time_ns: u64,
        weight_ns: u64,
        stack: &Stack,
        round: u64,
    ) -> Added {
        if !self.has_place(span) {
            if let Some(refused) = self.refuse(span, round) {
                refused.lost += 1;
                refused.lost_ns += weight_ns;
            }
            return Added::Refused;
        }
        let pending = span_of(&mut self.spans, &mut self.bytes, span, round);
        pending.last_ns = time_ns;
        pending.skipped += 1;
        pending.skipped_ns = pending.skipped_ns.saturating_add(weight_ns);
        if pending.skipped < pending.thinning {
            pending.thinned += 1;
            return Added::Thinned(1);
        }
        pending.skipped = 0;
        let weight_ns = std::mem::take(&mut pending.skipped_ns);
        let needed = size_of::<PendingSample>() + pending.stacks.cost(stack);
        if self.bytes + needed > self.budget_bytes {
            // Those that it stands for are thinned out already.
            pending.lost += 1;
            self.has_lost = true;
            pending.lost_ns += weight_ns;
            return Added::Lost;
        }
        self.bytes += needed;
        let stack = pending.stacks.add(stack);
        pending.samples.push(PendingSample { time_ns, stack, weight_ns });
        if pending.samples.len() <= self.most_samples {
            return Added::Kept;
        }
        let before = pending.samples.len();
        pending.thin();
        let thinned = before - pending.samples.len();
        pending.thinned += thinned as u64;
        self.bytes -= thinned * size_of::<PendingSample>();
        Added::Thinned(thinned as u64)
    }

    /// Adds a wait to a span, `round` being the present one. Returns false if there is no memory for
    /// it: then only its time is kept.
    pub(super) fn add_wait(
        &mut self,
        span: SpanKey,
        wait: PendingWait,
        stack: &Stack,
        round: u64,
    ) -> bool {
        if !self.has_place(span) {
            return false;
        }
        let pending = span_of(&mut self.spans, &mut self.bytes, span, round);
        pending.last_ns = pending.last_ns.max(wait.time_ns);
        let needed = size_of::<PendingWait>() + pending.stacks.cost(stack);
        if self.bytes + needed > self.budget_bytes || pending.waits.len() >= self.most_samples {
            pending.lost_waits_ns += wait.duration_ns;
            return false;
        }
        self.bytes += needed;
        let stack = pending.stacks.add(stack);
        pending.waits.push(PendingWait { stack, ..wait });
        true
    }

    fn has_place(&self, span: SpanKey) -> bool {
        self.spans.len() < self.most_spans || self.spans.contains_key(&span)
    }

    fn refuse(&mut self, span: SpanKey, round: u64) -> Option<&mut Refused> {
        self.has_lost = true;
        let has_room = self.refused.len() < self.most_spans.saturating_mul(REFUSED_TIMES);
        if !has_room && !self.refused.contains_key(&span) {
            return None;
        }
        Some(self.refused.entry(span).or_insert_with(|| Refused { round, ..Refused::default() }))
    }

    /// Gives the roots of spans for which there was no place what those have lost.
    pub(super) fn charge_refused(&mut self) {
        for refused in self.refused.values_mut() {
            let root = refused.known.and_then(|known| self.spans.get_mut(&known.root));
            if let Some(root) = root {
                root.lost += std::mem::take(&mut refused.lost);
                root.lost_ns += std::mem::take(&mut refused.lost_ns);
            }
        }
    }

    /// Something more is known of that span, if there is a place for it.
    pub(super) fn note(&mut self, span: SpanKey, note: impl FnOnce(&mut PendingSpan)) {
        _ = self.spans.get_mut(&span).map(note);
    }

    /// What the hooks say of a span; more than once if threads said it at the same time.
    pub(super) fn know(&mut self, span: SpanKey, known: KnownSpan, round: u64) {
        // The root itself has always a place: what those inside it lose is said there.
        if !self.has_place(span) && span != known.root {
            if let Some(refused) = self.refuse(span, round) {
                refused.known = Some(known);
            }
            return;
        }
        let refused = self.refused.remove(&span).unwrap_or_default();
        let pending = span_of(&mut self.spans, &mut self.bytes, span, round);
        // There is a place for it now.
        pending.lost += refused.lost;
        pending.lost_ns += refused.lost_ns;
        if pending.known.replace(known).is_none() {
            self.roots.entry(known.root).or_default().spans.push(span);
        }
    }

    /// Whether a sample was lost, and since then there was no room.
    pub(super) fn is_short(&mut self) -> bool {
        let has_room = self.bytes + SOME_STACKS <= self.budget_bytes;
        self.has_lost &= !has_room || self.spans.len() >= self.most_spans;
        self.has_lost
    }

    pub(super) fn get(&self, span: SpanKey) -> Option<&PendingSpan> {
        self.spans.get(&span)
    }

    /// The spans of a root, itself among them.
    pub(super) fn of_root(&self, root: SpanKey) -> &[SpanKey] {
        self.roots.get(&root).map_or(&[], |root| &root.spans)
    }

    /// A span's ancestors from the inside out.
    pub(super) fn ancestors(&self, span: SpanKey) -> impl Iterator<Item = SpanKey> {
        let parent = |span: &SpanKey| self.spans.get(span)?.known?.parent;
        std::iter::successors(parent(&span), move |span| parent(span))
    }

    /// The spans among `kept` that are inside no other of them.
    pub(super) fn topmost(&self, kept: &HashSet<SpanKey>) -> Vec<SpanKey> {
        let inside = |span: &&SpanKey| self.ancestors(**span).any(|above| kept.contains(&above));
        kept.iter().filter(|span| !inside(span)).copied().collect()
    }

    /// The spans around those that are `kept` with so many samples, and how many samples of each
    /// are so in a kept one. Looks at each span once, however deep the tree is.
    pub(super) fn enclosing(&self, kept: &HashMap<SpanKey, u64>) -> HashMap<SpanKey, u64> {
        // Paths, each from the inside out and up to a span of an earlier one: so from the last to
        // the first, children come before their parents.
        let mut seen = HashSet::new();
        let paths: Vec<Vec<SpanKey>> = kept
            .keys()
            .map(|span| {
                let up = std::iter::once(*span).chain(self.ancestors(*span));
                up.take_while(|span| seen.insert(*span)).collect()
            })
            .collect();
        let mut enclosing: HashMap<SpanKey, u64> = HashMap::new();
        for span in paths.iter().rev().flatten() {
            let inside = enclosing.get(span).copied().unwrap_or(0);
            // What is inside a kept span is among its own.
            let samples = kept.get(span).copied().unwrap_or(inside);
            if let Some(parent) = self.ancestors(*span).next() {
                *enclosing.entry(parent).or_default() += samples;
            }
        }
        enclosing.retain(|span, _| !kept.contains_key(span));
        enclosing
    }

    /// Forgets the samples of a span, which are exported; the span stays.
    pub(super) fn clear(&mut self, span: SpanKey) {
        if let Some(pending) = self.spans.get_mut(&span) {
            self.bytes -= pending.bytes();
            let (samples, waits) = pending.exported();
            let (samples, waits) = (samples.len(), waits.len());
            pending.mark = None;
            pending.samples.drain(..samples);
            pending.waits.drain(..waits);
            pending.lost_waits_ns = 0;
            if pending.samples.is_empty() && pending.waits.is_empty() {
                pending.samples = Vec::new();
                pending.waits = Vec::new();
                pending.stacks = Stacks::default();
                pending.thinning = 1;
            }
            pending.skipped = 0;
            pending.skipped_ns = 0;
            pending.lost = 0;
            pending.lost_ns = 0;
            pending.thinned = 0;
            pending.ring_full = 0;
            pending.lowered = 0;
            pending.late = 0;
            self.bytes += pending.bytes();
        }
    }

    /// The next profile takes of that span what is here now, and not what comes until it is made.
    pub(super) fn mark(&mut self, span: SpanKey) {
        if let Some(pending) = self.spans.get_mut(&span) {
            pending.mark = Some((pending.samples.len(), pending.waits.len()));
        }
    }

    /// The span is exported under these ids.
    pub(super) fn name(&mut self, span: SpanKey, ids: Option<TraceIds>) {
        if let Some(pending) = self.spans.get_mut(&span) {
            pending.ids = ids;
        }
    }

    /// The span has closed.
    pub(super) fn close(&mut self, span: SpanKey) {
        self.refused.remove(&span);
        if let Some(pending) = self.spans.get_mut(&span) {
            pending.is_closed = true;
        }
    }

    /// If memory or places run short, gives up closed spans of roots that live on (a connection, `main`),
    /// those first that were sampled longest ago, until half of them are free. Their CPU time
    /// goes to the root, as lost. Spares the roots that `is_promised` a profile. Returns how many
    /// samples were given up, and whether it was for want of memory.
    pub(super) fn give_up_closed(&mut self, is_promised: impl Fn(SpanKey) -> bool) -> (u64, bool) {
        let is_short = self.bytes > self.budget_bytes / 4 * 3;
        if !self.is_over(3) {
            return (0, is_short);
        }
        let mut samples = 0;
        loop {
            // From the leaves up, so that nobody's parent goes missing.
            let parents: HashSet<_> =
                self.spans.values().filter_map(|pending| pending.known?.parent).collect();
            let mut closed: Vec<_> = self
                .spans
                .iter()
                .filter_map(|(span, pending)| {
                    let root = pending.known?.root;
                    let may_go = pending.is_closed
                        && root != *span
                        && !parents.contains(span)
                        && !is_promised(root);
                    may_go.then_some((pending.last_ns, *span, root))
                })
                .collect();
            closed.sort_unstable();
            let before = self.spans.len();
            for (_, span, root) in closed {
                if !self.is_over(2) {
                    break;
                }
                samples += self.give_up(span, root);
            }
            let left: HashSet<_> = self.spans.keys().copied().collect();
            self.roots.values_mut().for_each(|root| root.spans.retain(|span| left.contains(span)));
            if !self.is_over(2) || self.spans.len() == before {
                return (samples, is_short);
            }
        }
    }

    /// Whether more than so many quarters of the memory or of the places for spans are taken.
    fn is_over(&self, quarters: usize) -> bool {
        self.bytes > self.budget_bytes / 4 * quarters
            || self.spans.len() > self.most_spans / 4 * quarters
    }

    fn give_up(&mut self, span: SpanKey, root: SpanKey) -> u64 {
        let Some(pending) = self.spans.remove(&span) else { return 0 };
        self.bytes -= pending.bytes();
        let weights = pending.samples.iter().map(|sample| sample.weight_ns);
        let lost_ns = pending.lost_ns + pending.skipped_ns + weights.sum::<u64>();
        let samples = pending.samples.len() as u64;
        let waits = pending.waits.iter().map(|wait| wait.duration_ns);
        let lost_waits_ns = pending.lost_waits_ns + waits.sum::<u64>();
        if let Some(root) = self.spans.get_mut(&root) {
            root.lost += pending.lost + samples;
            root.lost_ns += lost_ns;
            root.lost_waits_ns += lost_waits_ns;
            root.last_ns = root.last_ns.max(pending.last_ns);
            root.thinned += pending.thinned;
            root.ring_full += pending.ring_full;
            root.lowered += pending.lowered;
            root.late += pending.late;
        }
        samples
    }

    /// Forgets a root and all its spans.
    pub(super) fn remove_root(&mut self, root: SpanKey) {
        for span in self.roots.remove(&root).unwrap_or_default().spans {
            self.remove_span(span);
        }
    }

    fn remove_span(&mut self, span: SpanKey) {
        if let Some(pending) = self.spans.remove(&span) {
            self.bytes -= pending.bytes();
        }
    }

    /// The spans of which somebody should ask whether they are open still.
    pub(super) fn known_spans(&self) -> Vec<(SpanKey, KnownSpan)> {
        let pending = self.spans.iter().map(|(span, pending)| (*span, pending.known));
        let refused = self.refused.iter().map(|(span, refused)| (*span, refused.known));
        pending.chain(refused).filter_map(|(span, known)| Some((span, known?))).collect()
    }

    /// Forgets spans that nobody has made known since before `round`, but for those that are
    /// `entered`. Returns the number of their samples.
    pub(super) fn remove_unknown(&mut self, round: u64, entered: &HashSet<SpanKey>) -> u64 {
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

/// What is known of a span, `round` being the one in which it is first heard of.
fn span_of<'a>(
    spans: &'a mut HashMap<SpanKey, PendingSpan>,
    bytes: &mut usize,
    span: SpanKey,
    round: u64,
) -> &'a mut PendingSpan {
    spans.entry(span).or_insert_with(|| {
        *bytes += BYTES_A_SPAN;
        PendingSpan { thinning: 1, first_round: round, ..PendingSpan::default() }
    })
}

/// Room without which memory is short.
const SOME_STACKS: usize = 16 * 1024;

/// What a span takes beside its samples and stacks, roughly.
const BYTES_A_SPAN: usize = size_of::<PendingSpan>() + 64;

impl PendingSpan {
    pub(super) fn stack(&self, number: u32) -> Option<&Stack> {
        self.stacks.by_number.get(number as usize).map(AsRef::as_ref)
    }

    /// What a profile takes.
    pub(super) fn exported(&self) -> (&[PendingSample], &[PendingWait]) {
        let (samples, waits) = self.mark.unwrap_or((usize::MAX, usize::MAX));
        let samples = self.samples.get(..samples).unwrap_or(&self.samples);
        (samples, self.waits.get(..waits).unwrap_or(&self.waits))
    }

    /// Whether nothing fell in the span that a profile would show.
    pub(super) fn is_empty(&self) -> bool {
        let has_waits = !self.waits.is_empty() || self.lost_waits_ns > 0;
        self.samples.is_empty() && self.lost == 0 && self.ring_full == 0 && !has_waits
    }

    /// Leaves out every other sample, and lets those that are left stand for two.
    fn thin(&mut self) {
        self.mark = self.mark.map(|(samples, waits)| (samples / 2, waits));
        let mut left_out = None;
        self.samples.retain_mut(|sample| match left_out.take() {
            Some(weight_ns) => {
                sample.weight_ns = sample.weight_ns.saturating_add(weight_ns);
                true
            }
            None => {
                left_out = Some(sample.weight_ns);
                false
            }
        });
        if let Some(weight_ns) = left_out {
            // The last one waits for its pair.
            self.skipped += self.thinning;
            self.skipped_ns += weight_ns;
        }
        self.thinning = self.thinning.saturating_mul(2);
    }

    fn bytes(&self) -> usize {
        let stacks = self.stacks.by_number.iter().map(|stack| stack.bytes()).sum::<usize>();
        let samples = self.samples.len() * size_of::<PendingSample>();
        BYTES_A_SPAN + samples + self.waits.len() * size_of::<PendingWait>() + stacks
    }
}

impl Stacks {
    fn cost(&self, stack: &Stack) -> usize {
        if self.numbers.contains_key(stack) { 0 } else { stack.bytes() }
    }

    fn add(&mut self, stack: &Stack) -> u32 {
        if let Some(number) = self.numbers.get(stack) {
            return *number;
        }
        let number = self.by_number.len() as u32;
        let stack = Arc::new(stack.clone());
        self.by_number.push(Arc::clone(&stack));
        self.numbers.insert(stack, number);
        number
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unwind::ModuleAddress;

    const SPAN: SpanKey = SpanKey::new(5).unwrap();
    const PLENTY: usize = 1 << 20;
    const SPANS: usize = 10_000;

    fn stack(address: u64) -> Stack {
        Stack { frames: vec![ModuleAddress::new(None, address)], ..Stack::new() }
    }

    fn key(number: u64) -> SpanKey {
        SpanKey::new(number).unwrap()
    }

    fn known(root: u64, parent: Option<u64>) -> KnownSpan {
        let id = RegistryId::MIN;
        KnownSpan { parent: parent.map(key), root: key(root), id, plan: 0 }
    }

    #[test]
    fn a_root_that_lives_on_does_not_fill_the_memory() {
        let mut pending = Pending::new(64 * 1024, 1_000, SPANS);
        let root = SpanKey::new(1).unwrap();
        let known = |parent| {
            let id = RegistryId::new(1).unwrap();
            KnownSpan { parent, root, id, plan: 0 }
        };
        pending.know(root, known(None), 1);
        let stack = Stack { frames: vec![ModuleAddress::new(None, 7)], ..Stack::new() };
        let (mut weight_ns, mut given_up) = (0, 0);
        for number in 2..5_000 {
            let child = SpanKey::new(number).unwrap();
            let grandchild = SpanKey::new(number + 10_000).unwrap();
            pending.know(child, known(Some(root)), 1);
            pending.know(grandchild, known(Some(child)), 1);
            for span in [child, grandchild] {
                assert_eq!(pending.add(span, number, 3, &stack, 1), Added::Kept);
                weight_ns += 3;
                pending.close(span);
            }
            assert_eq!(pending.give_up_closed(|_| true).0, 0, "what was promised stays");
            given_up += pending.give_up_closed(|_| false).0;
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
        assert_eq!(root.lost, given_up);
        assert_eq!(root.lost_ns + left, weight_ns);
        let whole = |span: &SpanKey| pending.ancestors(*span).last() == spans.first().copied();
        assert!(spans.iter().skip(1).all(whole));
    }

    #[test]
    fn equal_stacks_are_held_once() {
        let mut pending = Pending::new(PLENTY, 100, SPANS);
        for time in 0..10 {
            pending.add(SPAN, time, 1, &stack(7), 0);
        }
        pending.add(SPAN, 11, 1, &stack(8), 0);
        let span = pending.get(SPAN).unwrap();
        assert_eq!(span.samples.len(), 11);
        assert_eq!(span.stacks.by_number.len(), 2);
        assert_eq!(pending.bytes, span.bytes());
    }

    #[test]
    fn more_than_the_most_are_thinned_and_stand_for_the_rest() {
        let mut pending = Pending::new(PLENTY, 100, SPANS);
        let mut thinned = 0;
        for time in 0..1_000 {
            if let Added::Thinned(count) = pending.add(SPAN, time, 3, &stack(7), 0) {
                thinned += count;
            }
        }
        let span = pending.get(SPAN).unwrap();
        assert!(span.samples.len() <= 100 && span.samples.len() > 40);
        let weight: u64 = span.samples.iter().map(|s| s.weight_ns).sum();
        assert_eq!(weight + span.skipped_ns, 3_000);
        let uniform = 3 * u64::from(span.thinning);
        assert!(span.samples.iter().all(|sample| sample.weight_ns == uniform));
        assert_eq!(thinned + span.samples.len() as u64, 1_000);
        // Evenly over the whole time.
        let half = span.samples.iter().filter(|s| s.time_ns < 500).count();
        assert!(half.abs_diff(span.samples.len() / 2) <= 2);
        assert_eq!(pending.bytes, span.bytes());
    }

    #[test]
    fn without_memory_the_cpu_time_is_kept() {
        let mut pending = Pending::new(1_000, 100, SPANS);
        let lost = (0..100).filter(|i| pending.add(SPAN, *i, 3, &stack(*i), 0) == Added::Lost);
        let lost = lost.count() as u64;
        assert!(lost > 50);
        let span = pending.get(SPAN).unwrap();
        assert_eq!((span.lost, span.lost_ns), (lost, lost * 3));
        assert!(pending.bytes <= 1_000);
    }

    #[test]
    fn a_span_without_a_place_leaves_its_time_to_its_root() {
        let mut pending = Pending::new(PLENTY, 100, 4);
        pending.know(key(1), known(1, None), 0);
        for span in 2..10 {
            // The sample may be read before or after the span is made known.
            if span % 2 == 0 {
                pending.add(key(span), 0, 3, &stack(1), 0);
            }
            pending.know(key(span), known(1, Some(1)), 0);
            pending.add(key(span), 0, 3, &stack(1), 0);
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
        // One that gets a place keeps what it had lost before.
        pending.most_spans = 5;
        pending.add(key(30), 0, 3, &stack(1), 0);
        pending.know(key(30), known(1, Some(1)), 0);
        assert_eq!(pending.get(key(30)).unwrap().samples.len(), 1);
        assert_eq!(pending.add(key(31), 0, 3, &stack(1), 0), Added::Refused);
        pending.most_spans = 6;
        pending.know(key(31), known(1, Some(1)), 0);
        assert_eq!(pending.get(key(31)).unwrap().lost_ns, 3);
        for span in 2..10 {
            pending.close(key(span));
        }
        assert!(pending.refused.is_empty());
        // Another root has its place all the same.
        pending.know(key(20), known(20, None), 0);
        assert!(pending.get(key(20)).is_some());
    }

    #[test]
    fn a_root_is_forgotten_with_all_its_spans() {
        let mut pending = Pending::new(PLENTY, 100, SPANS);
        for (span, parent) in [(1, None), (2, Some(1)), (3, Some(2))] {
            pending.know(key(span), known(1, parent), 0);
            pending.add(key(span), 0, 1, &stack(span), 0);
        }
        pending.know(key(9), known(9, None), 0);
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
            pending.know(key(span), known(1, parent), 0);
        }
        let mut topmost = pending.topmost(&HashSet::from([key(2), key(3), key(4)]));
        topmost.sort();
        assert_eq!(topmost, [key(2), key(4)]);
    }

    #[test]
    fn samples_of_kept_spans_are_charged_to_all_around_them_once() {
        let mut pending = Pending::new(PLENTY, 100, SPANS);
        // 1 { 2 { 3, 4 { 5 } }, 6 }
        for (span, parent) in
            [(1, None), (2, Some(1)), (3, Some(2)), (4, Some(2)), (5, Some(4)), (6, Some(1))]
        {
            pending.know(key(span), known(1, parent), 0);
        }
        let kept = [(3, 10), (5, 7), (4, 9), (6, 1)].map(|(span, samples)| (key(span), samples));
        let mut enclosing: Vec<_> = pending.enclosing(&HashMap::from(kept)).into_iter().collect();
        enclosing.sort();
        assert_eq!(enclosing, [(key(1), 20), (key(2), 19)]);
    }

    #[test]
    fn what_nobody_made_known_is_forgotten_after_a_while() {
        let mut pending = Pending::new(PLENTY, 100, SPANS);
        pending.add(key(1), 0, 1, &stack(1), 5);
        pending.add(key(2), 0, 1, &stack(1), 5);
        let entered = HashSet::from([key(2)]);
        assert_eq!(pending.remove_unknown(5, &entered), 0);
        assert_eq!(pending.remove_unknown(6, &entered), 1);
        assert!(pending.get(key(1)).is_none());
        assert!(pending.get(key(2)).is_some());
    }

    #[test]
    fn what_comes_after_the_mark_is_for_the_next_profile() {
        let mut pending = Pending::new(PLENTY, 100, SPANS);
        pending.know(SPAN, known(5, None), 0);
        pending.add(SPAN, 0, 1, &stack(1), 0);
        pending.mark(SPAN);
        pending.add(SPAN, 1, 1, &stack(2), 0);
        let times = |pending: &Pending| {
            let (samples, _) = pending.get(SPAN).unwrap().exported();
            samples.iter().map(|sample| sample.time_ns).collect::<Vec<_>>()
        };
        assert_eq!(times(&pending), [0]);
        pending.clear(SPAN);
        assert_eq!(times(&pending), [1]);
        assert_eq!(pending.bytes, pending.get(SPAN).unwrap().bytes());
        pending.clear(SPAN);
        assert_eq!((times(&pending).len(), pending.bytes), (0, BYTES_A_SPAN));
    }

    #[test]
    fn exported_samples_are_cleared_and_the_span_stays() {
        let mut pending = Pending::new(PLENTY, 100, SPANS);
        pending.know(SPAN, known(5, None), 0);
        pending.add(SPAN, 0, 1, &stack(1), 0);
        pending.clear(SPAN);
        assert!(pending.get(SPAN).unwrap().samples.is_empty());
        assert_eq!(pending.bytes, BYTES_A_SPAN);
        pending.remove_root(SPAN);
        assert_eq!(pending.bytes, 0);
    }
}
