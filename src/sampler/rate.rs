//! Sampling rates.

use std::time::{Duration, Instant};

/// How often a thread is sampled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rate {
    /// CPU time between two samples.
    pub(crate) period_ns: u64,
    /// Use a timer even where perf is available, because perf makes each context switch slower.
    pub(crate) by_timer: bool,
}

const BY_TIMER: u64 = 1 << 63;

impl Rate {
    pub(crate) const fn of(period_ns: u64) -> Self {
        Self { period_ns, by_timer: false }
    }

    /// Multiplies the time between two samples.
    pub(crate) fn slowed(self, times: f64) -> Self {
        Self { period_ns: (self.period_ns as f64 * times.max(1.0)) as u64, ..self }
    }

    pub(super) fn from_word(word: u64) -> Self {
        Self { period_ns: word & !BY_TIMER, by_timer: word & BY_TIMER != 0 }
    }

    pub(super) fn word(self) -> u64 {
        self.period_ns & !BY_TIMER | if self.by_timer { BY_TIMER } else { 0 }
    }
}

/// The CPU time between two samples in nanoseconds, at the first, second and last [`Level`].
///
/// Slightly less than round numbers, so that samples do not run in step with the kernel's tick or with the program's
/// timers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Periods([u64; 3]);

impl Periods {
    /// 1,000, 200 and 100 samples per second: enough to show where the time of a slow request went, and few enough not
    /// to matter for a thread that runs only slow requests.
    pub(crate) const USUAL: Self = Self([997_000, 4_985_000, 9_970_000]);

    /// For timers whose samples can interrupt blocking system calls.
    pub(crate) const INTERRUPTING: Self = Self([4_985_000, 4_985_000, 9_970_000]);

    /// A fixed number of samples per second of CPU time.
    pub(crate) fn of_rate(hertz: u32) -> Self {
        Self([1_000_000_000 / u64::from(hertz.max(1)); 3])
    }

    pub(crate) fn first(self) -> u64 {
        self.0[0]
    }

    pub(crate) fn last(self) -> u64 {
        self.0[2]
    }

    pub(crate) fn rate(self, level: Level) -> Rate {
        let [first, second, last] = self.0;
        let period_ns = match level {
            Level::First => first,
            Level::Second => second,
            Level::Last | Level::ByTimer => last,
        };
        // A configured rate is fixed.
        Rate { period_ns, by_timer: level == Level::ByTimer && first != last }
    }
}

/// A budget of samples, which determines the rate. A thread earns 100 per second of wall time, the lowest rate, and
/// saves up to 2,000. Context switches use it up too, since perf events make each of them slower.
///
/// All threads together have the same budget per processor; otherwise a pool of hundreds of threads on two processors
/// would use hundreds of times as much.
#[derive(Debug)]
pub(crate) struct Allowance {
    processors: f64,
    left: f64,
    since: Instant,
    level: Level,
    /// Seconds, and context switches in them, since the last check.
    counted: (f64, u64),
}

/// How much a thread is sampled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Level {
    First,
    Second,
    Last,
    /// The lowest rate, without the cost at context switches.
    ByTimer,
}

/// The samples and switches taken from an allowance.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Spent {
    samples: f64,
    switches: u64,
}

impl Spent {
    /// A thread had `samples`, and `switches` while perf events sampled it with `period_ns`.
    pub(crate) fn new(samples: u64, switches: u64, period_ns: u64) -> Self {
        let switch_cost = if period_ns < TICK_NS { SWITCH_COST } else { CHEAP_SWITCH_COST };
        Self { samples: samples as f64 + switches as f64 * switch_cost, switches }
    }

    /// The part that counts for a thread at the lowest rate: its switches. It uses no samples that other threads could
    /// have.
    pub(crate) fn without_samples(self) -> Self {
        Self { samples: 0.0, ..self }
    }

    pub(crate) fn add(&mut self, other: Self) {
        self.samples += other.samples;
        self.switches += other.switches;
    }
}

