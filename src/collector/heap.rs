//! The live heap: by which code the blocks in use were allocated, and what has grown.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;

use super::build::ProfileInputs;
use super::command::Command;
use super::engine::Engine;
use super::stack::{Stack, StackEntry, Waited};
use super::stack_tree::{StackTree, StoredStack};
use crate::ids::ProfileId;
use crate::inbox::{CopiedSample, HeapUse};
use crate::profile::{Profile, SampleKind};
use crate::publish::{Job, Question};
use crate::stats::Counters;
use crate::sys;

/// Stacks beyond that share one.
const MOST_BYTES: usize = 16 << 20;
/// How long the caller waits for the layer's threads, which read symbols.
const LONGEST: Duration = Duration::from_secs(30);

/// All sampled allocations of the process, by stack, and the sampled blocks in use.
#[derive(Debug, Default)]
pub(super) struct Heap {
    pub(super) stacks: StackTree<StackEntry>,
    /// All that each stack has allocated.
    allocated: BTreeMap<StoredStack, Amounts>,
    /// By place. A later block of a place replaces the one before, which has been freed.
    blocks: HashMap<u32, HeapBlock>,
    /// What was in use at the last look.
    seen: HashMap<StoredStack, Amounts>,
    /// What is seen once the last answer is found to have been taken.
    answered: Option<(HashMap<StoredStack, Amounts>, Arc<AtomicBool>)>,
}

#[derive(Debug)]
struct HeapBlock {
    uses: u32,
    stack: StoredStack,
    amounts: Amounts,
}

/// What samples represent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Amounts {
    bytes: u64,
    blocks: u64,
}

