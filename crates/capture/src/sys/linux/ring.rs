//! The memory of a ring of records.
#![allow(
    unsafe_code,
    reason = "maps and reads memory shared with the kernel or a signal handler; rustix has no perf mappings"
)]

use std::ffi::c_void;
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use perf_event_open_sys::bindings::perf_event_mmap_page;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use super::clock::monotonic_raw_ns;
use super::pages::{READ_WRITE, keep_stacks_here, map_zeros};
use super::thread::current_pid;

/// A page of counters and a power of two of pages of records, in perf's layout.
///
/// The kernel or a signal handler writes concurrently, so no reference to the mapping is ever created. Words are copied
/// out, and the parser validates the lengths they contain.
#[derive(Debug)]
pub struct RingMemory {
    base: NonNull<u8>,
    page_size: usize,
    data_size: usize,
    /// The size of the inaccessible memory on each side.
    guard_size: usize,
    /// The process that mapped it: the kernel does not copy a perf mapping into a forked child.
    home: u32,
}

// SAFETY: the mapping belongs to the process, not to a thread, and stays mapped until `drop`, which has exclusive
// access.
unsafe impl Send for RingMemory {}
// SAFETY: methods that can be called concurrently load or store single words atomically: a stale value is a wrong
// position, which the parser rejects, and never a wrong address. Or they replace whole pages while all addresses stay
// mapped and readable (`replace_by_zeros`, `discard_records`). The fields do not change.
unsafe impl Sync for RingMemory {}

pub(crate) fn bytes_of_ring(data_bytes: usize) -> u64 {
    (page_size() + data_bytes) as u64
}

