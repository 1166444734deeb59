//! What the numbers in spans stand for.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

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
    /// The number of the rule that decided. Each `#[profiled]` that says when to keep is one.
    pub(crate) rule: u32,
    pub(crate) plan: Plan,
    /// After so many nanoseconds without a break it hangs.
    pub(crate) hung_ns: Option<u64>,
    /// After so many nanoseconds it is open for too long.
    pub(crate) open_ns: Option<u64>,
    /// If values decide between this and others.
    pub(crate) fields: Option<Arc<FieldRules>>,
    /// If it takes the percentile of such spans to judge one.
    pub(crate) sketch: Option<Arc<Sketch>>,
    /// Spans so far, where one of so many is kept.
    pub(super) count: AtomicU32,
}

impl Callsite {
    /// Whether this span is the one of so many that is kept.
    pub(crate) fn is_the_one(&self) -> bool {
        let Some(number) = self.keep.one_in() else { return false };
        // Not the first one, which is none of many.
        self.count.fetch_add(1, Ordering::Relaxed) % number == number.get() - 1
    }
}

/// All that spans may have, by their numbers. Behind a lock: only what may be kept, or depends on values, asks.
#[derive(Debug, Default)]
pub(super) struct Plans(RwLock<HashMap<u32, Arc<Callsite>>>);

impl Plans {
    pub(super) fn get(&self, number: u32) -> Option<Arc<Callsite>> {
        self.0.read().get(&number).cloned()
    }

    /// So many numbers in a row that stand for nothing, from `from` on.
    pub(super) fn free(&self, from: u32, count: u32) -> Range<u32> {
        let plans = self.0.read();
        let mut start = from;
        loop {
            // One is left for what an entry has of a callsite without a plan.
            if start.checked_add(count).is_none_or(|end| end == u32::MAX) {
                start = 0;
            }
            let numbers = start..start + count;
            // After four thousand million, some are still in use.
            match numbers.clone().rev().find(|number| plans.contains_key(number)) {
                Some(taken) => start = taken + 1,
                None => return numbers,
            }
        }
    }

    pub(super) fn set(&self, number: u32, callsite: Callsite) {
        self.0.write().insert(number, Arc::new(callsite));
    }

    pub(super) fn remove(&self, numbers: impl IntoIterator<Item = u32>) {
        let mut plans = self.0.write();
        for number in numbers {
            plans.remove(&number);
        }
        plans.shrink_to_fit();
    }

    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        self.0.read().len()
    }

    /// The least age at which spans are sampled, in ticks, but those that are from the enter.
    pub(super) fn least_age(&self) -> u64 {
        let plans = self.0.read();
        let profiled = plans.values().filter(|callsite| !callsite.keep.is_never());
        let ages = profiled.map(|callsite| callsite.plan.arm_after).filter(|age| *age > 0);
        ages.min().unwrap_or(u64::MAX)
    }

    /// The least time limit of all.
    pub(super) fn least_limit_ns(&self) -> u64 {
        let plans = self.0.read();
        let limits = plans.values().flat_map(|plan| [plan.hung_ns, plan.open_ns]);
        limits.flatten().min().unwrap_or(u64::MAX)
    }
}
