//! Plays scripts and compares the reports.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::rc::Rc;
use std::sync::OnceLock;
use std::time::Duration;

use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner};
use tracing::Dispatch;
use tracing_subscriber::layer::SubscriberExt;

use super::oracle::{ChildSums, Oracle, Place, Reported, ReportedSpan, Times};
use super::script::{Kind, Op, Step, THREADS, Under, Ways, script};
use super::stage::{Snapshot, Stage};
use crate::control::Control;
use crate::facts::Reason;
use crate::intake::inside::INSIDE;
use crate::layer::ProfilingLayer;
use crate::sys;

/// Without `PROPTEST_CASES`: the same scripts in each run. With it, the scripts are random.
const CASES: u32 = 2_000;
/// The limit for a script, so that rings do not fill up and names stay few.
const MOST_SPANS: usize = 40;

/// How often each situation occurred that the scripts are meant to reach.
#[derive(Debug, Default)]
struct Reached(BTreeMap<&'static str, u32>);

impl Reached {
    fn note(&mut self, reported: &Reported, is_root_open: bool, has_old_samples: bool) {
        let any = |is: fn(&ReportedSpan) -> bool| reported.kept.iter().any(is);
        let profile = reported.profile.as_ref();
        let is_deep = |place: &Place| place.path.len() > 2;
        for (what, is_so) in [
            ("a profile", profile.is_some()),
            ("no profile", profile.is_none()),
            ("a profile of several spans", profile.is_some() && reported.kept.len() > 1),
            ("a profile while the root is open", profile.is_some() && is_root_open),
            ("samples that another profile has", has_old_samples),
            ("a deep path", profile.is_some_and(|it| it.samples.values().any(is_deep))),
            ("child spans", any(|span| span.children.count > 0)),
            ("a wait", profile.is_some_and(|it| !it.waits.is_empty())),
            ("off-CPU time", any(|span| span.times.off_cpu_ns > 0)),
            ("time in other spans", any(|span| span.times.other_ns > 0)),
            ("a span on two threads at once", any(|span| span.times.is_more_than_wall())),
        ] {
            *self.0.entry(what).or_default() += u32::from(is_so);
        }
    }

    fn note_snapshot(&mut self, samples: usize) {
        *self.0.entry("a snapshot of an open span").or_default() += u32::from(samples > 0);
    }

    /// Each situation must occur in at least one of a hundred scripts.
    fn check(&self, scripts: u32) {
        let rare: Vec<_> = self.0.iter().filter(|(_, count)| **count < scripts / 100).collect();
        assert!(rare.is_empty(), "too rare in {scripts} scripts: {rare:?}");
    }
}

/// A script that is played on the stage and through the oracle.
struct Play {
    reached: Reached,
    oracle: Oracle,
    stage: Stage,
    /// Spans are sampled a moment after their first enter.
    is_late: bool,
    /// The numbers of the samples that are in a profile.
    profiled: BTreeSet<usize>,
    /// The steps so far, in words.
    story: String,
}

fn stage(Ways { has_switches, is_late }: Ways) -> Stage {
    Stage::new(has_switches, is_late, |engine| {
        let layer = ProfilingLayer::new(Control::of_engine(engine));
        Dispatch::new(tracing_subscriber::registry().with(layer))
    })
}

impl Play {
    fn new(ways: Ways) -> Self {
        let (stage, Ways { has_switches, is_late }) = (stage(ways), ways);
        let oracle = Oracle::new(has_switches);
        let reached = Reached::default();
        let (profiled, story) = (BTreeSet::new(), String::new());
        Self { reached, oracle, stage, is_late, profiled, story }
    }

    fn op(&mut self, op: &Op) -> Result<(), String> {
        let held = self.oracle.held();
        // Counts from the latest span backwards, so that a script stays similar when its beginning is removed.
        let pick = |number: u8| {
            let back = usize::from(number) % held.len().max(1);
            held.iter().rev().nth(back).copied()
        };
        let resolve = |under| match under {
            Under::Current => Under::Current,
            Under::Nothing => Under::Nothing,
            Under::Span(number) => pick(number).map_or(Under::Nothing, Under::Span),
        };
        let oracle = &self.oracle;
        let mut steps = Vec::new();
        match *op {
            Op::Open { thread, kind, under, enter } => {
                let thread = usize::from(thread);
                let span = oracle.span_count();
                let under = resolve(under);
                if span < MOST_SPANS {
                    steps.push(Step::Open { thread, span, kind, under });
                    steps.extend(enter.then_some(Step::Enter { thread, span }));
                }
            }
            Op::Child { thread, under, samples, flush } => {
                let thread = usize::from(thread);
                let span = oracle.span_count();
                if span < MOST_SPANS {
                    let (kind, under) = (Kind::Failing, resolve(under));
                    steps.push(Step::Open { thread, span, kind, under });
                    steps.push(Step::Enter { thread, span });
                    steps.extend(oracle.next_samples(samples).map(|number| Step::Sample {
                        thread,
                        number,
                        weight_ns: None,
                    }));
                    steps.push(Step::Error { thread, span: None });
                    steps.push(Step::Exit { thread, span });
                    steps.push(Step::Drop { thread, span });
                    steps.push(Step::Round { flush, detach: false });
                }
            }
            Op::Enter { thread, span } => {
                let thread = usize::from(thread);
                steps.extend(pick(span).map(|span| Step::Enter { thread, span }));
            }
            Op::Exit { thread, up, and_drop } => {
                let thread = usize::from(thread);
                let span = oracle.entered(thread).iter().rev().nth(up.into()).copied();
                let span = span.filter(|span| !oracle.is_unmatched_below(thread, *span));
                steps.extend(span.map(|span| Step::Exit { thread, span }));
                let span = span.filter(|span| and_drop && held.contains(span));
                steps.extend(span.map(|span| Step::Drop { thread, span }));
            }
            Op::Panic { thread } => steps.push(Step::Panic { thread: thread.into() }),
            Op::Drop { thread, span } => {
                let thread = usize::from(thread);
                steps.extend(pick(span).map(|span| Step::Drop { thread, span }));
            }
            Op::Error { thread, span } => {
                steps.push(Step::Error { thread: thread.into(), span: span.and_then(pick) });
            }
            Op::Status { thread, span } => {
                let span = pick(span).filter(|span| oracle.kind(*span).has_status());
                let thread = usize::from(thread);
                steps.extend(span.map(|span| Step::Status { thread, span }));
            }
            Op::Samples { thread, count, with_weight } => {
                let thread = usize::from(thread);
                if oracle.is_attached(thread) {
                    steps.extend(oracle.next_samples(count).map(|number| {
                        let weight_ns = with_weight.then_some(3_000_000 + number as u64);
                        Step::Sample { thread, number, weight_ns }
                    }));
                }
            }
            Op::Pass { ns } => steps.push(Step::Pass { ns }),
            Op::Off { thread, ns, preempted } => {
                let thread = usize::from(thread);
                steps.push(Step::SwitchOut { thread, preempted });
                steps.push(Step::Pass { ns });
                steps.push(Step::SwitchIn { thread });
            }
            Op::Wait { thread, before_ns, after_ns } => {
                let thread = usize::from(thread);
                steps.push(Step::SwitchOut { thread, preempted: false });
                steps.push(Step::Pass { ns: before_ns });
                steps.push(Step::Round { flush: false, detach: false });
                steps.push(Step::Pass { ns: after_ns });
                steps.push(Step::SwitchIn { thread });
            }
            Op::Round { flush } => steps.push(Step::Round { flush, detach: false }),
            Op::Detach => {
                steps.push(Step::Round { flush: false, detach: false });
                // Threads check once per millisecond whether they were detached.
                steps.push(Step::Pass { ns: 1_100_000_000 });
                steps.push(Step::Round { flush: false, detach: true });
            }
            Op::EndThread { thread } => {
                let thread = usize::from(thread);
                steps.extend(self.leave_all(thread));
                steps.push(Step::EndThread { thread });
            }
        }
        steps.iter().try_for_each(|step| self.step(step))
    }

    fn leave_all(&self, thread: usize) -> Vec<Step> {
        let entered = self.oracle.entered(thread).iter().rev();
        entered.map(|span| Step::Exit { thread, span: *span }).collect()
    }

    fn step(&mut self, step: &Step) -> Result<(), String> {
        let attached = self.stage.attached();
        if let Step::Sample { thread, .. } = step
            && !attached[*thread]
        {
            return Ok(());
        }
        self.oracle.set_attached(attached);
        _ = writeln!(self.story, "{step}");
        let period_ns = match step {
            Step::Sample { thread, .. } => self.stage.period_ns(*thread),
            _ => 0,
        };
        let mut expected = self.oracle.play(step, period_ns);
        for reported in &expected {
            let samples = reported.profile.iter().flat_map(|profile| profile.samples.keys());
            let old = samples.filter(|number| !self.profiled.insert(**number)).count();
            self.reached.note(reported, self.oracle.is_open(reported.root), old > 0);
        }
        let mut reported = self.stage.play(step);
        self.oracle.note_known(&self.stage.known());
        for Snapshot { spans, samples } in self.stage.take_snapshots() {
            self.reached.note_snapshot(samples.len());
            let expected = self.oracle.samples_in(&spans);
            if samples != expected {
                return Err(format!(
                    "a snapshot of {spans:?} has {samples:?}, expected {expected:?}"
                ));
            }
        }
        // Spans without a profile are reported in the order of the log.
        for one in expected.iter_mut().chain(&mut reported).filter(|one| one.profile.is_none()) {
            one.kept.sort_by_key(|kept| (kept.opened_ns, kept.span));
        }
        let first = |reported: &Reported| reported.kept.first().map(|kept| kept.span);
        expected.sort_by_key(first);
        reported.sort_by_key(first);
        for (reported, expected) in reported.iter_mut().zip(&expected) {
            for (reported, expected) in reported.kept.iter_mut().zip(&expected.kept) {
                reported.times = without_bounds(reported.times, &expected.times);
                let samples = expected.samples..=expected.samples + expected.silent_waits;
                if samples.contains(&reported.samples) {
                    reported.samples = expected.samples;
                    reported.silent_waits = expected.silent_waits;
                }
                if self.is_late && is_part(&reported.children, &expected.children) {
                    reported.children = expected.children;
                }
            }
        }
        let is_same = reported == expected;
        is_same
            .then_some(())
            .ok_or_else(|| format!("reported {reported:#?}\nexpected {expected:#?}"))
    }

    /// Leaves and drops all spans, and flushes.
    fn end(&mut self) -> Result<(), String> {
        for thread in 0..THREADS {
            self.leave_all(thread).iter().try_for_each(|step| self.step(step))?;
        }
        for span in self.oracle.held() {
            self.step(&Step::Drop { thread: span % THREADS, span })?;
        }
        self.step(&Step::Round { flush: true, detach: false })?;
        assert!(self.oracle.is_done());
        let stats = self.stage.stats();
        let counted = [
            stats.spans.kept - stats.kept_for(Reason::Hung) - stats.kept_for(Reason::Open),
            stats.samples.taken,
            stats.samples.outside_spans,
            stats.samples.dropped_unknown_span,
            stats.sampling.records_malformed,
        ];
        let Oracle { spans_kept, samples_inside, samples_outside, .. } = self.oracle;
        let expected = [spans_kept, samples_inside, samples_outside, 0, 0];
        if counted != expected {
            return Err(format!("counted {counted:?}, expected {expected:?}"));
        }
        self.fall_asleep()
    }

    /// With no open profiled span and all threads detached, nothing wakes the collector.
    fn fall_asleep(&mut self) -> Result<(), String> {
        // The first one may only restart the idle time of a thread that was in a span.
        self.op(&Op::Detach)?;
        self.op(&Op::Detach)?;
        // Ended rings are given back one round later.
        self.step(&Step::Round { flush: false, detach: false })?;
        let sleep = self.stage.sleep();
        sleep.map_or(Ok(()), |sleep| Err(format!("the collector wakes up again in {sleep:?}")))
    }
}

/// Whether some of the child spans are counted: those that were created once one around them was old.
fn is_part(reported: &ChildSums, all: &ChildSums) -> bool {
    reported.count <= all.count
        && reported.total_ns <= all.total_ns
        && reported.longest_ns <= all.longest_ns
}

/// Replaces the reported times by the true ones if those lie within the reported error bounds. When exactly switches
/// happened is not known to the stage.
fn without_bounds(reported: Times, truth: &Times) -> Times {
    let is_within = reported.on_cpu_ns.abs_diff(truth.on_cpu_ns) <= reported.error_ns;
    let is_sum_right =
        reported.on_cpu_ns + reported.off_cpu_ns == truth.on_cpu_ns + truth.off_cpu_ns;
    let (voluntary, involuntary) = (truth.voluntary, truth.involuntary);
    let reported = Times { voluntary, involuntary, ..reported };
    if is_within && is_sum_right {
        let Times { on_cpu_ns, off_cpu_ns, .. } = *truth;
        return Times { on_cpu_ns, off_cpu_ns, error_ns: 0, ..reported };
    }
    reported
}

fn play(ops: &[Op], ways: Ways) -> Result<Reached, String> {
    let mut play = Play::new(ways);
    let result = ops.iter().try_for_each(|op| play.op(op)).and_then(|()| play.end());
    let Play { reached, stage, story, .. } = play;
    stage.end();
    result.map(|()| reached).map_err(|what| format!("after this:\n{story}\n{what}"))
}

/// How many threads play scripts.
const PARTS: usize = 2;

/// Plays the scripts whose numbers leave `part` when divided by [`PARTS`]. Once a script has failed, only its part goes on, with
/// simpler forms of it.
fn play_part(cases: Option<u32>, part: usize, failed: &OnceLock<usize>) -> Reached {
    let config = |cases| Config { cases, failure_persistence: None, ..Config::default() };
    let mut runner = match cases {
        Some(cases) => TestRunner::new(config(cases)),
        None => {
            let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
            TestRunner::new_with_rng(config(CASES), rng)
        }
    };
    let number = Cell::new(0);
    let reached = RefCell::new(Reached::default());
    let result = runner.run(&script(), |(ops, ways)| {
        let number = number.replace(number.get() + 1);
        if *failed.get().unwrap_or(&(number % PARTS)) != part {
            return Ok(());
        }
        let Reached(here) = play(&ops, ways).map_err(|what| {
            _ = failed.set(part);
            TestCaseError::fail(what)
        })?;
        let Reached(all) = &mut *reached.borrow_mut();
        here.into_iter().for_each(|(what, count)| *all.entry(what).or_default() += count.min(1));
        Ok(())
    });
    if let Err(error) = result {
        panic!("{error}");
    }
    reached.into_inner()
}

#[test]
fn layer_and_model_agree_on_all_scripts() {
    if sys::SampleRing::scripted(4096, 1).is_err() {
        // This system has no rings.
        return;
    }
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok());
    let (mut reached, failed) = (Reached::default(), &OnceLock::new());
    std::thread::scope(|scope| {
        let parts = std::array::from_fn::<_, PARTS, _>(|part| {
            scope.spawn(move || play_part(cases, part, failed))
        });
        for Reached(part) in parts.map(|part| part.join().unwrap()) {
            part.into_iter().for_each(|(what, count)| *reached.0.entry(what).or_default() += count);
        }
    });
    reached.check(cases.unwrap_or(CASES));
}

