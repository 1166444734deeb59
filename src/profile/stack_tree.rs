//! Stacks that share what their callers have in common.

use std::collections::HashMap;
use std::hash::{BuildHasher as _, Hash};

use super::table::{TableId as _, handle};

handle! {
    /// A stack: the index of its innermost call.
    StackId
}

impl StackId {
    /// The empty stack.
    pub(super) const EMPTY: Self = Self(u32::MAX);
}

/// A frame on a stack. Stacks with the same callers share these nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct StackNode<F> {
    caller: StackId,
    frame: F,
}

/// Stacks of frames, each frame once for all stacks with the same callers.
#[derive(Clone, Debug)]
pub(crate) struct StackTree<F> {
    /// Each with how many nodes and stacks use it; 0 if it is free.
    nodes: Vec<(StackNode<F>, u32)>,
    /// By their hash. Of two with the same one, the second is not found: it is there more than once.
    places: HashMap<u64, StackId>,
    free: Vec<StackId>,
    /// The nodes of the stack that was added last, from the outermost on: the next one has most of them, too.
    last: Vec<StackId>,
}

impl<F> Default for StackTree<F> {
    fn default() -> Self {
        let (nodes, places) = (Vec::new(), HashMap::new());
        Self { nodes, places, free: Vec::new(), last: Vec::new() }
    }
}

impl<F: Copy + Eq + Hash> StackTree<F> {
    /// The approximate memory of a node: in the list and in the map, both of which may just have grown.
    pub(crate) const BYTES_A_NODE: usize = size_of::<(StackNode<F>, u32)>() + 48;

    /// Adds a stack, with the innermost frame first.
    pub(crate) fn add(&mut self, frames: impl DoubleEndedIterator<Item = F> + Clone) -> StackId {
        self.add_within(frames, usize::MAX).unwrap_or(StackId::EMPTY)
    }

    /// The same, if what is new of it takes no more memory than that.
    pub(crate) fn add_within(
        &mut self,
        frames: impl DoubleEndedIterator<Item = F> + Clone,
        most_bytes: usize,
    ) -> Option<StackId> {
        let mut rest = frames.rev().peekable();
        let (mut stack, mut depth) = (StackId::EMPTY, 0);
        while let Some(frame) = rest.peek() {
            let node = StackNode { caller: stack, frame: *frame };
            let last = self.last.get(depth).copied().filter(|last| self.is_node(*last, &node));
            if let Some(last) = last {
                stack = last;
            } else if let Some(known) = self.places.get(&self.hash(&node)).copied()
                && self.is_node(known, &node)
            {
                self.last.truncate(depth);
                self.last.push(known);
                stack = known;
            } else {
                break;
            }
            depth += 1;
            rest.next();
        }
        if rest.clone().count().saturating_mul(Self::BYTES_A_NODE) > most_bytes {
            return None;
        }
        self.last.truncate(depth);
        for frame in rest {
            stack = self.insert(StackNode { caller: stack, frame });
            self.last.push(stack);
        }
        self.add_use(stack);
        Some(stack)
    }

    /// Removes a stack that was added, once for each time.
    pub(crate) fn remove(&mut self, mut stack: StackId) {
        while let Some((node, uses)) = self.nodes.get_mut(stack.number() as usize) {
            *uses = uses.saturating_sub(1);
            if *uses > 0 {
                break;
            }
            let node = *node;
            let hash = self.hash(&node);
            if self.places.get(&hash) == Some(&stack) {
                self.places.remove(&hash);
            }
            self.free.push(stack);
            stack = node.caller;
        }
        if self.free.len() == self.nodes.len() {
            *self = Self::default();
        }
    }

    /// The frames of a stack, with the innermost first. Empty if there is no such stack.
    pub(crate) fn frames(&self, stack: StackId) -> impl Iterator<Item = F> {
        self.calls(stack).filter_map(|call| self.node(call)).map(|node| node.frame)
    }

    /// A stack, that of its caller, and so on.
    pub(crate) fn calls(&self, stack: StackId) -> impl Iterator<Item = StackId> {
        let some = |stack: StackId| (stack != StackId::EMPTY).then_some(stack);
        std::iter::successors(some(stack), move |call| some(self.node(*call)?.caller))
    }

    /// The innermost frame of a stack, and the stack of its caller.
    pub(crate) fn split(&self, stack: StackId) -> Option<(F, StackId)> {
        self.node(stack).map(|node| (node.frame, node.caller))
    }

    /// The caller of each stack, if it has one, and its innermost frame. If none was removed: in order of the ids, callers
    /// first.
    pub(crate) fn nodes(&self) -> impl Iterator<Item = (Option<StackId>, F)> {
        let caller = |node: &StackNode<F>| Some(node.caller).filter(|it| *it != StackId::EMPTY);
        let used = self.nodes.iter().filter(|(_, uses)| *uses > 0);
        used.map(move |(node, _)| (caller(node), node.frame))
    }

