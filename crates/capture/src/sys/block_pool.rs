//! Memory in blocks of one size. It does not come from the program's allocator, which is not able to give memory back to the
//! system while a block lies in it that the program has not allocated, and does not free.
#![allow(unsafe_code, reason = "divides memory")]

use std::array;
use std::iter;
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crossbeam::utils::CachePadded;

use super::platform;
use super::stripes::{STRIPES, Stripe, Striped, stripes_in_use};
use super::words::Forks;

/// Hands out its blocks without a lock, those first that the calling thread used last.
#[derive(Debug)]
pub struct BlockPool(Striped<BlockMemory>);

#[derive(Debug)]
struct BlockMemory {
    /// `None` if it has no blocks.
    memory: Option<NonNull<u8>>,
    count: u32,
    /// The block after each in its chain: the chain of those that are free, or of some that were taken together.
    next: Box<[BlockLinks]>,
    unused: CachePadded<FreeList>,
    /// Free blocks that were used, by the part of the threads that used them last. Threads take from others if nothing
    /// else is left, so that no block is kept from anyone, also after its threads have ended.
    free: [CachePadded<OwnList>; STRIPES],
    made_in: u32,
}

/// The first block that is free in the lower half, and in the upper half the number of changes: a chain that has
/// changed in between can begin with the same block.
type FreeList = AtomicU64;

/// The free blocks of a part, and how many blocks its threads have taken: in the line that they write anyway.
#[derive(Debug)]
struct OwnList {
    free: FreeList,
    taken: AtomicU32,
}

/// Two lines of links. Threads take unused blocks by this number, so that they do not write to the same lines.
#[derive(Debug)]
#[repr(align(128))]
struct BlockLinks([AtomicU32; LINKS]);
const LINKS: usize = 32;

/// Some blocks, of which each links to the next.
#[derive(Clone, Copy, Debug)]
struct LinkedBlocks {
    first: u32,
    last: u32,
    count: u32,
}

// SAFETY: the memory belongs to the process, not to a thread. Only `Blocks` give access to it, each to blocks that no
// other has.
unsafe impl Send for BlockMemory {}
// SAFETY: as above.
unsafe impl Sync for BlockMemory {}

const NONE: u32 = u32::MAX;
const ONE_CHANGE: u64 = 1 << 32;
const MAX_BLOCKS: usize = 4 << 20;

impl BlockPool {
    pub const BLOCK_BYTES: usize = 1 << 10;

    /// A pool of that many bytes, up to 4 GiB; without any if they cannot be mapped.
    pub fn new(bytes: usize) -> Self {
        Self(Striped::new(BlockMemory::new(bytes)))
    }

    /// False in the child of a fork.
    pub fn is_here(&self) -> bool {
        self.0.made_in == Forks::generation()
    }

    /// Whether more than that many percent of its blocks are in use.
    pub fn is_fuller_than(&self, percent: u64) -> bool {
        let taken = self.0.free.iter().map(|list| u64::from(list.taken.load(Ordering::Relaxed)));
        taken.sum::<u64>() * 100 > u64::from(self.0.count) * percent
    }

    #[cfg(test)]
    pub(crate) fn count_free(&self) -> usize {
        let lists = self.0.free.iter().map(|list| &list.free).chain([&*self.0.unused]);
        let count = |list: &FreeList| {
            let first = list.load(Ordering::Acquire) as u32;
            let chain = iter::successors(Some(first), |block| Some(self.0.after(*block)));
            chain.take_while(|block| *block != NONE).count()
        };
        lists.map(count).sum()
    }
}

impl BlockMemory {
    fn new(bytes: usize) -> Self {
        let count = (bytes / BlockPool::BLOCK_BYTES).min(MAX_BLOCKS);
        let memory = match count {
            0 => None,
            _ => platform::map_memory(count * BlockPool::BLOCK_BYTES),
        };
        let count = memory.map_or(0, |_| count as u32);
        let link = |block: usize| if block + 1 < count as usize { block as u32 + 1 } else { NONE };
        let links = |at: usize| {
            BlockLinks(array::from_fn(|number| AtomicU32::new(link(at * LINKS + number))))
        };
        let list = |first: u32| AtomicU64::new(first.into());
        let own = |_| CachePadded::new(OwnList { free: list(NONE), taken: AtomicU32::new(0) });
        Self {
            memory,
            count,
            next: (0..(count as usize).div_ceil(LINKS)).map(links).collect(),
            unused: CachePadded::new(list(if count == 0 { NONE } else { 0 })),
            free: array::from_fn(own),
            made_in: Forks::generation(),
        }
    }

