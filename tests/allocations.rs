//! What spans allocate, held against an allocator that counts for the test.

#![allow(
    unsafe_code,
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test"
)]

#[cfg(not(tracing_profiling_unsupported))]
#[path = "allocations/stacks.rs"]
mod stacks;
mod support;

use std::alloc::{GlobalAlloc, Layout};
use std::cell::Cell;
use std::collections::HashMap;
use std::future::{Future, poll_fn};
use std::hint::black_box;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use mimalloc::MiMalloc;
use support::{Log, Setup};
use tracing::{Instrument, Span, info_span};
use tracing_profiling::{
    Allocations, KeptSpan, Measure, ProfilingAllocator, ProfilingLayer, Reason,
};
use tracing_subscriber::prelude::*;

/// Bytes and calls of allocations and frees.
type Counts = [u64; 4];

thread_local! {
    static COUNTS: Cell<Counts> = const { Cell::new([0; 4]) };
}

/// Counts what each thread allocates, below the allocator that is tested.
struct Counting(MiMalloc);

#[global_allocator]
static ALLOCATOR: ProfilingAllocator<Counting> = ProfilingAllocator::new(Counting(MiMalloc));

fn count(allocated: Option<usize>, freed: Option<usize>) {
    let one = |size: Option<usize>| [size.unwrap_or(0) as u64, u64::from(size.is_some())];
    let ([bytes, calls], [freed_bytes, frees]) = (one(allocated), one(freed));
    COUNTS.set(sum(COUNTS.get(), [bytes, calls, freed_bytes, frees]));
}

fn sum(counts: Counts, more: Counts) -> Counts {
    std::array::from_fn(|i| counts[i] + more[i])
}