    /// The number of nodes in use.
    pub(crate) fn len(&self) -> usize {
        self.nodes.len() - self.free.len()
    }

    /// The approximate memory use.
    pub(crate) fn bytes(&self) -> usize {
        self.len() * Self::BYTES_A_NODE
    }

    fn node(&self, stack: StackId) -> Option<&StackNode<F>> {
        self.nodes.get(stack.number() as usize).map(|(node, _)| node)
    }

    fn is_node(&self, stack: StackId, node: &StackNode<F>) -> bool {
        let found = self.nodes.get(stack.number() as usize);
        found.is_some_and(|(found, uses)| *uses > 0 && found == node)
    }

    fn hash(&self, node: &StackNode<F>) -> u64 {
        self.places.hasher().hash_one(node)
    }

    fn add_use(&mut self, stack: StackId) {
        if let Some((_, uses)) = self.nodes.get_mut(stack.number() as usize) {
            *uses = uses.saturating_add(1);
        }
    }

    fn insert(&mut self, node: StackNode<F>) -> StackId {
        self.add_use(node.caller);
        let free = self.free.pop();
        // More than four billion nodes do not fit into memory.
        let place = free.unwrap_or(StackId(u32::try_from(self.nodes.len()).unwrap_or(u32::MAX)));
        match self.nodes.get_mut(place.number() as usize) {
            Some(entry) => *entry = (node, 0),
            None => self.nodes.push((node, 0)),
        }
        self.places.entry(self.hash(&node)).or_insert(place);
        place
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn add(tree: &mut StackTree<u8>, stack: &str) -> StackId {
        tree.add(stack.bytes())
    }

    fn frames(tree: &StackTree<u8>, stack: StackId) -> String {
        tree.frames(stack).map(char::from).collect()
    }

    #[test]
    fn stacks_share_their_callers() {
        let mut tree = StackTree::default();
        let [leaf, other, again] = ["cba", "dba", "cba"].map(|stack| add(&mut tree, stack));
        assert_eq!((leaf, tree.bytes()), (again, 4 * StackTree::<u8>::BYTES_A_NODE));
        assert_eq!([leaf, other].map(|stack| frames(&tree, stack)), ["cba", "dba"]);
        let nodes: String = tree.nodes().map(|(_, frame)| char::from(frame)).collect();
        assert_eq!(nodes, "abcd", "callers first");
        assert_eq!(add(&mut tree, ""), StackId::EMPTY);
        assert_eq!(frames(&tree, StackId::EMPTY), "");
    }

    #[test]
    fn what_no_stack_has_any_more_is_free() {
        let mut tree = StackTree::default();
        let node = StackTree::<u8>::BYTES_A_NODE;
        let [leaf, other, again] = ["cba", "dxa", "cba"].map(|stack| add(&mut tree, stack));
        assert_eq!(tree.bytes(), 5 * node);
        tree.remove(leaf);
        assert_eq!(tree.bytes(), 5 * node, "it was added twice");
        tree.remove(again);
        assert_eq!((tree.bytes(), frames(&tree, other).as_str()), (3 * node, "dxa"));
        // The free nodes are used again, and no stack is found in them.
        let new = ["cba", "fexa", "cbxa"].map(|stack| add(&mut tree, stack));
        assert_eq!(new.map(|stack| frames(&tree, stack)), ["cba", "fexa", "cbxa"]);
        assert_eq!(tree.bytes(), (3 + 2 + 2 + 2) * node);
        new.into_iter().chain([other]).for_each(|stack| tree.remove(stack));
        assert_eq!((tree.bytes(), tree.nodes.capacity()), (0, 0));
    }

    #[test]
    fn only_what_is_new_of_a_stack_takes_memory() {
        let mut tree = StackTree::default();
        let node = StackTree::<u8>::BYTES_A_NODE;
        assert_eq!(tree.add_within("ba".bytes(), 2 * node - 1), None);
        assert_eq!(tree.bytes(), 0);
        assert!(tree.add_within("ba".bytes(), 2 * node).is_some());
        assert!(tree.add_within("cba".bytes(), node).is_some());
        assert!(tree.add_within("ba".bytes(), 0).is_some());
        assert_eq!(tree.add_within("dba".bytes(), node - 1), None);
    }

    #[test]
    fn nodes_with_the_same_hash_are_distinct() {
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        struct Alike(u8);
        impl Hash for Alike {
            fn hash<S: std::hash::Hasher>(&self, _: &mut S) {}
        }
        let mut tree = StackTree::default();
        let stacks = [1, 2, 3, 2].map(|number| tree.add([Alike(number)].into_iter()));
        for (stack, number) in stacks.into_iter().zip([1, 2, 3, 2]) {
            assert_eq!(tree.frames(stack).collect::<Vec<_>>(), [Alike(number)]);
        }
        stacks.into_iter().for_each(|stack| tree.remove(stack));
        assert_eq!(tree.bytes(), 0);
    }
}
