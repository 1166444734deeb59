//! What a slow span did that others of its kind do not. Knows no span, thread, format or clock.
//!
//! A [`Breakdown`] says where the time of one span went. Some spans are chosen at random when they are created
//! ([`ReferenceChooser`]), before it is known how long they will take, so their breakdowns are those of typical ones. They
//! are kept by cohort ([`CohortSet`], [`CohortHistory`]), and [`compare`] has the rows.

mod breakdown;
mod chooser;
mod cohorts;
mod comparison;
mod estimate;
mod history;
mod references;
#[cfg(test)]
mod tests;
mod totals;

pub(crate) use breakdown::{Amount, Breakdown, Measured, OwnFunction, Quantity, SpentIn, TimeKind};
pub(crate) use chooser::{Gap, ReferenceChooser, ReferenceLimits};
pub(crate) use cohorts::CohortSet;
pub(crate) use comparison::{ComparedRow, ComparedValue, Comparison, compare, compare_sets, drift};
pub(crate) use estimate::{Interval, Moments};
pub(crate) use history::{CohortHistory, CohortHour, WallTimes};
pub(crate) use references::{MOST_REFERENCES, ReferenceSet};
pub(crate) use totals::SpanTotals;
