//! The calling thread, its sleep, and the limits of the process.
#![allow(
    unsafe_code,
    reason = "getrusage(RUSAGE_THREAD), which rustix does not offer; the bounds of stacks"
)]

use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use rustix::process::{Resource, getrlimit};
use rustix::thread::futex::{self, Flags, Timespec};
use rustix::thread::gettid;

use super::calls::may;
use super::ring::page_size;
use super::signal::last_error;
use super::texts::{field, mask_in};
use crate::sys::Usage;
use crate::sys::types::{FilteredSyscall, OsThread, ThreadStack, WhyRefused};

pub fn current_tid() -> u32 {
    gettid().as_raw_nonzero().get() as u32
}

/// Not by the C library, of which a child of a raw `clone` could be given its parent's.
pub fn current_pid() -> u32 {
    rustix::process::getpid().as_raw_nonzero().get() as u32
}

pub(crate) fn current_thread() -> OsThread {
    let name = rustix::thread::name().unwrap_or_default();
    OsThread::new(current_tid(), name.to_bytes())
}

pub(crate) fn is_traced() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    field(&status, "TracerPid:").is_some_and(|tracer| tracer != "0")
}

/// Whether this process has a thread with that id. By `/proc`, which needs no call that a seccomp filter may forbid; where
/// that does not know the calling thread either, as in a PID namespace with the `/proc` of another, the answer is yes.
pub(crate) fn is_own_thread(tid: u32) -> bool {
    let is_there = |tid| std::fs::metadata(format!("/proc/self/task/{tid}")).is_ok();
    is_there(tid) || !is_there(current_tid())
}

/// The calling thread's resource usage, or why it cannot be read.
pub(crate) fn try_thread_usage() -> Result<Usage, WhyRefused> {
    if !may(FilteredSyscall::Getrusage) {
        return Err(WhyRefused::KilledBySeccomp);
    }
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the pointer is to writable memory of the right size, which the call fills.
    let result = unsafe { libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr()) };
    if result != 0 {
        return Err(WhyRefused::Failed(FilteredSyscall::Getrusage, last_error()));
    }
    // SAFETY: zeroed, then filled by the kernel; `rusage` is plain integers.
    let usage = unsafe { usage.assume_init() };
    Ok(Usage {
        minor_faults: usage.ru_minflt as u64,
        major_faults: usage.ru_majflt as u64,
        // The `read_bytes` of `/proc/thread-self/io`, which the kernel gives in units of 512 bytes here.
        disk_read: (usage.ru_inblock as u64).saturating_mul(512),
        voluntary_switches: usage.ru_nvcsw as u64,
        involuntary_switches: usage.ru_nivcsw as u64,
        ..Usage::default()
    })
}

pub fn open_file_limit() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// The limit of signals that are pending for the user of this process.
pub(crate) fn pending_signal_limit() -> u64 {
    getrlimit(Resource::Sigpending).current.unwrap_or(u64::MAX)
}

/// Whether the user has nearly as many pending signals as the limit allows, or that is unknown. Each timer counts as one.
pub(super) fn are_signals_used_up(status: &str) -> bool {
    let line = field(status, "SigQ:").and_then(|line| line.split_once('/'));
    let used = line.and_then(|(used, most)| Some((used.parse().ok()?, most.parse().ok()?)));
    used.is_none_or(|(used, most): (u64, u64)| used >= most - most / 8)
}

pub(super) fn own_status() -> String {
    std::fs::read_to_string("/proc/thread-self/status").unwrap_or_default()
}

/// The number of the capability to lock any amount of memory.
const CAP_IPC_LOCK: u32 = 14;

/// The limit of memory that this process may lock; `None` if there is none for it.
pub(crate) fn locked_memory_limit() -> Option<u64> {
    let limit = getrlimit(Resource::Memlock).current?;
    // Asked each time: a service may drop its privileges, and lower its limits.
    // From the file: a seccomp filter may forbid `capget`.
    let effective = mask_in(&own_status(), "CapEff:");
    let may_lock = effective.is_some_and(|sets| sets >> CAP_IPC_LOCK & 1 != 0);
    (!may_lock || !is_in_first_user_namespace()).then_some(limit)
}

/// Whether the capabilities of this process are those of the host.
fn is_in_first_user_namespace() -> bool {
    static IS_FIRST: OnceLock<bool> = OnceLock::new();
    *IS_FIRST.get_or_init(|| {
        let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
        map.split_ascii_whitespace().eq(["0", "0", "4294967295"])
    })
}

