//! The seam to `tracing-opentelemetry`: the OpenTelemetry span of a closing span, and what is said
//! on it.

mod attributes;
#[cfg(not(feature = "opentelemetry-sdk"))]
mod no_processor;
#[cfg(feature = "opentelemetry")]
mod order;
#[cfg(not(feature = "opentelemetry"))]
#[path = "no_order.rs"]
mod order;
#[cfg(feature = "opentelemetry-sdk")]
mod processor;
#[cfg(feature = "opentelemetry")]
mod values;

#[cfg(feature = "opentelemetry-sdk")]
use std::cell::RefCell;
#[cfg(not(feature = "opentelemetry-sdk"))]
use std::convert::Infallible;

#[cfg(feature = "opentelemetry")]
use opentelemetry::Context;
#[cfg(feature = "opentelemetry")]
use opentelemetry::trace::TraceContextExt;
#[cfg(feature = "opentelemetry-sdk")]
use opentelemetry_sdk::trace::SpanData;
use tracing::{Dispatch, span};

use crate::span::TraceIds;

pub use attributes::SPAN_ATTRIBUTES;
pub(crate) use attributes::{AttributeNames, SpanAttributes};
#[cfg(not(feature = "opentelemetry-sdk"))]
pub(crate) use no_processor::{Close, EndedSpan, Meeting, Order};
pub(crate) use order::LayerOrder;
#[cfg(feature = "opentelemetry-sdk")]
pub use processor::ProfilingSpanProcessor;
#[cfg(feature = "opentelemetry-sdk")]
pub(crate) use processor::{
    Close, ClosingSpan, Ended, EndedSpan, Found, FoundClose, Meeting, Order, SpanEnds, TOO_LONG,
};

/// The OpenTelemetry span that a closing span is exported as.
#[derive(Debug)]
pub(crate) enum OtelSpan<'a> {
    /// It has not ended yet.
    #[cfg(feature = "opentelemetry")]
    Open(Context),
    /// It has, and was not handed on yet.
    #[cfg(feature = "opentelemetry-sdk")]
    Ended(&'a RefCell<SpanData>),
    #[cfg(not(feature = "opentelemetry-sdk"))]
    #[expect(dead_code, reason = "nobody can have one")]
    Never(&'a Infallible),
}

impl OtelSpan<'_> {
    /// Finds it; `None` without OpenTelemetry, where a filter hides the span from it, and where it
    /// has seen the span close already.
    ///
    /// This starts the OpenTelemetry span if nobody has, after which its parent cannot be set any
    /// more: so only for a span that closes, once, and while nobody holds its extensions.
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

    /// Whether its attributes can be set until it ends.
    pub(crate) fn is_open(&self) -> bool {
        match self {
            #[cfg(feature = "opentelemetry")]
            Self::Open(_) => true,
            #[cfg(feature = "opentelemetry-sdk")]
            Self::Ended(_) => false,
            #[cfg(not(feature = "opentelemetry-sdk"))]
            Self::Never(never) => match **never {},
        }
    }

    pub(crate) fn ids(&self) -> TraceIds {
        match self {
            #[cfg(feature = "opentelemetry")]
            Self::Open(context) => values::ids_of(context.span().span_context()),
            #[cfg(feature = "opentelemetry-sdk")]
            Self::Ended(data) => values::ids_of(&data.borrow().span_context),
            #[cfg(not(feature = "opentelemetry-sdk"))]
            Self::Never(never) => match **never {},
        }
    }

    #[cfg_attr(not(feature = "opentelemetry"), expect(unused_variables, reason = "nobody has one"))]
    pub(crate) fn set_attributes(&mut self, attributes: SpanAttributes) {
        match self {
            #[cfg(feature = "opentelemetry")]
            Self::Open(context) => context.span().set_attributes(values::key_values(attributes)),
            #[cfg(feature = "opentelemetry-sdk")]
            Self::Ended(data) => {
                data.borrow_mut().attributes.extend(values::key_values(attributes));
            }
            #[cfg(not(feature = "opentelemetry-sdk"))]
            Self::Never(never) => match **never {},
        }
    }
}
