//! System calls at which a seccomp filter would end the process: found out in a child, which it ends
//! instead.
#![allow(unsafe_code, reason = "clone, wait4, and system calls without a wrapper in the child")]

use std::ffi::{c_int, c_long};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::signal::with_signals_blocked;
use crate::sys::types::Unusual;

/// The calls at which it would, on any thread that was looked at.
static DEADLY: AtomicU32 = AtomicU32::new(0);

/// Numbers of filters for which that is known: threads with as many have the same ones, in all likelihood.
static PROBED: AtomicU64 = AtomicU64::new(0);

/// Whether a call may be made, as far as [`look_at_filters`] has seen.
#[inline]
pub(crate) fn may(call: Unusual) -> bool {
    DEADLY.load(Ordering::Relaxed) & bit(call) == 0
}

/// The calls that may not be made.
pub(crate) fn deadly() -> impl Iterator<Item = Unusual> {
    Unusual::ALL.into_iter().filter(|call| !may(*call))
}

fn bit(call: Unusual) -> u32 {
    1 << call as u32
}

/// Looks whether the calling thread has a filter that was not there before, and what it does. Before a
/// thread makes unusual calls for the first time: filters are a thread's own, and may come at any time.
pub(crate) fn look_at_filters() {
    // Of this thread, where the file of the process speaks of its first one. Without `/proc`, as in a
    // sandbox, a child can do no harm.
    let filters = match std::fs::read_to_string("/proc/thread-self/status") {
        Ok(status) => filters_of(&status),
        Err(error) => match error.kind() {
            std::io::ErrorKind::NotFound | std::io::ErrorKind::PermissionDenied => Some(UNKNOWN),
            // No more files may be open, or the like: it passes, and is asked again.
            _ => None,
        },
    };
    let Some(number) = filters else { return };
    let number = 1 << number.min(UNKNOWN);
    if PROBED.load(Ordering::Acquire) & number == 0 {
        probe();
        PROBED.fetch_or(number, Ordering::Release);
    }
}

const UNKNOWN: u32 = u64::BITS - 1;

/// The number of filters of a thread by its `/proc/thread-self/status`; `None` if it has none.
pub(super) fn filters_of(status: &str) -> Option<u32> {
    const FILTER_MODE: &str = "2";
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.map(str::trim)
    };
    if field("Seccomp:")? != FILTER_MODE {
        return None;
    }
    // Since Linux 5.9.
    Some(field("Seccomp_filters:").and_then(|number| number.parse().ok()).unwrap_or(UNKNOWN))
}

/// Lets a child make all calls. Where it ends, the next one goes on behind that call.
fn probe() {
    let (mut next, mut is_quiet) = (0, true);
    while let Some(call) = Unusual::ALL.get(next) {
        let rest = next..Unusual::ALL.len();
        let ended_at = with_signals_blocked(|| child(rest, is_quiet));
        match ended_at.filter(|at| is_quiet || *at != BEGINNING) {
            Some(BEGINNING) => is_quiet = false,
            Some(done) if done >= Unusual::ALL.len() => return,
            Some(ended_at) => {
                let ended_at = ended_at.max(next);
                if let Some(call) = Unusual::ALL.get(ended_at) {
                    DEADLY.fetch_or(bit(*call), Ordering::Relaxed);
                }
                next = ended_at + 1;
            }
            // No child can be had: nobody knows. `call` and all behind it are left alone.
            None => {
                let rest = Unusual::ALL.iter().skip(*call as usize);
                DEADLY.fetch_or(rest.map(|call| bit(*call)).sum(), Ordering::Relaxed);
                return;
            }
        }
    }
}

/// What a child has reached that has made none of the calls.
const BEGINNING: usize = u32::MAX as usize;
/// How long a child may take: it makes some ten system calls. One that a supervisor holds up, or that is in a
/// handler of the program's, may never end.
const MAX_TIME: Duration = Duration::from_secs(1);

