//! The seam to `tracing-opentelemetry`: the OpenTelemetry span of a closing span, and what is said
//! on it.

mod attributes;
mod order;
mod processor;

use std::cell::RefCell;

use opentelemetry::trace::TraceContextExt;
use opentelemetry::{Context, KeyValue};
use opentelemetry_sdk::trace::SpanData;
use tracing::{Dispatch, span};

use crate::span::TraceIds;

pub(crate) use attributes::AttributeNames;
pub use attributes::SPAN_ATTRIBUTES;
pub(crate) use order::LayerOrder;
pub use processor::ProfilingSpanProcessor;
pub(crate) use processor::{
    Close, ClosingSpan, Ended, EndedSpan, Found, FoundClose, Meeting, Order, SpanEnds, TOO_LONG,
};

/// The OpenTelemetry span that a closing span is exported as.
#[derive(Debug)]
pub(crate) enum OtelSpan<'a> {
    /// It has not ended yet.
    #[cfg_attr(
        not(feature = "tracing-opentelemetry"),
        expect(dead_code, reason = "only its layer knows them")
    )]
    Open(Context),
    /// It has, and was not handed on yet.
    Ended(&'a RefCell<SpanData>),
}

impl OtelSpan<'_> {
    /// Finds it; `None` without OpenTelemetry, where a filter hides the span from it, and where it
    /// has seen the span close already.
    ///
    /// This starts the OpenTelemetry span if nobody has, after which its parent cannot be set any
    /// more: so only for a span that closes, once, and while nobody holds its extensions.
    #[cfg(feature = "tracing-opentelemetry")]
    pub(crate) fn find(id: &span::Id, dispatch: &Dispatch) -> Option<Self> {
        let context = tracing_opentelemetry::get_otel_context(id, dispatch)?;
        let is_valid = context.span().span_context().is_valid();
        is_valid.then_some(Self::Open(context))
    }

    #[cfg(not(feature = "tracing-opentelemetry"))]
    pub(crate) fn find(_: &span::Id, _: &Dispatch) -> Option<Self> {
        None
    }

    pub(crate) fn ids(&self) -> TraceIds {
        match self {
            Self::Open(context) => TraceIds::of(context.span().span_context()),
            Self::Ended(data) => TraceIds::of(&data.borrow().span_context),
        }
    }

    pub(crate) fn set_attributes(&mut self, attributes: Vec<KeyValue>) {
        match self {
            Self::Open(context) => context.span().set_attributes(attributes),
            Self::Ended(data) => data.borrow_mut().attributes.extend(attributes),
        }
    }
}
