//! How long spans of one name usually take.
//!
//! HDR histograms in two windows of five minutes, for each rule and name and each of its routes, both in bounded
//! number.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use hdrhistogram::Histogram;
use parking_lot::Mutex;

use crate::stats::Counters;

/// The histograms for the spans of one name and rule: one for each route, so that the requests of a route are compared with
/// each other, and one for all together, with which those of further routes are compared.
#[derive(Debug)]
pub(super) struct WallHistograms {
    percentile: Percentile,
    /// The lowest limit that any of them has had: a span below it is not rare.
    least_ns: AtomicU64,
    known: Mutex<Known>,
    counts: Arc<HistogramCounts>,
    counters: Arc<Counters>,
}

/// The histograms of a layer. Each has another value of these.
#[derive(Debug, Default)]
pub(super) struct HistogramCounts {
    names: Arc<()>,
    routes: Arc<()>,
}

#[derive(Debug, Default)]
struct Known {
    /// `None` before the first span.
    all: Option<Box<WallHistogram>>,
    /// By the hash of the route. Boxed, since the threads that add spans can have little stack.
    by_route: HashMap<u64, Box<WallHistogram>>,
    /// When routes with few spans may make room for others.
    swept_ns: Option<u64>,
    /// The rule is not in force, or there are too many: there is no histogram.
    is_off: bool,
}

#[derive(Clone, Copy, Debug)]
struct Percentile {
    /// In parts of a million.
    millionths: u32,
    /// Spans that must be counted before the limit applies.
    warm_up: u64,
}

/// How long such spans took in the last five to ten minutes.
///
/// There are two windows, and one of them fills. Old spans are forgotten a window at a time, and once a window has
/// passed, the limit always covers at least a whole one.
#[derive(Debug)]
struct WallHistogram {
    filling: Histogram<u32>,
    full: Histogram<u32>,
    began_ns: u64,
    limit_ns: Option<u64>,
    /// Spans until the limit is computed again.
    until_next: u32,
    _place: Arc<()>,
}

const WINDOW_NS: u64 = 5 * 60 * 1_000_000_000;
/// Histograms of a layer, and as many again for routes; each takes up to some 20 KiB.
const MAX_HISTOGRAMS: usize = 256;
/// The expected number of spans above the percentile before it is meaningful.
const EXPECTED_ABOVE: u64 = 10;
const MIN_WARM_UP: u64 = 100;
/// Spans between two evaluations of the histograms, which take microseconds.
const BETWEEN: u32 = 64;
const MILLION: u64 = 1_000_000;
/// Histograms count microseconds, to within 1 %.
const UNIT_NS: u64 = 1_000;
const DIGITS: u8 = 2;
const LONGEST: u64 = 24 * 60 * 60 * 1_000_000;

impl WallHistograms {
    pub(super) fn new(
        millionths: u32,
        counts: &Arc<HistogramCounts>,
        counters: &Arc<Counters>,
    ) -> Self {
        let above = MILLION.saturating_sub(u64::from(millionths)).max(1);
        let warm_up = (EXPECTED_ABOVE * MILLION / above).max(MIN_WARM_UP);
        Self {
            percentile: Percentile { millionths, warm_up },
            least_ns: AtomicU64::new(u64::MAX),
            known: Mutex::default(),
            counts: Arc::clone(counts),
            counters: Arc::clone(counters),
        }
    }

    /// Frees the memory, because the rule is no longer in force: no span is rare any more.
    pub(super) fn forget(&self) {
        *self.known.lock() = Known { is_off: true, ..Known::default() };
    }

    /// The rule is in force, and begins with new histograms if it was not.
    pub(super) fn resume(&self) {
        self.known.lock().is_off = false;
    }

    /// Adds a span with the hash of its route, if it has one. Returns whether it took longer than the percentile of the
    /// spans before it. While another thread adds one, a span that cannot be rare does not wait, and is not added.
    pub(super) fn add(&self, route: Option<u64>, wall_ns: u64, now_ns: u64) -> bool {
        let known = self.known.try_lock();
        if known.is_none() && wall_ns <= self.least_ns.load(Ordering::Relaxed) {
            return false;
        }
        let mut known = known.unwrap_or_else(|| self.known.lock());
        if known.all.is_none() && !known.is_off {
            known.all = WallHistogram::new(now_ns, &self.counts.names);
            known.is_off = known.all.is_none();
            Counters::add(&self.counters.rules.percentiles_dropped, known.is_off.into());
        }
        let Some(all) = &mut known.all else { return false };
        let limit_ns = all.add(wall_ns, now_ns, self.percentile);
        let of_route = route.and_then(|route| {
            let histogram = self.of_route(&mut known, route, now_ns);
            if histogram.is_none() {
                Counters::add(&self.counters.rules.percentiles_shared, 1);
            }
            Some(histogram?.add(wall_ns, now_ns, self.percentile))
        });
        let limit_ns = of_route.unwrap_or(limit_ns).unwrap_or(u64::MAX);
        if limit_ns < self.least_ns.load(Ordering::Relaxed) {
            self.least_ns.store(limit_ns, Ordering::Relaxed);
        }
        wall_ns > limit_ns
    }

