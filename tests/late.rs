//! Threads are sampled once their spans have been entered for a while, and not before.

#![cfg(not(tracing_profiling_unsupported))]
#![allow(clippy::expect_used, clippy::unwrap_used, clippy::indexing_slicing, reason = "a test")]

mod support;

use std::fs;
use std::sync::{Barrier, mpsc};
use std::time::{Duration, Instant};

use cpu_time::ThreadTime;
use support::Nanos as _;
use support::{PLENTY, Setup, burn, functions, has_perf, is_child, run_child, taken};
use tracing::{Span, info_span};
use tracing_profiling::profile::{Profile, Sample, SampleKind};
use tracing_profiling::{Builder, Source, TimeBreakdown};

const MS: Duration = Duration::from_millis(1);
const AGE: Duration = Duration::from_millis(20);
const NEVER: Duration = Duration::from_secs(3600);

/// Perf where it is allowed, and timers.
fn sources() -> Vec<Source> {
    let perf = has_perf().then_some(Source::Perf);
    perf.into_iter().chain([Source::Timer]).collect()
}

fn with(source: Source, sampling_delay: Duration) -> Setup {
    Setup::with("0ms", |builder: Builder| builder.source(source).sampling_delay(sampling_delay))
}

fn in_layer<R>(setup: &Setup, action: impl FnOnce() -> R) -> R {
    tracing::dispatcher::with_default(&setup.dispatch, action)
}

fn is_sampled(setup: &Setup) -> bool {
    setup.handle.stats().threads.sampled > 0
}

/// Repeats the check until it holds.
#[track_caller]
fn until(mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PLENTY, "timed out");
    }
}

fn account(setup: &Setup, name: &str) -> TimeBreakdown {
    let kept = setup.kept();
    let mut spans = kept.iter().flat_map(|kept| &kept.spans);
    spans.find(|span| span.name() == name).map(|span| *span.times()).expect("the span is kept")
}

fn profile_of(setup: &Setup, name: &str) -> Profile {
    let mut profiles = setup.profiles().into_iter();
    profiles.find(|profile| profile.name == name).expect("the span has a profile")
}

/// The number of perf events and of timers of this process.
fn open_here() -> (usize, usize) {
    let files = fs::read_dir("/proc/self/fd").unwrap();
    let names = files.filter_map(|file| fs::read_link(file.unwrap().path()).ok());
    let events = names.filter(|name| name.to_string_lossy().contains("perf_event")).count();
    // Some kernels do not have this file.
    let timers = fs::read_to_string("/proc/self/timers").unwrap_or_default();
    (events, timers.lines().filter(|line| line.starts_with("ID:")).count())
}

#[test]
fn young_spans_use_no_resources() {
    if !is_child("young_spans_use_no_resources") {
        let output = run_child("young_spans_use_no_resources", &[]);
        assert!(output.status.success(), "{output:?}");
        return;
    }
    const THREADS: usize = 64;
    for source in sources() {
        let setup = with(source, NEVER);
        // The collector opens its files when it starts.
        setup.flush();
        let before = open_here();
        let barrier = Barrier::new(THREADS + 1);
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    in_layer(&setup, || {
                        info_span!("young").in_scope(|| {
                            burn(2 * MS);
                            barrier.wait();
                            barrier.wait();
                        });
                    });
                });
            }
            barrier.wait();
            std::thread::sleep(50 * MS);
            assert_eq!(open_here(), before, "{source:?}");
            assert!(!is_sampled(&setup), "{source:?}");
            barrier.wait();
        });
        setup.flush();
        assert_eq!(setup.handle.stats().samples.taken, 0, "{source:?}");
        let young = account(&setup, "young");
        assert!(young.sampled_ns == 0 && young.on_cpu().ns() > 0, "{young:?}");
        // Its files are closed before those of the next one are counted.
        setup.handle.shutdown(PLENTY).unwrap();
    }
}

