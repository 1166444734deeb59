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
use std::time::Duration;

use mimalloc::MiMalloc;
use support::{Log, Setup};
use tracing::{Instrument, Span, info_span};
use tracing_profiling::profile::{Profile, SampleKind};
use tracing_profiling::{Allocations, KeptSpan, ProfilingAllocator, ProfilingLayer, Reason};
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
        let builder = builder.fields(["index"]).alloc_sample_bytes(0);
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
        assert_eq!(counts(times.own_allocations()), expected.own(number), "span {number} itself");
        assert_eq!(counts(times.allocations()), expected.all(number), "span {number}");
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
        assert_eq!(counts(span.times().allocations()), [0; 4], "{}", span.name());
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
    let reasons: Vec<_> = kept
        .iter()
        .flat_map(|kept| &kept.spans)
        .map(|span| (span.name(), span.reasons().iter().collect::<Vec<_>>()))
        .collect();
    let expected = [("bytes", vec![Reason::Allocated]), ("calls", vec![Reason::Allocations])];
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
        assert!(handle.flush(support::PLENTY));
    });
    let log = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    assert!(log.contains("kept `clones` (alloc)"), "{log}");
    assert!(log.contains("allocated 21.0 MB in 21 allocations, freed 21.0 MB"), "{log}");
    assert!(log.contains("allocated_bytes=21000000"), "{log}");
}

#[test]
fn open_spans_are_counted_when_profiling_is_switched_off() {
    // The other tests of this program have layers, so this one needs its own process.
    if std::env::var_os("PROFILING_TEST_ALONE").is_none() {
        let program = std::env::current_exe().unwrap();
        let test = "open_spans_are_counted_when_profiling_is_switched_off";
        let mut command = std::process::Command::new(program);
        let command = command.args([test, "--exact"]).env("PROFILING_TEST_ALONE", "1");
        assert!(command.status().unwrap().success());
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
        setup.handle.disable();
        setup.flush();
        open.in_scope(allocate);
        drop(open);
    });
    assert_eq!(counted(&setup), 3_000);
    assert_eq!(setup.kept().last().unwrap().spans[0].times().allocations().unwrap().allocations, 2);
    setup.handle.enable().unwrap();
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
    let setup = Setup::with("[work]=always", |builder| builder.fields(["user"]));
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
    assert_eq!(counts(span.times().own_allocations()), [60_000, 1, 60_000, 1]);
}

/// Ten functions with a digit in their names. Names have no generic parameters.
macro_rules! numbered {
    ($list:ident, $body:ident, [$($name:ident),+]) => {
        $(
            #[inline(never)]
            fn $name(site: Site, number: usize) {
                $body(site, number);
                black_box(());
            }
        )+
        const $list: &[fn(Site, usize)] = &[$($name),+];
    };
}

#[derive(Clone, Copy)]
struct Site {
    block: usize,
    blocks: usize,
}

// 1,000 stacks.
numbered!(
    OUTER,
    call_middle,
    [outer0, outer1, outer2, outer3, outer4, outer5, outer6, outer7, outer8, outer9]
);
numbered!(
    MIDDLE,
    call_leaf,
    [middle0, middle1, middle2, middle3, middle4, middle5, middle6, middle7, middle8, middle9]
);
numbered!(LEAVES, work, [leaf0, leaf1, leaf2, leaf3, leaf4, leaf5, leaf6, leaf7, leaf8, leaf9]);

fn call_middle(site: Site, number: usize) {
    MIDDLE[number / 10 % 10](site, number);
}

fn call_leaf(site: Site, number: usize) {
    LEAVES[number % 10](site, number);
}

#[inline(always)]
fn work(site: Site, number: usize) {
    for turn in 0..site.blocks {
        match (number + turn) % 3 {
            0 => drop(black_box(Vec::<u8>::with_capacity(site.block))),
            1 => drop(black_box(vec![0_u8; site.block])),
            // The old block is allocated as well.
            _ => {
                let mut grown = Vec::<u8>::with_capacity(site.block / 2);
                grown.reserve_exact(site.block);
                drop(black_box(grown));
            }
        }
    }
}

/// The digit in the name of a function.
fn digit_of(name: &str, of: &str) -> Option<usize> {
    name.rsplit("::").next()?.strip_prefix(of)?.parse().ok()
}

/// The sums of samples of a site, and their variance.
#[derive(Clone, Copy, Default)]
struct Estimate {
    bytes: f64,
    calls: f64,
    variance: f64,
    calls_variance: f64,
}

