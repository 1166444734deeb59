//! The time breakdown of spans, compared with the kernel's counters and with known times.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cpu_time::ThreadTime;
use tracing::{Span, dispatcher, info_span};
use tracing_profiling::{Source, TimeBreakdown};

use crate::measure::{Setup, figure, median, work_for};
use crate::sleeps::{ALL, reported, waits};

/// What was measured for one span independently of its account.
#[derive(Default)]
struct Known {
    /// CPU time of the thread, from just after each enter to just before the exit.
    on_cpu: Duration,
    /// CPU time of the thread, from just before each enter to just after the exit.
    on_cpu_around: Duration,
    /// The length of the sleep.
    asleep: Duration,
}

const SPANS: usize = 20;
/// The maximum delay between a span becoming old and being sampled.
const LATE: Duration = Duration::from_millis(8);
/// The number of spans that sleep a thousand times.
const SLEEPERS: usize = 5;

/// Runs the action in `span`, and adds the thread's CPU time.
fn segment(span: &Span, known: &mut Known, action: impl FnOnce()) {
    let around = ThreadTime::now();
    let entered = span.enter();
    let inside = ThreadTime::now();
    action();
    known.on_cpu += inside.elapsed();
    drop(entered);
    known.on_cpu_around += around.elapsed();
}

/// Short segments, a long one, and a sleep.
fn mixed() -> Known {
    let mut known = Known::default();
    let span = info_span!("span");
    // Like polls of a task: shorter than the interval between two reads of the CPU clock, with other work in between.
    for _ in 0..400 {
        segment(&span, &mut known, || _ = work_for(10_000));
        work_for(5_000);
    }
    segment(&span, &mut known, || {
        for _ in 0..40 {
            work_for(400_000);
            std::thread::yield_now();
        }
    });
    let mut asleep = Duration::ZERO;
    segment(&span, &mut known, || {
        let start = Instant::now();
        std::thread::sleep(Duration::from_millis(20));
        asleep = start.elapsed();
    });
    known.asleep = asleep;
    known
}

/// Some hundred milliseconds of work.
fn busy() -> Known {
    let mut known = Known::default();
    segment(&info_span!("busy"), &mut known, || _ = work_for(120_000_000));
    known
}

/// A thousand sleeps of 100 µs.
fn switching() -> Known {
    let mut known = Known::default();
    segment(&info_span!("switching"), &mut known, || {
        (0..1_000).for_each(|_| std::thread::sleep(Duration::from_micros(100)));
    });
    known
}

fn accounts(source: Source, count: usize, span: fn() -> Known) -> Vec<(TimeBreakdown, Known)> {
    let accounts = Arc::new(Mutex::new(Vec::new()));
    let reports = Arc::clone(&accounts);
    let setup = Setup::new("0ms", |builder| {
        builder.source(source).profiles_per_minute(10_000).on_kept(move |kept| {
            reports.lock().expect("no panic").push(*kept.spans[0].times());
        })
    });
    let known: Vec<Known> = dispatcher::with_default(&setup.dispatch, || {
        let one = |_| {
            let known = span();
            // One group per span, so that the reports come in order.
            setup.flush();
            known
        };
        (0..count).map(one).collect()
    });
    let accounts = accounts.lock().expect("no panic").clone();
    assert_eq!(accounts.len(), count);
    accounts.into_iter().zip(known).collect()
}

fn on_cpu_error(accounts: &[(TimeBreakdown, Known)]) -> f64 {
    let errors: Vec<f64> = accounts
        .iter()
        .map(|(account, known)| {
            let truth = known.on_cpu.as_nanos() as f64;
            (account.on_cpu().as_nanos() as f64 - truth).abs() / truth * 100.0
        })
        .collect();
    median(&errors)
}

fn off_cpu_error(accounts: &[(TimeBreakdown, Known)]) -> f64 {
    let errors: Vec<f64> = accounts
        .iter()
        .map(|(account, known)| {
            // The thread may also have been preempted, which is no error.
            let least = known.asleep.as_nanos() as f64;
            let entered = account.wall().as_nanos() - account.idle().as_nanos();
            let most = entered as f64 - known.on_cpu.as_nanos() as f64;
            let off = account.off_cpu().as_nanos() as f64;
            (least - off).max(off - most).max(0.0) / 1e6
        })
        .collect();
    median(&errors)
}

/// The error bound that the accounts state, in percent of wall time.
fn bound(accounts: &[(TimeBreakdown, Known)]) -> f64 {
    let of_wall = |(account, _): &(TimeBreakdown, Known)| {
        account.on_cpu_error().as_nanos() as f64 / account.wall().as_nanos() as f64 * 100.0
    };
    median(&accounts.iter().map(of_wall).collect::<Vec<_>>())
}

