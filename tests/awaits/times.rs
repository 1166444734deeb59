//! How long awaits and scheduling delays were, and in which samples they are.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use futures::FutureExt;
use tokio::runtime::Builder;
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};
use tracing::{Instrument, info_span};
use tracing_profiling::profile::{Leaf, Profile, Sample, SampleKind};
use tracing_profiling::{ProfiledExt, TimeBreakdown};

use crate::leaf::{Event, Task, yield_now};
use crate::support::Setup;
use crate::{MS, is_in, sum, with_subscriber};

/// The weight of samples of short awaits, and of short delays.
const SAMPLE: Duration = Duration::from_millis(10);

async fn nap(times: usize, length: Duration) {
    for _ in 0..times {
        sleep(length).await;
    }
}

/// Whether a delay is that before the first poll, which a busy machine makes long.
fn has_not_begun(profile: &Profile, sample: &Sample) -> bool {
    profile.leaf(sample.leaf) == Some(&Leaf::Unknown("scheduling delay before it began"))
}

/// Runs naps in a span, with a neighbour that blocks the thread from time to time. Returns the time of the span, and of
/// its samples of awaits and of delays, and for how long the task was polled outside of the span.
fn naps(times: usize, length: Duration) -> (TimeBreakdown, [Duration; 2], Duration) {
    // A span grows old in 1 ms. If the thread were armed at each enter, that would add to idle time.
    let setup = Setup::of_rules("20ms", |builder| builder);
    let polled = setup.run(|| {
        with_subscriber(&setup, Builder::new_current_thread()).block_on(async {
            tokio::spawn(async {
                loop {
                    thread::sleep(2 * MS);
                    sleep(9 * MS).await;
                }
            });
            // Boxed, because a function that is inlined into another has no name in a release build.
            let nap = nap(times, length).boxed();
            let task = async move { nap.instrument(info_span!("naps")).await };
            let (mut task, mut polled) = (Box::pin(task.profiled()), Duration::ZERO);
            let polls = poll_fn(move |context| {
                let start = Instant::now();
                let result = task.as_mut().poll(context);
                polled += start.elapsed();
                result.map(|()| polled)
            });
            tokio::spawn(polls).await.unwrap()
        })
    });
    let kept = setup.kept();
    let times = *kept[0].spans[0].times();
    let outside = polled.saturating_sub(times.wall() - times.idle());
    let profile = &setup.profiles()[0];
    let sums = [SampleKind::Await, SampleKind::Delay].map(|kind| {
        sum(profile, kind, |it| is_in(profile, it, "nap") || has_not_begun(profile, it))
    });
    println!("{times:?}, samples {sums:?}, polled {outside:?} outside of it");
    (times, sums, outside)
}

#[test]
fn long_awaits_and_their_delays_add_up_to_idle_time() {
    let (times, [awaits, delays], outside) = naps(5, 200 * MS);
    let explained = times.awaiting() + times.scheduling_delay();
    // Its thread can be preempted between the beginning of a poll and its enter, and between its exit and the end.
    let little = times.idle() / 100;
    assert!(explained <= times.idle() + little, "{times:?}");
    assert!(explained + outside + little >= times.idle(), "{times:?}, {outside:?}");
    assert!(times.scheduling_delay() > Duration::ZERO, "{times:?}");
    assert!(awaits.abs_diff(times.awaiting()) <= times.idle() / 100, "{awaits:?}, {times:?}");
    // Some delays are short.
    assert!(delays.abs_diff(times.scheduling_delay()) <= SAMPLE + MS, "{delays:?}, {times:?}");
}

#[test]
fn a_hundred_short_awaits_are_sampled() {
    let (times, [awaits, delays], _) = naps(100, 5 * MS);
    assert!(awaits.abs_diff(times.awaiting()) <= SAMPLE + MS, "{awaits:?}, {times:?}");
    assert!(delays.abs_diff(times.scheduling_delay()) <= SAMPLE + MS, "{delays:?}, {times:?}");
}

async fn wait_in_vain(event: Event) {
    event.wait().await;
}

