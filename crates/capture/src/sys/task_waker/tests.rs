//! What wakers promise to executors and leaf futures. Miri runs these tests as well.
#![allow(clippy::waker_clone_wake, reason = "what wakers do is tested")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicBool;
use std::task::Wake;
use std::thread;

use proptest::prelude::*;

use super::*;

/// Counts what is reported to it. The second field is dropped with it.
#[derive(Debug, Default)]
struct Seen {
    clones: AtomicUsize,
    others: AtomicUsize,
    wakes: AtomicUsize,
    own_wakes: AtomicUsize,
    /// The tag of the next clone, if it is not 0.
    next_tag: AtomicUsize,
    woken: AtomicUsize,
    dropped: AtomicUsize,
    _alive: Arc<()>,
}

static VTABLE: RawWakerVTable =
    RawWakerVTable::new(clone::<Seen>, wake::<Seen>, wake_by_ref::<Seen>, drop_waker::<Seen>);

impl WakerObserver for Seen {
    fn vtable() -> &'static RawWakerVTable {
        &VTABLE
    }

    fn on_clone(&self, _: Option<&LiveStack>, is_only: bool) -> Option<usize> {
        self.clones.fetch_add(1, Ordering::Relaxed);
        self.others.fetch_add(usize::from(!is_only), Ordering::Relaxed);
        Some(self.next_tag.load(Ordering::Relaxed)).filter(|tag| *tag > 0)
    }

    fn on_drop(&self, tag: usize) {
        self.dropped.store(tag, Ordering::Relaxed);
    }

    fn on_wake(&self, tag: usize, _: impl FnOnce() -> Option<LiveStack>) {
        self.wakes.fetch_add(1, Ordering::Relaxed);
        self.woken.store(tag, Ordering::Relaxed);
    }

    fn on_own_wake(&self, _: Option<&LiveStack>, is_only: bool) {
        self.wakes.fetch_add(1, Ordering::Relaxed);
        self.own_wakes.fetch_add(1, Ordering::Relaxed);
        self.others.fetch_add(usize::from(!is_only), Ordering::Relaxed);
    }
}

/// The task of an executor. Its wakers count as references to it.
#[derive(Debug, Default)]
struct Task {
    wakes: AtomicUsize,
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        self.wakes.fetch_add(1, Ordering::Relaxed);
    }
}

impl Task {
    fn wakes(&self) -> usize {
        self.wakes.load(Ordering::Relaxed)
    }

    /// Polls with a waker of its own.
    fn poll<R>(
        self: &Arc<Self>,
        future: &Arc<TaskWaker<Seen>>,
        poll: impl FnOnce(&Waker) -> R,
    ) -> R {
        self.poll_tagged(future, 0, poll)
    }

    fn poll_tagged<R>(
        self: &Arc<Self>,
        future: &Arc<TaskWaker<Seen>>,
        tag: usize,
        poll: impl FnOnce(&Waker) -> R,
    ) -> R {
        let waker = Waker::from(Arc::clone(self));
        future.poll(tag, &Context::from_waker(&waker), |context| poll(context.waker()))
    }
}

fn setup() -> (Arc<TaskWaker<Seen>>, Arc<Task>) {
    (TaskWaker::new(Seen::default()), Arc::default())
}

#[test]
fn wakes_inside_the_poll_are_reported_as_such() {
    let (future, task) = setup();
    let own_wakes = || future.observer.own_wakes.load(Ordering::Relaxed);
    let held = task.poll(&future, |waker| {
        waker.wake_by_ref();
        assert_eq!((own_wakes(), future.observer.others.load(Ordering::Relaxed)), (1, 0));
        let held = waker.clone();
        waker.wake_by_ref();
        assert_eq!((own_wakes(), future.observer.others.load(Ordering::Relaxed)), (2, 1));
        thread::scope(|scope| _ = scope.spawn(|| held.wake_by_ref()));
        held
    });
    held.wake();
    assert_eq!((own_wakes(), future.observer.wakes.load(Ordering::Relaxed)), (2, 4));
    assert_eq!(task.wakes(), 4);
}

