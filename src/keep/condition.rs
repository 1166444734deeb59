//! When a span is kept.

use std::fmt;
use std::num::NonZeroU32;
use std::time::Duration;

use crate::facts::{Measure, Unit};
use crate::text::ExactBytes;

/// One condition for keeping a span. Each begins with the text form that `TRACING_PROFILING` takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Condition {
    /// `250ms`, of [`Measure::Wall`], and `on_cpu>100ms`, `on_cpu>80%` and others: the value of a measure is larger than a
    /// threshold. [`Measure`] says which measures have such a condition, and its name. An unknown value does not meet it.
    Above(Measure, Threshold),
    /// `error`: the span failed, by an `ERROR` event in it or in a span inside it, the field `otel.status_code` set to
    /// `ERROR`, or a panic that unwinds through it. A span that is entered only while its thread already unwinds, for
    /// example by the drop of a future, has not failed.
    Error,
    /// `error=self`: like [`Error`](Self::Error), but failures in profiled spans inside it do not count.
    ErrorSelf,
    /// `p99>20ms`, `p99.9`: the span took longer than this percentile of the spans with its name, route and rule in the
    /// last five to ten minutes, and longer than `floor`. The condition takes effect once enough spans were counted that
    /// ten are expected above the percentile, and not before 100 spans.
    Percentile {
        /// In millionths: 990,000 for `p99`.
        millionths: u32,
        /// Spans shorter than this are not kept, however rare they are.
        floor: Duration,
    },
    /// `always`: every span.
    Always,
    /// `one_in=1000`: one in this number of spans, chosen at random, for example as a baseline for the slow ones.
    OneIn(NonZeroU32),
    /// `hung>30s`: the span stays entered for longer than this without an exit. Its profile is then exported while it
    /// still hangs. One of its threads must be sampled: with [`Source::None`](crate::Source::None) no hang is detected.
    ///
    /// Without this and [`NeverHung`](Self::NeverHung), the limit is ten times the shortest time in the other
    /// conditions, and at least 10 seconds. If they contain no time, there is no limit.
    Hung(Duration),
    /// `hung=off`: never treat the span as hanging.
    NeverHung,
    /// `open>5min`: the span is open for longer than this, entered or not. Its profile up to then is exported while it is
    /// open.
    Open(Duration),
}

impl Condition {
    /// Whether it can be met: its measure has a condition, and its threshold is of the measure's unit.
    pub(crate) fn is_possible(self) -> bool {
        let Self::Above(measure, threshold) = self else { return true };
        let is_time = measure.unit() == Unit::Nanoseconds;
        let is_of_unit = match threshold {
            Threshold::Time(_) => is_time,
            Threshold::Percent(_) => is_time && measure != Measure::Wall,
            Threshold::Number(_) => !is_time,
        };
        is_of_unit && !measure.row().condition.is_empty()
    }

    const fn slot(self) -> usize {
        let other = match self {
            Self::Above(measure, Threshold::Percent(_)) => return 2 * measure as usize + 1,
            Self::Above(measure, _) => return 2 * measure as usize,
            Self::Error | Self::ErrorSelf => 0,
            Self::Percentile { .. } => 1,
            Self::Always => 2,
            Self::OneIn(_) => 3,
            Self::Hung(_) | Self::NeverHung => 4,
            Self::Open(_) => 5,
        };
        2 * Measure::ALL.len() + other
    }

    /// The wall time of the shortest span that can meet it, if it judges how long a span was or where its time went.
    fn shortest(self) -> Option<Duration> {
        match self {
            Self::Above(_, Threshold::Time(time)) => Some(time),
            Self::Above(_, Threshold::Percent(_)) => Some(SHORTEST_FOR_SHARES),
            _ => None,
        }
    }

    fn time(self) -> Option<Duration> {
        match self {
            Self::Above(_, Threshold::Time(time)) => Some(time),
            Self::Percentile { floor, .. } if !floor.is_zero() => Some(floor),
            _ => None,
        }
    }

