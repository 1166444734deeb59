//! The signal handler of the source `timer` must only write to the ring of the thread that it interrupts.
//! (`.ci/handler_calls` checks the same in the machine code.)

#![cfg(not(tracing_profiling_unsupported))]
#![allow(clippy::unwrap_used, reason = "a test")]

mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::hint::black_box;

use support::{PLENTY, Setup, burn, has_all_threads};
use tracing::info_span;
use tracing_profiling::Source;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: forwards everything to the system's allocator.
#[allow(unsafe_code, reason = "a global allocator")]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller upholds the contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller upholds the contract.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap()
}

#[test]
fn the_handler_allocates_nothing_and_leaves_errno_and_registers_alone() {
    // The kernel's tick may rarely find the thread running.
    let signals: u64 = (0..10).map(|_| signals_of_half_a_second()).sum();
    assert!(signals >= 40, "the handler ran: {signals}");
    if has_all_threads() {
        let signals: u64 = (0..4).map(|_| signals_of_the_process()).sum();
        assert!(signals >= 40, "the handler ran: {signals}");
    }
}

fn signals_of_half_a_second() -> u64 {
    let setup = Setup::with("0ms", |builder| builder.source(Source::Timer).rate(10_000));
    compute(&setup);
    let stats = setup.handle.stats();
    stats.samples.taken + stats.samples.dropped_ring_full
}

/// The same for the timers of the continuous profile.
fn signals_of_the_process() -> u64 {
    let setup = Setup::of_rules("1h", |builder| builder.continuous(1_000));
    let taken = || {
        // The rings are read.
        _ = setup.handle.open_spans(PLENTY);
        setup.handle.stats().continuous.taken
    };
    let start = std::time::Instant::now();
    while taken() == 0 {
        assert!(start.elapsed() < PLENTY);
        _ = burn(std::time::Duration::from_millis(20));
    }
    let before = taken();
    compute(&setup);
    taken() - before
}

fn compute(setup: &Setup) {
    tracing::dispatcher::with_default(&setup.dispatch, || {
        let _span = info_span!("computes").entered();
        // Entering the span has armed the thread, which allocates.
        let before = ALLOCATIONS.get();
        // SAFETY: sets the calling thread's errno.
        #[allow(unsafe_code, reason = "there is no safe way to set errno")]
        unsafe {
            *libc::__errno_location() = libc::EXFULL;
        }
        let first = black_box(iterate(1.0));
        let mut all_same = true;
        let start = cpu_time::ThreadTime::now();
        while start.elapsed() < std::time::Duration::from_millis(500) {
            // Floating point in registers, which the handler must not change.
            all_same &= iterate(1.0).to_bits() == first.to_bits();
        }
        assert_eq!(errno(), libc::EXFULL);
        assert_eq!(ALLOCATIONS.get(), before, "allocations on the thread");
        assert!(all_same);
    });
    setup.handle.flush(PLENTY).unwrap();
}

fn iterate(mut x: f64) -> f64 {
    for i in 0..5_000_u32 {
        x = x.mul_add(1.000_000_1, f64::from(i)) / 1.000_01;
    }
    x
}
