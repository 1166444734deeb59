//! OpenTelemetry spans, reached through `tracing-opentelemetry`.
//!
//! Asking for a span's context starts the OpenTelemetry span, after which its parent cannot be set. So it is asked for
//! in `on_close`, where that layer would start it a moment later.

use opentelemetry::trace::TraceContextExt;
use opentelemetry::{Array, Context, KeyValue, StringValue};
use tracing::{Dispatch, span};

use super::SpanAttributes;
use crate::profile::Value;
use crate::span::TraceIds;

/// The OpenTelemetry span of a closing span, which has not ended yet, or of a span around it.
#[derive(Debug)]
pub(crate) struct OtelSpan(Context);

impl OtelSpan {
    /// Finds the OpenTelemetry span. `None` if a filter hides the span from the layer of `tracing-opentelemetry`, if that
    /// layer cannot be reached, or if it has already handled the close.
    ///
    /// This starts the OpenTelemetry span if it has not been started, after which its parent cannot be set any more.
    /// Therefore call it only once, for a span that closes, or for one that was entered with its context, and only
    /// while its extensions are not locked. A span around one that is closing stays open until then; two threads may ask
    /// for it at once, since `tracing-opentelemetry` starts it under a lock.
    pub(crate) fn find(id: &span::Id, dispatch: &Dispatch) -> Option<Self> {
        let context = tracing_opentelemetry::get_otel_context(id, dispatch)?;
        let is_valid = context.span().span_context().is_valid();
        is_valid.then_some(Self(context))
    }

    pub(crate) fn ids(&self) -> TraceIds {
        let span = self.0.span();
        let context = span.span_context();
        TraceIds {
            trace: context.trace_id().into(),
            span: context.span_id().into(),
            is_sampled: context.is_sampled(),
        }
    }

    pub(crate) fn set_attributes(&self, attributes: SpanAttributes) {
        let attributes =
            attributes.into_iter().map(|(key, value)| KeyValue::new(key, theirs(value)));
        self.0.span().set_attributes(attributes);
    }
}

fn theirs(value: Value) -> opentelemetry::Value {
    match value {
        Value::String(text) => text.into(),
        Value::Int(number) => number.into(),
        Value::Double(number) => number.into(),
        Value::Bool(truth) => truth.into(),
        // Arrays of this crate contain text only.
        Value::Array(values) => {
            let texts = values.into_iter().filter_map(|value| match value {
                Value::String(text) => Some(StringValue::from(text)),
                _ => None,
            });
            opentelemetry::Value::Array(Array::String(texts.collect()))
        }
    }
}
