//! Which spans become references: a throw for each new span, and a budget of CPU time.
//!
//! **Unbiased**: each span of a cohort is chosen with the same probability, whatever it will do, and independently of all
//! others. Probabilities are powers of two. That of a cohort is halved when one of its spans was chosen for which there is
//! no budget, so frequent cohorts come to have equally many references, and all are doubled after ten minutes without that:
//! bursts that come again and again have the same one as the time between them.
//!
//! **Limited**: references may take a part of the CPU time of the process. What one takes is measured. What the budget
//! refuses is counted: a burst as none in the last ten minutes has too few references in its later part.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tracing::Metadata;

use crate::budget::CpuBudget;
use crate::facts::format::nanoseconds;
use crate::keep::{FieldValues, random};
use crate::stats::Counters;
use crate::sys;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReferenceLimits {
    /// Of each cohort, at most one in this number. 0 for none.
    pub(crate) one_in: u32,
    /// Of the CPU time of the process, in thousandths. All of it is no limit.
    pub(crate) cpu_thousandths: u32,
}

pub(crate) const ALL_CPU: u32 = 1_000;
/// The most that the flags of a span have room for.
const MAX_HALVINGS: u8 = 30;

impl ReferenceLimits {
    pub(crate) const NONE: Self = Self { one_in: 0, cpu_thousandths: 0 };

    /// The power of one half that is the highest probability.
    fn least_halvings(self) -> u8 {
        if self.one_in == 0 {
            return u8::MAX;
        }
        (0..MAX_HALVINGS).find(|halvings| self.one_in <= 1 << halvings).unwrap_or(MAX_HALVINGS)
    }
}

impl Default for ReferenceLimits {
    fn default() -> Self {
        Self { one_in: 16, cpu_thousandths: 2 }
    }
}

/// The power of one half that was thrown: a span is chosen if its cohort's probability is as high.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Throw(u32);

/// A hash of what is known of a span's cohort when it is created.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CohortHash(u64);

impl CohortHash {
    /// Returns the hash for spans of a callsite.
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

/// A point in time, and in the CPU time of the process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moment {
    at: Instant,
    used_ns: u64,
}

impl Moment {
    pub(crate) fn now() -> Self {
        static FIRST: LazyLock<Instant> = LazyLock::new(Instant::now);
        let at = Instant::now();
        // As if one CPU were busy, if the system does not say.
        let passed_ns = || nanoseconds(at.saturating_duration_since(*FIRST));
        Self { at, used_ns: sys::process_cpu_ns().unwrap_or_else(passed_ns) }
    }
}

#[derive(Debug)]
struct ReferenceBudget {
    cpu: CpuBudget,
    /// What a reference takes: the mean of the last ones.
    mean_ns: u64,
    /// Since when nothing was refused and no probability raised.
    calm_since: Instant,
}

/// What is saved up. For more than some 16 references at once the collector has no room.
const MAX_SAVED_NS: i64 = 16_000_000;
/// What the first is thought to take.
const FIRST_NS: u64 = 1_000_000;
/// How many the mean is of.
const IN_MEAN: u64 = 16;
/// So that the probability is the same in bursts and between them.
const LONG_CALM: Duration = Duration::from_secs(600);

/// A cohort has one of these places, by the first bits of its hash. Those that share one have the same probability.
const PLACES_BITS: u32 = 10;

#[derive(Debug)]
pub(crate) struct SpanChoice {
    limits: ReferenceLimits,
    /// The power of one half that is the highest probability; a throw never reaches it if there are to be none.
    least_halvings: u8,
    /// The power of one half that is the probability. Rarely written: under the lock.
    halvings: Box<[AtomicU8]>,
    budget: Mutex<ReferenceBudget>,
    counters: Arc<Counters>,
}

impl SpanChoice {
    pub(super) fn new(limits: ReferenceLimits, counters: Arc<Counters>, now: Moment) -> Self {
        let places = 0..1_u32 << PLACES_BITS;
        let cpu = CpuBudget::of_thousandths(u64::from(limits.cpu_thousandths), MAX_SAVED_NS);
        let mut budget = ReferenceBudget { cpu, mean_ns: FIRST_NS, calm_since: now.at };
        // A process that has just started is not typical.
        let saved_ns = budget.cpu.left_ns(now.used_ns).cast_unsigned();
        budget.cpu.spend(saved_ns);
        let least_halvings = limits.least_halvings();
        Self {
            limits,
            least_halvings,
            halvings: places.map(|_| AtomicU8::new(least_halvings)).collect(),
            budget: Mutex::new(budget),
            counters,
        }
    }

