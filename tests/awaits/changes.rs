//! What changes between two polls: what is awaited, the rules, the layer, the process.

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::thread;

use futures::FutureExt;
use futures::future::{BoxFuture, join};
use tracing::{Instrument, info_span};
use tracing_profiling::ProfiledExt;
use tracing_profiling::profile::{Profile, SampleKind};

use crate::leaf::{Event, Task, yield_now};
use crate::support::{PLENTY, Setup, is_child, run_child};
use crate::{MS, is_in};

// Boxed, because a function that is inlined into another keeps its line in a release build, but not its name.
fn wait_first(event: &Event) -> BoxFuture<'_, ()> {
    async fn wait_first(event: &Event) {
        event.wait().await;
    }
    wait_first(event).boxed()
}

fn wait_second(event: &Event) -> BoxFuture<'_, ()> {
    async fn wait_second(event: &Event) {
        event.wait().await;
    }
    wait_second(event).boxed()
}

#[test]
fn a_leaf_that_is_still_awaited_is_shown_after_another_that_cloned_the_waker_later() {
    let setup = Setup::new("0ms");
    setup.run(|| {
        let (task, first, second) = (Arc::new(Task::default()), Event::default(), Event::default());
        let later = async {
            // Pending without a clone.
            yield_now().await;
            wait_second(&second).await;
        };
        let both = async { _ = join(wait_first(&first), later).await };
        let mut both = pin!(both.instrument(info_span!("both")).profiled());
        assert!(task.poll(both.as_mut()).is_pending());
        assert!(task.poll(both.as_mut()).is_pending());
        thread::sleep(15 * MS);
        second.happen();
        assert!(task.poll(both.as_mut()).is_pending());
        thread::sleep(15 * MS);
        first.happen();
        assert!(task.poll(both.as_mut()).is_ready());
    });
    let profile = &setup.profiles()[0];
    let mut seen = Vec::new();
    for sample in profile.of_kind(SampleKind::Await) {
        let function = ["wait_first", "wait_second"].map(|name| is_in(profile, sample, name));
        seen.extend(sample.points.iter().map(|point| (point.time(), function)));
    }
    seen.sort_unstable();
    let seen: Vec<_> = seen.into_iter().map(|(_, function)| function).collect();
    assert_eq!(seen, [[false, true], [true, false]], "the last that cloned, and what was left");
}

fn yields() -> BoxFuture<'static, ()> {
    async fn yields() {
        yield_now().await;
    }
    yields().boxed()
}

#[test]
fn a_leaf_that_wakes_itself_is_shown_until_another_is_awaited() {
    let (setup, mut late) = (Setup::new("0ms"), std::time::Duration::ZERO);
    setup.run(|| {
        let (task, event) = (Arc::new(Task::default()), Event::default());
        {
            let both = async { _ = join(wait_first(&event), yields()).await };
            let mut both = pin!(both.instrument(info_span!("both")).profiled());
            // Both are pending; the second makes the task run again.
            assert!(task.poll(both.as_mut()).is_pending());
            thread::sleep(15 * MS);
            assert!(task.poll(both.as_mut()).is_pending());
            thread::sleep(15 * MS);
            let happened = std::time::Instant::now();
            event.happen();
            assert!(task.poll(both.as_mut()).is_ready());
            late = happened.elapsed();
        }
        // As the first leaf of a task.
        let mut yields = pin!(yields().instrument(info_span!("alone")).profiled());
        assert!(task.poll(yields.as_mut()).is_pending());
        thread::sleep(15 * MS);
        assert!(task.poll(yields.as_mut()).is_ready());
    });
    let mut seen = Vec::new();
    for profile in setup.profiles() {
        for kind in [SampleKind::Await, SampleKind::Delay] {
            for sample in profile.of_kind(kind) {
                let function = ["wait_first", "yields"].map(|name| is_in(&profile, sample, name));
                // What passes between the event and the poll. A sample is of 10 ms.
                let may_be_late = kind == SampleKind::Delay && function == [true, false];
                let longest = (late + 10 * MS).as_nanos();
                let points = sample.points.iter();
                let points = points.filter(|at| !may_be_late || u128::from(at.weight) > longest);
                seen.extend(points.map(|point| (point.time(), kind, function)));
            }
        }
    }
    // Not the rest of the account, of which there is no sample.
    seen.retain(|(.., function)| *function != [false; 2]);
    seen.sort_unstable_by_key(|(time, ..)| *time);
    let seen: Vec<_> = seen.into_iter().map(|(_, kind, function)| (kind, function)).collect();
    let (delay, awaited) = (SampleKind::Delay, SampleKind::Await);
    let yielded = (delay, [false, true]);
    assert_eq!(seen, [yielded, (awaited, [true, false]), yielded]);
}