// SAFETY: passes all calls on.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(Some(layout.size()), None);
        // SAFETY: the contract is the caller's.
        unsafe { self.0.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(Some(layout.size()), None);
        // SAFETY: the contract is the caller's.
        unsafe { self.0.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        count(None, Some(layout.size()));
        // SAFETY: the contract is the caller's.
        unsafe { self.0.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count(Some(new_size), Some(layout.size()));
        // SAFETY: the contract is the caller's.
        unsafe { self.0.realloc(block, layout, new_size) }
    }
}

/// What the spans of the test should have allocated themselves.
struct Expected {
    own: Vec<[AtomicU64; 4]>,
    /// Blocks that one span allocates and another one frees, perhaps on another thread.
    held: Mutex<Vec<Vec<u8>>>,
    /// What is dropped at the end, outside of all spans: a span that closes frees what layers have stored with it.
    later: Mutex<Vec<(Span, Option<Task>)>>,
    spans: usize,
}

impl Expected {
    fn new(spans: usize) -> Self {
        let own = (0..spans).map(|_| Default::default()).collect();
        let held = Mutex::new(Vec::with_capacity(1 << 16));
        let later = Mutex::new(Vec::with_capacity(1 << 16));
        Self { own, held, later, spans }
    }

    /// Runs code of the program inside a span.
    fn measure(&self, span: usize, code: impl FnOnce()) {
        let before = COUNTS.get();
        code();
        for (sum, (now, before)) in self.own[span].iter().zip(COUNTS.get().iter().zip(before)) {
            sum.fetch_add(now - before, Ordering::Relaxed);
        }
    }

    /// Closes all spans, the inner ones first.
    fn close(&self, setup: &Setup) {
        tracing::dispatcher::with_default(&setup.dispatch, || {
            self.later.lock().unwrap().drain(..).for_each(drop);
        });
        setup.flush();
    }

    fn own(&self, span: usize) -> Counts {
        self.own[span].each_ref().map(|sum| sum.load(Ordering::Relaxed))
    }

    fn all(&self, span: usize) -> Counts {
        let children = children(span).filter(|child| *child < self.spans);
        children.fold(self.own(span), |all, child| sum(all, self.all(child)))
    }
}

/// Trees of 8 spans: 0 { 1 { 3, 4 }, 2 { 5, 6 { 7 } } }, with numbers that begin at a multiple of 8.
fn children(span: usize) -> impl Iterator<Item = usize> {
    const CHILDREN: [&[usize]; 8] = [&[1, 2], &[3, 4], &[5, 6], &[], &[], &[], &[7], &[]];
    CHILDREN[span % 8].iter().map(move |child| span / 8 * 8 + child)
}

/// All kinds of allocations, of sizes that depend on the numbers.
fn allocate(expected: &Expected, span: usize, turn: usize) {
    expected.measure(span, || {
        let size = 1 + (span * 7_919 + turn * 104_729) % 5_000;
        let mut grown = vec![1_u8; size];
        for _ in 0..turn % 4 {
            grown.reserve_exact(2 * grown.capacity() + turn);
        }
        grown.truncate(1);
        grown.shrink_to_fit();
        drop(black_box(vec![0_u64; size]));
        drop(black_box(grown));
        let mut held = expected.held.lock().unwrap();
        match (span + turn).is_multiple_of(3) {
            true => held.push(black_box(vec![2; size])),
            false => drop(held.pop()),
        }
    });
}

fn run(expected: &Expected, span: usize) {
    let own = info_span!("work", index = span);
    own.in_scope(|| {
        allocate(expected, span, 0);
        for child in children(span) {
            run(expected, child);
            allocate(expected, span, child);
        }
    });
    expected.later.lock().unwrap().push((own, None));
}

fn counts(all: Option<Allocations>) -> Counts {
    let all = all.expect("counted");
    [all.allocated_bytes, all.allocations, all.freed_bytes, all.frees]
}

fn setup() -> Setup {
    Setup::with("[work]=always", |builder| {
        // What the layer allocates for a sample is not what the program allocates, but the test counts it.
        let builder = builder.span_fields(["index"]).alloc_sample_interval(0);
        builder.profiles_per_minute(1_000_000)
    })
}

fn index(span: &KeptSpan) -> usize {
    let (_, index) = span.fields().find(|(name, _)| *name == "index").unwrap();
    index.parse().unwrap()
}

/// Compares all kept spans with what they should have.
fn compare(setup: &Setup, expected: &Expected) {
    let kept = setup.kept();
    let spans: HashMap<_, _> =
        kept.iter().flat_map(|kept| &kept.spans).map(|span| (index(span), span)).collect();
    assert_eq!(spans.len(), expected.spans);
    for (number, span) in spans {
        let times = span.times();
        assert_eq!(counts(times.own_allocations), expected.own(number), "span {number} itself");
        assert_eq!(counts(times.allocations), expected.all(number), "span {number}");
        assert!(expected.own(number)[1] > 0, "it has allocated");
    }
    let stats = setup.handle.stats().allocations;
    let of_stats = [stats.allocated_bytes, stats.allocations, stats.freed_bytes, stats.frees];
    let roots = (0..expected.spans).step_by(8).map(|root| expected.all(root));
    assert_eq!(of_stats, roots.fold([0; 4], sum));
}

/// The registry allocates when a thread has more spans than ever before.
fn warm_up() {
    let spans: Vec<_> = (0..64).map(|_| tracing::trace_span!("warm")).collect();
    let _entered: Vec<_> = spans.iter().map(Span::enter).collect();
}

#[test]
fn counts_of_spans_on_eight_threads_are_exact() {
    let setup = setup();
    let expected = Expected::new(8 * 128);
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let (setup, expected) = (&setup, &expected);
            scope.spawn(move || {
                let _default = tracing::dispatcher::set_default(&setup.dispatch);
                warm_up();
                (0..16).for_each(|tree| run(expected, (thread * 16 + tree) * 8));
            });
        }
    });
    expected.close(&setup);
    compare(&setup, &expected);
}

type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

