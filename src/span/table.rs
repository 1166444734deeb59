//! From a span's registry id to its slot, without hashing or locks.

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::RwLock;

use super::RegistryId;
use super::slot::Slot;

/// Slots laid out as the registry lays out its spans.
///
/// `tracing-subscriber`'s registry (sharded-slab 0.1) numbers spans from 1 by thread: the lowest
/// 38 bits are an address that restarts at 0 in each thread and is used again first, the next 13
/// bits the thread, the rest a generation. So thread and address are an index, pages can double
/// as the registry's do, and two open spans never want one slot.
///
/// None of this is promised to us. The full id is kept in the slot and compared, and a span that
/// finds its slot taken, or that lies outside the table, goes into a map behind a lock: slower,
/// still right.
#[derive(Debug)]
pub(crate) struct SlotTable {
    shards: Box<[OnceLock<Box<Shard>>]>,
    outside: RwLock<HashMap<u64, Arc<Slot>>>,
    outside_count: AtomicUsize,
}

const ADDRESS_BITS: u32 = 38;
const THREAD_BITS: u32 = 13;
/// The registry refuses more threads at once (`MAX_THREADS` of its configuration).
const SHARDS: usize = 4096;
const FIRST_PAGE: usize = 32;
/// Pages of 64, 128, ... slots: two million open spans of one thread.
const MORE_PAGES: usize = 15;

#[derive(Debug)]
struct Shard {
    // In the shard itself: one load less for a thread with few spans open.
    first: [Slot; FIRST_PAGE],
    more: [OnceLock<Box<[Slot]>>; MORE_PAGES],
}

/// A slot, wherever it lies.
#[derive(Debug)]
pub(crate) enum SlotRef<'a> {
    Inside(&'a Slot),
    Outside(Arc<Slot>),
}

impl Deref for SlotRef<'_> {
    type Target = Slot;

    #[inline(always)]
    fn deref(&self) -> &Slot {
        match self {
            Self::Inside(slot) => slot,
            Self::Outside(slot) => slot,
        }
    }
}

impl SlotTable {
    pub(crate) fn new() -> Self {
        Self {
            shards: (0..SHARDS).map(|_| OnceLock::new()).collect(),
            outside: RwLock::default(),
            outside_count: AtomicUsize::new(0),
        }
    }

    /// The slot of an open profiled span.
    #[inline]
    pub(crate) fn get(&self, id: RegistryId) -> Option<SlotRef<'_>> {
        if let Some(slot) = self.place(id)
            && slot.holds(id)
        {
            return Some(SlotRef::Inside(slot));
        }
        if self.outside_count.load(Ordering::Acquire) == 0 {
            return None;
        }
        self.outside.read().get(&id.get()).cloned().map(SlotRef::Outside)
    }

    /// A free slot for a span that opens. It is in use once [`Slot::open`] was called.
    #[inline]
    pub(crate) fn claim(&self, id: RegistryId) -> SlotRef<'_> {
        match self.place_or_make(id) {
            Some(slot) if slot.is_free() => SlotRef::Inside(slot),
            _ => self.claim_outside(id),
        }
    }

    /// Gives the slot of a closed span back.
    #[inline]
    pub(crate) fn release(&self, id: RegistryId, slot: &SlotRef<'_>) {
        slot.release();
        if let SlotRef::Outside(_) = slot {
            let mut outside = self.outside.write();
            outside.remove(&id.get());
            self.outside_count.store(outside.len(), Ordering::Release);
        }
    }

    #[cold]
    fn claim_outside(&self, id: RegistryId) -> SlotRef<'_> {
        let mut outside = self.outside.write();
        let slot = Arc::clone(outside.entry(id.get()).or_default());
        self.outside_count.store(outside.len(), Ordering::Release);
        SlotRef::Outside(slot)
    }

    #[inline]
    fn place(&self, id: RegistryId) -> Option<&Slot> {
        let (shard, page, offset) = index(id);
        let shard = self.shards.get(shard)?.get()?;
        match page {
            0 => shard.first.get(offset),
            page => shard.more.get(page - 1)?.get()?.get(offset),
        }
    }

    #[inline]
    fn place_or_make(&self, id: RegistryId) -> Option<&Slot> {
        match self.place(id) {
            Some(slot) => Some(slot),
            None => self.make(id),
        }
    }

    #[cold]
    fn make(&self, id: RegistryId) -> Option<&Slot> {
        let (shard, page, _) = index(id);
        let shard = self.shards.get(shard)?.get_or_init(|| {
            Box::new(Shard {
                first: std::array::from_fn(|_| Slot::default()),
                more: std::array::from_fn(|_| OnceLock::new()),
            })
        });
        if page > 0 {
            let slots = || (0..FIRST_PAGE << page).map(|_| Slot::default()).collect();
            shard.more.get(page - 1)?.get_or_init(slots);
        }
        self.place(id)
    }
}

