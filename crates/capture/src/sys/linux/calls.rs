//! Finds system calls at which a seccomp filter would kill the process, by making them in a child process.
#![allow(unsafe_code, reason = "clone, wait4, and system calls without a wrapper in the child")]

use std::ffi::{c_int, c_long};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::signal::with_signals_blocked;
use super::texts::field;
use crate::sys::types::FilteredSyscall;

/// The deadly calls, on any thread that was probed.
static DEADLY: AtomicU32 = AtomicU32::new(0);

/// The filter counts that have been probed. Threads with the same number of filters very likely have the same filters.
static PROBED: AtomicU64 = AtomicU64::new(0);

#[inline]
pub(crate) fn may(call: FilteredSyscall) -> bool {
    DEADLY.load(Ordering::Relaxed) & bit(call) == 0
}

impl FilteredSyscall {
    pub fn forbidden() -> impl Iterator<Item = Self> {
        Self::ALL.iter().copied().filter(|call| !may(*call))
    }
}

fn bit(call: FilteredSyscall) -> u32 {
    1 << call as u32
}

/// Checks whether the calling thread has new seccomp filters, and probes them. Called before a thread makes unusual
/// calls for the first time: filters are per thread, and can be installed at any time.
pub fn read_filters() {
    if !may_have_filters() {
        return;
    }
    // The file of this thread: that of the process is of its first one. Without `/proc`, as in a sandbox, a probe is harmless.
    let filters = match std::fs::read_to_string("/proc/thread-self/status") {
        Ok(status) => filters_of(&status).inspect(|_| MODE.store(FILTERED, Ordering::Relaxed)),
        Err(error) => match error.kind() {
            std::io::ErrorKind::NotFound | std::io::ErrorKind::PermissionDenied => Some(UNKNOWN),
            // A temporary failure, such as too many open files. The next call tries again.
            _ => return,
        },
    };
    let Some(number) = filters else {
        _ = MODE.compare_exchange(UNKNOWN_MODE, UNFILTERED, Ordering::Relaxed, Ordering::Relaxed);
        return;
    };
    let number = 1 << number.min(UNKNOWN);
    if PROBED.load(Ordering::Acquire) & number == 0 {
        probe();
        PROBED.fetch_or(number, Ordering::Release);
    }
}

const UNKNOWN: u32 = u64::BITS - 1;

static MODE: AtomicU32 = AtomicU32::new(UNKNOWN_MODE);
const UNKNOWN_MODE: u32 = 0;
const UNFILTERED: u32 = 1;
/// A thread had a filter, which may end the process at the call below.
const FILTERED: u32 = 2;

/// Whether the calling thread may have filters. If no thread had any so far, one system call shows that: the file takes
/// thirty times as long, and each new thread asks.
fn may_have_filters() -> bool {
    let none: libc::c_ulong = 0;
    MODE.load(Ordering::Relaxed) != UNFILTERED
        // SAFETY: a call without pointers, that changes nothing.
        || unsafe { libc::prctl(libc::PR_GET_SECCOMP, none, none, none, none) } != 0
}

/// The number of filters of a thread, from its `/proc/thread-self/status`; `None` if it has none.
pub(super) fn filters_of(status: &str) -> Option<u32> {
    const FILTER_MODE: &str = "2";
    if field(status, "Seccomp:")? != FILTER_MODE {
        return None;
    }
    // Since Linux 5.9.
    let number = field(status, "Seccomp_filters:").and_then(|number| number.parse().ok());
    Some(number.unwrap_or(UNKNOWN))
}

/// Makes all calls in a child. If it is killed, the next child continues after that call.
fn probe() {
    let (mut next, mut is_quiet) = (0, true);
    while let Some(call) = FilteredSyscall::ALL.get(next) {
        let rest = next..FilteredSyscall::ALL.len();
        let ended_at = with_signals_blocked(|| child(rest, is_quiet));
        match ended_at.filter(|at| is_quiet || *at != BEGINNING) {
            Some(BEGINNING) => is_quiet = false,
            Some(done) if done >= FilteredSyscall::ALL.len() => return,
            Some(ended_at) => {
                let ended_at = ended_at.max(next);
                if let Some(call) = FilteredSyscall::ALL.get(ended_at) {
                    DEADLY.fetch_or(bit(*call), Ordering::Relaxed);
                }
                next = ended_at + 1;
            }
            // No child can be created, so the result is unknown: `call` and all later ones are avoided.
            None => {
                let rest = FilteredSyscall::ALL.iter().skip(*call as usize);
                DEADLY.fetch_or(rest.map(|call| bit(*call)).sum(), Ordering::Relaxed);
                return;
            }
        }
    }
}

