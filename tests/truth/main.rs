//! Compares profiles and accounts with what the tests measure themselves, on a tokio runtime with real samples: which
//! span a sample is on, the share of each function, and the time breakdown of each span.
//!
//! Each scenario runs in its own process, once with each source of samples. No verdict depends on how long something
//! takes. Each value is compared with two bounds, which are read just inside and just outside of what the layer
//! measures.

#![cfg(all(target_os = "linux", not(tracing_profiling_unsupported)))]
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test"
)]

#[path = "../support/mod.rs"]
mod support;

mod accounts;
mod clocks;
mod links;
mod shares;
mod switched;
mod throttled;
mod times;

use support::{has_perf, is_child, run_child};
use tracing_profiling::{Builder, Source};

/// The source of samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sampled {
    Perf,
    /// At most once per kernel tick.
    Timer,
    /// No samples, only times.
    Nothing,
}

impl Sampled {
    pub(crate) fn set(self, builder: Builder) -> Builder {
        match self {
            Self::Perf => builder.source(Source::Perf),
            Self::Timer => builder.source(Source::Timer),
            Self::Nothing => builder.source(Source::None),
        }
    }
}

/// The last line of a successful child. The exit status is not enough: a test filter without a match exits with 0 too.
const DONE: &str = "child is done";

/// Runs the scenario if this is the child. Otherwise runs the child and asserts that it succeeds.
fn play(test: &str, sampled: Sampled, scenario: impl FnOnce(Sampled)) {
    if sampled == Sampled::Perf && !has_perf() {
        println!("skipped: perf events are refused here");
        return;
    }
    if is_child(test) {
        scenario(sampled);
        println!("{DONE}");
        return;
    }
    let output = run_child(test, &[]);
    let [text, errors] =
        [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    println!("{text}{errors}");
    assert!(output.status.success() && text.contains(DONE), "{}", output.status);
}

/// Declares a test for each source: `NAME::perf`, `NAME::timer` and so on.
macro_rules! scenarios {
    ($($name:ident: $scenario:expr, $($variant:ident $sampled:ident),+;)+) => {
        $(mod $name {
            use super::*;

            $(#[test]
            fn $variant() {
                let test = concat!(stringify!($name), "::", stringify!($variant));
                play(test, Sampled::$sampled, $scenario);
            })+
        })+
    };
}

scenarios! {
    // Minutes with timers, which are bound to the kernel's tick.
    no_sample_is_on_a_wrong_span: links::scenario, perf Perf, timer Timer;
    shares_are_within_their_bounds: shares::scenario, perf Perf, timer Timer;
    functions_of_a_thread_that_is_often_preempted_have_their_time: switched::scenario, perf Perf;
    times_agree_with_the_clocks: times::scenario, perf Perf, timer Timer, nothing Nothing;
    accounts_agree_with_the_thread_clock: accounts::scenario, perf Perf, timer Timer, nothing Nothing;
    a_thread_waits_for_a_cpu_as_long_as_the_kernel_says: accounts::runnable, perf Perf, timer Timer, nothing Nothing;
    a_span_that_waits_for_a_cpu_names_the_thread_that_has_it: accounts::rival, timer Timer;
}
