//! The verdict on a closed span.

use super::{Condition, Keep};
use crate::facts::{Facts, Reason, Reasons};
use crate::span::{CHOSEN, FAILED, FAILED_ITSELF, FORCED, SpanSnapshot};

/// The verdict on a closed span. `is_rare` returns whether a wall time is longer than the rule's percentile.
pub(crate) fn judge(keep: &Keep, closing: &SpanSnapshot, is_rare: impl Fn(u64) -> bool) -> Reasons {
    let facts = Facts { times: closing.account, ..Facts::default() };
    let wall_ns = facts.times.wall_ns;
    let judge = |condition| match condition {
        Condition::Above(measure, threshold) => {
            let is_above = |value| threshold.is_exceeded_by(value, wall_ns);
            let value = facts.get(measure).filter(|_| !measure.row().condition.is_empty());
            value.is_some_and(is_above).then_some(Reason::Above(measure))
        }
        Condition::Error => closing.has(FAILED).then_some(Reason::Error),
        Condition::ErrorSelf => closing.has(FAILED_ITSELF).then_some(Reason::Error),
        // Evaluated for every span, because the percentile is computed from all of them.
        Condition::Percentile { floor, .. } => {
            let is_met = is_rare(wall_ns) && u128::from(wall_ns) > floor.as_nanos();
            is_met.then_some(Reason::Percentile)
        }
        Condition::Always => Some(Reason::Always),
        Condition::OneIn(_) => closing.has(CHOSEN).then_some(Reason::OneIn),
        // These apply to open spans only.
        Condition::Hung(_) | Condition::NeverHung | Condition::Open(_) => None,
    };
    let forced = closing.has(FORCED).then_some(Reason::Forced);
    keep.conditions().filter_map(judge).chain(forced).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::Threshold;
    use super::*;
    use crate::facts::Allocations;
    use crate::facts::Measure;

    const MS: Duration = Duration::from_millis(1);
    const RULE: Keep = Keep::slower_than(Duration::from_millis(250));

    fn judged(keep: Keep, closing: &SpanSnapshot) -> String {
        super::judge(&keep, closing, |_| true).to_string()
    }

    fn judge(keep: Keep, wall_ns: u64, flags: u32) -> String {
        judged(keep, &SpanSnapshot::for_test(wall_ns, flags))
    }

    #[test]
    fn slower_than_the_rule_allows_is_kept() {
        assert_eq!(judge(RULE, 250_000_001, 0), "latency");
        assert_eq!(judge(RULE, 250_000_000, 0), "");
    }

    #[test]
    fn a_failed_span_is_kept_only_if_the_rule_asks_for_it() {
        assert_eq!(judge(RULE, 1, FAILED), "");
        assert_eq!(judge(RULE.or_failed(), 1, FAILED), "error");
        assert_eq!(judge(RULE.or_failed(), 1, 0), "");
        assert_eq!(judge(Keep::failed(), u64::MAX, FAILED), "error");
        let own = Keep::when(Condition::ErrorSelf);
        assert_eq!(judge(own, 1, FAILED), "");
        assert_eq!(judge(own, 1, FAILED | FAILED_ITSELF), "error");
    }

    #[test]
    fn all_reasons_are_reported() {
        let keep = RULE.or_failed().or(Condition::OneIn(std::num::NonZeroU32::MIN));
        let flags = FAILED | FORCED | CHOSEN;
        assert_eq!(judge(keep, 300_000_000, flags), "latency|error|one_in|forced");
    }

    #[test]
    fn never_keeps_only_forced_spans() {
        assert_eq!(judge(Keep::never(), u64::MAX, FAILED | CHOSEN), "");
        assert_eq!(judge(Keep::never(), 1, FORCED), "forced");
        assert_eq!(judge(Keep::when(Condition::Always), 0, 0), "always");
    }

    #[test]
    fn each_part_of_the_time_has_its_condition() {
        let mut closing = SpanSnapshot::for_test(10_000_000, 0);
        closing.account.on_cpu_ns = 1_000_001;
        closing.account.subtree_on_cpu_ns = 12_000_000;
        closing.account.off_cpu_ns = 2_000_001;
        closing.account.idle_ns = 6_900_000;
        closing.account.await_ns = 4_000_001;
        closing.account.delay_ns = 500_001;
        closing.account.after_last_exit_ns = 3_000_000;
        closing.account.allocations =
            Some(Allocations { allocated_bytes: 1_000, allocations: 10, ..Allocations::default() });
        for (measure, threshold, reason) in [
            (Measure::Allocated, Threshold::Number(999), "alloc"),
            (Measure::Allocated, Threshold::Number(1_000), ""),
            (Measure::Allocations, Threshold::Number(9), "allocs"),
            (Measure::Allocations, Threshold::Number(10), ""),
            (Measure::SubtreeOnCpu, Threshold::Time(11 * MS), "on_cpu"),
            (Measure::SubtreeOnCpu, Threshold::Time(12 * MS), ""),
            (Measure::SubtreeOnCpu, Threshold::Percent(100), "on_cpu"),
            (Measure::OnCpu, Threshold::Time(MS), "own_on_cpu"),
            (Measure::OnCpu, Threshold::Time(2 * MS), ""),
            (Measure::OffCpu, Threshold::Time(2 * MS), "off_cpu"),
            (Measure::OffCpu, Threshold::Percent(20), "off_cpu"),
            (Measure::OffCpu, Threshold::Percent(21), ""),
            (Measure::Idle, Threshold::Percent(68), "idle"),
            (Measure::Idle, Threshold::Percent(69), ""),
            (Measure::Await, Threshold::Time(4 * MS), "await"),
            (Measure::Await, Threshold::Time(5 * MS), ""),
            (Measure::Await, Threshold::Percent(40), "await"),
            (Measure::Await, Threshold::Percent(41), ""),
            (Measure::SchedulingDelay, Threshold::Time(MS / 2), "delay"),
            (Measure::SchedulingDelay, Threshold::Time(MS), ""),
            (Measure::SchedulingDelay, Threshold::Percent(5), "delay"),
            (Measure::SchedulingDelay, Threshold::Percent(6), ""),
            (Measure::LastExit, Threshold::Time(6 * MS), "last_exit"),
            (Measure::LastExit, Threshold::Time(7 * MS), ""),
        ] {
            let condition = Condition::Above(measure, threshold);
            assert_eq!(judged(Keep::when(condition), &closing), reason, "{condition}");
        }
    }

    #[test]
    fn a_rare_span_must_also_be_longer_than_the_floor() {
        let keep = Keep::when(Condition::Percentile { millionths: 990_000, floor: MS });
        let closing = |wall_ns| SpanSnapshot::for_test(wall_ns, 0);
        assert_eq!(judged(keep, &closing(1_000_001)), "percentile");
        assert_eq!(judged(keep, &closing(1_000_000)), "");
        assert!(super::judge(&keep, &closing(u64::MAX), |_| false).is_empty());
        // Short spans are counted, too.
        let seen = std::cell::Cell::new(0);
        super::judge(&keep, &closing(5), |wall_ns| {
            seen.set(wall_ns);
            true
        });
        assert_eq!(seen.get(), 5);
    }
}
