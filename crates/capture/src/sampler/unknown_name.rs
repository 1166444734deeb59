//! The error for unknown names.

/// The error for a name that is not one of a few, or whose feature is off.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected one of {}", known.join(", "))]
pub struct UnknownName {
    known: Vec<&'static str>,
}

impl UnknownName {
    /// From the names that exist.
    pub fn new(known: impl IntoIterator<Item = &'static str>) -> Self {
        Self { known: known.into_iter().collect() }
    }
}
