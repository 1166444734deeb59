//! Types that both platforms use.

use std::io;
use std::num::NonZeroU64;
use std::ops::Range;
use std::path::PathBuf;

/// The program's own number of what a thread does, for instance of a span. Samples have that of their moment.
pub type Tag = NonZeroU64;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SampleRequest {
    pub period_ns: u64,
    /// Bytes of stack in each sample, a multiple of 8 and at most 65,448.
    pub stack_bytes: u32,
    /// Bytes of ring: a power of two of pages.
    pub ring_bytes: usize,
    /// Also take a sample when the thread is in the kernel.
    pub in_kernel: bool,
    /// The step by which a timer's sample moves the position that hooks read.
    pub position_step: u64,
    /// The signal that a timer must send; `None` to choose one.
    pub signal: Option<i32>,
}

/// The bounds of a stack that are not known. A timer's handler then finds out how much of it is mapped.
pub(crate) const ANY_STACK: Range<u64> = 0..u64::MAX;

/// The most bytes of a stack that are copied for a sample: what fits into one perf record.
pub const MAX_STACK_COPIED: u32 = 65_448;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThreadStack {
    pub(crate) bounds: Range<u64>,
    /// The address of its `errno`, by which a signal handler recognizes the thread without a system call.
    pub(crate) errno_at: u64,
}

impl ThreadStack {
    pub(crate) const ANY: Self = Self { bounds: ANY_STACK, errno_at: 0 };
}

/// The names of this crate's threads, after `profiling-`, as the kernel cuts them. Others may have similar ones.
const OF_LAYER: [&str; 8] = ["drain", "expor", "http", "kept", "log", "otlp", "rules", "symbo"];

/// A thread, and its name for the system.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OsThread {
    pub tid: u32,
    /// Padded with zeros. The kernel stores 15 bytes.
    name: [u8; 16],
}

impl OsThread {
    pub fn new(tid: u32, name: &[u8]) -> Self {
        let mut padded = [0; 16];
        padded.iter_mut().zip(name).for_each(|(to, from)| *to = *from);
        Self { tid, name: padded }
    }

    /// The two halves of the name, padded with zeros.
    pub fn halves_of_name(&self) -> [[u8; 8]; 2] {
        let (halves, _) = self.name.as_chunks();
        std::array::from_fn(|half| halves.get(half).copied().unwrap_or_default())
    }

    /// Whether it is one of this crate, by its name.
    pub fn is_of_layer(&self) -> bool {
        self.name().strip_prefix("profiling-").is_some_and(|name| OF_LAYER.contains(&name))
    }

    pub fn has_name(&self) -> bool {
        self.name != [0; 16]
    }

    /// The name of the thread, which can be cut within a character.
    pub fn name(&self) -> String {
        let name = self.name.split(|byte| *byte == 0).next().unwrap_or_default();
        String::from_utf8_lossy(name).into_owned()
    }
}

/// Why an event, a timer or a ring could not be created, by what a user can do about it. Numbers are errnos.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(dead_code, reason = "each platform uses some of them")]
pub enum WhyRefused {
    /// By `perf_event_paranoid`, a seccomp filter or a security module.
    #[error(
        "perf_event_open is refused ({}); allow it on the host with `sysctl kernel.perf_event_paranoid=2`, in a \
         container with the capability PERFMON (`docker run --cap-add PERFMON`)", error(.0)
    )]
    NotAllowed(i32),
    #[error("this kernel has no perf events (perf_event_open: {})", error(.0))]
    NotSupported(i32),
    /// Or it does not do what it is used for.
    #[error("{} is refused: {}", .0.with_requests(), error(.1))]
    Failed(FilteredSyscall, i32),
    #[error("the limit on open files is reached")]
    NoFiles,
    #[error("the limit of locked memory is reached")]
    NoLockedMemory,
    /// No memory or no address space.
    #[error("out of memory")]
    NoMemory,
    #[error(
        "the limit of pending signals is reached (`ulimit -i`, now {}); each timer takes one, and all of them at most \
         an eighth: raise it to eight times the number of threads",
        super::platform::pending_signal_limit()
    )]
    NoTimers,
    #[error("the signal stacks of threads are too small")]
    SmallSignalStack,
    #[error(
        "no signal is free, or not the one of TRACING_PROFILING_SIGNAL: it must be a real-time signal or SIGPROF, and \
         have no handler"
    )]
    NoSignal,
    #[error("the thread blocks the signal of timers")]
    SignalBlocked,
    /// A debugger would stop at each signal.
    #[error("a debugger is attached")]
    Traced,
    #[error("the bounds of the thread's stack are not known (is /proc mounted?)")]
    NoStack,
    #[error("{}", error(.0))]
    Other(i32),
    #[error("perf has another clock than this time namespace")]
    TimeNamespace,
    /// Disabled by the settings.
    #[error("it was not requested")]
    NotAsked,
    #[error("the thread has ended")]
    Ended,
    #[error(
        "the seccomp filter of this process kills it at a system call for that, which is therefore not made; allow it \
         (`SystemCallFilter=` of systemd)"
    )]
    KilledBySeccomp,
    /// The system does not have it at all.
    #[error("this system has no such timers")]
    OtherSystem,
}

