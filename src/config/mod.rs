//! Settings, in code and by environment variables.

mod builder;
mod environment;
mod links;
mod start;

pub use builder::Builder;
pub(crate) use start::start;
