//! The table of measures: what is known of a kept span in numbers.
//!
//! The log, attributes, JSON, pages, titles, conditions, reasons and counters read this table, so a measure needs no more
//! than a row here and the place that measures it.

use super::{Facts, TimeBreakdown};

/// The unit of a [`Measure`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Nanoseconds.
    Nanoseconds,
    /// Bytes.
    Bytes,
    /// A number of events.
    Count,
}

/// What the table says of a measure.
#[derive(Clone, Copy, Debug)]
pub struct MeasureInfo {
    name: &'static str,
    unit: Unit,
    /// The name of the attribute of spans and profiles, and of the field in the log and in JSON.
    attribute: &'static str,
    pub field: &'static str,
    /// The name of the condition and reason, or empty; and of the counter of spans that were kept for it.
    pub condition: &'static str,
    pub(crate) counter: &'static str,
    /// What it is, for people, after its value.
    pub words: &'static str,
    /// The measure that this one is a part of, if any.
    pub(crate) part_of: Option<Measure>,
    /// The title of a profile says it if it is at least this percentage of wall time.
    titled_from: Option<u64>,
    /// All texts for people say it beside the split of wall time if it is at least this percentage of wall time.
    said_from: Option<u64>,
    /// `None` if it is unknown.
    value: fn(&Facts) -> Option<u64>,
    /// The system counts it for threads: it is read at each enter and exit of spans whose rule judges it.
    pub is_counted: bool,
    /// Only JSON and conditions have it.
    is_minor: bool,
    /// Smaller values are not said where space is short: in logs, attributes and texts.
    least: fn(&Facts) -> u64,
}

impl MeasureInfo {
    const DEFAULT: Self = Self {
        name: "",
        unit: Unit::Nanoseconds,
        attribute: "",
        field: "",
        condition: "",
        counter: "",
        words: "",
        part_of: None,
        titled_from: None,
        said_from: None,
        value: |_| None,
        is_counted: false,
        is_minor: false,
        least: |_| 0,
    };
}

macro_rules! suffixed {
    ($prefix:literal $name:literal Nanoseconds $suffix:literal) => {
        concat!($prefix, $name, $suffix)
    };
    ($prefix:literal $name:literal Bytes $suffix:literal) => {
        concat!($prefix, $name, "_bytes")
    };
    ($prefix:literal $name:literal Count $suffix:literal) => {
        concat!($prefix, $name)
    };
}

