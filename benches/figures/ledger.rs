//! The cost of counting child spans.

use std::time::Duration;

use tracing::{dispatcher, info_span};
use tracing_profiling::Source;

use crate::measure::{Setup, added, figure, interleave, time_each};

/// Fewer than half of those that can wait for the collector, which is not woken for them.
const CHILDREN: u32 = 1_000;

/// The time of the close of a span that was not entered, inside a root that is.
fn closes(setup: &Setup) -> f64 {
    let time = dispatcher::with_default(&setup.dispatch, || {
        let _root = info_span!(target: "matched", "root").entered();
        let new = |_| info_span!(target: "matched", "query");
        let mut children: Vec<_> = (0..CHILDREN).map(new).collect();
        time_each(CHILDREN, || drop(children.pop()))
    });
    setup.handle.flush(Duration::from_secs(10)).expect("the collector");
    time
}

pub(crate) fn run() {
    let rules = "matched=10s";
    let young = Setup::late(rules, |builder| builder.source(Source::None));
    let old = Setup::new(rules, |builder| builder.source(Source::None));
    let times = interleave(41, &mut [&mut || closes(&young), &mut || closes(&old)]);
    figure("ledger.child_close.added", added(&times[0], &times[1]), "ns");
}
