//! Why a span was kept.

use std::fmt;
use std::time::Duration;

use super::{Condition, Keep};
use crate::span::{CHOSEN, Closing, FAILED, FAILED_ITSELF, FORCED, TimeBreakdown};
use crate::stats::{Counters, Stats};

/// Why a span was kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reason {
    /// It took longer than its rule allows.
    Latency,
    /// Its last exit was later than its rule allows.
    LastExit,
    /// It failed.
    Error,
    /// The on-CPU time of its subtree is longer than its rule allows.
    OnCpu,
    /// Its own on-CPU time is longer than its rule allows.
    OwnOnCpu,
    /// It was blocked or preempted for longer than its rule allows.
    OffCpu,
    /// It was open but not entered for longer than its rule allows.
    Idle,
    /// Its future awaited something for longer than its rule allows.
    Await,
    /// Its future had been woken and was not polled for longer than its rule allows.
    Delay,
    /// It allocated more bytes than its rule allows.
    Allocated,
    /// It made more allocations than its rule allows.
    Allocations,
    /// It took longer than the percentile of its rule.
    Percentile,
    /// Its rule keeps every span.
    Always,
    /// It is the one in *n* spans that its rule keeps.
    OneIn,
    /// It was considered hung while it was open: it stayed entered for too long without an exit.
    Hung,
    /// It was still open after longer than its rule allows.
    Open,
    /// The program asked for it: [`Handle::keep_current`](crate::Handle::keep_current).
    Forced,
}

impl Reason {
    /// All reasons, in order.
    pub const ALL: [Self; 17] = [
        Self::Latency,
        Self::LastExit,
        Self::Error,
        Self::OnCpu,
        Self::OwnOnCpu,
        Self::OffCpu,
        Self::Idle,
        Self::Await,
        Self::Delay,
        Self::Allocated,
        Self::Allocations,
        Self::Percentile,
        Self::Always,
        Self::OneIn,
        Self::Hung,
        Self::Open,
        Self::Forced,
    ];

    /// The name under which the reason is exported, such as `latency`, `error` or `on_cpu`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Latency => "latency",
            Self::LastExit => "last_exit",
            Self::Error => "error",
            Self::OnCpu => "on_cpu",
            Self::OwnOnCpu => "own_on_cpu",
            Self::OffCpu => "off_cpu",
            Self::Idle => "idle",
            Self::Await => "await",
            Self::Delay => "delay",
            Self::Allocated => "alloc",
            Self::Allocations => "allocs",
            Self::Percentile => "percentile",
            Self::Always => "always",
            Self::OneIn => "one_in",
            Self::Hung => "hung",
            Self::Open => "open",
            Self::Forced => "forced",
        }
    }

    const fn bit(self) -> u32 {
        1 << self as u32
    }
}

impl Stats {
    /// How many spans were kept for that reason.
    pub fn kept_for(&self, reason: Reason) -> u64 {
        let is_of =
            |(name, _): &(&str, u64)| name.strip_prefix("spans.kept_for_") == Some(reason.as_str());
        self.iter().find(is_of).map_or(0, |(_, spans)| spans)
    }
}

impl Counters {
    /// Counts a span that was kept for these reasons.
    pub(crate) fn add_kept(&self, reasons: Reasons) {
        Self::add(&self.spans.kept, 1);
        for reason in reasons.iter() {
            let counter = match reason {
                Reason::Latency => &self.spans.kept_for_latency,
                Reason::LastExit => &self.spans.kept_for_last_exit,
                Reason::Error => &self.spans.kept_for_error,
                Reason::OnCpu => &self.spans.kept_for_on_cpu,
                Reason::OwnOnCpu => &self.spans.kept_for_own_on_cpu,
                Reason::OffCpu => &self.spans.kept_for_off_cpu,
                Reason::Idle => &self.spans.kept_for_idle,
                Reason::Await => &self.spans.kept_for_await,
                Reason::Delay => &self.spans.kept_for_delay,
                Reason::Allocated => &self.spans.kept_for_alloc,
                Reason::Allocations => &self.spans.kept_for_allocs,
                Reason::Percentile => &self.spans.kept_for_percentile,
                Reason::Always => &self.spans.kept_for_always,
                Reason::OneIn => &self.spans.kept_for_one_in,
                Reason::Hung => &self.spans.kept_for_hung,
                Reason::Open => &self.spans.kept_for_open,
                Reason::Forced => &self.spans.kept_for_forced,
            };
            Self::add(counter, 1);
        }
    }
}

