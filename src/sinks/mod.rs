//! Who wants samples: the store, until the verdict on their spans, the table of the live heap, and profiles of the
//! process while they are made.

mod aggregate;
mod heap;
mod ledger;
mod losses;
mod process;
mod span_samples;
mod stack;
mod stack_tree;
mod store;

pub(crate) use aggregate::Total;
pub(crate) use heap::{Heap, HeapPart};
pub(crate) use ledger::{ChildTimes, ClosedChild};
pub(crate) use losses::Losses;
pub(crate) use process::{ProcessPlace, ProcessSamples};
pub(crate) use span_samples::{Added, Lost, NewSample, SHORTEST_WAIT, SpanSamples, StoredSample};
pub(crate) use stack::{Holder, Stack, StackEntry, StackLeaf};
pub(crate) use stack_tree::{StackTree, StoredStack};
pub(crate) use store::Store;

use crate::inbox::HeapUse;
use crate::span::SpanKey;
use crate::stats::Counters;

pub(crate) struct Sinks {
    /// The samples in spans, until the verdict on them.
    pub(crate) store: Store,
    pub(crate) heap: Heap,
    /// While a profile of the process is made.
    pub(crate) process: Option<ProcessSamples>,
    /// While the process is profiled continuously.
    pub(crate) continuous: Option<ProcessSamples>,
    /// While the wall time of all threads is observed.
    pub(crate) wall: Option<ProcessSamples>,
}

/// By whom a sample is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WantedBy {
    span: Option<SpanKey>,
    heap: HeapUse,
    process: bool,
    /// What a sample represents in the continuous profile, if that is not its weight.
    continuous_ns: Option<u64>,
}

impl WantedBy {
    /// The store wants all that is in a span.
    pub(crate) fn span(span: SpanKey) -> Self {
        Self { span: Some(span), heap: HeapUse::None, process: false, continuous_ns: None }
    }

    /// `None` if no one wants a sample in this span, if it is in one. It need not be unwound then.
    pub(crate) fn new(span: Option<SpanKey>, heap: HeapUse) -> Option<Self> {
        let is_any = span.is_some() || heap != HeapUse::None;
        is_any.then_some(Self { span, heap, process: false, continuous_ns: None })
    }
}

impl Sinks {
    pub(crate) fn new(store: Store, heap: Heap) -> Self {
        Self { store, heap, process: None, continuous: None, wall: None }
    }

    /// The samples of the profile of the process that was asked for.
    pub(crate) fn requested(&mut self) -> &mut Option<ProcessSamples> {
        if self.wall.is_some() { &mut self.wall } else { &mut self.process }
    }

    /// By whom a sample of a thread that ran in this span, if it was in one, is wanted. `continuous_ns` is what it represents
    /// in the continuous profile, if that is not its weight.
    pub(crate) fn wanted_of_cpu(
        &self,
        span: Option<SpanKey>,
        continuous_ns: Option<u64>,
    ) -> Option<WantedBy> {
        let process = self.process.is_some() || self.continuous.is_some();
        let wanted = WantedBy { span, heap: HeapUse::None, process, continuous_ns };
        (span.is_some() || process).then_some(wanted)
    }

    /// Notes what is known of the spans of profiles of the process, each round before the store forgets closed ones.
    pub(crate) fn note_spans(&mut self) {
        let all = self.process.iter_mut().chain(&mut self.continuous).chain(&mut self.wall);
        all.for_each(|process| process.note_spans(&self.store));
    }

