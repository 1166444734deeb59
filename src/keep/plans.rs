//! What the numbers in spans stand for.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use parking_lot::RwLock;
use tracing::Metadata;

use super::Keep;
use super::fields::FieldRules;
use super::percentile::Sketch;
use crate::span::Plan;

/// What a rule means for the spans of a callsite.
#[derive(Debug)]
pub(crate) struct Callsite {
    pub(crate) metadata: &'static Metadata<'static>,
    pub(crate) keep: Keep,
    /// The id of the rule that decided: the same for an equal rule. Each `#[profiled]` that says when to keep is one.
    pub(crate) rule: u64,
    pub(crate) plan: Plan,
    /// After so many nanoseconds without a break it hangs.
    pub(crate) hung_ns: Option<u64>,
    /// After so many nanoseconds it is open for too long.
    pub(crate) open_ns: Option<u64>,
    /// If values decide between this and others.
    pub(crate) fields: Option<Arc<FieldRules>>,
    /// If it takes the other spans of its rule to judge one.
    pub(super) cohort: Option<Arc<Cohort>>,
    /// The first of the numbers between which values decide.
    pub(super) first: u64,
    /// Its rules were replaced, and the last sweep found no span that has it.
    pub(super) was_unused: AtomicBool,
}

impl Callsite {
    /// Whether this span is the one of so many that is kept.
    pub(crate) fn is_the_one(&self) -> bool {
        let Some((cohort, number)) = self.cohort.as_ref().zip(self.keep.one_in()) else {
            return false;
        };
        // Not the first one, which is none of many.
        cohort.spans.fetch_add(1, Ordering::Relaxed) % number == number.get() - 1
    }
}

/// What is remembered of the spans of one rule and name for as long as the rule is in force.
#[derive(Debug, Default)]
pub(super) struct Cohort {
    /// So far, where one of so many is kept.
    pub(super) spans: AtomicU32,
    /// If it takes their percentile to judge one.
    pub(super) sketch: Option<Sketch>,
}

/// All that spans may have, by their numbers. Behind a lock: only what may be kept, or depends on values, asks.
#[derive(Debug)]
pub(super) struct Plans {
    by_number: RwLock<HashMap<u64, Arc<Callsite>>>,
    /// After so many nanoseconds the first open span may have to be kept; `u64::MAX` if none ever.
    pub(super) least_limit_ns: AtomicU64,
    /// The least age at which spans are sampled, in ticks, but those that are from the enter.
    pub(super) least_age: AtomicU64,
}

impl Plans {
    pub(super) fn new() -> Self {
        Self {
            by_number: RwLock::default(),
            least_limit_ns: AtomicU64::new(u64::MAX),
            least_age: AtomicU64::new(u64::MAX),
        }
    }

    pub(super) fn get(&self, number: u64) -> Option<Arc<Callsite>> {
        self.by_number.read().get(&number).cloned()
    }

    pub(super) fn insert(&self, callsite: Callsite) {
        let mut plans = self.by_number.write();
        self.lower_limits(&callsite);
        plans.insert(callsite.plan.number, Arc::new(callsite));
    }

    /// Drops those before `current` that are not `in_use`, and were not when this was called before. Returns
    /// whether some before `current` are left.
    pub(super) fn sweep(&self, current: u64, in_use: &HashSet<u64>) -> bool {
        let mut plans = self.by_number.write();
        let first = |number| Some(plans.get(number)?.first);
        let in_use: HashSet<_> = in_use.iter().filter_map(first).collect();
        plans.retain(|number, callsite| {
            let is_unused = *number < current && !in_use.contains(&callsite.first);
            let was_unused = callsite.was_unused.swap(is_unused, Ordering::Relaxed);
            !(is_unused && was_unused)
        });
        plans.shrink_to_fit();
        self.least_limit_ns.store(u64::MAX, Ordering::Relaxed);
        self.least_age.store(u64::MAX, Ordering::Relaxed);
        plans.values().for_each(|callsite| self.lower_limits(callsite));
        plans.keys().any(|number| *number < current)
    }

    fn lower_limits(&self, callsite: &Callsite) {
        for limit_ns in callsite.hung_ns.into_iter().chain(callsite.open_ns) {
            self.least_limit_ns.fetch_min(limit_ns, Ordering::Relaxed);
        }
        let arm_after = callsite.plan.arm_after;
        if arm_after > 0 && !callsite.keep.is_never() {
            self.least_age.fetch_min(arm_after, Ordering::Relaxed);
        }
    }

    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        self.by_number.read().len()
    }
}
