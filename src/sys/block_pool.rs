//! Memory in blocks of one size. It does not come from the program's allocator, which is not able to give memory back to the
//! system while a block lies in it that the program has not allocated, and does not free.
#![allow(unsafe_code, reason = "divides memory")]

use std::iter;
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::platform::{self, fork_generation};

/// Hands out its blocks without a lock, those first that were in use last.
#[derive(Debug)]
pub(crate) struct BlockPool {
    /// `None` if it has no blocks.
    memory: Option<NonNull<u8>>,
    /// The block after each in its chain: the chain of those that are free, or of some that were taken together.
    next: Box<[AtomicU32]>,
    /// The first block that is free in the lower half, and in the upper half the number of changes: a chain that has
    /// changed in between can begin with the same block.
    free: AtomicU64,
    made_in: u32,
}

// SAFETY: the memory belongs to the process, not to a thread. Only `Blocks` give access to it, each to blocks that no
// other has.
unsafe impl Send for BlockPool {}
// SAFETY: as above.
unsafe impl Sync for BlockPool {}

/// The end of a chain.
const NONE: u32 = u32::MAX;
const ONE_CHANGE: u64 = 1 << 32;
const MOST_BLOCKS: usize = 4 << 20;

impl BlockPool {
    pub(crate) const BLOCK_BYTES: usize = 1 << 10;

    /// A pool of that many bytes, up to 4 GiB; without any if they cannot be mapped.
    pub(crate) fn new(bytes: usize) -> Self {
        let count = (bytes / Self::BLOCK_BYTES).min(MOST_BLOCKS);
        let memory = match count {
            0 => None,
            _ => platform::map_memory(count * Self::BLOCK_BYTES),
        };
        let count = memory.map_or(0, |_| count as u32);
        let next = (1..count).chain(iter::once(NONE)).take(count as usize);
        Self {
            memory,
            next: next.map(AtomicU32::new).collect(),
            free: AtomicU64::new(if count == 0 { NONE.into() } else { 0 }),
            made_in: fork_generation(),
        }
    }

    /// False in the child of a fork.
    pub(crate) fn is_here(&self) -> bool {
        self.made_in == fork_generation()
    }

    fn after(&self, block: u32) -> u32 {
        self.next.get(block as usize).map_or(NONE, |next| next.load(Ordering::Relaxed))
    }

    /// The first and the last of that many free blocks, which are a chain.
    fn take(&self, count: u32) -> Option<(u32, u32)> {
        // Acquire: what the earlier owners of the blocks did to them was before.
        let mut free = self.free.load(Ordering::Acquire);
        loop {
            let first = free as u32;
            // Another thread may take these blocks and change the chain: the numbers are valid, and the exchange fails.
            let last = (1..count).fold(first, |last, _| self.after(last));
            if last == NONE {
                let now = self.free.load(Ordering::Acquire);
                if now == free {
                    return None;
                }
                free = now;
                continue;
            }
            match self.change_free(free, self.after(last)) {
                Ok(_) => return Some((first, last)),
                Err(now) => free = now,
            }
        }
    }

    fn give_back(&self, first: u32, last: u32) {
        let Some(next) = self.next.get(last as usize) else { return };
        let mut free = self.free.load(Ordering::Relaxed);
        loop {
            next.store(free as u32, Ordering::Relaxed);
            match self.change_free(free, first) {
                Ok(_) => return,
                Err(now) => free = now,
            }
        }
    }

    fn change_free(&self, before: u64, first: u32) -> Result<u64, u64> {
        let after = (before & !u64::from(u32::MAX)).wrapping_add(ONE_CHANGE) | u64::from(first);
        self.free.compare_exchange_weak(before, after, Ordering::AcqRel, Ordering::Acquire)
    }

    #[cfg(test)]
    pub(crate) fn count_free(&self) -> usize {
        let first = self.free.load(Ordering::Acquire) as u32;
        let chain = iter::successors(Some(first), |block| Some(self.after(*block)));
        chain.take_while(|block| *block != NONE).count()
    }
}

impl Drop for BlockPool {
    fn drop(&mut self) {
        if let Some(memory) = self.memory {
            // SAFETY: the whole mapping, and nothing refers to it: `Blocks` share the pool.
            unsafe { platform::unmap_memory(memory, self.next.len() * Self::BLOCK_BYTES) };
        }
    }
}

/// Some blocks of a pool, which get them back.
#[derive(Debug)]
pub(crate) struct Blocks {
    pool: Arc<BlockPool>,
    first: u32,
    last: u32,
    count: u32,
}

impl Blocks {
    /// Takes blocks for at least that many bytes. `None` if fewer are free.
    pub(crate) fn take(pool: &Arc<BlockPool>, bytes: usize) -> Option<Self> {
        let count = u32::try_from(bytes.div_ceil(BlockPool::BLOCK_BYTES).max(1)).ok()?;
        let (first, last) = pool.take(count)?;
        Some(Self { pool: Arc::clone(pool), first, last, count })
    }

    pub(crate) fn pool(&self) -> &Arc<BlockPool> {
        &self.pool
    }

    pub(crate) fn bytes(&self) -> usize {
        self.count as usize * BlockPool::BLOCK_BYTES
    }

