//! Reads samples that the threads of the program take themselves: awaits and allocations, each with a copy of the stack.

use super::Intake;
use crate::budget::CpuBudget;
use crate::inbox::{
    Branch, CopiedSample, CopiedStack, Inbox, InboxCounters, KindWeight, LeafStacks,
};
use crate::profile::SampleKind;
use crate::sinks::{Added, Holder, NewSample, Stack, StackLeaf, Total};
use crate::span::{IdleCause, InnermostSpan, OtherSpan, SpanKey};
use crate::stats::Counters;
use crate::sys::Clock;
use crate::unwind::{ModuleAddress, UnwindEnd};

/// The CPU budget for unwinding the samples of an inbox: 50 ms at once, and 2 % of a core after that.
const UNWINDING: CpuBudget = CpuBudget::new(2, 50_000_000);
/// Where the budget for samples is unlimited.
const UNLIMITED: CpuBudget = CpuBudget::new(100, i64::MAX);
const MS: u64 = 1_000_000;
/// How many samples are read between two checks of the budget.
const AT_ONCE: usize = 8;
/// The assumed cost where CPU time cannot be read.
const A_STACK_NS: u64 = 20_000;

/// The CPU budgets for unwinding the samples of awaits and of allocations.
pub(super) fn copied_budgets(is_limited: bool) -> [CpuBudget; 2] {
    [UNWINDING, if is_limited { UNWINDING } else { UNLIMITED }]
}

impl Intake {
    /// Reads all samples that have been sent. Returns whether those of allocations are over their budget.
    pub(crate) fn read_copied(&mut self, awaits: &Inbox, allocations: &Inbox) -> bool {
        let now_ns = self.now_ns();
        let [for_awaits, for_allocations] = self.for_copied;
        let for_awaits = self.read(awaits, for_awaits, now_ns);
        let mut for_allocations = self.read(allocations, for_allocations, now_ns);
        self.for_copied = [for_awaits, for_allocations];
        !for_allocations.has_budget(now_ns)
    }

    /// Reads the samples that wait until now. `left` is the budget for their stacks. Returns what is left of it.
    fn read(&mut self, inbox: &Inbox, mut left: CpuBudget, now_ns: u64) -> CpuBudget {
        let waiting = inbox.samples.len();
        if waiting == 0 {
            return left;
        }
        self.reader.unwinder.refresh();
        _ = self.own_cpu.lap();
        let mut samples = std::iter::from_fn(|| inbox.samples.pop()).take(waiting).peekable();
        while samples.peek().is_some() {
            let mut count = 0;
            for sample in samples.by_ref().take(AT_ONCE) {
                self.add_copied(sample, left.has_budget(now_ns), inbox);
                count += 1;
            }
            let took = self.own_cpu.lap();
            left.spend(took.unwrap_or(count * A_STACK_NS));
            Counters::add(&self.counters.sampling.collector_cpu_ns, took.unwrap_or(0));
        }
        left
    }

    fn add_copied(&mut self, mut sample: CopiedSample, has_budget: bool, inbox: &Inbox) {
        let counters = inbox.counters();
        if !has_budget && sample.stacks.last.is_some() {
            Counters::add(counters.dropped_over_budget, 1);
            sample.stacks = LeafStacks::default();
        }
        let mut stack = self.unwound(&sample);
        let [weight, count] = sample.amounts.map(|amount| amount.weight);
        self.sinks.heap.add(sample.heap, &stack, Total { weight, count }, &self.counters);
        let Some(InnermostSpan { key: span, .. }) = sample.span else { return };
        for part in sample.parts() {
            stack.waited = self.idle_leaf(part, &sample, &stack);
            let new = new_sample(part, &stack, &self.spans.clock);
            let is_held = self.sinks.store.add(span, new, self.round) == Added::Kept;
            // An allocation has two parts.
            if part.kind != SampleKind::Allocations {
                let InboxCounters { held, dropped_pending_full, .. } = counters;
                Counters::add(if is_held { held } else { dropped_pending_full }, 1);
            }
        }
    }

    /// Adds idle time in which there is no stack. If there is no memory for it, it stays unexplained.
    pub(super) fn add_idle(&mut self, span: SpanKey, time_ns: u64, weight: u64, cause: IdleCause) {
        let (kind, leaf) = match cause {
            IdleCause::NotObserved => (SampleKind::Await, StackLeaf::NotObserved),
            IdleCause::NotBegun { behind: None } => (SampleKind::Delay, StackLeaf::NotBegun),
            IdleCause::NotBegun { behind } => (SampleKind::Delay, self.delayed(behind)),
        };
        let stack = Stack { waited: Some(leaf), ..Stack::new() };
        let idle = NewSample { kind, time_ns, weight, thread: None, stack: &stack };
        if self.sinks.store.add(span, idle, self.round) != Added::Kept {
            Counters::add(&self.counters.awaits.dropped_pending_full, 1);
        }
    }

