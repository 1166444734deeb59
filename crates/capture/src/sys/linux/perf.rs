//! Perf events on threads of this process, and the rings that the kernel fills for them.
#![allow(unsafe_code, reason = "calls perf_event_open and its ioctls")]

use std::ffi::c_int;
use std::io;
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use parking_lot::Mutex;
use perf_event_open_sys::bindings::{
    self, PERF_COUNT_SW_CPU_CLOCK, PERF_COUNT_SW_DUMMY, PERF_FLAG_FD_CLOEXEC,
    PERF_SAMPLE_CALLCHAIN, PERF_SAMPLE_REGS_USER, PERF_SAMPLE_STACK_USER, PERF_SAMPLE_TID,
    PERF_SAMPLE_TIME, PERF_TYPE_SOFTWARE, perf_event_attr,
};

use super::calls::may;
use super::own_files::{OwnFile, is_scarce};
use super::ring::RingMemory;
use super::thread::current_tid;
use crate::sys::types::{FilteredSyscall, SampleRequest, WhyRefused};

impl WhyRefused {
    fn of_open(error: &io::Error) -> Self {
        match error.raw_os_error().unwrap_or(0) {
            errno @ (libc::EACCES | libc::EPERM) => Self::NotAllowed(errno),
            errno @ (libc::ENOSYS | libc::ENOENT | libc::EOPNOTSUPP | libc::ENODEV) => {
                Self::NotSupported(errno)
            }
            libc::EMFILE | libc::ENFILE => Self::NoFiles,
            libc::ESRCH => Self::Ended,
            // They may work later.
            errno
            @ (0 | libc::EAGAIN | libc::EINTR | libc::ENOMEM | libc::EBUSY | libc::ENOSPC) => {
                Self::Other(errno)
            }
            errno => Self::Failed(FilteredSyscall::PerfEventOpen, errno),
        }
    }

    /// An `ioctl` of an event has failed. Without an errno it was not made.
    fn of_ioctl(error: &io::Error) -> Self {
        let errno = error.raw_os_error();
        errno.map_or(Self::Other(0), |errno| Self::Failed(FilteredSyscall::PerfEventOpen, errno))
    }

    fn of_map(error: &io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::EPERM | libc::ENOMEM) => Self::NoLockedMemory,
            other => Self::Other(other.unwrap_or(0)),
        }
    }
}

/// The registers that unwinding starts from, as a mask of the kernel's register numbers.
#[cfg(target_arch = "x86_64")]
const REGISTERS: u64 = 1 << bindings::PERF_REG_X86_BP
    | 1 << bindings::PERF_REG_X86_SP
    | 1 << bindings::PERF_REG_X86_IP;
#[cfg(target_arch = "aarch64")]
const REGISTERS: u64 = 1 << bindings::PERF_REG_ARM64_X29
    | 1 << bindings::PERF_REG_ARM64_LR
    | 1 << bindings::PERF_REG_ARM64_SP
    | 1 << bindings::PERF_REG_ARM64_PC;

/// Opens an event that samples thread `tid` by its CPU time, once it is started.
///
/// Each sample is a record of thread, time (`CLOCK_MONOTONIC_RAW` of the initial time namespace), the kernel's call chain,
/// which is empty where it is not allowed, user registers and the top of the user stack. `sampler::record` has the layout.
pub(crate) fn open_sample_ring(request: SampleRequest, tid: u32) -> Result<PerfRing, WhyRefused> {
    let mut attr = software(PERF_COUNT_SW_CPU_CLOCK);
    attr.__bindgen_anon_1.sample_period = request.period_ns;
    attr.sample_type = u64::from(
        PERF_SAMPLE_TID
            | PERF_SAMPLE_TIME
            | PERF_SAMPLE_CALLCHAIN
            | PERF_SAMPLE_REGS_USER
            | PERF_SAMPLE_STACK_USER,
    );
    attr.sample_regs_user = REGISTERS;
    attr.sample_stack_user = request.stack_bytes;
    attr.set_exclude_kernel(u64::from(!request.in_kernel));
    attr.set_exclude_callchain_kernel(u64::from(!request.in_kernel));
    attr.set_exclude_callchain_user(1);
    attr.set_disabled(1);
    attr.set_watermark(1);
    // The event's file is not polled.
    attr.__bindgen_anon_2.wakeup_watermark = u32::MAX;
    PerfRing::map(open(&mut attr, tid)?, request.ring_bytes)
}

/// Opens an event that records the context switches of thread `tid`, once it is started.
///
/// The event is separate, with its own ring of `ring_bytes`: in the ring of the samples, these records would move the
/// position without a sample. It needs no privileges.
pub(crate) fn open_switch_ring(ring_bytes: usize, tid: u32) -> Result<PerfRing, WhyRefused> {
    let mut attr = software(PERF_COUNT_SW_DUMMY);
    attr.sample_type = u64::from(PERF_SAMPLE_TIME);
    attr.set_exclude_kernel(1);
    attr.set_context_switch(1);
    attr.set_disabled(1);
    attr.set_sample_id_all(1);
    // No thread waits for this ring: the collector reads it in its scans.
    attr.set_watermark(1);
    attr.__bindgen_anon_2.wakeup_watermark = u32::MAX;
    PerfRing::map(open(&mut attr, tid)?, ring_bytes)
}

