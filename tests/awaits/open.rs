//! Awaits of spans that are open, young, or whose futures are not profiled.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use futures::FutureExt;
use futures::future::BoxFuture;
use tracing::{Instrument, info_span};
use tracing_profiling::profile::{Profile, SampleKind};
use tracing_profiling::{OpenState, ProfiledExt};

use crate::leaf::{Event, Task};
use crate::support::{PLENTY, Setup, functions};
use crate::{MS, is_in, sum};

// Boxed, because a function that is inlined into another keeps its line in a release build, but not its name.
fn call_upstream(event: &Event) -> BoxFuture<'_, ()> {
    async fn call_upstream(event: &Event) {
        event.wait().await;
    }
    call_upstream(event).boxed()
}

/// The time of the awaits in spans of that name.
fn awaited_in(profile: &Profile, span: &str) -> Duration {
    sum(profile, SampleKind::Await, |sample| {
        sample.link.and_then(|link| profile.link(link)).is_some_and(|link| link.span == span)
    })
}

#[test]
fn open_spans_are_listed_with_where_they_are() {
    let setup = Setup::new("1h");
    let list = || {
        let mut open = setup.handle.open_spans(Duration::ZERO).unwrap();
        open.sort_by(|a, b| a.name.cmp(&b.name));
        open.into_iter().map(|span| (span.name.clone(), span.state, span)).collect::<Vec<_>>()
    };
    setup.run(|| {
        let (task, event) = (Arc::new(Task::default()), Event::default());
        let request = info_span!("a_request", method = "GET");
        let future = async { call_upstream(&event).instrument(info_span!("b_query")).await };
        let mut future = pin!(future.instrument(request).profiled());
        let other = Event::default();
        let mut plain = pin!(call_upstream(&other).instrument(info_span!("c_plain")));
        assert!(task.poll(future.as_mut()).is_pending());
        assert!(task.poll(plain.as_mut()).is_pending());
        let entered = info_span!("d_entered").entered();
        let open = list();
        let states: Vec<_> = open.iter().map(|(name, state, _)| (name.as_str(), *state)).collect();
        let expected = [
            ("a_request", OpenState::Awaiting),
            ("b_query", OpenState::Awaiting),
            ("c_plain", OpenState::Idle),
            ("d_entered", OpenState::Entered),
        ];
        assert_eq!(states, expected);
        let (_, _, request) = &open[0];
        assert_eq!(request.fields, [("method", "GET".to_owned())]);
        let place = request.stack.iter().find(|line| line.contains("call_upstream")).unwrap();
        assert!(place.contains("(awaits/open.rs:"), "{place}");
        assert!(open[2].2.stack.is_empty());
        let older = setup.handle.open_spans(Duration::from_secs(3_600)).unwrap();
        assert!(older.is_empty(), "{older:?}");
        drop(entered);
        event.happen();
        assert_eq!(list()[0].1, OpenState::Woken);
        assert!(task.poll(future.as_mut()).is_ready());
    });
}

#[test]
fn a_dump_of_all_threads_says_that_futures_are_awaiting() {
    let setup = Setup::new("1h");
    setup.run(|| {
        let task = Arc::new(Task::default());
        let events: Vec<_> = (0..64).map(|_| Event::default()).collect();
        let pending = |event| {
            let request = info_span!("request");
            let mut future = Box::pin(call_upstream(event).instrument(request).profiled());
            assert!(task.poll(future.as_mut()).is_pending());
            future
        };
        let mut futures: Vec<_> = events.iter().map(pending).collect();
        let dump = setup.handle.threads().unwrap();
        assert_eq!((dump.awaiting, dump.idle_spans), (64, 64));
        assert!(dump.threads().iter().all(|thread| thread.spans.is_empty()), "{dump}");
        let last =
            "\n64 open spans and 64 awaiting futures are in no thread: GET /open lists them\n";
        assert!(dump.to_string().ends_with(last), "{dump}");
        // Those that are ready are not awaiting, and have left their spans.
        for (event, future) in events.iter().zip(&mut futures).take(60) {
            event.happen();
            assert!(task.poll(future.as_mut()).is_ready());
        }
        drop(futures.drain(..60));
        let dump = setup.handle.threads().unwrap();
        assert_eq!((dump.awaiting, dump.idle_spans), (4, 4));
    });
    let dump = setup.handle.threads().unwrap();
    assert_eq!((dump.awaiting, dump.idle_spans), (0, 0));
    assert!(!dump.to_string().contains("GET /open"), "{dump}");
}