    /// Whether it replaces `other`, which has the same slot and came first.
    const fn beats(self, other: Self) -> bool {
        match (self, other) {
            (Self::ErrorSelf, Self::Error) => false,
            (Self::OneIn(number), Self::OneIn(other)) => number.get() <= other.get(),
            (Self::Open(time), Self::Open(other))
            | (Self::Above(_, Threshold::Time(time)), Self::Above(_, Threshold::Time(other))) => {
                time.as_nanos() <= other.as_nanos()
            }
            (
                Self::Above(_, Threshold::Percent(one)),
                Self::Above(_, Threshold::Percent(other)),
            ) => one <= other,
            (Self::Above(_, Threshold::Number(one)), Self::Above(_, Threshold::Number(other))) => {
                one <= other
            }
            _ => true,
        }
    }
}

/// What a measure is compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Threshold {
    /// An absolute time.
    Time(Duration),
    /// A percentage of the wall time. Applies only to spans of at least 1 ms; the share of a shorter one means little.
    Percent(u32),
    /// A number of bytes or events.
    Number(u64),
}

pub(super) const DEFAULT_LATENCY: Duration = Duration::from_millis(250);
/// Shares are not judged for shorter spans.
const SHORTEST_FOR_SHARES: Duration = Duration::from_millis(1);
/// A span hangs after this multiple of the time that its rule allows.
const HUNG_TIMES: u32 = 10;
const SHORTEST_HUNG: Duration = Duration::from_secs(10);

impl Threshold {
    pub(crate) fn is_exceeded_by(self, value: u64, wall_ns: u64) -> bool {
        match self {
            Self::Time(time) => u128::from(value) > time.as_nanos(),
            Self::Percent(percent) => {
                u128::from(wall_ns) >= SHORTEST_FOR_SHARES.as_nanos()
                    && u128::from(value) * 100 > u128::from(wall_ns) * u128::from(percent)
            }
            Self::Number(number) => value > number,
        }
    }
}

/// When to keep a span that a rule matches: if any of its conditions is met.
///
/// `Display` prints the text form that can be parsed.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[must_use]
pub struct Keep([Option<Condition>; SLOTS]);

/// The conditions that a [`Keep`] can have: of each measure a share and another threshold, and one of each other kind.
const SLOTS: usize = 2 * Measure::ALL.len() + 6;

/// The slots of shares. Each follows the slot for another threshold of the same measure.
const SHARES: u64 = 0xaaaa_aaaa_aaaa_aaaa & ((1 << (2 * Measure::ALL.len())) - 1);

const _: () = assert!(SLOTS <= 64);