#[test]
fn a_future_that_is_cancelled_shows_where_it_awaited() {
    let setup = Setup::new("0ms");
    setup.run(|| {
        with_subscriber(&setup, Builder::new_current_thread()).block_on(async {
            let wait = wait_in_vain(Event::default()).boxed().instrument(info_span!("cancelled"));
            assert!(timeout(300 * MS, wait.profiled()).await.is_err());
        });
    });
    let kept = setup.kept();
    let (profile, times) = (&setup.profiles()[0], kept[0].spans[0].times());
    let awaits = sum(profile, SampleKind::Await, |sample| is_in(profile, sample, "wait_in_vain"));
    // The timeout polls it once more before it drops it, on a busy machine long before.
    assert!(
        awaits.abs_diff(times.awaiting()) <= SAMPLE + MS && !awaits.is_zero(),
        "{awaits:?}, {times:?}, {:?}",
        setup.handle.stats().awaits
    );
}

#[test]
fn a_delay_names_the_span_that_blocked_the_thread() {
    [false, true].into_iter().for_each(is_behind_a_blocker);
}

/// `stays_open` says whether the blocker is still open when the delay is noticed.
fn is_behind_a_blocker(stays_open: bool) {
    let setup = Setup::new("0ms");
    setup.run(|| {
        with_subscriber(&setup, Builder::new_current_thread()).block_on(async {
            let (answer, answered) = oneshot::channel();
            let (block, blocks) = mpsc::channel();
            thread::spawn(move || {
                let is_woken: mpsc::Sender<()> = blocks.recv().unwrap();
                answer.send(()).unwrap();
                is_woken.send(()).unwrap();
            });
            let request = async { answered.await.unwrap() };
            let request = request.instrument(info_span!("request")).profiled();
            let request = tokio::spawn(request);
            tokio::task::yield_now().await;
            let blocker = info_span!("blocker", http.route = "/report/{id}", user = 7);
            blocker.in_scope(|| {
                let (send, is_woken) = mpsc::channel();
                block.send(send).unwrap();
                is_woken.recv().unwrap();
                thread::sleep(300 * MS);
            });
            let blocker = stays_open.then_some(blocker);
            request.await.unwrap();
            setup.flush();
            drop(blocker);
        });
    });
    let kept = setup.kept();
    let request = kept.iter().find(|kept| kept.spans[0].name() == "request").expect("kept");
    let delay = request.spans[0].times().scheduling_delay();
    let profiles = setup.profiles();
    let profile = profiles.iter().find(|profile| profile.title.contains("request")).unwrap();
    let behind = sum(profile, SampleKind::Delay, |sample| {
        let behind = "blocker{http.route=/report/{id}}".to_owned();
        profile.leaf(sample.leaf) == Some(&Leaf::Delayed { behind: Some(behind) })
    });
    let before = sum(profile, SampleKind::Delay, |sample| has_not_begun(profile, sample));
    println!("{delay:?}, behind the blocker {behind:?}");
    assert!(behind > 200 * MS, "{behind:?} of {delay:?}");
    assert!((behind + before).abs_diff(delay) <= MS, "{behind:?} and {before:?} of {delay:?}");
}

/// The thread that would see that a time has passed is blocked then, so that it looks like a long await.
#[test]
fn an_await_names_the_span_that_kept_the_thread_from_seeing_its_end() {
    [false, true].into_iter().for_each(is_kept_from_seeing);
}

/// `is_limited` says whether the future awaits a timeout at the same time, as HTTP clients do.
fn is_kept_from_seeing(is_limited: bool) {
    // The thread may lose its CPU for a while when it has left the span.
    let is_named = (0..8).any(|_| {
        let setup = Setup::new("0ms");
        setup.run(|| {
            with_subscriber(&setup, Builder::new_current_thread()).block_on(async {
                let request = async move {
                    let awaited = sleep(20 * MS);
                    match is_limited {
                        true => timeout(100 * SAMPLE, awaited).await.unwrap(),
                        false => awaited.await,
                    }
                };
                let request = request.instrument(info_span!("request")).profiled();
                let request = tokio::spawn(request);
                tokio::task::yield_now().await;
                info_span!("blocker").in_scope(|| thread::sleep(300 * MS));
                request.await.unwrap();
            });
        });
        let profiles = setup.profiles();
        let profile = profiles.iter().find(|profile| profile.title.contains("request")).unwrap();
        let awaits = profile.of_kind(SampleKind::Await).map(|sample| profile.leaf(sample.leaf));
        let left = Leaf::AwaitingUntil {
            span: Some("blocker".to_owned()),
            woke: false,
            at: String::new(),
        };
        awaits.flatten().any(|leaf| *leaf == left)
            && profile.headline.contains(", until `blocker` left the thread")
    });
    assert!(is_named, "{is_limited}");
}

