//! Samples: what each shows, and how much of it.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::Serialize;

use super::leaf::LeafId;
use super::spans::{LinkId, ThreadId};
use super::table::handle;
use crate::ids::ProfileId;

handle! {
    /// A stack: the index of its innermost call.
    StackId
}

impl StackId {
    pub(super) const EMPTY: Self = Self(u32::MAX);
}

/// What a sample shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SampleKind {
    /// The thread ran.
    OnCpu,
    /// The thread waited.
    OffCpu,
    /// No thread was in the future: it waited for what its stack shows, until it was woken.
    Await,
    /// Woken, and not polled yet: its executor had other things to do. The stack is that of the await before it.
    #[serde(rename = "scheduling_delay")]
    Delay,
    /// Bytes that the thread allocated, also those that were freed since.
    #[serde(rename = "allocated")]
    AllocatedBytes,
    /// The number of these allocations.
    Allocations,
    /// Bytes of blocks that are still in use.
    InUseBytes,
    /// The number of these blocks.
    InUseBlocks,
}

impl SampleKind {
    pub(crate) const ALL: [Self; 8] = [
        Self::OnCpu,
        Self::OffCpu,
        Self::Await,
        Self::Delay,
        Self::AllocatedBytes,
        Self::Allocations,
        Self::InUseBytes,
        Self::InUseBlocks,
    ];

    pub(crate) fn is_time(self) -> bool {
        matches!(self, Self::OnCpu | Self::OffCpu | Self::Await | Self::Delay)
    }

    /// The name and the unit of its values in pprof and OTLP.
    #[cfg(any(feature = "otlp", feature = "pprof"))]
    pub(crate) const fn value_type(self) -> [&'static str; 2] {
        match self {
            Self::OnCpu => ["cpu", "nanoseconds"],
            Self::OffCpu => ["off_cpu", "nanoseconds"],
            Self::Await => ["await", "nanoseconds"],
            Self::Delay => ["scheduling_delay", "nanoseconds"],
            Self::AllocatedBytes => ["alloc_space", "bytes"],
            Self::Allocations => ["alloc_objects", "count"],
            Self::InUseBytes => ["inuse_space", "bytes"],
            Self::InUseBlocks => ["inuse_objects", "count"],
        }
    }

    /// The id under which OTLP, which has one profile for each kind of sample, exports the samples of this kind: that of the
    /// profile for those of running threads, and otherwise with one bit inverted. That is the last one for waits, the one
    /// before it for awaits, and so on in the order of the kinds.
    #[must_use]
    pub fn id_of(self, profile: ProfileId) -> ProfileId {
        match self {
            Self::OnCpu => profile,
            _ => profile.inverted(1 << (self as u8 - 1)),
        }
    }
}

/// One sample of a running thread, one wait, one await, or one allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Point {
    /// See [`time`](Self::time).
    pub time_unix_ns: u64,
    /// What the sample represents, as its [kind](SampleKind) says: nanoseconds of CPU time, or of the wait, await or delay;
    /// a number of allocations or of bytes. Of awaits and delays shorter than 10 ms, some represent others: these have
    /// 10 ms.
    pub weight: u64,
    /// `None` if unknown.
    pub thread: Option<ThreadId>,
}

impl Point {
    /// When the sample was taken, or the wait, await or scheduling delay began.
    pub fn time(&self) -> SystemTime {
        UNIX_EPOCH + Duration::from_nanos(self.time_unix_ns)
    }
}

/// All samples with the same stack, leaf and span.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    /// The stack.
    pub stack: StackId,
    /// What was going on at its end.
    pub leaf: LeafId,
    /// The span.
    pub link: Option<LinkId>,
    /// What it shows.
    pub kind: SampleKind,
    /// In order of time.
    pub points: Vec<Point>,
}

impl Sample {
    /// What all its points have together.
    pub fn total(&self) -> u64 {
        self.points.iter().fold(0, |all, point| all.saturating_add(point.weight))
    }
}

/// What the samples of a profile are of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProfileScope {
    /// Kept spans.
    Spans,
    /// The CPU time of all threads of the process, in spans or not.
    Process,
    /// The wall time of all threads of the process, running or blocked.
    ProcessWall,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_sample_has_an_id_that_is_not_zero() {
        for last in 0..=128 {
            let mut bytes = [0; 16];
            bytes[15] = last;
            let ids = SampleKind::ALL.map(|kind| kind.id_of(ProfileId::from_bytes(bytes)));
            let distinct: std::collections::HashSet<_> = ids.into_iter().collect();
            assert_eq!(distinct.len(), 8, "{ids:?}");
            assert!(!ids[1..].contains(&ProfileId::NONE), "{ids:?}");
        }
    }
}
