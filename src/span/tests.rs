//! The hooks, driven by a script that controls time, samples and context switches.

// The tests need rings.
#![cfg(not(tracing_profiling_unsupported))]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};

use parking_lot::Mutex;

use super::*;
use crate::facts::{TimeBreakdown, Usage};
use crate::sampler::{
    AttachThreads, Rate, RunDelay, SamplingSession, ThreadSetup, ThreadShared, ThreadSource,
};
use crate::stats::Counters;
use crate::sys::{Clock, OsThread, SampleRing, WhyRefused};

const SAMPLE: u64 = 10;
const BASE_PERIOD: u64 = 5_000;
const MS: u64 = 1_000_000;

/// What a script controls, on the one thread that it runs on.
#[derive(Clone, Debug, Default)]
struct Script {
    now: Arc<AtomicU64>,
    samples: Arc<AtomicU64>,
    rings: Arc<Mutex<Vec<Arc<SampleRing>>>>,
    /// For how long the thread did not run.
    off_ns: Arc<AtomicU64>,
    threads: Arc<Mutex<Vec<Arc<ThreadShared>>>>,
    /// No thread can be sampled.
    refuses: Arc<AtomicBool>,
    /// The thread's voluntary and involuntary switches.
    switches: Arc<Mutex<[u64; 2]>>,
    /// One entry per wake-up of the collector: when the thread's spans become old, as the collector sees it.
    wakes: Arc<Mutex<Vec<u64>>>,
}

impl AttachThreads for Script {
    fn begin(&self) -> ThreadSetup {
        let first = Arc::new(SamplingSession::none());
        let sampled = Arc::new(ThreadShared::new(
            OsThread::new(1, b""),
            Err(WhyRefused::NotAsked),
            Rate::of(BASE_PERIOD),
            Arc::clone(&first),
        ));
        self.threads.lock().push(Arc::clone(&sampled));
        ThreadSetup { sampled: Some((sampled, first)), source: Box::new(self.clone()) }
    }

    fn attach(&self, sampled: &ThreadShared) {
        if self.refuses.load(Ordering::Relaxed) {
            return;
        }
        let ring = Arc::new(SampleRing::scripted(4096, SAMPLE).unwrap());
        self.rings.lock().push(Arc::clone(&ring));
        sampled.append_session(|_| {
            Some(SamplingSession::new(Some(ring), Rate::of(BASE_PERIOD), SAMPLE, 4096))
        });
    }
}

impl ThreadSource for Script {
    fn cpu_ns(&mut self) -> Option<u64> {
        Some(self.now.load(Ordering::Relaxed) - self.off_ns.load(Ordering::Relaxed))
    }

    fn usage(&mut self, _: Option<&SamplingSession>) -> Usage {
        // One page fault per sample.
        let minor_faults = self.samples.load(Ordering::Relaxed) / SAMPLE;
        let [voluntary_switches, involuntary_switches] = *self.switches.lock();
        Usage { minor_faults, voluntary_switches, involuntary_switches, ..Usage::default() }
    }

    fn wake_collector(&self) {
        let threads = self.threads.lock();
        self.wakes.lock().extend(threads.last().map(|sampled| sampled.samples_from()));
    }
}

/// Spans on the thread of the test, and the script that drives them.
struct Scene {
    script: Script,
    spans: Spans,
    next: u64,
}

fn id(number: u64) -> RegistryId {
    RegistryId::new(number).unwrap()
}

impl Scene {
    fn new() -> Self {
        let script = Script::default();
        let clock = Clock::by_hand(Arc::clone(&script.now));
        let source = Box::new(script.clone());
        let spans = Spans::new(clock, source, Arc::new(Counters::default()));
        // Not 0, so that times in the past exist.
        script.now.store(MS, Ordering::Relaxed);
        Self { script, spans, next: 1 }
    }

    /// Opens a span below the entered one; every close of it is judged.
    fn open(&mut self) -> RegistryId {
        self.open_as(GivenParent::Contextual, 0, &|_, _| {})
    }

    fn open_as(&mut self, parent: GivenParent, flags: u32, ancestry: Ancestry<'_>) -> RegistryId {
        let id = id(self.next);
        self.next += 1;
        let plan = Plan { number: 7, flags, judge_after: 0, sampling_delay: 0, ..Plan::default() };
        self.spans.open(id, &plan, 0, parent, ancestry);
        id
    }

    /// Opens a span that may have to be kept once it has taken 200 ms, and is never sampled.
    fn open_judged(&mut self, parent: GivenParent, flags: u32) -> RegistryId {
        let id = id(self.next);
        self.next += 1;
        let plan = Plan { number: 7, flags, judge_after: 200 * MS, ..Plan::default() };
        let ancestry: Ancestry<'_> = &|from, visit| {
            if let AncestryFrom::Span(id) = from {
                visit(id);
            }
        };
        self.spans.open(id, &plan, 0, parent, ancestry);
        id
    }

    /// Opens a span that is sampled after it has been entered for `sampling_delay`.
    fn open_young(&mut self, sampling_delay: u64) -> RegistryId {
        let id = id(self.next);
        self.next += 1;
        let plan = Plan { number: 7, judge_after: 0, sampling_delay, ..Plan::default() };
        self.spans.open(id, &plan, 0, GivenParent::Contextual, &|_, _| {});
        id
    }

    /// Opens a span of a plan with that number that is old after 10 ms and open for long after a second.
    fn open_plan(&mut self, number: u64, parent: GivenParent) -> RegistryId {
        let id = id(self.next);
        self.next += 1;
        let (sampling_delay, long_after) = (10 * MS, 1_000 * MS);
        let plan = Plan { number, sampling_delay, long_after, ..Plan::default() };
        let ancestry: Ancestry<'_> = &|from, visit| {
            if let AncestryFrom::Span(id) = from {
                visit(id);
            }
        };
        self.spans.open(id, &plan, 0, parent, ancestry);
        id
    }

    /// Opens and closes a span inside the entered one after `ms`. It is not judged.
    fn child(&mut self, number: u64, ms: u64) {
        let child = self.open_plan(number, GivenParent::Contextual);
        self.wait(ms * MS);
        self.close_unjudged(child);
    }

    fn close_unjudged(&self, id: RegistryId) {
        self.spans.close(id, |_| panic!("judged"));
    }

    /// The reports of child spans: owner, plan, and when each was opened and closed, in milliseconds from the start.
    fn child_closes(&self) -> Vec<(SpanKey, u64, u64, u64)> {
        let ms = |ticks: u64| (ticks - MS) / MS;
        let closes = self.spans.take_child_closes();
        closes.map(|it| (it.owner, it.plan, ms(it.opened), ms(it.closed))).collect()
    }

    /// The collector reads for how long the thread has waited for a CPU.
    fn read_run_delay(&self, ns: u64) {
        let at = self.script.now.load(Ordering::Relaxed);
        self.read_run_delay_of(RunDelay { at, ns, ran_at: at });
    }

    fn read_run_delay_of(&self, read: RunDelay) {
        let thread = self.sampled();
        thread.last().run_delay.set(read, thread.last_hook_at());
    }

    /// The thread does not run, as it is switched out that many times voluntarily and involuntarily.
    fn is_off(&self, ns: u64, switches: [u64; 2]) {
        self.wait_off_cpu(ns);
        let mut sums = self.script.switches.lock();
        sums.iter_mut().zip(switches).for_each(|(sum, more)| *sum += more);
    }

    fn enter(&self, id: RegistryId) {
        self.spans.enter(id);
    }

    fn exit(&self, id: RegistryId) {
        self.spans.exit(id);
    }

    fn wait(&self, ns: u64) {
        self.script.now.fetch_add(ns, Ordering::Relaxed);
    }

    fn sample(&self, count: u64) {
        self.script.samples.fetch_add(count * SAMPLE, Ordering::Relaxed);
        let rings = self.script.rings.lock();
        (0..count).for_each(|_| rings.last().unwrap().timer().unwrap().move_scripted());
    }

    /// Time passes in which the thread does not run.
    fn wait_off_cpu(&self, ns: u64) {
        self.wait(ns);
        self.script.off_ns.fetch_add(ns, Ordering::Relaxed);
    }

    fn key(&self, id: RegistryId) -> SpanKey {
        self.spans.key_of(id).unwrap()
    }

    fn sampled(&self) -> Arc<ThreadShared> {
        Arc::clone(self.script.threads.lock().last().unwrap())
    }

    /// The span intervals so far: span, from, to.
    fn intervals(&self) -> Vec<(SpanKey, u64, u64)> {
        let session = self.sampled().last();
        std::iter::from_fn(|| session.take_interval()).map(|m| (m.span, m.from, m.to)).collect()
    }

    /// The reports to the collector, without times.
    fn span_events(&self) -> Vec<SpanEvent> {
        let mut events = self.timed_span_events();
        for event in &mut events {
            match event {
                SpanEvent::Opened(_, known) => known.opened_ns = 0,
                SpanEvent::Closed { closed_ns, .. } => *closed_ns = 0,
                SpanEvent::Idle { .. } => {}
            }
        }
        events
    }

    fn timed_span_events(&self) -> Vec<SpanEvent> {
        std::iter::from_fn(|| self.spans.take_span_event()).collect()
    }

    fn close(&self, id: RegistryId) -> SpanSnapshot {
        self.close_judged(id, false)
    }

    fn close_judged(&self, id: RegistryId, must_notify: bool) -> SpanSnapshot {
        self.wait(1);
        let mut closed = None;
        self.spans.close(id, |closing| {
            assert!(self.spans.is_open(id, closing.key), "while it is judged");
            closed = Some(closing.clone());
            Verdict { must_notify, ..Verdict::default() }
        });
        assert!(self.spans.key_of(id).is_none());
        closed.unwrap()
    }
}