/// What it waited for is in the hands of the other span. What its own span does on another
/// task is no answer.
#[test]
fn who_holds_what_a_future_awaits_is_named() {
    let setup = Setup::new("0ms");
    setup.run(|| {
        with_subscriber(&setup, Builder::new_current_thread()).block_on(async {
            let gate = Arc::new(tokio::sync::Mutex::new(()));
            let hold = |length, span, gate: &Arc<tokio::sync::Mutex<()>>| {
                let gate = Arc::clone(gate);
                let held = async move {
                    let _held = gate.lock().await;
                    sleep(length).await;
                };
                held.instrument(span).profiled()
            };
            let holder = hold(100 * MS, info_span!("holder", http.route = "/hold"), &gate);
            let holder = tokio::spawn(holder);
            tokio::task::yield_now().await;
            let second = tokio::spawn(hold(MS, info_span!("second"), &gate));
            holder.await.unwrap();
            second.await.unwrap();
            let request = info_span!("request");
            let own = tokio::spawn(hold(100 * MS, request.clone(), &gate));
            tokio::task::yield_now().await;
            tokio::spawn(hold(MS, request, &gate)).await.unwrap();
            own.await.unwrap();
        });
    });
    let profiles = setup.profiles();
    let of = |span: &str| {
        let is_it = |profile: &&Profile| profile.spans[0].span == span;
        &profiles.iter().find(is_it).unwrap().headline
    };
    let said = of("second");
    let until = "::Mutex::lock, until awaits::times::who_holds_what_a_future_awaits_is_named (awaits/times.rs:";
    let woke = ") in `holder{http.route=/hold}` woke it";
    assert!(said.contains(until) && said.contains(woke), "{said}");
    assert!(!of("holder").contains("woke it"), "{}", of("holder"));
    let request = profiles.iter().find(|profile| profile.title.contains("request")).unwrap();
    let awaits = request.of_kind(SampleKind::Await).map(|sample| request.leaf(sample.leaf));
    let awaits: Vec<_> = awaits.flatten().collect();
    assert!(awaits.len() >= 2, "{awaits:?}");
    let is_named = |leaf: &&Leaf| matches!(leaf, Leaf::AwaitingUntil { span: Some(_), .. });
    assert!(!awaits.iter().any(is_named), "{awaits:?}");
}

/// Its drop enters the span once more.
#[test]
fn a_future_that_has_ended_awaits_nothing_until_it_is_dropped() {
    let setup = Setup::new("0ms");
    setup.run(|| {
        let (task, event) = (Arc::new(Task::default()), Event::default());
        let request = async { event.wait().await };
        let mut request = Box::pin(request.instrument(info_span!("request")).profiled());
        assert!(task.poll(request.as_mut()).is_pending());
        thread::sleep(30 * MS);
        event.happen();
        assert!(task.poll(request.as_mut()).is_ready());
        thread::sleep(30 * MS);
        drop(request);
    });
    let profile = &setup.profiles()[0];
    let leaves: Vec<_> =
        profile.of_kind(SampleKind::Await).map(|sample| profile.leaf(sample.leaf)).collect();
    assert_eq!(leaves, [Some(&Leaf::Awaiting)]);
}

/// As of a connection, which is woken in the span of the request that opened it.
#[test]
fn who_wakes_what_others_cannot_hold_is_not_named() {
    let setup = Setup::new("0ms");
    setup.run(|| {
        let (task, event) = (Arc::new(Task::default()), Event::default());
        let request = async { event.wait().await };
        let mut request = pin!(request.instrument(info_span!("request")).profiled());
        assert!(task.poll(request.as_mut()).is_pending());
        thread::sleep(30 * MS);
        info_span!("other").in_scope(|| event.happen());
        assert!(task.poll(request.as_mut()).is_ready());
    });
    let profiles = setup.profiles();
    let profile = profiles.iter().find(|profile| profile.spans[0].span == "request").unwrap();
    let mut leaves = profile.of_kind(SampleKind::Await).map(|sample| profile.leaf(sample.leaf));
    assert_eq!(leaves.next(), Some(Some(&Leaf::Awaiting)));
    assert!(leaves.all(|leaf| leaf == Some(&Leaf::Awaiting)), "{}", profile.headline);
}

