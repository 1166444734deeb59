//! How long spans of one name usually take.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use hdrhistogram::Histogram;
use parking_lot::{Mutex, RwLock};

/// The sketches for the spans of one name and rule: one for each combination of values of their shown fields, so that the
/// requests of a route are compared with each other.
#[derive(Debug)]
pub(super) struct Sketches {
    /// For spans without shown fields, and for those for which there was no room.
    others: Sketch,
    /// By the hash of the values.
    by_values: RwLock<HashMap<u64, Arc<Sketch>>>,
    /// How many sketches for values there are in the layer.
    total: Arc<AtomicUsize>,
}

impl Sketches {
    pub(super) fn new(millionths: u32, total: &Arc<AtomicUsize>) -> Self {
        let (others, by_values) = (Sketch::new(millionths), RwLock::default());
        Self { others, by_values, total: Arc::clone(total) }
    }

    /// Frees the memory, because the rule is no longer in force. If the rule comes back, all begins anew.
    pub(super) fn forget(&self) {
        self.others.forget();
        let forgotten = std::mem::take(&mut *self.by_values.write());
        self.total.fetch_sub(forgotten.len(), Ordering::Relaxed);
    }

    /// Whether the sketch for spans without values holds memory.
    pub(super) fn is_in_use(&self) -> bool {
        self.others.is_in_use()
    }

    /// Adds a span with the hash of its values, if it has any. Returns whether it took longer than the percentile of the
    /// spans before it with the same values.
    pub(super) fn add(&self, values: Option<u64>, wall_ns: u64, now_ns: u64) -> bool {
        let known = |values| self.by_values.read().get(&values).cloned();
        match values.and_then(|values| known(values).or_else(|| self.sketch_of(values))) {
            Some(sketch) => sketch.add(wall_ns, now_ns),
            None => self.others.add(wall_ns, now_ns),
        }
    }

    #[cold]
    fn sketch_of(&self, values: u64) -> Option<Arc<Sketch>> {
        let mut by_values = self.by_values.write();
        if let Some(known) = by_values.get(&values) {
            return Some(Arc::clone(known));
        }
        let one_more = |total| (total < MOST_SKETCHES).then_some(total + 1);
        self.total.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).ok()?;
        let new = Arc::new(Sketch::new(self.others.millionths));
        by_values.insert(values, Arc::clone(&new));
        Some(new)
    }
}

impl Drop for Sketches {
    fn drop(&mut self) {
        self.total.fetch_sub(self.by_values.get_mut().len(), Ordering::Relaxed);
    }
}

/// How long spans of one name and rule took in the last five to ten minutes.
///
/// There are two windows, and one of them fills. Old spans are forgotten a window at a time, and once a window has
/// passed, the limit always covers at least a whole one.
#[derive(Debug)]
struct Sketch {
    /// In parts of a million.
    millionths: u32,
    /// Spans that must be counted before the limit applies.
    warm_up: u64,
    /// `None` before the first span, and while the rule is not in force.
    windows: Mutex<Option<Windows>>,
}

#[derive(Debug)]
struct Windows {
    filling: Histogram<u32>,
    full: Histogram<u32>,
    began_ns: u64,
    /// The percentile in nanoseconds, once known.
    limit_ns: Option<u64>,
    /// Spans until the limit is computed again.
    until_next: u32,
}

const WINDOW_NS: u64 = 5 * 60 * 1_000_000_000;
/// Sketches of a layer, and as many again for values of fields; each takes up to some 20 KiB.
pub(super) const MOST_SKETCHES: usize = 256;
/// The expected number of spans above the percentile before it is meaningful.
const EXPECTED_ABOVE: u64 = 10;
const LEAST_WARM_UP: u64 = 100;
/// Spans between two evaluations of the histograms, which take microseconds.
const BETWEEN: u32 = 64;
const MILLION: u64 = 1_000_000;
/// Histograms count microseconds, to within 1 %.
const UNIT_NS: u64 = 1_000;
const DIGITS: u8 = 2;
const LONGEST: u64 = 24 * 60 * 60 * 1_000_000;

impl Sketch {
    /// A sketch of that percentile, in parts of a million.
    fn new(millionths: u32) -> Self {
        let above = MILLION.saturating_sub(u64::from(millionths)).max(1);
        let warm_up = (EXPECTED_ABOVE * MILLION / above).max(LEAST_WARM_UP);
        Self { millionths, warm_up, windows: Mutex::new(None) }
    }

    /// Frees the memory, because the rule is no longer in force. If the rule comes back, the sketch starts anew.
    fn forget(&self) {
        *self.windows.lock() = None;
    }

    /// Whether it holds memory.
    fn is_in_use(&self) -> bool {
        self.windows.lock().is_some()
    }