#[test]
fn a_sample_belongs_to_the_innermost_span() {
    let mut scene = Scene::new();
    let outer = scene.open();
    scene.enter(outer);
    scene.sample(1);
    let inner = scene.open();
    scene.enter(inner);
    scene.sample(2);
    scene.exit(inner);
    scene.sample(3);
    scene.exit(outer);
    scene.sample(4);
    let (outer_key, inner_key) = (scene.key(outer), scene.key(inner));
    assert_eq!(scene.intervals(), [(outer_key, 0, 10), (inner_key, 10, 30), (outer_key, 30, 60)]);
    assert_eq!(scene.sampled().span(), None);
    assert_eq!(scene.close(inner).samples.on_cpu, 2);
    assert_eq!(scene.close(outer).samples.on_cpu, 6);
}

#[test]
fn segments_without_a_sample_write_no_interval() {
    let mut scene = Scene::new();
    let span = scene.open();
    for _ in 0..100 {
        scene.enter(span);
        scene.wait(1_000);
        scene.exit(span);
    }
    assert_eq!(scene.intervals(), []);
    assert_eq!(scene.span_events(), []);
}

#[test]
fn the_interval_of_an_entered_span_is_open() {
    let mut scene = Scene::new();
    let span = scene.open();
    scene.enter(span);
    scene.sample(5);
    let open = scene.sampled().open_interval(&scene.sampled().last());
    assert_eq!((open.span, open.from), (Some(scene.key(span)), 0));
}

#[test]
fn a_sampled_span_and_its_ancestors_are_reported_once() {
    let mut scene = Scene::new();
    let outer = scene.open();
    scene.enter(outer);
    let middle = scene.open();
    scene.enter(middle);
    let inner = scene.open();
    scene.enter(inner);
    scene.sample(1);
    scene.exit(inner);
    let keys = [outer, middle, inner].map(|id| scene.key(id));
    let known = |n: usize, id: RegistryId| {
        let parent = n.checked_sub(1).map(|n| keys[n]);
        SpanEvent::Opened(keys[n], SpanInfo { parent, root: keys[0], id, plan: 7, opened_ns: 0 })
    };
    assert_eq!(scene.span_events(), [known(0, outer), known(1, middle), known(2, inner)]);
    scene.sample(1);
    scene.exit(middle);
    assert_eq!(scene.span_events(), []);
    scene.close(inner);
    assert_eq!(scene.span_events(), [SpanEvent::Closed { key: keys[2], ids: None, closed_ns: 0 }]);
}

#[test]
fn the_collector_learns_when_a_span_was_open() {
    let mut scene = Scene::new();
    let span = scene.open();
    scene.enter(span);
    scene.sample(1);
    scene.wait(7 * MS);
    scene.exit(span);
    scene.close(span);
    let events = scene.timed_span_events();
    let [SpanEvent::Opened(_, SpanInfo { opened_ns, .. }), SpanEvent::Closed { closed_ns, .. }] =
        events[..]
    else {
        panic!("{events:?}")
    };
    assert_eq!((opened_ns / MS, (closed_ns - opened_ns) / MS), (1, 7));
}

#[test]
fn a_queue_that_fills_up_leaves_the_outer_spans_reported() {
    let mut scene = Scene::new();
    let outer = scene.open();
    scene.enter(outer);
    let inner = scene.open();
    scene.enter(inner);
    let place = scene.spans.span_events.capacity() - 1;
    let filler = SpanEvent::Closed { key: SpanKey::MIN, ids: None, closed_ns: 0 };
    (0..place).for_each(|_| scene.spans.span_events.push(filler).unwrap());
    scene.sample(1);
    scene.exit(inner);
    let key = scene.key(outer);
    let of_outer = SpanEvent::Opened(
        key,
        SpanInfo { parent: None, root: key, id: outer, plan: 7, opened_ns: 0 },
    );
    assert_eq!(scene.span_events().split_off(place), [of_outer]);
    let closing = scene.close(inner);
    assert_eq!(closing.samples.total(), 0, "its samples are lost");
    assert_eq!(scene.span_events(), [], "it was not reported");
    scene.exit(outer);
    let closing = scene.close(outer);
    assert_eq!(
        scene.span_events(),
        [SpanEvent::Closed { key: closing.key, ids: None, closed_ns: 0 }]
    );
}

#[test]
fn the_close_of_an_unreported_span_is_reported_only_if_it_is_kept() {
    let mut scene = Scene::new();
    let span = scene.open();
    scene.close(span);
    assert_eq!(scene.span_events(), []);
    let span = scene.open();
    let closing = scene.close_judged(span, true);
    assert_eq!(
        scene.span_events(),
        [SpanEvent::Closed { key: closing.key, ids: None, closed_ns: 0 }]
    );
}

#[test]
fn off_cpu_time_belongs_to_every_span_that_was_entered() {
    let mut scene = Scene::new();
    let outer = scene.open();
    scene.enter(outer);
    let inner = scene.open();
    scene.wait(100 * MS);
    scene.enter(inner);
    scene.wait(20 * MS);
    scene.wait_off_cpu(30 * MS);
    scene.exit(inner);
    scene.wait(10 * MS);
    scene.exit(outer);
    let inner = scene.close(inner).account;
    assert_eq!((inner.on_cpu_ns, inner.off_cpu_ns), (20 * MS, 30 * MS));
    let outer = scene.close(outer).account;
    assert_eq!((outer.on_cpu_ns, outer.off_cpu_ns), (130 * MS, 30 * MS));
    assert_eq!(outer.on_cpu_error_ns, 0);
}

