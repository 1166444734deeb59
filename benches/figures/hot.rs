//! What a profiled span costs that is not kept, and one that no rule matches.

use std::hint::black_box;

use tracing::{Dispatch, dispatcher};
use tracing_profiling::ProfilingLayer;
use tracing_subscriber::layer::Identity;
use tracing_subscriber::prelude::*;

use crate::measure::{added, figure, interleave, median, time_each};

fn profiled(rules: &str) -> Dispatch {
    let rules = rules.parse().expect("rules of this bench");
    let layer = ProfilingLayer::builder().rules(rules).build().expect("threads");
    Dispatch::new(tracing_subscriber::registry().with(layer))
}

/// Runs `body` with a span of a target that the rules match, or of one that they do not.
macro_rules! with_target {
    ($matched:expr, $body:expr) => {
        if $matched { $body(&|| tracing::info_span!(target: "matched", "hot")) }
        else { $body(&|| tracing::info_span!(target: "unmatched", "hot")) }
    };
}

fn enter_exit(dispatch: &Dispatch, is_matched: bool) -> f64 {
    dispatcher::with_default(dispatch, || {
        with_target!(is_matched, |new: &dyn Fn() -> tracing::Span| {
            let span = new();
            time_each(20_000, || span.in_scope(|| black_box(())))
        })
    })
}

fn whole_life(dispatch: &Dispatch, is_matched: bool) -> f64 {
    dispatcher::with_default(dispatch, || {
        with_target!(is_matched, |new: &dyn Fn() -> tracing::Span| {
            time_each(20_000, || new().in_scope(|| black_box(())))
        })
    })
}

pub(crate) fn run() {
    // A registry without any layer never closes a span; with one that does nothing it does.
    let bare = Dispatch::new(tracing_subscriber::registry().with(Identity::new()));
    let ours = profiled("matched=10s|error");
    for (what, run) in
        [("enter_exit", enter_exit as fn(&Dispatch, bool) -> f64), ("span", whole_life)]
    {
        let times = interleave(
            41,
            &mut [&mut || run(&bare, true), &mut || run(&ours, true), &mut || run(&ours, false)],
        );
        figure(&format!("hot.{what}.bare"), median(&mut times[0].clone()), "ns");
        figure(&format!("hot.{what}.added"), added(&times[0], &times[1]), "ns");
        figure(&format!("hot.unmatched.{what}.added"), added(&times[0], &times[2]), "ns");
    }
}
