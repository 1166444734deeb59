//! Which CPU time of threads the samples of the continuous profile represent.
//!
//! Sessions that begin and end often lose what a thread ran after their last sample. So all samples of a thread in one
//! drain share what its CPU clock has gained since the drain before.

use std::collections::HashMap;

use crate::sys;

/// The CPU clocks of threads at their last samples. Sessions are short at times, and end between two samples: without
/// the clocks, all that came after the last sample would be missing.
#[derive(Debug, Default)]
pub(crate) struct SampledClocks(HashMap<u32, u64>);

impl SampledClocks {
    /// Reads the clocks of all threads. The clocks of later threads begin at 0.
    pub(crate) fn now() -> Self {
        let clocks = sys::own_threads().unwrap_or_default().into_iter();
        Self(clocks.filter_map(|tid| Some((tid, sys::cpu_ns_of(tid)?))).collect())
    }

    /// The CPU time that samples of a thread represent which were taken since the last call. `None` if it has ended.
    pub(super) fn ran_ns(&mut self, tid: u32) -> Option<u64> {
        Some(self.advance(tid, sys::cpu_ns_of(tid)?))
    }

    fn advance(&mut self, tid: u32, now_ns: u64) -> u64 {
        let before_ns = self.0.insert(tid, now_ns).unwrap_or(0);
        // Otherwise another thread has the id of one that has ended.
        now_ns.checked_sub(before_ns).unwrap_or(now_ns)
    }

    /// Forgets threads that have ended.
    pub(crate) fn forget_ended(&mut self) {
        self.0.retain(|tid, _| sys::cpu_ns_of(*tid).is_some());
    }
}

/// What each of these samples of a thread represents that has run for `ran_ns` since the samples before. `None` if that is
/// more than `most_ns`: the thread was not sampled for most of it, as the layer's own ones, or while the machine was too busy.
pub(super) fn share_of(ran_ns: u64, samples: usize, most_ns: u64) -> Option<u64> {
    let share_ns = ran_ns.checked_div(samples as u64)?;
    (share_ns <= most_ns).then_some(share_ns)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_represents_nothing_of_what_a_thread_ran_for_long_without_samples() {
        const MS: u64 = 1_000_000;
        assert_eq!(share_of(30 * MS, 2, 160 * MS), Some(15 * MS));
        assert_eq!(share_of(0, 1, 160 * MS), Some(0));
        assert_eq!(share_of(3_600_000 * MS, 2, 160 * MS), None);
        assert_eq!(share_of(10 * MS, 0, 160 * MS), None);
    }

    #[test]
    fn the_samples_of_a_thread_add_up_to_its_clock() {
        let mut clocks = SampledClocks(HashMap::from([(1, 50_000)]));
        assert_eq!([clocks.advance(1, 50_020), clocks.advance(1, 50_050)], [20, 30]);
        assert_eq!([clocks.advance(2, 7), clocks.advance(2, 17)], [7, 10], "it has begun later");
        assert_eq!([clocks.advance(1, 5), clocks.advance(1, 6)], [5, 1], "another has the id");
    }
}
