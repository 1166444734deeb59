//! The interface to the operating system, and all `unsafe` code of the crate.
//!
//! `linux` and `unsupported` export the same names with the same signatures, so the modules above do not depend on the
//! system. `docs/platform.md` lists what each call requires of the kernel, and what happens if it is refused.

mod allocator;
mod block_pool;
mod clock;
mod files_guard;
mod layer_marker;
mod live_blocks;
mod live_stack;
mod poll;
mod position;
mod ring;
mod spawn;
mod stripes;
mod task_waker;
mod types;
mod usage;
mod words;

#[cfg_attr(
    all(
        target_os = "linux",
        any(target_arch = "x86_64", target_arch = "aarch64"),
        not(tracing_profiling_unsupported)
    ),
    path = "linux/mod.rs"
)]
#[cfg_attr(
    not(all(
        target_os = "linux",
        any(target_arch = "x86_64", target_arch = "aarch64"),
        not(tracing_profiling_unsupported)
    )),
    path = "unsupported.rs",
    allow(
        private_interfaces,
        unreachable_pub,
        reason = "callers use less of it where it is real, and less of it is public there"
    )
)]
mod platform;

#[cfg(all(any(test, feature = "_test"), not(tracing_profiling_unsupported)))]
pub use allocator::sample_bytes;
pub use allocator::{ProfilingAllocator, SampledAllocation, SuspendCounting, mixed};
pub use block_pool::{BlockPool, Blocks};
pub use clock::Clock;
pub use files_guard::FilesGuard;
pub use live_blocks::TrackedBlock;
pub use live_stack::{LiveStack, Registers};
pub use platform::*;
pub use poll::{Poller, Waker};
pub use position::Position;
pub use ring::SampleRing;
pub use spawn::{STACK_BYTES, spawn};
pub use stripes::{STRIPES, Stripe, Striped, own_stripe};
pub use task_waker::{TAGS, TaskWaker, WakerObserver, waker_vtable};
pub use types::*;
pub use usage::{Allocations, Usage};
pub use words::{Forks, WORDS};