#[test]
fn a_single_leaf_does_not_clone_the_waker_again() {
    let setup = Setup::new("0ms");
    setup.run(|| {
        let (task, event) = (Arc::new(Task::default()), Event::default());
        let wait = event.wait().instrument(info_span!("single")).profiled();
        let mut wait = pin!(wait);
        for _ in 0..100 {
            assert!(task.poll(wait.as_mut()).is_pending());
        }
        assert_eq!(event.clones(), 1);
    });
}

#[test]
fn time_counts_when_a_wrapper_around_begins_to_observe() {
    let setup = Setup::new("0ms");
    setup.run(|| {
        let (task, gate, event) = (Arc::new(Task::default()), Event::default(), Event::default());
        let inner = async { wait_first(&event).await };
        let inner = inner.instrument(info_span!("inner")).profiled();
        let mut outer = pin!(
            async {
                gate.wait().await;
                inner.await;
            }
            .profiled()
        );
        // In no span: the polls that are observed are the 1st, 2nd, 4th, ... 64th, 128th.
        for _ in 0..64 {
            assert!(task.poll(outer.as_mut()).is_pending());
        }
        gate.happen();
        for _ in 0..63 {
            assert!(task.poll(outer.as_mut()).is_pending());
        }
        thread::sleep(30 * MS);
        assert!(task.poll(outer.as_mut()).is_pending());
        thread::sleep(30 * MS);
        event.happen();
        assert!(task.poll(outer.as_mut()).is_ready());
    });
    let times = *setup.kept()[0].spans[0].times();
    // Both sleeps; the other idle time is that of the polls.
    assert!(times.awaiting() >= 60 * MS, "{times:?}");
    assert!(times.awaiting() + times.scheduling_delay() <= times.idle(), "{times:?}");
}

#[test]
fn a_wake_while_another_wrapper_observes_does_not_count_later() {
    let setup = Setup::new("0ms");
    setup.run(|| {
        let (task, event, held) = (Arc::new(Task::default()), Event::default(), RefCell::default());
        let wait = poll_fn(|context| {
            *held.borrow_mut() = Some(context.waker().clone());
            pin!(event.wait()).poll(context)
        });
        let mut inner = pin!(wait.instrument(info_span!("inner")).profiled());
        assert!(task.poll(inner.as_mut()).is_pending());
        let stale = held.take().expect("a waker of the inner one");
        {
            let outer = pin!(inner.as_mut().instrument(info_span!("outer")).profiled());
            assert!(task.poll(outer).is_pending());
        }
        stale.wake();
        assert!(task.poll(inner.as_mut()).is_pending());
        thread::sleep(30 * MS);
        event.happen();
        assert!(task.poll(inner.as_mut()).is_ready());
    });
    let kept = setup.kept();
    let inner = kept.iter().find(|kept| kept.spans[0].name() == "inner").expect("kept");
    let times = inner.spans[0].times();
    assert!(times.awaiting() >= 30 * MS, "{times:?}");
}

#[test]
fn a_future_that_outlives_a_layer_reports_to_the_next() {
    let (first, second) = (Setup::new("0ms"), Setup::new("0ms"));
    let (task, one, another) = (Arc::new(Task::default()), Event::default(), Event::default());
    let both = async {
        wait_first(&one).instrument(info_span!("one")).await;
        wait_second(&another).instrument(info_span!("another")).await;
    };
    let mut both = pin!(both.profiled());
    first.run(|| assert!(task.poll(both.as_mut()).is_pending()));
    first.handle.shutdown(PLENTY).unwrap();
    second.run(|| {
        one.happen();
        assert!(task.poll(both.as_mut()).is_pending());
        thread::sleep(15 * MS);
        another.happen();
        assert!(task.poll(both.as_mut()).is_ready());
    });
    let kept = second.kept();
    let times = kept[0].spans[0].times();
    assert!(times.awaiting() >= 15 * MS, "{times:?}");
}

