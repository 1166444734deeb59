//! Which thread holds the lock that another one waits for.
//!
//! Where the lock does not state it: a thread that had its address on the stack when it was first sought, and that has run
//! when the end of the wait is noticed, since only a thread that runs can unlock. So threads that merely know the lock and
//! sleep are ruled out. While the wait goes on, they are not.

use std::collections::HashMap;
use std::ops::Range;
use std::time::Duration;

use super::locks::{futex_of, lock_at, may_be_lock};
use crate::budget::CpuBudget;
use crate::sinks::Holder;
use crate::sys::{self, Call, OsThread};

/// Of shorter waits, no holder is sought.
const MIN_WAIT: Duration = Duration::from_millis(10);

/// All threads are searched for all such locks at once, which takes some 30 µs for each thread.
pub(super) const SEARCHES: CpuBudget = CpuBudget::new(1, 20_000_000);

/// A holder is sought at most this many times, the last time after 20 seconds.
const MAX_SEARCHES: u32 = 12;

/// How many threads may hold a lock; beyond these, the likeliest.
pub(super) const MAX_HOLDERS: usize = 8;

#[derive(Debug, Default)]
pub(super) struct HolderSearch {
    /// As the lock states it.
    stated: Option<Holder>,
    /// What a thread waits for, its id and its stack pointer.
    futex: Option<(u64, u32, u64)>,
    lock: Option<u64>,
    searches: u32,
    possible: Vec<HolderCandidate>,
}

impl HolderSearch {
    /// Of thread `tid` with that stack pointer, which is blocked in this call.
    pub(super) fn of(call: Call, tid: u32, sp: u64) -> Self {
        let stated = Holder::stated_by(call, tid);
        let futex = futex_of(call).filter(|_| stated.is_none()).map(|futex| (futex, tid, sp));
        Self { stated, futex, ..Self::default() }
    }

    /// Whether it is to be sought: at 10 ms, and until one is found, each time that the wait is twice as long.
    pub(super) fn is_due(&self, waited_ns: u64) -> bool {
        let due = MIN_WAIT.saturating_mul(1 << self.searches.min(MAX_SEARCHES));
        self.futex.is_some()
            && self.possible.is_empty()
            && self.searches < MAX_SEARCHES
            && u128::from(waited_ns) >= due.as_nanos()
    }

    /// Begins a search, or postpones it. Returns whether the thread seems to wait for a lock.
    pub(super) fn begin(&mut self) -> bool {
        self.searches += 1;
        self.futex.is_some_and(|(futex, ..)| may_be_lock(futex))
    }

    /// The lock whose holder is to be sought, if the thread waits for one. `mappings` are those of the process.
    pub(super) fn find_lock(&mut self, mappings: &[Range<u64>]) -> Option<u64> {
        self.lock = self.futex.and_then(|(futex, _, sp)| lock_at(futex, sp, mappings));
        self.lock
    }

    /// Takes those that may hold its lock, if none was known.
    pub(super) fn end(
        &mut self,
        holders: &HashMap<u64, Vec<HolderCandidate>>,
        mappings: &[Range<u64>],
    ) {
        let lock = self.lock.filter(|_| self.possible.is_empty());
        let Some((lock, found)) = lock.and_then(|lock| Some((lock, holders.get(&lock)?))) else {
            return;
        };
        // If it was given back during the search, stacks that were read after that say nothing of it: a thread that has waited
        // in a condition variable of the lock no longer does.
        if self.find_lock(mappings) != Some(lock) {
            return;
        }
        // Itself if it has the lock by now.
        let is_other = |holder: &&HolderCandidate| {
            self.futex.is_none_or(|(_, tid, _)| tid != holder.thread.tid)
        };
        self.possible.extend(found.iter().filter(is_other).take(MAX_HOLDERS).cloned());
    }

    /// The likeliest one; `None` if two are equally likely. If the wait has ended, one that has run.
    pub(super) fn likeliest(&self, has_ended: bool) -> Option<Holder> {
        // Since its stack was read.
        let has_run = |it: &HolderCandidate| {
            it.blocked_cpu_ns.is_none_or(|before| sys::cpu_ns_of(it.thread.tid) != Some(before))
        };
        let ran: Vec<_> = self.possible.iter().filter(|it| !has_ended || has_run(it)).collect();
        let Some(best) = ran.iter().max_by_key(|thread| thread.rank()) else { return self.stated };
        let is_only_one = ran.iter().filter(|thread| thread.rank() == best.rank()).count() == 1;
        let HolderCandidate { thread, span, .. } = **best;
        is_only_one.then_some(Holder { thread, span, is_inferred: true })
    }
}

#[derive(Clone, Debug)]
pub(super) struct HolderCandidate {
    pub(super) thread: OsThread,
    pub(super) span: u64,
    /// The thread's CPU time while it was blocked; `None` if it ran.
    pub(super) blocked_cpu_ns: Option<u64>,
    /// The thread waited in a condition variable, perhaps of this lock, or was parked.
    pub(super) is_in_other_futex: bool,
    /// How often its stack has the lock.
    pub(super) times: u32,
}