impl Keep {
    pub(super) const NEVER: &'static Self = &Self::never();

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
        Self::when(Condition::Above(Measure::Wall, Threshold::Time(latency)))
    }

    /// Keep a span if it failed; see [`Condition::Error`].
    pub const fn failed() -> Self {
        Self::when(Condition::Error)
    }

    /// Also keep a span if it took longer than `latency`. If called several times, the shortest latency applies.
    pub const fn or_slower_than(self, latency: Duration) -> Self {
        self.or(Condition::Above(Measure::Wall, Threshold::Time(latency)))
    }

    /// Also keep a span if it failed; see [`Condition::Error`].
    pub const fn or_failed(self) -> Self {
        self.or(Condition::Error)
    }

    /// Also keep a span if this condition is met. Of two conditions of the same kind, the one that keeps more spans
    /// applies. For [`Percentile`](Condition::Percentile), and for [`Hung`](Condition::Hung) and
    /// [`NeverHung`](Condition::NeverHung), the last one applies.
    pub const fn or(mut self, condition: Condition) -> Self {
        self.add(condition);
        self
    }

    #[expect(clippy::indexing_slicing, reason = "there is no `get_mut` in constants yet")]
    pub(super) const fn add(&mut self, condition: Condition) {
        let slot = &mut self.0[condition.slot()];
        match *slot {
            Some(other) if !condition.beats(other) => {}
            _ => *slot = Some(condition),
        }
    }

    /// The conditions, in the order of [`Condition`].
    pub fn conditions(&self) -> impl Iterator<Item = Condition> {
        self.0.iter().flatten().copied()
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
        self.conditions().filter_map(Condition::shortest).min()
    }

    /// How long a span is entered before it is sampled, unless the configuration sets it.
    pub(crate) fn sampling_delay(&self) -> Duration {
        const SHARE: u32 = 20;
        const LEAST: Duration = Duration::from_millis(1);
        const MOST: Duration = Duration::from_millis(20);
        // An idle span has no samples.
        let is_of_idle = |condition: &Condition| {
            let idle = |measure| {
                measure == Measure::Idle || Measure::Idle.parts().any(|part| part == measure)
            };
            matches!(condition, Condition::Above(measure, _) if idle(*measure))
        };
        let sampled = self.conditions().filter(|condition| !is_of_idle(condition));
        let times = sampled.filter_map(|condition| condition.time().or(condition.shortest()));
        let least = times.min().or(self.shortest());
        let is_always = self.conditions().any(|condition| condition == Condition::Always);
        if is_always || least == Some(Duration::ZERO) {
            return Duration::ZERO;
        }
        least.map_or(LEAST, |least| (least / SHARE).clamp(LEAST, MOST))
    }

    pub(crate) fn judges_allocations(&self) -> bool {
        use Measure::{Allocated, Allocations};
        let is_one = |condition| matches!(condition, Condition::Above(Allocated | Allocations, _));
        self.conditions().any(is_one)
    }

    pub(crate) fn judges_errors(&self) -> bool {
        let is_one = |condition| matches!(condition, Condition::Error | Condition::ErrorSelf);
        self.conditions().any(is_one)
    }

    pub(crate) fn is_never(&self) -> bool {
        self.conditions().all(|condition| condition == Condition::NeverHung)
    }

    /// A bit for each kind of condition in it.
    pub(crate) fn kinds(&self) -> u64 {
        let slots = self.conditions().fold(0, |slots, condition| slots | 1 << condition.slot());
        slots | (slots & SHARES) >> 1
    }
}

/// Apart from its caller, whose frame must be small.
#[inline(never)]
pub(super) fn boxed(keep: &Keep) -> Box<Keep> {
    Box::new(*keep)
}

impl fmt::Debug for Keep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.conditions()).finish()
    }
}

impl fmt::Display for Threshold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Time(time) => f.write_str(&without_blanks(*time)),
            Self::Percent(percent) => write!(f, "{percent}%"),
            Self::Number(number) => write!(f, "{number}"),
        }
    }
}

/// A duration, as in rules.
fn without_blanks(time: Duration) -> String {
    // Little stack: a span can close on a small one.
    let mut text = humantime::format_duration(time).to_string();
    text.retain(|character| character != ' ');
    text
}

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Above(Measure::Wall, threshold) => write!(f, "{threshold}"),
            Self::Above(measure, Threshold::Number(bytes)) if measure.unit() == Unit::Bytes => {
                write!(f, "{}>{}", measure.row().condition, ExactBytes(*bytes))
            }
            Self::Above(measure, threshold) => write!(f, "{}>{threshold}", measure.row().condition),
            Self::Error => f.write_str("error"),
            Self::ErrorSelf => f.write_str("error=self"),
            Self::Percentile { millionths, floor } => {
                write!(f, "p{}", f64::from(*millionths) / 10_000.0)?;
                if floor.is_zero() { Ok(()) } else { write!(f, ">{}", without_blanks(*floor)) }
            }
            Self::Always => f.write_str("always"),
            Self::OneIn(number) => write!(f, "one_in={number}"),
            Self::Hung(limit) => write!(f, "hung>{}", without_blanks(*limit)),
            Self::NeverHung => f.write_str("hung=off"),
            Self::Open(limit) => write!(f, "open>{}", without_blanks(*limit)),
        }
    }
}

