//! Settings in code.

use std::ops::RangeInclusive;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::collector::{Engine, Gate, Limits, Pace, Parts, ShedLimits, waiting_profiles};
use crate::error::Error;
#[cfg(feature = "_otlp")]
use crate::export::OtlpExporter;
use crate::export::{Directory, Exporter, Remote};
use crate::keep::{Callsites, Condition, Keep, Keeper, Kept, MOST_PROMISED, OnKept, Rules};
use crate::otel::{AttributeNames, Pairing};
use crate::profile::Resource;
use crate::redact::Redaction;
use crate::sampler::{Periods, Sampler, Source, SourceSettings};
use crate::span::{JUDGES_CPU, KEEP_ON_ERROR, ONE_IN, Plan, SUSPECT, Spans, WATCHED};
use crate::stats::Counters;
use crate::symbols::SymbolSettings;
use crate::sys::{self, Clock, Poller, SampleRequest, TimerClock};

/// Makes a [`ProfilingLayer`](crate::ProfilingLayer) with other settings than the default.
///
/// ```no_run
/// use std::time::Duration;
/// use tracing_profiling::{Keep, ProfilingLayer, Rule, Rules};
/// use tracing_subscriber::prelude::*;
///
/// # fn main() -> Result<(), tracing_profiling::Error> {
/// let layer = ProfilingLayer::builder()
///     .rules(Rules::new([Rule::for_all(Keep::slower_than(Duration::from_millis(100)))]))
///     .directory("/var/lib/shop/profiles")
///     .build()?;
/// tracing_subscriber::registry().with(layer).init();
/// # Ok(())
/// # }
/// ```
pub struct Builder {
    rules: Rules,
    source: SourceSettings,
    max_depth: u32,
    directory: PathBuf,
    exporter: Option<Box<dyn Exporter>>,
    /// What the environment says, if that is to be used.
    #[cfg(feature = "_otlp")]
    otlp: Option<OtlpExporter>,
    resource: Option<Resource>,
    profiles_per_minute: u32,
    samples_per_profile: usize,
    pending_spans: usize,
    pending_profiles: usize,
    memory_bytes: usize,
    export_bytes: usize,
    cpu_percent: Option<u32>,
    shed: ShedLimits,
    pub(crate) pace: Pace,
    on_kept: Option<OnKept>,
    only_sampled_traces: bool,
    attributes: AttributeNames,
    redaction: Redaction,
    /// What the environment says of it: beside the above, whichever was set first.
    env_redaction: Redaction,
    symbols: SymbolSettings,
    #[cfg(feature = "sighup")]
    reloads_on_sighup: bool,
}

/// Deep enough for an async service built for release; see `docs/design.md` for the figures.
const DEFAULT_STACK_BYTES: u32 = 32 * 1024;
/// As much as fits into a record.
pub(super) const STACK_BYTES: RangeInclusive<u32> = 1024..=65_448;
const DEFAULT_DEPTH: u32 = 256;
pub(super) const DEPTHS: RangeInclusive<u32> = 1..=1024;
/// In hertz.
pub(super) const RATES: RangeInclusive<u32> = 1..=10_000;
const DEFAULT_PROFILES_PER_MINUTE: u32 = 60;
/// What Pyroscope takes by default.
const DEFAULT_SAMPLES_PER_PROFILE: usize = 16_000;
const DEFAULT_PENDING_SPANS: usize = 16_384;
/// Of one core.
const DEFAULT_CPU_PERCENT: u32 = 1;
const DEFAULT_MEMORY_BYTES: usize = 32 * 1024 * 1024;
/// Of memory that may still be reserved: two threads' stacks, and what a layer begins with.
const LEAST_MIB: u64 = 8;
const DEFAULT_EXPORT_BYTES: usize = 64 * 1024 * 1024;
/// Line tables of a large service are a tenth of that, all of its debug information may be more.
const DEFAULT_SYMBOL_BYTES: u64 = 512 * 1024 * 1024;

const RING_BYTES: usize = 256 * 1024;

