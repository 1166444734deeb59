//! What kept a span from a CPU, in words.

use super::format::Ns;
use crate::facts::{Facts, Measure};

/// What is less than this, or less than a tenth of wall time, explains nothing.
const LEAST_NS: u64 = 10_000_000;

/// What the kernel counts.
pub(super) const ALL_CPUS: &str = " (all CPUs together)";

/// For how long it waited for a CPU, and its control group was throttled, if that matters.
pub(crate) fn starved(facts: &Facts) -> Option<String> {
    let least_ns = LEAST_NS.max(facts.times.wall_ns / 10);
    let much = |measure| facts.get(measure).filter(|ns| *ns >= least_ns).map(Ns);
    let waited = much(Measure::Runnable).map(|ns| format!("{ns} waiting for a CPU"));
    let throttled = much(Measure::Throttled)
        .map(|ns| format!("its control group was throttled for {ns}{ALL_CPUS}"));
    match (waited, throttled) {
        (Some(waited), Some(throttled)) => Some(format!("{waited} while {throttled}")),
        (waited, throttled) => waited.or(throttled),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::{Throttled, TimeBreakdown, Usage};

    #[test]
    fn what_matters_is_said() {
        const MS: u64 = 1_000_000;
        let text = |runnable_ms, throttled_ms: Option<u64>| {
            let usage = Usage { run_delay_ns: runnable_ms * MS, ..Usage::default() };
            let (wall_ns, off_cpu_ns) = (500 * MS, 400 * MS);
            let times = TimeBreakdown { wall_ns, off_cpu_ns, usage, ..TimeBreakdown::default() };
            let throttled_ns = throttled_ms.map(|ms| ms * MS);
            let throttled = throttled_ns.map_or_else(Throttled::default, |ns| Throttled(Ok(ns)));
            starved(&Facts { times, throttled, ..Facts::default() })
        };
        let both = "180 ms waiting for a CPU while its control group was throttled for 160 ms (all CPUs together)";
        assert_eq!(text(180, Some(160)).as_deref(), Some(both));
        assert_eq!(text(180, Some(49)).as_deref(), Some("180 ms waiting for a CPU"));
        assert_eq!(text(180, None).as_deref(), Some("180 ms waiting for a CPU"));
        let throttled = "its control group was throttled for 1.60 s (all CPUs together)";
        assert_eq!(text(49, Some(1_600)).as_deref(), Some(throttled));
        assert_eq!(text(49, Some(0)), None);
    }
}