/// Another thread sends the answer while the span is on the thread: it did not wait for the end of that.
#[test]
fn an_await_that_ends_while_the_thread_is_in_a_span_does_not_name_it() {
    let setup = Setup::new("0ms");
    setup.run(|| {
        with_subscriber(&setup, Builder::new_current_thread()).block_on(async {
            let (answer, answered) = oneshot::channel();
            let request = async { answered.await.unwrap() };
            let request = request.instrument(info_span!("request")).profiled();
            let request = tokio::spawn(request);
            tokio::task::yield_now().await;
            info_span!("blocker").in_scope(|| {
                thread::sleep(150 * MS);
                thread::spawn(|| answer.send(())).join().unwrap().unwrap();
                thread::sleep(100 * MS);
            });
            request.await.unwrap();
        });
    });
    let profiles = setup.profiles();
    let profile = profiles.iter().find(|profile| profile.title.contains("request")).unwrap();
    let mut awaits = profile.of_kind(SampleKind::Await).map(|sample| profile.leaf(sample.leaf));
    let is_sender =
        |leaf: Option<&Leaf>| matches!(leaf, Some(Leaf::AwaitingUntil { span: None, .. }));
    assert!(awaits.all(is_sender), "{}", profile.headline);
    assert!(!profile.headline.contains("until `blocker`"), "{}", profile.headline);
}

async fn slow_call(length: Duration) {
    tokio::time::sleep(length).await;
}

#[test]
fn a_timeout_shows_what_it_limits() {
    let setup = Setup::new("0ms");
    setup.run(|| {
        let runtime = Builder::new_current_thread().enable_time().build().unwrap();
        let limited = async { timeout(100 * SAMPLE, slow_call(3 * SAMPLE)).await };
        runtime.block_on(limited.instrument(info_span!("one_span")).profiled()).unwrap();
        let limited = async {
            let call = slow_call(3 * SAMPLE).instrument(info_span!("call"));
            timeout(100 * SAMPLE, call).await
        };
        runtime.block_on(limited.instrument(info_span!("span_inside")).profiled()).unwrap();
        // The timer is outside of all spans.
        let call = slow_call(3 * SAMPLE).instrument(info_span!("timer_outside"));
        runtime.block_on(async { timeout(100 * SAMPLE, call).profiled().await }).unwrap();
    });
    let profiles = setup.profiles();
    assert_eq!(profiles.len(), 3);
    for profile in &profiles {
        let all = sum(profile, SampleKind::Await, |_| true);
        let of_call = sum(profile, SampleKind::Await, |sample| is_in(profile, sample, "slow_call"));
        assert!(all >= SAMPLE && of_call == all, "{}: {of_call:?} of {all:?}", profile.title);
    }
}

/// The thread of a driver may enter the span of the request that waits for it, as that of `sqlx` with SQLite does.
#[test]
fn a_span_that_another_thread_is_in_does_not_await() {
    let setup = Setup::new("0ms");
    setup.run(|| {
        let runtime = Builder::new_current_thread().enable_time().build().unwrap();
        let span = info_span!("request");
        let (done, wait) = tokio::sync::oneshot::channel();
        let (polled, is_polled) = mpsc::channel();
        let (dispatch, worked_for) = (setup.dispatch.clone(), span.clone());
        let worker = std::thread::spawn(move || {
            tracing::dispatcher::with_default(&dispatch, || {
                is_polled.recv().unwrap();
                std::thread::sleep(2 * SAMPLE);
                worked_for.in_scope(|| std::thread::sleep(6 * SAMPLE));
                done.send(()).unwrap();
            });
        });
        let request = async {
            polled.send(()).unwrap();
            wait.await.unwrap();
        };
        runtime.block_on(request.instrument(span).profiled());
        worker.join().unwrap();
    });
    let times = *setup.kept()[0].spans[0].times();
    let awaited = sum(&setup.profiles()[0], SampleKind::Await, |_| true);
    assert!(!awaited.is_zero() && awaited <= times.idle() + SAMPLE, "{awaited:?} {times:?}");
    assert!(times.awaiting() + times.scheduling_delay() <= times.idle(), "{times:?}");
}

