//! The promises that executors and futures make to each other hold through the wrapper.

use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Poll, Wake, Waker};

use futures::StreamExt;
use futures::channel::{mpsc, oneshot};
use futures::stream::FuturesUnordered;
use futures::task::LocalSpawnExt;
use tokio::runtime::Builder;
use tracing::{Instrument, info_span};
use tracing_profiling::ProfiledExt;

use crate::leaf::{Event, Task, poll_once};
use crate::support::Setup;
use crate::with_subscriber;

/// Its name, and what runs a job in its way.
type Executor = (&'static str, fn(&Setup, Job));

type Job = Pin<Box<dyn Future<Output = ()> + Send>>;

/// All executors, each of which runs the job to its end as a task of its own, with its threads in the subscriber.
const EXECUTORS: &[Executor] = &[
    ("tokio current_thread", |setup, job| {
        let runtime = with_subscriber(setup, Builder::new_current_thread());
        runtime.block_on(async { tokio::spawn(job).await.unwrap() });
    }),
    ("tokio multi_thread", |setup, job| {
        let runtime = with_subscriber(setup, Builder::new_multi_thread());
        runtime.block_on(async { tokio::spawn(job).await.unwrap() });
    }),
    ("tokio LocalSet", |setup, job| {
        let runtime = with_subscriber(setup, Builder::new_current_thread());
        let local = tokio::task::LocalSet::new();
        local.block_on(&runtime, async { tokio::task::spawn_local(job).await.unwrap() });
    }),
    ("smol", |_, job| {
        let executor = smol::Executor::new();
        smol::block_on(executor.run(executor.spawn(job)));
    }),
    ("futures block_on", |_, job| futures::executor::block_on(job)),
    ("futures LocalPool", |_, job| {
        let mut pool = futures::executor::LocalPool::new();
        pool.spawner().spawn_local(job).unwrap();
        pool.run();
    }),
    ("another waker for each poll, without being woken", |_, mut job| {
        while Arc::new(Task::default()).poll(job.as_mut()).is_pending() {
            std::thread::yield_now();
        }
    }),
];

/// Runs the same job on all executors.
fn on_each<F: Future<Output = ()> + Send + 'static>(job: impl Fn() -> F) -> Setup {
    let setup = Setup::new("0ms");
    setup.run(|| {
        for (name, run) in EXECUTORS {
            println!("{name}");
            run(&setup, Box::pin(job()));
        }
    });
    setup
}

#[test]
fn all_values_arrive() {
    let values = 500;
    let setup = on_each(|| {
        let (sender, mut receiver) = mpsc::channel(1);
        let send = move || {
            let mut sender = sender;
            for value in 0..values {
                while sender.try_send(value).is_err_and(|error| error.is_full()) {
                    std::thread::yield_now();
                }
            }
        };
        async move {
            let thread = std::thread::spawn(send);
            let receive = async {
                for value in 0..values {
                    assert_eq!(receiver.next().await, Some(value));
                }
                assert_eq!(receiver.next().await, None);
            };
            receive.instrument(info_span!("receive")).profiled().await;
            thread.join().unwrap();
        }
    });
    let kept = setup.kept();
    assert_eq!(kept.len(), EXECUTORS.len());
    for kept in kept {
        let times = kept.spans[0].times();
        assert!(times.awaiting() + times.scheduling_delay() <= times.idle(), "{times:?}");
    }
}

#[test]
fn the_first_waker_of_a_poll_equals_that_of_the_poll_and_all_wake() {
    on_each(|| {
        let probe = std::future::poll_fn(|context: &mut Context<'_>| {
            let (one, another) = (context.waker().clone(), context.waker().clone());
            assert!(one.will_wake(context.waker()));
            let thread = std::thread::spawn(move || {
                one.wake_by_ref();
                assert!(another.will_wake(&another.clone()));
                another.wake();
            });
            thread.join().unwrap();
            Poll::Ready(())
        });
        probe.instrument(info_span!("probe")).profiled()
    });
}

