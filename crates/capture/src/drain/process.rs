//! What profiles of the process want of threads, and those of them that have met no hook, or none for a while.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::cursor::ThreadCursor;
use super::demand::{DemandBudgets, Why};
use super::reader::{Reader, Sink};
use crate::budget::{CpuBudget, passed};
use crate::sampler::{AttachThreads as _, Periods, Rate, Sampler, SamplingSession, ThreadShared};
use crate::sys;

/// The threads of the process are listed this often, or less if that would take more than one part in [`SHARE`] of a core,
/// or twice that where rounds come more often: they search from half of the interval on.
/// Threads are listed often, since what one runs before it is found has no samples.
const MIN_INTERVAL: Duration = Duration::from_millis(10);
const MAX_INTERVAL: Duration = Duration::from_secs(1);
const SHARE: u32 = 50;
/// Continuously, each search that finds no new thread doubles the time until the next one.
const SHARE_CONTINUOUSLY: u32 = 500;
/// How long one search may attach threads, after it has listed them. The rings of others fill while it does.
const MAX_ATTACHING: Duration = Duration::from_millis(5);
/// Each thread without hooks has rings of some 300 KiB while it is sampled. Further ones are not.
const MAX_OTHERS: usize = 1_024;
/// The CPU budget for attaching threads, beside that for slow spans: some 1,000 at once.
const ATTACHING: CpuBudget = CpuBudget::new(10, 200_000_000);
const ATTACHING_CONTINUOUSLY: CpuBudget = CpuBudget::new(1, 200_000_000);
/// The assumed cost of attaching one where CPU time cannot be read.
const ATTACH_COST_NS: u64 = 150_000;
/// The pause before another attempt to attach a thread. Others may have released resources by then. A profile may last 10 s.
const RETRY: Duration = Duration::from_secs(1);

/// The demands of profiles of the process, and the sampling of threads that have met no hook for a while.
#[derive(Debug, Default)]
pub struct ProcessThreads {
    /// How often threads are to be sampled for a profile that was asked for, and for the continuous one.
    requested: Option<Periods>,
    continuous: Option<Periods>,
    /// By their ids. Without a demand, those that are drained once more.
    others: HashMap<u32, OtherThread>,
    /// The threads that have met a hook, and have run since the demand began, by their ids.
    active: HashSet<u32>,
    /// The CPU times of all threads at the last search, or when they were last sampled after it.
    cpu_ns: HashMap<u32, u64>,
    searched: Option<Instant>,
    interval: Duration,
    attaching: CpuBudget,
}

/// A thread that has met no hook, or none for a while.
#[derive(Debug)]
struct OtherThread {
    cursor: ThreadCursor,
    is_named: bool,
    failed: Option<Instant>,
    why: Why,
    /// No longer sampled; given back once it is drained.
    is_ending: bool,
}

impl ProcessThreads {
    /// Begins or ends a demand. All that was sampled for one that ends is in the rings, which this round drains.
    pub fn set(&mut self, why: Why, periods: Option<Periods>) {
        let before = self.demand();
        match why {
            Why::Continuous => self.continuous = periods,
            _ => self.requested = periods,
        }
        let now = self.demand();
        if before == now {
            return;
        }
        // The search finds them again.
        let tids: Vec<u32> = self.others.keys().copied().collect();
        tids.into_iter().for_each(|tid| self.end_other(tid));
        if before.is_none() || now.is_none() {
            self.active.clear();
            self.cpu_ns.clear();
            self.searched = None;
        }
        self.interval = MIN_INTERVAL;
        self.attaching = match self.requested {
            Some(_) => ATTACHING,
            None => ATTACHING_CONTINUOUSLY,
        };
    }

    /// How often threads are to be sampled, and for whom, while there is a demand: the higher one.
    pub fn demand(&self) -> Option<(Why, Periods)> {
        let both = [(Why::Process, self.requested), (Why::Continuous, self.continuous)];
        let both = both.into_iter().filter_map(|(why, periods)| Some((why, periods?)));
        both.min_by_key(|(_, periods)| periods.full_ns)
    }

