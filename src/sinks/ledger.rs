//! What is counted of the child spans of one span.

use std::collections::HashMap;

/// A child span that has closed. Times are `CLOCK_MONOTONIC_RAW` in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClosedChild {
    pub(crate) plan: u64,
    pub(crate) opened_ns: u64,
    pub(crate) closed_ns: u64,
    /// All spans inside the one that counts it do that open from then on.
    pub(crate) from_ns: u64,
}

/// The spans inside a span that have closed, at any depth, by the number of their plan.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    pub(crate) by_plan: HashMap<u64, ChildTimes>,
    /// Of further plans.
    pub(crate) others: ChildTimes,
    /// All that opened from then on count: `CLOCK_MONOTONIC_RAW` in nanoseconds.
    pub(crate) from_ns: u64,
    /// Some were not counted, for lack of memory.
    pub(crate) has_lost: bool,
    pub(super) bytes: usize,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ChildTimes {
    pub(crate) count: u64,
    /// The sum of their wall times.
    pub(crate) total_ns: u64,
    pub(crate) longest_ns: u64,
    open: OpenTime,
}

/// The time in which at least one of several spans was open: intervals in order, with time between them.
///
/// The time is exact for any order of the spans, up to as many intervals as are kept. Beyond that, the two earliest
/// become one with the length of the gap between them, which is still exact unless a span that is added later covers a
/// part of that one: its share of the gaps then counts as covered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct OpenTime(Vec<ChildInterval>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ChildInterval {
    from_ns: u64,
    to_ns: u64,
    /// The time in it in which no span was open.
    gaps_ns: u64,
}

const MOST_PLANS: usize = 64;
const MOST_INTERVALS: usize = 32;
/// The approximate memory of a ledger, and of an entry of its map.
const BYTES_A_LEDGER: usize = size_of::<Ledger>() + 16;
const BYTES_A_PLAN: usize = 2 * size_of::<(u64, ChildTimes)>();
/// A list of intervals has at most twice as much room as it needs.
const BYTES_AN_INTERVAL: usize = 2 * size_of::<ChildInterval>();

impl Ledger {
    /// How much one more child span can add to its memory.
    pub(crate) const MOST_GROWTH: usize = BYTES_A_LEDGER + BYTES_A_PLAN + BYTES_AN_INTERVAL;

    pub(crate) fn new() -> Self {
        Self { from_ns: u64::MAX, bytes: BYTES_A_LEDGER, ..Self::default() }
    }

    pub(crate) fn add(&mut self, child: ClosedChild) {
        let ClosedChild { plan, opened_ns, closed_ns, from_ns } = child;
        self.from_ns = self.from_ns.min(from_ns);
        let is_new = !self.by_plan.contains_key(&plan);
        let times = if is_new && self.by_plan.len() >= MOST_PLANS {
            &mut self.others
        } else {
            self.bytes += if is_new { BYTES_A_PLAN } else { 0 };
            self.by_plan.entry(plan).or_default()
        };
        let before = times.open.0.len();
        times.add(opened_ns, closed_ns);
        let after = times.open.0.len();
        self.bytes = (self.bytes + after * BYTES_AN_INTERVAL) - before * BYTES_AN_INTERVAL;
    }
}

impl ChildTimes {
    fn add(&mut self, opened_ns: u64, closed_ns: u64) {
        // The clock's rate may have been corrected in between.
        let closed_ns = closed_ns.max(opened_ns);
        let ns = closed_ns - opened_ns;
        self.count += 1;
        self.total_ns = self.total_ns.saturating_add(ns);
        self.longest_ns = self.longest_ns.max(ns);
        self.open.add(ChildInterval { from_ns: opened_ns, to_ns: closed_ns, gaps_ns: 0 });
    }

    pub(crate) fn merge(&mut self, other: &Self) {
        self.count += other.count;
        self.total_ns = self.total_ns.saturating_add(other.total_ns);
        self.longest_ns = self.longest_ns.max(other.longest_ns);
        other.open.0.iter().for_each(|interval| self.open.add(*interval));
    }

    /// For how long at least one of them was open.
    pub(crate) fn open_ns(&self) -> u64 {
        self.open.0.iter().map(ChildInterval::open_ns).sum::<u64>().min(self.total_ns)
    }
}

impl OpenTime {
    fn add(&mut self, interval: ChildInterval) {
        let intervals = &mut self.0;
        let first = intervals.partition_point(|before| before.to_ns < interval.from_ns);
        let end = intervals.partition_point(|it| it.from_ns <= interval.to_ns).max(first);
        let joined = intervals.drain(first..end).fold(interval, ChildInterval::joined_with);
        intervals.insert(first, joined);
        if intervals.len() > MOST_INTERVALS {
            let second = intervals.remove(1);
            if let Some(earliest) = intervals.first_mut() {
                earliest.gaps_ns += second.from_ns - earliest.to_ns + second.gaps_ns;
                earliest.to_ns = second.to_ns;
            }
        }
    }
}

impl ChildInterval {
    fn length_ns(&self) -> u64 {
        self.to_ns - self.from_ns
    }

    fn open_ns(&self) -> u64 {
        self.length_ns() - self.gaps_ns
    }

    /// With another one that overlaps it, or that it touches.
    fn joined_with(self, other: Self) -> Self {
        let (from_ns, to_ns) = (self.from_ns.max(other.from_ns), self.to_ns.min(other.to_ns));
        let overlap_ns = to_ns.saturating_sub(from_ns);
        Self {
            from_ns: self.from_ns.min(other.from_ns),
            to_ns: self.to_ns.max(other.to_ns),
            gaps_ns: self.gaps_outside(overlap_ns) + other.gaps_outside(overlap_ns),
        }
    }

