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

use crate::span::SpanKey;

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

impl Sinks {
    pub(crate) fn new(store: Store, heap: Heap) -> Self {
        Self { store, heap, process: None, continuous: None, wall: None }
    }

    /// The samples of the profile of the process that was asked for.
    pub(crate) fn requested(&mut self) -> &mut Option<ProcessSamples> {
        if self.wall.is_some() { &mut self.wall } else { &mut self.process }
    }

    /// Notes what is known of the spans of profiles of the process, each round before the store forgets closed ones.
    pub(crate) fn note_spans(&mut self) {
        let all = self.process.iter_mut().chain(&mut self.continuous).chain(&mut self.wall);
        all.for_each(|process| process.note_spans(&self.store));
    }

    pub(crate) fn set_root_fields(&mut self, closed: Vec<(SpanKey, Vec<(&'static str, String)>)>) {
        for (root, fields) in closed {
            let all = self.process.iter_mut().chain(&mut self.continuous).chain(&mut self.wall);
            all.for_each(|process| process.set_fields(root, fields.clone()));
        }
    }

    /// Whether a sample of a thread that ran is wanted, in this span if it was in one. Others need not be unwound.
    pub(crate) fn wants(&self, span: Option<SpanKey>) -> bool {
        span.is_some() || self.process.is_some() || self.continuous.is_some()
    }

    /// Adds a sample of a thread that ran to those that want it. `continuous_ns` is what it represents in the
    /// continuous profile, if that is not its weight. Returns what the store made of it, if it is in a span.
    pub(crate) fn add_ran(
        &mut self,
        span: Option<SpanKey>,
        sample: NewSample<'_>,
        continuous_ns: Option<u64>,
        round: u64,
    ) -> Option<Added> {
        let weight = continuous_ns.unwrap_or(sample.weight);
        self.process.iter_mut().for_each(|process| process.add(span, sample));
        let in_continuous = NewSample { weight, ..sample };
        self.continuous.iter_mut().for_each(|process| process.add(span, in_continuous));
        span.map(|span| self.store.add(span, sample, round))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::SampleKind;

    const SPAN: SpanKey = SpanKey::new(5).unwrap();

    #[test]
    fn samples_outside_of_spans_are_wanted_while_a_profile_of_the_process_is_made() {
        let store = Store::new(1 << 20, 100, 100);
        let mut sinks = Sinks::new(store, Heap::default());
        assert!(!sinks.wants(None) && sinks.wants(Some(SPAN)));
        sinks.process = Some(ProcessSamples::new(5));
        sinks.continuous = Some(ProcessSamples::new(0));
        let stack = Stack::new();
        let kind = SampleKind::OnCpu;
        let sample = NewSample { kind, time_ns: 5, weight: 7, thread: None, stack: &stack };
        let mut add = |span| {
            assert!(sinks.wants(span));
            sinks.add_ran(span, sample, Some(3), 0)
        };
        assert_eq!((add(None), add(Some(SPAN))), (None, Some(Added::Kept)));
        // The rings may have some from before it began.
        sinks.add_ran(None, NewSample { time_ns: 4, ..sample }, None, 0);
        // What a thread allocates or waits for is not CPU time.
        sinks.store.add(SPAN, sample, 0);
        assert_eq!(sinks.process.map(|process| process.weight_ns), Some(14));
        assert_eq!(sinks.continuous.map(|process| process.weight_ns), Some(2 * 3 + 7));
    }
}
