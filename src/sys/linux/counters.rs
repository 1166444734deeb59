//! Hardware counters.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use perf_event_open_sys::bindings::{
    PERF_COUNT_HW_CACHE_MISSES, PERF_COUNT_HW_CPU_CYCLES, PERF_COUNT_HW_INSTRUCTIONS,
    PERF_COUNT_SW_DUMMY, PERF_FORMAT_GROUP, PERF_FORMAT_ID, PERF_FORMAT_TOTAL_TIME_ENABLED,
    PERF_FORMAT_TOTAL_TIME_RUNNING, PERF_TYPE_HARDWARE, PERF_TYPE_SOFTWARE, perf_event_attr,
};

use super::calls::may;
use super::perf::{enable_group, event_id, open_file, read_words};
use crate::sys::types::UnusualCall;

/// Cycles, instructions and cache misses of the calling thread, as one group of perf events.
pub(crate) struct HardwareCounters {
    /// A dummy event that leads the group, and the counters. Present until the value is dropped.
    events: Option<[OwnedFd; 4]>,
    id: u64,
}

impl HardwareCounters {
    /// The number of words that [`read`](Self::read) returns: a header of three, then count and id of the group's own
    /// dummy event, of cycles, of instructions and of cache misses.
    pub(crate) const WORDS: usize = 3 + 2 * 4;

    /// Opens the counters. Fails if there are none, as on most virtual machines, or if perf is refused.
    pub(crate) fn open() -> io::Result<Self> {
        Self::of(
            PERF_TYPE_HARDWARE,
            [PERF_COUNT_HW_CPU_CYCLES, PERF_COUNT_HW_INSTRUCTIONS, PERF_COUNT_HW_CACHE_MISSES],
        )
    }

    /// Three software counters in place of the hardware ones: page faults, and CPU time counted in two ways. (Context
    /// switches happen in the kernel, which an unprivileged user's counters exclude.)
    #[cfg(test)]
    pub(crate) fn open_software() -> io::Result<Self> {
        use perf_event_open_sys::bindings::{
            PERF_COUNT_SW_CPU_CLOCK, PERF_COUNT_SW_PAGE_FAULTS, PERF_COUNT_SW_TASK_CLOCK,
        };
        Self::of(
            PERF_TYPE_SOFTWARE,
            [PERF_COUNT_SW_PAGE_FAULTS, PERF_COUNT_SW_CPU_CLOCK, PERF_COUNT_SW_TASK_CLOCK],
        )
    }

    fn of(kind: u32, [first, second, third]: [u32; 3]) -> io::Result<Self> {
        const THIS_THREAD: u32 = 0;
        if !may(UnusualCall::PerfEventOpen) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let mut leading = counting(PERF_TYPE_SOFTWARE, PERF_COUNT_SW_DUMMY);
        leading.set_disabled(1);
        leading.read_format = u64::from(
            PERF_FORMAT_TOTAL_TIME_ENABLED
                | PERF_FORMAT_TOTAL_TIME_RUNNING
                | PERF_FORMAT_ID
                | PERF_FORMAT_GROUP,
        );
        let group = open_file(&mut leading, THIS_THREAD, None)?;
        let member =
            |event| open_file(&mut counting(kind, event), THIS_THREAD, Some(group.as_fd()));
        let [first, second, third] = [member(first)?, member(second)?, member(third)?];
        enable_group(group.as_fd())?;
        let id = event_id(group.as_fd()).ok_or(io::ErrorKind::Unsupported)?;
        Ok(Self { events: Some([group, first, second, third]), id })
    }

    /// Takes one system call.
    pub(crate) fn read(&self) -> io::Result<[u64; Self::WORDS]> {
        read_words(self.event()?)
    }

    fn event(&self) -> io::Result<BorrowedFd<'_>> {
        let [group, ..] = self.events.as_ref().ok_or(io::ErrorKind::BrokenPipe)?;
        // The program may have closed the descriptor, and its number may belong to another file.
        let is_ours = event_id(group.as_fd()) == Some(self.id);
        is_ours.then_some(group.as_fd()).ok_or(io::ErrorKind::BrokenPipe.into())
    }
}

fn counting(kind: u32, event: u32) -> perf_event_attr {
    let mut attr = perf_event_attr {
        type_: kind,
        size: size_of::<perf_event_attr>() as u32,
        config: u64::from(event),
        ..perf_event_attr::default()
    };
    attr.set_exclude_kernel(1);
    attr.set_exclude_hv(1);
    attr
}

impl Drop for HardwareCounters {
    fn drop(&mut self) {
        if self.event().is_err() {
            std::mem::forget(self.events.take());
        }
    }
}

impl std::fmt::Debug for HardwareCounters {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HardwareCounters").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use rustix::io::{FdFlags, fcntl_getfd};
    use seccompiler::{
        SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
        SeccompRule, apply_filter,
    };

    use super::*;

    /// A program that another thread executes meanwhile would inherit a descriptor that is changed only afterwards.
    #[test]
    fn descriptors_are_close_on_exec_from_the_beginning() {
        if HardwareCounters::open_software().is_err() {
            return;
        }
        let result = std::thread::spawn(|| {
            let is_set_fd = SeccompCondition::new(
                1,
                SeccompCmpArgLen::Dword,
                SeccompCmpOp::Eq,
                libc::F_SETFD as u64,
            );
            let rule = SeccompRule::new(vec![is_set_fd.unwrap()]).unwrap();
            let filter = SeccompFilter::new(
                BTreeMap::from([(libc::SYS_fcntl, vec![rule])]),
                SeccompAction::Allow,
                SeccompAction::Errno(libc::EPERM as u32),
                std::env::consts::ARCH.try_into().unwrap(),
            );
            // On this thread.
            let program: seccompiler::BpfProgram = filter.unwrap().try_into().unwrap();
            apply_filter(&program).unwrap();
            let counters = HardwareCounters::open_software()?;
            counters.events.iter().flatten().map(|event| Ok(fcntl_getfd(event)?)).collect()
        });
        let flags: io::Result<Vec<FdFlags>> = result.join().unwrap();
        assert_eq!(flags.unwrap(), [FdFlags::CLOEXEC; 4]);
    }
}
