//! Which routes have become slower. Knows no clock and no file: hours are numbers.

use std::collections::BTreeMap;

use super::comparison::drift;
use super::estimate::Moments;
use super::hour::CohortHour;

const HOURS_PER_DAY: u64 = 24;
/// Each route is compared with the day before and with the version before.
const BASELINES: u32 = 2;
/// Of several processes, and of earlier ones. Further ones are not compared.
pub const MAX_ROUTES: usize = 1_024;

/// The wall times of reference spans, and how many there are.
type WallSum = (Moments, u64);

fn merge((sum, spans): &mut WallSum, (wall, more): &WallSum) {
    sum.merge(wall);
    *spans = spans.saturating_add(*more);
}

/// The wall times of reference spans, by hour and route.
#[derive(Debug, Default)]
struct HourlyWalls(BTreeMap<u64, BTreeMap<String, WallSum>>);

impl HourlyWalls {
    fn add(&mut self, hour: u64, routes: &BTreeMap<String, CohortHour>) {
        let known = self.0.entry(hour).or_default();
        for (route, CohortHour { references, .. }) in routes {
            if known.len() < MAX_ROUTES || known.contains_key(route) {
                let sum = (*references.wall(), references.spans());
                merge(known.entry(route.clone()).or_default(), &sum);
            }
        }
    }

    /// The sum of a route over the hours in which `is_wanted`.
    fn sum(&self, route: &str, is_wanted: impl Fn(u64) -> bool) -> WallSum {
        let mut sum = WallSum::default();
        let wanted = self.0.iter().filter(|(hour, _)| is_wanted(**hour));
        wanted.filter_map(|(_, known)| known.get(route)).for_each(|known| merge(&mut sum, known));
        sum
    }

    /// Whether there is any of a route at that time of the day.
    fn has(&self, route: &str, hour: u64) -> bool {
        let same = |known: u64| known % HOURS_PER_DAY == hour % HOURS_PER_DAY;
        self.sum(route, same).1 > 0
    }
}

/// What a route is compared with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Baseline {
    /// The route in the same hour of the day before.
    DayBefore,
    /// The version of the service before this one.
    Version(String),
}

/// A route has become slower.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drift {
    pub route: String,
    /// Mean wall times.
    pub was_ns: u64,
    pub is_ns: u64,
    pub since: Baseline,
    /// The hour in which it was found, counted from 1970.
    pub hour: u64,
}

/// Compares each hour with that of the day before, and in the first day, this version of the service with the last.
#[derive(Debug, Default)]
pub struct DriftDetector {
    /// Of the last 25 hours, of all versions.
    hours: HourlyWalls,
    /// A day of the version before this one, and its name.
    before: (String, HourlyWalls),
    /// The first day of this process.
    own: HourlyWalls,
    began: u64,
    /// The hour in which it was last said of a route. The day before is slow, too, a day later.
    said: BTreeMap<String, u64>,
}

impl DriftDetector {
    pub fn new(began: u64) -> Self {
        Self { began, ..Self::default() }
    }

    /// Adds an hour of earlier processes, or of others.
    pub fn add_stored(&mut self, hour: u64, routes: &BTreeMap<String, CohortHour>) {
        if hour + HOURS_PER_DAY >= self.began {
            self.hours.add(hour, routes);
        }
    }

    /// Adds an hour of the version before this one.
    pub fn add_before(&mut self, version: &str, hour: u64, routes: &BTreeMap<String, CohortHour>) {
        version.clone_into(&mut self.before.0);
        self.before.1.add(hour, routes);
    }