#[test]
fn a_wait_before_a_span_was_entered_is_not_its_own() {
    let mut scene = Scene::new();
    let first = scene.open();
    scene.enter(first);
    scene.exit(first);
    scene.wait(100 * MS);
    scene.wait_off_cpu(900 * MS);
    let span = scene.open();
    scene.enter(span);
    scene.wait(40);
    scene.exit(span);
    let account = scene.close(span).account;
    assert_eq!((account.on_cpu_ns, account.off_cpu_ns), (40, 0));
}

/// The verdict on a root of 100 ms whose children run on `threads` threads at once, each for 60 ms.
fn close_after_threads(threads: usize, flags: u32) -> (bool, Option<TimeBreakdown>) {
    let mut scene = Scene::new();
    let root = scene.open_judged(GivenParent::None, flags);
    let parent = GivenParent::Span(root);
    let children: Vec<_> = (0..threads).map(|_| scene.open_judged(parent, 0)).collect();
    let step = &Barrier::new(threads + 1);
    let spans = &scene.spans;
    std::thread::scope(|scope| {
        for child in children {
            scope.spawn(move || {
                for _ in 0..2 {
                    spans.enter(child);
                    step.wait();
                    step.wait();
                    spans.exit(child);
                    step.wait();
                    step.wait();
                }
                spans.close(child, |_| Verdict::default());
            });
        }
        // The first segment is shorter than the interval in which CPU clocks are read.
        for ran in [MS / 2, 60 * MS - MS / 2] {
            step.wait();
            scene.wait(ran);
            step.wait();
            step.wait();
            scene.wait_off_cpu(MS / 2);
            step.wait();
        }
    });
    scene.wait(39 * MS);
    let mut account = None;
    let is_judged = scene.spans.close(root, |closing| {
        account = Some(closing.account);
        Verdict::default()
    });
    (is_judged, account)
}

#[test]
fn a_span_shorter_than_the_limit_of_its_subtree_is_judged_if_other_threads_were_in_it() {
    let (is_judged, account) = close_after_threads(4, JUDGES_CPU | JUDGES_SUBTREE);
    assert!(is_judged);
    let account = account.unwrap();
    assert_eq!((account.wall_ns, account.on_cpu_ns), (100 * MS, 0));
    // The clock was read at each enter and exit.
    let subtree = (account.subtree_on_cpu_ns, account.subtree_on_cpu_error_ns);
    assert!(subtree.0.abs_diff(240 * MS) < 100 && subtree.1 < 100, "{subtree:?}");
    // Other spans need no verdict.
    assert_eq!(close_after_threads(0, JUDGES_CPU | JUDGES_SUBTREE), (false, None));
    assert_eq!(close_after_threads(4, JUDGES_CPU), (false, None));
}

#[test]
fn idle_is_the_time_between_segments() {
    let mut scene = Scene::new();
    let span = scene.open();
    scene.wait(5);
    for _ in 0..3 {
        scene.enter(span);
        scene.wait(10);
        scene.exit(span);
        scene.wait(20);
    }
    let account = scene.close(span).account;
    assert_eq!((account.on_cpu_ns, account.idle_ns, account.wall_ns), (30, 5 + 60 + 1, 96));
}

#[test]
fn a_span_entered_twice_on_one_thread_counts_once() {
    let mut scene = Scene::new();
    let span = scene.open();
    scene.enter(span);
    scene.wait(10);
    scene.enter(span);
    scene.wait(10);
    scene.exit(span);
    scene.wait(10);
    scene.exit(span);
    let account = scene.close(span).account;
    assert_eq!((account.on_cpu_ns, account.idle_ns, account.wall_ns), (30, 1, 31));
}

/// Whatever is entered again and left in whatever order, a span takes the time from its first enter to its last exit once,
/// except that in which a span around it was entered again; and a new span has the parent that the registry has.
#[test]
fn spans_that_are_entered_again_take_their_time_once() {
    // Spans by their names; `x` is not profiled. Upper case is an exit.
    for (order, own) in [
        ("aaAaAA", [5, 0]),
        ("aabBAA", [5, 1]),
        ("aabAAB", [4, 3]),
        ("aabbABAB", [6, 5]),
        ("axaXAA", [5, 0]),
        ("aaxAXA", [5, 0]),
        ("abaabBAABA", [9, 3]),
        ("aaAbaABA", [7, 2]),
    ] {
        let mut scene = Scene::new();
        let a = scene.open_as(GivenParent::None, 0, &|_, _| {});
        let b = scene.open_as(GivenParent::Span(a), 0, &|_, visit| _ = visit(a));
        let unmatched = id(1_000);
        // What the registry does: an enter of a span that is entered already is no new current span.
        let mut stack: Vec<(RegistryId, bool)> = Vec::new();
        for step in order.chars() {
            let span = match step.to_ascii_lowercase() {
                'a' => a,
                'b' => b,
                _ => unmatched,
            };
            if step.is_lowercase() {
                let is_again = stack.iter().any(|(entered, _)| *entered == span);
                stack.push((span, is_again));
                scene.enter(span);
            } else {
                let latest = stack.iter().rposition(|(entered, _)| *entered == span).unwrap();
                stack.remove(latest);
                scene.exit(span);
            }
            scene.wait(1);
            let current = stack.iter().rev().find(|(_, is_again)| !is_again).map(|(span, _)| *span);
            let ask: Ancestry<'_> = &|_, visit| {
                current.into_iter().for_each(|current| _ = visit(current));
            };
            let child = scene.open_as(GivenParent::Contextual, 0, ask);
            let is_profiled = |span: &RegistryId| *span != unmatched;
            let parent = scene.spans.table.get(child).unwrap().parent();
            if current.is_none_or(|current| is_profiled(&current)) {
                assert_eq!(parent, current, "{order} at {step}");
            }
            scene.spans.close(child, |_| Verdict::default());
        }
        let on_cpu = [a, b].map(|span| scene.close(span).account.on_cpu_ns);
        assert_eq!(on_cpu, own, "{order}");
    }
}

/// What an account says of a span that is not idle: its time on and off CPU, how long its thread was in others on its
/// stack, and the error.
fn parts(account: &TimeBreakdown) -> ([u64; 3], u64) {
    let sum = account.on_cpu_ns + account.off_cpu_ns + account.other_spans_ns + account.idle_ns;
    assert_eq!(sum, account.wall_ns, "{account:?}");
    let parts = [account.on_cpu_ns, account.off_cpu_ns, account.other_spans_ns];
    (parts, account.on_cpu_error_ns)
}

/// A thread of a pool takes parts of other requests while it waits for one.
#[test]
fn a_span_takes_no_time_while_its_thread_is_in_others_on_its_stack() {
    // In units of 1 ms, so that the CPU clock is read in each part; and of 1 µs, so that it is not.
    for (unit, flags) in [(MS, 0), (MS, JUDGES_CPU), (1_000, 0), (1_000, JUDGES_CPU)] {
        let mut scene = Scene::new();
        let of = |span| {
            move |_: AncestryFrom, visit: &mut dyn FnMut(RegistryId) -> bool| {
                visit(span);
            }
        };
        let a = scene.open_as(GivenParent::None, flags, &|_, _| {});
        let b = scene.open_as(GivenParent::None, flags, &|_, _| {});
        let part = scene.open_as(GivenParent::Span(a), flags, &of(a));
        let nested = scene.open_as(GivenParent::Span(b), flags, &of(b));
        scene.enter(a);
        scene.wait(10 * unit);
        scene.enter(b);
        scene.wait(20 * unit);
        scene.enter(nested);
        scene.wait_off_cpu(5 * unit);
        // A part of the first request is found on top of the second one.
        scene.enter(part);
        scene.wait(3 * unit);
        scene.wait_off_cpu(4 * unit);
        scene.exit(part);
        scene.wait(6 * unit);
        scene.exit(nested);
        scene.wait(7 * unit);
        // The first request itself, again.
        scene.enter(a);
        scene.wait(2 * unit);
        scene.exit(a);
        scene.wait(unit);
        scene.exit(b);
        scene.wait(30 * unit);
        scene.exit(a);
        let expected = [
            // On CPU, off CPU, in other spans.
            (part, [3, 4, 0]),
            (nested, [6, 5, 7]),
            (a, [10 + 3 + 2 + 30, 4, 20 + 5 + 6 + 7 + 1]),
            (b, [20 + 6 + 7 + 1, 5, 7 + 2]),
        ];
        for (span, expected) in expected {
            let (found, error) = parts(&scene.close(span).account);
            let expected = expected.map(|part| part * unit);
            assert_eq!(found[2], expected[2], "{found:?} {expected:?}");
            let is_within = found[0].abs_diff(expected[0]) <= error;
            assert!(is_within, "{found:?} ± {error}, {expected:?} {unit}");
            assert!(flags == 0 || (found, error) == (expected, 0), "{found:?} ± {error}");
        }
    }
}

