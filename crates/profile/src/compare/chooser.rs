//! Which spans become references.

use std::hash::Hash;

use super::cohorts::CohortSet;

/// Chooses spans at random when they are created.
///
/// **Unbiased**: each span of a cohort is chosen with the same probability, whatever it will do. Taking the first span in
/// each 100 ms would prefer those at the beginning of a burst. So a span is chosen or not by chance alone; how large the
/// chance is follows from the traffic *before*: of the last ten minutes on average, and of the busiest second of the last
/// hour. Probabilities are powers of two and change only if the traffic changes clearly, so that bursts that come again
/// and again have the same one as the time between them. When it does change, spans of the quieter time have the higher
/// probability.
///
/// **Limited**: the limits on the rate are twice as high as what the probabilities aim at, so they are met only in a burst
/// as never before. What they refuse is counted: such a burst has too few references in its later part.
///
/// **Fair**: every cohort has the same number of references per second, but of a rare one at most half of the spans are
/// chosen.
#[derive(Clone, Debug)]
pub struct ReferenceChooser<K> {
    limits: ReferenceLimits,
    cohorts: CohortSet<K, Traffic>,
    /// Tokens of the limit on the share of spans.
    by_share: f64,
    /// Tokens of the limit on the rate, and when they were last filled.
    by_time: f64,
    filled_ns: u64,
    adapted_ns: u64,
    refused: u64,
}

/// How many spans may be chosen in the whole process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReferenceLimits {
    /// At most one in this number. 0 for none.
    pub one_in: u32,
    /// And one in this time, in nanoseconds, on average: ten at once.
    pub interval_ns: u64,
}

impl ReferenceLimits {
    pub const NONE: Self = Self { one_in: 0, interval_ns: u64::MAX };

    /// How many spans of a cohort are chosen if each cohort has at most `level` references per second. Its bursts are its
    /// own: however short they are, they leave the others their part.
    fn probability(&self, traffic: &Traffic, level: f64) -> f64 {
        let most = LARGEST_PROBABILITY.max(1.0 / f64::from(self.one_in));
        let burst = (traffic.peak - traffic.rate()).max(f64::MIN_POSITIVE);
        let most = most.min(MOST_OF_A_BURST.max(self.by_time()) / burst);
        most.min(level / traffic.rate().max(f64::MIN_POSITIVE))
    }

    /// The references per second that are aimed at.
    fn by_time(&self) -> f64 {
        AIM_BY_TIME * SECOND_NS as f64 / self.interval_ns.max(1) as f64
    }

    /// The highest level that is within the limits.
    fn level(&self, all: &[&mut Traffic]) -> f64 {
        let per_second: f64 = all.iter().map(|traffic| traffic.rate()).sum();
        let by_share = AIM_BY_SHARE * per_second / f64::from(self.one_in);
        let is_within = |level: f64| {
            let of = |traffic: &&mut Traffic| self.probability(traffic, level) * traffic.rate();
            all.iter().map(of).sum::<f64>() <= by_share.min(self.by_time())
        };
        // By halves of the exponent, from one reference in ten years to a thousand million per second.
        let (mut low, mut high) = (-28.0_f64, 30.0_f64);
        for _ in 0..32 {
            let middle = f64::midpoint(low, high);
            if is_within(middle.exp2()) { low = middle } else { high = middle }
        }
        low.exp2()
    }
}

impl Default for ReferenceLimits {
    fn default() -> Self {
        Self { one_in: 100, interval_ns: 500_000_000 }
    }
}

/// The spans of a cohort that one thread passes over before it asks the chooser again.
///
/// How many spans come before the next one that is chosen is drawn: that is the same as a throw for each span, at any
/// time and on any number of threads. A gap that is given up, because the thread has too many cohorts, does not bias, as
/// long as its length does not decide that: however many spans were passed over, the next gap is drawn as the first one
/// was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gap {
    spans: u32,
    /// Whether the span after it is chosen. If not, more are to be drawn then.
    is_whole: bool,
    /// A span is chosen with a probability of 1 in 2 to the power of this.
    halvings: u8,
    began_ns: u64,
}

/// So that a thread learns soon of another probability: the most spans that it passes over, as long as the cohort is not
/// known to be frequent, and then.
const FEW_PASSED: u32 = 4;
const MOST_PASSED: u32 = 256;