/// By Horvitz and Thompson: samples of blocks of `s` bytes that represent `w` bytes have the variance `w (w - s)`.
#[cfg(not(tracing_profiling_unsupported))]
#[test]
fn samples_represent_what_each_site_allocates() {
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse::<usize>().ok());
    let turns = number("PROFILING_TEST_ALLOCATIONS").unwrap_or(3);
    let sizes = [48, 700, 9_000, 60_000, 400_000];
    // Of each size about as many bytes.
    let site_of = |number: usize| {
        let block = sizes[number % 7 % 5] + number;
        Site { block, blocks: 400_000_usize.div_ceil(block) }
    };
    let setup = Setup::with("[sites]=always", |builder| {
        builder.alloc_sample_bytes(64 << 10).samples_per_profile(1 << 20)
    });
    let threads = 4;
    let setup_ref = &setup;
    std::thread::scope(|scope| {
        for thread in 0..threads {
            scope.spawn(move || {
                tracing::dispatcher::with_default(&setup_ref.dispatch, || {
                    info_span!("sites").in_scope(|| {
                        for turn in 0..turns {
                            for number in (0..1_000).map(|number| (number * 7 + turn) % 1_000) {
                                let span = info_span!("odd");
                                // In a span of its own, or not.
                                let _entered = (number % 2 == thread % 2).then(|| span.enter());
                                OUTER[number / 100](site_of(number), number);
                                if number % 4 == 0 {
                                    std::thread::sleep(Duration::from_millis(1));
                                }
                            }
                        }
                    });
                });
            });
        }
    });
    setup.flush();
    let stats = setup.handle.stats().allocations;
    let others = [stats.dropped_over_budget, stats.off_stack, stats.dropped_pending_full];
    assert_eq!(others, [0; 3]);
    // The collector may be behind on a busy machine.
    let lost =
        (stats.dropped_queue_full + stats.dropped_memory) as f64 / stats.sampled.max(1) as f64;
    assert!(lost < 0.1, "{stats:?}");
    let mut estimates = vec![Estimate::default(); 1_000];
    let (mut samples, mut without_stack) = (0, [0.0; 2]);
    for profile in setup.profiles() {
        for kind in [SampleKind::AllocatedBytes, SampleKind::Allocations] {
            for sample in profile.of_kind(kind) {
                let names = support::functions(&profile, sample);
                let amounts = sample.points.iter().map(|point| point.amount() as f64);
                let numbers = ["outer", "middle", "leaf"]
                    .map(|of| names.iter().find_map(|name| digit_of(name, of)));
                let [Some(outer), Some(middle), Some(leaf)] = numbers else {
                    assert_eq!(names, ["[allocated: stack not copied]"]);
                    without_stack[usize::from(kind == SampleKind::Allocations)] +=
                        amounts.sum::<f64>();
                    continue;
                };
                // In debug builds, the body is inlined.
                let innermost =
                    names.iter().find(|name| name.rsplit("::").next() != Some("work")).unwrap();
                assert!(digit_of(innermost, "leaf").is_some(), "the innermost: {names:?}");
                let site = 100 * outer + 10 * middle + leaf;
                let path = profile.span_path(sample.link);
                assert_eq!(path[0], "sites", "{path:?}");
                // Only threads of the other parity enter the inner span there.
                assert!(path.len() == 1 || path[1..] == ["odd"], "{path:?}");
                let estimate = &mut estimates[site];
                for amount in amounts {
                    if kind == SampleKind::Allocations {
                        estimate.calls += amount;
                        estimate.calls_variance += amount * (amount - 1.0);
                        continue;
                    }
                    samples += 1;
                    estimate.bytes += amount;
                    // The smaller block of a reallocation has a larger variance: at most this.
                    let block = site_of(site).block as f64 / 2.0;
                    estimate.variance += amount * (amount - block).max(0.0);
                }
            }
        }
    }
    // What a site allocates in one call, by the test itself.
    let truth = |number: usize| {
        let Site { block, blocks } = site_of(number);
        let (mut bytes, mut calls) = (0, 0);
        for turn in 0..blocks {
            let grows = (number + turn) % 3 == 2;
            bytes += block + if grows { block / 2 } else { 0 };
            calls += if grows { 2 } else { 1 };
        }
        [bytes, calls].map(|one| (one * turns * threads) as f64)
    };
    let sums = |sites: &mut dyn Iterator<Item = usize>| {
        sites.fold((Estimate::default(), [0.0; 2]), |(sum, [bytes, calls]), site| {
            let (more, [more_bytes, more_calls]) = (estimates[site], truth(site));
            let sum = Estimate {
                bytes: sum.bytes + more.bytes,
                calls: sum.calls + more.calls,
                variance: sum.variance + more.variance,
                calls_variance: sum.calls_variance + more.calls_variance,
            };
            (sum, [bytes + more_bytes, calls + more_calls])
        })
    };
    let (all, [bytes, calls]) = sums(&mut (0..1_000));
    let errors = |sum: Estimate, bytes: f64| (sum.bytes - bytes) / sum.variance.sqrt();
    println!(
        "{samples} samples, {lost:.4} lost, {:.2} of {:.2} GB ({:+.2} standard errors), {:.0} of {calls:.0} calls ({:+.2}), \
         without a stack {without_stack:?}",
        all.bytes / 1e9,
        bytes / 1e9,
        errors(all, bytes),
        all.calls,
        (all.calls - calls) / all.calls_variance.sqrt(),
    );
    // One in 100,000 correct runs is further off, apart from what was lost.
    let within = |sum: f64, truth: f64, variance: f64, errors: f64| {
        (sum - truth).abs() < errors * variance.sqrt() + 2.0 * lost * truth
    };
    assert!(within(all.bytes, bytes, all.variance, 4.5));
    assert!(within(all.calls, calls, all.calls_variance, 4.5));
    assert_eq!(without_stack[0] > 0.0, stats.dropped_memory > 0);
    // By each of the names, so that one that is systematically wrong is found.
    let mut right = 0;
    for digit in 0..30 {
        let is_in = |site: &usize| site / [1, 10, 100][digit / 10] % 10 == digit % 10;
        let (sum, [bytes, _]) = sums(&mut (0..1_000).filter(is_in));
        right += usize::from(within(sum.bytes, bytes, sum.variance, 3.0));
    }
    println!("{right} of 30 groups of 100 sites within three standard errors");
    assert!(right >= 27, "{right}");
}

