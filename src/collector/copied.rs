//! Reads samples that the threads of the program take themselves: awaits and allocations, each with a copy of the stack.

use std::sync::Arc;

use super::budget::Share;
use super::heap::Heap;
use super::limits::Limits;
use super::pending::{Added, NewSample, Pending};
use super::stack::{Stack, Waited};
use crate::allocations::{AllocationSettings, LayerAllocations};
use crate::awaits::LayerAwaits;
use crate::inbox::{Amount, CopiedSample, CopiedStack, Inbox, InboxCounters, LeafStacks};
use crate::profile::SampleKind;
use crate::span::{InnermostSpan, SpanKey, Spans};
use crate::stats::Counters;
use crate::sys::{self, Clock, Striped, Waker};
use crate::unwind::{ModuleAddress, UnwindEnd, Unwinder};

/// Where the threads of the program leave these samples.
#[derive(Debug)]
pub(super) struct CopiedSamples {
    pub(super) awaits: Arc<Striped<LayerAwaits>>,
    pub(super) allocations: Arc<LayerAllocations>,
}

impl CopiedSamples {
    pub(super) fn new(
        spans: &Arc<Spans>,
        counters: &Arc<Counters>,
        waker: &Waker,
        limits: Limits,
    ) -> Self {
        let Limits { await_bytes, alloc_sample_interval, stack_bytes, tracks_heap, .. } = limits;
        let settings =
            AllocationSettings { sample_bytes: alloc_sample_interval, stack_bytes, tracks_heap };
        let shared = || (Arc::clone(spans), Arc::clone(counters), waker.clone());
        Self {
            awaits: LayerAwaits::new(shared(), await_bytes),
            allocations: LayerAllocations::new(shared(), settings),
        }
    }

    pub(super) fn set_active(&self, is_active: bool) {
        self.awaits.set_active(is_active);
        self.allocations.set_active(is_active);
    }
}

/// The CPU budget for unwinding the samples of an inbox: 50 ms at once, and 2 % of a core after that.
const UNWINDING: Share = Share::new(2, 50_000_000);
/// Where the budget for samples is unlimited.
const UNLIMITED: Share = Share::new(100, i64::MAX);
/// The assumed cost where CPU time cannot be read.
const A_STACK_NS: u64 = 20_000;

/// The collector's side of them.
#[derive(Debug)]
pub(super) struct CopiedReader {
    for_awaits: Share,
    for_allocations: Share,
    pub(super) heap: Heap,
    /// What futures await now, for snapshots of open spans.
    pub(super) present: Vec<(InnermostSpan, CopiedSample)>,
}

impl CopiedReader {
    /// With a budget of CPU time, or without.
    pub(super) fn new(is_limited: bool) -> Self {
        let for_allocations = if is_limited { UNWINDING } else { UNLIMITED };
        let (heap, present) = (Heap::default(), Vec::new());
        Self { for_awaits: UNWINDING, for_allocations, heap, present }
    }

    /// Reads all that have been sent.
    pub(super) fn read(&mut self, samples: &CopiedSamples, target: &mut ReadTarget<'_>) {
        let CopiedSamples { awaits, allocations } = samples;
        target.read(&awaits.inbox, &mut self.for_awaits, &mut self.heap);
        target.read(&allocations.inbox, &mut self.for_allocations, &mut self.heap);
        allocations.set_over_budget(!self.for_allocations.has_budget(target.now_ns));
    }

    /// The awaits in `present` with their spans, unwound.
    pub(super) fn unwind_present(
        &self,
        unwinder: &mut Unwinder,
        most_frames: usize,
    ) -> Vec<(SpanKey, Amount, Stack)> {
        let unwind = |(span, sample): &(InnermostSpan, CopiedSample)| {
            let (span, stack) = (span.key, unwound(sample, unwinder, most_frames));
            let parts = sample.parts().map(|part| {
                let waited = waited(part, sample).or(stack.waited);
                (span, part, Stack { waited, ..stack.clone() })
            });
            parts.collect::<Vec<_>>()
        };
        self.present.iter().flat_map(unwind).collect()
    }
}

/// Where they are read to.
pub(super) struct ReadTarget<'a> {
    pub(super) unwinder: &'a mut Unwinder,
    pub(super) pending: &'a mut Pending,
    pub(super) counters: &'a Counters,
    pub(super) clock: &'a Clock,
    pub(super) most_frames: usize,
    pub(super) round: u64,
    /// `CLOCK_MONOTONIC_RAW` in nanoseconds.
    pub(super) now_ns: u64,
}

