//! When a span is kept.

use std::fmt;
use std::num::NonZeroU32;
use std::time::Duration;

use crate::text::ExactBytes;

/// One condition for keeping a span. In the text form that `TRACING_PROFILING` takes:
///
/// | text | condition |
/// |---|---|
/// | `250ms` | [`Latency`](Self::Latency) |
/// | `last_exit>250ms` | [`LastExit`](Self::LastExit) |
/// | `error`, `error=self` | [`Error`](Self::Error), [`ErrorSelf`](Self::ErrorSelf) |
/// | `on_cpu>100ms`, `on_cpu>80%` | [`OnCpu`](Self::OnCpu) |
/// | `own_on_cpu>100ms`, `own_on_cpu>80%` | [`OwnOnCpu`](Self::OwnOnCpu) |
/// | `off_cpu>50ms`, `off_cpu>80%` | [`OffCpu`](Self::OffCpu) |
/// | `idle>1s`, `idle>80%` | [`Idle`](Self::Idle) |
/// | `await>1s`, `await>80%` | [`Await`](Self::Await) |
/// | `delay>50ms`, `delay>10%` | [`Delay`](Self::Delay) |
/// | `alloc>100MB` | [`Allocated`](Self::Allocated) |
/// | `allocs>1000000` | [`Allocations`](Self::Allocations) |
/// | `p99>20ms`, `p99.9`  | [`Percentile`](Self::Percentile) |
/// | `always` | [`Always`](Self::Always) |
/// | `one_in=1000` | [`OneIn`](Self::OneIn) |
/// | `hung>30s`, `hung=off` | [`Hung`](Self::Hung), [`NeverHung`](Self::NeverHung) |
/// | `open>5min` | [`Open`](Self::Open) |
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Condition {
    /// The time from its creation to its close is longer than this.
    Latency(Duration),
    /// The time from its creation to its last exit is longer than this. A span stays open while a child is open; this
    /// condition ignores the time that a child task takes after the span's last exit.
    LastExit(Duration),
    /// It failed: an `ERROR` event in it or in a span inside it, the field `otel.status_code` set to `ERROR`, or a
    /// panic that unwinds through it. A span that is entered only while its thread already unwinds, for example by the
    /// drop of a future, has not failed.
    Error,
    /// Like [`Error`](Self::Error), but failures in profiled spans inside it do not count.
    ErrorSelf,
    /// The on-CPU time of its subtree, its child spans on other threads and in other tasks included, is longer than
    /// this. It can be longer than wall time. To judge this and the next two, the thread's CPU clock is read at each
    /// enter and exit, for this one also at those of child spans that run elsewhere, which takes 1 µs for both.
    OnCpu(TimeOrShare),
    /// Its own on-CPU time, while threads ran in it, is longer than this.
    OwnOnCpu(TimeOrShare),
    /// Its own off-CPU time, while it was entered and its thread did not run (blocked or preempted), is longer than
    /// this.
    OffCpu(TimeOrShare),
    /// Its own idle time, while it was open but not entered, is longer than this. This is `time.idle` of
    /// `tracing-subscriber`; on-CPU and off-CPU time together are `time.busy`.
    Idle(TimeOrShare),
    /// The part of its own idle time in which its future awaited something and had not been woken is longer than this:
    /// [`TimeBreakdown::awaiting`](crate::TimeBreakdown::awaiting). Known only of futures that are polled through
    /// `Profiled`.
    Await(TimeOrShare),
    /// The part of its own idle time in which its future had been woken and not been polled yet is longer than this: its
    /// executor had other things to do. Known only where [`Await`](Self::Await) is.
    Delay(TimeOrShare),
    /// It allocated more than this number of bytes, with the spans inside it: `allocated_bytes` of
    /// [`TimeBreakdown::allocations`](crate::TimeBreakdown::allocations). This and the next one are known only if the
    /// program's global allocator is a [`ProfilingAllocator`](crate::ProfilingAllocator).
    Allocated(u64),
    /// It made more than this number of allocations, with the spans inside it.
    Allocations(u64),
    /// It took longer than this percentile of the spans with its name and rule in the last five to ten minutes, and
    /// longer than `floor`. The condition takes effect once enough spans were counted that ten are expected above the
    /// percentile, and not before 100 spans.
    Percentile {
        /// In millionths: 990,000 for `p99`.
        millionths: u32,
        /// Spans shorter than this are not kept, however rare they are.
        floor: Duration,
    },
    /// Every span.
    Always,
    /// One in this number of spans with its name and rule, for example as a baseline for the slow ones.
    OneIn(NonZeroU32),
    /// It stays entered for longer than this without an exit. Its profile is then exported while it still hangs.
    ///
    /// One of its threads must be sampled: with [`Source::None`](crate::Source::None) no hang is detected.
    ///
    /// Without this and [`NeverHung`](Self::NeverHung), the limit is ten times the shortest time in the other
    /// conditions, and at least 10 seconds. If they contain no time, there is no limit.
    Hung(Duration),
    /// Never treat the span as hanging.
    NeverHung,
    /// It is open for longer than this, entered or not. Its profile up to then is exported while it is open.
    Open(Duration),
}