    pub(crate) fn are_on(&self) -> bool {
        self.limits.one_in > 0
    }

    /// The throw for a new span; `None` for most, which no cohort would choose. Nothing need be known of them.
    #[inline]
    pub(crate) fn throw(&self) -> Option<Throw> {
        let halvings = random().leading_zeros();
        (halvings >= u32::from(self.least_halvings)).then_some(Throw(halvings))
    }

    /// Whether the new span becomes a reference: if so, with which probability it was chosen, as a power of one half.
    /// `now` is asked for only if chance has chosen it.
    #[cold]
    pub(crate) fn choose(
        &self,
        Throw(thrown): Throw,
        CohortHash(hash): CohortHash,
        now: impl FnOnce() -> Moment,
    ) -> Option<u8> {
        let place = self.halvings.get((hash >> (u64::BITS - PLACES_BITS)) as usize)?;
        let halvings = place.load(Ordering::Relaxed);
        if thrown < u32::from(halvings) {
            return None;
        }
        let (counters, now) = (&self.counters.references, now());
        self.relax(now);
        let mut budget = self.budget.lock();
        let mean_ns = budget.mean_ns;
        let needed_ns = mean_ns.cast_signed().min(MAX_SAVED_NS / 2);
        if self.limits.cpu_thousandths >= ALL_CPU || budget.cpu.left_ns(now.used_ns) >= needed_ns {
            budget.cpu.spend(mean_ns);
            Counters::add(&counters.chosen, 1);
            return Some(halvings);
        }
        Counters::add(&counters.refused_limit, 1);
        budget.calm_since = now.at;
        // Once for all threads that threw with this probability.
        if halvings < MAX_HALVINGS && place.load(Ordering::Relaxed) == halvings {
            place.store(halvings + 1, Ordering::Relaxed);
        }
        None
    }

    /// Doubles the probabilities after a long time in which nothing was refused, if they leave a part of the budget. To be
    /// called from time to time: if they are low, no span may be chosen for long.
    pub(crate) fn relax(&self, now: Moment) {
        let mut budget = self.budget.lock();
        let is_calm = now.at.saturating_duration_since(budget.calm_since) >= LONG_CALM;
        if is_calm && budget.cpu.left_ns(now.used_ns) >= MAX_SAVED_NS / 2 {
            budget.calm_since = now.at;
            for place in &self.halvings {
                let halvings = place.load(Ordering::Relaxed);
                place.store(halvings.saturating_sub(1).max(self.least_halvings), Ordering::Relaxed);
            }
        }
    }

