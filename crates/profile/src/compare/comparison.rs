//! What one span did that others of its kind do not, and what a set of spans does that the set before did not.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use super::breakdown::{Breakdown, Quantity, SpentIn};
use super::estimate::{
    Interval, Moments, RISK_OF_ONE, RISK_OF_SETS, interval_of_one, interval_of_sets, rounded_means,
};
use super::references::ReferenceSet;
use super::totals::SpanTotals;
use crate::facts::TimeKind;

/// A span against reference spans, or a set of spans against the set before.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// How many reference spans there are. Below ten, there is no interval.
    pub references: u64,
    /// Of the reference spans; `None` if only their sums are known, or if there is none.
    pub median_wall_ns: Option<u64>,
    /// Wall times. The extra is the sum of that of all rows, exactly.
    pub wall: ComparedValue,
    /// Parts of the wall time, the largest difference first.
    pub rows: Vec<ComparedRow>,
    /// What is not part of the wall time, in the order of quantities.
    pub beside: Vec<ComparedRow>,
}

/// One quantity.
#[derive(Clone, Debug, PartialEq)]
pub struct ComparedRow {
    /// What is compared.
    pub quantity: Quantity,
    /// How much of it there is.
    pub value: ComparedValue,
    /// How many reference spans have any of it.
    pub present_in: u64,
    /// How many have at least as much of it as the span, or at most, if it has less than on average. `None` if unknown.
    pub as_extreme_in: Option<u64>,
}

/// A value and what it is compared with, in the unit of the quantity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ComparedValue {
    /// Of the span, or the mean of the later set.
    pub value: u64,
    /// The mean of the reference spans: within 1 of it, such that all of a wall time sum to the mean wall time, which is
    /// rounded to nearest.
    pub typical: u64,
    /// Of the difference to the mean, with 95 % confidence. `None` for fewer than ten spans.
    pub interval: Option<Interval>,
}

impl ComparedValue {
    /// How much more there is than in the mean reference span.
    pub fn extra(self) -> i64 {
        // Values are at most `i64::MAX`.
        self.value.cast_signed().wrapping_sub(self.typical.cast_signed())
    }

    /// How much more there is, if that is not by chance.
    pub(crate) fn certain_extra(self) -> Option<u64> {
        let is_certain = self.interval?.low > 0;
        u64::try_from(self.extra()).ok().filter(|_| is_certain)
    }
}

impl Comparison {
    /// A kept span is sampled only once it is old, and reference spans from their first enter: what it ran before is in no
    /// function. That much less in a function, or more in none, is no certain difference.
    pub fn allow_for_unsampled(&mut self, span: &Breakdown) {
        let unknown = Quantity::Wall(TimeKind::OnCpu, SpentIn::Unknown);
        let unsampled = span.value(&unknown).cast_signed();
        for row in &mut self.rows {
            let Quantity::Wall(TimeKind::OnCpu, _) = row.quantity else { continue };
            let is_unknown = row.quantity == unknown;
            if let Some(interval) = &mut row.value.interval {
                match is_unknown {
                    true => interval.low = interval.low.saturating_sub(unsampled),
                    false => interval.high = interval.high.saturating_add(unsampled),
                }
            }
        }
    }
}

/// The mean of each quantity, those of wall time such that they sum to the mean wall time, which follows.
fn means<'a>(
    quantities: &BTreeSet<&'a Quantity>,
    sum: impl Fn(&Quantity) -> u128,
    spans: u64,
) -> (BTreeMap<&'a Quantity, u64>, u64) {
    let (of_wall, beside): (Vec<&Quantity>, Vec<&Quantity>) =
        quantities.iter().copied().partition(|quantity| quantity.is_wall());
    let sums: Vec<_> = of_wall.iter().map(|quantity| sum(quantity)).collect();
    let (means, mean_wall_ns) = rounded_means(&sums, spans);
    let beside = beside.into_iter().map(|of| (of, rounded_means(&[sum(of)], spans).1));
    (of_wall.into_iter().zip(means).chain(beside).collect(), mean_wall_ns)
}

impl Comparison {
    /// `rows` are in the order of quantities.
    fn of_rows(
        references: u64,
        wall: ComparedValue,
        rows: impl Iterator<Item = ComparedRow>,
    ) -> Self {
        let (mut rows, beside): (Vec<_>, Vec<_>) = rows.partition(|row| row.quantity.is_wall());
        // Stable, so that equal ones are in the order of quantities.
        rows.sort_by_key(|row| Reverse(row.value.extra().unsigned_abs()));
        Self { references, median_wall_ns: None, wall, rows, beside }
    }
}

