//! The compiled rules behind the numbers in spans.
//!
//! A span keeps its number when rules are replaced, and hooks read without a lock, so compiled rules stay, up to a cap.

use std::cell::Cell;
use std::hash::{BuildHasher, RandomState};
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use tracing::Metadata;

use super::fields::FieldRules;
use super::percentile::Sketches;
use super::{Condition, Keep};
use crate::facts::format::nanoseconds;
use crate::redact::Redaction;
use crate::span::Plan;

/// A rule, as all callsites that it decides for use it.
#[derive(Debug)]
pub(crate) struct CompiledRule {
    /// Equal rules have the same id. Each `#[profiled]` with conditions is a rule.
    pub(crate) id: u64,
    pub(crate) keep: Box<Keep>,
    /// Nanoseconds without an exit after which a span hangs.
    pub(crate) hung_ns: Option<u64>,
    /// Nanoseconds after which a span is open for too long.
    pub(crate) open_ns: Option<u64>,
    /// The conditions as text, redacted, once a span met one of them.
    text: OnceLock<Arc<str>>,
}

impl CompiledRule {
    pub(super) fn new(id: u64, keep: Box<Keep>) -> Self {
        let hung_ns = keep.hung_limit().map(nanoseconds);
        let open_ns = keep.conditions().find_map(|condition| match condition {
            Condition::Open(limit) => Some(nanoseconds(limit)),
            _ => None,
        });
        Self { id, keep, hung_ns, open_ns, text: OnceLock::new() }
    }

    /// The conditions, for reports.
    pub(crate) fn text(&self, names: &Redaction) -> Arc<str> {
        let text = || names.redact_span(&self.keep.to_string()).into();
        Arc::clone(self.text.get_or_init(text))
    }
}

/// What a rule means for the spans of a callsite.
#[derive(Debug)]
pub(crate) struct Callsite {
    pub(crate) plan: Plan,
    pub(crate) metadata: &'static Metadata<'static>,
    /// The rule that decided.
    pub(crate) rule: Arc<CompiledRule>,
    /// Present if values select between this plan and others.
    pub(super) fields: Option<Arc<FieldRules>>,
    /// Present if judging a span needs the other spans of its rule.
    pub(super) cohort: Option<Arc<Cohort>>,
    pub(super) is_in_force: AtomicBool,
}

impl Callsite {
    /// Whether this span is the one that `one_in` keeps.
    #[cold]
    pub(crate) fn is_chosen(&self) -> bool {
        let chosen = |(cohort, number): (&Arc<Cohort>, _)| cohort.is_due(number);
        self.cohort.as_ref().zip(self.rule.keep.one_in()).is_some_and(chosen)
    }
}

/// What is counted for the spans of one rule and name.
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
    /// On the first one it is the last of each `number` spans. Others begin at random, as threads may end early.
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

/// The compiled rules by number. They live as long as the layer, so that hooks read them without a lock.
#[derive(Debug)]
pub(super) struct Plans {
    /// Each has twice as many places as the one before it.
    blocks: [Block; BLOCKS],
    /// The shortest time, in nanoseconds, after which an open span may have to be kept; `u64::MAX` if none.
    pub(super) least_limit_ns: AtomicU64,
    /// The shortest `sampling_delay`, in ticks, except of plans that sample from the enter.
    pub(super) least_age: AtomicU64,
}

type Block = OnceLock<Box<[OnceLock<Callsite>]>>;

const FIRST_BLOCK: u64 = 64;
const BLOCKS: usize = 24;

impl Plans {
    pub(super) fn new() -> Self {
        let [least_limit_ns, least_age] = [AtomicU64::new(u64::MAX), AtomicU64::new(u64::MAX)];
        Self { blocks: Default::default(), least_limit_ns, least_age }
    }

    #[inline(always)]
    fn place(&self, number: u64) -> Option<(&Block, u64, usize)> {
        let place = number.saturating_add(FIRST_BLOCK);
        let block = place.ilog2() - FIRST_BLOCK.ilog2();
        let len = FIRST_BLOCK << block;
        Some((self.blocks.get(block as usize)?, len, (place - len) as usize))
    }

    #[inline(always)]
    pub(super) fn get(&self, number: u64) -> Option<&Callsite> {
        let (block, _, at) = self.place(number)?;
        block.get()?.get(at)?.get()
    }

    pub(super) fn insert(&self, callsite: Callsite) {
        let Some((block, len, at)) = self.place(callsite.plan.number) else { return };
        let block = block.get_or_init(|| (0..len).map(|_| OnceLock::new()).collect());
        _ = block.get(at).map(|place| place.set(callsite));
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Callsite> {
        self.blocks.iter().filter_map(OnceLock::get).flatten().filter_map(OnceLock::get)
    }

    pub(super) fn lower_limits(&self, Callsite { plan, rule, .. }: &Callsite) {
        for limit_ns in rule.hung_ns.into_iter().chain(rule.open_ns) {
            self.least_limit_ns.fetch_min(limit_ns, Ordering::Relaxed);
        }
        if plan.sampling_delay > 0 && !rule.keep.is_never() {
            self.least_age.fetch_min(plan.sampling_delay, Ordering::Relaxed);
        }
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
