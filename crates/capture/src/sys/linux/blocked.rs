//! Inspects a blocked thread from another thread, without affecting it.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use super::modules::{read_by_system_call, read_own_memory};
use super::own_files::KernelFile;
use super::signal::bit;
use super::texts::{field, mask_in};
use super::thread::{current_tid, is_own_thread};
use crate::sys::types::{Blocked, Call, OsThread, Schedstat, WhyRefused};

impl Blocked {
    /// Where a thread of this process is blocked; `None` if it is running or runnable.
    ///
    /// Reads `/proc/self/task/TID/syscall`, which a process may read for its own threads without privileges. It is refused
    /// only to programs that were started with file capabilities, that have changed their user, or are not dumpable.
    pub fn of(tid: u32) -> io::Result<Option<Self>> {
        let bytes = read(tid, "syscall")?;
        Ok(std::str::from_utf8(&bytes).ok().and_then(parse))
    }
}

impl Call {
    /// The thread that holds the lock for which a thread waits, if that is a mutex of glibc: only these have it.
    pub fn lock_owner(self) -> Option<u32> {
        let Self::PlainFutex(lock) = self else { return None };
        let bytes = read_own_memory(lock..lock.checked_add(20)?).ok()?;
        let mut words = bytes.as_chunks().0.iter().map(|word| u32::from_ne_bytes(*word));
        // The state of the mutex, its depth, its owner, the number of its users, and its kind.
        let words = [words.next()?, words.next()?, words.next()?, words.next()?, words.next()?];
        owner_of(words).filter(|owner| is_own_thread(*owner))
    }
}

/// The owner, if it is a mutex of glibc for which a thread waits. Locks of others have other words there.
fn owner_of([state, depth, owner, users, kind]: [u32; 5]) -> Option<u32> {
    const CONTENDED: u32 = 2;
    const DEEPEST: u32 = 1 << 16;
    // Those that are robust or inherit priorities have another state.
    const LARGEST_KIND: u32 = 0x3ff;
    let is_one = state == CONTENDED && depth <= DEEPEST && users == 1 && kind <= LARGEST_KIND;
    (cfg!(target_env = "gnu") && is_one && owner != 0).then_some(owner)
}

/// What the kernel says of a thread in a file, by one read.
fn read(tid: u32, file: &str) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; 512];
    let length = File::open(path(tid, file)?)?.read(&mut bytes)?;
    bytes.truncate(length);
    Ok(bytes)
}

/// Fails where `/proc` is that of another PID namespace, which knows threads by other ids.
fn path(tid: u32, file: &str) -> io::Result<PathBuf> {
    check_proc()?;
    Ok(format!("/proc/self/task/{tid}/{file}").into())
}

/// Fails where `/proc` is that of another PID namespace.
fn check_proc() -> io::Result<()> {
    static IS_OWN: AtomicBool = AtomicBool::new(false);
    if !IS_OWN.load(Ordering::Relaxed)
        && let Ok(own) = fs::read_link("/proc/thread-self")
    {
        if !own.ends_with(current_tid().to_string()) {
            return Err(io::ErrorKind::NotFound.into());
        }
        IS_OWN.store(true, Ordering::Relaxed);
    }
    Ok(())
}

impl Schedstat {
    pub fn open(tid: u32) -> io::Result<KernelFile> {
        KernelFile::open_at(&path(tid, "schedstat")?)
    }

    /// What the scheduler has counted for the thread with that file. Fails where the kernel does not count it.
    pub fn read(file: &KernelFile) -> io::Result<Self> {
        let mut bytes = [0; 128];
        let parsed = schedstat_in(file.text(&mut bytes)?);
        parsed.ok_or_else(|| io::ErrorKind::Unsupported.into())
    }
}

/// A kernel that does not count has three zeros.
fn schedstat_in(text: &str) -> Option<Schedstat> {
    let mut numbers = text.strip_suffix('\n')?.split(' ').map(str::parse);
    let numbers = [numbers.next(), numbers.next(), numbers.next(), numbers.next()];
    let [Some(Ok(cpu_ns)), Some(Ok(run_delay_ns)), Some(Ok(runs @ 1..)), None] = numbers else {
        return None;
    };
    Some(Schedstat { cpu_ns, run_delay_ns, runs })
}

pub fn own_threads() -> io::Result<Vec<u32>> {
    const MAX_LISTS: usize = 16;
    check_proc()?;
    let own = current_tid();
    // If the thread at which the kernel stands has just ended, it goes on by number, and the list can lack others.
    for _ in 0..MAX_LISTS {
        let tasks = fs::read_dir("/proc/self/task")?;
        let ids = tasks.filter_map(|task| task.ok()?.file_name().to_str()?.parse().ok());
        let threads: Vec<u32> = ids.collect();
        if threads.contains(&own) {
            return Ok(threads);
        }
    }
    Err(io::ErrorKind::NotFound.into())
}

