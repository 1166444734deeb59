//! What belongs to a kept span: its child spans on any thread, and nothing else.

#![allow(clippy::expect_used, clippy::unwrap_used, clippy::indexing_slicing, reason = "a test")]

mod support;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use support::Nanos as _;
use support::{HAS_STACKS, Setup, burn, functions, points_in};
use tracing::{Instrument, Span, info_span};
use tracing_profiling::profile::{Profile, Sample};
use tracing_profiling::{KeptSpan, ProfilingLayer, TimeBreakdown};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::prelude::*;

const MS: Duration = Duration::from_millis(1);

/// On a busy machine timers rarely hit a thread: two samples can be up to 100 ms of its CPU time apart.
const LONG: Duration = Duration::from_millis(300);

#[inline(never)]
fn work_inside() {
    burn(LONG);
}

#[inline(never)]
fn work_outside() {
    burn(LONG);
}

/// The error of a span's account: the kernel's accounting of a thread and of its events differ by some microseconds
/// per switch.
fn error_of(account: &TimeBreakdown) -> Duration {
    let switches = account.usage.voluntary_switches + account.usage.involuntary_switches;
    Duration::from_nanos(account.on_cpu_error().ns() + 50_000 * switches) + 2 * MS
}

/// The span paths that samples of [`burn`] are linked to. (Other samples can fall between two spans, or represent
/// known kernel time.)
fn paths(profile: &Profile) -> BTreeSet<Vec<&str>> {
    let is_burning = |sample: &&Sample| {
        functions(profile, sample).iter().any(|name| name.ends_with("support::burn"))
    };
    let samples = profile.samples().iter().filter(is_burning);
    samples.map(|sample| profile.span_path(sample.link)).collect()
}

fn span_of(setup: &Setup, name: &str) -> KeptSpan {
    let kept = setup.kept();
    kept.iter().flat_map(|kept| &kept.spans).find(|span| span.name() == name).unwrap().clone()
}

#[test]
fn child_spans_in_tasks_are_included_and_following_spans_are_not() {
    let setup = Setup::new("[request]=0ms,[followed]=1h,1h");
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .on_thread_start({
            let dispatch = setup.dispatch.clone();
            move || {
                // For the lifetime of the thread.
                std::mem::forget(tracing::dispatcher::set_default(&dispatch));
            }
        })
        .build()
        .unwrap();
    setup.run(|| {
        let request = info_span!("request");
        let tasks = request.in_scope(|| {
            let instrumented =
                runtime.spawn(async { work_inside() }.instrument(info_span!("instrumented")));
            let in_current = runtime.spawn(async { work_inside() }.in_current_span());
            let explicit = info_span!(parent: &request, "explicit");
            let explicit = runtime.spawn(async move { explicit.in_scope(work_inside) });
            let follows = info_span!(parent: None, "follows");
            follows.follows_from(&request);
            let follows = runtime.spawn(async { work_outside() }.instrument(follows));
            [instrumented, in_current, explicit, follows]
        });
        runtime.block_on(async {
            for task in tasks {
                task.await.unwrap();
            }
        });
    });
    let request = span_of(&setup, "request");
    // On this thread it was entered only to spawn, and on another thread once.
    let on_cpu = Duration::from_nanos(request.times().on_cpu().ns());
    assert!(!HAS_STACKS || on_cpu + error_of(request.times()) >= LONG, "{request:?}");
    if !HAS_STACKS {
        return;
    }
    let profiles = setup.profiles();
    assert_eq!(profiles.len(), 1);
    let expected = [vec!["request"], vec!["request", "explicit"], vec!["request", "instrumented"]];
    assert_eq!(paths(&profiles[0]), expected.into_iter().collect());
    assert_eq!(points_in(&profiles[0], "work_outside"), 0);
    assert!(points_in(&profiles[0], "work_inside") >= 3);
}

