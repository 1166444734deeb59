//! Compares each function's share of the samples with its share of the CPU time.

use std::collections::HashMap;
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};

use tracing::{Instrument, info_span};
use tracing_profiling::profile::{Profile, SampleKind};

use crate::Sampled;
use crate::clocks::cpu_ns;

use crate::support::{Setup, functions};

/// The required number of samples of equal weight: with fewer, the bounds would be too wide to be useful. Samples by
/// timers are rarer, and their weights are the more unequal the busier the machine is.
fn wanted(sampled: Sampled) -> f64 {
    if sampled == Sampled::Perf { 6_000.0 } else { 1_000.0 }
}

/// The CPU time of a round.
const ROUND_NS: u64 = 2_000_000_000;
const RATE: u32 = 1_000;
const TASKS: usize = 6;

/// How far a share may be off, in standard errors: exceeded by chance once in two million times.
const STANDARD_ERRORS: f64 = 5.0;

/// A function, and the approximate number of rounds per call.
struct Part {
    name: &'static str,
    work: fn(u64),
    rounds: u64,
    /// The CPU time spent in it.
    used_ns: AtomicU64,
}

macro_rules! mix {
    ($($name:ident $rounds:literal,)+) => {
        $(#[inline(never)]
        fn $name(rounds: u64) {
            // The name keeps the compiler from merging the functions.
            let mut x = black_box(stringify!($name)).len() as u64;
            let mut i = 0;
            while i < rounds {
                x = black_box((x ^ i) * 3 % 1_000_003);
                i += 1;
            }
        })+
        static MIX: [Part; [$($rounds),+].len()] = [$(Part {
            name: stringify!($name),
            work: $name,
            rounds: $rounds,
            used_ns: AtomicU64::new(0),
        }),+];
    };
}

mix! {
    much 90_000,
    half_of_that 45_000,
    a_fifth 20_000,
    less 12_000,
    little 6_000,
    hardly_any 2_000,
}

/// A pseudorandom generator, with the same sequence in each run.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

impl Part {
    /// Does work of a random length.
    fn run(&self, random: &mut Random) {
        let rounds = self.rounds / 4 + random.below(self.rounds * 3 / 2);
        let before_ns = cpu_ns();
        (self.work)(rounds);
        self.used_ns.fetch_add(cpu_ns() - before_ns, Ordering::Relaxed);
    }
}

fn used_ns() -> u64 {
    MIX.iter().map(|part| part.used_ns.load(Ordering::Relaxed)).sum()
}

/// The samples of a function.
#[derive(Clone, Copy, Default)]
struct Samples {
    weight: f64,
    /// Sum of the squares of the weights.
    squares: f64,
}

/// Adds a profile's samples to those of each function.
fn add_samples(profile: &Profile, of_parts: &mut HashMap<&'static str, Samples>) {
    for sample in profile.of_kind(SampleKind::OnCpu) {
        let functions = functions(profile, sample);
        let is_in =
            |part: &&Part| functions.iter().any(|name| name.rsplit("::").next() == Some(part.name));
        let Some(part) = MIX.iter().find(is_in) else { continue };
        let of_part = of_parts.entry(part.name).or_default();
        for point in &sample.points {
            let weight = point.weight as f64;
            of_part.weight += weight;
            of_part.squares += weight * weight;
        }
    }
}

/// The total weight, and the effective sample size: the number of samples of equal weight with the same variance.
fn in_all(of_parts: &HashMap<&'static str, Samples>) -> (f64, f64) {
    let sum = |of: fn(&Samples) -> f64| of_parts.values().map(of).sum::<f64>();
    let (weight, squares) = (sum(|samples| samples.weight), sum(|samples| samples.squares));
    (weight, if squares > 0.0 { weight * weight / squares } else { 0.0 })
}

async fn task(seed: u64, until_ns: u64) {
    let mut random = Random(seed);
    while used_ns() < until_ns {
        // Each call is in its own span or in that of the task, at random.
        let part = &MIX[random.below(MIX.len() as u64) as usize];
        if random.below(2) == 0 {
            info_span!("part").in_scope(|| part.run(&mut random));
        } else {
            part.run(&mut random);
        }
        tokio::task::yield_now().await;
    }
}

pub(crate) fn scenario(sampled: Sampled) {
    let setup = Setup::with("1h,[root]=0ms", |builder| {
        sampled.set(builder).rate(RATE).samples_per_profile(1_000_000)
    });
    tracing::dispatcher::set_global_default(setup.dispatch.clone()).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
    let mut found = HashMap::new();
    let mut seeds = 0..;
    while in_all(&found).1 < wanted(sampled) {
        let root = info_span!("root");
        let until_ns = used_ns() + ROUND_NS;
        let start = |seed| {
            let span = root.in_scope(|| info_span!("task"));
            runtime.spawn(task(seed, until_ns).instrument(span))
        };
        let tasks: Vec<_> = seeds.by_ref().take(TASKS).map(start).collect();
        drop(root);
        for task in tasks {
            runtime.block_on(task).unwrap();
        }
        setup.flush();
        let profiles = setup.memory.take();
        assert!(!profiles.is_empty(), "no samples: {:?}", setup.handle.stats());
        profiles.iter().for_each(|profile| add_samples(profile, &mut found));
    }
    let (weight, count) = in_all(&found);
    let used_ns = used_ns() as f64;
    println!(
        "{count:.0} samples, for {:.3} of the CPU time; {:?}",
        weight / used_ns,
        setup.handle.stats()
    );
    let mut worst: f64 = 0.0;
    for part in &MIX {
        let share = part.used_ns.load(Ordering::Relaxed) as f64 / used_ns;
        let observed = found.get(part.name).map_or(0.0, |samples| samples.weight / weight);
        let standard_error = (share * (1.0 - share) / count).sqrt();
        let off = (observed - share) / standard_error;
        println!(
            "{:>12}: {:.3} % of the time, {:.3} % of the samples, {off:+.2} standard errors",
            part.name,
            share * 100.0,
            observed * 100.0
        );
        worst = worst.max(off.abs());
    }
    assert!(worst < STANDARD_ERRORS, "{worst}");
}