/// The address space that can still be reserved, if it is limited.
pub fn address_space_left() -> Option<u64> {
    let limit = |limit| getrlimit(limit).current;
    let (all, data) = (limit(Resource::As), limit(Resource::Data));
    if all.is_none() && data.is_none() {
        return None;
    }
    // proc_pid_status(5), in KiB.
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let left = |limit: Option<u64>, name: &str| {
        let used = field(&text, name).and_then(|used| used.strip_suffix(" kB")?.parse().ok());
        limit.map(|limit| limit.saturating_sub(used.map_or(limit, |kib: u64| kib * 1024)))
    };
    left(all, "VmSize:").into_iter().chain(left(data, "VmData:")).min()
}

pub(crate) fn stack_bounds() -> Option<Range<u64>> {
    // Of the main thread's stack, a C library may know only the part in use (as musl does), or nothing without `/proc`. In
    // a forked child, the first thread can be one with another stack.
    let here = {
        let here = 0_u8;
        (&raw const here).addr() as u64
    };
    if current_tid() == current_pid()
        && let Some(stack) = main_stack().filter(|stack| stack.contains(&here))
    {
        return Some(stack);
    }
    let mut attributes = std::mem::MaybeUninit::<libc::pthread_attr_t>::zeroed();
    let (mut low, mut size) = (std::ptr::null_mut(), 0);
    // SAFETY: fills the structure, which is then read and destroyed. This is always possible for the calling thread.
    let is_known = unsafe {
        if libc::pthread_getattr_np(libc::pthread_self(), attributes.as_mut_ptr()) != 0 {
            return None;
        }
        let result = libc::pthread_attr_getstack(attributes.as_ptr(), &raw mut low, &raw mut size);
        libc::pthread_attr_destroy(attributes.as_mut_ptr());
        result == 0
    };
    let low = low as u64;
    is_known.then(|| low..low.saturating_add(size as u64))
}

pub(crate) fn thread_stack() -> Option<ThreadStack> {
    // SAFETY: the C library gives each thread its own errno.
    let errno_at = unsafe { libc::__errno_location() }.addr() as u64;
    Some(ThreadStack { bounds: stack_bounds()?, errno_at })
}

/// The addresses of the main thread's stack, including those it can grow to. The kernel puts the name of the program at its
/// top, and leaves this much below that to it, whatever its limit is.
fn main_stack() -> Option<Range<u64>> {
    const MIN_ROOM: u64 = 128 << 20;
    // SAFETY: reads a value that the kernel gave this process when it started.
    let name = unsafe { libc::getauxval(libc::AT_EXECFN) } as *const libc::c_char;
    if name.is_null() {
        return None;
    }
    // SAFETY: a string of the kernel, at the end of the memory of the stack.
    let length = unsafe { libc::strlen(name) };
    let end = (name.addr() + length + 1).next_multiple_of(page_size()) as u64;
    let limit = getrlimit(Resource::Stack).current.unwrap_or(u64::MAX);
    Some(end.saturating_sub(limit.min(MIN_ROOM))..end)
}

/// Sleeps for that time at most, until [`futex_wake`], unless the word has changed since then. It can end at any time.
pub(crate) fn futex_wait(word: &AtomicU32, before: u32, most: Option<Duration>) {
    let most = most.and_then(|most| Timespec::try_from(most).ok());
    _ = futex::wait(word, Flags::PRIVATE, before, most.as_ref());
}

pub(crate) fn futex_wake(word: &AtomicU32) {
    _ = futex::wake(word, Flags::PRIVATE, i32::MAX.cast_unsigned());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_of_pending_signals_is_reached_if_the_user_has_that_many() {
        let of =
            |used| are_signals_used_up(&format!("Threads:\t2\nSigQ:\t{used}/96365\nSigPnd:\t0\n"));
        assert_eq!([0, 80_000, 96_000, 96_365].map(of), [false, false, true, true]);
        assert!(are_signals_used_up(""), "without /proc it is likely");
        assert!(!are_signals_used_up(&own_status()));
    }

    #[test]
    fn the_main_stack_is_what_is_mapped_so() {
        let maps = std::fs::read("/proc/self/maps").unwrap();
        let maps = String::from_utf8_lossy(&maps);
        let line = maps.lines().find(|line| line.ends_with("[stack]")).unwrap();
        let mapped = line.split(' ').next().and_then(|addresses| addresses.split_once('-'));
        let [start, end] =
            <[&str; 2]>::from(mapped.unwrap()).map(|at| u64::from_str_radix(at, 16).unwrap());
        let stack = main_stack().unwrap();
        assert_eq!(stack.end, end);
        assert!(stack.contains(&start) || (start..end).contains(&stack.start));
    }
}
