//! Settings, in code and by environment variables.

mod builder;
mod environment;
mod plan;

pub use builder::Builder;
pub(crate) use environment::rules_of_env;
