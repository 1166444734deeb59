//! The place of the `#[profiled]` attribute of `tracing-profiling`.
//!
//! Empty for now: a procedural macro needs a crate of its own, and this one is here so that the
//! workspace has its final shape.