impl OsThread {
    /// A thread of this process, with its name; without one if that cannot be read.
    pub fn of(tid: u32) -> Self {
        let name = read(tid, "comm").unwrap_or_default();
        Self::new(tid, name.strip_suffix(b"\n").unwrap_or(&name))
    }

    /// The letter of the state of a thread of this process, as in `proc_pid_stat(5)`: also where [`Blocked::of`] is refused.
    pub fn state_of(tid: u32) -> Option<u8> {
        field(&status_of(tid)?, "State:")?.bytes().next()
    }

    /// Whether a thread of this process is blocked, and not running, runnable or stopped.
    pub fn is_blocked(tid: u32) -> Option<bool> {
        Self::state_of(tid).map(|state| matches!(state, b'S' | b'D'))
    }

    /// How often a thread of this process has been switched out since it started, also for the wait that it is in.
    pub fn switches_of(tid: u32) -> Option<u64> {
        let status = status_of(tid)?;
        // Blocked, and preempted.
        let counts = ["voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:"];
        Some(counts.iter().filter_map(|name| field(&status, name)?.parse::<u64>().ok()).sum())
    }
}

/// Whether a thread has the same seccomp filters as the calling thread, as far as their number shows.
pub(super) fn has_same_filters(tid: u32) -> bool {
    let filters_of = |tid| {
        let status = status_of(tid)?;
        Some(["Seccomp:", "Seccomp_filters:"].map(|name| field(&status, name).map(str::to_owned)))
    };
    filters_of(tid).is_some_and(|filters| filters_of(current_tid()) == Some(filters))
}

pub(super) fn blocks_signal(tid: u32, signal: libc::c_int) -> bool {
    let blocked = status_of(tid).and_then(|status| mask_in(&status, "SigBlk:"));
    blocked.is_some_and(|blocked| blocked & bit(signal) != 0)
}

fn status_of(tid: u32) -> Option<String> {
    // Its name can be any bytes.
    let status = fs::read(path(tid, "status").ok()?).ok()?;
    Some(String::from_utf8_lossy(&status).into_owned())
}

/// Parses `running`; or the number of the system call, its six arguments, the stack pointer and the program counter; or
/// -1, the stack pointer and the program counter of a thread that is blocked without a system call (by a page fault).
pub(super) fn parse(text: &str) -> Option<Blocked> {
    let mut words = text.split_ascii_whitespace();
    let number: i64 = words.next()?.parse().ok()?;
    let mut hex = words.map(|word| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok());
    if number == -1 {
        let (sp, pc) = (hex.next()??, hex.next()??);
        return Some(Blocked { call: Call::PageFault, sp, pc });
    }
    let mut arguments = [0; 6];
    for argument in &mut arguments {
        *argument = hex.next()??;
    }
    let (sp, pc) = (hex.next()??, hex.next()??);
    Some(Blocked { call: call(number, arguments), sp, pc })
}