/// A time, or a share of a span's wall time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TimeOrShare {
    /// An absolute time.
    Time(Duration),
    /// A percentage of the wall time. Applies only to spans of at least 1 ms; the share of a shorter one means little.
    Percent(u32),
}

/// The latency of the default rules.
pub(super) const DEFAULT_LATENCY: Duration = Duration::from_millis(250);
/// Shares are not judged for shorter spans.
const SHORTEST_FOR_SHARES: Duration = Duration::from_millis(1);
/// A span hangs after this multiple of the time that its rule allows.
const HUNG_TIMES: u32 = 10;
const SHORTEST_HUNG: Duration = Duration::from_secs(10);

impl TimeOrShare {
    /// Whether `ns`, of a wall time of `wall_ns`, exceeds it.
    pub(crate) fn is_exceeded_by(self, ns: u64, wall_ns: u64) -> bool {
        match self {
            Self::Time(time) => u128::from(ns) > time.as_nanos(),
            Self::Percent(percent) => {
                u128::from(wall_ns) >= SHORTEST_FOR_SHARES.as_nanos()
                    && u128::from(ns) * 100 > u128::from(wall_ns) * u128::from(percent)
            }
        }
    }

    /// The wall time of the shortest span that can exceed it.
    const fn shortest(self) -> Duration {
        match self {
            Self::Time(time) => time,
            Self::Percent(_) => SHORTEST_FOR_SHARES,
        }
    }
}

/// When to keep a span that a rule matches: if any of its conditions is met.
///
/// `Display` prints the text form that can be parsed.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Keep([Option<Condition>; SLOTS]);

/// The number of conditions that a [`Keep`] can have: one of each kind, and both a time and a share where both exist.
const SLOTS: usize = 22;

/// The slots of [`TimeOrShare::Percent`] conditions. Each follows the slot for a time of the same kind.
const SHARES: u32 = 1 << 4 | 1 << 6 | 1 << 8 | 1 << 10 | 1 << 12 | 1 << 14;

impl Condition {
    /// Its index in a [`Keep`].
    const fn slot(self) -> usize {
        match self {
            Self::Latency(_) => 0,
            Self::LastExit(_) => 1,
            Self::Error | Self::ErrorSelf => 2,
            Self::OnCpu(TimeOrShare::Time(_)) => 3,
            Self::OnCpu(TimeOrShare::Percent(_)) => 4,
            Self::OwnOnCpu(TimeOrShare::Time(_)) => 5,
            Self::OwnOnCpu(TimeOrShare::Percent(_)) => 6,
            Self::OffCpu(TimeOrShare::Time(_)) => 7,
            Self::OffCpu(TimeOrShare::Percent(_)) => 8,
            Self::Idle(TimeOrShare::Time(_)) => 9,
            Self::Idle(TimeOrShare::Percent(_)) => 10,
            Self::Await(TimeOrShare::Time(_)) => 11,
            Self::Await(TimeOrShare::Percent(_)) => 12,
            Self::Delay(TimeOrShare::Time(_)) => 13,
            Self::Delay(TimeOrShare::Percent(_)) => 14,
            Self::Allocated(_) => 15,
            Self::Allocations(_) => 16,
            Self::Percentile { .. } => 17,
            Self::Always => 18,
            Self::OneIn(_) => 19,
            Self::Hung(_) | Self::NeverHung => 20,
            Self::Open(_) => 21,
        }
    }

