//! The choice at a span's creation.

use std::cell::{Cell, OnceCell, RefCell};
use std::hash::{BuildHasher as _, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use tracing::Metadata;

use super::MOST_COHORTS;
use crate::compare::{Gap, ReferenceChooser, ReferenceLimits};
use crate::keep::FieldValues;
use crate::stats::Counters;
use crate::sys::Uncounted;

/// Each cohort has one of four places on a thread. One that takes the place of another begins a new gap.
const WAYS: usize = 4;
const SETS: usize = 32;

/// The gap of a cohort on one thread.
struct GapHere {
    /// A hash of the cohort and the layer.
    key: Cell<u64>,
    /// The spans of the gap that are still to come.
    left: Cell<u32>,
    gap: Cell<Gap>,
}

impl GapHere {
    const fn new() -> Self {
        Self { key: Cell::new(0), left: Cell::new(0), gap: Cell::new(Gap::NONE) }
    }
}

thread_local! {
    /// Not in the thread-local itself, which takes its bytes from the stack of every thread.
    static GAPS_HERE: OnceCell<Box<[[GapHere; WAYS]]>> = const { OnceCell::new() };
    static RANDOM: RefCell<Option<(RandomState, u64)>> = const { RefCell::new(None) };
}

/// Another random number each time.
fn random() -> u64 {
    RANDOM.with_borrow_mut(|random| {
        // Its keys are random.
        let (state, drawn) = random.get_or_insert_with(|| (RandomState::new(), 0));
        *drawn += 1;
        state.hash_one(*drawn)
    })
}

/// A hash of what is known of a span's cohort when it is created.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CohortHash(u64);

impl CohortHash {
    /// That of spans of a callsite.
    #[inline]
    pub(crate) fn of(callsite: &'static Metadata<'static>) -> Self {
        // The first bits of the product are mixed best, and the address differs in the middle.
        Self((std::ptr::from_ref(callsite).addr() as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    /// With the values that are known.
    pub(crate) fn with(self, values: &FieldValues) -> Self {
        let Self(hash) = self;
        values.route_hash().map_or(self, |values| Self(hash ^ values))
    }
}

/// Chooses spans at random when they are created.
#[derive(Debug)]
pub(crate) struct SpanChoice {
    limits: ReferenceLimits,
    /// Unique in this process.
    id: u64,
    chooser: Mutex<ReferenceChooser<u64>>,
    counters: Arc<Counters>,
}

impl SpanChoice {
    pub(super) fn new(limits: ReferenceLimits, counters: Arc<Counters>, now_ns: u64) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        // What is known at creation can be more than what names a cohort.
        let chooser = Mutex::new(ReferenceChooser::new(limits, 4 * MOST_COHORTS, now_ns));
        Self { limits, id, chooser, counters }
    }

    pub(crate) fn are_on(&self) -> bool {
        self.limits.one_in > 0
    }

    /// Whether a new span becomes a reference: if so, with which probability it was chosen, as a power of one half.
    /// `now_ns` is asked for only if the thread's gap has ended.
    #[inline]
    pub(crate) fn choose(&self, cohort: CohortHash, now_ns: impl Fn() -> u64) -> Option<u8> {
        let CohortHash(hash) = cohort;
        let key = hash ^ self.id;
        let choose = |all: &OnceCell<Box<[[GapHere; WAYS]]>>| {
            let all = all.get_or_init(|| {
                let _uncounted = Uncounted::begin();
                (0..SETS).map(|_| [const { GapHere::new() }; WAYS]).collect()
            });
            let set = all.get((key >> (u64::BITS - SETS.trailing_zeros())) as usize)?;
            let Some(place) = set.iter().find(|place| place.key.get() == key) else {
                return self.ask(key, self.give_up(set, now_ns()), now_ns());
            };
            let left = place.left.get();
            if left > 0 {
                place.left.set(left - 1);
                return None;
            }
            self.ask(key, place, now_ns())
        };
        GAPS_HERE.try_with(choose).ok().flatten()
    }

    /// Gives up the gap of the most frequent cohort, which is soon drawn again. Not the one that has most left: if long gaps
    /// are given up and short ones are not, more spans are chosen than the probability says.
    #[cold]
    #[inline(never)]
    fn give_up<'a>(&self, set: &'a [GapHere; WAYS], now_ns: u64) -> &'a GapHere {
        let [first, others @ ..] = set;
        let free = set.iter().find(|place| place.key.get() == 0);
        let place = free.unwrap_or_else(|| {
            let halvings = |place: &GapHere| place.gap.get().halvings();
            let rarer = |most: &'a GapHere, place: &'a GapHere| {
                if halvings(place) > halvings(most) { place } else { most }
            };
            others.iter().fold(first, rarer)
        });
        let key = place.key.replace(0);
        let passed = place.gap.get().spans() - place.left.get();
        // Of another layer, too: its chooser does not miss them much.
        if key != 0 && passed > 0 {
            let _uncounted = Uncounted::begin();
            self.chooser.lock().pass(&key, place.gap.get(), passed, now_ns);
        }
        place
    }

    #[cold]
    #[inline(never)]
    fn ask(&self, key: u64, place: &GapHere, now_ns: u64) -> Option<u8> {
        let _uncounted = Uncounted::begin();
        let mut chooser = self.chooser.lock();
        let (refused, unknown) = (chooser.refused(), chooser.unknown());
        let is_same = place.key.replace(key) == key;
        let mut gap = if is_same { place.gap.get() } else { Gap::NONE };
        let chosen = chooser.choose(&key, &mut gap, now_ns, &mut random);
        place.left.set(gap.spans());
        place.gap.set(gap);
        let counters = &self.counters.references;
        Counters::add(&counters.refused_limit, chooser.refused() - refused);
        Counters::add(&counters.refused_cohorts_full, chooser.unknown() - unknown);
        Counters::add(&counters.chosen, chosen.is_some().into());
        chosen
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::ReferenceStats;

    const SECOND_NS: u64 = 1_000_000_000;

    /// What is chosen in ten minutes of a cohort with a thousand spans a second, beside seven with ten each.
    fn chosen(are_in_one_set: bool) -> (u64, ReferenceStats) {
        let counters = Arc::new(Counters::default());
        let choice = SpanChoice::new(ReferenceLimits::default(), Arc::clone(&counters), 0);
        let choose = |cohort: u64, now_ns| {
            let set = if are_in_one_set { 0 } else { cohort << 59 };
            choice.choose(CohortHash((set | (cohort + 1)) ^ choice.id), || now_ns).is_some()
        };
        let mut of_frequent = 0;
        for number in 0..600_000 {
            let now_ns = number * SECOND_NS / 1_000;
            of_frequent += u64::from(choose(0, now_ns));
            if number % 14 == 0 {
                _ = choose(1 + number / 14 % 7, now_ns);
            }
        }
        (of_frequent, counters.snapshot().references)
    }

    #[test]
    fn cohorts_that_share_a_set_of_places_do_not_make_each_other_look_rare() {
        let (alone, in_sets) = chosen(false);
        let (together, in_one) = chosen(true);
        // Two per second are allowed, half of that is aimed at, and all cohorts have the same number.
        for (of_frequent, stats) in [(alone, in_sets), (together, in_one)] {
            assert!((50..150).contains(&of_frequent), "{of_frequent} {stats:?}");
            assert!((400..800).contains(&stats.chosen), "{of_frequent} {stats:?}");
            // A few, before it is known how frequent the cohorts are.
            assert!(stats.refused_limit < 40, "{of_frequent} {stats:?}");
        }
    }
}
