//! In which span a future is pending, and at which leaves.

use std::sync::atomic::AtomicU64;

use super::leaves::PendingLeaves;
use crate::span::{InnermostSpan, SpanKey, Spans};
use crate::sys::mixed;

/// Where the future is.
#[derive(Debug, Default)]
pub(super) struct AwaitPlace {
    pub(super) span: Option<InnermostSpan>,
    /// The spans around it, from the inside out: it may close before the future goes on in them.
    pub(super) around: Vec<InnermostSpan>,
    /// The spans of other leaves of the same poll, and those around them which are not around this one.
    pub(super) beside: Vec<InnermostSpan>,
    /// Empty, so that a poll need not allocate.
    spare: Vec<InnermostSpan>,
    pub(super) leaves: PendingLeaves,
    pub(super) carried: Option<Carried>,
    /// What was awaited last before an error was logged.
    pub(super) before_error: Option<Carried>,
}

/// One sample for all awaits of a young span, in case it is kept: of each with the probability of its share.
#[derive(Debug)]
pub(super) struct Carried {
    pub(super) span: InnermostSpan,
    /// The outermost span that it was in.
    pub(super) outermost: InnermostSpan,
    /// Moved here only when the future overwrites them; `None` if they are still those of its place.
    pub(super) leaves: Option<PendingLeaves>,
    /// The tag of the waker that woke the task.
    pub(super) woke: Option<u8>,
    pub(super) since: u64,
    pub(super) woken_at: u64,
    /// The time that it represents, in ticks: of awaits and of delays.
    pub(super) weights: [u64; 2],
    /// The sample represents more than one await.
    pub(super) is_merged: bool,
    pub(super) is_before_error: bool,
}

impl Carried {
    pub(super) fn new(
        [span, outermost]: [InnermostSpan; 2],
        woke: Option<u8>,
        [since, woken_at]: [u64; 2],
        weights: [u64; 2],
    ) -> Self {
        let (leaves, is_merged, is_before_error) = (None, false, false);
        Self { span, outermost, leaves, woke, since, woken_at, weights, is_merged, is_before_error }
    }
}

impl AwaitPlace {
    /// The carried sample, with its stacks, if it is one that is asked for. `lost` counts stacks without memory.
    pub(super) fn take_carried(
        &mut self,
        is_it: impl FnOnce(&mut Carried) -> bool,
        lost: &AtomicU64,
    ) -> Option<Carried> {
        let mut carried = self.carried.take_if(is_it)?;
        let copy = || Some(self.leaves.duplicate(carried.woke, lost));
        carried.leaves = carried.leaves.take().or_else(copy);
        Some(carried)
    }

    /// The span that the future is in: that in which the waker was cloned last, or the nearest around it that is open.
    pub(super) fn open_span(&self, spans: &Spans) -> Option<InnermostSpan> {
        let mut all = self.span.into_iter().chain(self.around.iter().copied());
        all.find(|span| spans.is_open(span.id, span.key))
    }

    /// Like [`open_span`](Self::open_span), but forgets the spans that have closed, and what was awaited in them.
    pub(super) fn leave_closed(&mut self, spans: &Spans) -> Option<InnermostSpan> {
        let open = self.open_span(spans)?;
        if let Some(closed) = self.around.iter().position(|span| *span == open) {
            self.drop_leaves();
            self.around.drain(..=closed);
            self.span = Some(open);
        }
        Some(open)
    }

    /// The future has ended.
    pub(super) fn end(&mut self, spans: &Spans) {
        self.drop_leaves();
        let all = self.span.take().into_iter().chain(self.around.drain(..));
        let all = all.chain(self.beside.drain(..));
        all.for_each(|span| spans.forget_observed(&span));
    }

    /// What was awaited is not awaited any more.
    pub(super) fn drop_leaves(&mut self) {
        self.keep_carried();
        self.leaves = PendingLeaves::default();
    }

    /// Frees the stacks, also those of the carried sample. Returns how many there were.
    pub(super) fn take_back(&mut self) -> u64 {
        let carried = self.carried.as_mut();
        let of_carried = carried.map(|carried| carried.leaves.get_or_insert_default().take_back());
        of_carried.unwrap_or(0) + self.leaves.take_back()
    }

    /// The leaves are about to be overwritten or dropped.
    pub(super) fn keep_carried(&mut self) {
        if let Some(carried) = &mut self.carried
            && carried.leaves.is_none()
        {
            carried.leaves = Some(std::mem::take(&mut self.leaves));
        }
    }

    /// A leaf in that span is the first in its poll.
    pub(super) fn begin(&mut self, spans: &Spans, span: Option<InnermostSpan>) {
        self.beside.clear();
        self.enter(spans, span);
    }

    /// A leaf in `span` follows others in the same poll, whose spans go to `beside` unless they are around `span`.
    pub(super) fn go_beside(&mut self, spans: &Spans, span: InnermostSpan) {
        let mut before = std::mem::replace(&mut self.around, std::mem::take(&mut self.spare));
        before.extend(self.span.replace(span));
        spans.note_observed(Some(&span), &mut self.around);
        for span in before.drain(..) {
            let here = self.span.iter().chain(&self.around);
            let is_around = here.into_iter().any(|around| around.key == span.key);
            if !is_around && !self.beside.contains(&span) {
                self.beside.push(span);
            }
        }
        self.spare = before;
    }

    pub(super) fn enter(&mut self, spans: &Spans, span: Option<InnermostSpan>) {
        if self.span != span {
            self.span = span;
            spans.note_observed(span.as_ref(), &mut self.around);
        }
    }

    /// An error was logged in the poll after an await that ended with a wake by that clone.
    pub(super) fn note_error(
        &mut self,
        (spans, now): (&Spans, u64),
        woke: u8,
        failed: SpanKey,
        lost: &AtomicU64,
    ) {
        let open = self.open_span(spans).and_then(|span| Some((span, spans.outermost_of(&span)?)));
        let Some((span, outermost)) = open else { return };
        let is_known = self.before_error.as_ref().is_some_and(|it| it.outermost == outermost);
        let mut awaited = self.leaves.awaited();
        if is_known
            || !awaited.all(|leaf| spans.is_open(leaf.span.id, leaf.span.key))
            || outermost.key != failed
        {
            return;
        }
        let woke = Some(woke);
        let leaves = Some(self.leaves.duplicate(woke, lost));
        let last = Carried::new([span, outermost], woke, [now, now], [1, 0]);
        self.before_error = Some(Carried { leaves, is_before_error: true, ..last });
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
