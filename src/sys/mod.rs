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
mod position;
mod ring;
mod spawn;
mod stripes;
mod task_waker;
mod types;
mod usage;
mod words;

#[cfg(all(
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64"),
    not(tracing_profiling_unsupported)
))]
mod linux;
#[cfg(all(
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64"),
    not(tracing_profiling_unsupported)
))]
use linux as platform;

#[cfg(not(all(
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64"),
    not(tracing_profiling_unsupported)
)))]
mod unsupported;
#[cfg(not(all(
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64"),
    not(tracing_profiling_unsupported)
)))]
use unsupported as platform;

pub use allocator::ProfilingAllocator;
#[cfg(all(test, not(tracing_profiling_unsupported)))]
pub(crate) use allocator::sample_bytes;
pub(crate) use allocator::{
    SampledAllocation, Uncounted, allocated_here, begin_counting, can_sample, counts_allocations,
    end_counting, forget_counting, is_in_use, is_uncounted, sample_allocations, track_blocks,
};
pub(crate) use block_pool::{BlockPool, Blocks};
pub(crate) use clock::Clock;
pub(crate) use files_guard::FilesGuard;
pub(crate) use layer_marker::{answer_of, downcast_through};
#[cfg(all(
    test,
    target_os = "linux",
    target_arch = "x86_64",
    not(miri),
    not(tracing_profiling_unsupported)
))]
pub(crate) use linux::nested_code;
pub(crate) use live_blocks::TrackedBlock;
pub(crate) use live_stack::{LiveRegisters, LiveStack};
pub(crate) use platform::open_regular;
#[cfg(test)]
pub(crate) use platform::open_switch_registers;
pub(crate) use platform::{
    ControlGroup, Files, GroupTexts, HardwareCounters, KeptOn, KernelFile, PerfRing, Poller,
    RingMemory, Waker, address_in_libc, address_space_left, block_timers, blocked, bytes_of_ring,
    check_writable, control_groups_of, cpu_group_in, cpu_model, cpu_ns_of,
    create_private_directory, create_private_file, current_thread, current_tid,
    executable_mappings, forbidden_calls, has_ended, has_small_signal_stack, host_name, is_blocked,
    is_mapped_as, is_own_thread, is_traced, kernel_release, kernel_symbols, load, loaded_modules,
    locked_memory_limit, log_between_forks, mapped_now, mappings, memory_file, memory_left,
    memory_limit, module_loads, monotonic_raw_ns, note_claimed_signals, on_fork, open_file_limit,
    open_sample_ring, open_schedstat, open_switch_ring, open_timer_ring, open_without_waiting,
    own_thread, own_threads, owner_of_lock, path_of_open, pending_signal_limit, probe_timers,
    process_cpu_ns, process_id, program_memory, program_path, read_filters, read_own_memory,
    read_own_stack, schedstat, signal_of_timers, switches_of, take_signals_without_room,
    thread_and_state, thread_cpu_ns, thread_stack, tick_ns, time_namespace_offset_ns,
    try_cpu_ns_of, try_thread_cpu_ns, try_thread_usage, unblock_timers, user_ns_of,
};
#[cfg(fuzzing)]
pub(crate) use platform::{parse_map, read_proc_texts};
pub(crate) use position::Position;
pub(crate) use ring::SampleRing;
#[cfg(feature = "_otlp")]
pub(crate) use spawn::STACK_BYTES;
pub(crate) use spawn::spawn;
pub(crate) use stripes::{STRIPES, Stripe, Striped, own_stripe};
pub(crate) use task_waker::{TAGS, TaskWaker, WakerObserver};
pub(crate) use task_waker::{clone as clone_waker, drop_waker, wake, wake_by_ref};
pub(crate) use types::{
    ANY_STACK, Blocked, Call, CpuUse, FileIdentity, FilteredSyscall, Load, LoadedModule,
    MOST_STACK_COPIED, MappedFile, MappedPart, ModuleList, ModuleLoads, NoFile, OsThread,
    SampleRequest, Schedstat, ThreadStack, WhyRefused,
};
pub(crate) use usage::UsageSums;
pub(crate) use words::{WORDS, fork_generation};

/// For a test in a process of its own: whether this is that process. Otherwise the test of that path has run in one.
#[cfg(test)]
pub(crate) fn is_alone(test: &str) -> bool {
    const VARIABLE: &str = "PROFILING_TEST_ALONE";
    if std::env::var(VARIABLE).is_ok_and(|alone| alone == test) {
        return true;
    }
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    let output = command.args(["--exact", test]).env(VARIABLE, test).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{output:?}");
    false
}
