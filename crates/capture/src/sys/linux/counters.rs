//! Hardware counters.

use perf_event_open_sys::bindings::{
    PERF_COUNT_HW_CACHE_MISSES, PERF_COUNT_HW_CPU_CYCLES, PERF_COUNT_HW_INSTRUCTIONS,
    PERF_COUNT_SW_DUMMY, PERF_FORMAT_GROUP, PERF_FORMAT_ID, PERF_FORMAT_TOTAL_TIME_ENABLED,
    PERF_FORMAT_TOTAL_TIME_RUNNING, PERF_TYPE_HARDWARE, PERF_TYPE_SOFTWARE, perf_event_attr,
};

use super::perf::{PerfEvent, open, software};
use super::thread::current_tid;
use crate::sys::types::WhyRefused;

/// Cycles, instructions and cache misses of the calling thread, as one group, which a dummy event leads.
#[derive(Debug)]
pub(crate) struct HardwareCounters {
    leader: PerfEvent,
    _members: [PerfEvent; 3],
}

/// The words of a read: the number of events, both times, then a value and an id for each event.
const WORDS: usize = 3 + 2 * 4;

impl HardwareCounters {
    /// Opens the counters. Fails if there are none, as on most virtual machines, or if perf is refused.
    pub(crate) fn open() -> Result<Self, WhyRefused> {
        let counts =
            [PERF_COUNT_HW_CPU_CYCLES, PERF_COUNT_HW_INSTRUCTIONS, PERF_COUNT_HW_CACHE_MISSES];
        Self::of(PERF_TYPE_HARDWARE, counts)
    }

    fn of(kind: u32, [first, second, third]: [u32; 3]) -> Result<Self, WhyRefused> {
        let event = |kind, config, leader: Option<&PerfEvent>| {
            let mut attr = perf_event_attr { type_: kind, ..software(config) };
            attr.read_format = u64::from(
                PERF_FORMAT_GROUP
                    | PERF_FORMAT_ID
                    | PERF_FORMAT_TOTAL_TIME_ENABLED
                    | PERF_FORMAT_TOTAL_TIME_RUNNING,
            );
            attr.set_exclude_kernel(1);
            // The group counts once its leader does.
            attr.set_disabled(u64::from(leader.is_none()));
            open(&mut attr, current_tid(), leader)
        };
        let leader = event(PERF_TYPE_SOFTWARE, PERF_COUNT_SW_DUMMY, None)?;
        let member = |config| event(kind, config, Some(&leader));
        let members = [member(first)?, member(second)?, member(third)?];
        leader.enable()?;
        Ok(Self { leader, _members: members })
    }

    /// The three counts since then, by one system call. `None` if the group never ran.
    pub(crate) fn read(&self) -> Option<[u64; 3]> {
        let mut bytes = [[0; 8]; WORDS];
        let length = rustix::io::read(self.leader.file().ok()?, bytes.as_flattened_mut()).ok()?;
        let words = bytes.map(u64::from_ne_bytes);
        parse_group(words.get(..length / 8)?)
    }
}

/// Parses a read of the group, in the layout that `perf_event_open(2)` documents.
///
/// If the hardware was multiplexed, the counts are scaled. `None` if the group never ran or has another layout.
fn parse_group(words: &[u64]) -> Option<[u64; 3]> {
    let [4, enabled, running, _dummy, _, cycles, _, instructions, _, cache_misses, _] = *words
    else {
        return None;
    };
    if running == 0 || running > enabled {
        return None;
    }
    let scale = |count: u64| {
        let scaled = u128::from(count) * u128::from(enabled) / u128::from(running);
        u64::try_from(scaled).unwrap_or(u64::MAX)
    };
    Some([cycles, instructions, cache_misses].map(scale))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_a_group_of_the_kernel() {
        use perf_event_open_sys::bindings::{
            PERF_COUNT_SW_CPU_CLOCK, PERF_COUNT_SW_PAGE_FAULTS, PERF_COUNT_SW_TASK_CLOCK,
        };
        // The layout is the same for all events, and software events exist everywhere. (Context switches happen in the
        // kernel, which an unprivileged user's counters exclude.)
        let events = [PERF_COUNT_SW_PAGE_FAULTS, PERF_COUNT_SW_CPU_CLOCK, PERF_COUNT_SW_TASK_CLOCK];
        let Ok(counters) = HardwareCounters::of(PERF_TYPE_SOFTWARE, events) else { return };
        let before = counters.read().unwrap();
        // More than an allocator caches (glibc's heaps have 64 MiB), so these pages have never been touched.
        let pages: Vec<u8> = vec![1; 96 << 20];
        std::thread::sleep(std::time::Duration::from_millis(1));
        let after = counters.read().unwrap();
        drop(pages);
        let [faults, cpu_ns, task_ns] = [0, 1, 2].map(|number| after[number] - before[number]);
        assert!(faults >= 2 && cpu_ns > 0 && task_ns > 0, "{before:?} {after:?}");
    }

    #[test]
    fn a_group_that_always_ran_is_not_scaled() {
        let words = [4, 1000, 1000, 0, 50, 3_000_000, 51, 7_500_000, 52, 1_234, 53];
        assert_eq!(parse_group(&words), Some([3_000_000, 7_500_000, 1_234]));
    }

    #[test]
    fn a_group_that_shared_the_hardware_is_scaled() {
        let words = [4, 1000, 250, 0, 50, 30, 51, 75, 52, 1, 53];
        assert_eq!(parse_group(&words), Some([120, 300, 4]));
    }

    #[test]
    fn a_group_that_never_ran_has_no_counts() {
        assert_eq!(parse_group(&[4, 1000, 0, 0, 50, 0, 51, 0, 52, 0, 53]), None);
        assert_eq!(parse_group(&[4, 10, 20, 0, 50, 1, 51, 1, 52, 1, 53]), None);
        assert_eq!(parse_group(&[3, 1000, 1000, 0, 50, 1, 51, 1, 52]), None);
        assert_eq!(parse_group(&[]), None);
    }
}
