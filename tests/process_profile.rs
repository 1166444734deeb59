//! Profiles of the process: all threads, in spans or not, by their CPU clocks.

#![allow(clippy::panic, clippy::unwrap_used, clippy::indexing_slicing, reason = "a test")]

mod support;

use std::collections::{BTreeMap, HashMap};
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, mpsc};
use std::thread::{self, Builder};
use std::time::{Duration, Instant};

use cpu_time::{ProcessTime, ThreadTime};
use support::{HAS_STACKS, Nanos, PLENTY, Setup, burn, functions, has_all_threads, has_perf};
use tracing::info_span;
use tracing_profiling::profile::{Leaf, Profile, Sample, SampleKind};
use tracing_profiling::{ProfileError, ProfileKind, ProfileOptions, Source};

const MS: Duration = Duration::from_millis(1);

/// One at a time: each has all threads of the process.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Eight functions that the compiler must not merge, and the CPU time of each by its threads' clocks.
macro_rules! burns {
    ($($name:ident = $factor:literal),+) => {
        $(
            #[inline(never)]
            fn $name(cpu: Duration, used_ns: &AtomicU64) {
                let start = ThreadTime::now();
                let mut x = $factor;
                while start.elapsed() < cpu {
                    let mut i = 0_u64;
                    while i < 20_000 {
                        x = black_box((x ^ i).wrapping_mul($factor) % 1_000_003);
                        i += 1;
                    }
                }
                used_ns.fetch_add(start.elapsed().ns(), Ordering::Relaxed);
            }
        )+
        const FUNCTIONS: &[(&str, fn(Duration, &AtomicU64))] = &[$((stringify!($name), $name)),+];
    };
}

burns! {
    burn_plain_a = 3_u64, burn_plain_b = 5_u64, burn_other_a = 7_u64, burn_other_b = 11_u64,
    burn_in_span = 13_u64, burn_beside_span = 17_u64, burn_short = 19_u64, burn_late = 23_u64
}

fn options(seconds: u64, rate: u32) -> ProfileOptions {
    let duration = Duration::from_secs(seconds);
    ProfileOptions { duration, rate, ..ProfileOptions::default() }
}

/// The CPU time of the samples that have such a function, or are of such a kind, and how many there are.
fn found(profile: &Profile, is_it: impl Fn(&Sample) -> bool) -> (u64, u64) {
    let samples = profile.of_kind(SampleKind::OnCpu).filter(|sample| is_it(sample));
    let points = samples.flat_map(|sample| &sample.points);
    points.fold((0, 0), |(ns, count), point| (ns + point.weight, count + 1))
}

fn has_function(profile: &Profile, sample: &Sample, name: &str) -> bool {
    functions(profile, sample).iter().any(|function| function.rsplit("::").next() == Some(name))
}

