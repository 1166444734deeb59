//! What a slow span did that typical ones of its kind do not.
//!
//! Some spans are chosen at random when they are created, before it is known how long they will take
//! ([`Builder::references`](crate::Builder::references)), so what they did is typical. A [`Comparison`] splits the difference
//! to their mean by where the time went; [`Kept::comparison`](crate::Kept::comparison) is that of a kept span.

// Knows no span, thread, format or clock.

mod breakdown;
mod chooser;
mod cohorts;
mod comparison;
mod detector;
mod estimate;
mod history;
mod references;
#[cfg(test)]
mod tests;
mod totals;

pub use crate::facts::TimeKind;
pub(crate) use breakdown::{Amount, Breakdown, Measured};
pub use breakdown::{OwnFunction, Quantity, SpentIn};
pub(crate) use chooser::{Gap, ReferenceChooser, ReferenceLimits};
pub(crate) use cohorts::CohortSet;
#[cfg(test)]
pub(crate) use comparison::drift;
pub use comparison::{ComparedRow, ComparedValue, Comparison};
pub(crate) use comparison::{compare, compare_sets};
pub(crate) use detector::{Baseline, Drift, DriftDetector, MOST_ROUTES};
pub use estimate::Interval;
pub(crate) use estimate::Moments;
pub(crate) use history::{CohortHistory, CohortHour, WallTimes};
#[cfg(test)]
pub(crate) use references::{MOST_REFERENCES, ReferenceSet};
pub(crate) use totals::SpanTotals;
