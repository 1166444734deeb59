//! Writing records into a ring of ours, from a signal handler.
#![allow(
    unsafe_code,
    reason = "writes to memory that another thread reads, from a signal handler, where nothing may be \
              allocated or locked"
)]

use std::sync::atomic::{AtomicU64, Ordering};

use super::poll::Wakeups;

/// What a signal handler must know of a ring; it lies in the ring's own first page.
#[derive(Debug)]
pub(super) struct Sink {
    pub(super) memory: SinkMemory,
    pub(super) stack_bytes: u64,
    /// Bytes in the ring after which the collector is woken.
    pub(super) wake_after_bytes: u64,
    /// Null if nobody is; else valid as long as the ring.
    pub(super) wakes: *const Wakeups,
    pub(super) period_ns: u64,
    /// The kernel's numbers of the process and the thread, as records have them.
    pub(super) ids: u64,
    /// Samples stand for the CPU time since the one before.
    pub(super) counts_cpu: bool,
    pub(super) cpu_ns: AtomicU64,
    /// Samples that found the ring full since the last that did not.
    pub(super) lost: AtomicU64,
    /// The position that hooks look at: `step` further with each sample, however long it is.
    pub(super) position: AtomicU64,
    pub(super) step: u64,
}

/// Where a ring is.
#[derive(Clone, Copy, Debug)]
pub(super) struct SinkMemory {
    pub(super) head: *const AtomicU64,
    pub(super) tail: *const AtomicU64,
    pub(super) data: *mut u8,
    /// A power of two.
    pub(super) data_size: u64,
}

/// One record on its way into the ring.
pub(super) struct Writer<'a> {
    sink: &'a Sink,
    head: &'a AtomicU64,
    start: u64,
    position: u64,
    tail: u64,
}

impl Sink {
    /// Only for the ring's own thread.
    pub(super) fn writer(&self) -> Writer<'_> {
        // SAFETY: both words lie in the page that this sink lies in, and are only ever accessed
        // atomically.
        let (head, tail) = unsafe { (&*self.memory.head, &*self.memory.tail) };
        let start = head.load(Ordering::Relaxed);
        // Acquire: what was before the tail has been read by the time we write over it.
        let tail = tail.load(Ordering::Acquire);
        Writer { sink: self, head, start, position: start, tail }
    }
}

impl Writer<'_> {
    pub(super) fn has_room(&self, bytes: u64) -> bool {
        let used = self.position.wrapping_sub(self.tail);
        used.wrapping_add(bytes) <= self.sink.memory.data_size
    }

    /// Writes a word. The record must [have room](Self::has_room).
    pub(super) fn word(&mut self, word: u64) {
        let bytes = word.to_ne_bytes();
        // SAFETY: eight bytes of ours.
        unsafe { self.bytes(bytes.as_ptr(), 8) };
    }

    /// Copies bytes from anywhere. The record must [have room](Self::has_room).
    ///
    /// # Safety
    ///
    /// All of them must be mapped.
    pub(super) unsafe fn bytes(&mut self, from: *const u8, length: u64) {
        let SinkMemory { data, data_size, .. } = self.sink.memory;
        let offset = self.position & data_size.wrapping_sub(1);
        let until_end = data_size.wrapping_sub(offset).min(length);
        // SAFETY: the first part ends where the data ends, at the latest; the second begins where
        // the data begins, and is no longer than what there was room for. Nobody reads there, since
        // it is not between tail and head.
        unsafe {
            copy(from, data.wrapping_add(offset as usize), until_end as usize);
            let rest = length.wrapping_sub(until_end) as usize;
            copy(from.wrapping_add(until_end as usize), data, rest);
        }
        self.position = self.position.wrapping_add(length);
    }

    /// Lets others see what was written. Returns whether the ring has filled to its mark with it.
    pub(super) fn publish(self) -> bool {
        self.head.store(self.position, Ordering::Release);
        let mark = self.sink.wake_after_bytes;
        let before = self.start.wrapping_sub(self.tail);
        let after = self.position.wrapping_sub(self.tail);
        before < mark && after >= mark
    }
}

/// Copies bytes that may be anybody's. Not by a call to `memcpy`, of which sanitizers want to know
/// whose bytes they are, and which a program may have replaced.
///
/// # Safety
///
/// Both ranges must be mapped, and the second writable; they may not overlap.
#[cfg(target_arch = "x86_64")]
unsafe fn copy(from: *const u8, to: *mut u8, length: usize) {
    // SAFETY: this is what the instruction does; the direction flag is clear in Rust code.
    unsafe {
        core::arch::asm!(
            "rep movsb",
            inout("rcx") length => _,
            inout("rsi") from => _,
            inout("rdi") to => _,
            options(nostack, preserves_flags),
        );
    }
}

/// As above.
///
/// # Safety
///
/// As above.
#[cfg(target_arch = "aarch64")]
unsafe fn copy(from: *const u8, to: *mut u8, length: usize) {
    // SAFETY: reads and writes each byte of both ranges once, words first.
    unsafe {
        core::arch::asm!(
            "cbz {words}, 3f",
            "2:",
            "ldr {word}, [{from}], #8",
            "str {word}, [{to}], #8",
            "subs {words}, {words}, #1",
            "b.ne 2b",
            "3:",
            "cbz {bytes}, 5f",
            "4:",
            "ldrb {word:w}, [{from}], #1",
            "strb {word:w}, [{to}], #1",
            "subs {bytes}, {bytes}, #1",
            "b.ne 4b",
            "5:",
            words = inout(reg) length / 8 => _,
            bytes = inout(reg) length % 8 => _,
            from = inout(reg) from => _,
            to = inout(reg) to => _,
            word = out(reg) _,
            options(nostack),
        );
    }
}
