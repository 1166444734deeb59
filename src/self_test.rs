//! A short synthetic load, to check what can be observed on this system.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::{Dispatch, Event, Subscriber};
use tracing_subscriber::layer::{Context, Layer};
use tracing_subscriber::prelude::*;

use crate::config::Builder;
use crate::export::Memory;
use crate::handle::Handle;
use crate::log::LogKind;
use crate::profile::{
    CALLERS_NOT_COPIED, CALLERS_WITHOUT_TABLES, FrameKind, Profile, Sample, SampleKind,
};
use crate::sampler::SourceSettings;
use crate::stats::Stats;

/// The result of [`Handle::self_test`].
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct SelfTest {
    /// Which source samples threads, and what it cannot observe.
    pub source: String,
    /// The number of samples of a function that was busy for [`busy`](Self::busy) of CPU time, on two threads.
    pub samples: usize,
    /// How many of them are of the second thread. That one is not sampled from the start of its span: another thread begins
    /// to sample it, as with all spans that take long.
    pub samples_begun_later: usize,
    /// The CPU time that these samples represent.
    pub sampled: Duration,
    /// How long the function was busy.
    pub busy: Duration,
    /// The number of samples whose stack was unwound to the thread's first function.
    pub whole_stacks: usize,
    /// The number of other samples whose stack was longer than what was copied of it.
    pub cut_stacks: usize,
    /// The number of other samples whose stack ends at code without unwind tables.
    pub stacks_without_tables: usize,
    /// Whether the name of the function was found.
    pub has_functions: bool,
    /// Whether its source file and line were found.
    pub has_lines: bool,
    /// The measured duration of a wait of [`asleep`](Self::asleep); `None` if the wait was not captured.
    pub waited: Option<Duration>,
    /// Whether the stack of that wait was found.
    pub has_stack_of_wait: bool,
    /// How long the function waited.
    pub asleep: Duration,
    /// What the layer has logged in the meantime.
    causes: Vec<Cause>,
    /// Why threads could not be sampled.
    refused: String,
}

/// A warning, which may say why something does not work.
#[derive(Clone, Debug, Default, PartialEq)]
struct Cause {
    kind: String,
    reason: String,
    message: String,
}

impl Visit for Cause {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        match field.name() {
            "kind" => self.kind = format!("{value:?}"),
            "reason" => self.reason = format!("{value:?}"),
            "message" => self.message = format!("{value:?}"),
            _ => {}
        }
    }
}

/// Collects the warnings of the layer under test.
#[derive(Clone, Debug, Default)]
struct Causes(Arc<Mutex<Vec<Cause>>>);

impl<S: Subscriber> Layer<S> for Causes {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut cause = Cause::default();
        event.record(&mut cause);
        self.0.lock().push(cause);
    }
}

/// The kinds of warnings that say why there are no samples, stacks, names or waits.
const OF_SAMPLES: &[LogKind] = &[
    LogKind::SignalLost,
    LogKind::SignalStackSmall,
    LogKind::CallsForbidden,
    LogKind::FilesClosed,
    LogKind::Failed,
];
const OF_STACKS: &[LogKind] = &[LogKind::StacksCut];
const OF_NAMES: &[LogKind] = &[
    LogKind::NoLineTables,
    LogKind::FileReplaced,
    LogKind::FileUnreadable,
    LogKind::FileCompressed,
    LogKind::FileSplit,
    LogKind::FileTooLarge,
];
const OF_WAITS: &[LogKind] = &[LogKind::WaitsUnseen, LogKind::CallsForbidden];