    pub(crate) fn spend(&self, ns: u64) {
        let mut budget = self.budget.lock();
        budget.mean_ns = (budget.mean_ns.saturating_mul(IN_MEAN - 1).saturating_add(ns)) / IN_MEAN;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keep::RANDOM;

    const MS: u64 = 1_000_000;
    const SECOND: u64 = 1_000 * MS;

    /// A layer in a process that uses some part of a CPU, in which references take 1 ms.
    struct Scene {
        choice: SpanChoice,
        began: Instant,
        cpus: f64,
    }

    impl Scene {
        fn new(one_in: u32, cpu_thousandths: u32, cpus: f64) -> Self {
            let began = Instant::now();
            let now = Moment { at: began, used_ns: 0 };
            let limits = ReferenceLimits { one_in, cpu_thousandths };
            Self { choice: SpanChoice::new(limits, Arc::default(), now), began, cpus }
        }

        fn at(&self, now_ns: u64) -> Moment {
            let used_ns = (now_ns as f64 * self.cpus) as u64;
            Moment { at: self.began + Duration::from_nanos(now_ns), used_ns }
        }

        fn chooses(&self, hash: CohortHash, now: Moment) -> bool {
            self.choice.throw().is_some_and(|it| self.choice.choose(it, hash, || now).is_some())
        }

        fn choose(&self, cohort: u64, now_ns: u64) -> bool {
            let hash = CohortHash(cohort << (u64::BITS - PLACES_BITS));
            let is_chosen = self.chooses(hash, self.at(now_ns));
            if is_chosen {
                self.choice.spend(MS);
            }
            is_chosen
        }

        fn refused(&self) -> u64 {
            self.choice.counters.snapshot().references.refused_limit
        }
    }

    /// Sums of values, of all spans and of the chosen ones.
    #[derive(Debug, Default)]
    struct Sampling {
        all: (f64, f64),
        chosen: (f64, f64, f64),
    }

    impl Sampling {
        fn add(&mut self, value: f64, is_chosen: bool) {
            self.all = (self.all.0 + 1.0, self.all.1 + value);
            if is_chosen {
                let (n, sum, squares) = self.chosen;
                self.chosen = (n + 1.0, sum + value, squares + value * value);
            }
        }

        /// By how many standard errors the mean of the chosen ones is too high.
        fn errors(&self) -> f64 {
            let ((n, sum, squares), (of_all, total)) = (self.chosen, self.all);
            let mean = sum / n;
            let variance = (squares / n - mean * mean) * n / (n - 1.0);
            (mean - total / of_all) / (variance / n).sqrt()
        }
    }

    #[test]
    fn references_of_mixed_lengths_are_unbiased_also_on_rare_routes() {
        RANDOM.set(1);
        let scene = Scene::new(16, 2, 1.0);
        let (mut frequent, mut rare) = (Sampling::default(), Sampling::default());
        let length_ms = |number: u64| {
            let mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
            [5.0, 20.0, 20.0, 80.0, 400.0][(mixed % 5) as usize]
        };
        // 500 a second beside five a minute, for two hours.
        for number in 0..3_600_000 {
            let now_ns = number * 2 * MS;
            frequent.add(length_ms(number), scene.choose(0, now_ns));
            if number % 6_000 == 17 {
                rare.add(length_ms(number / 6_000), scene.choose(1, now_ns));
            }
        }
        assert!(
            frequent.errors().abs() < 3.0 && rare.errors().abs() < 3.0,
            "{frequent:?} {rare:?}"
        );
        // Of two in a second that there is budget for; and one in 16 of the rare ones.
        assert!(frequent.chosen.0 > 5_000.0 && rare.chosen.0 > 20.0, "{frequent:?} {rare:?}");
        assert!(rare.chosen.0 < 60.0, "{rare:?}");
        assert!(scene.refused() < 200, "{}", scene.refused());
    }

    #[test]
    fn the_cpu_time_of_references_is_a_part_of_that_of_the_process() {
        for (cpus, reference_ns, most) in [(1.0, MS, 7_216), (0.05, MS, 376), (1.0, 10 * MS, 736)] {
            RANDOM.set(2);
            let scene = Scene::new(16, 2, cpus);
            (0..100).for_each(|_| scene.choice.spend(reference_ns));
            let mut chosen = 0;
            for number in 0..720_000 {
                let (hash, now) = (CohortHash((number % 20) << 54), scene.at(number * 5 * MS));
                chosen += u64::from(scene.chooses(hash, now));
            }
            assert!((most / 4..=most).contains(&chosen), "{cpus} {reference_ns}: {chosen}");
        }
    }

    #[test]
    fn frequent_cohorts_have_as_many_references_as_others() {
        RANDOM.set(3);
        let scene = Scene::new(16, 2, 1.0);
        let mut chosen = [0_u64; 3];
        for number in 0..3_600_000 {
            let now_ns = number * MS;
            for (cohort, every) in [(0, 1), (1, 10), (2, 100)] {
                if number % every == 0 {
                    chosen[cohort] += u64::from(scene.choose(cohort as u64, now_ns));
                }
            }
        }
        let (least, most) = (chosen.iter().min().unwrap(), chosen.iter().max().unwrap());
        assert!(*least > 500 && *most < 6 * least, "{chosen:?}");
    }

    /// As of a job that runs each hour.
    #[test]
    fn bursts_of_one_cohort_take_little_of_others() {
        RANDOM.set(4);
        let scene = Scene::new(16, 2, 1.0);
        let mut by_hour = [0_u64; 3];
        for number in 0..3 * 360_000_u64 {
            let now_ns = number * 10 * MS;
            by_hour[(number / 360_000) as usize] += u64::from(scene.choose(0, now_ns));
            // Ten times as many for a second.
            if number % 360_000 < 100 {
                (0..10).for_each(|_| _ = scene.choose(1, now_ns));
            }
        }
        assert!(by_hour.iter().all(|chosen| *chosen > 2_500), "{by_hour:?}");
    }

    /// What comes first in a burst takes longest: caches are cold, or connections are made.
    #[test]
    fn bursts_that_begin_with_long_spans_do_not_bias() {
        RANDOM.set(5);
        let scene = Scene::new(16, 2, 1.0);
        let (mut sampling, mut by_rate) = (Sampling::default(), Sampling::default());
        let (mut halves, mut last_ns) = ([0, 0], 0);
        for burst in 0..600_u64 {
            // From the third one on: the first are like none before.
            let mut add = |now_ns: u64, length: f64| {
                let is_chosen = scene.choose(0, now_ns);
                let is_first = now_ns >= last_ns + 100 * MS;
                last_ns = if is_first { now_ns } else { last_ns };
                if burst >= 3 {
                    sampling.add(length, is_chosen);
                    by_rate.add(length, is_first);
                }
                is_chosen && burst >= 3
            };
            for number in 0..2_000_u64 {
                let length = 300.0 - number as f64 / 10.0;
                let is_chosen = add(burst * 20 * SECOND + number * MS / 2, length);
                halves[(number / 1_000) as usize] += u64::from(is_chosen);
            }
            for number in 0..200_u64 {
                add(burst * 20 * SECOND + SECOND + number * 95 * MS, 50.0);
            }
        }
        assert!(sampling.chosen.0 > 500.0 && sampling.errors().abs() < 3.0, "{sampling:?}");
        let [first, second] = halves;
        let difference = (first as f64 - second as f64) / ((first + second) as f64).sqrt();
        assert!(difference.abs() < 3.0, "{halves:?}");
        // The first span in each 100 ms, as a limit alone would choose.
        assert!(by_rate.errors() < -10.0, "{by_rate:?}");
    }

    #[test]
    fn a_burst_as_never_before_is_limited_and_counted() {
        RANDOM.set(6);
        let scene = Scene::new(16, 2, 1.0);
        let choose = |number: u64, now_ns| (0..number).filter(|_| scene.choose(0, now_ns)).count();
        (0..6_000).for_each(|tenth| _ = choose(1, tenth * 100 * MS));
        let chosen: usize =
            (0..2_000).map(|number| choose(30, 600 * SECOND + number * MS / 2)).sum();
        assert!(chosen <= 20, "{chosen} of 60,000 in a second");
        // The probability fell at once: without that, 3,700 were to be refused.
        assert!((1..30).contains(&scene.refused()), "{}", scene.refused());
    }

    #[test]
    fn probabilities_rise_again_although_no_span_is_chosen() {
        RANDOM.set(7);
        let scene = Scene::new(1, 2, 1.0);
        (0..1_000_000).for_each(|_| _ = scene.choose(0, 0));
        let halvings = || scene.choice.halvings[0].load(Ordering::Relaxed);
        let at_first = halvings();
        assert!(at_first > 10, "{at_first}");
        (1..=3).for_each(|times| scene.choice.relax(scene.at(times * 600 * SECOND)));
        assert_eq!(halvings(), at_first - 3);
        (0..100).for_each(|times| scene.choice.relax(scene.at((4 + times) * 600 * SECOND)));
        assert_eq!(halvings(), 0);
    }

    #[test]
    fn none_are_chosen_if_there_is_no_budget_and_all_if_there_is_no_limit() {
        for (cpu_thousandths, expected) in [(ALL_CPU, 1_000), (0, 0)] {
            let scene = Scene::new(1, cpu_thousandths, 1.0);
            let chosen = (0..1_000).filter(|number| scene.choose(0, number * MS));
            assert_eq!(chosen.count(), expected);
        }
    }

    #[test]
    fn throws_are_independent_and_as_probable_as_they_say() {
        RANDOM.set(8);
        for one_in in [2, 16, 100] {
            let scene = Scene::new(one_in, ALL_CPU, 1.0);
            let chosen: Vec<_> = (0..200_000).map(|_| scene.choose(0, 0)).collect();
            let probability = 1.0 / f64::from(one_in.next_power_of_two());
            // After one that is chosen, the next one is as probable.
            for (spans, of) in [
                (200_000.0, chosen.iter().filter(|it| **it).count()),
                (200_000.0 * probability, chosen.windows(2).filter(|it| it[0] && it[1]).count()),
            ] {
                let expected = spans * probability;
                let error = (of as f64 - expected) / expected.sqrt();
                assert!(error.abs() < 4.0, "{one_in}: {of} for {expected}");
            }
        }
    }
}
