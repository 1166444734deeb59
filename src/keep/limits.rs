//! The limits of profiles and reports per minute.
//!
//! There is a token bucket for each rule, name and combination of shown values, and one for each rule: a span takes a
//! token from both, or from none.

use std::collections::HashMap;

/// Limits the kept spans of a rule, those of one name and values, so that one route does not take what others need, and
/// all of them together, as there can be any number of routes.
///
/// Each limit is a token bucket that starts full and refills evenly.
#[derive(Debug)]
pub(super) struct RateLimits {
    per_minute: u32,
    /// When each bucket will be full if nothing more is taken. A full one need not be there.
    full_ns: HashMap<Limit, u64>,
    /// How many remained when full ones were last forgotten.
    remained: usize,
}

/// The limit of a rule, or of one name in it, which is a hash.
type Limit = (u64, Option<u64>, Limited);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Limited {
    Profile,
    /// For groups without a profile, which are only reported.
    Report,
}

/// A rule has this multiple of what the spans of one name and values have.
const NAMES_PER_RULE: u32 = 4;
/// From that many on, full buckets are forgotten each time that the number has doubled. A rule bounds how many are not full.
const MANY_BUCKETS: usize = 1024;
const MINUTE_NS: u64 = 60_000_000_000;

/// Takes a token from a bucket that holds `per_minute` of them and is full at `full_ns`. Returns when it is full then;
/// `None` if there is no token.
fn take(full_ns: u64, per_minute: u32, now_ns: u64) -> Option<u64> {
    let interval_ns = MINUTE_NS / u64::from(per_minute.max(1));
    let full_ns = full_ns.max(now_ns).saturating_add(interval_ns);
    let missing_ns = full_ns - now_ns;
    (missing_ns <= interval_ns.saturating_mul(u64::from(per_minute))).then_some(full_ns)
}

impl RateLimits {
    pub(super) fn new(per_minute: u32) -> Self {
        Self { per_minute, full_ns: HashMap::new(), remained: 0 }
    }

    pub(super) fn take(&mut self, span: (u64, u64), what: Limited, now_ns: u64) -> bool {
        let Some(taken) = self.taken(span, what, now_ns) else { return false };
        if self.full_ns.len() >= MANY_BUCKETS.max(2 * self.remained) {
            self.full_ns.retain(|_, full_ns| *full_ns > now_ns);
            self.remained = self.full_ns.len();
        }
        self.full_ns.extend(taken);
        true
    }

    /// The rule's bucket and the name's without a token, if both have one.
    pub(super) fn taken(
        &self,
        (rule, name): (u64, u64),
        what: Limited,
        now_ns: u64,
    ) -> Option<[(Limit, u64); 2]> {
        let taken = |limit, per_minute| {
            let full_ns = self.full_ns.get(&limit).copied().unwrap_or(0);
            Some((limit, take(full_ns, per_minute, now_ns)?))
        };
        let of_rule = taken((rule, None, what), self.per_minute.saturating_mul(NAMES_PER_RULE))?;
        Some([of_rule, taken((rule, Some(name), what), self.per_minute)?])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(rule: u64, route: &str) -> (u64, u64) {
        (rule, route.bytes().fold(7, |hash, byte| hash * 31 + u64::from(byte)))
    }

    #[test]
    fn a_noisy_route_leaves_the_profiles_of_others() {
        let mut limits = RateLimits::new(3);
        let mut taken = |rule, route: &str| {
            let span = span(rule, route);
            (0..100).filter(|_| limits.take(span, Limited::Profile, 0)).count()
        };
        assert_eq!([taken(1, "/noisy"), taken(1, "/noisy"), taken(1, "/other")], [3, 0, 3]);
        // The rule as a whole has 12.
        assert_eq!(["/a", "/b", "/c", "/d"].map(|route| taken(1, route)), [3, 3, 0, 0]);
        assert_eq!(taken(2, "/noisy"), 3);
    }

    #[test]
    fn gives_its_capacity_at_once_and_then_at_its_rate() {
        const SECOND: u64 = 1_000_000_000;
        let (mut full_ns, start) = (0, 1_000 * SECOND);
        let mut take = |now_ns| {
            let taken = super::take(full_ns, 6, now_ns);
            full_ns = taken.unwrap_or(full_ns);
            taken.is_some()
        };
        assert_eq!((0..10).filter(|_| take(start)).count(), 6);
        assert!(!take(start + 10 * SECOND - 1));
        assert!(take(start + 10 * SECOND));
        assert!(!take(start + 10 * SECOND));
        assert_eq!((0..10).filter(|_| take(start + 3600 * SECOND)).count(), 6);
    }

    #[test]
    fn a_refused_span_takes_nothing_from_its_rule_or_name() {
        let (mut limits, second) = (RateLimits::new(60), 1_000_000_000);
        for route in ["/a", "/b", "/c", "/d"] {
            let taken = || limits.take(span(1, route), Limited::Report, 0);
            assert_eq!(std::iter::repeat_with(taken).take_while(|taken| *taken).count(), 60);
        }
        // The fourth name took the last tokens of the rule.
        let has = |route, now_ns| limits.taken(span(1, route), Limited::Report, now_ns).is_some();
        assert!(!has("/e", 0) && !has("/e", second / 4 - 1) && has("/e", second / 4));
        assert!(!has("/a", second - 1) && has("/a", second));
        assert!(RateLimits::new(0).taken(span(1, "/"), Limited::Profile, second).is_none());
    }

    #[test]
    fn profiles_and_reports_have_limits_of_their_own() {
        let mut limits = RateLimits::new(1);
        let span = span(1, "/");
        let what = [Limited::Profile, Limited::Profile, Limited::Report, Limited::Report];
        let taken = what.map(|what| limits.take(span, what, 0));
        assert_eq!(taken, [true, false, true, false]);
    }

    #[test]
    fn a_flood_of_names_leaves_the_limits_of_others() {
        let mut limits = RateLimits::new(10_000);
        for number in 0..3_000 {
            _ = limits.take(span(1, &number.to_string()), Limited::Profile, 0);
        }
        let mut taken = |route: &str| {
            let span = span(1, route);
            (0..30_000).filter(|_| limits.take(span, Limited::Profile, 0)).count()
        };
        assert_eq!(taken("/noisy"), 10_000, "it has a limit of its own");
        for number in 3_000..6_000 {
            _ = limits.take(span(1, &number.to_string()), Limited::Profile, 0);
        }
        let mut limits_of_noisy =
            (0..10).filter(|_| limits.take(span(1, "/noisy"), Limited::Profile, 0));
        assert_eq!(limits_of_noisy.next(), None, "it is not forgotten");
    }

    #[test]
    fn the_number_of_limits_is_bounded() {
        let mut limits = RateLimits::new(1_000);
        let mut take = |number: u32| limits.take(span(1, &number.to_string()), Limited::Report, 0);
        assert_eq!((0..9_000).filter(|number| take(*number)).count(), 4_000);
        assert_eq!(limits.full_ns.len(), 4_001, "one of each name, and that of the rule");
        let minute = 60_000_000_000;
        for number in 9_000..9_200 {
            assert!(limits.take(span(1, &number.to_string()), Limited::Report, minute));
        }
        assert_eq!(limits.full_ns.len(), 201, "full buckets are forgotten");
    }
}
