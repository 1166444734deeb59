//! A span has a profile id only if the profile is exported, except for at most three while the receiver fails.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use tracing_profiling::{KeptSpan, NoProfile, OtlpBuilder};

use crate::receiver::{Behavior, Receiver, Speaks, free_address};
use crate::support::Nanos as _;
use crate::support::{HAS_STACKS, PLENTY, Setup};
use crate::{BOTH, MS, arrived_at_least_once, given_ids, keep, setup, spans_with_ids, to};

/// The default of `grace_period`.
const USUAL_GRACE_PERIOD: Duration = Duration::from_secs(10);

fn impatient(speaks: Speaks, receiver: &Receiver) -> OtlpBuilder {
    to(speaks, receiver.address).grace_period(USUAL_GRACE_PERIOD).timeout(1000 * MS)
}

fn spans(setup: &Setup) -> Vec<KeptSpan> {
    setup.kept().into_iter().flat_map(|kept| kept.spans).collect()
}

/// Keeps spans while the receiver fails from the start, and again once it has recovered.
fn assert_costs_at_most_three_ids(speaks: Speaks, behavior: Option<Behavior>) {
    let what = format!("{speaks:?} {behavior:?}");
    let mut receiver = Receiver::offline(speaks, free_address());
    if let Some(behavior) = behavior.clone() {
        receiver.always(behavior);
        receiver.start();
    }
    let setup = setup(impatient(speaks, &receiver));
    for round in 0..8 {
        keep(&setup, 1);
        let start = Instant::now();
        assert!(setup.handle.flush(300 * MS).is_err() || !HAS_STACKS, "{what}: round {round}");
        assert!(start.elapsed() < PLENTY);
    }
    if !HAS_STACKS {
        return;
    }
    let stats = || setup.handle.stats();
    let early = spans_with_ids(&stats());
    assert!((1..=3).contains(&early), "{what}: {:?}", stats());
    let start = Instant::now();
    let without = || spans(&setup).into_iter().filter(|span| span.profile().is_err());
    while without().count() < 8 - early as usize {
        assert!(start.elapsed() < PLENTY, "{what}: {:?}", stats());
        std::thread::sleep(MS);
    }
    for span in without() {
        let times = span.times();
        assert!(times.wall().ns() >= 60_000_000 && times.on_cpu().ns() > 0, "{what}: {times:?}");
        let expected = [NoProfile::ExporterFails, NoProfile::ExporterBusy];
        assert!(expected.map(Err).contains(&span.profile()), "{what}: {:?}", span.profile());
    }
    // The receiver recovers.
    match behavior {
        Some(_) => receiver.accept_all(),
        None => receiver.start(),
    }
    let start = Instant::now();
    while spans_with_ids(&stats()) == early {
        assert!(start.elapsed() < 2 * PLENTY, "{what}: {:?}", stats());
        keep(&setup, 1);
        _ = setup.handle.flush(300 * MS);
    }
    // The first flush after a loss reports it.
    while setup.handle.flush(PLENTY).is_err() {
        assert!(start.elapsed() < 4 * PLENTY, "{what}: {:?}", stats());
    }
    let before = given_ids(&setup);
    keep(&setup, 4);
    setup.handle.flush(PLENTY).unwrap();
    let later: BTreeSet<_> = given_ids(&setup).difference(&before).cloned().collect();
    assert_eq!(later.len(), 4, "{what}: {:?}", stats());
    assert!(later.is_subset(&arrived_at_least_once(&receiver, &setup)), "{what}");
}

#[test]
fn a_receiver_that_refuses_everything_costs_at_most_three_profiles() {
    for speaks in BOTH {
        for status in [400, 413, 500, 404, 401] {
            assert_costs_at_most_three_ids(speaks, Some(Behavior::Refuse(status, None)));
        }
    }
}

#[test]
fn a_receiver_that_accepts_nothing_costs_at_most_three_profiles() {
    for speaks in BOTH {
        for behavior in [Some(Behavior::Refuse(503, None)), Some(Behavior::Hang), None] {
            assert_costs_at_most_three_ids(speaks, behavior);
        }
    }
}
