//! The time that a thread spends in descendants of spans that it is not in.
//!
//! Tasks on many threads can be below one long-lived span. If each thread added each segment to that span's slot, all of
//! them would write the same cache lines all the time. Therefore a thread that does so often adds the segments up by
//! itself, and moves the sums to the slot when its accounts are synced; what is left is moved when the span closes.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::RegistryId;
use super::account::{InsideTime, Sums};
use super::flags::HAS_SUMS;
use super::slot::Slot;
use super::table::SlotTable;

/// What one thread counts for others to read.
#[derive(Debug)]
pub(super) struct ThreadTotals {
    /// The number of spans that the thread has created.
    pub(super) seen: AtomicU64,
    /// Held while a sum is moved to a slot, or its place is taken by another one.
    moving: Mutex<()>,
    sums: Box<[Sum]>,
}

impl Default for ThreadTotals {
    fn default() -> Self {
        let sums = (0..PLACES).map(|_| Sum::default()).collect();
        Self { seen: AtomicU64::new(0), moving: Mutex::default(), sums }
    }
}

/// The segments that one thread spent inside one span. Only the thread itself adds to it, plainly: the span is open then.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Sum {
    id: AtomicU64,
    /// The span's key as a number; 0 if the place is free.
    key: AtomicU64,
    /// The ticks that [`Slot::use_up_delay`] has not been given, and the [`InsideTime`].
    sums: Sums<4>,
}

/// Spans around others that a thread is likely to meet at a time, such as connections.
const PLACES: usize = 8;
/// Segments of a thread inside a span before it adds them up by itself. Requests that spawn a few tasks stay below, so
/// that their close need not look at all threads.
const MANY: u32 = 32;

/// The thread's own side of its sums.
#[derive(Debug, Default)]
pub(super) struct Inside {
    pub(super) totals: Arc<ThreadTotals>,
    /// By place: the key of the last span, and how many segments the thread had inside it, up to [`MANY`].
    last: [Cell<(u64, u32)>; PLACES],
    has_sums: Cell<bool>,
    /// How many ancestors the current hook visits at most, and from when on one may visit all.
    pub(super) reach: Cell<u32>,
    all_from: Cell<u64>,
}

/// How many ancestors of a span that a thread is not in each hook visits; all of them only for some percent of its time.
const NEAREST: u32 = 64;

fn place_of(key: u64) -> usize {
    (key % PLACES as u64) as usize
}

impl Sum {
    fn add(&self, ticks: u64, [on_ns, unsure_ns, sampled_ns]: InsideTime) {
        self.sums.add_alone([ticks, on_ns, unsure_ns, sampled_ns]);
    }

    fn get(&self) -> (u64, InsideTime) {
        let [ticks, time @ ..] = self.sums.get();
        (ticks, time)
    }

    /// Moves the sum to its span's slot. With the lock.
    fn move_to(&self, slot: &Slot) {
        let (ticks, time) = self.get();
        self.sums.clear();
        if ticks > 0 || time != InsideTime::default() {
            slot.use_up_delay(ticks);
            slot.count_inside(time);
        }
    }

    /// Moves the sum if the span is open, which then cannot close during this. If it has closed, no sum is left.
    fn move_to_slot(&self, table: &SlotTable) {
        let key = self.key.load(Ordering::Relaxed);
        let slot = RegistryId::new(self.id.load(Ordering::Relaxed)).and_then(|id| table.get(id));
        if let Some(slot) = slot.filter(|slot| key != 0 && slot.raw_key() == key) {
            self.move_to(&slot);
        }
    }
}

impl ThreadTotals {
    /// Whether a sum has not been moved yet.
    pub(super) fn has_sums(&self) -> bool {
        self.sums.iter().any(|sum| sum.key.load(Ordering::Relaxed) != 0)
    }
}

impl Inside {
    /// For how many ticks the span is older than its slot says, because of this thread.
    pub(super) fn ticks(&self, key: u64) -> u64 {
        let sum = self.totals.sums.get(place_of(key));
        let sum = sum.filter(|sum| sum.key.load(Ordering::Relaxed) == key);
        sum.map_or(0, |sum| sum.get().0)
    }

