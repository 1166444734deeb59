//! Checks that 100,000 samples of functions (25,000 of timers) are on the spans in which the functions ran, while tasks
//! migrate between threads.

use std::collections::{HashMap, HashSet};
use std::hint::black_box;
use std::sync::Mutex;
use std::thread::ThreadId;

use tracing::{Id, Instrument, Span, info_span};
use tracing_profiling::profile::{Profile, SampleKind};

use crate::Sampled;
use crate::support::{Setup, functions};

const WANTED: usize = 100_000;
/// The number where CI repeats the test for another user, which it requests by a short stress time.
const WANTED_AGAIN: usize = 20_000;

fn wanted(sampled: Sampled) -> usize {
    let seconds = std::env::var("PROFILING_TEST_STRESS_SECONDS");
    let wanted = match seconds.ok().and_then(|seconds| seconds.parse().ok()) {
        Some(0..10) => WANTED_AGAIN,
        Some(10_u64..) | None => WANTED,
    };
    // A timer samples a quarter as often, at the usual 250 ticks a second.
    if sampled == Sampled::Timer { wanted / 4 } else { wanted }
}

/// The minimum and maximum rounds of a segment, which takes from a tenth of a sampling period to several.
const ROUNDS: (u64, u64) = (200, 20_000);
const SEGMENTS: usize = 60;

/// A function that burns CPU, and the span of the same name.
#[derive(Clone, Copy)]
struct Kind {
    name: &'static str,
    /// Calls the closure in the middle.
    work: fn(u64, &dyn Fn()),
    span: fn() -> Span,
    span_under: fn(Option<Id>) -> Span,
}

macro_rules! kinds {
    ($($group:ident: $($name:ident)+;)+) => {
        $($(
            #[inline(never)]
            fn $name(rounds: u64, then: &dyn Fn()) {
                // The name keeps the compiler from merging the functions.
                let mut x = black_box(stringify!($name)).len() as u64;
                let mut i = 0;
                while i < rounds {
                    if i == rounds / 2 {
                        between(then);
                    }
                    x = black_box((x ^ i) * 3 % 1_000_003);
                    i += 1;
                }
            }
        )+)+
        $(const $group: &[Kind] = &[$(Kind {
            name: stringify!($name),
            work: $name,
            span: || info_span!(stringify!($name)),
            span_under: |parent| info_span!(parent: parent, stringify!($name)),
        }),+];)+
    };
}

kinds! {
    POLLED: polled0 polled1 polled2 polled3 polled4 polled5 polled6 polled7;
    EXPLICIT: explicit0 explicit1 explicit2 explicit3 explicit4 explicit5 explicit6 explicit7;
    OUTER: outer0 outer1 outer2 outer3 outer4 outer5 outer6 outer7;
    SCOPED: scoped0 scoped1 scoped2 scoped3 scoped4 scoped5 scoped6 scoped7;
    AWAITED: awaited0 awaited1 awaited2 awaited3 awaited4 awaited5 awaited6 awaited7;
    SPAWNER: spawner0 spawner1 spawner2 spawner3 spawner4 spawner5 spawner6 spawner7;
    CHILD: child0 child1 child2 child3 child4 child5 child6 child7;
    CURRENT: current0 current1 current2 current3 current4 current5 current6 current7;
    DETACHED: detached0 detached1 detached2 detached3 detached4 detached5 detached6 detached7;
    FOLLOWER: follower0 follower1 follower2 follower3 follower4 follower5 follower6 follower7;
}

/// Between the functions of two spans, the thread is first in the one span and then in the other. The stack does not
/// show which, so samples with this function are ignored.
#[inline(never)]
fn between(then: &dyn Fn()) {
    then();
    black_box(());
}

fn nothing() {}

/// The spans in which the function of that name runs, outermost first.
fn path_of(name: &str) -> Vec<String> {
    let (group, number) = name.split_at(name.len() - 1);
    let path: &[&str] = match group {
        "polled" | "explicit" | "outer" | "spawner" | "follower" => &["root", group],
        "scoped" | "awaited" => &["root", "outer", group],
        "child" => &["root", "spawner", group],
        // Runs in the span of its spawner.
        "current" => &["root", "spawner"],
        "detached" => &[group],
        _ => panic!("unknown function: {name}"),
    };
    let numbered =
        |part: &&str| if *part == "root" { (*part).to_owned() } else { format!("{part}{number}") };
    path.iter().map(numbered).collect()
}

/// The threads that each task has run on.
static THREADS: Mutex<Option<HashMap<&str, HashSet<ThreadId>>>> = Mutex::new(None);

fn note_thread(task: &'static str) {
    let here = std::thread::current().id();
    let mut threads = THREADS.lock().unwrap();
    threads.get_or_insert_default().entry(task).or_default().insert(here);
}

/// Works in segments of different lengths, and yields after each.
async fn work(kind: Kind, then: impl Fn()) {
    let (least, most) = ROUNDS;
    // A congruential generator: different lengths for each task, the same in each run.
    let mut random = kind.name.bytes().fold(0, |sum, byte| sum * 31 + u64::from(byte));
    for _ in 0..SEGMENTS {
        random =
            random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (kind.work)(least + (random >> 33) % (most - least), &then);
        note_thread(kind.name);
        tokio::task::yield_now().await;
    }
}

fn in_scope(span: &Span, kind: Kind) {
    span.in_scope(|| (kind.work)(ROUNDS.1 / 4, &nothing));
}

