//! The log line on the source: what it samples, its limits, and how to lift them.

use super::perf::Perf;
use super::rate::Periods;
use super::timer::Timers;
use crate::sys::{self, TimerClock, WhyRefused};

pub(super) const OTHER_SYSTEM: &str = "source none: kept spans have times but no stacks; threads can be sampled only on \
    Linux (x86-64 and aarch64)";
pub(super) const PERF_NOT_SUPPORTED: &str = "this kernel has no perf events";
pub(super) const PERF_DEADLY: &str = "the seccomp filter of this process kills it at perf_event_open, which is therefore not \
    called; allow it (`SystemCallFilter=` of systemd)";
pub(super) const PERF_REFUSED: &str = "perf_event_open is refused; allow it on the host with \
    `sysctl kernel.perf_event_paranoid=2`, in a container with the capability PERFMON \
    (`docker run --cap-add PERFMON`)";

fn describe_rate(periods: Periods) -> String {
    let rate = |period_ns: u64| 1e9 / period_ns.max(1) as f64;
    let (first, last) = (rate(periods.first()), rate(periods.last()));
    if periods.first() == periods.last() {
        return format!("{first:.0} samples per second of CPU time");
    }
    format!("{first:.0} samples per second of CPU time, down to {last:.0} for a busy thread")
}

pub(super) fn describe_perf(perf: &Perf, periods: Periods) -> String {
    let kernel = if perf.sees_kernel() {
        "time in the kernel has kernel frames"
    } else {
        "time in the kernel is a single frame (kernel functions need CAP_PERFMON or \
             kernel.perf_event_paranoid=1)"
    };
    let hardware = if perf.has_hardware() { "counted" } else { "not available" };
    let rate = describe_rate(periods);
    format!("source perf: {rate}; {kernel}; hardware counters {hardware}")
}

pub(super) fn describe_timers(
    timers: &Timers,
    periods: Periods,
    perf_refused: &str,
    is_traced: bool,
) -> String {
    let period_ns = periods.first();
    let wanted = 1e9 / period_ns.max(1) as f64;
    let rate = match (timers.clock(), sys::tick_ns()) {
        (TimerClock::Cpu, Some(tick_ns)) if tick_ns > period_ns => format!(
            "{:.0} samples per second of CPU time, the kernel's tick, instead of {wanted:.0} (finer with \
             TRACING_PROFILING_TIMER_CLOCK=monotonic, which interrupts waiting system calls)",
            1e9 / tick_ns as f64
        ),
        (TimerClock::Cpu, _) => describe_rate(periods),
        (TimerClock::Monotonic, _) => {
            format!("{}, which interrupt waiting system calls", describe_rate(periods))
        }
    };
    // As gdb calls it.
    let signal = match timers.signal() {
        Ok(27) => "SIGPROF".to_owned(),
        Ok(number) => format!("SIG{number}"),
        Err(_) => "not chosen yet".to_owned(),
    };
    let traced = if is_traced { IS_TRACED } else { "" };
    format!(
        "source timer: {rate}; time in the kernel is attributed to the system call; no hardware \
         counters; perf would show more: {perf_refused}; the signal is {signal} (in gdb: `handle {signal} nostop \
         noprint pass`){traced}"
    )
}

const IS_TRACED: &str = "; a debugger or another tracer is attached, which stops at each signal: no thread is sampled \
    until it leaves (TRACING_PROFILING_SOURCE=timer samples nonetheless)";

pub(super) fn describe_refusal(why: WhyRefused) -> &'static str {
    match why {
        WhyRefused::NotAllowed => "timer_create is not allowed here",
        WhyRefused::NotSupported | WhyRefused::OtherSystem => "this system has no such timers",
        WhyRefused::Deadly => "the seccomp filter of this process kills it at their system calls",
        WhyRefused::NoTimers => "the limit on pending signals (`ulimit -i`) is reached",
        WhyRefused::NoSignal => {
            "no signal is free, or not the one of TRACING_PROFILING_SIGNAL: it must be a real-time signal or SIGPROF, \
             and have no handler"
        }
        WhyRefused::Traced => "a debugger is attached",
        WhyRefused::SmallSignalStack => "the signal stacks of threads are too small",
        WhyRefused::NoFiles => "the limit on open files is reached",
        WhyRefused::NoLockedMemory | WhyRefused::NoMemory => "out of memory",
        WhyRefused::Other(_) | WhyRefused::NotAsked | WhyRefused::Ended => {
            "for an unexpected reason"
        }
    }
}