    /// Adds a segment of this thread inside the span of that slot.
    pub(super) fn add(&self, table: &SlotTable, slot: &Slot, ticks: u64, time: InsideTime) {
        slot.note_inside();
        let key = slot.raw_key();
        let at = place_of(key);
        let (Some(last), Some(sum)) = (self.last.get(at), self.totals.sums.get(at)) else {
            return;
        };
        let (last_key, before) = last.get();
        let before = if last_key == key { before } else { 0 };
        if before >= MANY {
            sum.add(ticks, time);
            return;
        }
        last.set((key, before + 1));
        if sum.key.load(Ordering::Relaxed) != 0 {
            let _moving = self.totals.moving.lock();
            sum.move_to_slot(table);
            sum.key.store(0, Ordering::Relaxed);
        }
        if before + 1 == MANY {
            // First, so that the thread that closes the span looks for the sum.
            slot.set(HAS_SUMS);
            let _moving = self.totals.moving.lock();
            sum.id.store(slot.id().map_or(0, RegistryId::get), Ordering::Relaxed);
            sum.key.store(key, Ordering::Relaxed);
            self.has_sums.set(true);
        }
        slot.use_up_delay(ticks);
        slot.count_inside(time);
    }

    /// A hook begins at `now` that may visit ancestors that the thread is not in.
    pub(super) fn set_reach(&self, now: u64) {
        self.reach.set(if now < self.all_from.get() { NEAREST } else { u32::MAX });
    }

    /// The hook, not an enter, visited that number. To visit one takes a small part of `pause`, in ticks.
    pub(super) fn note_reached(&self, visited: u32, now: u64, pause: u64) {
        if visited > NEAREST {
            self.all_from.set(now.saturating_add(pause.saturating_mul(visited.into())));
        }
    }

    /// Moves what this thread has added up to the slots.
    pub(super) fn move_sums(&self, table: &SlotTable) {
        if self.has_sums.get() {
            let _moving = self.totals.moving.lock();
            self.totals.sums.iter().for_each(|sum| sum.move_to_slot(table));
            self.has_sums.set(self.totals.has_sums());
        }
    }
}

/// What threads count, and the number of spans that were created.
#[derive(Debug, Default)]
pub(super) struct SpanCounts {
    threads: Vec<Arc<ThreadTotals>>,
    /// By threads that have ended.
    before: u64,
    /// At how many threads those that have ended are forgotten: twice as many as were left the last time.
    most: usize,
}

impl SpanCounts {
    pub(super) fn add_thread(&mut self, totals: &Arc<ThreadTotals>) {
        const LEAST: usize = 64;
        if self.threads.len() >= self.most.max(LEAST) {
            self.forget_ended();
            self.most = 2 * self.threads.len();
        }
        self.threads.push(Arc::clone(totals));
    }

    fn forget_ended(&mut self) {
        let before = &mut self.before;
        self.threads.retain(|totals| {
            let stays = Arc::strong_count(totals) > 1 || totals.has_sums();
            *before += if stays { 0 } else { totals.seen.load(Ordering::Relaxed) };
            stays
        });
    }

    pub(super) fn seen(&self) -> u64 {
        let threads = self.threads.iter().map(|totals| totals.seen.load(Ordering::Relaxed));
        self.before + threads.sum::<u64>()
    }

    /// The span of that slot closes: moves what all threads have added up for it to its slot.
    pub(super) fn move_sums_of(&self, slot: &Slot) {
        self.for_sums_of(slot, |sum| {
            sum.move_to(slot);
            sum.key.store(0, Ordering::Relaxed);
        });
    }

    /// What threads have added up for an open span and not moved yet.
    pub(super) fn sums_of(&self, slot: &Slot) -> InsideTime {
        let mut all = InsideTime::default();
        self.for_sums_of(slot, |sum| {
            all.iter_mut().zip(sum.get().1).for_each(|(all, more)| *all += more);
        });
        all
    }

    fn for_sums_of(&self, slot: &Slot, mut visit: impl FnMut(&Sum)) {
        let key = slot.raw_key();
        for totals in &self.threads {
            let _moving = totals.moving.lock();
            let sum = totals.sums.get(place_of(key));
            sum.filter(|sum| sum.key.load(Ordering::Relaxed) == key)
                .into_iter()
                .for_each(&mut visit);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn thread(seen: u64) -> Arc<ThreadTotals> {
        Arc::new(ThreadTotals { seen: AtomicU64::new(seen), ..ThreadTotals::default() })
    }

    /// Each new thread looks at a bounded number of others, however many there are.
    #[test]
    fn ended_threads_are_forgotten_now_and_then_and_their_spans_still_count() {
        let mut counts = SpanCounts::default();
        let lives: Vec<_> = (0..100).map(|_| thread(1)).collect();
        lives.iter().for_each(|thread| counts.add_thread(thread));
        let (mut most, mut forgotten) = (0, 0);
        for _ in 0..10_000 {
            let before = counts.threads.len();
            counts.add_thread(&thread(3));
            most = most.max(counts.threads.len());
            forgotten += usize::from(counts.threads.len() <= before);
        }
        assert_eq!(counts.seen(), 100 + 3 * 10_000);
        assert!(most <= 2 * 101 + 1, "{most}");
        assert!(forgotten <= 10_000 / 99, "checked all of them {forgotten} times");
    }
}
