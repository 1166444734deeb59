//! No span has the id of a profile that nobody will find.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use tracing_profiling::{KeptSpan, NoProfile, OtlpBuilder};

use crate::receiver::{Does, Receiver, Speaks, free_address};
use crate::support::{HAS_STACKS, PLENTY, Setup};
use crate::{BOTH, MS, arrived_at_least_once, given, keep, promised, setup, to};

/// As it is without a word about patience.
const USUAL_PATIENCE: Duration = Duration::from_secs(10);

fn impatient(speaks: Speaks, receiver: &Receiver) -> OtlpBuilder {
    to(speaks, receiver.address).patience(USUAL_PATIENCE).timeout(1000 * MS)
}

fn spans(setup: &Setup) -> Vec<KeptSpan> {
    setup.kept().into_iter().flat_map(|kept| kept.spans).collect()
}

/// Spans are kept while the receiver does so from the beginning, and after that.
fn costs_three_ids(speaks: Speaks, does: Option<Does>) {
    let what = format!("{speaks:?} {does:?}");
    let mut receiver = Receiver::away(speaks, free_address());
    if let Some(does) = does.clone() {
        receiver.always(does);
        receiver.start();
    }
    let setup = setup(impatient(speaks, &receiver));
    for round in 0..8 {
        keep(&setup, 1);
        let start = Instant::now();
        assert!(!setup.handle.flush(300 * MS) || !HAS_STACKS, "{what}: round {round}");
        assert!(start.elapsed() < PLENTY);
    }
    if !HAS_STACKS {
        return;
    }
    let stats = || setup.handle.stats();
    let early = given(&stats());
    assert!((1..=3).contains(&early), "{what}: {:?}", stats());
    let start = Instant::now();
    let without = || spans(&setup).into_iter().filter(|span| span.profile().is_err());
    while without().count() < 8 - early as usize {
        assert!(start.elapsed() < PLENTY, "{what}: {:?}", stats());
        std::thread::sleep(MS);
    }
    for span in without() {
        let times = span.account();
        assert!(times.wall_ns >= 60_000_000 && times.on_cpu_ns > 0, "{what}: {times:?}");
        let expected = [NoProfile::ExporterFails, NoProfile::ExporterBusy];
        assert!(expected.map(Err).contains(&span.profile()), "{what}: {:?}", span.profile());
    }
    // It is well again.
    match does {
        Some(_) => receiver.will_no_more(),
        None => receiver.start(),
    }
    let start = Instant::now();
    while given(&stats()) == early {
        assert!(start.elapsed() < 2 * PLENTY, "{what}: {:?}", stats());
        keep(&setup, 1);
        _ = setup.handle.flush(300 * MS);
    }
    // What was lost before is said once.
    while !setup.handle.flush(PLENTY) {
        assert!(start.elapsed() < 4 * PLENTY, "{what}: {:?}", stats());
    }
    let before = promised(&setup);
    keep(&setup, 4);
    assert!(setup.handle.flush(PLENTY), "{what}");
    let later: BTreeSet<_> = promised(&setup).difference(&before).cloned().collect();
    assert_eq!(later.len(), 4, "{what}: {:?}", stats());
    assert!(later.is_subset(&arrived_at_least_once(&receiver, &setup)), "{what}");
}

#[test]
fn a_receiver_that_refuses_all_gets_three() {
    for speaks in BOTH {
        for status in [400, 413, 500, 404, 401] {
            costs_three_ids(speaks, Some(Does::Refuse(status, None)));
        }
    }
}

#[test]
fn a_receiver_that_never_takes_any_gets_three() {
    for speaks in BOTH {
        for does in [Some(Does::Refuse(503, None)), Some(Does::Hang), None] {
            costs_three_ids(speaks, does);
        }
    }
}
