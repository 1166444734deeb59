//! Unusual stacks: nearly exhausted, of an uncommon layout, or not allocated by the system.

use std::ffi::c_void;
use std::hint::black_box;
use std::ptr;
use std::time::Duration;

use corosensei::stack::{Stack, StackPointer};
use corosensei::{Coroutine, CoroutineResult, Yielder};
use tracing::info_span;

use crate::host::Host;
use crate::support::burn;

const MS: Duration = Duration::from_millis(1);
const KIB: usize = 1024;

/// The lowest address of the caller's stack, above the guard page.
fn lowest_address() -> usize {
    let here = 0_u8;
    let here = (&raw const here).addr();
    let maps = std::fs::read_to_string("/proc/thread-self/maps").unwrap();
    let bounds = maps.lines().filter_map(|line| {
        let (from, to) = line.split_whitespace().next()?.split_once('-')?;
        Some((usize::from_str_radix(from, 16).ok()?, usize::from_str_radix(to, 16).ok()?))
    });
    bounds.into_iter().find(|(from, to)| (*from..*to).contains(&here)).unwrap().0
}

/// Recurses until at most `left` bytes are left above the address `lowest`, and runs `action` there.
#[inline(never)]
fn descend(lowest: usize, left: usize, action: &mut dyn FnMut()) {
    let mut frame = [0_u8; 256];
    black_box(&mut frame);
    if frame.as_ptr().addr() - lowest > left + 1024 {
        descend(lowest, left, action);
    } else {
        action();
    }
    black_box(&frame);
}

fn burn_near_the_end(left: usize) {
    let lowest = lowest_address();
    let _span = info_span!("near the guard page").entered();
    // Arms the thread before it gets there.
    burn(MS);
    descend(lowest, left, &mut || {
        burn(200 * MS);
    });
    burn(MS);
}

/// Rust's threads have an alternate signal stack. Spans are also opened near the end of the stack.
pub(crate) fn near_the_guard_page(_: &Host) {
    for stack in [128 * KIB, 2 * KIB * KIB] {
        let builder = std::thread::Builder::new().stack_size(stack);
        builder.spawn(|| burn_near_the_end(16 * KIB)).unwrap().join().unwrap();
    }
    let builder = std::thread::Builder::new().stack_size(256 * KIB);
    let opens_spans = || {
        info_span!("far from it").in_scope(|| burn(MS));
        descend(lowest_address(), 64 * KIB, &mut || {
            for _ in 0..20 {
                info_span!("down there").in_scope(|| burn(MS));
            }
        });
    };
    builder.spawn(opens_spans).unwrap().join().unwrap();
}

/// A thread that was not made by Rust, and has no alternate signal stack.
pub(crate) fn near_the_guard_page_of_a_raw_thread(_: &Host) {
    on_raw_thread(128 * KIB, || burn_near_the_end(24 * KIB));
    // Also with a stack that is smaller than the copy that a sample takes of deeper ones.
    on_raw_thread(128 * KIB, || {
        info_span!("shallow").in_scope(|| burn(100 * MS));
    });
}

fn on_raw_thread(stack: usize, action: fn()) {
    extern "C" fn begin(action: *mut c_void) -> *mut c_void {
        // SAFETY: `action` is the pointer that is passed below.
        let action = unsafe { *action.cast::<fn()>() };
        action();
        ptr::null_mut()
    }

    let mut action = action;
    // SAFETY: all zeros is valid for both structures, and the calls initialize them. `action` outlives the thread,
    // which is joined here.
    unsafe {
        let mut attribute: libc::pthread_attr_t = std::mem::zeroed();
        assert_eq!(libc::pthread_attr_init(&raw mut attribute), 0);
        assert_eq!(libc::pthread_attr_setstacksize(&raw mut attribute, stack), 0);
        let mut thread: libc::pthread_t = std::mem::zeroed();
        let given = (&raw mut action).cast();
        assert_eq!(libc::pthread_create(&raw mut thread, &raw const attribute, begin, given), 0);
        libc::pthread_attr_destroy(&raw mut attribute);
        assert_eq!(libc::pthread_join(thread, ptr::null_mut()), 0);
    }
}