impl Gap {
    /// The chooser is to be asked at once.
    pub const NONE: Self = Self { spans: 0, is_whole: false, halvings: 0, began_ns: 0 };

    /// How many spans it has.
    pub fn spans(self) -> u32 {
        self.spans
    }

    /// A span is chosen with a probability of 1 in 2 to the power of this.
    pub fn halvings(self) -> u8 {
        self.halvings
    }

    fn of(spans: u64, (halvings, most): (i32, u32), now_ns: u64) -> Self {
        let left = u32::try_from(spans).unwrap_or(most).min(most);
        let halvings = u8::try_from(halvings).unwrap_or(0);
        Self { spans: left, is_whole: spans == u64::from(left), halvings, began_ns: now_ns }
    }
}

/// How often spans of a cohort are created, and how many of them are chosen.
#[derive(Clone, Debug)]
struct Traffic {
    /// A span is chosen with a probability of 1 in 2 to the power of this.
    halvings: i32,
    adapted_ns: u64,
    /// Spans in this period, and in the last ten minutes, as a decaying sum, with the seconds of it.
    in_period: u64,
    spans: f64,
    seconds: f64,
    second: u64,
    in_second: u64,
    /// Spans in the busiest second, decaying.
    peak: f64,
}

const SECOND_NS: u64 = 1_000_000_000;
const PERIOD_NS: u64 = 10 * SECOND_NS;
/// While the limits refuse spans. To adapt takes up to 40 µs.
const LEAST_PERIOD_NS: u64 = 10_000_000;
const AVERAGE_HALF_S: f64 = 600.0;
const PEAK_HALF_S: f64 = 3_600.0;
/// Tokens that are saved up.
const MOST_BY_SHARE: f64 = 32.0;
const MOST_BY_TIME: f64 = 10.0;
/// How many references of one second's burst are aimed at, at least: what is saved up has room for them.
const MOST_OF_A_BURST: f64 = 5.0;
/// The part of the limits that is aimed at.
const AIM_BY_SHARE: f64 = 0.8;
const AIM_BY_TIME: f64 = 0.5;
/// So that not all spans of a rare cohort are sampled.
const LARGEST_PROBABILITY: f64 = 0.5;

impl Traffic {
    fn new(halvings: i32, now_ns: u64) -> Self {
        Self {
            halvings,
            adapted_ns: now_ns,
            in_period: 0,
            spans: 0.0,
            seconds: 0.0,
            second: now_ns / SECOND_NS,
            in_second: 0,
            peak: 0.0,
        }
    }

    /// Counts spans that were created since then.
    fn count(&mut self, spans: u64, since_ns: u64, now_ns: u64) {
        let second = now_ns / SECOND_NS;
        if second != self.second {
            self.second = second;
            self.in_second = 0;
        }
        self.in_period += spans;
        let seconds = 1 + now_ns.saturating_sub(since_ns) / SECOND_NS;
        self.in_second += spans.div_ceil(seconds);
        self.peak = self.peak.max(self.in_second as f64);
    }

    fn decay(&mut self, now_ns: u64) {
        let passed_ns = now_ns.saturating_sub(self.adapted_ns);
        let passed_s = passed_ns as f64 / SECOND_NS as f64;
        let left = (-passed_s / AVERAGE_HALF_S).exp2();
        self.spans = self.spans * left + self.in_period as f64;
        self.seconds = self.seconds * left + passed_s;
        self.peak *= (-passed_s / PEAK_HALF_S).exp2();
        self.in_period = 0;
        self.adapted_ns = self.adapted_ns.max(now_ns);
    }

    /// Spans per second. Of less than a period as if the rest of it had none.
    fn rate(&self) -> f64 {
        self.spans / self.seconds.max(PERIOD_NS as f64 / SECOND_NS as f64)
    }

    /// How many spans a thread passes over at most before it asks again: those of a second.
    fn most_passed(&self) -> u32 {
        // Conversions of numbers that are too large saturate.
        (self.rate() as u32).clamp(FEW_PASSED, MOST_PASSED)
    }

    fn probability(&self) -> f64 {
        f64::from(-self.halvings).exp2()
    }
}

/// Spans before the next one that is chosen, if each is chosen with a probability of 1 in 2 to the power of `halvings`.
fn gap(halvings: i32, random: &mut impl FnMut() -> u64) -> u64 {
    // From above 0 to 1.
    let chance = ((random() >> 11) + 1) as f64 / (1_u64 << 53) as f64;
    let of_none = (-f64::from(-halvings).exp2()).ln_1p();
    // Saturates.
    (chance.ln() / of_none) as u64
}