    /// Its limit, if it judges how long a span was or where its time went.
    const fn amount(self) -> Option<TimeOrShare> {
        match self {
            Self::Latency(time) | Self::LastExit(time) => Some(TimeOrShare::Time(time)),
            Self::OnCpu(amount)
            | Self::OwnOnCpu(amount)
            | Self::OffCpu(amount)
            | Self::Idle(amount)
            | Self::Await(amount)
            | Self::Delay(amount) => Some(amount),
            _ => None,
        }
    }

    /// The time that it contains.
    fn time(self) -> Option<Duration> {
        match (self, self.amount()) {
            (_, Some(TimeOrShare::Time(time))) => Some(time),
            (Self::Percentile { floor, .. }, _) if !floor.is_zero() => Some(floor),
            _ => None,
        }
    }

    /// Whether it replaces `other`, which has the same slot and came first.
    const fn beats(self, other: Self) -> bool {
        match (self, other) {
            (Self::ErrorSelf, Self::Error) => false,
            (Self::OneIn(number), Self::OneIn(other)) => number.get() <= other.get(),
            (Self::Allocated(limit), Self::Allocated(other))
            | (Self::Allocations(limit), Self::Allocations(other)) => limit <= other,
            (Self::Open(time), Self::Open(other)) => time.as_nanos() <= other.as_nanos(),
            _ => match (self.amount(), other.amount()) {
                (Some(TimeOrShare::Time(time)), Some(TimeOrShare::Time(other))) => {
                    time.as_nanos() <= other.as_nanos()
                }
                (Some(TimeOrShare::Percent(share)), Some(TimeOrShare::Percent(other))) => {
                    share <= other
                }
                _ => true,
            },
        }
    }
}

impl Keep {
    /// Never keep the span: it is not profiled and costs nothing.
    pub const fn never() -> Self {
        Self([None; SLOTS])
    }

    /// Keep a span if this condition is met.
    pub const fn when(condition: Condition) -> Self {
        Self::never().or(condition)
    }

    /// Keep a span if the time from its creation to its close is longer than `latency`.
    pub const fn slower_than(latency: Duration) -> Self {
        Self::when(Condition::Latency(latency))
    }

    /// Keep a span if it failed; see [`Condition::Error`].
    pub const fn failed() -> Self {
        Self::when(Condition::Error)
    }

    /// Also keep a span if it took longer than `latency`. If called several times, the shortest latency applies.
    #[must_use]
    pub const fn or_slower_than(self, latency: Duration) -> Self {
        self.or(Condition::Latency(latency))
    }

    /// Also keep a span if it failed; see [`Condition::Error`].
    #[must_use]
    pub const fn or_failed(self) -> Self {
        self.or(Condition::Error)
    }

    /// Also keep a span if this condition is met. Of two conditions of the same kind, the one that keeps more spans
    /// applies. For [`Percentile`](Condition::Percentile), and for [`Hung`](Condition::Hung) and
    /// [`NeverHung`](Condition::NeverHung), the last one applies.
    #[must_use]
    #[expect(clippy::indexing_slicing, reason = "there is no `get_mut` in constants yet")]
    pub const fn or(mut self, condition: Condition) -> Self {
        let slot = &mut self.0[condition.slot()];
        match *slot {
            Some(other) if !condition.beats(other) => {}
            _ => *slot = Some(condition),
        }
        self
    }

    /// The conditions, in the order of [`Condition`].
    pub fn conditions(&self) -> impl Iterator<Item = Condition> {
        self.0.into_iter().flatten()
    }

    pub(crate) fn percentile(&self) -> Option<u32> {
        self.conditions().find_map(|condition| match condition {
            Condition::Percentile { millionths, .. } => Some(millionths),
            _ => None,
        })
    }

    pub(crate) fn one_in(&self) -> Option<NonZeroU32> {
        self.conditions().find_map(|condition| match condition {
            Condition::OneIn(number) => Some(number),
            _ => None,
        })
    }

    pub(crate) fn open_limit(&self) -> Option<Duration> {
        self.conditions().find_map(|condition| match condition {
            Condition::Open(limit) => Some(limit),
            _ => None,
        })
    }

    /// How long a span may stay entered without an exit before it hangs.
    pub(crate) fn hung_limit(&self) -> Option<Duration> {
        let explicit = self.conditions().find_map(|condition| match condition {
            Condition::Hung(limit) => Some(Some(limit)),
            Condition::NeverHung => Some(None),
            _ => None,
        });
        explicit.unwrap_or_else(|| {
            let usual = self.conditions().filter_map(Condition::time).min()?;
            Some(usual.saturating_mul(HUNG_TIMES).max(SHORTEST_HUNG))
        })
    }