// Minimal cases that the test above has found.

fn must_agree(ops: &[Op]) {
    if sys::SampleRing::scripted(4096, 1).is_ok() {
        play(ops, Ways { has_switches: true, is_late: false })
            .unwrap_or_else(|what| panic!("{what}"));
    }
}

fn open(kind: Kind) -> Op {
    Op::Open { thread: 0, kind, under: Under::Current, enter: true }
}

const SAMPLE: Op = Op::Samples { thread: 0, count: 1, with_weight: false };
const ERROR: Op = Op::Error { thread: 0, span: None };

/// The collector may wait for a CPU before.
#[test]
fn a_profile_of_the_process_has_its_whole_time_from_when_it_begins() {
    if sys::own_threads().is_err() || sys::SampleRing::scripted(4096, 1).is_err() {
        return;
    }
    const HOUR: Duration = Duration::from_secs(3_600);
    let mut stage = stage(Ways { has_switches: true, is_late: false });
    let (begins, until) = stage.profile_of_process(HOUR);
    assert!(until >= begins + HOUR, "{:?} less", begins + HOUR - until);
    stage.end();
}

#[test]
fn a_span_that_is_entered_again_is_not_the_current_one() {
    let again = Op::Enter { thread: 0, span: 1 };
    let inside = open(Kind::Patient);
    must_agree(&[open(Kind::Failing), open(Kind::Patient), again, inside, SAMPLE, ERROR]);
}

