//! The system's allocator with counters for calls and live bytes. They are updated only during a measurement, so the
//! service under load, which also uses this allocator, pays nothing.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicIsize, AtomicUsize, Ordering};

static IS_COUNTING: AtomicBool = AtomicBool::new(false);
static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);
/// Live bytes since counting began; negative if more was freed than allocated.
static LIVE: AtomicIsize = AtomicIsize::new(0);
static PEAK: AtomicIsize = AtomicIsize::new(0);

pub(crate) struct Counting;

/// How often memory is allocated or grown during `action`.
pub(crate) fn allocations(action: impl FnOnce()) -> usize {
    let before = ALLOCATIONS.load(Ordering::SeqCst);
    IS_COUNTING.store(true, Ordering::SeqCst);
    action();
    IS_COUNTING.store(false, Ordering::SeqCst);
    ALLOCATIONS.load(Ordering::SeqCst) - before
}

/// The peak of live bytes during `action`, relative to the start.
pub(crate) fn peak<R>(action: impl FnOnce() -> R) -> (usize, R) {
    LIVE.store(0, Ordering::SeqCst);
    PEAK.store(0, Ordering::SeqCst);
    let mut result = None;
    allocations(|| result = Some(action()));
    (PEAK.load(Ordering::SeqCst).unsigned_abs(), result.expect("the action returned"))
}

fn count(more: usize, less: usize) {
    if IS_COUNTING.load(Ordering::Relaxed) {
        ALLOCATIONS.fetch_add(usize::from(more > 0), Ordering::Relaxed);
        let change = more as isize - less as isize;
        let live = LIVE.fetch_add(change, Ordering::Relaxed) + change;
        PEAK.fetch_max(live, Ordering::Relaxed);
    }
}

// SAFETY: forwards all calls to the system's allocator.
#[allow(unsafe_code, reason = "a global allocator")]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), 0);
        // SAFETY: the contract is the caller's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), 0);
        // SAFETY: the contract is the caller's.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size, layout.size());
        // SAFETY: the contract is the caller's.
        unsafe { System.realloc(pointer, layout, size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(0, layout.size());
        // SAFETY: the contract is the caller's.
        unsafe { System.dealloc(pointer, layout) }
    }
}
