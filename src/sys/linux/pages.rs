//! Memory that does not come from an allocator.
#![allow(unsafe_code, reason = "maps memory")]

#[cfg(not(miri))]
use std::ptr;
use std::ptr::NonNull;

#[cfg(not(miri))]
use rustix::mm::{MapFlags, ProtFlags};

/// Maps zeroed memory, of which the system provides a page when it is first used. `None` if there is no address space.
#[cfg(not(miri))]
pub(crate) fn map_memory(bytes: usize) -> Option<NonNull<u8>> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: the kernel chooses the address of the new mapping, so no other memory is affected.
    let start = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), bytes, access, flags) };
    NonNull::new(start.ok()?.cast())
}

/// Unmaps it.
///
/// # Safety
///
/// The memory must be a whole mapping of [`map_memory`], and must not be used any more.
#[cfg(not(miri))]
pub(crate) unsafe fn unmap_memory(start: NonNull<u8>, bytes: usize) {
    // SAFETY: what the caller guarantees. If the kernel refuses, the memory stays mapped.
    _ = unsafe { rustix::mm::munmap(start.as_ptr().cast(), bytes) };
}

/// Miri makes no system calls.
#[cfg(miri)]
pub(crate) fn map_memory(bytes: usize) -> Option<NonNull<u8>> {
    let memory = Box::leak(vec![0_u8; bytes].into_boxed_slice());
    NonNull::new(memory.as_mut_ptr())
}

/// # Safety
///
/// As above.
#[cfg(miri)]
pub(crate) unsafe fn unmap_memory(start: NonNull<u8>, bytes: usize) {
    let memory = std::ptr::slice_from_raw_parts_mut(start.as_ptr(), bytes);
    // SAFETY: the caller's, and it was leaked with that length.
    drop(unsafe { Box::from_raw(memory) });
}
