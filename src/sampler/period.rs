//! How often to sample.

use std::time::Instant;

/// How often a thread is sampled: the CPU time between two samples in nanoseconds, where it has been sampled for
/// little, for more and for long.
///
/// A little less than round numbers, so that they do not fall into step with the kernel's tick or with a program's
/// own timers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Periods([u64; 3]);

impl Periods {
    /// 1,000, 200 and 100 samples a second: of a slow request as many as tell where its time went, and of a thread
    /// that has nothing but slow requests so few that they do not matter.
    pub(crate) const USUAL: Self = Self([997_000, 4_985_000, 9_970_000]);

    /// Always so many samples a second of CPU time.
    pub(crate) fn of_rate(hertz: u32) -> Self {
        Self([1_000_000_000 / u64::from(hertz.max(1)); 3])
    }

    pub(crate) fn first(self) -> u64 {
        self.0[0]
    }

    pub(crate) fn last(self) -> u64 {
        self.0[2]
    }
}

/// How many samples a thread may have before it has fewer: it gets 100 a second of wall time, as many as it has at
/// the lowest rate, and saves up to 1,000.
#[derive(Debug)]
pub(crate) struct Allowance {
    left: f64,
    since: Instant,
    level: usize,
}

const A_SECOND: f64 = 100.0;
const MOST: f64 = 1_000.0;
/// With so many left it falls from the first level to the second; with none to the last one.
const HALF: f64 = MOST / 2.0;
/// And comes back to the first one with so many.
const NEARLY_ALL: f64 = MOST * 0.9;

impl Allowance {
    pub(crate) fn new(now: Instant) -> Self {
        Self { left: MOST, since: now, level: 0 }
    }

    /// The thread had so many samples since the last call. Returns how often it is sampled from now on.
    pub(crate) fn spend(&mut self, samples: u64, now: Instant, periods: Periods) -> u64 {
        let more = now.saturating_duration_since(self.since).as_secs_f64() * A_SECOND;
        self.since = now;
        self.left = ((self.left + more).min(MOST) - samples as f64).max(0.0);
        self.level = match self.level {
            _ if self.left <= 0.0 => 2,
            2 if self.left < HALF => 2,
            0 if self.left > HALF => 0,
            _ if self.left >= NEARLY_ALL => 0,
            _ => 1,
        };
        periods.0.get(self.level).copied().unwrap_or(periods.last())
    }
}

/// A time is so many times as long.
pub(crate) fn stretched(period_ns: u64, times: f64) -> u64 {
    (period_ns as f64 * times.max(1.0)) as u64
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// The rates that a thread has that runs for so many seconds, each tenth of one.
    fn rates(allowance: &mut Allowance, start: Instant, seconds: std::ops::Range<u32>) -> Vec<u64> {
        let mut period_ns = allowance.spend(0, start, Periods::USUAL);
        let tenths = (10 * seconds.start + 1)..=10 * seconds.end;
        let rates = tenths.map(|tenth| {
            let now = start + tenth * Duration::from_millis(100);
            period_ns = allowance.spend(100_000_000 / period_ns, now, Periods::USUAL);
            (1e9 / period_ns as f64).round() as u64
        });
        let mut rates: Vec<_> = rates.collect();
        rates.dedup();
        rates
    }

    #[test]
    fn a_thread_that_goes_on_is_sampled_less_and_less() {
        let start = Instant::now();
        let mut allowance = Allowance::new(start);
        assert_eq!(rates(&mut allowance, start, 0..60), [1_003, 201, 100]);
        // Ten seconds without a sample are as good as new.
        let later = start + Duration::from_secs(70);
        assert_eq!(allowance.spend(0, later, Periods::USUAL), Periods::USUAL.first());
    }

    #[test]
    fn a_thread_with_few_samples_a_second_keeps_the_highest_rate() {
        let start = Instant::now();
        let mut allowance = Allowance::new(start);
        for second in 1..100 {
            let now = start + Duration::from_secs(second);
            assert_eq!(allowance.spend(90, now, Periods::USUAL), 997_000);
        }
    }

    #[test]
    fn it_does_not_swing_between_two_rates() {
        let start = Instant::now();
        let mut allowance = Allowance::new(start);
        let spend = |allowance: &mut Allowance, samples, ms| {
            allowance.spend(samples, start + Duration::from_millis(ms), Periods::USUAL)
        };
        assert_eq!(spend(&mut allowance, 501, 1), 4_985_000);
        assert_eq!(spend(&mut allowance, 0, 3_000), 4_985_000, "not before nearly all is back");
        assert_eq!(spend(&mut allowance, 0, 4_100), 997_000);
        assert_eq!(spend(&mut allowance, 2_000, 4_200), 9_970_000);
        assert_eq!(spend(&mut allowance, 0, 8_000), 9_970_000);
        assert_eq!(spend(&mut allowance, 0, 9_300), 4_985_000);
    }

    #[test]
    fn a_rate_that_is_set_is_never_left() {
        let (start, periods) = (Instant::now(), Periods::of_rate(999));
        assert_eq!(Allowance::new(start).spend(100_000, start, periods), 1_001_001);
        assert_eq!(Periods::of_rate(0).first(), 1_000_000_000);
    }

    #[test]
    fn a_budget_makes_it_longer_and_never_shorter() {
        assert_eq!((stretched(1_000, 2.5), stretched(1_000, 0.1)), (2_500, 1_000));
    }
}
