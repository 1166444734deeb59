//! Reference spans, and what kept spans did that these did not.

#![cfg(not(tracing_profiling_unsupported))]
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test"
)]

mod support;

use std::future::Future;
use std::time::Duration;

use support::{Burning, PLENTY, Setup, burn};
use tracing::{Instrument as _, info_span};
use tracing_profiling::compare::{ComparedRow, Comparison, Quantity, SpentIn, TimeKind};
use tracing_profiling::{Builder, ChildOrder, Handle, ProfiledExt as _, ProfilingAllocator};

#[global_allocator]
static ALLOCATOR: ProfilingAllocator = ProfilingAllocator::system();

const MS: Duration = Duration::from_millis(1);
const TYPICAL: u64 = 30;

/// Each span that is created becomes a reference.
fn all(builder: Builder) -> Builder {
    builder.references(1, 100.0).span_fields(["http.route", "customer"])
}

/// Until the reference spans that have closed are known.
fn wait_for_references(handle: &Handle, expected: u64) {
    let start = std::time::Instant::now();
    loop {
        handle.flush(PLENTY).unwrap();
        let references = handle.stats().references;
        if references.added + references.dropped_busy >= expected {
            assert_eq!(references.dropped_busy, 0, "{references:?}");
            return;
        }
        assert!(start.elapsed() < PLENTY, "{references:?}");
    }
}

/// Runs typical requests, few at a time: 30 at once are too many.
fn typical(handle: &Handle, request: impl Fn(u64)) {
    for number in 0..TYPICAL {
        request(number);
        if number % 8 == 7 || number + 1 == TYPICAL {
            wait_for_references(handle, number + 1);
        }
    }
}

#[inline(never)]
fn render(cpu: Duration) {
    burn(cpu);
}

/// Burns CPU time in the function itself.
#[inline(never)]
fn count_cheap_bundles(cpu: Duration) {
    let burning = Burning::new(cpu);
    let mut bundles = 1_u64;
    while burning.goes_on() {
        let mut bundle = 0;
        while bundle < 5_000 {
            bundles = std::hint::black_box((bundles ^ bundle) * 3 % 1_000_003);
            bundle += 1;
        }
    }
}

#[inline(never)]
fn reserve_stock(time: Duration) {
    std::thread::sleep(time);
}

#[inline(never)]
fn build_index(bytes: usize) -> usize {
    let index: Vec<u64> = (0..bytes as u64 / 8).collect();
    std::hint::black_box(&index).len()
}

/// What a request is made of, besides 4 ms of `render`.
#[derive(Clone, Copy, Default)]
struct Extra {
    cpu: Duration,
    wait: Duration,
    bytes: usize,
    queries: u64,
}

fn request(customer: u64, extra: Extra) {
    let _request = info_span!("request", http.route = "/similar", customer).entered();
    render(4 * MS);
    if extra.cpu > Duration::ZERO {
        count_cheap_bundles(extra.cpu);
    }
    if extra.wait > Duration::ZERO {
        reserve_stock(extra.wait);
    }
    for _ in 0..3 + extra.queries {
        let _query = info_span!("query").entered();
    }
    build_index(64 * 1024 + extra.bytes);
}

/// The comparison of one request like that with many typical ones.
fn compared(slow: Extra) -> Comparison {
    // No typical request uses 60 ms of CPU time, however busy the machine is.
    let setup = Setup::with("on_cpu>60ms|alloc>60MB", all);
    tracing::dispatcher::with_default(&setup.dispatch, || {
        typical(&setup.handle, |number| request(number, Extra { wait: MS, ..Extra::default() }));
        request(99, slow);
    });
    setup.flush();
    let kept = setup.kept();
    let [kept] = &kept[..] else { panic!("{kept:?}") };
    let comparison = kept.comparison().unwrap().clone();
    assert_eq!(comparison.references, TYPICAL, "none of them is the span itself");
    let parts: i64 = comparison.rows.iter().map(|row| row.value.extra()).sum();
    assert_eq!(parts, comparison.wall.extra(), "{comparison:?}");
    assert_eq!(
        comparison.wall.value,
        u64::try_from(kept.spans[0].times().wall().as_nanos()).unwrap()
    );
    wait_for_references(&setup.handle, TYPICAL + 1);
    comparison
}

/// The function with the largest difference. On a busy machine, threads of other programs can have taken more.
fn first(comparison: &Comparison) -> (TimeKind, &str) {
    for row in &comparison.rows {
        match &row.quantity {
            // It is not always known for how long a thread waited for a CPU.
            Quantity::Wall(TimeKind::Runnable, _)
            | Quantity::Wall(TimeKind::OffCpu, SpentIn::Unknown) => {}
            Quantity::Wall(kind, SpentIn::Function(function)) => {
                assert!(row.value.interval.unwrap().low > 0, "{row:?}");
                return (*kind, &function.name);
            }
            _ => break,
        }
    }
    panic!("{comparison:?}")
}

