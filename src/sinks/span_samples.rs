//! What one span has until its verdict.

use std::collections::HashMap;
use std::time::Duration;

use super::ledger::Ledger;
use super::losses::Losses;
use super::stack::{Stack, StackEntry};
use super::stack_tree::{StackTree, StoredStack};
use crate::profile::{Downsampling, SampleKind};
use crate::span::{SampleCounts, SpanInfo, TraceIds};
use crate::sys::OsThread;

/// Waits shorter than this are not captured.
pub(crate) const SHORTEST_WAIT: Duration = Duration::from_millis(5);

/// A sample for a span: of a running thread, a wait of a thread, an await of its future, or what it allocated.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NewSample<'a> {
    pub(crate) kind: SampleKind,
    /// When it was taken, or began: `CLOCK_MONOTONIC_RAW` in nanoseconds.
    pub(crate) time_ns: u64,
    /// What it represents, in the unit of its kind.
    pub(crate) weight: u64,
    pub(crate) thread: Option<OsThread>,
    pub(crate) stack: &'a Stack,
}

/// A [`NewSample`] as it is stored, of a span that is still open, or whose root is: 24 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StoredSample {
    pub(crate) time_ns: u64,
    pub(crate) weight: u64,
    pub(crate) stack: StoredStack,
    /// Where the tables have its thread, and [`INSIDE`].
    pub(super) thread: u32,
}

/// The sample is of a span inside the one that has it.
const INSIDE: u32 = 1 << 31;

impl StoredSample {
    pub(crate) fn is_of_span_inside(&self) -> bool {
        self.thread & INSIDE != 0
    }

    /// Returns the sample as one of the span around its own.
    pub(super) fn in_span_around(self) -> Self {
        Self { thread: self.thread | INSIDE, ..self }
    }

    fn thread(&self) -> StoredStack {
        StoredStack(self.thread & !INSIDE)
    }
}

/// What samples refer to, with how many do so.
#[derive(Debug, Default)]
pub(crate) struct SampleTables {
    pub(crate) stacks: StackTree<StackEntry>,
    /// Each like a stack of one frame; none is an empty stack.
    threads: StackTree<OsThread>,
}

impl SampleTables {
    /// Adds what a new sample refers to, if it takes no more memory than that.
    pub(crate) fn add(
        &mut self,
        NewSample { time_ns, weight, thread, stack, .. }: NewSample<'_>,
        most_bytes: usize,
    ) -> Option<StoredSample> {
        let before = self.threads.bytes();
        let thread = self.threads.add_within(thread.into_iter(), most_bytes)?;
        let most_bytes = most_bytes.saturating_sub(self.threads.bytes() - before);
        let Some(stack) = self.stacks.add_within(stack.entries(), most_bytes) else {
            self.threads.remove(thread);
            return None;
        };
        Some(StoredSample { time_ns, weight, stack, thread: thread.0 })
    }

    pub(crate) fn remove(&mut self, sample: &StoredSample) {
        self.stacks.remove(sample.stack);
        self.threads.remove(sample.thread());
    }

    pub(crate) fn thread(&self, sample: &StoredSample) -> Option<OsThread> {
        self.threads.frames(sample.thread()).next()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.stacks.bytes() + self.threads.bytes()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Added {
    Kept,
    /// The sample was merged into others, or others into it.
    Downsampled(u64),
    /// Out of memory, or too many of a kind that is not downsampled: only its weight is kept.
    Lost,
    /// Too many spans: if it is CPU time, that goes to the root of its span.
    Refused,
}

#[derive(Debug, Default)]
pub(crate) struct SpanSamples {
    pub(crate) known: Option<SpanInfo>,
    /// The ids under which the span is exported; known once it has closed.
    pub(crate) ids: Option<TraceIds>,
    /// When it closed: `CLOCK_MONOTONIC_RAW` in nanoseconds.
    pub(crate) closed_ns: Option<u64>,
    pub(crate) kinds: HashMap<SampleKind, KindSamples>,
    /// What is counted of the spans inside it, if any is.
    pub(crate) children: Option<Box<Ledger>>,
    /// What its profile lacks, apart from what its samples and their stacks show.
    pub(crate) losses: Losses,
    /// The time of the last sample.
    pub(crate) last_ns: u64,
    /// The round in which the span was first seen.
    pub(crate) first_round: u64,
    pub(crate) state: PendingState,
}

/// For what a span is pending.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum PendingState {
    #[default]
    Open,
    /// The span has closed, and is here only for the spans around it.
    Closed,
    /// The span has closed, and a profile has its samples.
    Exported,
}

/// The samples of a span that are of one kind.
#[derive(Debug, Default)]
pub(crate) struct KindSamples {
    pub(crate) samples: Vec<StoredSample>,
    pub(crate) downsampling: Downsampling,
    /// How many were merged into others.
    pub(crate) downsampled: u64,
    /// The samples for which there was no memory, and which a profile shows all the same.
    pub(crate) lost: Lost,
}

/// Samples of which only the weight is left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Lost {
    pub(crate) count: u64,
    pub(crate) weight: u64,
}

impl std::ops::AddAssign for Lost {
    fn add_assign(&mut self, Self { count, weight }: Self) {
        self.count += count;
        self.weight = self.weight.saturating_add(weight);
    }
}

