//! A bounded set of cohorts.

use std::collections::HashMap;

/// A bounded number of values, by the name of the cohort.
///
/// When the set is full, a new cohort takes the place of the one that was used least lately, if that lost it: a cohort
/// keeps its place after its last use for as long as it was in use before, at least ten minutes and at most a day. So what
/// occurs once, or for a short time, however many names it invents, replaces only its like.
#[derive(Clone, Debug)]
pub(crate) struct CohortSet<V> {
    most: usize,
    cohorts: HashMap<String, CohortEntry<V>>,
}

#[derive(Clone, Debug)]
struct CohortEntry<V> {
    first_ns: u64,
    last_ns: u64,
    value: V,
}

const MIN_STAY_NS: u64 = 10 * 60 * 1_000_000_000;
const LONGEST_STAY_NS: u64 = 24 * 60 * 60 * 1_000_000_000;

impl<V> CohortEntry<V> {
    fn stays_until_ns(&self) -> u64 {
        let used_for_ns = self.last_ns.saturating_sub(self.first_ns);
        self.last_ns.saturating_add(used_for_ns.clamp(MIN_STAY_NS, LONGEST_STAY_NS))
    }
}

impl<V> CohortSet<V> {
    pub(crate) fn new(most: usize) -> Self {
        Self { most, cohorts: HashMap::new() }
    }

    /// Counts a use of the cohort, and returns its value, and whether another one had to go for it: a new value if it comes
    /// into the set, `None` if it does not.
    pub(crate) fn use_at(
        &mut self,
        name: &str,
        now_ns: u64,
        new: impl FnOnce() -> V,
    ) -> Option<(&mut V, bool)> {
        let is_full = self.cohorts.len() >= self.most && !self.cohorts.contains_key(name);
        if is_full {
            let gone = self.cohorts.iter().filter(|(_, entry)| entry.stays_until_ns() <= now_ns);
            let gone = gone.min_by_key(|(_, entry)| entry.last_ns)?.0.clone();
            self.cohorts.remove(&gone);
        }
        let new = || CohortEntry { first_ns: now_ns, last_ns: now_ns, value: new() };
        let entry = self.cohorts.entry(name.to_owned()).or_insert_with(new);
        entry.last_ns = entry.last_ns.max(now_ns);
        Some((&mut entry.value, is_full))
    }

    pub(crate) fn get(&self, name: &str) -> Option<&V> {
        self.cohorts.get(name).map(|entry| &entry.value)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&String, &V)> {
        self.cohorts.iter().map(|(name, entry)| (name, &entry.value))
    }

    /// The cohorts, in no order, to change their values.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (&String, &mut V)> {
        self.cohorts.iter_mut().map(|(name, entry)| (name, &mut entry.value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: u64 = 60 * 1_000_000_000;

    #[test]
    fn a_flood_of_new_cohorts_does_not_evict_the_old_ones() {
        let mut set = CohortSet::new(64);
        let mut now_ns = 0;
        // Routes with one request a minute, for four hours.
        let use_real = |set: &mut CohortSet<u32>, now_ns: u64| {
            (0..60)
                .filter(|route| set.use_at(&format!("route {route}"), now_ns, || 0).is_some())
                .count()
        };
        for _ in 0..240 {
            now_ns += MINUTE;
            assert_eq!(use_real(&mut set, now_ns), 60);
        }
        // An hour of 256 invented methods, each ten times a minute, and of ever new ones.
        for minute in 0..60 {
            now_ns += MINUTE;
            for number in 0..2_560 {
                set.use_at(&format!("method {}", number % 256), now_ns, || 0);
                set.use_at(&format!("once {minute} {number}"), now_ns, || 0);
            }
            assert_eq!(use_real(&mut set, now_ns), 60, "{minute}");
        }
        assert_eq!(set.iter().filter(|(name, _)| name.starts_with("route")).count(), 60);
        // A new route takes the place of one that was invented, soon after.
        let minutes = (0..120).find(|_| {
            now_ns += MINUTE;
            use_real(&mut set, now_ns);
            set.use_at("route new", now_ns, || 0).is_some()
        });
        assert!(minutes.is_some(), "the new route has a place within two hours");
        assert_eq!((use_real(&mut set, now_ns), set.iter().count()), (60, 64));
    }

    #[test]
    fn a_new_cohort_comes_in_although_others_are_invented() {
        let mut random = 6_u64;
        let mut set = CohortSet::new(4);
        let mut use_at = |name: String, minute: u64| {
            set.use_at(&name, minute * MINUTE, || 0).map(|(known, _)| std::mem::replace(known, 1))
        };
        for minute in 0..60 {
            (0..4).for_each(|number| _ = use_at(format!("route {number}"), minute));
        }
        // The routes are used no more. Of ten a minute that are, one is not invented.
        let minutes = (60..600).find(|minute| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let at = (random >> 32) % 10;
            let one = |number| match number == at {
                true => use_at("new".to_owned(), *minute),
                false => use_at(format!("once {minute} {number}"), *minute),
            };
            // It stays: it has a value of before.
            (0..10).filter_map(one).any(|known| known == 1)
        });
        assert!(minutes.is_some_and(|minutes| minutes >= 118), "{minutes:?}");
    }

    #[test]
    fn cohorts_with_as_much_use_do_not_take_turns() {
        let mut set = CohortSet::new(2);
        let mut use_at = |name, minute: u64| {
            set.use_at(name, minute * MINUTE, || 0).map(|(_, has_evicted)| has_evicted)
        };
        for minute in 0..3_000 {
            let used = ["a", "b", "c", "d"].map(|name| use_at(name, minute));
            assert_eq!(used, [Some(false), Some(false), None, None]);
        }
        // One that is used no more goes, for one that is.
        let turns: Vec<_> =
            (3_000..5_000).map(|minute| ["a", "c"].map(|name| use_at(name, minute))).collect();
        assert!(turns.iter().all(|[a, _]| *a == Some(false)), "{turns:?}");
        let gone = turns.iter().position(|[_, c]| *c == Some(true));
        assert_eq!(gone, Some(24 * 60 - 1), "after a day");
    }
}
