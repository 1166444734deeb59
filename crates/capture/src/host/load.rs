//! The load of the machine, or of the process's control group.

use std::fs;

use super::cgroup::cpu_directory;
use super::number_in;

/// The load of the machine, or of the process's control group.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// Of all CPUs of the host since it started.
    pub host: Option<CpuUse>,
    /// The CPU time that the control group has used, in microseconds, and its limit in cores.
    pub group: Option<(u64, f64)>,
    /// Of the control group, or of the host if there is none.
    pub memory_bytes: Option<u64>,
}

/// In ticks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuUse {
    pub busy: u64,
    pub all: u64,
}

/// The current load, from `proc_stat(5)`, `proc_meminfo(5)` and control groups version 2. Unreadable values are `None`.
pub fn load() -> Load {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let group = cpu_directory();
    let of_group = |name: &str| {
        let path = group.as_ref()?.join(name);
        fs::read_to_string(path).ok()
    };
    let cores = of_group("cpu.max").and_then(|text| cores_in(&text));
    let used = of_group("cpu.stat").and_then(|text| number_in(&text, "usage_usec"));
    let memory = of_group("memory.current").and_then(|text| text.trim().parse().ok());
    Load {
        host: host_cpu_in(&read("/proc/stat")),
        group: used.zip(cores),
        memory_bytes: memory.or_else(|| host_memory_in(&read("/proc/meminfo"))),
    }
}

/// The CPU limit of the group in cores, if it has one.
fn cores_in(text: &str) -> Option<f64> {
    let (quota_us, period_us) = text.trim().split_once(' ')?;
    let (quota_us, period_us): (f64, f64) = (quota_us.parse().ok()?, period_us.parse().ok()?);
    (period_us > 0.0).then(|| quota_us / period_us)
}

fn host_cpu_in(text: &str) -> Option<CpuUse> {
    let line = text.lines().next()?.strip_prefix("cpu ")?;
    // The time of guests is already part of the first two.
    let ticks: Vec<u64> =
        line.split_whitespace().take(8).map_while(|ticks| ticks.parse().ok()).collect();
    let [_, _, _, idle, waiting, ..] = *ticks.as_slice() else { return None };
    let all = ticks.iter().try_fold(0_u64, |sum, ticks| sum.checked_add(*ticks))?;
    Some(CpuUse { busy: all - idle - waiting, all })
}

fn host_memory_in(text: &str) -> Option<u64> {
    let all = number_in(text, "MemTotal")?;
    let available = number_in(text, "MemAvailable")?;
    Some(all.saturating_sub(available).saturating_mul(1024))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_files_of_the_kernel() {
        let stat = "cpu  100 20 30 800 50 6 7 8 90 10\ncpu0 1 1 1 1 1 1 1 1 1 1\n";
        assert_eq!(host_cpu_in(stat), Some(CpuUse { busy: 171, all: 1_021 }));
        let memory = "MemTotal:        8000 kB\nMemFree:  1 kB\nMemAvailable:    6000 kB\n";
        assert_eq!(host_memory_in(memory), Some(2_000 * 1024));
        assert_eq!(cores_in("150000 100000\n"), Some(1.5));
        assert_eq!(cores_in("max 100000\n"), None);
        assert_eq!(number_in("usage_usec 12345\nuser_usec 1\n", "usage_usec"), Some(12_345));
    }

    #[test]
    fn malformed_files_are_ignored() {
        for text in ["", "cpu", "cpu \n", "cpu  1 2 3\n", "intr 5\n", "cpu  a b c d e\n"] {
            assert_eq!(host_cpu_in(text), None, "{text:?}");
        }
        assert_eq!(host_memory_in("MemTotal: x kB\nMemAvailable: 1 kB"), None);
        assert_eq!((cores_in("100000 0"), cores_in("max")), (None, None));
        assert_eq!(host_cpu_in(&format!("cpu {}", " 18446744073709551615".repeat(8))), None);
    }

    #[cfg(not(tracing_profiling_unsupported))]
    #[test]
    fn the_load_of_this_machine_is_known() {
        let load = load();
        assert!(load.host.is_some_and(|host| host.all > 0), "{load:?}");
        assert!(load.memory_bytes.is_some_and(|bytes| bytes > 1 << 20), "{load:?}");
    }
}
