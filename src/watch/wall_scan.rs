//! Finds out again and again where all threads of the process are, running or blocked.
//!
//! A thread whose CPU clock stands still since it was found blocked is in the same wait: it is not inspected again.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher as _, RandomState};
use std::time::{Duration, Instant};

use crate::budget::{CpuBudget, passed};
use crate::facts::format::nanoseconds;
use crate::intake::Intake;
use crate::profile::ThreadActivity;
use crate::sampler::ThreadShared;
use crate::sinks::{ProcessPlace, StoredStack};
use crate::stats::Counters;
use crate::sys;
use crate::threads::{InspectedThread, Threads, inspect};

/// What scans may use of a core. The first one inspects all threads: some 1,000 within what is saved up then.
const BUDGET: CpuBudget = CpuBudget::new(2, 100_000_000);
/// The assumed cost of visiting a thread before one was visited: that of an inspection.
const A_VISIT_NS: u64 = 100_000;
/// The last scan visits at least this number of threads, whatever is left of the budget.
const MIN_VISITS: usize = 16;
/// A scan ends early if it takes this many times as much as it was expected to.
const MAX_OVER: u64 = 4;
/// Rings are read after each step, so that none is full.
pub(super) const STEP: Duration = Duration::from_millis(5);
/// How long after the end the last scan may end, on a machine that is busy.
const LATEST: Duration = Duration::from_secs(5);

/// Observes where all threads of the process are, until a time. The thread that scans is none of them.
pub(crate) struct WallScanner {
    period: Duration,
    until: Instant,
    next: Instant,
    /// Up to when the time of threads has been added: `CLOCK_MONOTONIC_RAW` in nanoseconds.
    pub(crate) added_until_ns: u64,
    known: HashMap<u32, KnownThread>,
    present: Option<PresentScan>,
    cost: ScanCost,
    pub(crate) observations: WallObservations,
    is_over: bool,
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WallObservations {
    pub(crate) scans: u64,
    /// The threads that there were at each scan.
    pub(crate) threads: u64,
    /// The threads that were to be visited.
    pub(crate) visited: u64,
    /// The threads that were to be visited and had not ended by then.
    pub(crate) found: u64,
    /// The time that these represent, and the sum of the squares of what each does.
    weight_ns: f64,
    squares: f64,
}

impl WallObservations {
    /// How many observations of equal weight are as precise (Kish's effective sample size): those of a scan that visited few
    /// threads represent much.
    pub(crate) fn effective(&self) -> u64 {
        // Conversions saturate.
        (self.weight_ns * self.weight_ns / self.squares.max(1.0)).round().max(1.0) as u64
    }
}

/// A thread as it was visited last.
struct KnownThread {
    at: (StoredStack, ProcessPlace),
    cpu_ns: Option<u64>,
    scan: u64,
}

/// One scan: the threads in random order, of which the first are visited.
struct PresentScan {
    began: Instant,
    began_ns: u64,
    tids: Vec<u32>,
    /// How many of them are to be visited.
    chosen: usize,
    /// How many of them have been, or have ended before.
    reached: usize,
    spent_ns: u64,
}

struct ScanCost {
    left: CpuBudget,
    /// Of listing all threads, the last time.
    list_ns: u64,
    visit_ns: u64,
}

impl ScanCost {
    const fn new() -> Self {
        Self { left: BUDGET, list_ns: 0, visit_ns: A_VISIT_NS }
    }

    /// Whether there is enough for a scan that does not spend most of it on the list.
    fn has_enough(&mut self, now_ns: u64) -> bool {
        self.left.left_ns(now_ns) > (2 * self.list_ns).cast_signed()
    }

    fn spend_on_list(&mut self, ns: u64) {
        self.list_ns = ns;
        self.left.spend(ns);
    }

    fn affordable(&mut self, now_ns: u64, all: usize) -> usize {
        let left_ns = u64::try_from(self.left.left_ns(now_ns)).unwrap_or(0);
        let visits = left_ns / self.visit_ns.max(1);
        usize::try_from(visits).unwrap_or(all).clamp(1, all.max(1))
    }

    /// Whether a scan has taken much more than `visits` were expected to.
    fn is_exceeded(&self, spent_ns: u64, visits: usize) -> bool {
        spent_ns > MAX_OVER * A_VISIT_NS.max(self.visit_ns * visits as u64)
    }

    fn note(&mut self, spent_ns: u64, visits: usize) {
        if visits > 0 {
            self.visit_ns = (self.visit_ns + spent_ns / visits as u64) / 2;
        }
    }
}

impl WallScanner {
    /// Of the time from now, `now_ns`, until then. The first scan is after one period.
    pub(crate) fn new(period_ns: u64, now_ns: u64, until: Instant) -> Self {
        let mut scanner = Self {
            period: Duration::from_nanos(period_ns),
            until,
            next: until,
            added_until_ns: now_ns,
            known: HashMap::new(),
            present: None,
            cost: ScanCost::new(),
            observations: WallObservations::default(),
            is_over: false,
        };
        scanner.plan_next(Instant::now());
        scanner
    }

