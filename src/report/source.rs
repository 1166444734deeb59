//! The log line on the source: what it samples, its limits, and how to lift them.

use crate::sampler::{Periods, Sampler};
use crate::sys::{self, WhyRefused};

const NO_STACKS: &str = "source none: kept spans have times but no stacks";

/// Describes the source, its limits and how to lift them. The flag is true if it is less than was requested.
pub(crate) fn source(sampler: &Sampler) -> (String, bool) {
    let (mut line, mut is_less) = without_limits(sampler);
    for missing in unreadable(sampler) {
        line = format!("{line}; {missing}");
        is_less = true;
    }
    (line, is_less)
}

fn without_limits(sampler: &Sampler) -> (String, bool) {
    let (probed, rate) = (sampler.probed(), rate(sampler.periods()));
    if probed.refused() == Some(WhyRefused::OtherSystem) {
        let where_it_can = "threads can be sampled only on Linux (x86-64 and aarch64)";
        return (format!("{NO_STACKS}; {where_it_can}"), true);
    }
    let perf_refused = match &probed.perf {
        Some(perf) => match perf.refused {
            None => {
                let kernel = match perf.sees_kernel() {
                    true => "time in the kernel has kernel frames",
                    false => {
                        "time in the kernel is a single frame (kernel functions need CAP_PERFMON or \
                         kernel.perf_event_paranoid=1)"
                    }
                };
                return (format!("source perf: {rate}; {kernel}"), false);
            }
            Some(why) => why.to_string(),
        },
        None => "it was not requested".to_owned(),
    };
    let Some(timers) = &probed.timers else {
        return match &probed.perf {
            None => {
                let line = "source none, as configured: kept spans have times but no stacks";
                (line.to_owned(), false)
            }
            Some(_) => {
                let otherwise = "or set TRACING_PROFILING_SOURCE=auto";
                (format!("{NO_STACKS}; perf is not used: {perf_refused}; {otherwise}"), true)
            }
        };
    };
    if let Some(why) = probed.timers_refused {
        let why = format!("timers are not used: {why}; perf is not used: {perf_refused}");
        return (format!("{NO_STACKS}; {why}"), true);
    }
    let period_ns = sampler.periods().full_ns;
    let rate = match sys::tick_ns() {
        Some(tick_ns) if tick_ns > period_ns => format!(
            "{:.0} samples per second of CPU time, the kernel's tick, instead of {:.0}",
            per_second(tick_ns),
            per_second(period_ns)
        ),
        _ => rate,
    };
    // As gdb calls it.
    let signal = match timers.signal() {
        Ok(27) => "SIGPROF".to_owned(),
        Ok(number) => format!("SIG{number}"),
        Err(_) => "not chosen yet".to_owned(),
    };
    let mut line = format!(
        "source timer: {rate}; time in the kernel is attributed to the system call; perf would \
         show more: {perf_refused}; the signal is {signal} (in gdb: `handle {signal} nostop noprint pass`)"
    );
    if probed.is_traced {
        line += "; a debugger or another tracer is attached, which stops at each signal: no thread is sampled until it \
                 leaves (TRACING_PROFILING_SOURCE=timer samples nonetheless)";
    }
    if let Some(why) = probed.timers_lacking {
        line = format!("{line}; at present no thread can be sampled: {why}");
    }
    (line, probed.is_traced || probed.timers_lacking.is_some())
}

/// What cannot be read of threads, and what is missing for that reason, but for calls that a filter forbids.
fn unreadable(sampler: &Sampler) -> impl Iterator<Item = String> {
    let unreadable = sampler.probed().unreadable;
    let because = |why| match why {
        WhyRefused::Failed(..) => format!(" ({why})"),
        _ => String::new(),
    };
    let cpu_time = match (unreadable.own_cpu_time, unreadable.cpu_time_of_others) {
        (Some(why), _) => Some(format!(
            "the CPU time of threads cannot be read{}: rules with `on_cpu`, `own_on_cpu` or `off_cpu` match no span",
            because(why)
        )),
        (None, why) => why.map(|why| {
            format!(
                "the CPU time of other threads cannot be read{}: waits are recorded by perf alone, and not which of \
                 the on-CPU time was sampled",
                because(why)
            )
        }),
    };
    let usage = unreadable.usage.filter(|why| matches!(why, WhyRefused::Failed(..)));
    let usage = usage
        .map(|why| format!("page faults and context switches are not counted{}", because(why)));
    cpu_time.into_iter().chain(usage)
}

/// Says why a thread was not sampled, although the source was found to work.
pub(crate) fn unsampled(why: WhyRefused) -> String {
    format!("some threads are not sampled, and their spans have times but no stacks: {why}")
}

/// Says that the process cannot be profiled continuously now, and why; `None` if it can.
pub(crate) fn no_continuous(sampler: &Sampler) -> Option<String> {
    let probed = sampler.probed();
    if probed.has_perf() {
        return None;
    }
    let why = match &probed.timers {
        Some(timers) => probed.timers_refused.or_else(|| timers.lacking())?.to_string(),
        None => {
            let why = probed
                .refused()
                .map_or_else(|| "no source was requested".to_owned(), |why| why.to_string());
            why + "; set TRACING_PROFILING_SOURCE=auto"
        }
    };
    Some(format!("the process is not profiled continuously: {why}"))
}

fn per_second(period_ns: u64) -> f64 {
    1e9 / period_ns.max(1) as f64
}

fn rate(Periods { full_ns, low_ns }: Periods) -> String {
    let full = format!("{:.0} samples per second of CPU time", per_second(full_ns));
    match low_ns == full_ns {
        true => full,
        false => format!("{full}, down to {:.0} for a busy thread", per_second(low_ns)),
    }
}
