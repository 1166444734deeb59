//! Systems without perf events: times only, no stacks.
//!
//! Exports the same names as `linux`, so that the modules above compile and run on any system. Whatever needs the
//! kernel is refused with [`WhyRefused::OtherSystem`].
#![allow(unsafe_code, reason = "copies bytes that may belong to any object")]

use std::fs::File;
use std::io;
use std::ops::{Deref, Range};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::types::{
    Blocked, Call, FileIdentity, FilteredSyscall, MappedFile, ModuleList, ModuleLoads, OsThread,
    SampleRequest, Schedstat, ThreadStack, WhyRefused,
};
use crate::sys::{Forks, Waker};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TickSource {
    Raw,
}

impl TickSource {
    pub fn needs_rate(self) -> bool {
        false
    }
}

#[inline(always)]
pub fn read_ticks(_: TickSource) -> u64 {
    monotonic_raw_ns()
}

/// Nanoseconds since the first call.
pub fn monotonic_raw_ns() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    u64::try_from(START.get_or_init(Instant::now).elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// Where all sleep, in place of a futex.
static SLEEPING: (Mutex<()>, Condvar) = (Mutex::new(()), Condvar::new());

pub fn futex_wait(word: &AtomicU32, before: u32, most: Option<Duration>) {
    let (lock, woken) = &SLEEPING;
    let mut held = lock.lock();
    if word.load(Ordering::SeqCst) == before {
        match most {
            Some(most) => _ = woken.wait_for(&mut held, most),
            None => woken.wait(&mut held),
        }
    }
}

pub fn futex_wake(_: &AtomicU32) {
    let (lock, woken) = &SLEEPING;
    // A thread that has read the word sleeps by then.
    drop(lock.lock());
    woken.notify_all();
}

pub fn current_tid() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    thread_local! {
        static TID: u32 = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    TID.try_with(|tid| *tid).unwrap_or(0)
}

pub fn with_signals_blocked<R>(action: impl FnOnce() -> R) -> R {
    action()
}

/// # Safety
///
/// As for `std::ptr::copy_nonoverlapping`.
pub unsafe fn copy_any(from: *const u8, to: *mut u8, length: usize) {
    // SAFETY: the caller's.
    unsafe { std::ptr::copy_nonoverlapping(from, to, length) }
}

pub fn map_memory(bytes: usize) -> Option<NonNull<u8>> {
    let mut memory = Vec::new();
    memory.try_reserve_exact(bytes).ok()?;
    memory.resize(bytes, 0_u8);
    NonNull::new(Box::leak(memory.into_boxed_slice()).as_mut_ptr())
}

/// # Safety
///
/// As on Linux.
pub unsafe fn unmap_memory(start: NonNull<u8>, bytes: usize) {
    // SAFETY: the caller's, and it was leaked with that length.
    drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(start.as_ptr(), bytes)) });
}

fn refused<T>() -> Result<T, WhyRefused> {
    Err(WhyRefused::OtherSystem)
}

fn unsupported<T>() -> io::Result<T> {
    Err(io::ErrorKind::Unsupported.into())
}

