//! The memory that the kernel writes records into.
#![allow(
    unsafe_code,
    reason = "maps and reads memory shared with the kernel; rustix has no perf mappings"
)]

use std::hash::{BuildHasher as _, RandomState};
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;
use perf_event_open_sys::bindings::perf_event_mmap_page;
use rustix::mm::{MapFlags, ProtFlags};

use super::blocked::cpu_ns_of;
use super::perf::{Event, disable_event, enable_event};
use super::poll::Wakeups;
use super::sink::{Sink, SinkMemory};
use super::thread::process_id;
use super::timer::Timer;
use crate::sys::types::WhyRefused;

/// A perf event and its ring: a page of counters, then a power of two of pages of records.
///
/// The kernel writes while we read, so no reference to the mapping is ever made: bytes are copied
/// out, and what they say about their own length is for the parser to doubt.
#[derive(Debug)]
pub(crate) struct Ring {
    writer: Mutex<Option<RingWriter>>,
    base: NonNull<u8>,
    page_size: usize,
    data_size: usize,
    process: u32,
    /// The kernel writes here, and not a signal handler of ours.
    is_of_kernel: bool,
    /// See [`take_foreign`](Self::take_foreign).
    foreign: AtomicU64,
    has_kernel_chains: bool,
    /// A handler may still write here: it did not come to its end.
    is_in_use: AtomicBool,
    /// What a handler wakes that has filled it to its mark.
    wakes: Option<Arc<Wakeups>>,
}

/// Who makes a ring be written to.
#[derive(Debug)]
enum RingWriter {
    Event(Event),
    Timer(Timer),
}

// SAFETY: the mapping belongs to the process, not to a thread, and stays mapped until `drop`, which needs
// the ring for itself.
unsafe impl Send for Ring {}
// SAFETY: what may be called from several threads at once does one of three things with the mapping. It
// loads or stores single words, atomically (`head`, `tail`, `release_to`, `copy`,
// `position`, `position_word`, `sink`, whose fields that change are atomics): a value
// that comes at the wrong time is a wrong position, which the parser doubts, and never a wrong address. It
// does so with the writer locked (`set_timer`, `take_foreign`, `has_lost_signal`, `start`, `pause`,
// `stop_timer`, `retire`). Or it exchanges its pages as a
// whole while all addresses stay mapped and readable (`retire`, `empty`). All other fields do not change.
unsafe impl Sync for Ring {}

