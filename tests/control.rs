//! Replacing rules and switching profiling off and on while spans are open.

#![allow(unsafe_code, reason = "sets environment variables of its own process")]
#![allow(clippy::expect_used, clippy::unwrap_used, clippy::indexing_slicing, reason = "a test")]

mod support;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use support::Nanos as _;
use support::{HAS_STACKS, Setup, burn};
use tracing::subscriber::with_default;
use tracing::{error, info_span};
use tracing_profiling::export::{ExportError, Exported, Exporter, Memory};
use tracing_profiling::profile::{Profile, SampleKind};
use tracing_profiling::{FlushError, FlushStage, Handle, ProfilingLayer, Reason, Rules};
use tracing_subscriber::prelude::*;

const MS: Duration = Duration::from_millis(1);

fn rules(text: &str) -> Rules {
    text.parse().unwrap()
}

fn names(setup: &Setup) -> Vec<&'static str> {
    setup.kept().iter().flat_map(|kept| &kept.spans).map(|span| span.name()).collect()
}

#[test]
fn an_open_span_is_judged_by_the_rules_it_was_created_under() {
    let setup = Setup::new("error");
    let handle = &setup.handle;
    setup.run(|| {
        let before = info_span!("before").entered();
        handle.set_rules(rules("[during]=always")).unwrap();
        assert_eq!(handle.rules().to_string(), "[during]=always");
        let during = info_span!("during").entered();
        let unmatched = info_span!("unmatched").entered();
        handle.set_enabled(false).unwrap();
        let disabled = info_span!("during").entered();
        error!("in all of them");
        drop((disabled, unmatched, during, before));
    });
    let mut names = names(&setup);
    names.sort_unstable();
    assert_eq!(names, ["before", "during"]);
    assert!(!handle.is_enabled());
    handle.set_enabled(true).unwrap();
    assert!(handle.is_enabled());
    setup.run(|| info_span!("during").in_scope(|| {}));
    assert_eq!(self::names(&setup).len(), 3);
}

#[test]
fn a_layer_that_is_off_is_started_by_rules_and_by_enabling() {
    for by_rules in [true, false] {
        let setup = Setup::new("off");
        let handle = &setup.handle;
        assert!(!handle.is_enabled());
        setup.run(|| info_span!("off").in_scope(|| error!("lost")));
        if by_rules {
            handle.set_rules(rules("error")).unwrap();
        } else {
            handle.set_enabled(true).unwrap();
            assert_eq!(handle.rules(), Rules::default(), "the defaults apply");
        }
        assert!(handle.is_enabled());
        setup.run(|| {
            info_span!("on").in_scope(|| {
                burn(30 * MS);
                error!("oh");
            });
        });
        assert_eq!(names(&setup), ["on"]);
        assert_eq!(setup.profiles().len(), usize::from(HAS_STACKS));
        handle.set_rules(rules("off")).unwrap();
        assert!(!handle.is_enabled());
        setup.run(|| info_span!("off again").in_scope(|| error!("lost")));
        assert_eq!(names(&setup), ["on"]);
    }
}

#[test]
fn a_dropped_or_shut_down_layer_returns_errors() {
    let setup = Setup::new("always");
    setup.handle.shutdown(support::PLENTY).unwrap();
    let error = setup.handle.set_rules(Rules::default()).unwrap_err();
    assert_eq!(error.to_string(), "the profiling layer is gone, or has been shut down");
    assert!(setup.handle.set_enabled(true).is_err());
    assert!(!setup.handle.is_enabled() && !setup.handle.keep_current());
    let off = Setup::new("off");
    off.handle.shutdown(support::PLENTY).unwrap();
    assert!(off.handle.set_enabled(true).is_err(), "and nothing starts after it");
    let handle = ProfilingLayer::builder().rules(rules("off")).build().unwrap().handle();
    assert!(handle.set_rules(Rules::default()).is_err());
    assert!(handle.rules().to_string() == "off" && !handle.is_enabled());
    assert!(handle.set_enabled(false).is_err());
}

/// Waits before it exports.
struct Waiting(Memory, Receiver<()>);

impl Exporter for Waiting {
    fn export(&mut self, profile: &Profile) -> Result<Exported, ExportError> {
        self.1.recv().unwrap();
        self.0.export(profile)
    }
}