    fn link(&self, block: u32) -> Option<&AtomicU32> {
        let BlockLinks(links) = self.next.get(block as usize / LINKS)?;
        links.get(block as usize % LINKS)
    }

    fn after(&self, block: u32) -> u32 {
        self.link(block).map_or(NONE, |next| next.load(Ordering::Relaxed))
    }

    fn set_after(&self, block: u32, next: u32) {
        _ = self.link(block).map(|link| link.store(next, Ordering::Relaxed));
    }

    /// Takes `count` free blocks for threads of that part. `None` if there are fewer, or others are just taking them.
    fn take(&self, count: u32, part: usize) -> Option<LinkedBlocks> {
        let own = self.free.get(part)?;
        // Each thread begins elsewhere.
        let in_use = self.free.get(..stripes_in_use()).unwrap_or_default();
        let (before, after) = in_use.split_at_checked(part).unwrap_or((in_use, &[]));
        let others = after.iter().skip(1).chain(before).map(|list| &list.free);
        let (mut taken, mut left): (Option<LinkedBlocks>, u32) = (None, count);
        for list in [&own.free, &*self.unused].into_iter().chain(others) {
            let is_unused = ptr::eq(list, &*self.unused);
            let most = if is_unused { left.next_multiple_of(LINKS as u32) } else { left };
            let Some(more) = self.take_from(list, most) else { continue };
            let (more, rest) = self.split(more, left);
            _ = rest.map(|rest| self.give_back(rest, part));
            left -= more.count;
            taken = Some(match taken {
                None => more,
                Some(LinkedBlocks { first, last, count }) => {
                    self.set_after(last, more.first);
                    LinkedBlocks { first, last: more.last, count: count + more.count }
                }
            });
            if left == 0 {
                self.count_taken(part, count);
                return taken;
            }
        }
        _ = taken.map(|taken| self.give_back(taken, part));
        None
    }

    /// Counts wrap: `count` can be a negative number.
    fn count_taken(&self, part: usize, count: u32) {
        _ = self.free.get(part).map(|list| list.taken.fetch_add(count, Ordering::Relaxed));
    }

    /// At most that many blocks of a list, and `None` if it is empty.
    fn take_from(&self, list: &FreeList, most: u32) -> Option<LinkedBlocks> {
        // Acquire: what the earlier owners of the blocks did to them was before.
        let mut free = list.load(Ordering::Acquire);
        loop {
            let first = free as u32;
            if first == NONE {
                return None;
            }
            // Another thread may take these blocks and change the chain: the numbers are valid, and the exchange fails.
            let (mut chain, mut after) =
                (LinkedBlocks { first, last: first, count: 1 }, self.after(first));
            while chain.count < most && after != NONE {
                chain = LinkedBlocks { last: after, count: chain.count + 1, ..chain };
                after = self.after(after);
            }
            match change(list, free, after) {
                Ok(_) => return Some(chain),
                Err(now) => free = now,
            }
        }
    }

    /// The first blocks of a chain, and the others.
    fn split(
        &self,
        LinkedBlocks { first, last, count }: LinkedBlocks,
        at: u32,
    ) -> (LinkedBlocks, Option<LinkedBlocks>) {
        if count <= at {
            return (LinkedBlocks { first, last, count }, None);
        }
        let middle = (1..at).fold(first, |block, _| self.after(block));
        let rest = LinkedBlocks { first: self.after(middle), last, count: count - at };
        (LinkedBlocks { first, last: middle, count: at }, Some(rest))
    }

    fn give_back(&self, chain: LinkedBlocks, part: usize) {
        let Some(OwnList { free: list, .. }) = self.free.get(part).map(|list| &**list) else {
            return;
        };
        let mut free = list.load(Ordering::Relaxed);
        loop {
            self.set_after(chain.last, free as u32);
            match change(list, free, chain.first) {
                Ok(_) => return,
                Err(now) => free = now,
            }
        }
    }
}