impl Builder {
    pub(crate) fn new() -> Self {
        Self {
            rules: Rules::default(),
            source: SourceSettings {
                source: Source::default(),
                timer_clock: TimerClock::default(),
                stack_bytes: DEFAULT_STACK_BYTES,
                periods: None,
                waits: true,
                arm_after: None,
            },
            max_depth: DEFAULT_DEPTH,
            directory: PathBuf::from("profiles"),
            exporter: None,
            #[cfg(feature = "_otlp")]
            otlp: None,
            resource: None,
            profiles_per_minute: DEFAULT_PROFILES_PER_MINUTE,
            samples_per_profile: DEFAULT_SAMPLES_PER_PROFILE,
            pending_spans: DEFAULT_PENDING_SPANS,
            pending_profiles: MOST_PROMISED,
            memory_bytes: DEFAULT_MEMORY_BYTES,
            cpu_percent: None,
            shed: ShedLimits::default(),
            pace: Pace::USUAL,
            on_kept: None,
            only_sampled_traces: false,
            attributes: AttributeNames::default(),
            redaction: Redaction::new(),
            env_redaction: Redaction::new(),
            export_bytes: DEFAULT_EXPORT_BYTES,
            symbols: SymbolSettings {
                names: cfg!(feature = "symbols"),
                most_bytes: DEFAULT_SYMBOL_BYTES,
            },
            #[cfg(feature = "sighup")]
            reloads_on_sighup: false,
        }
    }

    /// Which spans are profiled, and when they are kept. `250ms|error` for all by default.
    #[must_use]
    pub fn rules(self, rules: Rules) -> Self {
        Self { rules, ..self }
    }

    /// Whether to see where threads wait inside profiled spans, for what, and for how long; true by default. Without
    /// it nothing is read of threads from outside (`/proc/self/task`, their CPU clocks, the memory of their
    /// stacks), and spans have their off-CPU times all the same.
    #[must_use]
    pub fn waits(mut self, waits: bool) -> Self {
        self.source.waits = waits;
        self
    }

    /// What produces stacks; [`Source::Auto`] by default.
    #[must_use]
    pub fn source(mut self, source: Source) -> Self {
        self.source.source = source;
        self
    }

    pub(crate) fn with_source_settings(self, source: SourceSettings) -> Self {
        Self { source, ..self }
    }

    /// Lets the source `timer` sample as often as the rate says, and not only as often as the kernel
    /// ticks (100 to 1,000 times a second).
    ///
    /// The price: its signals then come while a thread waits, too. System calls that wait with a time
    /// limit (`epoll_wait`, `poll`, `nanosleep`, a `read` or `recv` with a timeout, `futex` with one)
    /// then return early with `EINTR`, which the program must be ready for. Without this none of
    /// them is interrupted (on kernels before 5.9, hardly ever); see `docs/platform.md`.
    #[must_use]
    pub fn fine_timers(self) -> Self {
        self.timers(true)
    }

    pub(super) fn timers(mut self, are_fine: bool) -> Self {
        self.source.timer_clock = if are_fine { TimerClock::Monotonic } else { TimerClock::Cpu };
        self
    }

    /// Samples a second of CPU time, from 1 to 10,000, of each thread in a span that is sampled. By default 1,000; a
    /// thread that has had some 1,000 in a few seconds falls to 200 a second, and one that goes on for long to 100.
    #[must_use]
    pub fn rate(mut self, hertz: u32) -> Self {
        self.source.periods = Some(Periods::of_rate(hertz.clamp(*RATES.start(), *RATES.end())));
        self
    }

    /// For how long a span is entered, with the spans inside it, before the threads in it are sampled. By default
    /// that follows its rule: a twentieth of the least time that it names, but no less than 1 ms and no more than
    /// 20 ms (12.5 ms for `250ms`), and 1 ms if it names none; spans that `always` or `0ms` keeps, those that `one_in` chooses, and what
    /// [`Handle::keep_current`](crate::Handle::keep_current) is called in, are sampled from the beginning.
    ///
    /// [`Duration::ZERO`] samples all profiled spans from their first enter: nothing is missing at the beginning of
    /// a profile, and each context switch in a profiled span costs 3 to 15 µs, also in spans that are not kept.
    #[must_use]
    pub fn arm_after(mut self, arm_after: Duration) -> Self {
        self.source.arm_after = Some(arm_after);
        self
    }

    /// Samples no more threads while the CPUs of the host, or those that the process's control group may use, are busy
    /// for more than so many percent, as of the last second. Spans that are kept then have their times and no samples;
    /// [`ThreadStats::shed`](crate::ThreadStats::shed) and the log say so. No limit by default. What is sampled
    /// already goes on; and on systems other than Linux nothing is known of the load.
    #[must_use]
    pub fn shed_above_cpu(mut self, percent: u32) -> Self {
        self.shed.cpu_percent = Some(percent);
        self
    }