#[test]
fn an_unmatched_span_stays_current_when_the_profiled_one_below_it_is_left() {
    let leave_below = Op::Exit { thread: 0, up: 1, and_drop: false };
    let outer = [open(Kind::Failing), open(Kind::Patient)];
    let ops = [open(Kind::Unmatched), leave_below, open(Kind::Patient), SAMPLE, ERROR];
    must_agree(&[&outer[..], &ops].concat());
}

#[test]
fn an_unmatched_span_stays_current_when_a_profiled_one_between_others_is_left() {
    let leave = |up| Op::Exit { thread: 0, up, and_drop: false };
    let outer = [open(Kind::Failing), open(Kind::Patient), open(Kind::Unmatched)];
    let inner = [open(Kind::Patient), open(Kind::Patient)];
    // The inner of the two patient spans is left after the outer one.
    let ops = [leave(1), leave(0), leave(1), open(Kind::Patient), SAMPLE, ERROR];
    must_agree(&[&outer[..], &inner, &ops].concat());
}

#[test]
fn a_span_inside_a_group_that_has_ended_has_its_samples_again() {
    let outer = [open(Kind::Patient), open(Kind::Failing), open(Kind::Failing)];
    let under = Under::Current;
    let child = |thread| Op::Child { thread, under, samples: 1, flush: true };
    // The innermost span is kept after its child, in the same group as a child of the outermost.
    let leave = Op::Exit { thread: 0, up: 0, and_drop: true };
    let enter_outermost = Op::Enter { thread: 1, span: 1 };
    must_agree(&[&outer[..], &[child(0), leave, enter_outermost, child(1)]].concat());
}

