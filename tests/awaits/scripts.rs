//! Random scripts of what can happen to a task, against bounds of its own times: the wrapper is observed from outside and
//! from inside, so what it notes lies between, however busy the machine is.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, mpsc};
use std::task::Poll;
use std::thread;
use std::time::{Duration, Instant};

use pin_project_lite::pin_project;
use tracing::dispatcher::with_default;
use tracing::{Dispatch, Instrument, Span, info_span};
use tracing_profiling::ProfiledExt;

use crate::leaf::{Event, Task, yield_now};
use crate::support::Setup;

const THREADS: usize = 4;
const TASKS: usize = 8;

/// What the task does until it is polled again.
#[derive(Clone, Copy, Debug)]
struct Step {
    leaf: Leaf,
    /// It is in a span inside its span.
    is_in_child: bool,
    /// It is polled before it is woken, and remains pending.
    is_polled_early: bool,
    /// For how long another task is in its span: before it is woken, or after. Not both: how that time is divided is not
    /// known then. A span around the wrapper is left a little later than the wrapper, so others are in it only before.
    others: Option<(bool, Duration)>,
    await_for: Duration,
    delay_for: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Leaf {
    Event,
    /// Wakes itself, without a clone of the waker.
    Yield,
}

#[derive(Clone, Debug)]
struct Script {
    steps: Vec<Step>,
    /// It is dropped while it is pending in the last step.
    is_aborted: bool,
    /// The span is around the wrapper, not inside it.
    is_around: bool,
}

/// A linear congruential generator.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }

    fn one_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    fn time(&mut self) -> Duration {
        Duration::from_micros([0, 50, 300, 1_500, 4_000][self.below(5) as usize])
    }

    fn step(&mut self, is_around: bool) -> Step {
        Step {
            leaf: if self.one_in(4) { Leaf::Yield } else { Leaf::Event },
            is_in_child: self.one_in(2),
            is_polled_early: self.one_in(5),
            others: self.one_in(3).then(|| (is_around || self.one_in(2), self.time())),
            await_for: self.time(),
            delay_for: self.time(),
        }
    }

    fn script(&mut self) -> Script {
        let is_around = self.one_in(3);
        let steps = (0..1 + self.below(4)).map(|_| self.step(is_around)).collect();
        Script { steps, is_aborted: self.one_in(4), is_around }
    }
}

/// When something happened: at some time between two.
#[derive(Clone, Copy, Debug)]
struct When(Instant, Instant);

impl When {
    fn of<T>(action: impl FnOnce() -> T) -> (Self, T) {
        let start = Instant::now();
        let result = action();
        (Self(start, Instant::now()), result)
    }
}

/// Bounds of a time.
#[derive(Clone, Copy, Debug, Default)]
struct Bounds {
    least: Duration,
    most: Duration,
}

impl Bounds {
    fn add(&mut self, from: When, to: When) {
        self.least += to.0.saturating_duration_since(from.1);
        self.most += to.1.saturating_duration_since(from.0);
    }

    /// By how much a time misses them, apart from the difference of the clocks.
    fn miss(self, time: Duration) -> Duration {
        const CLOCKS: Duration = Duration::from_micros(20);
        let slack = CLOCKS + time / 1_000;
        let miss = self.least.saturating_sub(time).max(time.saturating_sub(self.most));
        miss.saturating_sub(slack)
    }
}

/// When the future in the span was last polled or dropped, and when that ended.
type Inside = Arc<Mutex<Option<When>>>;

pin_project! {
    /// Notes when the future in it is polled, and when it is dropped.
    struct Noting<F> {
        #[pin]
        inner: F,
        inside: Inside,
    }

    impl<F> PinnedDrop for Noting<F> {
        fn drop(this: Pin<&mut Self>) {
            let (now, _) = When::of(|| ());
            *this.inside.lock().unwrap() = Some(now);
        }
    }
}

