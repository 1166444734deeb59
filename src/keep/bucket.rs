//! A rate limit.

/// A token bucket that starts full and refills evenly.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TokenBucket {
    capacity: u32,
    /// Nanoseconds per token.
    interval_ns: u64,
    /// When the bucket will be full if nothing more is taken.
    full_at_ns: u64,
}

impl TokenBucket {
    /// A bucket that refills with `per_minute` tokens a minute, and holds at most that many.
    pub(crate) fn new(per_minute: u32) -> Self {
        const MINUTE_NS: u64 = 60_000_000_000;
        Self {
            capacity: per_minute,
            interval_ns: MINUTE_NS / u64::from(per_minute.max(1)),
            full_at_ns: 0,
        }
    }

    /// Whether the bucket is full, as a new one is.
    pub(crate) fn is_full(&self, now_ns: u64) -> bool {
        self.full_at_ns <= now_ns
    }

    /// Takes a token, if there is one. `now_ns` must not decrease.
    pub(crate) fn take(&mut self, now_ns: u64) -> bool {
        let full_at_ns = self.full_at_ns.max(now_ns).saturating_add(self.interval_ns);
        let missing_ns = full_at_ns - now_ns;
        let fits = missing_ns <= self.interval_ns.saturating_mul(u64::from(self.capacity));
        if fits {
            self.full_at_ns = full_at_ns;
        }
        fits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn gives_its_capacity_at_once_and_then_at_its_rate() {
        let mut bucket = TokenBucket::new(6);
        let start = 1_000 * SECOND;
        assert_eq!((0..10).filter(|_| bucket.take(start)).count(), 6);
        assert!(!bucket.take(start + 9 * SECOND));
        assert!(bucket.take(start + 10 * SECOND));
        assert!(!bucket.take(start + 10 * SECOND));
        assert_eq!((0..10).filter(|_| bucket.take(start + 3600 * SECOND)).count(), 6);
    }

    #[test]
    fn an_empty_bucket_gives_nothing() {
        assert!(!TokenBucket::new(0).take(0));
    }
}
