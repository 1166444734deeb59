//! The counters that time is read from.
#![allow(unsafe_code, reason = "reads the CPU's time stamp counter, 10 ns instead of 23")]

use rustix::time::{ClockId, clock_gettime};

/// What [`read_ticks`] reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TickSource {
    /// The time stamp counter (x86-64) or the virtual count register (aarch64).
    Counter,
    /// `CLOCK_MONOTONIC_RAW` through the vDSO, in nanoseconds.
    Raw,
}

impl TickSource {
    /// Whether a tick is not a nanosecond.
    pub(crate) fn needs_rate(self) -> bool {
        self == Self::Counter
    }
}

/// The counter where the kernel uses it as its own clock source: then it is constant, does not
/// stop, and is in step between CPUs, because the kernel watches over just that.
pub(crate) fn tick_source() -> TickSource {
    const CURRENT: &str = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
    let trusted = if cfg!(target_arch = "x86_64") { "tsc" } else { "arch_sys_counter" };
    match std::fs::read_to_string(CURRENT) {
        Ok(name) if name.trim() == trusted => TickSource::Counter,
        _ => TickSource::Raw,
    }
}

#[inline(always)]
pub(crate) fn read_ticks(source: TickSource) -> u64 {
    match source {
        TickSource::Counter => counter(),
        TickSource::Raw => monotonic_raw_ns(),
    }
}

#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn counter() -> u64 {
    // SAFETY: RDTSC is part of x86-64. The kernel lets user mode execute it unless the process
    // asked for a trap (PR_SET_TSC), and it may not be the kernel's clock source then for us:
    // the vDSO would trap as well.
    unsafe { core::arch::x86_64::_rdtsc() }
}

#[cfg(target_arch = "aarch64")]
#[inline(always)]
fn counter() -> u64 {
    let ticks: u64;
    // SAFETY: CNTVCT_EL0 is readable in user mode whenever the kernel's vDSO uses it, which is
    // what `arch_sys_counter` as clock source means. The instruction only writes `ticks`.
    unsafe {
        core::arch::asm!("mrs {}, cntvct_el0", out(reg) ticks, options(nomem, nostack, preserves_flags));
    }
    ticks
}

/// `CLOCK_MONOTONIC_RAW` in nanoseconds.
pub(crate) fn monotonic_raw_ns() -> u64 {
    let now = clock_gettime(ClockId::MonotonicRaw);
    (now.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(now.tv_nsec as u64)
}
