//! The limits of profiles and reports per minute.

use std::collections::HashMap;

use super::bucket::TokenBucket;
use crate::ids::hash_of;

/// Limits the kept spans of a rule, those of one name and values, so that one route does not take what others need, and
/// all of them together, as there can be any number of routes.
#[derive(Debug)]
pub(super) struct RateLimits {
    per_minute: u32,
    /// By the rule's id, and by [`limit_of`] it and a name.
    buckets: HashMap<u64, Buckets>,
}

#[derive(Clone, Copy, Debug)]
struct Buckets {
    profiles: TokenBucket,
    /// For groups without a profile, which are only reported.
    reports: TokenBucket,
    is_of_rule: bool,
}

/// What a span takes a token for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Limited {
    Profile,
    Report,
}

/// There is no token of that limit until that time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NoToken {
    pub(super) limit: u64,
    pub(super) until_ns: u64,
}

/// The limit of the spans of a rule with that name, which is a hash.
pub(super) fn limit_of(rule: u64, name: u64) -> u64 {
    hash_of((rule, name))
}

/// A rule has this multiple of what the spans of one name and values have.
const NAMES_PER_RULE: u32 = 4;
/// How many limits are stored. A new name takes the place of the one that has most of its tokens.
const MOST_BUCKETS: usize = 1024;

impl Buckets {
    fn new(per_minute: u32, is_of_rule: bool) -> Self {
        let bucket = TokenBucket::new(per_minute);
        Self { profiles: bucket, reports: bucket, is_of_rule }
    }

    fn bucket(&mut self, what: Limited) -> &mut TokenBucket {
        match what {
            Limited::Profile => &mut self.profiles,
            Limited::Report => &mut self.reports,
        }
    }

    fn are_full(&self, now_ns: u64) -> bool {
        self.profiles.is_full(now_ns) && self.reports.is_full(now_ns)
    }
}

impl RateLimits {
    pub(super) fn new(per_minute: u32) -> Self {
        Self { per_minute, buckets: HashMap::new() }
    }

    /// Takes a token for a span, if there is one. `now_ns` must not decrease.
    pub(super) fn take(
        &mut self,
        (rule, name): (u64, u64),
        what: Limited,
        now_ns: u64,
    ) -> Result<(), NoToken> {
        if self.buckets.len() >= MOST_BUCKETS {
            self.buckets.retain(|_, buckets| !buckets.are_full(now_ns));
        }
        let name = limit_of(rule, name);
        if !self.buckets.contains_key(&name) && self.buckets.len() >= MOST_BUCKETS {
            self.evict();
        }
        let of_rule = (rule, self.per_minute.saturating_mul(NAMES_PER_RULE), true);
        let of_name = (name, self.per_minute, false);
        let mut limits = [of_rule, of_name].map(|(key, per_minute, is_of_rule)| {
            let known = self.buckets.get(&key).copied();
            (key, known.unwrap_or_else(|| Buckets::new(per_minute, is_of_rule)))
        });
        // From both, or from none.
        for (limit, buckets) in &mut limits {
            let bucket = buckets.bucket(what);
            if !bucket.take(now_ns) {
                return Err(NoToken { limit: *limit, until_ns: bucket.next_ns() });
            }
        }
        self.buckets.extend(limits);
        Ok(())
    }

    /// Forgets the name that has taken the least: it loses nothing but a few tokens that it gets once more.
    fn evict(&mut self) {
        let of_names = self.buckets.iter().filter(|(_, buckets)| !buckets.is_of_rule);
        let taken = |buckets: &Buckets| buckets.profiles.full_ns().max(buckets.reports.full_ns());
        let least = of_names.min_by_key(|(_, buckets)| taken(buckets)).map(|(name, _)| *name);
        least.map(|name| self.buckets.remove(&name));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(rule: u64, route: &str) -> (u64, u64) {
        (rule, limit_of(0, route.bytes().fold(7, |hash, byte| hash * 31 + u64::from(byte))))
    }

    #[test]
    fn a_noisy_route_leaves_the_profiles_of_others() {
        let mut limits = RateLimits::new(3);
        let mut taken = |rule, route: &str| {
            let span = span(rule, route);
            (0..100).filter(|_| limits.take(span, Limited::Profile, 0).is_ok()).count()
        };
        assert_eq!([taken(1, "/noisy"), taken(1, "/noisy"), taken(1, "/other")], [3, 0, 3]);
        // The rule as a whole has 12.
        assert_eq!(["/a", "/b", "/c", "/d"].map(|route| taken(1, route)), [3, 3, 0, 0]);
        assert_eq!(taken(2, "/noisy"), 3);
    }

    #[test]
    fn a_refusal_says_for_whom_it_is_and_until_when() {
        let (mut limits, second) = (RateLimits::new(60), 1_000_000_000);
        let mut refused = |route: &str, now_ns| loop {
            if let Err(refused) = limits.take(span(1, route), Limited::Report, now_ns) {
                break refused;
            }
        };
        for route in ["/a", "/b", "/c"] {
            let limit = limit_of(1, span(1, route).1);
            assert_eq!(refused(route, 0), NoToken { limit, until_ns: second });
        }
        // The fourth name takes the last tokens of the rule.
        let of_rule = NoToken { limit: 1, until_ns: second / 4 };
        assert_eq!(["/d", "/e"].map(|route| refused(route, 0)), [of_rule; 2]);
        assert_eq!(refused("/a", second / 8), of_rule);
    }

    #[test]
    fn profiles_and_reports_have_limits_of_their_own() {
        let mut limits = RateLimits::new(1);
        let span = span(1, "/");
        let what = [Limited::Profile, Limited::Profile, Limited::Report, Limited::Report];
        let taken = what.map(|what| limits.take(span, what, 0).is_ok());
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
            (0..30_000).filter(|_| limits.take(span, Limited::Profile, 0).is_ok()).count()
        };
        assert_eq!(taken("/noisy"), 10_000, "it has a limit of its own");
        for number in 3_000..6_000 {
            _ = limits.take(span(1, &number.to_string()), Limited::Profile, 0);
        }
        let mut limits_of_noisy =
            (0..10).filter(|_| limits.take(span(1, "/noisy"), Limited::Profile, 0).is_ok());
        assert_eq!(limits_of_noisy.next(), None, "it is not forgotten");
    }

    #[test]
    fn the_number_of_limits_is_bounded() {
        let mut limits = RateLimits::new(1_000);
        for number in 0..3_000 {
            assert!(limits.take(span(1, &number.to_string()), Limited::Report, 0).is_ok());
        }
        assert_eq!(limits.buckets.len(), MOST_BUCKETS);
        let minute = 60_000_000_000;
        assert!(limits.take(span(1, "/"), Limited::Report, minute).is_ok());
        assert!(limits.buckets.len() <= 2, "full buckets are forgotten");
    }
}