    /// Sets the fields of local roots that have closed.
    pub(crate) fn set_root_fields(&mut self, closed: Vec<(SpanKey, Vec<(&'static str, String)>)>) {
        for (root, fields) in closed {
            let all = self.process.iter_mut().chain(&mut self.continuous).chain(&mut self.wall);
            all.for_each(|process| process.set_fields(root, fields.clone()));
        }
    }

    /// Adds a sample to those that want it. Returns what the store made of it, if it is one of them.
    pub(crate) fn add(
        &mut self,
        wanted: WantedBy,
        sample: NewSample<'_>,
        round: u64,
    ) -> Option<Added> {
        if wanted.process {
            let weight = wanted.continuous_ns.unwrap_or(sample.weight);
            let in_continuous = NewSample { weight, ..sample };
            self.process.iter_mut().for_each(|process| process.add(wanted.span, sample));
            self.continuous.iter_mut().for_each(|process| process.add(wanted.span, in_continuous));
        }
        wanted.span.map(|span| self.store.add(span, sample, round))
    }

    /// Adds to what the profile of the sample's span lacks.
    pub(crate) fn note(&mut self, wanted: WantedBy, note: impl FnOnce(&mut Losses)) {
        _ = wanted.span.map(|span| self.store.note(span, |pending| note(&mut pending.losses)));
    }

    /// Adds an allocation to the heap, if that wants it: once with all that it represents.
    pub(crate) fn add_allocated(
        &mut self,
        wanted: WantedBy,
        (stack, total): (&Stack, Total),
        counters: &Counters,
    ) {
        self.heap.add(wanted.heap, stack, total, counters);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::SampleKind;
    use crate::sys::TrackedBlock;

    const SPAN: SpanKey = SpanKey::new(5).unwrap();

    #[test]
    fn a_sample_goes_to_those_that_want_it() {
        let tracked = HeapUse::Tracked(TrackedBlock { place: 1, uses: 1 });
        let counters = Counters::default();
        let stack = Stack { waited: Some(StackLeaf::Unknown), ..Stack::new() };
        let added = |span, heap| {
            let store = Store::new(1 << 20, 100, 100);
            let mut sinks = Sinks::new(store, Heap::default());
            let wanted = WantedBy::new(span, heap)?;
            let kind = SampleKind::AllocatedBytes;
            let sample = NewSample { kind, time_ns: 1, weight: 7, thread: None, stack: &stack };
            let added = sinks.add(wanted, sample, 0);
            sinks.add_allocated(wanted, (&stack, Total { weight: 7, count: 1 }), &counters);
            let of_span = sinks.store.get(SPAN).map_or(0, |span| span.samples(kind).len());
            Some((added, of_span, sinks.heap.stacks().len()))
        };
        assert_eq!(added(Some(SPAN), HeapUse::None), Some((Some(Added::Kept), 1, 0)));
        assert_eq!(added(Some(SPAN), tracked), Some((Some(Added::Kept), 1, 1)));
        assert_eq!(added(None, tracked), Some((None, 0, 1)));
        assert_eq!(added(None, HeapUse::NotTracked), Some((None, 0, 1)));
        assert_eq!(added(None, HeapUse::None), None, "not wanted");
    }

    #[test]
    fn samples_outside_of_spans_are_wanted_while_a_profile_of_the_process_is_made() {
        let store = Store::new(1 << 20, 100, 100);
        let mut sinks = Sinks::new(store, Heap::default());
        assert_eq!(sinks.wanted_of_cpu(None, None), None);
        assert_eq!(sinks.wanted_of_cpu(Some(SPAN), None), Some(WantedBy::span(SPAN)));
        sinks.process = Some(ProcessSamples::since(5));
        let stack = Stack::new();
        let kind = SampleKind::OnCpu;
        let sample = NewSample { kind, time_ns: 5, weight: 7, thread: None, stack: &stack };
        let mut add = |span| {
            let wanted = sinks.wanted_of_cpu(span, None).unwrap();
            sinks.add(wanted, sample, 0)
        };
        assert_eq!((add(None), add(Some(SPAN))), (None, Some(Added::Kept)));
        // What a thread allocates or waits for is not CPU time.
        sinks.add(WantedBy::span(SPAN), sample, 0);
        // The rings may have some from before it began.
        let wanted = sinks.wanted_of_cpu(None, None).unwrap();
        sinks.add(wanted, NewSample { time_ns: 4, ..sample }, 0);
        assert_eq!(sinks.process.map(|process| process.weight_ns()), Some(14));
    }
}
