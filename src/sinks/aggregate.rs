//! Sums of samples by stack.

use std::collections::BTreeMap;

use super::stack::{Stack, StackEntry, StackLeaf};
use super::stack_tree::{StackTree, StoredStack};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Total {
    pub(crate) weight: u64,
    pub(crate) count: u64,
}

impl Total {
    pub(crate) fn add(&mut self, more: Self) {
        self.weight = self.weight.saturating_add(more.weight);
        self.count = self.count.saturating_add(more.count);
    }

    pub(super) fn since(self, before: Self) -> Self {
        let weight = self.weight.saturating_sub(before.weight);
        Self { weight, count: self.count.saturating_sub(before.count) }
    }
}

/// The memory for stacks. Those beyond share one.
const MOST_BYTES: usize = 16 << 20;

/// The totals of samples by stack, and by what else tells them apart, in bounded memory.
#[derive(Default)]
pub(crate) struct Aggregate<K = ()> {
    pub(crate) stacks: StackTree<StackEntry>,
    totals: BTreeMap<(StoredStack, K), Total>,
}

impl<K: Copy + Ord> Aggregate<K> {
    pub(crate) fn add(
        &mut self,
        stack: impl DoubleEndedIterator<Item = StackEntry> + Clone,
        key: K,
        more: Total,
    ) -> StoredStack {
        let stack = self.store(stack);
        self.add_stored(stack, key, more);
        stack
    }

    pub(crate) fn store(
        &mut self,
        stack: impl DoubleEndedIterator<Item = StackEntry> + Clone,
    ) -> StoredStack {
        let left = MOST_BYTES.saturating_sub(self.bytes());
        self.stacks.add_within(stack, left).unwrap_or_else(|| {
            let waited = Some(StackLeaf::OtherStacks);
            self.stacks.add(Stack { waited, ..Stack::new() }.entries())
        })
    }

    pub(crate) fn add_stored(&mut self, stack: StoredStack, key: K, more: Total) {
        self.totals.entry((stack, key)).or_default().add(more);
    }

    pub(crate) fn totals(&self) -> impl Iterator<Item = (StoredStack, K, Total)> {
        self.totals.iter().map(|((stack, key), total)| (*stack, *key, *total))
    }

    pub(crate) fn is_full(&self) -> bool {
        self.bytes() >= MOST_BYTES
    }

    fn bytes(&self) -> usize {
        self.stacks.bytes() + self.totals.len() * size_of::<((StoredStack, K), Total)>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unwind::ModuleAddress;

    #[test]
    fn stacks_beyond_the_limit_share_one() {
        let mut aggregate = Aggregate::default();
        let deep = |number| {
            let frames = (0..256_u64).map(|frame| ModuleAddress::new(None, number << 32 | frame));
            Stack { frames: frames.collect(), ..Stack::new() }
        };
        for number in 0..5_000_u64 {
            aggregate.add(deep(number).entries(), (), Total { weight: 3, count: 1 });
        }
        assert!(aggregate.bytes() <= MOST_BYTES + 1_024);
        let (others, _, _) = aggregate.totals().last().unwrap();
        let mut others = aggregate.stacks.frames(others);
        assert_eq!(others.next(), Some(StackEntry::StackLeaf(StackLeaf::OtherStacks)));
        let mut all = Total::default();
        aggregate.totals().for_each(|(_, _, total)| all.add(total));
        assert_eq!(all, Total { weight: 15_000, count: 5_000 });
    }
}
