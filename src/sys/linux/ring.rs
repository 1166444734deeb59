//! The memory of a ring of records.
#![allow(
    unsafe_code,
    reason = "maps and reads memory shared with the kernel or a signal handler; rustix has no perf mappings"
)]

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use perf_event_open_sys::bindings::perf_event_mmap_page;
use rustix::mm::{MapFlags, ProtFlags};

use super::fork::HomeProcess;

/// A page of counters, then a power of two of pages of records, laid out as perf does.
///
/// The kernel or a signal handler writes while we read, so no reference to the mapping is ever made: words are
/// copied out, and what they say about their own length is for the parser to doubt.
#[derive(Debug)]
pub(crate) struct RingMemory {
    base: NonNull<u8>,
    page_size: usize,
    data_size: usize,
    /// Inaccessible memory before it and behind it.
    guard_size: usize,
    /// The kernel does not copy a perf mapping into the child of a fork.
    home: HomeProcess,
}

// SAFETY: the mapping belongs to the process, not to a thread, and stays mapped until `drop`, which needs
// the memory for itself.
unsafe impl Send for RingMemory {}
// SAFETY: what may be called from several threads at once loads or stores single words, atomically: a value
// that comes at the wrong time is a wrong position, which the parser doubts, and never a wrong address. Or it
// exchanges pages as a whole while all addresses stay mapped and readable (`replace_by_zeros`,
// `discard_records`). The fields do not change.
unsafe impl Sync for RingMemory {}

