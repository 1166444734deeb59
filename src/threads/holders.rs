//! Which thread holds the lock that another one waits for.
//!
//! Where the lock does not state it: a thread that has its address on the stack while the other one waits, and that ran
//! before the wait ended, since only a thread that runs can unlock. So threads that merely know the lock and sleep are ruled
//! out.

use std::collections::HashMap;
use std::ops::Range;
use std::time::Duration;

use super::locks::{futex_of, lock_at};
use crate::budget::CpuBudget;
use crate::sinks::Holder;
use crate::sys::{self, Call, OsThread};

/// Of shorter waits, no holder is sought.
const LEAST_WAIT: Duration = Duration::from_millis(10);

/// All threads are searched for all such locks at once, which takes some 30 µs for each thread.
pub(super) const SEARCHES: CpuBudget = CpuBudget::new(1, 20_000_000);

/// The holder of the lock that a thread waits for.
#[derive(Debug, Default)]
pub(super) struct SoughtHolder {
    /// As the lock states it.
    stated: Option<Holder>,
    /// What the thread waits for, and its stack pointer, unless that is known to be no lock.
    futex: Option<(u64, u64)>,
    lock: Option<u64>,
    searches: u32,
    possible: Vec<PossibleHolder>,
}

impl SoughtHolder {
    /// Of a thread with that stack pointer that is blocked in this call.
    pub(super) fn of(call: Call, sp: u64) -> Self {
        let stated = Holder::stated_by(call);
        let futex = futex_of(call).filter(|_| stated.is_none()).map(|futex| (futex, sp));
        Self { stated, futex, ..Self::default() }
    }

    /// Whether it is to be sought: at 10 ms, and until one is found, each time that the wait is twice as long.
    pub(super) fn is_due(&self, waited_ns: u64) -> bool {
        let due = LEAST_WAIT.saturating_mul(1 << self.searches.min(20));
        self.futex.is_some() && self.possible.is_empty() && u128::from(waited_ns) >= due.as_nanos()
    }

    /// It is not sought this time.
    pub(super) fn postpone(&mut self) {
        self.searches += 1;
    }

    /// The lock whose holder is to be sought, if the thread waits for one. `mappings` are those of the process.
    pub(super) fn begin(&mut self, mappings: &[Range<u64>]) -> Option<u64> {
        self.searches += 1;
        self.lock = self.futex.and_then(|(futex, sp)| lock_at(futex, sp, mappings));
        self.futex = self.futex.filter(|_| self.lock.is_some());
        self.lock
    }

    /// Takes those that may hold its lock, if none was known.
    pub(super) fn end(&mut self, holders: &HashMap<u64, Vec<PossibleHolder>>) {
        if self.possible.is_empty()
            && let Some(found) = self.lock.and_then(|lock| holders.get(&lock))
        {
            self.possible.clone_from(found);
        }
    }

    /// The likeliest one; `None` if two are equally likely. If the wait has ended, one that has run.
    pub(super) fn likeliest(&self, has_ended: bool) -> Option<Holder> {
        let rank = |thread: &PossibleHolder| (!thread.is_in_other_futex, thread.times);
        let ran = || self.possible.iter().filter(|thread| !has_ended || thread.has_run());
        let Some(best) = ran().max_by_key(|thread| rank(thread)) else { return self.stated };
        let is_only_one = ran().filter(|thread| rank(thread) == rank(best)).count() == 1;
        let PossibleHolder { thread, plan, .. } = *best;
        is_only_one.then_some(Holder { thread, plan, is_inferred: true })
    }
}

/// A thread that may hold a lock.
#[derive(Clone, Debug)]
pub(super) struct PossibleHolder {
    pub(super) thread: OsThread,
    pub(super) plan: u64,
    /// Its CPU time while it was blocked; `None` if it ran.
    pub(super) blocked_cpu_ns: Option<u64>,
    /// It waited in a condition variable, perhaps of this lock, or was parked.
    pub(super) is_in_other_futex: bool,
    /// How often its stack has the lock.
    pub(super) times: u32,
}

impl PossibleHolder {
    /// Whether it has run since its stack was read.
    fn has_run(&self) -> bool {
        self.blocked_cpu_ns.is_none_or(|before| sys::cpu_ns_of(self.thread.tid) != Some(before))
    }
}

#[cfg(test)]
mod tests {
    use super::super::locks::BlockedThread;
    use super::*;

    fn thread(tid: u32, is_in_other_futex: bool, times: u32) -> PossibleHolder {
        let (thread, plan) = (OsThread::unnamed(tid), Holder::NO_PLAN);
        PossibleHolder { thread, plan, blocked_cpu_ns: None, is_in_other_futex, times }
    }

    #[test]
    fn a_thread_that_is_no_more_likely_than_another_is_not_named() {
        let named = |threads: &[PossibleHolder]| {
            let sought = SoughtHolder { possible: threads.to_vec(), ..SoughtHolder::default() };
            Some(sought.likeliest(true)?.thread.tid)
        };
        assert_eq!(named(&[]), None);
        assert_eq!(named(&[thread(1, false, 1)]), Some(1));
        assert_eq!(named(&[thread(1, false, 1), thread(2, false, 3)]), Some(2));
        assert_eq!(named(&[thread(1, false, 1), thread(2, true, 3)]), Some(1));
        assert_eq!(named(&[thread(1, true, 2)]), Some(1));
        assert_eq!(named(&[thread(1, false, 2), thread(2, false, 2)]), None);
    }

    #[test]
    fn a_thread_that_has_not_run_since_has_unlocked_nothing() {
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let (send, tid) = std::sync::mpsc::channel();
        let asleep = std::thread::spawn(move || {
            send.send(sys::current_tid()).unwrap();
            _ = ended.recv();
        });
        let tid = tid.recv().unwrap();
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
        let one = PossibleHolder { blocked_cpu_ns: Some(blocked.cpu_ns), ..thread(tid, false, 1) };
        let sought = SoughtHolder { possible: vec![one], ..SoughtHolder::default() };
        assert!(sought.likeliest(true).is_none(), "it sleeps");
        assert!(sought.likeliest(false).is_some(), "the wait goes on");
        drop(end);
        asleep.join().unwrap();
        assert!(sought.likeliest(true).is_some());
    }
}
