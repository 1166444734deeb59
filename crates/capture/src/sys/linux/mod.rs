//! Linux on x86-64 and aarch64.

mod blocked;
mod calls;
mod cgroup;
mod clock;
mod context;
mod counters;
mod files;
mod fork;
mod load;
mod maps;
mod modules;
#[cfg(all(test, target_arch = "x86_64", not(miri)))]
pub(crate) mod nested_code;
mod own_files;
mod pages;
mod perf;
mod poll;
mod resident;
mod ring;
#[cfg(any(test, feature = "_test"))]
mod scripted;
mod signal;
mod signal_stack;
mod thread;
mod timer;

/// Whether a text parses as a blocked thread's `/proc/self/task/TID/syscall`, and as a `/proc/thread-self/status` with
/// seccomp filters.
#[cfg(fuzzing)]
pub(crate) fn read_proc_texts(text: &str) -> (bool, bool) {
    (blocked::parse(text).is_some(), calls::filters_of(text).is_some())
}

/// Whether a line parses as one of `/proc/self/maps`.
#[cfg(fuzzing)]
pub(crate) fn parse_map(line: &[u8]) -> bool {
    maps::MapLine::parse(line)
        .is_some_and(|mapping| mapping.file().path.as_os_str().len() <= line.len())
}

pub use blocked::{
    blocked, control_groups_of, cpu_ns_of, is_blocked, open_schedstat, own_thread, own_threads,
    owner_of_lock, read_own_stack, schedstat, switches_of, thread_and_state,
};
pub(crate) use blocked::{try_cpu_ns_of, user_ns_of};
pub use calls::{forbidden_calls, read_filters};
pub use cgroup::{ControlGroup, GroupTexts, cpu_group_in, memory_left, memory_limit};
pub(crate) use clock::{
    TickSource, monotonic_raw_ns, read_ticks, tick_source, time_namespace_offset_ns,
    try_thread_cpu_ns,
};
pub use clock::{process_cpu_ns, thread_cpu_ns, tick_ns};
pub(crate) use counters::HardwareCounters;
pub use files::{
    check_writable, create_private_directory, create_private_file, kernel_symbols, memory_file,
    open_regular, open_without_waiting, path_of_open,
};
pub use fork::{log_between_forks, on_fork, watch_forks};
pub use load::load;
pub(crate) use maps::executable_mappings;
pub use maps::{is_mapped_as, mapped_now, mappings};
pub(crate) use modules::{address_in_libc, loaded_modules, module_loads, program_memory};
pub use modules::{program_path, read_own_memory};
pub use own_files::{Files, KernelFile};
pub(crate) use pages::{map_memory, unmap_memory};
pub use perf::PerfRing;
#[cfg(test)]
pub(crate) use perf::open_switch_registers;
pub(crate) use perf::{KeptOn, open_sample_ring, open_switch_ring};
pub use poll::{Poller, Waker};
pub(crate) use ring::{RingMemory, bytes_of_ring, copy_any};
pub(crate) use signal::{note_claimed_signals, with_signals_blocked};
pub(crate) use signal_stack::has_small_signal_stack;
pub use signal_stack::take_signals_without_room;
pub use thread::{
    address_space_left, cpu_model, current_tid, has_ended, host_name, kernel_release,
    open_file_limit, process_id,
};
pub(crate) use thread::{
    current_thread, is_own_thread, is_traced, locked_memory_limit, pending_signal_limit,
    stack_bounds, thread_stack, try_thread_usage,
};
pub(crate) use timer::{
    TimerRing, block_timers, open_timer_ring, probe_timers, signal_of_timers, unblock_timers,
};
