//! From raw samples and verdicts to profiles.
//!
//! One thread drains the rings, attributes, unwinds, and holds samples until their spans are
//! judged; another symbolizes what was kept and hands it to the exporter, so that draining never
//! waits for a file.

mod build;
mod command;
mod drain;
mod engine;
mod gate;
mod pending;
mod report;
mod run;
mod waits;
mod worker;

pub(crate) use engine::{Engine, Limits, Parts};
pub(crate) use gate::Gate;