#[test]
fn shares_are_those_of_the_cpu_clocks_of_all_threads() {
    const LONGEST: u64 = 8;
    /// For each function; the profile goes on until the last has had it, or nearly until its end.
    const CPU: Duration = Duration::from_millis(400);
    let _alone = alone();
    // No span is kept, but each is past its sampling delay, so that at times something else wants samples, too.
    let setup = Setup::of_rules("1h", |builder| builder.sampling_delay(2 * MS));
    if !HAS_STACKS {
        let refused = setup.handle.profile(options(1, 100)).unwrap_err();
        assert!(matches!(refused, ProfileError::Unavailable(_)), "{refused:?}");
        return;
    }
    let used: BTreeMap<&str, AtomicU64> =
        FUNCTIONS.iter().map(|(name, _)| (*name, AtomicU64::new(0))).collect();
    let (used, burns): (_, HashMap<_, _>) = (&used, FUNCTIONS.iter().copied().collect());
    let is_over = &AtomicBool::new(false);
    let run = |name: &str, cpu: Duration| burns[name](cpu, &used[name]);
    let run = &run;
    let goes_on = |name: &str| {
        used[name].load(Ordering::Relaxed) < CPU.ns() && !is_over.load(Ordering::Relaxed)
    };
    let goes_on = &goes_on;
    // One thread has met a hook before the profile begins.
    let (is_hooked, has_begun) = (&AtomicBool::new(false), &AtomicBool::new(false));
    let wait_for = |flag: &AtomicBool| {
        let start = Instant::now();
        while !flag.load(Ordering::Acquire) {
            assert!(start.elapsed() < 2 * PLENTY);
            thread::sleep(MS);
        }
    };
    let wait_for = &wait_for;
    let attached = || setup.handle.stats().threads.attached;
    let process = ProcessTime::now();
    let (profile, used_by_process) = thread::scope(|scope| {
        let (handle, dispatch) = (setup.handle.clone(), &setup.dispatch);
        let named = |name: &str| Builder::new().name(name.to_owned());
        named("in span")
            .spawn_scoped(scope, move || {
                tracing::dispatcher::with_default(dispatch, || {
                    info_span!("first").in_scope(|| is_hooked.store(true, Ordering::Release));
                    wait_for(has_begun);
                    while goes_on("burn_in_span") || goes_on("burn_beside_span") {
                        let span = info_span!("GET", http.route = "/cart");
                        span.in_scope(|| {
                            info_span!("render").in_scope(|| run("burn_in_span", 4 * MS));
                        });
                        drop(span);
                        run("burn_beside_span", 2 * MS);
                        thread::sleep(10 * MS);
                    }
                });
            })
            .unwrap();
        wait_for(is_hooked);
        let before = attached();
        let profile = scope.spawn(move || handle.profile(options(LONGEST, 200)));
        let start = Instant::now();
        while attached() == before {
            assert!(start.elapsed() < PLENTY, "threads are sampled");
            thread::sleep(MS);
        }
        has_begun.store(true, Ordering::Release);
        named("plain")
            .spawn_scoped(scope, move || {
                while goes_on("burn_plain_a") || goes_on("burn_plain_b") {
                    run("burn_plain_a", 10 * MS);
                    run("burn_plain_b", 5 * MS);
                }
            })
            .unwrap();
        for name in ["burn_other_a", "burn_other_b"] {
            let burn = move || {
                while goes_on(name) {
                    run(name, 10 * MS);
                }
            };
            named("other").spawn_scoped(scope, burn).unwrap();
        }
        // Threads that last for some 50 ms each.
        scope.spawn(move || {
            while goes_on("burn_short") {
                let burn = move || run("burn_short", 50 * MS);
                thread::scope(|inner| {
                    named("short").spawn_scoped(inner, burn).unwrap();
                });
            }
        });
        // It is found before it meets its first hook.
        named("late hook")
            .spawn_scoped(scope, move || {
                let half = || used["burn_late"].load(Ordering::Relaxed) < CPU.ns() / 2;
                while half() && goes_on("burn_late") {
                    run("burn_late", 10 * MS);
                }
                tracing::dispatcher::with_default(dispatch, || {
                    while goes_on("burn_late") {
                        info_span!("late").in_scope(|| run("burn_late", 10 * MS));
                    }
                });
            })
            .unwrap();
        let nearly = Duration::from_secs(LONGEST) - 500 * MS;
        while start.elapsed() < nearly && FUNCTIONS.iter().any(|&(name, _)| goes_on(name)) {
            thread::sleep(5 * MS);
        }
        is_over.store(true, Ordering::Relaxed);
        let profile = profile.join().unwrap().unwrap();
        (profile, process.elapsed().ns())
    });

    let used: BTreeMap<&str, u64> =
        used.iter().map(|(name, ns)| (*name, ns.load(Ordering::Relaxed))).collect();
    // Short threads have samples from when they are found.
    let all = || {
        let each = used.iter().map(|(name, ns)| (*name, *ns));
        each.filter(|(name, _)| *name != "burn_short")
    };
    let of = |name: &str| found(&profile, |sample| has_function(&profile, sample, name));
    let all_used: u64 = all().map(|(_, ns)| ns).sum();
    let (all_found, all_count) =
        all().map(|(name, _)| of(name)).fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1));
    assert!(all_count > 100, "{all_count}");
    for (name, ns) in all() {
        let share = ns as f64 / all_used as f64;
        let found = of(name).0 as f64 / all_found as f64;
        // Five standard errors, and a thread's beginning and end.
        let error = 5.0 * (share * (1.0 - share) / all_count as f64).sqrt() + 0.02;
        assert!((found - share).abs() < error, "{name}: {found} of {share} ± {error}");
    }
    let (short_found, _) = of("burn_short");
    let period_ns = profile.period().ns();
    let most = |ns: u64| ns + ns / 4 + 20 * period_ns;
    assert!(short_found > 0 && short_found < most(used["burn_short"]), "{short_found} {used:?}");
    // None is sampled twice, and what was not sampled is one frame.
    let (late, _) = of("burn_late");
    assert!(late < most(used["burn_late"]), "{late} {used:?}");
    let is_rest = |sample: &Sample| match profile.leaf(sample.leaf) {
        Some(Leaf::Unknown(what)) => what.starts_with("not sampled"),
        _ => false,
    };
    let (rest, _) = found(&profile, is_rest);
    let sum = profile.weight().ns();
    assert!(sum < used_by_process + used_by_process / 4, "{sum} of {used_by_process}, rest {rest}");
    let used_here: u64 = used.values().sum();
    assert!(sum > used_here - used_here / 4, "{sum} of {used_here}, rest {rest}");

    let threads_of = |name: &str| {
        let samples = profile.of_kind(SampleKind::OnCpu);
        let samples = samples.filter(|sample| has_function(&profile, sample, name));
        let points = samples.flat_map(|sample| &sample.points);
        let mut names: Vec<_> =
            points.filter_map(|point| Some(profile.thread(point.thread?)?.name.clone())).collect();
        names.sort();
        names.dedup();
        names
    };
    for (name, thread) in [
        ("burn_plain_a", "plain"),
        ("burn_other_a", "other"),
        ("burn_in_span", "in span"),
        ("burn_late", "late hook"),
    ] {
        assert_eq!(threads_of(name), [thread], "{name}");
    }
    let mut paths = Vec::new();
    for sample in profile.of_kind(SampleKind::OnCpu) {
        let path = profile.span_path(sample.link);
        if has_function(&profile, sample, "burn_in_span") {
            paths.push(path);
        } else if has_function(&profile, sample, "burn_beside_span") {
            assert!(path.is_empty(), "{path:?}");
        }
    }
    assert!(!paths.is_empty() && paths.iter().all(|path| *path == ["GET", "render"]), "{paths:?}");
    let link = profile.of_kind(SampleKind::OnCpu).find_map(|sample| {
        has_function(&profile, sample, "burn_in_span").then(|| profile.link(sample.link?))?
    });
    let root = link.and_then(|link| profile.link(link.parent?)).unwrap();
    let fields: Vec<_> = root.fields.iter().map(|(key, value)| (*key, value.as_str())).collect();
    assert_eq!(fields, [("local_root", "GET"), ("http.route", "/cart")]);

    // Once it is over, nothing is sampled.
    assert!(setup.profiles().is_empty());
    let start = Instant::now();
    while setup.handle.stats().threads.sampled > 0 {
        assert!(start.elapsed() < PLENTY, "{:?}", setup.handle.stats().threads);
        thread::sleep(MS);
    }
}

