//! The plans behind the numbers in spans.

use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, RandomState};
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::RwLock;
use tracing::Metadata;

use super::Keep;
use super::fields::FieldRules;
use super::percentile::Sketches;
use crate::redact::Redaction;
use crate::span::Plan;
use crate::sys::Uncounted;

/// What a rule means for the spans of a callsite.
#[derive(Debug)]
pub(crate) struct Callsite {
    pub(crate) metadata: &'static Metadata<'static>,
    pub(crate) keep: Box<Keep>,
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
    /// The conditions as text, redacted, once a span met one of them.
    pub(super) text: OnceLock<Arc<str>>,
    /// Its rules were replaced, and the last sweep found no span that uses it.
    pub(super) was_unused: AtomicBool,
}

impl Callsite {
    /// The conditions of the rule that decided, for reports.
    pub(crate) fn rule_text(&self, names: &Redaction) -> Arc<str> {
        let text = || names.redact_span(&self.keep.to_string()).into();
        Arc::clone(self.text.get_or_init(text))
    }

    /// Whether this span is the one that `one_in` keeps.
    pub(crate) fn is_chosen(&self) -> bool {
        let chosen = |(cohort, number): (&Arc<Cohort>, _)| cohort.is_due(number);
        self.cohort.as_ref().zip(self.keep.one_in()).is_some_and(chosen)
    }
}

/// What is counted for the spans of one rule and name while the rule is in force.
#[derive(Debug)]
pub(super) struct Cohort {
    /// Unique in this process, and not 0.
    id: u64,
    /// A thread counts its spans for `one_in`.
    is_counted: AtomicBool,
    /// Present if the rule has a percentile.
    pub(super) sketches: Option<Sketches>,
}

/// The spans of one cohort on one thread.
#[derive(Clone, Copy)]
struct Countdown {
    cohort: u64,
    /// The span that is chosen is that many ahead.
    left: u32,
}

/// As many as a thread is likely to have at a time. One that takes the place of another begins anew.
const COUNTDOWNS: usize = 16;

thread_local! {
    static COUNTDOWNS_HERE: [Cell<Countdown>; COUNTDOWNS] =
        const { [const { Cell::new(Countdown { cohort: 0, left: 0 }) }; COUNTDOWNS] };
}

impl Cohort {
    pub(super) fn new(sketches: Option<Sketches>) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Self { id, is_counted: AtomicBool::new(false), sketches }
    }

    /// Whether one more span is the one in `number`.
    ///
    /// Each thread counts for itself, since threads that count together wait for each other's cache line at each span.
    /// On the first one it is the last of each `number` spans. The others begin at random, so that threads that end
    /// early have their share, too.
    fn is_due(&self, number: NonZeroU32) -> bool {
        COUNTDOWNS_HERE.with(|all| {
            let at = (self.id % COUNTDOWNS as u64) as usize;
            let Some(place) = all.get(at) else { return false };
            let Countdown { cohort, left } = place.get();
            let left = if cohort == self.id && left > 0 { left } else { self.begin(number) };
            let is_due = left == 1;
            let left = if is_due { number.get() } else { left - 1 };
            place.set(Countdown { cohort: self.id, left });
            is_due
        })
    }

    #[cold]
    fn begin(&self, number: NonZeroU32) -> u32 {
        if !self.is_counted.swap(true, Ordering::Relaxed) {
            return number.get();
        }
        // Its keys are random.
        let random = RandomState::new().hash_one(self.id);
        (random % u64::from(number.get())) as u32 + 1
    }
}

/// All plans in use, by number. The lock is taken only for spans that may be kept or depend on values, and only if the
/// thread has had no such span of that plan just before: see [`get_here`](Self::get_here).
#[derive(Debug)]
pub(super) struct Plans {
    /// Unique in this process.
    id: u64,
    by_number: RwLock<HashMap<u64, Arc<Callsite>>>,
    /// The shortest time, in nanoseconds, after which an open span may have to be kept; `u64::MAX` if none.
    pub(super) least_limit_ns: AtomicU64,
    /// The shortest `sampling_delay`, in ticks, except of plans that sample from the enter.
    pub(super) least_age: AtomicU64,
}