    /// The same while more than so many bytes of memory are in use: by the process's control group (version 2,
    /// `memory.current`), or on the host (`MemTotal` less `MemAvailable`) where it has none.
    #[must_use]
    pub fn shed_above_memory(mut self, bytes: u64) -> Self {
        self.shed.memory_bytes = Some(bytes);
        self
    }

    /// Bytes of stack that are copied with each sample at most, from 1,024 to 65,448; 32 KiB by default.
    /// The outer frames of a deeper stack are missing, and its profile says so.
    #[must_use]
    pub fn stack_bytes(mut self, bytes: u32) -> Self {
        // The kernel wants a multiple of 8.
        self.source.stack_bytes = bytes.clamp(*STACK_BYTES.start(), *STACK_BYTES.end()) & !7;
        self
    }

    /// Frames of a stack that are kept, from 1 to 1,024; 256 by default.
    #[must_use]
    pub fn max_depth(self, frames: u32) -> Self {
        Self { max_depth: frames.clamp(*DEPTHS.start(), *DEPTHS.end()), ..self }
    }

    /// Where profiles are written, if no exporter is set; `profiles` in the working directory by
    /// default. See [`Directory`].
    #[must_use]
    pub fn directory(self, path: impl Into<PathBuf>) -> Self {
        Self { directory: path.into(), ..self }
    }

    /// To OTLP, as the environment says, unless another exporter is set.
    #[cfg(feature = "_otlp")]
    pub(super) fn otlp(self, otlp: OtlpExporter) -> Self {
        Self { otlp: Some(otlp), ..self }
    }

    #[cfg(all(test, feature = "_otlp"))]
    pub(super) fn is_otlp(&self) -> bool {
        self.otlp.is_some()
    }

    /// Where profiles go instead of a directory.
    #[must_use]
    pub fn exporter(self, exporter: impl Exporter + 'static) -> Self {
        Self { exporter: Some(Box::new(exporter)), ..self }
    }

    /// What the process is, as the profiles say, unless the exporter was made by hand. Give the same to the
    /// tracer provider. By default what `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` say.
    #[must_use]
    pub fn resource(self, resource: impl Into<Resource>) -> Self {
        Self { resource: Some(resource.into()), ..self }
    }

    /// Profiles that each rule may keep a minute, and at once; 60 by default. Spans over the limit
    /// are counted.
    #[must_use]
    pub fn profiles_per_minute(self, profiles: u32) -> Self {
        Self { profiles_per_minute: profiles, ..self }
    }

    /// Samples that a profile may have; 16,000 by default. A longer span's samples are thinned
    /// out evenly, and those that are left stand for the others.
    #[must_use]
    pub fn samples_per_profile(self, samples: usize) -> Self {
        Self { samples_per_profile: samples.max(2), ..self }
    }

    /// Memory in which samples may wait for their span's verdict; 32 MiB by default. What does not
    /// fit keeps its CPU time and loses its stack.
    #[must_use]
    pub fn memory_bytes(self, bytes: usize) -> Self {
        Self { memory_bytes: bytes, ..self }
    }

    /// Spans with samples that may wait for their verdict at once, local roots apart; 16,384 by default. Of
    /// more than that
    /// the stacks are given up, and their CPU time is shown at their root.
    #[must_use]
    pub fn pending_spans(self, spans: usize) -> Self {
        Self { pending_spans: spans.max(1), ..self }
    }

    /// Profiles that may wait to be made and exported at once; 32 by default. Each is in memory, also while the
    /// exporter fails: there are no more than have 64 KiB each in half of the [`export_bytes`](Self::export_bytes).
    /// Spans that are kept meanwhile have none: see
    /// [`SpanStats::kept_exporter_busy`](crate::SpanStats::kept_exporter_busy).
    #[must_use]
    pub fn pending_profiles(self, profiles: usize) -> Self {
        Self { pending_profiles: profiles.max(1), ..self }
    }

    /// How much of one core reading and unwinding samples may take, in percent; 0 for as much as it takes. If
    /// it takes more, threads are sampled less often until it takes less: the log, the profiles and
    /// [`SamplingStats::rate_reduced`](crate::SamplingStats::rate_reduced) say so. 1 by default, and 0 if the
    /// [`rate`](Self::rate) is set.
    #[must_use]
    pub fn cpu_budget(self, percent: u32) -> Self {
        Self { cpu_percent: Some(percent), ..self }
    }