#[test]
fn wakers_of_one_poll_are_equal_and_those_of_polls_with_equal_tags() {
    let (future, task) = setup();
    let first = task.poll_tagged(&future, 3, |waker| {
        let (one, another) = (waker.clone(), waker.clone());
        assert!(one.will_wake(waker) && waker.will_wake(&another) && one.will_wake(&another));
        assert!(one.clone().will_wake(&another));
        one
    });
    task.poll_tagged(&future, 3, |waker| assert!(first.will_wake(waker)));
    task.poll_tagged(&future, 3 + TAGS, |waker| assert!(first.will_wake(waker)));
    task.poll_tagged(&future, 4, |waker| assert!(!first.will_wake(waker)));
    let (other, _) = setup();
    task.poll_tagged(&other, 3, |waker| assert!(!first.will_wake(waker)));
}

#[test]
fn all_wakers_wake_the_executor_and_report_it() {
    let (future, task) = setup();
    let (by_ref, by_value) = task.poll(&future, |waker| {
        waker.wake_by_ref();
        assert_eq!(task.wakes(), 1, "without a clone");
        let clones = (waker.clone(), waker.clone());
        waker.wake_by_ref();
        clones
    });
    assert_eq!(task.wakes(), 2);
    by_ref.wake_by_ref();
    assert_eq!(task.wakes(), 3);
    by_value.wake();
    by_ref.wake();
    assert_eq!(task.wakes(), 5);
    assert_eq!(future.observer.wakes.load(Ordering::Relaxed), 5);
    assert_eq!(future.observer.clones.load(Ordering::Relaxed), 2);
}

#[test]
fn a_clone_has_the_tag_that_the_observer_gives_it() {
    let (future, task) = setup();
    let seen = &future.observer;
    let [woken, dropped] = [&seen.woken, &seen.dropped].map(|tag| || tag.load(Ordering::Relaxed));
    let (first, second) = task.poll_tagged(&future, 3, |waker| {
        let first = waker.clone();
        seen.next_tag.store(TAGS - 1, Ordering::Relaxed);
        let second = waker.clone();
        assert!(first.will_wake(waker) && !second.will_wake(waker));
        drop(first.clone());
        assert_eq!(dropped(), TAGS - 1, "the clone of a clone, too");
        (first, second)
    });
    let again = second.clone();
    assert!(again.will_wake(&second), "no poll, so the same tag");
    first.wake_by_ref();
    assert_eq!(woken(), 3);
    again.wake();
    assert_eq!(woken(), TAGS - 1);
    seen.dropped.store(0, Ordering::Relaxed);
    drop(second);
    assert_eq!(dropped(), 0, "no poll");
    task.poll(&future, |_| drop(first));
    assert_eq!((dropped(), Arc::strong_count(&task)), (3, 1));
}

#[test]
fn clones_inside_the_poll_are_reported_and_whether_there_are_others() {
    let (future, task) = setup();
    let reported = || {
        let seen = &future.observer;
        (seen.clones.load(Ordering::Relaxed), seen.others.load(Ordering::Relaxed))
    };
    let held = task.poll(&future, |waker| {
        drop(waker.clone());
        assert_eq!(reported(), (1, 0));
        let held = waker.clone();
        assert_eq!(reported(), (2, 0), "the first was dropped");
        held
    });
    drop(held.clone());
    assert_eq!(reported(), (2, 0), "no poll");
    task.poll(&future, |waker| drop(waker.clone()));
    assert_eq!(reported(), (3, 1), "one is held");
    task.poll(&future, |waker| {
        thread::scope(|scope| _ = scope.spawn(|| drop(waker.clone())));
        assert_eq!(reported(), (3, 1), "another thread, whose stack is not the poll's");
    });
}

#[test]
fn a_clone_wakes_the_executor_that_polled_last() {
    let (future, first) = setup();
    let second = Arc::<Task>::default();
    let clone = first.poll(&future, Waker::clone);
    assert_eq!(Arc::strong_count(&first), 2);
    second.poll(&future, |_| clone.wake_by_ref());
    assert_eq!((first.wakes(), second.wakes()), (0, 1), "during the poll");
    assert_eq!(Arc::strong_count(&first), 1, "the first one is given up");
    clone.wake_by_ref();
    first.poll(&future, |_| ());
    clone.wake();
    assert_eq!((first.wakes(), second.wakes()), (1, 2));
    assert_eq!((Arc::strong_count(&first), Arc::strong_count(&second)), (1, 1));
}

