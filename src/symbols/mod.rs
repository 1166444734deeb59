//! From addresses to functions, inlined functions, files and lines.

mod build_id;
#[cfg(fuzzing)]
pub(crate) mod fuzzing;
mod kernel;
mod names;
mod sections;
mod source;
mod symbolizer;

pub(crate) use build_id::hex;
pub(crate) use symbolizer::{Missing, SymbolSettings, Symbolizer};
