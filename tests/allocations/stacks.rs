//! Which code allocates, and who holds what is in use.

use std::hint::black_box;
use std::time::Duration;

use tracing::info_span;
use tracing_profiling::profile::{Leaf, Profile, SampleKind};

use crate::COUNTS;
use crate::support::{PLENTY, Setup, functions, has_all_threads, is_alone};

/// Ten functions with a digit in their names. Names have no generic parameters.
macro_rules! numbered {
    ($list:ident, $body:ident, [$($name:ident),+]) => {
        $(
            #[inline(never)]
            fn $name(site: Site, number: usize) {
                $body(site, number);
                // Not the same code as the others, which would be merged with it.
                black_box(stringify!($name));
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

// 10,000 stacks.
numbered!(
    OUTERMOST,
    call_outer,
    [most0, most1, most2, most3, most4, most5, most6, most7, most8, most9]
);
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

fn call_outer(site: Site, number: usize) {
    OUTER[number / 100 % 10](site, number);
}

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
#[test]
fn samples_represent_what_each_site_allocates() {
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse::<usize>().ok());
    let turns = number("PROFILING_TEST_ALLOCATIONS").unwrap_or(3);
    let sites = number("PROFILING_TEST_SITES").unwrap_or(1_000).next_multiple_of(1_000);
    let sizes = [48, 700, 9_000, 60_000, 400_000];
    // Of each size about as many bytes.
    let site_of = |number: usize| {
        let block = sizes[number % 7 % 5] + number % 1_000;
        Site { block, blocks: 400_000_usize.div_ceil(block) }
    };
    let setup = Setup::with("[sites]=always", |builder| {
        builder.alloc_sample_interval(64 << 10).samples_per_profile(1 << 20)
    });
    let threads = 4;
    let setup_ref = &setup;
    std::thread::scope(|scope| {
        for thread in 0..threads {
            scope.spawn(move || {
                tracing::dispatcher::with_default(&setup_ref.dispatch, || {
                    info_span!("sites").in_scope(|| {
                        for turn in 0..turns {
                            for number in (0..sites).map(|number| (number * 7 + turn) % sites) {
                                let span = info_span!("odd");
                                // In a span of its own, or not.
                                let _entered = (number % 2 == thread % 2).then(|| span.enter());
                                OUTERMOST[number / 1_000](site_of(number), number);
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
    assert_eq!(stats.dropped_table_busy, 0);
    let others = [stats.dropped_over_budget, stats.off_stack, stats.dropped_pending_full];
    assert_eq!(others, [0; 3]);
    // The collector may be behind on a busy machine.
    let lost =
        (stats.dropped_queue_full + stats.dropped_memory) as f64 / stats.sampled.max(1) as f64;
    assert!(lost < 0.1, "{stats:?}");
    let mut estimates = vec![Estimate::default(); sites];
    let (mut samples, mut without_stack) = (0, [0.0; 2]);
    for profile in setup.profiles() {
        for kind in [SampleKind::AllocatedBytes, SampleKind::Allocations] {
            for sample in profile.of_kind(kind) {
                let names = functions(&profile, sample);
                let amounts = sample.points.iter().map(|point| point.weight as f64);
                let numbers = ["most", "outer", "middle", "leaf"]
                    .map(|of| names.iter().find_map(|name| digit_of(name, of)));
                let [Some(most), Some(outer), Some(middle), Some(leaf)] = numbers else {
                    let leaf = profile.leaf(sample.leaf).unwrap();
                    assert_eq!(*leaf, Leaf::Unknown("allocated: stack not copied"));
                    assert_eq!(names, [""; 0]);
                    without_stack[usize::from(kind == SampleKind::Allocations)] +=
                        amounts.sum::<f64>();
                    continue;
                };
                // In debug builds, the body is inlined.
                let innermost =
                    names.iter().find(|name| name.rsplit("::").next() != Some("work")).unwrap();
                assert!(digit_of(innermost, "leaf").is_some(), "the innermost: {names:?}");
                let site = 1_000 * most + 100 * outer + 10 * middle + leaf;
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
    let (all, [bytes, calls]) = sums(&mut (0..sites));
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
    // Far more than any correct run is off, apart from what was lost. (The error is itself an estimate, and is too small if
    // the sum is.)
    let within = |sum: f64, truth: f64, variance: f64, errors: f64| {
        (sum - truth).abs() < errors * variance.sqrt() + 2.0 * lost * truth
    };
    assert!(within(all.bytes, bytes, all.variance, 6.0));
    assert!(within(all.calls, calls, all.calls_variance, 6.0));
    assert_eq!(without_stack[0] > 0.0, stats.dropped_memory > 0);
    // By each of the names, so that one that is systematically wrong is found.
    let mut right = 0;
    for digit in 0..30 {
        let is_in = |site: &usize| site / [1, 10, 100][digit / 10] % 10 == digit % 10;
        let (sum, [bytes, _]) = sums(&mut (0..sites).filter(is_in));
        right += usize::from(within(sum.bytes, bytes, sum.variance, 3.0));
    }
    println!("{right} of 30 groups of a tenth of all {sites} sites within three standard errors");
    assert!(right >= 27, "{right}");
}

/// Old after an hour: only the rule that judges allocations asks for samples of young spans, and of those inside them.
#[test]
fn young_spans_are_sampled_only_if_a_rule_judges_allocations() {
    let rules = "[young]=always,[judged]=always|alloc>1000GB,[inner]=always";
    let setup = Setup::of_rules(rules, |builder| {
        builder.sampling_delay(Duration::from_secs(3_600)).alloc_sample_interval(64 << 10)
    });
    setup.run(|| {
        let allocate = || drop(black_box(vec![1_u8; 16 << 20]));
        info_span!("young").in_scope(allocate);
        info_span!("judged").in_scope(|| {
            allocate();
            info_span!("inner").in_scope(allocate);
        });
    });
    let mut paths = Vec::new();
    for profile in setup.profiles() {
        for sample in profile.of_kind(SampleKind::AllocatedBytes) {
            let path = profile.span_path(sample.link).join("/");
            paths.push((path, sample.points[0].weight >> 20));
        }
    }
    paths.sort();
    assert_eq!(paths, [("judged".to_owned(), 16), ("judged/inner".to_owned(), 16)]);
    let kept = setup.kept();
    assert_eq!(kept.iter().flat_map(|kept| &kept.spans).count(), 3, "with their counts");
}

/// A copy of a stack would stay between the program's blocks, and hold their memory when they are freed.
#[test]
fn a_sample_takes_no_memory_of_the_program() {
    const BLOCKS: usize = 500;
    let setup = Setup::of_rules("1h", |builder| {
        builder.sampling_delay(Duration::ZERO).alloc_sample_interval(64 << 10)
    });
    let before = setup.handle.stats().allocations;
    setup.run(|| {
        let mut blocks = Vec::with_capacity(BLOCKS);
        info_span!("old").in_scope(|| {
            let in_use = || COUNTS.get()[1] - COUNTS.get()[3];
            let before = in_use();
            (0..BLOCKS).for_each(|_| keep_forever(&mut blocks, 1 << 20));
            assert_eq!(in_use() - before, BLOCKS as u64, "the program's own");
        });
    });
    setup.flush();
    let after = setup.handle.stats().allocations;
    assert!(after.sampled - before.sampled > BLOCKS as u64 / 2, "{after:?}");
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

#[test]
fn the_live_heap_has_what_is_in_use() {
    if !is_alone("stacks::the_live_heap_has_what_is_in_use") {
        return;
    }
    // Blocks are so large that each is a sample, but for one in a million.
    const BLOCK: usize = 1 << 20;
    const MB: u64 = 1 << 20;
    let setup = Setup::with("1h", |builder| builder.heap(true).alloc_sample_interval(64 << 10));
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
    let functions = grown.functions_by(SampleKind::InUseBytes);
    let [(first, bytes)] = &functions[..] else { panic!("{functions:?}") };
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
    setup.handle.set_enabled(false).unwrap();
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
    // One layer at a time tracks it. The next one no longer counts what is allocated, since its rules are off.
    let other = Setup::with("1h", |builder| builder.heap(true));
    other.handle.set_enabled(false).unwrap();
    other.flush();
    assert!(other.handle.heap_profile().is_err());
    setup.handle.shutdown(PLENTY).unwrap();
    assert!(setup.handle.heap_profile().is_err());
    other.flush();
    let mut kept = Vec::with_capacity(10);
    (0..10).for_each(|_| keep_forever(&mut kept, 16 * BLOCK));
    assert_eq!(heap_of(&other.handle.heap_profile().unwrap(), "keep_forever"), [160 * MB; 2]);
    kept.clear();
    assert_eq!(heap_of(&other.handle.heap_profile().unwrap(), "keep_forever"), [0, 160 * MB]);
    let stats = setup.handle.stats().allocations;
    assert_eq!((stats.dropped_queue_full, stats.dropped_not_tracked), (0, 0));
}

/// Of what it takes to ask, too.
#[test]
fn the_live_heap_has_nothing_of_the_layer() {
    if !is_alone("stacks::the_live_heap_has_nothing_of_the_layer") {
        return;
    }
    // Nearly each allocation is a sample.
    let setup = Setup::with("1h", |builder| builder.heap(true).alloc_sample_interval(64));
    let mut kept = Vec::with_capacity(1);
    keep_forever(&mut kept, 1 << 20);
    for _ in 0..30 {
        let profile = setup.handle.heap_profile().expect("the live heap is tracked");
        assert_eq!(heap_of(&profile, "keep_forever")[0], 1 << 20);
        let functions = profile.functions_by(SampleKind::InUseBytes).into_iter();
        let is_of_layer = |name: &str| name.contains("crossbeam") || name.contains("tracing_prof");
        let of_layer: Vec<_> = functions.filter(|(name, _)| is_of_layer(name)).collect();
        assert!(of_layer.is_empty(), "{of_layer:?}");
        _ = (setup.handle.threads(), setup.handle.open_spans(Duration::ZERO));
        setup.flush();
    }
}

#[test]
fn the_continuous_profile_has_what_was_allocated_in_its_time() {
    if !is_alone("stacks::the_continuous_profile_has_what_was_allocated_in_its_time") {
        return;
    }
    if !has_all_threads() {
        return;
    }
    const BLOCK: usize = 1 << 20;
    const MB: u64 = 1 << 20;
    let setup = Setup::with("1h", |builder| {
        let builder = builder.heap(true).alloc_sample_interval(64 << 10);
        builder.continuous_interval(Duration::from_secs(3_600))
    });
    // The collector has read all samples, and has done what it was asked before.
    let heap = || setup.handle.heap_profile().expect("the live heap is tracked");
    let mut kept = Vec::with_capacity(100);
    (0..10).for_each(|_| keep_forever(&mut kept, BLOCK));
    heap();
    setup.handle.set_continuous(97).unwrap();
    heap();
    (0..20).for_each(|_| keep_forever(&mut kept, BLOCK));
    assert_eq!(heap_of(&heap(), "keep_forever"), [30 * MB, 30 * MB]);
    setup.handle.set_continuous(0).unwrap();
    let start = std::time::Instant::now();
    while setup.profiles().is_empty() {
        assert!(start.elapsed() < PLENTY);
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(heap_of(&setup.profiles()[0], "keep_forever"), [0, 20 * MB]);
}

/// What `go tool pprof` and scrapers read.
#[tokio::test]
async fn the_heap_is_served_as_go_serves_it() {
    use std::io::Read;

    use axum::body::Body;
    use axum::http::{Request, header};
    use http_body_util::BodyExt;
    use tower::ServiceExt;

    if !is_alone("stacks::the_heap_is_served_as_go_serves_it") {
        return;
    }
    let setup = Setup::with("1h", |builder| builder.heap(true));
    let mut kept = Vec::with_capacity(10);
    (0..10).for_each(|_| keep_forever(&mut kept, 16 << 20));
    let ask = async |method, path: &str| {
        let request = Request::builder().method(method).uri(path);
        let request = request.header(header::HOST, "localhost");
        let request = request.body(Body::empty()).unwrap();
        tracing_profiling_server::router(&setup.handle).oneshot(request).await.unwrap()
    };
    for query in ["seconds=0", "seconds=x", "seconds=1&debug=1"] {
        let answer = ask("GET", &format!("/debug/pprof/heap?{query}")).await;
        assert_eq!(answer.status(), axum::http::StatusCode::BAD_REQUEST);
    }
    let has_answered = std::sync::atomic::AtomicBool::new(false);
    let has_answered = std::sync::Arc::new(has_answered);
    let ends = std::sync::Arc::clone(&has_answered);
    let other = std::thread::spawn(move || {
        let mut later = Vec::new();
        while !ends.load(std::sync::atomic::Ordering::Relaxed) {
            keep_later(&mut later);
        }
    });
    for (method, path) in [
        ("GET", "/debug/pprof/heap?seconds=1"),
        ("GET", "/debug/pprof/heap"),
        ("GET", "/debug/pprof/allocs"),
        ("POST", "/debug/pprof/heap"),
    ] {
        let answer = ask(method, path).await;
        assert_eq!(answer.headers()[header::CONTENT_TYPE], "application/octet-stream");
        let body = answer.into_body().collect().await.unwrap().to_bytes();
        let mut plain = Vec::new();
        flate2::read::GzDecoder::new(&body[..]).read_to_end(&mut plain).unwrap();
        let has = |text: &str| plain.windows(text.len()).any(|part| part == text.as_bytes());
        for text in ["alloc_objects", "alloc_space", "inuse_objects", "inuse_space", "keep_later"] {
            assert!(has(text), "{text} in {path}");
        }
        // Only the others have what was allocated before, and is in use.
        assert_eq!(has("keep_forever"), method == "GET" && !path.contains("seconds"), "{path}");
        assert!(!has("off_cpu"), "{path}");
    }
    has_answered.store(true, std::sync::atomic::Ordering::Relaxed);
    other.join().unwrap();

    let answer = ask("GET", "/debug/pprof/heap?debug=1").await;
    assert_eq!(answer.headers()[header::CONTENT_TYPE], "text/plain; charset=utf-8");
    let body = answer.into_body().collect().await.unwrap().to_bytes();
    let text = str::from_utf8(&body).unwrap();
    // `blocks: bytes [allocated blocks: allocated bytes] @ ...`
    let values = |line: &str| {
        let (values, rest) = line.split_once(" @ ").unwrap();
        let numbers = values.replace([':', '[', ']'], "");
        let numbers: Vec<u64> = numbers.split(' ').map(|number| number.parse().unwrap()).collect();
        (<[u64; 4]>::try_from(numbers).unwrap(), rest.to_owned())
    };
    let first = text.lines().next().unwrap().strip_prefix("heap profile: ").unwrap();
    let (all, rate) = values(first);
    assert_eq!(rate, "heap/2", "go tool pprof scales nothing");
    let is_stack = |line: &&str| line.contains(" @ 0x");
    let stacks: Vec<_> = text.lines().filter(is_stack).map(values).collect();
    let sum = |at: usize| stacks.iter().map(|(values, _)| values[at]).sum::<u64>();
    assert_eq!(all, [0, 1, 2, 3].map(sum));
    assert!(stacks.is_sorted_by(|(a, _), (b, _)| a[1] >= b[1]), "{text}");
    let of_forever = text.split("\n\n").find(|stack| stack.contains("keep_forever")).unwrap();
    let (_, addresses) = values(of_forever.lines().find(is_stack).unwrap());
    let of_function = of_forever.lines().find(|line| line.contains("keep_forever")).unwrap();
    let ["#", address, _, place] = of_function.split('\t').collect::<Vec<_>>()[..] else {
        panic!("{of_function}")
    };
    assert!(addresses.split(' ').any(|other| other == address), "{of_forever}");
    assert!(place.contains("allocations/stacks.rs:"), "{of_function}");
}

/// Two requests that wait for what grows leave the places of those that work.
#[tokio::test]
async fn requests_that_wait_for_growth_do_not_keep_others_out() {
    use axum::http::{Request, StatusCode, header};
    use tower::ServiceExt;

    if !is_alone("stacks::requests_that_wait_for_growth_do_not_keep_others_out") {
        return;
    }
    let setup = Setup::with("1h", |builder| builder.heap(true));
    let router = tracing_profiling_server::router(&setup.handle);
    let ask = |query: &str| {
        let request = Request::get(format!("/debug/pprof/heap{query}"));
        let request = request.header(header::HOST, "localhost").body(axum::body::Body::empty());
        let answer = router.clone().oneshot(request.unwrap());
        async { answer.await.unwrap().status() }
    };
    let waiting = [(); 2].map(|()| tokio::spawn(ask("?seconds=600")));
    // On this runtime, both have begun then.
    tokio::task::yield_now().await;
    assert_eq!(ask("?seconds=600").await, StatusCode::SERVICE_UNAVAILABLE);
    let start = std::time::Instant::now();
    // They work in the beginning.
    while ask("").await != StatusCode::OK {
        assert!(start.elapsed() < PLENTY);
    }
    waiting.iter().for_each(|task| assert!(!task.is_finished()));
    waiting.into_iter().for_each(|task| task.abort());
}

#[inline(never)]
fn keep_later(kept: &mut Vec<Vec<u8>>) {
    kept.push(black_box(Vec::with_capacity(4 << 20)));
    std::thread::sleep(Duration::from_millis(5));
}