impl RingMemory {
    /// Maps the ring of a perf event with `data_size` bytes of records, a power of two of pages.
    pub(super) fn of_event(event: BorrowedFd<'_>, data_size: usize) -> io::Result<Self> {
        let page_size = page_size();
        // The kernel rounds up to pages, of 64 KiB on some machines, and writes to all of them.
        let data_size = data_size.max(page_size);
        // SAFETY: a new mapping at an address of the kernel's choosing disturbs nothing.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                page_size + data_size,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                event,
                0,
            )?
        };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, page_size, data_size, guard_size: 0, home: HomeProcess::current() })
    }

    /// Private memory of the same layout, between two pages that nobody may touch.
    pub(super) fn anonymous(data_size: usize) -> io::Result<Self> {
        let page_size = page_size();
        let data_size = data_size.max(page_size);
        let length = page_size + data_size;
        // SAFETY: a new mapping at an address of the kernel's choosing disturbs nothing.
        let guarded = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                length + 2 * page_size,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )?
        };
        let base = guarded.cast::<u8>().wrapping_add(page_size);
        let memory = Self {
            base: NonNull::new(base).ok_or(io::ErrorKind::OutOfMemory)?,
            page_size,
            data_size,
            guard_size: page_size,
            home: HomeProcess::current(),
        };
        // SAFETY: a part of the mapping just made.
        unsafe {
            let flags = rustix::mm::MprotectFlags::READ | rustix::mm::MprotectFlags::WRITE;
            rustix::mm::mprotect(base.cast(), length, flags)?;
        }
        Ok(memory)
    }

    /// The process that made it: the only one that may stop what writes there, or unmap it.
    pub(super) fn home(&self) -> HomeProcess {
        self.home
    }

    /// The bytes that records may fill.
    pub(crate) fn data_size(&self) -> usize {
        self.data_size
    }

    /// A field of the first page that is a position.
    fn position_in_header(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: an aligned word of a page that is mapped until `drop`, and that everybody reads and writes
        // with single 64-bit instructions.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    /// The number of bytes that were written since the ring was made.
    pub(crate) fn head_word(&self) -> &AtomicU64 {
        self.position_in_header(std::mem::offset_of!(perf_event_mmap_page, data_head))
    }

    fn tail_word(&self) -> &AtomicU64 {
        self.position_in_header(std::mem::offset_of!(perf_event_mmap_page, data_tail))
    }

    pub(crate) fn head(&self) -> u64 {
        // `Acquire` pairs with the barrier the kernel puts between the records and this word.
        self.head_word().load(Ordering::Acquire)
    }

    /// How far the ring has been given back to who writes.
    pub(crate) fn tail(&self) -> u64 {
        self.tail_word().load(Ordering::Relaxed)
    }

    /// Gives everything before `position` back to who writes.
    pub(crate) fn release_to(&self, position: u64) {
        // `Release` keeps our copies before it.
        self.tail_word().store(position, Ordering::Release);
    }

    /// Copies the bytes from `position` on. They are what was written there only if
    /// `position` lies between tail and head; otherwise they are just some bytes.
    pub(crate) fn copy(&self, position: u64, out: &mut [u8]) {
        let mut position = position as usize;
        let mut rest = out;
        while !rest.is_empty() {
            let word = self.word(position).to_ne_bytes();
            let from = word.iter().skip(position % word.len());
            let length = (word.len() - position % word.len()).min(rest.len());
            let (now, later) = rest.split_at_mut(length);
            now.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
            position = position.wrapping_add(length);
            rest = later;
        }
    }

    /// The word around a position.
    fn word(&self, position: usize) -> u64 {
        let offset = position & (self.data_size - 1) & !7;
        // SAFETY: `data_size` is a power of two of pages: so the word lies within the mapping, which lives
        // until `drop`, and is aligned. The kernel, or a handler, may write there meanwhile: then it is some
        // word, and the positions say that it is not to be used.
        unsafe {
            let word = self.base.as_ptr().add(self.page_size + offset);
            AtomicU64::from_ptr(word.cast()).load(Ordering::Relaxed)
        }
    }

    /// Exchanges a perf mapping, whose event is closed, for zeros, and keeps its head: who reads that goes on
    /// seeing the last one.
    pub(super) fn replace_by_zeros(&self) {
        let length = self.page_size + self.data_size;
        // First the new memory and then the change of places: where the system promises no memory
        // that it does not have, `MAP_FIXED` could take the old and refuse the new.
        // SAFETY: a new mapping at an address of the kernel's choosing disturbs nothing.
        let zeros = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                length,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        };
        // If it is refused the ring just stays, and nothing is written to it any more.
        let Ok(zeros) = zeros else { return };
        let page = zeros.cast::<perf_event_mmap_page>();
        // SAFETY: a field of the mapping just made, of which nobody else knows, and which is longer.
        unsafe { (&raw mut (*page).data_head).write(self.head()) };
        // SAFETY: the first range is the mapping just made, the second is our own until `drop`.
        // The kernel changes them while no thread of ours can fault, so one that reads meanwhile
        // finds either the ring or zeros.
        let moved = unsafe {
            rustix::mm::mremap_fixed(
                zeros,
                length,
                length,
                rustix::mm::MremapFlags::MAYMOVE,
                self.base.as_ptr().cast(),
            )
        };
        if moved.is_err() {
            // No room for one more mapping: again the ring just stays, unless it was taken away before that
            // was found out.
            // SAFETY: the mapping just made, of which nobody else knows.
            _ = unsafe { rustix::mm::munmap(zeros, length) };
            self.fill_gap();
        }
    }

    /// Maps zeros where the ring was, if nothing is there.
    fn fill_gap(&self) {
        const MOST_TRIES: u32 = 1000;
        let length = self.page_size + self.data_size;
        let base = self.base.as_ptr().cast();
        for _ in 0..MOST_TRIES {
            // SAFETY: nothing that is mapped is touched: what is there makes it fail.
            let filled = unsafe {
                rustix::mm::mmap_anonymous(
                    base,
                    length,
                    ProtFlags::READ | ProtFlags::WRITE,
                    MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED_NOREPLACE,
                )
            };
            match filled {
                // Before Linux 4.17 the address is a wish.
                Ok(elsewhere) if elsewhere != base => {
                    // SAFETY: the mapping just made, of which nobody else knows.
                    _ = unsafe { rustix::mm::munmap(elsewhere, length) };
                    return;
                }
                Ok(_) | Err(rustix::io::Errno::EXIST) => return,
                // There may be memory in a moment, and who reads here until then ends the process.
                Err(_) => std::thread::yield_now(),
            }
        }
    }

    /// Gives back what the records take. A handler that is at work this very moment still finds memory, and the
    /// first page as it was.
    pub(super) fn discard_records(&self) {
        let data = self.base.as_ptr().wrapping_add(self.page_size);
        // SAFETY: private memory of ours, whose bytes nobody needs any more.
        // Refused for memory that the program has locked: then it stays.
        _ = unsafe {
            rustix::mm::madvise(data.cast(), self.data_size, rustix::mm::Advice::LinuxDontNeed)
        };
    }

    /// Only for the one thread that writes to memory that is not the kernel's.
    pub(super) fn writer(&self) -> RingWriter<'_> {
        // Acquire: what was before the tail has been read by the time we write over it.
        let tail = self.tail_word().load(Ordering::Acquire);
        RingWriter { memory: self, position: self.head_word().load(Ordering::Relaxed), tail }
    }
}

