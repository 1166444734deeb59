//! The default resource, from the environment.

use std::env;

use crate::profile::Resource;
use crate::sys;

impl Resource {
    /// The default resource: the attributes in `OTEL_RESOURCE_ATTRIBUTES`; `service.name` from `OTEL_SERVICE_NAME`,
    /// else from `OTEL_RESOURCE_ATTRIBUTES`, else `unknown_service:` and the name of the executable; `process.pid`; and
    /// `telemetry.sdk.*`, which name this crate.
    ///
    /// Values are not percent-decoded, as in `opentelemetry_sdk`. In its release 0.33, `OTEL_RESOURCE_ATTRIBUTES`
    /// overrides `OTEL_SERVICE_NAME`; the specification requires the opposite.
    pub fn from_env() -> Self {
        Self::from_variables(&|name| env::var(name).ok().filter(|text| !text.is_empty()))
    }

    fn from_variables(variable: &dyn Fn(&str) -> Option<String>) -> Self {
        let mut resource = Self::new()
            .with("telemetry.sdk.language", "rust")
            .with("telemetry.sdk.name", env!("CARGO_PKG_NAME"))
            .with("telemetry.sdk.version", env!("CARGO_PKG_VERSION"));
        let attributes = variable("OTEL_RESOURCE_ATTRIBUTES").unwrap_or_default();
        for (key, value) in attributes.split(',').filter_map(|entry| entry.split_once('=')) {
            resource = resource.with(key.trim(), value.trim());
        }
        let resource = resource.with("process.pid", sys::process_id());
        match variable("OTEL_SERVICE_NAME") {
            Some(name) => resource.with("service.name", name),
            None if resource.get("service.name").is_some() => resource,
            None => resource.with("service.name", unknown_service()),
        }
    }
}

fn unknown_service() -> String {
    let file = env::current_exe().ok();
    let name = file.as_deref().and_then(|file| file.file_name()).and_then(|name| name.to_str());
    name.map_or_else(|| "unknown_service".to_owned(), |name| format!("unknown_service:{name}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::Value;

    fn name_of(name: Option<&str>, attributes: &str) -> Option<Value> {
        let resource = Resource::from_variables(&|variable| match variable {
            "OTEL_SERVICE_NAME" => name.map(str::to_owned),
            "OTEL_RESOURCE_ATTRIBUTES" => Some(attributes.to_owned()),
            _ => None,
        });
        resource.get("service.name").cloned()
    }

    #[test]
    fn the_sources_of_the_service_name_have_an_order() {
        assert_eq!(name_of(Some("shop"), "service.name=other"), Some("shop".into()));
        assert_eq!(name_of(None, "a=b, service.name = other ,c"), Some("other".into()));
        let Some(Value::String(name)) = name_of(None, "") else { panic!("it has one") };
        assert!(name.starts_with("unknown_service:tracing_profiling"), "{name}");
    }
}
