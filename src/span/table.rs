//! Maps a span's registry id to its slot, without hashing or locks.
//!
//! The table follows the layout of the registry's ids: shard and index, pages that double. The registry does not
//! promise that layout, so lookups compare the whole id, and a span whose slot is taken, or whose id lies outside the
//! table, goes to a map behind a lock. What hooks read without a lock is never released.

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

use super::RegistryId;
use super::slot::Slot;
use crate::sys::SuspendCounting;

/// Slots, laid out as the registry lays out its spans.
///
/// The registry of `tracing-subscriber` (sharded-slab 0.1) numbers spans from 1, per thread: the lowest 38 bits are an
/// address that starts at 0 in each thread and is reused first, the next 13 bits are the thread, and the rest is a
/// generation. Thread and address therefore form an index, pages can double in size as the registry's do, and two open
/// spans never need the same slot.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct SlotTable {
    /// The first page of each shard.
    shards: Box<[OnceLock<Box<[Slot; FIRST_PAGE]>>; SHARDS]>,
    /// The others, once a thread has that many open spans.
    more: OnceLock<Box<[MorePages]>>,
    /// The number of slots outside the table.
    overflow_count: AtomicUsize,
    /// The slots outside the table by shard, so that a thread with many open spans does not make others take the lock.
    overflow_counts: Box<[AtomicU32]>,
    /// Not a lock of parking_lot: a sampled allocation reads it, and parking_lot allocates while it holds its own table.
    overflow: RwLock<Overflow>,
}

const ADDRESS_BITS: u32 = 38;
/// The registry uses 12 of the 13 thread bits: it refuses more threads at once.
const SHARDS: usize = 4096;
const FIRST_PAGE: usize = 16;
/// Pages of 32, 64, ... 8,192 slots: some 16,000 open spans per thread, or 4 MiB. They are never released, since hooks
/// read them without a lock. Further open spans of a thread are in overflow chunks, which are released.
const MORE_PAGES: usize = 9;
/// Slots of a chunk: large enough to be a separate allocation that the allocator returns to the system.
const A_CHUNK: usize = 4096;

type MorePages = OnceLock<Box<[OnceLock<Box<[Slot]>>; MORE_PAGES]>>;

#[derive(Debug, Default)]
struct Overflow {
    /// By shard and chunk number.
    chunks: HashMap<(usize, usize), Arc<Chunk>>,
    /// The last released chunk, for reuse.
    spare: Option<Arc<Chunk>>,
    /// Spans whose slot was taken, by id.
    alone: HashMap<u64, Arc<Slot>>,
    count: usize,
}

#[derive(Debug)]
pub(crate) struct Chunk {
    slots: Box<[Slot]>,
    /// The number of slots in use. Changed only under the lock.
    used: AtomicUsize,
    /// Never in use.
    none: Slot,
}

impl Default for Chunk {
    fn default() -> Self {
        let slots = (0..A_CHUNK).map(|_| Slot::default()).collect();
        Self { slots, used: AtomicUsize::new(0), none: Slot::default() }
    }
}

/// A slot, in the table or in the overflow.
#[derive(Clone, Debug)]
pub(crate) enum SlotRef<'a> {
    InTable(&'a Slot),
    InChunk(Arc<Chunk>, usize),
    Alone(Arc<Slot>),
}

impl Deref for SlotRef<'_> {
    type Target = Slot;

    #[inline(always)]
    fn deref(&self) -> &Slot {
        match self {
            Self::InTable(slot) => slot,
            Self::InChunk(chunk, index) => chunk.slots.get(*index).unwrap_or(&chunk.none),
            Self::Alone(slot) => slot,
        }
    }
}

/// The key of the chunk (shard and number), and the index in it.
fn chunk(id: RegistryId) -> ((usize, usize), usize) {
    let (shard, address) = split(id);
    ((shard, address / A_CHUNK), address % A_CHUNK)
}