/// Compares a span with reference spans, of which it should be none.
///
/// Comparing takes 0.4 ms for 200 reference spans of 60 quantities each. The intervals are in closed form: for halves
/// of the same traffic, those of a bootstrap exclude zero more often, and need the single spans.
pub fn compare(slow: &Breakdown, references: &ReferenceSet) -> Comparison {
    let of_references = references.values();
    let of_slow = slow.amounts().iter().map(|amount| &amount.quantity);
    let quantities = of_slow.chain(of_references.keys().copied()).collect();
    let spans = references.len() as u64;
    let values = |of: &Quantity| of_references.get(of).map(Vec::as_slice).unwrap_or_default();
    let sum = |of: &Quantity| values(of).iter().map(|value| u128::from(*value)).sum();
    let (means, mean_wall_ns) = means(&quantities, sum, spans);
    let rows = means.into_iter().map(|(quantity, typical)| {
        let (value, of) = (slow.value(quantity), values(quantity));
        let interval = interval(value, slow.sampling_variance(quantity), of, spans);
        ComparedRow {
            quantity: quantity.clone(),
            value: ComparedValue { value, typical, interval },
            present_in: of.len() as u64,
            as_extreme_in: Some(as_extreme_in(value, of, spans, sum(quantity))),
        }
    });
    let mut walls_ns: Vec<_> = references.walls_ns().collect();
    let interval = interval(slow.wall_ns(), 0.0, &walls_ns, spans);
    let wall = ComparedValue { value: slow.wall_ns(), typical: mean_wall_ns, interval };
    let median_wall_ns = median(&mut walls_ns);
    Comparison { median_wall_ns, ..Comparison::of_rows(spans, wall, rows) }
}

fn interval(value: u64, variance: f64, references: &[u64], spans: u64) -> Option<Interval> {
    let mut moments = Moments::default();
    references.iter().for_each(|value| moments.add(*value));
    interval_of_one(value as f64, variance, &moments, spans, RISK_OF_ONE)
}

fn as_extreme_in(value: u64, references: &[u64], spans: u64, sum: u128) -> u64 {
    let count = |is_such: &dyn Fn(u64) -> bool| {
        references.iter().filter(|value| is_such(**value)).count() as u64
    };
    if u128::from(value) * u128::from(spans) >= sum {
        // Not 0: no row is of nothing.
        count(&|of_reference| of_reference >= value)
    } else {
        spans - count(&|of_reference| of_reference > value)
    }
}

/// The lower one of two in the middle.
fn median(values: &mut [u64]) -> Option<u64> {
    let middle = values.len().checked_sub(1)? / 2;
    Some(*values.select_nth_unstable(middle).1)
}

/// Compares the mean span of a set with that of the set before: a deploy with the one before, or an hour with the same
/// hour of the day before.
pub fn compare_sets(before: &SpanTotals, after: &SpanTotals) -> Comparison {
    let quantities = before.quantities().chain(after.quantities()).map(|(of, _)| of).collect();
    let sum = |totals: &SpanTotals, quantity: &Quantity| totals.moments(quantity).sum;
    let (typical, typical_ns) = means(&quantities, |of| sum(before, of), before.spans());
    let (values, value_ns) = means(&quantities, |of| sum(after, of), after.spans());
    let compared = |was: &Moments, is: &Moments, typical, value| {
        let interval = interval_of_sets((was, before.spans()), (is, after.spans()), RISK_OF_SETS);
        ComparedValue { value, typical, interval }
    };
    let rows = typical.into_iter().zip(values.into_values()).map(|((quantity, typical), value)| {
        let was = before.moments(quantity);
        ComparedRow {
            quantity: quantity.clone(),
            value: compared(&was, &after.moments(quantity), typical, value),
            present_in: was.present.min(before.spans()),
            as_extreme_in: None,
        }
    });
    let wall = compared(before.wall(), after.wall(), typical_ns, value_ns);
    Comparison::of_rows(before.spans(), wall, rows)
}

/// How often one of a day's comparisons may say that a cohort has become slower although it has not: once in 100 days.
const FALSE_ALARMS_PER_DAY: f64 = 0.01;

/// Whether spans have become slower: the mean wall times, in nanoseconds.
///
/// Only if the extra wall time is above a tenth of what it was, and if the interval excludes zero. That is at a confidence
/// that depends on how many such comparisons are made in a day (cohorts times hours), because each can be wrong. The sums
/// are of wall times, each with its number of spans. They should be of all spans of the cohort: where times vary as much
/// as their mean, 3,600 spans in each are needed to find a fifth more.
pub(crate) fn drift(
    before: (&Moments, u64),
    after: (&Moments, u64),
    comparisons_per_day: u32,
) -> Option<(u64, u64)> {
    // An interval has two sides, and only one of them is of interest.
    let risk = 2.0 * FALSE_ALARMS_PER_DAY / f64::from(comparisons_per_day.max(1));
    let interval = interval_of_sets(before, after, risk)?;
    let (was, is) = (before.0.mean(before.1), after.0.mean(after.1));
    let is_slower = interval.low > 0 && is - was > was / 10.0;
    is_slower.then_some((was as u64, is as u64))
}