    /// Their memory, to write to it: blocks that are side by side at once, as they are until they were in use often.
    pub(crate) fn runs_mut(&mut self) -> impl Iterator<Item = &mut [u8]> {
        let pool = &self.pool;
        let (mut first, mut left) = (self.first, self.count);
        iter::from_fn(move || {
            let memory = pool.memory.filter(|_| left > 0)?;
            let (start, mut count) = (first as usize, 0);
            loop {
                let next = pool.after(first);
                count += 1;
                left -= 1;
                let is_beside = left > 0 && next == first + 1;
                first = next;
                if !is_beside {
                    break;
                }
            }
            // SAFETY: these blocks are in the memory, which is zeroed or written, and only `self` has them. It is borrowed,
            // and each block is in the chain once.
            Some(unsafe {
                let start = memory.add(start * BlockPool::BLOCK_BYTES);
                slice::from_raw_parts_mut(start.as_ptr(), count * BlockPool::BLOCK_BYTES)
            })
        })
    }

    fn addresses(&self) -> impl Iterator<Item = NonNull<u8>> {
        let memory = self.pool.memory;
        let chain = iter::successors(Some(self.first), |block| Some(self.pool.after(*block)));
        let chain = chain.take(self.count as usize);
        // SAFETY: the numbers of a chain are those of blocks, all of which are in the memory.
        let address = |memory: NonNull<u8>, block: u32| unsafe {
            memory.add(block as usize * BlockPool::BLOCK_BYTES)
        };
        chain.filter_map(move |block| Some(address(memory?, block)))
    }

    /// Their memory, a block at a time.
    pub(crate) fn parts(&self) -> impl Iterator<Item = &[u8]> {
        // SAFETY: zeroed or written memory of a block that only `self` has, which is borrowed.
        let part = |start: NonNull<u8>| unsafe {
            slice::from_raw_parts(start.as_ptr(), BlockPool::BLOCK_BYTES)
        };
        self.addresses().map(part)
    }

    /// The same, to write to it.
    pub(crate) fn parts_mut(&mut self) -> impl Iterator<Item = &mut [u8]> {
        // SAFETY: as above, and each block is in the chain once.
        let part = |start: NonNull<u8>| unsafe {
            slice::from_raw_parts_mut(start.as_ptr(), BlockPool::BLOCK_BYTES)
        };
        self.addresses().map(part)
    }
}

impl Drop for Blocks {
    fn drop(&mut self) {
        self.pool.give_back(self.first, self.last);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: usize = BlockPool::BLOCK_BYTES;

    fn fill(blocks: &mut Blocks, byte: u8) {
        blocks.parts_mut().for_each(|part| part.fill(byte));
    }

    fn has_only(blocks: &Blocks, byte: u8) -> bool {
        blocks.parts().flatten().all(|other| *other == byte)
    }

    #[test]
    fn blocks_are_reused_and_limited() {
        let pool = Arc::new(BlockPool::new(10 * BLOCK + 1));
        let mut first = Blocks::take(&pool, 3_000).unwrap();
        assert_eq!((first.bytes(), pool.count_free()), (3 * BLOCK, 7));
        assert!(has_only(&first, 0));
        fill(&mut first, 1);
        let mut second = Blocks::take(&pool, 7 * BLOCK).unwrap();
        fill(&mut second, 2);
        assert!(Blocks::take(&pool, 0).is_none(), "all are in use");
        assert!(has_only(&first, 1) && has_only(&second, 2));
        drop(first);
        assert!(Blocks::take(&pool, 4 * BLOCK).is_none());
        assert_eq!(pool.count_free(), 3);
        drop(second);
        // In any order.
        let mut whole = Blocks::take(&pool, 10 * BLOCK).unwrap();
        for (number, run) in whole.runs_mut().enumerate() {
            run.fill(number as u8);
        }
        let bytes: Vec<_> = whole.parts().map(|part| (part[0], part[BLOCK - 1])).collect();
        assert_eq!(bytes, [[(0, 0); 7].as_slice(), &[(1, 1); 3]].concat(), "two runs");
        assert_eq!((whole.parts().count(), pool.count_free()), (10, 0));
        drop((whole, pool));
    }

    #[test]
    fn a_pool_can_be_empty() {
        for bytes in [0, 1, BLOCK - 1] {
            let pool = Arc::new(BlockPool::new(bytes));
            assert!(Blocks::take(&pool, BLOCK).is_none(), "{bytes}");
        }
    }

    #[test]
    fn no_block_is_given_to_two_threads() {
        let (blocks, times) = if cfg!(miri) { (8, 30) } else { (40, 100_000) };
        let pool = Arc::new(BlockPool::new(blocks * BLOCK));
        std::thread::scope(|scope| {
            for thread in 1..=4_u8 {
                let pool = &pool;
                scope.spawn(move || {
                    let mut held: Vec<Blocks> = Vec::new();
                    for number in 0..times {
                        let bytes = (number * 7 + usize::from(thread)) % 5 * BLOCK;
                        held.extend(Blocks::take(pool, bytes).map(|mut new| {
                            fill(&mut new, thread);
                            new
                        }));
                        if held.len() > number % 4 {
                            let oldest = held.remove(0);
                            assert!(has_only(&oldest, thread));
                        }
                    }
                });
            }
        });
        assert_eq!(pool.count_free(), blocks, "none is lost");
    }
}
