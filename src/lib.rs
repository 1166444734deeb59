//! Span-scoped, on-demand profiling: a [`tracing_subscriber::Layer`] that answers "why was this
//! span slow?" with a profile of exactly that span, down to function and line.
//!
//! The layer samples the threads of spans that have been entered for long enough to become slow. A span that closes
//! slow or failed, or that hangs, is kept: its stacks become a profile that shows where its threads ran and where they
//! waited, and what its futures awaited, as a report for browsers, as pprof and, optionally, as OTLP. All other spans leave nothing behind.
//!
//! ```no_run
//! use tracing_profiling::ProfilingLayer;
//! use tracing_subscriber::filter::LevelFilter;
//! use tracing_subscriber::prelude::*;
//!
//! fn main() -> Result<(), tracing_profiling::Error> {
//!     let profiling = ProfilingLayer::from_env()?;
//!     let _flush = profiling.handle().flush_on_drop();
//!     tracing_subscriber::registry()
//!         .with(tracing_subscriber::fmt::layer().with_filter(LevelFilter::INFO))
//!         .with(profiling)
//!         .init();
//!     // ... spans that take longer than 250 ms, and failed ones, now leave profiles in `./profiles/`.
//!     Ok(())
//! }
//! ```
//!
//! The README says what you provide, what a profile has, and what it costs; the [`guide`] has a page for each topic. For
//! lines and inlined functions, set `debug = "line-tables-only"` in `[profile.release]`. Async code shows what it awaits if
//! each task is wrapped once ([`ProfiledExt::profiled`], `tower::AwaitsLayer`, or [`macro@profiled`]).
//!
//! A sample belongs to the innermost profiled span that its thread was in. It is attributed by its position in the ring
//! buffer of its thread, not by its timestamp, so it cannot be attributed to a wrong span. Samples that cannot be
//! attributed are discarded and counted.
//!
//! # What you must do
//!
//! - In the child of a `fork` that is not followed by `exec`, build a new layer. The parent's layer does nothing there.
//! - Keep the guard of [`Handle::flush_on_drop`] in `main`, or call [`Handle::flush`]. Otherwise spans kept just before
//!   the process ends are lost. `exit` and `abort` do not drop guards.
//! - Filter the layers, not the subscriber: `fmt::layer().with_filter(...)`. An `EnvFilter` that is a layer of its own
//!   disables spans for this layer, too ([order of the layers](guide::subscriber#order-of-the-layers)).
//!
//! # What it does not do
//!
//! - It does not profile code outside spans, or other processes.
//! - What C code allocates with `malloc` is neither counted nor sampled, also with [`ProfilingAllocator`].
//! - Of futures without the wrapper, only the innermost idle span is known, not what they await.
//! - On systems other than Linux on x86-64 and aarch64, spans have wall, busy and idle times. On-CPU time is unknown
//!   there, and there are no stacks.
//!
//! # Features
//!
//! | feature | | |
//! |---|---|---|
//! | `opentelemetry` | on by default | access to OpenTelemetry spans through `tracing-opentelemetry`: attributes on the span, and its ids in the profile |
//! | `symbols` | on by default | functions, files and lines; without it, profiles have addresses and build ids, as with `TRACING_PROFILING_SYMBOLS=off` |
//! | `pprof` | on by default | `encode::pprof`, and a file in that format next to each report |
//! | `otlp` | off | `encode::otlp`, and a file in that format next to each report |
//! | `firefox` | off | `encode::firefox`: a format for profiler.firefox.com and samply |
//! | `opentelemetry-sdk` | off | `KeptTraces`: whole traces of what was kept, few of the others; conversion of a resource of `opentelemetry_sdk` to [`Resource`] |
//! | `tower`, `axum` | off | `tower::AwaitsLayer`, for servers: the profiles of requests show what they await; with `axum` they are named by the route |
//! | `metrics` | off | `Handle::register_metrics`, `register_route_metrics`: [`Stats`], and totals by route, as OpenTelemetry metrics |
//! | `otlp-http`, `otlp-grpc` | off | `OtlpExporter`: profiles go to an OpenTelemetry Collector. With an endpoint in `OTEL_EXPORTER_OTLP_ENDPOINT` or `OTEL_EXPORTER_OTLP_PROFILES_ENDPOINT`, [`ProfilingLayer::from_env`] uses it |
//! | `otlp-tls-ring`, `otlp-tls-aws-lc` | off | `https` for `otlp-http` and `otlp-grpc`, with that cryptography; `otlp-tls`: with the one that the program [has installed](crate::guide::otlp#https) |
//!
//! No other feature starts anything by itself. The crate `tracing-profiling-server` has routes for axum: the rules, the state and
//! the profiles over HTTP, and a page that shows them.
//!
//! [Variables](guide::configuration#variables) configure it, and methods of the [`Builder`].
//!
//! # Rules
//!
//! Up to 256 comma-separated directives. Targets, spans and fields have the syntax of `EnvFilter`; the conditions of a
//! directive are joined by `|`, and any one is enough: `250ms|error,shop::cart[checkout]=50ms,noisy=off`. The most specific
//! directive applies. The [guide](guide::configuration#rules) explains all forms, and [`Condition`] lists the conditions.
//!
//! [`Handle::set_rules`] replaces the rules at run time.