/// Runs a task of each kind.
async fn tasks(root: Span, number: usize) {
    let all: [fn(&Span, usize) -> tokio::task::JoinHandle<()>; 4] = [
        // A span with an explicit parent that is not the current span.
        |root, number| {
            let root_id = root.id();
            let explicit = move || {
                let kind = EXPLICIT[number];
                in_scope(&(kind.span_under)(root_id.clone()), kind);
            };
            let polled = POLLED[number];
            tokio::spawn(work(polled, explicit).instrument(root.in_scope(polled.span)))
        },
        // Spans inside a task's span: within a poll, and across several polls.
        |root, number| {
            let outer = OUTER[number];
            let task = async move {
                work(outer, || in_scope(&(SCOPED[number].span)(), SCOPED[number])).await;
                let awaited = AWAITED[number];
                work(awaited, nothing).instrument((awaited.span)()).await;
                work(outer, nothing).await;
            };
            tokio::spawn(task.instrument(root.in_scope(outer.span)))
        },
        // A task that spawns others: with a child span, with its own span, and with a root span.
        |root, number| {
            let spawner = SPAWNER[number];
            let task = async move {
                let (child, detached) = (CHILD[number], DETACHED[number]);
                let others = [
                    tokio::spawn(work(child, nothing).instrument((child.span)())),
                    tokio::spawn(work(CURRENT[number], nothing).in_current_span()),
                    tokio::spawn(work(detached, nothing).instrument((detached.span_under)(None))),
                ];
                work(spawner, nothing).await;
                for other in others {
                    other.await.unwrap();
                }
            };
            tokio::spawn(task.instrument(root.in_scope(spawner.span)))
        },
        // A span that follows from another is not inside it.
        |root, number| {
            let follower = FOLLOWER[number];
            let leader = root.in_scope(|| info_span!("leader"));
            let span = root.in_scope(follower.span);
            span.follows_from(&leader);
            let task = work(follower, nothing).instrument(span);
            tokio::spawn(async move {
                task.await;
                drop(leader);
            })
        },
    ];
    for task in all.map(|start| start(&root, number)) {
        task.await.unwrap();
    }
}

/// Counts the samples of each function on its span, and collects those on a wrong span.
fn check(profile: &Profile, right: &mut HashMap<String, usize>, wrong: &mut Vec<String>) {
    let names: Vec<&str> =
        [POLLED, EXPLICIT, OUTER, SCOPED, AWAITED, SPAWNER, CHILD, CURRENT, DETACHED, FOLLOWER]
            .concat()
            .iter()
            .map(|kind| kind.name)
            .collect();
    for sample in profile.of_kind(SampleKind::OnCpu) {
        let mut functions = functions(profile, sample).into_iter();
        let last_part = |name: &str| name.rsplit("::").next().unwrap_or_default().to_owned();
        let innermost = functions
            .by_ref()
            .map(last_part)
            .find(|name| names.contains(&name.as_str()) || name == "between");
        let Some(name) = innermost.filter(|name| name != "between") else { continue };
        let path = profile.span_path(sample.link);
        if path == path_of(&name) {
            *right.entry(name).or_default() += sample.points.len();
        } else {
            wrong.extend(sample.points.iter().map(|_| format!("{name} under {path:?}")));
        }
    }
}

pub(crate) fn scenario(sampled: Sampled) {
    let detached: Vec<_> = DETACHED.iter().map(|kind| format!(",[{}]=0ms", kind.name)).collect();
    let rules = format!("1h,[root]=0ms{}", detached.concat());
    // A small stack and a high rate: only the attribution matters, so the more samples the better.
    let setup = Setup::with(&rules, |builder| {
        sampled
            .set(builder)
            .rate(10_000)
            .stack_bytes(2_048)
            .samples_per_profile(WANTED * 4)
            .profiles_per_minute(1_000_000)
    });
    // Global: a span's parent is closed on the default subscriber of the thread that drops it.
    tracing::dispatcher::set_global_default(setup.dispatch.clone()).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(4).build().unwrap();
    let (mut right, mut wrong) = (HashMap::new(), Vec::new());
    let (mut rounds, start) = (0, std::time::Instant::now());
    // Enough CPU time for samples in each round. The kernel's tick may rarely find a thread running.
    let roots = if sampled == Sampled::Timer { 8 } else { 1 };
    loop {
        let before = right.values().sum::<usize>() + wrong.len();
        if before >= wanted(sampled) {
            break;
        }
        for _ in 0..roots {
            let root = info_span!("root");
            let all: Vec<_> =
                (0..POLLED.len()).map(|n| runtime.spawn(tasks(root.clone(), n))).collect();
            drop(root);
            for tasks in all {
                runtime.block_on(tasks).unwrap();
            }
        }
        setup.flush();
        for profile in setup.memory.take() {
            check(&profile, &mut right, &mut wrong);
        }
        let after = right.values().sum::<usize>() + wrong.len();
        assert!(after > before, "no samples: {:?}", setup.handle.stats());
        rounds += 1;
    }
    let threads = THREADS.lock().unwrap().take().unwrap();
    let migrated = threads.values().filter(|threads| threads.len() > 1).count();
    let count: usize = right.values().sum();
    println!(
        "{count} samples of {} functions, {} on a wrong span, in {rounds} rounds, {:?}; {migrated} of {} tasks migrated; {:?}",
        right.len(),
        wrong.len(),
        start.elapsed(),
        threads.len(),
        setup.handle.stats()
    );
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert_eq!(right.len(), 80, "each function was sampled");
    assert!(migrated > 0, "no task has migrated");
}