/// At a rate over the kernel's ticks, so that most samples represent several periods.
#[test]
fn the_continuous_profile_has_the_shares_of_the_cpu_clocks_by_thread_name_and_local_root() {
    const CPU: Duration = Duration::from_millis(500);
    const HOUR: Duration = Duration::from_secs(3_600);
    let _alone = alone();
    let set =
        |builder: tracing_profiling::Builder| builder.continuous(1_000).continuous_interval(HOUR);
    let setup = Setup::of_rules("1h", set);
    if !has_all_threads() {
        assert!(setup.profiles().is_empty());
        return;
    }
    let setup = &setup;
    let stats = || setup.handle.stats().continuous;
    let start = Instant::now();
    while stats().taken == 0 {
        assert!(start.elapsed() < PLENTY, "{:?}", stats());
        _ = burn(20 * MS);
        // The rings are read.
        _ = setup.handle.open_spans(HOUR);
    }
    let used: BTreeMap<&str, AtomicU64> =
        FUNCTIONS.iter().map(|(name, _)| (*name, AtomicU64::new(0))).collect();
    let (used, burns): (_, HashMap<_, _>) = (&used, FUNCTIONS.iter().copied().collect());
    let run = |name: &str, cpu: Duration| burns[name](cpu, &used[name]);
    let goes_on = |name: &str| used[name].load(Ordering::Relaxed) < CPU.ns();
    let (run, goes_on) = (&run, &goes_on);
    let process = ProcessTime::now();
    thread::scope(|scope| {
        let named = |name: &str| Builder::new().name(name.to_owned());
        let dispatch = &setup.dispatch;
        let in_span = move || {
            tracing::dispatcher::with_default(dispatch, || {
                while goes_on("burn_in_span") || goes_on("burn_beside_span") {
                    let span = info_span!("GET", http.route = "/cart");
                    span.in_scope(|| {
                        info_span!("render").in_scope(|| run("burn_in_span", 10 * MS));
                    });
                    drop(span);
                    run("burn_beside_span", 10 * MS);
                }
                // It is open when the profile ends, and its thread meets no hook after the samples.
                let span = info_span!("still open");
                let entered = span.enter();
                while goes_on("burn_late") {
                    run("burn_late", 10 * MS);
                }
                setup.handle.set_continuous(0).unwrap();
                let start = Instant::now();
                while setup.profiles().is_empty() {
                    assert!(start.elapsed() < PLENTY);
                    thread::sleep(MS);
                }
                drop(entered);
            });
        };
        let plain = move || {
            while goes_on("burn_plain_a") || goes_on("burn_plain_b") {
                run("burn_plain_a", 10 * MS);
                run("burn_plain_b", 5 * MS);
            }
        };
        let plain = named("plain").spawn_scoped(scope, plain).unwrap();
        let other = move || {
            while goes_on("burn_other_a") {
                run("burn_other_a", 10 * MS);
            }
        };
        let other = named("other").spawn_scoped(scope, other).unwrap();
        // Threads that last for some 20 ms each.
        while goes_on("burn_short") {
            let burn = move || run("burn_short", 20 * MS);
            thread::scope(|inner| _ = named("short").spawn_scoped(inner, burn).unwrap());
        }
        plain.join().unwrap();
        other.join().unwrap();
        named("in span").spawn_scoped(scope, in_span).unwrap();
    });
    let used_by_process = process.elapsed().ns();
    let [profile] = setup.profiles().try_into().unwrap();
    let stats = stats();
    println!("{stats:?}");
    let of = |name: &str| found(&profile, |sample| has_function(&profile, sample, name)).0;
    let used: BTreeMap<&str, u64> =
        used.iter().map(|(name, ns)| (*name, ns.load(Ordering::Relaxed))).collect();
    // Of threads that end soon, some have no sample: the signals go to some cores more often.
    let all = || used.iter().filter(|(name, _)| **name != "burn_short");
    let all_used: u64 = all().map(|(_, ns)| ns).sum();
    let all_found: u64 = all().map(|(name, _)| of(name)).sum();
    let short_found = of("burn_short");
    assert!(short_found > 0 && short_found < used["burn_short"] + 50 * MS.ns(), "{short_found}");
    for (name, ns) in all() {
        let share = *ns as f64 / all_used as f64;
        let found = of(name) as f64 / all_found as f64;
        // Five standard errors.
        let error = 5.0 * (share * (1.0 - share) / stats.taken as f64).sqrt() + 0.01;
        assert!((found - share).abs() < error, "{name}: {found} of {share} ± {error}");
    }
    assert!(all_found > all_used - all_used / 5, "{all_found} of {all_used}");
    // What has no sample is one frame.
    let sum = profile.weight().ns();
    assert!(sum < used_by_process + used_by_process / 8, "{sum} of {used_by_process}");
    assert!(sum > used.values().sum(), "{sum} of {used:?}");

    let labels_of = |name: &str| {
        let samples = profile.of_kind(SampleKind::OnCpu);
        let samples = samples.filter(|sample| has_function(&profile, sample, name));
        let mut labels: Vec<_> = samples
            .flat_map(|sample| sample.points.iter().map(move |point| (sample, point)))
            .map(|(sample, point)| {
                let thread = point.thread.and_then(|id| profile.thread(id));
                let link = sample.link.and_then(|id| profile.link(id));
                let fields = link.map(|link| link.fields.clone()).unwrap_or_default();
                (thread.unwrap().name.clone(), profile.span_path(sample.link).join(" "), fields)
            })
            .collect();
        labels.sort();
        labels.dedup();
        labels
    };
    let root = |name: &str| ("local_root", name.to_owned());
    for (function, thread, path, fields) in [
        ("burn_plain_b", "plain", "", vec![]),
        ("burn_other_a", "other", "", vec![]),
        ("burn_short", "short", "", vec![]),
        ("burn_beside_span", "in span", "", vec![]),
        ("burn_in_span", "in span", "GET", vec![root("GET"), ("http.route", "/cart".to_owned())]),
        ("burn_late", "in span", "still open", vec![root("still open")]),
    ] {
        let expected = (thread.to_owned(), path.to_owned(), fields);
        assert_eq!(labels_of(function), [expected], "{function}");
    }
    // Neither takes samples from the other: one of its spans is past its sampling delay.
    assert!(setup.kept().is_empty());
    assert!(setup.handle.stats().samples.taken > 0);
}