#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(
    not(feature = "symbols"),
    allow(
        dead_code,
        unused_imports,
        reason = "some code that reads object files is used only for symbols"
    )
)]
#![cfg_attr(docsrs, doc(auto_cfg(hide(feature, values("_otlp")))))]

mod allocations;
mod assemble;
mod awaits;
#[cfg(test)]
mod churn;
mod collect;
mod config;
mod control;
mod engine;
mod error;
pub mod export;
mod handle;
mod history;
mod inbox;
mod intake;
mod interest;
mod keep;
mod layer;
mod layers;
mod log;
#[cfg(feature = "metrics")]
mod metrics;
#[cfg(test)]
mod model;
mod otel;
mod publish;
mod references;
mod refresh;
mod report;
mod sinks;
mod span;
mod start;
mod stats;
mod symbols;
mod threads;
#[cfg(feature = "tower")]
pub mod tower;
mod watch;

use tracing_profiling_capture::{budget, drain, sampler, sys, unwind};
#[doc(inline)]
pub use tracing_profiling_profile::{compare, encode, profile};
use tracing_profiling_profile::{facts, ids, redact, text};

#[cfg(fuzzing)]
pub mod fuzzing;

/// The guide: a page for each topic.
// Of two definitions of a link the first holds: here those of `rustdoc_links.txt`, in the repository those of the page.
#[cfg(any(doc, doctest))]
pub mod guide {
    macro_rules! pages {
        ($($page:ident)*) => { $(
            #[doc = include_str!("../docs/rustdoc_links.txt")]
            #[doc = include_str!(concat!("../docs/guide/", stringify!($page), ".md"))]
            pub mod $page {}
        )* };
        ($(if $feature:literal ($shown:meta, $name:literal) $page:ident)*) => { $(
            #[cfg_attr(feature = $feature, doc = include_str!("../docs/rustdoc_links.txt"))]
            #[cfg_attr(feature = $feature, doc = include_str!(concat!("../docs/guide/", stringify!($page), ".md")))]
            #[cfg_attr(not(feature = $feature), doc = concat!("This page is about the feature ", $name, "."))]
            #[cfg_attr(docsrs, doc(cfg($shown)))]
            pub mod $page {}
        )* };
    }
    pages! {
        subscriber awaits allocations configuration live_control log report nothing_is_kept platforms sizing redaction
    }
    pages! {
        if "opentelemetry-sdk" (feature = "opentelemetry-sdk", "`opentelemetry-sdk`") opentelemetry
        if "opentelemetry-sdk" (feature = "opentelemetry-sdk", "`opentelemetry-sdk`") kept_traces
        if "_otlp" (any(feature = "otlp-grpc", feature = "otlp-http"), "`otlp-grpc` or `otlp-http`") otlp
        if "_otlp" (any(feature = "otlp-grpc", feature = "otlp-http"), "`otlp-grpc` or `otlp-http`") receivers
    }
}

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

