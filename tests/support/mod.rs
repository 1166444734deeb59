//! Helpers shared by the tests.

#![allow(dead_code, reason = "not every test needs everything")]

mod nanos;
pub(crate) mod tasks;
mod tick;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tracing::Dispatch;
use tracing_profiling::export::Memory;
use tracing_profiling::profile::{FrameKind, Profile, Sample, SampleKind};
use tracing_profiling::{Builder, Handle, Kept, ProfilingLayer};
use tracing_subscriber::prelude::*;

pub(crate) use nanos::Nanos;

/// A timeout that only a hang exceeds, also on a busy machine.
pub(crate) const PLENTY: Duration = Duration::from_secs(300);

/// A layer that exports to memory, with its own subscriber.
pub(crate) struct Setup {
    pub(crate) handle: Handle,
    pub(crate) dispatch: Dispatch,
    pub(crate) memory: Memory,
    pub(crate) kept: Arc<Mutex<Vec<Kept>>>,
}

impl Setup {
    pub(crate) fn new(rules: &str) -> Self {
        Self::with(rules, |builder| builder)
    }

    pub(crate) fn with(rules: &str, set: impl FnOnce(Builder) -> Builder) -> Self {
        // At this rate a ring holds 30 ms of samples. On a busy machine the collector can be off-CPU for that long.
        Self::at_the_usual_rate(rules, |builder| set(builder.rate(200)))
    }

    /// The same with the default sampling rates.
    pub(crate) fn at_the_usual_rate(rules: &str, set: impl FnOnce(Builder) -> Builder) -> Self {
        // Sample from the enter, so that spans of a few milliseconds have samples. tests/late.rs tests the default.
        Self::of_rules(rules, |builder| set(builder.sampling_delay(Duration::ZERO)))
    }

    /// The same with the default `sampling_delay`.
    pub(crate) fn of_rules(rules: &str, set: impl FnOnce(Builder) -> Builder) -> Self {
        // On a busy machine some milliseconds of work can take longer than the usual limit of spans that hang.
        let keeps_all = |rule: &str| rule == "0ms" || rule.ends_with("=0ms");
        let rules = rules.split(',').map(|rule| match keeps_all(rule) {
            true => format!("{rule}|hung=off"),
            false => rule.to_owned(),
        });
        let rules = rules.collect::<Vec<_>>().join(",");
        let memory = Memory::new();
        let kept = Arc::new(Mutex::new(Vec::new()));
        let received = Arc::clone(&kept);
        let builder = ProfilingLayer::builder()
            .rules(rules.parse().unwrap())
            .exporter(memory.clone())
            // Debug builds on a busy machine exceed the budget, which would lower the sampling rate.
            .cpu_budget(0)
            .on_kept(move |one| received.lock().unwrap().push(one.clone()));
        let layer = set(builder).build().unwrap();
        let handle = layer.handle();
        let dispatch = Dispatch::new(tracing_subscriber::registry().with(layer));
        Self { handle, dispatch, memory, kept }
    }

    /// Runs `action` with this subscriber and waits until everything is exported.
    pub(crate) fn run<R>(&self, action: impl FnOnce() -> R) -> R {
        let result = tracing::dispatcher::with_default(&self.dispatch, action);
        self.flush();
        result
    }

    pub(crate) fn flush(&self) {
        self.handle.flush(PLENTY).unwrap();
    }

    pub(crate) fn kept(&self) -> Vec<Kept> {
        self.kept.lock().unwrap().clone()
    }

    /// The names of the kept spans, one list per local root, in the order in which these closed. They are reported in
    /// another one: those without a profile wait for no export.
    pub(crate) fn kept_names(&self) -> Vec<Vec<&'static str>> {
        let names = |kept: &Kept| kept.spans.iter().map(|span| span.name()).collect();
        let mut kept = self.kept();
        kept.sort_by_key(|kept| {
            let root = kept.spans.first();
            root.map(|root| root.facts.start().unwrap() + root.times().wall())
        });
        kept.iter().map(names).collect()
    }

    pub(crate) fn profiles(&self) -> Vec<Profile> {
        self.memory.profiles()
    }
}