#[test]
fn the_first_row_names_the_function_that_took_more_cpu_time() {
    let comparison = compared(Extra { cpu: 80 * MS, ..Extra::default() });
    let (kind, function) = first(&comparison);
    assert!(kind == TimeKind::OnCpu && function.ends_with("count_cheap_bundles"), "{comparison:?}");
    let is_it =
        |row: &&ComparedRow| matches!(&row.quantity, Quantity::Wall(_, SpentIn::Function(_)));
    let row = comparison.rows.iter().find(is_it).unwrap();
    assert_eq!((row.present_in, row.as_extreme_in), (0, Some(0)), "{row:?}");
}

#[test]
fn the_first_row_names_the_function_that_waited() {
    let wait = Duration::from_millis(600);
    let slow = Extra { cpu: 70 * MS, wait, ..Extra::default() };
    let comparison = compared(slow);
    let (kind, function) = first(&comparison);
    assert!(kind == TimeKind::OffCpu && function.ends_with("reserve_stock"), "{comparison:?}");
}

#[test]
fn what_was_allocated_is_beside_the_wall_time() {
    let comparison = compared(Extra { bytes: 64 << 20, ..Extra::default() });
    let row = comparison.beside.iter().find(|row| row.quantity == Quantity::AllocatedBytes);
    let row = row.unwrap_or_else(|| panic!("{comparison:?}"));
    assert!(row.value.interval.unwrap().low > 50 << 20 && row.as_extreme_in == Some(0), "{row:?}");
}

#[test]
fn many_queries_are_beside_the_wall_time() {
    // What it allocates is why it is kept, however fast the machine is.
    let comparison = compared(Extra { queries: 211, bytes: 64 << 20, ..Extra::default() });
    let queries = Quantity::ChildSpans(Some("query".into()));
    let row = comparison.beside.iter().find(|row| row.quantity == queries);
    let row = row.unwrap_or_else(|| panic!("{comparison:?}"));
    assert_eq!((row.value.value, row.value.typical), (214, 3), "{row:?}");
    assert_eq!((row.present_in, row.as_extreme_in), (TYPICAL, Some(0)), "{row:?}");
    let time = Quantity::ChildTime(Some("query".into()));
    assert!(comparison.beside.iter().any(|row| row.quantity == time), "{comparison:?}");
}

#[test]
fn child_spans_are_counted_by_name_with_and_without_samples() {
    let setup = Setup::with("alloc>60MB", |builder| builder.sampling_delay(Duration::ZERO));
    tracing::dispatcher::with_default(&setup.dispatch, || {
        let request = info_span!("request");
        request.in_scope(|| {
            for _ in 0..214 {
                let _query = info_span!("query").entered();
                let _row = info_span!("row").entered();
            }
            let together = std::sync::Barrier::new(8);
            std::thread::scope(|scope| {
                for _ in 0..8 {
                    scope.spawn(|| {
                        tracing::dispatcher::with_default(&setup.dispatch, || {
                            let _fetch = info_span!(parent: &request, "fetch").entered();
                            together.wait();
                            std::thread::sleep(10 * MS);
                            together.wait();
                        });
                    });
                }
            });
            build_index(64 << 20);
        });
    });
    setup.flush();
    let kept = setup.kept();
    let [kept] = &kept[..] else { panic!("{kept:?}") };
    let children = &kept.spans[0].facts.children;
    let of =
        |name: &str| children.totals.iter().find(|it| it.name.as_deref() == Some(name)).unwrap();
    let (query, row, fetch) = (of("query"), of("row"), of("fetch"));
    assert_eq!([query.count, row.count, fetch.count], [214, 214, 8]);
    assert_eq!((query.order(), row.order()), (ChildOrder::InTurn, ChildOrder::InTurn));
    assert!(fetch.total_ns >= 80_000_000 && fetch.longest_ns >= 10_000_000, "{fetch:?}");
    assert!(fetch.open_ns < fetch.total_ns && fetch.order() != ChildOrder::InTurn, "{fetch:?}");
    assert!(query.open_ns == query.total_ns && row.total_ns <= query.total_ns, "{query:?} {row:?}");
    assert_eq!((children.totals.len(), children.from_ns), (3, 0));
    assert!(!children.are_incomplete);
    assert_eq!(setup.handle.stats().children.counted, 214 + 214 + 8);
}

