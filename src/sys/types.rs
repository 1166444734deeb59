//! What both platforms speak of.

use std::ops::Range;
use std::path::PathBuf;

/// What to sample, how often, and into how much memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SampleRequest {
    pub(crate) period_ns: u64,
    /// Bytes of stack in each sample, a multiple of 8 and at most 65,448.
    pub(crate) stack_bytes: u32,
    /// Bytes of ring: a power of two of pages.
    pub(crate) ring_bytes: usize,
    /// Also take a sample when the thread is in the kernel.
    pub(crate) in_kernel: bool,
    /// By how much a sample of a timer moves the position that hooks look at.
    pub(crate) position_step: u64,
}

/// What a sampling timer counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum TimerClock {
    /// The thread's CPU time, as often as the kernel's tick at most. Never interrupts a wait.
    #[default]
    Cpu,
    /// Time, as finely as is asked for. Interrupts system calls that wait.
    Monotonic,
}

/// Why an event or its ring could not be had, by what a user can do about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(dead_code, reason = "each platform uses some of them")]
pub(crate) enum WhyRefused {
    /// `perf_event_paranoid`, a seccomp filter or a security module says no.
    NotAllowed,
    /// The kernel was built without it, or is not Linux.
    NotSupported,
    /// No more open files for this process or system.
    NoFiles,
    /// What an unprivileged user may lock is used up.
    NoLockedMemory,
    /// No memory or no address space.
    NoMemory,
    /// As many signals may be pending as this user has timers (`ulimit -i`).
    NoTimers,
    /// Anything else, by its errno.
    Other(i32),
    /// The settings say so.
    NotAsked,
    /// The thread is not there any more.
    Ended,
    /// A seccomp filter would end the process.
    Deadly,
    /// There is none of it on this system, whatever is installed or allowed.
    OtherSystem,
}

impl WhyRefused {
    /// Whether it will be no different for another thread, or later.
    pub(crate) fn is_for_good(self) -> bool {
        matches!(self, Self::NotAllowed | Self::NotSupported | Self::Deadly | Self::OtherSystem)
    }
}

/// System calls that an ordinary service may do without, and a seccomp filter therefore end it at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(dead_code, reason = "only Linux has such filters")]
pub(crate) enum Unusual {
    /// And the `ioctl`s of its events.
    PerfEventOpen,
    TimerCreate,
    TimerSettime,
    TimerDelete,
    ProcessVmReadv,
    /// The CPU clock of a thread: other clocks are read without a system call.
    ClockGettime,
    Getrusage,
    Statfs,
    Faccessat,
    MemfdCreate,
}

impl Unusual {
    #[allow(dead_code, reason = "only Linux has such filters")]
    pub(crate) const ALL: [Self; 10] = [
        Self::PerfEventOpen,
        Self::TimerCreate,
        Self::TimerSettime,
        Self::TimerDelete,
        Self::ProcessVmReadv,
        Self::ClockGettime,
        Self::Getrusage,
        Self::Statfs,
        Self::Faccessat,
        Self::MemfdCreate,
    ];

    /// As filters name it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::PerfEventOpen => "perf_event_open",
            Self::TimerCreate => "timer_create",
            Self::TimerSettime => "timer_settime",
            Self::TimerDelete => "timer_delete",
            Self::ProcessVmReadv => "process_vm_readv",
            Self::ClockGettime => "clock_gettime",
            Self::Getrusage => "getrusage",
            Self::Statfs => "statfs",
            Self::Faccessat => "faccessat",
            Self::MemfdCreate => "memfd_create",
        }
    }
}

/// What a thread has cost the memory manager and the scheduler since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ThreadUsage {
    pub(crate) minor_faults: u64,
    pub(crate) major_faults: u64,
    /// Times the thread gave up the CPU to wait.
    pub(crate) voluntary_switches: u64,
    /// Times the scheduler took the CPU away.
    pub(crate) involuntary_switches: u64,
}

/// A thread that is blocked in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Blocked {
    pub(crate) call: Call,
    /// Of its user code; no other register is known.
    pub(crate) sp: u64,
    pub(crate) pc: u64,
}

/// What a thread is blocked in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(dead_code, reason = "only Linux reports it")]
pub(crate) enum Call {
    /// A lock or a condition, by its address.
    Futex(u64),
    Named(&'static str),
    /// A system call that we have no name for.
    Numbered(i64),
    /// No system call: memory that is read from a disk.
    PageFault,
}

/// The program or a shared library, as the dynamic loader has placed it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LoadedModule {
    /// Empty for the program itself.
    pub(crate) path: PathBuf,
    /// What is added to an address as the file states it to get the address in memory.
    pub(crate) bias: u64,
    /// Addresses in memory that hold code.
    pub(crate) code: Vec<CodeSegment>,
    /// Addresses in memory of everything that the module has mapped.
    pub(crate) loaded: Vec<Range<u64>>,
    /// Those of `loaded` that are not meant to be written.
    pub(crate) read_only: Vec<Range<u64>>,
    /// Addresses in memory of `.eh_frame_hdr`.
    pub(crate) eh_frame_hdr: Option<Range<u64>>,
    /// Addresses in memory of the notes, among them the build id.
    pub(crate) notes: Vec<Range<u64>>,
}

/// A segment that holds code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CodeSegment {
    pub(crate) addresses: Range<u64>,
    /// Where the segment begins in the file.
    pub(crate) file_offset: u64,
}

/// The modules, and the generation they belong to.
#[derive(Debug)]
pub(crate) struct ModuleList {
    pub(crate) generation: u64,
    pub(crate) modules: Vec<LoadedModule>,
}

/// Which file it is, whatever its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileIdentity {
    pub(crate) device: u64,
    pub(crate) inode: u64,
}

/// How much the machine, or the part of it that the process may use, has to do.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Load {
    /// Of all CPUs of the host since it started.
    pub(crate) host: Option<CpuUse>,
    /// CPU time that the control group has used in microseconds, and how many cores it may use.
    pub(crate) group: Option<(u64, f64)>,
    /// Of the control group, or of the host where there is none.
    pub(crate) memory_bytes: Option<u64>,
}

/// In ticks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CpuUse {
    pub(crate) busy: u64,
    pub(crate) all: u64,
}
