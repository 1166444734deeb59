//! The delay before the first poll of a spawned future, and before a closure begins on a pool of threads.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use tokio::runtime::Builder;
use tracing::{Instrument, info_span};
use tracing_profiling::profile::{Leaf, Profile, SampleKind};
use tracing_profiling::{ProfiledExt, TimeBreakdown, queued};

use crate::leaf::{Event, Task};
use crate::support::Setup;
use crate::{MS, with_subscriber};

const NAP: Duration = Duration::from_millis(200);

type Job = Pin<Box<dyn Future<Output = ()> + Send>>;

fn times_of(setup: &Setup, name: &str) -> TimeBreakdown {
    let kept = setup.kept();
    let span = kept.iter().flat_map(|kept| &kept.spans).find(|span| span.name() == name);
    *span.unwrap_or_else(|| panic!("{name} is kept: {kept:?}")).times()
}

/// The delays that the profile with that span shows, each with its leaf and whether it is in a span of that name.
fn delays(setup: &Setup, name: &str) -> Vec<(Leaf, String, Duration)> {
    let profiles = setup.profiles();
    let is_of = |profile: &&Profile| profile.spans.iter().any(|span| span.name() == name);
    let profile = profiles.iter().find(is_of).expect("a profile");
    let mut delays = Vec::new();
    for sample in profile.of_kind(SampleKind::Delay) {
        let leaf = profile.leaf(sample.leaf).unwrap().clone();
        let span = profile.span_path(sample.link).last().copied().unwrap_or_default().to_owned();
        let weight = sample.points.iter().map(|point| point.weight).sum();
        delays.push((leaf, span, Duration::from_nanos(weight)));
    }
    delays
}

/// Spawns a job, and blocks the only thread in a span for a nap before it is polled.
fn spawn_behind_a_blocker(job: fn() -> Job) -> Setup {
    let setup = Setup::new("0ms");
    setup.run(|| {
        with_subscriber(&setup, Builder::new_current_thread()).block_on(async {
            let job = info_span!("blocker").in_scope(|| {
                let job = tokio::spawn(job());
                thread::sleep(NAP);
                job
            });
            job.await.unwrap();
        });
    });
    setup
}

fn assert_delayed(setup: &Setup, name: &str) {
    let times = times_of(setup, name);
    let delay = times.scheduling_delay();
    assert!(delay >= NAP && delay <= times.idle(), "{name}: {times:?}");
}

#[test]
fn the_time_from_the_spawn_to_the_first_poll_is_a_scheduling_delay() {
    let jobs: [fn() -> Job; 3] = [
        || {
            Box::pin(
                async { tokio::time::sleep(MS).await }
                    .instrument(info_span!(parent: None, "job"))
                    .profiled(),
            )
        },
        || {
            Box::pin(
                async { tokio::time::sleep(MS).await }
                    .profiled()
                    .instrument(info_span!(parent: None, "job")),
            )
        },
        // Ready at once.
        || Box::pin(async {}.instrument(info_span!(parent: None, "job")).profiled()),
    ];
    for job in jobs {
        let setup = spawn_behind_a_blocker(job);
        assert_delayed(&setup, "job");
        let shown = delays(&setup, "job");
        let first = shown.iter().find(|(.., delay)| *delay >= NAP).expect("shown");
        assert_eq!(first.0, Leaf::Delayed { behind: Some("blocker".to_owned()) });
        assert_eq!(first.1, "job");
    }
}

#[test]
fn of_spans_in_each_other_the_innermost_shows_the_delay_and_each_has_it() {
    let setup = spawn_behind_a_blocker(|| {
        let outer = info_span!(parent: None, "outer");
        let inner = info_span!(parent: &outer, "inner");
        let job = async {}.instrument(inner).instrument(outer);
        Box::pin(job.profiled())
    });
    for name in ["outer", "inner"] {
        assert_delayed(&setup, name);
    }
    let shown = delays(&setup, "outer");
    let spans: Vec<_> = shown.iter().map(|(_, span, _)| span.as_str()).collect();
    assert_eq!(spans, ["inner"]);
}