/// Makes a child that makes the calls of these numbers, `is_quiet` if it is to leave no core dump. Returns at
/// which it ended; the number of all if it made them all. Nobody but us hears of the child: it sends no signal as it ends, and only who waits for
/// children of just that kind finds it.
fn child(calls: std::ops::Range<usize>, is_quiet: bool) -> Option<usize> {
    let none: c_long = 0;
    // A page that both see, for how far the child has come.
    // SAFETY: a new mapping at an address of the kernel's choosing disturbs nothing.
    let shared = unsafe {
        rustix::mm::mmap_anonymous(
            std::ptr::null_mut(),
            size_of::<AtomicU32>(),
            rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE,
            rustix::mm::MapFlags::SHARED,
        )
    };
    let shared = shared.ok()?;
    // SAFETY: the mapping just made: zeros, aligned, and large enough.
    let reached = unsafe { &*shared.cast::<AtomicU32>() };
    // As `fork`, without the handlers that run at one, and without a signal at its end.
    // SAFETY: no memory is shared but for that page. The child has one thread, whose locks may be held
    // by others for ever: it calls nothing that takes one, and allocates nothing.
    let child = unsafe { libc::syscall(libc::SYS_clone, none, none, none, none, none) };
    if child == 0 {
        reached.store(BEGINNING as u32, Ordering::Relaxed);
        if is_quiet {
            suppress_core_dump();
        }
        make(calls, reached);
    }
    let mut status: c_int = 0;
    let (start, mut is_killed) = (Instant::now(), false);
    let ended = loop {
        let options = libc::__WALL | if is_killed { 0 } else { libc::WNOHANG };
        // SAFETY: waits for a child of ours, and writes to an integer of ours.
        let ended = (child > 0).then(|| unsafe {
            libc::syscall(libc::SYS_wait4, child, &raw mut status, options, none)
        });
        match ended {
            Some(0) if start.elapsed() < MAX_TIME => {
                std::thread::sleep(Duration::from_micros(50));
            }
            Some(0) => {
                is_killed = true;
                // SAFETY: ends a child of ours that nobody has waited for.
                let killed = unsafe { libc::kill(child as libc::pid_t, libc::SIGKILL) };
                if killed != 0 {
                    // Better a child that is left than to wait for it without end.
                    break None;
                }
            }
            Some(-1) if super::signal::last_error() == libc::EINTR => {}
            ended => break ended,
        }
    };
    let reached = reached.load(Ordering::Relaxed) as usize;
    // SAFETY: the mapping made above, which nobody uses any more.
    _ = unsafe { rustix::mm::munmap(shared, size_of::<AtomicU32>()) };
    let is_whole = ended == Some(child) && child > 0;
    is_whole.then(|| if libc::WIFEXITED(status) { Unusual::ALL.len() } else { reached })
}

/// In the child: whose end is none that anybody should look into, and is the filter's doing and not that of a
/// handler of the program's.
fn suppress_core_dump() {
    // Where one is refused there is a core dump, or a handler is called: nothing depends on that.
    // SAFETY: plain settings of this process, which goes on for some microseconds. All zeros is a valid
    // action: the default.
    unsafe {
        libc::syscall(libc::SYS_prctl, libc::PR_SET_DUMPABLE, 0, 0, 0, 0);
        let default: libc::sigaction = std::mem::zeroed();
        libc::sigaction(libc::SIGSYS, &raw const default, std::ptr::null_mut());
    }
}

/// In the child.
fn make(calls: std::ops::Range<usize>, reached: &AtomicU32) -> ! {
    for (number, call) in Unusual::ALL.into_iter().enumerate() {
        if calls.contains(&number) {
            reached.store(number as u32, Ordering::Relaxed);
            make_one(call);
        }
    }
    loop {
        // SAFETY: ends this process.
        unsafe { libc::syscall(libc::SYS_exit_group, 0) };
    }
}

/// With arguments that do nothing, most of which the kernel refuses.
fn make_one(call: Unusual) {
    use perf_event_open_sys::bindings;
    const NO_FILE: c_int = -1;
    let none: c_long = 0;
    let mut words = [0_u64; 64];
    let pointer = words.as_mut_ptr();
    // SAFETY: each reads or fills at most the words above, which are larger than any of its structures.
    unsafe {
        match call {
            Unusual::PerfEventOpen => {
                libc::syscall(libc::SYS_perf_event_open, none, none, -1_i64, NO_FILE, none);
                for request in [bindings::ENABLE, bindings::DISABLE, bindings::PERIOD, bindings::ID]
                {
                    libc::syscall(libc::SYS_ioctl, NO_FILE, request as c_long, none);
                }
            }
            Unusual::TimerCreate => {
                libc::syscall(libc::SYS_timer_create, libc::CLOCK_THREAD_CPUTIME_ID, none, pointer);
            }
            // Of no such timer: the one just made has the number 0.
            Unusual::TimerSettime => {
                libc::syscall(libc::SYS_timer_settime, c_int::MAX, 0, pointer, none);
            }
            Unusual::TimerDelete => {
                libc::syscall(libc::SYS_timer_delete, c_int::MAX);
            }
            Unusual::ProcessVmReadv => {
                let process = libc::syscall(libc::SYS_getpid);
                libc::syscall(libc::SYS_process_vm_readv, process, none, none, none, none, none);
            }
            Unusual::ClockGettime => {
                libc::syscall(libc::SYS_clock_gettime, libc::CLOCK_THREAD_CPUTIME_ID, pointer);
            }
            Unusual::Getrusage => {
                libc::syscall(libc::SYS_getrusage, libc::RUSAGE_THREAD, pointer);
            }
            Unusual::Statfs => {
                libc::syscall(libc::SYS_statfs, c"/".as_ptr(), pointer);
            }
            Unusual::Faccessat => {
                libc::syscall(libc::SYS_faccessat, libc::AT_FDCWD, c"/".as_ptr(), libc::R_OK);
            }
            // The file goes with the process.
            Unusual::MemfdCreate => {
                libc::syscall(libc::SYS_memfd_create, c"".as_ptr(), libc::MFD_CLOEXEC);
            }
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
            assert_eq!(child(0..Unusual::ALL.len(), is_quiet), Some(Unusual::ALL.len()));
        }
        // The numbers by which calls are known are those of the table.
        for (number, call) in Unusual::ALL.into_iter().enumerate() {
            assert_eq!(call as usize, number);
        }
    }
}
