//! What a user can set, in code and by environment variables.

mod builder;
mod directive;
mod environment;
mod self_test;

pub use builder::Builder;
pub(crate) use environment::rules_of_env;
pub use self_test::SelfTest;
pub(crate) use self_test::self_test;