impl Amounts {
    fn add(&mut self, more: Self) {
        self.bytes = self.bytes.saturating_add(more.bytes);
        self.blocks = self.blocks.saturating_add(more.blocks);
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
    /// Adds a sample with its unwound stack.
    pub(super) fn add(&mut self, sample: &CopiedSample, stack: &Stack, counters: &Counters) {
        let counters = &counters.allocations;
        if sample.heap == HeapUse::None {
            return;
        }
        let [bytes, blocks] = sample.amounts.map(|amount| amount.weight);
        let amounts = Amounts { bytes, blocks };
        let stack = self.stored(stack);
        self.allocated.entry(stack).or_default().add(amounts);
        match sample.heap {
            HeapUse::Tracked(block) => {
                let new = HeapBlock { uses: block.uses, stack, amounts };
                self.blocks.insert(block.place, new);
                Counters::add(&counters.tracked, 1);
            }
            _ => Counters::add(&counters.dropped_not_tracked, 1),
        }
    }

    fn stored(&mut self, stack: &Stack) -> StoredStack {
        let left = MOST_BYTES.saturating_sub(self.bytes());
        self.stacks.add_within(stack.entries(), left).unwrap_or_else(|| {
            let waited = Some(Waited::OtherStacks);
            self.stacks.add(Stack { waited, ..Stack::new() }.entries())
        })
    }

    /// The memory of the stacks.
    fn bytes(&self) -> usize {
        self.stacks.bytes() + self.allocated.len() * size_of::<(StoredStack, Amounts)>()
    }

    /// What of each stack is in use.
    fn in_use(&mut self) -> HashMap<StoredStack, Amounts> {
        let mut in_use: HashMap<_, Amounts> = HashMap::new();
        self.blocks.retain(|place, block| {
            let is_in_use = sys::is_in_use(sys::TrackedBlock { place: *place, uses: block.uses });
            if is_in_use {
                in_use.entry(block.stack).or_default().add(block.amounts);
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
    ) -> Vec<(StoredStack, Vec<(SampleKind, u64)>)> {
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
        let weights = |(stack, allocated): (&StoredStack, &Amounts)| {
            let of_stack =
                |of: &HashMap<StoredStack, Amounts>| of.get(stack).copied().unwrap_or_default();
            let (now, none) = (of_stack(&in_use), Amounts::default());
            let (allocated, seen) = match part {
                HeapPart::All => (*allocated, none),
                HeapPart::Growth => (none, of_stack(&self.seen)),
            };
            let weights = [
                (SampleKind::AllocatedBytes, allocated.bytes),
                (SampleKind::Allocations, allocated.blocks),
                (SampleKind::InUseBytes, now.bytes.saturating_sub(seen.bytes)),
                (SampleKind::InUseBlocks, now.blocks.saturating_sub(seen.blocks)),
            ];
            (*stack, weights.into_iter().filter(|(_, weight)| *weight > 0).collect::<Vec<_>>())
        };
        let weights = self.allocated.iter().map(weights);
        weights.filter(|(_, weights)| !weights.is_empty()).collect()
    }
}

/// Makes the profile of the live heap, which is empty if it is not tracked.
pub(super) fn make_heap(heap: &mut Heap, inputs: ProfileInputs<'_>, request: HeapRequest) -> Job {
    let HeapRequest { part, reply, is_taken } = request;
    let id = ProfileId::random().unwrap_or(ProfileId::NONE);
    let weights = heap.weights(part, &is_taken).into_iter();
    let weights = weights.map(|(stack, weights)| (heap.stacks.frames(stack), 0, weights));
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
    use crate::inbox::{KindWeight, LeafStacks};
    use crate::unwind::ModuleAddress;

    fn stack(address: u64) -> Stack {
        Stack { frames: vec![ModuleAddress::new(None, address)], ..Stack::new() }
    }

    fn sample(heap: HeapUse, bytes: u64) -> CopiedSample {
        let amounts = [(SampleKind::AllocatedBytes, bytes), (SampleKind::Allocations, 2)];
        let amounts = amounts.map(|(kind, weight)| KindWeight { kind, at: 0, weight });
        let (largest, stacks) = (u64::MAX, LeafStacks::default());
        CopiedSample { span: None, amounts, largest, stacks, behind: None, heap }
    }

    #[test]
    fn allocations_add_up_by_stack() {
        let (mut heap, counters) = (Heap::default(), Counters::default());
        for (address, bytes) in [(1, 10), (2, 20), (1, 30)] {
            heap.add(&sample(HeapUse::NotTracked, bytes), &stack(address), &counters);
        }
        let of_span = sample(HeapUse::None, 7);
        heap.add(&of_span, &stack(1), &counters);
        let taken = Arc::default();
        let weights = heap.weights(HeapPart::All, &taken);
        let weights: Vec<_> = weights.into_iter().flat_map(|(_, weights)| weights).collect();
        let (bytes, count) = (SampleKind::AllocatedBytes, SampleKind::Allocations);
        assert_eq!(weights, [(bytes, 40), (count, 4), (bytes, 20), (count, 2)]);
        assert_eq!(counters.snapshot().allocations.dropped_not_tracked, 3);
        let grown = heap.weights(HeapPart::Growth, &taken);
        assert!(grown.is_empty(), "nothing is known to be in use");
    }

    #[test]
    fn stacks_beyond_the_limit_share_one() {
        let (mut heap, counters) = (Heap::default(), Counters::default());
        let deep = |number| {
            let frames = (0..256_u64).map(|frame| ModuleAddress::new(None, number << 32 | frame));
            Stack { frames: frames.collect(), ..Stack::new() }
        };
        for number in 0..10_000_u64 {
            heap.add(&sample(HeapUse::NotTracked, 1), &deep(number), &counters);
        }
        assert!(heap.bytes() <= MOST_BYTES + 1_024);
        let (others, _) = heap.allocated.last_key_value().unwrap();
        let mut others = heap.stacks.frames(*others);
        assert_eq!(others.next(), Some(StackEntry::Waited(Waited::OtherStacks)));
        let sum: u64 = heap.allocated.values().map(|amounts| amounts.bytes).sum();
        assert_eq!(sum, 10_000);
    }
}
