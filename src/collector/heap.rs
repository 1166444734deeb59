//! The live heap: by which code the blocks in use were allocated, and what has grown.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;

use super::aggregate::{Aggregate, Total};
use super::build::ProfileInputs;
use super::command::Command;
use super::engine::Engine;
use super::stack::{Stack, StackEntry};
use crate::ids::ProfileId;
use crate::inbox::HeapUse;
use crate::profile::{Profile, SampleKind, StackId, StackTree};
use crate::publish::{Job, Question};
use crate::stats::Counters;
use crate::sys;

/// The memory for stacks.
const MOST_BYTES: usize = 16 << 20;
/// How long the caller waits for the layer's threads, which read symbols.
const LONGEST: Duration = Duration::from_secs(30);

/// All sampled allocations of the process, by stack, and the sampled blocks in use.
#[derive(Debug)]
pub(super) struct Heap {
    /// All that each stack has allocated: bytes, and the number of blocks.
    allocated: Aggregate,
    /// By place. A later block of a place replaces the one before, which has been freed.
    blocks: HashMap<u32, HeapBlock>,
    /// What was in use at the last look.
    seen: HashMap<StackId, Total>,
    /// What is seen once the last answer is found to have been taken.
    answered: Option<(HashMap<StackId, Total>, Arc<AtomicBool>)>,
}

#[derive(Debug)]
struct HeapBlock {
    uses: u32,
    stack: StackId,
    total: Total,
}

impl Default for Heap {
    fn default() -> Self {
        let (allocated, answered) = (Aggregate::new(MOST_BYTES), None);
        Self { allocated, blocks: HashMap::new(), seen: HashMap::new(), answered }
    }
}

/// A request for the profile of the live heap.
#[derive(Debug)]
pub(super) struct HeapRequest {
    part: HeapPart,
    reply: Question<Profile>,
    /// Whether the caller has the answer. Set by the caller, whose next request may come right after that.
    is_taken: Arc<AtomicBool>,
}

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeapPart {
    /// All that was allocated, and what of it is in use.
    All,
    /// What is in use and was not at the last request of this kind.
    Growth,
}

impl Heap {
    /// Adds what a sample represents.
    pub(super) fn add(&mut self, heap: HeapUse, stack: &Stack, total: Total, counters: &Counters) {
        let counters = &counters.allocations;
        if heap == HeapUse::None {
            return;
        }
        let stack = self.allocated.add(stack.entries(), total);
        match heap {
            HeapUse::Tracked(block) => {
                let new = HeapBlock { uses: block.uses, stack, total };
                self.blocks.insert(block.place, new);
                Counters::add(&counters.tracked, 1);
            }
            _ => Counters::add(&counters.dropped_not_tracked, 1),
        }
    }

    pub(super) fn stacks(&self) -> &StackTree<StackEntry> {
        &self.allocated.stacks
    }

    /// What of each stack is in use.
    fn in_use(&mut self) -> HashMap<StackId, Total> {
        let mut in_use: HashMap<_, Total> = HashMap::new();
        self.blocks.retain(|place, block| {
            let is_in_use = sys::is_in_use(sys::TrackedBlock { place: *place, uses: block.uses });
            if is_in_use {
                in_use.entry(block.stack).or_default().add(block.total);
            }
            is_in_use
        });
        in_use
    }

    /// What a profile shows of each stack. The caller sets `is_taken` once it has the answer.
    fn weights(
        &mut self,
        part: HeapPart,
        is_taken: &Arc<AtomicBool>,
    ) -> Vec<(StackId, Vec<(SampleKind, u64)>)> {
        let answered = self.answered.take_if(|_| part == HeapPart::Growth);
        if let Some((seen, was_taken)) = answered
            && was_taken.load(Ordering::Relaxed)
        {
            self.seen = seen;
        }
        let in_use = self.in_use();
        if part == HeapPart::Growth {
            self.answered = Some((in_use.clone(), Arc::clone(is_taken)));
        }
        let weights = |(stack, allocated): (StackId, Total)| {
            let of_stack =
                |of: &HashMap<StackId, Total>| of.get(&stack).copied().unwrap_or_default();
            let (now, none) = (of_stack(&in_use), Total::default());
            let (allocated, seen) = match part {
                HeapPart::All => (allocated, none),
                HeapPart::Growth => (none, of_stack(&self.seen)),
            };
            let weights = [
                (SampleKind::AllocatedBytes, allocated.weight),
                (SampleKind::Allocations, allocated.count),
                (SampleKind::InUseBytes, now.weight.saturating_sub(seen.weight)),
                (SampleKind::InUseBlocks, now.count.saturating_sub(seen.count)),
            ];
            (stack, weights.into_iter().filter(|(_, weight)| *weight > 0).collect::<Vec<_>>())
        };
        let weights = self.allocated.totals().map(weights);
        weights.filter(|(_, weights)| !weights.is_empty()).collect()
    }
}