const NOT_EXPORTED: Result<(), FlushError> = Err(FlushError::Timeout(FlushStage::Collection));

/// A subscriber that is in force for a function is dropped at its end, and what it had kept is exported after that.
#[test]
fn a_flush_after_the_layer_was_dropped_waits_for_what_it_had_kept() {
    if !HAS_STACKS {
        return;
    }
    let memory = Memory::new();
    let new = || {
        let ((go_on, wait), (report, reported)) = (mpsc::channel(), mpsc::channel());
        let reported = Mutex::new(reported);
        let layer = ProfilingLayer::builder()
            .rules(rules("always"))
            .exporter(Waiting(memory.clone(), wait))
            .on_kept(move |_| reported.lock().unwrap().recv().unwrap())
            .build()
            .unwrap();
        let handle = layer.handle();
        let subscriber = tracing_subscriber::registry().with(layer);
        with_default(subscriber, || info_span!("work").in_scope(|| burn(30 * MS)));
        (handle, go_on, report)
    };
    let (handle, go_on, report) = new();
    assert_eq!(handle.flush(Duration::ZERO), NOT_EXPORTED);
    go_on.send(()).unwrap();
    let start = Instant::now();
    while handle.flush(MS) != Err(FlushError::Timeout(FlushStage::Reports)) {
        assert!(start.elapsed() < support::PLENTY);
    }
    assert_eq!(memory.take().len(), 1);
    report.send(()).unwrap();
    handle.flush(support::PLENTY).unwrap();
    let other = handle.clone();
    assert_eq!((handle.flush(support::PLENTY), other.flush(support::PLENTY)), (Ok(()), Ok(())));

    let shut_down = |handle: &Handle| handle.shutdown(support::PLENTY).unwrap();
    let guarded = |handle: &Handle| drop(handle.flush_on_drop());
    // Longer than the guard waits for a receiver and for the last lines of the log.
    for (end, after) in [(shut_down as fn(&Handle), 50 * MS), (guarded, 8_000 * MS)] {
        let (handle, go_on, report) = new();
        report.send(()).unwrap();
        let is_sent = Arc::new(AtomicBool::new(false));
        let sent = Arc::clone(&is_sent);
        let later = std::thread::spawn(move || {
            std::thread::sleep(after);
            sent.store(true, Ordering::Relaxed);
            go_on.send(()).unwrap();
        });
        end(&handle);
        assert!(is_sent.load(Ordering::Relaxed));
        // The guard does not wait forever.
        handle.flush(support::PLENTY).unwrap();
        assert_eq!(memory.take().len(), 1);
        later.join().unwrap();
    }
}

#[test]
fn a_flush_after_a_shutdown_that_came_to_no_end_waits_for_it() {
    if !HAS_STACKS {
        return;
    }
    let (memory, (go_on, wait)) = (Memory::new(), mpsc::channel());
    let exporter = Waiting(memory.clone(), wait);
    let setup = Setup::with("always", |builder| builder.exporter(exporter));
    tracing::dispatcher::with_default(&setup.dispatch, || {
        info_span!("work").in_scope(|| burn(30 * MS));
    });
    let handle = &setup.handle;
    assert_eq!(handle.shutdown(MS), NOT_EXPORTED);
    assert_eq!(handle.flush(MS), NOT_EXPORTED);
    go_on.send(()).unwrap();
    handle.flush(support::PLENTY).unwrap();
    assert_eq!(memory.take().len(), 1);
}