fn error(errno: &i32) -> io::Error {
    match errno {
        0 => io::Error::other("for an unexpected reason"),
        errno => io::Error::from_raw_os_error(*errno),
    }
}

impl WhyRefused {
    /// Whether the refusal is permanent and applies to all threads.
    pub(crate) fn is_permanent(self) -> bool {
        matches!(
            self,
            Self::NotAllowed(_)
                | Self::NotSupported(_)
                | Self::Failed(..)
                | Self::KilledBySeccomp
                | Self::TimeNamespace
                | Self::OtherSystem
                | Self::NoSignal
        )
    }
}

macro_rules! filtered_syscalls {
    ($($(#[doc = $doc:literal])* $call:ident $name:literal)+) => {
        /// System calls that an ordinary service does not need, so a seccomp filter may kill the process for making them.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(dead_code, reason = "only Linux has such filters")]
        pub enum FilteredSyscall {
            $($(#[doc = $doc])* $call,)+
        }

        impl FilteredSyscall {
            #[allow(dead_code, reason = "only Linux has such filters")]
            pub(crate) const ALL: &[Self] = &[$(Self::$call),+];

            /// The name that filters use.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$call => $name,)+
                }
            }

            fn with_requests(self) -> &'static str {
                match self {
                    Self::PerfEventOpen => "perf_event_open, or an ioctl of its events,",
                    call => call.name(),
                }
            }
        }
    };
}

filtered_syscalls! {
    /// Including the `ioctl`s of its events.
    PerfEventOpen "perf_event_open"
    TimerCreate "timer_create"
    TimerSettime "timer_settime"
    TimerDelete "timer_delete"
    ProcessVmReadv "process_vm_readv"
    /// The CPU clock of a thread: other clocks are read without a system call.
    ClockGettime "clock_gettime"
    Getrusage "getrusage"
    /// Including the size of the file.
    MemfdCreate "memfd_create"
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocked {
    pub call: Call,
    /// Of its user code; no other register is known.
    pub sp: u64,
    pub pc: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(dead_code, reason = "only Linux reports it")]
pub enum Call {
    /// A lock or a condition variable, by its address.
    Futex(u64),
    /// A lock, by its address, with the futex command that the locks of glibc use, and not those of std.
    PlainFutex(u64),
    /// A reference to the name, so that this is 16 bytes.
    Named(&'static &'static str),
    /// Another system call, by its number.
    Numbered(i64),
    /// No system call: a page fault that reads from disk.
    PageFault,
}

/// The program or a shared library, as it is in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LoadedModule {
    /// The file that the kernel has mapped at its code.
    pub(crate) file: Result<MappedFile, NoFile>,
    /// What the loader calls it, which can be anything: relative to a former directory, or the name of another file.
    pub(crate) loader_name: PathBuf,
    pub(crate) is_vdso: bool,
    /// The offset from the file's addresses to those in memory.
    pub(crate) bias: u64,
    /// What holds code.
    pub(crate) code: Vec<MappedPart>,
    /// Everything that it has mapped.
    pub(crate) loaded: Vec<MappedPart>,
    /// Addresses in memory of the read-only part of `loaded`.
    pub(crate) read_only: Vec<Range<u64>>,
    /// Of `.eh_frame_hdr`.
    pub(crate) eh_frame_hdr: Option<MappedPart>,
    /// Addresses in memory of the notes, which include the build id.
    pub(crate) notes: Vec<Range<u64>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MappedPart {
    pub(crate) addresses: Range<u64>,
    pub(crate) file_offset: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ModuleLoads {
    pub(crate) loaded: u64,
    pub(crate) unloaded: u64,
}

#[derive(Debug)]
pub(crate) struct ModuleList {
    pub(crate) loads: ModuleLoads,
    pub(crate) modules: Vec<LoadedModule>,
    /// How many of them the loader lists. These are the first, in the order in which they were loaded.
    pub(crate) listed: usize,
    pub(crate) has_files: bool,
}

/// A file as the kernel shows it where it is mapped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MappedFile {
    /// The path of the file, or its last one if it was deleted.
    pub path: PathBuf,
    pub is_deleted: bool,
    pub identity: FileIdentity,
}

/// Why the file of a module is not known.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(dead_code, reason = "only Linux has modules")]
pub enum NoFile {
    /// The mappings were not read, since that took too long shortly before.
    NotRead,
    Unreadable(String),
    /// The memory of the module comes from no file.
    NotMapped,
}

/// The identity of a file, independent of its name, as the kernel shows it in mappings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileIdentity {
    pub(crate) device: u64,
    pub(crate) inode: u64,
}

/// What the scheduler counts for a thread, since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Schedstat {
    /// Up to the last tick or switch.
    pub(crate) cpu_ns: u64,
    /// For how long it could have run and had no CPU, also when its control group was throttled. Counts when that ends.
    pub run_delay_ns: u64,
    pub runs: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_of_a_program_whose_name_is_similar_are_not_of_the_layer() {
        let is_of_layer = |name: &[u8]| OsThread::new(1, name).is_of_layer();
        let own: [&[u8]; 3] = [b"profiling-drain", b"profiling-symbo", b"profiling-http"];
        let other: [&[u8]; 3] = [b"profiling-shop", b"profiling-", b"drain"];
        assert_eq!([own.map(is_of_layer), other.map(is_of_layer)], [[true; 3], [false; 3]]);
    }
}
