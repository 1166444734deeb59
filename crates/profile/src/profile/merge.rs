//! Sums of profiles by stack.

use std::collections::HashMap;

use super::leaf::{Leaf, LeafId};
use super::model::{Line, Location, LocationId, Profile};
use super::sample::StackId;

/// What happens to the weight of a sample.
#[derive(Debug)]
pub enum Placed {
    AtItsStack(u64),
    /// One sample of each kind has it, without a stack.
    WithOthers(u64),
}

const OTHERS: &str = "[other stacks]";

/// Adds the weights of another profile's samples by stack: without times, threads, spans and addresses, which differ
/// between spans that do the same. What has no weight is left out.
pub fn add_stacks(to: &mut Profile, other: &Profile, mut place: impl FnMut(u64) -> Placed) {
    let mut locations: HashMap<LocationId, LocationId> = HashMap::new();
    let mut places: HashMap<(StackId, LeafId), (StackId, LeafId)> = HashMap::new();
    for sample in other.samples() {
        let weight = match place(sample.total()) {
            Placed::AtItsStack(weight) => weight,
            Placed::WithOthers(weight) => {
                let others = to.add_remark(OTHERS);
                let place = (to.add_stack(vec![others]), to.add_leaf(Leaf::of(sample.kind)));
                to.add_weight(sample.kind, place, weight);
                continue;
            }
        };
        if weight == 0 {
            continue;
        }
        let from = (sample.stack, sample.leaf);
        let place = match places.get(&from) {
            Some(place) => *place,
            None => {
                let ids = other.location_ids(sample.stack);
                let stack = ids.map(|id| copy_location(to, other, id, &mut locations));
                let stack: Vec<_> = stack.collect();
                let leaf = other.leaf(sample.leaf).map_or(Leaf::of(sample.kind), without_address);
                let place = (to.add_stack(stack), to.add_leaf(leaf));
                *places.entry(from).or_insert(place)
            }
        };
        to.add_weight(sample.kind, place, weight);
    }
}

fn copy_location(
    to: &mut Profile,
    other: &Profile,
    id: LocationId,
    known: &mut HashMap<LocationId, LocationId>,
) -> LocationId {
    if let Some(known) = known.get(&id) {
        return *known;
    }
    let copy = match other.location(id) {
        Some(location) => {
            let mapping = location.mapping.and_then(|mapping| other.mapping(mapping));
            let mapping = mapping.map(|mapping| to.add_mapping(mapping.clone()));
            let lines = location.lines.iter().filter_map(|line| {
                let function = to.add_function(other.function(line.function)?.clone());
                to.set_origin(function, other.origin(line.function));
                Some(Line { function, ..*line })
            });
            let lines: Vec<_> = lines.collect();
            // Without a name, the address is all that is known.
            let address = if lines.is_empty() { location.address } else { 0 };
            to.add_location(Location { mapping, address, lines, ..location.clone() })
        }
        None => to.add_remark("[unknown]"),
    };
    known.insert(id, copy);
    copy
}

/// The address of a lock and who holds it differ between processes.
fn without_address(leaf: &Leaf) -> Leaf {
    match leaf {
        Leaf::Blocked(text) | Leaf::BlockedBy(text, _) => {
            Leaf::Blocked(text.split(" 0x").next().unwrap_or_default().to_owned())
        }
        other => other.clone(),
    }
}