#[test]
fn an_exact_wait_is_not_shortened_to_an_inexact_account() {
    let child = |thread| Op::Child { thread, under: Under::Current, samples: 0, flush: false };
    let slow = Op::Open { thread: 1, kind: Kind::Slow, under: Under::Current, enter: true };
    let wait = Op::Wait { thread: 1, before_ns: 100_000_000, after_ns: 1 };
    must_agree(&[child(1), child(0), Op::Pass { ns: 2 }, slow, wait]);
}

/// SpanSnapshot a span waits neither for the collector, which runs no round here, nor for the exporter.
#[test]
fn ten_thousand_kept_spans_close_while_the_collector_stands_still() {
    const SPANS: usize = 10_000;
    if sys::SampleRing::scripted(4096, 1).is_err() {
        return;
    }
    let mut stage = stage(Ways { has_switches: true, is_late: false });
    let thread = 0;
    for span in 0..SPANS {
        stage.play(&Step::Open { thread, span, kind: Kind::Failing, under: Under::Nothing });
        stage.play(&Step::Enter { thread, span });
        // As many as fit into the ring.
        if span % 1_000 == 0 {
            stage.play(&Step::Sample { thread, number: span, weight_ns: None });
        }
        stage.play(&Step::Error { thread, span: None });
        stage.play(&Step::Exit { thread, span });
        stage.play(&Step::Drop { thread, span });
    }
    assert_eq!(stage.stats().spans.kept, SPANS as u64);
    let reported = stage.play(&Step::Round { flush: true, detach: false });
    let reported: usize = reported.iter().map(|reported| reported.kept.len()).sum();
    let unreported = stage.stats().spans.kept_unreported;
    assert_eq!(reported as u64 + unreported, SPANS as u64, "no span is lost");
    assert!(reported >= 1_000, "{reported}");
    stage.end();
}

