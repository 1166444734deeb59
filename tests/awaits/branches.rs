//! Leaves that are awaited at the same time: the branches of `select!` and `join!`.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, join_all, join3, select_all};
use tokio::runtime::Builder;
use tracing::{Instrument, info_span};
use tracing_profiling::profile::{Leaf, Profile, SampleKind};
use tracing_profiling::{OpenState, ProfiledExt};

use crate::leaf::{Event, Task, poll_once};
use crate::support::Setup;
use crate::{MS, is_in, sum, with_subscriber};

const NAP: Duration = Duration::from_millis(30);

// Boxed, because a function that is inlined into another keeps its line in a release build, but not its name.
macro_rules! branches {
    ($($name:ident)*) => {
        $(fn $name(event: &Event) -> BoxFuture<'_, ()> {
            async fn $name(event: &Event) {
                event.wait().await;
                // Otherwise they would be the same function in a release build.
                std::hint::black_box(stringify!($name));
            }
            $name(event).boxed()
        })*
        const NAMES: &[&str] = &[$(stringify!($name)),*];
    };
}

branches! { branch_a branch_b branch_c }

/// What is shown of a kind: in order of time the branch and of how many it is one, with its time.
fn shown(profile: &Profile, kind: SampleKind) -> Vec<(&'static str, u32, Duration)> {
    let mut shown = Vec::new();
    for sample in profile.of_kind(kind) {
        let of_name = NAMES.iter().filter(|name| is_in(profile, sample, name));
        let branches: Vec<_> = of_name.copied().collect();
        let count = match profile.leaf(sample.leaf) {
            Some(Leaf::AwaitingOneOf { count, .. }) => *count,
            _ => 1,
        };
        let branch = match branches[..] {
            [branch] => branch,
            _ => "another",
        };
        let weights = sample.points.iter().map(|it| (it.time(), Duration::from_nanos(it.weight)));
        shown.extend(weights.map(|(time, weight)| (time, branch, count, weight)));
    }
    shown.sort_unstable();
    shown.into_iter().map(|(_, branch, count, weight)| (branch, count, weight)).collect()
}

fn without_times<'a>(shown: &[(&'a str, u32, Duration)]) -> Vec<(&'a str, u32)> {
    shown.iter().map(|(branch, count, _)| (*branch, *count)).collect()
}

type Wait = Pin<Box<dyn Future<Output = ()>>>;

/// Runs a future of three events, which happen in that order, a nap after each other. Returns what is shown of it.
fn naps(wait: fn([Event; 3]) -> Wait, order: &[usize]) -> Vec<(&'static str, u32)> {
    let setup = Setup::new("0ms");
    setup.run(|| {
        let (task, events) = (Arc::new(Task::default()), [(); 3].map(|()| Event::default()));
        let wait = wait(events.clone()).instrument(info_span!("both"));
        let mut wait = pin!(wait.profiled());
        for next in order {
            assert!(task.poll(wait.as_mut()).is_pending());
            thread::sleep(NAP);
            events[*next].happen();
        }
        assert!(task.poll(wait.as_mut()).is_ready());
    });
    let times = *setup.kept()[0].spans[0].times();
    let profile = &setup.profiles()[0];
    let awaited = sum(profile, SampleKind::Await, |_| true);
    let naps = NAP * u32::try_from(order.len()).unwrap();
    assert!(awaited >= naps, "{awaited:?}");
    assert!(awaited.abs_diff(times.awaiting()) <= MS, "{awaited:?} {times:?}");
    without_times(&shown(profile, SampleKind::Await))
}

/// Seemingly at the same time: the semaphore lets one of them go on.
#[test]
fn what_the_other_branches_await_is_named() {
    let setup = Setup::new("0ms");
    setup.run(|| {
        let (task, events) = (Arc::new(Task::default()), [(); 3].map(|()| Event::default()));
        let one_by_one = tokio::sync::Semaphore::new(1);
        let branches = events.each_ref().map(async |event| {
            let _permit = one_by_one.acquire().await.unwrap();
            branch_a(event).await;
        });
        let mut wait = pin!(join_all(branches).instrument(info_span!("all")).profiled());
        for event in &events {
            assert!(task.poll(wait.as_mut()).is_pending());
            thread::sleep(NAP);
            event.happen();
        }
        assert!(task.poll(wait.as_mut()).is_ready());
    });
    let kept = setup.kept();
    let hotspot = kept[0].hotspot(SampleKind::Await).unwrap();
    let is_of_semaphore = |name: &str| name.contains("emaphore") && !name.contains("branch_a");
    let beside = hotspot.beside.as_ref().map(|beside| beside.name.as_str());
    assert!(beside.is_some_and(is_of_semaphore), "{hotspot:?}");
    assert!(hotspot.to_string().starts_with("others at tokio::sync::"), "{hotspot}");
}

