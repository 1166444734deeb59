//! Settings in code.

use std::fmt;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use super::links;
use crate::collect::{CONTINUOUS_RATES, ContinuousSettings};
use crate::error::Error;
use crate::export::{Directory, Exporter};
use crate::keep::{Kept, OnKept, Rules, ShownFields};
use crate::log::{LogEvent, LogKind};
use crate::profile::Resource;
use crate::redact::Redaction;
use crate::references::{ALL_CPU, ReferenceLimits};
use crate::sampler::{Periods, Source, SourceSettings};
use crate::sys::MAX_STACK_COPIED;
use crate::threads::Timing;

/// Builds a [`ProfilingLayer`](crate::ProfilingLayer) with settings other than the defaults.
///
/// ```no_run
/// use std::time::Duration;
/// use tracing_profiling::{Directory, Keep, ProfilingLayer, Rule, Rules};
/// use tracing_subscriber::prelude::*;
///
/// # fn main() -> Result<(), tracing_profiling::Error> {
/// let layer = ProfilingLayer::builder()
///     .rules(Rules::new([Rule::for_all(Keep::slower_than(Duration::from_millis(100)))]))
///     .exporter(Directory::new("/var/lib/shop/profiles"))
///     .build()?;
/// tracing_subscriber::registry().with(layer).init();
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use]
pub struct Builder {
    pub(crate) rules: Rules,
    pub(super) source: SamplingSettings,
    pub(super) exporter: Opaque<Option<Box<dyn Exporter>>>,
    /// What the environment configures in its place.
    pub(super) env_exporter: Opaque<Option<Box<dyn Exporter>>>,
    pub(super) resource: Option<Resource>,
    /// Where files are written if there is no other exporter, and a variable that sets this.
    pub(super) files: Directory,
    pub(super) files_set_by: Option<&'static str>,
    /// The templates of links in reports; empty if there is none.
    pub(crate) trace_url: String,
    pub(super) source_url: String,
    pub(super) profiles_per_minute: u32,
    pub(super) samples_per_profile: usize,
    pub(super) memory: usize,
    pub(super) alloc_sample_interval: u32,
    pub(super) heap: bool,
    pub(super) cpu_percent: Option<u32>,
    pub(super) references: ReferenceLimits,
    pub(crate) timing: Timing,
    pub(super) on_kept: Opaque<Option<OnKept>>,
    pub(super) shown_fields: ShownFields,
    pub(super) redaction: Redaction,
    pub(super) symbols: bool,
    /// The first setting with which no layer can be built.
    pub(super) invalid: Option<Error>,
    /// What is wrong with the settings, although the layer can start with them.
    pub(super) warnings: Vec<LogEvent>,
    /// The variable that sets an OTLP endpoint.
    pub(super) endpoint: Option<&'static str>,
}

/// What has no `Debug`.
pub(super) struct Opaque<T>(pub(super) T);

impl<T> fmt::Debug for Opaque<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("..")
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct SamplingSettings {
    pub(super) threads: SourceSettings,
    pub(super) waits: bool,
    /// For how long a span must be entered before its threads are sampled; `None` if its rule decides.
    pub(super) sampling_delay: Option<Duration>,
    pub(super) continuous: ContinuousSettings,
}

pub(super) const STACK_BYTES: RangeInclusive<u32> = 1024..=MAX_STACK_COPIED;
pub(super) const RATES: RangeInclusive<u32> = 1..=10_000;
pub(super) const SHORTEST_INTERVAL: Duration = Duration::from_secs(1);
pub(super) const LONGEST_INTERVAL: Duration = Duration::from_secs(24 * 60 * 60);

