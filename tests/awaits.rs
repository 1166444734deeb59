//! What futures await: where, for how long, and how long they are not polled after they were woken.

#![cfg(not(tracing_profiling_unsupported))]
#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test"
)]

#[path = "awaits/attribution.rs"]
mod attribution;
#[path = "awaits/branches.rs"]
mod branches;
#[path = "awaits/changes.rs"]
mod changes;
#[path = "awaits/executors.rs"]
mod executors;
#[path = "awaits/first_polls.rs"]
mod first_polls;
#[path = "awaits/leaf.rs"]
mod leaf;
#[path = "awaits/open.rs"]
mod open;
#[path = "awaits/scripts.rs"]
mod scripts;
mod support;
#[path = "awaits/times.rs"]
mod times;

use std::time::Duration;

use support::{Setup, functions};
use tracing_profiling::profile::{Profile, Sample, SampleKind};

const MS: Duration = Duration::from_millis(1);

/// A runtime whose threads use the subscriber of `setup`.
fn with_subscriber(setup: &Setup, mut builder: tokio::runtime::Builder) -> tokio::runtime::Runtime {
    let dispatch = setup.dispatch.clone();
    let start = move || std::mem::forget(tracing::dispatcher::set_default(&dispatch));
    builder.enable_all().on_thread_start(start).build().unwrap()
}

/// Whether the stack has a function, or the state machine of an asynchronous one, of that name.
fn is_in(profile: &Profile, sample: &Sample, function: &str) -> bool {
    let has = |name: &&str| name.split("::").any(|part| part == function);
    functions(profile, sample).iter().any(has)
}

/// The sum of all points of samples of that kind for which `is_it`.
fn sum(profile: &Profile, kind: SampleKind, is_it: impl Fn(&Sample) -> bool) -> Duration {
    let samples = profile.of_kind(kind).filter(|sample| is_it(sample));
    Duration::from_nanos(samples.flat_map(|sample| &sample.points).map(|point| point.weight).sum())
}
