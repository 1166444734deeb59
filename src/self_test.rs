//! A short synthetic load, to check what can be observed on this system.

use std::fmt;
use std::time::{Duration, Instant};

use tracing::Dispatch;
use tracing_subscriber::prelude::*;

use crate::config::Builder;
use crate::export::Memory;
use crate::handle::Handle;
use crate::keep::{Keep, Rule, Rules};
use crate::profile::{CALLERS_NOT_COPIED, FrameKind, Profile, Sample, SampleKind};
use crate::sampler::SourceSettings;

/// The result of [`Handle::self_test`].
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct SelfTest {
    /// Which source samples threads, and what it cannot observe.
    pub source: String,
    /// The number of samples of a function that was busy for [`busy`](Self::busy) of CPU time.
    pub samples: usize,
    /// The CPU time that these samples represent.
    pub sampled: Duration,
    /// How long the function was busy.
    pub busy: Duration,
    /// The number of samples whose stack was unwound to the thread's first function.
    pub whole_stacks: usize,
    /// The number of other samples whose stack was longer than what was copied of it.
    pub cut_stacks: usize,
    /// Whether the name of the function was found.
    pub has_functions: bool,
    /// Whether its source file and line were found.
    pub has_lines: bool,
    /// The measured duration of a wait of [`asleep`](Self::asleep); `None` if the wait was not captured.
    pub waited: Option<Duration>,
    /// How long the function waited.
    pub asleep: Duration,
}

const BUSY: Duration = Duration::from_millis(300);
/// The limit of wall time, for a machine that is too busy to give that much CPU time.
const AT_MOST: Duration = Duration::from_secs(3);
const ASLEEP: Duration = Duration::from_millis(200);
/// Symbols of a large program take a while.
const DEADLINE: Duration = Duration::from_secs(60);

impl SelfTest {
    /// Whether samples, stacks, functions and waits all work. (Lines are not required: they need line tables in the
    /// program.)
    pub fn is_ok(&self) -> bool {
        self.problems().is_empty()
    }

    /// What does not work, one line each.
    pub fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        if self.samples == 0 {
            return vec![format!("no samples are taken ({})", self.source)];
        }
        if self.sampled < self.busy / 2 || self.sampled > self.busy * 2 {
            let (sampled, busy) = (self.sampled, self.busy);
            problems.push(format!("the samples represent {sampled:.0?} of {busy:.0?} of CPU time"));
        }
        if self.whole_stacks * 10 < self.samples * 9 {
            let (whole, all) = (self.whole_stacks, self.samples);
            let why = if self.cut_stacks * 2 > all - whole {
                "stacks were deeper than TRACING_PROFILING_STACK_BYTES"
            } else {
                "the program or a library that it calls has no unwind tables"
            };
            problems.push(format!("{whole} of {all} stacks are complete: {why}"));
        }
        if cfg!(feature = "symbols") && !self.has_functions {
            problems.push("functions have no names: is the program stripped?".to_owned());
        }
        if self.waited.is_none() {
            problems.push("the wait was not captured".to_owned());
        }
        problems
    }
}

impl fmt::Display for SelfTest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { source, samples, sampled, busy, whole_stacks, .. } = self;
        write!(f, "{source}; {samples} samples of {sampled:.0?} in {busy:.0?} of CPU time")?;
        write!(f, ", {whole_stacks} of their stacks complete")?;
        let found = |is: bool| if is { "found" } else { "not found" };
        write!(f, "; functions {}, lines {}", found(self.has_functions), found(self.has_lines))?;
        match self.waited {
            Some(waited) => write!(f, "; a wait of {:.0?} measured as {waited:.1?}", self.asleep),
            None => f.write_str("; waits not captured"),
        }
    }
}

#[inline(never)]
fn self_test_is_busy() -> u64 {
    let start = Instant::now();
    let cpu = || crate::sys::thread_cpu_ns().map(Duration::from_nanos);
    let before = cpu();
    let ran = || cpu().zip(before).map_or_else(|| start.elapsed(), |(now, then)| now - then);
    let mut x = 1_u64;
    while ran() < BUSY && start.elapsed() < AT_MOST {
        for i in 0..100_000_u64 {
            x = std::hint::black_box((x ^ i).wrapping_mul(6_364_136_223_846_793_005));
        }
    }
    x
}

#[inline(never)]
fn self_test_is_asleep() {
    std::thread::sleep(ASLEEP);
}

impl Handle {
    /// Runs a short synthetic load, and reports whether samples, stacks, symbols and waits work in this program, on
    /// this system, with the source of this layer.
    ///
    /// It takes a little more than half a second, and longer if the program has much debug information. The load runs
    /// on its own thread under its own layer, and leaves no profile. This blocks; in async code call it from
    /// `spawn_blocking`.
    ///
    /// ```
    /// # use tracing_profiling::ProfilingLayer;
    /// # fn main() -> Result<(), tracing_profiling::Error> {
    /// let profiling = ProfilingLayer::from_env()?;
    /// let found = profiling.handle().self_test();
    /// println!("{found}");
    /// for problem in found.problems() {
    ///     eprintln!("profiling: {problem}");
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn self_test(&self) -> SelfTest {
        match self.source_settings() {
            Some(settings) => self_test(settings),
            None => SelfTest { source: "the layer is off".to_owned(), ..SelfTest::default() },
        }
    }
}

