//! Compares the on-CPU time of spans on one thread with the thread's CPU clock. It must lie between what the clock
//! measures inside and around the span, and near the middle of these bounds.

use std::collections::HashMap;
use std::io::Write as _;
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::Duration;

use rustix::thread::{CpuSet, gettid, sched_getaffinity, sched_setaffinity};
use tracing::{Span, info_span};
use tracing_profiling::{Facts, Measure, TimeBreakdown};

use crate::Sampled;
use crate::clocks::{Reading, wall_ns};
use crate::support::Nanos as _;
use crate::support::{Setup, burn};
use crate::times::{Known, Log, Segment, judge, work};

const MS: Duration = Duration::from_millis(1);
const US: Duration = Duration::from_micros(1);
/// The number of runs whose median is checked.
const RUNS: usize = 5;

/// A span, with clock readings around and inside each of its segments.
struct Measured {
    span: Option<Span>,
    log: Log,
}

impl Measured {
    fn new(make: fn() -> Span) -> Self {
        let before = wall_ns();
        let span = Some(make());
        let log = Log { made: [before, wall_ns()], segments: Vec::with_capacity(4_096) };
        Self { span, log }
    }

    fn enter(&mut self, action: impl FnOnce()) {
        self.segment(action, false);
    }

    /// Enters the span for the last time and closes it.
    fn close(mut self, action: impl FnOnce()) -> Known {
        self.segment(action, true);
        self.log.known()
    }

    fn segment(&mut self, action: impl FnOnce(), closes: bool) {
        let before = Reading::wall_first();
        let entered = self.span.take().unwrap().entered();
        let begun = Reading::wall_last();
        action();
        let ended = Reading::wall_first();
        self.span = Some(entered.exit()).filter(|_| !closes);
        let after = Reading::wall_last();
        self.log.segments.push(Segment { before, begun, ended, after });
    }
}

/// Runs `action` on a CPU that a thread `sharing` keeps busy; it can read that thread's CPU time.
fn on_a_shared_cpu(action: impl FnOnce(&dyn Fn() -> u64)) {
    /// Stops the thread also when `action` panics, since the scope would otherwise wait forever.
    struct Stop<'a>(&'a AtomicBool);
    impl Drop for Stop<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    let allowed = sched_getaffinity(None).unwrap();
    let first = (0..CpuSet::MAX_CPU).find(|number| allowed.is_set(*number)).unwrap();
    let mut one = CpuSet::new();
    one.set(first);
    let (has_ended, other) = (AtomicBool::new(false), AtomicI32::new(0));
    std::thread::scope(|scope| {
        _ = sched_setaffinity(None, &one);
        let stop = Stop(&has_ended);
        // The thread inherits the affinity.
        let sharing = std::thread::Builder::new().name("sharing".to_owned());
        let busy = || {
            other.store(gettid().as_raw_nonzero().get(), Ordering::Relaxed);
            while !has_ended.load(Ordering::Relaxed) {
                work(10_000);
            }
        };
        sharing.spawn_scoped(scope, busy).unwrap();
        while other.load(Ordering::Relaxed) == 0 {
            std::thread::yield_now();
        }
        let path = format!("/proc/self/task/{}/schedstat", other.load(Ordering::Relaxed));
        action(&|| {
            std::fs::read_to_string(&path).unwrap().split(' ').next().unwrap().parse().unwrap()
        });
        drop(stop);
        _ = sched_setaffinity(None, &allowed);
    });
}

