//! Threads with alternate signal stacks that are small, or already in use, and are sampled by a timer. No byte below
//! such a stack may change, and the kernel must not end the process because a signal does not fit.

use std::ffi::c_int;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};
use tracing_profiling::Source;
use tracing_profiling::export::Memory;

use super::{Host, MS, alone, in_child};
use crate::support::{PLENTY, burn};

const PAGE: usize = 4096;
const PAINT: u8 = 0xa5;

/// `AT_MINSIGSTKSZ`: the kernel's largest frame.
pub(super) fn largest_frame() -> usize {
    // SAFETY: reads a value that the kernel gave this process.
    let bytes = unsafe { libc::getauxval(51) } as usize;
    if bytes == 0 { 8192 } else { bytes }
}

/// The smallest stack on which a thread is sampled.
pub(super) fn least() -> usize {
    let frame = largest_frame();
    frame.max((frame + 2048).min(8192))
}

/// What is below a stack.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Below {
    /// Memory that cannot be accessed.
    Guard,
    /// Memory that must not change.
    Painted,
}

/// An alternate signal stack.
pub(super) struct SignalStack {
    mapping: *mut u8,
    /// The bytes below it, then the stack itself.
    painted: usize,
    bytes: usize,
}

const MAPPED: usize = 64 * PAGE;

// SAFETY: the pointer is used while no thread writes there, but for the kernel.
unsafe impl Sync for SignalStack {}

impl SignalStack {
    pub(super) fn new(bytes: usize, below: Below) -> Self {
        // SAFETY: a new mapping, whose middle becomes accessible.
        let mapping = unsafe {
            let start = mmap_anonymous(
                ptr::null_mut(),
                MAPPED + 2 * PAGE,
                ProtFlags::empty(),
                MapFlags::PRIVATE,
            );
            let start = start.unwrap().cast::<u8>();
            let access = MprotectFlags::READ | MprotectFlags::WRITE;
            mprotect(start.add(PAGE).cast(), MAPPED, access).unwrap();
            std::slice::from_raw_parts_mut(start.add(PAGE), MAPPED).fill(PAINT);
            start
        };
        Self { mapping, painted: if below == Below::Guard { 0 } else { 16 * PAGE }, bytes }
    }

    fn lowest(&self) -> *mut u8 {
        // SAFETY: within the mapping.
        unsafe { self.mapping.add(PAGE + self.painted) }
    }

    /// Makes it the calling thread's. Returns the former one.
    pub(super) fn install(&self) -> libc::stack_t {
        set(&libc::stack_t { ss_sp: self.lowest().cast(), ss_flags: 0, ss_size: self.bytes })
    }

    pub(super) fn changed_below(&self) -> usize {
        // SAFETY: within the mapping, and no thread writes there.
        let below = unsafe { std::slice::from_raw_parts(self.mapping.add(PAGE), self.painted) };
        below.iter().filter(|byte| **byte != PAINT).count()
    }

    /// How many of its bytes were used.
    fn used(&self) -> usize {
        // SAFETY: as above.
        let stack = unsafe { std::slice::from_raw_parts(self.lowest(), self.bytes) };
        stack.iter().position(|byte| *byte != PAINT).map_or(0, |untouched| self.bytes - untouched)
    }
}

impl Drop for SignalStack {
    fn drop(&mut self) {
        // SAFETY: no thread has the stack any more.
        unsafe { munmap(self.mapping.cast(), MAPPED + 2 * PAGE) }.unwrap();
    }
}

fn set(stack: &libc::stack_t) -> libc::stack_t {
    // SAFETY: `stack` describes memory that the caller keeps until it installs another one.
    unsafe {
        let mut before = std::mem::zeroed();
        assert_eq!(libc::sigaltstack(stack, &raw mut before), 0);
        before
    }
}