macro_rules! stubs {
    ($($(#[$meta:meta])* fn $name:ident($($argument:tt: $type:ty),*) $(-> $result:ty)? = $value:expr;)*) => {
        $($(#[$meta])* pub fn $name($($argument: $type),*) $(-> $result)? { $value })*
    };
}

stubs! {
    /// Unknown here, so the CPU times of spans are unknown.
    fn thread_cpu_ns() -> Option<u64> = None;
    fn process_cpu_ns() -> Option<u64> = None;
    fn current_pid() -> u32 = std::process::id();
    fn cpu_ns_of(_: u32) -> Option<u64> = None;
    fn try_thread_cpu_ns() -> Result<u64, WhyRefused> = refused();
    fn try_cpu_ns_of(_: u32) -> Result<u64, WhyRefused> = refused();
    fn try_thread_usage() -> Result<crate::sys::Usage, WhyRefused> = refused();
    fn tick_ns() -> Option<u64> = None;
    fn open_file_limit() -> u64 = 0;
    fn pending_signal_limit() -> u64 = u64::MAX;
    fn locked_memory_limit() -> Option<u64> = None;
    fn bytes_of_ring(_: usize) -> u64 = 0;
    fn is_own_thread(_: u32) -> bool = false;
    fn address_space_left() -> Option<u64> = None;
    fn stack_bounds() -> Option<Range<u64>> = None;
    fn thread_stack() -> Option<ThreadStack> = None;
    /// There are no seccomp filters here.
    fn read_filters() = ();
    fn unblock_timers(_: Option<i32>) = ();
    fn block_timers(_: Option<i32>) = ();
    fn take_signals_without_room() -> u64 = 0;
    fn signal_of_timers(_: Option<i32>) -> Result<i32, WhyRefused> = refused();
    fn note_claimed_signals() = ();
    fn is_traced() -> bool = false;
    fn is_in_time_namespace() -> bool = false;
    fn has_small_signal_stack() -> bool = false;
    fn open_sample_ring(_: SampleRequest, _: u32) -> Result<PerfRing, WhyRefused> = refused();
    fn open_switch_ring(_: usize, _: u32) -> Result<PerfRing, WhyRefused> = refused();
    fn open_timer_ring(_: SampleRequest, _: u32, _: ThreadStack, _: &Waker) -> Result<TimerRing, WhyRefused> = refused();
    fn probe_timers(_: SampleRequest, _: u32) -> Result<(), WhyRefused> = refused();
    fn own_threads() -> io::Result<Vec<u32>> = unsupported();
    fn read_own_stack(_: u64, _: usize, _: &mut Vec<u8>) -> io::Result<()> = unsupported();
    fn read_own_memory(_: Range<u64>) -> io::Result<Vec<u8>> = unsupported();
    fn program_memory(_: Range<u64>) -> Option<&'static [u8]> = None;
    fn mappings(_: bool) -> io::Result<Vec<Range<u64>>> = unsupported();
    fn program_path() -> Option<PathBuf> = None;
    fn module_loads() -> ModuleLoads = ModuleLoads::default();
    fn address_in_libc() -> u64 = 0;
    fn loaded_modules(_: bool) -> ModuleList =
        ModuleList {
            loads: ModuleLoads::default(), modules: Vec::new(), listed: 0, has_files: true
        };
    fn path_of_open(_: &File, _: usize) -> PathBuf = PathBuf::new();
    fn open_keep_alive() -> Result<PerfEvent, WhyRefused> = refused();
    fn memory_file() -> io::Result<File> = unsupported();
    fn tick_source() -> TickSource = TickSource::Raw;
    fn current_thread() -> OsThread = OsThread::new(current_tid(), b"");
    /// No module is known here whose file could be opened.
    fn open_without_waiting(path: &Path) -> io::Result<File> = File::open(path);
    #[cfg(test)]
    fn open_switch_registers(_: usize) -> Result<PerfRing, WhyRefused> = refused();
}

/// As `stubs`, of types.
macro_rules! associated {
    ($($of:ident: fn $name:ident($($argument:tt: $type:ty),*) $(-> $result:ty)? = $value:expr;)*) => {
        $(#[allow(clippy::needless_arbitrary_self_type, reason = "the macro needs types")]
        impl $of { pub fn $name($($argument: $type),*) $(-> $result)? { $value } })*
    };
}

associated! {
    Forks: fn on_each(_: fn()) = ();
    Forks: fn watch() = ();
    OsThread: fn of(_: u32) -> Self = Self::new(0, b"");
    OsThread: fn state_of(_: u32) -> Option<u8> = None;
    OsThread: fn is_blocked(_: u32) -> Option<bool> = None;
    OsThread: fn switches_of(_: u32) -> Option<u64> = None;
    Blocked: fn of(_: u32) -> io::Result<Option<Self>> = unsupported();
    Call: fn lock_owner(self: Self) -> Option<u32> = None;
    Schedstat: fn open(_: u32) -> io::Result<KernelFile> = unsupported();
    Schedstat: fn read(_: &KernelFile) -> io::Result<Self> = unsupported();
    FilteredSyscall: fn forbidden() -> std::iter::Empty<Self> = std::iter::empty();
    MappedFile: fn now(_: FileIdentity) -> io::Result<Option<(Self, PathBuf)>> = unsupported();
    MappedFile: fn is_mapped_as(_: &File, _: FileIdentity) -> bool = false;
}

impl Forks {
    pub fn log_between(log: impl FnOnce()) {
        log();
    }
}

/// What the kernel would give. There are no values of it, so its methods are never called.
#[derive(Debug)]
pub enum Absent {}

/// As [`Absent`].
#[derive(Debug)]
pub enum RingMemory {}

pub use Absent as PerfEvent;
pub use Absent as KernelFile;
pub use Absent as PerfRing;
pub use Absent as TimerRing;

macro_rules! methods {
    ($($(#[$meta:meta])* $of:ident: fn $name:ident($($_argument:tt: $type:ty),*) $(-> $result:ty)?;)*) => {$(
        impl $of {
            $(#[$meta])*
            pub fn $name(&self, $(_: $type),*) $(-> $result)? {
                match *self {}
            }
        }
    )*};
}

methods! {
    RingMemory: fn data_size() -> usize;
    RingMemory: fn head() -> u64;
    RingMemory: fn tail() -> u64;
    RingMemory: fn release_to(_: u64);
    RingMemory: fn word(_: u64) -> u64;
    #[cfg(any(test, feature = "_test"))]
    RingMemory: fn write_scripted(_: &[u64]) -> bool;
    Absent: fn head_word() -> &AtomicU64;
    Absent: fn position_word() -> &AtomicU64;
    Absent: fn has_lost_signal() -> bool;
    Absent: fn start() -> Result<(), WhyRefused>;
    Absent: fn pause();
    Absent: fn stop();
    Absent: fn retire();
    #[cfg(any(test, feature = "_test"))]
    Absent: fn sample_scripted(_: &[u64]) -> bool;
    Absent: fn read() -> Option<[u64; 3]>;
    Absent: fn text(_: &mut [u8]) -> io::Result<&str>;
}

/// Rings have the methods of their memory.
impl Deref for Absent {
    type Target = RingMemory;

    fn deref(&self) -> &RingMemory {
        match *self {}
    }
}

impl Absent {
    stubs! {
        fn open() -> Result<Self, WhyRefused> = refused();
        fn open_at(_: &Path) -> io::Result<Self> = unsupported();
        #[cfg(any(test, feature = "_test"))]
        fn scripted(_: usize) -> io::Result<Self> = unsupported();
    }
}

/// No known program on these systems closes files that it does not own.
#[derive(Debug)]
pub struct Files;

impl Files {
    #[expect(clippy::unnecessary_wraps, reason = "the same signature as on Linux")]
    pub fn new() -> io::Result<Self> {
        Ok(Self)
    }

    #[expect(clippy::unused_self, reason = "the same signature as on Linux")]
    pub fn still_owned(&self) -> bool {
        true
    }
}

/// Opens the regular file at that path for reading, if there is one. Does not follow a link.
pub fn open_regular(path: &Path) -> io::Result<Option<File>> {
    let is_file = match std::fs::symlink_metadata(path) {
        Ok(metadata) => metadata.is_file(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => false,
        Err(error) => return Err(error),
    };
    is_file.then(|| File::open(path)).transpose()
}

#[cfg(any(test, feature = "_test"))]
impl crate::sys::SampleRing {
    pub fn scripted(_: usize, _: u64) -> io::Result<Self> {
        unsupported()
    }
}