    pub(crate) fn until_next(&self) -> Duration {
        match self.present {
            Some(_) => Duration::ZERO,
            None => self.next.saturating_duration_since(Instant::now()),
        }
    }

    pub(crate) fn is_over(&self) -> bool {
        self.is_over || self.until + LATEST <= Instant::now()
    }

    /// Goes on with the present scan, or begins one when it is time. Returns whether it ended.
    pub(crate) fn step(&mut self, intake: &mut Intake, threads: &Threads) -> bool {
        if self.is_over || !self.until_next().is_zero() {
            return false;
        }
        sys::read_filters();
        let Some(mut scan) = self.present.take().or_else(|| self.begin(intake)) else {
            return false;
        };
        let (start, start_cpu_ns) = (Instant::now(), sys::thread_cpu_ns());
        let spent = || {
            let cpu_ns = passed(start_cpu_ns, sys::thread_cpu_ns());
            cpu_ns.unwrap_or_else(|| nanoseconds(start.elapsed()))
        };
        let sampled = threads.sampled.by_tid();
        let chosen = scan.tids.get(..scan.chosen).unwrap_or_default();
        for tid in chosen.iter().skip(scan.reached).copied() {
            self.visit(intake, sampled.get(&tid).map(|it| it.thread()), tid);
            scan.reached += 1;
            if start.elapsed() >= STEP {
                break;
            }
        }
        let spent_ns = spent();
        scan.spent_ns += spent_ns;
        self.cost.left.spend(spent_ns);
        Counters::add(&intake.counters.sampling.collector_cpu_ns, spent_ns);
        if scan.reached >= scan.chosen || self.cost.is_exceeded(scan.spent_ns, scan.chosen) {
            self.end(intake, &scan);
            return true;
        }
        self.present = Some(scan);
        false
    }

    /// Begins a scan, unless there is too little left of the budget for one.
    fn begin(&mut self, intake: &Intake) -> Option<PresentScan> {
        let (began, began_ns) = (Instant::now(), intake.now_ns());
        let is_last = began >= self.until;
        if !self.cost.has_enough(began_ns) && !is_last {
            self.plan_next(began);
            return None;
        }
        let before = sys::thread_cpu_ns();
        let mut tids = sys::own_threads().unwrap_or_default();
        // It would find nothing but that it scans.
        tids.retain(|tid| *tid != sys::current_tid());
        tids.sort_by_cached_key(|_| random());
        let list_ns = passed(before, sys::thread_cpu_ns()).unwrap_or(0);
        self.cost.spend_on_list(list_ns);
        Counters::add(&intake.counters.sampling.collector_cpu_ns, list_ns);
        let least = if is_last { MIN_VISITS.min(tids.len()) } else { 1 };
        let chosen = self.cost.affordable(began_ns, tids.len()).max(least);
        let chosen = chosen.min(tids.len());
        Some(PresentScan { began, began_ns, tids, chosen, reached: 0, spent_ns: 0 })
    }

    /// Finds out where a thread is, unless it is where it was.
    fn visit(&mut self, intake: &mut Intake, shared: Option<&ThreadShared>, tid: u32) {
        let scan = self.observations.scans;
        let cpu_ns = sys::cpu_ns_of(tid);
        if let Some(known) = self.known.get_mut(&tid)
            // In the same wait.
            && known.at.1.is_blocked
            && cpu_ns.is_some()
            && cpu_ns == known.cpu_ns
        {
            known.scan = scan;
            return;
        }
        self.known.remove(&tid);
        let Some(found) = inspect(intake, shared, tid) else { return };
        let (stack, _) = found.stack(intake);
        let InspectedThread { thread, activity, span, cpu_ns, .. } = found;
        let is_blocked = activity != ThreadActivity::Running;
        if let Some(samples) = &mut intake.sinks.wall {
            let at = samples.store(stack.into_iter(), thread, span, is_blocked);
            self.known.insert(tid, KnownThread { at, cpu_ns, scan });
        }
    }

    /// Adds the time since the scan before to where the threads are, and plans the next scan.
    fn end(&mut self, intake: &mut Intake, scan: &PresentScan) {
        let number = self.observations.scans;
        let visited = scan.tids.get(..scan.reached).unwrap_or_default();
        let each_ns = weight_of_visit(
            scan.began_ns.saturating_sub(self.added_until_ns),
            scan.tids.len(),
            scan.reached,
        );
        if let Some(samples) = &mut intake.sinks.wall {
            let found = visited.iter().filter_map(|tid| self.known.get(tid));
            for known in found.filter(|known| known.scan == number) {
                samples.add_stored(known.at, each_ns);
                self.observations.found += 1;
                self.observations.weight_ns += each_ns as f64;
                self.observations.squares += (each_ns as f64).powi(2);
            }
        }
        self.observations.scans += 1;
        self.observations.threads += scan.tids.len() as u64;
        self.observations.visited += scan.reached as u64;
        self.cost.note(scan.spent_ns, scan.reached);
        self.added_until_ns = scan.began_ns;
        if self.known.len() > scan.tids.len() {
            let present: HashSet<u32> = scan.tids.iter().copied().collect();
            self.known.retain(|tid, _| present.contains(tid));
        }
        self.is_over = scan.began >= self.until;
        self.plan_next(scan.began);
    }

