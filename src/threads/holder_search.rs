//! The search for the holders of locks on the stacks of all threads.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::ops::Range;

use super::holders::{HolderCandidate, MAX_HOLDERS};
use super::inspect::inspect;
use super::locks::{BlockedThread, MAX_THREADS, OnStack, locks_in};
use super::sampled::{SampledThread, SampledThreads};
use super::waits::CaptureBudget;
use crate::budget::passed;
use crate::intake::Intake;
use crate::sinks::{Holder, StackEntry};
use crate::span::SpanKey;
use crate::stats::Counters;
use crate::sys;

/// The assumed cost of a search where CPU time cannot be read.
const A_SEARCH_NS: u64 = 1_000_000;

pub(super) fn search_holders(
    sampled: &mut SampledThreads,
    captures: &mut CaptureBudget,
    intake: &mut Intake,
    now_ns: u64,
) {
    let waits = sampled.iter_mut().filter_map(SampledThread::waiting_mut);
    let mut due: Vec<_> = waits.filter(|wait| wait.sought.is_due(wait.waited_ns())).collect();
    if due.is_empty() {
        return;
    }
    captures.read_filters(now_ns);
    due.retain_mut(|wait| wait.sought.begin());
    if due.is_empty() {
        return;
    }
    if !captures.searches.has_budget(now_ns) {
        let counter = &intake.counters.waits.holders_not_sought;
        return Counters::add(counter, due.len() as u64);
    }
    let start = sys::thread_cpu_ns();
    let mappings = sys::mappings(false).unwrap_or_default();
    let mut locks: HashMap<u64, u64> = HashMap::new();
    for wait in &mut due {
        if let Some(lock) = wait.sought.find_lock(&mappings) {
            let since_ns = locks.entry(lock).or_default();
            *since_ns = wait.since_ns.max(*since_ns);
        }
    }
    if !locks.is_empty() {
        let holders = possible_holders(sampled, &locks, &mappings, intake);
        for wait in sampled.iter_mut().filter_map(SampledThread::waiting_mut) {
            wait.sought.end(&holders, &mappings);
            wait.choose_holder(false);
        }
        place_holders(sampled, intake);
    }
    let took = passed(start, sys::thread_cpu_ns());
    captures.searches.spend(took.unwrap_or(A_SEARCH_NS));
}

/// Finds out where the holders are now, or were in their newest samples.
fn place_holders(sampled: &mut SampledThreads, intake: &mut Intake) {
    let waits = sampled.iter().filter_map(SampledThread::waiting);
    let tids: HashSet<u32> = waits.filter_map(|it| Some(it.stack.holder?.thread.tid)).collect();
    let known = sampled.by_tid();
    let frames_of = |tid| {
        let (stack, _) = inspect(intake, known.get(&tid).map(|it| it.thread()), tid)?.stack(intake);
        Some((tid, stack.into_iter().filter_map(StackEntry::code).collect()))
    };
    let places: HashMap<u32, Vec<_>> = tids.into_iter().filter_map(frames_of).collect();
    for wait in sampled.iter_mut().filter_map(SampledThread::waiting_mut) {
        let place = wait.stack.holder.and_then(|it| places.get(&it.thread.tid));
        wait.stack.elsewhere = place.cloned().unwrap_or_default();
    }
}

/// The threads that have the locks on their stacks, the likeliest first. Each lock comes with the beginning of the last wait for
/// it.
fn possible_holders(
    sampled: &SampledThreads,
    locks: &HashMap<u64, u64>,
    mappings: &[Range<u64>],
    intake: &Intake,
) -> HashMap<u64, Vec<HolderCandidate>> {
    let mut holders: HashMap<u64, Vec<HolderCandidate>> = HashMap::new();
    let tids = sys::own_threads().unwrap_or_default();
    if tids.len() > MAX_THREADS {
        Counters::add(&intake.counters.waits.holders_not_sought, locks.len() as u64);
        return holders;
    }
    let addresses: HashSet<u64> = locks.keys().copied().collect();
    let known = sampled.by_tid();
    let mut bytes = Vec::new();
    for tid in tids {
        let one = known.get(&tid).copied();
        let (found, blocked_cpu_ns, is_in_other_futex) = match BlockedThread::of(tid, mappings) {
            Some(thread) => {
                let mut found = thread.locks_on_stack(mappings, &addresses, &mut bytes);
                found.retain(|lock, on_stack| !thread.waits_with(*lock, *on_stack, mappings));
                // Otherwise the stack was read while it ran.
                let is_whole = || sys::cpu_ns_of(tid) == Some(thread.cpu_ns);
                if found.is_empty() || !is_whole() {
                    continue;
                }
                (found, Some(thread.cpu_ns), thread.other_futex.is_some())
            }
            None => {
                let Some((time_ns, found)) = one.and_then(|one| {
                    one.cursor.newest_stack(|time_ns, words| (time_ns, locks_in(words, &addresses)))
                }) else {
                    continue;
                };
                let is_since = |lock: &u64| locks.get(lock).is_some_and(|since| *since <= time_ns);
                (found.into_iter().filter(|(lock, _)| is_since(lock)).collect(), None, false)
            }
        };
        if found.is_empty() {
            continue;
        }
        let (thread, span) = (sys::OsThread::of(tid), Holder::NO_SPAN);
        for (lock, OnStack { times, .. }) in found {
            let holder = HolderCandidate { thread, span, blocked_cpu_ns, is_in_other_futex, times };
            holders.entry(lock).or_default().push(holder);
        }
    }
    for holders in holders.values_mut() {
        holders.sort_by_key(|holder| Reverse(holder.rank()));
        // One of them may be the one that waits.
        holders.truncate(1 + MAX_HOLDERS);
    }
    let span_of = |holder: &HolderCandidate| known.get(&holder.thread.tid)?.thread().span();
    let spans: HashSet<SpanKey> = holders.values().flatten().filter_map(span_of).collect();
    for span in intake.spans.find_open(&spans) {
        let number = intake.sinks.store.names.number_of(&intake.spans, span);
        let of_it = holders.values_mut().flatten().filter(|it| span_of(it) == Some(span.key));
        of_it.for_each(|holder| holder.span = number);
    }
    holders
}
