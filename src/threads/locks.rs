//! The locks that blocked threads wait for and may hold.
//!
//! A mutex of glibc has the id of the thread that holds it. Of other locks that is inferred: a guard has the address of the
//! lock, and is on the stack of the thread that holds it. Known are the locks of the standard library, parking_lot and
//! dashmap that one thread holds alone, of `RwLock` of the standard library also to read.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use crate::sys::{self, Blocked, Call};

/// The stacks of more threads are not searched.
pub(crate) const MAX_THREADS: usize = 1_000;
const STACK_BYTES: u64 = 64 << 10;

pub(crate) struct BlockedThread {
    pub(crate) tid: u32,
    pub(crate) cpu_ns: u64,
    sp: u64,
    /// The futex in which it is blocked if that is no lock: of a condition variable, or it is parked.
    pub(super) other_futex: Option<u64>,
    /// The address of the lock that it waits for, and the thread that holds it, if that is certain.
    pub(crate) lock: Option<u64>,
    pub(crate) owner: Option<u32>,
}

impl BlockedThread {
    /// `mappings` are those of the process.
    pub(crate) fn of(tid: u32, mappings: &[Range<u64>]) -> Option<Self> {
        if tid == sys::current_tid() {
            return None;
        }
        let cpu_ns = sys::cpu_ns_of(tid)?;
        let Blocked { call, sp, .. } = Blocked::of(tid).ok()??;
        let owner = call.lock_owner();
        let futex = futex_of(call);
        let lock = futex.and_then(|futex| {
            if owner.is_some() { Some(futex) } else { lock_at(futex, sp, mappings) }
        });
        let other_futex = futex.filter(|_| lock.is_none());
        Some(Self { tid, cpu_ns, sp, other_futex, lock, owner })
    }

    /// Which of the locks its stack has, other than the one that it waits for, and how often.
    pub(crate) fn locks_on_stack(
        &self,
        mappings: &[Range<u64>],
        locks: &HashSet<u64>,
        bytes: &mut Vec<u8>,
    ) -> HashMap<u64, OnStack> {
        let stack = stack_in(mappings, self.sp);
        let length = (stack.end - stack.start) as usize;
        if sys::read_own_stack(stack.start, length, bytes).is_err() {
            bytes.clear();
        }
        let words = bytes.as_chunks().0.iter().map(|word| u64::from_ne_bytes(*word));
        let mut found = locks_in(words, locks);
        self.lock.iter().for_each(|own| _ = found.remove(own));
        found
    }

    /// Whether it waits in a condition variable of the lock, which it does not hold then.
    pub(super) fn waits_with(&self, lock: u64, on_stack: OnStack, mappings: &[Range<u64>]) -> bool {
        self.other_futex.is_some_and(|futex| {
            on_stack.first < WORDS_OF_CONDVAR
                || parking_lot::is_condvar_of(lock, futex, self.sp, mappings)
        })
    }
}

/// Where a stack has the address of a lock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OnStack {
    /// How many words above the stack pointer it is first.
    first: usize,
    pub(crate) times: u32,
}

/// A condition variable of the standard library has its mutex this near to the stack pointer while it waits: 5 words have been
/// seen, with musl 16; and at least 53 of one who holds a mutex and waits for a message. A word that an earlier call left there
/// hides who holds it and waits for another condition variable.
const WORDS_OF_CONDVAR: usize = 24;

pub(super) fn locks_in(
    words: impl Iterator<Item = u64>,
    locks: &HashSet<u64>,
) -> HashMap<u64, OnStack> {
    let mut found: HashMap<u64, OnStack> = HashMap::new();
    // Nearly all words are beyond these.
    let (lowest, highest) = (locks.iter().min(), locks.iter().max());
    let range = lowest.copied().unwrap_or(1)..=highest.copied().unwrap_or(0);
    let is_lock = |(_, word): &(usize, u64)| range.contains(word) && locks.contains(word);
    for (first, lock) in words.enumerate().filter(is_lock) {
        found.entry(lock).or_insert(OnStack { first, times: 0 }).times += 1;
    }
    found
}

/// What is read of the stack of a thread with this stack pointer. Right above it can be a heap, with the addresses of locks of
/// all threads. (Before Linux 6.7, or with musl, both can be one mapping; a deadlock can be missed then.)
fn stack_in(mappings: &[Range<u64>], sp: u64) -> Range<u64> {
    let end = sp.saturating_add(STACK_BYTES);
    sp..mapping_at(mappings, sp).map_or(end, |mapping| mapping.end.min(end))
}

