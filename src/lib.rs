//! Span-scoped, on-demand profiling: a [`tracing_subscriber::Layer`] that answers "why was this
//! span slow?" with a profile of exactly that span, down to function and line.
//!
//! It samples the threads of spans that have been entered for long enough to become slow, and keeps nothing until a span
//! has earned it. A span that closes slow or failed, or hangs, gets its stacks unwound into a profile: where its threads
//! ran and where they waited, as a flame graph, as pprof and, if you like, as OTLP. All others leave no trace.
//!
//! ```no_run
//! use tracing_profiling::ProfilingLayer;
//! use tracing_subscriber::prelude::*;
//!
//! fn main() -> Result<(), tracing_profiling::Error> {
//!     let profiling = ProfilingLayer::from_env()?;
//!     let _flush = profiling.handle().flush_on_drop();
//!     tracing_subscriber::registry()
//!         .with(tracing_subscriber::fmt::layer())
//!         .with(profiling)
//!         .init();
//!     // ... spans that take longer than 250 ms, and failed ones, now leave profiles in `./profiles/`.
//!     Ok(())
//! }
//! ```
//!
//! # You give
//!
//! - Spans, as you have them, or functions marked with [`macro@profiled`]. Sync or async, on any
//!   threads.
//! - Rules: which spans, and when to keep them. `250ms|error` for all spans if you say nothing.
//! - Line tables, if you want lines and inlined functions: `debug = "line-tables-only"` in
//!   `[profile.release]`. They cost disk space and nothing at run time.
//!
//! # You get
//!
//! - For each kept span the split of its wall time: on-CPU, off-CPU (entered, but its thread did
//!   not run), idle (not entered); context switches and page faults. See [`Account`].
//! - A profile of everything that ran inside it: its own segments, its child spans, and child
//!   spans on other threads and tasks. Spans of one tree that are kept together share a profile.
//! - In it, waits of 10 ms and more, each with its stack, its measured length, and what it was for: for
//!   a lock, its address. A wait that blocks an async executor is called out.
//! - One line in the log (target `tracing_profiling`) that says what was kept, why, and where it
//!   lies; and [`Builder::on_kept`] to hear of it in code.
//! - Beside `tracing-opentelemetry`, attributes on the exported span that lead to the profile
//!   ([`SPAN_ATTRIBUTES`]), and the ids of its trace and span on every sample.
//! - Names of functions, files and spans, and no values of fields; what is left out of names says
//!   [`Redaction`].
//! - [`Stats`]: every way to lose something has a number of its own.
//!
//! A sample belongs to the innermost profiled span that its thread was in, by its position in the
//! thread's own ring and not by its time: it cannot land in a wrong span. What cannot be
//! attributed is discarded and counted.
//!
//! # Your duties
//!
//! - In the child of a `fork` that is not followed by `exec`, make another layer: the parent's does
//!   nothing there.
//! - Keep the guard of [`Handle::flush_on_drop`] in `main`, or call [`Handle::flush`]: what was
//!   kept in the last moments before the end of the process is lost otherwise. `exit` and `abort`
//!   drop no guards.
//! - Filter spans that nobody wants, as for any other layer: `profiling.with_filter(...)`.
//!
//! # Not for
//!
//! - Code outside spans; processes other than this one; memory.
//! - Systems other than Linux on x86-64 and aarch64: there, spans have wall, busy and idle times; whether
//!   threads ran in them is unknown, and there are no stacks.
//!
//! # What it costs
//!
//! | | |
//! |---|---|
//! | off (`TRACING_PROFILING=off`) | nothing: no thread, no file, no signal handler, no ring |
//! | a span that no rule matches | some nanoseconds |
//! | a profiled span that is not kept | some tens of nanoseconds an enter and exit, no allocation, a system call once a millisecond of a thread at most, and at each enter and exit if its rule judges `on_cpu` or `off_cpu` |
//! | a sample | some 30 µs of the thread's time, two thirds of which any timer interrupt costs; only of threads in old spans, 1,000 a second of CPU time at first, down to 100 |
//! | a context switch in an old span | 2 to 15 µs with perf, nothing with timers |
//! | a kept span | symbolization and two files (three with `otlp`), on a thread of ours |
//!
//! `docs/performance.md` has the figures and the commands that measure them.
//!
//! # Features
//!
//! | feature | | |
//! |---|---|---|
//! | `opentelemetry` | on by default | reaches the OpenTelemetry span of a span through `tracing-opentelemetry`: attributes on it, and its ids in the profile |
//! | `symbols` | on by default | functions, files and lines; without it profiles have addresses and build ids, as with `TRACING_PROFILING_SYMBOLS=off` |
//! | `pprof` | on by default | `encode::pprof`, and a file of that format beside each flame graph |
//! | `otlp` | off | `encode::otlp`, and a file of that format beside each flame graph |
//! | `opentelemetry-sdk` | off | `Handle::span_processor`, for layers in another order; [`Resource`] from one of `opentelemetry_sdk` |
//! | `axum` | off | `Handle::router`: the rules, the state and the profiles over HTTP; closed to pages of other sites, but without authentication, so not to be reached from outside |
//! | `metrics` | off | `Handle::register_metrics`: [`Stats`] as metrics of OpenTelemetry |
//! | `sighup` | off | `Builder::reload_on_sighup`: reads `TRACING_PROFILING` again when the process gets SIGHUP |
//! | `otlp-http`, `otlp-grpc` | off | `OtlpExporter`: profiles go to an OpenTelemetry collector. With an endpoint in `OTEL_EXPORTER_OTLP_ENDPOINT` or `OTEL_EXPORTER_OTLP_PROFILES_ENDPOINT`, [`ProfilingLayer::from_env`] uses it |
//! | `otlp-tls` | off | `https` for these |
//!
//! None of the others makes anything run by itself.
//!
//! # Environment variables
//!
//! | variable | meaning | default |
//! |---|---|---|
//! | `TRACING_PROFILING` | the rules, see below | `250ms\|error` |
//! | `TRACING_PROFILING_SOURCE` | what produces stacks: `auto`, `perf`, `timer` or `none`; see [`Source`] | `auto` |
//! | `TRACING_PROFILING_WAITS` | `on` or `off`; see [`Builder::waits`] | `on` |
//! | `TRACING_PROFILING_TIMER_CLOCK` | `cpu` or `monotonic`; see [`Builder::fine_timers`] | `cpu` |
//! | `TRACING_PROFILING_ARM_AFTER` | for how long a span is entered before it is sampled ([`Builder::arm_after`]) | follows its rule: 12.5 ms for 250 ms |
//! | `TRACING_PROFILING_RATE` | samples a second of CPU time, 1 to 10000 | 1,000 at first, down to 100 for a thread that is sampled for long |
//! | `TRACING_PROFILING_STACK_BYTES` | bytes of stack copied with each sample at most, 1024 to 65448 | 32768 |
//! | `TRACING_PROFILING_MAX_DEPTH` | frames kept of a stack, 1 to 1024 | 256 |
//! | `TRACING_PROFILING_SHED` | `cpu>90%`, `memory>2GB`, or both with a bar between: no more threads are sampled while the host, or the process's control group, is above that ([`Builder::shed_above_cpu`], [`Builder::shed_above_memory`]) | no limit |
//! | `TRACING_PROFILING_CPU_BUDGET` | percent of a core that reading samples may take, 0 for no limit; see [`Builder::cpu_budget`] | 1, and 0 if the rate is set |
//! | `TRACING_PROFILING_PENDING_PROFILES` | profiles that may wait to be exported at once, 1 to 100000 | 32 |
//! | `TRACING_PROFILING_DIR` | where profiles are written | `profiles` |
//! | `OTEL_PROFILES_EXPORTER` | where profiles go: `otlp`, `directory` or `none` | `otlp` where a feature for it is on and its endpoint is set, else `directory` |
//! | `TRACING_PROFILING_REDACT` | regular expressions with `;` between them (`\;` is one of a pattern): what they match in names of functions, files and spans becomes `[redacted]`; see [`Redaction`] | nothing |
//! | `TRACING_PROFILING_PATHS` | `short`, or `full` with the folders that the program was built in | `short` |
//! | `TRACING_PROFILING_SYMBOLS` | `on`, or `off` for addresses and build ids alone; see [`Builder::symbols`] | `on` |
//! | `TRACING_PROFILING_EXPORT_BYTES` | bytes that profiles may take until they are exported, up to 4294967295; see [`Builder::export_bytes`] | 67108864 |
//! | `TRACING_PROFILING_SYMBOL_BYTES` | bytes of symbols that may be held, up to 4294967295; see [`Builder::symbol_bytes`] | 536870912 |
//!
//! # Rules
//!
//! Up to 256 comma-separated directives, with targets, spans and fields as `EnvFilter` has them:
//!
//! | directive | meaning |
//! |---|---|
//! | `250ms` | keep every span that takes longer |
//! | `250ms\|error` | and every one that fails: an `ERROR` event in it or inside it, `otel.status_code = "ERROR"`, or a panic through it |
//! | `shop=100ms` | for targets that begin with `shop` |
//! | `shop::cart[checkout]=50ms` | for the span `checkout` of such targets |
//! | `[checkout]=50ms` | for the span `checkout` of any target |
//! | `[checkout{tenant=acme}]=50ms` | if its field `tenant` has that value, also if it is recorded later |
//! | `[{tenant}]=50ms` | for all spans with such a field |
//! | `noisy=off` | not these |
//! | `off` | nothing that no other directive names |
//!
//! Conditions are joined by `|`, and each of them is enough; [`Condition`] has all of them.
//!
//! The most specific directive decides alone: the one with the longest target, then the one that
//! names a span, then the one with more fields, then the last. If the variable is set, spans that no
//! directive matches are not profiled: `shop=100ms` profiles the shop and nothing else,
//! `250ms|error,shop=100ms` also the rest.
//!
//! [`Handle::set_rules`] replaces them at run time.

