//! What the profiling allocator adds to an allocation and its free.

use std::alloc::{GlobalAlloc, Layout, System};
use std::hint::black_box;
use std::time::Duration;

use mimalloc::MiMalloc;
use tracing::{dispatcher, info_span};
use tracing_profiling::ProfilingAllocator;

use crate::measure::{Setup, added, figure, interleave, median, ratio, time_each};

const PAIRS: u32 = 200_000;
const ROUNDS: usize = 41;
const LAYOUT: Layout = Layout::new::<[u64; 8]>();

// Not inlined: some of the variants would be, and others not.
#[inline(never)]
#[allow(unsafe_code, reason = "calls an allocator that is not the program's")]
fn pair(allocator: &impl GlobalAlloc) {
    // SAFETY: the layout is not empty, and the block is freed once with it.
    unsafe {
        let block = allocator.alloc(black_box(LAYOUT));
        allocator.dealloc(black_box(block), black_box(LAYOUT));
    }
}

pub(crate) fn run() {
    of(&System, &ProfilingAllocator::system(), "");
    of(&MiMalloc, &ProfilingAllocator::new(MiMalloc), "_mimalloc");
    service(&System, &ProfilingAllocator::system());
    spans(&System, &ProfilingAllocator::system());
    samples();
    live_heap(&System, &ProfilingAllocator::system());
}

/// Returns the same block for each call, so that only what is added takes time.
struct Fixed(Box<[u8]>);

// SAFETY: the block is as large as any layout of this bench, and nothing in it is used.
#[allow(unsafe_code, reason = "an allocator")]
unsafe impl GlobalAlloc for Fixed {
    unsafe fn alloc(&self, _: Layout) -> *mut u8 {
        self.0.as_ptr().cast_mut()
    }

    unsafe fn dealloc(&self, _: *mut u8, _: Layout) {}
}

/// Calls `action` with at least 32 KiB of stack in use.
#[inline(never)]
fn on_a_deep_stack(action: &mut dyn FnMut() -> f64) -> f64 {
    let stack = black_box([1_u8; 32 << 10]);
    let result = action();
    _ = black_box(stack);
    result
}

/// A sample, in an old span. Blocks are so large that each is one.
fn samples() {
    const SAMPLES: u32 = 20;
    const LARGE: Layout = Layout::new::<[u8; 16 << 20]>();
    let bare = Fixed(vec![0; 64].into_boxed_slice());
    let profiling = ProfilingAllocator::new(Fixed(vec![0; 64].into_boxed_slice()));
    let setup = Setup::new("[old]=1h", |builder| builder.stack_bytes(32 << 10));
    #[inline(never)]
    #[allow(unsafe_code, reason = "calls an allocator that is not the program's")]
    fn large(allocator: &impl GlobalAlloc) {
        // SAFETY: the block is not used.
        unsafe {
            let block = allocator.alloc(black_box(LARGE));
            allocator.dealloc(black_box(block), LARGE);
        }
    }
    let before = setup.handle.stats().allocations;
    let rounds = 31;
    let values = dispatcher::with_default(&setup.dispatch, || {
        let flush = || setup.flush();
        interleave(
            rounds,
            &mut [
                &mut || {
                    let _old = info_span!("old").entered();
                    on_a_deep_stack(&mut || time_each(SAMPLES, || large(&bare)))
                },
                &mut || {
                    let old = info_span!("old").entered();
                    let each = on_a_deep_stack(&mut || time_each(SAMPLES, || large(&profiling)));
                    drop(old);
                    flush();
                    each
                },
            ],
        )
    });
    let sampled = setup.handle.stats().allocations.sampled - before.sampled;
    let expected = u64::from(SAMPLES) * (rounds as u64 + 1);
    assert!(sampled >= expected * 9 / 10, "{sampled} of {expected} are samples");
    let [bare, sampled] = &values[..] else { return };
    figure("alloc.sample", added(bare, sampled) / 1_000.0, "us");
}

/// A pair with the live heap tracked, and in use as many sampled blocks as in a heap of 2 GiB.
fn live_heap<A: GlobalAlloc + Sync>(bare: &A, profiling: &ProfilingAllocator<A>) {
    let setup = Setup::late("1h", |builder| builder.heap(true));
    let blocks = fill(profiling);
    let tracked = setup.handle.stats().allocations.tracked;
    assert!(tracked > 2_000, "{tracked} blocks are tracked");
    let values = dispatcher::with_default(&setup.dispatch, || {
        interleave(
            ROUNDS,
            &mut [&mut || time_each(PAIRS, || pair(bare)), &mut || {
                time_each(PAIRS, || pair(profiling))
            }],
        )
    });
    empty(profiling, blocks);
    let [bare, with] = &values[..] else { return };
    figure("alloc.with_live_heap", added(bare, with), "ns");
    figure("alloc.live_blocks", tracked as f64, "count");
}

const KEPT: Layout = Layout::new::<[u8; 1 << 20]>();

/// Allocates thousands of blocks, most of which are samples: each thread takes some hundred at once.
#[allow(unsafe_code, reason = "calls an allocator that is not the program's")]
fn fill(allocator: &(impl GlobalAlloc + Sync)) -> Vec<usize> {
    let some = || {
        let block = |number: u32| {
            if number.is_multiple_of(10) {
                std::thread::sleep(Duration::from_millis(2));
            }
            // SAFETY: the layout is not empty.
            unsafe { allocator.alloc(KEPT) }.expose_provenance()
        };
        (0..400).map(block).collect::<Vec<_>>()
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(some)).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("filled")).collect()
    })
}