impl RingMemory {
    /// Maps the ring of a perf event with `data_size` bytes of records, a power of two of pages.
    pub(super) fn of_event(event: BorrowedFd<'_>, data_size: usize) -> io::Result<Self> {
        let page_size = page_size();
        // The kernel rounds up to pages, which have 64 KiB on some machines, and writes to all of them.
        let data_size = data_size.max(page_size);
        // SAFETY: the kernel chooses the address of the new mapping, so no other memory is affected.
        let base = unsafe {
            let length = page_size + data_size;
            rustix::mm::mmap(ptr::null_mut(), length, READ_WRITE, MapFlags::SHARED, event, 0)?
        };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, page_size, data_size, guard_size: 0, home: current_pid() })
    }

    /// Private memory of the same layout, between two guard pages.
    pub(super) fn anonymous(data_size: usize) -> io::Result<Self> {
        let page_size = page_size();
        let data_size = data_size.max(page_size);
        let length = page_size + data_size;
        let guarded = map_zeros(ptr::null_mut(), length + 2 * page_size, ProtFlags::empty())?;
        let base = guarded.cast::<u8>().wrapping_add(page_size);
        let memory = Self {
            base: NonNull::new(base).ok_or(io::ErrorKind::OutOfMemory)?,
            page_size,
            data_size,
            guard_size: page_size,
            home: current_pid(),
        };
        // SAFETY: a part of the mapping just created.
        unsafe {
            let flags = rustix::mm::MprotectFlags::READ | rustix::mm::MprotectFlags::WRITE;
            rustix::mm::mprotect(base.cast(), length, flags)?;
            keep_stacks_here(memory.base, length);
        }
        Ok(memory)
    }

    /// Whether this process mapped it. Only that one may stop its writer or unmap it.
    pub(super) fn is_at_home(&self) -> bool {
        self.home == current_pid()
    }

    pub fn data_size(&self) -> usize {
        self.data_size
    }

    fn position_in_header(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: an aligned word of a page that is mapped until `drop`, and that all sides access with single 64-bit
        // instructions.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    /// The number of bytes written since the ring was created.
    pub(crate) fn head_word(&self) -> &AtomicU64 {
        self.position_in_header(std::mem::offset_of!(perf_event_mmap_page, data_head))
    }

    fn tail_word(&self) -> &AtomicU64 {
        self.position_in_header(std::mem::offset_of!(perf_event_mmap_page, data_tail))
    }

    pub fn head(&self) -> u64 {
        // `Acquire` pairs with the kernel's barrier between the records and this word.
        self.head_word().load(Ordering::Acquire)
    }

    /// The position up to which the reader has released the ring to the writer.
    pub fn tail(&self) -> u64 {
        self.tail_word().load(Ordering::Relaxed)
    }

    pub fn release_to(&self, position: u64) {
        // `Release` orders the reads of the records before this store.
        self.tail_word().store(position, Ordering::Release);
    }

    /// The eight bytes from `position` on. They are valid only if they lie between tail and head, or else arbitrary.
    pub(crate) fn word(&self, position: u64) -> u64 {
        let position = position as usize;
        let (first, shift) = (self.aligned_word(position), position % 8 * 8);
        match shift {
            0 => first,
            // Both processors are little-endian.
            _ => first >> shift | self.aligned_word(position.wrapping_add(8)) << (64 - shift),
        }
    }

    /// The aligned word that contains a position.
    fn aligned_word(&self, position: usize) -> u64 {
        let offset = position & (self.data_size - 1) & !7;
        // SAFETY: `data_size` is a power of two of pages, so the word is aligned and lies within the mapping, which
        // lives until `drop`. The kernel or a handler may write there concurrently: the word is then arbitrary, and the
        // positions show that it is invalid.
        unsafe {
            let word = self.base.as_ptr().add(self.page_size + offset);
            AtomicU64::from_ptr(word.cast()).load(Ordering::Relaxed)
        }
    }

    /// Replaces a perf mapping, whose event is closed, by zeros, and keeps its head, which threads continue to read.
    pub(super) fn replace_by_zeros(&self) {
        let length = self.page_size + self.data_size;
        // The new memory is mapped first and then moved: without overcommit, `MAP_FIXED` could unmap the old memory and
        // then fail to map the new.
        // On failure the ring stays mapped, and nothing writes to it any more.
        let Ok(zeros) = map_zeros(ptr::null_mut(), length, READ_WRITE) else { return };
        let page = zeros.cast::<perf_event_mmap_page>();
        // SAFETY: a field of the mapping just created, which is larger and not shared yet.
        unsafe { (&raw mut (*page).data_head).write(self.head()) };
        // SAFETY: the first range is the mapping just created, the second is owned until `drop`. The kernel replaces it
        // while no thread of the process can fault, so a concurrent reader finds either the ring or zeros.
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
            // The limit of mappings is reached: the ring stays mapped, unless it was unmapped before the failure.
            // SAFETY: the mapping just created, which is not shared.
            _ = unsafe { rustix::mm::munmap(zeros, length) };
            self.fill_gap();
        }
    }

    /// Maps zeros in place of the ring, if nothing is mapped there. Waits for memory as long as there is none: a thread that
    /// reads there until then would end the process.
    fn fill_gap(&self) {
        let length = self.page_size + self.data_size;
        let base = self.base.as_ptr().cast();
        loop {
            match map_zeros(base, length, READ_WRITE) {
                // Before Linux 4.17 the address is only a hint.
                Ok(elsewhere) if elsewhere != base => {
                    // SAFETY: the mapping just created, which is not shared.
                    _ = unsafe { rustix::mm::munmap(elsewhere, length) };
                    return;
                }
                Err(Errno::NOMEM | Errno::AGAIN) => std::thread::sleep(Duration::from_micros(50)),
                // There is a mapping, or (any other error) there can be none.
                Ok(_) | Err(_) => return,
            }
        }
    }

    /// Releases the memory of the records. A handler that runs right now still finds memory, and the same first page.
    pub(super) fn discard_records(&self) {
        let data = self.base.as_ptr().wrapping_add(self.page_size);
        // The kernel refuses this for memory that the program has locked, which then stays.
        // SAFETY: private memory of this ring, whose contents are no longer needed.
        _ = unsafe {
            rustix::mm::madvise(data.cast(), self.data_size, rustix::mm::Advice::LinuxDontNeed)
        };
    }

    /// Only for the single writer of a ring that the kernel does not fill.
    pub(super) fn writer(&self) -> RingWriter<'_> {
        // Acquire: the reader has finished with what precedes the tail before it is overwritten.
        let tail = self.tail_word().load(Ordering::Acquire);
        RingWriter { memory: self, position: self.head_word().load(Ordering::Relaxed), tail }
    }
}