    /// At a random time, so that no thread does something else at each scan.
    fn plan_next(&mut self, after: Instant) {
        let part = random() as f64 / u64::MAX as f64;
        self.next = (after + self.period.mul_f64(0.5 + part)).min(self.until);
    }
}

/// Each `RandomState` has other keys.
fn random() -> u64 {
    RandomState::new().hash_one(())
}

/// The time that each of `reached` threads represents, of `all` threads during an interval.
fn weight_of_visit(interval_ns: u64, all: usize, reached: usize) -> u64 {
    let of_all_ns = u128::from(interval_ns) * all as u128;
    u64::try_from(of_all_ns / reached.max(1) as u128).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    const SECOND: u64 = 1_000 * MS;

    #[test]
    fn observations_of_unequal_weight_are_less_precise() {
        let of = |weights: &[f64]| {
            let weight_ns = weights.iter().sum();
            let squares = weights.iter().map(|weight| weight * weight).sum();
            WallObservations { weight_ns, squares, ..WallObservations::default() }.effective()
        };
        assert_eq!(of(&[50e6; 1_000]), 1_000);
        // Half of the time was observed by sixteen.
        assert_eq!(of(&[[1e6; 1_600].as_slice(), &[100e6; 16]].concat()), 63);
        assert_eq!(of(&[]), 1);
    }

    #[test]
    fn a_scan_visits_what_the_budget_allows_and_each_visit_represents_the_others() {
        let mut cost = ScanCost::new();
        assert_eq!(cost.affordable(SECOND, 800), 800, "all of them at first");
        assert_eq!(cost.affordable(SECOND, 5_000), 1_000);
        cost.left.spend(99 * MS);
        cost.note(99 * MS, 1_000);
        assert_eq!(cost.visit_ns, 99_500);
        // Some 50 ms later: 2 % of that.
        assert_eq!(cost.affordable(SECOND + 50 * MS, 1_000), 20);
        // They are in the same waits.
        (0..20).for_each(|_| cost.note(20 * 1_000, 20));
        assert!(cost.visit_ns <= 1_001, "{}", cost.visit_ns);
        assert_eq!(cost.affordable(SECOND + 50 * MS, 1_000), 1_000);
        assert_eq!(cost.affordable(SECOND, 0), 1);
        assert_eq!(weight_of_visit(50 * MS, 1_000, 1_000), 50 * MS);
        assert_eq!(weight_of_visit(50 * MS, 1_000, 20), 2_500 * MS);
        assert_eq!(weight_of_visit(50 * MS, 0, 0), 0);
    }

    #[test]
    fn scans_use_two_percent_of_a_core_also_where_the_list_is_long() {
        let mut cost = ScanCost::new();
        let (mut spent_ns, mut visits) = (0, 0);
        let end_ns = 100 * SECOND;
        for now_ns in (0..end_ns).step_by(50_000_000) {
            if !cost.has_enough(SECOND + now_ns) {
                continue;
            }
            cost.spend_on_list(6 * MS);
            let chosen = cost.affordable(SECOND + now_ns, 10_000);
            let visits_ns = chosen as u64 * 20_000;
            cost.left.spend(visits_ns);
            cost.note(visits_ns, chosen);
            spent_ns += 6 * MS + visits_ns;
            visits += chosen;
        }
        assert!(spent_ns <= end_ns / 50 + 110 * MS, "{spent_ns}");
        // Half of it at least goes to the threads.
        assert!(visits as u64 * 20_000 >= spent_ns / 2, "{visits} in {spent_ns}");
    }

    #[test]
    fn a_scan_that_costs_more_than_expected_ends_early() {
        let mut cost = ScanCost::new();
        (0..40).for_each(|_| cost.note(1_000, 1));
        assert!(!cost.is_exceeded(MAX_OVER * 1_000 * 1_000, 1_000));
        assert!(cost.is_exceeded(MAX_OVER * 1_001 * 1_000, 1_000));
        assert!(!cost.is_exceeded(MAX_OVER * A_VISIT_NS, 1));
    }

    #[test]
    fn scans_are_at_random_times_and_the_last_one_is_at_the_end() {
        let start = Instant::now();
        let second = Duration::from_secs(1);
        let mut scanner = WallScanner::new(50 * MS, 0, start + 100 * second);
        let delays: HashSet<_> = (0..100)
            .map(|_| {
                scanner.plan_next(start);
                scanner.next - start
            })
            .collect();
        assert!(delays.len() > 20, "{delays:?}");
        let usual = Duration::from_millis(25)..Duration::from_millis(75);
        assert!(delays.iter().all(|delay| usual.contains(delay)), "{delays:?}");
        scanner.plan_next(start + 100 * second - Duration::from_millis(1));
        assert_eq!(scanner.next, scanner.until);
    }
}
