//! What allocators that profile add to an allocation and its free, interleaved in one run: this crate's and dial9's with
//! the live heap, dhat's, that of stats_alloc, and jemalloc's own heap profiler, which rust-jemalloc-pprof reads. Those that
//! sample do so at the same rate: `cargo run --release --locked --bin alloc`.

#![allow(dead_code, reason = "the shared module has more than this needs")]

#[path = "../../../figures/measure.rs"]
mod measure;

use std::alloc::{GlobalAlloc, Layout, System};
use std::hint::black_box;

use dial9::memory_profiling::{Dial9Allocator, MemoryProfiler, MemoryProfilingConfig};
use dial9::telemetry::{Dial9HandleTokioExt as _, MemoryBuffer, TokioAttachOptions, recorder};
use measure::{added, figure, interleave, median, time_each};
use stats_alloc::StatsAlloc;
use tikv_jemallocator::Jemalloc;
use tracing::{Dispatch, dispatcher};
use tracing_profiling::{ProfilingAllocator, ProfilingLayer};
use tracing_subscriber::prelude::*;

const ROUNDS: usize = 41;
const PAIRS: u32 = 100_000;
/// dhat takes microseconds.
const FEW: u32 = 2_000;
const LAYOUT: Layout = Layout::new::<[u64; 8]>();

/// Its profiler can be switched on, with a sample in 512 KiB in the mean.
#[unsafe(export_name = "_rjem_malloc_conf")]
static MALLOC_CONF: Option<&'static std::ffi::c_char> =
    Some(unsafe { &*c"prof:true,prof_active:false,lg_prof_sample:19".as_ptr() });

#[inline(never)]
fn pair(allocator: &impl GlobalAlloc) {
    // SAFETY: the layout is not empty, and the block is freed once with it.
    unsafe {
        let block = allocator.alloc(black_box(LAYOUT));
        allocator.dealloc(black_box(block), black_box(LAYOUT));
    }
}

fn set_jemalloc_profiles(active: bool) {
    // SAFETY: the name is that of a boolean.
    unsafe { tikv_jemalloc_ctl::raw::write(b"prof.active\0", active) }.expect("it has a profiler");
}

/// Its profiler works while the returned value lives.
fn start_dial9() -> impl Sized {
    let buffer = MemoryBuffer::new(16 * 1024 * 1024).expect("memory");
    let recorder = recorder(buffer).build();
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    runtime.worker_threads(1);
    let runtime = recorder.handle().attach_tokio_runtime(runtime, TokioAttachOptions::default());
    let config = MemoryProfilingConfig::builder().sample_rate_bytes(512 * 1024).track_liveset(true);
    let profiler = MemoryProfiler::from_config(config.build()).install(recorder.handle().clone());
    (profiler.expect("frame pointers"), runtime.expect("a runtime"), recorder)
}

fn main() {
    let (ours, stats) = (ProfilingAllocator::system(), StatsAlloc::system());
    let ours_on_jemalloc = ProfilingAllocator::new(Jemalloc);
    let dial9 = Dial9Allocator::system();
    let _dial9 = start_dial9();
    let rules = "10s".parse().expect("rules of this bench");
    let layer = ProfilingLayer::builder().rules(rules).heap(true).build().expect("threads");
    let dispatch = Dispatch::new(tracing_subscriber::registry().with(layer));
    let _dhat = dhat::Profiler::builder().testing().build();
    let values = dispatcher::with_default(&dispatch, || {
        interleave(
            ROUNDS,
            &mut [
                &mut || time_each(PAIRS, || pair(&System)),
                &mut || time_each(PAIRS, || pair(&ours)),
                &mut || time_each(PAIRS, || pair(&stats)),
                &mut || time_each(PAIRS, || pair(&dial9)),
                &mut || time_each(FEW, || pair(&dhat::Alloc)),
                &mut || time_each(PAIRS, || pair(&Jemalloc)),
                &mut || time_each(PAIRS, || pair(&ours_on_jemalloc)),
                &mut || {
                    set_jemalloc_profiles(true);
                    let each = time_each(PAIRS, || pair(&Jemalloc));
                    set_jemalloc_profiles(false);
                    each
                },
            ],
        )
    });
    let [system, ours, stats, dial9, dhat, jemalloc, on_jemalloc, profiled] = &values[..] else {
        return;
    };
    figure("alloc.system", median(system), "ns");
    figure("alloc.ours_with_live_heap", added(system, ours), "ns");
    figure("alloc.stats_alloc", added(system, stats), "ns");
    figure("alloc.dial9_with_live_heap", added(system, dial9), "ns");
    figure("alloc.dhat", added(system, dhat), "ns");
    figure("alloc.jemalloc", median(jemalloc), "ns");
    figure("alloc.ours_on_jemalloc_with_live_heap", added(jemalloc, on_jemalloc), "ns");
    figure("alloc.jemalloc_profiler", added(jemalloc, profiled), "ns");
}
