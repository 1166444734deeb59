//! The leaves that a future awaits at the same time: those that cloned its waker in one poll.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use smallvec::SmallVec;

use crate::inbox::{Branch, CopiedStack, LeafStacks};
use crate::span::InnermostSpan;
use crate::stats::Counters;
use crate::sys::TAGS;

/// Of more leaves in one poll, the last ones are kept.
const MOST: usize = 8;
/// The limit in place of [`MOST`] while little memory is left.
const MOST_TIGHT: usize = 2;

/// The tags of the clones of a waker: those of one poll differ, so that it is known which was dropped and which woke.
#[derive(Debug, Default)]
pub(super) struct PollTags {
    /// The tag of the poll's waker, and how many tags were given, beginning with that one.
    first: AtomicU8,
    given: AtomicU8,
}

/// Not the tag of a clone: the leaf woke the task in the poll.
pub(super) const WOKE_ITSELF: u8 = u8::MAX;
const NUMBER: u8 = {
    assert!(TAGS < WOKE_ITSELF as usize);
    TAGS as u8
};

impl PollTags {
    /// A poll begins whose waker has that tag. `is_new`: no clone has it.
    #[inline]
    pub(super) fn begin(&self, tag: u8, is_new: bool) {
        self.first.store(tag, Ordering::Relaxed);
        self.given.store(u8::from(!is_new), Ordering::Relaxed);
    }

    /// The tag of a clone: that of the poll's waker if it `is_only`, so that a single leaf need not clone it again.
    pub(super) fn next(&self, is_only: bool) -> u8 {
        let given = self.given.load(Ordering::Relaxed);
        // The rest has the same: the waker of the next poll must have another one.
        let number = if is_only { 0 } else { given.min(NUMBER - 2) };
        self.given.store(given.max(number + 1), Ordering::Relaxed);
        (self.first.load(Ordering::Relaxed) + number) % NUMBER
    }

    /// One that no clone of the poll has.
    pub(super) fn unused(&self) -> u8 {
        let given = self.given.load(Ordering::Relaxed).max(1);
        (self.first.load(Ordering::Relaxed) + given) % NUMBER
    }
}

/// A leaf that cloned the waker, or that woke it at once.
#[derive(Debug)]
pub(super) struct PendingLeaf {
    pub(super) span: InnermostSpan,
    /// The tag of the leaf's clone.
    pub(super) tag: u8,
    /// The leaf's clone was dropped in the same poll: the leaf is not awaited any more.
    pub(super) is_done: bool,
    pub(super) stack: Option<CopiedStack>,
}

/// The pending leaves of one poll. One leaf takes no memory beside its stack.
#[derive(Debug, Default)]
pub(super) struct PendingLeaves {
    /// The oldest first.
    leaves: SmallVec<[PendingLeaf; 1]>,
    /// How many more there were.
    left_out: u32,
}

/// What a sample shows of the leaves in one span.
#[derive(Debug)]
pub(super) struct SpanLeaves {
    pub(super) span: InnermostSpan,
    pub(super) stacks: LeafStacks,
    pub(super) branch: Branch,
}

impl PendingLeaves {
    /// Returns the leaves that are awaited, the last first. The last is, if nothing else is known to be.
    pub(super) fn awaited(&self) -> impl Iterator<Item = &PendingLeaf> + Clone {
        let none_is = self.leaves.iter().all(|leaf| leaf.is_done);
        self.leaves.iter().rev().enumerate().filter_map(move |(number, leaf)| {
            (!leaf.is_done || none_is && number == 0).then_some(leaf)
        })
    }

    pub(super) fn are_done(&self) -> bool {
        self.leaves.iter().all(|leaf| leaf.is_done)
    }

    /// How many have no stack because there were too many.
    pub(super) fn left_out(&self) -> u64 {
        u64::from(self.left_out)
    }

    /// Forgets all. Returns the memory of one, to use it again.
    pub(super) fn clear(&mut self) -> Option<CopiedStack> {
        self.left_out = 0;
        self.leaves.drain(..).filter_map(|leaf| leaf.stack).next()
    }

    /// Forgets those that are done, and those for which `is_over` returns true. Returns the memory of one.
    pub(super) fn retain(
        &mut self,
        is_over: impl Fn(&InnermostSpan) -> bool,
    ) -> Option<CopiedStack> {
        let mut spare = None;
        self.leaves.retain(|leaf| {
            let goes = leaf.is_done || is_over(&leaf.span);
            if goes {
                spare = leaf.stack.take().or_else(|| spare.take());
            }
            !goes
        });
        spare
    }

