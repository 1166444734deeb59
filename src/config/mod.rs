//! Settings, in code and by environment variables.

mod builder;
mod environment;

pub use builder::Builder;
pub(crate) use environment::rules_of_env;
