//! Which spans are kept, and the content of their profiles.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test"
)]

mod support;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex, OnceLock};
use std::time::{Duration, Instant};

use support::Nanos as _;
use support::{HAS_STACKS, PLENTY, Setup, burn, functions, has_perf, points_in, taken};
use tracing::{Level, info_span};
use tracing_profiling::export::{ExportError, Exported, Exporter, Memory};
use tracing_profiling::{FlushError, Handle, Measure, NoProfile, Profile, Reason, Source};

const MS: Duration = Duration::from_millis(1);

/// Spans that are over their limit are found first, and counted as if they were not.
#[test]
fn every_kept_span_is_reported_or_counted_when_its_limit_is_used_up() {
    const COUNT: u64 = 2_000;
    for per_minute in [0, 1, 5, 100] {
        for has_values in [false, true] {
            let setup = Setup::with("always", |builder| {
                builder.source(Source::None).profiles_per_minute(per_minute).span_fields(["route"])
            });
            setup.run(|| {
                for number in 0..COUNT {
                    match has_values {
                        true => info_span!("request", route = number % 2).in_scope(|| ()),
                        false => info_span!("request").in_scope(|| ()),
                    }
                }
            });
            let all = setup.handle.stats();
            let stats = all.spans;
            let reported: usize = setup.kept().iter().map(|kept| kept.spans.len()).sum();
            let what = format!("{per_minute}, {has_values}: {stats:?}");
            assert_eq!((stats.kept, all.kept_for(Reason::Always)), (COUNT, COUNT), "{what}");
            assert_eq!(stats.no_profile_no_samples, COUNT, "{what}");
            assert_eq!(stats.kept_unreported + reported as u64, COUNT, "{what}");
            // Some more come while the test takes its time.
            let names = if has_values { 2 } else { 1 };
            assert!(reported >= (names * per_minute) as usize, "{what}, {reported}");
            assert!(stats.kept_unreported > COUNT / 2, "{what}, {reported}");
        }
    }
}

/// It takes longer than a group waits for a root that is only open, and many times as long as is too slow.
#[test]
fn a_request_of_many_slow_steps_is_one_profile_with_all_its_steps() {
    const STEPS: usize = 12;
    let setup = Setup::of_rules("20ms", |builder| builder);
    let before_steps = setup.run(|| {
        let opened = Instant::now();
        let _request = info_span!("request").entered();
        let before_steps = (0..STEPS).map(|_| {
            let step = info_span!("step");
            let before = opened.elapsed();
            step.in_scope(|| std::thread::sleep(250 * MS));
            before
        });
        before_steps.min().unwrap()
    });
    let kept = setup.kept();
    let [kept] = kept.as_slice() else { panic!("{:?}", setup.kept_names()) };
    let names: Vec<_> = kept.spans.iter().map(|span| span.name()).collect();
    assert_eq!(names, [&["request"][..], &["step"; STEPS]].concat());
    let children = kept.spans[0].facts.children.clone();
    let counted: Vec<_> = children.totals.iter().map(|it| (it.name.clone(), it.count)).collect();
    assert_eq!(counted, [(Some("step".to_owned()), STEPS as u64)]);
    // Ten times the sampling delay, of a millisecond, or when the first step began, and the error of a clock.
    let latest = before_steps.max(10 * MS) + MS;
    assert!(Duration::from_nanos(children.from_ns) <= latest, "{latest:?}: {children:?}");
}

/// A span whose root has a profile needs no token.
#[test]
fn a_span_joins_the_profile_of_its_root_when_its_limit_is_used_up() {
    if !HAS_STACKS {
        return;
    }
    let setup = Setup::with("always", |builder| builder.profiles_per_minute(1));
    setup.run(|| {
        // One takes the token for profiles, one that for reports, and nothing is left for the third.
        (0..3).for_each(|_| _ = info_span!("outer").in_scope(|| burn(20 * MS)));
        let _outer = info_span!("outer").entered();
        // On a busy machine, 20 ms may have no sample. The spans before have fewer than these.
        let taken = || setup.handle.stats().samples.taken;
        let (before, start) = (taken(), Instant::now());
        let inner = info_span!("inner").entered();
        while taken() < before + 100 && start.elapsed() < PLENTY {
            burn(20 * MS);
        }
        drop(inner);
    });
    assert!(setup.handle.stats().spans.kept_unreported > 0);
    let kept = setup.kept();
    let joined = kept.iter().find(|kept| kept.spans.len() == 2);
    let joined = joined.unwrap_or_else(|| panic!("{kept:?}"));
    assert_eq!([0, 1].map(|at| joined.spans[at].name()), ["outer", "inner"]);
    assert!(joined.spans.iter().all(|span| span.profile().is_ok()), "{joined:?}");
}