const PER_SECOND: f64 = 100.0;
const MOST: f64 = 2_000.0;
/// At this share it falls from the first level to the second; at 0 to the last.
const HALF: f64 = 0.5;
/// At this share it returns to the first level.
const NEARLY_ALL: f64 = 0.9;
/// A context switch takes 15 µs longer if the kernel must program a timer for less than a tick, and otherwise 2 to 3
/// µs. A sample takes some 10 µs.
const SWITCH_COST: f64 = 1.0;
const CHEAP_SWITCH_COST: f64 = 0.25;
const TICK_NS: u64 = 4_000_000;
/// Per second: 1 % of the time of a thread at the lowest rate.
const MANY_SWITCHES: f64 = 4_000.0;

impl Allowance {
    pub(crate) fn of_a_thread(now: Instant) -> Self {
        Self::new(1.0, now)
    }

    pub(crate) fn of_all(processors: usize, now: Instant) -> Self {
        Self::new(processors.max(1) as f64, now)
    }

    fn new(processors: f64, now: Instant) -> Self {
        let left = MOST * processors;
        Self { processors, left, since: now, level: Level::First, counted: (0.0, 0) }
    }

    /// Takes `spent` since the last call. Returns the level from now on.
    pub(crate) fn spend(&mut self, spent: Spent, now: Instant) -> Level {
        let seconds = now.saturating_duration_since(self.since).as_secs_f64();
        self.since = now;
        let most = MOST * self.processors;
        let more = seconds * PER_SECOND * self.processors;
        self.left = ((self.left + more).min(most) - spent.samples).max(0.0);
        let (has_none, share) = (self.left <= 0.0, self.left / most);
        let is_switched_often = self.is_switched_often(seconds, spent.switches);
        self.level = match self.level {
            Level::Last if has_none && is_switched_often => Level::ByTimer,
            level @ (Level::Last | Level::ByTimer) if share < HALF => level,
            _ if has_none => Level::Last,
            Level::First if share > HALF => Level::First,
            _ if share >= NEARLY_ALL => Level::First,
            _ => Level::Second,
        };
        self.level
    }

    /// Whether the threads are switched often, measured over a sufficiently long time.
    fn is_switched_often(&mut self, seconds: f64, switches: u64) -> bool {
        const LONG_ENOUGH: f64 = 0.5;
        let (seconds, switches) = (self.counted.0 + seconds, self.counted.1 + switches);
        self.counted = (seconds, switches);
        if seconds < LONG_ENOUGH {
            return false;
        }
        self.counted = (0.0, 0);
        switches as f64 > seconds * MANY_SWITCHES * self.processors
    }
}

/// Lowers the sampling rate while reading samples takes more than its share of a core, over ten seconds.
#[derive(Debug)]
pub(crate) struct SamplingBudget {
    /// The share of one core; `None` for no limit.
    share: Option<f64>,
    since: Instant,
    /// The CPU time used until `since`, in nanoseconds.
    used_ns: u64,
    /// The factor on the time between samples.
    times: f64,
    /// The unused budget of the last seconds: slow requests come in bursts.
    saved_ns: f64,
}

/// Shorter windows are too noisy.
const WINDOW: Duration = Duration::from_secs(1);
/// The maximum time for which unused budget is saved.
const MAX_SAVED: Duration = Duration::from_secs(10);
/// The maximum factor on the time between samples.
const MAX_TIMES: f64 = 64.0;
/// The rate is raised again only while less than this share of the budget is used.
const LOW_USE: f64 = 0.5;

impl SamplingBudget {
    pub(crate) fn new(percent: Option<u32>) -> Self {
        let share = percent.map(|percent| f64::from(percent) / 100.0);
        let saved_ns = share.unwrap_or(0.0) * MAX_SAVED.as_nanos() as f64;
        Self { share, since: Instant::now(), used_ns: 0, times: 1.0, saved_ns }
    }