/// Threads get their names from themselves or from others when they run, which may be after they were found.
#[test]
fn a_thread_that_is_named_after_it_was_found_has_that_name() {
    let _alone = alone();
    if !HAS_STACKS {
        return;
    }
    let sources = [Source::Timer, Source::Perf].into_iter();
    for source in sources.filter(|source| *source == Source::Timer || has_perf()) {
        // It may be sampled before it has its new name, or found after that.
        let found = (0..10).find_map(|_| {
            let setup = Setup::of_rules("1h", |builder| builder.source(source));
            let attached = || setup.handle.stats().threads.attached;
            let profile = thread::scope(|scope| {
                let profile = scope.spawn(|| setup.handle.profile(options(2, 500)));
                let thread = Builder::new().name("before".to_owned()).spawn_scoped(scope, || {
                    // Waking is enough to be found by a search, and too short for a sample.
                    for _ in 0..12 {
                        thread::sleep(50 * MS);
                    }
                    let was_found = attached() > 0;
                    rustix::thread::set_name(c"after").unwrap();
                    burn_short(300 * MS, &AtomicU64::new(0));
                    was_found
                });
                let was_found = thread.unwrap().join().unwrap();
                Some(profile.join().unwrap().unwrap()).filter(|_| was_found)
            })?;
            let burnt = profile.of_kind(SampleKind::OnCpu);
            let burnt = burnt.filter(|sample| has_function(&profile, sample, "burn_short"));
            let points = burnt.flat_map(|sample| &sample.points);
            let names: Vec<_> = points
                .filter_map(|point| Some(profile.thread(point.thread?)?.name.as_str()))
                .collect();
            (!names.is_empty() && names.iter().all(|name| *name == "after")).then_some(())
        });
        assert!(found.is_some(), "{source:?}");
    }
}

