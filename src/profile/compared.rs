//! What the log and lists say of a kept span against typical ones.

use std::sync::Arc;

use super::model::Compared;
use crate::compare::{ComparedRow, Comparison, Quantity};
use crate::facts::Facts;

/// What a kept span's comparison says in short.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ComparedSummary {
    span: String,
    pub(crate) references: u64,
    pub(crate) median_wall_ns: Option<u64>,
    /// The wall time divided by the median one; `None` for fewer than ten reference spans.
    pub(crate) times_typical: Option<f64>,
    /// How much longer it took than the mean one, if that is not by chance.
    pub(crate) slower_ns: Option<u64>,
    /// The largest difference, if it is one that made the span slower, and not by chance.
    pub(crate) slower_in: Option<SlowerIn>,
    /// All of it; `None` where many spans are remembered.
    pub(crate) comparison: Option<Arc<Comparison>>,
}

/// A part of the wall time of which a span has more than typical ones.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SlowerIn {
    pub(crate) quantity: Quantity,
    pub(crate) extra_ns: u64,
}

impl Compared {
    /// Which of the kept spans it is.
    pub(crate) fn find<'a>(&self, spans: &'a [Facts]) -> Option<(usize, &'a Facts)> {
        let is_it = |(_, facts): &(usize, &Facts)| !facts.is_open && facts.name() == self.span;
        spans.iter().enumerate().find(is_it)
    }

    pub(crate) fn summary(&self) -> ComparedSummary {
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
    #[cfg(feature = "axum")]
    pub(crate) fn without_rows(&self) -> Self {
        Self { comparison: None, ..self.clone() }
    }

    /// Whether it is that of a kept span.
    pub(crate) fn is_of(&self, facts: &Facts) -> bool {
        !facts.is_open && facts.name() == self.span
    }

    /// The factor with two digits.
    pub(crate) fn times(&self) -> Option<f64> {
        let times = self.times_typical?;
        Some(if times < 9.95 { (times * 10.0).round() / 10.0 } else { times.round() })
    }
}

#[cfg(test)]
impl Compared {
    /// Makes it that of another span, with another first function.
    pub(crate) fn rename_for_test(&mut self, span: &str, function: &str) {
        use crate::compare::{OwnFunction, SpentIn, TimeKind};
        self.span = span.to_owned();
        let (file, name) = (String::new(), function.to_owned());
        let own = SpentIn::Function(Arc::new(OwnFunction { name, file, line: 0 }));
        if function != span {
            Arc::make_mut(&mut self.comparison).rows[0].quantity =
                Quantity::Wall(TimeKind::OnCpu, own);
        }
    }

    /// A span of 1.2 s against others of 0.1 s: nearly all that it has more is on-CPU in `shop::count_cheap_bundles`.
    pub(crate) fn for_test(references: u64) -> Self {
        use super::model::Profile;
        use crate::compare::{ComparedValue, Interval, OwnFunction, SpentIn, TimeKind};
        const MS: u64 = 1_000_000;
        let own = |name: &str, line| {
            let (name, file) = (format!("shop::{name}"), "shop/src/similar.rs".to_owned());
            SpentIn::Function(Arc::new(OwnFunction { name, file, line }))
        };
        let around = |extra: i64, by: i64| Interval { low: extra - by, high: extra + by };
        let row = |quantity, value: u64, typical: u64, (by, present_in, as_extreme_in)| {
            let compared = ComparedValue { value, typical, interval: None };
            let interval = (references >= 10).then(|| around(compared.extra(), by));
            ComparedRow {
                quantity,
                value: ComparedValue { interval, ..compared },
                present_in,
                as_extreme_in: Some(as_extreme_in),
            }
        };
        let wall = |kind, spent_in| Quantity::Wall(kind, spent_in);
        let ms = MS.cast_signed();
        let rows = vec![
            row(
                wall(TimeKind::OnCpu, own("count_cheap_bundles", 0)),
                1_070 * MS,
                10 * MS,
                (40 * ms, 12, 0),
            ),
            row(wall(TimeKind::OffCpu, own("reserve", 41)), 70 * MS, 20 * MS, (10 * ms, 90, 2)),
            row(wall(TimeKind::Await, own("fetch", 9)), 20 * MS, 30 * MS, (20 * ms, 150, 60)),
            row(
                wall(TimeKind::SchedulingDelay, SpentIn::Unknown),
                30 * MS,
                24 * MS,
                (9 * ms, 80, 40),
            ),
            row(wall(TimeKind::OnCpu, own("render", 0)), 10 * MS, 14 * MS, (9 * ms, 199, 90)),
            row(wall(TimeKind::Unmeasured, SpentIn::Others), 1, 2_000_000, (ms, 3, 100)),
        ];
        let beside = vec![
            row(Quantity::OtherThreads(own("prefetch", 0)), 0, 40 * MS, (5 * ms, 150, 50)),
            row(Quantity::AllocatedBytes, 25_000_000, 2_000_000, (1_000_000, 200, 0)),
            row(Quantity::ChildSpans(Some("query".into())), 214, 3, (1, 200, 0)),
            row(Quantity::ChildTime(Some("query".into())), 60 * MS, 8 * MS, (ms, 200, 0)),
        ];
        let typical = Profile::builder("GET /checkout")
            .sample(
                crate::profile::SampleKind::OnCpu,
                &[],
                &["shop::render", "shop::main"],
                std::time::Duration::ZERO,
                std::time::Duration::from_millis(14),
            )
            .build();
        Self {
            cohort: "GET /checkout".to_owned(),
            span: "GET /checkout".to_owned(),
            comparison: Arc::new(Comparison {
                references,
                median_wall_ns: Some(98 * MS),
                wall: ComparedValue {
                    value: 1_200 * MS + 1,
                    typical: 100 * MS,
                    interval: (references >= 10).then(|| around(1_100 * ms + 1, 60 * ms)),
                },
                rows,
                beside,
            }),
            typical: Arc::new(typical),
        }
    }
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