impl Builder {
    pub(crate) fn new() -> Self {
        Self {
            rules: Rules::default(),
            source: SamplingSettings {
                threads: SourceSettings {
                    source: Source::default(),
                    signal: None,
                    // Deep enough for an async service in a release build.
                    stack_bytes: 32 * 1024,
                    periods: None,
                },
                waits: true,
                sampling_delay: None,
                continuous: ContinuousSettings::OFF,
            },
            exporter: Opaque(None),
            env_exporter: Opaque(None),
            resource: None,
            files: Directory::new("profiles"),
            files_set_by: None,
            trace_url: String::new(),
            source_url: String::new(),
            profiles_per_minute: 60,
            // The default limit of Pyroscope.
            samples_per_profile: 16_000,
            memory: 128 << 20,
            cpu_percent: None,
            references: ReferenceLimits::default(),
            timing: Timing::USUAL,
            on_kept: Opaque(None),
            shown_fields: ShownFields::default(),
            redaction: Redaction::new(),
            alloc_sample_interval: 512 << 10,
            heap: false,
            symbols: cfg!(feature = "symbols"),
            invalid: None,
            warnings: Vec::new(),
            endpoint: None,
        }
    }

    /// Adds a warning, which is logged once the layer has a subscriber.
    pub(crate) fn warn(&mut self, warning: LogEvent) {
        if !self.warnings.contains(&warning) {
            self.warnings.push(warning);
        }
    }

    /// The value of `setting`, clamped to its range with a warning.
    fn clamped(&mut self, setting: &'static str, value: u32, range: &RangeInclusive<u32>) -> u32 {
        let clamped = value.clamp(*range.start(), *range.end());
        if clamped != value {
            let (least, most) = range.clone().into_inner();
            let message =
                format!("{setting}({value}) is not from {least} to {most}: it is {clamped} now");
            let warning = LogEvent::warning(LogKind::Clamped, message);
            let (variable, limit) = (Some(setting.into()), Some(clamped.into()));
            self.warn(LogEvent { variable, value: Some(value.to_string()), limit, ..warning });
        }
        clamped
    }

    /// Which spans are profiled, and when they are kept. The default is `250ms|error` for all spans.
    pub fn rules(self, rules: Rules) -> Self {
        Self { rules, ..self }
    }

    /// Whether to capture where threads wait in profiled spans, what they wait for, and how long. The default is true.
    /// Without it, threads are not inspected from outside (`/proc/self/task`, their CPU clocks, their stack memory);
    /// spans still have their off-CPU times.
    pub fn off_cpu(mut self, off_cpu: bool) -> Self {
        self.source.waits = off_cpu;
        self
    }

    /// What produces stacks. The default is [`Source::Auto`].
    pub fn source(mut self, source: Source) -> Self {
        self.source.threads.source = source;
        self
    }

    /// The signal that timers send: the number of a real-time signal, or `SIGPROF` (27), that the program neither
    /// handles nor waits for. By default it is the highest real-time signal that is free when the layer is built; see
    /// `docs/platform.md`. If the given one is not free, no thread is sampled by a timer, and the log says so.
    pub fn timer_signal(mut self, number: i32) -> Self {
        self.source.threads.signal = Some(number);
        self
    }

    /// Samples per second of CPU time, from 1 to 10,000, for each thread in a span that is sampled; a timer takes at most
    /// one per kernel tick (100 to 1,000 a second). The default is 1,000; a thread that has had about 1,000 samples within
    /// a few seconds drops to 200 per second, and one that continues for long to 100.
    pub fn rate(mut self, hertz: u32) -> Self {
        self.source.threads.periods = Some(Periods::of_rate(self.clamped("rate", hertz, &RATES)));
        self
    }

    /// How long a span must have been entered, including the spans inside it, before the threads in it are
    /// [sampled](crate::guide::configuration#when-a-span-is-sampled): by default a twentieth of the shortest time in its
    /// rule, 1 to 20 ms. With [`Duration::ZERO`], each context switch in a profiled span costs 3 to 15 µs.
    pub fn sampling_delay(mut self, sampling_delay: Duration) -> Self {
        self.source.sampling_delay = Some(sampling_delay);
        self
    }

