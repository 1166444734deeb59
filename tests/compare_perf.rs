//! The program that `.ci/compare_perf` runs under `perf record`: sixteen functions of different weights in a kept span.

#![cfg(all(target_os = "linux", not(tracing_profiling_unsupported)))]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::print_stdout, reason = "a test")]

use std::hint::black_box;
use std::time::{Duration, Instant};

use cpu_time::ProcessTime;
use tracing::{Instrument, info_span};
use tracing_profiling::profile::{Profile, SampleKind};
use tracing_profiling::{Directory, ExportError, Exported, Exporter, ProfilingLayer};
use tracing_subscriber::prelude::*;

/// The minimum CPU time of the process, and the minimum wall time.
const TIME: Duration = Duration::from_secs(24);
const LEAST: Duration = Duration::from_secs(12);
const RATE: u32 = 999;

/// The name of the threads that the functions run on.
const THREADS: &str = "mix";

type Work = fn(u64) -> u64;

/// Functions that burn CPU, and the approximate number of rounds per call.
macro_rules! mix {
    ($($name:ident $rounds:literal,)+) => {
        $(#[inline(never)]
        fn $name(rounds: u64) -> u64 {
            // The name keeps the compiler from merging the functions.
            let mut x = black_box(stringify!($name)).len() as u64;
            let mut i = 0;
            while i < rounds {
                x = black_box((x ^ i) * 3 % 1_000_003);
                i += 1;
            }
            x
        })+
        const MIX: &[(Work, u64)] = &[$(($name, $rounds)),+];
    };
}

mix! {
    first 100_000,
    second 88_000,
    third 77_000,
    fourth 68_000,
    fifth 60_000,
    sixth 52_000,
    seventh 46_000,
    eighth 40_000,
    ninth 34_000,
    tenth 29_000,
    eleventh 25_000,
    twelfth 21_000,
    thirteenth 17_000,
    fourteenth 13_000,
    fifteenth 9_000,
    sixteenth 5_000,
}

/// Writes the files, and prints the effective sample size.
struct ToFiles(Directory);

impl Exporter for ToFiles {
    fn export(&mut self, profile: &Profile) -> Result<Exported, ExportError> {
        let points = profile.of_kind(SampleKind::OnCpu).flat_map(|sample| &sample.points);
        let (sum, squares) = points.fold((0.0, 0.0), |(sum, squares), point| {
            let weight = point.weight as f64;
            (sum + weight, squares + weight * weight)
        });
        println!("effective samples: {:.0}", sum * sum / squares);
        self.0.export(profile)
    }
}

async fn mix(seed: u64) {
    // A congruential generator, so that the calls follow no rhythm.
    let mut random = seed;
    let mut below = |limit: u64| {
        random =
            random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % limit
    };
    let (cpu, wall) = (ProcessTime::now(), Instant::now());
    while cpu.elapsed() < TIME || wall.elapsed() < LEAST {
        let (work, rounds) = MIX[below(MIX.len() as u64) as usize];
        black_box(work(rounds / 2 + below(rounds)));
        tokio::task::yield_now().await;
    }
}

#[test]
#[ignore = "run by .ci/compare_perf, which sets the output directory"]
fn known_mix() {
    let dir = std::env::var_os("MIX_DIR").unwrap();
    let layer = ProfilingLayer::builder()
        .with_env()
        .unwrap()
        .rules("0ms".parse().unwrap())
        .rate(RATE)
        .samples_per_profile(1_000_000)
        .exporter(ToFiles(Directory::new(dir)))
        .build()
        .unwrap();
    let handle = layer.handle();
    tracing_subscriber::registry().with(layer).init();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name(THREADS)
        .build()
        .unwrap();
    let root = info_span!("mix");
    let tasks: Vec<_> =
        (0..3).map(|seed| runtime.spawn(mix(seed).instrument(root.clone()))).collect();
    drop(root);
    for task in tasks {
        runtime.block_on(task).unwrap();
    }
    handle.shutdown(Duration::from_secs(60)).unwrap();
    println!("{:?}", handle.stats());
}
