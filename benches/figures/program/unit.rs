//! One compilation unit of the program that `symbols.rs` links: its functions call each other through a list, from
//! inside inlined functions. Compiled only by that bench.

#![no_std]

use core::hint::black_box;

#[repr(C)]
pub struct Walk {
    next: extern "C" fn(&mut Walk) -> u64,
    seed: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Item<const K: usize> {
    key: u64,
    weight: u32,
    tag: Option<[u8; 4]>,
}

#[derive(Clone, Copy)]
enum Choice<const K: usize> {
    One(Item<K>),
    Two { left: u64, right: Item<K> },
    Nothing,
}

impl<const K: usize> Item<K> {
    fn new(seed: u64) -> Self {
        let key = seed.wrapping_mul(K as u64 | 1);
        let tag = (key % 3 == 0).then(|| (key as u32).to_le_bytes());
        Self { key, weight: (key >> 32) as u32, tag }
    }

    fn score(&self) -> u64 {
        let sum = |tag: [u8; 4]| tag.iter().map(|byte| u64::from(*byte)).sum();
        self.tag.map_or(self.key, sum).wrapping_add(u64::from(self.weight))
    }
}

fn choose<const K: usize>(seed: u64) -> Choice<K> {
    match seed % 3 {
        0 => Choice::One(Item::new(seed)),
        1 => Choice::Two { left: seed, right: Item::new(!seed) },
        _ => Choice::Nothing,
    }
}

fn weigh<const K: usize>(choice: Choice<K>) -> u64 {
    match choice {
        Choice::One(item) => item.score(),
        Choice::Two { left, right } => left ^ right.score(),
        Choice::Nothing => K as u64,
    }
}

fn sift<const K: usize>(seed: u64) -> u64 {
    let items: [Item<K>; 3] = core::array::from_fn(|at| Item::new(seed ^ at as u64));
    items.iter().filter(|item| item.weight % 2 == 0).map(Item::score).fold(0, u64::wrapping_add)
}

#[inline(always)]
fn within<const K: usize>(walk: &mut Walk) -> u64 {
    let deep = (walk.next)(walk);
    weigh::<K>(choose(deep ^ walk.seed))
}

#[inline(always)]
fn around<const K: usize>(walk: &mut Walk) -> u64 {
    Some(walk).filter(|walk| walk.seed != 1).map_or(0, |walk| within::<K>(walk))
}

extern "C" fn step<const K: usize>(walk: &mut Walk) -> u64 {
    if walk.seed == 2 {
        return sift::<K>(black_box(walk.seed));
    }
    black_box(around::<K>(walk)) + 1
}

#[used]
#[unsafe(link_section = "steps")]
static STEPS: [extern "C" fn(&mut Walk) -> u64; 8] =
    [step::<0>, step::<1>, step::<2>, step::<3>, step::<4>, step::<5>, step::<6>, step::<7>];
