//! Reads for how long threads in slow spans could have run and had no CPU.
//!
//! The result is a lower bound, since it counts for spans that were entered throughout. Switch records of perf, and a
//! thread that was switched out and never blocked, give two others; the largest counts.

use super::waits::Scanner;
use crate::drain::ThreadCursor;
use crate::sampler::RunDelay;
use crate::stats::Counters;
use crate::sys::Schedstat;

/// Readings of all threads take 1 % of a core if one takes 10 µs: the file is opened for each.
const A_READING_NS: u64 = 1_000_000;
/// The pause after a failure. There may be files again by then.
const RETRY_NS: u64 = 1_000_000_000;
/// A thread that waits for less between two readings lacks no CPU.
const STARVED_NS: u64 = 1_000_000;

#[derive(Debug, Default)]
pub(super) struct RunDelayReader {
    /// When it was last read, or later if that failed: `CLOCK_MONOTONIC_RAW` in nanoseconds.
    read_ns: u64,
    /// The last reading, when that was, and when the thread ran before: in ticks.
    last: Option<(Schedstat, u64, u64)>,
}

impl RunDelayReader {
    /// Reads that of a thread in a span past its sampling delay, and publishes it to the thread's hooks. Returns how often
    /// the thread was given a CPU since the last reading, 0 if that is not known.
    pub(super) fn read(&mut self, cursor: &ThreadCursor, scanner: &mut Scanner<'_>) -> u64 {
        let pause_ns = A_READING_NS.saturating_mul(scanner.slow_threads);
        if scanner.now_ns < self.read_ns.saturating_add(pause_ns) {
            return 0;
        }
        self.read_ns = scanner.now_ns;
        // Before it is read, so that nothing that is read is later.
        let at = scanner.intake.clock().now();
        let file = Schedstat::open(cursor.thread.tid());
        match file.and_then(|file| Schedstat::read(&file)) {
            Ok(read) => {
                let ran_at = match self.last {
                    Some((same, _, ran_at)) if same == read => ran_at,
                    Some((_, at, _)) => at,
                    None => 0,
                };
                let before = self.last.map_or(read, |(last, ..)| last);
                let delayed_ns = read.run_delay_ns.saturating_sub(before.run_delay_ns);
                scanner.is_starved |= delayed_ns >= STARVED_NS;
                self.last = Some((read, at, ran_at));
                let delay = RunDelay { at, ns: read.run_delay_ns, ran_at };
                cursor.session.run_delay.set(delay, cursor.thread.last_hook_at());
                return read.runs.saturating_sub(before.runs);
            }
            Err(_) if cursor.thread.is_over() => {}
            Err(_) => {
                self.read_ns = scanner.now_ns.saturating_add(RETRY_NS);
                Counters::add(&scanner.intake.counters.waits.run_delays_unread, 1);
            }
        }
        0
    }
}