/// Each set of rules keeps one kind of failure and one name. A span that is judged by a mixture of two sets would be
/// kept for neither reason, or for both.
#[test]
fn replacing_rules_a_thousand_times_under_load_loses_and_mixes_no_verdict() {
    let sets = [
        "[a]=error|hung=off,[b]=always",
        "[b]=error|hung=off,[a]=always",
        "[a]=always,[b]=always",
        "off",
    ];
    let setup = Setup::with(sets[0], |builder| builder.profiles_per_minute(0).rate(100));
    let has_ended = AtomicBool::new(false);
    let spans = [const { AtomicU64::new(0) }; 2];
    std::thread::scope(|scope| {
        for failing in [true, false] {
            let (setup, has_ended, spans) = (&setup, &has_ended, &spans);
            scope.spawn(move || {
                let _default = tracing::dispatcher::set_default(&setup.dispatch);
                while !has_ended.load(Ordering::Relaxed) {
                    for span in [info_span!("a").entered(), info_span!("b").entered()] {
                        if failing {
                            error!("oh");
                        }
                        drop(span);
                    }
                    spans[usize::from(failing)].fetch_add(2, Ordering::Relaxed);
                }
            });
        }
        let start = Instant::now();
        // At most so long, as the threads would not end after a panic.
        while spans.iter().any(|spans| spans.load(Ordering::Relaxed) == 0)
            && start.elapsed() < support::PLENTY
        {
            std::thread::yield_now();
        }
        for number in 0..1_000 {
            setup.handle.set_rules(rules(sets[number % sets.len()])).unwrap();
            std::thread::yield_now();
        }
        // From now on the rules stay the same, and each verdict is known.
        setup.handle.set_rules(rules(sets[2])).unwrap();
        let before = setup.handle.stats();
        let made: u64 = spans.iter().map(|spans| spans.load(Ordering::Relaxed)).sum();
        let start = Instant::now();
        while spans.iter().map(|spans| spans.load(Ordering::Relaxed)).sum::<u64>() < made + 10_000 {
            assert!(start.elapsed() < support::PLENTY);
            std::thread::yield_now();
        }
        let after = setup.handle.stats();
        assert!(after.spans.kept >= before.spans.kept + 9_900, "{before:?} {after:?}");
        has_ended.store(true, Ordering::Relaxed);
    });
    setup.flush();
    let stats = setup.handle.stats();
    // Each kept span has exactly one reason, `always` or `error`.
    let by_reason = Reason::all().map(|reason| stats.kept_for(reason)).sum::<u64>();
    assert_eq!(by_reason, stats.spans.kept, "one reason each: {stats:?}");
    assert_eq!(stats.spans.kept, stats.kept_for(Reason::Always) + stats.kept_for(Reason::Error));
    assert!(stats.kept_for(Reason::Always) > 0 && stats.kept_for(Reason::Error) > 0, "{stats:?}");
    assert!(stats.spans.seen >= stats.spans.kept);
}

#[test]
fn a_thread_that_has_many_samples_is_sampled_less_often() {
    if !HAS_STACKS || !support::has_perf() {
        // A timer's rate is limited by the kernel's tick.
        return;
    }
    // The duration is increased until it suffices, since a collector without CPU time reacts late.
    let rate_falls = |has_hooks: bool| {
        [3, 6, 12, 24].into_iter().any(|seconds| {
            let setup = Setup::at_the_usual_rate("[long]=0ms|hung=off,[step]=1h", |builder| {
                builder.stack_bytes(2_048).samples_per_profile(100_000)
            });
            setup.run(|| {
                info_span!("long").in_scope(|| {
                    let start = cpu_time::ThreadTime::now();
                    while start.elapsed() < Duration::from_secs(seconds) {
                        match has_hooks {
                            true => info_span!("step").in_scope(|| burn(MS)),
                            false => burn(MS),
                        };
                    }
                });
            });
            let kept = setup.kept();
            let account = kept[0].spans[0].times();
            let profile = setup.profiles().remove(0);
            let samples = profile.of_kind(SampleKind::OnCpu).flat_map(|sample| &sample.points);
            let weights: Vec<_> = samples.map(|sample| sample.weight).collect();
            // All together represent no more than the thread's CPU time, so some represent less than a period.
            let full = weights.iter().filter(|weight_ns| **weight_ns <= 997_000).count();
            let reduced = weights.iter().filter(|weight_ns| **weight_ns > 2 * 997_000).count();
            // The limit is 1,000 samples, and context switches count as samples.
            let switches =
                (account.usage.voluntary_switches + account.usage.involuntary_switches) as usize;
            assert!(full + switches > 900, "{full}, {reduced}, {account:?}");
            let weight_ns: u64 = weights.iter().sum();
            let is_about = weight_ns.abs_diff(account.on_cpu().ns()) < account.on_cpu().ns() / 10;
            // Other samples are dropped when the ring is full, and counted.
            let is_whole = setup.handle.stats().samples.dropped_ring_full == 0;
            assert!(is_about || !is_whole, "{weight_ns}: {full}, {reduced}, {account:?}");
            // Time that was sampled at another rate does not count as unsampled. The rate changes in a hook.
            let unsampled_ns = account.on_cpu().ns().saturating_sub(account.sampled_ns);
            assert!(unsampled_ns < account.on_cpu().ns() / 10, "{account:?}");
            assert!(account.sampled_ns <= account.on_cpu().ns() + account.on_cpu_error().ns());
            reduced > 50
        })
    };
    // Whether the thread runs through hooks or not.
    assert!(rate_falls(true) && rate_falls(false), "the sampling rate falls");
}

