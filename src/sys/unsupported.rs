//! Systems without perf events: times only, no stacks.
//!
//! Exports the same names as `linux`, so that the modules above compile and run on any system. Whatever needs the
//! kernel is refused with [`WhyRefused::OtherSystem`].
#![allow(unsafe_code, reason = "copies bytes that may belong to any object")]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::convert::Infallible;
use std::fs::File;
use std::io;
use std::ops::{Deref, Range};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::types::{
    Blocked, Call, FileIdentity, FilteredSyscall, Load, MappedFile, ModuleList, ModuleLoads,
    OsThread, SampleRequest, Schedstat, ThreadStack, WhyRefused,
};
use crate::facts::ThrottlingUnknown;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TickSource {
    Raw,
}

impl TickSource {
    pub(crate) fn needs_rate(self) -> bool {
        false
    }
}

#[inline(always)]
pub(crate) fn read_ticks(_: TickSource) -> u64 {
    monotonic_raw_ns()
}

/// Nanoseconds since the first call.
pub(crate) fn monotonic_raw_ns() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    u64::try_from(START.get_or_init(Instant::now).elapsed().as_nanos()).unwrap_or(u64::MAX)
}

pub(crate) fn log_between_forks(log: impl FnOnce()) {
    log();
}

pub(crate) fn current_thread() -> OsThread {
    OsThread::new(current_tid(), b"")
}

pub(crate) fn current_tid() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    thread_local! {
        static TID: u32 = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    TID.try_with(|tid| *tid).unwrap_or(0)
}

pub(crate) fn process_id() -> u32 {
    std::process::id()
}

pub(crate) fn with_signals_blocked<R>(action: impl FnOnce() -> R) -> R {
    action()
}

/// # Safety
///
/// As for `std::ptr::copy_nonoverlapping`.
pub(crate) unsafe fn copy_any(from: *const u8, to: *mut u8, length: usize) {
    // SAFETY: the caller's.
    unsafe { std::ptr::copy_nonoverlapping(from, to, length) }
}

fn layout(bytes: usize) -> Option<Layout> {
    Layout::from_size_align(bytes, 4_096).ok().filter(|_| bytes > 0)
}

pub(crate) fn map_memory(bytes: usize) -> Option<NonNull<u8>> {
    // SAFETY: the layout is not empty.
    NonNull::new(unsafe { alloc_zeroed(layout(bytes)?) })
}

/// # Safety
///
/// As on Linux.
pub(crate) unsafe fn unmap_memory(start: NonNull<u8>, bytes: usize) {
    if let Some(layout) = layout(bytes) {
        // SAFETY: the layout with which it was allocated.
        unsafe { dealloc(start.as_ptr(), layout) };
    }
}

#[cfg(fuzzing)]
pub(crate) fn read_proc_texts(_text: &str) -> (bool, bool) {
    (false, false)
}

pub(crate) fn forbidden_calls() -> impl Iterator<Item = FilteredSyscall> {
    std::iter::empty()
}

fn refused<T>() -> Result<T, WhyRefused> {
    Err(WhyRefused::OtherSystem)
}

fn unsupported<T>() -> io::Result<T> {
    Err(io::ErrorKind::Unsupported.into())
}

/// No mutex is known to have an owner.
pub(crate) fn owner_of_lock(_call: Call) -> Option<u32> {
    None
}