/// Samples the user registers of the calling thread when it is switched out, with privileges. For tests of inferred ones.
#[cfg(test)]
pub(crate) fn open_switch_registers(ring_bytes: usize) -> Result<PerfRing, WhyRefused> {
    let mut attr = software(bindings::PERF_COUNT_SW_CONTEXT_SWITCHES);
    attr.sample_type = u64::from(PERF_SAMPLE_TIME | PERF_SAMPLE_REGS_USER);
    attr.sample_regs_user = REGISTERS;
    attr.__bindgen_anon_1.sample_period = 1;
    PerfRing::map(open(&mut attr, current_tid())?, ring_bytes)
}

/// Keeps the kernel's perf events machinery enabled, by an event that is never enabled and has no ring.
///
/// The kernel patches its scheduler for the first event in the system, which takes some 10 ms, and undoes that a second
/// after the last was closed. While this one exists, opening events takes no such time.
pub(crate) fn open_keep_alive() -> Result<PerfEvent, WhyRefused> {
    let mut attr = software(PERF_COUNT_SW_DUMMY);
    attr.set_exclude_kernel(1);
    attr.set_disabled(1);
    open(&mut attr, current_tid())
}

fn software(config: u32) -> perf_event_attr {
    let mut attr = perf_event_attr {
        type_: PERF_TYPE_SOFTWARE,
        size: size_of::<perf_event_attr>() as u32,
        config: u64::from(config),
        clockid: libc::CLOCK_MONOTONIC_RAW,
        ..perf_event_attr::default()
    };
    attr.set_use_clockid(1);
    attr.set_exclude_hv(1);
    attr
}

fn open(attr: &mut perf_event_attr, tid: u32) -> Result<PerfEvent, WhyRefused> {
    if !may(FilteredSyscall::PerfEventOpen) {
        return Err(WhyRefused::KilledBySeccomp);
    }
    const ANY_CPU: i32 = -1;
    const NO_GROUP: i32 = -1;
    // SAFETY: `attr` is initialized and contains its own size. It requests events on a thread of this process, which affect
    // nothing but the ring.
    let event = unsafe {
        perf_event_open_sys::perf_event_open(
            attr,
            tid.cast_signed(),
            ANY_CPU,
            NO_GROUP,
            u64::from(PERF_FLAG_FD_CLOEXEC),
        )
    };
    if event < 0 {
        return Err(WhyRefused::of_open(&io::Error::last_os_error()));
    }
    // SAFETY: a file descriptor that the kernel just returned, with no other owner.
    let file = unsafe { OwnedFd::from_raw_fd(event) };
    if is_scarce(file.as_fd()) {
        return Err(WhyRefused::NoFiles);
    }
    let event = OwnFile::new(file, event_id).map(PerfEvent);
    event.ok_or_else(|| WhyRefused::of_ioctl(&io::Error::last_os_error()))
}

/// A perf event and its ring, which the kernel fills.
#[derive(Debug)]
pub struct PerfRing {
    /// None once released. Closed before the memory is.
    pub(super) event: Mutex<Option<PerfEvent>>,
    pub(super) memory: RingMemory,
}

impl PerfRing {
    fn map(event: PerfEvent, data_size: usize) -> Result<Self, WhyRefused> {
        let memory = event.0.get().and_then(|file| RingMemory::of_event(file, data_size));
        let memory = memory.map_err(|error| WhyRefused::of_map(&error))?;
        Ok(Self { event: Mutex::new(Some(event)), memory })
    }

    pub(crate) fn start(&self) -> Result<(), WhyRefused> {
        self.event.lock().as_ref().map_or(Ok(()), PerfEvent::enable)
    }

    pub(crate) fn pause(&self) {
        _ = self.event.lock().as_ref().map(PerfEvent::disable);
    }

    /// Closes the event and releases the ring's memory. Its thread may go on reading the position, which stays.
    pub(crate) fn retire(&self) {
        // A forked child may hold the event too, and closing it here does not stop it then.
        self.pause();
        if self.event.lock().take().is_some() {
            self.memory.replace_by_zeros();
        }
    }
}

impl Deref for PerfRing {
    type Target = RingMemory;

    fn deref(&self) -> &RingMemory {
        &self.memory
    }
}

/// A perf event, whose id is checked before each use.
#[derive(Debug)]
pub(crate) struct PerfEvent(OwnFile);

impl PerfEvent {
    fn enable(&self) -> Result<(), WhyRefused> {
        // SAFETY: an ioctl without an argument, on an event of this layer.
        self.change(|event| unsafe { perf_event_open_sys::ioctls::ENABLE(event, 0) })
    }

    fn disable(&self) -> Result<(), WhyRefused> {
        // SAFETY: as above.
        self.change(|event| unsafe { perf_event_open_sys::ioctls::DISABLE(event, 0) })
    }

    fn change(&self, call: impl FnOnce(c_int) -> c_int) -> Result<(), WhyRefused> {
        if !may(FilteredSyscall::PerfEventOpen) {
            return Err(WhyRefused::Other(0));
        }
        let changed = self.0.get().and_then(|event| match call(event.as_raw_fd()) {
            0.. => Ok(()),
            _ => Err(io::Error::last_os_error()),
        });
        changed.map_err(|error| WhyRefused::of_ioctl(&error))
    }
}

/// The kernel's id of a perf event; `None` for any other file.
fn event_id(event: BorrowedFd<'_>) -> Option<(u64, u64)> {
    let mut id = 0_u64;
    // SAFETY: the kernel writes one word, to `id`.
    let result = unsafe { perf_event_open_sys::ioctls::ID(event.as_raw_fd(), &raw mut id) };
    (result == 0).then_some((id, 0))
}