#[test]
fn the_executor_is_held_only_while_there_are_clones() {
    let (future, task) = setup();
    task.poll(&future, |waker| drop(waker.clone()));
    assert_eq!(Arc::strong_count(&task), 1);
    let clones: Vec<_> = task.poll(&future, |waker| (0..3).map(|_| waker.clone()).collect());
    assert_eq!(Arc::strong_count(&task), 2, "once for all clones");
    for (clone, left) in clones.into_iter().zip([2, 1, 0]) {
        drop(clone);
        assert_eq!(Arc::strong_count(&task), 1 + usize::from(left > 0));
    }
}

#[test]
fn clones_work_after_the_future_and_its_executor_have_gone() {
    let (future, task) = setup();
    let seen = Arc::downgrade(&future.observer._alive);
    let gone = Arc::downgrade(&task);
    let (one, another) = task.poll(&future, |waker| (waker.clone(), waker.clone()));
    drop(future);
    one.wake();
    assert_eq!(task.wakes(), 1);
    drop(task);
    assert!(gone.upgrade().is_some(), "as with any waker");
    another.clone().wake();
    another.wake_by_ref();
    drop(another);
    assert!(gone.upgrade().is_none() && seen.upgrade().is_none());
}

#[test]
fn wakers_are_used_on_other_threads_during_the_poll() {
    let (future, task) = setup();
    let threads = 3;
    let clones: Vec<_> = task.poll(&future, |waker| {
        thread::scope(|scope| {
            let use_it = || {
                waker.wake_by_ref();
                waker.clone().wake();
                drop(waker.clone());
                waker.clone()
            };
            let all: Vec<_> = (0..threads).map(|_| scope.spawn(use_it)).collect();
            all.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    });
    assert_eq!(task.wakes(), 2 * threads);
    assert_eq!(Arc::strong_count(&task), 2);
    drop(clones);
    assert_eq!(Arc::strong_count(&task), 1);
}

#[test]
fn a_panic_in_the_poll_ends_it() {
    let (future, task) = setup();
    let held = Mutex::new(None);
    let poll = || {
        task.poll(&future, |waker| {
            *held.lock() = Some(waker.clone());
            panic!("in the poll");
        })
    };
    assert!(catch_unwind(AssertUnwindSafe(poll)).is_err());
    assert!(future.polled_with.load(Ordering::Relaxed).is_null());
    let held = held.into_inner().unwrap();
    drop(held.clone());
    assert_eq!(future.observer.clones.load(Ordering::Relaxed), 1, "the poll has ended");
    held.wake();
    assert_eq!((task.wakes(), Arc::strong_count(&task)), (1, 1));
}

/// A waker that panics in the named function. `live` is the number of wakers.
struct Panicking {
    live: AtomicUsize,
    in_clone: AtomicBool,
    in_wake: AtomicBool,
}

static PANICKING: RawWakerVTable = RawWakerVTable::new(
    |data| {
        // SAFETY: `data` is from `Arc::into_raw`, here and in all others.
        let this = unsafe { ManuallyDrop::new(Arc::from_raw(data.cast::<Panicking>())) };
        assert!(!this.in_clone.load(Ordering::Relaxed), "in clone");
        Panicking::raw(&this)
    },
    |data| {
        // SAFETY: as above.
        let this = unsafe { Arc::from_raw(data.cast::<Panicking>()) };
        this.live.fetch_sub(1, Ordering::Relaxed);
        assert!(!this.in_wake.load(Ordering::Relaxed), "in wake");
    },
    |_| (),
    |data| {
        // SAFETY: as above.
        let this = unsafe { Arc::from_raw(data.cast::<Panicking>()) };
        this.live.fetch_sub(1, Ordering::Relaxed);
    },
);

impl Panicking {
    fn raw(self: &Arc<Self>) -> RawWaker {
        self.live.fetch_add(1, Ordering::Relaxed);
        RawWaker::new(Arc::into_raw(Arc::clone(self)).cast(), &PANICKING)
    }

    fn waker(self: &Arc<Self>) -> Waker {
        // SAFETY: the functions above keep the contract, apart from their panics.
        unsafe { Waker::from_raw(self.raw()) }
    }
}

#[test]
fn panics_of_the_executor_s_waker_leave_everything_in_order() {
    let (future, task) = setup();
    let bad = Arc::new(Panicking {
        live: AtomicUsize::new(0),
        in_clone: AtomicBool::new(true),
        in_wake: AtomicBool::new(true),
    });
    let panics = |action: &mut dyn FnMut()| catch_unwind(AssertUnwindSafe(action)).is_err();
    let poll = |poll: &mut dyn FnMut(&Waker)| {
        let waker = bad.waker();
        future.poll(0, &Context::from_waker(&waker), |context| poll(context.waker()));
    };
    assert!(panics(&mut || poll(&mut |waker| drop(waker.clone()))), "first clone");
    assert_eq!(bad.live.load(Ordering::Relaxed), 0);
    let held = task.poll(&future, Waker::clone);
    assert!(panics(&mut || poll(&mut |_| ())), "a poll with another waker while there are clones");
    bad.in_clone.store(false, Ordering::Relaxed);
    poll(&mut |_| ());
    assert_eq!(bad.live.load(Ordering::Relaxed), 1, "it has taken the place of the first");
    assert!(panics(&mut || held.wake_by_ref()));
    bad.in_clone.store(true, Ordering::Relaxed);
    assert!(panics(&mut || held.wake_by_ref()));
    let mut held = Some(held);
    assert!(panics(&mut || held.take().unwrap().wake()));
    assert_eq!((bad.live.load(Ordering::Relaxed), Arc::strong_count(&future)), (0, 1));
    task.poll(&future, Waker::clone).wake();
    assert_eq!((task.wakes(), Arc::strong_count(&task)), (1, 1));
}

/// A leaf that is ready after a number of events, and keeps its waker if that will wake.
#[derive(Default)]
struct Leaf {
    events: AtomicUsize,
    waker: Mutex<Option<Waker>>,
}

impl Leaf {
    fn happen(&self, by_ref: bool) {
        self.events.fetch_add(1, Ordering::Release);
        if by_ref {
            if let Some(waker) = &*self.waker.lock() {
                waker.wake_by_ref();
            }
        } else {
            let waker = self.waker.lock().take();
            if let Some(waker) = waker {
                waker.wake();
            }
        }
    }

    fn is_ready(&self, waker: &Waker, at: usize) -> bool {
        let mut held = self.waker.lock();
        if !held.as_ref().is_some_and(|held| held.will_wake(waker)) {
            *held = Some(waker.clone());
        }
        self.events.load(Ordering::Acquire) >= at
    }
}

/// An executor whose wakers each unpark a thread, all different.
struct Unpark(thread::Thread, AtomicBool);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.1.store(true, Ordering::Release);
        self.0.unpark();
    }
}