#[test]
fn a_second_profile_at_the_same_time_is_refused_and_the_first_ends_with_the_layer() {
    let _alone = alone();
    let setup = Setup::of_rules("1h", |builder| builder);
    for (seconds, rate) in [(0, 100), (3_601, 100), (1, 0), (1, 1_001)] {
        let refused = setup.handle.profile(options(seconds, rate)).unwrap_err();
        assert_eq!(refused, ProfileError::OutOfRange, "{seconds} {rate}");
    }
    let refused = setup.handle.profile(wall(1, 101)).unwrap_err();
    assert_eq!(refused, ProfileError::OutOfRange);
    if !HAS_STACKS {
        return;
    }
    thread::scope(|scope| {
        let handle = setup.handle.clone();
        let first = scope.spawn(move || handle.profile(options(3_000, 100)));
        let start = Instant::now();
        while setup.handle.stats().threads.attached == 0 {
            assert!(start.elapsed() < PLENTY && !first.is_finished());
            thread::sleep(MS);
        }
        for options in [options(1, 100), wall(1, 20)] {
            assert_eq!(setup.handle.profile(options).unwrap_err(), ProfileError::Busy);
        }
        setup.handle.shutdown(PLENTY).unwrap();
        assert_eq!(first.join().unwrap().unwrap_err(), ProfileError::Ended);
    });
    for options in [options(1, 100), wall(1, 20)] {
        assert_eq!(setup.handle.profile(options).unwrap_err(), ProfileError::Ended);
    }
}

/// Options for wall time.
fn wall(seconds: u64, rate: u32) -> ProfileOptions {
    let duration = Duration::from_secs(seconds);
    ProfileOptions { duration, rate, ..ProfileOptions::of(ProfileKind::Wall) }
}

/// The wall time of threads that is in samples which have such a function, or are of such a kind.
fn observed(profile: &Profile, is_it: impl Fn(&Sample) -> bool) -> Duration {
    let samples = profile.samples().iter().filter(|sample| is_it(sample));
    let points = samples.flat_map(|sample| &sample.points);
    Duration::from_nanos(points.map(|point| point.weight).sum())
}

