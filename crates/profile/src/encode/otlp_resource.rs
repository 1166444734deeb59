//! Resources as OTLP has them.

use opentelemetry_proto::tonic::common::v1::{AnyValue, ArrayValue, KeyValue, any_value};
use opentelemetry_proto::tonic::resource::v1::Resource as ProtoResource;

use crate::profile::{Resource, Value};

pub(super) fn encode_resource(resource: &Resource) -> ProtoResource {
    let attributes = resource.attributes().map(|(key, value)| KeyValue {
        key: key.to_owned(),
        value: Some(encode_value(value)),
        ..KeyValue::default()
    });
    ProtoResource { attributes: attributes.collect(), ..ProtoResource::default() }
}

pub(super) fn encode_value(value: &Value) -> AnyValue {
    let value = match value {
        Value::String(text) => any_value::Value::StringValue(text.clone()),
        Value::Int(number) => any_value::Value::IntValue(*number),
        Value::Double(number) => any_value::Value::DoubleValue(*number),
        Value::Bool(truth) => any_value::Value::BoolValue(*truth),
        Value::Array(values) => {
            let values = values.iter().map(encode_value).collect();
            any_value::Value::ArrayValue(ArrayValue { values })
        }
    };
    AnyValue { value: Some(value) }
}