#[test]
fn a_span_over_its_threshold_is_kept_and_no_other() {
    let setup = Setup::new("slow=0ms,fast=1h");
    setup.run(|| {
        for _ in 0..10 {
            info_span!(target: "fast", "fine").in_scope(|| burn(2 * MS));
            info_span!(target: "nothing", "nothing").in_scope(|| burn(2 * MS));
        }
        info_span!(target: "slow", "slow").in_scope(|| burn(100 * MS));
    });
    assert_eq!(setup.kept_names(), [["slow"]]);
    let kept = &setup.kept()[0];
    let span = &kept.spans[0];
    assert!(span.reasons().contains(Reason::Above(Measure::Wall)));
    assert!(!span.reasons().contains(Reason::Error));
    let account = span.times();
    assert!(account.wall().ns() >= 100_000_000);
    let parts = support::sum_of_parts_ns(account);
    // The parts are measured independently, and the kernel's clocks differ slightly at each context switch.
    let switches = account.usage.voluntary_switches + account.usage.involuntary_switches;
    let slack = 100_000 * (switches + 1) + account.wall().ns() / 1000;
    assert!(parts.abs_diff(account.wall().ns()) <= slack, "{account:?}");
    if HAS_STACKS {
        let profiles = setup.profiles();
        assert_eq!(profiles.len(), 1);
        assert_eq!(span.profile(), Ok(profiles[0].id));
        assert_eq!(kept.profile, Some(profiles[0].id));
        assert!(points_in(&profiles[0], "burn") > 0);
        assert_eq!(profiles[0].name, "slow");
    } else {
        assert_eq!(span.profile(), Err(NoProfile::SamplingUnavailable));
        assert!(setup.profiles().is_empty());
    }
}

#[test]
fn an_error_keeps_the_span_and_those_around_it() {
    let setup = Setup::new("error");
    setup.run(|| {
        let root = info_span!("root").entered();
        info_span!("fine").in_scope(|| tracing::warn!("not an error"));
        info_span!("failing").in_scope(|| {
            tracing::error!("an error");
            tracing::error!("another one");
        });
        drop(root);
        info_span!("later").in_scope(|| ());
        tracing::error!("outside any span");
    });
    assert_eq!(setup.kept_names(), [["root", "failing"]]);
    assert!(!format!("{:?}", setup.profiles()).contains("an error"), "only the log has the text");
    let kept = &setup.kept()[0];
    assert!(kept.spans[0].reasons().contains(Reason::Error));
    let place = format!("tests/keeping.rs:{}", line!() - 11);
    for span in &kept.spans {
        assert_eq!(span.facts.error_at.as_deref(), Some(&*place));
    }
}

#[test]
fn an_error_event_can_name_its_span() {
    let setup = Setup::new("error");
    setup.run(|| {
        let one = info_span!("one");
        let _other = info_span!("other").entered();
        tracing::error!(parent: &one, "happened there");
        tracing::event!(parent: None, Level::ERROR, "happened nowhere");
    });
    assert_eq!(setup.kept_names(), [["one"]]);
}

#[test]
fn a_status_code_of_error_is_an_error() {
    let setup = Setup::new("error");
    setup.run(|| {
        let _ = info_span!("from the start", otel.status_code = "ERROR");
        let later = info_span!("later", otel.status_code = tracing::field::Empty);
        later.record("otel.status_code", "error");
        let _ = info_span!("fine", otel.status_code = "OK");
        let _ = info_span!("another field", status = "ERROR");
    });
    assert_eq!(setup.kept_names(), [["from the start"], ["later"]]);
    assert!(setup.kept().iter().all(|kept| kept.spans[0].facts.error_at.is_none()));
}

#[test]
fn a_panic_that_passes_through_is_an_error() {
    let setup = Setup::new("error");
    setup.run(|| {
        let panicked = std::panic::catch_unwind(|| {
            let _span = info_span!("panics").entered();
            std::panic::resume_unwind(Box::new("on purpose"));
        });
        assert!(panicked.is_err());
        info_span!("fine").in_scope(|| ());
    });
    assert_eq!(setup.kept_names(), [["panics"]]);
}

/// Enters its span when it is dropped, as the future of an instrumented request does.
struct Request(tracing::Span);

impl Drop for Request {
    fn drop(&mut self) {
        let _entered = self.0.enter();
        info_span!("cleaning up").in_scope(|| info_span!("its query").in_scope(|| ()));
    }
}

#[test]
fn a_panic_fails_the_spans_that_it_unwinds_and_none_that_are_dropped_by_it() {
    let setup = Setup::new("error");
    setup.run(|| {
        let panicked = std::panic::catch_unwind(|| {
            let _outer = info_span!("outer").entered();
            let _requests: Vec<_> = (0..50).map(|_| Request(info_span!("innocent"))).collect();
            let _inner = info_span!("inner").entered();
            let _more: Vec<_> = (0..50).map(|_| Request(info_span!("innocent"))).collect();
            std::panic::resume_unwind(Box::new("on purpose"));
        });
        assert!(panicked.is_err());
        info_span!("later").in_scope(|| ());
    });
    assert_eq!(setup.kept_names(), [["outer", "inner"]]);
    assert_eq!(setup.handle.stats().kept_for(Reason::Error), 2);
}