#[test]
#[cfg_attr(miri, ignore = "parking_lot waits by a call of `futex` with a type that Miri refuses")]
fn no_wake_is_lost_when_each_poll_has_another_waker() {
    let (future, leaf) = (TaskWaker::new(Seen::default()), Leaf::default());
    let rounds = if cfg!(miri) { 15 } else { 20_000 };
    thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..rounds {
                leaf.happen(round % 3 == 0);
                if round % 2 == 0 {
                    thread::yield_now();
                }
            }
        });
        let mut polls = 0;
        for round in 1..=rounds {
            loop {
                let unpark = Arc::new(Unpark(thread::current(), AtomicBool::new(false)));
                let waker = Waker::from(Arc::clone(&unpark));
                polls += 1;
                let context = &Context::from_waker(&waker);
                // With tags, the leaf clones the waker again; without, it keeps the one it has.
                let tag = if round % 4 == 0 { polls } else { 0 };
                let poll = |context: &mut Context<'_>| leaf.is_ready(context.waker(), round);
                if future.poll(tag, context, poll) {
                    break;
                }
                // Only the waker of this poll counts. Without its wake this would never end.
                while !unpark.1.load(Ordering::Acquire) {
                    thread::park();
                }
            }
        }
    });
    drop(leaf.waker.lock().take());
    assert_eq!(Arc::strong_count(&future), 1);
    assert!(future.forward.lock().waker.is_none());
}

