//! The counters from which time is read, and timers.
#![allow(
    unsafe_code,
    reason = "reads the CPU's time stamp counter, 10 ns instead of 23, and the kernel's clocks without the C library; \
              rustix's clock_gettime finds the vDSO by itself, which crashes under valgrind 3.19; rustix has no POSIX timers"
)]

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;

use super::blocked::cpu_clock_of;
use super::calls::may;
use super::signal::last_error;
use super::texts::field;
use crate::sys::types::{FilteredSyscall, WhyRefused};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TickSource {
    /// The time stamp counter (x86-64) or the virtual count register (aarch64).
    Counter,
    /// `CLOCK_MONOTONIC_RAW` by the C library, which uses the vDSO, in nanoseconds.
    Raw,
    /// `CLOCK_MONOTONIC_RAW` by a system call, because another function is in the place of the C library's.
    RawByCall,
}

impl TickSource {
    /// Whether a tick is not a nanosecond.
    pub(crate) fn needs_rate(self) -> bool {
        self == Self::Counter
    }
}

/// The counter, if the kernel uses it as its clock source: it is then constant, and synchronized between CPUs.
pub(crate) fn tick_source() -> TickSource {
    const CURRENT: &str = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
    let trusted = if cfg!(target_arch = "x86_64") { "tsc" } else { "arch_sys_counter" };
    match std::fs::read_to_string(CURRENT) {
        Ok(name) if name.trim() == trusted => TickSource::Counter,
        _ if is_replaced() => TickSource::RawByCall,
        _ => TickSource::Raw,
    }
}

/// Whether another function is in the place of the C library's `clock_gettime`, as that of libfaketime.
fn is_replaced() -> bool {
    let before = read_by_call(libc::CLOCK_MONOTONIC_RAW);
    let found = read(libc::CLOCK_MONOTONIC_RAW);
    let after = read_by_call(libc::CLOCK_MONOTONIC_RAW);
    let between = before.zip(after).map(|(before, after)| before..=after);
    between.is_some_and(|between| found.is_none_or(|found| !between.contains(&found)))
}

