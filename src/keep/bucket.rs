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

    /// When it will be full if nothing more is taken.
    pub(crate) fn full_ns(&self) -> u64 {
        self.full_at_ns
    }

    /// When there will be a token, if nothing is taken until then.
    pub(crate) fn next_ns(&self) -> u64 {
        match self.capacity {
            0 => u64::MAX,
            more => {
                let full_ns = self.full_at_ns.saturating_add(self.interval_ns);
                full_ns.saturating_sub(self.interval_ns.saturating_mul(u64::from(more)))
            }
        }
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
        let mut bucket = TokenBucket::new(0);
        assert!(!bucket.take(0));
        assert_eq!(bucket.next_ns(), u64::MAX);
    }

    #[test]
    fn it_states_when_there_will_be_a_token() {
        for per_minute in [1, 6, 60, 240, 1_000_000, u32::MAX] {
            let mut bucket = TokenBucket::new(per_minute);
            assert!(bucket.next_ns() <= SECOND);
            let start = 1_000 * SECOND;
            let taken = (0..1_000_u32).filter(|_| bucket.take(start)).count();
            if taken == 1_000 {
                assert!(bucket.next_ns() <= start);
                continue;
            }
            for _ in 0..3 {
                let next = bucket.next_ns();
                assert!(next > start && !bucket.take(next - 1), "{per_minute}");
                assert!(bucket.take(next), "{per_minute}");
            }
        }
    }
}