/// The number of accounts whose error exceeds their bound.
fn broken(accounts: &[(TimeBreakdown, Known)]) -> usize {
    let is_broken = |(account, known): &&(TimeBreakdown, Known)| {
        let (on_cpu_ns, on_cpu_error_ns) =
            (account.on_cpu().as_nanos(), account.on_cpu_error().as_nanos());
        // The rate of the clock for spans is known to 50 ppm.
        let slack_ns = account.wall().as_nanos() / 10_000 + 1_000;
        known.on_cpu.as_nanos() > on_cpu_ns + on_cpu_error_ns + slack_ns
            || known.on_cpu_around.as_nanos() + slack_ns < on_cpu_ns - on_cpu_error_ns
    };
    accounts.iter().filter(is_broken).count()
}

/// The waits in profiles, for all patterns of sleeps, sampled from the enter and from when a span is old.
struct OfWaits {
    /// The largest excess of a span's waits over its off-CPU time, in percent of the latter.
    over_off_cpu: f64,
    /// The largest error of a sleep's length beyond 1 %, in milliseconds.
    error_ms: f64,
    /// Sleeps of 15 ms and more that no wait covers.
    missed: usize,
    reported: usize,
    /// Waits that do not lie in their span.
    outside: usize,
}

fn of_waits(source: Source) -> OfWaits {
    let mut found =
        OfWaits { over_off_cpu: 0.0, error_ms: 0.0, missed: 0, reported: 0, outside: 0 };
    for sampling_delay in [Duration::ZERO, Duration::from_millis(12)] {
        for sleeps in ALL {
            let accounts = Arc::new(Mutex::new(Vec::new()));
            let reports = Arc::clone(&accounts);
            let setup = Setup::late("0ms", |builder| {
                builder.source(source).sampling_delay(sampling_delay).on_kept(move |kept| {
                    reports.lock().expect("no panic").push(*kept.spans[0].times());
                })
            });
            let slept = dispatcher::with_default(&setup.dispatch, || sleeps.sleep());
            setup.flush();
            let account = accounts.lock().expect("no panic")[0];
            let waits: Vec<_> = setup.memory.take().iter().flat_map(waits).collect();
            found.outside += waits.iter().filter(|wait| !slept.holds(wait)).count();
            let waited_ns: u64 = waits.iter().map(|wait| wait.when.len_ns()).sum();
            let over_ns = u128::from(waited_ns)
                .saturating_sub((account.off_cpu() + account.on_cpu_error()).as_nanos());
            let over = over_ns as f64 / account.off_cpu().as_nanos() as f64 * 100.0;
            found.over_off_cpu = found.over_off_cpu.max(over);
            // Sleeps that begin once the thread is sampled: some milliseconds after the span is old.
            let sampled =
                if sampling_delay.is_zero() { sampling_delay } else { sampling_delay + LATE };
            for (slept_ns, reported_ns) in reported(&slept, &waits, sampled) {
                if let Some(reported_ns) = reported_ns {
                    let error_ns = reported_ns.abs_diff(slept_ns).saturating_sub(slept_ns / 100);
                    found.error_ms = found.error_ms.max(error_ns as f64 / 1e6);
                    found.reported += 1;
                } else if slept_ns >= 15_000_000 {
                    found.missed += 1;
                }
            }
        }
    }
    found
}

pub(crate) fn run() {
    let (mut over_off_cpu, mut outside) = (0.0_f64, 0);
    for (name, source) in [("split", Source::Perf), ("split.timer", Source::Timer)] {
        let found = of_waits(source);
        figure(&format!("{name}.wait_error"), found.error_ms, "ms");
        figure(&format!("{name}.waits_missed"), found.missed as f64, "count");
        figure(&format!("{name}.waits_reported"), found.reported as f64, "count");
        over_off_cpu = over_off_cpu.max(found.over_off_cpu);
        outside += found.outside;
    }
    figure("split.waits_over_off_cpu", over_off_cpu, "%");
    figure("split.waits_outside", outside as f64, "count");
    let (mut of_switching, mut all_broken) = (0.0_f64, 0);
    for (name, source) in
        [("split", Source::Perf), ("split.timer", Source::Timer), ("split.none", Source::None)]
    {
        let (busy, mixed) = (accounts(source, SPANS / 4, busy), accounts(source, SPANS, mixed));
        let switching = accounts(source, SLEEPERS, switching);
        figure(&format!("{name}.on_cpu_error"), on_cpu_error(&busy), "%");
        figure(&format!("{name}.on_cpu_error_mixed"), on_cpu_error(&mixed), "%");
        figure(&format!("{name}.bound_mixed"), bound(&mixed), "%");
        figure(&format!("{name}.off_cpu_error"), off_cpu_error(&mixed), "ms");
        of_switching = of_switching.max(on_cpu_error(&switching));
        all_broken += broken(&busy) + broken(&mixed) + broken(&switching);
    }
    figure("split.on_cpu_error_switching", of_switching, "%");
    figure("split.bounds_broken", all_broken as f64, "count");
}
