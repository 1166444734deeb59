//! The mapping in which profilers of the host find what this process is: OpenTelemetry's process context (OTEP 4719).
//!
//! A small header that points to a message in ordinary memory. Readers search `/proc/PID/maps` for its name, copy both,
//! and check that the time in the header is still the same.
#![allow(unsafe_code, reason = "maps memory, names it, and shares it with other processes")]

use std::fs::File;
use std::io;
use std::mem;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use parking_lot::Mutex;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::calls::may;
use super::files::named_memory_file;
use super::fork::{OwnerProcess, lock_publishing};
use super::maps::has_mapping_of;
use crate::sys::types::{FilteredSyscall, Unpublished};

/// The layout that readers expect, of native byte order.
#[repr(C)]
struct Header {
    signature: AtomicU64,
    version: AtomicU32,
    payload_bytes: AtomicU32,
    /// `CLOCK_BOOTTIME`, and another value after each change. 0 while the header changes.
    published_at_ns: AtomicU64,
    /// The address of the message.
    payload: AtomicU64,
}

const HEADER_BYTES: usize = size_of::<Header>();
const NAME: &std::ffi::CStr = c"OTEL_CTX";
const SIGNATURE: u64 = u64::from_ne_bytes(*b"OTEL_CTX");
const VERSION: u32 = 2;
/// How names of such mappings begin: a named file in memory, a named mapping, and a file in memory without a name.
const MAPPED_AS: [&[u8]; 3] = [b"[anon_shmem:OTEL_CTX]", b"[anon:OTEL_CTX]", b"/memfd:OTEL_CTX"];

/// What this process has published.
struct Published {
    /// A child has a copy of this, and no mapping.
    owner: OwnerProcess,
    header: NonNull<Header>,
    payload: Vec<u8>,
}

// SAFETY: the header is a mapping that belongs to no thread.
unsafe impl Send for Published {}

/// A process has at most one. Only locked by the thread that has locked publishing, so a child never finds it locked.
static PUBLISHED: Mutex<Option<Published>> = Mutex::new(None);

/// Publishes a message as the process context, or replaces the one that was published here before. It stays until the
/// process ends, and is not in the children of forks.
pub(crate) fn publish_process_context(payload: Vec<u8>) -> Result<(), Unpublished> {
    let is_taken = !has_own() && has_mapping_of(&MAPPED_AS);
    let publishing = lock_publishing();
    let mut published = PUBLISHED.lock();
    let outcome = match published.as_mut().filter(|published| published.owner.is_current()) {
        Some(published) => {
            // SAFETY: this process has mapped it, and never unmaps it.
            unsafe { published.header.as_ref() }.publish(&payload);
            name(published.header);
            Ok(mem::replace(&mut published.payload, payload))
        }
        None if is_taken => Err(Unpublished::Taken),
        None => match map_and_publish(&payload) {
            Ok(header) => {
                let owner = OwnerProcess::current();
                let before = published.replace(Published { owner, header, payload });
                Ok(before.map(|inherited| inherited.payload).unwrap_or_default())
            }
            // Not by `map`, which would free the message here.
            Err(error) => Err(error),
        },
    };
    drop(published);
    drop(publishing);
    // Frees the message that nothing points to any more.
    outcome.map(drop)
}

fn has_own() -> bool {
    let _publishing = lock_publishing();
    PUBLISHED.lock().as_ref().is_some_and(|published| published.owner.is_current())
}

fn map_and_publish(payload: &[u8]) -> Result<NonNull<Header>, Unpublished> {
    let failed = |call| move |error: rustix::io::Errno| Unpublished::Failed(call, error.into());
    let file = memory_file();
    let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    let start = match &file {
        // SAFETY: the kernel chooses the address of the new mapping, so no other memory is affected. The file is at
        // least as long, and is closed below: no process can shorten it.
        Ok(file) => unsafe {
            rustix::mm::mmap(ptr::null_mut(), HEADER_BYTES, access, flags, file, 0)
        },
        // SAFETY: as above.
        Err(_) => unsafe {
            rustix::mm::mmap_anonymous(ptr::null_mut(), HEADER_BYTES, access, flags)
        },
    };
    let refusal = file.err();
    let start = start.map_err(failed("mmap"))?;
    let unmap = |error| {
        // SAFETY: the mapping just created, to which there are no references.
        _ = unsafe { rustix::mm::munmap(start, HEADER_BYTES) };
        error
    };
    // SAFETY: the mapping just created; changes nothing in this process.
    let is_private = unsafe { rustix::mm::madvise(start, HEADER_BYTES, Advice::LinuxDontFork) };
    is_private.map_err(failed("madvise")).map_err(unmap)?;
    let Some(header) = NonNull::new(start.cast::<Header>()) else {
        return Err(unmap(Unpublished::Failed("mmap", io::ErrorKind::AddrNotAvailable.into())));
    };
    // SAFETY: the mapping is zeroed, aligned to a page, and large enough.
    let fields = unsafe { header.as_ref() };
    fields.signature.store(SIGNATURE, Ordering::Relaxed);
    fields.version.store(VERSION, Ordering::Relaxed);
    fields.publish(payload);
    // Many kernels cannot name memory; the file's name is as good.
    match (name(header), refusal) {
        (false, Some(refusal)) => Err(unmap(Unpublished::Failed("memfd_create", refusal))),
        _ => Ok(header),
    }
}

/// A file in memory of the size of a header.
fn memory_file() -> io::Result<File> {
    let file = named_memory_file(NAME)?;
    file.set_len(HEADER_BYTES as u64)?;
    Ok(file)
}

/// Names the mapping. Readers may also take this call for the signal that something was published, so it is made where
/// the kernel cannot do it, too.
fn name(header: NonNull<Header>) -> bool {
    let how = libc::PR_SET_VMA_ANON_NAME as libc::c_ulong;
    let (start, bytes) = (header.as_ptr().addr(), HEADER_BYTES);
    may(FilteredSyscall::NameMemory)
        // SAFETY: names a whole mapping of this module, and copies a text that ends with a zero.
        && unsafe { libc::prctl(libc::PR_SET_VMA, how, start, bytes, NAME.as_ptr()) } == 0
}

impl Header {
    /// Makes it point to a message, which must stay where it is until the next one.
    fn publish(&self, payload: &[u8]) {
        let before = self.published_at_ns.load(Ordering::Relaxed);
        self.published_at_ns.store(0, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        // A message that is longer is refused before.
        let bytes = u32::try_from(payload.len()).unwrap_or_default();
        self.payload_bytes.store(bytes, Ordering::Relaxed);
        self.payload.store(payload.as_ptr().addr() as u64, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let now_ns = boot_time_ns().unwrap_or_default();
        self.published_at_ns.store(now_ns.max(before + 1), Ordering::Relaxed);
    }
}

fn boot_time_ns() -> Option<u64> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: fills a local variable.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut time) };
    let (seconds, ns) = (u64::try_from(time.tv_sec).ok()?, u64::try_from(time.tv_nsec).ok()?);
    (result == 0).then(|| seconds.saturating_mul(1_000_000_000).saturating_add(ns))
}