/// Makes the profile of the live heap, which is empty if it is not tracked.
pub(super) fn make_heap(heap: &mut Heap, inputs: ProfileInputs<'_>, request: HeapRequest) -> Job {
    let HeapRequest { part, reply, is_taken } = request;
    let id = ProfileId::random().unwrap_or(ProfileId::NONE);
    let weights = heap.weights(part, &is_taken).into_iter();
    let weights = weights.map(|(stack, weights)| (heap.stacks().frames(stack), 0, weights));
    let (mut profile, modules) = inputs.profile_of_stacks(id, weights);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    profile.set_moment(u64::try_from(now.as_nanos()).unwrap_or(0));
    profile.name = "heap".to_owned();
    profile.title = match part {
        HeapPart::All => "What is in use, and all that was allocated".to_owned(),
        HeapPart::Growth => "What has grown since the last request".to_owned(),
    };
    // If the caller no longer waits, the next request for growth covers this one.
    Job::Reply { profile: Box::new(profile), modules, reply }
}

/// Whether the live heap is tracked.
fn is_tracked(engine: &Engine) -> bool {
    engine.copied.allocations.tracks_heap() && sys::counts_allocations()
}

/// Tracks the heap if no other layer does that any more. Once rules are off and all spans have closed, nothing else needs
/// to know what is allocated.
pub(super) fn update_counting(engine: &Engine) {
    if engine.copied.allocations.can_claim_heap() {
        // Blocks are tracked only while all frees are counted.
        engine.gate.set_counts_allocations(true);
        engine.copied.allocations.claim_heap();
    }
    let is_counting = engine.gate.counts_allocations() && !is_tracked(engine);
    if is_counting && engine.callsites.are_off() && !engine.spans.has_any_open() {
        engine.gate.set_counts_allocations(false);
        // New rules may have been set in the meantime.
        if !engine.callsites.are_off() {
            engine.gate.set_counts_allocations(true);
        }
    }
}

/// Why there is no profile of the live heap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoHeap {
    NotTracked,
    /// The layer's threads did not answer in time.
    NoAnswer,
}

/// The profile of the live heap.
pub(crate) fn heap_profile(engine: &Engine, part: HeapPart) -> Result<Profile, NoHeap> {
    /// One at a time: each takes memory and the time of the layer's threads.
    static ASKING: Mutex<()> = Mutex::new(());
    if !is_tracked(engine) {
        return Err(NoHeap::NotTracked);
    }
    let deadline = Instant::now() + LONGEST;
    let _asking = ASKING.try_lock_until(deadline).ok_or(NoHeap::NoAnswer)?;
    let (reply, wait) = engine.commands.questions.ask().ok_or(NoHeap::NoAnswer)?;
    let is_taken = Arc::new(AtomicBool::new(false));
    let request = HeapRequest { part, reply, is_taken: Arc::clone(&is_taken) };
    if !engine.ask(Command::Heap(request)) {
        return Err(NoHeap::NoAnswer);
    }
    let profile = wait.recv_deadline(deadline).map_err(|_| NoHeap::NoAnswer)?;
    is_taken.store(true, Ordering::Relaxed);
    Ok(profile)
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
        let taken = Arc::default();
        let weights = heap.weights(HeapPart::All, &taken);
        let weights: Vec<_> = weights.into_iter().flat_map(|(_, weights)| weights).collect();
        let (bytes, count) = (SampleKind::AllocatedBytes, SampleKind::Allocations);
        assert_eq!(weights, [(bytes, 40), (count, 4), (bytes, 20), (count, 2)]);
        assert_eq!(counters.snapshot().allocations.dropped_not_tracked, 3);
        let grown = heap.weights(HeapPart::Growth, &taken);
        assert!(grown.is_empty(), "nothing is known to be in use");
    }
}
