//! The counters from which time is read.
#![allow(
    unsafe_code,
    reason = "reads the CPU's time stamp counter, 10 ns instead of 23; and rustix's clock_gettime \
              finds the vDSO by itself, which crashes under valgrind 3.19"
)]

use super::calls::may;
use crate::sys::types::UnusualCall;

/// The source of [`read_ticks`].
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

/// The counter, if the kernel uses it as its clock source. The kernel then verifies that it is constant, does not stop,
/// and is synchronized between CPUs.
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
    // SAFETY: RDTSC is part of x86-64. The kernel lets user mode execute it unless the process requested a trap
    // (PR_SET_TSC), in which case the vDSO would trap as well.
    unsafe { core::arch::x86_64::_rdtsc() }
}

#[cfg(target_arch = "aarch64")]
#[inline(always)]
fn counter() -> u64 {
    let ticks: u64;
    // SAFETY: CNTVCT_EL0 is readable in user mode whenever the kernel's vDSO uses it, which the clock source
    // `arch_sys_counter` implies. The instruction only writes `ticks`.
    unsafe {
        core::arch::asm!("mrs {}, cntvct_el0", out(reg) ticks, options(nomem, nostack, preserves_flags));
    }
    ticks
}

/// `CLOCK_MONOTONIC_RAW` in nanoseconds.
#[inline(always)]
pub(crate) fn monotonic_raw_ns() -> u64 {
    read(libc::CLOCK_MONOTONIC_RAW).unwrap_or(0)
}

/// The CPU time of the calling thread, in nanoseconds.
pub(crate) fn thread_cpu_ns() -> Option<u64> {
    read_cpu(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// Reads a CPU clock, which takes a system call.
pub(super) fn read_cpu(clock: libc::clockid_t) -> Option<u64> {
    may(UnusualCall::ClockGettime).then(|| read(clock)).flatten()
}

/// The kernel's tick, if known. Timers on CPU time expire at ticks.
pub(crate) fn tick_ns() -> Option<u64> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // The resolution of the coarse clock is the tick.
    // SAFETY: the pointer is to a local `timespec`, which the call fills.
    let result = unsafe { libc::clock_getres(libc::CLOCK_MONOTONIC_COARSE, &raw mut time) };
    (result == 0 && time.tv_nsec > 0).then_some(time.tv_nsec as u64)
}

#[inline(always)]
fn read(clock: libc::clockid_t) -> Option<u64> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a local `timespec`, which the call fills.
    let result = unsafe { libc::clock_gettime(clock, &raw mut time) };
    let ns = (time.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(time.tv_nsec as u64);
    (result == 0).then_some(ns)
}