#[inline(never)]
fn keep_forever(kept: &mut Vec<Vec<u8>>, bytes: usize) {
    kept.push(black_box(vec![1; bytes]));
}

#[inline(never)]
fn keep_for_a_while(kept: &mut Vec<Vec<u8>>, bytes: usize) {
    while kept.len() < 100 {
        kept.push(black_box(vec![2; bytes]));
    }
}

#[inline(never)]
fn grow(vector: &mut Vec<u8>, bytes: usize) {
    vector.reserve_exact(bytes);
    black_box(vector);
}

/// What is in use of a function's allocations, in bytes, and all that it allocated.
fn heap_of(profile: &Profile, function: &str) -> [u64; 2] {
    [SampleKind::InUseBytes, SampleKind::AllocatedBytes].map(|kind| {
        let functions = profile.functions_by(kind).into_iter();
        let is_it = |(name, _): &(String, u64)| name.ends_with(&format!("::{function}"));
        functions.filter(is_it).map(|(_, bytes)| bytes).sum()
    })
}

/// In a process of its own, since one layer of a process tracks the heap.
#[cfg(not(tracing_profiling_unsupported))]
#[test]
fn the_live_heap_has_what_is_in_use() {
    let name = "the_live_heap_has_what_is_in_use";
    if std::env::var_os("PROFILING_TEST_ALONE").is_none() {
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        let command = command.args([name, "--exact"]).env("PROFILING_TEST_ALONE", "1");
        assert!(command.status().unwrap().success());
        return;
    }
    // Blocks are so large that each is a sample, but for one in a million.
    const BLOCK: usize = 1 << 20;
    const MB: u64 = 1 << 20;
    let setup = Setup::with("1h", |builder| builder.heap(true).alloc_sample_bytes(64 << 10));
    let heap = || setup.handle.heap_profile().expect("the live heap is tracked");
    let growth = || setup.handle.heap_growth().expect("the live heap is tracked");
    growth();
    // The lists do not grow in the functions.
    let [mut kept, mut while_kept] = [(); 2].map(|()| Vec::with_capacity(100));
    (0..10).for_each(|_| keep_forever(&mut kept, BLOCK));
    keep_for_a_while(&mut while_kept, BLOCK);
    assert_eq!(heap_of(&heap(), "keep_forever"), [10 * MB, 10 * MB]);
    assert_eq!(heap_of(&heap(), "keep_for_a_while"), [100 * MB, 100 * MB]);
    let grown = growth();
    assert!(grown.functions_by(SampleKind::InUseBytes)[0].0.ends_with("keep_for_a_while"));
    // Freed on another thread.
    std::thread::spawn(move || drop(while_kept)).join().unwrap();
    (0..20).for_each(|_| keep_forever(&mut kept, BLOCK));
    assert_eq!(heap_of(&heap(), "keep_for_a_while"), [0, 100 * MB]);
    let grown = growth();
    let [(first, bytes)] = &grown.functions_by(SampleKind::InUseBytes)[..] else { panic!() };
    assert!(first.ends_with("keep_forever"), "{first}");
    assert_eq!(*bytes, 20 * MB);
    let grown = growth();
    assert_eq!(heap_of(&grown, "keep_forever"), [0, 0], "nothing since the last one");
    // A reallocation is a free and an allocation, in place or not.
    let mut vector = Vec::new();
    (1..=4).for_each(|times| grow(&mut vector, times * BLOCK));
    assert_eq!(heap_of(&heap(), "grow"), [4 * MB, 10 * MB]);
    drop(vector);
    // Profiling may be off: memory is in use all the same.
    setup.handle.disable();
    setup.flush();
    kept.clear();
    assert_eq!(heap_of(&heap(), "keep_forever"), [0, 30 * MB]);
    assert_eq!(heap_of(&heap(), "grow"), [0, 10 * MB]);
    // Small blocks are estimated.
    let small: Vec<_> = (0..200_000).map(|_| black_box(Box::new([3_u64; 16]))).collect();
    let profile = heap();
    let all: u64 =
        profile.functions_by(SampleKind::InUseBytes).iter().map(|(_, bytes)| bytes).sum();
    let truth = (200_000 * 128 + 200_000 * 8) as f64;
    assert!((all as f64 / truth - 1.0).abs() < 0.5, "{all} of {truth}");
    drop(small);
    // One layer at a time tracks it.
    let other = Setup::with("1h", |builder| builder.heap(true));
    assert!(other.handle.heap_profile().is_none());
    assert!(setup.handle.shutdown(support::PLENTY));
    assert!(setup.handle.heap_profile().is_none());
    other.flush();
    let mut kept = Vec::with_capacity(10);
    (0..10).for_each(|_| keep_forever(&mut kept, 16 * BLOCK));
    assert_eq!(heap_of(&other.handle.heap_profile().unwrap(), "keep_forever"), [160 * MB; 2]);
    kept.clear();
    assert_eq!(heap_of(&other.handle.heap_profile().unwrap(), "keep_forever"), [0, 160 * MB]);
    let stats = setup.handle.stats().allocations;
    assert_eq!((stats.dropped_queue_full, stats.dropped_not_tracked), (0, 0));
}