#[allow(unsafe_code, reason = "calls an allocator that is not the program's")]
fn empty(allocator: &impl GlobalAlloc, blocks: Vec<usize>) {
    for block in blocks {
        // SAFETY: the allocator has returned it for this layout, and nothing else frees it.
        unsafe { allocator.dealloc(std::ptr::with_exposed_provenance_mut(block), KEPT) };
    }
}

/// A request with four spans that allocates blocks of 1 KiB in the mean. Each is filled and read for about a microsecond:
/// 1 GB a second.
#[inline(never)]
fn request(allocator: &impl GlobalAlloc) -> u64 {
    let blocks = |count: usize| {
        let sizes = (0..count).map(|number| 64 + number * 389 % 1_920);
        let layouts = sizes.map(|size| Layout::from_size_align(size, 8).expect("a layout"));
        layouts.fold(0_u64, |sum, layout| sum.wrapping_add(touch(allocator, layout)))
    };
    info_span!("request").in_scope(|| {
        let before = blocks(20);
        let inside = info_span!("order").in_scope(|| {
            let query = info_span!("query").in_scope(|| blocks(60));
            query.wrapping_add(blocks(40))
        });
        let encoded = info_span!("encode").in_scope(|| blocks(60));
        before.wrapping_add(inside).wrapping_add(encoded)
    })
}

#[allow(unsafe_code, reason = "calls an allocator that is not the program's")]
fn touch(allocator: &impl GlobalAlloc, layout: Layout) -> u64 {
    // SAFETY: the layout is not empty, and the block is used within it and freed once with it.
    unsafe {
        let block = allocator.alloc(layout);
        block.write_bytes(7, layout.size());
        let bytes = std::slice::from_raw_parts(block, layout.size());
        let sum = bytes.iter().fold(0, |sum: u64, byte| {
            sum.wrapping_mul(31).wrapping_add(u64::from(black_box(*byte)))
        });
        allocator.dealloc(block, layout);
        sum
    }
}

fn of<A: GlobalAlloc>(bare: &A, profiling: &ProfilingAllocator<A>, name: &str) {
    let setup = Setup::late("1h", |builder| builder);
    let handle = &setup.handle;
    let values = interleave(
        ROUNDS,
        &mut [
            &mut || time_each(PAIRS, || pair(bare)),
            &mut || {
                handle.set_enabled(false).expect("disabled");
                // Counting ends when the collector has seen that no span is open.
                setup.flush();
                time_each(PAIRS, || pair(profiling))
            },
            &mut || {
                handle.set_enabled(true).expect("enabled");
                time_each(PAIRS, || pair(profiling))
            },
        ],
    );
    if let [bare, off, counting] = &values[..] {
        figure(&format!("alloc.bare{name}"), median(bare), "ns");
        figure(&format!("alloc.off{name}"), added(bare, off), "ns");
        figure(&format!("alloc.counting{name}"), added(bare, counting), "ns");
    }
    drop(setup);
    // With a sample in some thousand pairs.
    let setup = Setup::new("[old]=1h", |builder| builder);
    let values = dispatcher::with_default(&setup.dispatch, || {
        let _old = info_span!("old").entered();
        interleave(
            ROUNDS,
            &mut [&mut || time_each(PAIRS, || pair(bare)), &mut || {
                time_each(PAIRS, || pair(profiling))
            }],
        )
    });
    let [bare, sampling] = &values[..] else { return };
    figure(&format!("alloc.sampling_on_unsampled{name}"), added(bare, sampling), "ns");
}

fn service<A: GlobalAlloc>(bare: &A, profiling: &ProfilingAllocator<A>) {
    const REQUESTS: u32 = 200;
    let setup = Setup::late("1h", |builder| builder);
    dispatcher::with_default(&setup.dispatch, || {
        let values = interleave(
            ROUNDS,
            &mut [&mut || time_each(REQUESTS, || _ = black_box(request(bare))), &mut || {
                time_each(REQUESTS, || _ = black_box(request(profiling)))
            }],
        );
        let [bare, counting] = &values[..] else { return };
        figure("alloc.service_us", median(bare) / 1_000.0, "us");
        figure("alloc.service_added", (ratio(bare, counting) - 1.0) * 100.0, "%");
    });
}

/// What an allocation and its free add to a span: each is counted and passed up. Another rule judges them, too.
fn spans<A: GlobalAlloc>(bare: &A, profiling: &ProfilingAllocator<A>) {
    const SPANS: u32 = 20_000;
    for (rules, name) in [("1h", "alloc.span_added"), ("1h|alloc>1GB", "alloc.judged_span_added")] {
        let setup = Setup::late(rules, |builder| builder);
        let values = dispatcher::with_default(&setup.dispatch, || {
            interleave(
                ROUNDS,
                &mut [
                    &mut || time_each(SPANS, || info_span!("request").in_scope(|| pair(bare))),
                    &mut || time_each(SPANS, || info_span!("request").in_scope(|| pair(profiling))),
                ],
            )
        });
        let [bare, counting] = &values[..] else { return };
        figure(name, added(bare, counting), "ns");
    }
}