impl Ring {
    /// Maps the ring of `event` with `data_size` bytes of records, a power of two of pages.
    pub(super) fn map(event: Event, data_size: usize) -> io::Result<Self> {
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
                event.file()?,
                0,
            )?
        };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self {
            writer: Mutex::new(Some(RingWriter::Event(event))),
            base,
            page_size,
            data_size,
            process: process_id(),
            is_of_kernel: true,
            foreign: AtomicU64::new(0),
            has_kernel_chains: false,
            is_in_use: AtomicBool::new(false),
            wakes: None,
        })
    }

    pub(super) fn with_kernel_chains(mut self, has_kernel_chains: bool) -> Self {
        self.has_kernel_chains = has_kernel_chains;
        self
    }

    /// Whether its samples hold the call chain in the kernel.
    pub(crate) fn has_kernel_chains(&self) -> bool {
        self.has_kernel_chains
    }

    /// A ring for a signal handler to write to, laid out as the kernel's are. Before and behind it
    /// is a page that nobody may touch.
    pub(super) fn of_ours(data_size: usize, wakes: Option<Arc<Wakeups>>) -> io::Result<Self> {
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
        let ring = Self {
            writer: Mutex::new(None),
            base: NonNull::new(base).ok_or(io::ErrorKind::OutOfMemory)?,
            page_size,
            data_size,
            process: process_id(),
            is_of_kernel: false,
            foreign: AtomicU64::new(0),
            has_kernel_chains: false,
            is_in_use: AtomicBool::new(false),
            wakes,
        };
        // SAFETY: a part of the mapping just made.
        unsafe {
            let flags = rustix::mm::MprotectFlags::READ | rustix::mm::MprotectFlags::WRITE;
            rustix::mm::mprotect(base.cast(), length, flags)?;
        }
        Ok(ring)
    }

    /// What writes to a ring of ours.
    pub(super) fn set_timer(&self, timer: Timer) {
        *self.writer.lock() = Some(RingWriter::Timer(timer));
    }

    /// Where a ring of ours keeps what the signal handler must know.
    pub(super) fn sink(&self) -> NonNull<Sink> {
        // SAFETY: inside the first page, behind the kernel's part of it, which rings of ours have
        // only for its two positions.
        unsafe { self.base.add(SINK_OFFSET).cast() }
    }

    /// Null if nobody is to be woken; else valid as long as the ring.
    pub(super) fn wakes(&self) -> *const Wakeups {
        self.wakes.as_ref().map_or(std::ptr::null(), Arc::as_ptr)
    }

    pub(super) fn sink_memory(&self) -> SinkMemory {
        SinkMemory {
            head: self.head_word().as_ptr(),
            tail: self.tail_word().as_ptr(),
            data: self.base.as_ptr().wrapping_add(self.page_size),
            data_size: self.data_size as u64,
        }
    }

    /// Samples that the timer of a ring of ours could not take because the thread was on a stack
    /// that is not its own, since this was last asked.
    pub(crate) fn take_foreign(&self) -> u64 {
        if let Some(RingWriter::Timer(timer)) = &*self.writer.lock() {
            self.foreign.fetch_add(timer.take_foreign(), Ordering::Relaxed);
        }
        self.foreign.swap(0, Ordering::Relaxed)
    }

    /// Whether a timer fills it whose signal somebody else handles by now.
    pub(crate) fn has_lost_signal(&self) -> bool {
        match &*self.writer.lock() {
            Some(RingWriter::Timer(timer)) => timer.has_lost_signal(),
            _ => false,
        }
    }

    /// What fills it begins, or goes on.
    pub(crate) fn start(&self) -> Result<(), WhyRefused> {
        let why = |error: io::Error| WhyRefused::Other(error.raw_os_error().unwrap_or(0));
        match &*self.writer.lock() {
            Some(RingWriter::Event(event)) => event.file().and_then(enable_event).map_err(why),
            Some(RingWriter::Timer(timer)) => {
                // SAFETY: written before the timer was made, and valid as long as the ring.
                let sink = unsafe { self.sink().as_ref() };
                // What the thread has run for until now is nobody's.
                let cpu_ns = cpu_ns_of((sink.ids >> 32) as u32).unwrap_or(0);
                sink.cpu_ns.store(cpu_ns, Ordering::Relaxed);
                // So that no point of a short time is more likely to be sampled than another.
                let first_ns = 1 + RandomState::new().hash_one(cpu_ns) % sink.period_ns.max(1);
                timer.set(first_ns, sink.period_ns).map_err(WhyRefused::Other)
            }
            None => Ok(()),
        }
    }

    /// What fills it stops, until it is started again.
    pub(crate) fn pause(&self) {
        match &*self.writer.lock() {
            Some(RingWriter::Event(event)) => _ = event.file().and_then(disable_event),
            Some(RingWriter::Timer(timer)) => _ = timer.set(0, 0),
            None => {}
        }
    }

    /// The position that hooks see now.
    pub(crate) fn position(&self) -> u64 {
        // SAFETY: mapped until `drop`, aligned, and written with one 64-bit store.
        unsafe { self.position_word().as_ref() }.load(Ordering::Acquire)
    }

    /// Ends the sampling of a thread by a timer; what is in the ring stays there.
    pub(crate) fn stop_timer(&self) {
        if self.process != process_id() {
            return;
        }
        let mut writer = self.writer.lock();
        if let Some(RingWriter::Timer(timer)) = &*writer {
            self.foreign.fetch_add(timer.take_foreign(), Ordering::Relaxed);
            self.end_writer(&mut writer);
        }
    }

    fn end_writer(&self, writer: &mut Option<RingWriter>) {
        if let Some(RingWriter::Timer(timer)) = writer.take()
            && !timer.end()
        {
            self.is_in_use.store(true, Ordering::Relaxed);
        }
    }

    /// The bytes that records may fill.
    pub(crate) fn data_size(&self) -> usize {
        self.data_size
    }

    pub(super) fn header(&self) -> NonNull<perf_event_mmap_page> {
        self.base.cast()
    }

    /// The number of bytes that the kernel has written since the ring was made.
    pub(crate) fn head_word(&self) -> NonNull<AtomicU64> {
        // SAFETY: projects to a field of the header page without making a reference.
        let word = unsafe { &raw mut (*self.header().as_ptr()).data_head };
        // SAFETY: a field of a page that is mapped at an address that is not null.
        unsafe { NonNull::new_unchecked(word).cast() }
    }

    /// What moves when a sample is taken: the same, or in a ring of ours a number of its own, since there
    /// samples are not all of one length.
    pub(crate) fn position_word(&self) -> NonNull<AtomicU64> {
        if self.is_of_kernel {
            return self.head_word();
        }
        // SAFETY: projects to a field of the sink without making a reference.
        let word = unsafe { &raw mut (*self.sink().as_ptr()).position };
        // SAFETY: a field of a page that is mapped at an address that is not null.
        unsafe { NonNull::new_unchecked(word) }
    }

    /// Whether records end with the position at which hooks saw them.
    pub(crate) fn says_positions(&self) -> bool {
        !self.is_of_kernel
    }

    pub(crate) fn head(&self) -> u64 {
        // SAFETY: mapped until `drop`, aligned, and written by the kernel with one 64-bit store.
        // `Acquire` pairs with the barrier the kernel puts between the records and this word.
        unsafe { self.head_word().as_ref() }.load(Ordering::Acquire)
    }

    fn tail_word(&self) -> NonNull<AtomicU64> {
        // SAFETY: projects to a field of the header page without making a reference.
        let word = unsafe { &raw mut (*self.header().as_ptr()).data_tail };
        // SAFETY: a field of a page that is mapped at an address that is not null.
        unsafe { NonNull::new_unchecked(word).cast() }
    }

    /// How far the ring has been given back to the kernel.
    pub(crate) fn tail(&self) -> u64 {
        // SAFETY: mapped until `drop`, aligned, and only ever written through this atomic.
        unsafe { self.tail_word().as_ref() }.load(Ordering::Relaxed)
    }

    /// Gives everything before `position` back to the kernel.
    pub(crate) fn release_to(&self, position: u64) {
        // SAFETY: as for `tail`. `Release` keeps our copies before it.
        unsafe { self.tail_word().as_ref() }.store(position, Ordering::Release);
    }

    /// Copies the bytes from `position` on. They are what the kernel wrote there only if
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

    /// Closes the event and gives the ring's memory back, for good. Its thread may go on reading
    /// positions: it sees the last one.
    pub(crate) fn retire(&self) {
        if self.process != process_id() {
            return;
        }
        if !self.is_of_kernel {
            self.stop_timer();
            self.empty();
            return;
        }
        let Some(RingWriter::Event(event)) = self.writer.lock().take() else { return };
        // A child of a fork may hold it too, and then to close it is not the end of it.
        _ = event.file().and_then(disable_event);
        drop(event);
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
        unsafe { (&raw mut (*page).data_head).write(self.position()) };
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
}