    /// The part of its gaps that is in the rest of it, as if they were spread evenly.
    fn gaps_outside(&self, overlap_ns: u64) -> u64 {
        let rest_ns = u128::from(self.length_ns().saturating_sub(overlap_ns));
        let gaps_ns = u128::from(self.gaps_ns) * rest_ns / u128::from(self.length_ns().max(1));
        u64::try_from(gaps_ns).unwrap_or(self.gaps_ns)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: u64 = 1_000_000;

    fn ledger(children: impl IntoIterator<Item = (u64, u64, u64)>) -> Ledger {
        let mut ledger = Ledger::new();
        for (plan, opened_ns, closed_ns) in children {
            ledger.add(ClosedChild { plan, opened_ns, closed_ns, from_ns: opened_ns });
        }
        ledger
    }

    /// Number, total, longest, and time in which at least one was open.
    fn times(times: &ChildTimes) -> [u64; 4] {
        [times.count, times.total_ns, times.longest_ns, times.open_ns()]
    }

    fn of_plan(ledger: &Ledger, plan: u64) -> [u64; 4] {
        times(&ledger.by_plan[&plan])
    }

    #[test]
    fn child_spans_in_turn_and_at_the_same_time_differ() {
        // 0.1 ms between them.
        let query = |n: u64| (1, n * 91 * MS / 10, n * 91 * MS / 10 + 9 * MS);
        let fetch = |n: u64| (2, 5 * MS + n, 105 * MS + n);
        let mixed = ledger((0..214).map(query).chain((0..8).map(fetch)));
        assert_eq!(of_plan(&mixed, 1), [214, 1_926 * MS, 9 * MS, 1_926 * MS]);
        assert_eq!(of_plan(&mixed, 2), [8, 800 * MS, 100 * MS, 100 * MS + 7]);
        // In whatever order they close.
        let reverse = ledger((0..8).rev().map(fetch).chain((0..214).rev().map(query)));
        assert_eq!(of_plan(&reverse, 1), of_plan(&mixed, 1));
        assert_eq!(of_plan(&reverse, 2), of_plan(&mixed, 2));
    }

    #[test]
    fn a_span_around_those_before_covers_their_gaps() {
        let short = |n: u64| (1, n * 10, n * 10 + 5);
        let before = ledger((0..1_000).map(short));
        assert_eq!(of_plan(&before, 1), [1_000, 5_000, 5, 5_000]);
        let all = ledger((0..1_000).map(short).chain([(1, 0, 20_000)]));
        assert_eq!(of_plan(&all, 1), [1_001, 25_000, 20_000, 20_000]);
        // From the middle of those that are one interval by now: half of its gaps, estimated.
        let part = ledger((0..1_000).map(short).chain([(1, 5_000, 20_000)]));
        let [_, _, _, open_ns] = of_plan(&part, 1);
        assert!(open_ns.abs_diff(2_500 + 15_000) < 200, "{open_ns}");
    }

    #[test]
    fn memory_is_bounded_and_further_plans_are_counted_together() {
        let many =
            || (0..1_000_u64).flat_map(|n| (0..100).map(move |plan| (plan, n * 9, n * 9 + 4)));
        let ledger = ledger(many());
        assert_eq!(ledger.by_plan.len(), MOST_PLANS);
        let count: u64 = ledger.by_plan.values().map(|times| times.count).sum();
        assert_eq!(count + ledger.others.count, 100_000);
        assert_eq!(times(&ledger.others), [36_000, 144_000, 4, 4_000]);
        let most = BYTES_A_LEDGER + 65 * (BYTES_A_PLAN + MOST_INTERVALS * BYTES_AN_INTERVAL);
        assert!(ledger.bytes <= most && most < 128 << 10, "{} of {most}", ledger.bytes);
        let intervals: usize = ledger.by_plan.values().map(|times| times.open.0.len()).sum();
        let intervals = intervals + ledger.others.open.0.len();
        let expected = BYTES_A_LEDGER + 64 * BYTES_A_PLAN + intervals * BYTES_AN_INTERVAL;
        assert_eq!(ledger.bytes, expected);
    }

    #[test]
    fn those_count_from_the_earliest_on_that_one_says() {
        let mut ledger = ledger([(1, 5, 6)]);
        assert_eq!(ledger.from_ns, 5);
        ledger.add(ClosedChild { plan: 1, opened_ns: 1, closed_ns: 7, from_ns: 3 });
        assert_eq!(ledger.from_ns, 3);
    }

    proptest! {
        /// As long as no intervals are joined for lack of room.
        #[test]
        fn the_time_in_which_any_was_open_is_exact_in_any_order(
            spans in prop::collection::vec((0..500_u64, 0..60_u64), 1..30)
        ) {
            let is_open = |at: u64| spans.iter().any(|(from, long)| (*from..from + long).contains(&at));
            let expected = (0..600).filter(|at| is_open(*at)).count() as u64;
            let of = |it: &(u64, u64)| (1, it.0, it.0 + it.1);
            prop_assert_eq!(of_plan(&ledger(spans.iter().map(of)), 1)[3], expected);
            prop_assert_eq!(of_plan(&ledger(spans.iter().rev().map(of)), 1)[3], expected);
        }

        /// Whatever the order and number: between the longest span and the total.
        #[test]
        fn the_time_in_which_any_was_open_is_within_bounds(
            spans in prop::collection::vec((0..1_000_000_u64, 0..500_u64), 1..200)
        ) {
            let of = |it: &(u64, u64)| (1, it.0, it.0 + it.1);
            let [_, total_ns, longest_ns, open_ns] = of_plan(&ledger(spans.iter().map(of)), 1);
            prop_assert!((longest_ns..=total_ns).contains(&open_ns));
        }
    }
}