/// Declares functions that do nothing, with the values they return.
macro_rules! stubs {
    ($($(#[$meta:meta])* fn $name:ident($(_: $type:ty),*) $(-> $result:ty)? = $value:expr;)*) => {
        $($(#[$meta])* pub(crate) fn $name($(_: $type),*) $(-> $result)? { $value })*
    };
}

stubs! {
    fn on_fork(_: fn()) = ();
    fn host_name() -> Option<String> = None;
    fn kernel_release() -> Option<String> = None;
    fn cpu_model() -> Option<String> = None;
    fn memory_limit() -> Option<u64> = None;
    fn load() -> Load = Load::default();
    fn has_ended(_: u32) -> bool = false;
    /// Unknown here, so the CPU times of spans are unknown.
    fn thread_cpu_ns() -> Option<u64> = None;
    fn process_cpu_ns() -> Option<u64> = None;
    fn own_thread(_: u32) -> OsThread = OsThread::new(0, b"");
    fn cpu_ns_of(_: u32) -> Option<u64> = None;
    fn try_thread_cpu_ns() -> Result<u64, WhyRefused> = refused();
    fn try_cpu_ns_of(_: u32) -> Result<u64, WhyRefused> = refused();
    fn try_thread_usage() -> Result<crate::facts::Usage, WhyRefused> = refused();
    fn tick_ns() -> Option<u64> = None;
    fn time_namespace_offset_ns() -> Option<i64> = None;
    fn open_file_limit() -> u64 = 0;
    fn pending_signal_limit() -> u64 = u64::MAX;
    fn locked_memory_limit() -> Option<u64> = None;
    fn bytes_of_ring(_: usize) -> u64 = 0;
    fn is_own_thread(_: u32) -> bool = false;
    fn address_space_left() -> Option<u64> = None;
    fn memory_left() -> Option<u64> = None;
    fn stack_bounds() -> Option<Range<u64>> = None;
    fn thread_stack() -> Option<ThreadStack> = None;
    /// There are no seccomp filters here.
    fn read_filters() = ();
    fn unblock_timers(_: Option<i32>) -> Result<(), WhyRefused> = refused();
    fn block_timers(_: Option<i32>) = ();
    fn take_signals_without_room() -> u64 = 0;
    fn signal_of_timers(_: Option<i32>) -> Result<i32, WhyRefused> = refused();
    fn note_claimed_signals() = ();
    fn is_traced() -> bool = false;
    fn has_small_signal_stack() -> bool = false;
    fn open_sample_ring(_: SampleRequest, _: u32) -> Result<PerfRing, WhyRefused> = refused();
    fn open_switch_ring(_: usize, _: u32, _: i64) -> Result<PerfRing, WhyRefused> = refused();
    fn open_timer_ring(_: SampleRequest, _: u32, _: ThreadStack, _: &Waker) -> Result<TimerRing, WhyRefused> = refused();
    fn probe_timers(_: SampleRequest, _: u32) -> Result<(), WhyRefused> = refused();
    fn blocked(_: u32) -> io::Result<Option<Blocked>> = unsupported();
    fn own_threads() -> io::Result<Vec<u32>> = unsupported();
    fn thread_and_state(_: u32) -> io::Result<(OsThread, u8)> = unsupported();
    fn user_ns_of(_: u32) -> Option<u64> = None;
    fn open_schedstat(_: u32) -> io::Result<KernelFile> = unsupported();
    fn schedstat(_: &KernelFile) -> io::Result<Schedstat> = unsupported();
    fn control_groups_of(_: u32) -> io::Result<String> = unsupported();
    fn cpu_group_in(_: &str) -> Option<(bool, &str)> = None;
    fn is_blocked(_: u32) -> Option<bool> = None;
    fn switches_of(_: u32) -> Option<u64> = None;
    fn read_own_stack(_: u64, _: usize, _: &mut Vec<u8>) -> io::Result<()> = unsupported();
    fn read_own_memory(_: Range<u64>) -> io::Result<Vec<u8>> = unsupported();
    fn program_memory(_: Range<u64>) -> Option<&'static [u8]> = None;
    fn mappings() -> io::Result<Vec<Range<u64>>> = unsupported();
    fn executable_mappings() -> io::Result<Vec<Range<u64>>> = unsupported();
    fn is_mapped_as(_: &File, _: FileIdentity) -> bool = false;
    fn mapped_now(_: FileIdentity) -> io::Result<Option<(MappedFile, PathBuf)>> = unsupported();
    fn program_path() -> Option<PathBuf> = None;
    fn module_loads() -> ModuleLoads = ModuleLoads::default();
    fn address_in_libc() -> u64 = 0;
    fn loaded_modules(_: bool) -> ModuleList =
        ModuleList {
            loads: ModuleLoads::default(), modules: Vec::new(), listed: 0, has_files: true
        };
    fn kernel_symbols() -> io::Result<io::Empty> = unsupported();
    fn path_of_open(_: &File, _: usize) -> PathBuf = PathBuf::new();
    fn memory_file() -> io::Result<File> = unsupported();
    fn tick_source() -> TickSource = TickSource::Raw;
}

/// Declares types without values, whose methods are never called.
macro_rules! absent {
    ($(#[$of_type:meta])* $name:ident {
        $($(#[$of_method:meta])* fn $method:ident($($argument:ident: $type:ty),*) $(-> $result:ty)?;)*
    }) => {
        $(#[$of_type])*
        #[derive(Debug)]
        pub(crate) struct $name(Infallible);

        impl $name {
            $($(#[$of_method])* pub(crate) fn $method(&self, $($argument: $type),*) $(-> $result)? {
                match self.0 {}
            })*
        }
    };
}

absent!(RingMemory {
    fn data_size() -> usize;
    fn head() -> u64;
    fn tail() -> u64;
    fn release_to(_position: u64);
    fn copy(_position: u64, _out: &mut [u8]);
    fn own_time(_recorded_ns: u64) -> u64;
    #[cfg(test)]
    fn write_scripted(_words: &[u64]) -> bool;
});

absent!(PerfRing {
    fn head_word() -> &AtomicU64;
    fn has_kernel_chains() -> bool;
    fn start() -> Result<(), WhyRefused>;
    fn pause();
    fn retire();
});

absent!(TimerRing {
    fn position_word() -> &AtomicU64;
    fn has_lost_signal() -> bool;
    fn start() -> Result<(), WhyRefused>;
    fn pause();
    fn stop();
    fn retire();
    #[cfg(test)]
    fn sample_scripted(_words: &[u64]) -> bool;
});

impl Deref for PerfRing {
    type Target = RingMemory;

    fn deref(&self) -> &RingMemory {
        match self.0 {}
    }
}

impl Deref for TimerRing {
    type Target = RingMemory;

    fn deref(&self) -> &RingMemory {
        match self.0 {}
    }
}

/// Rings that a test writes to are not available either.
#[cfg(test)]
impl PerfRing {
    pub(crate) fn scripted(_data_size: usize) -> io::Result<Self> {
        unsupported()
    }
}

#[cfg(test)]
impl TimerRing {
    pub(crate) fn scripted(_data_size: usize, _step: u64) -> io::Result<Self> {
        unsupported()
    }
}

absent!(KeptOn {});

impl KeptOn {
    pub(crate) fn open() -> Result<Self, WhyRefused> {
        refused()
    }
}

#[cfg(test)]
pub(crate) fn open_switch_registers(_ring_bytes: usize) -> Result<PerfRing, WhyRefused> {
    Err(WhyRefused::OtherSystem)
}

absent!(HardwareCounters {
    fn read() -> io::Result<[u64; Self::WORDS]>;
});

impl HardwareCounters {
    pub(crate) const WORDS: usize = 3 + 2 * 4;

    pub(crate) fn open() -> io::Result<Self> {
        unsupported()
    }

    #[cfg(test)]
    pub(crate) fn open_software() -> io::Result<Self> {
        Self::open()
    }
}

/// No known program on these systems closes files that it does not own.
#[derive(Debug)]
pub(crate) struct Files;

impl Files {
    #[expect(clippy::unused_self, reason = "the same signature as on Linux")]
    pub(crate) fn still_owned(&self) -> bool {
        true
    }
}

/// There are none here.
#[derive(Debug)]
pub(crate) enum KernelFile {}

/// There are none here.
#[derive(Debug)]
pub(crate) enum ControlGroup {}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GroupTexts {
    pub(crate) groups: String,
}

impl GroupTexts {
    pub(crate) fn read() -> Result<Self, ThrottlingUnknown> {
        Err(ThrottlingUnknown::OtherSystem)
    }
}

impl ControlGroup {
    pub(crate) fn find(_: &GroupTexts) -> Result<Self, ThrottlingUnknown> {
        Err(ThrottlingUnknown::OtherSystem)
    }

    pub(crate) fn throttled_ns(&self) -> Option<u64> {
        match *self {}
    }

    pub(crate) fn is_same(&self, _: &Self) -> bool {
        match *self {}
    }
}

#[derive(Debug)]
pub(crate) struct Poller(Arc<(Mutex<bool>, Condvar)>, Arc<Files>);

#[derive(Clone, Debug)]
pub(crate) struct Waker(Arc<(Mutex<bool>, Condvar)>);

impl Poller {
    #[expect(clippy::unnecessary_wraps, reason = "the same signature as on Linux")]
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(Arc::new((Mutex::new(false), Condvar::new())), Arc::new(Files)))
    }

    pub(crate) fn waker(&self) -> Waker {
        Waker(Arc::clone(&self.0))
    }

    pub(crate) fn files(&self) -> &Arc<Files> {
        &self.1
    }

    pub(crate) fn wait(&self, timeout: Option<Duration>) -> bool {
        let (woken, condition) = &*self.0;
        let mut woken = woken.lock();
        if !*woken {
            match timeout {
                Some(time) => _ = condition.wait_for(&mut woken, time),
                None => condition.wait(&mut woken),
            }
        }
        std::mem::take(&mut *woken)
    }
}

impl Waker {
    pub(crate) fn wake(&self) {
        let (woken, condition) = &*self.0;
        *woken.lock() = true;
        condition.notify_one();
    }

    pub(crate) fn wake_soon(&self) {
        self.wake();
    }
}

/// Creates a file that only its owner can read, where files have modes.
pub(crate) fn create_private_file(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.write(true).create_new(true).open(path)
}

/// Whether files can be created in this directory, according to its mode.
pub(crate) fn check_writable(directory: &Path) -> io::Result<()> {
    let metadata = std::fs::metadata(directory)?;
    if !metadata.is_dir() {
        return Err(io::ErrorKind::NotADirectory.into());
    }
    if metadata.permissions().readonly() {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    Ok(())
}

pub(crate) fn create_private_directory(path: &Path) -> io::Result<()> {
    std::fs::create_dir_all(path)
}

/// No module is known here whose file could be opened.
pub(crate) fn open_without_waiting(path: &Path) -> io::Result<File> {
    File::open(path)
}

/// Opens the regular file at that path for reading, if there is one. Does not follow a link.
pub(crate) fn open_regular(path: &Path) -> io::Result<Option<File>> {
    let is_file = match std::fs::symlink_metadata(path) {
        Ok(metadata) => metadata.is_file(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => false,
        Err(error) => return Err(error),
    };
    is_file.then(|| File::open(path)).transpose()
}
