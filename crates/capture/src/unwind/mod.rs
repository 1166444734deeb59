//! Unwinding: from registers and a copy of the stack to the addresses of the frames.

mod blocked;
mod calls;
mod content;
#[cfg(fuzzing)]
pub(crate) mod fuzzing;
mod listing;
mod machine;
mod modules;
mod places;
mod rules;
mod saved;
mod signal;
mod start;
mod tables;
#[cfg(all(test, target_arch = "x86_64"))]
mod tests;
mod unwinder;

pub use modules::{Module, ModuleAddress, ModuleId, Modules, build_id_in};
pub use unwinder::{UnwindEnd, Unwinder};