fn page_size() -> usize {
    // SAFETY: takes a number and gives one; this one is always known.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).unwrap_or(4096)
}

impl Drop for RingMemory {
    fn drop(&mut self) {
        // In the child of a fork the addresses of a perf mapping may belong to somebody else.
        if !self.home.is_current() {
            return;
        }
        let start = self.base.as_ptr().wrapping_sub(self.guard_size);
        let length = self.page_size + self.data_size + 2 * self.guard_size;
        // SAFETY: the range was mapped by `of_event` or `anonymous`, is unmapped only here, and nobody
        // holds a pointer into it but through this value, which is going away.
        let unmapped = unsafe { rustix::mm::munmap(start.cast(), length) };
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}

/// One record on its way into a ring.
pub(super) struct RingWriter<'a> {
    memory: &'a RingMemory,
    position: u64,
    tail: u64,
}

impl RingWriter<'_> {
    pub(super) fn has_room(&self, bytes: u64) -> bool {
        let used = self.position.wrapping_sub(self.tail);
        used.wrapping_add(bytes) <= self.memory.data_size as u64
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
        let data_size = self.memory.data_size as u64;
        let data = self.memory.base.as_ptr().wrapping_add(self.memory.page_size);
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

    /// Lets others see what was written.
    pub(super) fn publish(self) {
        self.memory.head_word().store(self.position, Ordering::Release);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_from_any_position_around_the_end() {
        let ring = RingMemory::anonymous(4096).unwrap();
        let words: Vec<u64> =
            (0..512_u64).map(|number| number.wrapping_mul(0x0101_0101_0101_0101)).collect();
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        assert!(words.chunks(64).all(|words| ring.write_scripted(words)));
        for position in [0, 1, 7, 8, 13, 4080, 4089, 4095, 4096 * 3 + 5, u64::MAX - 4095] {
            for length in [0, 1, 3, 8, 9, 16, 31, 4096] {
                let mut out = vec![0xaa; length];
                ring.copy(position, &mut out);
                let from = position as usize % 4096;
                let expected: Vec<u8> =
                    bytes.iter().cycle().skip(from).take(length).copied().collect();
                assert_eq!(out, expected, "{position} {length}");
            }
        }
    }

    /// Where perf is refused, or this thread is not sampled in time, there is nothing to see.
    #[test]
    fn hooks_see_the_last_position_of_a_ring_that_was_given_back() {
        let Ok(ring) = super::super::perf::open_switch_ring(8 * page_size(), 0) else { return };
        ring.start().unwrap();
        (0..100).for_each(|_| std::thread::sleep(std::time::Duration::from_micros(100)));
        ring.pause();
        let (seen, word) = (ring.head(), ring.word(0));
        assert!(seen > 0 && word > 0, "the thread was switched");
        ring.retire();
        assert_eq!((ring.head(), ring.word(0)), (seen, 0));
        ring.retire();
        assert_eq!(ring.head(), seen, "once is enough");
    }

    #[test]
    fn a_ring_that_is_gone_reads_as_zeros() {
        let ring = RingMemory::anonymous(4096).unwrap();
        ring.release_to(77);
        // It is there: nothing happens.
        ring.fill_gap();
        assert_eq!(ring.tail(), 77);
        let length = ring.page_size + ring.data_size;
        // SAFETY: nobody reads there before it is mapped again.
        unsafe { rustix::mm::munmap(ring.base.as_ptr().cast(), length).unwrap() };
        ring.fill_gap();
        assert_eq!((ring.head(), ring.tail()), (0, 0));
    }
}