#[test]
fn rules_change_and_profiling_stops_and_starts_between_polls() {
    let setup = Setup::new("0ms");
    setup.run(|| {
        let (task, event, last) = (Arc::new(Task::default()), Event::default(), Event::default());
        let rounds = 40;
        let all = async {
            for _ in 0..rounds {
                wait_first(&event).instrument(info_span!("round")).await;
            }
            wait_second(&last).instrument(info_span!("last")).await;
        };
        let mut all = pin!(all.profiled());
        assert!(task.poll(all.as_mut()).is_pending());
        for round in 1..=rounds {
            match round % 4 {
                0 => setup.handle.set_enabled(false).unwrap(),
                1 => setup.handle.set_enabled(true).unwrap(),
                2 => setup.handle.set_rules("off".parse().unwrap()).unwrap(),
                _ => setup.handle.set_rules("[round]=0ms,[last]=0ms".parse().unwrap()).unwrap(),
            }
            let wakes = task.wakes();
            event.happen();
            assert_eq!(task.wakes(), wakes + 1);
            if round == rounds {
                setup.handle.set_enabled(true).unwrap();
            }
            assert!(task.poll(all.as_mut()).is_pending());
        }
        thread::sleep(15 * MS);
        last.happen();
        assert!(task.poll(all.as_mut()).is_ready());
    });
    let kept = setup.kept();
    let last = kept.iter().find(|kept| kept.spans[0].name() == "last").expect("kept");
    assert!(last.spans[0].times().awaiting() >= 15 * MS, "{last:?}");
}

type Job = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A future that is polled and dropped when the thread-local variables of the layer have gone.
struct Late(Option<(Arc<Task>, Job)>);

impl Drop for Late {
    fn drop(&mut self) {
        let (task, mut job) = self.0.take().expect("dropped once");
        assert!(task.poll(job.as_mut()).is_pending());
    }
}

#[test]
fn a_future_is_polled_and_dropped_while_thread_locals_are_destroyed() {
    thread_local! {
        static LATE: RefCell<Late> = const { RefCell::new(Late(None)) };
    }
    let setup = Setup::new("0ms");
    let event = Event::default();
    let (shared, dispatch) = (event.clone(), setup.dispatch.clone());
    let thread = thread::spawn(move || {
        LATE.with(|late| {
            tracing::dispatcher::with_default(&dispatch, || {
                let wait = async move { shared.wait().await };
                let (mut job, task): (Job, _) = (Box::pin(wait.profiled()), Arc::default());
                // The registry cannot enter a span later.
                let poll = || Task::poll(&task, job.as_mut());
                assert!(info_span!("late").in_scope(poll).is_pending());
                late.borrow_mut().0 = Some((task, job));
            });
        });
    });
    thread.join().unwrap();
    if let Some(waker) = event.waker() {
        waker.wake();
    }
    setup.flush();
}

/// The child of a fork must not wait for locks of threads that it does not have.
#[test]
fn futures_are_dropped_in_forked_children() {
    const NAME: &str = "changes::futures_are_dropped_in_forked_children";
    if !is_child(NAME) {
        let output = run_child(NAME, &[]);
        assert!(output.status.success(), "{output:?}");
        return;
    }
    let setup = Setup::new("0ms");
    let span = tracing::dispatcher::with_default(&setup.dispatch, || info_span!("parent"));
    let pending = || {
        let mut wait = Box::pin(async { Event::default().wait().await }.profiled());
        let task = Arc::new(Task::default());
        assert!(span.in_scope(|| task.poll(wait.as_mut())).is_pending());
        wait
    };
    for _ in 0..8 {
        let span = span.clone();
        thread::spawn(move || {
            let (task, event) = (Arc::new(Task::default()), Event::default());
            loop {
                let mut wait = pin!(event.wait().profiled());
                _ = span.in_scope(|| task.poll(wait.as_mut()));
            }
        });
    }
    for _ in 0..200 {
        let futures: Vec<_> = (0..64).map(|_| pending()).collect();
        // SAFETY: the child only polls and drops these futures, and ends.
        #[allow(unsafe_code, reason = "a fork")]
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: as above.
            #[allow(unsafe_code, reason = "a fork")]
            unsafe {
                libc::alarm(20);
            }
            for mut future in futures {
                assert!(Arc::new(Task::default()).poll(future.as_mut()).is_pending());
                drop(future);
            }
            // SAFETY: as above.
            #[allow(unsafe_code, reason = "a fork")]
            unsafe {
                libc::_exit(0)
            }
        }
        let mut status = 0;
        // SAFETY: waits for the child.
        #[allow(unsafe_code, reason = "a fork")]
        let ended = unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!((ended, status), (child, 0));
    }
    std::process::exit(0);
}