impl fmt::Display for Keep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_never() {
            return f.write_str("off");
        }
        for (number, condition) in self.conditions().enumerate() {
            write!(f, "{}{condition}", if number == 0 { "" } else { "|" })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn sampling_delay_depends_on_the_shortest_time_that_keeps_a_span() {
        let ms = Duration::from_millis;
        let slower = |limit| Keep::slower_than(ms(limit));
        let micros = Duration::from_micros;
        assert_eq!(slower(250).or_failed().sampling_delay(), micros(12_500));
        assert_eq!(slower(100).sampling_delay(), ms(5));
        assert_eq!([slower(5).sampling_delay(), slower(60_000).sampling_delay()], [ms(1), ms(20)]);
        assert_eq!(slower(1_000).or_slower_than(ms(60)).sampling_delay(), ms(3));
        assert_eq!(Keep::failed().sampling_delay(), ms(1));
        // Both keep every span.
        assert_eq!(
            [slower(0).sampling_delay(), slower(100).or(Condition::Always).sampling_delay()],
            [ms(0); 2]
        );
    }

    /// While a span is idle, there is nothing to sample.
    #[test]
    fn sampling_delay_does_not_depend_on_limits_of_idle_time() {
        let ms = Duration::from_millis;
        for measure in [Measure::Idle, Measure::Await, Measure::SchedulingDelay] {
            for threshold in [Threshold::Time(ms(20)), Threshold::Percent(80)] {
                let keep = Keep::slower_than(ms(200)).or(Condition::Above(measure, threshold));
                assert_eq!(keep.sampling_delay(), ms(10), "{keep}");
            }
            // Unless the rule has no other limit.
            let alone = Keep::when(Condition::Above(measure, Threshold::Time(ms(200))));
            assert_eq!(alone.sampling_delay(), ms(10));
        }
    }

    #[test]
    fn of_two_conditions_of_a_kind_the_one_that_keeps_more_applies() {
        let keep = Keep::slower_than(3 * MS).or_slower_than(2 * MS).or_slower_than(4 * MS);
        assert_eq!(keep, Keep::slower_than(2 * MS));
        let keep = Keep::when(Condition::ErrorSelf).or_failed().or(Condition::ErrorSelf);
        assert_eq!(keep, Keep::failed());
        let on_cpu = |threshold| Condition::Above(Measure::SubtreeOnCpu, threshold);
        let both = Keep::when(on_cpu(Threshold::Percent(80)))
            .or(on_cpu(Threshold::Time(MS)))
            .or(on_cpu(Threshold::Percent(90)));
        assert_eq!(both.to_string(), "on_cpu>1ms|on_cpu>80%");
    }

    #[test]
    fn the_default_hung_limit_is_ten_times_the_shortest_time_and_at_least_ten_seconds() {
        let second = Duration::from_secs(1);
        let limit = |keep: Keep| keep.hung_limit();
        assert_eq!(limit(Keep::slower_than(250 * MS)), Some(10 * second));
        assert_eq!(limit(Keep::slower_than(3 * second)), Some(30 * second));
        let idle = Condition::Above(Measure::Idle, Threshold::Time(2 * second));
        let both = Keep::slower_than(3 * second).or(idle);
        assert_eq!(limit(both), Some(20 * second));
        assert_eq!(limit(Keep::failed()), None);
        assert_eq!(limit(Keep::when(Condition::Hung(MS))), Some(MS));
        assert_eq!(limit(Keep::slower_than(MS).or(Condition::NeverHung)), None);
    }

    #[test]
    fn shares_apply_only_to_spans_of_at_least_a_millisecond() {
        let most = Threshold::Percent(80);
        assert!(!most.is_exceeded_by(801, 1_000));
        assert!(most.is_exceeded_by(800_001, 1_000_000));
        assert!(!most.is_exceeded_by(800_000, 1_000_000));
        assert!(Threshold::Time(MS).is_exceeded_by(1_000_001, 0));
        assert!(!Threshold::Time(MS).is_exceeded_by(1_000_000, 0));
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