    /// Adds a span that took `wall_ns`. Returns whether it took longer than the percentile of the spans before it.
    fn add(&self, wall_ns: u64, now_ns: u64) -> bool {
        let mut windows = self.windows.lock();
        if windows.is_none() {
            *windows = Windows::new(now_ns);
        }
        // Without memory for histograms, no span is rare.
        let Some(windows) = &mut *windows else { return false };
        windows.turn(now_ns);
        if windows.filling.len() + windows.full.len() < self.warm_up {
            windows.limit_ns = None;
        } else if windows.limit_ns.is_none() || windows.until_next == 0 {
            windows.limit_ns = windows.limit_ns(self.millionths);
            windows.until_next = BETWEEN;
        }
        windows.until_next = windows.until_next.saturating_sub(1);
        // Fails only if a counter is saturated, and then the count stays.
        _ = windows.filling.record((wall_ns / UNIT_NS).min(LONGEST));
        windows.limit_ns.is_some_and(|limit_ns| wall_ns > limit_ns)
    }
}

impl Windows {
    fn new(now_ns: u64) -> Option<Self> {
        let histogram = || Histogram::new(DIGITS).ok();
        Some(Self {
            filling: histogram()?,
            full: histogram()?,
            began_ns: now_ns,
            limit_ns: None,
            until_next: 0,
        })
    }

    fn turn(&mut self, now_ns: u64) {
        let passed = now_ns.saturating_sub(self.began_ns) / WINDOW_NS;
        if passed == 0 {
            return;
        }
        std::mem::swap(&mut self.filling, &mut self.full);
        self.filling.reset();
        if passed > 1 {
            self.full.reset();
        }
        self.began_ns += passed * WINDOW_NS;
        self.until_next = 0;
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

    #[test]
    fn no_span_is_rare_before_the_warm_up() {
        let sketch = Sketch::new(990_000);
        assert!(lengths().all(|wall_ns| !sketch.add(wall_ns, 0)));
        assert!(sketch.add(10_000 * MS, 0));
    }

    #[test]
    fn the_share_of_spans_above_the_limit_matches_the_percentile() {
        for (millionths, expected) in [(990_000, 10), (900_000, 100), (500_000, 500)] {
            let sketch = Sketch::new(millionths);
            lengths().for_each(|wall_ns| _ = sketch.add(wall_ns, 0));
            let above = lengths().filter(|wall_ns| sketch.add(*wall_ns, 0)).count();
            // The histogram rounds by up to 1 %.
            assert!(above <= expected && above + expected / 10 + 5 >= expected, "{above}");
        }
    }

    #[test]
    fn spans_are_compared_with_those_of_the_same_values() {
        let total = Arc::default();
        let sketches = Sketches::new(990_000, &total);
        let (get, put) = (Some(1), Some(2));
        lengths().for_each(|wall_ns| _ = sketches.add(get, wall_ns, 0));
        lengths().for_each(|wall_ns| _ = sketches.add(put, wall_ns / 1_000, 0));
        lengths().for_each(|wall_ns| _ = sketches.add(None, wall_ns * 10, 0));
        let is_rare = |values, ms| sketches.add(values, ms * MS, 0);
        assert_eq!([is_rare(get, 900), is_rare(get, 1_100)], [false, true]);
        assert_eq!([is_rare(put, 2), is_rare(None, 5_000)], [true, false]);
        assert_eq!(total.load(Ordering::Relaxed), 2);
        sketches.forget();
        assert_eq!(total.load(Ordering::Relaxed), 0);
        assert!(!sketches.is_in_use() && !is_rare(get, 100_000));
        drop(sketches);
        assert_eq!(total.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn the_number_of_sketches_is_limited() {
        let total = Arc::default();
        let sketches = Sketches::new(990_000, &total);
        for number in 0..MOST_SKETCHES as u64 + 100 {
            sketches.add(Some(number), MS, 0);
        }
        assert_eq!(total.load(Ordering::Relaxed), MOST_SKETCHES);
        assert!(sketches.is_in_use(), "the last ones are compared with each other");
    }

    #[test]
    fn a_higher_percentile_needs_a_longer_warm_up() {
        let sketch = Sketch::new(999_000);
        for _ in 0..9 {
            lengths().for_each(|wall_ns| _ = sketch.add(wall_ns, 0));
        }
        assert!(!sketch.add(10_000 * MS, 0));
        lengths().for_each(|wall_ns| _ = sketch.add(wall_ns, 0));
        assert!(sketch.add(10_000 * MS, 0));
    }

    #[test]
    fn old_spans_are_forgotten() {
        let sketch = Sketch::new(900_000);
        lengths().for_each(|wall_ns| _ = sketch.add(wall_ns, 0));
        // The service is ten times faster now.
        let faster = || lengths().map(|wall_ns| wall_ns / 10);
        let above = |now_ns| faster().filter(|wall_ns| sketch.add(*wall_ns, now_ns)).count();
        assert_eq!(above(WINDOW_NS), 0);
        above(2 * WINDOW_NS);
        assert!(above(2 * WINDOW_NS) > 50);
        // After a pause, the windows are empty.
        assert!(!sketch.add(u64::MAX, 9 * WINDOW_NS));
        assert!(sketch.is_in_use());
        sketch.forget();
        assert!(!sketch.is_in_use());
    }
}
