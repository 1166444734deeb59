//! Settings, in code and by environment variables.

mod builder;
mod environment;
mod files;
mod links;
mod plan;
mod start;

pub use builder::Builder;
#[cfg(feature = "sighup")]
pub(crate) use environment::rules_of_env;
pub(crate) use start::start;