impl Overflow {
    fn get(&self, id: RegistryId) -> Option<SlotRef<'static>> {
        let (number, index) = chunk(id);
        let chunk = self.chunks.get(&number).cloned();
        let in_chunk = chunk.map(|chunk| SlotRef::InChunk(chunk, index));
        let in_chunk = in_chunk.filter(|slot| slot.holds(id));
        in_chunk.or_else(|| self.alone.get(&id.get()).cloned().map(SlotRef::Alone))
    }

    fn claim(&mut self, id: RegistryId, is_taken_in_table: bool) -> SlotRef<'static> {
        self.count += 1;
        let (number, index) = chunk(id);
        if !is_taken_in_table {
            let spare = &mut self.spare;
            let new = || spare.take().unwrap_or_default();
            let chunk = Arc::clone(self.chunks.entry(number).or_insert_with(new));
            if chunk.slots.get(index).is_some_and(Slot::is_free) {
                chunk.used.fetch_add(1, Ordering::Relaxed);
                return SlotRef::InChunk(chunk, index);
            }
        }
        SlotRef::Alone(Arc::clone(self.alone.entry(id.get()).or_default()))
    }

    fn release(&mut self, id: RegistryId, slot: &SlotRef<'_>) {
        self.count = self.count.saturating_sub(1);
        slot.release();
        match slot {
            SlotRef::InTable(_) => {}
            SlotRef::InChunk(chunk_of, _) => {
                if chunk_of.used.fetch_sub(1, Ordering::Relaxed) == 1 {
                    self.spare = self.chunks.remove(&chunk(id).0);
                }
            }
            SlotRef::Alone(_) => _ = self.alone.remove(&id.get()),
        }
    }
}

impl SlotTable {
    pub(crate) fn new() -> Self {
        Self {
            shards: Box::new([const { OnceLock::new() }; SHARDS]),
            more: OnceLock::new(),
            overflow_count: AtomicUsize::new(0),
            overflow_counts: (0..SHARDS).map(|_| AtomicU32::new(0)).collect(),
            overflow: RwLock::default(),
        }
    }

    /// The slot of an open profiled span, if it is in the table, as is nearly always the case.
    #[inline(always)]
    pub(crate) fn get_in_table(&self, id: RegistryId) -> Option<&Slot> {
        self.slot_at(id).filter(|slot| slot.holds(id))
    }

    #[inline(always)]
    pub(crate) fn has_overflow(&self) -> bool {
        self.overflow_count.load(Ordering::Acquire) != 0
    }

    /// Whether the slot of a span with that id may be outside the table.
    #[inline(always)]
    pub(crate) fn may_overflow(&self, id: RegistryId) -> bool {
        self.has_overflow() && self.shard_overflows(id)
    }

    #[cold]
    fn shard_overflows(&self, id: RegistryId) -> bool {
        let count = self.overflow_counts.get(split(id).0);
        count.is_some_and(|count| count.load(Ordering::Acquire) != 0)
    }

    /// Under the lock.
    fn count_overflow(&self, id: RegistryId, count: usize, change: i32) {
        if let Some(of_shard) = self.overflow_counts.get(split(id).0) {
            let now = of_shard.load(Ordering::Relaxed).saturating_add_signed(change);
            of_shard.store(now, Ordering::Release);
        }
        self.overflow_count.store(count, Ordering::Release);
    }

