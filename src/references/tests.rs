//! What is typical of the cohorts of a layer.

use std::sync::Arc;

use super::*;
use crate::facts::{Facts, TimeBreakdown};
use crate::profile::{
    FrameKind, Function, Leaf, Line, Location, LocationId, Point, Profile, ProfileId, SampleKind,
};
use crate::stats::Stats;

const MS: u64 = 1_000_000;

fn references() -> (References, Arc<Counters>) {
    let counters = Arc::new(Counters::default());
    (
        References::new(ReferenceLimits::default(), HtmlContext::default(), Arc::clone(&counters)),
        counters,
    )
}

fn function(profile: &mut Profile, name: &str, address: u64) -> LocationId {
    let function = profile.add_function(Function::named(name));
    let lines = vec![Line { function, line: 7, column: 0 }];
    let kind = FrameKind::Rust;
    profile.add_location(Location { mapping: None, address, kind, lines, is_inferred: false })
}

/// A request of a route that spends its wall time in these functions, each called from the one before.
fn request(route: &str, functions: &[(String, u64)]) -> (Profile, Facts) {
    let mut profile = Profile::new(ProfileId::NONE, MS);
    let mut stack = Vec::new();
    for (number, (name, ns)) in (0_u64..).zip(functions) {
        // Each time at another address, and blocked on another lock.
        let address = profile.sample_count() as u64 + number;
        stack.insert(0, function(&mut profile, name, address));
        let at = profile.add_stack(stack.clone());
        let point = |weight| Point { time_unix_ns: number, weight, thread: None };
        profile.add_sample(SampleKind::OnCpu, at, None, point(*ns));
        let leaf = profile.add_leaf(Leaf::Blocked(format!("futex 0x7f{number:x}")));
        profile.add_sample_at(SampleKind::OffCpu, (at, leaf), None, point(MS));
    }
    let wall_ns = functions.iter().map(|(_, ns)| ns).sum();
    let times = TimeBreakdown { wall_ns, on_cpu_ns: wall_ns, ..TimeBreakdown::default() };
    let fields = vec![("http.route", route.to_owned()), ("customer", "7".to_owned())];
    (profile, Facts { span: "request".into(), fields, times, ..Facts::default() })
}

fn stats(counters: &Counters) -> Stats {
    counters.snapshot()
}

#[test]
fn the_typical_profile_is_that_of_the_mean_request() {
    let (references, _) = references();
    for number in 0..1_000_u64 {
        // Every second one calls the inner function.
        let inner = if number % 2 == 0 { 4 * MS } else { 0 };
        let functions = [("outer".to_owned(), 10 * MS), ("inner".to_owned(), inner)];
        let (profile, facts) = request("/a", if inner > 0 { &functions } else { &functions[..1] });
        references.add(&profile, &facts, 1, number);
    }
    let (profile, facts) = request("/a", &[("outer".to_owned(), 30 * MS)]);
    let compared = references.compare(&profile, &facts).unwrap();
    assert_eq!(compared.cohort, "request{http.route=/a}");
    assert_eq!(compared.span, "request{http.route=/a customer=7}");
    assert_eq!(compared.comparison.references, 200);
    let typical = &compared.typical;
    let ns = |kind| typical.total(kind) as f64 / MS as f64;
    assert!((ns(SampleKind::OnCpu) - 12.0).abs() < 0.1, "{}", ns(SampleKind::OnCpu));
    assert!((ns(SampleKind::OffCpu) - 1.5).abs() < 0.02, "{}", ns(SampleKind::OffCpu));
    // Addresses of code and of locks do not tell its stacks apart.
    assert_eq!((typical.samples().len(), typical.locations().count()), (4, 2));
    assert!(references.compare(&profile, &Facts { fields: Vec::new(), ..facts }).is_none());
}

