//! What the collector may take beside the reading of samples.

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
