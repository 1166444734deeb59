//! The parser of hardware counter reads.

/// Counts since the counters were opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct HardwareCounts {
    pub(crate) cycles: u64,
    pub(crate) instructions: u64,
    pub(crate) cache_misses: u64,
}

/// Parses a read of the group of a dummy event, cycles, instructions and cache misses, in the layout that
/// `perf_event_open(2)` documents for `PERF_FORMAT_GROUP | ID | TOTAL_TIME_ENABLED | TOTAL_TIME_RUNNING`: the number of
/// events, both times, then a value and an id for each event.
///
/// If the hardware was multiplexed with other groups, the counts are scaled to the whole time. Returns `None` if the
/// group never ran or has another layout.
pub(crate) fn parse_group(words: &[u64]) -> Option<HardwareCounts> {
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
    Some(HardwareCounts {
        cycles: scale(cycles),
        instructions: scale(instructions),
        cache_misses: scale(cache_misses),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_a_group_of_the_kernel() {
        // The layout is the same for all events, and software events exist everywhere.
        let Ok(counters) = crate::sys::HardwareCounters::open_software() else {
            return;
        };
        let before = parse_group(&counters.read().unwrap()).unwrap();
        // More than an allocator caches (glibc's heaps have 64 MiB), so these pages have never been touched.
        let pages: Vec<u8> = vec![1; 96 << 20];
        std::thread::sleep(std::time::Duration::from_millis(1));
        let after = parse_group(&counters.read().unwrap()).unwrap();
        drop(pages);
        // Page faults, CPU time, CPU time.
        assert!(after.cycles >= before.cycles + 2, "{before:?} {after:?}");
        assert!(after.instructions > before.instructions, "{before:?} {after:?}");
        assert!(after.cache_misses > before.cache_misses, "{before:?} {after:?}");
    }

    #[test]
    fn a_group_that_always_ran_is_not_scaled() {
        let words = [4, 1000, 1000, 0, 50, 3_000_000, 51, 7_500_000, 52, 1_234, 53];
        let counts = parse_group(&words).unwrap();
        assert_eq!(
            counts,
            HardwareCounts { cycles: 3_000_000, instructions: 7_500_000, cache_misses: 1_234 }
        );
    }

    #[test]
    fn a_group_that_shared_the_hardware_is_scaled() {
        let words = [4, 1000, 250, 0, 50, 30, 51, 75, 52, 1, 53];
        let counts = parse_group(&words).unwrap();
        assert_eq!(counts, HardwareCounts { cycles: 120, instructions: 300, cache_misses: 4 });
    }

    #[test]
    fn a_group_that_never_ran_has_no_counts() {
        assert_eq!(parse_group(&[4, 1000, 0, 0, 50, 0, 51, 0, 52, 0, 53]), None);
        assert_eq!(parse_group(&[4, 10, 20, 0, 50, 1, 51, 1, 52, 1, 53]), None);
        assert_eq!(parse_group(&[3, 1000, 1000, 0, 50, 1, 51, 1, 52]), None);
        assert_eq!(parse_group(&[]), None);
    }
}
