//! Linux on x86-64 and aarch64.

mod blocked;
mod calls;
mod clock;
mod files;
mod fork;
mod maps;
mod modules;
#[cfg(all(test, target_arch = "x86_64", not(miri)))]
pub(crate) mod nested_code;
mod own_files;
mod pages;
mod perf;
mod ring;
#[cfg(any(test, feature = "_test"))]
mod scripted;
mod signal;
mod signal_stack;
mod texts;
mod thread;
mod timer;

/// Whether a text parses as a blocked thread's `syscall`, and as a `status` with seccomp filters, both in `/proc`.
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

pub use self::{
    blocked::*, calls::*, clock::*, files::*, maps::*, modules::*, own_files::*, perf::*, thread::*,
};
pub(crate) use self::{pages::*, ring::*, signal::*, signal_stack::*, timer::*};
