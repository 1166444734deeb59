//! Where raw samples come from.

mod counters;
mod perf;
mod period;
pub(crate) mod record;
mod source;
mod switches;
mod timer;

pub(crate) use period::{Allowance, Level, Periods, Spent, stretched};
pub use source::Source;
pub(crate) use source::{Sampler, SourceSettings};
pub(crate) use switches::{is_full, make_room, switched_in_after, switched_out, switches_between};
