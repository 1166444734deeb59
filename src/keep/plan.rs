//! What the rules mean for the hooks.
//!
//! A span whose rule judges its length is a slow request by it for 100 thresholds and at least 10 s; any other span
//! that is open for ten contains requests, as a connection does: what is inside does not belong together.

use std::time::Duration;

use super::{Condition, Keep, Threshold};
use crate::facts::Measure;
use crate::span::{
    ALWAYS_JUDGED, JUDGES_ALLOCATIONS, JUDGES_CPU, JUDGES_SUBTREE, JUDGES_USAGE, KEEP_ON_ERROR,
    ONE_IN, Plan, WATCHED,
};

#[derive(Clone, Copy, Debug)]
pub(crate) struct PlanSettings {
    pub(crate) ticks_a_second: u64,
    /// `None` if each rule has its own, as the next.
    pub(crate) sampling_delay: Option<Duration>,
    pub(crate) long_after: Option<Duration>,
}

/// What the hooks must know about spans with that `Keep`. The number is set later.
pub(super) fn plan(keep: &Keep, settings: PlanSettings) -> Plan {
    let in_ticks = |duration| in_ticks(duration, settings.ticks_a_second);
    let sampling_delay = settings.sampling_delay.unwrap_or_else(|| keep.sampling_delay());
    let judge_after = keep.shortest().map_or(u64::MAX, |shortest| {
        let ticks = in_ticks(shortest);
        // The clock's rate is known better and better. A span that may be over the limit by a later estimate must be judged.
        ticks - ticks / 1024
    });
    // A rule that keeps spans for other reasons, or keeps all, is treated as if one second were too long.
    let slow = keep.shortest().filter(|shortest| !shortest.is_zero());
    let slow = slow.unwrap_or(Duration::from_secs(1)).max(sampling_delay.saturating_mul(20));
    // What is slow by its rule is a slow request, however many of its steps are slow themselves.
    let judges_length =
        |it| matches!(it, Condition::Above(Measure::Wall, _) | Condition::Percentile { .. });
    let long_after = match keep.conditions().any(judges_length) {
        true => slow.saturating_mul(LONG_TIMES_SLOW).max(LONGEST_REQUEST),
        false => slow.saturating_mul(LONG_TIMES),
    };
    let flags = keep.conditions().map(|condition| match condition {
        Condition::Error | Condition::ErrorSelf => KEEP_ON_ERROR,
        // Every span is judged when it closes, however short it was.
        Condition::Always | Condition::Percentile { .. } | Condition::Above(Measure::Awaits, _) => {
            ALWAYS_JUDGED
        }
        Condition::OneIn(_) => ONE_IN,
        Condition::Above(Measure::SubtreeOnCpu, _) => JUDGES_CPU | JUDGES_SUBTREE,
        Condition::Above(Measure::OnCpu | Measure::OffCpu, _) => JUDGES_CPU,
        Condition::Above(Measure::Runnable, _) => JUDGES_CPU | JUDGES_USAGE,
        Condition::Above(it, _) if it.row().is_counted => JUDGES_CPU | JUDGES_USAGE | ALWAYS_JUDGED,
        Condition::Above(Measure::Allocated | Measure::Allocations, _) => JUDGES_ALLOCATIONS,
        // Its close must be observed, so that the layer knows when no such span is left.
        Condition::Open(_) => WATCHED | ALWAYS_JUDGED,
        _ => 0,
    });
    let flags = flags.fold(0, |all, flags| all | flags);
    let least = |judged| {
        let limits = keep.conditions().filter_map(|condition| match condition {
            Condition::Above(measure, Threshold::Number(number)) if measure == judged => {
                Some(number)
            }
            _ => None,
        });
        limits.min().unwrap_or(u64::MAX)
    };
    Plan {
        number: 0,
        flags,
        judge_after,
        sampling_delay: in_ticks(sampling_delay),
        long_after: in_ticks(settings.long_after.unwrap_or(long_after)),
        judge_above_bytes: least(Measure::Allocated),
        judge_above_allocations: least(Measure::Allocations),
    }
}

/// A span that is open for this multiple of what is too slow is one that contains requests, such as a connection or
/// `main`, unless its rule judges how long it is.
const LONG_TIMES: u32 = 10;
/// [`LONG_TIMES`] where the rule judges that, and the least time: a request that awaits some timeouts is not longer.
const LONG_TIMES_SLOW: u32 = 100;
const LONGEST_REQUEST: Duration = Duration::from_secs(10);

fn in_ticks(duration: Duration, ticks_a_second: u64) -> u64 {
    let ticks = duration.as_nanos().saturating_mul(ticks_a_second.into()) / 1_000_000_000;
    u64::try_from(ticks).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ticks are nanoseconds here.
    const SECOND: u64 = 1_000_000_000;

    fn plan(keep: &Keep, sampling_delay: Duration) -> Plan {
        let (sampling_delay, long_after) = (Some(sampling_delay), None);
        super::plan(keep, PlanSettings { ticks_a_second: SECOND, sampling_delay, long_after })
    }

    #[test]
    fn a_span_whose_rule_judges_its_length_is_a_request_for_ten_seconds_or_a_hundred_thresholds() {
        let ms = Duration::from_millis;
        let long_after = |keep: &Keep, sampling_delay| plan(keep, sampling_delay).long_after;
        assert_eq!(long_after(&Keep::slower_than(ms(250)), ms(12)), 25 * SECOND);
        assert_eq!(long_after(&Keep::slower_than(ms(20)), ms(1)), 10 * SECOND);
        assert_eq!(long_after(&Keep::slower_than(ms(2_000)), ms(12)), 200 * SECOND);
        assert_eq!(long_after(&Keep::slower_than(ms(0)), ms(0)), 100 * SECOND);
        // Of others, ten times what is slow.
        assert_eq!(long_after(&Keep::failed(), ms(1)), 10 * SECOND);
        let above = |ms| Keep::when(Condition::Above(Measure::OnCpu, Threshold::Time(ms)));
        assert_eq!(long_after(&above(ms(250)), ms(12)), 2_500_000_000);
        // Twenty times `sampling_delay`.
        assert_eq!(long_after(&above(ms(5)), ms(20)), 4 * SECOND);
        assert_eq!(long_after(&Keep::failed(), Duration::MAX), u64::MAX);
    }

    #[test]
    fn spans_are_suspect_above_the_limits_of_allocations() {
        let above = |measure, number| Condition::Above(measure, Threshold::Number(number));
        let keep = Keep::slower_than(Duration::from_secs(1)).or(above(Measure::Allocated, 70));
        let limits = |keep: &Keep| {
            let plan = plan(keep, Duration::ZERO);
            (plan.judge_above_bytes, plan.judge_above_allocations)
        };
        assert_eq!(limits(&keep), (70, u64::MAX));
        assert_eq!(limits(&keep.or(above(Measure::Allocations, 5))), (70, 5));
    }

    #[test]
    fn suspicion_begins_a_little_before_the_threshold() {
        let keep = Keep::slower_than(Duration::from_millis(250));
        let after = plan(&keep, Duration::ZERO).judge_after;
        assert!(after < 250_000_000 && after > 249_000_000);
    }
}