#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(
    not(feature = "symbols"),
    allow(
        dead_code,
        unused_imports,
        reason = "of what reads files of code some is for symbols alone"
    )
)]
#![cfg_attr(docsrs, doc(auto_cfg(hide(feature, values("_otlp", "_parts")))))]

#[cfg(test)]
mod churn;
mod collector;
mod config;
mod control;
pub mod encode;
mod error;
pub mod export;
mod handle;
#[cfg(feature = "sighup")]
mod hangup;
#[cfg(feature = "axum")]
mod http;
mod ids;
mod keep;
mod layer;
#[cfg(feature = "metrics")]
mod metrics;
#[cfg(feature = "axum")]
mod origin;
mod otel;
pub mod profile;
mod redact;
mod sampler;
mod self_test;
mod span;
mod stats;
mod symbols;
mod sys;
mod text;
mod unwind;

#[cfg(fuzzing)]
pub mod fuzzing;
#[cfg(feature = "_parts")]
#[doc(hidden)]
pub use collector::parts;

/// One page for each way of adding the layer, and for what one asks then.
#[cfg(any(doc, doctest))]
pub mod guide {
    #[doc = include_str!("../docs/guide/subscriber.md")]
    pub mod subscriber {}
    #[doc = include_str!("../docs/guide/attribute.md")]
    pub mod attribute {}
    #[cfg(feature = "opentelemetry-sdk")]
    #[doc = include_str!("../docs/guide/opentelemetry.md")]
    pub mod opentelemetry {}
    #[doc = include_str!("../docs/guide/without_opentelemetry.md")]
    pub mod without_opentelemetry {}
    #[doc = include_str!("../docs/guide/configuration.md")]
    pub mod configuration {}
    #[doc = include_str!("../docs/guide/nothing_is_kept.md")]
    pub mod nothing_is_kept {}
    #[doc = include_str!("../docs/guide/platforms.md")]
    pub mod platforms {}
    #[doc = include_str!("../docs/guide/sizing.md")]
    pub mod sizing {}
    #[doc = include_str!("../docs/guide/redaction.md")]
    pub mod redaction {}
    #[cfg(feature = "axum")]
    #[doc = include_str!("../docs/guide/live_control.md")]
    pub mod live_control {}
    #[cfg(feature = "_otlp")]
    #[cfg_attr(docsrs, doc(cfg(any(feature = "otlp-grpc", feature = "otlp-http"))))]
    #[doc = include_str!("../docs/guide/otlp.md")]
    pub mod otlp {}
    #[cfg(feature = "_otlp")]
    #[cfg_attr(docsrs, doc(cfg(any(feature = "otlp-grpc", feature = "otlp-http"))))]
    #[doc = include_str!("../docs/guide/collector.md")]
    pub mod collector {}
    #[cfg(feature = "_otlp")]
    #[cfg_attr(docsrs, doc(cfg(any(feature = "otlp-grpc", feature = "otlp-http"))))]
    #[doc = include_str!("../docs/guide/pyroscope.md")]
    pub mod pyroscope {}
    #[cfg(feature = "_otlp")]
    #[cfg_attr(docsrs, doc(cfg(any(feature = "otlp-grpc", feature = "otlp-http"))))]
    #[doc = include_str!("../docs/guide/parca.md")]
    pub mod parca {}
}

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

