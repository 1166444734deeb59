//! Who wants threads sampled, how often, and what that may cost.
//!
//! Each thread has a budget of CPU time for its samples, and all together one for each processor. When it is spent, the
//! rate falls to what is added. Slow spans and profiles of the process pay from budgets of their own.

use crate::budget::CpuBudget;
use crate::sampler::{Periods, Rate};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Demand {
    pub rate: Rate,
    pub why: Why,
}

/// Who wants a thread sampled. Each pays from budgets of its own, so that none starves another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// A span of the thread is past its sampling delay.
    SlowSpan,
    Process,
    Continuous,
}

impl Why {
    pub fn rate(self, frequency: Frequency, periods: Periods) -> Rate {
        let rate = frequency.rate(periods);
        // Always: threads are sampled for as long as they live.
        Rate { by_timer: rate.by_timer || self == Self::Continuous, ..rate }
    }
}

impl Demand {
    /// The one to be met of several for a thread: that of the highest rate, which pays for all.
    pub fn highest(demands: impl IntoIterator<Item = Self>) -> Option<Self> {
        demands.into_iter().min_by_key(|demand| demand.rate.period_ns)
    }
}

/// How often a budget lets threads be sampled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Frequency {
    Full,
    Low,
    /// By a timer where that is possible, which costs nothing at context switches.
    LowByTimer,
}

