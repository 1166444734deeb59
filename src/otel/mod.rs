//! Access to `tracing-opentelemetry`: the OpenTelemetry span of a closing span, and its attributes.

mod attributes;
#[cfg(feature = "opentelemetry")]
mod otel_span;
#[cfg(not(feature = "opentelemetry"))]
#[path = "no_otel_span.rs"]
mod otel_span;
mod unreached;
#[cfg(feature = "opentelemetry")]
mod values;

pub use attributes::span_attributes;
pub(crate) use attributes::{AttributeNames, SpanAttributes};
pub(crate) use otel_span::OtelSpan;
pub(crate) use unreached::UnreachedSpans;

/// How OpenTelemetry spans and profiles refer to each other.
#[derive(Clone, Debug, Default)]
pub(crate) struct OtelSettings {
    pub(crate) attributes: AttributeNames,
    /// Whether spans of traces that are not exported are not kept.
    pub(crate) only_sampled_traces: bool,
}
