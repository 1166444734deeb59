//! The sources of raw samples.

mod arming;
mod counters;
mod describe;
mod hooks;
mod losses;
mod perf;
mod probe;
mod rate;
pub(crate) mod record;
mod shares;
mod silence;
mod source;
mod switches;
mod thread;
mod thread_source;
mod timer;

pub(crate) use arming::{Arming, SpanInterval};
pub(crate) use hooks::{ArmThreads, Begun, ThreadSource};
pub(crate) use rate::{Periods, Rate};
pub use source::Source;
pub(crate) use source::{Sampler, SourceSettings};
pub(crate) use switches::{SwitchRing, switches_between};
pub(crate) use thread::{NEVER, OpenInterval, ThreadShared, Use};
