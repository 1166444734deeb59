//! The memory that the kernel writes records into.
#![allow(
    unsafe_code,
    reason = "maps and reads memory shared with the kernel; rustix has no perf mappings"
)]

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use parking_lot::Mutex;
use perf_event_open_sys::bindings::perf_event_mmap_page;
use rustix::mm::{MapFlags, ProtFlags};

use super::perf::{enable_event, redirect_event, set_event_period};
use super::sink::{Sink, SinkMemory};
use super::thread::process_id;
use super::timer::Timer;
use crate::sys::types::NotReplaced;

/// A perf event, or one that takes its place, and its ring: a page of counters, then a power of two of pages of records.
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
}

/// Who makes a ring be written to.
#[derive(Debug)]
enum RingWriter {
    Event(RingEvents),
    Timer(Timer),
}

/// The ring belongs to the first. The other may write to it in its place: what a sample holds cannot be
/// changed once an event is open.
#[derive(Debug)]
struct RingEvents {
    mapped: OwnedFd,
    instead: Option<OwnedFd>,
    /// Of the one that writes, if it was changed.
    period_ns: Option<u64>,
}

impl RingEvents {
    fn writing(&self) -> BorrowedFd<'_> {
        self.instead.as_ref().unwrap_or(&self.mapped).as_fd()
    }

    fn resume(&self) -> io::Result<()> {
        if let Some(period_ns) = self.period_ns {
            set_event_period(self.writing(), period_ns)?;
        }
        enable_event(self.writing(), true)
    }
}

// SAFETY: the mapping belongs to the process, not to a thread, and every access to it below is an
// atomic load or store or a copy out of memory that stays mapped until `drop`.
unsafe impl Send for Ring {}
// SAFETY: as for `Send`. Of the methods that change the ring, `release_to` and `retire` may be
// called from any thread without harm to memory: what they can disturb is which records are read.
unsafe impl Sync for Ring {}