macro_rules! measures {
    ($(
        $(#[doc = $doc:literal])+
        $measure:ident = $name:literal $unit:ident [$($condition:literal)?] $value:expr, { $($key:ident: $with:expr),* };
    )+) => {
        /// What is known of a span in numbers. [`Facts::get`] returns the value of a kept span.
        ///
        /// Some have a condition (`Condition::Above`), for which spans are kept. Times can also be judged as a share
        /// of wall time: `on_cpu>80%`.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Measure {
            $($(#[doc = $doc])+ $measure,)+
        }

        impl Measure {
            /// All measures.
            pub const ALL: &'static [Self] = &[$(Self::$measure,)+];

            /// What the table says of it.
            pub const fn row(self) -> &'static MeasureInfo {
                match self {
                    $(Self::$measure => {
                        const ROW: MeasureInfo = MeasureInfo {
                            name: $name,
                            unit: Unit::$unit,
                            attribute: suffixed!("profile." $name $unit "_ns"),
                            field: suffixed!("" $name $unit "_ms"),
                            condition: concat!($($condition)?),
                            counter: concat!("spans.kept_for_", $($condition)?),
                            value: $value,
                            $($key: $with,)*
                            ..MeasureInfo::DEFAULT
                        };
                        &ROW
                    })+
                }
            }
        }
    };
}

const MILLISECOND: u64 = 1_000_000;
/// From then on, their number says something.
const MANY_AWAITS: u64 = 50;
const NOT_ZERO: fn(&Facts) -> u64 = |_| 1;

measures! {
    /// From its creation to its close. Condition: `250ms`.
    Wall = "wall" Nanoseconds ["latency"] |facts| Some(facts.times.wall_ns), { words: "wall" };
    /// From its creation to its last exit. Condition: `last_exit>250ms`. A span stays open while a child is open; this
    /// leaves out the time that a child task takes after the span's last exit.
    LastExit = "last_exit" Nanoseconds ["last_exit"]
        |facts| Some(facts.times.wall_ns.saturating_sub(facts.times.after_last_exit_ns)),
        { words: "to the last exit", is_minor: true };
    /// [`TimeBreakdown::subtree_on_cpu`](crate::facts::TimeBreakdown::subtree_on_cpu). Condition: `on_cpu>100ms`, `on_cpu>80%`. It
    /// can be longer than wall time. To judge it, the CPU clock is also read at each enter and exit of child spans that run
    /// elsewhere, which takes 1 µs for both.
    SubtreeOnCpu = "subtree_on_cpu" Nanoseconds ["on_cpu"]
        |facts| known(facts, facts.times.subtree_on_cpu_ns),
        { words: "on-CPU with child spans", said_from: Some(0), least: more_than_own };
    /// [`TimeBreakdown::on_cpu`](crate::facts::TimeBreakdown::on_cpu). Condition: `own_on_cpu>100ms`. To judge this and off-CPU
    /// time, the thread's CPU clock is read at each enter and exit.
    OnCpu = "on_cpu" Nanoseconds ["own_on_cpu"] |facts| known(facts, facts.times.on_cpu_ns),
        { words: "on-CPU", part_of: Some(Measure::Wall) };
    /// [`TimeBreakdown::on_cpu_error`](crate::facts::TimeBreakdown::on_cpu_error)
    OnCpuError = "on_cpu_error" Nanoseconds [] |facts| known(facts, facts.times.on_cpu_error_ns),
        { words: "possible error of on-CPU time", said_from: Some(1), least: |_| 1_000 };
    /// [`TimeBreakdown::off_cpu`](crate::facts::TimeBreakdown::off_cpu). Condition: `off_cpu>50ms`.
    OffCpu = "off_cpu" Nanoseconds ["off_cpu"] |facts| known(facts, facts.times.off_cpu_ns),
        { words: "off-CPU", part_of: Some(Measure::Wall) };
    /// The time in which it was entered and its own code ran or waited. This is on-CPU and off-CPU time together.
    Busy = "busy" Nanoseconds [] |facts| Some(facts.times.busy_ns()),
        { words: "busy", least: |facts| if facts.times.is_cpu_time_unknown { 0 } else { u64::MAX } };
    /// The part of off-CPU time in which the thread could have run and had no CPU: it was preempted, had been woken, or its
    /// control group was throttled. Condition: `runnable>50ms`. At least that, with [`Self::RunnableError`]: from the records
    /// of context switches, from `/proc/self/task/TID/schedstat`, and where the thread was never blocked between two readings
    /// of its CPU clock.
    Runnable = "runnable" Nanoseconds ["runnable"] runnable,
        { words: "waiting for a CPU", part_of: Some(Measure::OffCpu), titled_from: Some(10), least: |_| MILLISECOND };
    /// How much more off-CPU time may have been [`Self::Runnable`]: `schedstat` is read from when the thread is sampled, every
    /// 5 ms or less often, and says nothing of segments that began or ended in between.
    RunnableError = "runnable_error" Nanoseconds [] runnable_error,
        { words: "more that may have been waiting for a CPU", is_minor: true };
    /// For how long the control group of the process was throttled while the span was open, as it had used up its CPU quota:
    /// of all threads and CPUs together, as `cpu.stat` has it. Not known to conditions. See [`Facts::throttling_unknown`].
    Throttled = "throttled" Nanoseconds [] |facts| facts.starved.throttled.ok(),
        { words: "of throttling", titled_from: Some(10), said_from: Some(0), least: |_| MILLISECOND };
    /// Page faults that read from disk. For how long is unknown: the kernel says it only to the privileged. Condition:
    /// `major_faults>10`.
    MajorFaults = "major_faults" Count ["major_faults"] |facts| Some(facts.times.usage.major_faults),
        { words: "major page faults", said_from: Some(0), least: NOT_ZERO, is_counted: true };
    /// Bytes that its threads read from disk, not from the page cache; absent if none was counted. Condition: `disk_read>50MB`.
    DiskRead = "disk_read" Bytes ["disk_read"] |facts| Some(facts.times.usage.disk_read).filter(|bytes| *bytes > 0),
        { words: "read from disk", said_from: Some(0), least: NOT_ZERO, is_counted: true };
    /// [`TimeBreakdown::idle`](crate::facts::TimeBreakdown::idle). Condition: `idle>1s`.
    Idle = "idle" Nanoseconds ["idle"] |facts| Some(facts.times.idle_ns),
        { words: "idle", part_of: Some(Measure::Wall) };
    /// [`TimeBreakdown::awaiting`](crate::facts::TimeBreakdown::awaiting). Condition: `await>1s`.
    Await = "await" Nanoseconds ["await"] |facts| Some(facts.times.await_ns),
        { words: "await", part_of: Some(Measure::Idle), least: NOT_ZERO };
    /// [`TimeBreakdown::scheduling_delay`](crate::facts::TimeBreakdown::scheduling_delay). Condition: `delay>50ms`.
    SchedulingDelay = "scheduling_delay" Nanoseconds ["delay"] |facts| Some(facts.times.delay_ns),
        { words: "scheduling delay", part_of: Some(Measure::Idle), least: NOT_ZERO };
    /// [`TimeBreakdown::awaits`](crate::facts::TimeBreakdown::awaits). Condition: `awaits>500`.
    Awaits = "awaits" Count ["awaits"] |facts| Some(facts.times.awaits),
        { words: "times pending", said_from: Some(0), least: |_| MANY_AWAITS };
    /// [`TimeBreakdown::other_spans`](crate::facts::TimeBreakdown::other_spans)
    OtherSpans = "other_spans" Nanoseconds [] |facts| Some(facts.times.other_spans_ns),
        { words: "other spans on its stack", part_of: Some(Measure::Wall), least: NOT_ZERO };
    /// [`TimeBreakdown::after_last_exit`](crate::facts::TimeBreakdown::after_last_exit)
    AfterLastExit = "after_last_exit" Nanoseconds [] |facts| Some(facts.times.after_last_exit_ns),
        { words: "after the last exit", said_from: Some(10), least: |_| MILLISECOND };
    /// On-CPU time of the subtree that certainly was not sampled. Unknown while the span is open.
    Unsampled = "unsampled" Nanoseconds []
        |facts| known(facts, facts.times.unsampled_ns()).filter(|_| !facts.is_open),
        { words: "on-CPU not sampled", titled_from: Some(0), least: |_| MILLISECOND };
    /// Bytes in [`TimeBreakdown::allocations`](crate::facts::TimeBreakdown::allocations). Condition: `alloc>100MB`.
    Allocated = "allocated" Bytes ["alloc"] |facts| Some(facts.times.allocations?.allocated_bytes),
        { words: "allocated" };
    /// Bytes in [`TimeBreakdown::own_allocations`](crate::facts::TimeBreakdown::own_allocations)
    OwnAllocated = "own_allocated" Bytes []
        |facts| Some(facts.times.own_allocations?.allocated_bytes),
        { words: "allocated outside of child spans", is_minor: true };
    /// The number of [`TimeBreakdown::allocations`](crate::facts::TimeBreakdown::allocations). Condition: `allocs>1000000`.
    Allocations = "allocations" Count ["allocs"] |facts| Some(facts.times.allocations?.allocations),
        { words: "allocations" };
    /// Bytes that were freed: see [`TimeBreakdown::allocations`](crate::facts::TimeBreakdown::allocations)
    Freed = "freed" Bytes [] |facts| Some(facts.times.allocations?.freed_bytes), { words: "freed" };
    /// How often memory was freed: see [`TimeBreakdown::allocations`](crate::facts::TimeBreakdown::allocations)
    Frees = "frees" Count [] |facts| Some(facts.times.allocations?.frees), { words: "frees" };
}

/// The sources are each exact for a part of the time, so the largest is the nearest. The kernel writes its records some
/// microseconds before and after it reads the clocks.
fn runnable(facts: &Facts) -> Option<u64> {
    let TimeBreakdown { off_cpu_ns, on_cpu_error_ns, usage, .. } = &facts.times;
    let known = known(facts, usage.preempted_ns.max(usage.run_delay_ns))
        .filter(|ns| *ns > 0 || usage.run_delay_read_ns > 0);
    known.map(|ns| ns.min(off_cpu_ns.saturating_add(*on_cpu_error_ns)))
}

fn runnable_error(facts: &Facts) -> Option<u64> {
    let known_ns = runnable(facts)?;
    let TimeBreakdown { on_cpu_ns, off_cpu_ns, usage, .. } = &facts.times;
    let unread_ns = (on_cpu_ns + off_cpu_ns).saturating_sub(usage.run_delay_read_ns);
    Some(off_cpu_ns.saturating_sub(known_ns).min(unread_ns))
}

/// Little more is the error of two readings.
fn more_than_own(facts: &Facts) -> u64 {
    facts.times.on_cpu_ns + facts.times.on_cpu_ns / 1_000 + 1_000
}

fn is_from(percent: Option<u64>, value: u64, facts: &Facts) -> bool {
    let least = |percent| u128::from(facts.times.wall_ns) * u128::from(percent);
    percent.is_some_and(|percent: u64| u128::from(value) * 100 >= least(percent))
}

/// A time that was found with the threads' CPU clocks.
fn known(facts: &Facts, ns: u64) -> Option<u64> {
    (!facts.times.is_cpu_time_unknown).then_some(ns)
}

impl Measure {
    /// The name of the measure, such as `on_cpu`.
    pub const fn name(self) -> &'static str {
        self.row().name
    }

    /// The unit of its values.
    pub const fn unit(self) -> Unit {
        self.row().unit
    }

    /// The name of the attribute of spans and profiles that has it, such as `profile.on_cpu_ns`.
    pub const fn attribute(self) -> &'static str {
        self.row().attribute
    }

    /// The measure that this condition judges.
    pub fn judged_by(condition: &str) -> Option<Self> {
        let is_it = |one: &Self| !condition.is_empty() && one.row().condition == condition;
        Self::ALL.iter().copied().find(is_it)
    }

    /// The parts that it has.
    pub fn parts(self) -> impl Iterator<Item = Self> {
        Self::ALL.iter().copied().filter(move |part| part.row().part_of == Some(self))
    }

    pub(super) fn value(self, facts: &Facts) -> Option<u64> {
        (self.row().value)(facts)
    }

    /// The measures that are said where space is short.
    pub fn major() -> impl Iterator<Item = Self> {
        Self::ALL.iter().copied().filter(|measure| !measure.row().is_minor)
    }

    /// The value, if it is worth saying where space is short.
    pub fn notable(self, facts: &Facts) -> Option<u64> {
        let MeasureInfo { is_minor, least, .. } = self.row();
        self.value(facts).filter(|value| !is_minor && *value >= least(facts))
    }

    /// The value, if the title of a profile should say it.
    pub fn titled(self, facts: &Facts) -> Option<u64> {
        self.notable(facts).filter(|value| is_from(self.row().titled_from, *value, facts))
    }

    /// The value, if texts should say it beside the split of wall time.
    pub(super) fn said(self, facts: &Facts) -> Option<u64> {
        let MeasureInfo { least, said_from, .. } = self.row();
        let value = self.value(facts).filter(|value| *value >= least(facts));
        value.filter(|value| is_from(*said_from, *value, facts))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::Usage;

    #[test]
    fn each_measure_has_names_of_its_own() {
        let all = |name: fn(&MeasureInfo) -> &'static str| {
            let mut names: Vec<_> =
                Measure::ALL.iter().map(|measure| name(measure.row())).collect();
            names.retain(|name| !name.is_empty());
            let count = names.len();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), count, "{names:?}");
            count
        };
        let names: [fn(&MeasureInfo) -> _; 4] =
            [|row| row.name, |row| row.attribute, |row| row.field, |row| row.words];
        for name in names {
            assert_eq!(all(name), Measure::ALL.len());
        }
        assert!(all(|row| row.condition) >= 10);
        assert_eq!(Measure::OnCpu.attribute(), "profile.on_cpu_ns");
        assert_eq!(Measure::OnCpu.row().field, "on_cpu_ms");
        assert_eq!(Measure::Allocated.row().field, "allocated_bytes");
        assert_eq!(Measure::judged_by("on_cpu"), Some(Measure::SubtreeOnCpu));
        assert_eq!(Measure::judged_by(""), None);
    }

    #[test]
    fn the_largest_of_the_sources_is_runnable_and_the_rest_is_its_error() {
        const MS: u64 = MILLISECOND;
        let of = |preempted_ns, run_delay_ns, run_delay_read_ns| {
            let usage = Usage { preempted_ns, run_delay_ns, run_delay_read_ns, ..Usage::default() };
            let (on_cpu_ns, off_cpu_ns) = (40 * MS, 60 * MS);
            let times = TimeBreakdown { on_cpu_ns, off_cpu_ns, usage, ..TimeBreakdown::default() };
            let facts = Facts { times, ..Facts::default() };
            let unknown = Facts { times: times.without_cpu_time(), ..Facts::default() };
            assert_eq!(unknown.get(Measure::Runnable), None);
            Measure::Runnable.value(&facts).zip(Measure::RunnableError.value(&facts))
        };
        assert_eq!(of(0, 0, 0), None, "nothing was read");
        assert_eq!(of(20 * MS, 0, 0), Some((20 * MS, 40 * MS)));
        assert_eq!(of(20 * MS, 25 * MS, 90 * MS), Some((25 * MS, 10 * MS)));
        assert_eq!(of(20 * MS, 10 * MS, 100 * MS), Some((20 * MS, 0)));
        assert_eq!(of(0, 0, 70 * MS), Some((0, 30 * MS)));
        // The kernel's clocks differ a little.
        assert_eq!(of(0, 61 * MS, 90 * MS), Some((60 * MS, 0)));
    }

    #[test]
    fn what_is_unknown_has_no_value_and_what_is_small_is_not_notable() {
        let times = TimeBreakdown {
            wall_ns: 9_000_000,
            on_cpu_ns: 4_000_000,
            subtree_on_cpu_ns: 4_000_000,
            on_cpu_error_ns: 999,
            ..TimeBreakdown::default()
        };
        let facts = Facts { times, ..Facts::default() };
        let notable = |facts: &Facts| {
            let all = Measure::ALL.iter().filter(|measure| measure.notable(facts).is_some());
            all.map(|measure| measure.name()).collect::<Vec<_>>()
        };
        assert_eq!(notable(&facts), ["wall", "on_cpu", "off_cpu", "idle", "unsampled"]);
        assert_eq!(Measure::Unsampled.titled(&facts), Some(4_000_000));
        let open = Facts { is_open: true, ..facts.clone() };
        assert_eq!(open.get(Measure::Unsampled), None);
        let unknown = Facts { times: times.without_cpu_time(), ..facts };
        assert_eq!(notable(&unknown), ["wall", "busy", "idle"]);
        assert_eq!(unknown.get(Measure::OnCpu), None);
        assert_eq!(unknown.get(Measure::Allocated), None, "there is no such allocator");
    }
}
