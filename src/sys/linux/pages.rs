//! Memory that does not come from an allocator.
#![allow(unsafe_code, reason = "maps memory")]

use std::ptr::{self, NonNull};

use rustix::mm::{MapFlags, ProtFlags};

/// Maps zeroed memory, of which the system provides a page when it is first used. `None` if there is no address space.
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
pub(crate) unsafe fn unmap_memory(start: NonNull<u8>, bytes: usize) {
    // SAFETY: what the caller guarantees.
    _ = unsafe { rustix::mm::munmap(start.as_ptr().cast(), bytes) };
}