#[test]
fn a_panic_fails_the_request_that_is_polled_and_none_that_its_executor_drops() {
    use std::future::{pending, poll_fn};
    use std::pin::Pin;
    use std::task::{Context, Waker};

    use tracing::Instrument;

    type Task = Pin<Box<dyn Future<Output = ()>>>;
    let setup = Setup::new("error");
    setup.run(|| {
        let poll = |task: &mut Task| task.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        let panicked = std::panic::catch_unwind(|| {
            // The executor of one thread unwinds, with all of its tasks.
            let task = |name| -> Task {
                match name {
                    "innocent" => Box::pin(pending().instrument(info_span!("innocent"))),
                    _ => Box::pin(
                        poll_fn(|_| std::panic::resume_unwind(Box::new("on purpose")))
                            .instrument(info_span!("query"))
                            .instrument(info_span!("guilty")),
                    ),
                }
            };
            let mut tasks: Vec<_> = (0..50).map(|_| task("innocent")).collect();
            tasks.insert(25, task("guilty"));
            for task in &mut tasks {
                assert!(poll(task).is_pending());
            }
        });
        assert!(panicked.is_err());
    });
    let mut kept = setup.kept_names().concat();
    kept.sort_unstable();
    assert_eq!(kept, ["guilty", "query"]);
    assert_eq!(setup.handle.stats().kept_for(Reason::Error), 2);
}

#[test]
fn a_panic_that_is_caught_inside_a_span_does_not_fail_it() {
    let setup = Setup::new("error");
    setup.run(|| {
        let panics = || std::panic::resume_unwind(Box::new("on purpose"));
        info_span!("catches").in_scope(|| assert!(std::panic::catch_unwind(panics).is_err()));
        // The same while another panic unwinds.
        struct Catches(tracing::Span);
        impl Drop for Catches {
            fn drop(&mut self) {
                let panics = || std::panic::resume_unwind(Box::new("on purpose"));
                self.0.in_scope(|| assert!(std::panic::catch_unwind(panics).is_err()));
            }
        }
        let panicked = std::panic::catch_unwind(|| {
            let _catches = Catches(info_span!("catches"));
            let _panics = info_span!("panics").entered();
            panics();
        });
        assert!(panicked.is_err());
    });
    assert_eq!(setup.kept_names(), [["panics"]]);
}

#[test]
fn a_span_that_is_entered_again_while_its_panic_unwinds_fails() {
    let setup = Setup::new("error");
    setup.run(|| {
        let panicked = std::panic::catch_unwind(|| {
            let span = info_span!("panics");
            let _entered = span.enter();
            let _again = Request(span.clone());
            std::panic::resume_unwind(Box::new("on purpose"));
        });
        assert!(panicked.is_err());
    });
    assert_eq!(setup.kept_names(), [["panics"]]);
}

#[test]
fn kept_spans_of_one_tree_share_a_profile_of_all_of_them() {
    let setup = Setup::new("0ms");
    let took = setup.run(|| {
        let root = info_span!("root").entered();
        burn(60 * MS);
        info_span!("inner").in_scope(|| burn(60 * MS));
        let closed = std::time::Instant::now();
        // A child on another thread.
        let child = info_span!("elsewhere");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _default = tracing::dispatcher::set_default(&setup.dispatch);
                child.in_scope(|| burn(60 * MS));
            });
        });
        drop(child);
        drop(root);
        closed.elapsed()
    });
    // A profile waits two seconds for the rest of its tree, which a busy machine may not reach.
    if took > Duration::from_secs(1) {
        println!("closed after {took:?}: the profile need not have waited for it");
        return;
    }
    assert_eq!(setup.kept_names(), [["root", "inner", "elsewhere"]]);
    if !HAS_STACKS {
        return;
    }
    let profiles = setup.profiles();
    assert_eq!(profiles.len(), 1);
    for span in &setup.kept()[0].spans {
        assert_eq!(span.profile(), Ok(profiles[0].id), "{}", span.name());
    }
    let mut paths: Vec<_> = profiles[0]
        .samples()
        .iter()
        .filter(|sample| functions(&profiles[0], sample).iter().any(|f| f.ends_with("burn")))
        .map(|sample| profiles[0].span_path(sample.link).join("/"))
        .collect();
    paths.sort();
    paths.dedup();
    assert_eq!(paths, ["root", "root/elsewhere", "root/inner"]);
}

#[test]
fn a_profile_has_only_what_is_inside_the_kept_span() {
    let setup = Setup::new("root=1h,root[inner]=0ms,root[innermost]=1h");
    setup.run(|| {
        let root = info_span!(target: "root", "root").entered();
        burn(60 * MS);
        let inner = info_span!(target: "root", "inner").entered();
        burn(60 * MS);
        info_span!(target: "root", "innermost").in_scope(|| burn(60 * MS));
        drop(inner);
        burn(60 * MS);
        drop(root);
    });
    assert_eq!(setup.kept_names(), [["inner"]]);
    if !HAS_STACKS {
        return;
    }
    let profile = &setup.profiles()[0];
    let mut paths: Vec<_> =
        profile.samples().iter().map(|s| profile.span_path(s.link).join("/")).collect();
    paths.sort();
    paths.dedup();
    assert_eq!(paths, ["inner", "inner/innermost"]);
    assert_eq!(setup.kept()[0].spans[0].samples(), taken(profile).0);
}

