//! A program that allocates where it should not, and runs out of memory.

use std::cell::RefCell;
use std::ffi::c_int;
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};

use tracing::info_span;

use crate::host::Host;

static BY_HANDLER: AtomicU64 = AtomicU64::new(0);

/// Allocates in a handler, which is not allowed. Here it interrupts no allocator.
extern "C" fn allocate_in_handler(_: c_int) {
    drop(black_box(vec![1_u8; 100]));
    BY_HANDLER.fetch_add(1, Ordering::Relaxed);
}

/// Allocates when its thread's thread-locals are destroyed. (The registry allows no new span there.)
#[derive(Default)]
struct AllocatesWhenDropped(Vec<u8>);

impl Drop for AllocatesWhenDropped {
    fn drop(&mut self) {
        drop(black_box(vec![self.0.clone(); 10]));
    }
}

thread_local! {
    static EARLY: RefCell<AllocatesWhenDropped> = RefCell::default();
    static LATE: RefCell<AllocatesWhenDropped> = RefCell::default();
}

pub(crate) fn everywhere(host: &Host) {
    let handler: extern "C" fn(_) = allocate_in_handler;
    // SAFETY: the handler may be called at any time, and interrupts only `raise`.
    unsafe { libc::signal(libc::SIGUSR1, handler as libc::sighandler_t) };
    for _ in 0..200 {
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    // Made before the thread's first span, and after it: the layer's own is in between.
                    EARLY.with_borrow_mut(|own| own.0 = vec![1; 1_000]);
                    info_span!("allocates").in_scope(|| {
                        LATE.with_borrow_mut(|own| own.0 = vec![1; 1_000]);
                        // SAFETY: calls the handler above.
                        unsafe { libc::raise(libc::SIGUSR1) };
                        let too_large = Vec::<u8>::new().try_reserve_exact(isize::MAX as usize);
                        assert!(too_large.is_err());
                    });
                });
            }
        });
    }
    assert_eq!(BY_HANDLER.load(Ordering::Relaxed), 1_600);
    let all = host.setup.handle.stats().allocations;
    // One in each span and one in its handler. Nothing of the size that failed, nothing of the threads around.
    assert_eq!((all.allocated_bytes, all.allocations), (1_600 * 1_100, 3_200));
    assert_eq!((all.freed_bytes, all.frees), (1_600 * 100, 1_600));
}
