//! Conversions to and from types of OpenTelemetry.

use opentelemetry::trace::SpanContext;
use opentelemetry::{Array, KeyValue, StringValue};

use super::SpanAttributes;
use crate::profile::Value;
use crate::span::TraceIds;

pub(super) fn ids_of(context: &SpanContext) -> TraceIds {
    TraceIds {
        trace: context.trace_id().into(),
        span: context.span_id().into(),
        is_sampled: context.is_sampled(),
    }
}

pub(super) fn key_values(attributes: SpanAttributes) -> Vec<KeyValue> {
    attributes.into_iter().map(|(key, value)| KeyValue::new(key, theirs(value))).collect()
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