fn change(list: &FreeList, before: u64, first: u32) -> Result<u64, u64> {
    let after = (before & !u64::from(u32::MAX)).wrapping_add(ONE_CHANGE) | u64::from(first);
    list.compare_exchange_weak(before, after, Ordering::AcqRel, Ordering::Acquire)
}

impl Drop for BlockMemory {
    fn drop(&mut self) {
        if let Some(memory) = self.memory {
            // SAFETY: the whole mapping, and nothing refers to it: `Blocks` share the pool.
            unsafe { platform::unmap_memory(memory, self.count as usize * BlockPool::BLOCK_BYTES) };
        }
    }
}

/// Some blocks of a pool, which get them back.
#[derive(Debug)]
pub struct Blocks {
    /// Of the thread that took them: they go back there.
    pool: Arc<Stripe<BlockMemory>>,
    chain: LinkedBlocks,
}

impl Blocks {
    /// Takes blocks for at least that many bytes. `None` if fewer are free.
    pub fn take(pool: &BlockPool, bytes: usize) -> Option<Self> {
        Self::take_of(pool.0.own(), bytes)
    }

    /// Takes further blocks, of the same pool, for at least that many bytes. `None` if fewer are free.
    pub fn take_more(&self, bytes: usize) -> Option<Self> {
        Self::take_of(&self.pool, bytes)
    }

    fn take_of(pool: &Arc<Stripe<BlockMemory>>, bytes: usize) -> Option<Self> {
        let count = u32::try_from(bytes.div_ceil(BlockPool::BLOCK_BYTES).max(1)).ok()?;
        let chain = pool.take(count, pool.number)?;
        Some(Self { pool: Arc::clone(pool), chain })
    }

    pub fn bytes(&self) -> usize {
        self.chain.count as usize * BlockPool::BLOCK_BYTES
    }

    /// Where their memory begins, and its length: blocks that are side by side at once, until they were in use often.
    fn runs(&self) -> impl Iterator<Item = (NonNull<u8>, usize)> {
        let LinkedBlocks { mut first, count: mut left, .. } = self.chain;
        iter::from_fn(move || {
            let memory = self.pool.memory.filter(|_| left > 0)?;
            let (start, mut count) = (first as usize, 0);
            loop {
                let next = self.pool.after(first);
                count += 1;
                left -= 1;
                let is_beside = left > 0 && next == first + 1;
                first = next;
                if !is_beside {
                    break;
                }
            }
            // SAFETY: the numbers of a chain are those of blocks, all of which are in the memory.
            let start = unsafe { memory.add(start * BlockPool::BLOCK_BYTES) };
            Some((start, count * BlockPool::BLOCK_BYTES))
        })
    }

    /// Their memory, a block at a time.
    pub fn parts(&self) -> impl Iterator<Item = &[u8]> {
        // SAFETY: zeroed or written memory of blocks that only `self` has, which is borrowed.
        let run = |(start, bytes): (NonNull<u8>, usize)| unsafe {
            slice::from_raw_parts(start.as_ptr(), bytes)
        };
        self.runs().map(run).flat_map(|run| run.chunks_exact(BlockPool::BLOCK_BYTES))
    }

    /// The memory of the blocks, to write to it, with blocks that are side by side at once.
    pub fn runs_mut(&mut self) -> impl Iterator<Item = &mut [u8]> {
        // SAFETY: as above, and each block is in the chain once.
        let run = |(start, bytes): (NonNull<u8>, usize)| unsafe {
            slice::from_raw_parts_mut(start.as_ptr(), bytes)
        };
        self.runs().map(run)
    }
}

impl Drop for Blocks {
    fn drop(&mut self) {
        let part = self.pool.number;
        self.pool.count_taken(part, self.chain.count.wrapping_neg());
        self.pool.give_back(self.chain, part);
    }
}

#[cfg(test)]
mod tests {
    use super::super::stripes::own_stripe;
    use super::*;

    const BLOCK: usize = BlockPool::BLOCK_BYTES;

    fn fill(blocks: &mut Blocks, byte: u8) {
        blocks.runs_mut().for_each(|run| run.fill(byte));
    }

