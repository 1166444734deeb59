//! Makes profiles of the samples in the store.

mod build;
mod children;
mod links;
mod process;
mod tables;

pub(crate) use build::{BuiltProfile, ProfileAssembler, ProfileInputs};
pub(crate) use children::children_of;
