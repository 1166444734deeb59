//! The sampled blocks that are in use, by their addresses, so that each free can tell whether its block is one.

use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

/// A set of addresses in buckets of eight, without a lock. A bucket that is full takes no more.
#[derive(Debug)]
pub(super) struct LiveBlocks {
    /// A byte for each place of a bucket: 0 if free, or a part of the address's hash. Almost all frees read only this word.
    tags: Box<[AtomicU64]>,
    addresses: Box<[AtomicUsize]>,
    uses: Box<[AtomicU32]>,
}

/// A sampled block, by its place and the number of that place's use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrackedBlock {
    pub place: u32,
    pub uses: u32,
}

const BUCKETS_LOG2: u32 = 14;
const BUCKETS: usize = 1 << BUCKETS_LOG2;
const WAYS: usize = 8;
const USED: u64 = 0x80;
const EACH: u64 = 0x0101_0101_0101_0101;

#[inline(always)]
const fn hashed(address: usize) -> (usize, u64) {
    // Two rounds of a multiplicative hash: after one, addresses at regular distances share buckets.
    let hash = (address as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let hash = (hash ^ hash >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93);
    ((hash >> (64 - BUCKETS_LOG2)) as usize, hash >> (64 - BUCKETS_LOG2 - 7) & 0x7f | USED)
}

/// The highest bit of each byte that may be equal to the tag.
#[inline(always)]
const fn places_of(tags: u64, tag: u64) -> u64 {
    let difference = tags ^ (tag * EACH);
    difference.wrapping_sub(EACH) & !difference & (EACH * 0x80)
}

impl LiveBlocks {
    pub(super) fn new() -> Self {
        Self {
            tags: (0..BUCKETS).map(|_| AtomicU64::new(0)).collect(),
            addresses: (0..BUCKETS * WAYS).map(|_| AtomicUsize::new(0)).collect(),
            uses: (0..BUCKETS * WAYS).map(|_| AtomicU32::new(0)).collect(),
        }
    }

    /// Adds the address of a new block. `None` if there is no place.
    pub(super) fn add(&self, address: usize) -> Option<TrackedBlock> {
        let (bucket, tag) = hashed(address);
        let tags = self.tags.get(bucket)?;
        let mut before = tags.load(Ordering::Relaxed);
        loop {
            let way = (0..WAYS).find(|way| before >> (8 * way) & 0xff == 0)?;
            let after = before | tag << (8 * way);
            match tags.compare_exchange(before, after, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => {
                    let place = bucket * WAYS + way;
                    let uses = self.uses.get(place)?.fetch_add(1, Ordering::Relaxed) + 1;
                    self.addresses.get(place)?.store(address, Ordering::Relaxed);
                    return Some(TrackedBlock { place: u32::try_from(place).ok()?, uses });
                }
                Err(now) => before = now,
            }
        }
    }

    /// The block at that address is about to be freed. Returns whether it was there.
    #[inline(always)]
    pub(super) fn remove(&self, address: usize) -> bool {
        let (bucket, tag) = hashed(address);
        let Some(tags) = self.tags.get(bucket) else { return false };
        // The thread that added the block has handed it over to this one since, so all stores are visible.
        let found = places_of(tags.load(Ordering::Relaxed), tag);
        found != 0 && self.remove_from((bucket, tags), found, address)
    }

    #[cold]
    #[inline(never)]
    fn remove_from(&self, of: (usize, &AtomicU64), mut found: u64, address: usize) -> bool {
        let (bucket, tags) = of;
        while found != 0 {
            let way = found.trailing_zeros() as usize / 8;
            if let Some(place) = self.addresses.get(bucket * WAYS + way)
                && place.load(Ordering::Relaxed) == address
            {
                // Before another block can take the place.
                place.store(0, Ordering::Relaxed);
                tags.fetch_and(!(0xff << (8 * way)), Ordering::Release);
                return true;
            }
            found &= found - 1;
        }
        false
    }

    /// Whether that block has not been freed.
    pub(super) fn contains(&self, TrackedBlock { place, uses }: TrackedBlock) -> bool {
        let place = place as usize;
        let is_used =
            |tags: &AtomicU64| tags.load(Ordering::Acquire) >> (8 * (place % WAYS)) & USED != 0;
        self.tags.get(place / WAYS).is_some_and(is_used)
            && self.uses.get(place).is_some_and(|now| now.load(Ordering::Relaxed) == uses)
    }

    pub(super) fn clear(&self) {
        self.addresses.iter().for_each(|address| address.store(0, Ordering::Relaxed));
        self.tags.iter().for_each(|tags| tags.store(0, Ordering::Relaxed));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn blocks_are_found_until_they_are_freed() {
        let live = LiveBlocks::new();
        let addresses: Vec<_> = (1..20_000).map(|number| number * 48).collect();
        let blocks: Vec<_> = addresses.iter().map(|address| live.add(*address)).collect();
        let full = blocks.iter().filter(|block| block.is_none()).count();
        assert!(full < addresses.len() / 100, "{full} without a place");
        assert!(!live.remove(7));
        for (address, block) in addresses.iter().zip(&blocks) {
            assert_eq!(live.remove(*address), block.is_some());
            assert!(!live.remove(*address), "twice");
            assert!(block.is_none_or(|block| !live.contains(block)));
        }
    }

    #[test]
    fn a_place_that_is_used_again_has_another_block() {
        let live = LiveBlocks::new();
        let block = live.add(4_096).unwrap();
        assert!(live.contains(block) && live.remove(4_096));
        let other = live.add(4_096).unwrap();
        assert_eq!((other.place, other.uses), (block.place, block.uses + 1));
        assert!(live.contains(other) && !live.contains(block));
        live.clear();
        assert!(!live.contains(other) && !live.remove(4_096));
    }

    proptest! {
        /// Addresses of few buckets, so that buckets are full and tags collide.
        #[test]
        fn behaves_like_a_map(steps in proptest::collection::vec((0..200_usize, any::<bool>()), 1..400)) {
            let live = LiveBlocks::new();
            let in_one = (1..usize::MAX).map(|number| number * 16);
            let addresses: Vec<_> = in_one.filter(|address| hashed(*address).0 < 4).take(200).collect();
            let mut model: HashMap<usize, TrackedBlock> = HashMap::new();
            for (number, adds) in steps {
                let address = addresses[number];
                if adds && !model.contains_key(&address) {
                    let in_bucket = |other: &&usize| hashed(**other).0 == hashed(address).0;
                    let is_full = model.keys().filter(in_bucket).count() == WAYS;
                    let block = live.add(address);
                    prop_assert_eq!(block.is_none(), is_full);
                    model.extend(block.map(|block| (address, block)));
                } else {
                    let known = model.remove(&address);
                    prop_assert_eq!(live.remove(address), known.is_some());
                    prop_assert!(known.is_none_or(|block| !live.contains(block)));
                }
                prop_assert!(model.values().all(|block| live.contains(*block)));
            }
        }
    }

    #[test]
    fn threads_do_not_lose_each_others_blocks() {
        let live = LiveBlocks::new();
        std::thread::scope(|scope| {
            for thread in 0..4_usize {
                let live = &live;
                scope.spawn(move || {
                    for round in 0..2_000 {
                        let own = (0..8).map(|number| (number * 4 + thread + 1) * 16);
                        let blocks: Vec<_> =
                            own.filter_map(|address| Some((address, live.add(address)?))).collect();
                        for (address, block) in &blocks {
                            assert!(live.contains(*block), "{round}");
                            assert!(live.remove(*address), "{round}");
                        }
                    }
                });
            }
        });
        assert!(live.tags.iter().all(|tags| tags.load(Ordering::Relaxed) == 0));
    }
}