#[inline(always)]
pub(crate) fn read_ticks(source: TickSource) -> u64 {
    match source {
        TickSource::Counter => counter(),
        TickSource::Raw => read(libc::CLOCK_MONOTONIC_RAW).unwrap_or(0),
        TickSource::RawByCall => monotonic_raw_ns(),
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

/// `CLOCK_MONOTONIC_RAW` in nanoseconds, by a system call where that is allowed: 200 ns instead of 30. A function in the place
/// of the C library's can return another time than perf's records have, and take locks, which a signal handler must not.
pub(crate) fn monotonic_raw_ns() -> u64 {
    let clock = libc::CLOCK_MONOTONIC_RAW;
    read_by_call(clock).or_else(|| read(clock)).unwrap_or(0)
}

/// Whether the clock of perf's records, which is the initial time namespace's, may not be that of this process.
pub(crate) fn is_in_time_namespace() -> bool {
    let offsets = std::fs::read_to_string("/proc/self/timens_offsets").unwrap_or_default();
    field(&offsets, "monotonic").is_some_and(has_offset)
}

/// Of `SECONDS NANOSECONDS`.
fn has_offset(offset: &str) -> bool {
    offset.split_ascii_whitespace().any(|number| number != "0")
}

pub fn thread_cpu_ns() -> Option<u64> {
    read_by_call(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// The CPU time of the calling thread, in nanoseconds, or why it cannot be read.
pub(crate) fn try_thread_cpu_ns() -> Result<u64, WhyRefused> {
    read_cpu(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// The CPU time of this process, in nanoseconds, with that of its threads that have ended.
pub fn process_cpu_ns() -> Option<u64> {
    read_by_call(libc::CLOCK_PROCESS_CPUTIME_ID)
}

/// Reads a CPU clock, which the C library cannot do without a system call either.
pub(super) fn read_cpu(clock: libc::clockid_t) -> Result<u64, WhyRefused> {
    if !may(FilteredSyscall::ClockGettime) {
        return Err(WhyRefused::KilledBySeccomp);
    }
    read_by_call(clock).ok_or_else(|| failed(FilteredSyscall::ClockGettime))
}

/// `None` if the system does not allow it.
fn read_by_call(clock: libc::clockid_t) -> Option<u64> {
    if !may(FilteredSyscall::ClockGettime) {
        return None;
    }
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a local `timespec`, which the call fills.
    let result = unsafe { libc::syscall(libc::SYS_clock_gettime, clock, &raw mut time) };
    (result == 0).then(|| nanoseconds(time))
}

/// Creates a timer on the CPU time of thread `tid`, whose signals go to it with that value. The error is an errno.
pub(super) fn create_timer(signal: c_int, tid: u32, value: u64) -> Result<libc::timer_t, i32> {
    let mut event = MaybeUninit::<libc::sigevent>::zeroed();
    let pointer = event.as_mut_ptr();
    // SAFETY: writes fields of a local structure; all zeros is a valid rest.
    unsafe {
        (*pointer).sigev_value = libc::sigval { sival_ptr: value as *mut c_void };
        (*pointer).sigev_signo = signal;
        (*pointer).sigev_notify = libc::SIGEV_THREAD_ID;
        (*pointer).sigev_notify_thread_id = tid.cast_signed();
    }
    let mut id: libc::timer_t = std::ptr::null_mut();
    // SAFETY: both pointers are to initialized local variables.
    if unsafe { libc::timer_create(cpu_clock_of(tid), pointer, &raw mut id) } == 0 {
        return Ok(id);
    }
    Err(last_error())
}

/// Sets the time to the first signal, 0 to disarm the timer, and between signals. The timer must not be deleted.
pub(super) fn set_timer(
    id: libc::timer_t,
    first_ns: u64,
    period_ns: u64,
) -> Result<(), WhyRefused> {
    if !may(FilteredSyscall::TimerSettime) {
        return Err(WhyRefused::KilledBySeccomp);
    }
    let time = |ns: u64| libc::timespec {
        // `time_t`, whose name is deprecated on musl.
        tv_sec: (ns / 1_000_000_000) as _,
        tv_nsec: (ns % 1_000_000_000) as libc::c_long,
    };
    let setting = libc::itimerspec { it_interval: time(period_ns), it_value: time(first_ns) };
    // SAFETY: a timer that is not deleted, and a structure that lives long enough.
    let result = unsafe { libc::timer_settime(id, 0, &raw const setting, std::ptr::null_mut()) };
    if result == 0 { Ok(()) } else { Err(failed(FilteredSyscall::TimerSettime)) }
}

/// Deletes a timer, which must not be deleted yet.
pub(super) fn delete_timer(id: libc::timer_t) -> Result<(), WhyRefused> {
    if !may(FilteredSyscall::TimerDelete) {
        return Err(WhyRefused::KilledBySeccomp);
    }
    // SAFETY: created by `timer_create`, and its owner uses it no more.
    match unsafe { libc::timer_delete(id) } {
        0 => Ok(()),
        // musl returns what the system call does, and leaves `errno` as it was.
        result if cfg!(target_env = "musl") => {
            Err(WhyRefused::Failed(FilteredSyscall::TimerDelete, -result))
        }
        _ => Err(failed(FilteredSyscall::TimerDelete)),
    }
}

fn failed(call: FilteredSyscall) -> WhyRefused {
    WhyRefused::Failed(call, last_error())
}

fn nanoseconds(time: libc::timespec) -> u64 {
    (time.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(time.tv_nsec as u64)
}

/// The kernel's tick, if known. Timers on CPU time expire at ticks.
pub fn tick_ns() -> Option<u64> {
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
    (result == 0).then(|| nanoseconds(time))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_offset_of_a_time_namespace_is_known() {
        assert!(has_offset("-60 000000009") && has_offset("0 9") && has_offset("1         0"));
        assert!(!has_offset("0         0") && !has_offset(""));
    }

    #[test]
    fn the_clock_of_the_c_library_is_in_its_place() {
        // The library of a test that replaces it is loaded by another program.
        assert!(!is_replaced());
        assert!(read_by_call(-1).is_none(), "no such clock");
        let refused = WhyRefused::Failed(FilteredSyscall::ClockGettime, libc::EINVAL);
        assert_eq!(read_cpu(-1), Err(refused));
    }
}
