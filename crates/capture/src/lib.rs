//! An in-process sampling profiler: perf events or timers, waits, and stacks of a program's own threads.

// Which machine it is, and where bytes are, is nothing that callers could choose.
#![allow(private_bounds)]

#[doc(hidden)]
pub mod budget;
#[doc(hidden)]
pub mod drain;
#[cfg(fuzzing)]
#[doc(hidden)]
pub mod fuzzing;
mod profiler;
#[doc(hidden)]
pub mod sampler;
#[doc(hidden)]
pub mod sys;
#[cfg(any(test, feature = "_test"))]
#[doc(hidden)]
pub mod testing;
#[doc(hidden)]
pub mod unwind;

pub use drain::{Loss, Sample, Sink};
pub use profiler::{Profiler, Settings};
pub use sampler::{Source, ThreadCounters, UnknownName};
pub use sys::{Allocations, OsThread, ProfilingAllocator, Tag, Usage};
pub use unwind::{ModuleAddress, UnwindEnd};