/// The clocks of the test and of the layer may differ by this, and so may the moments at which they are read.
const CLOCKS: Duration = MS;

#[test]
fn an_await_counts_except_while_another_task_is_in_the_span() {
    for (before, after) in [(8 * SAMPLE, SAMPLE), (SAMPLE, 8 * SAMPLE), (4 * SAMPLE, 4 * SAMPLE)] {
        for is_inside in [true, false] {
            let setup = Setup::new("0ms");
            let least = setup.run(|| {
                let (task, event, span) =
                    (Arc::new(Task::default()), Event::default(), info_span!("shared"));
                let wait = wait_in_vain(event.clone());
                let mut wait: Pin<Box<dyn Future<Output = ()>>> = match is_inside {
                    true => Box::pin(wait.instrument(span.clone()).profiled()),
                    false => Box::pin(wait.profiled().instrument(span.clone())),
                };
                assert!(task.poll(wait.as_mut()).is_pending());
                let start = Instant::now();
                thread::sleep(before);
                let enter = Instant::now();
                span.in_scope(|| thread::sleep(MS));
                let busy = enter.elapsed();
                thread::sleep(after);
                let pending = start.elapsed();
                event.happen();
                assert!(task.poll(wait.as_mut()).is_ready());
                pending - busy
            });
            let times = *setup.kept()[0].spans[0].times();
            let explained = times.awaiting() + times.scheduling_delay();
            assert!(explained + CLOCKS >= least, "{least:?} {times:?}");
            assert!(explained <= times.idle(), "{times:?}");
            let sampled = sum(&setup.profiles()[0], SampleKind::Await, |_| true);
            assert!(
                sampled + CLOCKS >= least && sampled <= times.idle() + CLOCKS,
                "{sampled:?} {times:?}"
            );
        }
    }
}

#[test]
fn what_a_dropped_future_awaited_counts_once() {
    let setup = Setup::new("0ms");
    let least = setup.run(|| {
        let (task, event) = (Arc::new(Task::default()), Event::default());
        let wait = wait_in_vain(event.clone()).instrument(info_span!("aborted"));
        let mut wait = Box::pin(wait.profiled());
        assert!(task.poll(wait.as_mut()).is_pending());
        let start = Instant::now();
        thread::sleep(8 * SAMPLE);
        let pending = start.elapsed();
        // Enters the span once more.
        drop(wait);
        pending
    });
    let times = *setup.kept()[0].spans[0].times();
    let sampled = sum(&setup.profiles()[0], SampleKind::Await, |_| true);
    assert!(sampled + CLOCKS >= least && sampled <= times.idle() + CLOCKS, "{sampled:?} {times:?}");
    // Of what is not observed, that is said still.
    let setup = Setup::new("0ms");
    setup.run(|| {
        let (task, event) = (Arc::new(Task::default()), Event::default());
        let outer = info_span!("outer").entered();
        let wait = wait_in_vain(event.clone()).instrument(info_span!("not_observed"));
        let mut wait = Box::pin(wait);
        assert!(task.poll(wait.as_mut()).is_pending());
        thread::sleep(8 * SAMPLE);
        drop(wait);
        drop(outer);
    });
    let is_said = |profile: &Profile| {
        let of_no_wrapper = |sample: &Sample| {
            let leaf = profile.leaf(sample.leaf);
            matches!(leaf, Some(Leaf::Unknown(why)) if why.contains("not `.profiled()`"))
        };
        profile.of_kind(SampleKind::Await).any(of_no_wrapper)
    };
    assert!(setup.profiles().iter().any(is_said), "{:?}", setup.kept());
}