    /// The wall time above which a span may be kept because of its length or because of where its time went. `None` if
    /// neither can keep it. Spans that run on several threads at once can have more on-CPU time than wall time, and are
    /// judged in any case.
    pub(crate) fn shortest(&self) -> Option<Duration> {
        self.conditions().filter_map(Condition::amount).map(TimeOrShare::shortest).min()
    }

    /// How long a span is entered before it is sampled, unless the configuration sets it.
    pub(crate) fn arm_after(&self) -> Duration {
        const SHARE: u32 = 20;
        const LEAST: Duration = Duration::from_millis(1);
        const MOST: Duration = Duration::from_millis(20);
        // An idle span has no samples.
        let is_of_idle = |condition: &Condition| {
            matches!(condition, Condition::Idle(_) | Condition::Await(_) | Condition::Delay(_))
        };
        let sampled = self.conditions().filter(|condition| !is_of_idle(condition));
        let shortest = |condition: Condition| condition.amount().map(TimeOrShare::shortest);
        let times = sampled.filter_map(|condition| condition.time().or(shortest(condition)));
        let least = times.min().or(self.shortest());
        let is_always = self.conditions().any(|condition| condition == Condition::Always);
        if is_always || least == Some(Duration::ZERO) {
            return Duration::ZERO;
        }
        least.map_or(LEAST, |least| (least / SHARE).clamp(LEAST, MOST))
    }

    /// Whether it has conditions on allocations.
    pub(crate) fn judges_allocations(&self) -> bool {
        let is_one =
            |condition| matches!(condition, Condition::Allocated(_) | Condition::Allocations(_));
        self.conditions().any(is_one)
    }

    /// Whether a span that fails is kept.
    pub(crate) fn judges_errors(&self) -> bool {
        let is_one = |condition| matches!(condition, Condition::Error | Condition::ErrorSelf);
        self.conditions().any(is_one)
    }

    pub(crate) fn is_never(&self) -> bool {
        self.conditions().all(|condition| condition == Condition::NeverHung)
    }

    /// A bit for each kind of condition in it.
    pub(crate) fn kinds(&self) -> u32 {
        let slots = self.conditions().fold(0, |slots, condition| slots | 1 << condition.slot());
        slots | (slots & SHARES) >> 1
    }
}

impl fmt::Debug for Keep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.conditions()).finish()
    }
}

impl fmt::Display for TimeOrShare {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Time(time) => write!(f, "{}", Time(*time)),
            Self::Percent(percent) => write!(f, "{percent}%"),
        }
    }
}

/// A duration without blanks, as in rules.
struct Time(Duration);

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&humantime::format_duration(self.0).to_string().replace(' ', ""))
    }
}

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Latency(time) => write!(f, "{}", Time(*time)),
            Self::LastExit(time) => write!(f, "last_exit>{}", Time(*time)),
            Self::Error => f.write_str("error"),
            Self::ErrorSelf => f.write_str("error=self"),
            Self::OnCpu(amount) => write!(f, "on_cpu>{amount}"),
            Self::OwnOnCpu(amount) => write!(f, "own_on_cpu>{amount}"),
            Self::OffCpu(amount) => write!(f, "off_cpu>{amount}"),
            Self::Idle(amount) => write!(f, "idle>{amount}"),
            Self::Await(amount) => write!(f, "await>{amount}"),
            Self::Delay(amount) => write!(f, "delay>{amount}"),
            Self::Allocated(bytes) => write!(f, "alloc>{}", ExactBytes(*bytes)),
            Self::Allocations(count) => write!(f, "allocs>{count}"),
            Self::Percentile { millionths, floor } => {
                write!(f, "p{}", f64::from(*millionths) / 10_000.0)?;
                if floor.is_zero() { Ok(()) } else { write!(f, ">{}", Time(*floor)) }
            }
            Self::Always => f.write_str("always"),
            Self::OneIn(number) => write!(f, "one_in={number}"),
            Self::Hung(limit) => write!(f, "hung>{}", Time(*limit)),
            Self::NeverHung => f.write_str("hung=off"),
            Self::Open(limit) => write!(f, "open>{}", Time(*limit)),
        }
    }
}