#[test]
fn an_old_span_reports_when_sampling_began() {
    for source in sources() {
        let setup = with(source, AGE);
        // How long the thread had run when the span was certainly still young.
        let mut young = Duration::ZERO;
        setup.run(|| {
            info_span!("old").in_scope(|| {
                let (start, cpu) = (Instant::now(), ThreadTime::now());
                until(|| {
                    burn(MS / 10);
                    let ran = cpu.elapsed();
                    if start.elapsed() < AGE - MS {
                        young = ran;
                    }
                    setup.handle.stats().samples.taken >= 5
                });
            });
        });
        let old = account(&setup, "old");
        let unsampled_ns = old.on_cpu().ns() + old.on_cpu_error().ns() - old.sampled_ns;
        assert!(
            old.sampled_ns > 0 && u128::from(unsampled_ns) >= young.as_nanos(),
            "{old:?} {young:?}"
        );
        let profile = profile_of(&setup, "old");
        let note_text = "of it not sampled";
        let is_noted = profile.notes.iter().any(|note| note.contains(note_text));
        let sure_ns = old.on_cpu().ns() - old.on_cpu_error().ns() - old.sampled_ns;
        assert_eq!(is_noted, sure_ns >= 1_000_000, "{:?}", profile.notes);
        assert_eq!(profile.title.contains("on-CPU not sampled"), is_noted, "{}", profile.title);
    }
}

/// The segments are long enough only together; each ends before the collector's next check.
#[test]
fn a_span_of_short_segments_becomes_old() {
    for source in sources() {
        let setup = with(source, AGE);
        let mut entered = Duration::ZERO;
        setup.run(|| {
            let span = info_span!("polled");
            until(|| {
                assert!(entered >= AGE || !is_sampled(&setup), "{source:?}: {entered:?}");
                let start = Instant::now();
                span.in_scope(|| burn(MS / 4));
                entered += start.elapsed();
                setup.handle.stats().samples.taken >= 3
            });
        });
        assert!(taken(&profile_of(&setup, "polled")).0 > 0, "{source:?}");
    }
}

#[test]
fn a_span_becomes_old_on_another_thread() {
    for source in sources() {
        let setup = with(source, 4 * AGE);
        in_layer(&setup, || {
            let span = info_span!("moved");
            let start = Instant::now();
            span.in_scope(|| until(|| start.elapsed() > 3 * AGE));
            let here = start.elapsed();
            let other = span.clone();
            std::thread::scope(|scope| {
                let there = scope.spawn(|| {
                    in_layer(&setup, || {
                        let start = Instant::now();
                        other.in_scope(|| until(|| is_sampled(&setup)));
                        start.elapsed()
                    })
                });
                assert!(here + there.join().unwrap() >= 4 * AGE, "{source:?}");
            });
        });
    }
}

/// The spans are idle for much longer than they are entered.
#[test]
fn a_span_that_awaits_stays_young() {
    const LONG: Duration = Duration::from_millis(200);
    for source in sources() {
        let setup = with(source, LONG);
        let mut longest = Duration::ZERO;
        in_layer(&setup, || {
            let spans: Vec<Span> = (0..20).map(|_| info_span!("awaits")).collect();
            for _ in 0..5 {
                for span in &spans {
                    let start = Instant::now();
                    span.in_scope(|| burn(MS / 5));
                    longest = longest.max(start.elapsed());
                }
                std::thread::sleep(100 * MS);
            }
        });
        // On a very busy machine they are entered for too long.
        assert!(longest * 5 > LONG || !is_sampled(&setup), "{source:?}");
        setup.flush();
        assert!(longest * 5 > LONG || setup.handle.stats().samples.taken == 0, "{source:?}");
    }
}

