//! Turns raw samples and verdicts into profiles.
//!
//! One thread drains the rings, attributes and unwinds samples, and holds them until the verdict on their spans.
//! Another thread symbolizes and exports the profiles, so draining never waits for a file.

mod allocations;
mod amounts;
mod awaits;
mod budget;
mod build;
mod command;
mod copied;
mod delivery;
mod drain;
mod engine;
mod gate;
mod heap;
mod kept_event;
mod limits;
mod links;
mod logged;
#[cfg(test)]
mod model;
mod modules;
mod open_spans;
mod outbox;
#[cfg(feature = "_parts")]
pub mod parts;
mod pending;
#[cfg(feature = "axum")]
mod recent;
mod report;
mod room;
mod run;
mod sampled;
mod scan;
mod shed;
mod stack;
mod tables;
mod waits;
mod watchdog;
mod worker;

#[cfg(feature = "sighup")]
pub(crate) use engine::spawn;
pub(crate) use engine::{Engine, Parts};
pub(crate) use gate::Gate;
pub(crate) use heap::{HeapPart, NoHeap, heap_profile};
pub(crate) use limits::Limits;
pub(crate) use open_spans::open_spans;
pub use open_spans::{OpenSpan, OpenState};
#[cfg(feature = "axum")]
pub(crate) use recent::RecentlyKept;
pub(crate) use room::waiting_profiles;
pub(crate) use sampled::Pace;
pub(crate) use shed::ShedLimits;