#[test]
fn the_branch_that_woke_the_task_has_the_time() {
    let joined = [("branch_b", 3), ("branch_c", 2), ("branch_a", 1)];
    let join = naps(
        |[a, b, c]| {
            Box::pin(async move { _ = tokio::join!(branch_a(&a), branch_b(&b), branch_c(&c)) })
        },
        &[1, 2, 0],
    );
    assert_eq!(join, joined);
    let join = naps(
        |[a, b, c]| {
            Box::pin(async move { _ = join3(branch_a(&a), branch_b(&b), branch_c(&c)).await })
        },
        &[1, 2, 0],
    );
    assert_eq!(join, joined);
    let select = naps(
        |[a, b, c]| {
            Box::pin(async move {
                tokio::select! {
                    () = branch_a(&a) => {}
                    () = branch_b(&b) => {}
                    () = branch_c(&c) => {}
                }
            })
        },
        &[0],
    );
    assert_eq!(select, [("branch_a", 3)]);
    let select = naps(
        |[a, b, c]| {
            Box::pin(async move {
                _ = select_all([branch_a(&a), branch_b(&b), branch_c(&c)]).await;
            })
        },
        &[2],
    );
    assert_eq!(select, [("branch_c", 3)]);
}

#[test]
fn a_select_in_a_loop_has_the_time_of_each_turn_where_it_was_spent() {
    let turns = naps(
        |[a, b, c]| {
            Box::pin(async move {
                let mut stop = branch_c(&c);
                loop {
                    tokio::select! {
                        biased;
                        () = branch_a(&a) => {}
                        () = branch_b(&b) => {}
                        () = &mut stop => break,
                    }
                }
            })
        },
        &[0, 1, 1, 0, 2],
    );
    let order = ["branch_a", "branch_b", "branch_b", "branch_a", "branch_c"];
    assert_eq!(turns, order.map(|branch| (branch, 3)));
}

#[test]
fn branches_share_the_time_if_it_is_not_known_which_one_woke() {
    let setup = Setup::new("0ms");
    setup.run(|| {
        let (task, events) = (Arc::new(Task::default()), [(); 3].map(|()| Event::default()));
        let [a, b, c] = &events;
        let all = async { _ = tokio::join!(branch_a(a), branch_b(b), branch_c(c)) };
        let mut all = Box::pin(all.instrument(info_span!("dropped")).profiled());
        assert!(task.poll(all.as_mut()).is_pending());
        thread::sleep(NAP);
        drop(all);
    });
    let times = *setup.kept()[0].spans[0].times();
    let profile = &setup.profiles()[0];
    let parts = shown(profile, SampleKind::Await);
    let names: BTreeMap<_, _> =
        parts.iter().map(|(branch, count, part)| (*branch, (*count, *part))).collect();
    assert_eq!(names.keys().copied().collect::<Vec<_>>(), NAMES);
    let all: Duration = parts.iter().map(|(.., part)| *part).sum();
    assert!(all >= NAP && all.abs_diff(times.awaiting()) <= MS, "{parts:?} {times:?}");
    for (count, part) in names.values() {
        assert_eq!(*count, 3);
        assert!(part.abs_diff(all / 3) <= Duration::from_nanos(1), "{parts:?}");
    }
}