#[test]
fn a_span_is_delayed_by_a_yield_after_one_inside_it_has_closed() {
    let setup = Setup::new("0ms");
    let least = setup.run(|| {
        let (task, event) = (Arc::new(Task::default()), Event::default());
        let both = async {
            let between = async { event.wait().instrument(info_span!("child")).await };
            between.instrument(info_span!("between")).await;
            // The waker is not cloned.
            yield_now().await;
        };
        let mut both = pin!(both.instrument(info_span!("parent")).profiled());
        assert!(task.poll(both.as_mut()).is_pending());
        event.happen();
        assert!(task.poll(both.as_mut()).is_pending());
        let start = Instant::now();
        thread::sleep(8 * SAMPLE);
        let delay = start.elapsed();
        assert!(task.poll(both.as_mut()).is_ready());
        delay
    });
    let kept = setup.kept();
    let parent = kept.iter().flat_map(|kept| &kept.spans).find(|span| span.name() == "parent");
    let times = *parent.expect("kept").times();
    let delay = times.scheduling_delay();
    assert!(delay + CLOCKS >= least && delay <= times.idle(), "{least:?} {times:?}");
    let profiles = setup.profiles();
    let sampled: Duration =
        profiles.iter().map(|profile| sum(profile, SampleKind::Delay, |_| true)).sum();
    assert!(sampled + CLOCKS >= least && sampled <= times.idle() + CLOCKS, "{sampled:?} {times:?}");
}

async fn back_off() {
    sleep(3 * SAMPLE).await;
}

#[test]
fn a_timer_after_a_timeout_that_elapsed_is_what_is_awaited() {
    let setup = Setup::new("0ms");
    setup.run(|| {
        let runtime = Builder::new_current_thread().enable_time().build().unwrap();
        let retry = async {
            assert!(timeout(2 * SAMPLE, slow_call(1_000 * SAMPLE)).await.is_err());
            back_off().await;
        };
        runtime.block_on(retry.instrument(info_span!("retry")).profiled());
    });
    let profile = &setup.profiles()[0];
    let of = |name| sum(profile, SampleKind::Await, |sample| is_in(profile, sample, name));
    let (call, pause) = (of("slow_call"), of("back_off"));
    assert!(call >= SAMPLE && pause >= 2 * SAMPLE, "{call:?} {pause:?}");
    assert_eq!(call + pause, sum(profile, SampleKind::Await, |_| true));
}

#[test]
fn a_span_whose_parent_is_not_entered_awaits_with_those_inside_it() {
    let setup = Setup::new("0ms");
    let pending = setup.run(|| {
        let (task, event) = (Arc::new(Task::default()), Event::default());
        let request = info_span!("request");
        let job = info_span!(parent: &request, "job");
        let wait = wait_in_vain(event.clone());
        let query = async { wait.instrument(info_span!("query")).await };
        let mut query: Pin<Box<dyn Future<Output = ()>>> =
            Box::pin(query.instrument(job).profiled());
        assert!(task.poll(query.as_mut()).is_pending());
        let start = Instant::now();
        thread::sleep(3 * SAMPLE);
        let pending = start.elapsed();
        event.happen();
        assert!(task.poll(query.as_mut()).is_ready());
        pending
    });
    let kept = setup.kept();
    let job = kept.iter().flat_map(|kept| &kept.spans).find(|span| span.name() == "job").unwrap();
    let times = job.times();
    let is_whole = times.awaiting() + CLOCKS >= pending;
    assert!(is_whole && times.awaiting() <= times.idle(), "{pending:?} {times:?}");
}

/// After some time, in no span.
async fn answers_late(answer: oneshot::Sender<()>) {
    sleep(100 * MS).await;
    answer.send(()).unwrap();
}

#[test]
fn the_function_that_sends_what_is_awaited_is_named_also_if_it_is_in_no_span() {
    let setup = Setup::new("0ms");
    setup.run(|| {
        with_subscriber(&setup, Builder::new_current_thread()).block_on(async {
            let (answer, answered) = oneshot::channel();
            tokio::spawn(answers_late(answer));
            let request = async { answered.await.unwrap() };
            request.instrument(info_span!("request")).profiled().await;
            // What ends is woken by the runtime.
            let request = async { tokio::spawn(sleep(100 * MS)).await.unwrap() };
            request.instrument(info_span!("joins")).profiled().await;
        });
    });
    let profiles = setup.profiles();
    let of = |span: &str| &profiles.iter().find(|it| it.spans[0].span == span).unwrap().headline;
    let said = of("request");
    let until = ", until awaits::times::answers_late (awaits/times.rs:";
    assert!(said.contains(until) && said.ends_with(") woke it"), "{said}");
    assert!(!of("joins").contains("until"), "{}", of("joins"));
}