    /// The rate of the [continuous profile](Self::continuous) that is `on`.
    pub const USUAL_CONTINUOUS_RATE: u32 = ContinuousSettings::USUAL_RATE;

    /// Profiles the process continuously: the CPU time of all its threads, a profile each minute, to the exporter of
    /// the layer. `rate` is in samples per second of CPU time: from 1 to 1,000, or 0 for off, which is the default.
    ///
    /// Samples have the names of their thread and of their local root; with [`heap`](Self::heap) there is also what
    /// was allocated. A [`Directory`](crate::Directory) has them in `process`, with a quota of its own. While the
    /// layer is off or its rules keep nothing, there is none.
    pub fn continuous(mut self, rate: u32) -> Self {
        let range = 0..=*CONTINUOUS_RATES.end();
        self.source.continuous.rate = self.clamped("continuous", rate, &range);
        self
    }

    /// The time that a profile of [`continuous`](Self::continuous) covers: a second to a day. The default is a minute.
    pub fn continuous_interval(mut self, interval: Duration) -> Self {
        self.source.continuous.interval = interval.clamp(SHORTEST_INTERVAL, LONGEST_INTERVAL);
        self
    }

    /// How many spans are chosen at random, when they are created, to show what is typical: of each route at most one
    /// in that number of requests, and as many as take at most `cpu_percent` of the CPU time of this process, rounded
    /// to tenths; 100 is no limit. Kept spans are compared with the last 200 of their name and route. Each takes some
    /// 1 ms of CPU time. The default is one in 16, and 0.2 %; 0 turns it off.
    pub fn references(mut self, one_in: u32, cpu_percent: f64) -> Self {
        // Saturates.
        let cpu_thousandths = ((cpu_percent * 10.0).round() as u32).min(ALL_CPU);
        self.references = match (one_in, cpu_thousandths) {
            (0, _) | (_, 0) => ReferenceLimits::NONE,
            _ => ReferenceLimits { one_in, cpu_thousandths },
        };
        self
    }

    /// The maximum number of stack bytes that are copied with each sample, from 1,024 to 65,448. The default is 32 KiB.
    /// The outer frames of a deeper stack are missing, and its profile states that.
    pub fn stack_bytes(mut self, bytes: u32) -> Self {
        // The kernel requires a multiple of 8.
        self.source.threads.stack_bytes = self.clamped("stack_bytes", bytes, &STACK_BYTES) & !7;
        self
    }

    /// Where profiles go. The default is a [`Directory`](crate::Directory), `profiles` in the working directory, or what the
    /// [environment](crate::guide::configuration#variables) configures.
    pub fn exporter(self, exporter: impl Exporter + 'static) -> Self {
        Self { exporter: Opaque(Some(Box::new(exporter))), ..self }
    }

    /// The resource that the profiles describe; the exporter [gets](Exporter::set_context) it, and the next two. Give the
    /// same one to the tracer provider. The default is taken from `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES`.
    pub fn resource(self, resource: impl Into<Resource>) -> Self {
        Self { resource: Some(resource.into()), ..self }
    }

    /// Makes each trace id in a report a link to the trace, with `{trace_id}` and `{span_id}` in the URL replaced:
    /// `https://tempo.internal/trace/{trace_id}`. [`build`](Self::build) returns an error unless it is an `http` or
    /// `https` URL with `{trace_id}`.
    pub fn trace_url(self, template: &str) -> Self {
        let builder = Self { trace_url: template.to_owned(), ..self };
        let is_valid = links::is_trace_url(template);
        builder.checked("trace_url", template, links::A_TRACE_URL, is_valid)
    }

    /// Makes each source line in a report a link, with `{file}` and `{line}` in the URL replaced:
    /// `vscode://file//home/me/{file}:{line}`. Paths begin with the directory of the package unless they are
    /// [full](crate::Redaction::full_paths). [`build`](Self::build) returns an error if it is no such URL, or one that
    /// runs a script.
    pub fn source_url(self, template: &str) -> Self {
        let builder = Self { source_url: template.to_owned(), ..self };
        let is_valid = links::is_source_url(template);
        builder.checked("source_url", template, links::A_SOURCE_URL, is_valid)
    }

