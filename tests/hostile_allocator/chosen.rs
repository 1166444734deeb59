//! The allocator of this program, which the environment chooses, and what may not happen under the loader's lock.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ffi::{CStr, c_int, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use tracing_profiling::ProfilingAllocator;

#[cfg(not(over_jemalloc))]
pub(crate) use mimalloc::MiMalloc as Another;
/// As `tests/outside/jemalloc` compiles this program.
#[cfg(over_jemalloc)]
pub(crate) use tikv_jemallocator::Jemalloc as Another;

/// Passes each call on to the chosen allocator, with or without a [`ProfilingAllocator`] in front of it.
pub(crate) struct Chosen;

pub(crate) const ALLOCATOR: &str = "ALLOCATOR";
pub(crate) const PROFILED: &str = "PROFILED";
pub(crate) const WALKS: &str = "walks";
pub(crate) const ANOTHER: &str = "another";

static PROFILED_INNER: ProfilingAllocator<Inner> = ProfilingAllocator::new(Inner);

static CHOICE: AtomicU8 = AtomicU8::new(0);
const IS_CHOSEN: u8 = 1;
const IS_WALKING: u8 = 2;
const IS_ANOTHER: u8 = 4;
const IS_PROFILED: u8 = 8;

/// Reads the environment at the first call, which is before `main`.
fn choice() -> u8 {
    match CHOICE.load(Ordering::Relaxed) {
        0 => choose(),
        choice => choice,
    }
}

#[cold]
fn choose() -> u8 {
    let variable = |name: &CStr| {
        // SAFETY: no other thread changes the environment. `std::env` would allocate.
        let value = unsafe { libc::getenv(name.as_ptr()) };
        // SAFETY: a NUL-terminated string of the environment.
        (!value.is_null()).then(|| unsafe { CStr::from_ptr(value) }.to_bytes())
    };
    let inner = match variable(c"ALLOCATOR") {
        Some(name) if name == WALKS.as_bytes() => IS_WALKING,
        Some(name) if name == ANOTHER.as_bytes() => IS_ANOTHER,
        _ => 0,
    };
    let profiled = if variable(c"PROFILED").is_some() { IS_PROFILED } else { 0 };
    let choice = IS_CHOSEN | inner | profiled;
    CHOICE.store(choice, Ordering::Relaxed);
    choice
}

// SAFETY: one allocator does all the work, since the choice does not change.
unsafe impl GlobalAlloc for Chosen {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promises are passed on.
        unsafe {
            match choice() & IS_PROFILED {
                0 => Inner.alloc(layout),
                _ => PROFILED_INNER.alloc(layout),
            }
        }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe {
            match choice() & IS_PROFILED {
                0 => Inner.dealloc(block, layout),
                _ => PROFILED_INNER.dealloc(block, layout),
            }
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Inner;

// SAFETY: as above.
unsafe impl GlobalAlloc for Inner {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note_call();
        let choice = choice();
        let _locked = (choice & IS_WALKING != 0).then(lock_and_walk);
        // SAFETY: as above.
        unsafe {
            if choice & IS_ANOTHER != 0 { Another.alloc(layout) } else { System.alloc(layout) }
        }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        note_call();
        let choice = choice();
        let _locked = (choice & IS_WALKING != 0).then(lock_and_walk);
        // SAFETY: as above.
        unsafe {
            match choice & IS_ANOTHER {
                0 => System.dealloc(block, layout),
                _ => Another.dealloc(block, layout),
            }
        }
    }
}

/// The lock of the allocator that walks. At every 64th call it asks the loader for all modules while it holds it, as
/// allocators do that walk the stacks of samples.
static LOCK: Mutex<u64> = Mutex::new(0);

fn lock_and_walk() -> std::sync::MutexGuard<'static, u64> {
    unsafe extern "C" fn count(
        _: *mut libc::dl_phdr_info,
        _: libc::size_t,
        number: *mut c_void,
    ) -> c_int {
        // SAFETY: the pointer that is passed below.
        unsafe { *number.cast::<u64>() += 1 };
        0
    }

    let mut calls = LOCK.lock().unwrap();
    *calls += 1;
    if calls.is_multiple_of(64) {
        let mut number = 0_u64;
        // SAFETY: `count` has the right signature, and is passed a pointer to a local number.
        unsafe { libc::dl_iterate_phdr(Some(count), (&raw mut number).cast()) };
        assert!(number > 0);
    }
    calls
}

thread_local! {
    /// How deep the thread is in callbacks of `dl_iterate_phdr`, which the loader calls under its lock.
    static UNDER_THE_LOADERS_LOCK: Cell<u32> = const { Cell::new(0) };
}

static CALLS_THERE: AtomicU64 = AtomicU64::new(0);

fn note_call() {
    if UNDER_THE_LOADERS_LOCK.get() > 0 {
        CALLS_THERE.fetch_add(1, Ordering::Relaxed);
    }
}

/// How often the program has allocated or freed under the loader's lock.
pub(crate) fn calls_under_the_loaders_lock() -> u64 {
    CALLS_THERE.load(Ordering::Relaxed)
}

/// Takes the place of the C library's function in this program, and calls that.
#[cfg(target_env = "gnu")]
mod interposed {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    type Callback =
        Option<unsafe extern "C" fn(*mut libc::dl_phdr_info, libc::size_t, *mut c_void) -> c_int>;
    type Iterate = unsafe extern "C" fn(Callback, *mut c_void) -> c_int;

    static NEXT: AtomicUsize = AtomicUsize::new(0);

    #[unsafe(no_mangle)]
    unsafe extern "C" fn dl_iterate_phdr(callback: Callback, data: *mut c_void) -> c_int {
        if NEXT.load(Ordering::Relaxed) == 0 {
            // SAFETY: looks a name up. The first call comes from the first thread.
            let next = unsafe { libc::dlsym(libc::RTLD_NEXT, c"dl_iterate_phdr".as_ptr()) };
            assert!(!next.is_null());
            NEXT.store(next.addr(), Ordering::Relaxed);
        }
        let next = NEXT.load(Ordering::Relaxed) as *const c_void;
        // SAFETY: the C library's function of that name.
        let next = unsafe { std::mem::transmute::<*const c_void, Iterate>(next) };
        UNDER_THE_LOADERS_LOCK.set(UNDER_THE_LOADERS_LOCK.get() + 1);
        // SAFETY: the caller's promises are passed on.
        let result = unsafe { next(callback, data) };
        UNDER_THE_LOADERS_LOCK.set(UNDER_THE_LOADERS_LOCK.get() - 1);
        result
    }
}