pub(super) fn page_size() -> usize {
    // SAFETY: takes and returns a number; this one is always known.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).unwrap_or(4096)
}

impl Drop for RingMemory {
    fn drop(&mut self) {
        // In a forked child, the addresses of a perf mapping may belong to another mapping.
        if !self.is_at_home() {
            return;
        }
        let start = self.base.as_ptr().wrapping_sub(self.guard_size);
        let length = self.page_size + self.data_size + 2 * self.guard_size;
        // SAFETY: the range was mapped by `of_event` or `anonymous` and is unmapped only here, and all pointers into it
        // come from this value, which is being dropped.
        let unmapped = unsafe { rustix::mm::munmap(start.cast(), length) };
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}

/// In the kernel's order of register numbers, as in perf's records.
#[cfg(target_arch = "x86_64")]
pub(super) type RawRegisters = [u64; 3];
#[cfg(target_arch = "aarch64")]
pub(super) type RawRegisters = [u64; 4];

const RECORD_SAMPLE: u64 = 9;
pub(super) const RECORD_LOST: u64 = 2;
const IN_USER_MODE: u64 = 2;
const ABI_64: u64 = 2;

/// How much [`RingWriter::read_ahead`] reads, in pieces. A page has no less, and the handler that reads has little stack.
const PIECE: u64 = 4096;
const PIECES: usize = 9;
pub(super) const MAX_READ: u64 = PIECE * (PIECES as u64 - 1);

pub(super) struct RingWriter<'a> {
    memory: &'a RingMemory,
    position: u64,
    tail: u64,
}

