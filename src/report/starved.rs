//! What kept a span from a CPU, in words.

use super::format::Ns;
use crate::facts::{Facts, Measure};

/// What is less than this, or less than a tenth of wall time, explains nothing.
const LEAST_NS: u64 = 10_000_000;

/// A time of the span that explains some of it.
fn much(facts: &Facts, measure: Measure) -> Option<u64> {
    let least_ns = LEAST_NS.max(facts.times.wall_ns / 10);
    facts.get(measure).filter(|ns| *ns >= least_ns)
}

/// For how long it waited for a CPU, if that matters.
pub(crate) fn waited_for_cpu(facts: &Facts) -> Option<u64> {
    much(facts, Measure::Runnable)
}

/// For how long it waited for a CPU, which threads ran then, and for how long its control group was throttled, if that matters.
pub(crate) fn starved(facts: &Facts) -> Option<String> {
    let waited = waited_for_cpu(facts).map(|ns| match &facts.starved.rivals {
        // They ran while it was open, not only while it waited.
        Some(rivals) => format!("{} waiting for a CPU, beside {rivals}", Ns(ns)),
        None => format!("{} waiting for a CPU", Ns(ns)),
    });
    let throttled = much(facts, Measure::Throttled)
        .map(|ns| format!("its control group was throttled for {} (all CPUs together)", Ns(ns)));
    match (waited, throttled) {
        (Some(waited), Some(throttled)) => Some(format!("{waited}, while {throttled}")),
        (waited, throttled) => waited.or(throttled),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::{Starved, ThrottlingUnknown, TimeBreakdown, Usage};

    #[test]
    fn what_matters_is_said() {
        const MS: u64 = 1_000_000;
        let text = |runnable_ms, throttled_ms: Option<u64>| {
            let usage = Usage { run_delay_ns: runnable_ms * MS, ..Usage::default() };
            let (wall_ns, off_cpu_ns) = (500 * MS, 400 * MS);
            let times = TimeBreakdown { wall_ns, off_cpu_ns, usage, ..TimeBreakdown::default() };
            let throttled_ns = throttled_ms.map(|ms| ms * MS);
            let throttled = throttled_ns.ok_or(ThrottlingUnknown::NOT_READ);
            let rivals =
                (runnable_ms == 181).then(|| "6 threads `indexer-*`, which ran for 1.02 s".into());
            let facts = Facts { times, starved: Starved { throttled, rivals }, ..Facts::default() };
            starved(&facts)
        };
        let both = "180 ms waiting for a CPU, while its control group was throttled for 160 ms (all CPUs together)";
        assert_eq!(text(180, Some(160)).as_deref(), Some(both));
        assert_eq!(text(180, Some(49)).as_deref(), Some("180 ms waiting for a CPU"));
        assert_eq!(text(180, None).as_deref(), Some("180 ms waiting for a CPU"));
        let rivals = "181 ms waiting for a CPU, beside 6 threads `indexer-*`, which ran for 1.02 s";
        assert_eq!(text(181, None).as_deref(), Some(rivals));
        let throttled = "its control group was throttled for 1.60 s (all CPUs together)";
        assert_eq!(text(49, Some(1_600)).as_deref(), Some(throttled));
        assert_eq!(text(49, Some(0)), None);
    }
}