/// The progress of a child that has not made any of the calls.
const BEGINNING: usize = u32::MAX as usize;
/// How long a child may take. It makes ten system calls, but may never end if a supervisor stops it.
const MAX_TIME: Duration = Duration::from_secs(1);
/// How often its end is polled at least, as the machine may have stood still in that time; and how long that may take.
const MIN_POLLS: u32 = 1_000;
const MAX_POLLING: Duration = Duration::from_secs(5);

/// Starts a child that makes the calls with these numbers; with `is_quiet`, it leaves no core dump. Returns the call at
/// which it was killed, or the number of all calls if it survived. The child is invisible to the program: it sends no
/// signal when it ends, and only a wait for this kind of child finds it.
fn child(calls: std::ops::Range<usize>, is_quiet: bool) -> Option<usize> {
    let none: c_long = 0;
    // A page shared with the child, for its progress.
    // SAFETY: the kernel chooses the address of the new mapping, so no other memory is affected.
    let shared = unsafe {
        rustix::mm::mmap_anonymous(
            std::ptr::null_mut(),
            size_of::<AtomicU32>(),
            rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE,
            rustix::mm::MapFlags::SHARED,
        )
    };
    let shared = shared.ok()?;
    // SAFETY: the mapping just created: zeroed, aligned, and large enough.
    let reached = unsafe { &*shared.cast::<AtomicU32>() };
    // Like `fork`, but without fork handlers and without a signal at its end.
    // SAFETY: only that page is shared. The child has one thread, and other threads' locks may be held forever in it:
    // it calls nothing that takes a lock, and does not allocate.
    let child = unsafe { libc::syscall(libc::SYS_clone, none, none, none, none, none) };
    if child == 0 {
        reached.store(BEGINNING as u32, Ordering::Relaxed);
        if is_quiet {
            suppress_core_dump();
        }
        make(calls, reached);
    }
    let mut status: c_int = 0;
    let (start, mut polls, mut is_killed) = (Instant::now(), 0, false);
    let ended = loop {
        let options = libc::__WALL | if is_killed { 0 } else { libc::WNOHANG };
        // SAFETY: waits for the child created above, and writes to a local integer.
        let ended = (child > 0).then(|| unsafe {
            libc::syscall(libc::SYS_wait4, child, &raw mut status, options, none)
        });
        match ended {
            Some(0)
                if start.elapsed() < MAX_TIME
                    || polls < MIN_POLLS && start.elapsed() < MAX_POLLING =>
            {
                polls += 1;
                std::thread::sleep(Duration::from_micros(50));
            }
            Some(0) => {
                is_killed = true;
                // SAFETY: kills the child created above, which has not been reaped.
                let killed = unsafe { libc::kill(child as libc::pid_t, libc::SIGKILL) };
                if killed != 0 {
                    // Leaking the child is better than waiting for it forever.
                    break None;
                }
            }
            Some(-1) if super::signal::last_error() == libc::EINTR => {}
            ended => break ended,
        }
    };
    let reached = reached.load(Ordering::Relaxed) as usize;
    // SAFETY: the mapping created above, which is no longer used.
    _ = unsafe { rustix::mm::munmap(shared, size_of::<AtomicU32>()) };
    let is_whole = ended == Some(child) && child > 0;
    is_whole.then(|| if libc::WIFEXITED(status) { FilteredSyscall::ALL.len() } else { reached })
}

/// In the child: avoids a core dump, and the program's handler of `SIGSYS`.
fn suppress_core_dump() {
    // If one of these is refused, a core dump is written or the handler runs; nothing depends on it.
    // SAFETY: settings of this process, which lives for some microseconds. All zeros is a valid action, the default
    // one.
    unsafe {
        libc::syscall(libc::SYS_prctl, libc::PR_SET_DUMPABLE, 0, 0, 0, 0);
        let default: libc::sigaction = std::mem::zeroed();
        libc::sigaction(libc::SIGSYS, &raw const default, std::ptr::null_mut());
    }
}

