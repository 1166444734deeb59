//! What reading samples may cost.

use std::time::{Duration, Instant};

/// Lowers the rate of sampling while reading the samples takes more than its share of a core, over ten seconds.
#[derive(Debug)]
pub(super) struct Budget {
    /// Of one core; `None` if it may take what it takes.
    share: Option<f64>,
    since: Instant,
    /// CPU time that had been used then, in nanoseconds.
    used_ns: u64,
    /// How many times as long the time between samples is.
    times: f64,
    /// What was not used of it in the last seconds: slow requests come in bursts.
    saved_ns: f64,
}

/// Shorter stretches say little.
const WINDOW: Duration = Duration::from_secs(1);
/// For how long what is not used is saved.
const MOST_SAVED: Duration = Duration::from_secs(10);
/// The rate is lowered no further.
const MOST_TIMES: f64 = 64.0;
/// As long as more than this part of the budget is used, the rate stays as low as it is.
const CALM: f64 = 0.5;

impl Budget {
    pub(super) fn new(percent: Option<u32>) -> Self {
        let share = percent.map(|percent| f64::from(percent) / 100.0);
        let saved_ns = share.unwrap_or(0.0) * MOST_SAVED.as_nanos() as f64;
        Self { share, since: Instant::now(), used_ns: 0, times: 1.0, saved_ns }
    }

    /// How many times as long the time between samples is from now on, if that changes; `used_ns` is the
    /// CPU time that was used until now.
    pub(super) fn look(&mut self, now: Instant, used_ns: u64) -> Option<f64> {
        let window = now.saturating_duration_since(self.since);
        if window < WINDOW {
            return None;
        }
        let used = used_ns.saturating_sub(self.used_ns);
        (self.since, self.used_ns) = (now, used_ns);
        let share = self.share.filter(|share| *share > 0.0)?;
        let budget_ns = window.as_nanos() as f64 * share;
        let most_saved_ns = share * MOST_SAVED.as_nanos() as f64;
        let saved_ns = (self.saved_ns + budget_ns).min(most_saved_ns) - used as f64;
        self.saved_ns = saved_ns.max(0.0);
        let of_budget = used as f64 / budget_ns;
        let times = if of_budget > 1.0 && saved_ns < 0.0 {
            (self.times * of_budget).min(MOST_TIMES)
        } else if of_budget < CALM {
            // Not at once, or it would swing: by half each second.
            let seconds = i32::try_from(window.as_secs()).unwrap_or(i32::MAX).min(64);
            (self.times / 2.0_f64.powi(seconds)).max(1.0)
        } else {
            self.times
        };
        let has_changed = (times - self.times).abs() > f64::EPSILON;
        self.times = times;
        has_changed.then_some(times)
    }

    /// How many times as long the time between samples is.
    pub(super) fn times(&self) -> f64 {
        self.times
    }

    pub(super) fn is_lowered(&self) -> bool {
        self.times > 1.0
    }
}

/// CPU time that something may take beside the reading of samples: a share of a core, and what was saved of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Share {
    percent: u64,
    most_ns: i64,
    /// Less than nothing if more was taken than there was.
    left_ns: i64,
    refilled_ns: u64,
}

impl Share {
    /// So much of a core, of which so many nanoseconds are saved at most, and at first.
    pub(super) const fn new(percent: u64, most_ns: i64) -> Self {
        Self { percent, most_ns, left_ns: most_ns, refilled_ns: 0 }
    }

    /// Whether there is any left, at that time in nanoseconds.
    pub(super) fn has_some(&mut self, now_ns: u64) -> bool {
        let more_ns = now_ns.saturating_sub(self.refilled_ns).saturating_mul(self.percent) / 100;
        if more_ns > 0 {
            self.refilled_ns = now_ns;
            self.left_ns = self.left_ns.saturating_add_unsigned(more_ns).min(self.most_ns);
        }
        self.left_ns > 0
    }

    pub(super) fn spend(&mut self, ns: u64) {
        self.left_ns = self.left_ns.saturating_sub_unsigned(ns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    /// What a second makes of it in which so much of a core was used, in thousandths.
    fn seconds(percent: Option<u32>, used: &[u64]) -> Vec<f64> {
        let mut budget = Budget::new(percent);
        let (start, mut total) = (budget.since, 0);
        let times = used.iter().zip(1_u32..).map(|(used, number)| {
            total += used * SECOND / 1_000;
            budget.look(start + number * WINDOW, total);
            budget.times
        });
        times.collect()
    }

    #[test]
    fn what_is_over_the_budget_lowers_the_rate_by_as_much() {
        // What was saved is used up in the third second.
        assert_eq!(seconds(Some(1), &[40, 40, 40, 40, 15]), [1.0, 1.0, 1.0, 4.0, 6.0]);
        assert_eq!(seconds(Some(1), &[900, 900]), [64.0, 64.0]);
    }

    #[test]
    fn a_burst_that_is_made_up_for_lowers_nothing() {
        let bursts = [100, 0, 0, 0, 0, 0, 0, 0, 0, 0].repeat(5);
        assert_eq!(seconds(Some(1), &bursts), [1.0; 50]);
    }

    #[test]
    fn it_comes_back_step_by_step_and_does_not_swing() {
        let found = seconds(Some(1), &[40, 40, 40, 40, 10, 6, 4, 1, 1]);
        assert_eq!(found[3..], [4.0, 4.0, 4.0, 2.0, 1.0, 1.0]);
    }

    #[test]
    fn without_a_budget_nothing_changes() {
        assert_eq!(seconds(None, &[900, 900]), [1.0, 1.0]);
        assert_eq!(seconds(Some(0), &[900]), [1.0]);
    }

    #[test]
    fn less_than_a_second_says_nothing() {
        let mut budget = Budget::new(Some(1));
        assert_eq!(budget.look(budget.since + WINDOW / 2, SECOND), None);
        assert!(!budget.is_lowered());
    }

    #[test]
    fn a_share_is_what_it_says_and_what_was_saved() {
        let mut share = Share::new(2, 1_000);
        assert!(share.has_some(SECOND));
        share.spend(5_000);
        assert!(!share.has_some(SECOND + 200_000), "what was taken before is owed");
        assert!(share.has_some(SECOND + 200_050), "a fiftieth of the time");
        share.spend(2);
        assert!(!share.has_some(SECOND + 200_149));
        assert!(share.has_some(2 * SECOND));
        share.spend(999);
        assert!(share.has_some(2 * SECOND));
        share.spend(1);
        assert!(!share.has_some(2 * SECOND));
    }
}