/// The collector is held inside its steps, of which registering spans and making a profile take longest, until spans
/// have closed on another thread.
#[test]
fn spans_close_while_the_collector_is_inside_a_step() {
    const SPANS: usize = 1_000;
    /// The spans of the first round: each round that finds closed spans is followed by another one.
    const STEPS: usize = 3;
    if sys::SampleRing::scripted(4096, 1).is_err() {
        return;
    }
    let mut stage = stage(Ways { has_switches: true, is_late: false });
    // Both are in one group, which ends while the root is open.
    for span in 0..2 {
        let under = Under::Current;
        stage.play(&Step::Open { thread: 0, span, kind: Kind::Failing, under });
        stage.play(&Step::Enter { thread: 0, span });
    }
    stage.play(&Step::Sample { thread: 0, number: 0, weight_ns: None });
    stage.play(&Step::Error { thread: 0, span: None });
    stage.play(&Step::Exit { thread: 0, span: 1 });
    stage.play(&Step::Drop { thread: 0, span: 1 });
    let (closes, steps) = (stage.closes(1, SPANS), Rc::new(Cell::new(0)));
    let held = Rc::clone(&steps);
    INSIDE.set(Some(Box::new(move || {
        if held.get() < STEPS {
            assert!(closes(), "a closing span waits for the collector");
            held.set(held.get() + 1);
        }
    })));
    let reported = stage.play(&Step::Round { flush: true, detach: false });
    INSIDE.set(None);
    assert!(reported.iter().any(|reported| reported.profile.is_some()), "{reported:?}");
    assert_eq!(stage.stats().spans.kept as usize, 1 + STEPS * SPANS);
    stage.play(&Step::Exit { thread: 0, span: 0 });
    stage.play(&Step::Drop { thread: 0, span: 0 });
    stage.end();
}

