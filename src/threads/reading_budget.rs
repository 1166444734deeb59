//! What reading samples may cost.

use crate::budget::CpuBudget;

/// Lowers the sampling rate while reading samples takes more than its share of a core. What is not used of ten seconds is
/// saved: slow requests come in bursts.
#[derive(Debug)]
pub(super) struct ReadingBudget {
    saved: Option<CpuBudget>,
    checked_ns: u64,
    /// The CPU time used until then.
    used_ns: u64,
    /// The factor on the time between samples.
    pub(super) times: f64,
}

/// Shorter windows are too noisy.
const WINDOW_NS: u64 = 1_000_000_000;
const MAX_TIMES: f64 = 64.0;
/// The rate is raised again only while less than this share of the budget is used.
const LOW_USE: f64 = 0.5;

impl ReadingBudget {
    pub(super) fn new(percent: Option<u32>) -> Self {
        let budget = |percent| CpuBudget::new(u64::from(percent), i64::from(percent) * 100_000_000);
        let saved = percent.filter(|percent| *percent > 0).map(budget);
        Self { saved, checked_ns: 0, used_ns: 0, times: 1.0 }
    }

    /// Returns the new factor on the time between samples, if it changes. `used_ns` is the CPU time used so far.
    pub(super) fn update(&mut self, now_ns: u64, used_ns: u64) -> Option<f64> {
        let window_ns = now_ns.saturating_sub(self.checked_ns);
        if window_ns < WINDOW_NS {
            return None;
        }
        let took_ns = used_ns.saturating_sub(self.used_ns);
        (self.checked_ns, self.used_ns) = (now_ns, used_ns);
        let saved = self.saved.as_mut()?;
        let is_over = saved.left_ns(now_ns) < took_ns.cast_signed();
        saved.spend_down_to(took_ns, 0);
        let of_budget = took_ns as f64 / saved.earned_ns(window_ns) as f64;
        let times = if of_budget > 1.0 && is_over {
            (self.times * of_budget).min(MAX_TIMES)
        } else if of_budget < LOW_USE {
            // Halved each second, because an immediate change would oscillate.
            let seconds = i32::try_from(window_ns / WINDOW_NS).unwrap_or(i32::MAX).min(64);
            (self.times / 2.0_f64.powi(seconds)).max(1.0)
        } else {
            self.times
        };
        let before = std::mem::replace(&mut self.times, times);
        ((times - before).abs() > f64::EPSILON).then_some(times)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    /// The factors after each second, in which the given thousandths of a core were used.
    fn seconds(percent: Option<u32>, used: &[u64]) -> Vec<f64> {
        let mut budget = ReadingBudget::new(percent);
        budget.update(SECOND, 0);
        let mut total = 0;
        let times = used.iter().zip(2..).map(|(used, number)| {
            total += used * SECOND / 1_000;
            budget.update(number * SECOND, total);
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
        let mut budget = ReadingBudget::new(Some(1));
        budget.update(SECOND, 0);
        assert_eq!(budget.update(SECOND + WINDOW_NS / 2, SECOND), None);
        assert!(budget.times <= 1.0);
    }
}