#[test]
fn a_future_that_is_dropped_while_its_waker_is_held_is_freed_and_its_waker_harmless() {
    on_each(|| async {
        let (event, alive) = (Event::default(), Arc::new(()));
        let inside = Arc::clone(&alive);
        let (shared, ended) = (event.clone(), Event::default());
        let wait = async move {
            shared.wait().await;
            drop(inside);
        };
        assert!(poll_once(wait.instrument(info_span!("dropped")).profiled()).await.is_none());
        assert_eq!(Arc::strong_count(&alive), 1);
        let waker = event.waker().unwrap();
        waker.wake_by_ref();
        waker.wake();

        // The same after the end of a future.
        let shared = ended.clone();
        let wait = async move { shared.wait().await }.instrument(info_span!("ended")).profiled();
        let mut wait = std::pin::pin!(wait);
        assert!(poll_once(wait.as_mut()).await.is_none());
        let waker = ended.waker().unwrap();
        ended.happen();
        wait.as_mut().await;
        waker.wake_by_ref();
        std::thread::spawn(move || waker.wake()).join().unwrap();
    });
}

#[test]
fn wakers_outlive_their_executor() {
    thread_local! {
        static WAKERS: RefCell<Vec<Waker>> = const { RefCell::new(Vec::new()) };
    }
    let wakers = Arc::new(Mutex::new(Vec::<Waker>::new()));
    let all = Arc::clone(&wakers);
    on_each(move || {
        let (event, all) = (Event::default(), Arc::clone(&all));
        async move {
            let wait = event.wait().instrument(info_span!("left")).profiled();
            assert!(poll_once(wait).await.is_none());
            all.lock().unwrap().extend(event.waker());
        }
    });
    let wakers = std::mem::take(&mut *wakers.lock().unwrap());
    assert_eq!(wakers.len(), EXECUTORS.len());
    for waker in &wakers {
        waker.wake_by_ref();
        drop(waker.clone());
    }
    // Thread-local destructors drop these, when those of the layer have run.
    WAKERS.set(wakers);
}

/// A task that only its wakers keep, as in most executors.
struct OfWakers(Mutex<Job>);

impl Wake for OfWakers {
    fn wake(self: Arc<Self>) {}
}

#[test]
fn a_task_that_only_wakers_keep_is_freed_with_them() {
    let setup = Setup::new("0ms");
    setup.run(|| {
        let (event, alive) = (Event::default(), Arc::new(()));
        let (shared, inside) = (event.clone(), Arc::clone(&alive));
        let wait = async move {
            shared.wait().await;
            drop(inside);
        };
        let job = wait.instrument(info_span!("kept by wakers")).profiled();
        let task = Arc::new(OfWakers(Mutex::new(Box::pin(job))));
        for _ in 0..3 {
            // Each poll has another waker of the same task.
            let waker = Waker::from(Arc::clone(&task));
            let mut context = Context::from_waker(&waker);
            assert!(task.0.lock().unwrap().as_mut().poll(&mut context).is_pending());
        }
        let freed = Arc::downgrade(&task);
        drop(task);
        assert_eq!(Weak::strong_count(&freed), 1, "the waker of the leaf");
        drop(event.waker());
        assert_eq!(Weak::strong_count(&freed), 0);
        assert_eq!(Arc::strong_count(&alive), 1);
    });
}

#[test]
fn wrappers_in_wrappers_receive_their_values() {
    on_each(|| async {
        let (senders, receivers): (Vec<_>, Vec<_>) = (0..20).map(|_| oneshot::channel()).unzip();
        let send = move || {
            for (value, sender) in senders.into_iter().enumerate() {
                sender.send(value).unwrap();
            }
        };
        let thread = std::thread::spawn(send);
        let wait = |receiver: oneshot::Receiver<usize>| {
            let wait = async move { receiver.await.unwrap() }.profiled();
            wait.instrument(info_span!("inner")).profiled()
        };
        let all =
            receivers.into_iter().map(wait).collect::<FuturesUnordered<_>>().profiled_stream();
        let sum = all.fold(0, |sum, value| async move { sum + value });
        let sum = sum.instrument(info_span!("outer")).profiled().await;
        assert_eq!(sum, (0..20).sum::<usize>());
        thread.join().unwrap();
    });
}
