//! How much stack the samples of a thread need.

use crate::sampler::record::LEAST_STACK;

/// Complete stacks after which a thread's copies are made smaller. Of all threads: one that is cut after all
/// makes it harder to believe of any.
#[derive(Debug)]
pub(super) struct Patience(u32);

const FIRST_PATIENCE: u32 = 64;
const MOST_PATIENCE: u32 = 1 << 16;

impl Default for Patience {
    fn default() -> Self {
        Self(FIRST_PATIENCE)
    }
}

impl Patience {
    pub(super) fn double(&mut self) {
        self.0 = (2 * self.0).min(MOST_PATIENCE);
    }
}

/// A thread begins with all that may be copied, so that no stack is cut while nothing is known of it. After
/// many stacks that took much less, copies are made smaller, to twice of what the deepest of them took at
/// least. One that is cut makes them whole again.
#[derive(Debug, Default)]
pub(super) struct StackNeed {
    /// By the deepest stack.
    used: u64,
    stacks: u32,
}

impl StackNeed {
    /// A stack was unwound from so many bytes of its copy. Returns how many of the `most` to copy from now on,
    /// if that is to be another number than is `copied`.
    pub(super) fn note(
        &mut self,
        used: u64,
        is_cut: bool,
        [copied, most]: [u32; 2],
        patience: &mut Patience,
    ) -> Option<u32> {
        if copied < most {
            if !is_cut {
                return None;
            }
            patience.double();
            *self = Self::default();
            return Some(most);
        }
        self.stacks += 1;
        self.used = self.used.max(if is_cut { u64::MAX } else { used });
        if self.stacks < patience.0 {
            return None;
        }
        let Self { used, .. } = std::mem::take(self);
        let enough = used.checked_mul(2).and_then(u64::checked_next_power_of_two);
        let enough = u32::try_from(enough?).ok()?.max(LEAST_STACK);
        // Half of it, or it is not worth a change.
        (enough <= most / 2).then_some(enough)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: u32 = 32 * 1024;
    const WHOLE: [u32; 2] = [MOST, MOST];
    const SMALL: [u32; 2] = [LEAST_STACK, MOST];

    #[derive(Default)]
    struct Thread {
        need: StackNeed,
        patience: Patience,
    }

    impl Thread {
        fn note(&mut self, used: u64, is_cut: bool, sizes: [u32; 2]) -> Option<u32> {
            self.need.note(used, is_cut, sizes, &mut self.patience)
        }

        /// What is asked for after so many complete stacks, if that is something.
        fn after(&mut self, stacks: u32, used: u64, sizes: [u32; 2]) -> Option<u32> {
            let asked: Vec<_> = (0..stacks).filter_map(|_| self.note(used, false, sizes)).collect();
            assert!(asked.len() <= 1);
            asked.first().copied()
        }
    }

    #[test]
    fn many_shallow_stacks_make_copies_smaller() {
        let mut thread = Thread::default();
        assert_eq!(thread.after(FIRST_PATIENCE - 1, 5000, WHOLE), None);
        assert_eq!(thread.note(100, false, WHOLE), Some(16384));
        assert_eq!(thread.after(10 * FIRST_PATIENCE, 100, SMALL), None);
    }

    #[test]
    fn one_deep_stack_among_them_keeps_them_whole() {
        for (used, is_cut) in [(u64::from(MOST), false), (9_000, false), (100, true)] {
            let mut thread = Thread::default();
            assert_eq!(thread.note(used, is_cut, WHOLE), None);
            assert_eq!(thread.after(FIRST_PATIENCE - 1, 100, WHOLE), None, "{used}");
            // It was long ago.
            assert_eq!(thread.after(FIRST_PATIENCE, 100, WHOLE), Some(LEAST_STACK));
        }
    }

    #[test]
    fn a_cut_one_makes_them_whole_and_is_remembered() {
        let mut thread = Thread::default();
        assert_eq!(thread.note(u64::from(LEAST_STACK), true, SMALL), Some(MOST));
        assert_eq!(thread.after(2 * FIRST_PATIENCE - 1, 100, WHOLE), None);
        assert_eq!(thread.note(100, false, WHOLE), Some(LEAST_STACK));
        for _ in 0..40 {
            assert_eq!(thread.note(0, true, SMALL), Some(MOST));
        }
        assert_eq!(thread.after(MOST_PATIENCE - 1, 100, WHOLE), None);
        assert_eq!(thread.note(100, false, WHOLE), Some(LEAST_STACK));
    }

    #[test]
    fn where_little_may_be_copied_nothing_is_changed() {
        for most in [LEAST_STACK, 2 * LEAST_STACK - 8] {
            assert_eq!(Thread::default().after(10 * FIRST_PATIENCE, 8, [most, most]), None);
        }
    }
}