/// The wall time of the threads of that name.
fn observed_of_threads(profile: &Profile, name: &str) -> Duration {
    let points = profile.samples().iter().flat_map(|sample| &sample.points);
    let is_it = |id| profile.thread(id).is_some_and(|thread| thread.name == name);
    let points = points.filter(|point| point.thread.is_some_and(is_it));
    Duration::from_nanos(points.map(|point| point.weight).sum())
}

/// What the profile may lack of a time, or have too much: five standard errors, and one observation.
fn error_of(profile: &Profile, time: Duration) -> Duration {
    let all = observed(profile, |_| true);
    // As the profile says.
    let count = profile.notes[0].rsplit_once(" / ").unwrap().1;
    let count: f64 = count.trim_end_matches(')').parse().unwrap();
    let share = time.as_secs_f64() / all.as_secs_f64();
    // Where each scan has visited all threads, there is none.
    let is_part = profile.notes.iter().any(|note| note.contains("represent the others"));
    let error = if is_part { 5.0 * (share * (1.0 - share).max(0.0) / count).sqrt() } else { 0.0 };
    all.mul_f64(error) + profile.period()
}

#[inline(never)]
fn waits_for_a_message(messages: &mpsc::Receiver<()>) {
    _ = messages.recv();
}

#[inline(never)]
fn waits_for_a_lock(lock: &Mutex<()>) {
    drop(lock.lock().unwrap());
}

#[inline(never)]
fn runs_all_the_time(is_over: &AtomicBool) {
    while !is_over.load(Ordering::Relaxed) {
        std::hint::spin_loop();
    }
}

#[inline(never)]
fn waits_for_a_while(messages: &mpsc::Receiver<()>, time: Duration) {
    _ = messages.recv_timeout(time);
}

/// A profile of the wall time of three threads, and of one that starts and ends while it is made.
fn wall_of_four_threads(source: Source, seconds: u64) -> Profile {
    let set =
        |builder: tracing_profiling::Builder| builder.source(source).sampling_delay(Duration::ZERO);
    let setup = Setup::of_rules("1h", set);
    let (is_over, lock) = (AtomicBool::new(false), Mutex::new(()));
    let (release, waits) = mpsc::channel();
    let (is_over, lock, dispatch) = (&is_over, &lock, &setup.dispatch);
    let held = lock.lock().unwrap();
    thread::scope(|scope| {
        let named = |name: &str| Builder::new().name(name.to_owned());
        let in_span = move |action: &dyn Fn()| {
            tracing::dispatcher::with_default(dispatch, || {
                let span = info_span!("GET", http.route = "/cart");
                span.in_scope(|| info_span!("render").in_scope(action));
            });
        };
        let message = move || {
            in_span(&|| waits_for_a_message(&waits));
        };
        named("message").spawn_scoped(scope, message).unwrap();
        named("lock").spawn_scoped(scope, move || waits_for_a_lock(lock)).unwrap();
        let runs = move || in_span(&|| runs_all_the_time(is_over));
        named("runs").spawn_scoped(scope, runs).unwrap();
        // Each is in its function from here on.
        let start = Instant::now();
        let are_there = || {
            let dump = setup.handle.threads().unwrap();
            let lines = || dump.threads().iter().flat_map(|thread| thread.stack.iter());
            let functions = ["waits_for_a_message", "waits_for_a_lock", "runs_all_the_time"];
            functions.into_iter().all(|function| lines().any(|line| line.contains(function)))
        };
        while !are_there() {
            if start.elapsed() > PLENTY {
                is_over.store(true, Ordering::Relaxed);
                panic!("the threads are not in their functions");
            }
            thread::sleep(MS);
        }
        let handle = setup.handle.clone();
        let profile = scope.spawn(move || handle.profile(wall(seconds, 50)));
        thread::sleep(Duration::from_secs(seconds) / 4);
        let short = named("short").spawn_scoped(scope, move || {
            let (_sender, messages) = mpsc::channel();
            waits_for_a_while(&messages, Duration::from_secs(seconds) / 4);
        });
        short.unwrap().join().unwrap();
        let profile = profile.join().unwrap();
        is_over.store(true, Ordering::Relaxed);
        drop((release, held));
        profile.unwrap()
    })
}