#[test]
fn clones_are_used_on_many_threads_while_polls_go_on() {
    let (future, first) = setup();
    let tasks = [first, Arc::<Task>::default()];
    let held = Mutex::new(Vec::<Waker>::new());
    let rounds = if cfg!(miri) { 10 } else { 10_000 };
    thread::scope(|scope| {
        for number in 0..2 {
            let held = &held;
            scope.spawn(move || {
                for round in 0..rounds {
                    let waker = held.lock().pop();
                    match (waker, (round + number) % 4) {
                        (None, _) => thread::yield_now(),
                        (Some(waker), 0) => waker.wake(),
                        (Some(waker), 1) => waker.wake_by_ref(),
                        (Some(waker), 2) => held.lock().push(waker.clone()),
                        (Some(waker), _) => drop(waker),
                    }
                }
            });
        }
        for round in 0..rounds {
            tasks[round % 2].poll(&future, |waker| {
                let clone = waker.clone();
                assert!(clone.will_wake(waker));
                held.lock().push(clone);
            });
        }
    });
    drop(held);
    assert_eq!(Arc::strong_count(&future), 1);
    assert_eq!(tasks.map(|task| Arc::strong_count(&task)), [1, 1]);
}

/// What can be done to wakers. Numbers choose one of the clones that are held.
#[derive(Clone, Debug)]
enum Step {
    /// Of an executor, with these steps inside.
    Poll(usize, Vec<Step>),
    /// Of the poll's own waker.
    CloneOwn,
    WakeOwn,
    Clone(usize),
    Wake(usize),
    WakeByRef(usize),
    Drop(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => Just(Step::CloneOwn),
        1 => Just(Step::WakeOwn),
        1 => any::<usize>().prop_map(Step::Clone),
        1 => any::<usize>().prop_map(Step::Wake),
        1 => any::<usize>().prop_map(Step::WakeByRef),
        2 => any::<usize>().prop_map(Step::Drop),
    ]
}

/// The wakers, and what is expected of them.
struct Model {
    future: Arc<TaskWaker<Seen>>,
    tasks: [Arc<Task>; 3],
    wakes: [usize; 3],
    held: Vec<Waker>,
    polled_last: usize,
}

impl Model {
    fn take(&mut self, number: usize) -> Option<Waker> {
        (!self.held.is_empty()).then(|| self.held.swap_remove(number % self.held.len()))
    }

    /// `own` is the waker of the poll that goes on.
    fn apply(&mut self, step: &Step, own: Option<&Waker>) {
        match (step, own) {
            (Step::Poll(task, steps), None) => {
                let (future, task) = (Arc::clone(&self.future), task % self.tasks.len());
                self.polled_last = task;
                Arc::clone(&self.tasks[task]).poll(&future, |waker| {
                    self.check(2);
                    for step in steps {
                        self.apply(step, Some(waker));
                        self.check(2);
                    }
                });
            }
            (Step::CloneOwn, Some(own)) => self.held.push(own.clone()),
            (Step::WakeOwn, Some(own)) => {
                self.wakes[self.polled_last] += 1;
                own.wake_by_ref();
            }
            (Step::Clone(number), _) if !self.held.is_empty() => {
                self.held.push(self.held[number % self.held.len()].clone());
            }
            (Step::WakeByRef(number), _) if !self.held.is_empty() => {
                self.wakes[self.polled_last] += 1;
                self.held[number % self.held.len()].wake_by_ref();
            }
            (Step::Wake(number), _) => {
                if let Some(waker) = self.take(*number) {
                    self.wakes[self.polled_last] += 1;
                    waker.wake();
                }
            }
            (Step::Drop(number), _) => drop(self.take(*number)),
            _ => (),
        }
    }

    /// `polling` is the number of references to its task that the executor holds during a poll.
    fn check(&self, polling: usize) {
        for (number, task) in self.tasks.iter().enumerate() {
            let is_last = number == self.polled_last;
            let ours = usize::from(is_last && !self.held.is_empty());
            let theirs = if is_last { polling } else { 0 };
            assert_eq!(Arc::strong_count(task), 1 + ours + theirs);
            assert_eq!(task.wakes(), self.wakes[number]);
        }
        assert_eq!(self.future.forward.lock().clones, self.held.len());
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 3 } else { ProptestConfig::default().cases },
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn wakers_and_model_agree(
        steps in proptest::collection::vec(
            prop_oneof![
                2 => (0_usize..3, proptest::collection::vec(step(), 0..5))
                    .prop_map(|(task, steps)| Step::Poll(task, steps)),
                1 => step(),
            ],
            0..30,
        )
    ) {
        let mut model = Model {
            future: TaskWaker::new(Seen::default()),
            tasks: Default::default(),
            wakes: [0; 3],
            held: Vec::new(),
            polled_last: 0,
        };
        for step in &steps {
            model.apply(step, None);
            model.check(0);
        }
    }
}
