//! Why a span was kept.

use std::fmt;

use super::Keep;
use crate::span::Closing;

/// Why a span was kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reason {
    /// It took longer than its rule allows.
    Latency,
    /// It failed.
    Error,
}

impl Reason {
    const ALL: [Self; 2] = [Self::Latency, Self::Error];

    /// The name under which the reason is exported: `latency`, `error`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Latency => "latency",
            Self::Error => "error",
        }
    }

    const fn bit(self) -> u8 {
        match self {
            Self::Latency => 1,
            Self::Error => 2,
        }
    }
}

/// A set of [`Reason`]s. It prints as their names with `|` between them.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Reasons(u8);

impl Reasons {
    /// Whether that reason is among them.
    pub const fn contains(self, reason: Reason) -> bool {
        self.0 & reason.bit() != 0
    }

    /// Whether there is none: then the span is not kept.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The reasons, in the order of [`Reason`].
    pub fn iter(self) -> impl Iterator<Item = Reason> {
        Reason::ALL.into_iter().filter(move |reason| self.contains(*reason))
    }

    /// The verdict on a closed span.
    pub(crate) fn judge(keep: &Keep, closing: &Closing) -> Self {
        let mut reasons = Self::default();
        let wall_ns = u128::from(closing.account.wall_ns);
        if keep.latency().is_some_and(|latency| wall_ns > latency.as_nanos()) {
            reasons.0 |= Reason::Latency.bit();
        }
        if keep.on_error() && closing.failed {
            reasons.0 |= Reason::Error.bit();
        }
        reasons
    }
}

impl FromIterator<Reason> for Reasons {
    fn from_iter<I: IntoIterator<Item = Reason>>(reasons: I) -> Self {
        Self(reasons.into_iter().fold(0, |set, reason| set | reason.bit()))
    }
}

impl fmt::Display for Reasons {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, reason) in self.iter().enumerate() {
            if i > 0 {
                f.write_str("|")?;
            }
            f.write_str(reason.as_str())?;
        }
        Ok(())
    }
}

impl fmt::Debug for Reasons {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const RULE: Keep = Keep::slower_than(Duration::from_millis(250));

    fn judge(keep: Keep, wall_ns: u64, failed: bool) -> String {
        Reasons::judge(&keep, &Closing::for_test(wall_ns, failed)).to_string()
    }

    #[test]
    fn slower_than_the_rule_allows_is_kept() {
        assert_eq!(judge(RULE, 250_000_001, false), "latency");
        assert_eq!(judge(RULE, 250_000_000, false), "");
    }

    #[test]
    fn failed_is_kept_only_where_the_rule_says_so() {
        assert_eq!(judge(RULE, 1, true), "");
        assert_eq!(judge(RULE.or_failed(), 1, true), "error");
        assert_eq!(judge(RULE.or_failed(), 1, false), "");
        assert_eq!(judge(Keep::failed(), u64::MAX, true), "error");
    }

    #[test]
    fn both_reasons_are_told() {
        assert_eq!(judge(RULE.or_failed(), 300_000_000, true), "latency|error");
    }

    #[test]
    fn never_keeps_nothing() {
        assert_eq!(judge(Keep::never(), u64::MAX, true), "");
    }
}
