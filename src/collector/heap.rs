//! The live heap: by which code the blocks in use were allocated, and what has grown.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;

use super::build::{ProfileInputs, StackWeight};
use super::command::Command;
use super::engine::Engine;
use super::stack::{Stack, Waited};
use crate::allocations::{AllocationSample, HeapUse};
use crate::ids::ProfileId;
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
    stacks: Vec<HeapStack>,
    numbers: HashMap<Arc<Stack>, usize>,
    /// The memory of the stacks.
    bytes: usize,
    /// By place. A later block of a place replaces the one before, which has been freed.
    blocks: HashMap<u32, HeapBlock>,
    /// What is seen once the last answer is found to have been taken.
    answered: Option<(Vec<Amounts>, Arc<AtomicBool>)>,
}

#[derive(Debug)]
struct HeapStack {
    stack: Arc<Stack>,
    allocated: Amounts,
    /// What was in use at the last look.
    seen: Amounts,
}

#[derive(Debug)]
struct HeapBlock {
    uses: u32,
    stack: usize,
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
    pub(super) fn stacks(&self) -> impl Iterator<Item = &Stack> {
        self.stacks.iter().map(|known| known.stack.as_ref())
    }

    /// Adds a sample with its unwound stack.
    pub(super) fn add(&mut self, sample: &AllocationSample, stack: &Stack, counters: &Counters) {
        let counters = &counters.allocations;
        if sample.heap == HeapUse::None {
            return;
        }
        let amounts = Amounts { bytes: sample.bytes, blocks: sample.count };
        let number = self.number_of(stack);
        if let Some(stack) = self.stacks.get_mut(number) {
            stack.allocated.add(amounts);
        }
        match sample.heap {
            HeapUse::Tracked(block) => {
                let new = HeapBlock { uses: block.uses, stack: number, amounts };
                self.blocks.insert(block.place, new);
                Counters::add(&counters.tracked, 1);
            }
            _ => Counters::add(&counters.dropped_not_tracked, 1),
        }
    }

    fn number_of(&mut self, stack: &Stack) -> usize {
        if let Some(number) = self.numbers.get(stack) {
            return *number;
        }
        let all_others = Stack { waited: Some(Waited::OtherStacks), ..Stack::new() };
        let is_full = self.bytes + stack.bytes() > MOST_BYTES;
        if is_full && *stack != all_others {
            return self.number_of(&all_others);
        }
        let stack = Arc::new(stack.clone());
        self.bytes += stack.bytes() + size_of::<HeapStack>();
        let none = Amounts::default();
        self.stacks.push(HeapStack { stack: Arc::clone(&stack), allocated: none, seen: none });
        self.numbers.insert(stack, self.stacks.len() - 1);
        self.stacks.len() - 1
    }

    /// What is in use, by the number of the stack.
    fn in_use(&mut self) -> Vec<Amounts> {
        let mut in_use = vec![Amounts::default(); self.stacks.len()];
        self.blocks.retain(|place, block| {
            let is_in_use = sys::is_in_use(sys::TrackedBlock { place: *place, uses: block.uses });
            if let Some(sum) = in_use.get_mut(block.stack).filter(|_| is_in_use) {
                sum.add(block.amounts);
            }
            is_in_use
        });
        in_use
    }

    /// The caller sets `is_taken` once it has the answer.
    fn weights(&mut self, part: HeapPart, is_taken: &Arc<AtomicBool>) -> Vec<StackWeight<'_>> {
        let answered = self.answered.take_if(|_| part == HeapPart::Growth);
        if let Some((seen, was_taken)) = answered
            && was_taken.load(Ordering::Relaxed)
        {
            for (stack, seen) in self.stacks.iter_mut().zip(seen) {
                stack.seen = seen;
            }
        }
        let in_use = self.in_use();
        if part == HeapPart::Growth {
            self.answered = Some((in_use.clone(), Arc::clone(is_taken)));
        }
        let mut weights = Vec::new();
        for (HeapStack { stack, allocated, seen }, now) in self.stacks.iter().zip(in_use) {
            let mut add = |kind, weight: u64| {
                let one = StackWeight { stack, time_unix_ns: 0, kind, weight };
                weights.extend((weight > 0).then_some(one));
            };
            match part {
                HeapPart::All => {
                    add(SampleKind::AllocatedBytes, allocated.bytes);
                    add(SampleKind::Allocations, allocated.blocks);
                    add(SampleKind::InUseBytes, now.bytes);
                    add(SampleKind::InUseBlocks, now.blocks);
                }
                HeapPart::Growth => {
                    add(SampleKind::InUseBytes, now.bytes.saturating_sub(seen.bytes));
                    add(SampleKind::InUseBlocks, now.blocks.saturating_sub(seen.blocks));
                }
            }
        }
        weights
    }
}

/// Makes the profile of the live heap, which is empty if it is not tracked.
pub(super) fn make_heap(heap: &mut Heap, inputs: ProfileInputs<'_>, request: HeapRequest) -> Job {
    let HeapRequest { part, reply, is_taken } = request;
    let id = ProfileId::random().unwrap_or(ProfileId::NONE);
    let (mut profile, modules) = inputs.profile_of_stacks(id, heap.weights(part, &is_taken));
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

    fn sample(bytes: u64) -> AllocationSample {
        AllocationSample::for_test(HeapUse::NotTracked, 2, bytes)
    }

    #[test]
    fn allocations_add_up_by_stack() {
        let (mut heap, counters) = (Heap::default(), Counters::default());
        for (address, bytes) in [(1, 10), (2, 20), (1, 30)] {
            heap.add(&sample(bytes), &stack(address), &counters);
        }
        let of_span = AllocationSample::for_test(HeapUse::None, 1, 7);
        heap.add(&of_span, &stack(1), &counters);
        let taken = Arc::default();
        let weights = heap.weights(HeapPart::All, &taken);
        let weights: Vec<_> = weights.iter().map(|one| (one.kind, one.weight)).collect();
        let (bytes, count) = (SampleKind::AllocatedBytes, SampleKind::Allocations);
        assert_eq!(weights, [(bytes, 40), (count, 4), (bytes, 20), (count, 2)]);
        assert_eq!(counters.snapshot().allocations.dropped_not_tracked, 3);
        assert!(heap.weights(HeapPart::Growth, &taken).is_empty(), "nothing is known to be in use");
    }

    #[test]
    fn stacks_beyond_the_limit_share_one() {
        let (mut heap, counters) = (Heap::default(), Counters::default());
        let deep = |number| {
            let frames = (0..256_u64).map(|frame| ModuleAddress::new(None, number << 32 | frame));
            Stack { frames: frames.collect(), ..Stack::new() }
        };
        for number in 0..10_000_u64 {
            heap.add(&sample(1), &deep(number), &counters);
        }
        assert!(heap.bytes <= MOST_BYTES + deep(0).bytes());
        let others = heap.stacks.last().unwrap();
        assert_eq!(others.stack.waited, Some(Waited::OtherStacks));
        let sum: u64 = heap.stacks.iter().map(|stack| stack.allocated.bytes).sum();
        assert_eq!(sum, 10_000);
    }
}
