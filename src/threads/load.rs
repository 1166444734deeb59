//! Load shedding: no thread is sampled while the machine is overloaded.

use std::time::{Duration, Instant};

use crate::host::{CpuUse, Load};

/// The limits above which no thread is sampled; `TRACING_PROFILING_PAUSE`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LoadLimits {
    pub(crate) cpu_percent: Option<u32>,
    pub(crate) memory_bytes: Option<u64>,
}

/// Checks the load against the limits.
pub(crate) struct LoadPause {
    limits: LoadLimits,
    last: Option<(Instant, Load)>,
    pub(crate) is_over: bool,
}

/// A shorter window is too noisy.
const WINDOW: Duration = Duration::from_secs(1);

impl LoadPause {
    pub(crate) fn new(limits: LoadLimits) -> Self {
        Self { limits, last: None, is_over: false }
    }

    /// Whether the next check is due.
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        let has_limits = self.limits != LoadLimits::default();
        let is_over = |(then, _): &(Instant, Load)| now.saturating_duration_since(*then) >= WINDOW;
        has_limits && self.last.as_ref().is_none_or(is_over)
    }

    /// Checks the current load. Returns a description of the exceeded limit if none was exceeded before.
    pub(crate) fn check(&mut self, now: Instant, load: Load) -> Option<String> {
        let before = self.last.replace((now, load));
        let cpu = before.and_then(|(then, before)| {
            // An average over a longer time does not describe the current load.
            let time = now.saturating_duration_since(then);
            cpu_percent(&before, &load, time).filter(|_| time < 3 * WINDOW)
        });
        let over_cpu =
            cpu.zip(self.limits.cpu_percent).filter(|(is, limit)| *is > f64::from(*limit));
        let memory = load.memory_bytes.zip(self.limits.memory_bytes);
        let over_memory = memory.filter(|(is, limit)| is > limit);
        let was_over =
            std::mem::replace(&mut self.is_over, over_cpu.is_some() || over_memory.is_some());
        let mib = |bytes: u64| bytes >> 20;
        let words = match (over_cpu, over_memory) {
            (Some((is, limit)), _) => format!("CPU use is {is:.0} %, above the limit of {limit} %"),
            (None, Some((is, limit))) => {
                format!("memory use is {} MiB, above the limit of {} MiB", mib(is), mib(limit))
            }
            (None, None) => return None,
        };
        (!was_over).then_some(words)
    }
}

/// CPU use of the host, or relative to the limit of the control group, whichever is higher.
fn cpu_percent(before: &Load, now: &Load, time: Duration) -> Option<f64> {
    let of_host = before.host.zip(now.host).and_then(|(before, now)| {
        let CpuUse { busy, all } = CpuUse {
            busy: now.busy.checked_sub(before.busy)?,
            all: now.all.checked_sub(before.all)?,
        };
        (all > 0).then(|| 100.0 * busy as f64 / all as f64)
    });
    let of_group = before.group.zip(now.group).and_then(|((before_us, _), (now_us, cores))| {
        let may_us = time.as_micros() as f64 * cores;
        (may_us > 0.0).then(|| 100.0 * now_us.saturating_sub(before_us) as f64 / may_us)
    });
    of_host.into_iter().chain(of_group).reduce(f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(busy: u64, all: u64) -> Load {
        Load { host: Some(CpuUse { busy, all }), ..Load::default() }
    }

    fn shed(cpu_percent: Option<u32>, memory_bytes: Option<u64>) -> LoadPause {
        LoadPause::new(LoadLimits { cpu_percent, memory_bytes })
    }

    #[test]
    fn an_exceeded_limit_is_reported_once_and_lasts_until_the_load_drops() {
        let (mut shed, start) = (shed(Some(90), None), Instant::now());
        let mut check = |second: u32, busy| {
            let now = start + second * WINDOW;
            assert!(shed.is_due(now) && (second == 0 || !shed.is_due(now - WINDOW)));
            let message = shed.check(now, host(busy, u64::from(second) * 100)).is_some();
            (message, shed.is_over)
        };
        // The first check has nothing to compare with.
        assert_eq!(check(0, 0), (false, false));
        assert_eq!(check(1, 91), (true, true));
        assert_eq!(check(2, 190), (false, true));
        assert_eq!(check(3, 280), (false, false), "exactly the limit");
        assert_eq!(check(4, 380), (true, true));
    }

    #[test]
    fn a_control_group_is_measured_against_its_cpu_limit() {
        let (mut shed, start) = (shed(Some(90), None), Instant::now());
        let group = |used_us| Load { group: Some((used_us, 0.5)), ..host(0, 0) };
        shed.check(start, group(0));
        assert_eq!(shed.check(start + WINDOW, group(400_000)), None);
        let message = shed.check(start + 2 * WINDOW, group(900_000));
        assert_eq!(message.as_deref(), Some("CPU use is 100 %, above the limit of 90 %"));
    }

    #[test]
    fn current_memory_use_is_compared_with_its_limit() {
        let (mut shed, start) = (shed(None, Some(2 << 30)), Instant::now());
        let used = |bytes| Load { memory_bytes: Some(bytes), ..Load::default() };
        assert_eq!(shed.check(start, used(2 << 30)), None);
        let message = shed.check(start, used(3 << 30));
        assert_eq!(message.as_deref(), Some("memory use is 3072 MiB, above the limit of 2048 MiB"));
    }

    #[test]
    fn a_long_gap_between_checks_is_ignored() {
        let (mut shed, start) = (shed(Some(90), None), Instant::now());
        shed.check(start, host(0, 0));
        assert_eq!(shed.check(start + 3_600 * WINDOW, host(100, 100)), None);
        assert!(shed.check(start + 3_601 * WINDOW, host(200, 200)).is_some());
    }

    #[test]
    fn without_limits_no_check_is_due() {
        assert!(!shed(None, None).is_due(Instant::now()));
    }

    #[test]
    fn an_unknown_load_exceeds_no_limit() {
        let mut shed = shed(Some(1), Some(1));
        let start = Instant::now();
        assert_eq!(shed.check(start, Load::default()), None);
        assert_eq!(shed.check(start + WINDOW, Load::default()), None);
        // The counters went backwards, as after a migration to another machine.
        assert_eq!(shed.check(start + 2 * WINDOW, host(100, 200)), None);
        assert_eq!(shed.check(start + 3 * WINDOW, host(10, 20)), None);
    }
}
