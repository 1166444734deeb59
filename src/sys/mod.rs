//! Every meeting with the operating system, and all of the crate's `unsafe`.
//!
//! `linux` and `unsupported` export the same names with the same signatures, so that nothing
//! above this module asks which system it runs on. What each call needs of the kernel, and what
//! it does when that is refused, is listed in `docs/platform.md`.

mod clock;
#[cfg(feature = "sighup")]
mod hangup;
mod position;
mod types;

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

pub(crate) use clock::Clock;
#[cfg(feature = "sighup")]
pub(crate) use hangup::{EndHangups, Hangups};
#[cfg(feature = "axum")]
pub(crate) use platform::open_regular;
#[cfg(test)]
pub(crate) use platform::open_switch_registers;
pub(crate) use platform::{
    HardwareCounters, KeptOn, Poller, Ring, Waker, blocked, check_writable, cpu_ns_of,
    create_private_directory, create_private_file, current_tid, fork_generation, kernel_symbols,
    loaded_modules, module_generation, on_fork, open_file_limit, open_sample_ring,
    open_switch_ring, open_timer_ring, process_id, program_memory, read_own_memory, read_own_stack,
    thread_cpu_ns, thread_usage, tick_ns,
};
pub(crate) use position::Position;
#[cfg(test)]
pub(crate) use types::Segment;
pub(crate) use types::{
    Blocked, Call, LoadedModule, NotReplaced, SampleRequest, TimerClock, WhyRefused,
};