/// Runs the load on its own thread, under its own layer with these settings.
fn self_test(settings: SourceSettings) -> SelfTest {
    let memory = Memory::new();
    let builder = Builder::new()
        .with_source_settings(settings)
        .arm_after(Duration::ZERO)
        .rules(Rules::new([Rule::for_all(Keep::slower_than(Duration::ZERO))]))
        .exporter(memory.clone());
    let mut found = SelfTest { asleep: ASLEEP, ..SelfTest::default() };
    let Ok(layer) = builder.build() else {
        found.source = "no thread could be started".to_owned();
        return found;
    };
    let handle = layer.handle();
    found.source = handle.source();
    let dispatch = Dispatch::new(tracing_subscriber::registry().with(layer));
    let of_thread = dispatch.clone();
    let run = move || {
        tracing::dispatcher::with_default(&of_thread, || {
            tracing::info_span!("self test").in_scope(|| {
                let before = crate::sys::thread_cpu_ns();
                self_test_is_busy();
                let ran = crate::sys::thread_cpu_ns().zip(before).map(|(now, then)| now - then);
                self_test_is_asleep();
                ran
            })
        })
    };
    // The calling thread may be ignored by the layer, or be in other spans.
    let thread = crate::sys::spawn("profiling-test", run);
    let ran_ns = thread.ok().and_then(|thread| thread.join().ok()).flatten();
    found.busy = ran_ns.map_or(BUSY, Duration::from_nanos);
    handle.flush(DEADLINE);
    if let Some(profile) = memory.profiles().first() {
        evaluate(profile, &mut found);
    }
    handle.shutdown(DEADLINE);
    drop(dispatch);
    found
}

fn evaluate(profile: &Profile, found: &mut SelfTest) {
    for sample in profile.of_kind(SampleKind::OnCpu) {
        let (mut is_whole, mut is_cut) = (true, false);
        for location in profile.stack(sample.stack) {
            is_whole &= location.kind != FrameKind::Remark;
            for line in &location.lines {
                let function = profile.function(line.function);
                let name = function.map_or("", |function| &function.name);
                is_cut |= location.kind == FrameKind::Remark && name == CALLERS_NOT_COPIED;
                if name.ends_with("self_test_is_busy") {
                    found.has_functions = true;
                    found.has_lines |= line.line > 0;
                }
            }
        }
        let points = sample.points.len();
        found.samples += points;
        found.whole_stacks += if is_whole { points } else { 0 };
        found.cut_stacks += if is_cut { points } else { 0 };
    }
    found.sampled = Duration::from_nanos(profile.weight_ns());
    let longest = |sample: &Sample| sample.points.iter().map(|point| point.weight).max();
    let waited = profile.of_kind(SampleKind::OffCpu).filter_map(longest).max();
    found.waited = waited.map(Duration::from_nanos);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> SelfTest {
        SelfTest {
            source: "source timer".to_owned(),
            samples: 60,
            sampled: BUSY,
            busy: BUSY,
            whole_stacks: 60,
            cut_stacks: 0,
            has_functions: true,
            has_lines: true,
            waited: Some(ASLEEP),
            asleep: ASLEEP,
        }
    }

    #[test]
    fn prints_the_result_in_one_line() {
        assert!(good().is_ok());
        assert_eq!(
            good().to_string(),
            "source timer; 60 samples of 300ms in 300ms of CPU time, 60 of their stacks complete; \
             functions found, lines found; a wait of 200ms measured as 200.0ms"
        );
    }

    #[test]
    fn reports_what_does_not_work() {
        for (broken, expected) in [
            (SelfTest { samples: 0, ..good() }, "no samples are taken (source timer)"),
            (SelfTest { sampled: BUSY / 3, ..good() }, "100ms of 300ms of CPU time"),
            (
                SelfTest { whole_stacks: 50, ..good() },
                "50 of 60 stacks are complete: the program or a library that it calls has no unwind tables",
            ),
            (
                SelfTest { whole_stacks: 50, cut_stacks: 9, ..good() },
                "50 of 60 stacks are complete: stacks were deeper than TRACING_PROFILING_STACK_BYTES",
            ),
            (SelfTest { has_functions: false, ..good() }, "is the program stripped?"),
            (SelfTest { waited: None, ..good() }, "the wait was not captured"),
        ] {
            let problems = broken.problems();
            assert_eq!(problems.len(), 1);
            assert!(problems[0].contains(expected), "{problems:?}");
        }
    }
}
