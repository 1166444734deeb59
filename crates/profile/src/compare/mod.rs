//! What a slow span did that typical ones of its kind do not.
//!
//! Some spans are chosen at random when they are created, before it is known how long they will take
//! (`Builder::references`), so what they did is typical. A [`Comparison`] splits the difference
//! to their mean by where the time went; `Kept::comparison` is that of a kept span.

// Knows no span, thread, format or clock.

mod breakdown;
#[doc(hidden)]
mod chooser;
#[doc(hidden)]
mod cohorts;
mod comparison;
#[doc(hidden)]
mod detector;
mod estimate;
#[doc(hidden)]
mod history;
mod references;
#[cfg(test)]
mod tests;
#[doc(hidden)]
mod totals;

pub use crate::facts::TimeKind;
pub use breakdown::{Amount, Breakdown, Measured, OwnFunction, Quantity, SpentIn};
pub use chooser::{Gap, ReferenceChooser, ReferenceLimits};
pub use cohorts::CohortSet;
#[cfg(test)]
pub(crate) use comparison::drift;
pub use comparison::{ComparedRow, ComparedValue, Comparison, compare, compare_sets};
pub use detector::{Baseline, Drift, DriftDetector, MOST_ROUTES};
pub use estimate::{Interval, Moments};
pub use history::{CohortHistory, CohortHour, WallTimes};
#[cfg(test)]
pub(crate) use references::{MOST_REFERENCES, ReferenceSet};
pub use totals::SpanTotals;