impl fmt::Display for Keep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_never() {
            return f.write_str("off");
        }
        for (number, condition) in self.conditions().enumerate() {
            if number > 0 {
                f.write_str("|")?;
            }
            write!(f, "{condition}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn arm_after_depends_on_the_shortest_time_that_keeps_a_span() {
        let ms = Duration::from_millis;
        let slower = |limit| Keep::slower_than(ms(limit));
        let micros = Duration::from_micros;
        assert_eq!(slower(250).or_failed().arm_after(), micros(12_500));
        assert_eq!(slower(100).arm_after(), ms(5));
        assert_eq!([slower(5).arm_after(), slower(60_000).arm_after()], [ms(1), ms(20)]);
        assert_eq!(slower(1_000).or_slower_than(ms(60)).arm_after(), ms(3));
        assert_eq!(Keep::failed().arm_after(), ms(1));
        // Both keep every span.
        assert_eq!(
            [slower(0).arm_after(), slower(100).or(Condition::Always).arm_after()],
            [ms(0); 2]
        );
    }

    /// While a span is idle, there is nothing to sample.
    #[test]
    fn arm_after_does_not_depend_on_limits_of_idle_time() {
        let ms = Duration::from_millis;
        for condition in [Condition::Idle, Condition::Await, Condition::Delay] {
            for amount in [TimeOrShare::Time(ms(20)), TimeOrShare::Percent(80)] {
                let keep = Keep::slower_than(ms(200)).or(condition(amount));
                assert_eq!(keep.arm_after(), ms(10), "{keep}");
            }
            // Unless the rule has no other limit.
            assert_eq!(Keep::when(condition(TimeOrShare::Time(ms(200)))).arm_after(), ms(10));
        }
    }

    #[test]
    fn of_two_conditions_of_a_kind_the_one_that_keeps_more_applies() {
        let keep = Keep::slower_than(3 * MS).or_slower_than(2 * MS).or_slower_than(4 * MS);
        assert_eq!(keep, Keep::slower_than(2 * MS));
        let keep = Keep::when(Condition::ErrorSelf).or_failed().or(Condition::ErrorSelf);
        assert_eq!(keep, Keep::failed());
        let both = Keep::when(Condition::OnCpu(TimeOrShare::Percent(80)))
            .or(Condition::OnCpu(TimeOrShare::Time(MS)))
            .or(Condition::OnCpu(TimeOrShare::Percent(90)));
        assert_eq!(both.to_string(), "on_cpu>1ms|on_cpu>80%");
    }

    #[test]
    fn the_default_hung_limit_is_ten_times_the_shortest_time_and_at_least_ten_seconds() {
        let second = Duration::from_secs(1);
        let limit = |keep: Keep| keep.hung_limit();
        assert_eq!(limit(Keep::slower_than(250 * MS)), Some(10 * second));
        assert_eq!(limit(Keep::slower_than(3 * second)), Some(30 * second));
        let both = Keep::slower_than(3 * second).or(Condition::Idle(TimeOrShare::Time(2 * second)));
        assert_eq!(limit(both), Some(20 * second));
        assert_eq!(limit(Keep::failed()), None);
        assert_eq!(limit(Keep::when(Condition::Hung(MS))), Some(MS));
        assert_eq!(limit(Keep::slower_than(MS).or(Condition::NeverHung)), None);
    }

    #[test]
    fn shares_apply_only_to_spans_of_at_least_a_millisecond() {
        let most = TimeOrShare::Percent(80);
        assert!(!most.is_exceeded_by(801, 1_000));
        assert!(most.is_exceeded_by(800_001, 1_000_000));
        assert!(!most.is_exceeded_by(800_000, 1_000_000));
        assert!(TimeOrShare::Time(MS).is_exceeded_by(1_000_001, 0));
        assert!(!TimeOrShare::Time(MS).is_exceeded_by(1_000_000, 0));
    }

    #[test]
    fn a_keep_that_keeps_nothing_is_never() {
        assert!(Keep::never().is_never());
        assert!(Keep::when(Condition::NeverHung).is_never());
        assert!(!Keep::when(Condition::Hung(MS)).is_never());
        assert!(!Keep::when(Condition::Open(MS)).is_never());
        assert!(!Keep::when(Condition::Always).is_never());
    }
}