fn mapping_at(mappings: &[Range<u64>], address: u64) -> Option<&Range<u64>> {
    let after = mappings.partition_point(|mapping| mapping.end <= address);
    mappings.get(after).filter(|mapping| mapping.contains(&address))
}

pub(super) fn futex_of(call: Call) -> Option<u64> {
    match call {
        Call::Futex(futex) | Call::PlainFutex(futex) => Some(futex),
        _ => None,
    }
}

/// What the words of a futex say of it.
enum Futex {
    /// The futex belongs to the lock at this address, or so it seems: condition variables count there.
    Lock(u64),
    ParkingLot,
    Other,
}

impl Futex {
    fn at(futex: u64) -> Self {
        let word = |at: u64| {
            let bytes = sys::read_own_memory(at..at.checked_add(4)?).ok()?;
            Some(u32::from_ne_bytes(bytes.try_into().ok()?))
        };
        // Writers wait for the word after the state, a counter.
        let state = futex.checked_sub(4);
        if let Some(state) =
            state.filter(|at| word(*at).is_some_and(std_lock::is_held_with_writers))
        {
            return Self::Lock(state);
        }
        match word(futex) {
            None | Some(std_lock::THREAD_PARKED) => Self::Other,
            Some(std_lock::MUTEX_CONTENDED) => Self::Lock(futex),
            Some(state) if std_lock::is_written_with_readers(state) => Self::Lock(futex),
            Some(parking_lot::PARKED) => Self::ParkingLot,
            Some(_) => Self::Other,
        }
    }
}

/// Whether the futex may belong to a lock, as far as its word shows.
pub(super) fn may_be_lock(futex: u64) -> bool {
    !matches!(Futex::at(futex), Futex::Other)
}

/// The lock for which another thread with that stack pointer waits, if the futex belongs to one.
pub(super) fn lock_at(futex: u64, sp: u64, mappings: &[Range<u64>]) -> Option<u64> {
    match Futex::at(futex) {
        Futex::Lock(lock) => Some(lock),
        Futex::ParkingLot => parking_lot::lock_of(futex, sp, mappings),
        Futex::Other => None,
    }
}

/// What `std::sys::sync::mutex::futex` and `rwlock::futex` have while a thread waits.
mod std_lock {
    pub(super) const MUTEX_CONTENDED: u32 = 2;
    /// What a parked thread has; and a lock for whose writer others wait to read and to write.
    pub(super) const THREAD_PARKED: u32 = u32::MAX;

    const WRITTEN: u32 = (1 << 30) - 1;
    const READERS_WAIT: u32 = 1 << 30;
    const WRITERS_WAIT: u32 = 1 << 31;

    pub(super) fn is_written_with_readers(state: u32) -> bool {
        state & WRITTEN == WRITTEN && state & READERS_WAIT != 0
    }

    pub(super) fn is_held_with_writers(state: u32) -> bool {
        matches!(state & WRITTEN, WRITTEN | 1) && state & WRITERS_WAIT != 0
    }
}

/// Each thread waits for a futex of its own, next to which is the address of the lock: `ThreadData` in
/// `parking_lot_core/src/parking_lot.rs`. The compiler chooses the order of its fields.
mod parking_lot {
    use super::{Range, mapping_at, sys};

    pub(super) const PARKED: u32 = 1;

    /// How far the address can be from the futex, and how much of the stack the functions that lock may have.
    const AROUND: u64 = 64;
    const LOCKING: usize = 4 << 10;

    pub(super) fn lock_of(futex: u64, sp: u64, mappings: &[Range<u64>]) -> Option<u64> {
        keys(futex, sp, mappings)?.into_iter().find_map(|key| {
            if word_at(key).is_some_and(is_held) {
                return Some(key);
            }
            // Readers of dashmap wait for the byte after.
            let lock = key.checked_sub(1).filter(|lock| lock % 8 == 0)?;
            word_at(lock).is_some_and(is_held_in_dashmap).then_some(lock)
        })
    }