type Spans = Vec<(&'static str, Known)>;

type Shape = (&'static str, fn() -> Spans);

/// What a thread does in one or two spans.
const SHAPES: &[Shape] = &[
    ("works", || {
        vec![("works", Measured::new(|| info_span!("works")).close(|| _ = burn(300 * MS)))]
    }),
    ("sleeps", || {
        let sleep = || (0..1_000).for_each(|_| std::thread::sleep(100 * US));
        vec![("sleeps", Measured::new(|| info_span!("sleeps")).close(sleep))]
    }),
    ("syncs", || {
        let mut file = tempfile::tempfile().unwrap();
        let sync = || {
            for _ in 0..20 {
                file.write_all(&[7; 2_000_000]).unwrap();
                rustix::fs::fsync(file.as_fd()).unwrap();
            }
        };
        vec![("syncs", Measured::new(|| info_span!("syncs")).close(sync))]
    }),
    ("shares its CPU", || {
        let mut spans = Vec::new();
        on_a_shared_cpu(|_| {
            let span = Measured::new(|| info_span!("shares its CPU"));
            spans.push(("shares its CPU", span.close(|| _ = burn(60 * MS))));
        });
        spans
    }),
    ("nested", || {
        let mut outer = Measured::new(|| info_span!("outer"));
        let mut inner = None;
        outer.enter(|| inner = Some(Measured::new(|| info_span!("inner"))));
        let mut inner = inner.unwrap();
        for _ in 0..10 {
            outer.enter(|| {
                work(500_000);
                inner.enter(|| {
                    std::thread::sleep(2 * MS);
                    work(300_000);
                });
                work(100_000);
            });
        }
        let inner = inner.close(|| work(300_000));
        vec![("inner", inner), ("outer", outer.close(|| std::thread::sleep(5 * MS)))]
    }),
    // As a task that is polled among others.
    ("polled", || {
        let mut span = Measured::new(|| info_span!("polled"));
        for n in 0..2_000_u64 {
            span.enter(|| work(2_000 + n * 37 % 101 * 100));
            work(4_000);
            if n % 100 == 0 {
                std::thread::sleep(MS);
            }
        }
        vec![("polled", span.close(|| work(2_000)))]
    }),
];

pub(crate) fn scenario(sampled: Sampled) {
    for is_early in [true, false] {
        let sampling_delay = if is_early { Duration::ZERO } else { 12 * MS };
        let setup = Setup::of_rules("0ms", |builder| {
            let builder = sampled.set(builder).rate(200).profiles_per_minute(1_000_000);
            builder.sampling_delay(sampling_delay)
        });
        for (name, play) in SHAPES {
            let mut errors: HashMap<&str, Vec<f64>> = HashMap::new();
            let mut bounds = Vec::new();
            for _ in 0..RUNS {
                let spans = setup.run(play);
                let kept = std::mem::take(&mut *setup.kept.lock().unwrap());
                for (name, known) in spans {
                    let mut all = kept.iter().flat_map(|kept| &kept.spans);
                    let span = all.find(|span| span.name() == name).unwrap();
                    let account: &TimeBreakdown = span.times();
                    judge(account, &known, &(name, sampled, is_early, account));
                    // The hooks lie between the inner and the outer readings.
                    let off_ns = known.on_cpu_ns.miss(account.on_cpu().ns()).unsigned_abs();
                    let error = off_ns as f64 / known.on_cpu_ns.middle() * 100.0;
                    // Where other threads compete for the CPU, the bounds are wide, and `judge` has checked them.
                    let truth_ns = known.on_cpu_ns.middle();
                    if account.on_cpu_error().ns() as f64 * 100.0 <= truth_ns {
                        errors.entry(name).or_default().push(error);
                    }
                    bounds.push(
                        account.on_cpu_error().ns() as f64 / account.wall().ns() as f64 * 100.0,
                    );
                }
            }
            // The width of the bounds depends on the load of the machine, so it is only a figure: `split.bound_mixed`.
            println!(
                "{sampled:?}, early {is_early}, {name}: {errors:.3?} %, bounds {bounds:.3?} %"
            );
            let most = if *name == "works" { 0.2 } else { 1.0 };
            for (name, mut errors) in errors {
                errors.sort_by(f64::total_cmp);
                assert!(errors[errors.len() / 2] <= most, "{name}: {errors:?} % off");
            }
        }
    }
}

/// For how long this thread has waited for a CPU; `None` where the kernel does not count it.
fn run_delay_ns() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    let numbers: Vec<u64> = text.split_whitespace().flat_map(str::parse).collect();
    numbers.get(1).copied().filter(|_| numbers.get(2).is_some_and(|times| *times > 0))
}

/// Of a span with that name: for how long its thread waited for a CPU inside of it, and around it.
fn with_run_delay(span: Span, action: impl FnOnce()) -> Option<[u64; 2]> {
    let before = run_delay_ns();
    let entered = span.entered();
    let begun = run_delay_ns();
    action();
    let ended = run_delay_ns();
    drop(entered);
    let after = run_delay_ns();
    Some([ended? - begun?, after? - before?])
}

/// A span that waits for a CPU names the thread that has it.
pub(crate) fn rival(sampled: Sampled) {
    let setup = Setup::of_rules("0ms", |builder| {
        sampled.set(builder).rate(200).sampling_delay(Duration::ZERO)
    });
    let mut missed = 0;
    for _ in 0..8 {
        let (mut is_shared, mut other_had_ns) = (false, 0);
        setup.run(|| {
            on_a_shared_cpu(|other_ns| {
                is_shared = sched_getaffinity(None).unwrap().count() == 1;
                let before_ns = other_ns();
                info_span!("starved").in_scope(|| _ = burn(300 * MS));
                other_had_ns = other_ns() - before_ns;
            });
        });
        let facts = setup.kept().pop().unwrap().spans[0].facts.clone();
        let waited_ns = facts.get(Measure::Runnable).filter(|_| is_shared).unwrap_or(0);
        let said = setup.profiles().pop().map(|profile| profile.headline).unwrap_or_default();
        println!("{other_had_ns} of {waited_ns}: {said}");
        if said.contains(" waiting for a CPU, beside the thread `sharing`, which ran for ") {
            return;
        }
        // On a busy machine others have most of it.
        let is_most = Duration::from_nanos(waited_ns) >= facts.times.wall() / 5
            && other_had_ns >= waited_ns / 4 * 3;
        missed += u32::from(is_most && !said.is_empty());
    }
    assert_eq!(missed, 0, "it was never named");
}

/// Two busy threads share a CPU, one of them also sleeps, and one thread only sleeps.
pub(crate) fn runnable(sampled: Sampled) {
    let setup = Setup::of_rules("0ms", |builder| {
        sampled.set(builder).rate(200).sampling_delay(Duration::ZERO)
    });
    let (mut is_shared, mut read, mut other_had_ns) = (false, [None; 3], 0);
    setup.run(|| {
        on_a_shared_cpu(|other_ns| {
            is_shared = sched_getaffinity(None).unwrap().count() == 1;
            let before_ns = other_ns();
            read[0] = with_run_delay(info_span!("shares"), || _ = burn(300 * MS));
            other_had_ns = other_ns() - before_ns;
            let mixed = || {
                (0..10).for_each(|_| {
                    burn(20 * MS);
                    std::thread::sleep(5 * MS);
                });
            };
            read[1] = with_run_delay(info_span!("mixed"), mixed);
        });
        let sleep = || (0..10).for_each(|_| std::thread::sleep(20 * MS));
        read[2] = with_run_delay(info_span!("sleeps"), sleep);
    });
    let facts = |name| -> Facts {
        let kept = setup.kept();
        let mut all = kept.iter().flat_map(|kept| &kept.spans);
        all.find(|span| span.name() == name).unwrap().facts.clone()
    };
    let lost = setup.handle.stats().waits.switches_dropped_ring_full;
    for (name, read) in ["shares", "mixed", "sleeps"].into_iter().zip(read) {
        let facts = facts(name);
        let (ns, error_ns) = (facts.get(Measure::Runnable), facts.get(Measure::RunnableError));
        let off_cpu_ns = facts.times.off_cpu().ns() + facts.times.on_cpu_error().ns();
        println!("{sampled:?} {name}: {ns:?} + {error_ns:?} of {off_cpu_ns}, {read:?}");
        let (Some(ns), Some(error_ns)) = (ns, error_ns) else {
            assert!(name != "shares" || !is_shared, "it waited");
            assert_eq!(sampled == Sampled::Nothing, ns.is_none(), "nothing reads it");
            continue;
        };
        assert!(ns <= off_cpu_ns, "{ns} of {off_cpu_ns}");
        let Some([inside_ns, around_ns]) = read else { continue };
        // The kernel counts its delays some microseconds before and after it switches the clocks.
        let may_differ_ns = around_ns / 20 + 2 * MS.ns();
        assert!(ns <= around_ns + may_differ_ns, "{ns} of {around_ns}");
        assert!(ns + error_ns + may_differ_ns >= inside_ns, "{ns} + {error_ns} of {inside_ns}");
        if name != "shares" || !is_shared || lost > 0 {
            continue;
        }
        // The other thread has the CPU for half of the time, and if more threads want it, others have more of it.
        assert!(ns >= 100_000_000, "{ns} of {off_cpu_ns}");
        assert!(ns.abs_diff(inside_ns) <= inside_ns / 20, "{ns} is not {inside_ns}");
        let profile = setup.profiles().into_iter().find(|profile| profile.name == "shares");
        if sampled == Sampled::Nothing {
            assert!(profile.is_none());
            continue;
        }
        let profile = profile.unwrap();
        let key = Measure::Runnable.attribute();
        let said = profile.attributes.iter().find(|attribute| attribute.key == key).unwrap();
        assert_eq!(said.value.to_string(), ns.to_string());
        assert!(profile.notes[0].contains(" waiting for a CPU ("), "{:?}", profile.notes);
        let is_titled = u128::from(ns) * 10 >= facts.times.wall().as_nanos();
        assert_eq!(profile.title.contains(" waiting for a CPU"), is_titled, "{}", profile.title);
        // What it had before the first reading does not count, and on a busy machine that may come late.
        if let Some((_, rival)) = profile.headline.split_once(" waiting for a CPU, beside ") {
            assert!(
                rival.starts_with("the thread `sharing`, which ran for "),
                "{}",
                profile.headline
            );
        }
        println!("the other thread had {other_had_ns}: {}", profile.headline);
    }
}
