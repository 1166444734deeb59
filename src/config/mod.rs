//! What a user can set, in code and by environment variables.

mod builder;
mod directive;
mod environment;

pub use builder::Builder;
