//! In which span a future is pending, and at which leaves.

use std::sync::atomic::AtomicU64;

use crate::inbox::LeafStacks;
use crate::span::{InnermostSpan, Spans};

/// Where the future is.
#[derive(Debug, Default)]
pub(super) struct AwaitPlace {
    pub(super) span: Option<InnermostSpan>,
    /// The spans around it, from the inside out: it may close before the future goes on in them.
    pub(super) around: Vec<InnermostSpan>,
    pub(super) stacks: LeafStacks,
    pub(super) carried: Option<Carried>,
}

/// One sample for all awaits of a span that is young, in case it is kept. Each await is the one whose stack it has with
/// the probability of its share.
#[derive(Debug)]
pub(super) struct Carried {
    pub(super) span: InnermostSpan,
    /// The outermost span that it was in.
    pub(super) outermost: InnermostSpan,
    /// Moved here only when the future overwrites them; `None` if they are still those of its place.
    pub(super) stacks: Option<LeafStacks>,
    pub(super) since: u64,
    pub(super) woken_at: u64,
    /// The time that it represents, in ticks: of awaits and of delays.
    pub(super) weights: [u64; 2],
    /// It represents more than one.
    pub(super) is_merged: bool,
}

impl AwaitPlace {
    /// The carried sample, with its stacks, if it is one that is asked for. `lost` counts stacks without memory.
    pub(super) fn take_carried(
        &mut self,
        is_it: impl FnOnce(&mut Carried) -> bool,
        lost: &AtomicU64,
    ) -> Option<Carried> {
        let mut carried = self.carried.take_if(is_it)?;
        carried.stacks = carried.stacks.take().or_else(|| Some(self.stacks.duplicate(lost)));
        Some(carried)
    }

    /// The span that the future is in: the one in which the waker was cloned last or, if that one has closed, the nearest
    /// around it that is open.
    pub(super) fn open_span(&self, spans: &Spans) -> Option<InnermostSpan> {
        let mut all = self.span.into_iter().chain(self.around.iter().copied());
        all.find(|span| spans.is_open_span(span))
    }

    /// The same. Forgets those that have closed, and what was awaited in them.
    pub(super) fn leave_closed(&mut self, spans: &Spans) -> Option<InnermostSpan> {
        let open = self.open_span(spans)?;
        if let Some(closed) = self.around.iter().position(|span| *span == open) {
            self.drop_stacks();
            self.around.drain(..=closed);
            self.span = Some(open);
        }
        Some(open)
    }

    /// The future has ended.
    pub(super) fn end(&mut self, spans: &Spans) {
        self.drop_stacks();
        let all = self.span.take().into_iter().chain(self.around.drain(..));
        all.for_each(|span| spans.forget_observed(&span));
    }

    /// What was awaited is not awaited any more.
    pub(super) fn drop_stacks(&mut self) {
        self.keep_carried();
        self.stacks = LeafStacks::default();
    }

    /// Frees the stacks, also those of the carried sample. Returns how many there were.
    pub(super) fn take_back(&mut self) -> u64 {
        let carried = self.carried.as_mut();
        let of_carried = carried.and_then(|carried| carried.stacks.replace(LeafStacks::default()));
        let all = [Some(std::mem::take(&mut self.stacks)), of_carried];
        let all = all.into_iter().flatten().flat_map(|stacks| [stacks.last, stacks.before]);
        all.flatten().count() as u64
    }

    /// The stacks are about to be overwritten or dropped.
    pub(super) fn keep_carried(&mut self) {
        if let Some(carried) = &mut self.carried
            && carried.stacks.is_none()
        {
            carried.stacks = Some(std::mem::take(&mut self.stacks));
        }
    }

    /// Carries a new sample together with the one before.
    pub(super) fn carry(&mut self, before: Option<Carried>, new: Carried) {
        let Some(before) = before else {
            self.carried = Some(new);
            return;
        };
        let ([awaited, delayed], [new_awaited, new_delayed]) = (before.weights, new.weights);
        let weights = [awaited + new_awaited, delayed + new_delayed];
        let all = weights.iter().sum::<u64>().max(1);
        let is_new = mixed(new.woken_at ^ new.span.key.get()) % all < new_awaited + new_delayed;
        let shown = if is_new { new } else { before };
        self.carried = Some(Carried { weights, is_merged: true, ..shown });
    }
}

/// The finalizer of SplitMix64, whose output for different numbers is as good as random.
pub(super) const fn mixed(number: u64) -> u64 {
    let number = (number ^ number >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ number >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ number >> 31
}