/// What `go tool pprof` and scrapers read.
#[cfg(not(tracing_profiling_unsupported))]
#[cfg(feature = "axum")]
#[tokio::test]
async fn the_heap_is_served_as_go_serves_it() {
    use std::io::Read;

    use axum::body::Body;
    use axum::http::{Request, header};
    use http_body_util::BodyExt;
    use tower::ServiceExt;

    let name = "the_heap_is_served_as_go_serves_it";
    if std::env::var_os("PROFILING_TEST_ALONE").is_none() {
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        let command = command.args([name, "--exact"]).env("PROFILING_TEST_ALONE", "1");
        assert!(command.status().unwrap().success());
        return;
    }
    let setup = Setup::with("1h", |builder| builder.heap(true));
    let mut kept = Vec::with_capacity(10);
    (0..10).for_each(|_| keep_forever(&mut kept, 16 << 20));
    for (method, path) in [
        ("GET", "/debug/pprof/heap"),
        ("GET", "/debug/pprof/allocs"),
        ("POST", "/debug/pprof/heap"),
    ] {
        let request = Request::builder().method(method).uri(path);
        let request = request.header(header::HOST, "localhost");
        let request = request.body(Body::empty()).unwrap();
        let answer = setup.handle.router().oneshot(request).await.unwrap();
        assert_eq!(answer.headers()[header::CONTENT_TYPE], "application/octet-stream");
        let body = answer.into_body().collect().await.unwrap().to_bytes();
        let mut plain = Vec::new();
        flate2::read::GzDecoder::new(&body[..]).read_to_end(&mut plain).unwrap();
        let has = |text: &str| plain.windows(text.len()).any(|part| part == text.as_bytes());
        for text in ["alloc_objects", "alloc_space", "inuse_objects", "inuse_space", "keep_forever"]
        {
            assert!(has(text), "{text} in {path}");
        }
        assert!(!has("off_cpu"), "{path}");
    }
}
