//! Samples that the threads of the program take themselves: of what futures awaited, and of what was allocated. Each has a
//! copy of its stack, and waits here until the collector reads it.

mod stack;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use crossbeam::queue::ArrayQueue;

pub(crate) use stack::{CopiedStack, LeafStacks};

use crate::profile::SampleKind;
use crate::span::{InnermostSpan, OtherSpan};
use crate::stats::Counters;
use crate::sys::{BlockPool, LiveStack, TrackedBlock, Waker};

/// Samples that the collector has not read.
const MOST_SAMPLES: usize = 512;
/// The collector is woken when this many are waiting. Their number makes the wake rare.
const WAKE_AT: usize = 64;

#[derive(Debug)]
pub(crate) struct CopiedSample {
    /// The span that it belongs to; `None` if it is only for the live heap.
    pub(crate) span: Option<InnermostSpan>,
    /// An await and the scheduling delay after it, of all branches, or the bytes and the number of allocations.
    pub(crate) amounts: [KindWeight; 2],
    /// Nothing that it represents is larger. What represents others must not be taken for a long one.
    pub(crate) largest: u64,
    pub(crate) stacks: LeafStacks,
    pub(crate) branch: Branch,
    /// The span that left the thread that polled it just before it was woken, after most of the await.
    pub(crate) after: Option<OtherSpan>,
    /// The span of another local root in which the future was woken.
    pub(crate) woken_in: Option<OtherSpan>,
    /// The span that was on the thread that polled it too late.
    pub(crate) behind: Option<OtherSpan>,
    /// For how long threads were in its span during the await. That is no part of its amount.
    pub(crate) entered_ns: u64,
    /// The await was the last one before an error was logged.
    pub(crate) is_before_error: bool,
    pub(crate) heap: HeapUse,
}

/// Which part of an await a sample shows, if its future awaited several leaves at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Branch {
    pub(crate) count: u32,
    /// From which to which of `of` parts of the time the sample has.
    pub(crate) from: u32,
    pub(crate) to: u32,
    pub(crate) of: u32,
}

impl Branch {
    pub(crate) const ONLY: Self = Self { count: 1, from: 0, to: 1, of: 1 };

    /// Returns the branch's part of `all`; the parts of all branches sum to it.
    fn share(self, all: u64) -> u64 {
        let up_to = |part: u32| {
            let up_to = u128::from(all) * u128::from(part) / u128::from(self.of.max(1));
            u64::try_from(up_to).unwrap_or(all)
        };
        up_to(self.to).saturating_sub(up_to(self.from))
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct KindWeight {
    pub(crate) kind: SampleKind,
    /// When it began, in ticks: the collector converts them.
    pub(crate) at: u64,
    /// In the unit of the kind; 0 if there is none of it.
    pub(crate) weight: u64,
}

/// What a sample is for the live heap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeapUse {
    /// Nothing: the live heap is not tracked, or another layer tracks it.
    None,
    /// Too many sampled blocks are in use.
    NotTracked,
    Tracked(TrackedBlock),
}

impl CopiedSample {
    pub(crate) fn new(
        span: Option<InnermostSpan>,
        amounts: [KindWeight; 2],
        (stacks, branch): (LeafStacks, Branch),
    ) -> Self {
        Self {
            span,
            amounts,
            largest: u64::MAX,
            stacks,
            branch,
            after: None,
            woken_in: None,
            behind: None,
            entered_ns: 0,
            is_before_error: false,
            heap: HeapUse::None,
        }
    }

    /// What it represents, in parts that are no larger than [`Self::largest`].
    pub(crate) fn parts(&self) -> impl Iterator<Item = KindWeight> + use<> {
        const MOST: u64 = 1_000;
        let (largest, branch) = (self.largest.max(1), self.branch);
        self.amounts.into_iter().flat_map(move |amount| {
            let amount = KindWeight { weight: branch.share(amount.weight), ..amount };
            let count = amount.weight.div_ceil(largest).min(MOST);
            let each = amount.weight / count.max(1);
            (0..count).map(move |number| {
                let rest = if number == 0 { amount.weight - each * count } else { 0 };
                KindWeight { weight: each + rest, ..amount }
            })
        })
    }
}

#[derive(Debug)]
pub(crate) struct Inbox {
    pub(crate) pool: BlockPool,
    /// Samples that the collector has not read.
    pub(crate) samples: ArrayQueue<CopiedSample>,
    pub(crate) all_counters: Arc<Counters>,
    own_counters: fn(&Counters) -> InboxCounters<'_>,
    waker: Waker,
    wake: fn(&Waker),
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct InboxCounters<'a> {
    pub(crate) held: &'a AtomicU64,
    pub(crate) unreadable: &'a AtomicU64,
    pub(crate) dropped_memory: &'a AtomicU64,
    pub(crate) dropped_queue_full: &'a AtomicU64,
    pub(crate) dropped_over_budget: &'a AtomicU64,
    pub(crate) dropped_pending_full: &'a AtomicU64,
}

impl Inbox {
    /// `most_bytes` limits the memory of copied stacks. `wake` wakes the collector when many samples are waiting.
    pub(crate) fn new(
        (all_counters, own_counters): (Arc<Counters>, fn(&Counters) -> InboxCounters<'_>),
        (waker, wake): (Waker, fn(&Waker)),
        most_bytes: usize,
    ) -> Self {
        let (pool, samples) = (BlockPool::new(most_bytes), ArrayQueue::new(MOST_SAMPLES));
        Self { pool, samples, all_counters, own_counters, waker, wake }
    }

    pub(crate) fn counters(&self) -> InboxCounters<'_> {
        (self.own_counters)(&self.all_counters)
    }

    /// Copies at most that many bytes of a stack, if it can be read, into that memory if it fits. `None` without memory.
    pub(crate) fn copy(
        &self,
        reused: Option<CopiedStack>,
        stack: Option<&LiveStack>,
        most_bytes: usize,
    ) -> Option<CopiedStack> {
        let copy = stack.and_then(|it| CopiedStack::new(&self.pool, reused, it, most_bytes));
        if copy.is_none() {
            let InboxCounters { unreadable, dropped_memory, .. } = self.counters();
            Counters::add(if stack.is_none() { unreadable } else { dropped_memory }, 1);
        }
        copy
    }

    /// Returns whether there was room for it. Does not count it otherwise.
    pub(crate) fn push(&self, sample: CopiedSample) -> bool {
        let is_pushed = self.samples.push(sample).is_ok();
        if self.samples.len() >= WAKE_AT {
            self.wake();
        }
        is_pushed
    }

    pub(crate) fn wake(&self) {
        (self.wake)(&self.waker);
    }
}
