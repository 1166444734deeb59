//! What the profiling allocator adds to an allocation and its free.

use std::alloc::{GlobalAlloc, Layout, System};
use std::hint::black_box;

use mimalloc::MiMalloc;
use tracing_profiling::ProfilingAllocator;

use crate::measure::{Setup, added, figure, interleave, median, time_each};

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