    /// Whether a thread waits in a condition variable of that mutex, which has its address.
    pub(super) fn is_condvar_of(lock: u64, futex: u64, sp: u64, mappings: &[Range<u64>]) -> bool {
        let keys = keys(futex, sp, mappings).unwrap_or_default();
        keys.into_iter().any(|key| word_at(key) == Some(lock))
    }

    /// What may be the address for which the thread waits.
    fn keys(futex: u64, sp: u64, mappings: &[Range<u64>]) -> Option<Vec<u64>> {
        let around = (futex & !7).checked_sub(AROUND)?..(futex & !7).checked_add(AROUND)?;
        let mut keys = words(&sys::read_own_memory(around).ok()?);
        // The futex is a thread-local, which the C library has above the stack. Of the first thread it is elsewhere, but the
        // address of the lock is mostly on the stack, too.
        if !mapping_at(mappings, sp).is_some_and(|stack| stack.contains(&futex)) {
            let mut on_stack = Vec::new();
            sys::read_own_stack(sp, LOCKING, &mut on_stack).ok()?;
            let on_stack = words(&on_stack);
            keys.retain(|key| on_stack.contains(key));
        }
        Some(keys)
    }

    /// `None` if it is no address.
    fn word_at(address: u64) -> Option<u64> {
        let bytes = sys::read_own_memory(address..address.checked_add(8)?).ok()?;
        bytes.first_chunk().copied().map(u64::from_le_bytes)
    }

    fn words(bytes: &[u8]) -> Vec<u64> {
        bytes.as_chunks().0.iter().map(|word| u64::from_ne_bytes(*word)).collect()
    }

    /// Whether a lock with this word, the first byte being the lowest, is held by one thread, and others wait.
    pub(super) fn is_held(word: u64) -> bool {
        /// `LOCKED_BIT` and `PARKED_BIT` of a `RawMutex`, a byte.
        const MUTEX: u64 = 0b11;
        /// `WRITER_BIT` and `PARKED_BIT` of a `RawRwLock`, a word.
        const WRITTEN: u64 = 0b1001;
        word & 0xff == MUTEX || word == WRITTEN || is_held_in_dashmap(word)
    }

    /// `ONE_WRITER`, and `READERS_PARKED` or `WRITERS_PARKED`, in `dashmap/src/lock.rs`.
    pub(super) fn is_held_in_dashmap(word: u64) -> bool {
        const PARKED: u64 = 0b11;
        word | PARKED == u64::MAX && word & PARKED != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_that_one_thread_holds_and_others_wait_for_is_known_by_its_word() {
        for (word, expected) in [
            (0b11, true),
            (0x7f00_0003, true),
            (0b10, false),
            (0b01, false),
            (0b1001, true),
            // Not held by a writer, or no thread waits.
            (0b1_0001, false),
            (0b1000, false),
            (u64::MAX, true),
            (u64::MAX - 1, true),
            (u64::MAX - 2, true),
            (u64::MAX - 3, false),
            (0, false),
        ] {
            assert_eq!(parking_lot::is_held(word), expected, "{word:#x}");
        }
        assert!(!parking_lot::is_held_in_dashmap(0b11));
        let (readers, writers) = (1 << 30, 1 << 31);
        let written = (1 << 30) - 1;
        assert!(std_lock::is_written_with_readers(written | readers));
        assert!(std_lock::is_held_with_writers(written | readers | writers));
        assert!(std_lock::is_held_with_writers(1 | writers), "one reader");
        assert!(!std_lock::is_written_with_readers(written));
        assert!(!std_lock::is_held_with_writers(5 | writers), "five readers");
        assert!(!std_lock::is_held_with_writers(writers), "none");
    }

    #[test]
    fn what_lies_above_a_stack_is_not_part_of_it() {
        const K: u64 = 1 << 10;
        let (low, stack, heap) = (K..2 * K, 4 * K..100 * K, 100 * K..900 * K);
        let mappings = [low, stack, heap];
        assert_eq!(stack_in(&mappings, 90 * K), 90 * K..100 * K);
        assert_eq!(stack_in(&mappings, 5 * K), 5 * K..69 * K, "not all of a large one");
        assert_eq!(stack_in(&mappings, 100 * K), 100 * K..164 * K);
        // The list is from before the stack was mapped, or there is none.
        assert_eq!(stack_in(&mappings, 3 * K), 3 * K..67 * K);
        assert_eq!(stack_in(&[], 3 * K), 3 * K..67 * K);
    }
}