#[test]
fn wall_time_is_that_of_all_threads_running_or_blocked() {
    let _alone = alone();
    if !HAS_STACKS {
        let setup = Setup::of_rules("1h", |builder| builder);
        let refused = setup.handle.profile(wall(1, 20)).unwrap_err();
        assert!(matches!(refused, ProfileError::Unavailable(_)), "{refused:?}");
        return;
    }
    // Without perf events, too.
    let perf = has_perf().then_some(Source::Perf);
    for source in perf.into_iter().chain([Source::Timer]) {
        // On a loaded machine the collector may get no CPU while that thread is there, or the thread may be late.
        let found = [1, 4, 16].into_iter().find_map(|seconds| {
            let profile = wall_of_four_threads(source, seconds);
            let short = observed_of_threads(&profile, "short");
            (!short.is_zero() && short < profile.duration().mul_f64(0.8)).then_some(profile)
        });
        let profile = found.unwrap();
        let duration = profile.duration();
        let in_function =
            |name: &str| observed(&profile, |sample| has_function(&profile, sample, name));
        for (thread, function) in [
            ("message", "waits_for_a_message"),
            ("lock", "waits_for_a_lock"),
            ("runs", "runs_all_the_time"),
        ] {
            let found = observed_of_threads(&profile, thread);
            let error = error_of(&profile, duration);
            assert!(
                found.abs_diff(duration) < error,
                "{thread}: {found:?} of {duration:?} ± {error:?}"
            );
            // A sample of the thread that runs can be without callers.
            assert!(in_function(function) >= found.mul_f64(0.9), "{thread}: {found:?}");
        }
        assert!(!in_function("waits_for_a_while").is_zero(), "{source:?}");

        for sample in profile.samples() {
            let path = profile.span_path(sample.link);
            let root = sample.link.and_then(|id| profile.link(profile.link(id)?.parent?));
            let fields = root.map(|root| root.fields.clone()).unwrap_or_default();
            match profile.leaf(sample.leaf) {
                _ if has_function(&profile, sample, "waits_for_a_message") => {
                    assert_eq!(sample.kind, SampleKind::OffCpu);
                    assert_eq!(path, ["GET", "render"]);
                    let route = ("http.route", "/cart".to_owned());
                    assert_eq!(fields, [("local_root", "GET".to_owned()), route]);
                }
                Some(Leaf::Blocked(call)) if has_function(&profile, sample, "waits_for_a_lock") => {
                    assert!(call.starts_with("futex 0x") && path.is_empty(), "{call} {path:?}");
                }
                Some(Leaf::Unknown("running: stack not known") | Leaf::Ran) => {
                    assert_eq!(sample.kind, SampleKind::OnCpu);
                }
                _ => {}
            }
        }
        assert!(profile.notes[0].contains("sqrt(p (1 - p) / "), "{:?}", profile.notes);
    }
}

/// And only those that have run since are inspected again.
#[test]
fn the_wall_time_of_a_thousand_threads_is_observed_within_the_budget() {
    const MANY: usize = 1_000;
    let _alone = alone();
    let setup = Setup::of_rules("1h", |builder| builder);
    if !HAS_STACKS {
        return;
    }
    let (begun, over) = (AtomicU64::new(0), Mutex::new(()));
    let held = over.lock().unwrap();
    let wait = || {
        begun.fetch_add(1, Ordering::Relaxed);
        waits_for_a_lock(&over);
    };
    let collector = || Duration::from_nanos(setup.handle.stats().sampling.collector_cpu_ns);
    let (profile, used, took) = thread::scope(|scope| {
        for _ in 0..MANY {
            let thread = Builder::new().name("many".to_owned()).stack_size(64 << 10);
            thread.spawn_scoped(scope, wait).unwrap();
        }
        while begun.load(Ordering::Relaxed) < MANY as u64 {
            thread::sleep(MS);
        }
        let (start, before) = (Instant::now(), collector());
        let profile = setup.handle.profile(wall(2, 20));
        let found = (profile, collector() - before, start.elapsed());
        drop(held);
        found
    });
    let profile = profile.unwrap();
    let expected = profile.duration() * MANY as u32;
    let (found, error) = (observed_of_threads(&profile, "many"), error_of(&profile, expected));
    assert!(found.abs_diff(expected) < error, "{found:?} of {expected:?} ± {error:?}");
    // The threads of the harness are few.
    let all = observed(&profile, |_| true);
    assert!(all < expected + error + 30 * profile.duration(), "{all:?} of {expected:?}");
    // 2 % of a core, what was saved up, and as much again: an inspection can take longer than assumed.
    assert!(used < took / 50 + 400 * MS, "{used:?} in {took:?}, {:?}", profile.notes);
}
