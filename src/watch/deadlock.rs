//! Threads that wait for each other's locks.
//!
//! One of the threads is likely to hold a lock that have its address on their stacks and do not wait for it themselves (see
//! `threads/locks.rs`). If each of these waits for a lock in turn, and so on, none can go on. A thread that runs cannot be
//! searched, so what is inferred can be wrong, and is marked.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::thread::sleep;
use std::time::Duration;

use crate::sys;
use crate::threads::{BlockedThread, MAX_THREADS};

/// How long a deadlock is watched before it is one.
const PERSISTS: Duration = Duration::from_millis(5);

/// Threads each of which waits for a lock that the next one holds. The first one holds that of the last.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Deadlock {
    waits: Vec<DeadlockedWait>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct DeadlockedWait {
    tid: u32,
    holder: u32,
    is_inferred: bool,
}

impl Deadlock {
    /// All deadlocks of threads of this process, as far as the system shows in what they are blocked.
    pub(super) fn find_all() -> Vec<Self> {
        let tids = sys::own_threads().unwrap_or_default();
        if tids.len() > MAX_THREADS {
            return Vec::new();
        }
        sys::read_filters();
        let mappings = sys::mappings(false).unwrap_or_default();
        let blocked: Vec<_> =
            tids.iter().filter_map(|tid| BlockedThread::of(*tid, &mappings)).collect();
        let locks: HashSet<u64> = blocked.iter().filter_map(|thread| thread.lock).collect();
        let has_owner = blocked.iter().any(|thread| thread.owner.is_some());
        if locks.len() < 2 && !has_owner {
            return Vec::new();
        }
        let (mut holders, mut bytes) = (PossibleHolders::new(), Vec::new());
        for thread in &blocked {
            for (lock, found) in thread.locks_on_stack(&mappings, &locks, &mut bytes) {
                holders.entry(lock).or_default().push((found.times, thread.tid));
            }
        }
        for thread in &blocked {
            if let (Some(lock), Some(owner)) = (thread.lock, thread.owner) {
                holders.insert(lock, vec![(OWNER, owner)]);
            }
        }
        let waits = blocked.iter().filter_map(|thread| Some((thread.tid, thread.lock?)));
        let mut deadlocks = cycles(without_end(waits.collect(), &holders));
        if !deadlocks.is_empty() {
            // A thread that holds a lock and runs has no stack that can be read.
            sleep(PERSISTS);
        }
        let has_not_run = |wait: &DeadlockedWait| {
            let thread = blocked.iter().find(|thread| thread.tid == wait.tid);
            thread.is_some_and(|thread| sys::cpu_ns_of(wait.tid) == Some(thread.cpu_ns))
        };
        deadlocks.retain(|deadlock| deadlock.waits.iter().all(has_not_run));
        deadlocks
    }

    pub(super) fn has(&self, tid: u32) -> bool {
        self.waits.iter().any(|wait| wait.tid == tid)
    }

    pub(super) fn in_words(&self, name: impl Fn(u32) -> String) -> String {
        let is_inferred = self.waits.iter().any(|wait| wait.is_inferred);
        let inferred = if is_inferred { " (inferred)" } else { "" };
        let first = self.waits.first().map(|wait| name(wait.tid)).unwrap_or_default();
        let waits = self.waits.iter();
        let waits = waits.map(|wait| format!(" waits for the lock of {}", name(wait.holder)));
        format!("deadlock{inferred}: {first}{}", waits.collect::<Vec<_>>().join(", which"))
    }
}

/// The threads that may hold each lock, with how often the lock is on the stack of each.
type PossibleHolders = HashMap<u64, Vec<(u32, u32)>>;

/// In place of a number, of a thread that is certain to hold the lock.
const OWNER: u32 = u32::MAX;

/// Of the threads that wait for locks, those that cannot go on: all that may hold the lock cannot, either. Each with the
/// likeliest of these.
fn without_end(mut waits: Vec<(u32, u64)>, holders: &PossibleHolders) -> Vec<DeadlockedWait> {
    let holders = |lock: u64| holders.get(&lock).map_or(&[][..], Vec::as_slice);
    loop {
        let waiting: HashSet<u32> = waits.iter().map(|(tid, _)| *tid).collect();
        let before = waits.len();
        waits.retain(|(_, lock)| {
            let holders = holders(*lock);
            !holders.is_empty() && holders.iter().all(|(_, tid)| waiting.contains(tid))
        });
        if waits.len() == before {
            break;
        }
    }
    let with_holder = |(tid, lock): (u32, u64)| {
        let (times, holder) = *holders(lock).iter().max()?;
        Some(DeadlockedWait { tid, holder, is_inferred: times != OWNER })
    };
    waits.into_iter().filter_map(with_holder).collect()
}

