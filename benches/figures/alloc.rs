//! What the profiling allocator adds to an allocation and its free.

use std::alloc::{GlobalAlloc, Layout, System};
use std::hint::black_box;

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
                handle.disable();
                time_each(PAIRS, || pair(profiling))
            },
            &mut || {
                handle.enable().expect("enabled");
                time_each(PAIRS, || pair(profiling))
            },
        ],
    );
    let [bare, off, counting] = &values[..] else { return };
    figure(&format!("alloc.bare{name}"), median(bare), "ns");
    figure(&format!("alloc.off{name}"), added(bare, off), "ns");
    figure(&format!("alloc.counting{name}"), added(bare, counting), "ns");
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