async fn yield_now() {
    let mut has_yielded = false;
    poll_fn(|_| {
        if std::mem::replace(&mut has_yielded, true) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

/// The spans of a tree, in the order of their ends. Boxed before it is polled, since a box would count.
fn task(expected: Arc<Expected>, span: usize, parent: &Span) -> Task {
    let own = info_span!(parent: parent, "work", index = span);
    let mut inner: Vec<_> =
        children(span).map(|child| task(Arc::clone(&expected), child, &own)).collect();
    let future = async move {
        for turn in 0..4 {
            allocate(&expected, span, turn);
            yield_now().await;
        }
        for child in &mut inner {
            child.await;
            allocate(&expected, span, 5);
            yield_now().await;
        }
        expected.measure(span, || {
            let mut later = expected.later.lock().unwrap();
            later.extend(
                std::mem::take(&mut inner).into_iter().map(|child| (Span::none(), Some(child))),
            );
        });
    };
    Box::pin(future.instrument(own))
}

#[test]
fn counts_of_tasks_that_migrate_are_exact() {
    let setup = setup();
    let expected = Arc::new(Expected::new(8 * 64));
    let tasks: Vec<_> = tracing::dispatcher::with_default(&setup.dispatch, || {
        (0..64).map(|tree| task(Arc::clone(&expected), tree * 8, &Span::none())).collect()
    });
    let queue = Mutex::new(tasks);
    let polls = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let _default = tracing::dispatcher::set_default(&setup.dispatch);
                warm_up();
                loop {
                    let Some(mut task) = queue.lock().unwrap().pop() else { return };
                    match task.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                        Poll::Ready(()) => {
                            expected.later.lock().unwrap().push((Span::none(), Some(task)));
                        }
                        Poll::Pending => queue.lock().unwrap().insert(0, task),
                    }
                    polls.fetch_add(1, Ordering::Relaxed);
                    std::thread::yield_now();
                }
            });
        }
    });
    assert!(polls.load(Ordering::Relaxed) > 64 * 8 * 4);
    expected.close(&setup);
    compare(&setup, &expected);
}

#[test]
fn what_the_layer_allocates_does_not_count() {
    let setup = Setup::new("always");
    setup.run(|| {
        warm_up();
        info_span!("parent").in_scope(|| {
            (0..100).for_each(|_| info_span!("child").in_scope(|| black_box(())));
        });
    });
    let kept = setup.kept();
    let spans = kept.iter().flat_map(|kept| &kept.spans);
    let of_spans: Vec<_> = spans.filter(|span| span.name() != "warm").collect();
    assert_eq!(of_spans.len(), 101);
    for span in of_spans {
        assert_eq!(counts(span.times().allocations), [0; 4], "{}", span.name());
    }
}

#[test]
fn rules_judge_what_was_allocated() {
    let setup = Setup::new("[bytes]=alloc>1MB,[calls]=allocs>999,[child]=1h");
    setup.run(|| {
        for (bytes, calls) in [(990_000, 999), (1_000_001, 1_000)] {
            info_span!("bytes").in_scope(|| {
                // On another thread, and in a child.
                let child = info_span!("child");
                let dispatch = &setup.dispatch;
                std::thread::scope(|scope| {
                    scope.spawn(move || {
                        let _default = tracing::dispatcher::set_default(dispatch);
                        drop(black_box(child.in_scope(|| vec![0_u8; bytes])));
                        // The registry releases the parent of a span through the default subscriber.
                        drop(child);
                    });
                });
            });
            info_span!("calls").in_scope(|| {
                (0..calls).for_each(|_| drop(black_box(Box::new(1))));
            });
        }
    });
    let kept = setup.kept();
    let mut reasons: Vec<_> = kept
        .iter()
        .flat_map(|kept| &kept.spans)
        .map(|span| (span.name(), span.reasons().iter().collect::<Vec<_>>()))
        .collect();
    // A span with a profile is reported once that is exported, and the other one at once.
    reasons.sort_unstable_by_key(|(name, _)| *name);
    let above = |measure| vec![Reason::Above(measure)];
    let expected = [("bytes", above(Measure::Allocated)), ("calls", above(Measure::Allocations))];
    assert_eq!(reasons, expected);
}

