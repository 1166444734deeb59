//! When samples were lost.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// When a loss was last noticed. It does not matter to spans that opened later.
#[derive(Debug, Default)]
pub(super) struct LossTimes {
    is_new: AtomicBool,
    /// 0 if there was none.
    last_ns: AtomicU64,
}

impl LossTimes {
    pub(super) fn note(&self) {
        self.is_new.store(true, Ordering::Relaxed);
    }

    /// Notices at that time whether there was a loss since the last call.
    pub(super) fn check(&self, now_ns: u64) {
        if self.is_new.swap(false, Ordering::Relaxed) {
            self.last_ns.store(now_ns.max(1), Ordering::Relaxed);
        }
    }

    pub(super) fn are_none_since(&self, since_ns: u64) -> bool {
        let last_ns = self.last_ns.load(Ordering::Relaxed);
        last_ns == 0 || last_ns < since_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_matters_to_what_was_open_when_it_was_noticed() {
        let losses = LossTimes::default();
        losses.check(10);
        assert!(losses.are_none_since(0));
        losses.note();
        losses.check(20);
        losses.check(30);
        assert_eq!(
            [0, 19, 20, 21].map(|ns| losses.are_none_since(ns)),
            [false, false, false, true]
        );
        losses.note();
        losses.check(40);
        assert!(!losses.are_none_since(21) && losses.are_none_since(41));
    }
}