/// The approximate memory of a span without its samples, and of a kind of samples without them.
pub(crate) const BYTES_A_SPAN: usize = size_of::<SpanSamples>() + 64;
const BYTES_A_KIND: usize = 4 * size_of::<KindSamples>();

impl SpanSamples {
    pub(crate) fn new(round: u64) -> Self {
        Self { first_round: round, ..Self::default() }
    }

    /// The samples of a kind. Adds the memory of what is new to `bytes`.
    pub(crate) fn of_kind(&mut self, kind: SampleKind, bytes: &mut usize) -> &mut KindSamples {
        self.kinds.entry(kind).or_insert_with(|| {
            *bytes += BYTES_A_KIND;
            KindSamples::default()
        })
    }

    pub(crate) fn samples(&self, kind: SampleKind) -> &[StoredSample] {
        self.kinds.get(&kind).map_or(&[], |of_kind| &of_kind.samples)
    }

    pub(crate) fn lost(&self, kind: SampleKind) -> Lost {
        self.kinds.get(&kind).map(|of_kind| of_kind.lost).unwrap_or_default()
    }

    /// The number of samples of the span, with those that were downsampled, and of running threads those that were lost.
    pub(crate) fn count(&self) -> SampleCounts {
        let mut counts = SampleCounts::default();
        for (kind, of_kind) in &self.kinds {
            let count = of_kind.samples.len() as u64 + of_kind.downsampled;
            match kind {
                SampleKind::OnCpu => counts.on_cpu += count + of_kind.lost.count,
                SampleKind::OffCpu => counts.waits += count,
                SampleKind::Await | SampleKind::Delay => counts.awaits += count,
                SampleKind::AllocatedBytes => counts.allocations += count,
                _ => {}
            }
        }
        counts
    }

    pub(crate) fn is_empty(&self) -> bool {
        let is_empty =
            |of_kind: &KindSamples| of_kind.samples.is_empty() && of_kind.lost.count == 0;
        self.losses.ring_full == 0 && self.kinds.values().all(is_empty)
    }

    pub(crate) fn bytes(&self) -> usize {
        let bytes = |of_kind: &KindSamples| BYTES_A_KIND + size_of_val(of_kind.samples.as_slice());
        let children = self.children.as_ref().map_or(0, |children| children.bytes);
        BYTES_A_SPAN + children + self.kinds.values().map(bytes).sum::<usize>()
    }

    /// Removes what the samples refer to from `tables`, before the samples are dropped.
    pub(crate) fn release(&self, tables: &mut SampleTables) {
        let samples = self.kinds.values().flat_map(|of_kind| &of_kind.samples);
        samples.for_each(|sample| tables.remove(sample));
    }
}

impl KindSamples {
    /// Only the weight of these samples stays, if a profile shows it: awaits are idle time in any case.
    pub(crate) fn lose(&mut self, kind: SampleKind, lost: Lost) {
        if !matches!(kind, SampleKind::Await | SampleKind::Delay) {
            self.lost += lost;
        }
    }

    /// The weight of a sample that is to be stored, if there is room for it.
    pub(crate) fn admit(
        &mut self,
        kind: SampleKind,
        weight: u64,
        most: usize,
    ) -> Result<u64, Added> {
        let Some(weight) = self.downsampling.take(weight, false) else {
            self.downsampled += 1;
            return Err(Added::Downsampled(1));
        };
        // A wait that represented others would be taken for a long one.
        if kind != SampleKind::OnCpu && self.samples.len() >= most {
            self.lose(kind, Lost { count: 1, weight });
            return Err(Added::Lost);
        }
        Ok(weight)
    }

    /// Stores a sample, and keeps at most that many. Adds its memory to `bytes`.
    pub(crate) fn push(
        &mut self,
        sample: StoredSample,
        most: usize,
        tables: &mut SampleTables,
        bytes: &mut usize,
    ) -> Added {
        self.samples.push(sample);
        *bytes += size_of::<StoredSample>();
        match self.samples.len() <= most {
            true => Added::Kept,
            false => Added::Downsampled(self.halve(tables, bytes)),
        }
    }

    /// Merges half of the samples, and of those that come. Subtracts their memory from `bytes`; returns how many.
    pub(crate) fn halve(&mut self, tables: &mut SampleTables, bytes: &mut usize) -> u64 {
        let before = self.samples.len();
        // Each pair becomes one with the weight of both.
        let mut pairs = Downsampling::new(2);
        self.samples.retain_mut(|sample| {
            let taken = pairs.take(sample.weight, false);
            match taken {
                Some(weight) => sample.weight = weight,
                None => tables.remove(sample),
            }
            taken.is_some()
        });
        let Downsampling { every, skipped, skipped_weight } = &mut self.downsampling;
        // The last one waits for its pair.
        *skipped += pairs.skipped * *every;
        *skipped_weight = skipped_weight.saturating_add(pairs.skipped_weight);
        *every = every.saturating_mul(2);
        self.samples.shrink_to_fit();
        let downsampled = before - self.samples.len();
        *bytes -= downsampled * size_of::<StoredSample>();
        self.downsampled += downsampled as u64;
        downsampled as u64
    }
}
