//! A global allocator that counts what each thread allocates.
#![allow(unsafe_code, reason = "implements `GlobalAlloc`")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// A global allocator that counts what spans allocate, in front of the program's own:
///
/// ```
/// use tracing_profiling::ProfilingAllocator;
///
/// #[global_allocator]
/// static ALLOCATOR: ProfilingAllocator = ProfilingAllocator::system();
/// ```
///
/// Any other allocator can do the work, for example `ProfilingAllocator::new(tikv_jemallocator::Jemalloc)`, of the type
/// `ProfilingAllocator<tikv_jemallocator::Jemalloc>`.
///
/// It passes each call on unchanged. While a layer profiles spans, it also adds to counters of the calling thread, from
/// which the hooks of spans take the difference: see [`TimeBreakdown::allocations`](crate::TimeBreakdown::allocations).
/// It takes no locks, makes no system calls and allocates nothing itself. What C code allocates with `malloc` does not
/// pass through it.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProfilingAllocator<A = System> {
    allocator: A,
}

impl ProfilingAllocator {
    /// In front of the system's allocator.
    pub const fn system() -> Self {
        Self::new(System)
    }
}

impl<A> ProfilingAllocator<A> {
    /// In front of that allocator.
    pub const fn new(allocator: A) -> Self {
        Self { allocator }
    }
}

/// What was allocated and freed, in bytes as they were requested and in calls.
///
/// A reallocation counts as an allocation of the new size and a free of the old one. A failed allocation does not count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Allocations {
    /// Bytes allocated.
    pub allocated_bytes: u64,
    /// The number of allocations.
    pub allocations: u64,
    /// Bytes freed, wherever they were allocated.
    pub freed_bytes: u64,
    /// The number of frees.
    pub frees: u64,
}

impl Allocations {
    pub(crate) fn since(self, before: Self) -> Self {
        Self {
            allocated_bytes: self.allocated_bytes.saturating_sub(before.allocated_bytes),
            allocations: self.allocations.saturating_sub(before.allocations),
            freed_bytes: self.freed_bytes.saturating_sub(before.freed_bytes),
            frees: self.frees.saturating_sub(before.frees),
        }
    }

    pub(crate) fn and(self, more: Self) -> Self {
        Self {
            allocated_bytes: self.allocated_bytes.saturating_add(more.allocated_bytes),
            allocations: self.allocations.saturating_add(more.allocations),
            freed_bytes: self.freed_bytes.saturating_add(more.freed_bytes),
            frees: self.frees.saturating_add(more.frees),
        }
    }
}

/// The number of layers that profile spans. The child of a fork has none.
static USERS: AtomicU32 = AtomicU32::new(0);
/// Whether the program's global allocator is a [`ProfilingAllocator`].
static IS_INSTALLED: AtomicBool = AtomicBool::new(false);

/// The counts of a thread. Each has its own cell, so that a signal handler that allocates can only lose counts. Without
/// a destructor, they can be used as long as the thread allocates.
struct ThreadAllocations {
    allocated_bytes: Cell<u64>,
    allocations: Cell<u64>,
    freed_bytes: Cell<u64>,
    frees: Cell<u64>,
}

thread_local! {
    static COUNTS: ThreadAllocations = const {
        ThreadAllocations {
            allocated_bytes: Cell::new(0),
            allocations: Cell::new(0),
            freed_bytes: Cell::new(0),
            frees: Cell::new(0),
        }
    };
}

#[inline(always)]
fn add(count: &Cell<u64>, more: u64) {
    count.set(count.get().wrapping_add(more));
}

#[inline(always)]
fn is_counting() -> bool {
    USERS.load(Ordering::Relaxed) != 0
}

#[inline(always)]
fn note_allocated(bytes: usize) {
    COUNTS.with(|counts| {
        add(&counts.allocated_bytes, bytes as u64);
        add(&counts.allocations, 1);
    });
}

#[inline(always)]
fn note_freed(bytes: usize) {
    COUNTS.with(|counts| {
        add(&counts.freed_bytes, bytes as u64);
        add(&counts.frees, 1);
    });
}

// SAFETY: each method passes its arguments on to the same method of the allocator and returns its result.
unsafe impl<A: GlobalAlloc> GlobalAlloc for ProfilingAllocator<A> {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // Without anything to do afterwards, the call is a jump.
        if !is_counting() {
            // SAFETY: what the caller guarantees.
            return unsafe { self.allocator.alloc(layout) };
        }
        // SAFETY: as above.
        let block = unsafe { self.allocator.alloc(layout) };
        if !block.is_null() {
            note_allocated(layout.size());
        }
        block
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if !is_counting() {
            // SAFETY: what the caller guarantees.
            return unsafe { self.allocator.alloc_zeroed(layout) };
        }
        // SAFETY: as above.
        let block = unsafe { self.allocator.alloc_zeroed(layout) };
        if !block.is_null() {
            note_allocated(layout.size());
        }
        block
    }

    #[inline]
    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        if is_counting() {
            note_freed(layout.size());
        }
        // SAFETY: what the caller guarantees.
        unsafe { self.allocator.dealloc(block, layout) };
    }

    #[inline]
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        if !is_counting() {
            // SAFETY: what the caller guarantees.
            return unsafe { self.allocator.realloc(block, layout, new_size) };
        }
        // SAFETY: as above.
        let new = unsafe { self.allocator.realloc(block, layout, new_size) };
        if !new.is_null() {
            note_freed(layout.size());
            note_allocated(new_size);
        }
        new
    }
}

