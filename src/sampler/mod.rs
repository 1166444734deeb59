//! The sources of raw samples.

mod continuous;
mod counters;
mod describe;
mod hooks;
mod losses;
mod perf;
mod probe;
mod rate;
pub(crate) mod record;
mod session;
mod shares;
mod silence;
mod source;
mod switches;
mod thread;
mod thread_source;
mod timer;

pub(crate) use continuous::{CONTINUOUS_RATES, ContinuousSettings, continuous_rate};
pub(crate) use hooks::{AttachThreads, Begun, ThreadSource};
pub(crate) use rate::{Periods, Rate};
pub(crate) use session::{RunDelay, SamplingSession, SpanInterval};
pub use source::Source;
pub(crate) use source::{Sampler, SourceSettings};
pub(crate) use switches::{SHORT_NS, SwitchRing, switches_between};
pub(crate) use thread::{NEVER, OpenInterval, ThreadShared, Use};
