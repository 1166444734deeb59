//! The log line on the source: what it samples, its limits, and how to lift them.

use std::time::Duration;

use super::perf::Perf;
use super::probe::{Probed, Unreadable};
use super::rate::Periods;
use super::timer::Timers;
use crate::sys::{self, FilteredSyscall, WhyRefused};

const OTHER_SYSTEM: &str = "source none: kept spans have times but no stacks; threads can be sampled only on \
    Linux (x86-64 and aarch64)";
const NO_STACKS: &str = "source none: kept spans have times but no stacks";

/// Describes the source, its limits and how to lift them. The flag is true if it is less than was requested.
pub(super) fn describe(probed: &Probed, periods: Periods) -> (String, bool) {
    let (mut line, mut is_less) = describe_source(probed, periods);
    for missing in describe_unreadable(probed) {
        line.push_str("; ");
        line.push_str(&missing);
        is_less = true;
    }
    (line, is_less)
}

fn describe_source(probed: &Probed, periods: Periods) -> (String, bool) {
    let of_perf = probed.perf.as_ref().and_then(|perf| perf.refused);
    if [of_perf, probed.timers_refused].contains(&Some(WhyRefused::OtherSystem)) {
        return (OTHER_SYSTEM.to_owned(), true);
    }
    let perf_refused = match &probed.perf {
        Some(perf) => match perf.refused {
            None => return (describe_perf(perf, periods), false),
            Some(why) => describe_perf_refusal(why),
        },
        None => "it was not requested".to_owned(),
    };
    match (&probed.timers, probed.timers_refused) {
        (Some(timers), None) => {
            let mut line = describe_timers(timers, periods, &perf_refused, probed.is_traced);
            if let Some(why) = probed.timers_lacking {
                line.push_str("; at present no thread can be sampled: ");
                line.push_str(&describe_refusal(why));
            }
            (line, probed.is_traced || probed.timers_lacking.is_some())
        }
        (None, _) if probed.perf.is_none() => {
            ("source none, as configured: kept spans have times but no stacks".to_owned(), false)
        }
        (None, _) => (
            format!(
                "{NO_STACKS}; perf is not used: {perf_refused}; or set TRACING_PROFILING_SOURCE=auto"
            ),
            true,
        ),
        (Some(_), Some(why)) => {
            let refused = describe_refusal(why);
            let line = format!(
                "{NO_STACKS}; timers are not used: {refused}; perf is not used: {perf_refused}"
            );
            (line, true)
        }
    }
}

/// What cannot be read of threads, and what is missing for that reason, but for calls that a filter forbids.
fn describe_unreadable(probed: &Probed) -> Vec<String> {
    let Unreadable { own_cpu_time, cpu_time_of_others, usage } = probed.unreadable;
    let because = |why| match why {
        WhyRefused::Failed(..) => format!(" ({})", describe_refusal(why)),
        _ => String::new(),
    };
    let mut missing = Vec::new();
    if let Some(why) = own_cpu_time {
        missing.push(format!(
            "the CPU time of threads cannot be read{}: rules with `on_cpu`, `own_on_cpu` or `off_cpu` match no span",
            because(why)
        ));
    } else if let Some(why) = cpu_time_of_others {
        missing.push(format!(
            "the CPU time of other threads cannot be read{}: waits are recorded by perf alone, and not which of the \
             on-CPU time was sampled",
            because(why)
        ));
    }
    if let Some(why @ WhyRefused::Failed(..)) = usage {
        let why = because(why);
        missing.push(format!("page faults and context switches are not counted{why}"));
    }
    missing
}

fn describe_perf_refusal(why: WhyRefused) -> String {
    match why {
        WhyRefused::NotSupported(errno) => {
            format!("this kernel has no perf events (perf_event_open: {})", describe_errno(errno))
        }
        WhyRefused::NotAllowed(errno) => format!(
            "perf_event_open is refused ({}); allow it on the host with `sysctl kernel.perf_event_paranoid=2`, in a \
             container with the capability PERFMON (`docker run --cap-add PERFMON`)",
            describe_errno(errno)
        ),
        WhyRefused::KilledBySeccomp => "the seccomp filter of this process kills it at perf_event_open, which is therefore not \
            called; allow it (`SystemCallFilter=` of systemd)"
            .to_owned(),
        why => describe_refusal(why),
    }
}

fn describe_errno(errno: i32) -> std::io::Error {
    std::io::Error::from_raw_os_error(errno)
}

