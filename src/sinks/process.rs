//! The CPU time or the wall time of all threads of the process, while a profile of it is made.

use std::cmp::Reverse;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};

use super::aggregate::{Aggregate, Total};
use super::span_samples::NewSample;
use super::stack::StackEntry;
use super::stack_tree::{StackTree, StoredStack};
use super::store::Store;
use crate::span::{SpanInfo, SpanKey, TraceIds};
use crate::sys::OsThread;

/// Further threads have no name in the profile, and samples in further spans are in none.
const MOST_NAMES: usize = 4_096;
const MOST_SPANS: usize = 65_536;

#[derive(Default)]
pub(crate) struct ProcessSamples {
    totals: Aggregate<ProcessPlace>,
    /// By their names: the first one of each.
    threads: HashMap<String, OsThread>,
    /// The spans that samples fell in, and their local roots.
    spans: HashMap<SpanKey, ProcessSpan>,
    /// The spans of which more may become known.
    open: Vec<SpanKey>,
    pub(crate) weight_ns: u64,
    /// Samples from before are not part of it.
    began_ns: u64,
}

/// Where a thread was, beside its stack.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ProcessPlace {
    /// The first thread with its name; `None` if there are too many names.
    pub(crate) thread: Option<OsThread>,
    span: Option<SpanKey>,
    /// The thread did not run: known of wall time.
    pub(crate) is_blocked: bool,
}

/// What is known of a span that samples fell in, or of its local root.
#[derive(Clone, Debug, Default)]
pub(crate) struct ProcessSpan {
    pub(crate) known: Option<SpanInfo>,
    /// The ids under which it is exported; known once it has closed.
    pub(crate) ids: Option<TraceIds>,
    /// Of a local root: its shown fields, with their values.
    pub(crate) fields: Vec<(&'static str, String)>,
}

impl ProcessSamples {
    /// Of a profile that begins then: threads may be sampled already.
    pub(crate) fn new(began_ns: u64) -> Self {
        Self { began_ns, ..Self::default() }
    }

    /// Adds a sample of a thread that ran, in that span, if it was in one.
    pub(crate) fn add(&mut self, span: Option<SpanKey>, sample: NewSample<'_>) {
        let NewSample { weight, thread, stack, time_ns, .. } = sample;
        if time_ns < self.began_ns {
            return;
        }
        let place = self.place(thread, span, false);
        self.totals.add(stack.entries(), place, Total { weight, count: 1 });
        self.weight_ns = self.weight_ns.saturating_add(weight);
    }

    /// Stores where a thread is, to add to it while it stays there.
    pub(crate) fn store(
        &mut self,
        stack: impl DoubleEndedIterator<Item = StackEntry> + Clone,
        thread: OsThread,
        span: Option<SpanKey>,
        is_blocked: bool,
    ) -> (StoredStack, ProcessPlace) {
        let place = self.place(Some(thread), span, is_blocked);
        (self.totals.store(stack), place)
    }

    /// Adds the time of a thread that is there.
    pub(crate) fn add_stored(&mut self, (stack, place): (StoredStack, ProcessPlace), weight: u64) {
        self.totals.add_stored(stack, place, Total { weight, count: 1 });
        self.weight_ns = self.weight_ns.saturating_add(weight);
    }

    fn place(
        &mut self,
        thread: Option<OsThread>,
        span: Option<SpanKey>,
        is_blocked: bool,
    ) -> ProcessPlace {
        let is_full = self.totals.is_full();
        let span = span.filter(|span| !is_full && self.note_span(*span));
        let thread = thread.and_then(|thread| self.first_of_name(thread));
        ProcessPlace { thread, span, is_blocked }
    }

    /// Returns whether there is room for it.
    fn note_span(&mut self, span: SpanKey) -> bool {
        if !self.spans.contains_key(&span) && self.spans.len() < MOST_SPANS {
            self.spans.insert(span, ProcessSpan::default());
            self.open.push(span);
        }
        self.spans.contains_key(&span)
    }

    fn first_of_name(&mut self, thread: OsThread) -> Option<OsThread> {
        let has_room = self.threads.len() < MOST_NAMES;
        match self.threads.entry(thread.name()) {
            Entry::Occupied(first) => Some(*first.get()),
            Entry::Vacant(place) => has_room.then(|| *place.insert(thread)),
        }
    }

    /// Reads from the store what has become known of spans. In each round, before the store forgets those that have
    /// closed.
    pub(super) fn note_spans(&mut self, store: &Store) {
        let Self { spans, open, .. } = self;
        let mut roots = Vec::new();
        open.retain(|key| {
            let Some(span) = spans.get_mut(key) else { return false };
            // It may be registered by the next hook of its thread.
            let Some(pending) = store.get(*key) else { return span.known.is_none() };
            (span.known, span.ids) = (pending.known.or(span.known), pending.ids.or(span.ids));
            roots.extend(span.known.map(|known| known.root).filter(|root| root != key));
            pending.closed_ns.is_none()
        });
        roots.retain(|root| !self.spans.contains_key(root) && self.note_span(*root));
        if !roots.is_empty() {
            self.note_spans(store);
        }
    }