pub use awaits::{Profiled, ProfiledExt, queued};
pub use config::Builder;
pub use engine::{CancelProfile, ProfileKind, StartedProfile};
pub use error::{Error, FlushError, FlushStage, ProfileError};
#[cfg(feature = "_otlp")]
#[cfg_attr(docsrs, doc(cfg(any(feature = "otlp-grpc", feature = "otlp-http"))))]
pub use export::{Compression, OtlpBuilder, OtlpExporter, Protocol};
pub use export::{
    Directory, ExportError, Exported, Exporter, Format, InvalidSetting, resource_from_env,
};
pub use facts::{
    Allocations, ChildOrder, ChildTotals, Children, Facts, Measure, Reason, Reasons, TimeBreakdown,
    Unit,
};
pub use handle::{FlushGuard, Handle, ProfileOptions};
pub use history::{Period, RouteHistory};
pub use ids::{InvalidId, ProfileId, SpanId, TraceId};
pub use keep::{Condition, Keep, Kept, KeptSpan, NoProfile, Rule, Rules, Threshold};
pub use layer::ProfilingLayer;
#[cfg(feature = "opentelemetry-sdk")]
#[cfg_attr(docsrs, doc(cfg(feature = "opentelemetry-sdk")))]
pub use otel::KeptTraces;
pub use otel::span_attributes;
pub use profile::{DumpedThread, Profile, Resource, ThreadActivity, ThreadDump};
pub use publish::{OpenSpan, OpenState, RecentlyKept};
pub use redact::{InvalidPattern, Redaction};
pub use references::Route;
pub use sampler::{Source, UnknownName};
pub use stats::{
    AllocationStats, AwaitStats, ChildStats, ContinuousStats, ProfileStats, ReferenceStats,
    ReportStats, RuleStats, SampleStats, SamplingStats, SpanStats, StackStats, Stats, ThreadStats,
    TraceStats, WaitStats,
};
pub use sys::ProfilingAllocator;

/// A function whose calls are spans: `#[tracing::instrument]` with its own conditions for keeping profiles.
///
/// ```
/// use tracing_profiling::profiled;
///
/// #[profiled(threshold = "50ms", on_error, skip(basket), err)]
/// async fn checkout(user: u64, basket: Vec<u64>) -> Result<(), std::io::Error> {
/// #   _ = (user, basket);
///     Ok(())
/// }
///
/// /// Never profiled, whatever the rules for all say.
/// #[profiled(off)]
/// fn heartbeat() {}
/// ```
///
/// | argument | meaning |
/// |---|---|
/// | `threshold = "50ms"` | keep the span if it takes longer |
/// | `on_error` | keep it if it fails; with `err`, a returned `Err` is an `ERROR` event and so a failure. The compiler warns where `err` is missing |
/// | `off` | never profile it |
/// | `crate = "shop_base::tracing_profiling"` | on async functions, the path of this crate if it is renamed or re-exported |
///
/// All other arguments are those of `#[tracing::instrument]`, to which they are passed; the crate `tracing` must be
/// available under that name. The attribute works on all functions and methods but a `const fn`. The body of an async
/// function is [`Profiled`]: its profiles show what it awaits. On functions that return `impl Future`, call
/// [`.profiled()`](ProfiledExt::profiled) on what they return.
///
/// `threshold` and `on_error` replace the directive for all spans (`250ms|error` by default); without them it applies. A
/// directive that names the span or its target (`shop=1s`, `[checkout]=off`) overrides the attribute. A function with its
/// own settings is profiled even if the rules name only other spans; only the rule set `off` switches it off. With
/// `level = "debug"` it is profiled if a layer or a rule enables that level. Each function with `threshold` or `on_error`
/// has its own limit of profiles per minute.
///
/// The attribute needs the layer in the subscriber. On sync functions it costs no more than `#[tracing::instrument]`.
pub use tracing_profiling_macros::profiled;