    fn has_only(blocks: &Blocks, byte: u8) -> bool {
        blocks.parts().flatten().all(|other| *other == byte)
    }

    #[test]
    fn blocks_are_reused_and_limited() {
        let pool = BlockPool::new(10 * BLOCK + 1);
        let mut first = Blocks::take(&pool, 3_000).unwrap();
        assert_eq!((first.bytes(), pool.count_free()), (3 * BLOCK, 7));
        assert_eq!([29, 30].map(|percent| pool.is_fuller_than(percent)), [true, false]);
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
        assert!(!pool.is_fuller_than(0));
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

    /// The first blocks of all lists, and how often each was changed.
    fn lists(pool: &BlockPool) -> Vec<u64> {
        let lists = pool.0.free.iter().map(|list| &list.free).chain([&*pool.0.unused]);
        lists.map(|list| list.load(Ordering::Relaxed)).collect()
    }

    /// Once a thread has some blocks, it writes to no list and no links that others write to.
    #[test]
    fn threads_reuse_blocks_of_their_own() {
        let pool = BlockPool::new(4 * LINKS * BLOCK);
        let take = || {
            let blocks = Blocks::take(&pool, 3 * BLOCK).unwrap();
            let links: Vec<_> = chain_of(&blocks).map(|block| block as usize / LINKS).collect();
            assert!(links.iter().all(|line| *line == links[0]), "{links:?}");
            (links[0], own_stripe())
        };
        let (line, own) = take();
        loop {
            let (other_line, other) = std::thread::scope(|scope| scope.spawn(take).join().unwrap());
            // After as many threads, one has the number of this one.
            if other != own {
                assert_ne!(other_line, line);
                break;
            }
        }
        let before = lists(&pool);
        (0..10).for_each(|_| assert_eq!(take(), (line, own)));
        let changes = lists(&pool).into_iter().zip(before).map(|(after, before)| after != before);
        let changed: Vec<_> = changes.enumerate().filter(|(_, is)| *is).map(|(at, _)| at).collect();
        assert_eq!(changed, [own], "only its own list");
    }

    fn chain_of(blocks: &Blocks) -> impl Iterator<Item = u32> {
        let first = blocks.chain.first;
        let chain = iter::successors(Some(first), |block| Some(blocks.pool.after(*block)));
        chain.take(blocks.chain.count as usize)
    }

    /// What threads have used and given back is there for others, also after they have ended.
    #[test]
    fn no_block_is_kept_from_other_threads() {
        let threads = if cfg!(miri) { 3 } else { 2 * STRIPES };
        let pool = BlockPool::new(100 * BLOCK);
        let used = std::thread::scope(|scope| {
            let take = || Blocks::take(&pool, 7 * BLOCK).is_some();
            let threads: Vec<_> = (0..threads).map(|_| scope.spawn(take)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).filter(|has| *has).count()
        });
        assert!(used > 0);
        let mut all = Blocks::take(&pool, 100 * BLOCK).unwrap();
        let mut numbers: Vec<_> = chain_of(&all).collect();
        numbers.sort_unstable();
        assert!(numbers.into_iter().eq(0..100), "each once");
        fill(&mut all, 9);
        assert!(has_only(&all, 9) && Blocks::take(&pool, 1).is_none());
        let elsewhere = || Blocks::take(&pool, 1).is_none();
        assert!(std::thread::scope(|scope| scope.spawn(elsewhere).join().unwrap()));
        drop(all);
        let elsewhere = || Blocks::take(&pool, 100 * BLOCK).is_some();
        assert!(std::thread::scope(|scope| scope.spawn(elsewhere).join().unwrap()));
    }

    #[test]
    fn a_pool_can_be_empty() {
        for bytes in [0, 1, BLOCK - 1] {
            let pool = BlockPool::new(bytes);
            assert!(Blocks::take(&pool, BLOCK).is_none(), "{bytes}");
        }
    }

    #[test]
    fn no_block_is_given_to_two_threads() {
        let (blocks, times) = if cfg!(miri) { (8, 30) } else { (40, 100_000) };
        let pool = BlockPool::new(blocks * BLOCK);
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
