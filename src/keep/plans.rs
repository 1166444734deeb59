//! The plans behind the numbers in spans.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use parking_lot::RwLock;
use tracing::Metadata;

use super::Keep;
use super::fields::FieldRules;
use super::percentile::Sketches;
use crate::span::Plan;

/// What a rule means for the spans of a callsite.
#[derive(Debug)]
pub(crate) struct Callsite {
    pub(crate) metadata: &'static Metadata<'static>,
    pub(crate) keep: Keep,
    /// The id of the rule that decided; equal rules have the same id. Each `#[profiled]` with conditions is a rule.
    pub(crate) rule: u64,
    pub(crate) plan: Plan,
    /// Nanoseconds without an exit after which a span hangs.
    pub(crate) hung_ns: Option<u64>,
    /// Nanoseconds after which a span is open for too long.
    pub(crate) open_ns: Option<u64>,
    /// Present if values select between this plan and others.
    pub(crate) fields: Option<Arc<FieldRules>>,
    /// Present if judging a span needs the other spans of its rule.
    pub(super) cohort: Option<Arc<Cohort>>,
    /// The first number of the group of plans that values select from.
    pub(super) first: u64,
    /// Its rules were replaced, and the last sweep found no span that uses it.
    pub(super) was_unused: AtomicBool,
}

impl Callsite {
    /// Whether this span is the one that `one_in` keeps.
    pub(crate) fn is_chosen(&self) -> bool {
        let Some((cohort, number)) = self.cohort.as_ref().zip(self.keep.one_in()) else {
            return false;
        };
        // The last of each group, so the first span is not kept.
        cohort.spans.fetch_add(1, Ordering::Relaxed) % number == number.get() - 1
    }
}

/// What is counted for the spans of one rule and name while the rule is in force.
#[derive(Debug, Default)]
pub(super) struct Cohort {
    /// Spans so far, for `one_in`.
    pub(super) spans: AtomicU32,
    /// Present if the rule has a percentile.
    pub(super) sketches: Option<Sketches>,
}

/// All plans in use, by number. The lock is taken only for spans that may be kept or depend on values.
#[derive(Debug)]
pub(super) struct Plans {
    by_number: RwLock<HashMap<u64, Arc<Callsite>>>,
    /// The shortest time, in nanoseconds, after which an open span may have to be kept; `u64::MAX` if none.
    pub(super) least_limit_ns: AtomicU64,
    /// The shortest `arm_after`, in ticks, except of plans that sample from the enter.
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

    /// Drops plans before `current` that are not `in_use` and were not at the last call either. Returns whether any
    /// plan before `current` is left.
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