/// The root itself is never entered, and each thread ends before the collector's next check.
#[test]
fn short_threads_below_an_old_root_are_sampled() {
    const THREADS: u32 = 60;
    const WORK: Duration = Duration::from_millis(4);
    for source in sources() {
        let setup =
            Setup::with("0ms", |builder| builder.source(source).sampling_delay(AGE).rate(1_000));
        let mut ran = Duration::ZERO;
        in_layer(&setup, || {
            let root = info_span!("root");
            for _ in 0..THREADS {
                let thread = || {
                    in_layer(&setup, || {
                        // The start of the thread is outside the span.
                        info_span!(parent: &root, "task").in_scope(|| {
                            let start = ThreadTime::now();
                            burn(WORK);
                            start.elapsed()
                        })
                    })
                };
                ran += std::thread::scope(|scope| scope.spawn(thread).join().unwrap());
            }
        });
        setup.flush();
        // There are several profiles if the root stays open for so long that an epoch is exported before.
        let profiles = setup.profiles();
        let (count, sampled_ns) = profiles
            .iter()
            .map(taken)
            .fold((0, 0), |(count, ns), (more, more_ns)| (count + more, ns + more_ns));
        // The first threads make the root old. A timer's tick finds only some threads, and never a predictable share.
        let least = if source == Source::Perf { ran / 2 } else { Duration::ZERO };
        assert!(
            u128::from(sampled_ns) > least.as_nanos(),
            "{source:?}: {count}, {sampled_ns} ns of {ran:?} {:?}",
            setup.handle.stats()
        );
        assert_eq!(setup.handle.stats().samples.dropped_unknown_span, 0, "{source:?}");
        // The root itself has no on-CPU and no off-CPU time.
        let root = account(&setup, "root");
        assert_eq!((root.on_cpu().ns(), root.off_cpu().ns()), (0, 0), "{source:?}");
        let wrong_ns = u128::from(root.subtree_on_cpu().ns()).abs_diff(ran.as_nanos());
        let may_be_ns = u128::from(root.subtree_on_cpu_error_ns) + ran.as_nanos() / 20;
        assert!(wrong_ns <= may_be_ns, "{source:?}: {ran:?}, {root:?}");
    }
}

/// Where a thread ran that ends before its first sample is not known. It was not in the kernel, for which the time
/// without samples is taken where samples are of user code alone.
#[test]
fn threads_that_end_before_their_first_sample_are_not_in_the_kernel() {
    if !has_perf() {
        eprintln!("perf events are not allowed here");
        return;
    }
    const THREADS: u32 = 40;
    let with_perf = |builder: Builder| builder.source(Source::Perf).rate(100);
    let setup = Setup::at_the_usual_rate("0ms", with_perf);
    let own = setup.run(|| {
        let root = info_span!("root").entered();
        // So that there is a profile: ten milliseconds are a sample.
        let start = ThreadTime::now();
        burn(40 * MS);
        let own = start.elapsed();
        for _ in 0..THREADS {
            let thread = || {
                in_layer(&setup, || info_span!(parent: &root, "task").in_scope(|| burn(2 * MS)));
            };
            std::thread::scope(|scope| scope.spawn(thread).join().unwrap());
        }
        own
    });
    let profile = setup.profiles().pop().unwrap();
    assert!(account(&setup, "root").subtree_on_cpu() > own + 60 * MS, "they ran for 80 ms");
    for sample in profile.of_kind(SampleKind::OnCpu) {
        assert_ne!(functions(&profile, sample), ["[kernel]"], "{profile:?}");
    }
    // The log line says of how little there are samples.
    let coverage = setup.kept().pop().unwrap().coverage.unwrap();
    let most = (own + 20 * MS).as_secs_f64() / (own + 60 * MS).as_secs_f64();
    assert!(coverage < most, "{coverage} {most}");
}

