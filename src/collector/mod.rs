//! Turns raw samples and verdicts into profiles.
//!
//! One thread drains the rings, attributes and unwinds samples, and holds them until the verdict on their spans. The
//! threads of `publish` do the rest, so draining never waits for a file.

mod aggregate;
mod attachment;
mod budget;
mod build;
mod command;
mod copied;
mod cursor;
mod demand;
mod drain;
mod engine;
mod gate;
mod heap;
mod limits;
mod links;
mod logged;
#[cfg(test)]
mod model;
mod modules;
mod open_spans;
mod over_limit;
mod parked;
#[cfg(feature = "_parts")]
pub mod parts;
mod run;
mod running_source;
mod sampled;
mod scan;
mod shed;
mod sinks;
mod span_samples;
mod stack;
mod start;
mod store;
mod tables;
mod waits;
mod watchdog;

pub(crate) use attachment::Pace;
pub(crate) use engine::Engine;
#[cfg(feature = "sighup")]
pub(crate) use engine::spawn;
pub(crate) use gate::Gate;
pub(crate) use heap::{HeapPart, NoHeap, heap_profile};
pub(crate) use limits::Limits;
pub(crate) use open_spans::open_spans;
pub(crate) use shed::ShedLimits;
pub(crate) use start::{Parts, start};
