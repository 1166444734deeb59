//! CPU budgets of the collector.

/// The CPU time between two readings of the thread's clock.
pub fn passed(start_ns: Option<u64>, end_ns: Option<u64>) -> Option<u64> {
    start_ns.zip(end_ns).and_then(|(start_ns, end_ns)| end_ns.checked_sub(start_ns))
}

/// A CPU budget: a share of a core, or of several, with a limit on what can be saved up.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuBudget {
    thousandths: u64,
    most_ns: i64,
    /// Negative if more was spent than was available.
    left_ns: i64,
    refilled_ns: u64,
}

impl CpuBudget {
    /// A budget of `percent` of a core. At most `most_ns` can be saved up, and it starts with that amount.
    pub const fn new(percent: u64, most_ns: i64) -> Self {
        Self::of_thousandths(10 * percent, most_ns)
    }

    /// Like [`new`](Self::new), but in thousandths of a core.
    pub const fn of_thousandths(thousandths: u64, most_ns: i64) -> Self {
        Self { thousandths, most_ns, left_ns: most_ns, refilled_ns: 0 }
    }

    pub fn left_ns(&mut self, now_ns: u64) -> i64 {
        let more_ns = self.earned_ns(now_ns.saturating_sub(self.refilled_ns));
        if more_ns > 0 {
            self.refilled_ns = now_ns;
            self.left_ns = self.left_ns.saturating_add_unsigned(more_ns).min(self.most_ns);
        }
        self.left_ns
    }

    pub fn earned_ns(&self, passed_ns: u64) -> u64 {
        passed_ns.saturating_mul(self.thousandths) / 1_000
    }

    pub fn has_budget(&mut self, now_ns: u64) -> bool {
        self.left_ns(now_ns) > 0
    }

    pub fn spend(&mut self, ns: u64) {
        self.spend_down_to(ns, i64::MIN);
    }

    /// Like [`spend`](Self::spend), but what is left does not fall below `least_ns`. Returns what is left.
    pub fn spend_down_to(&mut self, ns: u64, least_ns: i64) -> i64 {
        let left_ns = self.left_ns.saturating_sub_unsigned(ns).max(least_ns);
        self.left_ns = self.left_ns.min(left_ns);
        self.left_ns
    }

    pub fn most_ns(&self) -> i64 {
        self.most_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn a_budget_refills_by_its_share_up_to_its_limit() {
        let mut share = CpuBudget::new(2, 1_000);
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
        share.spend_down_to(100, -20);
        assert_eq!(share.left_ns(2 * SECOND), -20);
        share.spend_down_to(100, 0);
        assert_eq!(share.left_ns(2 * SECOND), -20, "it is below that");
    }
}