#[test]
fn branches_in_spans_of_their_own_await_in_these_and_once_around() {
    let setup = Setup::new("0ms");
    let wait = |is_woken: bool| {
        let (task, events) = (Arc::new(Task::default()), [(); 2].map(|()| Event::default()));
        let [a, b] = &events;
        let both = async {
            let a = branch_a(a).instrument(info_span!("in_a"));
            let b = branch_b(b).instrument(info_span!("in_b"));
            _ = tokio::join!(a, b);
        };
        let mut both = Box::pin(both.instrument(info_span!("around", is_woken)).profiled());
        assert!(task.poll(both.as_mut()).is_pending());
        thread::sleep(NAP);
        if is_woken {
            a.happen();
            assert!(task.poll(both.as_mut()).is_pending());
            thread::sleep(NAP);
            b.happen();
            assert!(task.poll(both.as_mut()).is_ready());
        }
    };
    setup.run(|| [true, false].map(wait));
    let (kept, profiles) = (setup.kept(), setup.profiles());
    for (kept, expected) in kept.iter().zip([2, 1]) {
        let times = |name: &str| {
            let span = kept.spans.iter().find(|span| span.name() == name).expect("kept");
            *span.times()
        };
        let [around, a, b] = ["around", "in_a", "in_b"].map(times);
        assert!(around.awaiting() >= NAP * expected, "{around:?}");
        for inside in [a, b] {
            assert!(inside.awaiting() >= NAP && inside.awaiting() <= inside.idle(), "{inside:?}");
        }
        assert!(around.awaiting() <= around.idle(), "{around:?}");
        // The last one was awaited all the time.
        assert!(b.awaiting() >= NAP * expected, "{b:?}");
    }
    for (profile, expected) in profiles.iter().zip([1, 2]) {
        let mut in_spans = Vec::new();
        for sample in profile.of_kind(SampleKind::Await) {
            let span =
                profile.span_path(sample.link).last().copied().unwrap_or_default().to_owned();
            let branch = NAMES.iter().find(|name| is_in(profile, sample, name)).unwrap();
            assert_eq!(span.replace("in_", ""), branch.replace("branch_", ""));
            let is_one_of =
                matches!(profile.leaf(sample.leaf), Some(Leaf::AwaitingOneOf { count: 2, .. }));
            in_spans.push((span, is_one_of));
        }
        in_spans.sort();
        let [in_a, in_b] = ["in_a", "in_b"].map(str::to_owned);
        assert_eq!(in_spans, [(in_a, true), (in_b, expected == 2)]);
    }
    assert_eq!((kept.len(), profiles.len()), (2, 2));
}

#[test]
fn what_is_done_in_the_same_poll_is_not_awaited() {
    let setup = Setup::new("0ms");
    setup.run(|| {
        let (task, [a, b, c]) = (Arc::new(Task::default()), [(); 3].map(|()| Event::default()));
        let later = async {
            assert!(poll_once(branch_a(&a)).await.is_none());
            drop(a.waker());
            branch_b(&b).await;
        };
        let both = async { _ = tokio::join!(branch_c(&c), later) };
        let mut both = pin!(both.instrument(info_span!("both")).profiled());
        assert!(task.poll(both.as_mut()).is_pending());
        thread::sleep(NAP);
        // Without being woken.
        assert!(task.poll(both.as_mut()).is_pending());
        thread::sleep(NAP);
        b.happen();
        c.happen();
        assert!(task.poll(both.as_mut()).is_ready());
    });
    let mut shown = without_times(&shown(&setup.profiles()[0], SampleKind::Await));
    shown.sort_unstable();
    assert_eq!(shown, [("branch_b", 2), ("branch_b", 2), ("branch_c", 2)]);
}

#[test]
fn an_open_span_is_listed_with_all_that_it_awaits() {
    let setup = Setup::new("1h");
    setup.run(|| {
        let (task, [a, b, _]) = (Arc::new(Task::default()), [(); 3].map(|()| Event::default()));
        let both = async { _ = tokio::join!(branch_a(&a), branch_b(&b)) };
        let mut both = pin!(both.instrument(info_span!("both")).profiled());
        assert!(task.poll(both.as_mut()).is_pending());
        let open = &setup.handle.open_spans(Duration::ZERO).unwrap()[0];
        assert_eq!(open.state, OpenState::Awaiting);
        for branch in ["branch_a", "branch_b"] {
            assert!(open.stack.iter().any(|line| line.contains(branch)), "{:?}", open.stack);
        }
        let marks = open.stack.iter().filter(|line| *line == "[await, one of 2 at the same time]");
        assert_eq!(marks.count(), 2, "{:?}", open.stack);
    });
}

#[test]
fn a_request_beside_a_shutdown_that_never_comes_has_all_the_time() {
    let setup = Setup::new("0ms");
    setup.run(|| {
        with_subscriber(&setup, Builder::new_current_thread()).block_on(async {
            let shutdown = Event::default();
            let handle = async move {
                for _ in 0..3 {
                    tokio::select! {
                        () = tokio::time::sleep(NAP) => {}
                        () = branch_c(&shutdown) => {}
                    }
                }
            };
            tokio::spawn(handle.instrument(info_span!("request")).profiled()).await.unwrap();
        });
    });
    let times = *setup.kept()[0].spans[0].times();
    let shown = shown(&setup.profiles()[0], SampleKind::Await);
    let slept: Duration = shown.iter().map(|(.., part)| *part).sum();
    assert!(slept.abs_diff(times.awaiting()) <= MS, "{shown:?} {times:?}");
    assert_eq!(without_times(&shown), [("another", 2); 3]);
}