    /// Returns the new factor on the time between samples, if it changes. `used_ns` is the CPU time used so far.
    pub(crate) fn update(&mut self, now: Instant, used_ns: u64) -> Option<f64> {
        let window = now.saturating_duration_since(self.since);
        if window < WINDOW {
            return None;
        }
        let used = used_ns.saturating_sub(self.used_ns);
        (self.since, self.used_ns) = (now, used_ns);
        let share = self.share.filter(|share| *share > 0.0)?;
        let budget_ns = window.as_nanos() as f64 * share;
        let most_saved_ns = share * MAX_SAVED.as_nanos() as f64;
        let saved_ns = (self.saved_ns + budget_ns).min(most_saved_ns) - used as f64;
        self.saved_ns = saved_ns.max(0.0);
        let of_budget = used as f64 / budget_ns;
        let times = if of_budget > 1.0 && saved_ns < 0.0 {
            (self.times * of_budget).min(MAX_TIMES)
        } else if of_budget < LOW_USE {
            // Halved each second, because an immediate change would oscillate.
            let seconds = i32::try_from(window.as_secs()).unwrap_or(i32::MAX).min(64);
            (self.times / 2.0_f64.powi(seconds)).max(1.0)
        } else {
            self.times
        };
        let has_changed = (times - self.times).abs() > f64::EPSILON;
        self.times = times;
        has_changed.then_some(times)
    }

    /// The factor on the time between samples.
    pub(crate) fn times(&self) -> f64 {
        self.times
    }