impl Ring {
    /// Maps the ring of `event` with `data_size` bytes of records, a power of two of pages.
    pub(super) fn map(event: OwnedFd, data_size: usize) -> io::Result<Self> {
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
                &event,
                0,
            )?
        };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self {
            writer: Mutex::new(Some(RingWriter::Event(RingEvents {
                mapped: event,
                instead: None,
                period_ns: None,
            }))),
            base,
            page_size,
            data_size,
            process: process_id(),
            is_of_kernel: true,
            foreign: AtomicU64::new(0),
            has_kernel_chains: false,
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
    pub(super) fn of_ours(data_size: usize) -> io::Result<Self> {
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

    /// Ends the sampling of a thread by a timer; what is in the ring stays there. The thread must
    /// have done this itself before it gives up its share of the ring.
    pub(crate) fn stop_timer(&self) {
        if self.process != process_id() {
            return;
        }
        let mut writer = self.writer.lock();
        if let Some(RingWriter::Timer(timer)) = &*writer {
            self.foreign.fetch_add(timer.take_foreign(), Ordering::Relaxed);
            *writer = None;
        }
    }

    /// Changes the time between samples. The time until the next one begins anew.
    ///
    /// # Errors
    ///
    /// [`WouldBlock`](io::ErrorKind::WouldBlock) if somebody else changes something at this very moment.
    pub(crate) fn set_period_ns(&self, period_ns: u64) -> io::Result<()> {
        // A hook does not wait for the collector.
        let mut writer = self.writer.try_lock().ok_or(io::ErrorKind::WouldBlock)?;
        match &mut *writer {
            Some(RingWriter::Event(events)) => {
                set_event_period(events.writing(), period_ns)?;
                events.period_ns = Some(period_ns);
                Ok(())
            }
            Some(RingWriter::Timer(timer)) => {
                // SAFETY: written before the timer was made, and valid as long as the ring.
                unsafe { self.sink().as_ref() }.period_ns.store(period_ns, Ordering::Relaxed);
                timer.set_period_ns(period_ns).map_err(io::Error::from_raw_os_error)
            }
            None => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }

    /// Does something with the event that the ring belongs to, unless the ring was retired.
    pub(super) fn with_event<R>(
        &self,
        action: impl FnOnce(BorrowedFd<'_>) -> io::Result<R>,
    ) -> io::Result<R> {
        match &*self.writer.lock() {
            Some(RingWriter::Event(events)) => action(events.mapped.as_fd()),
            _ => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }

    /// Lets another event of the ring's thread write to it, or if there is none the ring's own. In between
    /// nobody writes, and `between` is given the ring's head.
    pub(super) fn write_by(
        &self,
        event: Option<OwnedFd>,
        between: impl FnOnce(u64),
    ) -> Result<(), NotReplaced> {
        let mut writer = self.writer.lock();
        let Some(RingWriter::Event(events)) = &mut *writer else {
            return Err(NotReplaced::AsBefore);
        };
        if let Some(event) = &event {
            let redirected = redirect_event(event.as_fd(), events.mapped.as_fd());
            redirected.map_err(|_| NotReplaced::AsBefore)?;
        }
        enable_event(events.writing(), false).map_err(|_| NotReplaced::AsBefore)?;
        between(self.head());
        let before = std::mem::replace(&mut events.instead, event);
        let resumed = events.resume();
        // To close an event takes a while, and the thread may want to change the period.
        drop(writer);
        drop(before);
        resumed.map_err(|_| NotReplaced::Stopped)
    }

    /// Whether another event writes than the ring's own.
    pub(crate) fn has_another_event(&self) -> bool {
        let writer = self.writer.lock();
        matches!(&*writer, Some(RingWriter::Event(events)) if events.instead.is_some())
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
        let mut from = position as usize & (self.data_size - 1);
        let mut rest = out;
        while !rest.is_empty() {
            let length = rest.len().min(self.data_size - from);
            let (now, later) = rest.split_at_mut(length);
            // SAFETY: `from + length <= data_size`, so the source lies within the mapping, which
            // lives until `drop`; `now` is ours alone. The kernel may write there meanwhile: we
            // only ever look at the copy.
            unsafe {
                let source = self.base.as_ptr().add(self.page_size + from);
                std::ptr::copy_nonoverlapping(source, now.as_mut_ptr(), length);
            }
            from = 0;
            rest = later;
        }
    }

    /// The time that the event's thread had been running when it was last switched in, in
    /// nanoseconds. `None` if the kernel would not stop changing it.
    ///
    /// On the event's own thread it never changes while we look, short of a preemption between.
    pub(crate) fn time_enabled_at_switch_in(&self) -> Option<u64> {
        let header = self.header().as_ptr();
        // SAFETY: projects to a field of the header page without making a reference.
        let lock = unsafe { &raw mut (*header).lock };
        // SAFETY: as above.
        let enabled = unsafe { &raw mut (*header).time_enabled };
        // SAFETY: both words are mapped until `drop`, aligned, and written by the kernel with
        // single stores of their size.
        let (lock, enabled) = unsafe { (AtomicU32::from_ptr(lock), AtomicU64::from_ptr(enabled)) };
        for _ in 0..8 {
            let before = lock.load(Ordering::Acquire);
            let time = enabled.load(Ordering::Acquire);
            if before & 1 == 0 && lock.load(Ordering::Acquire) == before {
                return Some(time);
            }
        }
        None
    }

    /// Closes the event and gives the ring's memory back, for good. Its thread may go on reading
    /// positions: it sees 0.
    pub(crate) fn retire(&self) {
        if self.process != process_id() {
            return;
        }
        if !self.is_of_kernel {
            self.stop_timer();
            self.empty();
            return;
        }
        let Some(RingWriter::Event(events)) = self.writer.lock().take() else { return };
        // A child of a fork may hold it too, and then to close it is not the end of it.
        _ = enable_event(events.writing(), false);
        drop(events);
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
            // No room for one more mapping: again the ring just stays.
            // SAFETY: the mapping just made, of which nobody else knows.
            _ = unsafe { rustix::mm::munmap(zeros, length) };
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
        drop(self.writer.lock().take());
        let guards = if self.is_of_kernel { 0 } else { self.page_size };
        let start = self.base.as_ptr().wrapping_sub(guards);
        let length = self.page_size + self.data_size + 2 * guards;
        // SAFETY: the range was mapped by `map` or `of_ours`, is unmapped only here, and nobody
        // holds a pointer into it but through this ring, which is going away. That goes for the
        // signal handler too: it runs on the ring's own thread, which gives up its share of the ring
        // itself (see `sampler::timer`), so no handler is under way, and a later one finds no ring.
        let unmapped = unsafe { rustix::mm::munmap(start.cast(), length) };
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}