/// Uses the vector registers, which a frame then contains.
fn burn_dirty(time: Duration) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: writes registers that the code around it does not rely on, if the processor has them.
    unsafe {
        if std::is_x86_feature_detected!("avx512f") {
            std::arch::asm!(
                "vpternlogd zmm0, zmm0, zmm0, 0xff",
                "vpternlogd zmm31, zmm31, zmm31, 0xff",
                "kxnorq k1, k1, k1",
                out("xmm0") _, out("xmm31") _, out("k1") _,
            );
        } else if std::is_x86_feature_detected!("avx2") {
            std::arch::asm!("vpcmpeqd ymm15, ymm15, ymm15", out("xmm15") _);
        }
    }
    // So long that it waits for a tick of the kernel.
    _ = burn(time.max(20 * MS));
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum When {
    BeforeTheFirstSpan,
    BetweenSpans,
    InASpan,
}

/// A thread installs that stack. Returns its taken samples before and after, and the changed bytes below the stack.
fn samples_with(host: &Host, stack: &SignalStack, when: When) -> (u64, u64) {
    let taken = || {
        host.handle.flush(PLENTY).unwrap();
        host.handle.stats().samples.taken
    };
    let span = || host.span(|| burn_dirty(15 * MS));
    let spans = || (0..3).for_each(|_| span());
    let former = match when {
        When::BeforeTheFirstSpan => stack.install(),
        When::BetweenSpans => {
            spans();
            stack.install()
        }
        When::InASpan => {
            let mut former = None;
            host.span(|| {
                burn_dirty(15 * MS);
                former = Some(stack.install());
                burn_dirty(30 * MS);
            });
            former.unwrap()
        }
    };
    // The thread notices it in a hook.
    span();
    span();
    let before = taken();
    spans();
    let after = taken();
    set(&former);
    (before, after)
}

fn try_stack(bytes: usize, below: Below, when: When) {
    let host = Host::new(Source::Timer, Memory::new());
    let stack = SignalStack::new(bytes, below);
    let (before, after) = samples_with(&host, &stack, when);
    let stats = host.handle.stats();
    let said = host.lines_with("alternate signal stack").len();
    println!("{stats:?}; {} bytes used", stack.used());
    assert_eq!(stack.changed_below(), 0, "bytes below the stack");
    let is_small = bytes < least();
    assert_eq!(after > before, !is_small, "{before} samples, then {after}");
    assert_eq!(stats.threads.refused_signal_stack > 0, is_small, "counted");
    assert_eq!(said, usize::from(is_small), "said once");
    if !is_small {
        assert_eq!(stats.samples.dropped_signal_stack_full, 0);
    }
    // With its former stack the thread is sampled again.
    let start = std::time::Instant::now();
    while host.handle.stats().samples.taken == after {
        assert!(start.elapsed() < PLENTY);
        host.span(|| burn_dirty(15 * MS));
        host.handle.flush(PLENTY).unwrap();
    }
}