/// A set of [`Reason`]s. `Display` joins their names with `|`.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Reasons(u32);

impl Reasons {
    /// Whether the set contains that reason.
    pub const fn contains(self, reason: Reason) -> bool {
        self.0 & reason.bit() != 0
    }

    /// Whether the set is empty: the span is not kept.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub(crate) fn are_of_allocations(self) -> bool {
        self.contains(Reason::Allocated) || self.contains(Reason::Allocations)
    }

    /// The reasons, in the order of [`Reason`].
    pub fn iter(self) -> impl Iterator<Item = Reason> {
        Reason::ALL.into_iter().filter(move |reason| self.contains(*reason))
    }

    pub(crate) const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// The verdict on a closed span. `is_rare` returns whether a wall time is longer than the rule's percentile.
    pub(crate) fn judge(keep: &Keep, closing: &Closing, is_rare: impl Fn(u64) -> bool) -> Self {
        let wall_ns = closing.account.wall_ns;
        let longer = |ns: u64, limit: Duration| u128::from(ns) > limit.as_nanos();
        // If the CPU time is unknown, no limit on it is exceeded.
        let is_known = !closing.account.is_cpu_time_unknown;
        let is_met = |condition| {
            let TimeBreakdown {
                on_cpu_ns,
                subtree_on_cpu_ns,
                off_cpu_ns,
                idle_ns,
                await_ns,
                delay_ns,
                after_last_exit_ns,
                allocations,
                ..
            } = closing.account;
            match condition {
                Condition::Latency(limit) => (longer(wall_ns, limit), Reason::Latency),
                Condition::LastExit(limit) => {
                    (longer(wall_ns.saturating_sub(after_last_exit_ns), limit), Reason::LastExit)
                }
                Condition::Error => (closing.has(FAILED), Reason::Error),
                Condition::ErrorSelf => (closing.has(FAILED_ITSELF), Reason::Error),
                Condition::OnCpu(limit) => {
                    (is_known && limit.is_exceeded_by(subtree_on_cpu_ns, wall_ns), Reason::OnCpu)
                }
                Condition::OwnOnCpu(limit) => {
                    (is_known && limit.is_exceeded_by(on_cpu_ns, wall_ns), Reason::OwnOnCpu)
                }
                Condition::OffCpu(limit) => {
                    (is_known && limit.is_exceeded_by(off_cpu_ns, wall_ns), Reason::OffCpu)
                }
                Condition::Idle(limit) => (limit.is_exceeded_by(idle_ns, wall_ns), Reason::Idle),
                Condition::Await(limit) => (limit.is_exceeded_by(await_ns, wall_ns), Reason::Await),
                Condition::Delay(limit) => (limit.is_exceeded_by(delay_ns, wall_ns), Reason::Delay),
                Condition::Allocated(limit) => {
                    (allocations.is_some_and(|all| all.allocated_bytes > limit), Reason::Allocated)
                }
                Condition::Allocations(limit) => {
                    (allocations.is_some_and(|all| all.allocations > limit), Reason::Allocations)
                }
                // Evaluated for every span, because the percentile is computed from all of them.
                Condition::Percentile { floor, .. } => {
                    (is_rare(wall_ns) && longer(wall_ns, floor), Reason::Percentile)
                }
                Condition::Always => (true, Reason::Always),
                Condition::OneIn(_) => (closing.has(CHOSEN), Reason::OneIn),
                // These apply to open spans only.
                Condition::Hung(_) | Condition::NeverHung | Condition::Open(_) => {
                    (false, Reason::Hung)
                }
            }
        };
        let forced = closing.has(FORCED).then_some(Reason::Forced);
        let met = keep.conditions().map(is_met).filter_map(|(is, reason)| is.then_some(reason));
        met.chain(forced).collect()
    }
}

impl FromIterator<Reason> for Reasons {
    fn from_iter<I: IntoIterator<Item = Reason>>(reasons: I) -> Self {
        Self(reasons.into_iter().fold(0, |set, reason| set | reason.bit()))
    }
}

impl fmt::Display for Reasons {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, reason) in self.iter().enumerate() {
            if i > 0 {
                f.write_str("|")?;
            }
            f.write_str(reason.as_str())?;
        }
        Ok(())
    }
}

impl fmt::Debug for Reasons {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::super::TimeOrShare;
    use super::*;
    use crate::sys::Allocations;

    const MS: Duration = Duration::from_millis(1);
    const RULE: Keep = Keep::slower_than(Duration::from_millis(250));