    /// With the error of `build`, unless a value is valid.
    fn checked(
        self,
        setting: &'static str,
        value: &str,
        expected: &'static str,
        is_valid: bool,
    ) -> Self {
        let invalid = || (!is_valid).then(|| Error::setting(setting, value, expected));
        Self { invalid: self.invalid.or_else(invalid), ..self }
    }

    /// The number of profiles per minute for the spans of each rule that have the same name and values of
    /// [`span_fields`](Self::span_fields), and its maximum burst. The default is 60. All spans of a rule together have four times
    /// that. Spans over the limit are counted.
    pub fn profiles_per_minute(self, profiles: u32) -> Self {
        Self { profiles_per_minute: profiles, ..self }
    }

    /// The maximum number of samples in a profile. The default is 16,000. The samples of a longer span are downsampled
    /// evenly, and those that remain have the weight of the others.
    pub fn samples_per_profile(self, samples: usize) -> Self {
        Self { samples_per_profile: samples.max(2), ..self }
    }

    /// The memory that the layer may take, in bytes. The default is 128 MiB, and usually a few are used.
    ///
    /// | share | for | beyond that |
    /// |---|---|---|
    /// | a half | profiles that wait to be exported | they are downsampled, and state that ([`SampleStats::downsampled`](crate::SampleStats::downsampled)) |
    /// | a quarter | samples that wait for the verdict on their span | a sample keeps its CPU time and loses its stack ([`SampleStats::dropped_memory`](crate::SampleStats::dropped_memory)) |
    /// | an eighth | stacks of pending futures that are [`Profiled`](crate::Profiled) | an await has its length and no stack ([`AwaitStats::dropped_memory`](crate::AwaitStats::dropped_memory)) |
    ///
    /// Debug information and symbol tables are mapped from their files, up to four times as much: functions of a file beyond
    /// that have no lines, or no names ([`ProfileStats::symbols_over_limit`](crate::ProfileStats::symbols_over_limit)).
    /// What each sampled thread takes comes on top; [the guide](crate::guide::sizing) has all amounts.
    pub fn memory(self, bytes: usize) -> Self {
        Self { memory: bytes, ..self }
    }

    /// The share of one core that reading and unwinding samples may take, in percent; 0 for no limit. Above it, the
    /// sampling rate is reduced ([`SamplingStats::rate_reduced`](crate::SamplingStats::rate_reduced)). The default is
    /// 1, or 0 if the [`rate`](Self::rate) is set.
    pub fn cpu_budget(self, percent: u32) -> Self {
        Self { cpu_percent: Some(percent), ..self }
    }

    /// A callback for kept spans, called after their profile was exported, on a thread of its own. If it panics, that
    /// is counted and logged once. If it blocks, nothing else stops; it is not called for kept spans beyond 8,192
    /// that wait.
    pub fn on_kept(self, on_kept: impl Fn(&Kept) + Send + 'static) -> Self {
        Self { on_kept: Opaque(Some(Box::new(on_kept))), ..self }
    }

    /// The fields of kept spans whose values are shown, in the log, in profiles and in their file names, and by which
    /// percentiles are kept apart; by default [these](crate::guide::log#a-kept-span). The values of all others stay in the
    /// process. Values are cut after 100 characters, and [`redact`](Self::redact) applies to them. A span with such
    /// fields costs some 200 ns more.
    pub fn span_fields(self, names: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self { shown_fields: ShownFields::new(names), ..self }
    }

    /// What else is removed from names before they leave the process. By default absolute paths are shortened. What one
    /// call hides is hidden, whatever others or the environment say.
    pub fn redact(self, redaction: Redaction) -> Self {
        Self { redaction: self.redaction.and(redaction), ..self }
    }