fn call(number: i64, [first, second, ..]: [u64; 6]) -> Call {
    const FUTEX_COMMAND: u64 = 0x7f;
    let named = |name| Call::Named(name);
    match number {
        libc::SYS_futex => match (second & FUTEX_COMMAND) as i32 {
            libc::FUTEX_WAIT => Call::PlainFutex(first),
            libc::FUTEX_WAIT_BITSET | libc::FUTEX_LOCK_PI => Call::Futex(first),
            _ => named(&"futex"),
        },
        libc::SYS_nanosleep | libc::SYS_clock_nanosleep => named(&"sleep"),
        libc::SYS_epoll_pwait => named(&"epoll_wait"),
        libc::SYS_ppoll => named(&"poll"),
        libc::SYS_pselect6 => named(&"select"),
        libc::SYS_read | libc::SYS_readv | libc::SYS_pread64 | libc::SYS_preadv => named(&"read"),
        libc::SYS_write | libc::SYS_writev | libc::SYS_pwrite64 | libc::SYS_pwritev => {
            named(&"write")
        }
        libc::SYS_recvfrom | libc::SYS_recvmsg | libc::SYS_recvmmsg => named(&"recv"),
        libc::SYS_sendto | libc::SYS_sendmsg | libc::SYS_sendmmsg => named(&"send"),
        libc::SYS_connect => named(&"connect"),
        libc::SYS_accept | libc::SYS_accept4 => named(&"accept"),
        libc::SYS_wait4 | libc::SYS_waitid => named(&"wait for a process"),
        libc::SYS_fsync | libc::SYS_fdatasync | libc::SYS_msync | libc::SYS_sync_file_range => {
            named(&"sync to disk")
        }
        libc::SYS_openat => named(&"open"),
        libc::SYS_flock => named(&"file lock"),
        libc::SYS_io_uring_enter => named(&"io_uring"),
        libc::SYS_rt_sigtimedwait => named(&"sigwait"),
        libc::SYS_rt_sigsuspend => named(&"sigsuspend"),
        libc::SYS_clone | libc::SYS_clone3 => named(&"clone"),
        libc::SYS_mmap => named(&"mmap"),
        libc::SYS_munmap => named(&"munmap"),
        libc::SYS_mprotect => named(&"mprotect"),
        libc::SYS_madvise => named(&"madvise"),
        libc::SYS_close => named(&"close"),
        libc::SYS_fcntl => named(&"fcntl"),
        libc::SYS_statx | libc::SYS_newfstatat => named(&"stat"),
        libc::SYS_getdents64 => named(&"getdents"),
        libc::SYS_unlinkat => named(&"unlink"),
        libc::SYS_renameat | libc::SYS_renameat2 => named(&"rename"),
        libc::SYS_ftruncate => named(&"truncate"),
        libc::SYS_fallocate => named(&"fallocate"),
        libc::SYS_sendfile => named(&"sendfile"),
        #[cfg(target_arch = "x86_64")]
        number => call_of_old(number),
        #[cfg(not(target_arch = "x86_64"))]
        number => Call::Numbered(number),
    }
}

/// System calls that newer architectures do not have.
#[cfg(target_arch = "x86_64")]
fn call_of_old(number: i64) -> Call {
    match number {
        libc::SYS_epoll_wait => Call::Named(&"epoll_wait"),
        libc::SYS_poll => Call::Named(&"poll"),
        libc::SYS_select => Call::Named(&"select"),
        libc::SYS_open => Call::Named(&"open"),
        libc::SYS_pause => Call::Named(&"pause"),
        libc::SYS_vfork => Call::Named(&"vfork"),
        libc::SYS_stat | libc::SYS_lstat => Call::Named(&"stat"),
        libc::SYS_unlink => Call::Named(&"unlink"),
        libc::SYS_rename => Call::Named(&"rename"),
        _ => Call::Numbered(number),
    }
}

/// Copies up to `length` bytes of this process's memory from `address` on, as far as it is mapped.
pub fn read_own_stack(address: u64, length: usize, into: &mut Vec<u8>) -> io::Result<()> {
    into.clear();
    into.resize(length, 0);
    let read = match read_pages(address, into) {
        Ok(read) => read,
        // A container's filter may refuse the system call.
        Err(_) => File::open("/proc/self/mem")?.read_at(into, address)?,
    };
    into.truncate(read);
    Ok(())
}

/// The kernel copies each range completely or not at all, so each page is a separate range.
fn read_pages(address: u64, into: &mut [u8]) -> io::Result<usize> {
    const PAGE: u64 = 4096;
    let mut from = Vec::with_capacity(into.len() / PAGE as usize + 2);
    let (mut at, mut left) = (address, into.len() as u64);
    while left > 0 {
        let length = (PAGE - at % PAGE).min(left);
        from.push(libc::iovec { iov_base: at as *mut _, iov_len: length as usize });
        at = at.wrapping_add(length);
        left -= length;
    }
    read_by_system_call(&from, into)
}

/// The CPU time of a thread of this process, in nanoseconds; `None` if it has ended.
pub fn cpu_ns_of(tid: u32) -> Option<u64> {
    try_cpu_ns_of(tid).ok()
}

/// The CPU time of a thread of this process, in nanoseconds, or why it cannot be read.
pub(crate) fn try_cpu_ns_of(tid: u32) -> Result<u64, WhyRefused> {
    super::clock::read_cpu(cpu_clock_of(tid))
}

