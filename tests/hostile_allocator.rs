//! Host programs with allocators of their own. The other hostile programs are in `tests/hostile/`.

#![cfg(target_os = "linux")]
#![allow(
    dead_code,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stdout,
    unsafe_code,
    reason = "a test, which uses only some of the shared helpers"
)]

#[path = "hostile_allocator/chosen.rs"]
mod chosen;
#[path = "hostile/host.rs"]
mod host;
#[path = "hostile/libraries.rs"]
mod libraries;
#[path = "hostile/runner.rs"]
mod runner;
mod support;
#[path = "hostile/threads.rs"]
mod threads;

use std::fs;
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use chosen::{ALLOCATOR, ANOTHER, Chosen, PROFILED, WALKS};
use tracing::info_span;

#[global_allocator]
static GLOBAL: Chosen = Chosen;

/// How long libraries are loaded and unloaded: longer in `.ci/nightly`.
fn time() -> Duration {
    let seconds = std::env::var("PROFILING_TEST_ALLOCATOR_SECONDS");
    Duration::from_secs(seconds.map_or(2, |seconds| seconds.parse().unwrap()))
}

/// Threads that allocate while another one loads and unloads libraries, and then threads that end.
fn scenario() {
    let time = time();
    host::sampled(|_| {
        let ends = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    while !ends.load(Ordering::Relaxed) {
                        info_span!("allocates").in_scope(|| allocate_for(MS * 300));
                    }
                });
            }
            load_and_unload_copies(time);
            ends.store(true, Ordering::Relaxed);
        });
        threads::allocate(8, 50);
        threads::eight_short_threads();
    });
    assert_eq!(chosen::calls_under_the_loaders_lock(), 0);
}

const MS: Duration = Duration::from_millis(1);

/// Loads and unloads copies of a library in turn for that time. The loader takes each for another library.
///
/// Beside tcmalloc none is unloaded, since such programs can deadlock without the layer: when its heap grows, gperftools 2.10
/// walks the stack with its `pageheap_lock` held, and libunwind asks the loader for its modules; in glibc 2.36, `dlclose`
/// frees memory (`dl-close.c:649`) with the lock held that this takes. Both were seen in a debugger, in a program in C.
fn load_and_unload_copies(time: Duration) {
    let unloads = std::env::var_os("LD_PRELOAD").is_none();
    let count = if unloads { 8 } else { 64 };
    let pause = if unloads { Duration::ZERO } else { time / count };
    let dir = tempfile::tempdir().unwrap();
    let built =
        if cfg!(target_feature = "crt-static") { None } else { libraries::build(dir.path(), 1) };
    let copies: Vec<_> = built.map_or_else(Vec::new, |library| {
        let copy = |number| {
            let copy = dir.path().join(format!("copy{number}.so"));
            fs::copy(&library, &copy).unwrap();
            copy
        };
        (0..count).map(copy).collect()
    });
    let start = Instant::now();
    for copy in (0..count as usize).cycle() {
        if start.elapsed() > time {
            break;
        }
        let Some(copy) = copies.get(copy) else {
            std::thread::sleep(MS);
            continue;
        };
        // SAFETY: the library was built below and has no initializers or finalizers.
        let library = unsafe { libloading::Library::new(copy) }.unwrap();
        match unloads {
            true => library.close().unwrap(),
            false => std::mem::forget(library),
        }
        std::thread::sleep(pause);
    }
}

fn allocate_for(time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {
        let blocks: Vec<Vec<u8>> = (0..200).map(|size| vec![0; 32 + size]).collect();
        black_box(blocks);
    }
}

fn play(test: &str, source: &str, variables: &[(&str, &str)]) {
    runner::play_as(runner::DEADLINE + time(), variables, test, source, scenario);
}

/// Tests of each allocator, with either source, alone and behind a `ProfilingAllocator`.
macro_rules! allocators {
    ($($name:ident: $variables:expr;)+) => {
        $(mod $name {
            use super::*;

            fn play_here(test: &str, source: &str, more: &[(&str, &str)]) {
                let Some(mut variables) = $variables else { return };
                variables.extend(more);
                play(test, source, &variables);
            }

            #[test]
            fn perf() {
                play_here(concat!(stringify!($name), "::perf"), "perf", &[]);
            }

            #[test]
            fn timer() {
                play_here(concat!(stringify!($name), "::timer"), "timer", &[]);
            }

            #[test]
            fn profiled_perf() {
                play_here(concat!(stringify!($name), "::profiled_perf"), "perf", &[(PROFILED, "1")]);
            }

            #[test]
            fn profiled_timer() {
                play_here(concat!(stringify!($name), "::profiled_timer"), "timer", &[(PROFILED, "1")]);
            }
        })+
    };
}

allocators! {
    // Holds a lock of its own while it asks the loader for its modules.
    walking: Some(vec![(ALLOCATOR, WALKS)]);
    // Mimalloc, or jemalloc.
    another: Some(vec![(ALLOCATOR, ANOTHER)]);
    tcmalloc: tcmalloc();
}

/// Tcmalloc takes the place of the C library's allocator. It walks the stacks of the allocations that it samples, and
/// asks the loader for its modules for that.
fn tcmalloc() -> Option<Vec<(&'static str, &'static str)>> {
    let places = ["x86_64-linux-gnu/", "aarch64-linux-gnu/", ""];
    let paths = places.map(|place| format!("/usr/lib/{place}libtcmalloc.so.4"));
    let Some(path) = paths.into_iter().find(|path| std::path::Path::new(path).exists()) else {
        println!("skipped: there is no tcmalloc here");
        return None;
    };
    let path: &str = String::leak(path);
    Some(vec![("LD_PRELOAD", path), ("TCMALLOC_SAMPLE_PARAMETER", "65536")])
}