    /// Called for what was kept, after its profile is exported, on the thread that exports. If it panics that is
    /// caught, counted in [`SpanStats::on_kept_panics`](crate::SpanStats::on_kept_panics), and said once.
    #[must_use]
    pub fn on_kept(self, on_kept: impl Fn(&Kept) + Send + 'static) -> Self {
        Self { on_kept: Some(Box::new(on_kept)), ..self }
    }

    /// Keeps no spans of traces that OpenTelemetry does not export. By default they are profiled all
    /// the same, and the profile says so: `profile.trace_sampled`.
    #[must_use]
    pub fn only_sampled_traces(self, only: bool) -> Self {
        Self { only_sampled_traces: only, ..self }
    }

    /// Under which names attributes are set on the OpenTelemetry spans that were kept: `name` is
    /// called with each of [`SPAN_ATTRIBUTES`](crate::SPAN_ATTRIBUTES), and says how to call it, or
    /// `None` to leave it out.
    #[must_use]
    pub fn span_attributes(self, name: impl Fn(&'static str) -> Option<String>) -> Self {
        Self { attributes: AttributeNames::new(name), ..self }
    }

    /// What is left out of names before anything leaves the process. By default absolute paths are
    /// shortened. What the environment hides is hidden too, whichever of this and
    /// [`with_env`](Self::with_env) is called first.
    #[must_use]
    pub fn redact(self, redaction: Redaction) -> Self {
        Self { redaction, ..self }
    }

    /// Whether functions, files and lines are looked up; by default they are. Without them profiles have
    /// addresses, mappings and build ids, for whoever looks them up elsewhere, and the flame graph and the
    /// log have places such as `shop+0x1a2b`.
    #[must_use]
    pub fn symbols(mut self, symbols: bool) -> Self {
        self.symbols.names = symbols;
        self
    }

    /// Memory that profiles may take on their way from samples to where they are exported, symbols apart (see
    /// [`Builder::symbol_bytes`]); 64 MiB by default. A profile that would take more is thinned out: fewer of
    /// its samples stand for all, its title says so, and
    /// [`SampleStats::downsampled`](crate::SampleStats::downsampled) counts the others.
    #[must_use]
    pub fn export_bytes(self, bytes: usize) -> Self {
        Self { export_bytes: bytes, ..self }
    }

    /// How much of symbols may be held at once: debug information and symbol tables, as large as they are
    /// in their files; 512 MiB by default. They are mapped, and read where they are asked for. Of a file
    /// that does not fit beside the others functions are named by its symbol table, without lines, and if
    /// that does not fit either not at all: the log and
    /// [`ProfileStats::symbols_over_limit`](crate::ProfileStats::symbols_over_limit) say so. All is given back half a
    /// minute after the last profile.
    #[must_use]
    pub fn symbol_bytes(mut self, bytes: u64) -> Self {
        self.symbols.most_bytes = bytes;
        self
    }

    /// Beside what is set in code: whoever runs a program can hide more, and not less.
    pub(super) fn redact_too(self, env_redaction: Redaction) -> Self {
        Self { env_redaction, ..self }
    }

    /// Reads `TRACING_PROFILING` again whenever the process gets the signal SIGHUP, as
    /// [`Handle::reload_env`](crate::Handle::reload_env) does, on a thread of ours. What the rules are
    /// then is one line of log; if they do not parse it is a warning that shows the place, and the
    /// rules stay as they are. Needs the feature `sighup`.
    ///
    /// The environment of a process can be changed from within alone: this is for programs that load
    /// theirs from a file, and do so again at SIGHUP. A program that knows when it has read its rules
    /// calls [`Handle::set_rules`](crate::Handle::set_rules) instead.
    ///
    /// Handlers that the program installed before are called as before. From now on SIGHUP does not
    /// end the process, also when the layer is gone. It can end system calls early, as any signal
    /// that is handled (see `docs/platform.md`). The thread waits also while the layer is off, so
    /// that SIGHUP can turn it on; it ends with the layer.
    ///
    /// On systems without this signal nothing happens.
    #[cfg(feature = "sighup")]
    #[must_use]
    pub fn reload_on_sighup(self) -> Self {
        Self { reloads_on_sighup: true, ..self }
    }

    /// The program may change its working directory before anything is written.
    pub(crate) fn with_absolute_directory(self) -> Self {
        Self { directory: std::path::absolute(&self.directory).unwrap_or(self.directory), ..self }
    }

    #[cfg(feature = "sighup")]
    pub(crate) fn reloads_on_sighup(&self) -> bool {
        self.reloads_on_sighup
    }

    /// Where profiles can be found, if they become files.
    #[cfg(feature = "axum")]
    pub(crate) fn folder(&self) -> Option<PathBuf> {
        match &self.exporter {
            Some(exporter) => exporter.directory().map(PathBuf::from),
            #[cfg(feature = "_otlp")]
            None if self.otlp.is_some() => {
                self.otlp.as_ref().and_then(Exporter::directory).map(PathBuf::from)
            }
            None => Some(self.directory.clone()),
        }
    }

    pub(crate) fn get_rules(&self) -> &Rules {
        &self.rules
    }

    /// Starts the threads.
    pub(crate) fn start(
        self,
        gate: &'static Gate,
        pairing: Arc<Pairing>,
    ) -> Result<Arc<Engine>, Error> {
        // What is made first, the threads' stacks among it, cannot do with less; later all does. 0: the system does
        // not say how much there is.
        if sys::address_space_left().is_some_and(|left| (1..LEAST_MIB << 20).contains(&left)) {
            return Err(Error::no_memory(LEAST_MIB));
        }
        let clock = Clock::new();
        let counters = Arc::new(Counters::default());
        let poller = Poller::new().map_err(Error::thread)?;
        let request = SampleRequest {
            period_ns: self.source.periods.unwrap_or(Periods::USUAL).first(),
            stack_bytes: self.source.stack_bytes,
            ring_bytes: RING_BYTES,
            in_kernel: true,
            position_step: 0,
        };
        let source = Sampler::new(self.source, request, &poller.waker(), Arc::clone(&counters));
        let ticks_a_second = clock.ticks(Duration::from_secs(1));
        let arm_after = self.source.arm_after;
        let plan = move |keep: &Keep| {
            plan(keep, ticks_a_second, arm_after.unwrap_or_else(|| keep.arm_after()))
        };
        let callsites = Callsites::new(self.rules.clone(), Box::new(plan), Arc::clone(&counters));
        let most_pending = self.pending_profiles.min(waiting_profiles(self.export_bytes));
        let keeper = Keeper::new(self.profiles_per_minute).with_most_promised(most_pending);
        let spans = Spans::new(clock, Box::new(source.clone()), Arc::clone(&counters));
        let resource = self.resource.unwrap_or_else(Resource::from_env);
        #[cfg(feature = "_otlp")]
        let from_env = |resource: &Resource| {
            let exporter = self.otlp.map(|otlp| otlp.with_default_resource(resource.clone()));
            exporter.map(|exporter| Box::new(exporter) as Box<dyn Exporter>)
        };
        #[cfg(not(feature = "_otlp"))]
        let from_env = |_: &Resource| None;
        let mut exporter = self
            .exporter
            .or_else(|| from_env(&resource))
            .unwrap_or_else(|| Box::new(Directory::new(self.directory).with_resource(resource)));
        // It may be anybody's.
        let checked = catch_unwind(AssertUnwindSafe(|| exporter.check()));
        let problem = match checked {
            Ok(checked) => checked.err().map(|error| error.to_string()),
            Err(_) => Some("it panicked".to_owned()),
        };
        keeper.set_exporter_fails(problem.is_some());
        // With a directory nothing is lost; and who has no end of patience wants all to wait.
        let must_prove = |remote: &mut dyn Remote| {
            remote.fallback().is_none() && remote.limits().patience < Duration::MAX
        };
        if exporter.remote().is_some_and(must_prove) {
            keeper.demand_proof();
        }
        Engine::start(Parts {
            spans,
            callsites,
            keeper,
            counters,
            source,
            poller,
            limits: Limits {
                memory_bytes: self.memory_bytes,
                samples_per_profile: self.samples_per_profile,
                pending_spans: self.pending_spans,
                export_bytes: self.export_bytes,
                cpu_percent: match (self.cpu_percent, self.source.periods) {
                    (None, None) => Some(DEFAULT_CPU_PERCENT),
                    (percent, _) => percent.filter(|percent| *percent > 0),
                },
                frames_per_stack: self.max_depth as usize,
                stack_bytes: self.source.stack_bytes as usize,
                shed: self.shed,
                pace: self.pace,
            },
            gate,
            pairing,
            source_settings: self.source,
            exporter,
            problem,
            on_kept: self.on_kept,
            only_sampled_traces: self.only_sampled_traces,
            attributes: self.attributes,
            redaction: self.redaction.and(self.env_redaction),
            symbols: self.symbols,
        })
    }
}

impl std::fmt::Debug for Builder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Builder")
            .field("rules", &self.rules)
            .field("source", &self.source)
            .field("max_depth", &self.max_depth)
            .field("directory", &self.directory)
            .field("profiles_per_minute", &self.profiles_per_minute)
            .field("samples_per_profile", &self.samples_per_profile)
            .field("pending_spans", &self.pending_spans)
            .field("pending_profiles", &self.pending_profiles)
            .field("memory_bytes", &self.memory_bytes)
            .field("export_bytes", &self.export_bytes)
            .field("cpu_percent", &self.cpu_percent)
            .field("shed", &self.shed)
            .field("redaction", &self.redaction.clone().and(self.env_redaction.clone()))
            .field("symbols", &self.symbols)
            .finish_non_exhaustive()
    }
}

