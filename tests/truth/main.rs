//! What profiles and accounts say, against what the tests measure themselves, on tokio's runtime with
//! real samples: which span a sample is on, how large the share of each function is, and where the
//! time of each span went.
//!
//! Each runs in a process of its own, once with each source of samples. No verdict depends on how
//! long something takes: what is compared are two measurements of the same, of which one is between
//! two bounds that are read just inside and just outside of what the other measures.

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
mod times;

use support::{has_perf, is_child, run_child};
use tracing_profiling::{Builder, Source};

/// What takes the samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sampled {
    Perf,
    /// As often as the kernel ticks.
    Timer,
    /// As often as asked for.
    FineTimer,
    /// There are times and no samples.
    Nothing,
}

impl Sampled {
    pub(crate) fn set(self, builder: Builder) -> Builder {
        match self {
            Self::Perf => builder.source(Source::Perf),
            Self::Timer => builder.source(Source::Timer),
            Self::FineTimer => builder.source(Source::Timer).fine_timers(),
            Self::Nothing => builder.source(Source::None),
        }
    }
}

/// What the child says last: a test filter that matches nothing ends with 0 as well.
const DONE: &str = "child is done";

/// Runs the scenario if this is the child; else runs the child, and holds that it ends well.
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
    let [said, errors] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    println!("{said}{errors}");
    assert!(output.status.success() && said.contains(DONE), "{}", output.status);
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
    // Timers that follow the kernel's tick would take minutes.
    no_sample_is_on_a_wrong_span: links::scenario, perf Perf, fine_timer FineTimer;
    // Fine timers follow the wall's clock: where threads wait or share a CPU, a sample can come after the
    // wait and stand for what ran before it.
    shares_are_within_their_bounds: shares::scenario, perf Perf, timer Timer;
    times_are_what_clocks_say: times::scenario, perf Perf, timer Timer, nothing Nothing;
    accounts_are_the_threads_own: accounts::scenario, perf Perf, timer Timer, nothing Nothing;
}
