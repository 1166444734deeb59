//! Sampling rates.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// CPU time between two samples.
    pub period_ns: u64,
    /// Use a timer even where perf is available, because perf makes each context switch slower.
    pub by_timer: bool,
}

const BY_TIMER: u64 = 1 << 63;

impl Rate {
    pub const fn of(period_ns: u64) -> Self {
        Self { period_ns, by_timer: false }
    }

    pub fn slowed(self, times: f64) -> Self {
        Self { period_ns: (self.period_ns as f64 * times.max(1.0)) as u64, ..self }
    }

    pub(super) fn from_word(word: u64) -> Self {
        Self { period_ns: word & !BY_TIMER, by_timer: word & BY_TIMER != 0 }
    }

    pub(super) fn word(self) -> u64 {
        self.period_ns & !BY_TIMER | if self.by_timer { BY_TIMER } else { 0 }
    }
}

/// The CPU time between two samples in nanoseconds, at the full and at the low rate.
///
/// Slightly less than round numbers, so as not to run in step with the kernel's tick or the program's timers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Periods {
    pub full_ns: u64,
    pub low_ns: u64,
}

impl Periods {
    /// 1,000 and 100 samples per second: enough to show where the time of a slow request went, and few enough not to
    /// matter for a thread that runs only slow requests.
    pub const USUAL: Self = Self { full_ns: 997_000, low_ns: 9_970_000 };

    /// A fixed number of samples per second of CPU time.
    pub fn of_rate(hertz: u32) -> Self {
        let period_ns = 1_000_000_000 / u64::from(hertz.max(1));
        Self { full_ns: period_ns, low_ns: period_ns }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_only_lowers_the_rate() {
        let slowed = |times| Rate::of(1_000).slowed(times).period_ns;
        assert_eq!((slowed(2.5), slowed(0.1)), (2_500, 1_000));
    }
}