/// What the hooks must know of spans that are kept so, and sampled after that time.
fn plan(keep: &Keep, ticks_a_second: u64, arm_after: Duration) -> Plan {
    let in_ticks = |duration| in_ticks(duration, ticks_a_second);
    let suspect_after = keep.shortest().map_or(u64::MAX, |shortest| {
        let ticks = in_ticks(shortest);
        // The clock's rate gets better with time: what may be over by the last word on it must be
        // looked at.
        ticks - ticks / 1024
    });
    // One that is kept for something else, or whatever it takes: as if a second were too long.
    let slow = keep.shortest().filter(|shortest| !shortest.is_zero());
    let slow = slow.unwrap_or(Duration::from_secs(1)).max(arm_after.saturating_mul(20));
    let flags = keep.conditions().map(|condition| match condition {
        Condition::Error | Condition::ErrorSelf => KEEP_ON_ERROR,
        // Every span is looked at as it closes, however short it was.
        Condition::Always | Condition::Percentile { .. } => SUSPECT,
        Condition::OneIn(_) => ONE_IN,
        Condition::OnCpu(_) | Condition::OffCpu(_) => JUDGES_CPU,
        // Whose close must be seen, to know when there is none left.
        Condition::Open(_) => WATCHED | SUSPECT,
        _ => 0,
    });
    let flags = flags.fold(0, |all, flags| all | flags);
    Plan {
        number: 0,
        flags,
        suspect_after,
        arm_after: in_ticks(arm_after),
        long_after: in_ticks(slow.saturating_mul(LONG_TIMES)),
    }
}