#[test]
fn a_root_that_stays_open_has_an_epoch_per_export() {
    // On a slow machine this may take long enough to count as hung.
    let setup = Setup::new("0ms|hung=off");
    tracing::dispatcher::with_default(&setup.dispatch, || {
        let root = info_span!("root").entered();
        burn(30 * MS);
        info_span!("first").in_scope(|| burn(60 * MS));
        setup.flush();
        info_span!("second").in_scope(|| burn(60 * MS));
        setup.flush();
        drop(root);
    });
    setup.flush();
    assert_eq!(setup.kept_names(), [["first"], ["second"], ["root"]]);
    if !HAS_STACKS {
        return;
    }
    let kept = setup.kept();
    let ids: Vec<_> = kept.iter().map(|kept| kept.profile.unwrap()).collect();
    assert!(ids[0] != ids[1] && ids[1] != ids[2] && ids[0] != ids[2]);
    assert!(kept[2].spans[0].earlier_profiles().is_empty());
    // The last one has all samples.
    let profiles = setup.profiles();
    let paths = |profile: &Profile| {
        let mut paths: Vec<_> =
            profile.samples().iter().map(|s| profile.span_path(s.link).join("/")).collect();
        paths.dedup();
        paths.sort();
        paths.dedup();
        paths
    };
    assert_eq!(paths(&profiles[0]), ["first"]);
    assert_eq!(paths(&profiles[1]), ["second"]);
    assert_eq!(paths(&profiles[2]), ["root", "root/first", "root/second"]);
    let [first, second, root] = [0, 1, 2].map(|number| taken(&profiles[number]).0);
    assert!(root > first + second, "{root} > {first} + {second}");
    assert!(root <= kept[2].spans[0].samples());
}

#[test]
fn a_kept_span_does_not_wait_forever_for_its_root() {
    let setup = Setup::new("root=1h,0ms");
    tracing::dispatcher::with_default(&setup.dispatch, || {
        let _root = info_span!(target: "root", "root").entered();
        info_span!("kept").in_scope(|| burn(30 * MS));
        // Without a flush, the profile is exported after two seconds.
        let start = std::time::Instant::now();
        while setup.kept().is_empty() {
            assert!(start.elapsed() < PLENTY, "nothing was exported");
            std::thread::sleep(10 * MS);
        }
    });
    assert_eq!(setup.kept_names(), [["kept"]]);
}

#[test]
fn over_the_rate_limit_there_is_no_profile_and_no_id() {
    let setup = Setup::with("0ms", |builder| builder.profiles_per_minute(2));
    setup.run(|| {
        for _ in 0..4 {
            info_span!("busy").in_scope(|| burn(60 * MS));
        }
    });
    if !HAS_STACKS {
        return;
    }
    assert_eq!(setup.profiles().len(), 2);
    let stats = setup.handle.stats();
    assert_eq!(stats.spans.kept, 4);
    assert_eq!(stats.spans.no_profile_rate_limit, 2);
    let with_id = setup.kept().iter().filter(|kept| kept.spans[0].profile().is_ok()).count();
    assert_eq!(with_id, 2);
}

#[test]
fn without_memory_there_is_no_profile() {
    let setup = Setup::with("0ms", |builder| builder.memory(1));
    setup.run(|| info_span!("busy").in_scope(|| burn(300 * MS)));
    if !HAS_STACKS {
        return;
    }
    let stats = setup.handle.stats();
    assert!(stats.samples.dropped_memory > 0);
    // The shortage may have been detected only after the first span closed. From now on it is known.
    let profiles = setup.profiles().len();
    setup.run(|| info_span!("second").in_scope(|| burn(30 * MS)));
    assert_eq!(setup.profiles().len(), profiles);
    assert_eq!(setup.kept()[1].spans[0].profile(), Err(NoProfile::NoMemory));
    assert_eq!(
        setup.handle.stats().spans.no_profile_no_memory,
        stats.spans.no_profile_no_memory + 1
    );
}

#[test]
fn a_memory_shortage_after_the_verdict_is_noted_in_the_profile() {
    let start = std::time::Instant::now();
    let setup = loop {
        let setup = Setup::with("inner=0ms", |builder| builder.memory(1).rate(100));
        setup.run(|| {
            // Few samples: the ring is read only after the span has closed.
            info_span!(target: "inner", "busy").in_scope(|| burn(25 * MS));
        });
        if !HAS_STACKS {
            return;
        }
        // On a busy machine timers rarely find the thread running, or the ring is read while the span is open. Then the
        // shortage is known before the span gets an id.
        if !setup.profiles().is_empty() {
            break setup;
        }
        assert!(start.elapsed() < PLENTY, "{:?}", setup.handle.stats());
    };
    let profile = &setup.profiles()[0];
    let lost = setup.handle.stats().samples.dropped_memory;
    assert!(lost > 0);
    assert_eq!(support::points_with_remark(profile), profile.sample_count());
    assert!(profile.notes.iter().any(|note| note.contains(&format!("{lost} stack"))
        && note.contains(" dropped for lack of memory")));
    // The profile still has all of the CPU time.
    assert_weight(profile, lost);
}