impl RingWriter<'_> {
    pub(super) fn has_room(&self, bytes: u64) -> bool {
        self.used().wrapping_add(bytes) <= self.memory.data_size as u64
    }

    /// How many bytes the reader has not released, with what was written since.
    pub(super) fn used(&self) -> u64 {
        self.position.wrapping_sub(self.tail)
    }

    /// Writes a word. The record must [have room](Self::has_room).
    pub(super) fn word(&mut self, word: u64) {
        let bytes = word.to_ne_bytes();
        // SAFETY: eight bytes of a local variable.
        unsafe { self.bytes(bytes.as_ptr(), 8) };
    }

    /// Writes what precedes the stack in the record of a sample.
    pub(super) fn begin_sample(&mut self, size: u64, ids: u64, of: &RawRegisters, stack: u64) {
        self.word(RECORD_SAMPLE | IN_USER_MODE << 32 | size << 48);
        self.word(ids);
        self.word(monotonic_raw_ns());
        // No call chain of the kernel.
        self.word(0);
        self.word(ABI_64);
        for register in of {
            self.word(*register);
        }
        self.word(stack);
    }

    /// Copies up to `length` bytes of this process's memory from `from` on to `offset` bytes beyond here, as far as they are
    /// mapped and [`MAX_READ`] allows. Returns how many. The record must [have room](Self::has_room) for all of them.
    pub(super) fn read_ahead(&self, offset: u64, from: u64, length: u64) -> u64 {
        let nothing = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        let mut pieces = [nothing; PIECES];
        let (mut at, mut left, mut count) = (from, length, 0);
        for piece in &mut pieces {
            // The kernel copies each piece completely or not at all.
            let bytes = (PIECE - at % PIECE).min(left);
            if bytes == 0 {
                break;
            }
            *piece = libc::iovec { iov_base: at as *mut c_void, iov_len: bytes as usize };
            (at, left, count) = (at.wrapping_add(bytes), left.wrapping_sub(bytes), count + 1);
        }
        let all = length.wrapping_sub(left);
        let data_size = self.memory.data_size as u64;
        let data = self.memory.base.as_ptr().wrapping_add(self.memory.page_size);
        let begin = self.position.wrapping_add(offset) & data_size.wrapping_sub(1);
        let until_end = data_size.wrapping_sub(begin).min(all);
        let to = |from: u64, length: u64| libc::iovec {
            iov_base: data.wrapping_add(from as usize).cast(),
            iov_len: length as usize,
        };
        let to = [to(begin, until_end), to(0, all.wrapping_sub(until_end))];
        let process = rustix::process::getpid().as_raw_nonzero().get();
        // SAFETY: the kernel writes to the data of this ring, where the record has room and the reader reads nothing, since
        // it is not between tail and head. It checks the source addresses itself.
        let read =
            unsafe { libc::process_vm_readv(process, to.as_ptr(), 2, pieces.as_ptr(), count, 0) };
        u64::try_from(read).unwrap_or(0)
    }

    /// Moves on over bytes that were [read](Self::read_ahead).
    pub(super) fn skip(&mut self, length: u64) {
        self.position = self.position.wrapping_add(length);
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
        // SAFETY: the first part ends at the end of the data at the latest; the second begins at the start of the data,
        // and its length fits into the free space. The reader does not access it, since it is not between tail and
        // head.
        unsafe {
            copy_any(from, data.wrapping_add(offset as usize), until_end as usize);
            let rest = length.wrapping_sub(until_end) as usize;
            copy_any(from.wrapping_add(until_end as usize), data, rest);
        }
        self.position = self.position.wrapping_add(length);
    }

    /// Makes what was written visible to the reader.
    pub(super) fn publish(self) {
        self.memory.head_word().store(self.position, Ordering::Release);
    }
}

