//! What one span has until its verdict.

use std::collections::HashMap;

use super::stack::{Stack, Stacks};
use crate::profile::SampleKind;
use crate::publish::report::Losses;
use crate::span::{SampleCounts, SpanInfo, TraceIds};
use crate::sys::OsThread;

/// A sample of a span that is still open, or whose root is: 24 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PendingSample {
    /// `CLOCK_MONOTONIC_RAW` in nanoseconds.
    pub(super) time_ns: u64,
    pub(super) stack: u32,
    pub(super) thread: u32,
    /// The CPU time that the sample represents.
    pub(super) weight_ns: u64,
}

/// A wait of a thread in a span, an await of its future, or what it allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PendingWait {
    pub(super) kind: SampleKind,
    /// When it began: `CLOCK_MONOTONIC_RAW` in nanoseconds.
    pub(super) time_ns: u64,
    /// In the unit of its kind.
    pub(super) weight: u64,
    pub(super) stack: u32,
    pub(super) thread: u32,
}

/// The samples and waits of one span.
#[derive(Debug, Default)]
pub(super) struct PendingSpan {
    pub(super) known: Option<SpanInfo>,
    /// The ids under which the span is exported; known once it has closed.
    pub(super) ids: Option<TraceIds>,
    /// When it closed: `CLOCK_MONOTONIC_RAW` in nanoseconds.
    pub(super) closed_ns: Option<u64>,
    pub(super) samples: Vec<PendingSample>,
    pub(super) waits: Vec<PendingWait>,
    pub(super) of_kinds: HashMap<SampleKind, OfKind>,
    pub(super) stacks: Stacks,
    /// One in this many samples is kept.
    pub(super) keep_every: u32,
    /// Samples since the last one that was kept, and the CPU time that they represent.
    pub(super) skipped: u32,
    pub(super) skipped_ns: u64,
    /// What its profile lacks, apart from what its stacks show.
    pub(super) losses: Losses,
    /// The CPU time of samples whose stacks were dropped.
    pub(super) lost_ns: u64,
    /// The time of the last sample.
    pub(super) last_ns: u64,
    /// The round in which the span was first seen.
    pub(super) first_round: u64,
    pub(super) state: PendingState,
}

/// For what a span is pending.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum PendingState {
    #[default]
    Open,
    /// The span has closed, and is here only for the spans around it.
    Closed,
    /// It has closed, and a profile has its samples.
    Exported,
}

/// The waits of a span that are of one kind.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct OfKind {
    pub(super) count: usize,
    /// The weight of those that did not fit into memory.
    pub(super) lost: u64,
}

/// The approximate memory of a span without its samples and stacks.
pub(super) const BYTES_A_SPAN: usize = size_of::<PendingSpan>() + 64;

impl PendingSpan {
    pub(super) fn new(round: u64) -> Self {
        Self { keep_every: 1, first_round: round, ..Self::default() }
    }

    pub(super) fn stack(&self, number: u32) -> Option<&Stack> {
        self.stacks.get(number)
    }

    pub(super) fn thread(&self, number: u32) -> Option<OsThread> {
        self.stacks.thread(number)
    }

    /// The number of samples and waits of the span, including those that were dropped or downsampled.
    pub(super) fn count(&self) -> SampleCounts {
        let on_cpu = self.samples.len() as u64 + self.losses.lost + self.losses.downsampled;
        let mut counts = SampleCounts::of_on_cpu(on_cpu);
        for wait in &self.waits {
            match wait.kind {
                SampleKind::OffCpu => counts.waits += 1,
                SampleKind::Await | SampleKind::Delay => counts.awaits += 1,
                SampleKind::AllocatedBytes => counts.allocations += 1,
                _ => {}
            }
        }
        counts
    }

    /// The weight of waits or allocations that did not fit into memory.
    pub(super) fn lost(&self, kind: SampleKind) -> u64 {
        self.of_kinds.get(&kind).map_or(0, |of_kind| of_kind.lost)
    }

    pub(super) fn weight_of(&self, kind: SampleKind) -> u64 {
        self.waits.iter().filter(|wait| wait.kind == kind).map(|wait| wait.weight).sum()
    }

    /// Whether a profile would show nothing of the span.
    pub(super) fn is_empty(&self) -> bool {
        let has_lost = self.of_kinds.values().any(|of_kind| of_kind.lost > 0);
        let has_waits = !self.waits.is_empty() || has_lost;
        let Losses { lost, ring_full, .. } = self.losses;
        self.samples.is_empty() && lost == 0 && ring_full == 0 && !has_waits
    }

    /// Merges each pair of samples into one with the weight of both.
    pub(super) fn downsample(&mut self) {
        let mut left_out = None;
        self.samples.retain_mut(|sample| match left_out.take() {
            Some(weight_ns) => {
                sample.weight_ns = sample.weight_ns.saturating_add(weight_ns);
                true
            }
            None => {
                left_out = Some(sample.weight_ns);
                false
            }
        });
        if let Some(weight_ns) = left_out {
            // The last one waits for its pair.
            self.skipped += self.keep_every;
            self.skipped_ns += weight_ns;
        }
        self.keep_every = self.keep_every.saturating_mul(2);
    }

    pub(super) fn bytes(&self) -> usize {
        let samples = self.samples.len() * size_of::<PendingSample>();
        let waits = self.waits.len() * size_of::<PendingWait>();
        BYTES_A_SPAN + samples + waits + self.stacks.bytes()
    }
}

/// What a profile shows also if it did not fit into memory: awaits are idle time in any case.
pub(super) const SHOWN_IF_LOST: [SampleKind; 3] =
    [SampleKind::OffCpu, SampleKind::AllocatedBytes, SampleKind::Allocations];
