//! What the process is.

use super::Value;

/// What the process is that a profile comes from, as a resource of OpenTelemetry says it: `service.name` and so on.
///
/// ```
/// use tracing_profiling::Resource;
///
/// let resource = Resource::from_env()
///     .with("service.name", "shop")
///     .with("deployment.environment.name", "test");
/// ```
///
/// With the feature `opentelemetry-sdk` one of `opentelemetry_sdk` becomes one of these by `into()`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Resource {
    attributes: Vec<(String, Value)>,
    schema_url: Option<String>,
}

impl Resource {
    /// One that says nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// The same with that attribute; one of that name is replaced.
    #[must_use]
    pub fn with(mut self, key: impl Into<String>, value: impl Into<Value>) -> Self {
        let (key, value) = (key.into(), value.into());
        match self.attributes.iter_mut().find(|(known, _)| *known == key) {
            Some((_, known)) => *known = value,
            None => self.attributes.push((key, value)),
        }
        self
    }

    /// The same with the address of the schema by which its attributes are named.
    #[must_use]
    pub fn with_schema_url(self, url: impl Into<String>) -> Self {
        Self { schema_url: Some(url.into()), ..self }
    }

    /// The attributes, in the order in which they were given.
    pub fn attributes(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.attributes.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// The value of that attribute, if it has it.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.attributes().find_map(|(known, value)| (known == key).then_some(value))
    }

    /// The address of the schema by which its attributes are named, if it has one.
    pub fn schema_url(&self) -> Option<&str> {
        self.schema_url.as_deref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_value_of_an_attribute_is_its_value() {
        let resource = Resource::new().with("a", 1).with("b", true).with("a", "x");
        let attributes: Vec<_> = resource.attributes().collect();
        assert_eq!(attributes, [("a", &Value::from("x")), ("b", &Value::from(true))]);
        assert_eq!(resource.get("c"), None);
    }
}