impl Frequency {
    pub fn rate(self, Periods { full_ns, low_ns }: Periods) -> Rate {
        match self {
            Self::Full => Rate::of(full_ns),
            Self::Low => Rate::of(low_ns),
            // A configured rate is fixed.
            Self::LowByTimer => Rate { period_ns: low_ns, by_timer: low_ns != full_ns },
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Cost {
    pub samples_ns: u64,
    pub switches_ns: u64,
}

const SAMPLE_COST_NS: u64 = 30_000;

impl Cost {
    /// Of `samples`, and of `switches` while perf sampled with `period_ns`.
    pub fn new(samples: u64, switches: u64, period_ns: u64) -> Self {
        const TICK_NS: u64 = 4_000_000;
        // More if the kernel must program a timer for less than a tick.
        let a_switch_ns = if period_ns < TICK_NS { 9_500 } else { 1_300 };
        Self { samples_ns: samples * SAMPLE_COST_NS, switches_ns: switches * a_switch_ns }
    }
}

/// What sampling may cost, of a thread or of all of them: 2,000 samples at once, and after that 100 per second of wall
/// time, which are those of the low rate. All threads together have that for each processor; otherwise a pool of hundreds
/// of threads on two processors would use hundreds of times as much.
#[derive(Debug)]
pub struct SamplingBudget {
    left: CpuBudget,
    frequency: Frequency,
}

const MAX_NS: i64 = 2_000 * SAMPLE_COST_NS as i64;
/// Of a processor.
const THOUSANDTHS: u64 = 3;

impl SamplingBudget {
    pub fn new(processors: usize) -> Self {
        let most_ns = MAX_NS.saturating_mul(i64::try_from(processors).unwrap_or(i64::MAX));
        let left = CpuBudget::of_thousandths(THOUSANDTHS * processors as u64, most_ns);
        Self { left, frequency: Frequency::Full }
    }

    /// Takes what sampling has cost. Only switches leave a debt: the samples of the low rate are always possible.
    pub fn charge(&mut self, cost: Cost) {
        let most_ns = self.left.most_ns();
        self.left.spend_down_to(cost.samples_ns, 0);
        let at_most = match self.left.spend_down_to(cost.switches_ns, -most_ns) {
            1.. => Frequency::Full,
            left_ns if left_ns > -most_ns => Frequency::Low,
            _ => Frequency::LowByTimer,
        };
        self.frequency = self.frequency.max(at_most);
    }

    /// How often threads may be sampled from now on: at the full rate again when half of the budget is there.
    pub fn frequency(&mut self, now_ns: u64) -> Frequency {
        if self.left.left_ns(now_ns) >= self.left.most_ns() / 2 {
            self.frequency = Frequency::Full;
        }
        self.frequency
    }

    pub fn is_full(&self) -> bool {
        self.frequency == Frequency::Full
    }
}

/// The budgets of the demands: of a thread, or of all threads together.
#[derive(Debug)]
pub struct DemandBudgets {
    slow_spans: SamplingBudget,
    process: SamplingBudget,
    continuous: SamplingBudget,
}

impl DemandBudgets {
    pub fn new(processors: usize) -> Self {
        let budget = || SamplingBudget::new(processors);
        Self { slow_spans: budget(), process: budget(), continuous: budget() }
    }

    pub fn of(&mut self, why: Why) -> &mut SamplingBudget {
        match why {
            Why::SlowSpan => &mut self.slow_spans,
            Why::Process => &mut self.process,
            Why::Continuous => &mut self.continuous,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    const SECOND: u64 = 1_000 * MS;
    const START: u64 = 1_000 * SECOND;

    /// A thread, and when its budget was last checked.
    struct Checked {
        budget: SamplingBudget,
        now_ns: u64,
    }

    impl Checked {
        fn new(processors: usize) -> Self {
            let mut budget = SamplingBudget::new(processors);
            budget.frequency(START);
            Self { budget, now_ns: START }
        }

        fn rate(&self) -> Rate {
            self.budget.frequency.rate(Periods::USUAL)
        }

        /// The rate after this time, in which it had that many samples and switches.
        fn spend(&mut self, samples: u64, switches: u64, passed_ns: u64) -> Rate {
            let cost = Cost::new(samples, switches, self.rate().period_ns);
            self.budget.charge(cost);
            self.now_ns += passed_ns;
            self.budget.frequency(self.now_ns);
            self.rate()
        }

        /// The rates during a time in which it is busy for that many percent of it, checked each tenth of a second.
        fn rates(&mut self, seconds: u64, percent: u64) -> Vec<u64> {
            let tenth = |_| {
                let samples = percent * MS / self.rate().period_ns;
                1_000 * MS / self.spend(samples, 0, 100 * MS).period_ns
            };
            let mut rates: Vec<_> = (0..10 * seconds).map(tenth).collect();
            rates.dedup();
            rates
        }
    }

    #[test]
    fn a_busy_thread_is_sampled_less_once_its_budget_is_spent() {
        let mut thread = Checked::new(1);
        assert_eq!(thread.rates(2, 100), [1_003]);
        assert_eq!(thread.rates(600, 100), [1_003, 100]);
        // Half of the budget is there again after that long without a sample.
        assert_eq!(thread.rates(9, 0), [100]);
        assert_eq!(thread.rates(2, 0), [100, 1_003]);
    }

    #[test]
    fn a_thread_with_few_samples_a_second_keeps_the_full_rate() {
        assert_eq!(Checked::new(1).rates(600, 9), [1_003]);
    }

    #[test]
    fn the_rate_of_a_thread_that_is_half_busy_changes_rarely() {
        assert_eq!(Checked::new(1).rates(60, 50), [1_003, 100, 1_003, 100, 1_003, 100]);
    }

    #[test]
    fn a_configured_rate_is_fixed() {
        let periods = Periods::of_rate(999);
        let mut thread = Checked::new(1);
        for _ in 0..100 {
            thread.spend(100, 1_000, MS);
            assert_eq!(thread.budget.frequency.rate(periods), Rate::of(1_001_001));
        }
        assert_eq!(thread.budget.frequency, Frequency::LowByTimer);
    }

    /// The frequencies of a thread that runs a tenth of the time and is switched this often per second, checked every
    /// 5 ms.
    fn frequencies(switches: u64) -> Vec<Frequency> {
        let mut thread = Checked::new(1);
        let checks = (1..4_000_u64).map(|check| {
            let by_timer = thread.budget.frequency == Frequency::LowByTimer;
            let until = |check| if by_timer { 0 } else { switches * check / 200 };
            let samples = u64::from(check % 20 == 0);
            thread.spend(samples, until(check) - until(check - 1), 5 * MS);
            thread.budget.frequency
        });
        let mut frequencies: Vec<_> = checks.collect();
        frequencies.dedup();
        frequencies
    }

    #[test]
    fn a_thread_that_is_switched_often_is_sampled_by_a_timer() {
        assert_eq!(frequencies(20), [Frequency::Full]);
        assert_eq!(frequencies(1_000), [Frequency::Full, Frequency::Low]);
        let all = [Frequency::Full, Frequency::Low, Frequency::LowByTimer];
        assert_eq!(frequencies(20_000), all);
    }

    #[test]
    fn all_threads_share_a_budget_per_processor() {
        let mut all = Checked::new(2);
        let mut spend = |threads: u64, passed_ns| {
            all.spend(threads * 10, threads * 100, passed_ns);
            all.budget.frequency
        };
        let (one, two) = (Frequency::Full, Frequency::Low);
        let found = [(20, 5), (80, 5), (1_000, 700), (0, 1_000), (0, 45_000)]
            .map(|(threads, ms)| spend(threads, ms * MS));
        assert_eq!(found, [one, two, Frequency::LowByTimer, Frequency::LowByTimer, one]);
    }

    #[test]
    fn samples_at_the_low_rate_leave_no_debt() {
        let mut thread = Checked::new(1);
        thread.spend(100_000, 0, SECOND);
        assert_eq!(thread.budget.frequency, Frequency::Low);
        assert_eq!(thread.rates(3_600, 100), [100]);
        assert_eq!(thread.budget.frequency, Frequency::Low);
    }

    #[test]
    fn the_highest_rate_of_several_demands_is_met() {
        let demands = [5_000, 1_000, 3_000]
            .map(|period_ns| Demand { rate: Rate::of(period_ns), why: Why::SlowSpan });
        assert_eq!(Demand::highest(demands), Some(demands[1]));
        assert_eq!(Demand::highest([]), None);
    }

    #[test]
    fn a_profile_of_the_process_takes_nothing_of_the_budget_for_slow_spans() {
        let mut budgets = DemandBudgets::new(1);
        for why in [Why::SlowSpan, Why::Process, Why::Continuous] {
            assert_eq!(budgets.of(why).frequency(START), Frequency::Full);
        }
        budgets.of(Why::Process).charge(Cost::new(100_000, 100_000, 997_000));
        assert_eq!(budgets.of(Why::Process).frequency(START), Frequency::LowByTimer);
        for why in [Why::SlowSpan, Why::Continuous] {
            assert_eq!(budgets.of(why).frequency(START), Frequency::Full);
        }
    }
}
