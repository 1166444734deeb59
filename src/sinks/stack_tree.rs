//! Stacks that share what their callers have in common.

use std::collections::HashMap;
use std::hash::Hash;

/// A stored stack: the index of its innermost run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct StoredStack(pub(super) u32);

impl StoredStack {
    /// The highest bit is not used.
    const EMPTY: Self = Self(u32::MAX >> 1);
}

/// Adjacent frames of a stack: nothing in the tree ends or branches between them.
#[derive(Clone, Debug)]
struct Run<F> {
    caller: StoredStack,
    /// The outermost first.
    frames: Box<[F]>,
    /// How many runs and stacks are on top of it; 0 if it is free.
    uses: u32,
}

/// Stacks of frames, each frame once for all stacks with the same callers. It is a radix tree: deep stacks with little in
/// common, as of recursive code, take no more than their frames.
#[derive(Clone, Debug)]
pub(crate) struct StackTree<F> {
    runs: Vec<Run<F>>,
    /// By their caller and their outermost frame.
    places: HashMap<(StoredStack, F), StoredStack>,
    free: Vec<StoredStack>,
    frames: usize,
}

impl<F> Default for StackTree<F> {
    fn default() -> Self {
        Self { runs: Vec::new(), places: HashMap::new(), free: Vec::new(), frames: 0 }
    }
}

impl<F: Copy + Eq + Hash> StackTree<F> {
    /// The approximate memory of a run without its frames: in the list and in the map, both of which may just have grown,
    /// and of the allocation of its frames.
    const BYTES_A_RUN: usize =
        2 * (size_of::<Run<F>>() + size_of::<(StoredStack, F, StoredStack)>()) + 16;

    /// Adds a stack, with the innermost frame first.
    pub(crate) fn add(
        &mut self,
        frames: impl DoubleEndedIterator<Item = F> + Clone,
    ) -> StoredStack {
        self.add_within(frames, usize::MAX).unwrap_or(StoredStack::EMPTY)
    }

    /// Like [`add`](Self::add), but only if what is new of the stack takes at most `most_bytes` of memory.
    pub(crate) fn add_within(
        &mut self,
        frames: impl DoubleEndedIterator<Item = F> + Clone,
        most_bytes: usize,
    ) -> Option<StoredStack> {
        let mut rest = frames.rev();
        let (mut stack, mut split_at) = (StoredStack::EMPTY, None);
        while let Some(first) = rest.clone().next()
            && let Some(place) = self.places.get(&(stack, first)).copied()
            && let Some(run) = self.run(place)
        {
            let mut next = rest.clone();
            let is_next = |frame: &&F| next.next() == Some(**frame);
            let common = run.frames.iter().take_while(is_next).count();
            rest.by_ref().take(common).for_each(drop);
            stack = place;
            if common < run.frames.len() {
                split_at = Some(common);
                break;
            }
        }
        let new = rest.clone().count();
        let runs = usize::from(split_at.is_some()) + usize::from(new > 0);
        if runs * Self::BYTES_A_RUN + new * size_of::<F>() > most_bytes {
            return None;
        }
        if let Some(at) = split_at {
            stack = self.split(stack, at);
        }
        if new > 0 {
            self.add_use(stack);
            self.frames += new;
            stack = self.insert(Run { caller: stack, frames: rest.collect(), uses: 0 });
        }
        self.add_use(stack);
        Some(stack)
    }

    /// Removes a stack that was added, once for each time.
    pub(crate) fn remove(&mut self, mut stack: StoredStack) {
        while let Some(run) = self.runs.get_mut(stack.0 as usize) {
            run.uses = run.uses.saturating_sub(1);
            if run.uses > 0 {
                break;
            }
            let (caller, frames) = (run.caller, std::mem::take(&mut run.frames));
            self.frames -= frames.len();
            if let Some(first) = frames.first() {
                self.places.remove(&(caller, *first));
            }
            self.free.push(stack);
            stack = caller;
        }
        if self.free.len() == self.runs.len() {
            *self = Self::default();
        }
    }

    /// The frames of a stack, with the innermost first. Empty if there is no such stack.
    pub(crate) fn frames(&self, stack: StoredStack) -> impl Iterator<Item = F> {
        let runs = std::iter::successors(self.run(stack), |run| self.run(run.caller));
        runs.flat_map(|run| run.frames.iter().rev().copied())
    }

