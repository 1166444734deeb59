//! CPU budgets for the collector's work other than reading samples.

/// A CPU budget: a share of one core, with a limit on what can be saved up.
#[derive(Clone, Copy, Debug)]
pub(super) struct Share {
    percent: u64,
    most_ns: i64,
    /// Negative if more was spent than was available.
    left_ns: i64,
    refilled_ns: u64,
}

impl Share {
    /// A budget of `percent` of a core. At most `most_ns` can be saved up, and it starts with that amount.
    pub(super) const fn new(percent: u64, most_ns: i64) -> Self {
        Self { percent, most_ns, left_ns: most_ns, refilled_ns: 0 }
    }

    /// Whether any budget is left at `now_ns`.
    pub(super) fn has_budget(&mut self, now_ns: u64) -> bool {
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
    fn a_budget_refills_by_its_share_up_to_its_limit() {
        let mut share = Share::new(2, 1_000);
        assert!(share.has_budget(SECOND));
        share.spend(5_000);
        assert!(!share.has_budget(SECOND + 200_000), "overspending is paid back first");
        assert!(share.has_budget(SECOND + 200_050), "2 % of the elapsed time");
        share.spend(2);
        assert!(!share.has_budget(SECOND + 200_149));
        assert!(share.has_budget(2 * SECOND));
        share.spend(999);
        assert!(share.has_budget(2 * SECOND));
        share.spend(1);
        assert!(!share.has_budget(2 * SECOND));
    }
}