#[test]
fn a_typical_profile_with_many_stacks_has_all_of_the_time() {
    let (references, _) = references();
    for number in 0..60_u64 {
        // Each of its 600 stacks occurs once, with the same weight.
        let functions: Vec<_> =
            (0..600).map(|at| (format!("f{}", number * 600 + at), MS)).collect();
        for part in functions.chunks(6) {
            let (profile, facts) = request("/a", part);
            references.add(&profile, &facts, 1, number);
        }
    }
    let (profile, facts) = request("/a", &[("outer".to_owned(), 30 * MS)]);
    let typical = references.compare(&profile, &facts).unwrap().typical;
    let on_cpu_ms = typical.total(SampleKind::OnCpu) as f64 / MS as f64;
    // Each spans 6 ms, less what is rounded.
    assert!((5.0..=6.0).contains(&on_cpu_ms), "{on_cpu_ms}");
    let is_others = |name: &str| name == "[other stacks]";
    assert!(typical.functions().any(|(_, function)| is_others(&function.name)));
}

#[test]
fn what_is_known_of_64_cohorts_is_bounded_whatever_they_do() {
    let (references, counters) = references();
    let add = |number: u64, levels: u64| {
        let route = format!("/{}", number % 65);
        let functions: Vec<_> = (0..levels)
            .map(|level| (format!("shop::module::function_{}", (number * 31 + level) % 9_973), MS))
            .collect();
        let (profile, facts) = request(&route, &functions);
        references.add(&profile, &facts, 1, number * MS);
    };
    (0..200 * 65).for_each(|number| add(number, 3));
    (0..5 * 65).for_each(|number| add(number, 60));
    let cohorts = references.cohorts.lock();
    let bytes = cohorts.iter().map(|(_, known)| (known.references.bytes(), known.profile.bytes()));
    let bytes: Vec<_> = bytes.collect();
    let (of_references, of_profiles) =
        bytes.iter().fold((0, 0), |all, one| (all.0 + one.0, all.1 + one.1));
    println!("64 cohorts: references {of_references} bytes, profiles {of_profiles} bytes");
    assert_eq!(bytes.len(), MAX_COHORTS);
    assert!(of_references < 10 << 20 && of_profiles <= 64 * 128 * 1024);
    let stats = stats(&counters).references;
    assert_eq!((stats.added + stats.dropped_cohorts_full, stats.added), (205 * 65, 205 * 64));
}

#[test]
fn references_that_are_not_read_are_dropped_and_counted() {
    let (references, counters) = references();
    let key = |number| SpanKey::new(number).unwrap();
    let closed = |number| ClosedReference {
        span: KeptSpan::for_test(key(number), key(number), 1),
        weight: 128,
        since: Instant::now(),
        spent_ns: 0,
    };
    (1..=100).for_each(|number| references.close(closed(number)));
    assert_eq!(
        references.take_closed(&[key(3), key(5), key(99)], false, |span| span.key == key(5)).len(),
        1
    );
    assert!(references.take_closed(&[key(3)], false, |_| false).is_empty());
    assert_eq!(stats(&counters).references.dropped_busy, 36);
    assert_eq!(references.take_closed(&[], true, |_| true).len(), MAX_CLOSED - 1);
    let mut begun: Vec<_> = (0..20).filter_map(|_| references.begin()).collect();
    assert_eq!((begun.len(), stats(&counters).references.dropped_busy), (MAX_ON_WAY, 40));
    begun.pop();
    assert!(references.begin().is_some());
}

#[test]
fn a_reference_is_taken_at_last_if_its_close_is_never_reported_or_its_group_never_ends() {
    let (references, _) = references();
    let key = |number| SpanKey::new(number).unwrap();
    let closed = |number, since| ClosedReference {
        span: KeptSpan::for_test(key(number), key(number), 1),
        weight: 128,
        since,
        spent_ns: 0,
    };
    let now = Instant::now();
    references.close(closed(1, now.checked_sub(LONGEST_WAIT).unwrap()));
    references.close(closed(2, now));
    let taken = references.take_closed(&[], false, |_| true);
    assert_eq!(taken.iter().map(|it| it.span.key).collect::<Vec<_>>(), [key(1)]);
}
