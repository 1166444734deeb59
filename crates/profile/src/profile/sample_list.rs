//! The samples of a profile.

use std::collections::HashMap;

use super::leaf::LeafId;
use super::sample::{Point, Sample, SampleKind, StackId};
use super::spans::LinkId;

/// What all points of a sample have in common.
type SamplePlace = (StackId, LeafId, Option<LinkId>, SampleKind);

#[derive(Clone, Debug, Default)]
pub(super) struct SampleList {
    samples: Vec<Sample>,
    places: HashMap<SamplePlace, usize>,
    bytes: usize,
}

impl SampleList {
    /// The memory of a sample, with its entry in the map and the initial capacity for its points.
    const BYTES_A_SAMPLE: usize = 256;

    pub(super) fn add(&mut self, place: SamplePlace, point: Point) {
        self.bytes += size_of::<Point>();
        let (stack, leaf, link, kind) = place;
        let place = *self.places.entry(place).or_insert_with(|| {
            self.bytes += Self::BYTES_A_SAMPLE;
            self.samples.push(Sample { stack, leaf, link, kind, points: Vec::new() });
            self.samples.len() - 1
        });
        if let Some(sample) = self.samples.get_mut(place) {
            let later = sample.points.partition_point(|p| p.time_unix_ns <= point.time_unix_ns);
            sample.points.insert(later, point);
        }
    }

    /// Adds to the point at that place, which has no time and no thread.
    pub(super) fn add_weight(&mut self, place: SamplePlace, weight: u64) {
        let known = self.places.get(&place);
        let known = known.and_then(|known| self.samples.get_mut(*known)?.points.first_mut());
        match known {
            Some(point) => point.weight = point.weight.saturating_add(weight),
            None => self.add(place, Point { time_unix_ns: 0, weight, thread: None }),
        }
    }

    pub(super) fn list(&self) -> &[Sample] {
        &self.samples
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Sample> {
        self.samples.iter_mut()
    }

    #[cfg(test)]
    pub(super) fn keep_only(&mut self, kind: SampleKind) {
        self.samples.retain(|sample| sample.kind == kind);
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}