/// The id of a thread's CPU clock. `pthread_getcpuclockid` would need a `pthread_t` that is known to be alive.
pub(super) fn cpu_clock_of(tid: u32) -> i32 {
    const OF_A_THREAD: i32 = 4;
    const SCHEDULER_TIME: i32 = 2;
    !tid.cast_signed() << 3 | OF_A_THREAD | SCHEDULER_TIME
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicU32;

    use super::super::ring::{RingMemory, page_size};
    use super::*;

    #[test]
    fn parses_the_state_of_a_blocked_thread() {
        let arguments = "0x7f0012 0x189 0x0 0x0 0x0 0xffffffff 0x7ffe00 0x7fa1\n";
        let futex = format!("{} {arguments}", libc::SYS_futex);
        let expected = Blocked { call: Call::Futex(0x7f_0012), sp: 0x7f_fe00, pc: 0x7fa1 };
        assert_eq!(parse(&futex), Some(expected));
        let fault = parse("-1 0x7ffe00 0x55d0\n");
        assert_eq!(fault, Some(Blocked { call: Call::PageFault, sp: 0x7f_fe00, pc: 0x55d0 }));
        for nonsense in ["running\n", "", "7", "202 0x1", "x 0x1 0x2", "-1 0x1", "-1 1 2"] {
            assert_eq!(parse(nonsense), None, "{nonsense}");
        }
    }

    #[test]
    fn the_run_delay_is_the_second_number() {
        let of = |text| schedstat_in(text).map(|it| [it.cpu_ns, it.run_delay_ns, it.runs]);
        assert_eq!(of("92073496 3154133 64\n"), Some([92_073_496, 3_154_133, 64]));
        assert_eq!(of("0 0 1\n"), Some([0, 0, 1]));
        // A kernel that does not count, and what the kernel does not write.
        for text in ["0 0 0\n", "", "\n", "1 2\n", "1 2 3", "1 2 3 4\n", "1 -2 3\n", "a b c\n"] {
            assert_eq!(of(text), None, "{text:?}");
        }
        let own = Schedstat::open(current_tid()).and_then(|file| Schedstat::read(&file));
        println!("{own:?}");
        assert!(own.is_ok() || fs::metadata("/proc/thread-self/schedstat").is_err(), "{own:?}");
    }

    #[test]
    fn all_threads_are_listed_with_their_names_and_states() {
        for name in ["is listed", "State:\tS", "a\nb\\n"] {
            let listed = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
                let tid = current_tid();
                assert!(own_threads().unwrap().contains(&tid));
                assert_eq!(OsThread::of(tid).name(), name);
                assert_eq!(OsThread::state_of(tid), Some(b'R'));
                assert_eq!(OsThread::is_blocked(tid), Some(false));
            });
            listed.unwrap().join().unwrap();
        }
        assert_eq!(OsThread::state_of(u32::MAX >> 1), None);
    }

    #[test]
    fn finds_where_a_thread_is_blocked() {
        let ends = Arc::new(AtomicBool::new(false));
        let is_over = Arc::clone(&ends);
        let tid = Arc::new(AtomicU32::new(0));
        let own_tid = Arc::clone(&tid);
        let thread = std::thread::spawn(move || {
            // From here on it allocates nothing, so that it waits for no lock of the allocator.
            own_tid.store(current_tid(), Ordering::Release);
            while !is_over.load(Ordering::Acquire) {
                std::thread::park();
            }
        });
        let tid = loop {
            match tid.load(Ordering::Acquire) {
                0 => std::thread::yield_now(),
                tid => break tid,
            }
        };
        let sp = loop {
            let found = Blocked::of(tid).unwrap();
            if let Some(Blocked { call: Call::Futex(_) | Call::PlainFutex(_), sp, .. }) = found {
                break sp;
            }
            std::thread::yield_now();
        };
        let mut stack = Vec::new();
        read_own_stack(sp, 256, &mut stack).unwrap();
        assert_eq!(stack.len(), 256);
        let before = cpu_ns_of(tid).unwrap();
        assert_eq!(cpu_ns_of(tid), Some(before), "it does not run");
        assert_eq!(OsThread::is_blocked(tid), Some(true));
        ends.store(true, Ordering::Release);
        thread.thread().unpark();
        thread.join().unwrap();
    }

    #[test]
    fn a_stack_is_read_up_to_the_first_page_that_is_not_mapped() {
        // Another mapping may follow a real stack; a guard page follows this memory.
        let memory = RingMemory::anonymous(8192).unwrap();
        let header = std::ptr::from_ref(memory.head_word()).addr() as u64;
        let data = header.next_multiple_of(page_size() as u64);
        let mapped = usize::try_from(data - header).unwrap() + memory.data_size();
        let mut stack = Vec::new();
        for length in [mapped - 1, mapped, mapped + 1, mapped + (1 << 20)] {
            read_own_stack(header, length, &mut stack).unwrap();
            assert_eq!(stack.len(), length.min(mapped));
        }
        assert!(read_own_stack(0, 64, &mut stack).is_err() || stack.is_empty());
    }
}