/// A callsite of [`Plans`] that the calling thread holds.
#[derive(Debug)]
struct CallsiteHere {
    plans: u64,
    number: u64,
    callsite: Arc<Callsite>,
}

/// As many as spans of a request are likely to have.
const HERE: usize = 16;

thread_local! {
    /// The callsites that hooks of this thread have used last. To clone an `Arc` or to take a lock is to write a cache
    /// line that all threads write.
    static CALLSITES_HERE: [Cell<Option<CallsiteHere>>; HERE] =
        const { [const { Cell::new(None) }; HERE] };
}

impl Plans {
    pub(super) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            by_number: RwLock::default(),
            least_limit_ns: AtomicU64::new(u64::MAX),
            least_age: AtomicU64::new(u64::MAX),
        }
    }

    pub(super) fn get(&self, number: u64) -> Option<Arc<Callsite>> {
        self.by_number.read().get(&number).cloned()
    }

    /// Calls `used` with the same, for a hook: without a write to memory of other threads if the thread has used it
    /// just before.
    pub(super) fn get_here<T>(
        &self,
        number: u64,
        used: impl FnOnce(&Callsite) -> Option<T>,
    ) -> Option<T> {
        let at = (number % HERE as u64) as usize;
        // Taken out while it is used, since `used` may run code of the program, with hooks in it.
        let known = CALLSITES_HERE.try_with(|all| all.get(at).and_then(Cell::take)).ok().flatten();
        let is_it = |known: &CallsiteHere| (known.plans, known.number) == (self.id, number);
        let here = match known {
            Some(known) if is_it(&known) => known,
            other => {
                let _uncounted = Uncounted::begin();
                drop(other);
                CallsiteHere { plans: self.id, number, callsite: self.get(number)? }
            }
        };
        let result = used(&here.callsite);
        let _uncounted = Uncounted::begin();
        // A thread that ends has none.
        _ = CALLSITES_HERE.try_with(|all| all.get(at).map(|place| place.set(Some(here))));
        result
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
        let sampling_delay = callsite.plan.sampling_delay;
        if sampling_delay > 0 && !callsite.keep.is_never() {
            self.least_age.fetch_min(sampling_delay, Ordering::Relaxed);
        }
    }

    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        self.by_number.read().len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept_of(cohort: &Cohort, spans: u32, number: u32) -> Vec<u32> {
        let number = NonZeroU32::new(number).unwrap();
        (1..=spans).filter(|_| cohort.is_due(number)).collect()
    }

    fn on_another_thread<T: Send>(run: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| scope.spawn(run).join().unwrap())
    }

    #[test]
    fn one_in_n_on_each_thread() {
        for number in [1, 2, 3, 100] {
            let cohort = Cohort::new(None);
            let each: Vec<_> = (1..=7).map(|times| times * number).collect();
            assert_eq!(kept_of(&cohort, 7 * number, number), each);
            for _ in 0..3 {
                let kept = on_another_thread(|| kept_of(&cohort, 7 * number, number));
                assert_eq!(kept.len(), 7, "{kept:?}");
                assert!(kept.windows(2).all(|two| two[1] - two[0] == number), "{kept:?}");
            }
        }
    }

    /// Threads that end before they have had `number` spans have their share, too.
    #[test]
    fn one_in_n_of_threads_with_one_span() {
        let cohort = Cohort::new(None);
        assert_eq!(kept_of(&cohort, 3, 4), Vec::<u32>::new());
        let threads = if cfg!(miri) { 64 } else { 512 };
        let kept = (0..threads).filter(|_| on_another_thread(|| kept_of(&cohort, 1, 4)) == vec![1]);
        // Twelve standard deviations.
        assert!(kept.count().abs_diff(threads / 4) < 3 * threads / 12);
    }

    #[test]
    fn cohorts_that_share_a_place_have_their_share() {
        let cohorts: Vec<_> = (0..=COUNTDOWNS).map(|_| Cohort::new(None)).collect();
        let number = NonZeroU32::new(4).unwrap();
        let mut kept = vec![0; cohorts.len()];
        for _ in 0..4_000 {
            cohorts
                .iter()
                .zip(&mut kept)
                .for_each(|(one, kept)| *kept += i32::from(one.is_due(number)));
        }
        assert!(kept.iter().all(|kept| (kept - 1_000).abs() < 330), "{kept:?}");
    }
}
