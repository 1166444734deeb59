//! What the kernel knows of the calling thread, and of the process's limits.
#![allow(unsafe_code, reason = "getrusage(RUSAGE_THREAD), which rustix does not offer")]

use rustix::process::{Resource, getrlimit};
use rustix::thread::gettid;

use crate::sys::types::ThreadUsage;

/// The kernel's number of the calling thread.
pub(crate) fn current_tid() -> u32 {
    gettid().as_raw_nonzero().get() as u32
}

/// The kernel's number of this process.
pub(crate) fn process_id() -> u32 {
    rustix::process::getpid().as_raw_nonzero().get() as u32
}

/// The calling thread's usage; `None` if the kernel does not say.
pub(crate) fn thread_usage() -> Option<ThreadUsage> {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the pointer is to writable memory of the right size, which the call fills.
    let result = unsafe { libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr()) };
    if result != 0 {
        return None;
    }
    // SAFETY: zeroed, then filled by the kernel; `rusage` is plain integers.
    let usage = unsafe { usage.assume_init() };
    Some(ThreadUsage {
        minor_faults: usage.ru_minflt as u64,
        major_faults: usage.ru_majflt as u64,
        voluntary_switches: usage.ru_nvcsw as u64,
        involuntary_switches: usage.ru_nivcsw as u64,
    })
}

/// How many files this process may have open.
pub(crate) fn open_file_limit() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}