    /// What an await or a scheduling delay shows besides the stack of the leaf.
    fn idle_leaf(&self, of: KindWeight, sample: &CopiedSample, stack: &Stack) -> Option<StackLeaf> {
        match (of.kind, stack.waited) {
            (SampleKind::Delay, _) => Some(self.delayed(sample.behind)),
            (SampleKind::Await, None) if sample.entered_ns >= of.weight.max(MS) => {
                // Three digits of it, so that there are few different ones.
                let ms = sample.entered_ns / MS;
                let least = 1 << ms.ilog2().saturating_sub(2);
                Some(StackLeaf::WhileEntered(ms / least * least))
            }
            // Of several leaves, none was seen to be ready before that span left the thread.
            (SampleKind::Await, None | Some(StackLeaf::OneOf(_))) => {
                let left = sample.after.map(|span| StackLeaf::AwaitingUntil(self.name(span)));
                let woken_in = sample.woken_in.map(|span| self.name(span));
                let is_known = woken_in.is_some() || !stack.elsewhere.is_empty();
                let woken = StackLeaf::WokenIn(woken_in.unwrap_or(Holder::NO_SPAN));
                left.or(stack.waited).or(is_known.then_some(woken))
            }
            (_, waited) => waited,
        }
    }

    fn delayed(&self, behind: Option<OtherSpan>) -> StackLeaf {
        behind.map_or(StackLeaf::Scheduling, |it| StackLeaf::SchedulingBehind(self.name(it)))
    }

    fn name(&self, span: OtherSpan) -> u64 {
        self.sinks.store.names.number_of(&self.spans, span)
    }

    /// The stack of an allocation, or those of leaf futures up to the poll of the wrapper.
    pub(crate) fn unwound(&mut self, sample: &CopiedSample) -> Stack {
        let (unwinder, most_frames) = (&mut self.reader.unwinder, self.settings.frames_per_stack);
        let [KindWeight { kind, .. }, _] = sample.amounts;
        let mut unwind = |copy: &CopiedStack, frames: &mut Vec<ModuleAddress>| {
            let (registers, words) = (copy.registers, copy.words());
            let end = unwinder.unwind_copied(copy.unloads, registers, words, most_frames, frames);
            // A copy of all of it ends in the wrapper.
            let is_whole = kind == SampleKind::Await && !copy.is_part && frames.len() < most_frames;
            // Without the function that copied it.
            if !frames.is_empty() {
                frames.remove(0);
            }
            if end.is_cut() && is_whole { UnwindEnd::Root } else { end }
        };
        let mut stack = Stack::new();
        match &sample.stacks.last {
            Some(last) => stack.end = unwind(last, &mut stack.frames),
            None if kind == SampleKind::Await => stack.waited = Some(StackLeaf::NotCopied),
            None => stack.waited = Some(StackLeaf::AllocationNotCopied),
        }
        for copy in &sample.stacks.others {
            let mut frames = Vec::new();
            let end = unwind(copy, &mut frames);
            stack.others.push((frames, end));
        }
        if let Some(waker) = &sample.stacks.waker {
            unwind(waker, &mut stack.elsewhere);
        }
        (stack.woke, stack.is_before_error) = (sample.stacks.woke, sample.is_before_error);
        let Branch { count, .. } = sample.branch;
        stack.waited = stack.waited.or((count > 1).then_some(StackLeaf::OneOf(count)));
        stack
    }

    /// What futures await now, with their spans, unwound.
    pub(crate) fn unwind_present(
        &mut self,
        present: &[(InnermostSpan, CopiedSample)],
    ) -> Vec<(SpanKey, KindWeight, Stack)> {
        if !present.is_empty() {
            self.reader.unwinder.refresh();
        }
        let unwind = |(span, sample): &(InnermostSpan, CopiedSample)| {
            let (span, stack) = (span.key, self.unwound(sample));
            let parts = sample.parts().map(|part| {
                let waited = self.idle_leaf(part, sample, &stack);
                (span, part, Stack { waited, ..stack.clone() })
            });
            parts.collect::<Vec<_>>()
        };
        present.iter().flat_map(unwind).collect()
    }
}

pub(crate) fn new_sample<'a>(part: KindWeight, stack: &'a Stack, clock: &Clock) -> NewSample<'a> {
    let KindWeight { kind, at, weight } = part;
    NewSample { kind, time_ns: clock.raw_ns(at), weight, thread: None, stack }
}
