//! Clocks that a test sets.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::AtomicU64;

use super::{Anchor, Clock, Measurement, ONE, Pair, platform};

impl Clock {
    /// A clock whose ticks are nanoseconds, set by the test.
    pub fn by_hand(now: Arc<AtomicU64>) -> Self {
        let first = Pair { ticks: 0, raw_ns: 0 };
        let (source, rate) = (platform::tick_source(), AtomicU64::new(ONE));
        let (anchor, measurement) =
            (Anchor::new(first), Mutex::new(Measurement { first, is_certain: false }));
        Self { source, rate, anchor, measurement, by_hand: Some(now) }
    }

    /// A clock whose ticks are nanoseconds, and which stands still.
    pub fn nanoseconds() -> Self {
        Self::by_hand(Arc::default())
    }
}
