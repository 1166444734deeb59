//! The spans inside a kept span, by name.

use std::fmt;

/// The profiled spans inside a kept span, at any depth, that have closed.
///
/// Counts the spans that were created after the kept span was sampled (`Builder::sampling_delay`) or had been open for
/// ten times as long, and slow ones that were open then: others leave nothing, so that short requests cost nothing. Of
/// spans that are sampled from the start, all count. Only the outermost span of a request has them: a local root, or a
/// span inside one that was open for long when it was created, as a connection is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Children {
    /// The 16 names with the most time, the most first, and then all others together.
    pub totals: Vec<ChildTotals>,
    /// Whether some were not counted, for lack of memory or because the collector could not keep up; see
    /// `ChildStats`.
    pub are_incomplete: bool,
    /// From when on, after the span itself, all count that were created; 0 if all were counted.
    pub from_ns: u64,
}

/// The spans of one name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChildTotals {
    /// Their name, redacted; `None` for those of several names.
    pub name: Option<String>,
    /// How many there are.
    pub count: u64,
    /// The sum of their wall times.
    pub total_ns: u64,
    /// The longest of these.
    pub longest_ns: u64,
    /// For how long at least one of them was open.
    pub open_ns: u64,
}

/// How spans of one name follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ChildOrder {
    /// In turn, or nearly so: at most a twentieth of their time was at the same time as others of them.
    InTurn,
    /// Some in turn, some at the same time.
    Mixed,
    /// On average, at least two were open at the same time.
    AtOnce,
}

impl Children {
    /// Returns the totals of the name whose more than ten spans were open for most of `wall_ns`, if there is one.
    pub fn many_in(&self, wall_ns: u64) -> Option<&ChildTotals> {
        const MANY: u64 = 10;
        let of_names = self.totals.iter().filter(|it| it.name.is_some() && it.count > MANY);
        of_names.max_by_key(|it| it.open_ns).filter(|it| it.open_ns > wall_ns / 2)
    }
}

impl ChildTotals {
    /// Whether they were open in turn or at the same time.
    pub fn order(&self) -> ChildOrder {
        let both_ns = self.total_ns.saturating_sub(self.open_ns);
        if both_ns <= self.total_ns / 20 {
            ChildOrder::InTurn
        } else if self.open_ns <= self.total_ns / 2 {
            ChildOrder::AtOnce
        } else {
            ChildOrder::Mixed
        }
    }
}

impl fmt::Display for ChildOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InTurn => "in turn",
            Self::Mixed => "partly at the same time",
            Self::AtOnce => "at the same time",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn totals(count: u64, total_ns: u64, open_ns: u64) -> ChildTotals {
        ChildTotals {
            name: Some("query".to_owned()),
            count,
            total_ns,
            open_ns,
            ..ChildTotals::default()
        }
    }

    #[test]
    fn the_order_follows_from_the_time_in_which_any_is_open() {
        let order = |total_ns, open_ns| totals(2, total_ns, open_ns).order();
        assert_eq!([order(1_000, 1_000), order(1_000, 950)], [ChildOrder::InTurn; 2]);
        assert_eq!([order(1_000, 949), order(1_000, 501)], [ChildOrder::Mixed; 2]);
        assert_eq!([order(1_000, 500), order(1_000, 100)], [ChildOrder::AtOnce; 2]);
    }

    #[test]
    fn many_of_a_name_that_explain_most_of_the_time_are_worth_saying() {
        let others = ChildTotals { name: None, ..totals(400, 900, 900) };
        let of = |children: &[ChildTotals]| {
            let all = Children { totals: children.to_vec(), ..Children::default() };
            all.many_in(1_000).map(|it| it.count)
        };
        assert_eq!(of(&[totals(214, 800, 800), totals(11, 990, 510)]), Some(214));
        assert_eq!(of(&[totals(10, 800, 800)]), None, "few");
        assert_eq!(of(&[totals(214, 4_000, 500)]), None, "half of the time");
        assert_eq!(of(&[others]), None, "of several names");
    }
}
