//! Where a signal handler finds the span that its thread is in.
//!
//! Not in a thread-local: in a library that was loaded later, the first access on a thread allocates, which a handler must
//! not do.
#![allow(unsafe_code, reason = "a handler reads words through pointers whose owner is kept")]

use std::collections::HashMap;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering, fence};

use parking_lot::Mutex;

use crate::sys::types::{PublishesSpan, TICKED};

/// A power of two.
const ENTRIES: usize = 4096;
/// So that entries are found soon.
const MOST: usize = ENTRIES / 4 * 3;
const MOST_PROBES: usize = 32;

/// Not the ids of threads.
const FREE: u32 = 0;
const REMOVED: u32 = u32::MAX;

/// The threads that publish their spans, by their ids.
#[derive(Debug)]
pub(super) struct ThreadTable {
    entries: Box<[ThreadEntry]>,
    owners: Mutex<Owners>,
}

#[derive(Debug)]
struct ThreadEntry {
    tid: AtomicU32,
    span: AtomicPtr<AtomicU64>,
    turn: AtomicPtr<AtomicU32>,
}

/// What keeps the words of entries.
#[derive(Debug, Default)]
struct Owners {
    /// With the places of their entries.
    present: HashMap<u32, (usize, Arc<dyn PublishesSpan>)>,
    /// A handler may still use them.
    removed: Vec<Arc<dyn PublishesSpan>>,
}

impl ThreadTable {
    pub(super) fn new() -> Self {
        let entry = || ThreadEntry {
            tid: AtomicU32::new(FREE),
            span: AtomicPtr::new(null_mut()),
            turn: AtomicPtr::new(null_mut()),
        };
        let entries = std::iter::repeat_with(entry).take(ENTRIES).collect();
        Self { entries, owners: Mutex::default() }
    }

    fn probes(&self, tid: u32) -> impl Iterator<Item = (usize, &ThreadEntry)> {
        let first = tid.wrapping_mul(0x9e37_79b1) as usize >> 16;
        let places = (first..first + MOST_PROBES).map(|place| place & (ENTRIES - 1));
        places.filter_map(|place| Some((place, self.entries.get(place)?)))
    }

    /// Adds a thread, in place of another one with the same id. Returns false if there is no room. `is_quiet` is whether no handler
    /// runs that may have begun before.
    pub(super) fn add(&self, thread: Arc<dyn PublishesSpan>, is_quiet: impl Fn() -> bool) -> bool {
        let mut owners = self.owners.lock();
        let is_it = |(_, known): &(usize, Arc<dyn PublishesSpan>)| Arc::ptr_eq(known, &thread);
        if owners.present.get(&thread.tid()).is_some_and(is_it) {
            return true;
        }
        self.remove(&mut owners, thread.tid());
        if owners.present.len() >= MOST {
            self.remove_ended(&mut owners);
        }
        owners.forget_removed(is_quiet);
        let is_usable =
            |entry: &ThreadEntry| [FREE, REMOVED].contains(&entry.tid.load(Ordering::Relaxed));
        let mut places = self.probes(thread.tid()).filter(|(_, entry)| is_usable(entry));
        let Some((place, entry)) = places.next().filter(|_| owners.present.len() < MOST) else {
            return false;
        };
        let (span, turn) = thread.words();
        entry.span.store(std::ptr::from_ref(span).cast_mut(), Ordering::Relaxed);
        entry.turn.store(std::ptr::from_ref(turn).cast_mut(), Ordering::Relaxed);
        // Release: who finds the id finds the words.
        entry.tid.store(thread.tid(), Ordering::Release);
        owners.present.insert(thread.tid(), (place, thread));
        true
    }

    fn remove(&self, owners: &mut Owners, tid: u32) {
        let Some((place, owner)) = owners.present.remove(&tid) else { return };
        self.entries
            .get(place)
            .into_iter()
            .for_each(|entry| entry.tid.store(REMOVED, Ordering::Relaxed));
        owners.removed.push(owner);
    }

    fn remove_ended(&self, owners: &mut Owners) {
        let all = owners.present.iter();
        let ended: Vec<_> =
            all.filter(|(_, (_, owner))| owner.is_over()).map(|(tid, _)| *tid).collect();
        ended.into_iter().for_each(|tid| self.remove(owners, tid));
    }

