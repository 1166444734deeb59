//! wip
mod collector;
mod config;
pub mod encode;
mod error;
pub mod export;
mod handle;
mod keep;
mod layer;
pub mod profile;
mod sampler;
mod span;
mod stats;
mod symbols;
mod sys;
mod unwind;

pub use config::Builder;
pub use error::Error;
pub use handle::{FlushGuard, Handle};
pub use keep::{Keep, Kept, KeptSpan, NoProfile, Reason, Reasons, Rule, Rules};
pub use layer::ProfilingLayer;
pub use span::{Account, Hardware};
pub use stats::Stats;
