//! Where raw samples come from.

mod counters;
mod perf;
mod period;
pub(crate) mod record;
mod switches;

pub(crate) use perf::PerfSource;
pub(crate) use period::{period_for, period_of_rate};