/// An exit in any order, from any of them.
#[test]
fn spans_on_the_stack_of_others_may_be_left_in_any_order() {
    // Spans by their names, roots all of them but `d`, which is inside `a`. Upper case is an exit. One tick passes in
    // each step; the ticks that each span takes, and those in which it is entered and takes none.
    for (order, expected) in [
        ("abBA", [(2, 1), (1, 0), (0, 0), (0, 0)]),
        ("abAB", [(1, 1), (2, 0), (0, 0), (0, 0)]),
        ("abcBCA", [(2, 3), (1, 1), (2, 0), (0, 0)]),
        ("abcACB", [(1, 2), (2, 2), (2, 0), (0, 0)]),
        ("abdBDA", [(4, 1), (1, 1), (0, 0), (2, 0)]),
        ("abdADB", [(2, 1), (2, 2), (0, 0), (2, 0)]),
        ("adbDBA", [(3, 2), (2, 0), (0, 0), (1, 1)]),
        ("dabDBA", [(2, 2), (2, 0), (0, 0), (1, 2)]),
        ("abaBAA", [(4, 1), (1, 1), (0, 0), (0, 0)]),
        ("badcdDCDAB", [(5, 2), (2, 7), (2, 1), (3, 2)]),
    ] {
        let mut scene = Scene::new();
        let [a, b, c] = [(); 3].map(|()| scene.open_as(GivenParent::None, 0, &|_, _| {}));
        let of_a: Ancestry<'_> = &|_, visit| _ = visit(a);
        let d = scene.open_as(GivenParent::Span(a), 0, of_a);
        for step in order.chars() {
            let span = match step.to_ascii_lowercase() {
                'a' => a,
                'b' => b,
                'c' => c,
                _ => d,
            };
            if step.is_lowercase() {
                scene.enter(span);
            } else {
                scene.exit(span);
            }
            scene.wait(1);
        }
        let found = [d, a, b, c].map(|span| {
            let ([on_cpu, off_cpu, other], _) = parts(&scene.close(span).account);
            (on_cpu + off_cpu, other)
        });
        let [of_d, of_a, of_b, of_c] = found;
        assert_eq!([of_a, of_b, of_c, of_d], expected, "{order}");
    }
}

#[test]
fn an_open_span_takes_no_time_while_its_thread_is_in_others() {
    let mut scene = Scene::new();
    let (a, b) = (scene.open(), scene.open());
    let account = |scene: &Scene| {
        let (closing, segment_ns) = scene.spans.as_closing(a, scene.key(a)).unwrap();
        // The collector knows of the thread only that it ran all the time.
        let ran_ns = scene.script.now.load(Ordering::Relaxed) - MS;
        parts(&with_segment(closing.account, segment_ns, ran_ns, 0, 0))
    };
    scene.enter(a);
    scene.wait(10 * MS);
    scene.enter(b);
    scene.wait(500 * MS);
    assert_eq!(account(&scene), ([10 * MS, 0, 500 * MS], 0));
    scene.exit(b);
    scene.wait(7 * MS);
    assert_eq!(account(&scene), ([17 * MS, 0, 500 * MS], 0));
    scene.exit(a);
    assert_eq!(account(&scene), ([17 * MS, 0, 500 * MS], 0));
}

/// Of spans on one thread whose common parent is elsewhere, the parent gets the time of each once.
#[test]
fn time_inside_a_parent_elsewhere_is_counted_once_for_spans_on_one_stack() {
    for flags in [0, JUDGES_CPU | JUDGES_SUBTREE] {
        let mut scene = Scene::new();
        let below = Below::new(&mut scene, flags, 2);
        let (scene, [one, other]) = (below.scene, [below.children[0], below.children[1]]);
        scene.enter(one);
        scene.wait(10 * MS);
        scene.enter(other);
        scene.wait(20 * MS);
        scene.exit(other);
        scene.wait(5 * MS);
        scene.exit(one);
        let (least, most) = Below::inside_ns(&below.account());
        assert!(least <= 35 * MS && (35 * MS..35 * MS + 3).contains(&most), "{least} {most}");
        assert_eq!(
            parts(&scene.spans.as_closing(one, scene.key(one)).unwrap().0.account).0[2],
            20 * MS
        );
    }
}

/// What the thread counts belongs to the spans whose code it runs.
#[test]
fn faults_are_not_counted_for_spans_below_others() {
    let mut scene = Scene::new();
    let (below, above) = (scene.open(), scene.open());
    scene.enter(below);
    scene.sample(1);
    scene.enter(above);
    scene.sample(3);
    scene.exit(above);
    scene.sample(2);
    scene.exit(below);
    assert_eq!(scene.close(above).account.usage.minor_faults, 3);
    assert_eq!(scene.close(below).account.usage.minor_faults, 3);
}

#[test]
fn spans_may_be_left_in_any_order() {
    let mut scene = Scene::new();
    let a = scene.open();
    scene.enter(a);
    scene.wait(10);
    let b = scene.open();
    scene.enter(b);
    scene.wait(10);
    scene.exit(a);
    scene.sample(1);
    scene.wait(10);
    scene.exit(b);
    assert_eq!(scene.intervals(), [(scene.key(b), 0, 10)]);
    assert_eq!(scene.sampled().span(), None);
    assert_eq!(scene.close(a).account.on_cpu_ns, 20);
    assert_eq!(scene.close(b).account.on_cpu_ns, 20);
}

#[test]
fn faults_are_counted_where_samples_fall() {
    let mut scene = Scene::new();
    let outer = scene.open();
    scene.enter(outer);
    let inner = scene.open();
    scene.enter(inner);
    scene.sample(3);
    scene.exit(inner);
    scene.sample(1);
    scene.exit(outer);
    assert_eq!(scene.close(inner).account.usage.minor_faults, 3);
    assert_eq!(scene.close(outer).account.usage.minor_faults, 4);
}

#[test]
fn a_run_delay_belongs_to_the_spans_that_were_entered_throughout() {
    let mut scene = Scene::new();
    let outer = scene.open();
    scene.enter(outer);
    scene.wait(2 * MS);
    scene.read_run_delay(50 * MS);
    scene.wait(5 * MS);
    scene.read_run_delay(53 * MS);
    scene.wait(MS);
    let inner = scene.open();
    scene.enter(inner);
    scene.wait(4 * MS);
    // Of the time from the last reading on, which was partly before the span.
    scene.read_run_delay(54 * MS);
    scene.wait(5 * MS);
    scene.read_run_delay(55 * MS);
    scene.wait(5 * MS);
    scene.read_run_delay(56 * MS);
    scene.wait(5 * MS);
    scene.exit(inner);
    scene.wait(5 * MS);
    // Read when the span is over.
    scene.exit(outer);
    scene.read_run_delay(99 * MS);
    let next = scene.open();
    scene.enter(next);
    scene.wait(5 * MS);
    scene.exit(next);
    let of = |id| {
        let usage = scene.close(id).account.usage;
        [usage.run_delay_ns, usage.run_delay_read_ns]
    };
    assert_eq!(of(inner), [2 * MS, 10 * MS]);
    assert_eq!(of(outer), [6 * MS, 20 * MS]);
    assert_eq!(of(next), [0, 0]);
}

