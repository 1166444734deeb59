//! Access to `tracing-opentelemetry`: the OpenTelemetry span of a closing span, and its attributes.

mod attributes;
#[cfg_attr(not(feature = "opentelemetry-sdk"), path = "no_kept_traces.rs")]
mod kept_traces;
#[cfg_attr(not(feature = "opentelemetry"), path = "no_otel_span.rs")]
mod otel_span;
#[cfg(feature = "opentelemetry-sdk")]
mod probability;
#[cfg(feature = "opentelemetry-sdk")]
mod span_delivery;
mod unreached;

pub use attributes::span_attributes;
pub(crate) use attributes::{SpanAttributes, attributes_of};
#[cfg(feature = "opentelemetry-sdk")]
pub use kept_traces::KeptTraces;
pub(crate) use kept_traces::{keep_trace, keep_traces_begun_in, trace_stats};
pub(crate) use otel_span::OtelSpan;
pub(crate) use unreached::UnreachedSpans;