#[test]
fn what_its_own_task_does_before_the_first_poll_is_no_delay() {
    for is_wrapped in [false, true] {
        let setup = Setup::new("0ms");
        setup.run(|| {
            let (task, gate) = (Arc::new(Task::default()), Event::default());
            let request = async {
                let later = async {}.instrument(info_span!("later")).profiled();
                gate.wait().await;
                later.await;
            };
            let request = request.instrument(info_span!("request"));
            let mut request: Pin<Box<dyn Future<Output = ()>>> = match is_wrapped {
                true => Box::pin(request.profiled()),
                false => Box::pin(request),
            };
            assert!(task.poll(request.as_mut()).is_pending());
            thread::sleep(NAP);
            gate.happen();
            assert!(task.poll(request.as_mut()).is_ready());
        });
        let times = times_of(&setup, "later");
        assert!(times.idle() >= NAP && times.scheduling_delay().is_zero(), "{times:?}");
    }
}

#[test]
fn a_span_is_not_delayed_before_it_is_opened_or_after_the_first_poll() {
    let setup = Setup::new("0ms");
    setup.run(|| {
        let (task, event) = (Arc::new(Task::default()), Event::default());
        let job = async {
            let early = info_span!("early");
            let late = info_span!("late");
            early.in_scope(|| ());
            thread::sleep(NAP);
            // Idle since the first poll.
            late.in_scope(|| ());
            event.wait().await;
        };
        let mut job = pin!(job.profiled());
        thread::sleep(NAP);
        assert!(task.poll(job.as_mut()).is_pending());
    });
    for name in ["early", "late"] {
        let times = times_of(&setup, name);
        assert!(times.scheduling_delay().is_zero(), "{name}: {times:?}");
    }
}

#[test]
fn the_time_in_the_queue_of_blocking_threads_is_a_scheduling_delay() {
    for blocker in ["", "blocker"] {
        let setup = Setup::new("0ms");
        setup.run(|| {
            let mut builder = Builder::new_multi_thread();
            builder.worker_threads(1).max_blocking_threads(1);
            let runtime = with_subscriber(&setup, builder);
            let (go, gone) = mpsc::channel();
            let block = move || {
                gone.recv().unwrap();
                thread::sleep(NAP);
            };
            let first = match blocker {
                "" => runtime.spawn_blocking(block),
                _ => runtime.spawn_blocking(queued(info_span!("blocker"), block)),
            };
            let resize = runtime.spawn_blocking(queued(info_span!("resize"), || 7));
            go.send(()).unwrap();
            assert_eq!(runtime.block_on(resize).unwrap(), 7);
            runtime.block_on(first).unwrap();
        });
        let times = times_of(&setup, "resize");
        let delay = times.scheduling_delay();
        assert!(delay >= NAP && delay <= times.idle(), "{times:?}");
        let shown = delays(&setup, "resize");
        let leaf = match blocker {
            "" => Leaf::Unknown("scheduling delay before it began"),
            _ => Leaf::Delayed { behind: Some(blocker.to_owned()) },
        };
        assert_eq!((shown.len(), &shown[0].0), (1, &leaf), "{shown:?}");
        assert!(shown[0].2.abs_diff(delay) <= MS, "{shown:?} {delay:?}");
    }
}

#[test]
fn a_closure_is_not_delayed_on_the_thread_and_in_the_span_that_made_it() {
    let setup = Setup::new("0ms");
    setup.run(|| {
        info_span!("request").in_scope(|| {
            let run = queued(info_span!("here"), || ());
            thread::sleep(NAP);
            run();
        });
    });
    let times = times_of(&setup, "here");
    assert!(times.idle() >= NAP && times.scheduling_delay().is_zero(), "{times:?}");
}