#[test]
fn the_log_says_how_much() {
    let log = Log::default();
    let writer = log.clone();
    let layer = ProfilingLayer::builder()
        .rules("alloc>10MB".parse().unwrap())
        .exporter(tracing_profiling::export::Memory::new())
        .build()
        .unwrap();
    let handle = layer.handle();
    let fmt = tracing_subscriber::fmt::layer().with_ansi(false).with_writer(move || writer.clone());
    let subscriber = tracing_subscriber::registry().with(fmt).with(layer);
    tracing::subscriber::with_default(subscriber, || {
        info_span!("clones").in_scope(|| {
            let large = vec![1_u8; 1_000_000];
            (0..20).for_each(|_| drop(black_box(large.clone())));
        });
        handle.flush(support::PLENTY).unwrap();
    });
    let log = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    assert!(log.contains("kept `clones`: ") && log.contains("reason=alloc"), "{log}");
    assert!(log.contains("allocated 21.0 MB in 21 allocations, freed 21.0 MB"), "{log}");
    assert!(log.contains("allocated_bytes=21000000"), "{log}");
}

#[test]
fn open_spans_are_counted_when_profiling_is_switched_off() {
    // The other tests of this program have layers.
    if !support::is_alone("open_spans_are_counted_when_profiling_is_switched_off") {
        return;
    }
    let allocate = || drop(black_box(vec![1_u8; 1_000]));
    let counted = |setup: &Setup| setup.handle.stats().allocations.allocated_bytes;
    let setup = Setup::new("[work]=always,[other]=off");
    let spans = |setup: &Setup| {
        setup.run(|| info_span!("work").in_scope(allocate));
        counted(setup)
    };
    assert_eq!(spans(&setup), 1_000);
    // What is open goes on, and is judged by what it had.
    setup.run(|| {
        let open = info_span!("work");
        open.in_scope(allocate);
        setup.handle.set_enabled(false).unwrap();
        setup.flush();
        open.in_scope(allocate);
        drop(open);
    });
    assert_eq!(counted(&setup), 3_000);
    assert_eq!(setup.kept().last().unwrap().spans[0].times().allocations.unwrap().allocations, 2);
    setup.handle.set_enabled(true).unwrap();
    assert_eq!(spans(&setup), 4_000);
}

/// While the layer formats a field, code of the program runs in its hooks.
#[test]
fn what_a_field_allocates_does_not_count_and_hides_nothing() {
    struct Nested;
    impl std::fmt::Debug for Nested {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            info_span!("nested").in_scope(|| drop(black_box(vec![1_u8; 100_000])));
            f.write_str("nested")
        }
    }
    let setup = Setup::with("[work]=always", |builder| builder.span_fields(["user"]));
    setup.run(|| {
        warm_up();
        info_span!("work", user = tracing::field::Empty).in_scope(|| {
            let span = Span::current();
            span.record("user", tracing::field::debug(Nested));
            drop(black_box(vec![1_u8; 60_000]));
        });
    });
    let kept = setup.kept();
    let [span] = &kept[0].spans[..] else { panic!("{kept:?}") };
    assert_eq!(counts(span.times().own_allocations), [60_000, 1, 60_000, 1]);
}

/// The wrapper notes how long its span and those around it were idle.
#[test]
fn the_wrapper_of_a_future_counts_for_no_span() {
    use tracing_profiling::ProfiledExt;
    let counts = |is_wrapped: bool| {
        let setup = Setup::new("0ms");
        setup.run(|| {
            let _outer = info_span!("outer").entered();
            let mut polls = 0;
            let leaf = poll_fn(move |context| {
                polls += 1;
                _ = black_box(context.waker().clone());
                if polls == 3 { Poll::Ready(()) } else { Poll::Pending }
            });
            let query = async { leaf.instrument(info_span!("query")).await };
            let request = query.instrument(info_span!("request"));
            let poll = |mut future: Pin<&mut dyn Future<Output = ()>>| {
                while future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {}
            };
            match is_wrapped {
                true => poll(std::pin::pin!(request.profiled())),
                false => poll(std::pin::pin!(request)),
            }
        });
        let kept = setup.kept();
        let spans = kept.iter().flat_map(|kept| &kept.spans);
        let counts = spans.map(|span| (span.name(), span.times().own_allocations));
        counts.collect::<HashMap<_, _>>()
    };
    // The registry and the thread allocate in the first one.
    counts(false);
    let (with, without) = (counts(true), counts(false));
    assert!(without.len() == 3 && without.values().all(Option::is_some), "{without:?}");
    assert_eq!(with, without);
}