/// As of a database that runs on a thread of its own.
async fn asks(span: tracing::Span, length: Duration) {
    let (answer, answered) = oneshot::channel();
    let (awaits, is_awaited) = mpsc::channel();
    let run = move || {
        is_awaited.recv().unwrap();
        let _entered = span.entered();
        let start = Instant::now();
        while start.elapsed() < length {}
        answer.send(()).unwrap();
    };
    let thread = thread::spawn(run);
    // Polled once the future around is pending.
    tokio::spawn(async move { awaits.send(()).unwrap() });
    answered.await.unwrap();
    thread.join().unwrap();
}

#[test]
fn what_awaits_a_thread_in_its_span_is_known_although_that_is_not_idle() {
    let setup = Setup::new("0ms");
    setup.run(|| {
        with_subscriber(&setup, Builder::new_current_thread()).block_on(async {
            let span = info_span!("request");
            let request = asks(span.clone(), 300 * MS);
            request.instrument(span).profiled().await;
        });
    });
    let kept = setup.kept();
    let (place, time) = kept[0].awaits.mostly_in.as_ref().unwrap();
    assert!(place.starts_with("awaits::times::asks (awaits/times.rs:"), "{place}");
    let times = kept[0].spans[0].times();
    assert!(*time > 250 * MS && *time <= times.wall(), "{time:?}");
    // Until the thread was in the span, however late.
    assert!(kept[0].awaits.total <= times.idle() + MS, "{:?}, {:?}", kept[0].awaits, times.idle());
}

async fn fetches() {
    sleep(MS).await;
}

#[test]
fn an_error_has_what_its_future_awaited_last() {
    let setup = Setup::new("error");
    setup.run(|| {
        with_subscriber(&setup, Builder::new_current_thread()).block_on(async {
            let fails = async {
                fetches().await;
                tracing::error!("no such item");
            };
            fails.instrument(info_span!("fails")).profiled().await;
            let beside = info_span!("beside");
            let other = async {
                fetches().await;
                beside.in_scope(|| tracing::error!("no such item"));
            };
            other.instrument(info_span!("other")).profiled().await;
        });
    });
    let kept = setup.kept();
    let of = |span: &str| kept.iter().find(|kept| kept.spans[0].name() == span).unwrap();
    let place = of("fails").awaits.before_error.as_deref().unwrap();
    assert!(place.starts_with("awaits::times::fetches (awaits/times.rs:"), "{place}");
    assert_eq!(of("beside").awaits.before_error, None);
}

fn converts(length: Duration) {
    let start = Instant::now();
    while start.elapsed() < length {}
}

#[test]
fn who_had_the_thread_of_a_pool_is_named_with_its_function() {
    is_named_in_a_pool(converts, "awaits::times::converts (awaits/times.rs:");
}

#[inline(never)]
fn prints(length: Duration) {
    thread::sleep(length);
}

#[test]
fn who_blocked_the_thread_of_a_pool_is_named_with_its_function() {
    is_named_in_a_pool(prints, "awaits::times::prints (awaits/times.rs:");
}

/// Of a pool with one thread.
fn is_named_in_a_pool(work: fn(Duration), place: &str) {
    // The thread may lose its CPU between both.
    let is_named = (0..8).any(|_| {
        let setup = Setup::new("0ms");
        let mut builder = Builder::new_current_thread();
        builder.max_blocking_threads(1);
        setup.run(|| {
            with_subscriber(&setup, builder).block_on(async {
                let span = info_span!("convert");
                let busy = tokio::task::spawn_blocking(move || span.in_scope(|| work(300 * MS)));
                let request = async { tokio::task::spawn_blocking(|| ()).await.unwrap() };
                request.instrument(info_span!("request")).profiled().await;
                busy.await.unwrap();
            });
        });
        let profiles = setup.profiles();
        let request = profiles.iter().find(|it| it.spans[0].span == "request").unwrap();
        let until = format!(", until `convert` left the thread after {place}");
        request.headline.contains(&until)
    });
    assert!(is_named, "{place}");
}