impl<F: Future<Output = ()>> Future for Noting<F> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut std::task::Context<'_>) -> Poll<()> {
        let this = self.project();
        let (when, polled) = When::of(|| this.inner.poll(context));
        *this.inside.lock().unwrap() = Some(when);
        polled
    }
}

type Job = Box<dyn FnOnce() + Send>;

/// Threads on which tasks are polled.
struct Threads(Vec<Mutex<mpsc::Sender<Job>>>);

impl Threads {
    fn new(dispatch: &Dispatch) -> Self {
        Self(
            (0..THREADS)
                .map(|_| {
                    let (sender, jobs) = mpsc::channel::<Job>();
                    let dispatch = dispatch.clone();
                    thread::spawn(move || {
                        with_default(&dispatch, || jobs.iter().for_each(|job| job()))
                    });
                    Mutex::new(sender)
                })
                .collect(),
        )
    }

    fn run<T: Send + 'static>(&self, thread: u64, job: impl FnOnce() -> T + Send + 'static) -> T {
        let (sender, done) = mpsc::channel();
        let job = Box::new(move || _ = sender.send(job()));
        self.0[thread as usize % THREADS].lock().unwrap().send(job).unwrap();
        done.recv().expect("no panic")
    }
}

async fn play(steps: Vec<Step>, event: Event) {
    for step in steps {
        let wait = async {
            match step.leaf {
                Leaf::Event => event.wait().await,
                Leaf::Yield => yield_now().await,
            }
        };
        match step.is_in_child {
            true => wait.instrument(info_span!("child")).await,
            false => wait.await,
        }
    }
}

/// A task that plays a script, and its span.
struct Player<'a> {
    threads: &'a Threads,
    random: Random,
    span: Span,
    task: Arc<Task>,
    event: Event,
    inside: Inside,
    future: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    wrapped: When,
}

impl<'a> Player<'a> {
    fn new(script: &Script, threads: &'a Threads, random: Random, span: Span) -> Self {
        let (event, inside) = (Event::default(), Inside::default());
        let inner = play(script.steps.clone(), event.clone());
        let played = Noting { inner, inside: Arc::clone(&inside) };
        let wrap = || -> Pin<Box<dyn Future<Output = ()> + Send>> {
            match script.is_around {
                true => Box::pin(played.profiled().instrument(span.clone())),
                false => Box::pin(played.instrument(span.clone()).profiled()),
            }
        };
        let (wrapped, future) = When::of(wrap);
        let (task, future) = (Arc::default(), Some(future));
        Self { threads, random, span, task, event, inside, future, wrapped }
    }

    /// Polls the task on some thread, or drops it. Returns when the wrapper was entered, and when it was left.
    fn enter(&mut self, is_dropped: bool) -> [When; 2] {
        let (mut future, task) = (self.future.take().expect("not done"), Arc::clone(&self.task));
        let thread = self.random.below(THREADS as u64);
        let (outside, rest) = self.threads.run(thread, move || {
            When::of(|| (!is_dropped && task.poll(future.as_mut()).is_pending()).then_some(future))
        });
        self.future = rest;
        let inside = self.inside.lock().unwrap().take().expect("polled or dropped");
        [When(outside.0, inside.0), When(inside.1, outside.1)]
    }

    /// Another task is in the span on some thread. Returns when it enters, and when it leaves.
    fn other(&mut self, length: Duration) -> [When; 2] {
        let span = self.span.clone();
        self.threads.run(self.random.below(THREADS as u64), move || {
            let (outside, inside) =
                When::of(|| span.in_scope(|| When::of(|| thread::sleep(length)).0));
            [When(outside.0, inside.0), When(inside.1, outside.1)]
        })
    }

