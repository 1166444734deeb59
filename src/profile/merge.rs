//! Sums of profiles by stack.

use std::collections::HashMap;

use super::leaf::{Leaf, LeafId};
use super::model::{Line, Location, LocationId, Profile};
use super::sample::{Sample, StackId};

impl Profile {
    /// Adds the weights of another profile's samples, each scaled, by stack: without times, threads, spans and addresses,
    /// which differ between spans that do the same. What is scaled to 0 is left out.
    pub(crate) fn add_stacks_of(&mut self, other: &Self, scale: impl Fn(u64) -> u64) {
        let mut locations: HashMap<LocationId, LocationId> = HashMap::new();
        let mut places: HashMap<(StackId, LeafId), (StackId, LeafId)> = HashMap::new();
        for sample in other.samples() {
            let weight = scale(sample.total());
            if weight == 0 {
                continue;
            }
            let from = (sample.stack, sample.leaf);
            let place = match places.get(&from) {
                Some(place) => *place,
                None => {
                    let ids = other.location_ids(sample.stack);
                    let stack = ids.map(|id| self.copy_location(other, id, &mut locations));
                    let stack: Vec<_> = stack.collect();
                    let leaf =
                        other.leaf(sample.leaf).map_or(Leaf::of(sample.kind), without_address);
                    let place = (self.add_stack(stack), self.add_leaf(leaf));
                    *places.entry(from).or_insert(place)
                }
            };
            self.add_weight(sample.kind, place, weight);
        }
    }

    /// What each sample has.
    pub(crate) fn weights(&self) -> Vec<u64> {
        self.samples().iter().map(Sample::total).collect()
    }

    fn copy_location(
        &mut self,
        other: &Self,
        id: LocationId,
        known: &mut HashMap<LocationId, LocationId>,
    ) -> LocationId {
        if let Some(known) = known.get(&id) {
            return *known;
        }
        let copy = match other.location(id) {
            Some(location) => {
                let mapping = location.mapping.and_then(|mapping| other.mapping(mapping));
                let mapping = mapping.map(|mapping| self.add_mapping(mapping.clone()));
                let lines = location.lines.iter().filter_map(|line| {
                    let function = self.add_function(other.function(line.function)?.clone());
                    self.set_origin(function, other.origin(line.function));
                    Some(Line { function, ..*line })
                });
                let lines: Vec<_> = lines.collect();
                // Without a name, the address is all that is known.
                let address = if lines.is_empty() { location.address } else { 0 };
                self.add_location(Location { mapping, address, lines, ..location.clone() })
            }
            None => self.add_remark("[unknown]"),
        };
        known.insert(id, copy);
        copy
    }
}

/// The address of a lock differs between processes.
fn without_address(leaf: &Leaf) -> Leaf {
    match leaf {
        Leaf::Blocked(text) => {
            Leaf::Blocked(text.split(" 0x").next().unwrap_or_default().to_owned())
        }
        other => other.clone(),
    }
}
