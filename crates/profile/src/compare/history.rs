//! What is known of a cohort: its last reference spans, their sums over a longer time and in this hour, and how long its
//! spans take.

use std::mem;

use hdrhistogram::Histogram;

use super::breakdown::Breakdown;
use super::references::ReferenceSet;
use super::totals::SpanTotals;

/// What is known of a cohort. 64 of them take at most some 16 MiB, with 200 references of 60 quantities each.
#[derive(Clone, Debug)]
pub struct CohortHistory {
    references: ReferenceSet,
    /// Their weight is halved every hour.
    lately: SpanTotals,
    halved_ns: u64,
    hour: CohortHour,
}

/// What is stored of a cohort, by the version of the service and the hour.
#[derive(Clone, Debug, Default)]
pub struct CohortHour {
    /// Of reference spans.
    pub references: SpanTotals,
    pub walls: WallTimes,
}

/// How long the spans of a cohort took, estimated from reference spans, each of which has the weight of some: as many as one
/// of which was chosen on average, by the probability that it had.
#[derive(Clone, Debug, Default)]
pub struct WallTimes {
    spans: u64,
    /// In microseconds, to within 1 %. `None` before the first span, and without memory for it.
    histogram: Option<Histogram<u32>>,
}

impl CohortHour {
    /// Adds what is known of another hour, or of the same one in another process.
    pub fn merge(&mut self, other: &Self) {
        self.references.merge(&other.references);
        other.walls.counts().for_each(|(us, spans)| self.walls.count(us, spans));
    }
}

const HOUR_NS: u64 = 60 * 60 * 1_000_000_000;
const UNIT_NS: u64 = 1_000;
const DIGITS: u8 = 2;
const LONGEST: u64 = 24 * 60 * 60 * 1_000_000;

impl WallTimes {
    /// Wall times that were stored: [`counts`](Self::counts).
    pub fn of_stored(counts: impl IntoIterator<Item = (u64, u32)>) -> Self {
        let mut times = Self::default();
        counts.into_iter().for_each(|(us, count)| times.count(us, count));
        times
    }

    fn add(&mut self, wall_ns: u64, weight: u64) {
        self.count(wall_ns / UNIT_NS, u32::try_from(weight).unwrap_or(u32::MAX));
    }

    fn count(&mut self, us: u64, count: u32) {
        self.spans = self.spans.saturating_add(count.into());
        if self.histogram.is_none() {
            self.histogram = Histogram::new(DIGITS).ok();
        }
        if let Some(histogram) = &mut self.histogram {
            // Fails only if a counter is saturated, and then the count stays.
            _ = histogram.record_n(us.min(LONGEST), count);
        }
    }

    /// Times in microseconds, to within 1 %, with how many spans took that long.
    pub fn counts(&self) -> impl Iterator<Item = (u64, u32)> {
        let recorded = self.histogram.iter().flat_map(Histogram::iter_recorded);
        recorded.map(|value| (value.value_iterated_to(), value.count_at_value()))
    }

    /// How many spans there were.
    pub fn spans(&self) -> u64 {
        self.spans
    }

    /// The wall time that a share of the spans did not exceed, in nanoseconds; `None` without spans.
    pub fn percentile_ns(&self, percent: f64) -> Option<u64> {
        let histogram = self.histogram.as_ref().filter(|histogram| !histogram.is_empty())?;
        Some(histogram.value_at_quantile(percent / 100.0).saturating_mul(UNIT_NS))
    }
}

impl CohortHistory {
    pub fn new(now_ns: u64) -> Self {
        Self {
            references: ReferenceSet::default(),
            lately: SpanTotals::default(),
            halved_ns: now_ns,
            hour: CohortHour::default(),
        }
    }

    /// Adds a reference span when it closes. `weight` is how many spans it represents. Of a new cohort, the first to close
    /// are those that took the least time.
    pub fn add_reference(&mut self, breakdown: &Breakdown, weight: u64, now_ns: u64) {
        self.hour.walls.add(breakdown.wall_ns(), weight);
        self.halve(now_ns);
        self.references.push(breakdown);
        self.lately.add(breakdown);
        self.hour.references.add(breakdown);
    }

    fn halve(&mut self, now_ns: u64) {
        let hours = now_ns.saturating_sub(self.halved_ns) / HOUR_NS;
        // After 64 hours nothing is left.
        (0..hours.min(64)).for_each(|_| self.lately.halve());
        self.halved_ns += hours * HOUR_NS;
    }

    /// The last reference spans.
    pub fn references(&self) -> &ReferenceSet {
        &self.references
    }

    /// The sums of reference spans, with those of an hour ago at half of the weight.
    pub fn lately(&self) -> &SpanTotals {
        &self.lately
    }

    /// What was added since the last call, to be stored.
    pub fn take_hour(&mut self) -> CohortHour {
        mem::take(&mut self.hour)
    }

    pub fn hour(&self) -> &CohortHour {
        &self.hour
    }
}