    fn judged(keep: Keep, closing: &Closing) -> String {
        Reasons::judge(&keep, closing, |_| true).to_string()
    }

    fn judge(keep: Keep, wall_ns: u64, flags: u32) -> String {
        judged(keep, &Closing::for_test(wall_ns, flags))
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
    fn each_reason_has_its_own_counter() {
        let counters = Counters::default();
        for (number, reason) in Reason::ALL.into_iter().enumerate() {
            (0..=number).for_each(|_| counters.add_kept([reason].into_iter().collect()));
        }
        let counted = Reason::ALL.map(|reason| counters.snapshot().kept_for(reason));
        assert_eq!(counted.to_vec(), (1..=17).collect::<Vec<u64>>());
    }

    #[test]
    fn never_keeps_only_forced_spans() {
        assert_eq!(judge(Keep::never(), u64::MAX, FAILED | CHOSEN), "");
        assert_eq!(judge(Keep::never(), 1, FORCED), "forced");
        assert_eq!(judge(Keep::when(Condition::Always), 0, 0), "always");
    }

    #[test]
    fn each_part_of_the_time_has_its_condition() {
        let mut closing = Closing::for_test(10_000_000, 0);
        closing.account.on_cpu_ns = 1_000_001;
        closing.account.subtree_on_cpu_ns = 12_000_000;
        closing.account.off_cpu_ns = 2_000_001;
        closing.account.idle_ns = 6_900_000;
        closing.account.await_ns = 4_000_001;
        closing.account.delay_ns = 500_001;
        closing.account.after_last_exit_ns = 3_000_000;
        closing.account.allocations =
            Some(Allocations { allocated_bytes: 1_000, allocations: 10, ..Allocations::default() });
        for (condition, reason) in [
            (Condition::Allocated(999), "alloc"),
            (Condition::Allocated(1_000), ""),
            (Condition::Allocations(9), "allocs"),
            (Condition::Allocations(10), ""),
            (Condition::OnCpu(TimeOrShare::Time(11 * MS)), "on_cpu"),
            (Condition::OnCpu(TimeOrShare::Time(12 * MS)), ""),
            (Condition::OnCpu(TimeOrShare::Percent(100)), "on_cpu"),
            (Condition::OwnOnCpu(TimeOrShare::Time(MS)), "own_on_cpu"),
            (Condition::OwnOnCpu(TimeOrShare::Time(2 * MS)), ""),
            (Condition::OffCpu(TimeOrShare::Time(2 * MS)), "off_cpu"),
            (Condition::OffCpu(TimeOrShare::Percent(20)), "off_cpu"),
            (Condition::OffCpu(TimeOrShare::Percent(21)), ""),
            (Condition::Idle(TimeOrShare::Percent(68)), "idle"),
            (Condition::Idle(TimeOrShare::Percent(69)), ""),
            (Condition::Await(TimeOrShare::Time(4 * MS)), "await"),
            (Condition::Await(TimeOrShare::Time(5 * MS)), ""),
            (Condition::Await(TimeOrShare::Percent(40)), "await"),
            (Condition::Await(TimeOrShare::Percent(41)), ""),
            (Condition::Delay(TimeOrShare::Time(MS / 2)), "delay"),
            (Condition::Delay(TimeOrShare::Time(MS)), ""),
            (Condition::Delay(TimeOrShare::Percent(5)), "delay"),
            (Condition::Delay(TimeOrShare::Percent(6)), ""),
            (Condition::LastExit(6 * MS), "last_exit"),
            (Condition::LastExit(7 * MS), ""),
        ] {
            assert_eq!(judged(Keep::when(condition), &closing), reason, "{condition}");
        }
    }

    #[test]
    fn a_rare_span_must_also_be_longer_than_the_floor() {
        let keep = Keep::when(Condition::Percentile { millionths: 990_000, floor: MS });
        let closing = |wall_ns| Closing::for_test(wall_ns, 0);
        assert_eq!(judged(keep, &closing(1_000_001)), "percentile");
        assert_eq!(judged(keep, &closing(1_000_000)), "");
        assert!(Reasons::judge(&keep, &closing(u64::MAX), |_| false).is_empty());
        // Short spans are counted, too.
        let seen = std::cell::Cell::new(0);
        Reasons::judge(&keep, &closing(5), |wall_ns| {
            seen.set(wall_ns);
            true
        });
        assert_eq!(seen.get(), 5);
    }
}
