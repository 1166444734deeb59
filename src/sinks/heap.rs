//! The live heap: by which code the blocks in use were allocated, and what has grown.

use std::collections::HashMap;

use super::aggregate::{Aggregate, Total};
use super::stack::{Stack, StackEntry};
use super::stack_tree::{StackTree, StoredStack};
use crate::inbox::HeapUse;
use crate::profile::SampleKind;
use crate::stats::Counters;
use crate::sys;

/// All sampled allocations of the process, by stack, and the sampled blocks in use.
#[derive(Default)]
pub(crate) struct Heap {
    /// All that each stack has allocated: bytes, and the number of blocks.
    allocated: Aggregate,
    /// By place. A later block of a place replaces the one before, which has been freed.
    blocks: HashMap<u32, HeapBlock>,
    /// What was in use at the last request for what has grown.
    seen: HashMap<StoredStack, Total>,
}

struct HeapBlock {
    uses: u32,
    stack: StoredStack,
    total: Total,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeapPart {
    /// All that was allocated, and what of it is in use.
    All,
    /// What is in use and was not at the last request of this kind.
    Growth,
}

impl Heap {
    pub(crate) fn add(&mut self, heap: HeapUse, stack: &Stack, total: Total, counters: &Counters) {
        let counters = &counters.allocations;
        if heap == HeapUse::None {
            return;
        }
        let stack = self.allocated.add(stack.entries(), (), total);
        match heap {
            HeapUse::Tracked(block) => {
                let new = HeapBlock { uses: block.uses, stack, total };
                self.blocks.insert(block.place, new);
                Counters::add(&counters.tracked, 1);
            }
            _ => Counters::add(&counters.dropped_not_tracked, 1),
        }
    }

    pub(crate) fn stacks(&self) -> &StackTree<StackEntry> {
        &self.allocated.stacks
    }

    /// What each stack has allocated since `seen`, which becomes what it has allocated until now.
    pub(crate) fn allocated_since(
        &self,
        seen: &mut HashMap<StoredStack, Total>,
    ) -> Vec<(StoredStack, Total)> {
        let more = self.allocated.totals().map(|(stack, (), total)| {
            (stack, total.since(seen.insert(stack, total).unwrap_or_default()))
        });
        more.filter(|(_, total)| total.count > 0).collect()
    }

    fn in_use(&mut self) -> HashMap<StoredStack, Total> {
        let mut in_use: HashMap<_, Total> = HashMap::new();
        self.blocks.retain(|place, block| {
            let is_in_use = sys::TrackedBlock { place: *place, uses: block.uses }.is_in_use();
            if is_in_use {
                in_use.entry(block.stack).or_default().add(block.total);
            }
            is_in_use
        });
        in_use
    }

    pub(crate) fn weights(&mut self, part: HeapPart) -> Vec<(StoredStack, Vec<(SampleKind, u64)>)> {
        let mut in_use = self.in_use();
        let is_growth = part == HeapPart::Growth;
        if is_growth {
            let seen = std::mem::replace(&mut self.seen, in_use.clone());
            let of_stack = |stack: &StoredStack| seen.get(stack).copied().unwrap_or_default();
            in_use.iter_mut().for_each(|(stack, now)| *now = now.since(of_stack(stack)));
        }
        let weights = |(stack, (), allocated): (StoredStack, (), Total)| {
            let allocated = if is_growth { Total::default() } else { allocated };
            let now = in_use.get(&stack).copied().unwrap_or_default();
            let weights = [
                (SampleKind::AllocatedBytes, allocated.weight),
                (SampleKind::Allocations, allocated.count),
                (SampleKind::InUseBytes, now.weight),
                (SampleKind::InUseBlocks, now.count),
            ];
            (stack, weights.into_iter().filter(|(_, weight)| *weight > 0).collect::<Vec<_>>())
        };
        let weights = self.allocated.totals().map(weights);
        weights.filter(|(_, weights)| !weights.is_empty()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unwind::ModuleAddress;

    fn stack(address: u64) -> Stack {
        Stack { frames: vec![ModuleAddress::new(None, address)], ..Stack::new() }
    }

    #[test]
    fn allocations_add_up_by_stack() {
        let (mut heap, counters) = (Heap::default(), Counters::default());
        let mut add = |use_of, address, weight| {
            heap.add(use_of, &stack(address), Total { weight, count: 2 }, &counters);
        };
        for (address, bytes) in [(1, 10), (2, 20), (1, 30)] {
            add(HeapUse::NotTracked, address, bytes);
        }
        add(HeapUse::None, 1, 7);
        let weights = heap.weights(HeapPart::All);
        let weights: Vec<_> = weights.into_iter().flat_map(|(_, weights)| weights).collect();
        let (bytes, count) = (SampleKind::AllocatedBytes, SampleKind::Allocations);
        assert_eq!(weights, [(bytes, 40), (count, 4), (bytes, 20), (count, 2)]);
        assert_eq!(counters.snapshot().allocations.dropped_not_tracked, 3);
        let mut seen = HashMap::new();
        let since = |heap: &Heap, seen: &mut HashMap<_, _>| {
            let more = heap.allocated_since(seen).into_iter();
            more.map(|(_, total)| (total.weight, total.count)).collect::<Vec<_>>()
        };
        assert_eq!(since(&heap, &mut seen), [(40, 4), (20, 2)]);
        let tracked = HeapUse::Tracked(sys::TrackedBlock { place: u32::MAX, uses: u32::MAX });
        heap.add(tracked, &stack(2), Total { weight: 5, count: 1 }, &counters);
        assert_eq!(counters.snapshot().allocations.tracked, 1);
        assert_eq!(since(&heap, &mut seen), [(5, 1)]);
        assert_eq!(since(&heap, &mut seen), []);
        let grown = heap.weights(HeapPart::Growth);
        assert!(grown.is_empty(), "nothing is known to be in use");
    }
}
