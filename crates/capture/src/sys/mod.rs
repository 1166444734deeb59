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
    allow(unreachable_pub, reason = "callers use less of it where it is real")
)]
mod platform;

#[cfg(all(any(test, feature = "_test"), not(tracing_profiling_unsupported)))]
pub use allocator::sample_bytes;
pub use allocator::{ProfilingAllocator, SampledAllocation, SuspendCounting};
pub use block_pool::{BlockPool, Blocks};
pub use clock::Clock;
pub use files_guard::FilesGuard;
pub use live_blocks::TrackedBlock;
pub use live_stack::{LiveStack, Registers};
#[cfg(all(
    test,
    target_os = "linux",
    target_arch = "x86_64",
    not(miri),
    not(tracing_profiling_unsupported)
))]
pub(crate) use platform::nested_code;
#[cfg(test)]
pub(crate) use platform::open_switch_registers;
pub use platform::{
    Files, KernelFile, PerfRing, address_space_left, cpu_ns_of, current_pid, current_tid,
    is_blocked, mappings, memory_file, open_file_limit, open_regular, open_without_waiting,
    own_threads, path_of_open, process_cpu_ns, program_path, read_filters, read_own_memory,
    read_own_stack, state_of, switches_of, thread_cpu_ns, tick_ns,
};
pub(crate) use platform::{
    PerfEvent, RingMemory, address_in_libc, block_timers, bytes_of_ring, current_thread,
    has_small_signal_stack, is_in_time_namespace, is_own_thread, is_traced, loaded_modules,
    locked_memory_limit, module_loads, note_claimed_signals, open_keep_alive, open_sample_ring,
    open_switch_ring, open_timer_ring, pending_signal_limit, probe_timers, program_memory,
    signal_of_timers, take_signals_without_room, thread_stack, try_cpu_ns_of, try_thread_cpu_ns,
    try_thread_usage, unblock_timers,
};
#[cfg(fuzzing)]
pub(crate) use platform::{parse_map, read_proc_texts};
pub use poll::{Poller, Waker};
pub use position::Position;
pub use ring::SampleRing;
pub use spawn::{STACK_BYTES, spawn};
pub use stripes::{STRIPES, Stripe, Striped, own_stripe};
pub use task_waker::{TAGS, TaskWaker, WakerObserver, waker_vtable};
pub(crate) use types::{
    ANY_STACK, FileIdentity, LoadedModule, MappedPart, ModuleList, ModuleLoads, SampleRequest,
    ThreadStack,
};
pub use types::{
    Blocked, Call, FilteredSyscall, MAX_STACK_COPIED, MappedFile, NoFile, OsThread, Schedstat, Tag,
    WhyRefused,
};
pub use usage::{Allocations, Usage};
pub use words::{Forks, WORDS};