    /// The histogram of a route, if there is room for one. If there is none, routes with few spans make room once in a window.
    fn of_route<'a>(
        &self,
        known: &'a mut Known,
        route: u64,
        now_ns: u64,
    ) -> Option<&'a mut WallHistogram> {
        if !known.by_route.contains_key(&route) {
            let is_due = |swept_ns: u64| now_ns >= swept_ns + WINDOW_NS;
            if is_full(&self.counts.routes) && known.swept_ns.is_none_or(is_due) {
                known.by_route.retain(|_, histogram| histogram.is_warm(now_ns, self.percentile));
                known.swept_ns = Some(now_ns);
            }
            known.by_route.insert(route, WallHistogram::new(now_ns, &self.counts.routes)?);
        }
        known.by_route.get_mut(&route).map(Box::as_mut)
    }
}

fn is_full(places: &Arc<()>) -> bool {
    Arc::strong_count(places) > MAX_HISTOGRAMS
}

impl WallHistogram {
    /// `None` if there are as many as there may be.
    fn new(now_ns: u64, places: &Arc<()>) -> Option<Box<Self>> {
        if is_full(places) {
            return None;
        }
        let histogram = || Histogram::new(DIGITS).ok();
        let (filling, full, _place) = (histogram()?, histogram()?, Arc::clone(places));
        Some(Self { filling, full, began_ns: now_ns, limit_ns: None, until_next: 0, _place }.into())
    }

    /// Adds a span that took `wall_ns`. Returns the percentile of the spans before it, if it is known.
    fn add(&mut self, wall_ns: u64, now_ns: u64, percentile: Percentile) -> Option<u64> {
        if !self.is_warm(now_ns, percentile) {
            self.limit_ns = None;
        } else if self.limit_ns.is_none() || self.until_next == 0 {
            self.limit_ns = self.limit_ns(percentile.millionths);
            self.until_next = BETWEEN;
        }
        // Fails only if a counter is saturated, and then the count stays.
        _ = self.filling.record((wall_ns / UNIT_NS).min(LONGEST));
        self.until_next = self.until_next.saturating_sub(1);
        self.limit_ns
    }

    fn is_warm(&mut self, now_ns: u64, percentile: Percentile) -> bool {
        let passed = now_ns.saturating_sub(self.began_ns) / WINDOW_NS;
        if passed > 0 {
            std::mem::swap(&mut self.filling, &mut self.full);
            self.filling.reset();
            if passed > 1 {
                self.full.reset();
            }
            self.began_ns += passed * WINDOW_NS;
            self.until_next = 0;
        }
        self.filling.len() + self.full.len() >= percentile.warm_up
    }