    /// Adds an hour of this process that has ended. Returns which routes have become slower, each once a day.
    pub fn end_hour(&mut self, hour: u64, routes: &BTreeMap<String, CohortHour>) -> Vec<Drift> {
        self.hours.add(hour, routes);
        self.hours.0.retain(|known, _| known + HOURS_PER_DAY >= hour);
        let is_first_day = hour < self.began + HOURS_PER_DAY;
        if is_first_day {
            self.own.add(hour, routes);
        }
        self.said.retain(|_, said| *said + HOURS_PER_DAY > hour);
        let comparisons = u32::try_from(routes.len().min(MAX_ROUTES)).unwrap_or(u32::MAX);
        let comparisons = comparisons.saturating_mul(BASELINES * HOURS_PER_DAY as u32);
        let mut found = Vec::new();
        for route in routes.keys().filter(|route| !self.said.contains_key(*route)) {
            let drift = is_first_day.then(|| self.since_version(route, hour, comparisons));
            let yesterday = || self.since_yesterday(route, hour, comparisons);
            found.extend(drift.flatten().or_else(yesterday));
        }
        self.said.extend(found.iter().map(|drift| (drift.route.clone(), hour)));
        found
    }

    fn since_yesterday(&self, route: &str, hour: u64, comparisons: u32) -> Option<Drift> {
        let yesterday = self.hours.sum(route, |known| known + HOURS_PER_DAY == hour);
        let today = self.hours.sum(route, |known| known == hour);
        between((route, hour), (yesterday, today), comparisons, Baseline::DayBefore)
    }

    fn since_version(&self, route: &str, hour: u64, comparisons: u32) -> Option<Drift> {
        let (version, before) = &self.before;
        // Another time of the day has another traffic.
        let was = before.sum(route, |hour| self.own.has(route, hour));
        let is = self.own.sum(route, |hour| before.has(route, hour));
        between((route, hour), (was, is), comparisons, Baseline::Version(version.clone()))
    }
}