#[test]
fn a_snapshot_of_an_open_span_has_what_it_awaits_now() {
    let setup = Setup::new("open>500ms");
    setup.run(|| {
        let (task, event) = (Arc::new(Task::default()), Event::default());
        let mut future =
            pin!(call_upstream(&event).instrument(info_span!("connection")).profiled());
        let start = Instant::now();
        assert!(task.poll(future.as_mut()).is_pending());
        let (profile, kept) = loop {
            if let Some(both) = setup.profiles().pop().zip(setup.kept().pop()) {
                break both;
            }
            assert!(start.elapsed() < PLENTY);
            thread::sleep(MS);
        };
        let awaited =
            sum(&profile, SampleKind::Await, |sample| is_in(&profile, sample, "call_upstream"));
        let times = *kept.spans[0].times();
        assert!(awaited > Duration::ZERO && awaited <= start.elapsed(), "{awaited:?}");
        assert!(times.awaiting() > Duration::ZERO && times.awaiting() <= times.idle(), "{times:?}");
    });
}

/// Awaits for 15 ms, and blocks its thread for so long that its span is kept.
async fn awaits_and_blocks(event: &Event) {
    call_upstream(event).await;
    thread::sleep(120 * MS);
}

/// The profile of a future in which an await of a young span is followed by something else.
fn with_young_await<F: Future>(wrapped: impl FnOnce(Event) -> F) -> Profile {
    // An await is sent at once if its span is older than 50 ms.
    let setup = Setup::of_rules("100ms", |builder| builder);
    setup.run(|| {
        let (task, event) = (Arc::new(Task::default()), Event::default());
        let mut future = pin!(wrapped(event.clone()));
        assert!(task.poll(future.as_mut()).is_pending());
        thread::sleep(15 * MS);
        event.happen();
        assert!(task.poll(future.as_mut()).is_ready());
    });
    setup.profiles().remove(0)
}

#[test]
fn an_await_of_a_young_span_is_shown_if_the_span_is_kept() {
    let outside = with_young_await(|event| {
        async move { awaits_and_blocks(&event).await }.instrument(info_span!("slow")).profiled()
    });
    let inside = with_young_await(|event| {
        async move { awaits_and_blocks(&event).await }.profiled().instrument(info_span!("slow"))
    });
    for profile in [outside, inside] {
        let awaited =
            sum(&profile, SampleKind::Await, |sample| is_in(&profile, sample, "call_upstream"));
        assert!(awaited >= 10 * MS, "{awaited:?}");
    }
}

#[test]
fn idle_time_that_nothing_explains_is_shown_at_the_innermost_span_that_was_idle() {
    let setup = Setup::new("0ms");
    setup.run(|| {
        let (task, events) = (Arc::new(Task::default()), [(); 3].map(|()| Event::default()));
        let future = async {
            call_upstream(&events[0]).await;
            call_upstream(&events[1]).instrument(info_span!("query")).await;
            call_upstream(&events[2]).await;
        };
        let mut future = pin!(future.instrument(info_span!("request")));
        for (event, ms) in events.iter().zip([20, 40, 30]) {
            assert!(task.poll(future.as_mut()).is_pending());
            thread::sleep(ms * MS);
            event.happen();
        }
        assert!(task.poll(future.as_mut()).is_ready());
    });
    let profile = &setup.profiles()[0];
    let times = *setup.kept()[0].spans[0].times();
    let [request, query] = ["request", "query"].map(|span| awaited_in(profile, span));
    assert!(request >= 50 * MS && query >= 40 * MS, "{request:?} {query:?}");
    assert!(request + query <= times.idle(), "counted once");
    assert!(times.awaiting().is_zero() && times.scheduling_delay().is_zero());
}

#[test]
fn idle_time_alone_leaves_no_profile_if_its_future_is_not_profiled() {
    let setup = Setup::new("0ms");
    setup.run(|| {
        let (task, event) = (Arc::new(Task::default()), Event::default());
        let mut future = pin!(call_upstream(&event).instrument(info_span!("alone")));
        assert!(task.poll(future.as_mut()).is_pending());
        thread::sleep(20 * MS);
        event.happen();
        assert!(task.poll(future.as_mut()).is_ready());
    });
    assert_eq!(setup.kept_names(), [["alone"]]);
    assert!(setup.profiles().iter().all(|profile| profile.of_kind(SampleKind::Await).count() == 0));
}

