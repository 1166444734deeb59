//! How long spans of one name usually take.

use hdrhistogram::Histogram;
use parking_lot::Mutex;

/// How long spans of one name and rule took in the last five to ten minutes.
///
/// Two windows, one of which fills: so the oldest are forgotten together, and the limit never rests on
/// less than a whole window once one has passed.
#[derive(Debug)]
pub(crate) struct Sketch {
    /// In parts of a million.
    millionths: u32,
    /// Spans that must have been seen before any is over the limit.
    warm_up: u64,
    /// None before the first span, and while the rule is none of those in force.
    windows: Mutex<Option<Windows>>,
}

#[derive(Debug)]
struct Windows {
    filling: Histogram<u32>,
    full: Histogram<u32>,
    began_ns: u64,
    /// The percentile in nanoseconds, once it is known.
    limit_ns: Option<u64>,
    /// Until the limit is taken again.
    until_next: u32,
}

const WINDOW_NS: u64 = 5 * 60 * 1_000_000_000;
/// Sketches of a layer; each takes up to some 20 KiB.
pub(super) const MOST_SKETCHES: usize = 256;
/// Spans above the percentile that are to be expected before it means anything.
const EXPECTED_ABOVE: u64 = 10;
const LEAST_WARM_UP: u64 = 100;
/// Spans between two looks at the histograms, which take microseconds.
const BETWEEN: u32 = 64;
const MILLION: u64 = 1_000_000;
/// Microseconds, to within 1 %.
const UNIT_NS: u64 = 1_000;
const DIGITS: u8 = 2;
const LONGEST: u64 = 24 * 60 * 60 * 1_000_000;

impl Sketch {
    /// For that percentile, in parts of a million.
    pub(crate) fn new(millionths: u32) -> Self {
        let above = MILLION.saturating_sub(u64::from(millionths)).max(1);
        let warm_up = (EXPECTED_ABOVE * MILLION / above).max(LEAST_WARM_UP);
        Self { millionths, warm_up, windows: Mutex::new(None) }
    }

    /// Gives its memory back: its rule is none of those in force. If it comes back, it begins anew.
    pub(crate) fn forget(&self) {
        *self.windows.lock() = None;
    }

    /// Whether it takes memory.
    pub(crate) fn is_in_use(&self) -> bool {
        self.windows.lock().is_some()
    }

    /// A span took so long. Returns whether that is longer than the percentile of those before it.
    pub(crate) fn add(&self, wall_ns: u64, now_ns: u64) -> bool {
        let mut windows = self.windows.lock();
        if windows.is_none() {
            *windows = Windows::new(now_ns);
        }
        // Without memory for it nothing is rare.
        let Some(windows) = &mut *windows else { return false };
        windows.turn(now_ns);
        if windows.filling.len() + windows.full.len() < self.warm_up {
            windows.limit_ns = None;
        } else if windows.limit_ns.is_none() || windows.until_next == 0 {
            windows.limit_ns = windows.limit_ns(self.millionths);
            windows.until_next = BETWEEN;
        }
        windows.until_next = windows.until_next.saturating_sub(1);
        // Fails only if a single count is full, which it then stays.
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
        // The largest that is counted with it: what is longer is so for sure.
        Some(both.highest_equivalent(limit).saturating_add(1).saturating_mul(UNIT_NS))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// Spans of 1 to 1000 ms in an order that repeats only after all of them.
    fn lengths() -> impl Iterator<Item = u64> {
        (0..1_000_u64).map(|number| (number * 617 % 1_000 + 1) * MS)
    }

    #[test]
    fn nothing_is_over_the_limit_before_enough_were_seen() {
        let sketch = Sketch::new(990_000);
        assert!(lengths().all(|wall_ns| !sketch.add(wall_ns, 0)));
        assert!(sketch.add(10_000 * MS, 0));
    }

    #[test]
    fn what_is_over_it_is_as_rare_as_it_says() {
        for (millionths, expected) in [(990_000, 10), (900_000, 100), (500_000, 500)] {
            let sketch = Sketch::new(millionths);
            lengths().for_each(|wall_ns| _ = sketch.add(wall_ns, 0));
            let above = lengths().filter(|wall_ns| sketch.add(*wall_ns, 0)).count();
            // The histogram rounds by up to 1 %.
            assert!(above <= expected && above + expected / 10 + 5 >= expected, "{above}");
        }
    }

    #[test]
    fn a_higher_percentile_takes_longer_to_be_known() {
        let sketch = Sketch::new(999_000);
        for _ in 0..9 {
            lengths().for_each(|wall_ns| _ = sketch.add(wall_ns, 0));
        }
        assert!(!sketch.add(10_000 * MS, 0));
        lengths().for_each(|wall_ns| _ = sketch.add(wall_ns, 0));
        assert!(sketch.add(10_000 * MS, 0));
    }

    #[test]
    fn what_was_long_ago_is_forgotten() {
        let sketch = Sketch::new(900_000);
        lengths().for_each(|wall_ns| _ = sketch.add(wall_ns, 0));
        // The service is ten times faster now.
        let faster = || lengths().map(|wall_ns| wall_ns / 10);
        let above = |now_ns| faster().filter(|wall_ns| sketch.add(*wall_ns, now_ns)).count();
        assert_eq!(above(WINDOW_NS), 0);
        above(2 * WINDOW_NS);
        assert!(above(2 * WINDOW_NS) > 50);
        // After a pause nothing is known.
        assert!(!sketch.add(u64::MAX, 9 * WINDOW_NS));
        assert!(sketch.is_in_use());
        sketch.forget();
        assert!(!sketch.is_in_use());
    }
}
