//! What the log and lists say of a kept span against typical ones.

use std::sync::Arc;

use super::model::Compared;
use crate::compare::{ComparedRow, Comparison, Quantity};
use crate::facts::Facts;

/// What a kept span's comparison says in short.
#[derive(Clone, Debug, PartialEq)]
pub struct ComparedSummary {
    span: String,
    /// The number of reference spans.
    pub references: u64,
    /// Of the reference spans; `None` for fewer than ten.
    pub median_wall_ns: Option<u64>,
    /// The wall time divided by the median one; `None` for fewer than ten reference spans.
    pub times_typical: Option<f64>,
    /// How much longer it took than the mean one, if that is not by chance.
    pub slower_ns: Option<u64>,
    /// The largest difference, if it is one that made the span slower, and not by chance.
    pub slower_in: Option<SlowerIn>,
    /// All of it; `None` where many spans are remembered.
    pub comparison: Option<Arc<Comparison>>,
}

/// A part of the wall time of which a span has more than typical ones.
#[derive(Clone, Debug, PartialEq)]
pub struct SlowerIn {
    /// What it has more of.
    pub quantity: Quantity,
    /// How much more, for certain.
    pub extra_ns: u64,
}

impl Compared {
    /// Which of the kept spans it is.
    pub(crate) fn find(&self, spans: &[Facts]) -> Option<usize> {
        spans.iter().position(|facts| is_kept(facts, &self.span))
    }

    /// What it says in short.
    pub fn summary(&self) -> ComparedSummary {
        let Comparison { references, median_wall_ns, wall, ref rows, .. } = *self.comparison;
        let median_ns = median_wall_ns.filter(|ns| *ns > 0 && wall.interval.is_some());
        let slower_in = |row: &ComparedRow| {
            let extra_ns = row.value.certain_extra()?;
            Some(SlowerIn { quantity: row.quantity.clone(), extra_ns })
        };
        ComparedSummary {
            span: self.span.clone(),
            references,
            median_wall_ns,
            times_typical: median_ns.map(|ns| wall.value as f64 / ns as f64),
            // The rest is what is above the median.
            slower_ns: wall.certain_extra().map(|extra_ns| {
                median_ns.map_or(extra_ns, |median_ns| wall.value.saturating_sub(median_ns))
            }),
            slower_in: rows.first().and_then(slower_in),
            comparison: Some(Arc::clone(&self.comparison)),
        }
    }
}

impl ComparedSummary {
    /// Returns the summary without the whole comparison.
    pub fn without_rows(&self) -> Self {
        Self { comparison: None, ..self.clone() }
    }

    /// Whether it is that of a kept span.
    pub fn is_of(&self, facts: &Facts) -> bool {
        is_kept(facts, &self.span)
    }

    /// The factor with two digits.
    pub fn times(&self) -> Option<f64> {
        let times = self.times_typical?;
        Some(if times < 9.95 { (times * 10.0).round() / 10.0 } else { times.round() })
    }
}

fn is_kept(facts: &Facts, name: &str) -> bool {
    !facts.is_open && facts.name() == name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_says_only_what_is_not_by_chance() {
        let compared = Compared::for_test(200);
        let summary = compared.summary();
        assert_eq!(summary.times(), Some(12.0));
        let slower_in = summary.slower_in.clone().unwrap();
        assert_eq!(slower_in.quantity.to_string(), "on-CPU in shop::count_cheap_bundles");
        let Comparison { wall, median_wall_ns, .. } = &*compared.comparison;
        let above_median_ns = wall.value - median_wall_ns.unwrap();
        assert!(above_median_ns > 1_080_000_000, "{above_median_ns}");
        assert_eq!((slower_in.extra_ns, summary.slower_ns), (1_060_000_000, Some(above_median_ns)));
        let few = Compared::for_test(9).summary();
        assert_eq!(
            (few.references, few.times(), few.slower_ns, few.slower_in),
            (9, None, None, None)
        );

        // What is by chance, and what made the span faster.
        let mut compared = Compared::for_test(200);
        Arc::make_mut(&mut compared.comparison).rows.drain(..2);
        assert_eq!(compared.summary().slower_in, None);
    }
}
