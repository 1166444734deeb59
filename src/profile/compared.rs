//! A kept span against typical ones.

use std::sync::Arc;

use super::model::Profile;
use crate::compare::Comparison;

/// A kept span of a profile against the reference spans of its cohort.
#[derive(Clone, Debug)]
pub(crate) struct Compared {
    /// The name of the cohort: that of its spans, with the fields that name the route.
    pub(crate) cohort: String,
    /// The name of the kept span, with its shown fields.
    pub(crate) span: String,
    pub(crate) comparison: Comparison,
    /// What the mean of the last 200 to 400 reference spans did, by stack: without times, threads and spans.
    pub(crate) typical: Arc<Profile>,
}