    fn limit_ns(&self, millionths: u32) -> Option<u64> {
        let mut both = self.filling.clone();
        both.add(&self.full).ok()?;
        let limit = both.value_at_quantile(f64::from(millionths) / MILLION as f64);
        // The largest value in the same bucket, so that every longer span is certainly above the percentile.
        Some(both.highest_equivalent(limit).saturating_add(1).saturating_mul(UNIT_NS))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// Spans of 1 to 1000 ms, in an order that visits each of them once.
    fn lengths() -> impl Iterator<Item = u64> {
        (0..1_000_u64).map(|number| (number * 617 % 1_000 + 1) * MS)
    }

    fn histograms(millionths: u32) -> WallHistograms {
        WallHistograms::new(millionths, &Arc::default(), &Arc::default())
    }

    fn routes(counts: &HistogramCounts) -> usize {
        Arc::strong_count(&counts.routes) - 1
    }

    fn add_all(histograms: &WallHistograms, route: Option<u64>, now_ns: u64) -> usize {
        lengths().filter(|wall_ns| histograms.add(route, *wall_ns, now_ns)).count()
    }

    #[test]
    fn no_span_is_rare_before_the_warm_up() {
        for (millionths, rounds) in [(990_000, 1), (999_000, 10)] {
            let histograms = histograms(millionths);
            for _ in 0..rounds {
                assert!(!histograms.add(None, 10_000 * MS, 0));
                assert_eq!(add_all(&histograms, None, 0), 0);
            }
            assert!(histograms.add(None, 11_000 * MS, 0));
        }
    }

    #[test]
    fn the_share_of_spans_above_the_limit_matches_the_percentile() {
        for (millionths, expected) in [(990_000, 10), (900_000, 100), (500_000, 500)] {
            for route in [None, Some(1)] {
                let histograms = histograms(millionths);
                add_all(&histograms, route, 0);
                let above = add_all(&histograms, route, 0);
                // The histogram rounds by up to 1 %.
                assert!(above <= expected && above + expected / 10 + 5 >= expected, "{above}");
            }
        }
    }

    #[test]
    fn spans_are_compared_with_those_of_their_route() {
        let histograms = histograms(990_000);
        let (get, put) = (Some(1), Some(2));
        add_all(&histograms, get, 0);
        lengths().for_each(|wall_ns| _ = histograms.add(put, wall_ns / 1_000, 0));
        let is_rare = |route, ms| histograms.add(route, ms * MS, 0);
        assert_eq!([is_rare(get, 900), is_rare(get, 1_100)], [false, true]);
        assert_eq!([is_rare(put, 2), is_rare(None, 800)], [true, false]);
        assert_eq!(routes(&histograms.counts), 2);
        histograms.forget();
        assert_eq!(routes(&histograms.counts), 0);
        let holds_memory = || histograms.known.lock().all.is_some();
        assert!(!holds_memory() && !is_rare(get, 100_000) && !is_rare(None, 100_000));
        assert!(!holds_memory());
        histograms.resume();
        assert!(!is_rare(get, 100_000) && holds_memory(), "it begins anew");
    }

    #[test]
    fn names_of_which_there_are_too_many_have_no_percentile_and_are_counted() {
        let (counts, counters) = (Arc::default(), Arc::default());
        let new = || WallHistograms::new(500_000, &counts, &counters);
        let names: Vec<_> = (0..MAX_HISTOGRAMS).map(|_| new()).collect();
        names.iter().for_each(|one| _ = one.add(None, MS, 0));
        let one_more = new();
        let is_ever_rare = || (1..1_000).any(|ms| one_more.add(Some(1), ms * MS, 0));
        assert!(!is_ever_rare());
        assert_eq!(counters.rules.percentiles_dropped.load(Ordering::Relaxed), 1);
        drop(names);
        // Once rules are replaced.
        one_more.resume();
        assert!(is_ever_rare());
    }

    /// Each span has a route of its own, or the rest of the layer has taken all places.
    #[test]
    fn spans_of_too_many_routes_are_compared_with_each_other() {
        let histograms = histograms(990_000);
        let mut numbers = 0..;
        let mut add = |wall_ns| histograms.add(numbers.next(), wall_ns, 0);
        assert_eq!(lengths().filter(|wall_ns| add(*wall_ns)).count(), 0);
        let above = lengths().filter(|wall_ns| add(*wall_ns)).count();
        assert!((5..=10).contains(&above), "{above}");
        assert!(add(1_100 * MS));
        assert_eq!(routes(&histograms.counts), MAX_HISTOGRAMS);
        let shared = histograms.counters.rules.percentiles_shared.load(Ordering::Relaxed);
        assert_eq!(shared, 2_001 - 2 * MAX_HISTOGRAMS as u64);
    }

    #[test]
    fn routes_with_many_spans_keep_their_place_and_get_one() {
        let histograms = histograms(990_000);
        add_all(&histograms, Some(1), 0);
        let flood = |now_ns| {
            (1_000..2_000).for_each(|route| _ = histograms.add(Some(route), 9_000 * MS, now_ns));
        };
        flood(0);
        assert!(histograms.add(Some(1), 1_100 * MS, 0), "it has kept its place");
        let late = |now_ns| add_all(&histograms, Some(2), now_ns);
        assert_eq!(late(0), 0);
        late(WINDOW_NS);
        flood(WINDOW_NS);
        assert!(histograms.add(Some(2), 1_100 * MS, WINDOW_NS), "it has a place now");
        assert!(routes(&histograms.counts) <= MAX_HISTOGRAMS);
        let counts = Arc::clone(&histograms.counts);
        drop(histograms);
        assert_eq!(routes(&counts), 0);
    }

    #[test]
    fn old_spans_are_forgotten() {
        let histograms = histograms(900_000);
        add_all(&histograms, None, 0);
        // The service is ten times faster now.
        let above =
            |now_ns| lengths().filter(|wall_ns| histograms.add(None, wall_ns / 10, now_ns)).count();
        assert_eq!(above(WINDOW_NS), 0);
        above(2 * WINDOW_NS);
        assert!(above(2 * WINDOW_NS) > 50);
        // After a pause, the windows are empty.
        assert!(!histograms.add(None, u64::MAX, 9 * WINDOW_NS));
    }

    #[test]
    fn only_spans_that_may_be_rare_wait_for_another_thread() {
        let histograms = histograms(500_000);
        add_all(&histograms, None, 0);
        add_all(&histograms, None, 0);
        let counted = || histograms.known.lock().all.as_ref().map(|all| all.filling.len());
        let known = histograms.known.lock();
        std::thread::scope(|scope| {
            let add = |ms| histograms.add(None, ms * MS, 0);
            assert!(!scope.spawn(move || add(400)).join().unwrap(), "it does not wait");
            let waits = scope.spawn(move || add(600));
            drop(known);
            assert!(waits.join().unwrap());
        });
        assert_eq!(counted(), Some(2_001));
    }
}
