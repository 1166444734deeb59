//! What a slow span did that typical ones of its kind do not.
//!
//! Some spans are chosen at random when they are created, before it is known how long they will take
//! (`Builder::references`), so what they did is typical. A [`Comparison`] splits the difference
//! to their mean by where the time went; `Kept::comparison` is that of a kept span.

// Knows no span, thread, format or clock.

mod breakdown;
mod comparison;
#[doc(hidden)]
mod detector;
mod estimate;
#[doc(hidden)]
mod hour;
#[doc(hidden)]
mod references;
#[cfg(test)]
mod tests;
#[doc(hidden)]
mod totals;

pub use crate::facts::TimeKind;
pub(crate) use breakdown::AmountSums;
pub use breakdown::{Amount, Breakdown, OwnFunction, Quantity, Sampled, SpentIn};
#[cfg(test)]
pub(crate) use comparison::drift;
pub use comparison::{ComparedRow, ComparedValue, Comparison, compare, compare_sets};
pub use detector::{Baseline, Drift, DriftDetector, MAX_ROUTES};
pub use estimate::{Interval, Moments};
pub use hour::{CohortHour, WallTimes, hour_begins, hour_of};
#[cfg(test)]
pub(crate) use references::MAX_REFERENCES;
pub use references::ReferenceSet;
pub use totals::SpanTotals;