/// Says that a source has given no sample while threads ran.
pub(super) fn describe_silence(by_perf: bool, ran: Duration) -> String {
    let (source, instead) = match by_perf {
        true => ("perf", "TRACING_PROFILING_SOURCE=timer may do better"),
        false => ("timer", "perf does better where it is allowed"),
    };
    format!(
        "the source {source} gives no samples, although the system refuses nothing: threads ran for {ran:.1?} while they \
         were sampled, and there was none, so kept spans have times but no stacks; {instead}"
    )
}

/// Says that a thread was not sampled, although the source was found to work.
pub(super) fn describe_unsampled(why: WhyRefused) -> String {
    format!(
        "some threads are not sampled, and their spans have times but no stacks: {}",
        describe_refusal(why)
    )
}

/// Says that the process cannot be profiled continuously now, and why; `None` if it can.
pub(super) fn describe_no_continuous(probed: &Probed) -> Option<String> {
    if probed.has_perf() {
        return None;
    }
    let why = match &probed.timers {
        Some(timers) => probed.timers_refused.or_else(|| timers.lacking()).map(describe_refusal)?,
        None => {
            let refused =
                probed.perf.as_ref().and_then(|perf| perf.refused).map(describe_perf_refusal);
            refused.unwrap_or_else(|| "no source was requested".to_owned())
                + "; set TRACING_PROFILING_SOURCE=auto"
        }
    };
    Some(format!("the process is not profiled continuously: {why}"))
}

fn describe_rate(periods: Periods) -> String {
    let rate = |period_ns: u64| 1e9 / period_ns.max(1) as f64;
    let (full, low) = (rate(periods.full_ns), rate(periods.low_ns));
    if periods.full_ns == periods.low_ns {
        return format!("{full:.0} samples per second of CPU time");
    }
    format!("{full:.0} samples per second of CPU time, down to {low:.0} for a busy thread")
}

fn describe_perf(perf: &Perf, periods: Periods) -> String {
    let kernel = if perf.sees_kernel() {
        "time in the kernel has kernel frames"
    } else {
        "time in the kernel is a single frame (kernel functions need CAP_PERFMON or \
             kernel.perf_event_paranoid=1)"
    };
    let hardware = if perf.has_hardware { "counted" } else { "not available" };
    let rate = describe_rate(periods);
    format!("source perf: {rate}; {kernel}; hardware counters {hardware}")
}

fn describe_timers(
    timers: &Timers,
    periods: Periods,
    perf_refused: &str,
    is_traced: bool,
) -> String {
    let period_ns = periods.full_ns;
    let wanted = 1e9 / period_ns.max(1) as f64;
    let rate = match sys::tick_ns() {
        Some(tick_ns) if tick_ns > period_ns => format!(
            "{:.0} samples per second of CPU time, the kernel's tick, instead of {wanted:.0}",
            1e9 / tick_ns as f64
        ),
        _ => describe_rate(periods),
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

fn describe_refusal(why: WhyRefused) -> String {
    let text = match why {
        WhyRefused::Failed(call, errno) => {
            let name = match call {
                FilteredSyscall::PerfEventOpen => "perf_event_open, or an ioctl of its events,",
                call => call.name(),
            };
            return format!("{name} is refused: {}", describe_errno(errno));
        }
        WhyRefused::Other(errno) if errno != 0 => return describe_errno(errno).to_string(),
        WhyRefused::NotAllowed(_) | WhyRefused::NotSupported(_) => "perf events are refused",
        WhyRefused::OtherSystem => "this system has no such timers",
        WhyRefused::KilledBySeccomp => {
            "the seccomp filter of this process kills it at their system calls"
        }
        WhyRefused::NoTimers => {
            return format!(
                "the limit of pending signals is reached (`ulimit -i`, now {}); each timer takes one, and all of them at \
                 most an eighth: raise it to eight times the number of threads",
                sys::pending_signal_limit()
            );
        }
        WhyRefused::NoSignal => {
            "no signal is free, or not the one of TRACING_PROFILING_SIGNAL: it must be a real-time signal or SIGPROF, \
             and have no handler"
        }
        WhyRefused::SignalBlocked => "the thread blocks the signal of timers",
        WhyRefused::NoStack => "the bounds of the thread's stack are not known (is /proc mounted?)",
        WhyRefused::Traced => "a debugger is attached",
        WhyRefused::SmallSignalStack => "the signal stacks of threads are too small",
        WhyRefused::NoFiles => "the limit on open files is reached",
        WhyRefused::NoLockedMemory => "the limit of locked memory is reached",
        WhyRefused::NoMemory => "out of memory",
        WhyRefused::Other(_) | WhyRefused::NotAsked | WhyRefused::Ended => {
            "for an unexpected reason"
        }
    };
    text.to_owned()
}
