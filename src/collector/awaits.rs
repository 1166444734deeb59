//! Reads what futures have awaited.

use super::budget::Share;
use super::copied::{ReadTarget, UNWINDING, unwind_copy};
use super::pending::{Pending, PendingWait};
use super::stack::{Stack, Waited};
use crate::awaits::{AwaitSample, LayerAwaits, LeafStacks};
use crate::profile::SampleKind;
use crate::span::SpanKey;
use crate::stacks::CopiedStack;
use crate::stats::Counters;
use crate::unwind::{ModuleAddress, UnwindEnd, Unwinder};

/// Unwinds the stacks of awaits.
#[derive(Debug)]
pub(super) struct AwaitReader {
    left: Share,
    /// What futures await now, for snapshots of open spans.
    pub(super) present: Vec<AwaitSample>,
}

impl AwaitReader {
    pub(super) fn new() -> Self {
        Self { left: UNWINDING, present: Vec::new() }
    }

    /// Reads all that have been sent.
    pub(super) fn read(&mut self, awaits: &LayerAwaits, target: &mut ReadTarget<'_>) {
        target.read_all(awaits.waiting(), || awaits.take(), &mut self.left, Self::add);
    }

    fn add(sample: &AwaitSample, has_budget: bool, target: &mut ReadTarget<'_>) {
        let has_budget = has_budget || sample.stacks.last.is_none();
        if !has_budget {
            Counters::add(&target.counters.awaits.dropped_over_budget, 1);
        }
        let none = LeafStacks::default();
        let stacks = if has_budget { &sample.stacks } else { &none };
        let mut stack = unwound(stacks, target.unwinder, target.most_frames);
        for (kind, time_ns, weight) in sample.parts() {
            if kind == SampleKind::Delay {
                stack.waited = Some(Waited::Scheduling(sample.behind));
            }
            let wait = PendingWait { kind, time_ns, weight, stack: 0, thread: u32::MAX };
            let pending = &mut target.pending;
            let is_kept = pending.add_wait(sample.span.key, wait, None, &stack, target.round);
            let counter = match is_kept {
                true => &target.counters.awaits.captured,
                false => &target.counters.awaits.dropped_pending_full,
            };
            Counters::add(counter, 1);
        }
    }

    /// The awaits in `present`, unwound.
    pub(super) fn unwind_present(
        &self,
        unwinder: &mut Unwinder,
        most_frames: usize,
    ) -> Vec<PresentAwait> {
        let mut unwound_awaits = Vec::new();
        for sample in &self.present {
            let mut stack = unwound(&sample.stacks, unwinder, most_frames);
            for (kind, since_ns, duration_ns) in sample.parts() {
                if kind == SampleKind::Delay {
                    stack.waited = Some(Waited::Scheduling(sample.behind));
                }
                let (span, stack) = (sample.span.key, stack.clone());
                unwound_awaits.push(PresentAwait { span, kind, since_ns, duration_ns, stack });
            }
        }
        unwound_awaits
    }
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
    let (kind, thread) = (SampleKind::Await, u32::MAX);
    let wait = PendingWait { kind, time_ns, weight: duration_ns, stack: 0, thread };
    pending.add_wait(span, wait, None, &stack, round)
}

/// An await that has not ended, with its stack.
#[derive(Debug)]
pub(super) struct PresentAwait {
    pub(super) span: SpanKey,
    pub(super) kind: SampleKind,
    pub(super) since_ns: u64,
    pub(super) duration_ns: u64,
    pub(super) stack: Stack,
}

/// The frames from the leaf future to the poll of the wrapper, and those of the leaf before, if there is one.
pub(super) fn unwound(stacks: &LeafStacks, unwinder: &mut Unwinder, most_frames: usize) -> Stack {
    let mut stack = Stack::new();
    match &stacks.last {
        Some(last) => stack.end = unwind(last, unwinder, most_frames, &mut stack.frames),
        None => stack.waited = Some(Waited::NotCopied),
    }
    if let (Some(before), true) = (&stacks.before, stacks.last.is_some()) {
        unwind(before, unwinder, most_frames, &mut stack.other);
    }
    stack
}

fn unwind(
    copy: &CopiedStack,
    unwinder: &mut Unwinder,
    most_frames: usize,
    frames: &mut Vec<ModuleAddress>,
) -> UnwindEnd {
    let end = unwind_copy(copy, unwinder, most_frames, frames);
    // A copy of all of it ends in the wrapper.
    let is_whole = end == UnwindEnd::Cut && !copy.is_part() && frames.len() + 1 < most_frames;
    if is_whole { UnwindEnd::Root } else { end }
}
