//! What is known of a cohort in an hour: the sums of its reference spans, and how long its spans take.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::breakdown::Breakdown;
use super::totals::SpanTotals;

/// What is stored of a cohort, by the version of the service and the hour.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CohortHour {
    /// Of reference spans.
    pub references: SpanTotals,
    pub walls: WallTimes,
}

/// How long the spans of a cohort took, estimated from reference spans, each of which has the weight of some: as many as one
/// of which was chosen on average, by the probability that it had. In microseconds, to within 1 %.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WallTimes(BTreeMap<u64, u64>);

impl CohortHour {
    /// Adds a reference span when it closes, which represents `weight` spans. Of a new cohort, the shortest close first.
    pub fn add(&mut self, breakdown: &Breakdown, weight: u64) {
        self.references.add(breakdown);
        self.walls.add(breakdown.wall_ns() / UNIT_NS, weight);
    }

    /// Adds what is known of another hour, or of the same one in another process.
    pub fn merge(&mut self, other: &Self) {
        self.references.merge(&other.references);
        other.walls.0.iter().for_each(|(us, spans)| self.walls.add(*us, *spans));
    }
}

const HOUR_S: u64 = 60 * 60;

/// The hour of a time, counted from 1970.
pub fn hour_of(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs() / HOUR_S
}

/// When an hour begins. That of hours which no clock shows is 1970.
pub fn hour_begins(hour: u64) -> SystemTime {
    /// The first hour of the year 10000, which file names cannot have.
    const END: u64 = 253_402_300_800 / HOUR_S;
    let hour = if hour < END { hour } else { 0 };
    UNIX_EPOCH + Duration::from_secs(hour * HOUR_S)
}

const UNIT_NS: u64 = 1_000;
/// The first bits of a time, of which the others are left out.
const BITS: u32 = 8;

impl WallTimes {
    fn add(&mut self, us: u64, spans: u64) {
        let others = (u64::BITS - us.leading_zeros()).saturating_sub(BITS);
        let known = self.0.entry(us >> others << others).or_default();
        *known = known.saturating_add(spans);
    }

    /// How many spans there were.
    pub fn spans(&self) -> u64 {
        self.0.values().fold(0, |sum, spans| sum.saturating_add(*spans))
    }

    /// The wall time that a share of the spans did not exceed, in nanoseconds; `None` without spans.
    pub fn percentile_ns(&self, percent: f64) -> Option<u64> {
        let wanted = self.spans() as f64 * percent / 100.0;
        let mut spans = 0.0;
        let reached = self.0.iter().find(|(_, more)| {
            spans += **more as f64;
            spans >= wanted
        });
        let (us, _) = reached.or(self.0.last_key_value())?;
        Some(us.saturating_mul(UNIT_NS))
    }
}
