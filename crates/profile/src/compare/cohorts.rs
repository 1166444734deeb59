//! A bounded set of cohorts, from which the least used one goes.

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hash};

/// A bounded number of values by cohort.
///
/// How much a cohort is used is the number of *windows* of ten minutes in which it is, halved every six hours. A flood of
/// requests counts as often as one request. When the set is full, a new cohort is only counted at first, and takes the
/// place of the least used one once it was used clearly more. So what occurs once, or for a short time, however many
/// names it invents, replaces only its like.
#[derive(Clone, Debug)]
pub struct CohortSet<K, V> {
    most: usize,
    cohorts: HashMap<K, CohortEntry<V>>,
    /// Cohorts that are not in the set, by their hash.
    candidates: Box<[[CandidateCohort; WAYS]]>,
    hasher: RandomState,
    /// A window, and how much the least used cohort was used at some time in it. Until its end, none becomes less so.
    least: (u64, f64),
    evicted: u64,
    refused: u64,
}

#[derive(Clone, Debug)]
struct CohortEntry<V> {
    used: WindowsUsed,
    value: V,
}

#[derive(Clone, Copy, Debug, Default)]
struct CandidateCohort {
    hash: u64,
    used: WindowsUsed,
    last_ns: u64,
}

/// The number of windows of use, with the weight that it had at the last use.
#[derive(Clone, Copy, Debug, Default)]
struct WindowsUsed {
    number: f64,
    last: u64,
}

const WINDOW_NS: u64 = 10 * 60 * 1_000_000_000;
const WINDOWS_TO_HALF: f64 = 36.0;
/// How much more a new cohort must be used than the one whose place it takes, so that two do not take turns.
const CLEARLY_MORE: f64 = 4.0 / 3.0;
const CANDIDATES: usize = 256;
/// A candidate has as many places, of which the least used one is taken.
const WAYS: usize = 4;

impl WindowsUsed {
    fn new(now_ns: u64) -> Self {
        Self { number: 1.0, last: now_ns / WINDOW_NS }
    }

    fn at(self, now_ns: u64) -> f64 {
        let passed = (now_ns / WINDOW_NS).saturating_sub(self.last);
        self.number * (-(passed as f64) / WINDOWS_TO_HALF).exp2()
    }

    fn add(&mut self, now_ns: u64) {
        let window = now_ns / WINDOW_NS;
        if window > self.last {
            *self = Self { number: self.at(now_ns) + 1.0, last: window };
        }
    }
}

impl<K: Clone + Eq + Hash, V> CohortSet<K, V> {
    /// A set of at most `most` cohorts.
    pub fn new(most: usize) -> Self {
        Self {
            most,
            cohorts: HashMap::new(),
            candidates: vec![[CandidateCohort::default(); WAYS]; CANDIDATES].into(),
            hasher: RandomState::new(),
            least: (0, 0.0),
            evicted: 0,
            refused: 0,
        }
    }

    /// Counts a use of the cohort, and returns its value: a new one if it comes into the set, `None` if it does not.
    /// `now_ns` must not decrease by more than a window.
    pub fn use_at(&mut self, key: &K, now_ns: u64, new: impl FnOnce() -> V) -> Option<&mut V> {
        if let Some(entry) = self.cohorts.get_mut(key) {
            entry.used.add(now_ns);
        } else {
            let Some(used) = self.room_for(key, now_ns) else {
                self.refused += 1;
                return None;
            };
            self.cohorts.insert(key.clone(), CohortEntry { used, value: new() });
        }
        self.cohorts.get_mut(key).map(|entry| &mut entry.value)
    }

    /// How much a new cohort was used, if there is room for it now.
    fn room_for(&mut self, key: &K, now_ns: u64) -> Option<WindowsUsed> {
        if self.cohorts.len() < self.most {
            return Some(WindowsUsed::new(now_ns));
        }
        let used = self.count_candidate(self.hasher.hash_one(key), now_ns)?;
        let enough = used.at(now_ns) / CLEARLY_MORE;
        let window = now_ns / WINDOW_NS;
        // So that a flood does not go through all cohorts each time.
        if self.least.0 == window && enough <= self.least.1 {
            return None;
        }
        let of_all = self.cohorts.iter().map(|(key, entry)| (entry.used.at(now_ns), key));
        let (least, key) = of_all.min_by(|one, other| one.0.total_cmp(&other.0))?;
        self.least = (window, least);
        if enough <= least {
            return None;
        }
        let key = key.clone();
        self.cohorts.remove(&key);
        self.evicted += 1;
        Some(used)
    }

    fn count_candidate(&mut self, hash: u64, now_ns: u64) -> Option<WindowsUsed> {
        let at = usize::try_from(hash % CANDIDATES as u64).ok()?;
        let ways = self.candidates.get_mut(at)?;
        // The hash of an unused one is 0, and then it was last used at 0.
        if let Some(known) = ways.iter_mut().find(|known| known.hash == hash) {
            known.used.add(now_ns);
            known.last_ns = now_ns;
            return Some(known.used);
        }
        let used = |known: &CandidateCohort| (known.used.at(now_ns), known.last_ns);
        let least = ways.iter_mut().min_by(|one, other| {
            let ((one, one_ns), (other, other_ns)) = (used(one), used(other));
            one.total_cmp(&other).then(one_ns.cmp(&other_ns))
        })?;
        *least = CandidateCohort { hash, used: WindowsUsed::new(now_ns), last_ns: now_ns };
        Some(least.used)
    }

    pub fn get(&self, key: &K) -> Option<&V> {
        self.cohorts.get(key).map(|entry| &entry.value)
    }

    pub fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.cohorts.iter().map(|(key, entry)| (key, &entry.value))
    }

    /// The cohorts, in no order, to change their values.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (&K, &mut V)> {
        self.cohorts.iter_mut().map(|(key, entry)| (key, &mut entry.value))
    }

    pub(crate) fn values_mut(&mut self) -> impl Iterator<Item = &mut V> {
        self.cohorts.values_mut().map(|entry| &mut entry.value)
    }

    /// How many cohorts had to go for others.
    pub fn evicted(&self) -> u64 {
        self.evicted
    }

    /// How many uses there were of cohorts that are not in the set.
    pub(crate) fn refused(&self) -> u64 {
        self.refused
    }
}