    pub(crate) fn get(&self, id: RegistryId) -> Option<SlotRef<'_>> {
        match self.get_in_table(id) {
            Some(slot) => Some(SlotRef::InTable(slot)),
            None if self.may_overflow(id) => self.get_overflow(id),
            None => None,
        }
    }

    /// The slot of the span with that id and that key as a number, if it is open.
    pub(crate) fn find(&self, id: RegistryId, key: u64) -> Option<SlotRef<'_>> {
        self.get(id).filter(|slot| slot.raw_key() == key)
    }

    /// The slot of the parent, which is open as long as the span is.
    pub(crate) fn parent_of(&self, slot: &Slot) -> Option<SlotRef<'_>> {
        self.get(slot.parent()?)
    }

    /// Whether no thread is changing the overflow.
    pub(crate) fn can_look_up(&self) -> bool {
        !self.has_overflow() || self.overflow.try_read().is_ok()
    }

    /// The slot of an open profiled span, if it is in the overflow.
    #[cold]
    pub(crate) fn get_overflow(&self, id: RegistryId) -> Option<SlotRef<'static>> {
        self.overflow.read().unwrap_or_else(PoisonError::into_inner).get(id)
    }

    /// The table's slot for a span that opens, if it is free. It is in use once [`Slot::open`] was called.
    #[inline(always)]
    pub(crate) fn claim_in_table(&self, id: RegistryId) -> Option<&Slot> {
        let slot = match self.slot_at(id) {
            Some(slot) => slot,
            None => self.make(id)?,
        };
        slot.is_free().then_some(slot)
    }

    /// An overflow slot for a span that opens and has no slot in the table.
    #[cold]
    pub(crate) fn claim_overflow(&self, id: RegistryId) -> SlotRef<'static> {
        let _uncounted = SuspendCounting::begin();
        let is_taken_in_table = self.slot_at(id).is_some();
        let mut overflow = self.overflow.write().unwrap_or_else(PoisonError::into_inner);
        let slot = overflow.claim(id, is_taken_in_table);
        self.count_overflow(id, overflow.count, 1);
        slot
    }

    #[cold]
    pub(crate) fn release_overflow(&self, id: RegistryId, slot: &SlotRef<'_>) {
        let _uncounted = SuspendCounting::begin();
        let mut overflow = self.overflow.write().unwrap_or_else(PoisonError::into_inner);
        overflow.release(id, slot);
        self.count_overflow(id, overflow.count, -1);
    }

    /// Visits the slots of all open profiled spans. Spans that open or close during the visit may be missed.
    pub(crate) fn for_each(&self, mut visit: impl FnMut(&Slot)) {
        let first = self.shards.iter().filter_map(OnceLock::get).flat_map(|page| page.iter());
        let more = self.more.get().into_iter().flat_map(|shards| shards.iter());
        let more = more.filter_map(OnceLock::get).flat_map(|pages| pages.iter());
        let more = more.filter_map(OnceLock::get).flat_map(|page| page.iter());
        first.chain(more).filter(|slot| !slot.is_free()).for_each(&mut visit);
        if self.has_overflow() {
            // Not under the lock, since the visitor may take it.
            let overflow = self.overflow.read().unwrap_or_else(PoisonError::into_inner);
            let chunks: Vec<_> = overflow.chunks.values().cloned().collect();
            let alone: Vec<_> = overflow.alone.values().cloned().collect();
            drop(overflow);
            let in_chunks = chunks.iter().flat_map(|chunk| chunk.slots.iter());
            let all = in_chunks.chain(alone.iter().map(|slot| &**slot));
            all.filter(|slot| !slot.is_free()).for_each(visit);
        }
    }

    #[inline(always)]
    fn slot_at(&self, id: RegistryId) -> Option<&Slot> {
        let (shard, address) = split(id);
        match self.shards.get(shard)?.get()?.get(address) {
            Some(slot) => Some(slot),
            None => self.slot_in_more(shard, address),
        }
    }

    #[cold]
    fn make(&self, id: RegistryId) -> Option<&Slot> {
        let _uncounted = SuspendCounting::begin();
        let (shard, address) = split(id);
        let (page, _) = page(address);
        // On the heap from the start: the thread's stack may be small.
        let slots = |count| (0..count).map(|_| Slot::default()).collect::<Box<[Slot]>>();
        let first = self.shards.get(shard)?;
        if first.get().is_none() {
            _ = first.set(slots(FIRST_PAGE).try_into().ok()?);
        }
        if page > 0 {
            let more = self.more.get_or_init(|| (0..SHARDS).map(|_| OnceLock::new()).collect());
            let pages = || Box::new([const { OnceLock::new() }; MORE_PAGES]);
            let pages = more.get(shard)?.get_or_init(pages);
            pages.get(page - 1)?.get_or_init(|| slots(FIRST_PAGE << page));
        }
        self.slot_at(id)
    }

    fn slot_in_more(&self, shard: usize, address: usize) -> Option<&Slot> {
        let (page, offset) = page(address);
        let pages = self.more.get()?.get(shard)?.get()?;
        pages.get(page.checked_sub(1)?)?.get()?.get(offset)
    }
}

/// Shard and address.
#[inline(always)]
fn split(id: RegistryId) -> (usize, usize) {
    let number = id.get() - 1;
    let address = (number & ((1 << ADDRESS_BITS) - 1)) as usize;
    ((number >> ADDRESS_BITS) as usize & (SHARDS - 1), address)
}

/// Page, and index in the page.
fn page(address: usize) -> (usize, usize) {
    // Page n starts at address 16 * (2^n - 1), so the highest bit of address + 16 is bit 4 + n.
    let shifted = address + FIRST_PAGE;
    let page = (shifted.ilog2() - FIRST_PAGE.ilog2()) as usize;
    (page, shifted - (FIRST_PAGE << page))
}

#[cfg(test)]
mod tests {
    use super::super::{Plan, SpanKey};
    use super::*;

    fn id(generation: u64, thread: u64, address: u64) -> RegistryId {
        let number = generation << (ADDRESS_BITS + 13) | thread << ADDRESS_BITS | address;
        RegistryId::new(number + 1).unwrap()
    }

    fn open(table: &SlotTable, id: RegistryId, key: u64) {
        let plan = Plan::default();
        let open = |slot: &Slot| slot.open(id, SpanKey::new(key).unwrap(), 0, 1, &plan, None);
        match table.claim_in_table(id) {
            Some(slot) => open(slot),
            None => open(&table.claim_overflow(id)),
        }
    }