/// In the child.
fn make(calls: std::ops::Range<usize>, reached: &AtomicU32) -> ! {
    for (number, call) in FilteredSyscall::ALL.iter().enumerate() {
        if calls.contains(&number) {
            reached.store(number as u32, Ordering::Relaxed);
            try_call(*call);
        }
    }
    loop {
        // SAFETY: ends this process.
        unsafe { libc::syscall(libc::SYS_exit_group, 0) };
    }
}

/// Makes one call, with arguments that do nothing. The kernel rejects most of them.
fn try_call(call: FilteredSyscall) {
    use perf_event_open_sys::bindings;
    const NO_FILE: c_int = -1;
    let none: c_long = 0;
    let mut words = [0_u64; 64];
    let pointer = words.as_mut_ptr();
    // SAFETY: each call reads or writes at most the words above, which are larger than any of its structures.
    unsafe {
        match call {
            FilteredSyscall::PerfEventOpen => {
                libc::syscall(libc::SYS_perf_event_open, none, none, -1_i64, NO_FILE, none);
                for request in [bindings::ENABLE, bindings::DISABLE, bindings::PERIOD, bindings::ID]
                {
                    libc::syscall(libc::SYS_ioctl, NO_FILE, request as c_long, none);
                }
            }
            FilteredSyscall::TimerCreate => {
                libc::syscall(libc::SYS_timer_create, libc::CLOCK_THREAD_CPUTIME_ID, none, pointer);
            }
            // No such timer exists: the one just created has the id 0.
            FilteredSyscall::TimerSettime => {
                libc::syscall(libc::SYS_timer_settime, c_int::MAX, 0, pointer, none);
            }
            FilteredSyscall::TimerDelete => {
                libc::syscall(libc::SYS_timer_delete, c_int::MAX);
            }
            FilteredSyscall::ProcessVmReadv => {
                let process = libc::syscall(libc::SYS_getpid);
                libc::syscall(libc::SYS_process_vm_readv, process, none, none, none, none, none);
            }
            FilteredSyscall::ClockGettime => {
                libc::syscall(libc::SYS_clock_gettime, libc::CLOCK_THREAD_CPUTIME_ID, pointer);
            }
            FilteredSyscall::Getrusage => {
                libc::syscall(libc::SYS_getrusage, libc::RUSAGE_THREAD, pointer);
            }
            // The file is closed when the process ends.
            FilteredSyscall::MemfdCreate => {
                libc::syscall(libc::SYS_memfd_create, c"".as_ptr(), libc::MFD_CLOEXEC);
                libc::syscall(libc::SYS_ftruncate, NO_FILE, none);
            } // Of no memory.
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_the_number_of_filters_of_a_thread() {
        let status = |rest: &str| format!("Name:\tx\nNoNewPrivs:\t1\n{rest}Speculation:\tx\n");
        for (rest, filters) in [
            ("Seccomp:\t0\nSeccomp_filters:\t0\n", None),
            ("Seccomp:\t1\nSeccomp_filters:\t0\n", None),
            ("Seccomp:\t2\nSeccomp_filters:\t1\n", Some(1)),
            ("Seccomp:\t2\nSeccomp_filters:\t4294967295\n", Some(u32::MAX)),
            ("Seccomp:\t2\nSeccomp_filters:\tmany\n", Some(UNKNOWN)),
            ("Seccomp:\t2\n", Some(UNKNOWN)),
            ("", None),
        ] {
            assert_eq!(filters_of(&status(rest)), filters, "{rest}");
        }
        assert_eq!(filters_of(""), None);
    }

    #[test]
    fn without_a_filter_a_child_makes_all_calls() {
        for is_quiet in [true, false] {
            assert_eq!(
                child(0..FilteredSyscall::ALL.len(), is_quiet),
                Some(FilteredSyscall::ALL.len())
            );
        }
        // The numbers of the calls are their indices in the table.
        for (number, call) in FilteredSyscall::ALL.iter().enumerate() {
            assert_eq!(*call as usize, number);
        }
    }
}
