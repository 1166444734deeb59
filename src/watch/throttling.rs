//! For how long the control group of the process was throttled while a span was open.

use std::collections::VecDeque;
use std::fs;

use crate::facts::{ControlGroup, ThrottlingUnknown, cpu_group_in};

/// Each reading opens the file; with version 2 of control groups, the kernel adds up what its CPUs have counted.
const READ_INTERVAL_NS: u64 = 20_000_000;
/// The read interval for a span that has just closed.
const MIN_INTERVAL_NS: u64 = 2_000_000;
/// How often to check whether the process or a thread is in another group, and whether another group has a quota.
const CHECK_INTERVAL_NS: u64 = 1_000_000_000;
const SEARCH_INTERVAL_NS: u64 = 10_000_000_000;
const MAX_THREADS: usize = 64;
/// A change between two readings belongs to the time of the nearer one, if that is no further away: the usual period of
/// a quota.
const NEAR_NS: u64 = 100_000_000;
/// A group is throttled at most once in each period.
const MAX_READINGS: usize = 4_096;

pub(crate) struct Throttling {
    group: Result<ControlGroup, ThrottlingUnknown>,
    /// The groups of the process when its group was last searched for.
    groups: String,
    searched_ns: Option<u64>,
    checked_ns: Option<u64>,
    read_ns: Option<u64>,
    readings: Readings,
}

/// For how long the group has been throttled in all, by time.
#[derive(Debug, Default)]
struct Readings(VecDeque<Unchanged>);

/// An interval at whose begin and end the same was read, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Unchanged {
    from_ns: u64,
    to_ns: u64,
    throttled_ns: u64,
}

impl Throttling {
    pub(super) fn new() -> Self {
        Self {
            group: Err(ThrottlingUnknown::NOT_READ),
            groups: String::new(),
            searched_ns: None,
            checked_ns: None,
            read_ns: None,
            readings: Readings::default(),
        }
    }

    /// Reads it if that is due, and sooner if a span has closed. `now_ns` is `CLOCK_MONOTONIC_RAW`; `threads` are some of
    /// the process.
    pub(crate) fn read(
        &mut self,
        now_ns: u64,
        has_closed: bool,
        threads: impl Iterator<Item = u32>,
    ) {
        let is_due = |then: Option<u64>, interval_ns| {
            then.is_none_or(|then| now_ns.saturating_sub(then) >= interval_ns)
        };
        let interval_ns = if has_closed { MIN_INTERVAL_NS } else { READ_INTERVAL_NS };
        if !is_due(self.read_ns, interval_ns) {
            return;
        }
        self.read_ns = Some(now_ns);
        if is_due(self.checked_ns, CHECK_INTERVAL_NS) {
            self.checked_ns = Some(now_ns);
            let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
            let is_other = |tid| {
                let of_thread = fs::read_to_string(format!("/proc/self/task/{tid}/cgroup"));
                of_thread.is_ok_and(|of| cpu_group_in(&of) != cpu_group_in(&groups))
            };
            if threads.take(MAX_THREADS).any(is_other) {
                self.groups.clear();
                self.set(Err(ThrottlingUnknown::THREADED));
            } else if groups != self.groups || is_due(self.searched_ns, SEARCH_INTERVAL_NS) {
                (self.searched_ns, self.groups) = (Some(now_ns), groups);
                self.set(ControlGroup::find());
            }
        }
        let Ok(group) = &self.group else { return };
        match group.throttled_ns() {
            Some(throttled_ns) => self.readings.add(now_ns, throttled_ns),
            None => self.set(Err(ThrottlingUnknown::UNREADABLE)),
        }
    }

    /// Takes up another group, of which nothing is known yet.
    fn set(&mut self, group: Result<ControlGroup, ThrottlingUnknown>) {
        if group.is_err() || group != self.group {
            self.readings.0.clear();
            self.group = group;
        }
    }

    pub(crate) fn between(&self, from_ns: u64, to_ns: u64) -> Result<u64, ThrottlingUnknown> {
        self.group.as_ref().map_err(|why| *why)?;
        self.readings.between(from_ns, to_ns).ok_or(ThrottlingUnknown::NOT_READ)
    }
}

impl Readings {
    fn add(&mut self, now_ns: u64, throttled_ns: u64) {
        match self.0.back_mut() {
            Some(last) if last.throttled_ns == throttled_ns => last.to_ns = now_ns,
            // The counter of another group with the same path.
            Some(last) if last.throttled_ns > throttled_ns => self.0.clear(),
            _ => {}
        }
        if self.0.back().is_none_or(|last| last.throttled_ns != throttled_ns) {
            if self.0.len() >= MAX_READINGS {
                self.0.pop_front();
            }
            self.0.push_back(Unchanged { from_ns: now_ns, to_ns: now_ns, throttled_ns });
        }
    }