impl Ring {
    /// Gives back what the records of a ring of ours take. A handler that is at work this very
    /// moment still finds memory, and the first page as it was.
    fn empty(&self) {
        let data = self.base.as_ptr().wrapping_add(self.page_size);
        // SAFETY: private memory of ours, whose bytes nobody needs any more.
        // Refused for memory that the program has locked: then it stays.
        _ = unsafe {
            rustix::mm::madvise(data.cast(), self.data_size, rustix::mm::Advice::LinuxDontNeed)
        };
    }
}

/// Behind all that `perf_event_mmap_page` has, and well inside the smallest page.
const SINK_OFFSET: usize = 2048;
const _: () = assert!(size_of::<perf_event_mmap_page>() <= SINK_OFFSET);
const _: () = assert!(SINK_OFFSET + size_of::<Sink>() <= 4096);

fn page_size() -> usize {
    // SAFETY: takes a number and gives one; this one is always known.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).unwrap_or(4096)
}

impl Drop for Ring {
    fn drop(&mut self) {
        // The kernel does not copy the mapping into the child of a fork: there the addresses may
        // belong to somebody else.
        if self.process != process_id() {
            // Timers are not copied either: their numbers may be somebody else's here.
            std::mem::forget(self.writer.lock().take());
            return;
        }
        // First who writes there.
        self.end_writer(&mut self.writer.lock());
        if self.is_in_use.load(Ordering::Relaxed) {
            std::mem::forget(self.wakes.take());
            return;
        }
        let guards = if self.is_of_kernel { 0 } else { self.page_size };
        let start = self.base.as_ptr().wrapping_sub(guards);
        let length = self.page_size + self.data_size + 2 * guards;
        // SAFETY: the range was mapped by `map` or `of_ours`, is unmapped only here, and nobody
        // holds a pointer into it but through this ring, which is going away. That goes for the
        // signal handler too: none is under way (see `Timer::end`), and a later one finds no ring.
        let unmapped = unsafe { rustix::mm::munmap(start.cast(), length) };
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_from_any_position_around_the_end() {
        let ring = Ring::scripted(4096, 1).unwrap();
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
        let (seen, word) = (ring.position(), ring.word(0));
        assert!(seen > 0 && word > 0, "the thread was switched");
        ring.retire();
        assert_eq!((ring.position(), ring.word(0)), (seen, 0));
        ring.retire();
        assert_eq!(ring.position(), seen, "once is enough");
    }

    #[test]
    fn a_ring_that_is_gone_reads_as_zeros() {
        let ring = Ring::scripted(4096, 1).unwrap();
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
