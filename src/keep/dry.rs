//! Which rules, names and values have no token left, and until when: what an outage asks first.

use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};

use super::limits::Limited;
use crate::span::SpanKey;

/// How many are known at once. Of two with the same place, the last one is.
const PLACES: usize = 1_024;
/// Of the counts of roots with an open group.
const ROOTS: usize = 256;

/// Answers without a lock. It may be wrong in one direction only: that a token could be had.
#[derive(Debug)]
pub(super) struct Dry {
    places: Box<[DryPlace]>,
    /// How many roots have an open group, by a part of their keys: spans join it without a token.
    roots: Box<[AtomicU16]>,
}

/// Both words are written without a lock. They belong together if their combination is the hash of the limit.
#[derive(Debug, Default)]
struct DryPlace {
    check: AtomicU64,
    until_ns: AtomicU64,
}

/// A limit of a rule, or of the spans of one name and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LimitKey(u64);

impl LimitKey {
    pub(super) fn of_rule(rule: u64, what: Limited) -> Self {
        Self::hash((rule, what))
    }

    /// `name` is a hash.
    pub(super) fn of_name(rule: u64, name: u64, what: Limited) -> Self {
        Self::hash((rule, name, what))
    }

    fn hash(of: impl std::hash::Hash) -> Self {
        Self(BuildHasherDefault::<DefaultHasher>::default().hash_one(of))
    }
}

impl Dry {
    pub(super) fn new() -> Self {
        let places = (0..PLACES).map(|_| DryPlace::default()).collect();
        Self { places, roots: (0..ROOTS).map(|_| AtomicU16::new(0)).collect() }
    }

    fn place(&self, LimitKey(hash): LimitKey) -> Option<&DryPlace> {
        self.places.get(usize::try_from(hash).unwrap_or_default() % PLACES)
    }

    /// There is no token before that time.
    pub(super) fn note(&self, key: LimitKey, until_ns: u64) {
        let Some(place) = self.place(key) else { return };
        place.until_ns.store(until_ns, Ordering::Relaxed);
        place.check.store(key.0 ^ until_ns, Ordering::Relaxed);
    }

    /// Whether there is no token now.
    #[inline]
    pub(super) fn is_dry(&self, key: LimitKey, now_ns: u64) -> bool {
        self.place(key).is_some_and(|place| {
            let until_ns = place.until_ns.load(Ordering::Relaxed);
            now_ns < until_ns && place.check.load(Ordering::Relaxed) ^ until_ns == key.0
        })
    }

    fn root(&self, root: SpanKey) -> Option<&AtomicU16> {
        self.roots.get(usize::try_from(root.get()).unwrap_or_default() % ROOTS)
    }

    pub(super) fn add_root(&self, root: SpanKey) {
        if let Some(count) = self.root(root) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(super) fn remove_root(&self, root: SpanKey) {
        if let Some(count) = self.root(root) {
            count.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Whether that root may have an open group.
    #[inline]
    pub(super) fn may_have_group(&self, root: SpanKey) -> bool {
        self.root(root).is_none_or(|count| count.load(Ordering::Relaxed) > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_limit_is_dry_by_itself_and_for_its_time() {
        let dry = Dry::new();
        let keys: Vec<_> = [Limited::Profile, Limited::Report]
            .into_iter()
            .flat_map(|what| {
                let names = (0..5).map(move |name| LimitKey::of_name(7, name, what));
                names.chain([LimitKey::of_rule(7, what), LimitKey::of_rule(8, what)])
            })
            .collect();
        for (number, key) in (0..).zip(&keys) {
            assert!(!dry.is_dry(*key, 0), "nothing is known yet");
            dry.note(*key, 1_000 + number);
        }
        for (number, key) in (0..).zip(&keys) {
            let is_dry = [0, 999 + number, 1_000 + number, u64::MAX].map(|ns| dry.is_dry(*key, ns));
            assert_eq!(is_dry, [true, true, false, false]);
        }
    }

    #[test]
    fn another_limit_in_the_same_place_is_not_dry() {
        let dry = Dry::new();
        let (one, other) = (LimitKey(5), LimitKey(5 + PLACES as u64));
        dry.note(one, 10);
        assert!(dry.is_dry(one, 0) && !dry.is_dry(other, 0));
        dry.note(other, 20);
        assert!(!dry.is_dry(one, 0) && dry.is_dry(other, 0));
    }

    #[test]
    fn words_of_two_writers_do_not_belong_together() {
        let dry = Dry::new();
        let (one, other) = (LimitKey(5), LimitKey(5 + PLACES as u64));
        dry.note(one, 10);
        // Another thread is between its two stores.
        dry.place(other).unwrap().until_ns.store(20, Ordering::Relaxed);
        assert!(!dry.is_dry(one, 0) && !dry.is_dry(other, 0));
    }
}
