//! Copies of stacks that were made by the threads themselves: of pending futures, and of allocations.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crossbeam::queue::ArrayQueue;

use crate::sampler::record::Registers;
use crate::sys::{self, LiveStack};

/// StackBuffers of a few sizes, which are reused, and together have a limit.
#[derive(Debug)]
pub(crate) struct StackBuffers {
    free: [ArrayQueue<Box<[u8]>>; SIZES],
    /// Of all buffers, free or not.
    bytes: AtomicUsize,
    most_bytes: usize,
    /// The [`sys::fork_generation`] in which they were made.
    made_in: u32,
}

const SMALLEST: usize = 1 << 10;
/// Each is twice as large as the one before.
const SIZES: usize = 7;
const MOST_FREE: usize = 64;

const _: () = assert!(SMALLEST << (SIZES - 1) == LiveStack::MOST_BYTES);

impl StackBuffers {
    pub(crate) fn new(most_bytes: usize) -> Self {
        let free = std::array::from_fn(|_| ArrayQueue::new(MOST_FREE));
        Self { free, bytes: AtomicUsize::new(0), most_bytes, made_in: sys::fork_generation() }
    }

    /// False in the child of a fork.
    pub(crate) fn are_here(&self) -> bool {
        self.made_in == sys::fork_generation()
    }

    /// A buffer of at least that length, if there is memory for it.
    fn take(&self, length: usize) -> Option<Box<[u8]>> {
        let size = length.max(SMALLEST).next_power_of_two();
        let free = self.free.get((size / SMALLEST).trailing_zeros() as usize)?;
        free.pop().or_else(|| self.allocate(size))
    }

    #[cold]
    fn allocate(&self, size: usize) -> Option<Box<[u8]>> {
        let fits = |bytes: usize| {
            let bytes = bytes + size;
            (bytes <= self.most_bytes).then_some(bytes)
        };
        let reserve =
            || self.bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_ok();
        let is_reserved = reserve() || {
            self.release_free();
            reserve()
        };
        is_reserved.then(|| {
            // One more, so that a sample of this stack needs no allocation either.
            if reserve() {
                self.give_back(vec![0; size].into_boxed_slice());
            }
            vec![0; size].into_boxed_slice()
        })
    }

    /// Gives free buffers back to the allocator: those of other sizes may be of no use.
    fn release_free(&self) {
        for buffer in self.free.iter().flat_map(|free| std::iter::from_fn(|| free.pop())) {
            self.bytes.fetch_sub(buffer.len(), Ordering::Relaxed);
        }
    }

    fn give_back(&self, buffer: Box<[u8]>) {
        // A queue waits for threads that are in the middle of using it, which a forked child does not have.
        if !self.are_here() {
            return;
        }
        let free = self.free.get((buffer.len() / SMALLEST).trailing_zeros() as usize);
        if let Some(Err(buffer)) = free.map(|free| free.push(buffer)) {
            self.bytes.fetch_sub(buffer.len(), Ordering::Relaxed);
        }
    }

    #[cfg(test)]
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }
}

/// The copy of a part of a stack.
#[derive(Debug)]
pub(crate) struct CopiedStack {
    registers: Registers,
    /// Taken out by `drop` alone.
    bytes: Box<[u8]>,
    length: usize,
    buffers: Arc<StackBuffers>,
}

impl CopiedStack {
    /// Copies a stack, into the memory of an earlier copy if that is large enough. `None` if there is no memory.
    pub(crate) fn new(
        buffers: &Arc<StackBuffers>,
        reused: Option<Self>,
        stack: &LiveStack,
    ) -> Option<Self> {
        let length = stack.len();
        let mut copy = match reused.filter(|copy| copy.bytes.len() >= length) {
            Some(copy) => copy,
            None => Self {
                registers: Registers::X86_64 { ip: 0, sp: 0, bp: 0 },
                bytes: buffers.take(length)?,
                length: 0,
                buffers: Arc::clone(buffers),
            },
        };
        copy.registers = Registers::from(stack.registers);
        copy.length = length;
        stack.copy_to(&mut copy.bytes);
        Some(copy)
    }

    /// A second copy. `None` if there is no memory.
    pub(crate) fn duplicate(&self) -> Option<Self> {
        let mut bytes = self.buffers.take(self.length)?;
        let length = self.length;
        if let (Some(to), Some(from)) = (bytes.get_mut(..length), self.bytes.get(..length)) {
            to.copy_from_slice(from);
        }
        Some(Self { bytes, buffers: Arc::clone(&self.buffers), ..*self })
    }

    pub(crate) fn registers(&self) -> Registers {
        self.registers
    }

    /// The word at that many bytes above the stack pointer.
    pub(crate) fn word(&self, offset: u64) -> Option<u64> {
        let bytes = self.bytes.get(..self.length)?.get(usize::try_from(offset).ok()?..)?;
        bytes.first_chunk().map(|word| u64::from_ne_bytes(*word))
    }
}

impl Drop for CopiedStack {
    fn drop(&mut self) {
        self.buffers.give_back(std::mem::take(&mut self.bytes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_reused_and_limited() {
        let buffers = StackBuffers::new(10 << 10);
        let first = buffers.take(3_000).unwrap();
        assert_eq!((first.len(), buffers.bytes()), (4 << 10, 8 << 10), "and one more");
        buffers.give_back(first);
        let again = buffers.take(4_096).unwrap();
        assert_eq!((again.len(), buffers.bytes()), (4 << 10, 8 << 10));
        assert!(buffers.take(8_000).is_none(), "over the limit");
        buffers.give_back(again);
        // The free one, which is too small, makes room.
        assert_eq!(buffers.take(8_000).unwrap().len(), 8 << 10);
        assert_eq!(buffers.bytes(), 8 << 10);
    }

    #[test]
    fn a_forked_child_does_not_use_the_queues() {
        let buffers = StackBuffers { made_in: u32::MAX, ..StackBuffers::new(10 << 10) };
        let buffer = buffers.take(SMALLEST).unwrap();
        buffers.give_back(buffer);
        assert!(buffers.free.iter().all(ArrayQueue::is_empty));
    }

    #[test]
    fn more_than_the_largest_is_refused() {
        let buffers = StackBuffers::new(usize::MAX / 2);
        assert_eq!(buffers.take(LiveStack::MOST_BYTES).unwrap().len(), LiveStack::MOST_BYTES);
        assert!(buffers.take(LiveStack::MOST_BYTES + 1).is_none());
        assert_eq!(buffers.take(0).unwrap().len(), SMALLEST);
    }
}