/// Runs requests on one thread of an executor.
fn compared_futures<F: Future<Output = ()>>(run: impl Fn(bool) -> F) -> Comparison {
    let setup = Setup::with("2s", all);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    tracing::dispatcher::with_default(&setup.dispatch, || {
        let request = |is_slow| {
            let span = info_span!("request", http.route = "/similar");
            runtime.block_on(run(is_slow).instrument(span).profiled());
        };
        typical(&setup.handle, |_| request(false));
        request(true);
    });
    setup.flush();
    let kept = setup.kept();
    let [kept] = &kept[..] else { panic!("{kept:?}") };
    kept.comparison().unwrap().clone()
}

#[test]
fn the_first_row_names_what_was_awaited() {
    async fn ask_the_warehouse(time: Duration) {
        tokio::time::sleep(time).await;
    }
    let comparison = compared_futures(|is_slow| {
        ask_the_warehouse(if is_slow { Duration::from_secs(3) } else { 10 * MS })
    });
    let (kind, function) = first(&comparison);
    assert!(kind == TimeKind::Await && function.contains("ask_the_warehouse"), "{comparison:?}");
}

#[test]
fn the_first_row_says_that_a_request_was_not_polled() {
    let comparison = compared_futures(|is_slow| async move {
        let (answer, answered) = tokio::sync::oneshot::channel();
        // A task of the same thread, in no span. It wakes the request, and goes on.
        let other = async move {
            answer.send(()).unwrap();
            if is_slow {
                std::thread::sleep(Duration::from_secs(3));
            }
        };
        tokio::spawn(other.instrument(tracing::Span::none()));
        answered.await.unwrap();
    });
    assert_eq!(first_kind(&comparison), TimeKind::SchedulingDelay, "{comparison:?}");
}

fn first_kind(comparison: &Comparison) -> TimeKind {
    match &comparison.rows[0].quantity {
        Quantity::Wall(kind, _) => *kind,
        other => panic!("{other:?}"),
    }
}

#[test]
fn few_references_have_no_interval_and_none_give_no_comparison() {
    let setup = Setup::with("on_cpu>60ms", all);
    tracing::dispatcher::with_default(&setup.dispatch, || {
        let slow = Extra { cpu: 70 * MS, ..Extra::default() };
        request(0, slow);
        wait_for_references(&setup.handle, 1);
        (0..3).for_each(|number| request(number, Extra::default()));
        wait_for_references(&setup.handle, 4);
        request(0, slow);
    });
    setup.flush();
    let kept = setup.kept();
    assert!(kept.len() == 2 && kept[0].comparison().is_none(), "{kept:?}");
    let comparison = kept[1].comparison().unwrap();
    // The first one is a reference, too, although it was kept: what is typical depends on no verdict.
    assert_eq!(comparison.references, 4);
    assert!(comparison.rows.iter().all(|row| row.value.interval.is_none()), "{comparison:?}");
}

#[test]
fn nothing_of_a_reference_is_exported_and_off_means_none() {
    for is_on in [true, false] {
        let set = |builder: Builder| if is_on { all(builder) } else { builder.references(0, 0.0) };
        let setup = Setup::with("1h", set);
        tracing::dispatcher::with_default(&setup.dispatch, || {
            (0..5).for_each(|number| request(number, Extra::default()));
            // Of a child, nothing is known by itself.
            let _request = info_span!("request", http.route = "/similar").entered();
            info_span!("child").in_scope(|| render(MS));
        });
        wait_for_references(&setup.handle, if is_on { 6 } else { 0 });
        let references = setup.handle.stats().references;
        assert_eq!((references.chosen, references.added), if is_on { (6, 6) } else { (0, 0) });
        assert!(setup.kept().is_empty() && setup.profiles().is_empty());
    }
}

/// Of 10,000 requests whose lengths are known, the mean of the references is right, and their number is limited.
#[test]
fn references_are_chosen_whatever_they_will_take() {
    let set = |builder: Builder| builder.references(20, 100.0).span_fields(["http.route"]);
    let setup = Setup::with("1h", set);
    let mut chosen = [0_u64; 2];
    tracing::dispatcher::with_default(&setup.dispatch, || {
        for number in 0..10_000 {
            let before = setup.handle.stats().references.chosen;
            // Long and short ones, of one route.
            info_span!("request", http.route = "/").in_scope(|| ());
            chosen[number % 2] += setup.handle.stats().references.chosen - before;
        }
    });
    let all: u64 = chosen.iter().sum();
    // Powers of two are aimed at, below the limit: of one in 32, 312.
    assert!((200..=500).contains(&all), "{chosen:?}");
    let difference = chosen[0].abs_diff(chosen[1]) as f64 / (all as f64).sqrt();
    assert!(difference < 4.0, "{chosen:?}");
}