    /// Like [`demand`](Self::demand), for a thread that has met a hook. One that does not run is not attached: that
    /// would take from the limits of the process what others need. One that `is_idle` has met none for a while. For the
    /// continuous profile it is then sampled as those that have met none: that takes no scans.
    pub fn demand_of(&self, tid: u32, is_idle: bool) -> Option<(Why, Periods)> {
        let demand = self.demand().filter(|(why, _)| *why == Why::Process || !is_idle);
        demand.filter(|_| self.active.contains(&tid))
    }

    /// Whether threads are sampled for it, or were and are not drained yet.
    pub fn is_any(&self) -> bool {
        self.demand().is_some() || !self.others.is_empty()
    }

    /// A thread has met its first hook, or the first one for a while, and is sampled as one that did from now on.
    pub fn note_hook(&mut self, tid: u32) {
        self.end_other(tid);
        if self.demand().is_some() {
            self.active.insert(tid);
        }
    }

    /// A thread has met no hook for a while, and is no longer sampled as one that did.
    pub fn note_parked(&mut self, tid: u32) {
        if self.active.remove(&tid) {
            self.cpu_ns.extend(sys::cpu_ns_of(tid).map(|cpu_ns| (tid, cpu_ns)));
        }
    }

    fn end_other(&mut self, tid: u32) {
        let Some(other) = self.others.get_mut(&tid).filter(|other| !other.is_ending) else {
            return;
        };
        let was_sampled = other.cursor.is_attached();
        other.end();
        if was_sampled {
            self.cpu_ns.extend(sys::cpu_ns_of(tid).map(|cpu_ns| (tid, cpu_ns)));
        }
    }

    pub fn has_full_ring(&self) -> bool {
        self.others.values().any(|other| other.cursor.is_half_full())
    }

    /// How long until the next search, or until a ring may be half full.
    pub fn until_next(&self) -> Option<Duration> {
        let of_search = self.demand().map(|_| self.until_search());
        let others = self.others.values().filter(|other| !other.is_ending);
        let fill_times = others.filter_map(|other| other.cursor.fill_time(false));
        let of_rings = fill_times.min().map(|soonest| soonest.max(MIN_INTERVAL / 10));
        of_search.into_iter().chain(of_rings).min()
    }

    fn until_search(&self) -> Duration {
        let since = self.searched.map(|searched| searched.elapsed());
        since.map_or(Duration::ZERO, |since| self.interval.saturating_sub(since))
    }

    /// Whether threads are to be searched for: in the round of which it is soon, since then no further one is needed.
    pub fn must_search(&self, is_round: bool) -> bool {
        let is_soon = || is_round && self.until_search() < self.interval / 2;
        self.demand().is_some() && (self.until_search().is_zero() || is_soon())
    }