/// Stacks that grow into new segments, several times.
pub(crate) fn growing(_: &Host) {
    fn recurse(depth: u32) {
        stacker::maybe_grow(64 * KIB, 128 * KIB, || {
            let frame = [depth; 512];
            black_box(&frame);
            if depth.is_multiple_of(50) {
                info_span!("grown").in_scope(|| burn(MS));
            }
            if depth > 0 {
                recurse(depth - 1);
            }
            black_box(&frame);
        });
    }
    for _ in 0..10 {
        info_span!("grows").in_scope(|| recurse(400));
        let _span = info_span!("on a new stack").entered();
        stacker::grow(64 * KIB, || {
            burn(2 * MS);
            info_span!("there").in_scope(|| burn(2 * MS));
        });
    }
}

/// A stack between two guard pages: reading beyond it is a crash.
struct Island {
    lowest: *mut c_void,
    size: usize,
}

const PAGE: usize = 4 * KIB;

impl Island {
    fn new(size: usize) -> Self {
        use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect};
        let size = size + 2 * PAGE;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let lowest = unsafe {
            mmap_anonymous(ptr::null_mut(), size, ProtFlags::empty(), MapFlags::PRIVATE).unwrap()
        };
        // SAFETY: within the new mapping, which is not in use yet.
        unsafe {
            let inside = lowest.byte_add(PAGE);
            mprotect(inside, size - 2 * PAGE, MprotectFlags::READ | MprotectFlags::WRITE).unwrap();
        }
        Self { lowest, size }
    }
}

impl Drop for Island {
    fn drop(&mut self) {
        // SAFETY: the mapping from `new`, which no code runs on any more.
        unsafe { rustix::mm::munmap(self.lowest, self.size) }.unwrap();
    }
}

// SAFETY: there is a guard page below the stack, and `size` is far above the required minimum.
unsafe impl Stack for Island {
    fn base(&self) -> StackPointer {
        StackPointer::new(self.lowest.addr() + self.size - PAGE).unwrap()
    }

    fn limit(&self) -> StackPointer {
        StackPointer::new(self.lowest.addr()).unwrap()
    }
}

/// Coroutines that switch stacks: spans are entered in one and exited while spans of others are entered, and each stack
/// is sampled.
pub(crate) fn coroutines(_: &Host) {
    for _ in 0..10 {
        let _around = info_span!("around coroutines").entered();
        let mut coroutines: Vec<_> = (0..4).map(|_| coroutine()).collect();
        // Resumed in turns, so that spans are exited in another order than they were entered.
        while !coroutines.is_empty() {
            coroutines.retain_mut(|one| matches!(one.resume(()), CoroutineResult::Yield(())));
            burn(Duration::from_micros(200));
        }
        // A coroutine that is dropped while suspended is unwound.
        let mut dropped = coroutine();
        dropped.resume(());
    }
}

fn coroutine() -> Coroutine<(), (), (), Island> {
    Coroutine::with_stack(Island::new(128 * KIB), |yielder: &Yielder<(), ()>, ()| {
        for _ in 0..3 {
            let _span = info_span!("in a coroutine").entered();
            burn(MS);
            yielder.suspend(());
            burn(MS);
        }
    })
}

/// Signal handlers of the program, sampled while they run on an alternate stack.
pub(crate) fn in_a_handler_on_its_own_stack(_: &Host) {
    extern "C" fn handler(_: i32) {
        // Only reads a clock and computes, which is async-signal-safe.
        burn(20 * MS);
    }
    let handler: extern "C" fn(_) = handler;

    let island = Island::new(64 * KIB);
    let stack = libc::stack_t {
        // SAFETY: within the mapping.
        ss_sp: unsafe { island.lowest.byte_add(PAGE) },
        ss_flags: 0,
        ss_size: island.size - 2 * PAGE,
    };
    // SAFETY: the stack outlives its use, since this thread gets its former one back below. The remaining fields of a
    // `sigaction` may be 0.
    let before = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as libc::sighandler_t;
        action.sa_flags = libc::SA_ONSTACK | libc::SA_RESTART;
        assert_eq!(libc::sigaction(libc::SIGUSR1, &raw const action, ptr::null_mut()), 0);
        let mut before = std::mem::zeroed();
        assert_eq!(libc::sigaltstack(&raw const stack, &raw mut before), 0);
        before
    };
    for _ in 0..20 {
        info_span!("raises").in_scope(|| {
            burn(MS);
            signal_hook::low_level::raise(libc::SIGUSR1).unwrap();
            burn(MS);
        });
    }
    // SAFETY: this is the thread's former stack.
    assert_eq!(unsafe { libc::sigaltstack(&raw const before, ptr::null_mut()) }, 0);
}