/// What the calling thread has allocated since it began. Meaningful as a difference.
#[inline(always)]
pub(crate) fn allocated_here() -> Allocations {
    COUNTS.with(|counts| Allocations {
        allocated_bytes: counts.allocated_bytes.get(),
        allocations: counts.allocations.get(),
        freed_bytes: counts.freed_bytes.get(),
        frees: counts.frees.get(),
    })
}

/// While it lives, what the calling thread allocates does not count: it is the layer that allocates.
#[derive(Debug)]
pub(crate) struct Uncounted(Allocations);

impl Uncounted {
    #[inline]
    pub(crate) fn begin() -> Self {
        Self(allocated_here())
    }

    /// What the thread had allocated before.
    pub(crate) fn before(&self) -> Allocations {
        self.0
    }
}

impl Drop for Uncounted {
    #[inline]
    fn drop(&mut self) {
        let Allocations { allocated_bytes, allocations, freed_bytes, frees } = self.0;
        COUNTS.with(|counts| {
            counts.allocated_bytes.set(allocated_bytes);
            counts.allocations.set(allocations);
            counts.freed_bytes.set(freed_bytes);
            counts.frees.set(frees);
        });
    }
}

/// One more layer profiles spans.
pub(crate) fn begin_counting() {
    USERS.fetch_add(1, Ordering::Relaxed);
    let _uncounted = Uncounted::begin();
    let before = allocated_here();
    drop(black_box(Box::new(0_u8)));
    if allocated_here() != before {
        IS_INSTALLED.store(true, Ordering::Relaxed);
    }
}

/// One layer fewer profiles spans.
pub(crate) fn end_counting() {
    USERS.fetch_sub(1, Ordering::Relaxed);
}

/// Called in the child of a fork, where no layer profiles spans.
pub(crate) fn forget_counting() {
    USERS.store(0, Ordering::Relaxed);
}

/// Whether allocations are counted now, and the program's global allocator is a [`ProfilingAllocator`].
#[inline]
pub(crate) fn counts_allocations() -> bool {
    is_counting() && IS_INSTALLED.load(Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The global allocator of the tests is another one.
    const ALLOCATOR: ProfilingAllocator = ProfilingAllocator::system();

    fn counted(action: impl FnOnce()) -> [u64; 4] {
        let before = allocated_here();
        action();
        let Allocations { allocated_bytes, allocations, freed_bytes, frees } =
            allocated_here().since(before);
        [allocated_bytes, allocations, freed_bytes, frees]
    }

    #[test]
    fn each_call_is_passed_on_and_counted() {
        begin_counting();
        let layout = Layout::from_size_align(100, 64).unwrap();
        let larger = Layout::from_size_align(300, 64).unwrap();
        // SAFETY: blocks are used within their layouts, and freed once with the layout that they have.
        unsafe {
            let mut block = std::ptr::null_mut();
            assert_eq!(counted(|| block = ALLOCATOR.alloc(layout)), [100, 1, 0, 0]);
            assert_eq!(block.addr() % 64, 0);
            block.write_bytes(7, 100);
            let grow = || block = ALLOCATOR.realloc(block, layout, 300);
            assert_eq!(counted(grow), [300, 1, 100, 1]);
            assert_eq!(std::slice::from_raw_parts(block, 100), [7; 100]);
            assert_eq!(counted(|| ALLOCATOR.dealloc(block, larger)), [0, 0, 300, 1]);
            assert_eq!(counted(|| block = ALLOCATOR.alloc_zeroed(layout)), [100, 1, 0, 0]);
            assert_eq!(std::slice::from_raw_parts(block, 100), [0; 100]);
            let uncounted = || {
                let _uncounted = Uncounted::begin();
                ALLOCATOR.dealloc(block, layout);
            };
            assert_eq!(counted(uncounted), [0; 4]);
        }
        end_counting();
    }

    #[test]
    fn a_failed_allocation_does_not_count() {
        begin_counting();
        let huge = Layout::from_size_align(isize::MAX as usize - 63, 64).unwrap();
        let layout = Layout::from_size_align(64, 64).unwrap();
        // SAFETY: the block is freed once, with the layout that it has after the failed call.
        unsafe {
            assert_eq!(counted(|| assert!(ALLOCATOR.alloc(huge).is_null())), [0; 4]);
            let block = ALLOCATOR.alloc(layout);
            let grow = || assert!(ALLOCATOR.realloc(block, layout, huge.size()).is_null());
            assert_eq!(counted(grow), [0; 4]);
            ALLOCATOR.dealloc(block, layout);
        }
        end_counting();
    }
}
