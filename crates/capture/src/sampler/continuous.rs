//! The settings of the continuous profile.

use std::ops::RangeInclusive;
use std::time::Duration;

/// The continuous profile of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContinuousSettings {
    /// Samples per second of CPU time; 0 for none.
    pub rate: u32,
    /// The time that each profile covers.
    pub interval: Duration,
}

/// In hertz.
pub const CONTINUOUS_RATES: RangeInclusive<u32> = 1..=1_000;

/// The rate in a text: `on`, `off`, or samples per second. `None` if it is something else.
pub fn continuous_rate(text: &str) -> Option<u32> {
    match text {
        "on" => Some(ContinuousSettings::USUAL_RATE),
        "off" => Some(0),
        rate => rate.parse().ok().filter(|rate| CONTINUOUS_RATES.contains(rate)),
    }
}

impl ContinuousSettings {
    /// Prime, so that it is in step with nothing, and low.
    const USUAL_RATE: u32 = 49;
    pub const OFF: Self = Self { rate: 0, interval: Duration::from_secs(60) };
}