    pub(crate) fn is_lowered(&self) -> bool {
        self.times > 1.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spend(allowance: &mut Allowance, samples: u64, switches: u64, now: Instant) -> Rate {
        let period_ns = Periods::USUAL.rate(allowance.level).period_ns;
        Periods::USUAL.rate(allowance.spend(Spent::new(samples, switches, period_ns), now))
    }

    /// The rates of a thread that runs during these seconds, checked each tenth of a second.
    fn rates(allowance: &mut Allowance, start: Instant, seconds: std::ops::Range<u32>) -> Vec<u64> {
        let mut period_ns = spend(allowance, 0, 0, start).period_ns;
        let tenths = (10 * seconds.start + 1)..=10 * seconds.end;
        let rates = tenths.map(|tenth| {
            let now = start + tenth * Duration::from_millis(100);
            let samples = 100_000_000 / period_ns;
            period_ns = spend(allowance, samples, 0, now).period_ns;
            (1e9 / period_ns as f64).round() as u64
        });
        let mut rates: Vec<_> = rates.collect();
        rates.dedup();
        rates
    }

    #[test]
    fn a_busy_thread_is_sampled_less_and_less() {
        let start = Instant::now();
        let mut allowance = Allowance::of_a_thread(start);
        assert_eq!(rates(&mut allowance, start, 0..60), [1_003, 201, 100]);
        // After that long without a sample the allowance is full again.
        let later = start + Duration::from_secs(80);
        assert_eq!(spend(&mut allowance, 0, 0, later), Rate::of(997_000));
    }

    #[test]
    fn a_thread_with_few_samples_a_second_keeps_the_highest_rate() {
        let start = Instant::now();
        let mut allowance = Allowance::of_a_thread(start);
        for second in 1..100 {
            let now = start + Duration::from_secs(second);
            assert_eq!(spend(&mut allowance, 90, 0, now), Rate::of(997_000));
        }
    }

    #[test]
    fn the_rate_does_not_oscillate() {
        let start = Instant::now();
        let mut allowance = Allowance::of_a_thread(start);
        let spend = |allowance: &mut Allowance, samples, ms| {
            let now = start + Duration::from_millis(ms);
            super::tests::spend(allowance, samples, 0, now).period_ns
        };
        assert_eq!(spend(&mut allowance, 1_001, 1), 4_985_000);
        assert_eq!(
            spend(&mut allowance, 0, 7_000),
            4_985_000,
            "not before nearly all is earned back"
        );
        assert_eq!(spend(&mut allowance, 0, 8_100), 997_000);
        assert_eq!(spend(&mut allowance, 3_000, 8_200), 9_970_000);
        assert_eq!(spend(&mut allowance, 0, 18_000), 9_970_000);
        assert_eq!(spend(&mut allowance, 0, 18_300), 4_985_000);
    }

    #[test]
    fn a_configured_rate_is_fixed() {
        let (start, periods) = (Instant::now(), Periods::of_rate(999));
        let mut allowance = Allowance::of_a_thread(start);
        for ms in 0..100 {
            let now = start + Duration::from_millis(ms);
            let level = allowance.spend(Spent::new(100, 1_000, periods.first()), now);
            assert_eq!(periods.rate(level), Rate::of(1_001_001));
        }
        assert_eq!(Periods::of_rate(0).first(), 1_000_000_000);
    }

    /// The levels of a thread that runs a tenth of the time and is switched this often per second, checked every 5 ms.
    fn levels(switches: u64) -> Vec<Level> {
        let start = Instant::now();
        let mut allowance = Allowance::of_a_thread(start);
        let mut by_timer = false;
        let checks = (1..2_000).map(|check| {
            let now = start + check * Duration::from_millis(5);
            let switches = if by_timer {
                0
            } else {
                (switches * u64::from(check) / 200) - (switches * u64::from(check - 1) / 200)
            };
            let samples = u64::from(check % 20 == 0);
            by_timer = spend(&mut allowance, samples, switches, now).by_timer;
            allowance.level
        });
        let mut levels: Vec<_> = checks.collect();
        levels.dedup();
        levels
    }

    #[test]
    fn a_thread_that_is_switched_often_is_sampled_by_a_timer() {
        assert_eq!(levels(20), [Level::First]);
        assert_eq!(levels(1_000), [Level::First, Level::Second, Level::Last]);
        let all = [Level::First, Level::Second, Level::Last, Level::ByTimer];
        assert_eq!(levels(20_000), all);
    }

    #[test]
    fn all_threads_share_an_allowance_per_processor() {
        let start = Instant::now();
        let mut all = Allowance::of_all(2, start);
        let of_one = Spent::new(10, 100, 997_000);
        let mut sum = Spent::default();
        (0..20).for_each(|_| sum.add(of_one));
        // Each check takes 2,200 of 4,000.
        let checks = [5, 10, 15, 700, 21_000, 40_000].map(|ms| {
            let spent = if ms < 1_000 { sum } else { Spent::default() };
            all.spend(spent, start + Duration::from_millis(ms))
        });
        let expected =
            [Level::Second, Level::Last, Level::Last, Level::ByTimer, Level::First, Level::First];
        assert_eq!(checks, expected);
    }

    #[test]
    fn a_budget_only_lowers_the_rate() {
        let slowed = |times| Rate::of(1_000).slowed(times).period_ns;
        assert_eq!((slowed(2.5), slowed(0.1)), (2_500, 1_000));
    }

    const SECOND: u64 = 1_000_000_000;

    /// The factors after each second, in which the given thousandths of a core were used.
    fn seconds(percent: Option<u32>, used: &[u64]) -> Vec<f64> {
        let mut budget = SamplingBudget::new(percent);
        let (start, mut total) = (budget.since, 0);
        let times = used.iter().zip(1_u32..).map(|(used, number)| {
            total += used * SECOND / 1_000;
            budget.update(start + number * WINDOW, total);
            budget.times
        });
        times.collect()
    }

    #[test]
    fn exceeding_the_budget_lowers_the_rate_in_proportion() {
        // The savings are used up in the third second.
        assert_eq!(seconds(Some(1), &[40, 40, 40, 40, 15]), [1.0, 1.0, 1.0, 4.0, 6.0]);
        assert_eq!(seconds(Some(1), &[900, 900]), [64.0, 64.0]);
    }

    #[test]
    fn a_burst_within_the_savings_keeps_the_rate() {
        let bursts = [100, 0, 0, 0, 0, 0, 0, 0, 0, 0].repeat(5);
        assert_eq!(seconds(Some(1), &bursts), [1.0; 50]);
    }

    #[test]
    fn the_rate_returns_in_steps_without_oscillating() {
        let found = seconds(Some(1), &[40, 40, 40, 40, 10, 6, 4, 1, 1]);
        assert_eq!(found[3..], [4.0, 4.0, 4.0, 2.0, 1.0, 1.0]);
    }

    #[test]
    fn without_a_budget_nothing_changes() {
        assert_eq!(seconds(None, &[900, 900]), [1.0, 1.0]);
        assert_eq!(seconds(Some(0), &[900]), [1.0]);
    }

    #[test]
    fn less_than_a_second_is_not_measured() {
        let mut budget = SamplingBudget::new(Some(1));
        assert_eq!(budget.update(budget.since + WINDOW / 2, SECOND), None);
        assert!(!budget.is_lowered());
    }
}
