//! Leaves samples out where there are too many. Others have their weight, so the sums do not change.

use std::collections::{HashMap, HashSet};

use super::sample::SampleKind;
use crate::ids::{SpanId, TraceId};

/// Takes one in some of the samples that come. It has the weight of those since the one before.
#[derive(Clone, Debug)]
pub struct Downsampling {
    pub every: usize,
    /// The samples since the last one that was taken, and their weight.
    pub skipped: usize,
    pub skipped_weight: u64,
}

impl Default for Downsampling {
    fn default() -> Self {
        Self::new(1)
    }
}

impl Downsampling {
    pub fn new(every: usize) -> Self {
        Self { every, skipped: 0, skipped_weight: 0 }
    }

    /// The total weight for the next sample, if it is taken, which it always is if it is needed.
    pub fn take(&mut self, weight: u64, is_needed: bool) -> Option<u64> {
        self.skipped += 1;
        self.skipped_weight = self.skipped_weight.saturating_add(weight);
        if self.skipped < self.every && !is_needed {
            return None;
        }
        self.skipped = 0;
        Some(std::mem::take(&mut self.skipped_weight))
    }
}

/// Downsamples each kind by itself.
#[derive(Debug, Default)]
pub struct Selection {
    of_kinds: HashMap<SampleKind, KindSelection>,
    /// Samples that were left out. Allocations have two values each.
    pub downsampled: usize,
}

#[derive(Debug)]
struct KindSelection {
    downsampling: Downsampling,
    left: usize,
    linked: HashSet<(TraceId, SpanId)>,
}

impl Selection {
    /// Of each kind, how many samples come, and one in how many is taken.
    pub fn new(kinds: impl IntoIterator<Item = (SampleKind, usize, usize)>) -> Self {
        let of_kind = |(kind, left, every)| {
            let (downsampling, linked) = (Downsampling::new(every), HashSet::new());
            (kind, KindSelection { downsampling, left, linked })
        };
        Self { of_kinds: kinds.into_iter().map(of_kind).collect(), downsampled: 0 }
    }

    /// The total weight for the next sample of the kind, if it is taken. The last one always is, so that the profile has all
    /// of the time, and the first one with a link, since an attribute of a span may refer to it.
    pub fn take(
        &mut self,
        kind: SampleKind,
        weight: u64,
        linked: Option<(TraceId, SpanId)>,
    ) -> Option<u64> {
        let Some(of_kind) = self.of_kinds.get_mut(&kind) else { return Some(weight) };
        of_kind.left = of_kind.left.saturating_sub(1);
        let is_first = linked.is_some_and(|linked| of_kind.linked.insert(linked));
        let taken = of_kind.downsampling.take(weight, is_first || of_kind.left == 0);
        let is_counted = taken.is_none() && kind != SampleKind::Allocations;
        self.downsampled += usize::from(is_counted);
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_sample_of_each_link_is_not_downsampled() {
        let linked = |span| Some((TraceId::from_bytes([1; 16]), SpanId::from_bytes([span; 8])));
        let mut selection = Selection::new([(SampleKind::OnCpu, 9, 100)]);
        let links = [1, 1, 1, 2, 1, 3, 3, 2, 1].map(linked);
        let take = |link| selection.take(SampleKind::OnCpu, 10, link).unwrap_or(0);
        assert_eq!(links.map(take), [10, 0, 0, 30, 0, 20, 0, 0, 30]);
        assert_eq!(selection.downsampled, 5);
    }
}