    /// Forgets the threads that have ended.
    pub(super) fn forget_ended(&self, is_quiet: impl Fn() -> bool) {
        let mut owners = self.owners.lock();
        self.remove_ended(&mut owners);
        owners.forget_removed(is_quiet);
    }

    /// For a handler on that thread: its published span, 0 if none. Marks that a sample was taken in it, so that the next
    /// hook of the thread registers the span.
    pub(super) fn tick(&self, tid: u32) -> u64 {
        let mut entries = self.probes(tid).map(|(_, entry)| entry);
        let is_it = |entry: &&ThreadEntry| entry.tid.load(Ordering::Acquire) == tid;
        let Some(entry) = entries.find(is_it) else { return 0 };
        let (span, turn) = (entry.span.load(Ordering::Relaxed), entry.turn.load(Ordering::Relaxed));
        // SAFETY: their owner is kept while they are in an entry, and after that until no handler runs that may have found
        // it. Not null where the entry has an id.
        let (span, turn) = unsafe { (&*span, &*turn) };
        let span = span.load(Ordering::Relaxed);
        if span != 0 {
            turn.fetch_or(TICKED, Ordering::Relaxed);
        }
        span
    }
}

impl Owners {
    fn forget_removed(&mut self, is_quiet: impl Fn() -> bool) {
        // A handler that begins from here on does not find them. Pairs with the fence in `handle`.
        fence(Ordering::SeqCst);
        if is_quiet() {
            self.removed.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    #[derive(Debug)]
    struct Thread {
        tid: u32,
        span: AtomicU64,
        turn: AtomicU32,
        is_over: AtomicBool,
    }

    impl PublishesSpan for Thread {
        fn tid(&self) -> u32 {
            self.tid
        }

        fn words(&self) -> (&AtomicU64, &AtomicU32) {
            (&self.span, &self.turn)
        }

        fn is_over(&self) -> bool {
            self.is_over.load(Ordering::Relaxed)
        }
    }

    fn thread(tid: u32, span: u64) -> Arc<Thread> {
        let (span, turn) = (AtomicU64::new(span), AtomicU32::new(3));
        Arc::new(Thread { tid, span, turn, is_over: AtomicBool::new(false) })
    }

    #[test]
    fn a_thread_is_found_with_its_span_until_it_ends_and_kept_while_a_handler_may_use_it() {
        let table = ThreadTable::new();
        let (in_span, outside) = (thread(7, 5), thread(8, 0));
        for one in [&in_span, &outside] {
            assert!(table.add(Arc::clone(one) as _, || true));
        }
        assert_eq!([7, 8, 9].map(|tid| table.tick(tid)), [5, 0, 0]);
        let turns = [&in_span, &outside].map(|one| one.turn.load(Ordering::Relaxed));
        assert_eq!(turns, [3 | TICKED, 3]);
        // Again, and then another one with its id.
        assert!(table.add(Arc::clone(&in_span) as _, || false));
        let again = thread(7, 6);
        assert!(table.add(Arc::clone(&again) as _, || false));
        assert_eq!(table.tick(7), 6);
        assert_eq!(Arc::strong_count(&in_span), 2, "a handler may run");
        again.is_over.store(true, Ordering::Relaxed);
        table.forget_ended(|| true);
        assert_eq!(table.tick(7), 0);
        assert_eq!([in_span, again, outside].map(|one| Arc::strong_count(&one)), [1, 1, 2]);
    }

    #[test]
    fn threads_that_have_ended_make_room_for_others() {
        let table = ThreadTable::new();
        let all: Vec<_> = (1..=MOST as u32 + 9).map(|tid| thread(tid, tid.into())).collect();
        let added = all.iter().filter(|one| table.add(Arc::clone(one) as _, || true)).count();
        assert!(added > MOST / 2 && added <= MOST, "{added}");
        all.iter().for_each(|one| one.is_over.store(true, Ordering::Relaxed));
        table.forget_ended(|| true);
        let new = thread(1 << 20, 4);
        assert!(table.add(new as _, || true));
        assert_eq!(table.tick(1 << 20), 4);
    }
}