    /// Returns the bounds of what the span awaits, and of its scheduling delay.
    fn play(mut self, script: &Script) -> [Bounds; 2] {
        let [mut awaited, mut delayed] = [Bounds::default(); 2];
        let [first, mut since] = self.enter(false);
        let mut before = Bounds::default();
        before.add(self.wrapped, first);
        // Shorter ones do not count; clocks differ a little.
        if before.most >= Duration::from_millis(9) {
            delayed.most += before.most;
        }
        if before.least >= Duration::from_millis(11) {
            delayed.least += before.least;
        }
        for (number, step) in script.steps.iter().enumerate() {
            let mut is_dropped = script.is_aborted && number + 1 == script.steps.len();
            let mut idle = match step.leaf {
                Leaf::Event => &mut awaited,
                Leaf::Yield => &mut delayed,
            };
            if let Some((true, length)) = step.others {
                let [enters, leaves] = self.other(length);
                idle.add(since, enters);
                since = leaves;
            }
            thread::sleep(step.await_for);
            if step.is_polled_early && step.leaf == Leaf::Event {
                let [enters, leaves] = self.enter(false);
                idle.add(since, enters);
                since = leaves;
                thread::sleep(step.await_for);
            }
            if step.leaf == Leaf::Event && !is_dropped {
                let event = &self.event;
                let (woken, ()) = When::of(|| event.happen());
                idle.add(since, woken);
                (idle, since) = (&mut delayed, woken);
            }
            if let Some((false, length)) = step.others {
                let [enters, leaves] = self.other(length);
                idle.add(since, enters);
                since = leaves;
            }
            thread::sleep(step.delay_for);
            let [enters, leaves] = self.enter(std::mem::take(&mut is_dropped));
            idle.add(since, enters);
            since = leaves;
        }
        assert!(self.future.is_none(), "done or dropped");
        [awaited, delayed]
    }
}

/// Awaits and scheduling delays of tasks that migrate between threads, wake themselves, are polled early, are dropped, have
/// child spans that close, and whose spans other tasks enter in between. `PROFILING_TEST_SCRIPTS` is their number.
#[test]
fn awaits_and_delays_of_random_scripts_are_within_their_bounds() {
    let number = std::env::var("PROFILING_TEST_SCRIPTS").map_or(160, |text| text.parse().unwrap());
    let setup = Setup::of_rules("1h,[task]=0ms|hung=off", |builder| {
        builder.span_fields(["number"]).profiles_per_minute(1_000_000)
    });
    let threads = Threads::new(&setup.dispatch);
    let expected = Mutex::new(Vec::new());
    setup.run(|| {
        let dispatch = &setup.dispatch;
        thread::scope(|scope| {
            for first in 0..TASKS {
                let (threads, expected) = (&threads, &expected);
                scope.spawn(move || {
                    for number in (first..number).step_by(TASKS) {
                        let mut random = Random(number as u64);
                        let script = random.script();
                        let span = with_default(dispatch, || info_span!("task", number));
                        let bounds = Player::new(&script, threads, random, span).play(&script);
                        expected.lock().unwrap().push((number, script, bounds));
                    }
                });
            }
        });
    });
    let kept = setup.kept();
    let spans: Vec<_> = kept.iter().flat_map(|kept| &kept.spans).collect();
    let expected = expected.into_inner().unwrap();
    assert_eq!(spans.len(), number, "{:#?}", setup.handle.stats());
    let (mut widths, mut wrong) = (Vec::new(), Vec::new());
    for (number, script, bounds) in &expected {
        let is_it = |text: &str| text == number.to_string();
        let span = spans.iter().find(|span| span.fields().any(|(_, text)| is_it(text)));
        let times = *span.expect("kept").times();
        for (time, bounds) in [times.awaiting(), times.scheduling_delay()].into_iter().zip(bounds) {
            if !bounds.miss(time).is_zero() {
                wrong.push(format!("{number}: {time:?} is not in {bounds:?}: {script:?}"));
            }
            widths.push(bounds.most - bounds.least);
        }
    }
    widths.sort_unstable();
    assert!(wrong.is_empty(), "{} of {number}\n{}", wrong.len(), wrong.join("\n"));
    println!("half of the bounds are within {:?}", widths[widths.len() / 2]);
}