/// A delay that is in progress when it is read counts when it ends.
#[test]
fn nothing_is_known_from_when_a_thread_may_have_waited_for_a_cpu() {
    let mut scene = Scene::new();
    let span = scene.open();
    scene.enter(span);
    let start = scene.script.now.load(Ordering::Relaxed);
    // In milliseconds: when it is read, and when the thread ran before; a hook follows each reading but the first.
    for (at, ran_at) in [(2, 0), (10, 8), (20, 10), (30, 10), (40, 30), (50, 42)] {
        let at = start + at * MS;
        scene.wait(at - scene.script.now.load(Ordering::Relaxed));
        scene.read_run_delay_of(RunDelay { at, ns: 0, ran_at: start + ran_at * MS });
        if at > start + 2 * MS {
            let inner = scene.open();
            scene.enter(inner);
            scene.exit(inner);
        }
    }
    scene.wait(10 * MS);
    scene.exit(span);
    assert_eq!(scene.close(span).account.usage.run_delay_read_ns, (42 - 2) * MS);
}

#[test]
fn a_thread_that_was_switched_out_and_never_blocked_waited_for_a_cpu() {
    let mut scene = Scene::new();
    // Preempted, also blocked, and stopped by what no switch explains, such as a hypervisor.
    for (switches, expected) in [([0, 2], 7 * MS), ([1, 2], 0), ([0, 0], 0)] {
        let span = scene.open();
        scene.enter(span);
        scene.wait(5 * MS);
        scene.is_off(7 * MS, switches);
        scene.exit(span);
        assert_eq!(scene.close(span).account.usage.preempted_ns, expected, "{switches:?}");
    }
    // It can all have been before the inner span.
    let outer = scene.open();
    scene.enter(outer);
    scene.is_off(50_000, [0, 1]);
    let inner = scene.open_judged(GivenParent::Contextual, 0);
    scene.enter(inner);
    scene.wait(210 * MS);
    scene.exit(inner);
    scene.exit(outer);
    assert_eq!(scene.close(inner).account.usage.preempted_ns, 0);
    // A nanosecond passes with each close.
    assert_eq!(scene.close(outer).account.usage.preempted_ns, 50_000 - 1);
}

#[test]
fn an_error_marks_the_span_and_its_ancestors() {
    let mut scene = Scene::new();
    let outer = scene.open();
    scene.enter(outer);
    let inner = scene.open();
    let sibling = scene.open();
    let failed = std::cell::RefCell::new(Vec::new());
    let fail = |scene: &Scene, id| {
        let add = |key| failed.borrow_mut().push(key);
        scene.spans.fail_nearest(AncestryFrom::Span(id), &|_, visit| _ = visit(id), &add);
    };
    fail(&scene, inner);
    fail(&scene, inner);
    let inner = scene.close(inner);
    assert!(inner.has(FAILED));
    assert!(!scene.close(sibling).has(FAILED));
    let outer = scene.close(outer);
    assert!(outer.has(FAILED));
    assert_eq!(failed.into_inner(), [inner.key, outer.key, inner.key]);
}

#[test]
fn below_an_unmatched_span_the_registry_is_asked_for_the_parent() {
    let mut scene = Scene::new();
    let (outer, other) = (scene.open(), scene.open());
    scene.enter(outer);
    let unmatched = id(1_000);
    scene.enter(unmatched);
    // The unmatched span has another parent.
    let ask = |from: AncestryFrom, visit: &mut dyn FnMut(RegistryId) -> bool| {
        assert!(matches!(from, AncestryFrom::Current));
        _ = visit(unmatched) || visit(other);
    };
    let inner = scene.open_as(GivenParent::Contextual, 0, &ask);
    assert_eq!(scene.close(inner).root, scene.key(other));
    scene.exit(unmatched);
    let never =
        |_: AncestryFrom, _: &mut dyn FnMut(RegistryId) -> bool| panic!("known without asking");
    let inner = scene.open_as(GivenParent::Contextual, 0, &never);
    assert_eq!(scene.close(inner).root, scene.key(outer));
}

#[test]
fn a_given_parent_is_followed_to_the_nearest_profiled_span() {
    let mut scene = Scene::new();
    let outer = scene.open();
    let unmatched = id(1_000);
    let ask = |from: AncestryFrom, visit: &mut dyn FnMut(RegistryId) -> bool| {
        assert!(matches!(from, AncestryFrom::Span(given) if given == unmatched));
        _ = visit(unmatched) || visit(outer);
    };
    let inner = scene.open_as(GivenParent::Span(unmatched), 0, &ask);
    assert_eq!(scene.close(inner).root, scene.key(outer));
}

#[test]
fn an_explicit_root_has_no_parent() {
    let mut scene = Scene::new();
    let outer = scene.open();
    scene.enter(outer);
    let root = scene.open_as(GivenParent::None, 0, &|_, _| panic!("nothing to ask"));
    let key = scene.key(root);
    assert_eq!(scene.close(root).root, key);
}

#[test]
fn a_detached_thread_is_attached_again() {
    let mut scene = Scene::new();
    let span = scene.open();
    scene.enter(span);
    scene.exit(span);
    let first = scene.sampled();
    first.note_unused();
    assert!(first.end_if_unused());
    scene.script.samples.store(0, Ordering::Relaxed);
    scene.wait(3 * 1_000 * MS);
    scene.enter(span);
    scene.sample(1);
    scene.exit(span);
    assert_eq!(scene.script.threads.lock().len(), 2);
    assert_eq!(scene.intervals(), [(scene.key(span), 0, 10)]);
}

#[test]
fn a_thread_that_uses_spans_is_not_detached() {
    let mut scene = Scene::new();
    let span = scene.open();
    scene.enter(span);
    scene.exit(span);
    scene.sampled().note_unused();
    scene.wait(3 * 1_000 * MS);
    scene.enter(span);
    scene.exit(span);
    assert!(!scene.sampled().end_if_unused());
}

#[test]
fn the_cpu_clock_bounds_what_each_span_had() {
    let mut scene = Scene::new();
    let span = scene.open();
    scene.enter(span);
    scene.wait(8 * MS);
    scene.wait_off_cpu(2 * MS);
    scene.exit(span);
    let account = scene.close(span).account;
    assert_eq!((account.on_cpu_ns, account.on_cpu_error_ns), (8 * MS, 0));
    assert_eq!(account.off_cpu_ns, 2 * MS);
}

#[test]
fn short_segments_are_bounded_by_later_reads() {
    let mut scene = Scene::new();
    let span = scene.open();
    for _ in 0..4 {
        // Too short an interval for a read of the CPU clock.
        scene.enter(span);
        scene.wait(10_000);
        scene.exit(span);
        scene.wait(2_500);
        scene.wait_off_cpu(2_500);
    }
    // 60 µs in total, of which the thread ran for 50: at least 30 of the 40 µs inside.
    let account = scene.close(span).account;
    let (least, most) =
        (account.on_cpu_ns - account.on_cpu_error_ns, account.on_cpu_ns + account.on_cpu_error_ns);
    assert!(least <= 30_000 && most >= 40_000, "{account:?}");
    assert_eq!(account.on_cpu_ns + account.off_cpu_ns, 40_000);
}

