//! The resource that a profile describes.

use super::Value;

/// The process that a profile describes, as an OpenTelemetry resource: `service.name` and so on.
///
/// ```
/// use tracing_profiling_profile::profile::Resource;
///
/// let resource = Resource::new()
///     .with("service.name", "shop")
///     .with("deployment.environment.name", "test");
/// ```
///
/// With the feature `opentelemetry-sdk`, a resource of `opentelemetry_sdk` can be converted with `into()`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Resource {
    attributes: Vec<(String, Value)>,
    schema_url: Option<String>,
}

impl Resource {
    /// A resource without attributes.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets an attribute. An earlier value is replaced.
    #[must_use]
    pub fn with(mut self, key: impl Into<String>, value: impl Into<Value>) -> Self {
        let (key, value) = (key.into(), value.into());
        match self.attributes.iter_mut().find(|(known, _)| *known == key) {
            Some((_, known)) => *known = value,
            None => self.attributes.push((key, value)),
        }
        self
    }

    /// Sets the URL of the schema of its attributes.
    #[must_use]
    pub fn with_schema_url(self, url: impl Into<String>) -> Self {
        Self { schema_url: Some(url.into()), ..self }
    }

    /// The attributes, in the order in which they were added.
    pub fn attributes(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.attributes.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// The value of an attribute, if it is set.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.attributes().find_map(|(known, value)| (known == key).then_some(value))
    }

    /// The URL of the schema of its attributes, if it is set.
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