impl ReadTarget<'_> {
    /// Reads the samples that are waiting; those that are sent from now on are read in the next round. `left` is the budget
    /// for their stacks.
    fn read(&mut self, inbox: &Inbox, left: &mut Share, heap: &mut Heap) {
        let waiting = inbox.waiting();
        if waiting == 0 {
            return;
        }
        self.unwinder.refresh();
        let mut start = sys::thread_cpu_ns();
        for sample in std::iter::from_fn(|| inbox.take()).take(waiting) {
            self.add(sample, left.has_budget(self.now_ns), inbox, heap);
            let now = sys::thread_cpu_ns();
            let took = now.zip(start).and_then(|(now, start)| now.checked_sub(start));
            left.spend(took.unwrap_or(A_STACK_NS));
            Counters::add(&self.counters.sampling.collector_cpu_ns, took.unwrap_or(0));
            start = now;
        }
    }

    fn add(&mut self, mut sample: CopiedSample, has_budget: bool, inbox: &Inbox, heap: &mut Heap) {
        let counters = inbox.counters();
        if !has_budget && sample.stacks.last.is_some() {
            Counters::add(counters.dropped_over_budget, 1);
            sample.stacks = LeafStacks::default();
        }
        let mut stack = unwound(&sample, self.unwinder, self.most_frames);
        heap.add(&sample, &stack, self.counters);
        for part in sample.parts() {
            stack.waited = waited(part, &sample).or(stack.waited);
            let Some(span) = sample.span else { continue };
            let new = new_sample(part, &stack, self.clock);
            let is_held = self.pending.add(span.key, new, self.round) == Added::Kept;
            // An allocation has two parts.
            if part.kind != SampleKind::Allocations {
                let InboxCounters { held, dropped_pending_full, .. } = counters;
                Counters::add(if is_held { held } else { dropped_pending_full }, 1);
            }
        }
    }
}

/// A part of a sample, with its stack.
pub(super) fn new_sample<'a>(part: Amount, stack: &'a Stack, clock: &Clock) -> NewSample<'a> {
    let Amount { kind, at, weight } = part;
    NewSample { kind, time_ns: clock.raw_ns(at), weight, thread: None, stack }
}

/// What a scheduling delay shows besides the stack of the await before it.
fn waited(part: Amount, sample: &CopiedSample) -> Option<Waited> {
    (part.kind == SampleKind::Delay).then_some(Waited::Scheduling(sample.behind))
}

/// Adds idle time of a future that is not observed. Returns false if there is no memory for it; it stays unexplained.
pub(super) fn add_idle(
    pending: &mut Pending,
    span: SpanKey,
    time_ns: u64,
    duration_ns: u64,
    round: u64,
) -> bool {
    let stack = Stack { waited: Some(Waited::NotObserved), ..Stack::new() };
    let (kind, weight) = (SampleKind::Await, duration_ns);
    let idle = NewSample { kind, time_ns, weight, thread: None, stack: &stack };
    pending.add(span, idle, round) == Added::Kept
}

/// The stack of an allocation, or that of a leaf future up to the poll of the wrapper, and of the leaf before, if there is
/// one.
pub(super) fn unwound(sample: &CopiedSample, unwinder: &mut Unwinder, most_frames: usize) -> Stack {
    let [Amount { kind, .. }, _] = sample.amounts;
    let mut unwind = |copy: &CopiedStack, frames: &mut Vec<ModuleAddress>| {
        let end = unwinder.unwind(copy.registers(), copy.words(), most_frames, frames);
        // A copy of all of it ends in the wrapper.
        let is_whole = kind == SampleKind::Await && !copy.is_part() && frames.len() < most_frames;
        // Without the function that copied it.
        if !frames.is_empty() {
            frames.remove(0);
        }
        if end == UnwindEnd::Cut && is_whole { UnwindEnd::Root } else { end }
    };
    let mut stack = Stack::new();
    match &sample.stacks.last {
        Some(last) => stack.end = unwind(last, &mut stack.frames),
        None if kind == SampleKind::Await => stack.waited = Some(Waited::NotCopied),
        None => stack.waited = Some(Waited::AllocationNotCopied),
    }
    if let (Some(before), true) = (&sample.stacks.before, sample.stacks.last.is_some()) {
        unwind(before, &mut stack.other);
    }
    stack
}