impl HolderCandidate {
    /// The likelier, the larger.
    pub(super) fn rank(&self) -> impl Ord + use<> {
        (!self.is_in_other_futex, self.times)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

    use super::super::locks::BlockedThread;
    use super::*;

    fn thread(tid: u32, is_in_other_futex: bool, times: u32) -> HolderCandidate {
        let (thread, span) = (OsThread::new(tid, b""), Holder::NO_SPAN);
        HolderCandidate { thread, span, blocked_cpu_ns: None, is_in_other_futex, times }
    }

    #[test]
    fn a_thread_that_is_no_more_likely_than_another_is_not_named() {
        let named = |threads: &[HolderCandidate]| {
            let sought = HolderSearch { possible: threads.to_vec(), ..HolderSearch::default() };
            Some(sought.likeliest(true)?.thread.tid)
        };
        assert_eq!(named(&[]), None);
        assert_eq!(named(&[thread(1, false, 1)]), Some(1));
        assert_eq!(named(&[thread(1, false, 1), thread(2, false, 3)]), Some(2));
        assert_eq!(named(&[thread(1, false, 1), thread(2, true, 3)]), Some(1));
        assert_eq!(named(&[thread(1, true, 2)]), Some(1));
        assert_eq!(named(&[thread(1, false, 2), thread(2, false, 2)]), None);
    }

    /// A mutex of the standard library, for which thread 1 waits.
    fn waits_for(word: &AtomicU32) -> HolderSearch {
        let futex = std::ptr::from_ref(word).addr() as u64;
        HolderSearch { futex: Some((futex, 1, 0)), lock: Some(futex), ..HolderSearch::default() }
    }

    #[test]
    fn a_thread_that_has_the_lock_by_now_does_not_hold_it_for_itself() {
        if cfg!(tracing_profiling_unsupported) {
            return;
        }
        let words = [AtomicU32::new(0), AtomicU32::new(2)];
        let mut sought = waits_for(&words[1]);
        let lock = sought.lock.unwrap();
        let (own, others) = (vec![thread(1, false, 3)], vec![thread(2, false, 3)]);
        sought.end(&HashMap::from([(lock, own), (lock + 8, others)]), &[]);
        assert!(sought.likeliest(true).is_none());
        sought.end(&HashMap::from([(lock, vec![thread(1, false, 3), thread(3, false, 1)])]), &[]);
        assert_eq!(sought.likeliest(true).unwrap().thread.tid, 3);
    }

    #[test]
    fn a_lock_that_is_given_back_during_a_search_has_no_holder() {
        if cfg!(tracing_profiling_unsupported) {
            return;
        }
        let words = [AtomicU32::new(0), AtomicU32::new(2)];
        let mut sought = waits_for(&words[1]);
        let found = HashMap::from([(sought.lock.unwrap(), vec![thread(3, false, 1)])]);
        words[1].store(1, Ordering::Relaxed);
        sought.end(&found, &[]);
        assert!(sought.likeliest(false).is_none());
        let mut sought = waits_for(&words[1]);
        words[1].store(2, Ordering::Relaxed);
        sought.end(&found, &[]);
        assert_eq!(sought.likeliest(false).unwrap().thread.tid, 3);
    }

    #[test]
    fn a_holder_is_sought_less_and_less_often() {
        let mut sought = HolderSearch { futex: Some((8, 1, 0)), ..HolderSearch::default() };
        const MS: u64 = 1_000_000;
        for due_ms in [10, 20, 40, 80] {
            assert!(!sought.is_due(due_ms * MS - 1) && sought.is_due(due_ms * MS));
            assert!(!sought.begin(), "nothing is there");
        }
        (0..MAX_SEARCHES).for_each(|_| _ = sought.begin());
        assert!(!sought.is_due(u64::MAX), "for an hour");
    }

    #[test]
    fn a_thread_that_has_not_run_since_has_unlocked_nothing() {
        if cfg!(tracing_profiling_unsupported) {
            return;
        }
        use std::sync::Arc;

        let shared = Arc::new((AtomicU32::new(0), AtomicBool::new(false)));
        let own = Arc::clone(&shared);
        let asleep = std::thread::spawn(move || {
            // From here on it allocates nothing, so that it waits for no lock of the allocator.
            own.0.store(sys::current_tid(), Ordering::Release);
            while !own.1.load(Ordering::Acquire) {
                std::thread::park();
            }
        });
        let tid = loop {
            match shared.0.load(Ordering::Acquire) {
                0 => std::thread::yield_now(),
                tid => break tid,
            }
        };
        let start = std::time::Instant::now();
        let blocked = loop {
            assert!(start.elapsed() < Duration::from_secs(60));
            if let Some(blocked) = BlockedThread::of(tid, &[])
                && blocked.other_futex.is_some()
                && sys::cpu_ns_of(tid) == Some(blocked.cpu_ns)
            {
                break blocked;
            }
            std::thread::yield_now();
        };
        let one = HolderCandidate { blocked_cpu_ns: Some(blocked.cpu_ns), ..thread(tid, false, 1) };
        let sought = HolderSearch { possible: vec![one], ..HolderSearch::default() };
        assert!(sought.likeliest(true).is_none(), "it sleeps");
        assert!(sought.likeliest(false).is_some(), "the wait goes on");
        shared.1.store(true, Ordering::Release);
        asleep.thread().unpark();
        asleep.join().unwrap();
        assert!(sought.likeliest(true).is_some());
    }
}
