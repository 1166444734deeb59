//! What fuzz targets need of rules.

use super::Rule;

impl Rule {
    /// Compares the values that it wants with themselves, and with `other`.
    pub(crate) fn match_own_values(&self, other: &str) {
        for value in self.fields.iter().filter_map(|field| field.value.as_ref()) {
            assert!(value.is_str(value.as_str()) && value.is_printed(value.as_str()));
            _ = (value.is_str(other), value.is_printed(other));
        }
    }
}