    /// Lists the threads of the process, ends the sampling of those that have ended, and attaches those that have run since
    /// the last search and are not in `hooked`. Returns whether any of the hooked ones has run for the first time.
    pub fn search(
        &mut self,
        (why, rate): (Why, Rate),
        (source, now_ns): (&Sampler, u64),
        hooked: &HashSet<u32>,
    ) -> bool {
        let (start, start_cpu_ns) = (Instant::now(), sys::thread_cpu_ns());
        let (is_first, mut has_new, mut has_found) = (self.cpu_ns.is_empty(), false, false);
        let listed = sys::own_threads().unwrap_or_default();
        if listed.is_empty() {
            source.counters().unlisted.fetch_add(1, Ordering::Relaxed);
            return self.note_unlisted(hooked);
        }
        let mut cpu_ns = HashMap::with_capacity(listed.len());
        let mut have_run = Vec::new();
        for tid in listed {
            let before_ns = self.cpu_ns.get(&tid).copied().unwrap_or(0);
            // Where it cannot be read, all threads may have run.
            let now_ns = sys::cpu_ns_of(tid);
            let ran_ns = now_ns.map(|now_ns| now_ns.saturating_sub(before_ns));
            cpu_ns.insert(tid, now_ns.unwrap_or(0));
            // The first search shows what they had run before.
            let has_run = !is_first && ran_ns.is_none_or(|ran_ns| ran_ns > 0);
            if hooked.contains(&tid) {
                self.end_other(tid);
                has_new |= has_run && self.active.insert(tid);
            } else if self.others.get(&tid).is_none_or(|other| other.may_retry(start)) {
                have_run.extend(has_run.then_some((ran_ns.unwrap_or(0), tid)));
            } else if self.others.get(&tid).is_some_and(|other| other.is_ending) {
                // Found again once it is drained.
                cpu_ns.insert(tid, before_ns);
            }
        }
        let ended = self.others.iter_mut().filter(|(tid, _)| !cpu_ns.contains_key(*tid));
        ended.for_each(|(_, other)| other.end());
        self.active.retain(|tid| cpu_ns.contains_key(tid));
        have_run.sort_unstable_by_key(|(ran_ns, _)| Reverse(*ran_ns));
        // CPU time: on a busy machine, threads must not be found later for that.
        let listing = passed(start_cpu_ns, sys::thread_cpu_ns());
        let listing = listing.map_or_else(|| start.elapsed(), Duration::from_nanos);
        let begun = Instant::now();
        for (ran_ns, tid) in have_run {
            let is_full = self.others.len() >= MAX_OTHERS && !self.others.contains_key(&tid);
            if is_full || begun.elapsed() > MAX_ATTACHING || !self.attaching.has_budget(now_ns) {
                source.counters().attach_deferred.fetch_add(1, Ordering::Relaxed);
                // The next search attaches it even if it does not run until then.
                cpu_ns.insert(tid, self.cpu_ns.get(&tid).copied().unwrap_or(0));
                continue;
            }
            let before = sys::thread_cpu_ns();
            let new = || OtherThread::new(tid, (why, rate));
            let other = self.others.entry(tid).or_insert_with(new);
            has_found |= other.attach(ran_ns, source);
            self.attaching.spend(passed(before, sys::thread_cpu_ns()).unwrap_or(ATTACH_COST_NS));
        }
        self.cpu_ns = cpu_ns;
        self.searched = Some(Instant::now());
        let (share, soonest) = match why {
            // The first one attaches no thread.
            _ if is_first => (0, MIN_INTERVAL),
            Why::Continuous if has_found => (SHARE_CONTINUOUSLY, MIN_INTERVAL),
            Why::Continuous => (SHARE_CONTINUOUSLY, 2 * self.interval),
            _ => (SHARE, MIN_INTERVAL),
        };
        self.interval = (listing * share).max(soonest).min(MAX_INTERVAL);
        has_new
    }

    /// Threads could not be listed: all in `hooked` may have run, and others are as they were. Returns whether any is new.
    fn note_unlisted(&mut self, hooked: &HashSet<u32>) -> bool {
        (self.searched, self.interval) =
            (Some(Instant::now()), (2 * self.interval).min(MAX_INTERVAL));
        let before = self.active.len();
        self.active.extend(hooked);
        self.active.len() > before
    }

    /// Ends the sampling by timers whose signal the program has taken, or by all timers while a tracer is attached. Those of
    /// the first kind begin again with another signal. Returns whether there are any whose signal was taken.
    pub fn check_signals(&mut self, is_traced: bool) -> bool {
        let mut has_lost_signal = false;
        for other in self.others.values_mut() {
            let timer = other.cursor.session.ring.as_ref().and_then(|ring| ring.timer());
            let Some(timer) = timer else { continue };
            let is_lost = timer.has_lost_signal();
            if is_lost || is_traced {
                timer.stop();
                other.end();
            }
            has_lost_signal |= is_lost;
        }
        has_lost_signal
    }

