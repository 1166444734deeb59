//! An event, a span and a log record below the level that anybody prints.

use std::hint::black_box;

use cpu_time::ThreadTime;

const TIMES: u32 = 20_000;

#[inline(never)]
fn each(mut action: impl FnMut()) -> f64 {
    // Other programs of the machine do not count.
    let start = ThreadTime::now();
    for _ in 0..TIMES {
        action();
    }
    start.elapsed().as_nanos() as f64 / f64::from(TIMES)
}

/// Answers each line with the nanoseconds that each takes.
pub(crate) fn run() {
    println!("0");
    for _ in std::io::stdin().lines() {
        let trace_event = each(|| tracing::trace!(number = black_box(1), "an event"));
        let debug_span = each(|| {
            let span = tracing::debug_span!("span", number = black_box(1));
            span.in_scope(|| black_box(()));
        });
        let log_trace = each(|| log::trace!("a record {}", black_box(1)));
        println!("{trace_event} {debug_span} {log_trace}");
    }
}
