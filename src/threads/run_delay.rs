//! Reads for how long threads in slow spans could have run and had no CPU.
//!
//! The result is a lower bound, since it counts for spans that were entered throughout. Switch records of perf, and a
//! thread that was switched out and never blocked, give two others; the largest counts.

use std::io::ErrorKind::{NotFound, PermissionDenied};

use super::waits::Scanner;
use crate::drain::ThreadCursor;
use crate::sampler::RunDelay;
use crate::stats::Counters;
use crate::sys::{self, KernelFile, Schedstat};

/// The layer may have one in this many of the files that the process may open for this, and no more than [`MAX_FILES`].
const SHARE_OF_FILES: u64 = 32;
const MAX_FILES: u64 = 256;
/// A reading takes some 2 µs, and those of all threads 1 % of a core.
const A_READING_NS: u64 = 200_000;
/// A thread that waits for less between two readings lacks no CPU.
const STARVED_NS: u64 = 1_000_000;

#[derive(Debug, Default)]
pub(super) struct RunDelayReader {
    /// Open as long as the thread is sampled for its spans.
    file: Option<KernelFile>,
    read_ns: u64,
    /// The last reading, when that was, and when the thread ran before: in ticks.
    last: Option<(Schedstat, u64, u64)>,
    /// There is none to read.
    is_refused: bool,
    /// There is none to read as long as the thread is sampled.
    is_left_out: bool,
}

impl RunDelayReader {
    pub(super) fn is_open(&self) -> bool {
        self.file.is_some()
    }

    pub(super) fn end(&mut self) {
        self.file = None;
        self.is_left_out = false;
    }

    /// Reads that of a thread in a span past its sampling delay, and publishes it to the thread's hooks.
    pub(super) fn read(&mut self, cursor: &ThreadCursor, scanner: &mut Scanner<'_>) {
        let pause_ns = A_READING_NS.saturating_mul(scanner.run_delay_files);
        let is_early = self.is_open() && scanner.now_ns.saturating_sub(self.read_ns) < pause_ns;
        if self.is_refused || self.is_left_out || is_early {
            return;
        }
        if self.file.is_none() {
            // A system call.
            let most_files = (sys::open_file_limit() / SHARE_OF_FILES).clamp(1, MAX_FILES);
            if scanner.run_delay_files >= most_files {
                self.note_left_out(scanner);
                return;
            }
            match Schedstat::open(cursor.thread.tid()) {
                Ok(file) => {
                    self.file = Some(file);
                    scanner.run_delay_files += 1;
                }
                Err(error) => {
                    // Another file may be closed by the next time.
                    // Without `/proc`, or where it is hidden.
                    self.is_refused = matches!(error.kind(), NotFound | PermissionDenied);
                    self.note_left_out(scanner);
                    return;
                }
            }
        }
        let Some(file) = &self.file else { return };
        // Before it is read, so that nothing that is read is later.
        let at = scanner.intake.clock().now();
        match Schedstat::read(file) {
            Ok(read) => {
                let ran_at = match self.last {
                    Some((same, _, ran_at)) if same == read => ran_at,
                    Some((_, at, _)) => at,
                    None => 0,
                };
                let before = self.last.map_or(read.run_delay_ns, |(last, ..)| last.run_delay_ns);
                scanner.is_starved |= read.run_delay_ns.saturating_sub(before) >= STARVED_NS;
                self.last = Some((read, at, ran_at));
                let read = RunDelay { at, ns: read.run_delay_ns, ran_at };
                cursor.session.run_delay.set(read, cursor.thread.last_hook_at());
            }
            Err(_) if cursor.thread.is_over() => {}
            Err(_) => {
                self.end();
                self.is_refused = true;
                self.note_left_out(scanner);
            }
        }
        self.read_ns = scanner.now_ns;
    }

    fn note_left_out(&mut self, scanner: &Scanner<'_>) {
        self.is_left_out = true;
        Counters::add(&scanner.intake.counters.waits.run_delays_unread, 1);
    }
}
