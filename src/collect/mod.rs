//! The loop that turns raw samples and verdicts into profiles.
//!
//! One thread drains the rings, attributes and unwinds samples, and holds them until the verdict on their spans. The
//! threads of `publish` do the rest, so draining never waits for a file.

mod export;
mod logged;
mod process;
mod run;

pub(crate) use export::ProfileOutput;
pub(crate) use logged::Logged;
pub(crate) use process::{CONTINUOUS_RATES, ContinuousSettings, ProcessProfiler, continuous_rate};
pub(crate) use run::Collector;
