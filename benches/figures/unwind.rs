//! Unwinding stacks of a service: tokio, hyper, and C frames of SQLite.

use std::collections::HashMap;

use tracing_profiling::profile::Profile;

use crate::measure::{Setup, figure};
use crate::shop;

/// The functions in which threads begin.
const ROOTS: &[&str] = &["_start", "clone3", "__clone3", "__clone", "clone", "thread_start"];

pub(crate) fn run() {
    let setup = Setup::new("0ms", |builder| {
        builder.rate(999).profiles_per_minute(10_000).samples_per_profile(100_000)
    });
    // The service's own tasks and threads use the global default.
    tracing::dispatcher::set_global_default(setup.dispatch.clone())
        .expect("no other global default");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(shop::run()).expect("requests");
    setup.flush();
    let stats = setup.handle.stats();
    let shallow = stats.samples.taken - stats.stacks.truncated;
    let (mut whole, mut ends) = (0_u64, HashMap::new());
    for profile in setup.memory.profiles() {
        count_ends(&profile, &mut whole, &mut ends);
    }
    let all: u64 = whole + ends.values().sum::<u64>();
    let deep = ends.get("[callers not copied]").copied().unwrap_or(0);
    figure("unwind.samples", all as f64, "count");
    figure("unwind.complete", whole as f64 / (all - deep) as f64 * 100.0, "%");
    figure("unwind.deeper_than_copy", deep as f64 / all as f64 * 100.0, "%");
    figure(
        "unwind.per_sample",
        stats.sampling.collector_cpu_ns as f64 / stats.samples.taken as f64 / 1e3,
        "us",
    );
    for (end, count) in ends.iter().filter(|(end, _)| *end != "[callers not copied]") {
        eprintln!("{count} of {shallow} stacks end in {end}");
    }
}

/// Counts the stacks that end where threads begin, and the ends of the others.
fn count_ends(profile: &Profile, whole: &mut u64, ends: &mut HashMap<String, u64>) {
    for sample in profile.samples() {
        let points = sample.points.len() as u64;
        let outermost = profile.stack(sample.stack).last();
        let name = outermost
            .and_then(|location| location.lines.last())
            .and_then(|line| profile.function(line.function))
            .map_or("[unknown]", |function| &function.name);
        if ROOTS.contains(&name) {
            *whole += points;
        } else {
            *ends.entry(name.to_owned()).or_default() += points;
        }
    }
}