/// Time in nested spans of one thread counts once for each enclosing span that the thread is not in.
#[test]
fn a_span_counts_time_of_child_spans_on_other_threads_once() {
    let setup = Setup::with("0ms", |builder| builder.sampling_delay(Duration::ZERO));
    let work = |span: Span| {
        let start = ThreadTime::now();
        span.in_scope(|| {
            burn(10 * MS);
            info_span!("inside").in_scope(|| burn(10 * MS));
        });
        start.elapsed()
    };
    in_layer(&setup, || {
        let outer = info_span!("outer");
        let root = info_span!(parent: &outer, "root");
        let here = root.in_scope(|| work(info_span!("here")));
        let there = || {
            in_layer(&setup, || {
                let task = info_span!(parent: &root, "task");
                let _task = task.enter();
                let start = ThreadTime::now();
                // A sibling on its stack: the code of `task` does not run.
                let sister = work(info_span!(parent: &root, "sister"));
                (start.elapsed().saturating_sub(sister), sister)
            })
        };
        let (task, sister) = std::thread::scope(|scope| scope.spawn(there).join().unwrap());
        let there = task + sister;
        drop((root, outer));
        setup.flush();
        for (name, own, all) in [
            ("outer", Duration::ZERO, here + there),
            ("root", here, here + there),
            ("here", here, here),
            ("sister", sister, sister),
            ("task", task, task),
        ] {
            let account = account(&setup, name);
            // Interrupts beside the measured part are in the account alone. What counts twice is 10 ms.
            let is_about = |measured: Duration, error: Duration, time: Duration| {
                measured.abs_diff(time) <= error + time / 20 + MS
            };
            let is_right = is_about(account.on_cpu(), account.on_cpu_error(), own);
            assert!(is_right, "{name}: {own:?} {account:?}");
            let is_right = is_about(
                account.subtree_on_cpu(),
                Duration::from_nanos(account.subtree_on_cpu_error_ns),
                all,
            );
            assert!(is_right, "{name}: {all:?} {account:?}");
            let is_below = name == "task";
            let other = account.other_spans();
            assert!(
                // The measured time has hooks in it that no span has.
                if is_below { other + sister / 20 >= sister } else { other.is_zero() },
                "{name}: {account:?}"
            );
        }
    });
}

/// As with a connection that is open for an hour: a span inside it starts young. A span that is slow by its rule is a
/// request.
#[test]
fn a_long_lived_span_does_not_make_its_children_old() {
    for source in sources() {
        for (rules, is_open_for_long) in [("on_cpu>5ms", true), ("5ms", false)] {
            let setup = Setup::with(rules, |builder| {
                // A reference, one in 16, is sampled from its enter.
                builder.source(source).sampling_delay(AGE).references(0, 0.0)
            });
            in_layer(&setup, || {
                let connection = info_span!("connection");
                let request = |how: fn()| {
                    let request = || {
                        in_layer(&setup, || {
                            let start = Instant::now();
                            let span = info_span!(parent: &connection, "request");
                            let is_sampled = span.in_scope(|| {
                                how();
                                is_sampled(&setup)
                            });
                            (is_sampled, start.elapsed())
                        })
                    };
                    std::thread::scope(|scope| scope.spawn(request).join().unwrap())
                };
                let start = Instant::now();
                // Together they are in it for longer than `AGE`.
                for _ in 0..3 {
                    request(|| std::thread::sleep(AGE / 2));
                }
                // The threads that were armed for them are disarmed.
                until(|| !is_sampled(&setup));
                until(|| !is_open_for_long || start.elapsed() > 10 * 20 * AGE);
                let (is_sampled, took) = request(|| _ = burn(MS));
                let is_old = took > AGE / 2;
                assert!(is_old || is_sampled != is_open_for_long, "{source:?} {rules}");
            });
        }
    }
}

/// How often the calling thread was preempted.
fn preemptions() -> u64 {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let count = status.lines().find_map(|line| line.strip_prefix("nonvoluntary_ctxt_switches:"));
    count.map_or(0, |count| count.trim().parse().unwrap())
}