/// Asserts that the profile has the CPU time of `samples` samples. A timer's sample can represent more than one period. All
/// samples of perf together represent no more than the thread's CPU clock, which stops earlier at a switch than perf's.
#[track_caller]
fn assert_weight(profile: &Profile, samples: u64) {
    let usual_ns = samples * profile.period().ns();
    let (_, weight_ns) = taken(profile);
    if has_perf() {
        let on_cpu_ns = profile.spans[0].times.on_cpu().ns();
        let least_ns = usual_ns.min(on_cpu_ns) * 9 / 10;
        assert!((least_ns..=usual_ns).contains(&weight_ns), "{weight_ns}: {least_ns}, {usual_ns}");
    } else {
        assert!(weight_ns >= usual_ns, "{weight_ns} {usual_ns}");
    }
}

#[test]
fn too_many_samples_are_downsampled_evenly() {
    let setup = Setup::with("0ms", |builder| builder.rate(1_000).samples_per_profile(20));
    setup.run(|| info_span!("busy").in_scope(|| burn(200 * MS)));
    if !HAS_STACKS {
        return;
    }
    let profile = &setup.profiles()[0];
    assert!(taken(profile).0 <= 20);
    let stats = setup.handle.stats();
    assert_weight(profile, stats.samples.taken);
    assert_eq!(taken(profile).0 + stats.samples.downsampled, stats.samples.taken);
    let points = profile.samples().iter().flat_map(|sample| &sample.points);
    let whole = points.filter(|point| point.weight > profile.period().ns()).count();
    assert!(whole as u64 + 1 >= taken(profile).0, "each but the last has the same weight");
}

#[test]
fn downsampling_across_many_spans_keeps_all_of_their_cpu_time() {
    let setup =
        Setup::with("20ms,[inner]=1h", |builder| builder.rate(1_000).samples_per_profile(7));
    setup.run(|| {
        let _outer = info_span!("outer").entered();
        for _ in 0..40 {
            info_span!("inner").in_scope(|| burn(5 * MS));
        }
        (0..4).for_each(|_| std::thread::sleep(30 * MS));
    });
    if !HAS_STACKS {
        return;
    }
    let profile = &setup.profiles()[0];
    assert!(taken(profile).0 <= 7);
    let stats = setup.handle.stats();
    // A wait that represented others would be taken for a long one.
    assert_eq!(profile.wait_count() as u64, stats.waits.captured, "{:?}", profile.waits());
    assert_weight(profile, stats.samples.taken);
    assert_eq!(taken(profile).0 + stats.samples.downsampled, stats.samples.taken);
}

/// The records of the spans alone would not fit.
#[test]
fn a_profile_of_many_spans_has_all_of_its_samples() {
    fn nested(depth: u32) {
        info_span!("item", depth).in_scope(|| match depth {
            0 => _ = burn(2 * MS),
            depth => nested(depth - 1),
        });
    }
    let setup =
        Setup::with("[batch]=0ms|hung=off,[item]=1h", |builder| builder.rate(250).memory(14 << 20));
    setup.run(|| {
        let start = cpu_time::ThreadTime::now();
        let _batch = info_span!("batch").entered();
        while start.elapsed() < 2_600 * MS {
            nested(8);
        }
    });
    if !HAS_STACKS {
        return;
    }
    let profile = &setup.profiles()[0];
    let stats = setup.handle.stats().samples;
    assert!(stats.taken > 100, "{stats:?}");
    assert_eq!((taken(profile).0, stats.downsampled), (stats.taken, 0), "{stats:?}");
    let notes = profile.notes.join("; ");
    assert!(notes.contains("spans of one name are shown as one"), "{notes}");
    let mut paths: Vec<_> =
        profile.samples().iter().map(|sample| profile.span_path(sample.link)).collect();
    paths.sort();
    paths.dedup();
    assert!(paths.len() <= 10, "{paths:?}");
    assert_eq!(paths.last().unwrap().join(" "), format!("batch{}", " item".repeat(9)));
}

/// Fails the first `times` calls, then panics once, then succeeds.
struct Failing {
    calls: &'static AtomicUsize,
    times: usize,
}

impl Exporter for Failing {
    fn export(&mut self, _: &Profile) -> Result<Exported, ExportError> {
        match self.calls.fetch_add(1, Ordering::Relaxed) {
            call if call < self.times => Err("the disk is full".into()),
            call if call == self.times => panic!("an exporter may have bugs"),
            _ => Ok(Exported::default()),
        }
    }
}

/// Waits until the exporter was called.
fn wait_for(calls: &AtomicUsize) {
    let start = std::time::Instant::now();
    while HAS_STACKS && calls.load(Ordering::Relaxed) == 0 {
        assert!(start.elapsed() < PLENTY);
        std::thread::sleep(MS);
    }
}

