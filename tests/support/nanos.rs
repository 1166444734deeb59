//! Times in whole nanoseconds, for tests that compare them.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

pub(crate) trait Nanos {
    fn ns(self) -> u64;
}

impl Nanos for Duration {
    fn ns(self) -> u64 {
        u64::try_from(self.as_nanos()).unwrap_or(u64::MAX)
    }
}

impl Nanos for SystemTime {
    fn ns(self) -> u64 {
        self.duration_since(UNIX_EPOCH).map_or(0, Nanos::ns)
    }
}