impl<K: Clone + Eq + Hash> ReferenceChooser<K> {
    /// For at most `most` cohorts. Spans of others are not chosen.
    pub fn new(limits: ReferenceLimits, most: usize, now_ns: u64) -> Self {
        Self {
            limits,
            cohorts: CohortSet::new(most),
            by_share: 0.0,
            by_time: MOST_BY_TIME,
            filled_ns: now_ns,
            adapted_ns: now_ns,
            refused: 0,
        }
    }

    /// Whether a new span with which a gap ended becomes a reference: if so, with which probability it was chosen, as a
    /// power of one half. Puts the next gap in its place. `now_ns` must not decrease by more than ten minutes; `random`
    /// returns another random number each time.
    pub fn choose(
        &mut self,
        key: &K,
        gap: &mut Gap,
        now_ns: u64,
        random: &mut impl FnMut() -> u64,
    ) -> Option<u8> {
        let ended = std::mem::replace(gap, Gap::of(u64::MAX, (0, FEW_PASSED), now_ns));
        if self.limits.one_in == 0 {
            return None;
        }
        if now_ns.saturating_sub(self.adapted_ns) >= PERIOD_NS {
            self.adapt(now_ns);
        }
        let spans = u64::from(ended.spans) + 1;
        let share = spans as f64 / f64::from(self.limits.one_in);
        self.by_share = (self.by_share + share).min(MOST_BY_SHARE);
        let first = halvings_of(1.0 / f64::from(self.limits.one_in));
        let traffic = self.cohorts.use_at(key, now_ns, || Traffic::new(first, now_ns))?;
        traffic.count(spans, ended.began_ns, now_ns);
        let (halvings, most) = (traffic.halvings, traffic.most_passed());
        let mut draw = || self::gap(halvings, random);
        let next = draw();
        let chosen = if ended.is_whole {
            *gap = Gap::of(next, (halvings, most), now_ns);
            ended.halvings
        } else if let Some(passed_over) = next.checked_sub(1) {
            // This span is the first of them.
            *gap = Gap::of(passed_over, (halvings, most), now_ns);
            return None;
        } else {
            *gap = Gap::of(draw(), (halvings, most), now_ns);
            gap.halvings
        };
        if self.take(now_ns) {
            return Some(chosen);
        }
        self.refused += 1;
        // The burst may go on.
        if now_ns.saturating_sub(self.adapted_ns) >= LEAST_PERIOD_NS {
            self.adapt(now_ns);
        }
        None
    }

    /// Counts spans that a thread has passed over in a gap that it gives up.
    pub fn pass(&mut self, key: &K, gap: Gap, passed: u32, now_ns: u64) {
        let first = halvings_of(1.0 / f64::from(self.limits.one_in.max(1)));
        let spans = u64::from(passed);
        let share = spans as f64 / f64::from(self.limits.one_in.max(1));
        self.by_share = (self.by_share + share).min(MOST_BY_SHARE);
        if let Some(traffic) = self.cohorts.use_at(key, now_ns, || Traffic::new(first, now_ns)) {
            traffic.count(spans, gap.began_ns, now_ns);
        }
    }

    fn take(&mut self, now_ns: u64) -> bool {
        let passed_ns = now_ns.saturating_sub(self.filled_ns);
        let more = passed_ns as f64 / self.limits.interval_ns.max(1) as f64;
        self.by_time = (self.by_time + more).min(MOST_BY_TIME);
        self.filled_ns = self.filled_ns.max(now_ns);
        let is_taken = self.by_time >= 1.0 && self.by_share >= 1.0;
        if is_taken {
            self.by_time -= 1.0;
            self.by_share -= 1.0;
        }
        is_taken
    }

    /// Chooses the probabilities anew.
    fn adapt(&mut self, now_ns: u64) {
        self.adapted_ns = now_ns;
        let mut all: Vec<_> = self.cohorts.values_mut().collect();
        all.iter_mut().for_each(|traffic| traffic.decay(now_ns));
        let level = self.limits.level(&all);
        for traffic in all {
            let most = self.limits.probability(traffic, level);
            let (now, wanted) = (traffic.probability(), halvings_of(most));
            // What is a little too high is left, so that it does not change back and forth.
            let is_near = now <= 1.15 * most && 2.0 * now > most;
            if !is_near {
                traffic.halvings = wanted;
            }
        }
    }