    /// Whether to resolve functions, files and lines. The default is true. Otherwise profiles contain addresses and build
    /// ids, so that they can be symbolized elsewhere, and the log shows locations such as `shop+0x1a2b`.
    pub fn symbols(mut self, symbols: bool) -> Self {
        self.symbols = symbols;
        self
    }

    /// How many bytes a thread allocates in the mean between two samples of its allocations, if the program has a
    /// [`ProfilingAllocator`](crate::ProfilingAllocator). The default is 512 KiB; 0 is for no samples. Of several
    /// layers, the shortest gap applies.
    pub fn alloc_sample_interval(self, bytes: u32) -> Self {
        Self { alloc_sample_interval: bytes, ..self }
    }

    /// Tracks the live heap of the whole process: by which code the memory in use was allocated, in spans or not. The
    /// default is off. [`Handle::heap_profile`](crate::Handle::heap_profile) returns it. Needs a
    /// [`ProfilingAllocator`](crate::ProfilingAllocator), and takes some nanoseconds of each free. Of several layers,
    /// one tracks it.
    pub fn heap(self, heap: bool) -> Self {
        Self { heap, ..self }
    }

    /// The settings as they are when the layer is built; an error if one is invalid.
    pub(crate) fn finished(mut self) -> Result<Self, Error> {
        if let Some(error) = self.invalid.take() {
            return Err(error);
        }
        let unused = self.exporter.0.as_ref().and(self.files_set_by);
        if let Some(variable) = unused {
            let message = format!("{variable} has no effect: the program sets an exporter");
            let warning = LogEvent::warning(LogKind::UnknownVariable, message);
            self.warn(LogEvent { variable: Some(variable.into()), ..warning });
        }
        Ok(self)
    }

    /// The directory in which profiles can be found, if they are written to files.
    pub(crate) fn dir(&self) -> Option<PathBuf> {
        let chosen = self.exporter.0.as_ref().or(self.env_exporter.0.as_ref());
        let directory = chosen.map_or(self.files.directory(), |chosen| chosen.directory());
        directory.map(PathBuf::from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keep::{Condition, Keep};

    #[test]
    fn values_out_of_range_are_clamped_with_a_warning() {
        let builder = Builder::new().rate(0).stack_bytes(70_000);
        assert_eq!(builder.source.threads.periods, Some(Periods::of_rate(1)));
        assert_eq!(builder.source.threads.stack_bytes, 65_448);
        let expected = [
            "rate(0) is not from 1 to 10000: it is 1 now",
            "stack_bytes(70000) is not from 1024 to 65448: it is 65448 now",
        ];
        let messages: Vec<_> = builder.warnings.iter().map(|warning| &warning.message).collect();
        assert_eq!(messages, expected);
        let builder = Builder::new().rate(10_000).stack_bytes(5_003);
        assert_eq!((builder.source.threads.stack_bytes, builder.warnings.len()), (5_000, 0));
    }

    #[test]
    fn no_layer_is_built_with_a_link_that_cannot_be_used() {
        let builders = [
            Builder::new().trace_url("https://tempo.internal"),
            Builder::new().source_url("javascript:{file}").trace_url("https://t/{trace_id}"),
        ];
        let errors = builders.map(|builder| builder.build().unwrap_err().to_string());
        let expected = [
            "trace_url is `https://tempo.internal`: expected a URL as",
            "source_url is `javascript:{file}`: expected a URL as",
        ];
        for (error, expected) in errors.iter().zip(expected) {
            assert!(error.starts_with(expected), "{error}");
        }
    }

    #[test]
    fn a_rule_that_keeps_all_takes_its_hung_limit_from_its_latency() {
        let all = Keep::when(Condition::Always);
        let second = Duration::from_secs(1);
        assert_eq!(all.or_slower_than(3 * second).hung_limit(), Some(30 * second));
        assert_eq!(all.hung_limit(), None);
    }
}
