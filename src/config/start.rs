//! Starts what the settings ask for.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::Builder;
use crate::allocations::AllocationSettings;
use crate::encode::HtmlContext;
use crate::engine::{Engine, Gate};
use crate::error::Error;
use crate::export::resource_from_env;
use crate::history::HistorySettings;
use crate::intake::IntakeSettings;
use crate::keep::{
    Callsites, ExporterHealth, MAX_RESERVED, OwnDispatch, PlanSettings, ProfileAdmission, SpanNames,
};
use crate::log::{LogEvent, LogKind};
use crate::otel::UnreachedSpans;
use crate::publish::{PublishSettings, waiting_profiles};
use crate::references::References;
use crate::sampler::Sampler;
use crate::span::Spans;
use crate::start::{self, Limits, Parts};
use crate::stats::Counters;
use crate::symbols::SymbolSettings;
use crate::sys::{self, Clock, Poller};
use crate::threads::ThreadSettings;

/// Address space that must be left: five thread stacks and the initial allocations of a layer.
const MIN_MIB: u64 = 14;
const RING_BYTES: usize = 256 * 1024;

/// Starts the threads. `dir` is the directory in which profiles can be found.
pub(crate) fn start(
    builder: Builder,
    dir: Option<PathBuf>,
    gate: &'static Gate,
    (unreached, dispatch): (Arc<UnreachedSpans>, OwnDispatch),
) -> Result<Arc<Engine>, Error> {
    // The first allocations, thread stacks among them, fail with less. Later ones are optional. 0 means that the
    // system does not report how much is left.
    if sys::address_space_left().is_some_and(|left| (1..MIN_MIB << 20).contains(&left)) {
        return Err(Error::no_memory(MIN_MIB));
    }
    // Before the first of the calls that a filter may forbid.
    sys::read_filters();
    // That of the program, or else that of the environment.
    let chosen = builder.exporter.0.or(builder.env_exporter.0);
    let is_default = chosen.is_none();
    let mut exporter = chosen.unwrap_or_else(|| Box::new(builder.files));
    let clock = Clock::default();
    let counters = Arc::new(Counters::default());
    let poller = Poller::new().map_err(Error::thread)?;
    let source =
        Sampler::new(builder.source.threads, RING_BYTES, &poller.waker(), counters.threads.clone());
    let settings = PlanSettings {
        ticks_a_second: clock.ticks(Duration::from_secs(1)),
        sampling_delay: builder.source.sampling_delay,
        long_after: None,
    };
    let callsites =
        Callsites::new(builder.rules, settings, builder.shown_fields, Arc::clone(&counters));
    let spans = Spans::new(clock, Box::new(source.clone()), Arc::clone(&counters));
    let mut warnings = builder.warnings;
    let no_heap = if !sys::SampledAllocation::can_be_taken() {
        Some("that needs Linux on x86-64 or aarch64")
    } else if builder.alloc_sample_interval == 0 {
        Some("TRACING_PROFILING_ALLOC_SAMPLE_INTERVAL is 0: remove it for its default of 524288")
    } else {
        None
    };
    if let Some(why) = no_heap.filter(|_| builder.heap) {
        let message =
            format!("TRACING_PROFILING_HEAP is on, but the live heap is not tracked: {why}");
        warnings.push(LogEvent::warning(LogKind::NotCounted, message));
    }
    if let (Some(name), true) = (builder.endpoint, is_default) {
        let message = format!(
            "{name} is set, but profiles are written to {}: the feature `otlp-grpc` or `otlp-http` of \
             tracing-profiling is off (OTEL_PROFILES_EXPORTER=directory turns this warning off)",
            dir.as_deref().unwrap_or(Path::new("a directory")).display()
        );
        let warning = LogEvent::warning(LogKind::EndpointUnused, message);
        warnings.push(LogEvent { variable: Some(name.into()), ..warning });
    }
    let context = HtmlContext::new(builder.resource.unwrap_or_else(resource_from_env))
        .trace_url(builder.trace_url)
        .source_url(builder.source_url);
    // The exporter may be user code.
    let problem = catch_unwind(AssertUnwindSafe(|| {
        exporter.set_context(&context);
        exporter.check().err().map(|error| error.to_string())
    }));
    let problem = problem.unwrap_or_else(|_| Some("it panicked".to_owned()));
    let [service, version] = ["service.name", "service.version"]
        .map(|name| context.resource().get(name).map(ToString::to_string).unwrap_or_default());
    let history = HistorySettings { dir, service, version };
    // With a fallback directory no profile is lost. With unlimited patience all profiles are to wait.
    let must_prove = exporter.remote().is_some_and(|remote| {
        remote.fallback().is_none() && remote.limits().grace_period < Duration::MAX
    });
    let health = ExporterHealth::new(problem.is_none(), must_prove);
    let mut admission = ProfileAdmission::new(builder.profiles_per_minute, health);
    admission.most_reservations = MAX_RESERVED.min(waiting_profiles(builder.memory / 2));
    let cpu_percent = match (builder.cpu_percent, builder.source.threads.periods) {
        (None, None) => Some(1),
        (percent, _) => percent.filter(|percent| *percent > 0),
    };
    let stack_bytes = builder.source.threads.stack_bytes as usize;
    let references = References::new(builder.references, context, Arc::clone(&counters));
    start::start(Parts {
        spans,
        callsites,
        admission,
        counters,
        source,
        poller,
        limits: Limits {
            memory: builder.memory,
            samples_per_profile: builder.samples_per_profile,
            // With samples, without local roots.
            pending_spans: 16_384,
            threads: ThreadSettings {
                timing: builder.timing,
                cpu_percent,
                waits: builder.source.waits,
            },
            intake: IntakeSettings {
                // The innermost ones, if there are more.
                frames_per_stack: 1_024,
                stack_bytes,
                has_budget: cpu_percent.is_some(),
            },
            allocations: AllocationSettings {
                sample_bytes: builder.alloc_sample_interval.into(),
                stack_bytes,
                tracks_heap: builder.heap,
            },
        },
        gate,
        unreached,
        continuous: builder.source.continuous,
        publishing: PublishSettings {
            exporter,
            problem,
            history,
            on_kept: builder.on_kept.0,
            symbols: SymbolSettings {
                names: builder.symbols,
                // The line tables of a large service take a tenth of the default of 512 MiB; its full debug information
                // can be larger.
                most_bytes: (builder.memory as u64).saturating_mul(4),
            },
        },
        warnings,
        names: SpanNames::new(dispatch, Arc::new(builder.redaction)),
        references,
    })
}