/// Shard, page, and place in the page.
#[inline]
fn index(id: RegistryId) -> (usize, usize, usize) {
    let number = id.get() - 1;
    let address = (number & ((1 << ADDRESS_BITS) - 1)) as usize;
    let shard = (number >> ADDRESS_BITS) as usize & ((1 << THREAD_BITS) - 1);
    // Page n holds the addresses from 32 * (2^n - 1) on, so address + 32 has its bit 5 + n first.
    let shifted = address + FIRST_PAGE;
    let page = shifted.ilog2() - FIRST_PAGE.ilog2();
    (shard, page as usize, shifted - (FIRST_PAGE << page))
}

#[cfg(test)]
mod tests {
    use super::super::{Plan, SpanKey};
    use super::*;

    fn id(generation: u64, thread: u64, address: u64) -> RegistryId {
        let number =
            generation << (ADDRESS_BITS + THREAD_BITS) | thread << ADDRESS_BITS | address;
        RegistryId::new(number + 1).unwrap()
    }

    fn open(table: &SlotTable, id: RegistryId, key: u64) {
        let plan = Plan { number: 0, suspect_after: 0, flags: 0, period_ns: 5 };
        table.claim(id).open(id, SpanKey::new(key).unwrap(), 0, &plan, None);
    }

    fn key_of(table: &SlotTable, id: RegistryId) -> Option<u64> {
        table.get(id).and_then(|slot| slot.key()).map(SpanKey::get)
    }

    #[test]
    fn pages_double_and_leave_no_gap() {
        assert_eq!(index(id(0, 0, 0)), (0, 0, 0));
        assert_eq!(index(id(0, 0, 31)), (0, 0, 31));
        assert_eq!(index(id(0, 0, 32)), (0, 1, 0));
        assert_eq!(index(id(0, 0, 95)), (0, 1, 63));
        assert_eq!(index(id(0, 0, 96)), (0, 2, 0));
        assert_eq!(index(id(5, 4095, 0)), (4095, 0, 0));
    }

    #[test]
    fn every_open_span_of_many_threads_has_its_own_slot() {
        let table = SlotTable::new();
        let ids: Vec<_> =
            (0..3).flat_map(|thread| (0..5_000).map(move |at| id(0, thread, at))).collect();
        for (i, id) in ids.iter().enumerate() {
            open(&table, *id, i as u64 + 1);
        }
        for (i, id) in ids.iter().enumerate() {
            assert_eq!(key_of(&table, *id), Some(i as u64 + 1));
        }
        assert_eq!(table.outside_count.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn an_id_of_another_generation_is_not_found() {
        let table = SlotTable::new();
        open(&table, id(1, 0, 7), 1);
        assert_eq!(key_of(&table, id(2, 0, 7)), None);
        assert_eq!(key_of(&table, id(1, 0, 7)), Some(1));
    }

    #[test]
    fn a_slot_is_used_again_after_release() {
        let table = SlotTable::new();
        open(&table, id(1, 0, 7), 1);
        let slot = table.get(id(1, 0, 7)).unwrap();
        table.release(id(1, 0, 7), &slot);
        assert_eq!(key_of(&table, id(1, 0, 7)), None);
        open(&table, id(2, 0, 7), 2);
        assert_eq!(key_of(&table, id(2, 0, 7)), Some(2));
        assert_eq!(table.outside_count.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn ids_of_another_layout_are_still_found() {
        let table = SlotTable::new();
        // Two open spans that want one slot, an address beyond the last page, a thread beyond
        // the last shard.
        let ids = [id(1, 0, 7), id(2, 0, 7), id(0, 0, 1 << 37), id(0, 8000, 0)];
        for (i, id) in ids.iter().enumerate() {
            open(&table, *id, i as u64 + 1);
        }
        assert_eq!(table.outside_count.load(Ordering::Relaxed), 3);
        for (i, id) in ids.iter().enumerate() {
            assert_eq!(key_of(&table, *id), Some(i as u64 + 1));
        }
        for id in ids {
            let slot = table.get(id).unwrap();
            table.release(id, &slot);
            drop(slot);
            assert_eq!(key_of(&table, id), None);
        }
        assert_eq!(table.outside_count.load(Ordering::Relaxed), 0);
    }
}
