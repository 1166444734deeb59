//! What the system counts for a thread, as its hooks last read it.

use crate::facts::Usage;
use crate::sampler::RunDelay;
use crate::sys::Clock;

/// What was last read of what the system counts for the thread.
#[derive(Debug, Default)]
pub(super) struct UsageRead {
    pub(super) usage: Usage,
    /// When, in ticks.
    pub(super) at: u64,
    pub(super) run_delay: Option<RunDelay>,
    /// When the one before that was read, in ticks.
    pub(super) run_delay_since: u64,
    /// For how long the thread was preempted, by all records of switches.
    pub(super) recorded_ns: u64,
    pub(super) switches: Option<SwitchCounts>,
}

/// The context switches of a thread, and its CPU clock when these were read.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SwitchCounts {
    /// In ticks.
    pub(super) at: u64,
    pub(super) cpu_ns: u64,
    pub(super) usage: Usage,
    pub(super) recorded_ns: u64,
    /// The number of the session if it records switches.
    pub(super) records: Option<u32>,
}

impl SwitchCounts {
    /// For how long the thread waited for a CPU since `before` beyond what was recorded: whenever it did not run, if it was
    /// switched out and never because it was blocked. Where one session recorded all of it, that is known without this.
    pub(super) fn unrecorded_since(&self, before: &Self, clock: &Clock) -> u64 {
        let is_recorded = before.records.is_some() && before.records == self.records;
        let was_preempted = self.usage.involuntary_switches > before.usage.involuntary_switches;
        let was_blocked = self.usage.voluntary_switches != before.usage.voluntary_switches;
        if is_recorded || !was_preempted || was_blocked {
            return 0;
        }
        let ran_ns = self.cpu_ns.saturating_sub(before.cpu_ns);
        let off_ns = clock.ns(self.at.saturating_sub(before.at)).saturating_sub(ran_ns);
        off_ns.saturating_sub(self.recorded_ns.saturating_sub(before.recorded_ns))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_session_did_not_record_after_it_ended_or_before_it_began_is_counted() {
        let before = SwitchCounts { records: Some(1), ..SwitchCounts::default() };
        let usage = Usage { involuntary_switches: 3, ..Usage::default() };
        // Off for 12 of 20, of which records have 5.
        let after = SwitchCounts { at: 20, cpu_ns: 8, usage, recorded_ns: 5, records: None };
        let unrecorded = |before: SwitchCounts, records, voluntary_switches| {
            let usage = Usage { voluntary_switches, ..usage };
            let after = SwitchCounts { records, usage, ..after };
            after.unrecorded_since(&before, &Clock::nanoseconds())
        };
        assert_eq!(unrecorded(before, None, 0), 7, "it ended");
        assert_eq!(unrecorded(before, Some(2), 0), 7, "another one began");
        assert_eq!(unrecorded(SwitchCounts::default(), Some(1), 0), 7, "one began");
        assert_eq!(unrecorded(before, Some(1), 0), 0, "it recorded all");
        assert_eq!(unrecorded(before, None, 1), 0, "it was blocked");
    }
}
