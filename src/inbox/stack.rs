//! Copies of stacks that were made by the threads themselves: of pending futures, and of allocations.

use std::sync::atomic::Ordering;

use crate::sys::{BlockPool, Blocks, LiveStack, Registers, WORDS};

#[derive(Debug)]
pub(crate) struct CopiedStack {
    pub(crate) registers: Registers,
    blocks: Blocks,
    length: usize,
    /// There was more.
    pub(crate) is_part: bool,
    /// How often libraries were found to be unloaded before.
    pub(crate) unloads: u64,
}

impl CopiedStack {
    /// Copies at most that many bytes of a stack, its innermost part, into that memory if it fits. `None` without memory.
    pub(super) fn new(
        pool: &BlockPool,
        reused: Option<Self>,
        stack: &LiveStack,
        most_bytes: usize,
    ) -> Option<Self> {
        let length = stack.length_bytes().min(most_bytes);
        let is_good = |blocks: &Blocks| (length..=most_bytes).contains(&blocks.bytes());
        let reused = reused.map(|copy| copy.blocks).filter(is_good);
        let mut blocks = reused.or_else(|| Blocks::take(pool, length))?;
        stack.copy_to(blocks.runs_mut());
        let (registers, is_part) = (stack.registers, length < stack.length_bytes());
        let unloads = WORDS.unloads.load(Ordering::Acquire);
        Some(Self { registers, blocks, length, is_part, unloads })
    }

    /// A second copy. `None` if there is no memory.
    pub(crate) fn duplicate(&self) -> Option<Self> {
        let mut blocks = self.blocks.take_more(self.length)?;
        let to = blocks.runs_mut().flat_map(|run| run.chunks_exact_mut(BlockPool::BLOCK_BYTES));
        to.zip(self.blocks.parts()).for_each(|(to, from)| to.copy_from_slice(from));
        Some(Self { blocks, ..*self })
    }

    /// Returns the aligned word at a number of bytes above the stack pointer.
    pub(crate) fn words(&self) -> impl Fn(u64) -> Option<u64> {
        let mut parts = Vec::with_capacity(self.length.div_ceil(BlockPool::BLOCK_BYTES));
        parts.extend(self.blocks.parts());
        move |offset| {
            let offset = usize::try_from(offset).ok()?;
            let is_in = offset.checked_add(size_of::<u64>())? <= self.length;
            let part = parts.get(offset / BlockPool::BLOCK_BYTES).filter(|_| is_in)?;
            let bytes = part.get(offset % BlockPool::BLOCK_BYTES..)?;
            bytes.first_chunk().map(|word| u64::from_ne_bytes(*word))
        }
    }
}

/// The stacks of a sample: of an allocation, or of the leaves that a future awaited at the same time, in one span.
#[derive(Debug, Default)]
pub(crate) struct LeafStacks {
    /// Of the leaf that cloned the waker last.
    pub(crate) last: Option<CopiedStack>,
    /// The stacks of the leaves before, the latest first. (A timeout polls its timer last, and what it limits before.)
    pub(crate) others: Vec<CopiedStack>,
    /// Which of all these woke the task, if that is known.
    pub(crate) woke: Option<usize>,
    /// The stack of what woke the task.
    pub(crate) waker: Option<CopiedStack>,
}