/// The threads that could not be sampled, by cause.
fn refusals(stats: &Stats) -> String {
    let threads = &stats.threads;
    let counts = [
        (threads.refused_perf, "perf events are refused"),
        (threads.refused_locked_memory, "there is no more memory to lock (`ulimit -l`)"),
        (threads.refused_open_files, "the limit on open files is reached (`ulimit -n`)"),
        (threads.refused_timers, "the limit on pending signals is reached (`ulimit -i`)"),
        (threads.refused_signal_stack, "their signal stacks are too small"),
        (threads.refused_traced, "a debugger is attached"),
        (threads.refused_other, "the system refuses it for another reason"),
    ];
    let causes = counts.iter().filter(|(count, _)| *count > 0).map(|(_, cause)| *cause);
    causes.collect::<Vec<_>>().join(", ")
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

    /// What does not work, one line each, with the cause if that is known.
    pub fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        let why = |kinds: &[LogKind]| {
            let is_one = |cause: &&Cause| {
                let is_of =
                    |kind: &LogKind| kind.kind() == cause.kind && kind.reason() == cause.reason;
                kinds.iter().any(is_of)
            };
            let causes = self.causes.iter().filter(is_one);
            causes.map(|cause| format!(": {}", cause.message)).collect::<String>()
        };
        let (sampled, busy) = (self.sampled, self.busy);
        let why_samples = || match self.refused.as_str() {
            "" => why(OF_SAMPLES),
            refused => {
                format!(": threads could not be sampled, since {refused}{}", why(OF_SAMPLES))
            }
        };
        if self.samples == 0 {
            return vec![format!("no samples are taken ({}){}", self.source, why_samples())];
        }
        if self.samples_begun_later == 0 {
            let (source, why) = (&self.source, why_samples());
            problems.push(format!(
                "no thread is sampled that is in its span for some time already ({source}){why}"
            ));
        } else if sampled < busy / 2 || sampled > busy * 2 {
            let why = why_samples();
            problems.push(format!(
                "the samples represent {sampled:.0?} of {busy:.0?} of CPU time{why}"
            ));
        }
        let (whole, all) = (self.whole_stacks, self.samples);
        if whole * 10 < all * 9 {
            let is_most = |count| count * 2 > all - whole;
            let what = if is_most(self.cut_stacks) {
                ": stacks were deeper than TRACING_PROFILING_STACK_BYTES"
            } else if is_most(self.stacks_without_tables) {
                ": the program or a library that it calls has no unwind tables"
            } else {
                ": callers were not found"
            };
            problems.push(format!("{whole} of {all} stacks are complete{what}{}", why(OF_STACKS)));
        }
        if cfg!(feature = "symbols") && !self.has_functions {
            problems.push(format!("functions have no names{}", why(OF_NAMES)));
        }
        if self.waited.is_none() {
            problems.push(format!("the wait was not captured{}", why(OF_WAITS)));
        } else if !self.has_stack_of_wait {
            problems.push(format!("the wait has no stack{}", why(OF_WAITS)));
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
            Some(waited) => {
                let without = if self.has_stack_of_wait { "" } else { ", without its stack" };
                write!(f, "; a wait of {:.0?} measured as {waited:.1?}{without}", self.asleep)
            }
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
    let mut numbers = [0; 1_000];
    while ran() < BUSY && start.elapsed() < AT_MOST {
        for number in &mut numbers {
            x = (x ^ *number).wrapping_mul(6_364_136_223_846_793_005);
            *number = x;
        }
        crate::sys::sort_in_library(&mut numbers);
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
    /// on two threads of its own under its own layer, through functions of the C library, and leaves no profile. Problems
    /// have the warnings of that layer as their causes. This blocks; in async code call it from
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

/// The span whose thread is sampled from its start, as its threshold is 0.
const FIRST: &str = "self_test";
/// The span whose thread the collector begins to sample, after a twentieth of its threshold.
const LATER: &str = "self_test_later";
/// By name: no other layer wants these spans.
const RULES: &str = "[self_test]=0ms,[self_test_later]=100ms";

/// Runs the load on its own threads, under its own layer with these settings.
fn self_test(settings: SourceSettings) -> SelfTest {
    let (memory, causes) = (Memory::new(), Causes::default());
    let mut found = SelfTest { asleep: ASLEEP, ..SelfTest::default() };
    let rules = RULES.parse().unwrap_or_default();
    let settings = SourceSettings { sampling_delay: None, ..settings };
    let builder = Builder::new().with_source_settings(settings).rules(rules);
    let Ok(layer) = builder.exporter(memory.clone()).build() else {
        found.source = "no thread could be started".to_owned();
        return found;
    };
    let handle = layer.handle();
    found.source = handle.source();
    let of_layer = causes.clone().with_filter(LevelFilter::WARN);
    let dispatch = Dispatch::new(tracing_subscriber::registry().with(of_layer).with(layer));
    let run = |is_first: bool| {
        let dispatch = dispatch.clone();
        move || {
            tracing::dispatcher::with_default(&dispatch, || {
                let span = match is_first {
                    true => tracing::info_span!(FIRST),
                    false => tracing::info_span!(LATER),
                };
                span.in_scope(|| {
                    let before = crate::sys::thread_cpu_ns();
                    self_test_is_busy();
                    let now = crate::sys::thread_cpu_ns();
                    self_test_is_asleep();
                    now.zip(before).map(|(now, then)| now - then)
                })
            })
        }
    };
    // The calling thread may be ignored by the layer, or be in other spans.
    let threads = [true, false].map(|is_first| crate::sys::spawn("profiling-test", run(is_first)));
    let ran_ns = threads.map(|thread| thread.ok()?.join().ok()?);
    found.busy = ran_ns.map(|ns| ns.map_or(BUSY, Duration::from_nanos)).iter().sum();
    _ = handle.flush(DEADLINE);
    let profiles = memory.profiles();
    profiles.iter().for_each(|profile| evaluate(profile, &mut found));
    found.refused = refusals(&handle.stats());
    _ = handle.shutdown(DEADLINE);
    drop(dispatch);
    found.causes = std::mem::take(&mut *causes.0.lock());
    found
}

/// Adds what a profile has.
fn evaluate(profile: &Profile, found: &mut SelfTest) {
    let functions = |sample: &Sample| {
        let lines = profile.stack(sample.stack).flat_map(|location| &location.lines);
        lines.filter_map(|line| Some((&profile.function(line.function)?.name, line.line)))
    };
    let line_of = |sample: &Sample, function: &str| {
        functions(sample).find(|(name, _)| name.ends_with(function)).map(|(_, line)| line)
    };
    let busy = |sample: &Sample| line_of(sample, "self_test_is_busy");
    let has_names = profile.of_kind(SampleKind::OnCpu).any(|sample| busy(sample).is_some());
    for sample in profile.of_kind(SampleKind::OnCpu) {
        let (points, line) = (sample.points.len(), busy(sample));
        let all = |is_it: fn(FrameKind) -> bool| {
            profile.stack(sample.stack).all(|location| is_it(location.kind))
        };
        // Where time in the kernel has no stack, it is one sample.
        let is_whole = all(|kind| kind == FrameKind::Kernel)
            || all(|kind| kind != FrameKind::Remark) && (line.is_some() || !has_names);
        found.has_functions |= line.is_some();
        found.has_lines |= line.is_some_and(|line| line > 0);
        found.samples += points;
        found.samples_begun_later += if profile.name == LATER { points } else { 0 };
        let ends_at = |remark| functions(sample).any(|(name, _)| name == remark);
        let count = match is_whole {
            true => &mut found.whole_stacks,
            // It may also end without a remark.
            false if ends_at(CALLERS_NOT_COPIED) => &mut found.cut_stacks,
            false if ends_at(CALLERS_WITHOUT_TABLES) => &mut found.stacks_without_tables,
            false => continue,
        };
        *count += points;
    }
    found.sampled += Duration::from_nanos(profile.weight_ns());
    for sample in profile.of_kind(SampleKind::OffCpu) {
        let longest = sample.points.iter().map(|point| Duration::from_nanos(point.weight())).max();
        if longest > found.waited {
            found.waited = longest;
            let is_code = |kind| matches!(kind, FrameKind::Rust | FrameKind::Native);
            found.has_stack_of_wait =
                profile.stack(sample.stack).any(|location| is_code(location.kind));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> SelfTest {
        SelfTest {
            source: "source timer".to_owned(),
            samples: 60,
            samples_begun_later: 29,
            sampled: BUSY,
            busy: BUSY,
            whole_stacks: 60,
            cut_stacks: 0,
            stacks_without_tables: 0,
            has_functions: true,
            has_lines: true,
            waited: Some(ASLEEP),
            has_stack_of_wait: true,
            asleep: ASLEEP,
            causes: Vec::new(),
            refused: String::new(),
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
        let found = SelfTest { has_stack_of_wait: false, ..good() };
        assert!(found.to_string().ends_with("measured as 200.0ms, without its stack"));
    }

    #[test]
    fn reports_what_does_not_work() {
        for (broken, expected) in [
            (SelfTest { samples: 0, ..good() }, "no samples are taken (source timer)"),
            (
                SelfTest { samples_begun_later: 0, sampled: BUSY / 2, ..good() },
                "no thread is sampled that is in its span for some time already (source timer)",
            ),
            (
                SelfTest { sampled: BUSY / 3, ..good() },
                "the samples represent 100ms of 300ms of CPU time",
            ),
            (
                SelfTest { whole_stacks: 50, stacks_without_tables: 9, ..good() },
                "50 of 60 stacks are complete: the program or a library that it calls has no unwind tables",
            ),
            (
                SelfTest { whole_stacks: 50, cut_stacks: 9, ..good() },
                "50 of 60 stacks are complete: stacks were deeper than TRACING_PROFILING_STACK_BYTES",
            ),
            (
                SelfTest { whole_stacks: 50, ..good() },
                "50 of 60 stacks are complete: callers were not found",
            ),
            (
                SelfTest { samples: 0, refused: "of this".to_owned(), ..good() },
                "no samples are taken (source timer): threads could not be sampled, since of this",
            ),
            (SelfTest { has_functions: false, ..good() }, "functions have no names"),
            (SelfTest { waited: None, ..good() }, "the wait was not captured"),
            (SelfTest { has_stack_of_wait: false, ..good() }, "the wait has no stack"),
        ] {
            assert_eq!(broken.problems(), [expected]);
        }
    }

    #[test]
    fn a_problem_has_the_causes_that_were_logged() {
        let cause = |kind: LogKind, message: &str| Cause {
            kind: kind.kind().to_owned(),
            reason: kind.reason().to_owned(),
            message: message.to_owned(),
        };
        let causes = vec![
            cause(LogKind::FileUnreadable, "it cannot be read"),
            cause(LogKind::WaitsUnseen, "/proc is not mounted"),
            cause(LogKind::CallsForbidden, "a filter"),
        ];
        let found = SelfTest { causes, ..good() };
        assert!(found.is_ok(), "warnings alone are no problem");
        let found = SelfTest { has_functions: false, has_stack_of_wait: false, ..found };
        assert_eq!(
            found.problems(),
            [
                "functions have no names: it cannot be read",
                "the wait has no stack: /proc is not mounted: a filter"
            ]
        );
    }
}