#[test]
fn two_subscribers_have_separate_layers() {
    let (mut one, mut other) = (Scene::new(), Scene::new());
    let (a, b) = (one.open(), other.open());
    one.enter(a);
    other.enter(b);
    one.sample(1);
    other.sample(2);
    other.exit(b);
    one.exit(a);
    assert_eq!(one.intervals(), [(one.key(a), 0, 10)]);
    assert_eq!(other.intervals(), [(other.key(b), 0, 20)]);
}

#[test]
fn the_end_of_a_thread_is_detected() {
    let mut scene = Scene::new();
    let span = scene.open();
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            scene.spans.enter(span);
            scene.spans.exit(span);
            assert!(!scene.sampled().is_over());
        });
        // The scope alone does not wait for the thread's destructors.
        thread.join().unwrap();
    });
    assert!(scene.sampled().is_over());
}

#[test]
fn an_ignored_thread_is_not_recorded() {
    let mut scene = Scene::new();
    let outside = scene.open();
    let scene = &mut scene;
    std::thread::scope(|scope| {
        scope.spawn(move || {
            local::ignore_this_thread();
            let span = scene.open();
            scene.enter(span);
            scene.exit(span);
            scene.enter(outside);
            scene.exit(outside);
            assert!(scene.spans.key_of(span).is_none());
            assert!(scene.script.threads.lock().is_empty());
        });
    });
}

#[test]
fn an_unsampled_enter_of_an_old_span_wakes_an_idle_collector() {
    let mut scene = Scene::new();
    scene.script.refuses.store(true, Ordering::Relaxed);
    let wakes = Arc::clone(&scene.script.wakes);
    let span = scene.open_young(10 * MS);
    let enter_for = |scene: &Scene, ns| {
        scene.enter(span);
        scene.wait(ns);
        scene.exit(span);
    };
    scene.spans.set_scans_rarely(true);
    enter_for(&scene, 6 * MS);
    enter_for(&scene, 6 * MS);
    assert!(wakes.lock().is_empty(), "it was young at each enter");
    let now = scene.spans.clock.now();
    enter_for(&scene, MS);
    assert_eq!(wakes.lock().len(), 1);
    assert!(wakes.lock()[0] <= now, "the collector finds it old");
    enter_for(&scene, MS);
    assert_eq!(wakes.lock().len(), 1, "no scan since");
    scene.spans.set_scans_rarely(true);
    enter_for(&scene, MS);
    assert_eq!(wakes.lock().len(), 2);
    scene.spans.set_scans_rarely(false);
    enter_for(&scene, MS);
    assert_eq!(wakes.lock().len(), 2, "the next scan is soon anyway");
    scene.spans.set_scans_rarely(true);
    scene.script.refuses.store(false, Ordering::Relaxed);
    scene.script.attach(&scene.sampled());
    enter_for(&scene, MS);
    assert_eq!(wakes.lock().len(), 2, "it is sampled");
}

/// The collector is woken once, as long as it finds such spans, and again after it has found none.
#[test]
fn a_span_whose_open_time_is_limited_wakes_the_collector_once() {
    let scene = Scene::new();
    let plan = |flags| Plan { number: 7, flags, ..Plan::default() };
    let open = |number: u64, flags| {
        let given = GivenParent::None;
        scene.spans.open(id(number), &plan(flags), 0, given, &|_, _| {}).is_first_watched
    };
    let close = |number: u64| scene.spans.close(id(number), |_| Verdict::default());
    assert!(!open(1, 0) && !scene.spans.has_watched());
    assert!(open(2, WATCHED | ALWAYS_JUDGED) && scene.spans.has_watched());
    assert!(!open(3, WATCHED | ALWAYS_JUDGED));
    // It may look at any time; spans 2 and 3 are open.
    let look = || {
        scene.spans.forget_watched();
        let mut open = 0;
        scene.spans.for_each_open(|_| open += 1);
        if open > 1 {
            scene.spans.keep_watching();
        }
    };
    look();
    assert!(scene.spans.has_watched() && !open(4, WATCHED | ALWAYS_JUDGED));
    // While it looks.
    scene.spans.forget_watched();
    assert!(open(5, WATCHED | ALWAYS_JUDGED) && !open(6, WATCHED | ALWAYS_JUDGED));
    (2..=6).for_each(|number| _ = close(number));
    assert!(scene.spans.has_watched(), "not until it looks");
    look();
    assert!(!scene.spans.has_watched());
    // Values that are recorded can begin it, too.
    assert!(!open(7, HAS_FIELDS));
    let replan = |flags| scene.spans.replan(id(7), |_, _| Some((plan(flags | HAS_FIELDS), 0)));
    assert!(!replan(0) && replan(WATCHED) && !replan(WATCHED) && !replan(0) && !replan(WATCHED));
    assert!(scene.spans.has_watched());
}

/// Threads below one span that they are not in, each with a child span of its own.
struct Below<'a> {
    scene: &'a Scene,
    root: RegistryId,
    children: Vec<RegistryId>,
}

impl<'a> Below<'a> {
    fn new(scene: &'a mut Scene, flags: u32, threads: usize) -> Self {
        let root = scene.open_judged(GivenParent::None, flags);
        let parent = GivenParent::Span(root);
        let children = (0..threads).map(|_| scene.open_judged(parent, 0)).collect();
        Self { scene, root, children }
    }

    /// The time inside the root on other threads: what is known of it, and what may be.
    fn inside_ns(account: &TimeBreakdown) -> (u64, u64) {
        let on_ns = account.subtree_on_cpu_ns - account.on_cpu_ns;
        let error_ns = account.subtree_on_cpu_error_ns - account.on_cpu_error_ns;
        (on_ns - error_ns, on_ns + error_ns)
    }

    fn polls(&self, child: RegistryId, polls: u64, each_ns: u64) {
        for _ in 0..polls {
            self.scene.enter(child);
            self.scene.wait(each_ns);
            self.scene.exit(child);
        }
    }

    fn account(&self) -> TimeBreakdown {
        let key = self.scene.key(self.root);
        self.scene.spans.as_closing(self.root, key).unwrap().0.account
    }
}

#[test]
fn time_of_other_threads_below_a_span_is_counted_completely() {
    // Some polls are synced, and others are not.
    for (polls, each_ns) in
        [(1, 1_000), (31, 1_000), (32, 50), (33, 50), (900, 1_000), (70, 40_000)]
    {
        for (threads, end) in [(1, true), (1, false), (3, false), (3, true)] {
            for flags in [0, JUDGES_CPU | JUDGES_SUBTREE] {
                let mut scene = Scene::new();
                let below = Below::new(&mut scene, flags, threads);
                let (done, leave) = (&Barrier::new(2), &Barrier::new(threads + 1));
                let all_ns = polls * each_ns * threads as u64;
                // A segment of which all is known counts as one of which a nanosecond is not.
                let syncs = if flags == 0 { all_ns / MS + 2 } else { polls } * threads as u64;
                let check = |account: &TimeBreakdown| {
                    let (least, most) = Below::inside_ns(account);
                    let is_right = least <= all_ns && (all_ns..=all_ns + syncs).contains(&most);
                    assert!(is_right, "{least} {most} of {all_ns}");
                };
                let mut account = None;
                std::thread::scope(|scope| {
                    for child in below.children.clone() {
                        let below = &below;
                        scope.spawn(move || {
                            below.polls(child, polls, each_ns);
                            below.scene.spans.close(child, |_| Verdict::default());
                            done.wait();
                            if !end {
                                leave.wait();
                            }
                        });
                        done.wait();
                    }
                    let open = below.account();
                    below.scene.wait(250 * MS);
                    below.scene.spans.close(below.root, |closing| {
                        account = Some(closing.account);
                        Verdict::default()
                    });
                    if !end {
                        leave.wait();
                    }
                    check(&open);
                });
                check(&account.unwrap());
            }
        }
    }
}