    pub(crate) fn set_fields(&mut self, root: SpanKey, fields: Vec<(&'static str, String)>) {
        if let Some(span) = self.spans.get_mut(&root) {
            span.fields = fields;
        }
    }

    /// Returns the spans of which nothing is known yet: their threads have met no hook since.
    pub(crate) fn unknown_spans(&self) -> impl Iterator<Item = SpanKey> {
        self.open
            .iter()
            .copied()
            .filter(|key| self.spans.get(key).is_some_and(|span| span.known.is_none()))
    }

    /// Adds what is known of such a span, or of one around it.
    pub(crate) fn set_known(&mut self, key: SpanKey, known: SpanInfo) {
        self.spans.entry(key).or_default().known.get_or_insert(known);
        if known.root == key && !self.open.contains(&key) {
            self.open.push(key);
        }
    }

    pub(crate) fn open_roots(&self) -> impl Iterator<Item = SpanInfo> {
        let known = self.open.iter().filter_map(|key| Some((*key, self.spans.get(key)?.known?)));
        known.filter(|(key, known)| known.root == *key).map(|(_, known)| known)
    }

    pub(crate) fn stacks(&self) -> &StackTree<StackEntry> {
        &self.totals.stacks
    }

    /// All samples by stack, place, and instead of the span there its label; the most weight first.
    pub(crate) fn totals_by<L: Copy + Ord>(
        &self,
        mut label: impl FnMut(SpanKey) -> Option<L>,
    ) -> Vec<(StoredStack, ProcessPlace, Option<L>, Total)> {
        let mut merged: BTreeMap<_, Total> = BTreeMap::new();
        for (stack, place, total) in self.totals.totals() {
            let label = place.span.and_then(&mut label);
            let place = ProcessPlace { span: None, ..place };
            merged.entry((stack, place, label)).or_default().add(total);
        }
        let merged = merged.into_iter();
        let merged = merged.map(|((stack, place, label), total)| (stack, place, label, total));
        let mut merged: Vec<_> = merged.collect();
        merged.sort_by_key(|(.., total)| Reverse(total.weight));
        merged
    }

    pub(crate) fn span(&self, key: SpanKey) -> Option<&ProcessSpan> {
        self.spans.get(&key)
    }
}

#[cfg(test)]
mod tests {
    use super::super::stack::Stack;
    use super::*;
    use crate::profile::SampleKind;
    use crate::span::RegistryId;

    fn key(number: u64) -> SpanKey {
        SpanKey::new(number).unwrap()
    }

    #[test]
    fn samples_add_up_by_thread_name_and_span_and_spans_are_known_after_they_have_closed() {
        let (mut store, mut process) = (Store::new(1 << 20, 100, 100), ProcessSamples::new(0));
        let stack = Stack::new();
        let mut add = |store: &mut Store, name: &[u8], tid, span: Option<SpanKey>| {
            let (kind, thread) = (SampleKind::OnCpu, Some(OsThread::new(tid, name)));
            let sample = NewSample { kind, time_ns: 1, weight: 10, thread, stack: &stack };
            _ = span.map(|span| store.add(span, sample, 1));
            process.add(span, sample);
        };
        add(&mut store, b"worker", 1, None);
        add(&mut store, b"worker", 2, None);
        add(&mut store, b"worker", 2, Some(key(6)));
        add(&mut store, b"other", 3, None);
        let totals: Vec<_> = process
            .totals_by(Some)
            .into_iter()
            .map(|(_, place, span, total)| {
                let name = place.thread.map(|thread| thread.name());
                (name.unwrap(), span, total.weight, total.count)
            })
            .collect();
        let [worker, other] = ["worker", "other"].map(str::to_owned);
        assert_eq!(
            totals,
            [(worker.clone(), None, 20, 2), (worker, Some(key(6)), 10, 1), (other, None, 10, 1)]
        );
        assert_eq!(process.weight_ns, 40);
        let id = RegistryId::MIN;
        let info = |root, parent| SpanInfo { parent, root: key(root), id, plan: 7, opened_ns: 0 };
        store.register(key(5), info(5, None), 1);
        store.register(key(6), info(5, Some(key(5))), 1);
        process.note_spans(&store);
        assert_eq!(process.open_roots().map(|known| known.root).collect::<Vec<_>>(), [key(5)]);
        store.note(key(6), |pending| pending.closed_ns = Some(9));
        process.note_spans(&store);
        store.remove_root(key(5));
        process.set_fields(key(5), vec![("http.route", "/cart".to_owned())]);
        process.note_spans(&store);
        assert_eq!(process.open_roots().count(), 0);
        let root = process.span(key(6)).and_then(|span| span.known).unwrap().root;
        assert_eq!(process.span(root).unwrap().fields.len(), 1);
    }
}