fn sizes() -> Vec<usize> {
    let frame = largest_frame();
    let near = [frame, least() - 64, least()];
    let mut sizes = [&[2048, 3072, 4096, 8192], &near[..]].concat();
    // The kernel refuses smaller ones.
    sizes.retain(|bytes| *bytes >= 2048);
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

#[test]
fn threads_with_small_signal_stacks_are_not_sampled_by_timers() {
    let test = "threads_with_small_signal_stacks_are_not_sampled_by_timers";
    in_child(module_path!(), test, &[], || {
        for below in [Below::Guard, Below::Painted] {
            for bytes in sizes() {
                println!("{bytes} bytes, {below:?}");
                alone(|| try_stack(bytes, below, When::BeforeTheFirstSpan));
            }
        }
    });
}

/// A stack that the kernel's frame does not fit on ends the process at any signal, until the thread's next hook.
#[test]
fn a_smaller_signal_stack_is_noticed_when_it_is_installed_later() {
    let test = "a_smaller_signal_stack_is_noticed_when_it_is_installed_later";
    in_child(module_path!(), test, &[], || {
        for bytes in sizes().into_iter().filter(|bytes| *bytes >= largest_frame()) {
            for (below, when) in
                [(Below::Guard, When::BetweenSpans), (Below::Painted, When::InASpan)]
            {
                println!("{bytes} bytes, {below:?}, {when:?}");
                alone(|| try_stack(bytes, below, when));
            }
        }
    });
}

/// The room that is checked suffices, in whatever way this program was built.
#[test]
fn the_handler_needs_no_more_room_than_is_checked() {
    let test = "the_handler_needs_no_more_room_than_is_checked";
    in_child(module_path!(), test, &[], || {
        let host = Host::new(Source::Timer, Memory::new());
        let stack = SignalStack::new(32 * 1024, Below::Painted);
        let (_, after) = samples_with(&host, &stack, When::BeforeTheFirstSpan);
        assert!(after > 0);
        println!("{} bytes used, {} for the largest frame", stack.used(), largest_frame());
        assert!(stack.used() > 1024, "the handler ran there");
        assert!(stack.used() <= largest_frame() + 2048, "{}", stack.used());
    });
}

/// How much of the stack the handler leaves.
static LEFT: AtomicUsize = AtomicUsize::new(0);
static LOWEST: AtomicUsize = AtomicUsize::new(0);

/// Burns on the thread's signal stack, with little of it left.
extern "C" fn handler_of_the_program(_: c_int) {
    descend();
}

#[inline(never)]
fn descend() {
    let frame = [0_u8; 64];
    let here = std::hint::black_box(&frame).as_ptr().addr();
    if here - LOWEST.load(Ordering::Relaxed) > LEFT.load(Ordering::Relaxed) {
        descend();
    } else {
        // Only computes and reads a clock.
        _ = burn(30 * MS);
    }
    std::hint::black_box(&frame);
}

/// The kernel's frame fits on the rest of the stack, the handler does not.
#[test]
fn a_signal_that_interrupts_another_handler_of_the_program_needs_room_on_its_stack() {
    let test = "a_signal_that_interrupts_another_handler_of_the_program_needs_room_on_its_stack";
    in_child(module_path!(), test, &[], || {
        for left in [1024, 16384] {
            alone(|| {
                let host = Host::new(Source::Timer, Memory::new());
                let stack = SignalStack::new(64 * 1024, Below::Painted);
                // What `burn` takes itself is not known exactly.
                LEFT.store(largest_frame() + left, Ordering::Relaxed);
                LOWEST.store(stack.lowest().addr(), Ordering::Relaxed);
                let former = stack.install();
                let handler: extern "C" fn(_) = handler_of_the_program;
                // SAFETY: the other fields of a `sigaction` may be 0.
                unsafe {
                    let mut action: libc::sigaction = std::mem::zeroed();
                    action.sa_sigaction = handler as libc::sighandler_t;
                    action.sa_flags = libc::SA_ONSTACK | libc::SA_RESTART;
                    assert_eq!(libc::sigaction(libc::SIGUSR1, &action, ptr::null_mut()), 0);
                }
                for _ in 0..4 {
                    host.span(|| {
                        _ = burn(20 * MS);
                        // SAFETY: sends a signal to this thread.
                        assert_eq!(unsafe { libc::raise(libc::SIGUSR1) }, 0);
                    });
                }
                host.handle.flush(PLENTY).unwrap();
                let stats = host.handle.stats();
                println!("{left}: {stats:?}");
                assert!(stats.samples.taken > 0);
                // The handler of the program was interrupted.
                let dropped = stats.samples.dropped_signal_stack_full;
                assert_eq!(dropped > 0, left < 2048);
                // Not all of that stack is copied, and where it is, its callers are elsewhere. While the handler descends,
                // there is room.
                let on_it = stats.stacks.on_other_stacks + stats.stacks.truncated;
                assert!(
                    if left < 2048 { on_it < dropped } else { on_it > 0 },
                    "{on_it}, {dropped}"
                );
                assert_eq!(stack.changed_below(), 0);
                set(&former);
            });
        }
    });
}
