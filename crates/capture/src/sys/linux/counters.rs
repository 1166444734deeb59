//! Hardware counters.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use perf_event::events::{Event, Hardware};
use perf_event::{Builder, Counter, Group};

use super::calls::may;
use super::perf::{event_id, is_scarce, read_words};
use crate::sys::types::FilteredSyscall;

/// Cycles, instructions and cache misses of the calling thread, as one `perf_event` group.
pub(crate) struct HardwareCounters {
    /// Present until the value is dropped. A counter that is dropped leaves its group.
    counters: Option<(Group, [Counter; 3])>,
    id: u64,
}

impl HardwareCounters {
    /// The number of words that [`read`](Self::read) returns: a header of three, then count and id of the group's own
    /// dummy event, of cycles, of instructions and of cache misses.
    pub(crate) const WORDS: usize = 3 + 2 * 4;

    /// Opens the counters. Fails if there are none, as on most virtual machines, or if perf is refused.
    pub(crate) fn open() -> io::Result<Self> {
        Self::of([Hardware::CPU_CYCLES, Hardware::INSTRUCTIONS, Hardware::CACHE_MISSES])
    }

    /// Three software counters in place of the hardware ones: page faults, and CPU time counted in two ways. (Context
    /// switches happen in the kernel, which an unprivileged user's counters exclude.)
    #[cfg(test)]
    pub(crate) fn open_software() -> io::Result<Self> {
        use perf_event::events::Software;
        Self::of([Software::PAGE_FAULTS, Software::CPU_CLOCK, Software::TASK_CLOCK])
    }

    fn of<E: Into<Event>>(events: [E; 3]) -> io::Result<Self> {
        if !may(FilteredSyscall::PerfEventOpen) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let mut group = Group::new()?;
        let mut member = |event| Builder::new().group(&mut group).kind(event).build();
        let [first, second, third] = events;
        let members = [member(first)?, member(second)?, member(third)?];
        for event in members.iter().map(AsRawFd::as_raw_fd).chain([group.as_raw_fd()]) {
            // SAFETY: the descriptor is open: `group` and `members` own it.
            #[allow(unsafe_code, reason = "perf_event gives its descriptors only as numbers")]
            let event = unsafe { BorrowedFd::borrow_raw(event) };
            // perf_event does not set it, and executed programs must not inherit the descriptor.
            rustix::io::fcntl_setfd(event, rustix::io::FdFlags::CLOEXEC)?;
            if is_scarce(event) {
                return Err(io::ErrorKind::QuotaExceeded.into());
            }
        }
        group.enable()?;
        // SAFETY: the group owns the descriptor.
        #[allow(unsafe_code, reason = "perf_event gives its descriptors only as numbers")]
        let file = unsafe { BorrowedFd::borrow_raw(group.as_raw_fd()) };
        let id = event_id(file).ok_or(io::ErrorKind::Unsupported)?;
        Ok(Self { counters: Some((group, members)), id })
    }

    /// Takes one system call. `Group::read` is not used because it allocates and asserts.
    pub(crate) fn read(&self) -> io::Result<[u64; Self::WORDS]> {
        read_words(self.event()?)
    }

    #[allow(unsafe_code, reason = "perf_event::Group gives its descriptor only as a number")]
    fn event(&self) -> io::Result<BorrowedFd<'_>> {
        let (group, _) = self.counters.as_ref().ok_or(io::ErrorKind::BrokenPipe)?;
        // SAFETY: the group owns the descriptor and lives as long as the borrow.
        let event = unsafe { BorrowedFd::borrow_raw(group.as_raw_fd()) };
        // The program may have closed the descriptor, and its number may belong to another file.
        let is_ours = event_id(event) == Some(self.id);
        is_ours.then_some(event).ok_or(io::ErrorKind::BrokenPipe.into())
    }
}

impl Drop for HardwareCounters {
    fn drop(&mut self) {
        if self.event().is_err() {
            std::mem::forget(self.counters.take());
        }
    }
}

impl std::fmt::Debug for HardwareCounters {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HardwareCounters").finish_non_exhaustive()
    }
}