    fn between(&self, from_ns: u64, to_ns: u64) -> Option<u64> {
        let (from, to) = (self.at(from_ns)?, self.at(to_ns)?);
        // What changed in a gap was before, after or in between.
        let is_in_one_gap = self.next(from_ns) == self.next(to_ns) && !to.holds(to_ns);
        if is_in_one_gap && !from.holds(from_ns) {
            return None;
        }
        to.throttled_ns.checked_sub(from.throttled_ns)
    }

    fn next(&self, time_ns: u64) -> usize {
        self.0.partition_point(|reading| reading.to_ns < time_ns)
    }

    fn at(&self, time_ns: u64) -> Option<Unchanged> {
        let next = self.next(time_ns);
        let after = self.0.get(next).copied();
        let before = next.checked_sub(1).and_then(|before| self.0.get(before)).copied();
        let distance = |reading: &Unchanged| {
            reading.from_ns.saturating_sub(time_ns).max(time_ns.saturating_sub(reading.to_ns))
        };
        let nearest = before.into_iter().chain(after).min_by_key(distance)?;
        (distance(&nearest) <= NEAR_NS).then_some(nearest)
    }
}

impl Unchanged {
    fn holds(&self, time_ns: u64) -> bool {
        (self.from_ns..=self.to_ns).contains(&time_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys;

    const MS: u64 = 1_000_000;

    /// Of milliseconds: when it was read, and what.
    fn readings(of: &[(u64, u64)]) -> Readings {
        let mut readings = Readings::default();
        of.iter().for_each(|(at, throttled)| readings.add(at * MS, throttled * MS));
        readings
    }

    fn between(readings: &Readings, from: u64, to: u64) -> Option<u64> {
        readings.between(from * MS, to * MS).map(|ns| ns / MS)
    }

    #[test]
    fn what_was_read_around_a_span_is_its_throttling() {
        let readings = readings(&[(1_000, 5), (1_020, 5), (1_100, 85), (1_120, 85), (1_200, 165)]);
        assert_eq!(readings.0.len(), 3);
        assert_eq!(between(&readings, 1_000, 1_120), Some(80));
        assert_eq!(between(&readings, 1_010, 1_200), Some(160));
        // The change between two readings belongs to the time of the nearer one.
        assert_eq!(between(&readings, 1_010, 1_190), Some(160));
        assert_eq!(between(&readings, 1_010, 1_130), Some(80));
        assert_eq!(between(&readings, 1_030, 1_110), Some(80));
        assert_eq!(between(&readings, 1_090, 1_110), Some(0));
    }

    #[test]
    fn nothing_is_said_of_times_without_readings() {
        let readings = readings(&[(1_000, 5), (1_500, 105), (1_520, 105)]);
        // Not whether it was throttled then, or before or after.
        assert_eq!(between(&readings, 1_040, 1_060), None);
        assert_eq!(between(&readings, 1_460, 1_480), None);
        assert_eq!(between(&readings, 1_250, 1_510), None, "far from both readings");
        assert_eq!(between(&readings, 1_510, 1_630), None, "after the last one");
        assert_eq!(between(&readings, 800, 1_510), None, "before the first one");
        assert_eq!(between(&readings, 950, 1_540), Some(100));
        assert_eq!(between(&readings, 1_505, 1_510), Some(0));
        assert_eq!(between(&Readings::default(), 1, 2), None);
    }

    #[test]
    fn a_counter_that_went_back_is_another() {
        let readings = readings(&[(1_000, 500), (1_020, 0), (1_040, 10)]);
        assert_eq!(between(&readings, 1_020, 1_040), Some(10));
        assert_eq!(between(&readings, 900, 1_040), None);
    }

    #[test]
    fn readings_are_bounded() {
        let many: Vec<_> = (0..5_000).map(|at| (at, at)).collect();
        let readings = readings(&many);
        assert_eq!(readings.0.len(), MAX_READINGS);
        assert_eq!(between(&readings, 4_000, 4_999), Some(999));
    }

    /// A thread or a process without a group leaves one clear state.
    #[test]
    fn the_group_of_this_process_is_known_or_says_why_not() {
        let mut throttling = Throttling::new();
        assert_eq!(throttling.between(1, 2), Err(ThrottlingUnknown::NOT_READ));
        throttling.read(1_000 * MS, false, [sys::current_tid()].into_iter());
        throttling.read(1_010 * MS, false, std::iter::empty());
        let known = throttling.between(1_000 * MS, 1_000 * MS);
        println!("{known:?}");
        match &throttling.group {
            Ok(_) => assert_eq!(known, Ok(0)),
            Err(why) => assert_eq!(known, Err(*why)),
        }
        // What has vanished is unknown, and is not read again.
        throttling.set(Err(ThrottlingUnknown::UNREADABLE));
        throttling.read(1_100 * MS, true, std::iter::empty());
        let known = throttling.between(1_000 * MS, 1_000 * MS);
        assert_eq!(known, Err(ThrottlingUnknown::UNREADABLE));
    }
}