#[test]
fn a_wrapper_around_or_inside_a_span_explains_its_idle_time() {
    for is_around in [true, false] {
        let setup = Setup::new("0ms");
        setup.run(|| {
            let (task, event) = (Arc::new(Task::default()), Event::default());
            let span = info_span!("request");
            let future: std::pin::Pin<Box<dyn Future<Output = ()>>> = match is_around {
                true => Box::pin(call_upstream(&event).instrument(span).profiled()),
                false => Box::pin(call_upstream(&event).profiled().instrument(span)),
            };
            let mut future = pin!(future);
            assert!(task.poll(future.as_mut()).is_pending());
            thread::sleep(20 * MS);
            event.happen();
            assert!(task.poll(future.as_mut()).is_ready());
        });
        let profile = &setup.profiles()[0];
        let idle = setup.kept()[0].spans[0].times().idle();
        let all = sum(profile, SampleKind::Await, |_| true);
        assert!(all >= 10 * MS && all <= idle, "once: {all:?} of {idle:?}");
        let known = sum(profile, SampleKind::Await, |one| is_in(profile, one, "call_upstream"));
        assert_eq!(all, known);
    }
}

/// Polls a future until it is ready, which it is 20 ms later.
fn await_20_ms(future: impl Future, task: &Arc<Task>, event: &Event) {
    let mut future = pin!(future);
    assert!(task.poll(future.as_mut()).is_pending());
    thread::sleep(20 * MS);
    event.happen();
    assert!(task.poll(future.as_mut()).is_ready());
}

/// Thousands of connections may be idle. Their stacks are given up for those of requests, and copied again with the next
/// poll, also if what they await has kept the waker.
#[test]
fn connections_that_are_idle_for_long_leave_memory_for_requests() {
    let setup = Setup::with("0ms", |builder| builder.memory(8 << 20).profiles_per_minute(u32::MAX));
    let start = Instant::now();
    setup.run(|| {
        let task = Arc::new(Task::default());
        let events: Vec<_> = (0..2_000).map(|_| Event::default()).collect();
        let connection = info_span!("connection");
        let idle = |event| {
            let mut future =
                Box::pin(call_upstream(event).instrument(connection.clone()).profiled());
            assert!(task.poll(future.as_mut()).is_pending());
            future
        };
        let mut connections: Vec<_> = events.iter().map(idle).collect();
        assert!(setup.handle.stats().awaits.dropped_memory > 0);
        let has_stack = || {
            let event = Event::default();
            let request = call_upstream(&event).instrument(info_span!("request")).profiled();
            await_20_ms(request, &task, &event);
            setup.flush();
            let profile = setup.memory.take().pop().unwrap();
            profile
                .of_kind(SampleKind::Await)
                .any(|sample| is_in(&profile, sample, "call_upstream"))
        };
        while !has_stack() {
            assert!(start.elapsed() < PLENTY, "{:?}", setup.handle.stats().awaits);
        }
        assert_eq!(events[0].clones(), 1);
        for _ in 0..2 {
            assert!(task.poll(connections[0].as_mut()).is_pending());
        }
        assert_eq!(events[0].clones(), 2, "once again");
    });
}

/// With little memory left, the innermost functions of a stack are copied.
#[test]
fn copies_are_small_when_little_memory_is_left() {
    #[inline(never)]
    fn poll_deep<F: Future>(
        future: std::pin::Pin<&mut F>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<F::Output> {
        let mut deep = [0_u8; 16 << 10];
        std::hint::black_box(&mut deep);
        let polled = future.poll(context);
        std::hint::black_box(&mut deep);
        polled
    }
    let setup = Setup::with("0ms", |builder| builder.memory(8 << 20).profiles_per_minute(u32::MAX));
    let start = Instant::now();
    setup.run(|| {
        let task = Arc::new(Task::default());
        // On a busy machine the time for unwinding is used up, and a sample has no stack.
        let await_deep = || loop {
            assert!(start.elapsed() < PLENTY, "{:?}", setup.handle.stats().awaits);
            let event = Event::default();
            let deep = async {
                let mut inner = pin!(call_upstream(&event));
                std::future::poll_fn(|context| poll_deep(inner.as_mut(), context)).await;
            };
            await_20_ms(deep.instrument(info_span!("request")).profiled(), &task, &event);
            setup.flush();
            let profile = setup.memory.take().pop().unwrap();
            let mut awaits = profile.of_kind(SampleKind::Await);
            if let Some(sample) = awaits.find(|sample| is_in(&profile, sample, "call_upstream")) {
                break functions(&profile, sample).contains(&"[callers not copied]");
            }
        };
        assert!(!await_deep());
        let connection = info_span!("connection");
        let event = Event::default();
        let idle = || {
            let mut future =
                Box::pin(call_upstream(&event).instrument(connection.clone()).profiled());
            // It replaces the waker of the one before.
            assert!(task.poll(future.as_mut()).is_pending());
            future
        };
        let mut connections = Vec::new();
        while setup.handle.stats().awaits.dropped_memory == 0 {
            connections.push(idle());
        }
        // Between half and three quarters are left in use.
        connections.truncate(connections.len() * 2 / 3);
        assert!(await_deep());
        drop(connections);
    });
}
