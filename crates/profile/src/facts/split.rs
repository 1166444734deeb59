//! The split of a span's wall time, in which each moment counts once.

use std::fmt::{self, Display};

use serde::{Deserialize, Serialize};

use super::format::{Allocated, MeasuredValue, Ns, is_vague};
use super::{Facts, Measure};

macro_rules! time_kinds {
    ($($(#[doc = $doc:literal])+ $kind:ident = $name:literal $words:literal,)+) => {
        /// What a span's wall time was spent in. A moment is of the first kind that any of its threads was in.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        #[non_exhaustive]
        pub enum TimeKind {
            $($(#[doc = $doc])+ $kind,)+
        }

        impl TimeKind {
            /// All kinds.
            pub const ALL: &'static [Self] = &[$(Self::$kind,)+];

            /// The name of the kind in JSON and in files.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$kind => $name,)+
                }
            }

            /// What it is for people, after its value.
            pub(crate) const fn words(self) -> &'static str {
                match self {
                    $(Self::$kind => $words,)+
                }
            }
        }
    };
}

time_kinds! {
    /// A thread of the span ran.
    OnCpu = "on_cpu" "on-CPU",
    /// A thread of the span was blocked.
    OffCpu = "off_cpu" "blocked",
    /// A thread of the span could have run, and had no CPU.
    Runnable = "runnable" "waiting for a CPU",
    /// The span's future waited for something.
    Await = "await" "await",
    /// The span's future had been woken, and was not polled yet.
    SchedulingDelay = "scheduling_delay" "scheduling delay",
    /// The span was in no thread, and no wrapped future explains why.
    UnexplainedIdle = "unexplained_idle" "unexplained idle",
    /// A thread of the span ran spans that are not inside it.
    OtherSpans = "other_spans" "other spans on its stack",
    /// No account has it, as where the system does not tell the CPU time of threads.
    Unmeasured = "unmeasured" "not measured",
}

/// The wall time of a span in parts that add up to it.
#[derive(Clone, Copy, Debug)]
pub struct WallSplit {
    parts: [u64; TimeKind::ALL.len()],
    /// For how long threads were in the span beyond the time in which at least one was. If there is such time, it is not
    /// known whether they ran in turn, so the part on-CPU is the most that is possible.
    at_once_ns: u64,
    error_ns: u64,
}

impl Facts {
    /// Splits the wall time of the span into parts that add up to it.
    pub fn split(&self) -> WallSplit {
        let times = &self.times;
        let idle_ns = times.idle_ns.min(times.wall_ns);
        let entered_ns = times.wall_ns - idle_ns;
        let runnable_ns = self.get(Measure::Runnable).unwrap_or(0).min(times.off_cpu_ns);
        let delay_ns = times.delay_ns.min(idle_ns);
        let await_ns = times.await_ns.min(idle_ns - delay_ns);
        let mut left_ns = entered_ns;
        let mut take = |ns: u64| {
            let taken_ns = ns.min(left_ns);
            left_ns -= taken_ns;
            taken_ns
        };
        let (on_cpu_ns, blocked_ns) = (take(times.on_cpu_ns), times.off_cpu_ns - runnable_ns);
        let runnable_ns = take(runnable_ns);
        let parts = [
            on_cpu_ns,
            take(blocked_ns),
            runnable_ns,
            await_ns,
            delay_ns,
            idle_ns - delay_ns - await_ns,
            take(times.other_spans_ns),
            left_ns,
        ];
        let threads_ns = [times.on_cpu_ns, times.off_cpu_ns, times.other_spans_ns];
        let threads_ns = threads_ns.into_iter().fold(0, u64::saturating_add);
        let at_once_ns = threads_ns.saturating_sub(entered_ns);
        WallSplit { parts, at_once_ns, error_ns: times.on_cpu_error_ns }
    }

    /// What all texts say beside the split: `2,000 major page faults`.
    pub fn beside(&self) -> Vec<String> {
        let at_once_ns = Some(self.split().at_once_ns);
        // Clocks are not read in the same moment.
        let at_once_ns = at_once_ns.filter(|ns| *ns > self.times.wall_ns / 100);
        let at_once = at_once_ns.map(|ns| format!("{} on more threads at the same time", Ns(ns)));
        let measured = Measure::ALL.iter().filter_map(|measure| {
            let value = MeasuredValue(*measure, measure.said(self)?);
            Some(format!("{value} {}", measure.row().words))
        });
        let is_starved = self.get(Measure::Runnable).is_some_and(|ns| ns > self.times.wall_ns / 10);
        let unknown = self.throttling_unknown().filter(|_| is_starved);
        let unknown = unknown.map(|why| format!("whether it was throttled is unknown: {why}"));
        let allocated = self.times.allocations.filter(|all| all.allocations > 0);
        let allocated = allocated.map(|all| Allocated(&all).to_string());
        at_once.into_iter().chain(measured).chain(unknown).chain(allocated).collect()
    }
}

impl WallSplit {
    pub(crate) fn of(&self, kind: TimeKind) -> u64 {
        self.parts.get(kind as usize).copied().unwrap_or(0)
    }

    /// The parts that are not empty.
    pub(crate) fn parts(&self) -> impl Iterator<Item = (TimeKind, u64)> {
        TimeKind::ALL.iter().copied().zip(self.parts).filter(|(_, ns)| *ns > 0)
    }
}

/// `wall 217 ms = 65.9 ms on-CPU (30 %) + 151 ms blocked (70 %)`, without parts of less than a ten-thousandth.
impl Display for WallSplit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let wall_ns: u64 = self.parts.iter().sum();
        write!(f, "wall {}", Ns(wall_ns))?;
        let parts = self.parts().filter(|(_, ns)| *ns >= wall_ns / 10_000);
        for (number, (kind, ns)) in parts.enumerate() {
            f.write_str(if number == 0 { " = " } else { " + " })?;
            let share = 100.0 * ns as f64 / wall_ns as f64;
            write!(f, "{} {} ({share:.0} %", Ns(ns), kind.words())?;
            if kind == TimeKind::OnCpu && is_vague(ns, self.error_ns) {
                write!(f, ", ± {}", Ns(self.error_ns))?;
            }
            f.write_str(")")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::TimeBreakdown;
    use super::*;

    fn split(times: TimeBreakdown) -> WallSplit {
        Facts { times, ..Facts::default() }.split()
    }

    proptest! {
        #[test]
        fn the_parts_add_up_to_the_wall_time(
            [wall_ns, on_cpu_ns, off_cpu_ns, idle_ns] in any::<[u64; 4]>(),
            [other_spans_ns, await_ns, delay_ns, run_delay_ns] in any::<[u64; 4]>(),
            is_cpu_time_unknown in any::<bool>(),
        ) {
            let mut times = TimeBreakdown {
                wall_ns,
                on_cpu_ns,
                off_cpu_ns,
                idle_ns,
                other_spans_ns,
                await_ns,
                delay_ns,
                ..TimeBreakdown::default()
            };
            times.usage.run_delay_ns = run_delay_ns;
            let times = if is_cpu_time_unknown { times.without_cpu_time() } else { times };
            let sum: u128 = split(times).parts().map(|(_, ns)| u128::from(ns)).sum();
            prop_assert_eq!(sum, u128::from(wall_ns));
        }
    }

    #[test]
    fn of_two_threads_at_once_one_is_beside_the_wall_time() {
        let (on_cpu_ns, off_cpu_ns) = (65_900_000, 227_000_000);
        let wall_ns = 217_000_000;
        let times = TimeBreakdown { wall_ns, on_cpu_ns, off_cpu_ns, ..TimeBreakdown::default() };
        let text = "wall 217 ms = 65.9 ms on-CPU (30 %) + 151 ms blocked (70 %)";
        assert_eq!(split(times).to_string(), text);
        let with_little = TimeBreakdown { wall_ns: wall_ns + 1, idle_ns: 1, ..times };
        assert_eq!(split(with_little).to_string(), text);
        let facts = Facts { times, ..Facts::default() };
        assert_eq!(facts.beside(), ["75.9 ms on more threads at the same time"]);
    }

    #[test]
    fn an_error_that_is_as_large_as_the_time_is_beside_it() {
        let times = TimeBreakdown {
            wall_ns: 49_000,
            on_cpu_ns: 9_000,
            on_cpu_error_ns: 9_040,
            off_cpu_ns: 40_000,
            ..TimeBreakdown::default()
        };
        // What stands between the signs adds up.
        let text = "wall 49.0 µs = 9.00 µs on-CPU (18 %, ± 9.04 µs) + 40.0 µs blocked (82 %)";
        assert_eq!(split(times).to_string(), text);
    }
}
