//! When samples were lost.

use std::sync::atomic::{AtomicU64, Ordering};

/// When a loss was last noticed. It does not matter to spans that opened later.
#[derive(Debug, Default)]
pub(super) struct LossTimes {
    count: AtomicU64,
    last_ns: AtomicU64,
}

impl LossTimes {
    /// Notices at that time how many losses there were in all.
    pub(super) fn check(&self, count: u64, now_ns: u64) {
        if self.count.swap(count, Ordering::Relaxed) != count {
            self.last_ns.store(now_ns, Ordering::Relaxed);
        }
    }

    pub(super) fn are_none_since(&self, since_ns: u64) -> bool {
        self.count.load(Ordering::Relaxed) == 0 || self.last_ns.load(Ordering::Relaxed) < since_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_matters_to_what_was_open_when_it_was_noticed() {
        let losses = LossTimes::default();
        losses.check(0, 10);
        assert!(losses.are_none_since(0));
        losses.check(2, 20);
        losses.check(2, 30);
        assert_eq!(
            [0, 19, 20, 21].map(|ns| losses.are_none_since(ns)),
            [false, false, false, true]
        );
        losses.check(3, 40);
        assert!(!losses.are_none_since(21) && losses.are_none_since(41));
    }
}