#[test]
fn a_wait_in_a_separately_entered_span_is_not_shortened_to_the_account_of_its_parent() {
    let apart = Op::Open { thread: 0, kind: Kind::Patient, under: Under::Span(0), enter: false };
    must_agree(&[
        open(Kind::Slow),
        Op::Off { thread: 0, ns: 10_000_000, preempted: false },
        apart,
        Op::Exit { thread: 0, up: 0, and_drop: false },
        Op::Detach,
        Op::Enter { thread: 0, span: 6 },
        Op::Wait { thread: 0, before_ns: 10_000_000, after_ns: 1 },
    ]);
}

#[test]
fn a_wait_after_the_exit_of_the_span_around_it_is_not_shortened_to_that_spans_account() {
    must_agree(&[
        open(Kind::Tight),
        open(Kind::Unmatched),
        Op::Off { thread: 0, ns: 7_000_003, preempted: false },
        Op::Exit { thread: 0, up: 0, and_drop: false },
        open(Kind::Unmatched),
        open(Kind::Patient),
        Op::Exit { thread: 0, up: 2, and_drop: false },
        Op::Wait { thread: 0, before_ns: 7_000_003, after_ns: 1 },
    ]);
}

#[test]
fn a_wait_before_another_span_is_dropped_is_counted_by_that() {
    must_agree(&[
        open(Kind::Failing),
        open(Kind::Failing),
        Op::Exit { thread: 0, up: 0, and_drop: false },
        Op::Wait { thread: 0, before_ns: 10_000_000, after_ns: 1 },
        Op::Drop { thread: 0, span: 0 },
        Op::Wait { thread: 0, before_ns: 10_000_000, after_ns: 1 },
        Op::Error { thread: 0, span: None },
    ]);
}
