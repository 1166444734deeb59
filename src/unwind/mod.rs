//! From registers and copied stack bytes to the addresses of the frames.

mod blocked;
mod calls;
mod machine;
mod modules;
mod tables;
mod unwinder;

pub(crate) use modules::{Frame, Module, ModuleId, Modules};
pub(crate) use unwinder::{End, Unwinder};