#[test]
fn the_rate_is_lowered_to_stay_within_the_cpu_budget_and_that_is_logged() {
    if !support::has_perf() {
        // Timers take too few samples, at the kernel's tick, to exceed a budget for certain.
        return;
    }
    let lines = std::sync::Arc::new(Mutex::new(Vec::new()));
    let output = std::sync::Arc::clone(&lines);
    let layer = ProfilingLayer::builder()
        .rules(rules("1ms"))
        .rate(10_000)
        .cpu_budget(1)
        .profiles_per_minute(1_000)
        .exporter(tracing_profiling::export::Memory::new())
        .on_kept(|_| {})
        .build()
        .unwrap();
    let handle = layer.handle();
    let log_layer = tracing_subscriber::fmt::layer()
        .with_ansi(false)
        .with_writer(move || Lines(std::sync::Arc::clone(&output)));
    let subscriber = tracing_subscriber::registry().with(log_layer).with(layer);
    tracing::subscriber::with_default(subscriber, || {
        let start = Instant::now();
        while handle.stats().sampling.rate_reduced == 0 {
            assert!(start.elapsed() < support::PLENTY, "{:?}", handle.stats());
            info_span!("span").in_scope(|| burn(20 * MS));
        }
        let taken = || handle.stats().samples.taken;
        // The new rate applies from the thread's next check.
        for _ in 0..2 {
            let start = Instant::now();
            while start.elapsed() < Duration::from_millis(1_200) {
                info_span!("span").in_scope(|| burn(5 * MS));
            }
        }
        let (before, start) = (taken(), Instant::now());
        info_span!("at a lower rate").in_scope(|| burn(200 * MS));
        // The budget is a share of that time.
        let took = start.elapsed();
        _ = handle.flush(support::PLENTY);
        let rate = (taken() - before) as f64 / took.as_secs_f64();
        assert!(rate < 5_000.0, "{rate} a second instead of 10,000");
    });
    let lines = String::from_utf8(lines.lock().unwrap().clone()).unwrap();
    assert_eq!(lines.matches("the sampling rate is reduced").count(), 1, "{lines}");
}

#[derive(Clone)]
struct Lines(std::sync::Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_profile_at_a_lowered_rate_is_marked_and_has_all_of_its_time() {
    if !support::has_perf() {
        return;
    }
    let setup = Setup::with("[lowered]=0ms,1h", |builder| builder.rate(5_000).cpu_budget(1));
    let start = Instant::now();
    let ran = setup.run(|| {
        while setup.handle.stats().sampling.rate_reduced == 0 {
            assert!(start.elapsed() < support::PLENTY, "{:?}", setup.handle.stats());
            info_span!("before").in_scope(|| burn(20 * MS));
        }
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(1_500) {
            info_span!("before").in_scope(|| burn(5 * MS));
        }
        let start = cpu_time::ThreadTime::now();
        info_span!("lowered").in_scope(|| burn(300 * MS));
        start.elapsed()
    });
    let profiles = setup.profiles();
    let profile = profiles.iter().find(|profile| profile.name == "lowered").unwrap();
    let attributes: HashMap<_, _> =
        profile.attributes.iter().map(|attribute| (attribute.key, &attribute.value)).collect();
    assert!(attributes.contains_key("profile.samples_at_lowered_rate"), "{attributes:?}");
    assert!(profile.title.contains("samples at a lowered rate"), "{}", profile.title);
    let weight = u128::from(profile.weight().ns());
    assert!(weight < ran.as_nanos() / 4 * 5, "{weight} of {ran:?}");
    // On a busy machine the ring may overflow, and then the profile states that.
    if !attributes.contains_key("profile.samples_lost_ring_full") {
        assert!(weight > ran.as_nanos() / 4 * 3, "{weight} of {ran:?}: {attributes:?}");
    }
}