/// Copies bytes that may belong to any object, not by `memcpy`, which sanitizers instrument and programs replace.
///
/// # Safety
///
/// Both ranges must be mapped, the second must be writable, and they must not overlap.
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn copy_any(from: *const u8, to: *mut u8, length: usize) {
    // SAFETY: the instruction copies exactly these ranges; the direction flag is clear in Rust code.
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

/// # Safety
///
/// As above.
#[cfg(target_arch = "aarch64")]
pub(crate) unsafe fn copy_any(from: *const u8, to: *mut u8, length: usize) {
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
    fn memory_is_read_ahead_as_far_as_it_is_mapped_also_across_the_end_of_the_ring() {
        let ring = RingMemory::anonymous(64 * 1024).unwrap();
        // What follows its records is not accessible.
        let source = RingMemory::anonymous(4096).unwrap();
        let mut writer = source.writer();
        [7, 8, 9].into_iter().for_each(|word| writer.word(word));
        writer.publish();
        let from = source.base.as_ptr().wrapping_add(source.page_size).addr() as u64;
        let expected = MAX_READ.min(source.data_size as u64);
        for start in [0, ring.data_size as u64 - 24] {
            ring.head_word().store(start, Ordering::Release);
            ring.release_to(start);
            let mut writer = ring.writer();
            let length = writer.read_ahead(16, from, MAX_READ);
            assert_eq!(length, expected);
            writer.word(1);
            writer.word(2);
            writer.skip(length);
            writer.publish();
            assert_eq!(ring.head(), start + 16 + expected);
            let words = [0, 8, 16, 24, 32].map(|offset| ring.word(start + offset));
            assert_eq!(words, [1, 2, 7, 8, 9]);
        }
        // Nothing is mapped there.
        assert_eq!(ring.writer().read_ahead(0, 8, 64), 0);
    }

    #[test]
    fn words_are_read_at_any_position_around_the_end() {
        let ring = RingMemory::anonymous(4096).unwrap();
        let words: Vec<u64> =
            (0..512_u64).map(|number| number.wrapping_mul(0x0101_0101_0101_0101)).collect();
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        assert!(words.chunks(64).all(|words| ring.write_scripted(words)));
        for position in [0, 1, 7, 8, 13, 4080, 4089, 4095, 4096 * 3 + 5, u64::MAX - 4095] {
            let from = position as usize % 4096;
            let expected: Vec<u8> = bytes.iter().cycle().skip(from).take(8).copied().collect();
            assert_eq!(ring.word(position).to_ne_bytes().to_vec(), expected, "{position}");
        }
    }

    /// If perf is refused, or this thread is not switched in time, there is nothing to test.
    #[test]
    fn a_retired_ring_keeps_its_last_position() {
        let Ok(ring) = super::super::perf::open_switch_ring(8 * page_size(), 0) else { return };
        ring.start().unwrap();
        (0..100).for_each(|_| std::thread::sleep(std::time::Duration::from_micros(100)));
        ring.pause();
        let (head, word) = (ring.head(), ring.word(0));
        assert!(head > 0 && word > 0, "the thread was switched");
        ring.retire();
        assert_eq!((ring.head(), ring.word(0)), (head, 0));
        ring.retire();
        assert_eq!(ring.head(), head, "retiring twice is allowed");
    }

    /// In a process of its own, since another thread could map something there.
    #[test]
    fn an_unmapped_ring_is_replaced_by_zeros() {
        if !crate::testing::is_alone(
            "sys::platform::ring::tests::an_unmapped_ring_is_replaced_by_zeros",
        ) {
            return;
        }
        let ring = RingMemory::anonymous(4096).unwrap();
        ring.release_to(77);
        // The ring is mapped, so this does nothing.
        ring.fill_gap();
        assert_eq!(ring.tail(), 77);
        let length = ring.page_size + ring.data_size;
        // SAFETY: no thread reads there before it is mapped again.
        unsafe { rustix::mm::munmap(ring.base.as_ptr().cast(), length).unwrap() };
        ring.fill_gap();
        assert_eq!((ring.head(), ring.tail()), (0, 0));
    }

    /// In a process of its own, since no other thread could allocate at that time.
    #[test]
    fn an_unmapped_ring_waits_for_memory() {
        use std::sync::atomic::AtomicBool;

        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

        if !crate::testing::is_alone(
            "sys::platform::ring::tests::an_unmapped_ring_waits_for_memory",
        ) {
            return;
        }
        let ring = RingMemory::anonymous(4096).unwrap();
        let usual = getrlimit(Resource::As);
        let limit = |limit: Rlimit| setrlimit(Resource::As, limit).unwrap();
        let (is_ready, is_limited) = (AtomicBool::new(false), AtomicBool::new(false));
        let wait_for = |flag: &AtomicBool| {
            while !flag.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
        };
        std::thread::scope(|scope| {
            // Nothing is allocated while there is no memory.
            scope.spawn(|| {
                is_ready.store(true, Ordering::SeqCst);
                wait_for(&is_limited);
                std::thread::sleep(Duration::from_millis(300));
                limit(usual);
            });
            wait_for(&is_ready);
            let length = ring.page_size + ring.data_size;
            // SAFETY: no thread reads there before it is mapped again.
            unsafe { rustix::mm::munmap(ring.base.as_ptr().cast(), length).unwrap() };
            limit(Rlimit { current: Some(1), maximum: usual.maximum });
            is_limited.store(true, Ordering::SeqCst);
            ring.fill_gap();
            assert_eq!((ring.head(), ring.tail()), (0, 0));
        });
    }
}
