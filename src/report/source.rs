//! The log line on the source: what it samples, its limits, and how to lift them.

use crate::sampler::{Periods, Sampler};
use crate::sys::{self, WhyRefused};

const NO_STACKS: &str = "source none: kept spans have times but no stacks";

/// Describes the source, its limits and how to lift them. The flag is true if it is less than was requested.
pub(crate) fn source(sampler: &Sampler) -> (String, bool) {
    let (line, is_less) = without_limits(sampler);
    let all: Vec<_> = std::iter::once(line).chain(unreadable(sampler)).collect();
    (all.join("; "), is_less || all.len() > 1)
}

fn without_limits(sampler: &Sampler) -> (String, bool) {
    let (probed, Periods { full_ns, low_ns }) = (sampler.probed(), sampler.periods());
    let mut rate = format!("{:.0} samples per second of CPU time", per_second(full_ns));
    if low_ns != full_ns {
        rate = format!("{rate}, down to {:.0} for a busy thread", per_second(low_ns));
    }
    if probed.refused() == Some(WhyRefused::OtherSystem) {
        let where_it_can = "threads can be sampled only on Linux (x86-64 and aarch64)";
        return (format!("{NO_STACKS}; {where_it_can}"), true);
    }
    if let Some(perf) = probed.perf.as_ref().filter(|perf| perf.refused.is_none()) {
        let kernel = match perf.sees_kernel() {
            true => "has kernel frames",
            false => {
                "is a single frame (kernel functions need CAP_PERFMON or kernel.perf_event_paranoid=1)"
            }
        };
        return (format!("source perf: {rate}; time in the kernel {kernel}"), false);
    }
    let refused = probed.perf.as_ref().and_then(|perf| perf.refused).map(|why| why.to_string());
    let perf_refused = refused.as_deref().unwrap_or("it was not requested");
    let Some(timers) = &probed.timers else {
        let line = match refused {
            None => "source none, as configured: kept spans have times but no stacks".to_owned(),
            Some(_) => format!(
                "{NO_STACKS}; perf is not used: {perf_refused}; or set TRACING_PROFILING_SOURCE=auto"
            ),
        };
        return (line, refused.is_some());
    };
    if let Some(why) = probed.timers_refused {
        let why = format!("timers are not used: {why}; perf is not used: {perf_refused}");
        return (format!("{NO_STACKS}; {why}"), true);
    }
    if let Some(tick_ns) = sys::tick_ns().filter(|tick_ns| *tick_ns > full_ns) {
        let [tick, full] = [tick_ns, full_ns].map(per_second);
        rate = format!(
            "{tick:.0} samples per second of CPU time, the kernel's tick, instead of {full:.0}"
        );
    }
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