    /// Adds one that is awaited together with those before, of which another one may be left out for it.
    pub(super) fn add(&mut self, leaf: PendingLeaf, is_tight: bool) {
        self.leaves.push(leaf);
        let most = if is_tight { MOST_TIGHT } else { MOST };
        if self.leaves.len() > most {
            self.leaves.remove(0);
            self.left_out = self.left_out.saturating_add(1);
        }
    }

    /// A clone was dropped in the poll in which it was made.
    pub(super) fn note_drop(&mut self, tag: u8) {
        let with_tag = self.leaves.iter_mut().filter(|leaf| leaf.tag == tag);
        with_tag.for_each(|leaf| leaf.is_done = true);
    }

    /// The span of the leaf that woke the task with that tag, if it is known which one that was.
    pub(super) fn woken_in(&self, woke: Option<u8>) -> Option<InnermostSpan> {
        self.woken(woke).map(|leaf| leaf.span)
    }

    fn woken(&self, woke: Option<u8>) -> Option<&PendingLeaf> {
        let mut with_tag = self.awaited().filter(|leaf| Some(leaf.tag) == woke);
        with_tag.next().filter(|_| with_tag.next().is_none())
    }

    /// Frees the stacks. Returns how many there were.
    pub(super) fn take_back(&mut self) -> u64 {
        self.leaves.iter_mut().filter_map(|leaf| leaf.stack.take()).count() as u64
    }

    /// A copy, with the stacks that are needed and for which there is memory. `lost` counts the others.
    pub(super) fn duplicate(&self, woke: Option<u8>, lost: &AtomicU64) -> Self {
        let woken_in = self.woken_in(woke);
        let copy = |leaf: &PendingLeaf| {
            let is_needed = woken_in.is_none_or(|span| span == leaf.span);
            let stack = leaf.stack.as_ref().filter(|_| is_needed);
            let copy = stack.and_then(CopiedStack::duplicate);
            if stack.is_some() && copy.is_none() {
                Counters::add(lost, 1);
            }
            PendingLeaf { stack: copy, ..*leaf }
        };
        Self { leaves: self.leaves.iter().map(copy).collect(), left_out: self.left_out }
    }

    /// What is shown of them, in `span_of` of their spans: the one that woke the task has all the time, or all have parts.
    pub(super) fn into_samples(
        mut self,
        woke: Option<u8>,
        span: InnermostSpan,
        span_of: impl Fn(InnermostSpan) -> InnermostSpan,
    ) -> Vec<SpanLeaves> {
        let woken = self.woken(woke).map(|leaf| leaf.tag);
        if self.leaves.iter().any(|leaf| !leaf.is_done) {
            _ = self.retain(|_| false);
        } else {
            _ = self.leaves.drain(..self.leaves.len().saturating_sub(1));
        }
        let mut leaves: Vec<_> = self.leaves.into_iter().rev().collect();
        let of = u32::try_from(leaves.len()).unwrap_or(u32::MAX);
        let count = of.saturating_add(self.left_out).max(1);
        let woken_in = leaves.iter().find(|leaf| Some(leaf.tag) == woken).map(|leaf| leaf.span);
        let (mut samples, mut from): (Vec<SpanLeaves>, _) = (Vec::new(), 0);
        while let Some(next) = leaves.first().map(|leaf| leaf.span) {
            let is_here = |leaf: &PendingLeaf| span_of(leaf.span) == span_of(next);
            let (here, rest): (Vec<_>, Vec<_>) = leaves.into_iter().partition(is_here);
            leaves = rest;
            let to = from + u32::try_from(here.len()).unwrap_or(0);
            let is_woken = woken_in.is_some_and(|of| here.iter().any(|leaf| leaf.span == of));
            if is_woken || woken_in.is_none() {
                let branch = match is_woken {
                    true => Branch { count, ..Branch::ONLY },
                    false => Branch { count, from, to, of },
                };
                let stacks = stacks_of(here, woken);
                samples.push(SpanLeaves { span: span_of(next), stacks, branch });
            }
            from = to;
        }
        if samples.is_empty() {
            let (stacks, branch) = (LeafStacks::default(), Branch::ONLY);
            samples.push(SpanLeaves { span, stacks, branch });
        }
        samples
    }
}