fn between(
    (route, hour): (&str, u64),
    (before, after): (WallSum, WallSum),
    comparisons: u32,
    since: Baseline,
) -> Option<Drift> {
    let (was_ns, is_ns) = drift((&before.0, before.1), (&after.0, after.1), comparisons)?;
    Some(Drift { route: route.to_owned(), was_ns, is_ns, since, hour })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::Breakdown;

    const MS: f64 = 1_000_000.0;
    const PER_HOUR: u64 = 2_000;
    /// The first hour; it is not the first one of a day.
    const BEGAN: u64 = 490_003;

    /// Requests with a long tail, and slower by day than by night.
    struct Traffic(u64);

    impl Traffic {
        fn random(&mut self) -> f64 {
            self.0 = self
                .0
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            ((self.0 >> 11) as f64 + 1.0) / (1_u64 << 53) as f64
        }

        fn hour(&mut self, hour: u64, times: f64, per_hour: u64) -> CohortHour {
            let mut walls = CohortHour::default();
            let of_day = (hour as f64 / 24.0 * std::f64::consts::TAU).sin();
            for _ in 0..per_hour {
                let normal = (-2.0 * self.random().ln()).sqrt()
                    * (std::f64::consts::TAU * self.random()).cos();
                let wall_ns = 20.0 * MS * (1.0 + 0.3 * of_day) * (0.8 * normal).exp() * times;
                walls.add(&Breakdown::new(wall_ns as u64, []), 1);
            }
            walls
        }

        /// Two routes of which the second one takes `times` as long as usual, and one with few requests.
        fn routes(&mut self, hour: u64, times: f64) -> BTreeMap<String, CohortHour> {
            BTreeMap::from([
                ("/steady".to_owned(), self.hour(hour, 1.0, PER_HOUR)),
                ("/changed".to_owned(), self.hour(hour, times, PER_HOUR)),
                ("/rare".to_owned(), self.hour(hour, 1.0, 4)),
            ])
        }
    }

    #[test]
    fn steady_traffic_is_silent_and_a_change_of_a_fifth_is_said_within_the_hour_and_once() {
        let (mut traffic, mut detector) = (Traffic(1), DriftDetector::new(BEGAN));
        for hour in BEGAN..BEGAN + 48 {
            let routes = traffic.routes(hour, 1.0);
            assert_eq!(detector.end_hour(hour, &routes), [], "{hour}");
        }
        let changed = BEGAN + 48;
        let drifts = detector.end_hour(changed, &traffic.routes(changed, 1.2));
        let [drift] = &drifts[..] else { panic!("{drifts:?}") };
        assert_eq!((&*drift.route, &drift.since), ("/changed", &Baseline::DayBefore));
        let times = drift.is_ns as f64 / drift.was_ns as f64;
        assert!((1.1..1.3).contains(&times), "{drift:?}");
        for hour in changed + 1..changed + 48 {
            assert_eq!(detector.end_hour(hour, &traffic.routes(hour, 1.2)), [], "{hour}");
        }
        let again = changed + 48;
        let drifts = detector.end_hour(again, &traffic.routes(again, 1.5));
        assert_eq!(drifts.len(), 1, "it became slower again: {drifts:?}");
        assert!(detector.hours.0.len() <= 25 && detector.said.len() <= 2);
    }

    #[test]
    fn a_deploy_is_compared_with_the_version_before_at_the_same_time_of_day() {
        for (times, expected) in [(1.0, 0), (1.2, 1)] {
            let (mut traffic, mut detector) = (Traffic(2), DriftDetector::new(BEGAN));
            // It ended three days ago.
            for hour in BEGAN - 96..BEGAN - 72 {
                detector.add_before("1.4.1", hour, &traffic.routes(hour, 1.0));
            }
            let mut said = Vec::new();
            for hour in BEGAN..BEGAN + 24 {
                let drifts = detector.end_hour(hour, &traffic.routes(hour, times));
                said.extend(drifts.into_iter().map(|drift| (hour, drift)));
            }
            assert_eq!(said.len(), expected, "{said:?}");
            for (hour, drift) in said {
                assert_eq!((hour, &*drift.route), (BEGAN, "/changed"));
                assert_eq!(drift.since, Baseline::Version("1.4.1".to_owned()));
            }
        }
    }

    #[test]
    fn a_version_that_ran_at_other_times_of_the_day_is_not_compared() {
        let (mut traffic, mut detector) = (Traffic(3), DriftDetector::new(BEGAN));
        detector.add_before("1.4.1", BEGAN - 2, &traffic.routes(0, 1.0));
        let drifts = detector.end_hour(BEGAN, &traffic.routes(0, 1.3));
        assert!(drifts.is_empty(), "{drifts:?}");
        let mut detector = DriftDetector::new(BEGAN);
        detector.add_before("1.4.1", BEGAN - 24, &traffic.routes(0, 1.0));
        assert!(!detector.end_hour(BEGAN, &traffic.routes(0, 1.3)).is_empty());
    }

    #[test]
    fn stored_hours_are_the_day_before_and_invented_routes_are_bounded() {
        let (mut traffic, mut detector) = (Traffic(4), DriftDetector::new(BEGAN));
        let stored = traffic.routes(BEGAN, 1.0);
        // Of two processes, and one that is too old.
        detector.add_stored(BEGAN - 24, &stored);
        detector.add_stored(BEGAN - 24, &traffic.routes(BEGAN, 1.0));
        detector.add_stored(BEGAN - 25, &traffic.routes(BEGAN, 9.0));
        let invented = (0..3 * MAX_ROUTES).map(|n| (format!("/{n}"), CohortHour::default()));
        let invented = invented.collect();
        detector.add_stored(BEGAN - 24, &invented);
        detector.add_before("1", BEGAN - 24, &invented);
        let drifts = detector.end_hour(BEGAN, &traffic.routes(BEGAN, 1.2));
        assert_eq!(drifts.len(), 1, "{drifts:?}");
        assert!(detector.hours.0.values().all(|hour| hour.len() <= MAX_ROUTES));
        assert_eq!(detector.hours.0.len(), 2);
    }
}