/// Collects what a `fmt` layer writes.
#[derive(Clone, Default)]
pub(crate) struct Log(pub(crate) Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Whether stacks are sampled, by perf or timers: everywhere on Linux.
pub(crate) const HAS_STACKS: bool = cfg!(not(tracing_profiling_unsupported));

/// The sum of the parts of a span's wall time, as far as they are known.
pub(crate) fn sum_of_parts_ns(account: &tracing_profiling::TimeBreakdown) -> u64 {
    assert_eq!(account.is_cpu_time_unknown, !HAS_STACKS, "{account:?}");
    match account.is_cpu_time_unknown {
        true => account.wall().ns().max(account.idle().ns()),
        false => {
            let busy_ns = account.on_cpu().ns() + account.off_cpu().ns();
            busy_ns + account.idle().ns() + account.other_spans().ns()
        }
    }
}

/// Whether threads that meet no hook can be sampled.
pub(crate) fn has_all_threads() -> bool {
    // qemu-user has no `process_vm_readv`.
    HAS_STACKS && std::env::var_os("PROFILING_TEST_EMULATED").is_none()
}

/// Whether perf events are allowed. CI sets a variable where it expects them.
pub(crate) fn has_perf() -> bool {
    use perf_event::events::Software;
    let opened = perf_event::Builder::new().kind(Software::CPU_CLOCK).build();
    let is_allowed = HAS_STACKS && opened.is_ok();
    assert!(
        is_allowed || std::env::var_os("PROFILING_TEST_PERF").is_none(),
        "perf was expected to be allowed"
    );
    is_allowed
}

/// These tests are about signals themselves.
const WITHOUT_TICKS: bool =
    matches!(env!("CARGO_CRATE_NAME").as_bytes(), b"hostile" | b"hostile_allocator" | b"handler");

/// Keeps the CPU busy in a function that a profile can name. With 20 ms or more, the thread is sampled at least once by
/// any source; where that takes longer, this continues until then.
#[inline(never)]
pub(crate) fn burn(cpu: Duration) -> u64 {
    let burning = Burning::new(cpu);
    let mut x = 1_u64;
    while burning.goes_on() {
        let mut i = 0;
        // Reading the clock is a system call, and the samples are meant to be in user code.
        while i < 5_000 {
            x = (x ^ i) * 3 % 1_000_003;
            i += 1;
        }
    }
    x
}

/// A busy loop's end condition.
pub(crate) struct Burning {
    start: cpu_time::ThreadTime,
    cpu: Duration,
    tick: Option<tick::Tick>,
}

impl Burning {
    pub(crate) fn new(cpu: Duration) -> Self {
        const A_SAMPLE: Duration = Duration::from_millis(20);
        let start = cpu_time::ThreadTime::now();
        let is_enough = cpu < A_SAMPLE || !HAS_STACKS || WITHOUT_TICKS;
        let tick = if is_enough { None } else { tick::Tick::await_next() };
        Self { start, cpu, tick }
    }

    pub(crate) fn goes_on(&self) -> bool {
        assert!(self.start.elapsed() < PLENTY, "the kernel has checked its timers");
        let is_awaited = || self.tick.as_ref().is_some_and(|tick| !tick.has_come());
        self.start.elapsed() < self.cpu || is_awaited()
    }
}

/// The functions of a sample, innermost first, including inlined ones.
pub(crate) fn functions<'a>(profile: &'a Profile, sample: &Sample) -> Vec<&'a str> {
    profile
        .stack(sample.stack)
        .flat_map(|location| &location.lines)
        .filter_map(|line| profile.function(line.function))
        .map(|function| function.name.as_str())
        .collect()
}

/// The on-CPU samples that were taken, without the remainder that is attributed to the kernel where only user code is
/// sampled.
pub(crate) fn taken_samples(profile: &Profile) -> impl Iterator<Item = &Sample> {
    let is_remainder = |sample: &Sample| {
        profile.stack(sample.stack).map(|location| location.kind).eq([FrameKind::Kernel])
    };
    profile.of_kind(SampleKind::OnCpu).filter(move |sample| !is_remainder(sample))
}

/// The number of those samples and their CPU time.
pub(crate) fn taken(profile: &Profile) -> (u64, u64) {
    let points = taken_samples(profile).flat_map(|sample| &sample.points);
    points.fold((0, 0), |(count, ns), point| (count + 1, ns + point.weight))
}

/// The number of points with a function of that name (its last path segment) in their stack.
pub(crate) fn points_in(profile: &Profile, function: &str) -> usize {
    let is_it = |name: &&str| name.rsplit("::").next() == Some(function);
    let with_it = |sample: &&Sample| functions(profile, sample).iter().any(is_it);
    profile.samples().iter().filter(with_it).map(|sample| sample.points.len()).sum()
}

/// The number of points with a `Remark` frame in their stack.
pub(crate) fn points_with_remark(profile: &Profile) -> usize {
    let has_remark = |sample: &&Sample| {
        profile.stack(sample.stack).any(|location| location.kind == FrameKind::Remark)
    };
    profile.samples().iter().filter(has_remark).map(|sample| sample.points.len()).sum()
}

/// Runs one test of this test program in its own process, with the variable `CHILD` set, and returns its output.
pub(crate) fn run_child(test: &str, variables: &[(&str, &str)]) -> std::process::Output {
    std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--include-ignored"])
        .env("CHILD", test)
        .envs(variables.iter().copied())
        .output()
        .unwrap()
}

/// Whether this process was started by [`run_child`] for that test.
pub(crate) fn is_child(test: &str) -> bool {
    std::env::var("CHILD").is_ok_and(|child| child == test)
}

/// For a test that needs its own process: whether this is that process. Otherwise the test has run in one.
pub(crate) fn is_alone(test: &str) -> bool {
    if is_child(test) {
        return true;
    }
    let output = run_child(test, &[]);
    let [text, errors] =
        [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    assert!(output.status.success() && text.contains("1 passed"), "{text}\n{errors}");
    false
}

/// The unpacked data of a report, as JSON.
pub(crate) fn data_of_report(page: &[u8]) -> String {
    use base64::Engine as _;
    use std::io::Read as _;
    let page = std::str::from_utf8(page).unwrap();
    let (_, rest) = page.split_once("id=\"data\">").unwrap();
    let (data, _) = rest.split_once("</script>").unwrap();
    let bytes = base64::prelude::BASE64_STANDARD.decode(data).unwrap();
    let mut json = String::new();
    flate2::read::GzDecoder::new(bytes.as_slice()).read_to_string(&mut json).unwrap();
    json
}
