//! How often to sample.

use std::time::Duration;

/// Samples that the shortest span worth keeping should hold.
const WANTED_SAMPLES: u32 = 50;
const SHORTEST: Duration = Duration::from_millis(1);
const LONGEST: Duration = Duration::from_millis(10);

/// The sampling period for spans that are kept above `threshold`; without one, the longest.
///
/// A little less than a round number, so that it does not fall into step with the kernel's tick
/// or with a program's own timers.
pub(crate) fn period_for(threshold: Option<Duration>) -> Duration {
    let period = threshold
        .map_or(LONGEST, |threshold| (threshold / WANTED_SAMPLES).clamp(SHORTEST, LONGEST));
    period * 997 / 1000
}

/// The sampling period of a rate in samples a second of CPU time.
pub(crate) fn period_of_rate(hertz: u32) -> Duration {
    Duration::from_secs(1) / hertz.max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fifty_samples_of_the_shortest_span_worth_keeping() {
        assert_eq!(period_for(Some(Duration::from_millis(250))), Duration::from_micros(4985));
        assert_eq!(period_for(Some(Duration::from_millis(100))), Duration::from_micros(1994));
    }

    #[test]
    fn neither_too_often_nor_too_seldom() {
        assert_eq!(period_for(Some(Duration::from_millis(5))), Duration::from_micros(997));
        assert_eq!(period_for(Some(Duration::from_secs(60))), Duration::from_micros(9970));
        assert_eq!(period_for(None), Duration::from_micros(9970));
    }

    #[test]
    fn a_rate_is_taken_as_it_is() {
        assert_eq!(period_of_rate(999), Duration::from_nanos(1_001_001));
        assert_eq!(period_of_rate(0), Duration::from_secs(1));
    }
}
