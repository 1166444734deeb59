//! Memory that does not come from an allocator.
#![allow(unsafe_code, reason = "maps memory")]

use std::ffi::c_void;
use std::ptr::{self, NonNull};

use rustix::mm::{Advice, MapFlags, ProtFlags};

/// Maps private memory of zeros at an address where nothing is mapped, or anywhere.
pub(super) fn map_zeros(
    at: *mut c_void,
    bytes: usize,
    access: ProtFlags,
) -> rustix::io::Result<*mut c_void> {
    let fixed = if at.is_null() { MapFlags::empty() } else { MapFlags::FIXED_NOREPLACE };
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | fixed;
    // SAFETY: existing mappings are not affected: the kernel chooses the address, or the call fails if there is one.
    unsafe { rustix::mm::mmap_anonymous(at, bytes, access, flags) }
}

pub(super) const READ_WRITE: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

/// Maps zeroed memory for copies of stacks, which is provided when it is used. `None` if there is no address space.
#[cfg(not(miri))]
pub(crate) fn map_memory(bytes: usize) -> Option<NonNull<u8>> {
    let start = map_zeros(ptr::null_mut(), bytes, READ_WRITE).ok()?;
    let start = NonNull::new(start.cast())?;
    // SAFETY: the new mapping.
    unsafe { keep_stacks_here(start, bytes) };
    Some(start)
}

/// Memory with copies of stacks is not in core dumps, and zeroed in the child of a fork, but before Linux 4.14.
///
/// # Safety
///
/// The memory must be a private mapping without a file.
pub(super) unsafe fn keep_stacks_here(start: NonNull<u8>, bytes: usize) {
    for advice in [Advice::LinuxDontDump, Advice::LinuxWipeOnFork] {
        // SAFETY: the caller's mapping, in which neither changes anything now.
        _ = unsafe { rustix::mm::madvise(start.as_ptr().cast(), bytes, advice) };
    }
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

#[cfg(not(miri))]
#[cfg(test)]
mod tests {
    use super::*;

    /// The flags of the mapping that has that address, as `VmFlags` shows them. It may be one with another that follows.
    fn flags_at(start: NonNull<u8>) -> String {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let has_it = |line: &str| {
            let range = line.split(' ').next().and_then(|range| range.split_once('-'));
            let range = range.map(|(begin, end)| {
                [begin, end].map(|address| usize::from_str_radix(address, 16).unwrap_or(0))
            });
            range.is_some_and(|[begin, end]| (begin..end).contains(&start.as_ptr().addr()))
        };
        let mut lines = maps.lines().skip_while(|line| !has_it(line));
        lines.find(|line| line.starts_with("VmFlags:")).unwrap().to_owned()
    }

    #[test]
    fn copies_of_stacks_are_not_dumped_and_not_forked() {
        let bytes = 1 << 20;
        let start = map_memory(bytes).unwrap();
        let flags = flags_at(start);
        assert!(flags.contains(" dd") && flags.contains(" wf"), "{flags}");
        // SAFETY: the mapping is used in its bounds and unmapped once. The child only reads it and ends.
        unsafe {
            start.as_ptr().write_bytes(7, bytes);
            let child = libc::fork();
            if child == 0 {
                let is_wiped = (0..bytes).all(|at| start.add(at).read_volatile() == 0);
                // The child of a program that does not know can write to it.
                start.write_volatile(1);
                libc::_exit(i32::from(!is_wiped));
            }
            let mut status = -1;
            assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
            assert_eq!(status, 0, "zeroed there");
            assert_eq!(start.add(bytes - 1).read_volatile(), 7, "not here");
            unmap_memory(start, bytes);
        }
    }
}
