//! Why a span was kept.

use std::fmt;

use super::Measure;

/// Why a span was kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reason {
    /// The value of that measure is larger than its rule allows. [`Measure::Wall`] is for too long a latency.
    Above(Measure),
    /// The span failed.
    Error,
    /// The span took longer than the percentile of its rule.
    Percentile,
    /// The span's rule keeps every span.
    Always,
    /// The span is the one in *n* that its rule keeps.
    OneIn,
    /// The span was considered hung while it was open: it stayed entered for too long without an exit.
    Hung,
    /// The span was still open after longer than its rule allows.
    Open,
    /// The program asked for it: `Handle::keep_current`.
    Forced,
}

/// The reasons without a measure, each with its counter.
const OTHERS: [(Reason, &str); 7] = [
    (Reason::Error, "spans.kept_for_error"),
    (Reason::Percentile, "spans.kept_for_percentile"),
    (Reason::Always, "spans.kept_for_always"),
    (Reason::OneIn, "spans.kept_for_one_in"),
    (Reason::Hung, "spans.kept_for_hung"),
    (Reason::Open, "spans.kept_for_open"),
    (Reason::Forced, "spans.kept_for_forced"),
];

impl Reason {
    /// The number of reasons, and of measures, for which there may be none.
    pub const COUNT: usize = Measure::ALL.len() + OTHERS.len();

    /// All reasons, in order: how long it took, whether it failed, where its time went, and others.
    pub fn all() -> impl Iterator<Item = Self> {
        let judged = |is_length: bool| {
            let is_one = move |measure: &Measure| {
                let is_judged = !measure.row().condition.is_empty();
                is_judged && matches!(measure, Measure::Wall | Measure::LastExit) == is_length
            };
            Measure::ALL.iter().copied().filter(is_one).map(Self::Above)
        };
        let [error, others @ ..] = OTHERS.map(|(reason, _)| reason);
        judged(true).chain([error]).chain(judged(false)).chain(others)
    }

    /// The name under which the reason is exported, such as `latency`, `error` or `on_cpu`.
    pub fn as_str(self) -> &'static str {
        self.counter().strip_prefix("spans.kept_for_").unwrap_or_default()
    }

    /// The name of the counter of spans that were kept for it.
    pub fn counter(self) -> &'static str {
        match self {
            Self::Above(measure) => measure.row().counter,
            other => OTHERS.iter().find(|(of, _)| *of == other).map_or("", |(_, counter)| *counter),
        }
    }

    /// The number of the reason among all reasons.
    pub fn number(self) -> usize {
        match self {
            Self::Above(measure) => measure as usize,
            other => Measure::ALL.len() + OTHERS.iter().take_while(|(of, _)| *of != other).count(),
        }
    }

    fn bit(self) -> u64 {
        1 << self.number()
    }
}

/// A set of [`Reason`]s. `Display` joins their names with `|`.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Reasons(u64);

const _: () = assert!(Reason::COUNT <= 64);

impl Reasons {
    /// Whether the set contains that reason.
    pub fn contains(self, reason: Reason) -> bool {
        self.0 & reason.bit() != 0
    }

    /// Whether the set is empty: the span is not kept.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Whether it was kept for what it allocated.
    pub fn are_of_allocations(self) -> bool {
        let of = [Measure::Allocated, Measure::Allocations];
        of.into_iter().any(|measure| self.contains(Reason::Above(measure)))
    }

    /// The reasons, in the order of [`Reason::all`].
    pub fn iter(self) -> impl Iterator<Item = Reason> {
        Reason::all().filter(move |reason| self.contains(*reason))
    }

    /// The reasons of both.
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl FromIterator<Reason> for Reasons {
    fn from_iter<I: IntoIterator<Item = Reason>>(reasons: I) -> Self {
        Self(reasons.into_iter().fold(0, |set, reason| set | reason.bit()))
    }
}

impl fmt::Display for Reasons {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.iter().map(Reason::as_str).collect();
        f.write_str(&names.join("|"))
    }
}

impl fmt::Debug for Reasons {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_has_a_place_and_a_name_of_its_own() {
        let all: Vec<_> = Reason::all().collect();
        let places: std::collections::BTreeSet<_> = all.iter().map(|one| one.number()).collect();
        let names: std::collections::BTreeSet<_> = all.iter().map(|one| one.as_str()).collect();
        assert_eq!([places.len(), names.len()], [all.len(); 2]);
        assert!(places.iter().all(|place| *place < Reason::COUNT));
        let set: Reasons = [Reason::Forced, Reason::Above(Measure::Wall)].into_iter().collect();
        assert_eq!(set.to_string(), "latency|forced");
    }
}