/// The stacks of leaves in one span, the last first. If there is none of the one that woke the task, there is none.
fn stacks_of(leaves: Vec<PendingLeaf>, woken: Option<u8>) -> LeafStacks {
    let mut stacks = leaves.into_iter().filter_map(|leaf| Some((leaf.tag, leaf.stack?)));
    let (tags, mut copies): (Vec<_>, Vec<_>) = stacks.by_ref().unzip();
    let woke = woken.map(|woken| tags.iter().position(|tag| *tag == woken));
    if copies.is_empty() || woke == Some(None) {
        return LeafStacks::default();
    }
    let last = Some(copies.remove(0));
    LeafStacks { last, others: copies, woke: woke.flatten(), waker: None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::span::InnermostSpan;

    /// Of each span, the number of its parts of the time, of how many, and the number of all leaves.
    fn shown(leaves: PendingLeaves, woke: Option<u8>) -> Vec<(u64, u32, u32, u32)> {
        let [any, ..] = spans();
        let samples = leaves.into_samples(woke, any, |span| span);
        let parts = samples.iter().map(|sample| {
            let Branch { count, from, to, of } = sample.branch;
            (sample.span.key.get(), to - from, of, count)
        });
        parts.collect()
    }

    fn spans() -> [InnermostSpan; 3] {
        [1, 2, 3].map(InnermostSpan::for_test)
    }

    fn leaf(span: usize, tag: u8) -> PendingLeaf {
        PendingLeaf { span: spans()[span - 1], tag, is_done: false, stack: None }
    }

    fn leaves(all: &[(usize, u8)]) -> PendingLeaves {
        let mut leaves = PendingLeaves::default();
        for (span, tag) in all {
            leaves.add(leaf(*span, *tag), false);
        }
        assert_eq!(leaves.left_out(), 0);
        leaves
    }

    #[test]
    fn the_leaf_that_woke_has_all_and_otherwise_each_its_part() {
        let three = || leaves(&[(1, 4), (2, 5), (1, 6)]);
        assert_eq!(shown(three(), None), [(1, 2, 3, 3), (2, 1, 3, 3)]);
        assert_eq!(shown(three(), Some(5)), [(2, 1, 1, 3)]);
        assert_eq!(shown(three(), Some(4)), [(1, 1, 1, 3)]);
        assert_eq!(shown(three(), Some(7)), shown(three(), None), "of another poll");
        // With the same tag it is not known which of them it was.
        let alike = || leaves(&[(1, 4), (2, 4)]);
        assert_eq!(shown(alike(), Some(4)), [(2, 1, 2, 2), (1, 1, 2, 2)]);
        assert_eq!(shown(PendingLeaves::default(), Some(1)), [(1, 1, 1, 1)]);
    }

    #[test]
    fn what_is_done_in_the_poll_is_not_shown_except_the_last_that_is_left() {
        let mut two = leaves(&[(1, 4), (2, 5)]);
        two.note_drop(5);
        let spans_of = |leaves: &PendingLeaves| -> Vec<_> {
            leaves.awaited().map(|leaf| leaf.span.key.get()).collect()
        };
        assert_eq!(spans_of(&two), [1]);
        assert_eq!(two.woken_in(Some(5)), None);
        two.note_drop(4);
        assert_eq!(spans_of(&two), [2]);
        assert_eq!(shown(two, Some(4)), [(2, 1, 1, 1)]);
        let mut two = leaves(&[(1, 4), (2, 5)]);
        two.note_drop(4);
        _ = two.retain(|_| false);
        two.add(leaf(3, 6), false);
        assert_eq!(shown(two, None), [(3, 1, 2, 2), (2, 1, 2, 2)]);
    }

    #[test]
    fn clones_of_one_poll_have_different_tags_and_the_next_poll_another() {
        let tags = PollTags::default();
        let (mut first, mut is_new) = (0, true);
        for clones in [0, 1, 2, 5, 30, 31, 40] {
            tags.begin(first, is_new);
            let mut given: Vec<_> = (0..clones).map(|_| tags.next(false)).collect();
            let unused = tags.unused();
            assert!(unused < NUMBER && unused != first && !given.contains(&unused), "{given:?}");
            assert!(!is_new || clones == 0 || given[0] == first, "the first can be equal");
            given.dedup();
            let most = usize::from(NUMBER - 1 - u8::from(!is_new));
            assert_eq!(given.len(), most.min(clones), "{given:?}");
            assert!(is_new || !given.contains(&first), "an earlier clone has it");
            assert_eq!(tags.next(true), first, "a single leaf");
            (first, is_new) = (unused, !is_new);
        }
    }

    #[test]
    fn of_many_leaves_the_last_are_kept_and_all_are_counted() {
        for (is_tight, most) in [(false, MOST), (true, MOST_TIGHT)] {
            let mut many = PendingLeaves::default();
            (0..10).for_each(|tag| many.add(leaf(1, tag), is_tight));
            assert_eq!(many.left_out(), 10 - most as u64);
            let most = u32::try_from(most).unwrap();
            assert_eq!(shown(many, None), [(1, most, most, 10)]);
        }
    }
}