#[test]
fn hooks_visit_far_ancestors_as_often_as_is_cheap() {
    let mut scene = Scene::new();
    let mut chain = vec![scene.open_judged(GivenParent::None, 0)];
    for _ in 0..1_000 {
        let parent = GivenParent::Span(*chain.last().unwrap());
        chain.push(scene.open_judged(parent, 0));
    }
    scene.wait(100 * MS);
    let polls = |count| {
        for _ in 0..count {
            scene.enter(chain[1_000]);
            scene.wait(10_000);
            scene.exit(chain[1_000]);
        }
    };
    let inside_us = |at: usize| {
        let id = chain[at];
        let (closing, _) = scene.spans.as_closing(id, scene.key(id)).unwrap();
        // Bounds are off by a nanosecond.
        Below::inside_ns(&closing.account).1 / 1_000
    };
    let left_out = || scene.spans.counters.snapshot().spans.ancestors_left_out;
    let before = left_out();
    polls(100);
    assert_eq!([999, 936, 935, 0].map(inside_us), [1_000, 1_000, 10, 10]);
    assert_eq!(left_out() - before, 2 * 99);
    // What is visited takes a twentieth of the time, whatever the depth.
    scene.wait(4_100 * 1_000);
    polls(1);
    assert_eq!(inside_us(0), 20);
}

#[test]
fn nothing_is_wanted_inside_hundreds_of_spans() {
    let mut scene = Scene::new();
    let mut entered = Vec::new();
    while !(has_deepest() && scene.spans.is_too_deep()) {
        let span = scene.open();
        scene.enter(span);
        entered.push(span);
    }
    // The first one that is too deep is seen when it opens.
    assert_eq!(entered.len(), 258);
    assert_eq!(scene.spans.counters.snapshot().spans.declined_too_deep, 1);
    // Here, and as long as the thread is there.
    let is_too_deep = || scene.spans.is_too_deep();
    assert!(!std::thread::scope(|scope| scope.spawn(is_too_deep).join().unwrap()));
    entered.split_off(256).into_iter().rev().for_each(|span| scene.exit(span));
    assert!(!is_too_deep());
    // Also inside one with ancestors elsewhere, and not inside a root that is entered on top of others.
    let ask: Ancestry<'_> = &|from, visit| {
        if let AncestryFrom::Span(id) = from {
            visit(id);
        }
    };
    let root = scene.open_as(GivenParent::None, 0, ask);
    scene.enter(root);
    scene.exit(root);
    let mut chain = vec![root];
    for _ in 0..256 {
        let parent = GivenParent::Span(*chain.last().unwrap());
        chain.push(scene.open_as(parent, 0, ask));
    }
    scene.wait(5 * MS);
    for (at, is_deep) in [(256, true), (255, false), (0, false)] {
        scene.enter(chain[at]);
        assert_eq!(scene.spans.is_too_deep(), is_deep, "{at}");
        scene.exit(chain[at]);
        scene.wait(5 * MS);
    }
}

/// What a thread has added up is moved when its accounts are synced, and not at each poll.
#[test]
fn polls_below_a_long_lived_span_do_not_write_to_it() {
    let mut scene = Scene::new();
    let below = Below::new(&mut scene, 0, 1);
    let in_slot = || {
        let slot = below.scene.spans.table.get(below.root).unwrap();
        Below::inside_ns(&slot.account(&below.scene.spans.clock, 250 * MS)).1
    };
    let child = below.children[0];
    below.polls(child, 100, 1_000);
    let (before, mut writes) = (in_slot(), 0);
    let mut last = before;
    for poll in 101..3_000 {
        below.polls(child, 1, 1_000);
        writes += i32::from(in_slot() != last);
        last = in_slot();
        let most = Below::inside_ns(&below.account()).1;
        assert!((poll * 1_000..poll * 1_000 + 5).contains(&most), "{most} after {poll}");
    }
    assert!(writes <= 3, "{writes} writes in 3 ms");
    assert!(before < last && last <= 3_000_000);
}

#[test]
fn a_span_gets_older_by_what_its_threads_have_added_up() {
    for sampling_delay in [100_000, 20 * MS] {
        let mut scene = Scene::new();
        let root = id(900);
        let plan = Plan { judge_after: 200 * MS, sampling_delay, ..Plan::default() };
        scene.spans.open(root, &plan, 0, GivenParent::None, &|_, _| {});
        let child = scene.open_judged(GivenParent::Span(root), 0);
        let mut left = sampling_delay;
        while left > 0 {
            let now = scene.script.now.load(Ordering::Relaxed);
            scene.enter(child);
            assert_eq!(scene.sampled().samples_from() - now, left);
            scene.wait(1_000);
            scene.exit(child);
            scene.wait(500);
            left -= 1_000;
        }
    }
}

/// More spans at a time than a thread adds up for, in the same slots one after another.
#[test]
fn sums_of_one_span_are_not_those_of_another() {
    let mut scene = Scene::new();
    let open = |scene: &mut Scene, root: RegistryId| {
        let plan = Plan { judge_after: 0, ..Plan::default() };
        scene.spans.open(root, &plan, 0, GivenParent::None, &|_, _| {});
        (root, scene.open_judged(GivenParent::Span(root), 0))
    };
    let close = |scene: &Scene, (root, child): (RegistryId, RegistryId)| {
        scene.spans.close(child, |_| Verdict::default());
        Below::inside_ns(&scene.close(root).account).1
    };
    for _ in 0..3 {
        let opened: Vec<_> = (0..20).map(|number| open(&mut scene, id(1_000 + number))).collect();
        for (burst, each_ns) in [(40, 100), (1, 7_000), (64, 20), (2, 10)] {
            for (number, (_, child)) in (1..).zip(&opened) {
                for _ in 0..burst * number {
                    scene.enter(*child);
                    scene.wait(each_ns);
                    scene.exit(*child);
                }
            }
        }
        for (number, one) in (1..).zip(opened) {
            let (expected, found) = (number * (4_000 + 7_000 + 1_280 + 20), close(&scene, one));
            assert!((expected..expected + 7).contains(&found), "{found} instead of {expected}");
        }
        // One that never ran.
        let other = open(&mut scene, id(1_000));
        assert_eq!(close(&scene, other), 0);
    }
}

#[test]
fn spans_that_open_inside_an_old_span_are_reported_when_they_close() {
    let mut scene = Scene::new();
    let root = scene.open_plan(1, GivenParent::Contextual);
    scene.enter(root);
    let key = scene.key(root);
    let before = scene.open_plan(2, GivenParent::Contextual);
    scene.wait(9 * MS);
    scene.child(3, 1);
    assert_eq!((scene.child_closes(), scene.span_events()), (vec![], vec![]), "young");
    let outer = scene.open_plan(4, GivenParent::Contextual);
    scene.enter(outer);
    scene.child(5, 7);
    scene.close_unjudged(before);
    // Not inside it, although the thread is in an old one.
    let other = scene.open_plan(6, GivenParent::None);
    scene.close_unjudged(other);
    scene.exit(outer);
    scene.close_unjudged(outer);
    assert_eq!(scene.child_closes(), [(key, 5, 10, 17), (key, 4, 10, 17)]);
    // The collector has to release what it counts.
    let events = scene.span_events();
    assert!(matches!(events[..], [SpanEvent::Opened(opened, _)] if opened == key), "{events:?}");
    scene.exit(root);
    scene.close(root);
    assert_eq!(scene.span_events(), [SpanEvent::Closed { key, ids: None, closed_ns: 0 }]);
    assert!(!scene.spans.take_lost_child());
}

