//! Memory of wrapped futures: none that grows with polls, none beyond the pool with pending futures.

#![cfg(not(tracing_profiling_unsupported))]
#![allow(
    unsafe_code,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::print_stdout,
    reason = "a test"
)]

#[allow(dead_code, reason = "not every test needs everything")]
#[path = "awaits/leaf.rs"]
mod leaf;
mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicIsize, Ordering};
use std::time::Duration;

use leaf::{Event, Task};
use support::Setup;
use tracing::info_span;
use tracing_profiling::ProfiledExt;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}
static LIVE: AtomicIsize = AtomicIsize::new(0);

/// Counts the bytes of the process, and the allocations of each thread.
struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: forwards all calls to the system's allocator. `realloc` is made of these two.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        LIVE.fetch_add(layout.size().cast_signed(), Ordering::Relaxed);
        // SAFETY: the contract is the caller's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size().cast_signed(), Ordering::Relaxed);
        // SAFETY: the contract is the caller's.
        unsafe { System.dealloc(pointer, layout) }
    }
}

fn live() -> isize {
    LIVE.load(Ordering::Relaxed)
}

const KIB: isize = 1 << 10;

/// In turn, in the only test of the process.
#[test]
fn memory() {
    no_allocation_after_the_first_poll();
    many_pending_futures_take_the_pool();
    polls_leak_nothing();
}

fn no_allocation_after_the_first_poll() {
    // No span grows old.
    let setup = Setup::of_rules("1h", |builder| builder);
    setup.run(|| {
        let span = info_span!("young").entered();
        let (task, event) = (Arc::new(Task::default()), Event::default());
        let (kept, taken) = (pin!(event.wait().profiled()), Event::default());
        let (mut kept, mut fresh) = (kept, pin!(taken.wait().profiled()));
        let mut poll = || {
            assert!(task.poll(kept.as_mut()).is_pending());
            // This leaf clones the waker at each poll.
            drop(taken.waker());
            assert!(task.poll(fresh.as_mut()).is_pending());
        };
        poll();
        // A long await becomes a sample. The first one may take a buffer of its own, which the next ones use again.
        let long_await = || std::thread::sleep(Duration::from_millis(30));
        long_await();
        (0..10).for_each(|_| poll());
        let polls = 1_000;
        // The waker of each poll is one.
        let tasks = 2 * polls;
        let before = ALLOCATIONS.get();
        for number in 0..polls {
            poll();
            if number == polls / 2 {
                long_await();
            }
        }
        let count = ALLOCATIONS.get() - before;
        println!("{count} allocations in {tasks} polls");
        assert_eq!((event.clones(), taken.clones()), (1, 11 + polls));
        assert_eq!(count, 0);
        drop(span);
    });
}

fn many_pending_futures_take_the_pool() {
    let pool = 2 << 20;
    let setup = Setup::of_rules("1h", |builder| builder.memory(8 * pool));
    setup.run(|| {
        let _span = info_span!("many").entered();
        let (task, futures) = (Arc::new(Task::default()), 10_000);
        let before = live();
        let mut all = Vec::new();
        for _ in 0..futures {
            let mut future = Box::pin(async { Event::default().wait().await }.profiled());
            assert!(task.poll(future.as_mut()).is_pending());
            all.push(future);
        }
        let each = size_of_val(&*all[0]) as isize;
        let others = live() - before - futures * each;
        println!("{} KiB beside the futures", others / KIB);
        // In addition to the pool, each future has its waker, its place in the list, and its event.
        assert!(others <= pool as isize + futures * KIB, "{others}");
        assert!(setup.handle.stats().awaits.dropped_memory > 0);
        drop(all);
        let left = live() - before;
        println!("{} KiB are left", left / KIB);
        assert!(left <= pool as isize + futures * KIB / 4, "{left}");
    });
}

fn polls_leak_nothing() {
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse::<usize>().ok());
    let polls = number("PROFILING_TEST_POLLS").unwrap_or(200_000);
    // Symbols of reference spans are read at some time, and stay.
    let setup = Setup::with("1h", |builder| builder.references(0, 0.0));
    setup.run(|| {
        let batch = || {
            let _span = info_span!("batch").entered();
            for round in 0..10 {
                let (task, event) = (Arc::new(Task::default()), Event::default());
                let mut future = pin!(event.wait().profiled());
                for poll in 0..10 {
                    if (round + poll) % 3 == 0 {
                        drop(event.waker());
                    }
                    assert!(task.poll(future.as_mut()).is_pending());
                }
                if round % 2 == 0 {
                    event.happen();
                    assert!(task.poll(future.as_mut()).is_ready());
                }
            }
        };
        let batches = polls / 100;
        let mut after = Vec::new();
        for quarter in 1..=4 {
            for _ in 0..batches / 4 {
                batch();
            }
            setup.flush();
            after.push(live());
            println!("{quarter}/4 of {polls} polls: {} KiB", live() / KIB);
        }
        assert!(after[3] - after[0] < 256 * KIB, "{after:?}");
    });
}