#[test]
fn a_failing_exporter_does_not_harm_the_program() {
    static CALLS: AtomicUsize = AtomicUsize::new(0);
    let setup = Setup::with("0ms", |builder| builder.exporter(Failing { calls: &CALLS, times: 2 }));
    // The first profile fails twice. The second span closes while the exporter is known to fail.
    for _ in 0..2 {
        tracing::dispatcher::with_default(&setup.dispatch, || {
            info_span!("busy").in_scope(|| burn(60 * MS));
        });
        wait_for(&CALLS);
    }
    // The third call panics and the profile is lost, which one flush reports.
    assert_eq!(setup.handle.flush(PLENTY).is_ok(), !HAS_STACKS);
    setup.flush();
    if !HAS_STACKS {
        return;
    }
    let stats = || setup.handle.stats();
    assert_eq!(CALLS.load(Ordering::Relaxed), 3);
    assert_eq!((stats().profiles.dropped_export_failed, stats().profiles.exported), (1, 0));
    assert_eq!(stats().spans.no_profile_exporter_fails, 1);
    // After a while a span gets a profile again, and the export succeeds.
    let start = std::time::Instant::now();
    while stats().profiles.exported == 0 {
        assert!(start.elapsed() < PLENTY);
        setup.run(|| info_span!("busy").in_scope(|| burn(60 * MS)));
    }
    assert_eq!(stats().profiles.dropped_export_failed, 1);
    assert!(setup.kept().last().unwrap().profile.is_some());
}

/// Like a full disk on which space is freed later.
struct Full {
    is_full: Arc<AtomicBool>,
    memory: Memory,
    calls: &'static AtomicUsize,
}

impl Exporter for Full {
    fn export(&mut self, profile: &Profile) -> Result<Exported, ExportError> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.check()?;
        self.memory.export(profile)
    }

    fn check(&mut self) -> Result<(), ExportError> {
        if self.is_full.load(Ordering::Relaxed) { Err("the disk is full".into()) } else { Ok(()) }
    }
}

#[test]
fn retained_profiles_are_exported_when_the_exporter_recovers() {
    static CALLS: AtomicUsize = AtomicUsize::new(0);
    let is_full = Arc::new(AtomicBool::new(false));
    let memory = Memory::new();
    let exporter = Full { is_full: Arc::clone(&is_full), memory: memory.clone(), calls: &CALLS };
    let setup = Setup::with("0ms", |builder| builder.exporter(exporter));
    let busy = |patience, is_flushed| {
        tracing::dispatcher::with_default(&setup.dispatch, || {
            info_span!("busy").in_scope(|| burn(60 * MS));
        });
        wait_for(&CALLS);
        assert_eq!(setup.handle.flush(patience).is_ok(), is_flushed || !HAS_STACKS);
        setup.kept().iter().map(|kept| kept.spans[0].profile()).collect::<Vec<_>>()
    };
    is_full.store(true, Ordering::Relaxed);
    // The first profile finds the disk full and is retained. The other spans get no profile.
    for _ in 0..5 {
        busy(100 * MS, false);
    }
    is_full.store(false, Ordering::Relaxed);
    let profiles = busy(PLENTY, true);
    if !HAS_STACKS {
        return;
    }
    let fails = Err(NoProfile::ExporterFails);
    // Spans are reported in the order in which their epochs were concluded.
    assert_eq!(profiles[..4], [fails; 4]);
    let mut ids: Vec<_> = profiles.iter().filter_map(|profile| profile.ok()).collect();
    let mut exported: Vec<_> = memory.profiles().iter().map(|profile| profile.id).collect();
    ids.sort_by_key(ToString::to_string);
    exported.sort_by_key(ToString::to_string);
    assert_eq!(ids, exported);
    assert_eq!(setup.handle.stats().profiles.dropped_export_failed, 0);
    // The exporter works again.
    let after = busy(PLENTY, true);
    assert!(after[after.len() - 1].is_ok(), "{after:?}");
}

/// Fails for the first profile, at a moment that the test chooses, and for no other.
struct FailingOnce {
    is_asked: Arc<Barrier>,
    memory: Memory,
    has_failed: bool,
}

impl Exporter for FailingOnce {
    fn export(&mut self, profile: &Profile) -> Result<Exported, ExportError> {
        if std::mem::replace(&mut self.has_failed, true) {
            return self.memory.export(profile);
        }
        // Two spans get a profile before the failure is known.
        (0..2).for_each(|_| _ = self.is_asked.wait());
        Err("only this time".into())
    }
}

#[test]
fn a_refused_profile_is_exported_after_a_later_one_succeeds() {
    if !HAS_STACKS {
        return;
    }
    let (is_asked, memory) = (Arc::new(Barrier::new(2)), Memory::new());
    let exporter =
        FailingOnce { is_asked: Arc::clone(&is_asked), memory: memory.clone(), has_failed: false };
    let setup = Setup::with("0ms", |builder| builder.exporter(exporter));
    let busy = || {
        tracing::dispatcher::with_default(&setup.dispatch, || {
            info_span!("busy").in_scope(|| burn(60 * MS));
        });
    };
    busy();
    is_asked.wait();
    busy();
    is_asked.wait();
    setup.flush();
    let stats = setup.handle.stats();
    assert_eq!((stats.spans.kept, stats.profiles.exported), (2, 2), "{stats:?}");
    assert_eq!((memory.profiles().len(), setup.kept().len()), (2, 2));
}