/// A span that is open for so many times as long as is too slow is one that holds others.
const LONG_TIMES: u32 = 10;

fn in_ticks(duration: Duration, ticks_a_second: u64) -> u64 {
    let ticks = duration.as_nanos().saturating_mul(ticks_a_second.into()) / 1_000_000_000;
    u64::try_from(ticks).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of ticks that are nanoseconds.
    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn what_is_out_of_range_is_brought_into_it() {
        let builder = Builder::new().rate(0).stack_bytes(70_000).max_depth(0);
        assert_eq!(builder.source.periods, Some(Periods::of_rate(1)));
        assert_eq!(builder.source.stack_bytes, 65_448);
        assert_eq!(builder.max_depth, 1);
        assert_eq!(Builder::new().stack_bytes(5_003).source.stack_bytes, 5_000);
    }

    #[test]
    fn a_span_that_holds_others_is_open_for_ten_times_as_long_as_is_slow() {
        let ms = Duration::from_millis;
        let long_after = |keep: &Keep, arm_after| plan(keep, SECOND, arm_after).long_after;
        assert_eq!(long_after(&Keep::slower_than(ms(250)), ms(12)), 2_500_000_000);
        assert_eq!(long_after(&Keep::failed(), ms(1)), 10 * SECOND);
        assert_eq!(long_after(&Keep::slower_than(ms(0)), ms(0)), 10 * SECOND);
        // As long as it takes to be old, twenty times.
        assert_eq!(long_after(&Keep::slower_than(ms(5)), ms(20)), 4 * SECOND);
        assert_eq!(long_after(&Keep::failed(), Duration::MAX), u64::MAX);
    }

    #[test]
    fn what_keeps_all_hangs_for_as_long_as_its_latency_says() {
        let all = Keep::when(Condition::Always);
        let second = Duration::from_secs(1);
        assert_eq!(all.or_slower_than(3 * second).hung_limit(), Some(30 * second));
        assert_eq!(all.hung_limit(), None);
    }

    #[test]
    fn suspicion_begins_a_little_before_the_threshold() {
        let keep = Keep::slower_than(Duration::from_millis(250));
        let after = plan(&keep, SECOND, Duration::ZERO).suspect_after;
        assert!(after < 250_000_000 && after > 249_000_000);
    }
}
