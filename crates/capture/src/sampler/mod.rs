//! The sources of raw samples.

mod hooks;
mod perf;
mod probe;
mod quota;
mod rate;
pub(crate) mod record;
mod session;
mod source;
mod switches;
mod thread;
mod timer;

pub use hooks::{AttachThreads, ThreadSetup, ThreadSource};
pub use rate::{Periods, Rate};
pub use session::{RunDelay, SamplingSession, TagInterval};
pub use source::{Sampler, Source, SourceSettings, ThreadCounters, UnknownName};
pub use switches::SwitchRing;
pub(crate) use switches::switches_between;
pub use thread::{NEVER, OpenInterval, ThreadShared, ThreadUse};
