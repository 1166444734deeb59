//! How a thread spent its time, by its CPU clock.

use std::collections::VecDeque;

/// Readings of a thread's CPU clock, oldest first.
#[derive(Debug, Default)]
pub(crate) struct CpuTimes(VecDeque<CpuTime>);

#[derive(Clone, Copy, Debug)]
pub(crate) struct CpuTime {
    pub(crate) time_ns: u64,
    pub(crate) cpu_ns: u64,
    /// For how long the thread had been sampled in sessions that its hooks have not finished with.
    pub(crate) sampled_ns: u64,
}

#[derive(Default, PartialEq)]
pub(crate) struct Ran {
    pub(crate) on_ns: u64,
    pub(crate) off_ns: u64,
    pub(crate) sampled_ns: u64,
}

const MAX_CPU_TIMES: usize = 32;

impl CpuTimes {
    pub(crate) fn note(&mut self, time: CpuTime) {
        if self.0.len() == MAX_CPU_TIMES {
            // Drops every other reading, so that the rest covers twice the time.
            let mut keeps = false;
            self.0.retain(|_| {
                keeps = !keeps;
                keeps
            });
        }
        self.0.push_back(time);
    }

    /// The thread's on-CPU, off-CPU and sampled time from its first to its last reading between two times.
    pub(crate) fn between(&self, from_ns: u64, to_ns: u64) -> Ran {
        let mut within = self.0.iter().filter(|time| (from_ns..=to_ns).contains(&time.time_ns));
        let Some(first) = within.next() else { return Ran::default() };
        let last = within.next_back().unwrap_or(first);
        let on_ns = last.cpu_ns.saturating_sub(first.cpu_ns);
        Ran {
            on_ns,
            off_ns: last.time_ns.saturating_sub(first.time_ns).saturating_sub(on_ns),
            sampled_ns: last.sampled_ns.saturating_sub(first.sampled_ns).min(on_ns),
        }
    }

    /// What is certain of the thread's time since `since_ns` if its hooks read the clock at that time before.
    pub(crate) fn since_sync(&self, since_ns: u64, synced: Option<(u64, u64)>) -> Ran {
        let synced = synced.filter(|(time_ns, _)| *time_ns <= since_ns);
        let Some(((synced_ns, synced_cpu_ns), last)) = synced.zip(self.0.back()) else {
            return Ran::default();
        };
        let ran_ns = last.cpu_ns.saturating_sub(synced_cpu_ns);
        let interval_ns = last.time_ns.saturating_sub(since_ns);
        Ran {
            on_ns: ran_ns.saturating_sub(since_ns - synced_ns).min(interval_ns),
            off_ns: interval_ns.saturating_sub(ran_ns),
            sampled_ns: 0,
        }
    }
}

impl Ran {
    pub(crate) fn or(self, other: Self) -> Self {
        Self {
            on_ns: self.on_ns.max(other.on_ns),
            off_ns: self.off_ns.max(other.off_ns),
            sampled_ns: self.sampled_ns.max(other.sampled_ns),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn the_last_sync_says_for_how_long_a_thread_ran_and_did_not_run() {
        let mut times = CpuTimes::default();
        let last = CpuTime { time_ns: 14_200 * MS, cpu_ns: 162 * MS, sampled_ns: 0 };
        times.note(last);
        let certain = |synced| {
            let ran = times.between(0, u64::MAX).or(times.since_sync(0, None));
            assert!(ran == Ran::default(), "one reading says nothing");
            let Ran { on_ns, off_ns, .. } = times.since_sync(200 * MS, synced);
            (on_ns, off_ns)
        };
        // It entered the span 1 ms after the sync, and ran for 62 ms since that.
        let (on_ns, off_ns) = certain(Some((199 * MS, 100 * MS)));
        assert_eq!((on_ns, off_ns), (61 * MS, 13_938 * MS));
        assert_eq!(certain(Some((201 * MS, 100 * MS))), (0, 0), "not before the span");
        assert_eq!(certain(None), (0, 0));
    }
}