fn cycles(waits: Vec<DeadlockedWait>) -> Vec<Deadlock> {
    let waits: BTreeMap<u32, DeadlockedWait> =
        waits.into_iter().map(|wait| (wait.tid, wait)).collect();
    let (mut seen, mut deadlocks) = (HashSet::new(), Vec::new());
    for first in waits.keys() {
        let mut path: Vec<DeadlockedWait> = Vec::new();
        let mut next = *first;
        while let Some(wait) = waits.get(&next)
            && seen.insert(next)
        {
            path.push(*wait);
            next = wait.holder;
        }
        if let Some(begin) = path.iter().position(|wait| wait.tid == next) {
            deadlocks.push(Deadlock { waits: path.split_off(begin) });
        }
    }
    deadlocks
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each thread, and the one whose lock it waits for. The tids of those in circles.
    fn circles(waits: &[(u32, u32)]) -> Vec<Vec<u32>> {
        let wait = |(tid, holder): &(u32, u32)| DeadlockedWait {
            tid: *tid,
            holder: *holder,
            is_inferred: false,
        };
        let waits = waits.iter().map(wait);
        let tids = |it: Deadlock| it.waits.iter().map(|wait| wait.tid).collect();
        cycles(waits.collect()).into_iter().map(tids).collect()
    }

    #[test]
    fn threads_that_wait_in_a_circle_are_a_deadlock() {
        assert_eq!(circles(&[(1, 2), (2, 1)]), [[1, 2]]);
        assert_eq!(circles(&[(3, 1), (1, 7), (7, 3)]), [[1, 7, 3]]);
        // The first and the last wait for one of them.
        assert_eq!(circles(&[(1, 3), (2, 3), (3, 4), (4, 2), (5, 4)]), [[3, 4, 2]]);
        assert_eq!(circles(&[(1, 2), (2, 1), (3, 4), (4, 3)]), [[1, 2], [3, 4]]);
        assert_eq!(circles(&[(1, 2), (2, 3), (3, 9)]), Vec::<Vec<u32>>::new());
        assert_eq!(circles(&[(1, 1)]), [[1]], "a lock that it holds itself");
    }

    #[test]
    fn threads_go_on_if_one_that_may_hold_their_lock_does() {
        let found = |waits: &[(u32, u64)], holders: &[(u64, &[(u32, u32)])]| {
            let holders = holders.iter().map(|(lock, holders)| (*lock, holders.to_vec()));
            let found = without_end(waits.to_vec(), &holders.collect());
            found.iter().map(|it| (it.tid, it.holder, it.is_inferred)).collect::<Vec<_>>()
        };
        let two = [(1, 20), (2, 10)];
        assert_eq!(
            found(&two, &[(10, &[(1, 1)]), (20, &[(OWNER, 2)])]),
            [(1, 2, false), (2, 1, true)]
        );
        assert_eq!(found(&two, &[(10, &[(1, 1)])]), [], "no one is known to hold 20");
        assert_eq!(found(&two, &[(10, &[(1, 1), (1, 9)]), (20, &[(1, 2)])]), [], "9 may hold 10");
        // A third waits for what the first waits for, and may hold the other.
        let three = [(1, 20), (2, 10), (3, 20)];
        let holders: &[(u64, &[(u32, u32)])] = &[(10, &[(2, 1), (1, 3)]), (20, &[(1, 2)])];
        assert_eq!(found(&three, holders), [(1, 2, true), (2, 1, true), (3, 2, true)]);
    }

    #[test]
    fn inferred_holders_are_marked() {
        let wait = |tid, holder, is_inferred| DeadlockedWait { tid, holder, is_inferred };
        let name = |tid| format!("`t{tid}`");
        let certain = Deadlock { waits: vec![wait(1, 2, false), wait(2, 1, false)] };
        assert_eq!(
            certain.in_words(name),
            "deadlock: `t1` waits for the lock of `t2`, which waits for the lock of `t1`"
        );
        let inferred = Deadlock { waits: vec![wait(1, 2, false), wait(2, 1, true)] };
        assert!(inferred.in_words(name).starts_with("deadlock (inferred): "));
        assert!(inferred.has(2) && !inferred.has(3));
    }
}