/// The wait during which a span becomes old is captured from its beginning. It is marked if there were waits before it that
/// were not captured, and only then. A later wait is not.
#[test]
fn the_wait_during_which_a_span_becomes_old_is_captured() {
    let lengths = [100, 400, 1_600, 6_400].map(|times| MS * times);
    for (source, shorter) in sources().into_iter().flat_map(|source| [(source, 0), (source, 3)]) {
        let seen = lengths.into_iter().find_map(|length| {
            let setup = with(source, AGE);
            let is_preempted = setup.run(|| {
                let before = preemptions();
                info_span!("waits").in_scope(|| {
                    // A preempted thread waits, too.
                    let is_preempted = preemptions() > before;
                    (0..shorter).for_each(|_| std::thread::sleep(MS));
                    std::thread::sleep(length);
                    burn(30 * MS);
                    std::thread::sleep(length);
                    is_preempted
                })
            });
            let waits = account(&setup, "waits");
            let profile = setup.profiles().into_iter().next()?;
            let of = |marked| {
                let samples = profile.of_kind(SampleKind::OffCpu);
                let is_marked = |sample: &&Sample| {
                    functions(&profile, sample).contains(&"[and shorter waits before it]")
                };
                let samples = samples.filter(|sample| is_marked(sample) == marked);
                let points = samples.flat_map(|sample| &sample.points);
                points.map(|point| point.weight).sum::<u64>()
            };
            let (marked_ns, others_ns) = (of(true), of(false));
            let context = format!(
                "{source:?}, {shorter}, {is_preempted}: {marked_ns} and {others_ns} ns, {waits:?}"
            );
            println!("{context}");
            // The clocks have different units, so values are rounded.
            let most_ns = waits.off_cpu().ns() + waits.on_cpu_error().ns() + 10;
            assert!(marked_ns + others_ns <= most_ns, "{context}");
            // The collector may get no CPU for a while, so longer waits are tried.
            let marked = u32::from(shorter > 0 || is_preempted);
            let is_seen = |ns, times| u128::from(ns) * 10 >= (length * times).as_nanos() * 9;
            let is_so = is_seen(marked_ns, marked) && is_seen(others_ns, 2 - marked);
            is_so.then_some(())
        });
        assert!(seen.is_some(), "{source:?}, {shorter}: a wait of seconds is captured");
    }
}

#[test]
fn spans_kept_in_any_case_are_sampled_from_the_beginning() {
    for source in sources() {
        let setup = Setup::of_rules("always", |builder| builder.source(source));
        setup.run(|| info_span!("all").in_scope(|| assert!(is_sampled(&setup), "{source:?}")));
        let setup = Setup::of_rules("10s", |builder| builder.source(source));
        setup.run(|| {
            info_span!("asked for").in_scope(|| {
                assert!(setup.handle.keep_current());
                assert!(is_sampled(&setup), "{source:?}");
                burn(20 * MS);
            });
        });
        assert!(taken(&profile_of(&setup, "asked for")).0 > 0, "{source:?}");
    }
}

/// A thread that leaves its old span is no longer sampled, and is sampled again in the next one.
#[test]
fn threads_are_armed_and_disarmed_repeatedly() {
    for source in sources() {
        let setup = with(source, AGE);
        in_layer(&setup, || {
            for _ in 0..5 {
                info_span!("old").in_scope(|| until(|| burn(MS) > 0 && is_sampled(&setup)));
                until(|| {
                    info_span!("young").in_scope(|| burn(MS / 10));
                    !is_sampled(&setup)
                });
            }
        });
        setup.flush();
        let stats = setup.handle.stats();
        let lost = stats.samples.dropped_unknown_span + stats.sampling.records_malformed;
        assert_eq!((lost, stats.threads.sampled), (0, 0), "{source:?}: {stats:?}");
    }
}

/// A perf event makes each context switch more expensive, and a timer does not. The thread is sampled either way.
#[test]
fn a_thread_with_many_context_switches_is_sampled_by_a_timer() {
    if !has_perf() {
        return;
    }
    let rules = "[busy]=0ms|hung=off,[step]=1h";
    let setup = Setup::at_the_usual_rate(rules, |builder| builder.stack_bytes(2_048));
    let ((to, there), (back, here)) = (mpsc::sync_channel(0), mpsc::sync_channel(0));
    std::thread::scope(|scope| {
        scope.spawn(move || there.iter().for_each(|()| _ = back.send(())));
        in_layer(&setup, || {
            info_span!("busy").in_scope(|| {
                let ping_pong = || {
                    info_span!("step").in_scope(|| {
                        to.send(()).unwrap();
                        here.recv().unwrap();
                    });
                };
                let by_timer = || setup.handle.stats().threads.sampled_by_timer > 0;
                until(|| {
                    (0..100).for_each(|_| ping_pong());
                    by_timer()
                });
                let before = setup.handle.stats().samples.taken;
                until(|| {
                    burn(MS);
                    ping_pong();
                    setup.handle.stats().samples.taken > before + 5
                });
            });
        });
        drop(to);
    });
    setup.flush();
    let stats = setup.handle.stats();
    assert_eq!(stats.threads.refused_timers + stats.samples.dropped_unknown_span, 0, "{stats:?}");
}
