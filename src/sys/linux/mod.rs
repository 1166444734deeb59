//! Linux on x86-64 and aarch64.

mod blocked;
mod clock;
mod counters;
mod files;
mod fork;
mod modules;
mod perf;
mod poll;
mod ring;
#[cfg(test)]
mod scripted;
mod signal;
mod sink;
mod thread;
mod timer;

pub(crate) use blocked::{blocked, cpu_ns_of, read_own_stack};
pub(crate) use clock::{
    TickSource, monotonic_raw_ns, read_ticks, thread_cpu_ns, tick_ns, tick_source,
};
pub(crate) use counters::HardwareCounters;
#[cfg(feature = "axum")]
pub(crate) use files::open_regular;
pub(crate) use files::{
    check_writable, create_private_directory, create_private_file, kernel_symbols,
};
pub(crate) use fork::{fork_generation, on_fork};
pub(crate) use modules::{loaded_modules, module_generation, program_memory, read_own_memory};
#[cfg(test)]
pub(crate) use perf::open_switch_registers;
pub(crate) use perf::{KeptOn, open_sample_ring, open_switch_ring};
pub(crate) use poll::{Poller, Waker};
pub(crate) use ring::Ring;
pub(crate) use thread::{current_tid, open_file_limit, process_id, thread_usage};
pub(crate) use timer::open_timer_ring;
