//! What the system counts for a thread.

/// The resource usage of a thread since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) minor_faults: u64,
    pub(crate) major_faults: u64,
    pub(crate) voluntary_switches: u64,
    pub(crate) involuntary_switches: u64,
    pub(crate) cycles: u64,
    pub(crate) instructions: u64,
    pub(crate) cache_misses: u64,
    /// For how long it could have run and others had its CPU, in nanoseconds; 0 if that is unknown.
    pub(crate) preempted_ns: u64,
    /// For how long it could have run and had no CPU, as the kernel counted it over `run_delay_read_ns` of that time.
    pub(crate) run_delay_ns: u64,
    pub(crate) run_delay_read_ns: u64,
}

/// The counts of a [`Usage`], in its order.
pub(crate) type UsageCounts<T> = [T; 10];

impl Usage {
    pub(crate) fn counts(&self) -> UsageCounts<u64> {
        [
            self.minor_faults,
            self.major_faults,
            self.voluntary_switches,
            self.involuntary_switches,
            self.cycles,
            self.instructions,
            self.cache_misses,
            self.preempted_ns,
            self.run_delay_ns,
            self.run_delay_read_ns,
        ]
    }

    pub(crate) fn from_counts(counts: UsageCounts<u64>) -> Self {
        let [minor_faults, major_faults, voluntary, involuntary, of_session @ ..] = counts;
        let [cycles, instructions, cache_misses, of_cpus @ ..] = of_session;
        let [preempted_ns, run_delay_ns, run_delay_read_ns] = of_cpus;
        Self {
            minor_faults,
            major_faults,
            voluntary_switches: voluntary,
            involuntary_switches: involuntary,
            cycles,
            instructions,
            cache_misses,
            preempted_ns,
            run_delay_ns,
            run_delay_read_ns,
        }
    }

    /// Without the counts that start at 0 when the thread is attached.
    pub(crate) fn without_session(self) -> Self {
        Self { cycles: 0, instructions: 0, cache_misses: 0, preempted_ns: 0, ..self }
    }

    /// The usage since `before`.
    pub(crate) fn since(&self, before: &Self) -> Self {
        let mut counts = self.counts();
        counts
            .iter_mut()
            .zip(before.counts())
            .for_each(|(now, then)| *now = now.saturating_sub(then));
        Self::from_counts(counts)
    }

    pub(crate) fn add(&mut self, other: &Self) {
        let mut counts = self.counts();
        counts.iter_mut().zip(other.counts()).for_each(|(sum, more)| *sum += more);
        *self = Self::from_counts(counts);
    }
}