#[test]
fn spans_inside_a_span_that_is_sampled_from_its_enter_all_count() {
    let mut scene = Scene::new();
    let root = scene.open_plan(1, GivenParent::Contextual);
    scene.spans.make_reference(root, 3);
    let early = scene.open_plan(2, GivenParent::Span(root));
    scene.close_unjudged(early);
    scene.enter(root);
    scene.child(3, 5);
    let all: Vec<_> = scene.spans.take_child_closes().collect();
    assert_eq!(all.iter().map(|it| it.plan).collect::<Vec<_>>(), [2, 3]);
    assert!(all.iter().all(|it| it.from == 0));
    // Sampled from now on, and not from its start.
    let other = scene.open_plan(4, GivenParent::None);
    scene.enter(other);
    assert!(scene.spans.force_current());
    scene.child(5, 1);
    let all: Vec<_> = scene.spans.take_child_closes().collect();
    assert_eq!(
        all.iter().map(|it| (it.plan, it.from == it.opened)).collect::<Vec<_>>(),
        [(5, true)]
    );
}

#[test]
fn spans_inside_an_old_span_count_on_other_threads_too() {
    let mut scene = Scene::new();
    let root = scene.open_plan(1, GivenParent::Contextual);
    let key = scene.key(root);
    scene.enter(root);
    let closes = |scene: &mut Scene| {
        let child = scene.open_plan(2, GivenParent::Span(root));
        scene.close_unjudged(child);
        scene.child_closes().len()
    };
    scene.wait(9 * MS);
    std::thread::scope(|scope| scope.spawn(|| assert_eq!(closes(&mut scene), 0)).join().unwrap());
    scene.wait(MS);
    std::thread::scope(|scope| scope.spawn(|| assert_eq!(closes(&mut scene), 1)).join().unwrap());
    // Also while no thread is in it.
    scene.exit(root);
    let below = scene.open_plan(3, GivenParent::Span(root));
    let child = scene.open_plan(4, GivenParent::Span(below));
    scene.close_unjudged(child);
    scene.close_unjudged(below);
    let owners: Vec<_> = scene.child_closes().iter().map(|it| (it.0, it.1)).collect();
    assert_eq!(owners, [(key, 4), (key, 3)]);
}

#[test]
fn spans_inside_a_request_that_awaits_count_once_it_has_been_open_for_ten_times_as_long() {
    let mut scene = Scene::new();
    let root = scene.open_plan(1, GivenParent::Contextual);
    let key = scene.key(root);
    for _ in 0..20 {
        scene.enter(root);
        let query = scene.open_plan(2, GivenParent::Contextual);
        scene.exit(root);
        // It is awaited.
        scene.wait(9 * MS);
        scene.close_unjudged(query);
    }
    let expected: Vec<_> = (12..20).map(|n| (key, 2, 9 * n, 9 * n + 9)).collect();
    assert_eq!(scene.child_closes(), expected);
}

#[test]
fn a_slow_span_counts_that_was_open_when_its_request_became_old_as_open() {
    let mut scene = Scene::new();
    let root = scene.open_plan(1, GivenParent::Contextual);
    // Half as long as a slow one, which `closes_plainly` asks.
    let plan =
        Plan { number: 2, judge_after: 400 * MS, sampling_delay: 10 * MS, ..Plan::default() };
    let step = |number: u64, ms| {
        let id = id(5_000 + number);
        let parent: Ancestry<'_> = &|_, visit| _ = visit(root);
        scene.spans.open(id, &plan, 0, GivenParent::Span(root), parent);
        scene.wait(ms * MS);
        scene.close_unjudged(id);
        let closes: Vec<_> = scene.spans.take_child_closes().collect();
        let opened = scene.spans.table.get(root).unwrap().opened();
        closes.iter().map(|it| [it.closed, it.from].map(|at| (at - opened) / MS)).next()
    };
    assert_eq!(step(1, 50), None, "the request is young");
    assert_eq!(step(2, 201), Some([251, 100]), "all count that open from 100 ms on");
    assert_eq!(step(3, 3), Some([254, 251]));
}

#[test]
fn a_request_inside_a_span_that_is_open_for_long_counts_its_own() {
    let mut scene = Scene::new();
    let connection = scene.open_plan(1, GivenParent::Contextual);
    scene.wait(20_000 * MS);
    let request = scene.open_plan(2, GivenParent::Span(connection));
    let (connection_key, request_key) = (scene.key(connection), scene.key(request));
    scene.enter(request);
    scene.child(3, 10);
    assert_eq!(scene.child_closes(), [], "the request is young, and the connection idle");
    scene.child(4, 5);
    let expected = [(request_key, 4, 20_010, 20_015), (connection_key, 4, 20_010, 20_015)];
    assert_eq!(scene.child_closes(), expected);
    // However long it takes.
    scene.wait(5_000 * MS);
    scene.child(5, 5);
    let owners: Vec<_> = scene.child_closes().iter().map(|it| it.0).collect();
    assert_eq!(owners, [request_key, connection_key]);
}

#[test]
fn a_request_ends_at_what_was_open_for_long_when_it_began() {
    let mut scene = Scene::new();
    let main = scene.open_plan(1, GivenParent::Contextual);
    scene.wait(20_000 * MS);
    let request = scene.open_plan(2, GivenParent::Span(main));
    let early = scene.open_plan(3, GivenParent::Span(request));
    // However long it takes by now.
    scene.wait(5_000 * MS);
    let keys = [main, request, early].map(|id| scene.key(id));
    let of = |id, key| scene.spans.request_of(id, key);
    assert_eq!(of(early, keys[2]), Some(vec![keys[2], keys[1]]));
    assert_eq!(of(request, keys[1]), Some(vec![keys[1]]));
    assert_eq!(of(main, keys[0]), Some(vec![keys[0]]));
    assert_eq!(of(early, keys[1]), None, "it has closed");
}

#[test]
fn child_spans_that_the_collector_does_not_take_in_time_are_lost_and_counted() {
    let mut scene = Scene::new();
    let root = scene.open_plan(1, GivenParent::Contextual);
    scene.enter(root);
    scene.wait(10 * MS);
    let capacity = scene.spans.child_closes.capacity() as u64;
    let mut is_behind_at = None;
    for n in 0..capacity + 3 {
        let child = scene.open_plan(2, GivenParent::Contextual);
        if scene.spans.close(child, |_| panic!("judged")) {
            _ = is_behind_at.get_or_insert(n);
        }
    }
    assert_eq!(is_behind_at, Some(capacity / 2), "the collector is woken");
    assert_eq!(scene.child_closes().len() as u64, capacity);
    let dropped = &scene.spans.counters.children.dropped_queue_full;
    assert_eq!(dropped.load(Ordering::Relaxed), 3);
    assert!(scene.spans.take_lost_child() && !scene.spans.take_lost_child());
}

#[test]
fn a_reference_is_sampled_from_its_enter_on_whatever_is_recorded_and_less_when_open_for_long() {
    let scene = Scene::new();
    let plan = |number| Plan {
        number,
        flags: HAS_FIELDS,
        sampling_delay: 10 * MS,
        long_after: 1_000 * MS,
        ..Plan::default()
    };
    scene.spans.open(id(1), &plan(1), 0, GivenParent::None, &|_, _| {});
    // After how long a segment that begins now is sampled.
    let is_sampled_after_ms = || {
        let now = scene.script.now.load(Ordering::Relaxed);
        (scene.spans.table.get(id(1)).unwrap().samples_from(now) - now) / MS
    };
    assert_eq!(is_sampled_after_ms(), 10);
    scene.spans.make_reference(id(1), 3);
    assert_eq!(is_sampled_after_ms(), 0);
    // A field is recorded, and another rule matches.
    scene.spans.replan(id(1), |_, _| Some((plan(2), 0)));
    assert_eq!(is_sampled_after_ms(), 0);
    // It stays open for long, as a connection does: what is in it is sampled once that takes long.
    scene.wait(2_000 * MS);
    assert_eq!(is_sampled_after_ms(), 5);
}