pub use config::Builder;
pub use error::{Error, ErrorKind};
#[cfg(feature = "_otlp")]
#[cfg_attr(docsrs, doc(cfg(any(feature = "otlp-grpc", feature = "otlp-http"))))]
pub use export::{Compression, OtlpBuilder, OtlpExporter, Protocol};
pub use export::{Directory, ExportError, Exported, Exporter};
pub use handle::{FlushGuard, Handle};
pub use ids::{InvalidId, ProfileId, SpanId, TraceId};
pub use keep::{Amount, Condition, Keep, Kept, KeptSpan, NoProfile, Reason, Reasons, Rule, Rules};
pub use layer::ProfilingLayer;
#[cfg(feature = "opentelemetry-sdk")]
pub use otel::ProfilingSpanProcessor;
pub use otel::SPAN_ATTRIBUTES;
pub use profile::{Profile, Resource};
pub use redact::Redaction;
pub use sampler::Source;
pub use self_test::SelfTest;
pub use span::{Account, Hardware};
pub use stats::Stats;

/// A function whose calls are spans: `#[tracing::instrument]` with thresholds of its own.
///
/// ```
/// use tracing_profiling::profiled;
///
/// #[profiled(threshold = "50ms", on_error, skip(basket), err)]
/// async fn checkout(user: u64, basket: Vec<u64>) -> Result<(), std::io::Error> {
///     // ...
/// #   _ = (user, basket);
///     Ok(())
/// }
/// ```
///
/// | argument | meaning |
/// |---|---|
/// | `threshold = "50ms"` | keep the span if it takes longer |
/// | `on_error` | keep it if it fails; with `err`, a returned `Err` is an `ERROR` event and so a failure |
/// | `off` | never profile it |
///
/// All others are those of `#[tracing::instrument]`, to which the function is handed on: the crate
/// `tracing` must be there under that name. Sync and async functions, methods, generic and `unsafe`
/// functions and those of `async-trait` all work; only a `const fn` cannot be a span.
///
/// `threshold` and `on_error` take the place of the rule for all spans, as a directive for this
/// one would: what they do not name does not keep it. Without either the rule for all decides. A
/// directive that names the span or its target beats the attribute. Each function with `threshold`
/// or `on_error` has a limit of profiles a minute of its own.
///
/// The attribute alone does nothing: the layer must be part of the subscriber. It costs nothing
/// more than `#[tracing::instrument]`, for the settings are part of the callsite.
pub use tracing_profiling_macros::profiled;
