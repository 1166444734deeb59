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

fn enter_exit(dispatch: &Dispatch) -> f64 {
    dispatcher::with_default(dispatch, || {
        let span = tracing::info_span!("hot");
        time_each(20_000, || span.in_scope(|| black_box(())))
    })
}

fn whole_life(dispatch: &Dispatch) -> f64 {
    dispatcher::with_default(dispatch, || {
        time_each(20_000, || tracing::info_span!("hot").in_scope(|| black_box(())))
    })
}

pub(crate) fn run() {
    // A registry without any layer never closes a span; with one that does nothing it does.
    let bare = Dispatch::new(tracing_subscriber::registry().with(Identity::new()));
    let matched = profiled("10s|error");
    let unmatched = profiled("nothing_here=10s");
    for (what, run) in [
        ("enter_exit", enter_exit as fn(&Dispatch) -> f64),
        ("span", whole_life),
    ] {
        let times = interleave(
            41,
            &mut [&mut || run(&bare), &mut || run(&matched), &mut || run(&unmatched)],
        );
        figure(&format!("hot.{what}.bare"), median(&mut times[0].clone()), "ns");
        figure(&format!("hot.{what}.added"), added(&times[0], &times[1]), "ns");
        figure(&format!("hot.unmatched.{what}.added"), added(&times[0], &times[2]), "ns");
    }
}
