//! Threads that sleep repeatedly, and the waits that their profiles report.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use cpu_time::ThreadTime;
use tracing::info_span;
use tracing_profiling::profile::{Profile, SampleKind};

/// `count` sleeps in one segment of a span, with `work` before each and after the last.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sleeps {
    pub(crate) count: u32,
    pub(crate) sleep: Duration,
    pub(crate) work: Duration,
}

const fn sleeps(count: u32, sleep_ms: u64, work_us: u64) -> Sleeps {
    Sleeps { count, sleep: Duration::from_millis(sleep_ms), work: Duration::from_micros(work_us) }
}

pub(crate) const ALL: &[Sleeps] = &[
    sleeps(1, 5, 50),
    sleeps(1, 300, 3_000),
    sleeps(2, 120, 50),
    sleeps(5, 40, 500),
    sleeps(10, 30, 50),
    sleeps(10, 15, 1_000),
    sleeps(20, 5, 3_000),
    sleeps(25, 12, 3_000),
    sleeps(40, 5, 50),
    sleeps(40, 20, 500),
    sleeps(4, 300, 1_000),
];

/// A time interval, in nanoseconds since the Unix epoch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Interval {
    pub(crate) from_ns: u64,
    pub(crate) to_ns: u64,
}

impl Interval {
    fn since(start: SystemTime, length: Duration) -> Self {
        let unix_ns = |time: SystemTime| {
            let since_epoch = time.duration_since(UNIX_EPOCH).expect("a time after 1970");
            u64::try_from(since_epoch.as_nanos()).expect("a time before 2554")
        };
        Self { from_ns: unix_ns(start), to_ns: unix_ns(start + length) }
    }

    pub(crate) fn len_ns(self) -> u64 {
        self.to_ns.saturating_sub(self.from_ns)
    }

    fn shared_ns(self, other: Self) -> u64 {
        self.to_ns.min(other.to_ns).saturating_sub(self.from_ns.max(other.from_ns))
    }
}

/// The time of day, which profiles use, at the start, and then a monotonic clock.
struct Unix {
    start: Instant,
    start_ns: u64,
}

impl Unix {
    fn now() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { start: Instant::now(), start_ns: since.as_nanos() as u64 }
    }

    fn ns(&self) -> u64 {
        self.start_ns + self.start.elapsed().as_nanos() as u64
    }
}

/// What the thread measured itself.
#[derive(Debug)]
pub(crate) struct Slept {
    /// The span `sleeper`, plus the time to create and close it.
    pub(crate) span: Interval,
    pub(crate) sleeps: Vec<Interval>,
}

impl Slept {
    /// Whether the wait lies in the span, within 1 ms: profiles use the time of day, which may be set or slewed in the
    /// meantime.
    pub(crate) fn holds(&self, wait: &Wait) -> bool {
        wait.when.from_ns + 1_000_000 >= self.span.from_ns
            && wait.when.to_ns <= self.span.to_ns + 1_000_000
    }
}

impl Sleeps {
    pub(crate) fn sleep(&self) -> Slept {
        let unix = Unix::now();
        let mut sleeps = Vec::new();
        let from_ns = unix.ns();
        info_span!("sleeper").in_scope(|| {
            for _ in 0..self.count {
                work(self.work);
                let from_ns = unix.ns();
                std::thread::sleep(self.sleep);
                sleeps.push(Interval { from_ns, to_ns: unix.ns() });
            }
            work(self.work);
        });
        Slept { span: Interval { from_ns, to_ns: unix.ns() }, sleeps }
    }
}

fn work(cpu: Duration) {
    let start = ThreadTime::now();
    while start.elapsed() < cpu {
        std::hint::spin_loop();
    }
}

/// A wait in a profile.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wait {
    pub(crate) when: Interval,
    /// It includes the shorter waits before it.
    pub(crate) is_marked: bool,
}

pub(crate) fn waits(profile: &Profile) -> Vec<Wait> {
    let is_marked = |stack| {
        let lines = profile.stack(stack).flat_map(|location| &location.lines);
        let mut functions = lines.filter_map(|line| profile.function(line.function));
        functions.any(|function| function.name == "[and shorter waits before it]")
    };
    let samples = profile.of_kind(SampleKind::OffCpu);
    let waits = samples.flat_map(|sample| {
        let is_marked = is_marked(sample.stack);
        sample.points.iter().map(move |point| Wait {
            when: Interval::since(point.time(), Duration::from_nanos(point.weight)),
            is_marked,
        })
    });
    waits.collect()
}

/// For each sleep that begins `after` or later into the span, its length as the thread measured it, and the length of
/// the waits that lie mostly in it. Sleeps inside marked waits are omitted, since a marked wait does not report each
/// one.
pub(crate) fn reported(slept: &Slept, waits: &[Wait], after: Duration) -> Vec<(u64, Option<u64>)> {
    let best_match = |wait: &Wait| {
        let shared = |sleep: &Interval| sleep.shared_ns(wait.when);
        let matches = (0..slept.sleeps.len()).filter(|at| shared(&slept.sleeps[*at]) > 0);
        matches.max_by_key(|at| shared(&slept.sleeps[*at]))
    };
    let marked: Vec<_> = waits.iter().filter(|wait| wait.is_marked).collect();
    let mut reported: Vec<_> = slept.sleeps.iter().map(|sleep| (sleep.len_ns(), None)).collect();
    for wait in waits.iter().filter(|wait| !wait.is_marked) {
        if let Some(at) = best_match(wait) {
            *reported[at].1.get_or_insert(0) += wait.when.len_ns();
        }
    }
    let is_in_marked = |sleep: &Interval| {
        marked.iter().any(|wait| sleep.shared_ns(wait.when) > sleep.len_ns() / 2)
    };
    let from_ns = slept.span.from_ns + after.as_nanos() as u64;
    let is_covered = |sleep: &Interval| sleep.from_ns >= from_ns && !is_in_marked(sleep);
    let all = slept.sleeps.iter().zip(reported).filter(|(sleep, _)| is_covered(sleep));
    all.map(|(_, reported)| reported).collect()
}