    fn release(table: &SlotTable, id: RegistryId) {
        match table.get(id).unwrap() {
            SlotRef::InTable(slot) => slot.release(),
            slot => table.release_overflow(id, &slot),
        }
    }

    fn key_of(table: &SlotTable, id: RegistryId) -> Option<u64> {
        table.get(id).and_then(|slot| slot.key()).map(SpanKey::get)
    }

    #[test]
    fn pages_double_and_leave_no_gap() {
        let places = [0, 15, 16, 47, 48].map(page);
        assert_eq!(places, [(0, 0), (0, 15), (1, 0), (1, 31), (2, 0)]);
        assert_eq!(split(id(5, 4095, 7)), (4095, 7));
    }

    #[test]
    fn every_open_span_of_many_threads_has_its_own_slot() {
        let table = SlotTable::new();
        // More than one page; Miri would take hours for all.
        let each = if cfg!(miri) { 50 } else { 5_000 };
        let ids: Vec<_> =
            (0..3).flat_map(|thread| (0..each).map(move |at| id(0, thread, at))).collect();
        for (i, id) in ids.iter().enumerate() {
            open(&table, *id, i as u64 + 1);
        }
        for (i, id) in ids.iter().enumerate() {
            assert_eq!(key_of(&table, *id), Some(i as u64 + 1));
        }
        assert_eq!(table.overflow_count.load(Ordering::Relaxed), 0);
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
        release(&table, id(1, 0, 7));
        assert_eq!(key_of(&table, id(1, 0, 7)), None);
        open(&table, id(2, 0, 7), 2);
        assert_eq!(key_of(&table, id(2, 0, 7)), Some(2));
        assert_eq!(table.overflow_count.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn ids_of_another_layout_are_still_found() {
        let table = SlotTable::new();
        // Two open spans with the same slot, an address beyond the last page, a thread beyond the last shard.
        let ids = [id(1, 0, 7), id(2, 0, 7), id(0, 0, 1 << 37), id(0, 4096, 7)];
        for (i, id) in ids.iter().enumerate() {
            open(&table, *id, i as u64 + 1);
        }
        assert_eq!(table.overflow_count.load(Ordering::Relaxed), 3);
        for (i, id) in ids.iter().enumerate() {
            assert_eq!(key_of(&table, *id), Some(i as u64 + 1));
        }
        for id in ids {
            release(&table, id);
            assert_eq!(key_of(&table, id), None);
        }
        assert_eq!(table.overflow_count.load(Ordering::Relaxed), 0);
    }

    /// A hook in a span of another thread must not wait for the lock.
    #[test]
    fn spans_outside_the_table_are_searched_only_where_there_are_some() {
        let table = SlotTable::new();
        let others =
            || [id(0, 1, 7), id(3, 1, 1 << 37), id(0, 4095, 0)].map(|id| table.may_overflow(id));
        for far in [1 << 37, 1 << 36] {
            open(&table, id(0, 2, far), far);
            assert!(table.may_overflow(id(0, 2, far)) && table.may_overflow(id(1, 2, 3)));
            assert_eq!(others(), [false; 3]);
        }
        open(&table, id(0, 1, 1 << 37), 1);
        assert_eq!(others(), [true, true, false]);
        release(&table, id(0, 2, 1 << 37));
        assert_eq!(key_of(&table, id(0, 2, 1 << 36)), Some(1 << 36));
        release(&table, id(0, 2, 1 << 36));
        assert!(!table.may_overflow(id(0, 2, 1 << 36)));
        assert_eq!(key_of(&table, id(0, 1, 1 << 37)), Some(1));
        release(&table, id(0, 1, 1 << 37));
        assert_eq!(others(), [false; 3]);
    }

    /// A visitor may look up slots while other threads wait to open and close spans.
    #[test]
    fn a_visit_does_not_block_other_threads() {
        let table = SlotTable::new();
        open(&table, id(0, 0, 1 << 37), 1);
        let (done, wait) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            table.for_each(|_| {
                let done = done.clone();
                let table = &table;
                scope.spawn(move || {
                    open(table, id(0, 0, (1 << 37) + 1), 2);
                    done.send(()).unwrap();
                });
                wait.recv_timeout(std::time::Duration::from_secs(60)).unwrap();
                assert_eq!(key_of(table, id(0, 0, 1 << 37)), Some(1));
            });
        });
    }
}
