//! Decides which spans are kept. Pure, except for the callsite cache and the lock around the reservations.

mod admission;
mod callsites;
mod candidates;
mod condition;
mod directive;
mod fields;
#[cfg(fuzzing)]
mod fuzzing;
mod health;
mod kept;
mod limits;
mod logged_errors;
mod percentile;
mod plan;
mod plans;
mod reasons;
mod rules;
mod shown_fields;
mod span_names;
mod wanted;

pub(crate) use admission::{MAX_RESERVED, ProfileAdmission, ProfileGroup, Reservation};
pub(crate) use callsites::{Callsites, STATUS_FIELD};
pub use condition::{Condition, Keep, Threshold};
pub(crate) use health::ExporterHealth;
pub use kept::{Kept, KeptSpan, NoProfile};
pub(crate) use kept::{OnKept, SpanLink};
pub(crate) use logged_errors::{LoggedError, observe_panics};
pub(crate) use plan::PlanSettings;
#[cfg(test)]
pub(crate) use plans::RANDOM;
pub(crate) use plans::{Callsite, random};
pub(crate) use reasons::judge;
#[cfg(test)]
pub(crate) use rules::COMPARED;
pub use rules::{Rule, Rules};
pub(crate) use shown_fields::{DEFAULT_FIELDS, FieldValues, ShownFields, of_route};
pub(crate) use span_names::{OwnDispatch, SpanNames};
