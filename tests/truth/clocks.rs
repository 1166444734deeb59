//! What the kernel says of the calling thread, and bounds made of it.

use std::cell::{Cell, RefCell};
use std::ops::Sub;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use nix::time::{ClockId, clock_gettime};
use perf_event::Counter;
use perf_event::events::Software;

fn read(clock: ClockId) -> u64 {
    let time = clock_gettime(clock).unwrap();
    (time.tv_sec() * 1_000_000_000 + time.tv_nsec()).cast_unsigned()
}

/// Of the clock that nobody sets or slews, in nanoseconds.
pub(crate) fn wall_ns() -> u64 {
    read(ClockId::CLOCK_MONOTONIC_RAW)
}

/// The CPU time of the calling thread, in nanoseconds.
pub(crate) fn cpu_ns() -> u64 {
    read(ClockId::CLOCK_THREAD_CPUTIME_ID)
}

thread_local! {
    /// At the last reading.
    static LAST_SWITCHES: Cell<Option<u64>> = const { Cell::new(None) };

    static EVENT: RefCell<Option<Counter>> = RefCell::new(event());
}

/// The most switches of a thread between two readings, since this was last set to 0.
pub(crate) static MOST_SWITCHES: AtomicU64 = AtomicU64::new(0);

/// Whether to ask perf events, too.
pub(crate) static ASK_PERF: AtomicBool = AtomicBool::new(false);

/// An event of the test's own, which counts nothing but the time.
fn event() -> Option<Counter> {
    ASK_PERF.load(Ordering::Relaxed).then(|| {
        let mut event = perf_event::Builder::new().kind(Software::DUMMY).build().unwrap();
        event.enable().unwrap();
        event
    })
}

/// For how long the calling thread ran, as perf events have it: 0 where they are not asked.
fn perf_ns() -> u64 {
    EVENT.with_borrow_mut(|event| {
        event.as_mut().map_or(0, |event| event.read_count_and_time().unwrap().time_enabled)
    })
}

/// Times that the calling thread was switched off its CPU: because it waited, and otherwise.
fn switches() -> [u64; 2] {
    // SAFETY: a plain structure, which the call fills.
    #[allow(unsafe_code, reason = "no crate that we have asks this")]
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        assert_eq!(libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage), 0);
        usage
    };
    let switches = [usage.ru_nvcsw, usage.ru_nivcsw].map(i64::cast_unsigned);
    let sum = switches.iter().sum();
    let between = sum - LAST_SWITCHES.replace(Some(sum)).unwrap_or(sum);
    MOST_SWITCHES.fetch_max(between, Ordering::Relaxed);
    switches
}

/// The calling thread at one moment, or rather at several right after each other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reading {
    pub(crate) wall_ns: u64,
    pub(crate) cpu_ns: u64,
    pub(crate) perf_ns: u64,
    pub(crate) switches: [u64; 2],
}

impl Reading {
    /// At the outer end of something: between two of these, first this one and then
    /// [`wall_last`](Self::wall_last), there is all that the CPU clock saw.
    pub(crate) fn wall_first() -> Self {
        let wall_ns = wall_ns();
        Self { wall_ns, cpu_ns: cpu_ns(), perf_ns: perf_ns(), switches: switches() }
    }

    pub(crate) fn wall_last() -> Self {
        let switches = switches();
        let (perf_ns, cpu_ns) = (perf_ns(), cpu_ns());
        Self { wall_ns: wall_ns(), cpu_ns, perf_ns, switches }
    }
}

/// A value that is not known any better.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Bounds {
    pub(crate) least: u64,
    pub(crate) most: u64,
}

impl Bounds {
    pub(crate) fn add(&mut self, least: u64, most: u64) {
        self.least += least;
        self.most += most;
    }

    /// By how much a value is outside.
    pub(crate) fn miss(self, value: u64) -> i64 {
        let [below, above] = [self.least.saturating_sub(value), value.saturating_sub(self.most)];
        above.cast_signed() - below.cast_signed()
    }

    pub(crate) fn widened(self, by: u64) -> Self {
        Self { least: self.least.saturating_sub(by), most: self.most + by }
    }
}

/// What passed between two readings.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Passed {
    pub(crate) wall_ns: u64,
    pub(crate) cpu_ns: u64,
    pub(crate) perf_ns: u64,
    pub(crate) switches: [u64; 2],
}

impl Sub for Reading {
    type Output = Passed;

    fn sub(self, earlier: Self) -> Passed {
        let [voluntary, involuntary] = self.switches;
        Passed {
            wall_ns: self.wall_ns - earlier.wall_ns,
            cpu_ns: self.cpu_ns - earlier.cpu_ns,
            perf_ns: self.perf_ns - earlier.perf_ns,
            switches: [voluntary - earlier.switches[0], involuntary - earlier.switches[1]],
        }
    }
}