/// Always fails, but its `check` finds no problem.
struct AlwaysFailing(&'static AtomicUsize);

impl Exporter for AlwaysFailing {
    fn export(&mut self, _: &Profile) -> Result<Exported, ExportError> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Err("no receiver".into())
    }
}

#[test]
fn an_exporter_that_always_fails_gets_no_further_profiles_for_a_while() {
    static CALLS: AtomicUsize = AtomicUsize::new(0);
    let setup = Setup::with("0ms", |builder| builder.exporter(AlwaysFailing(&CALLS)));
    for _ in 0..8 {
        tracing::dispatcher::with_default(&setup.dispatch, || {
            info_span!("busy").in_scope(|| burn(30 * MS));
        });
        wait_for(&CALLS);
        assert!(setup.handle.flush(10 * MS).is_err() || !HAS_STACKS);
    }
    if !HAS_STACKS {
        return;
    }
    let stats = setup.handle.stats();
    // The first profile is retained, whatever is flushed.
    assert_eq!((stats.spans.kept, stats.spans.no_profile_exporter_fails), (8, 7));
    assert_eq!(stats.profiles.dropped_export_failed, 0);
    let start = std::time::Instant::now();
    assert!(setup.handle.shutdown(500 * MS).is_err());
    assert!(start.elapsed() >= 500 * MS, "the exporter could recover until the deadline");
    // The counter follows after `shutdown` has returned.
    while setup.handle.stats().profiles.dropped_export_failed == 0 {
        assert!(start.elapsed() < PLENTY);
        std::thread::sleep(MS);
    }
    assert_eq!(setup.handle.stats().profiles.dropped_export_failed, 1);
}

#[test]
fn the_guard_of_main_reports_what_is_lost() {
    static CALLS: AtomicUsize = AtomicUsize::new(0);
    let setup = Setup::with("0ms", |builder| builder.exporter(AlwaysFailing(&CALLS)));
    let guard = setup.handle.flush_on_drop();
    tracing::dispatcher::with_default(&setup.dispatch, || {
        info_span!("busy").in_scope(|| burn(30 * MS));
    });
    // By then the names are known, for which the guard has only some seconds.
    wait_for(&CALLS);
    drop(guard);
    assert_eq!(setup.kept_names(), [["busy"]]);
    let lost = setup.handle.stats().profiles.dropped_export_failed;
    assert_eq!(lost, u64::from(HAS_STACKS));
}

#[test]
fn spans_get_no_profile_if_the_exporter_fails_from_the_start() {
    static CALLS: AtomicUsize = AtomicUsize::new(0);
    let (is_full, memory) = (Arc::new(AtomicBool::new(true)), Memory::new());
    let exporter = Full { is_full, memory, calls: &CALLS };
    let setup = Setup::with("0ms", |builder| builder.exporter(exporter));
    setup.run(|| info_span!("busy").in_scope(|| burn(60 * MS)));
    if HAS_STACKS {
        assert_eq!(setup.kept()[0].spans[0].profile(), Err(NoProfile::ExporterFails));
    }
}

#[test]
fn a_panic_of_on_kept_is_counted() {
    let setup = Setup::with("always", |builder| {
        builder.on_kept(|kept| {
            assert!(kept.spans[0].name() == "fine", "a program may have bugs");
        })
    });
    setup.run(|| {
        for _ in 0..3 {
            info_span!("bad").in_scope(|| ());
            info_span!("fine").in_scope(|| ());
        }
    });
    let stats = setup.handle.stats();
    assert_eq!((stats.spans.kept, stats.spans.on_kept_panics), (6, 3));
}

#[test]
fn nothing_is_profiled_after_shutdown() {
    let setup = Setup::new("0ms");
    setup.run(|| info_span!("before").in_scope(|| burn(20 * MS)));
    let entered =
        tracing::dispatcher::with_default(&setup.dispatch, || info_span!("across").entered());
    setup.handle.shutdown(PLENTY).unwrap();
    tracing::dispatcher::with_default(&setup.dispatch, || {
        drop(entered);
        info_span!("after").in_scope(|| burn(20 * MS));
    });
    setup.handle.flush(PLENTY).unwrap();
    assert_eq!(setup.kept_names(), [["before"]]);
}

/// Ends profiling from inside of an export.
struct EndsProfiling {
    handle: Arc<OnceLock<Handle>>,
    result: Arc<Mutex<Option<Result<(), FlushError>>>>,
    memory: Memory,
}

impl Exporter for EndsProfiling {
    fn export(&mut self, profile: &Profile) -> Result<Exported, ExportError> {
        *self.result.lock().unwrap() = self.handle.get().map(|handle| handle.shutdown(PLENTY));
        self.memory.export(profile)
    }
}