async fn apply(event: Option<&Event>) {
    if let Some(event) = event {
        event.wait().await;
    }
}

#[test]
fn a_future_that_is_pending_between_its_spans_shows_what_they_await() {
    let setup = Setup::new("10ms");
    setup.run(|| {
        let (task, next, slow) = (Arc::new(Task::default()), Event::default(), Event::default());
        // As a connection does that handles one request after another.
        let connection = async {
            for number in 0..100 {
                next.wait().await;
                let event = (number == 50).then_some(&slow);
                apply(event).instrument(info_span!("apply")).await;
            }
        };
        let mut connection = pin!(connection.profiled());
        loop {
            if task.poll(connection.as_mut()).is_ready() {
                break;
            }
            if slow.clones() > 0 {
                thread::sleep(15 * MS);
                slow.happen();
            }
            next.happen();
        }
    });
    let profiles = setup.profiles();
    let of_apply = profiles.iter().map(|profile| {
        crate::sum(profile, SampleKind::Await, |sample| is_in(profile, sample, "apply"))
    });
    assert!(of_apply.sum::<std::time::Duration>() >= 10 * MS);
}

#[test]
fn the_awaits_of_a_span_that_is_open_for_long_are_not_merged() {
    // It is open for long after 50 ms.
    let setup = Setup::of_rules("5ms", |builder| builder);
    let own_longest = setup.run(|| {
        let (task, event) = (Arc::new(Task::default()), Event::default());
        let queries = async {
            for _ in 0..60 {
                wait_first(&event).await;
                wait_second(&event).await;
            }
        };
        let mut queries = pin!(queries.instrument(info_span!("queries")).profiled());
        let (mut longest, mut last) = (std::time::Duration::ZERO, std::time::Instant::now());
        while task.poll(queries.as_mut()).is_pending() {
            thread::sleep(3 * MS);
            event.happen();
            longest = longest.max(last.elapsed());
            last = std::time::Instant::now();
        }
        longest
    });
    let profile = &setup.profiles()[0];
    // Not their time: on a busy machine, one of them can have most of it.
    let [first, second] = ["wait_first", "wait_second"].map(|name| {
        let of_it = profile.of_kind(SampleKind::Await).filter(|it| is_in(profile, it, name));
        of_it.map(|sample| sample.points.len()).sum::<usize>()
    });
    let all = first + second;
    assert!(first > all / 4 && second > all / 4, "{first} {second}");
    let longest = profile.of_kind(SampleKind::Await).flat_map(|sample| &sample.points);
    let longest = longest.map(|point| std::time::Duration::from_nanos(point.weight)).max().unwrap();
    // A sample has the weight of what was not sampled before it, too.
    assert!(longest <= own_longest + 10 * MS, "{longest:?}, {own_longest:?} of {all:?}");
}

/// Spans of two layers can have the same id and number.
#[test]
fn a_span_of_another_layer_does_not_get_the_await_of_a_young_span() {
    let (setup, other) = (Setup::of_rules("1h", |builder| builder), Setup::new("0ms"));
    let (task, event) = (Arc::new(Task::default()), Event::default());
    let future = async {
        event.wait().await;
        other.run(|| info_span!("other").in_scope(|| ()));
    };
    setup.run(|| {
        let mut future = pin!(future.instrument(info_span!("young")).profiled());
        assert!(task.poll(future.as_mut()).is_pending());
        thread::sleep(15 * MS);
        event.happen();
        assert!(task.poll(future.as_mut()).is_ready());
    });
    assert_eq!(other.kept_names(), [["other"]]);
    let awaits = |profile: &Profile| profile.of_kind(SampleKind::Await).count();
    assert!(other.profiles().iter().all(|profile| awaits(profile) == 0));
}

#[test]
fn a_future_that_is_in_no_profiled_span_is_rarely_observed() {
    let setup = Setup::new("1h,other=0ms");
    setup.run(|| {
        let (task, event) = (Arc::new(Task::default()), Event::default());
        let mut future = pin!(event.wait().profiled());
        for _ in 0..500 {
            assert!(task.poll(future.as_mut()).is_pending());
        }
        // The leaf clones the waker before and after each poll that is observed.
        assert!((4..=50).contains(&event.clones()), "{}", event.clones());
    });
}