    /// The number of frames of all stacks, those that stacks share once.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.frames
    }

    pub(crate) fn bytes(&self) -> usize {
        self.runs.len() * Self::BYTES_A_RUN + self.frames * size_of::<F>()
    }

    fn run(&self, stack: StoredStack) -> Option<&Run<F>> {
        self.runs.get(stack.0 as usize)
    }

    fn add_use(&mut self, stack: StoredStack) {
        if let Some(run) = self.runs.get_mut(stack.0 as usize) {
            run.uses = run.uses.saturating_add(1);
        }
    }

    /// Splits a run, which remains what is on top of its first frames. Returns those.
    fn split(&mut self, upper: StoredStack, at: usize) -> StoredStack {
        let Some(run) = self.runs.get_mut(upper.0 as usize) else { return StoredStack::EMPTY };
        let (outer, inner) = run.frames.split_at(at);
        let lower = Run { caller: run.caller, frames: outer.into(), uses: 1 };
        let first = inner.first().copied();
        run.frames = inner.into();
        let lower = self.insert(lower);
        if let Some(run) = self.runs.get_mut(upper.0 as usize) {
            run.caller = lower;
        }
        self.places.extend(first.map(|first| ((lower, first), upper)));
        lower
    }

    fn insert(&mut self, run: Run<F>) -> StoredStack {
        let place = self.free.pop();
        // More than two billion runs do not fit into memory.
        let place =
            place.unwrap_or(u32::try_from(self.runs.len()).map_or(StoredStack::EMPTY, StoredStack));
        let key = run.frames.first().map(|first| (run.caller, *first));
        self.places.extend(key.map(|key| (key, place)));
        match self.runs.get_mut(place.0 as usize) {
            Some(free) => *free = run,
            None => self.runs.push(run),
        }
        place
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUN: usize = StackTree::<u8>::BYTES_A_RUN;

    fn add(tree: &mut StackTree<u8>, stack: &str) -> StoredStack {
        tree.add(stack.bytes())
    }

    fn frames(tree: &StackTree<u8>, stack: StoredStack) -> String {
        tree.frames(stack).map(char::from).collect()
    }

    #[test]
    fn stacks_share_their_callers() {
        let mut tree = StackTree::default();
        let [leaf, other, again] = ["dcba", "xcba", "dcba"].map(|stack| add(&mut tree, stack));
        assert_eq!((leaf, tree.len(), tree.bytes()), (again, 5, 3 * RUN + 5));
        assert_eq!([leaf, other].map(|stack| frames(&tree, stack)), ["dcba", "xcba"]);
        // A stack that is the beginning of others.
        let part = add(&mut tree, "ba");
        assert_eq!((frames(&tree, part).as_str(), tree.len()), ("ba", 5));
        assert_eq!([leaf, other].map(|stack| frames(&tree, stack)), ["dcba", "xcba"]);
        assert_eq!(add(&mut tree, ""), StoredStack::EMPTY);
        assert_eq!(frames(&tree, StoredStack::EMPTY), "");
    }

    #[test]
    fn what_no_stack_has_any_more_is_free() {
        let mut tree = StackTree::default();
        let [leaf, other, again] = ["cba", "dxa", "cba"].map(|stack| add(&mut tree, stack));
        assert_eq!(tree.len(), 5);
        tree.remove(leaf);
        assert_eq!(tree.len(), 5, "it was added twice");
        tree.remove(again);
        assert_eq!((tree.len(), frames(&tree, other).as_str()), (3, "dxa"));
        // The free runs are used again, and no stack is found in them.
        let new = ["cba", "fexa", "cbxa"].map(|stack| add(&mut tree, stack));
        assert_eq!(new.map(|stack| frames(&tree, stack)), ["cba", "fexa", "cbxa"]);
        assert_eq!(tree.len(), 3 + 2 + 2 + 2);
        new.into_iter().chain([other]).for_each(|stack| tree.remove(stack));
        assert_eq!((tree.bytes(), tree.runs.capacity(), tree.places.capacity()), (0, 0, 0));
    }

    #[test]
    fn only_what_is_new_of_a_stack_takes_memory() {
        let mut tree = StackTree::default();
        assert_eq!(tree.add_within("cba".bytes(), RUN + 2), None);
        assert_eq!(tree.bytes(), 0);
        assert!(tree.add_within("cba".bytes(), RUN + 3).is_some());
        assert!(tree.add_within("cba".bytes(), 0).is_some());
        assert!(tree.add_within("dcba".bytes(), RUN + 1).is_some());
        // The run of the first two frames becomes one of its own.
        assert_eq!(tree.add_within("xba".bytes(), 2 * RUN), None);
        assert_eq!(tree.bytes(), 2 * RUN + 4);
        assert!(tree.add_within("xba".bytes(), 2 * RUN + 1).is_some());
        assert_eq!(tree.bytes(), 4 * RUN + 5);
    }

    /// Against a list of all stacks: what was added is found as long as it was not removed, and nothing stays after that.
    #[test]
    fn random_stacks_stay_as_they_were_added() {
        let mut random = 1_u64;
        let mut below = |limit: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) % limit
        };
        let (mut tree, mut known) = (StackTree::default(), Vec::new());
        for _ in 0..20_000 {
            if below(5) < 3 {
                let frames: Vec<u8> = (0..below(7)).map(|_| b'a' + below(3) as u8).collect();
                known.push((tree.add(frames.iter().copied()), frames));
            } else if !known.is_empty() {
                let (stack, frames) = known.swap_remove(below(known.len() as u64) as usize);
                assert_eq!(tree.frames(stack).collect::<Vec<_>>(), frames);
                tree.remove(stack);
            }
            if known.len() > 40 {
                known.drain(..30).for_each(|(stack, _)| tree.remove(stack));
            }
        }
        for (stack, frames) in &known {
            assert_eq!(tree.frames(*stack).collect::<Vec<_>>(), *frames);
        }
        known.into_iter().for_each(|(stack, _)| tree.remove(stack));
        assert_eq!((tree.len(), tree.bytes()), (0, 0));
    }
}