    /// Reads everything in the rings, and gives back those of threads that are no longer sampled.
    pub fn drain(
        &mut self,
        (reader, source): (&mut Reader, &Sampler),
        sink: &mut impl Sink,
        all: &mut DemandBudgets,
    ) {
        self.others.retain(|_, other| {
            other.read_name();
            let OtherThread { cursor, is_ending, why, .. } = other;
            _ = cursor.drain(reader, sink);
            all.of(*why).charge(cursor.take_cost());
            if *is_ending {
                // No thread refers to its sessions.
                drop(cursor.give_back(source));
            }
            !*is_ending
        });
    }

    /// Ends the sampling without reading the rings.
    pub fn give_back(&mut self, source: &Sampler) {
        (self.requested, self.continuous) = (None, None);
        for mut other in std::mem::take(&mut self.others).into_values() {
            other.end();
            drop(other.cursor.give_back(source));
        }
    }
}

impl OtherThread {
    fn new(tid: u32, (why, rate): (Why, Rate)) -> Self {
        let shared = ThreadShared::without_hooks(sys::OsThread::of(tid), rate);
        let cursor = ThreadCursor::new(Arc::new(shared));
        Self { cursor, is_named: false, failed: None, why, is_ending: false }
    }

    /// Attaches it, and returns whether that was possible. It has run for `ran_ns` since the last search.
    fn attach(&mut self, ran_ns: u64, source: &Sampler) -> bool {
        // The layer's own threads block all signals, and run when a profile ends. Perf would have to be looked after.
        if self.why == Why::Continuous && self.cursor.named.is_of_layer() {
            return false;
        }
        source.attach(&self.cursor.thread);
        let is_attached = self.cursor.go_to_next_session();
        self.failed = (!is_attached).then(Instant::now);
        // It may have waited for its turn for long.
        let most_ns = match self.why {
            Why::Continuous => MAX_INTERVAL.as_nanos() as u64,
            _ => u64::MAX,
        };
        self.cursor.unsampled_ns = ran_ns.min(most_ns) + lost_at_end(&self.cursor.session);
        is_attached
    }

    /// Threads get their names when they have begun to run, which may be after they were found. Before the first samples.
    fn read_name(&mut self) {
        if !self.is_named && !self.cursor.is_drained() {
            self.is_named = true;
            let now = sys::OsThread::of(self.cursor.thread.tid());
            // One that has ended has none.
            if now.has_name() {
                self.cursor.named = now;
            }
        }
    }

    fn may_retry(&self, now: Instant) -> bool {
        let is_late = |failed| now.saturating_duration_since(failed) > RETRY;
        !self.is_ending && self.failed.is_some_and(is_late)
    }

    fn end(&mut self) {
        if !std::mem::replace(&mut self.is_ending, true) {
            self.cursor.thread.end();
            self.cursor.pause();
        }
    }
}

/// How much CPU time a session has no samples for at its end, on average. That matters for short threads.
fn lost_at_end(session: &SamplingSession) -> u64 {
    let between_ns = if session.has_switch_records() {
        // The first period is a whole one.
        session.rate.period_ns
    } else {
        // The first period is random, but a signal waits for the kernel's tick.
        sys::tick_ns().unwrap_or(0)
    };
    between_ns / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_list_threads_with_hooks_are_sampled_and_nothing_is_forgotten() {
        let mut threads = ProcessThreads::default();
        threads.set(Why::Continuous, Some(Periods::USUAL));
        threads.cpu_ns.insert(3, 70);
        let hooked = HashSet::from([1, 2]);
        assert_eq!([(); 2].map(|()| threads.note_unlisted(&hooked)), [true, false]);
        assert!([1, 2].iter().all(|tid| threads.demand_of(*tid, false).is_some()));
        assert_eq!(threads.cpu_ns, HashMap::from([(3, 70)]));
        assert_eq!(threads.interval, 4 * MIN_INTERVAL);
        (0..20).for_each(|_| _ = threads.note_unlisted(&hooked));
        assert_eq!(threads.interval, MAX_INTERVAL);
    }
}