#[test]
fn a_shutdown_on_a_thread_of_the_layer_ends_profiling_without_waiting_for_itself() {
    let (handle, result, memory) = (Arc::default(), Arc::default(), Memory::new());
    let ends = EndsProfiling {
        handle: Arc::clone(&handle),
        result: Arc::clone(&result),
        memory: memory.clone(),
    };
    let setup = Setup::with("0ms", |builder| builder.exporter(ends));
    handle.set(setup.handle.clone()).unwrap();
    if !HAS_STACKS {
        return;
    }
    tracing::dispatcher::with_default(&setup.dispatch, || {
        info_span!("kept").in_scope(|| burn(60 * MS));
    });
    let start = std::time::Instant::now();
    // The export that was under way is not lost.
    while setup.handle.is_enabled() || memory.profiles().is_empty() {
        assert!(start.elapsed() < PLENTY);
        std::thread::sleep(MS);
    }
    assert_eq!(*result.lock().unwrap(), Some(Err(FlushError::OwnThread)));
}

#[test]
fn kept_spans_are_exported_when_the_layer_is_dropped() {
    let setup = Setup::new("0ms");
    tracing::dispatcher::with_default(&setup.dispatch, || {
        info_span!("kept").in_scope(|| burn(30 * MS));
    });
    let Setup { handle, dispatch, kept, .. } = setup;
    drop(dispatch);
    let start = std::time::Instant::now();
    while kept.lock().unwrap().is_empty() {
        assert!(start.elapsed() < PLENTY, "nothing was exported");
        std::thread::sleep(MS);
    }
    assert_eq!(kept.lock().unwrap()[0].spans[0].name(), "kept");
    // Nothing is left to flush.
    handle.flush(PLENTY).unwrap();
}

#[test]
fn a_span_path_thousands_of_spans_deep_is_cut_in_the_middle() {
    // If others were kept, their profile would be made before this many spans have closed on a busy machine.
    let setup = Setup::new("1h,[outermost]=0ms");
    setup.run(|| {
        let mut spans = vec![info_span!("outermost")];
        for _ in 0..3_500 {
            let inner = info_span!(parent: spans.last().unwrap(), "deep");
            spans.push(inner);
        }
        let inner = info_span!(parent: spans.last().unwrap(), "innermost");
        inner.in_scope(|| burn(Duration::from_millis(50)));
        drop(inner);
        while spans.pop().is_some() {}
    });
    if !HAS_STACKS {
        return;
    }
    let profiles = setup.profiles();
    let profile = &profiles[0];
    let path = profile.span_path(profile.samples()[0].link);
    assert_eq!((path[0], path[path.len() - 1]), ("outermost", "innermost"));
    assert!(path.len() <= 128, "{}", path.len());
}

#[test]
fn no_profile_lacks_samples_that_another_one_has() {
    let setup = Setup::with("0ms", |builder| builder.rate(1_000).profiles_per_minute(1_000_000));
    let has_ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Ends epochs continuously, also in the middle of a close.
        scope.spawn(|| {
            while !has_ended.load(Ordering::Relaxed) {
                setup.flush();
            }
        });
        tracing::dispatcher::with_default(&setup.dispatch, || {
            for _ in 0..1_000 {
                let root = info_span!("root");
                info_span!(parent: &root, "child").in_scope(|| burn(Duration::from_micros(1_500)));
            }
        });
        has_ended.store(true, Ordering::Relaxed);
    });
    setup.flush();
    if !HAS_STACKS {
        return;
    }
    let profiles = setup.profiles();
    // On a busy machine the exporter takes few of them.
    assert!(profiles.len() > 10, "{}", profiles.len());
    let stats = setup.handle.stats();
    for profile in &profiles {
        let is_lost = profile.notes.iter().any(|note| note.contains("lost before they were read"));
        assert!(!is_lost, "{:?}, {:?}, {stats:?}", profile.notes, profile.samples());
    }
}

#[test]
fn the_title_names_the_outer_of_two_kept_spans() {
    let setup = Setup::new("0ms");
    setup.run(|| {
        let _request = info_span!("request").entered();
        burn(30 * MS);
        info_span!("query").in_scope(|| std::thread::sleep(2 * MS));
    });
    if !HAS_STACKS {
        return;
    }
    let profile = &setup.profiles()[0];
    let title = &profile.title;
    // On an idle machine nothing is worth adding.
    let rest = title.strip_prefix("request · kept: latency");
    assert!(rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(" · ")), "{title}");
    // What is most of its time: the function, unless it was preempted for long.
    let kept = &setup.kept()[0];
    let times = kept.spans[0].times();
    let most = times.subtree_on_cpu().max(kept.waits.total);
    if most <= times.wall() / 10 {
        assert!(title.contains(" waiting for a CPU"), "{title}, {times:?}");
    } else if most == times.subtree_on_cpu() {
        assert!(profile.headline.contains("burn"), "{title}, {}", profile.headline);
    }
}