#[test]
fn a_span_on_two_threads_at_once_counts_both() {
    let setup = Setup::new("0ms");
    let (ran, wall) = setup.run(|| {
        let start = Instant::now();
        let span = info_span!("shared");
        let ran: Duration = std::thread::scope(|scope| {
            let thread = |span: Span| {
                let dispatch = setup.dispatch.clone();
                move || {
                    let _default = tracing::dispatcher::set_default(&dispatch);
                    let before = cpu_time::ThreadTime::now();
                    span.in_scope(|| burn(LONG));
                    before.elapsed()
                }
            };
            let threads = [scope.spawn(thread(span.clone())), scope.spawn(thread(span.clone()))];
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        drop(span);
        (ran, start.elapsed())
    });
    let account = *span_of(&setup, "shared").times();
    let on_cpu = Duration::from_nanos(account.on_cpu().ns());
    let error = error_of(&account);
    assert!(!HAS_STACKS || on_cpu + error >= 2 * LONG, "{account:?}");
    // Perf events count time stolen by the hypervisor as run time. (On other systems the CPU time of a thread is
    // unknown.)
    assert!(!HAS_STACKS || on_cpu <= ran + ran / 5 + error, "{account:?}, {ran:?}");
    assert!(Duration::from_nanos(account.wall().ns()) <= wall);
    let parts = support::sum_of_parts_ns(&account);
    assert!(parts + 1_000_000 >= account.wall().ns(), "{account:?}");
    if HAS_STACKS {
        assert_eq!(paths(&setup.profiles()[0]), [vec!["shared"]].into_iter().collect());
    }
}

/// Executors inside a span poll tasks of others: first a pool of this thread, and in one of its tasks another executor.
#[test]
fn spans_that_an_executor_enters_on_the_stack_of_others_have_their_own_time() {
    use futures::task::LocalSpawnExt;
    /// Returns the CPU time that it took.
    fn burned(cpu: Duration) -> Duration {
        let before = cpu_time::ThreadTime::now();
        burn(cpu);
        before.elapsed()
    }
    let setup = Setup::new("0ms");
    let took = setup.run(|| {
        let _request = info_span!("request").entered();
        let mut took = [burned(LONG), Duration::ZERO, Duration::ZERO];
        let [of_request, of_task, of_inner] = &mut took;
        let mut pool = futures::executor::LocalPool::new();
        let inner = async { burned(2 * LONG) };
        let inner = inner.instrument(info_span!(parent: None, "inner"));
        let task = async {
            let before = burned(LONG);
            let inner = smol::block_on(inner);
            (before + burned(LONG), inner)
        };
        let task = task.instrument(info_span!(parent: None, "task"));
        let task = pool.spawner().spawn_local_with_handle(task).unwrap();
        (*of_task, *of_inner) = pool.run_until(task);
        *of_request += burned(LONG);
        took
    });
    let spans = ["request", "task", "inner"].map(|name| *span_of(&setup, name).times());
    for (account, took) in spans.iter().zip(took) {
        let (on_cpu, error) = (account.on_cpu(), error_of(account));
        assert!(!HAS_STACKS || on_cpu + error >= took, "{took:?} {account:?}");
        assert!(!HAS_STACKS || on_cpu <= took + took / 5 + error, "{took:?} {account:?}");
        let parts = support::sum_of_parts_ns(account);
        assert!(parts.abs_diff(account.wall().ns()) < 1_000_000, "{account:?}");
    }
    let [request, task, inner] = spans;
    // Each time is converted from ticks by itself, and the length of a tick is measured ever more exactly.
    let rounding = Duration::from_micros(1);
    let has_gap = |below: &TimeBreakdown, above: &TimeBreakdown| {
        below.other_spans() + rounding >= above.wall() - above.idle()
    };
    assert!(has_gap(&request, &task), "{request:?} {task:?}");
    assert!(has_gap(&task, &inner), "{task:?} {inner:?}");
    assert_eq!(inner.other_spans(), Duration::ZERO, "{inner:?}");
}

#[test]
fn a_span_that_is_dropped_on_another_thread_is_judged_there() {
    let setup = Setup::new("10ms");
    setup.run(|| {
        let span = info_span!("moved");
        span.in_scope(|| burn(LONG));
        // The layer has not run on that thread before.
        std::thread::spawn(move || drop(span)).join().unwrap();
    });
    let span = span_of(&setup, "moved");
    let on_cpu = Duration::from_nanos(span.times().on_cpu().ns());
    assert!(!HAS_STACKS || on_cpu + error_of(span.times()) >= LONG, "{span:?}");
    assert_eq!(span.profile().is_ok(), HAS_STACKS);
}

#[test]
fn a_parent_closes_with_its_last_child_and_reports_the_delay() {
    let setup = Setup::new("[parent]=0ms,[child]=1h");
    setup.run(|| {
        let parent = info_span!("parent");
        let child = parent.in_scope(|| info_span!("child"));
        drop(parent);
        std::thread::sleep(50 * MS);
        child.in_scope(work_inside);
        assert!(setup.kept().is_empty(), "a span stays open while its child is open");
        drop(child);
    });
    let account = *span_of(&setup, "parent").times();
    assert!(account.after_last_exit().ns() >= 100_000_000, "{account:?}");
    assert!(
        account.on_cpu().ns() < 50_000_000,
        "the time of the child is not its own: {account:?}"
    );
    if HAS_STACKS {
        assert!(
            points_in(&setup.profiles()[0], "work_inside") > 0,
            "the profile has the samples of the child"
        );
    }
}

#[test]
fn filters_apply_only_to_their_own_layer() {
    let memory = tracing_profiling::export::Memory::new();
    let layer = ProfilingLayer::builder()
        .rules("0ms".parse().unwrap())
        .exporter(memory.clone())
        .build()
        .unwrap();
    let handle = layer.handle();
    let seen = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let names = Names(std::sync::Arc::clone(&seen));
    let subscriber = tracing_subscriber::registry()
        .with(names.with_filter(filter_fn(|metadata| metadata.name() != "middle")))
        .with(layer.with_filter(filter_fn(|metadata| metadata.name() != "hidden")));
    let dispatch = tracing::Dispatch::new(subscriber);
    tracing::dispatcher::with_default(&dispatch, || {
        let _outer = info_span!("outer").entered();
        let _hidden = info_span!("hidden").entered();
        let _middle = info_span!("middle").entered();
        info_span!("inner").in_scope(work_inside);
    });
    handle.flush(support::PLENTY).unwrap();
    assert_eq!(*seen.lock().unwrap(), ["outer", "hidden", "inner"]);
    if HAS_STACKS {
        let profiles = memory.profiles();
        assert_eq!(paths(&profiles[0]), [vec!["outer", "middle", "inner"]].into_iter().collect());
    }
}

/// Records the names of spans.
struct Names(std::sync::Arc<std::sync::Mutex<Vec<&'static str>>>);

impl<S: tracing::Subscriber> Layer<S> for Names {
    fn on_new_span(
        &self,
        attributes: &tracing::span::Attributes<'_>,
        _: &tracing::Id,
        _: tracing_subscriber::layer::Context<'_, S>,
    ) {
        self.0.lock().unwrap().push(attributes.metadata().name());
    }
}

#[test]
fn two_subscribers_in_one_process_do_not_see_each_others_spans() {
    let setups = [Setup::new("0ms"), Setup::new("0ms")];
    std::thread::scope(|scope| {
        for (number, setup) in setups.iter().enumerate() {
            scope.spawn(move || {
                tracing::dispatcher::with_default(&setup.dispatch, || {
                    let name = if number == 0 { info_span!("first") } else { info_span!("second") };
                    name.in_scope(|| burn(50 * MS));
                });
            });
        }
    });
    // Nested on one thread: both have the same numeric ids.
    tracing::dispatcher::with_default(&setups[0].dispatch, || {
        let _outer = info_span!("outer of first").entered();
        burn(30 * MS);
        tracing::dispatcher::with_default(&setups[1].dispatch, || {
            info_span!("inner of second").in_scope(|| burn(30 * MS));
        });
    });
    setups.iter().for_each(Setup::flush);
    let names = |setup: &Setup| {
        let kept = setup.kept();
        kept.iter().flat_map(|kept| &kept.spans).map(|span| span.name()).collect::<BTreeSet<_>>()
    };
    assert_eq!(names(&setups[0]), ["first", "outer of first"].into_iter().collect());
    assert_eq!(names(&setups[1]), ["second", "inner of second"].into_iter().collect());
    for profile in setups.iter().flat_map(Setup::profiles) {
        assert!(paths(&profile).iter().all(|path| path.len() == 1), "{:?}", paths(&profile));
    }
}

#[test]
fn a_hundred_thousand_spans_open_at_once_are_all_judged() {
    const SPANS: usize = 100_000;
    let setup = Setup::with("[some]=always,1h", |builder| builder.profiles_per_minute(1));
    setup.run(|| {
        let root = info_span!("root").entered();
        let mut spans = Vec::with_capacity(SPANS);
        for number in 0..SPANS {
            let span = if number % 100 == 0 { info_span!("some") } else { info_span!("usual") };
            span.in_scope(|| {});
            spans.push(span);
        }
        burn(20 * MS);
        // In another order than they were created, and on two threads.
        let rest = spans.split_off(SPANS / 2);
        std::thread::scope(|scope| {
            scope.spawn(|| rest.into_iter().rev().for_each(drop));
            spans.into_iter().for_each(drop);
        });
        drop(root);
    });
    let stats = setup.handle.stats();
    assert_eq!((stats.spans.seen, stats.spans.kept), (SPANS as u64 + 1, SPANS as u64 / 100));
}

#[test]
fn reused_ids_belong_to_their_current_span() {
    let setup = Setup::with("[slow]=20ms,[fast]=1h", |builder| builder.profiles_per_minute(1_000));
    let mut ids = BTreeSet::new();
    let mut made = 0;
    setup.run(|| {
        for round in 0..200 {
            let slow = round % 20 == 0;
            let span = if slow { info_span!("slow") } else { info_span!("fast") };
            ids.extend(span.id().map(|id| id.into_u64() & 0xffff));
            made += 1;
            span.in_scope(|| burn(if slow { 30 * MS } else { MS }));
        }
    });
    assert!(ids.len() < made / 10, "ids are reused: {ids:?}");
    let kept = setup.kept();
    assert_eq!(kept.len(), 10);
    for profile in setup.profiles() {
        assert_eq!(paths(&profile), [vec!["slow"]].into_iter().collect());
        // At most as many samples as the span's own account allows, and none of earlier spans with its id. (Their
        // weights are a weaker check: with timers they include the ticks that a busy machine left out.)
        let span = kept.iter().find(|kept| kept.profile == Some(profile.id)).unwrap();
        let [span] = span.spans.as_slice() else { panic!("{span:?}") };
        let points: usize = profile.samples().iter().map(|sample| sample.points.len()).sum();
        let most = span.times().on_cpu().ns() / 990_000 + 3;
        assert!(points as u64 <= most, "{points} of {most}: {span:?}");
    }
}
