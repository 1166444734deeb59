//! `Resource` from that of `opentelemetry_sdk`.

use opentelemetry::{Array, Value as Theirs};

use crate::profile::{Resource, Value};

impl From<opentelemetry_sdk::Resource> for Resource {
    fn from(theirs: opentelemetry_sdk::Resource) -> Self {
        Self::from(&theirs)
    }
}

impl From<&opentelemetry_sdk::Resource> for Resource {
    fn from(theirs: &opentelemetry_sdk::Resource) -> Self {
        let mut attributes: Vec<_> =
            theirs.iter().map(|(key, value)| (key.as_str(), ours(value))).collect();
        // The SDK's resource has no order of its own.
        attributes.sort_by_key(|(key, _)| *key);
        let attributes = attributes.into_iter();
        let resource =
            attributes.fold(Self::new(), |resource, (key, value)| resource.with(key, value));
        match theirs.schema_url() {
            Some(url) => resource.with_schema_url(url),
            None => resource,
        }
    }
}

fn ours(value: &Theirs) -> Value {
    fn all<T: Clone + Into<Value>>(values: &[T]) -> Value {
        Value::Array(values.iter().cloned().map(Into::into).collect())
    }
    match value {
        Theirs::Bool(truth) => Value::Bool(*truth),
        Theirs::I64(number) => Value::Int(*number),
        Theirs::F64(number) => Value::Double(*number),
        Theirs::String(text) => Value::from(text.as_str()),
        Theirs::Array(Array::Bool(values)) => all(values),
        Theirs::Array(Array::I64(values)) => all(values),
        Theirs::Array(Array::F64(values)) => all(values),
        Theirs::Array(Array::String(values)) => {
            Value::Array(values.iter().map(|text| Value::from(text.as_str())).collect())
        }
        // The enum is non-exhaustive.
        other => Value::String(other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use opentelemetry::KeyValue;

    use super::*;

    #[test]
    fn a_resource_keeps_its_attributes() {
        let theirs = opentelemetry_sdk::Resource::builder_empty()
            .with_service_name("shop")
            .with_attribute(KeyValue::new("a.share", 0.5))
            .with_attribute(KeyValue::new("is.so", true))
            .with_attribute(KeyValue::new("ports", Theirs::Array(Array::I64(vec![80, 443]))))
            .build();
        let ours = Resource::from(theirs);
        assert_eq!(ours.get("service.name"), Some(&"shop".into()));
        assert_eq!(ours.get("a.share"), Some(&0.5.into()));
        assert_eq!(ours.get("is.so"), Some(&true.into()));
        assert_eq!(ours.get("ports"), Some(&Value::Array(vec![80.into(), 443.into()])));
        assert_eq!(ours.attributes().count(), 4);
    }
}