    /// How often a thread asked for spans of a cohort for which there was no room.
    pub fn unknown(&self) -> u64 {
        self.cohorts.refused()
    }

    /// Spans that were chosen but not taken because of the limits.
    pub fn refused(&self) -> u64 {
        self.refused
    }
}

/// The largest power of two that is at most this.
fn halvings_of(probability: f64) -> i32 {
    (-probability.log2()).ceil().clamp(0.0, 62.0) as i32
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    /// Numbers that are as good as random.
    fn random(seed: u64) -> impl FnMut() -> u64 {
        let mut number = seed;
        move || {
            // SplitMix64.
            number = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mixed = (number ^ number >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
            mixed ^ mixed >> 31
        }
    }

    const MS: u64 = 1_000_000;
    const LIMITS: ReferenceLimits = ReferenceLimits { one_in: 100, interval_ns: 100 * MS };

    /// A chooser, with the gaps of one thread.
    struct OnOneThread<K> {
        chooser: ReferenceChooser<K>,
        gaps: HashMap<K, (Gap, u32)>,
    }

    impl<K: Clone + Eq + Hash> OnOneThread<K> {
        fn new(limits: ReferenceLimits, most: usize) -> Self {
            Self { chooser: ReferenceChooser::new(limits, most, 0), gaps: HashMap::new() }
        }

        fn choose(&mut self, key: &K, now_ns: u64, random: &mut impl FnMut() -> u64) -> bool {
            let (gap, left) = self.gaps.entry(key.clone()).or_default();
            if *left > 0 {
                *left -= 1;
                return false;
            }
            let is_chosen = self.chooser.choose(key, gap, now_ns, random).is_some();
            *left = gap.spans();
            is_chosen
        }

        fn refused(&self) -> u64 {
            self.chooser.refused()
        }
    }

    fn chooser() -> OnOneThread<&'static str> {
        OnOneThread::new(LIMITS, 64)
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
        let (mut chooser, mut random, mut lengths) = (chooser(), random(1), random(2));
        let (mut frequent, mut rare) = (Sampling::default(), Sampling::default());
        let mut length_ms = move || [5.0, 20.0, 20.0, 80.0, 400.0][(lengths() % 5) as usize];
        // 500 a second beside one a minute, for an hour.
        for number in 0..1_800_000 {
            let now_ns = number * 2 * MS;
            let length = length_ms();
            frequent.add(length, chooser.choose(&"frequent", now_ns, &mut random));
            if number % 30_000 == 17 {
                let length = length_ms();
                rare.add(length, chooser.choose(&"rare", now_ns, &mut random));
            }
        }
        assert!(
            frequent.errors().abs() < 3.0 && rare.errors().abs() < 3.0,
            "{frequent:?} {rare:?}"
        );
        // Four in a second, of 500; and half of the rare ones.
        assert!(frequent.chosen.0 > 7_000.0 && rare.chosen.0 > 15.0, "{frequent:?} {rare:?}");
        assert!(rare.chosen.0 < 45.0, "{rare:?}");
        // At the beginning there is no token.
        assert!(chooser.refused() < 3, "{}", chooser.refused());
    }

    #[test]
    fn ten_thousand_requests_of_one_route_have_a_hundred_references_at_most() {
        let (mut chooser, mut random, mut lengths) = (chooser(), random(3), random(4));
        let mut sampling = Sampling::default();
        for number in 0..10_000_u64 {
            let length = [5.0, 20.0, 20.0, 80.0, 400.0][(lengths() % 5) as usize];
            sampling.add(length, chooser.choose(&"route", number * 50 * MS, &mut random));
        }
        assert!(sampling.errors().abs() < 3.0, "{sampling:?}");
        assert!(sampling.chosen.0 > 50.0 && sampling.chosen.0 <= 100.0, "{sampling:?}");
    }

    /// As of a job that runs each hour.
    #[test]
    fn bursts_of_one_cohort_take_nothing_of_others() {
        let (mut chooser, mut random) = (chooser(), random(10));
        let mut by_hour = [0_u64; 3];
        for number in 0..3 * 360_000_u64 {
            let now_ns = number * 10 * MS;
            let hour = (number / 360_000) as usize;
            by_hour[hour] += u64::from(chooser.choose(&"route", now_ns, &mut random));
            // Ten times as many for a second.
            if number % 360_000 < 100 {
                (0..10).for_each(|_| _ = chooser.choose(&"job", now_ns, &mut random));
            }
        }
        // Of 100 spans per second, with one in 128.
        assert!(by_hour.iter().all(|chosen| *chosen > 1_500), "{by_hour:?}");
    }

    /// What comes first in a burst takes longest: caches are cold, or connections are made.
    #[test]
    fn bursts_that_begin_with_long_spans_do_not_bias() {
        let (mut chooser, mut random) = (chooser(), random(5));
        let (mut sampling, mut by_rate) = (Sampling::default(), Sampling::default());
        let (mut halves, mut last_ns) = ([0, 0], 0);
        for burst in 0..600_u64 {
            // From the third one on: the first are like none before.
            let mut add = |now_ns: u64, length: f64| {
                let is_chosen = chooser.choose(&"route", now_ns, &mut random);
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
                let is_chosen = add(burst * 20 * SECOND_NS + number * MS / 2, length);
                halves[(number / 1_000) as usize] += u64::from(is_chosen);
            }
            for number in 0..200_u64 {
                add(burst * 20 * SECOND_NS + SECOND_NS + number * 95 * MS, 50.0);
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
        let (mut chooser, mut random) = (chooser(), random(6));
        let mut choose = |number: u64, now_ns| {
            (0..number).filter(|_| chooser.choose(&"route", now_ns, &mut random)).count()
        };
        (0..6_000).for_each(|tenth| _ = choose(1, tenth * 100 * MS));
        let begin_ns = 600 * SECOND_NS;
        let chosen: usize = (0..2_000).map(|number| choose(30, begin_ns + number * MS / 2)).sum();
        assert!(chosen <= 20, "{chosen} of 60,000 in a second");
        assert!(chooser.refused() > 0);
        // The probability fell at once: without that, 468 were to be refused.
        assert!(chooser.refused() < 60, "{}", chooser.refused());
    }

    #[test]
    fn many_invented_cohorts_take_none_from_real_ones() {
        let mut chooser: OnOneThread<u64> = OnOneThread::new(LIMITS, 64);
        let mut random = random(7);
        let (mut real, mut invented) = (0, 0);
        for number in 0..100_000_u64 {
            let now_ns = number * 10 * MS;
            real += u64::from(chooser.choose(&(number % 20), now_ns, &mut random));
            invented += u64::from(chooser.choose(&(1_000 + number), now_ns, &mut random));
        }
        // Of 100 spans per second nearly one, but at first, those that came once may be as frequent.
        assert!(real > 300 && real + invented <= 2_000, "{real} {invented}");
    }

    #[test]
    fn none_are_chosen_if_the_limit_is_none_and_all_if_it_is_all() {
        for (one_in, expected) in [(0, 0), (1, 1_000)] {
            let limits = ReferenceLimits { one_in, interval_ns: 1 };
            let mut chooser = OnOneThread::new(limits, 4);
            let mut random = random(8);
            let chosen = (0..1_000).filter(|number| chooser.choose(&"a", number * MS, &mut random));
            assert_eq!(chosen.count(), expected);
        }
    }

    #[test]
    fn gaps_are_those_of_independent_throws() {
        let mut random = random(9);
        for halvings in [1, 4, 10] {
            let gaps: Vec<_> = (0..10_000).map(|_| gap(halvings, &mut random)).collect();
            let mean = gaps.iter().sum::<u64>() as f64 / 10_000.0;
            let probability = f64::from(-halvings).exp2();
            let expected = (1.0 - probability) / probability;
            let error = (1.0 - probability).sqrt() / probability / 100.0;
            assert!((mean - expected).abs() < 4.0 * error, "{halvings}: {mean} for {expected}");
            let none = gaps.iter().filter(|gap| **gap == 0).count() as f64;
            let deviation = (10_000.0 * probability).sqrt();
            assert!((none - 10_000.0 * probability).abs() < 4.0 * deviation, "{halvings}: {none}");
        }
        assert_eq!(gap(0, &mut random), 0);
        // The least that is thrown: never, for the smallest probability.
        assert!(gap(62, &mut || 0) > u64::MAX / 2);
    }
}
