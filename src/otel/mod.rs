//! Access to `tracing-opentelemetry`: the OpenTelemetry span of a closing span, and its attributes.

mod attributes;
mod links;
mod pairing;
#[cfg(feature = "opentelemetry-sdk")]
mod processor;
#[cfg(feature = "opentelemetry")]
mod values;

#[cfg(feature = "opentelemetry")]
use opentelemetry::Context;
#[cfg(feature = "opentelemetry")]
use opentelemetry::trace::TraceContextExt;
use tracing::{Dispatch, span};

use crate::span::TraceIds;

pub use attributes::span_attributes;
pub(crate) use attributes::{AttributeNames, SpanAttributes};
pub use links::LinkTo;
pub(crate) use pairing::{EarlyVerdict, Pairing};
#[cfg(feature = "opentelemetry-sdk")]
pub use processor::ProfilingSpanProcessor;
#[cfg(feature = "opentelemetry-sdk")]
pub(crate) use processor::SpanEnds;

/// How OpenTelemetry spans and profiles refer to each other.
#[derive(Clone, Debug, Default)]
pub(crate) struct OtelSettings {
    pub(crate) attributes: AttributeNames,
    pub(crate) link_to: LinkTo,
    /// Whether spans of traces that are not exported are not kept.
    pub(crate) only_sampled_traces: bool,
}

/// The OpenTelemetry span that corresponds to a closing span.
#[derive(Debug)]
pub(crate) enum OtelSpan {
    /// It has not ended yet.
    #[cfg(feature = "opentelemetry")]
    Open(Context),
    /// It cannot be accessed, but a span processor observes its end on this thread.
    Paired(TraceIds),
}

impl OtelSpan {
    /// Finds the OpenTelemetry span. `None` without OpenTelemetry, if a filter hides the span from it, or if its layer
    /// has already handled the close.
    ///
    /// This starts the OpenTelemetry span if it has not been started, after which its parent cannot be set any more.
    /// Therefore call it only once, for a span that closes, or for one that was entered with its context, and only
    /// while its extensions are not locked. A span around one that is closing stays open until then; two threads may ask
    /// for it at once, since `tracing-opentelemetry` starts it under a lock.
    #[cfg(feature = "opentelemetry")]
    pub(crate) fn find(id: &span::Id, dispatch: &Dispatch) -> Option<Self> {
        let context = tracing_opentelemetry::get_otel_context(id, dispatch)?;
        let is_valid = context.span().span_context().is_valid();
        is_valid.then_some(Self::Open(context))
    }

    #[cfg(not(feature = "opentelemetry"))]
    pub(crate) fn find(_: &span::Id, _: &Dispatch) -> Option<Self> {
        None
    }

    pub(crate) fn ids(&self) -> TraceIds {
        match self {
            #[cfg(feature = "opentelemetry")]
            Self::Open(context) => values::ids_of(context.span().span_context()),
            Self::Paired(ids) => *ids,
        }
    }

    pub(crate) fn set_attributes(&self, attributes: SpanAttributes) {
        match self {
            #[cfg(feature = "opentelemetry")]
            Self::Open(context) => context.span().set_attributes(values::key_values(attributes)),
            Self::Paired(ids) => pairing::leave_attributes(ids.span, attributes),
        }
    }
}
