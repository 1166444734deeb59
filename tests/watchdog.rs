//! Spans that hang, or are open for too long.

#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::print_stdout,
    reason = "a test"
)]

mod support;

use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

use support::Nanos as _;
use support::{HAS_STACKS, PLENTY, Setup, burn, functions, has_perf};
use tracing::{Instrument, info_span};
use tracing_profiling::profile::{Profile, Sample, SampleKind, Value};
use tracing_profiling::{Builder, Kept, Reason, Source};

const MS: Duration = Duration::from_millis(1);

fn sources() -> Vec<Source> {
    let perf = has_perf().then_some(Source::Perf);
    perf.into_iter().chain([Source::Timer]).filter(|_| HAS_STACKS).collect()
}

fn with(rules: &str, source: Source) -> Setup {
    Setup::with(rules, |builder: Builder| builder.source(source))
}

/// Waits until `count` reports of kept spans have arrived.
fn wait_for(setup: &Setup, count: usize) -> Vec<Kept> {
    let start = Instant::now();
    loop {
        let kept = setup.kept();
        if kept.len() >= count {
            return kept;
        }
        assert!(start.elapsed() < PLENTY, "{kept:?}, {:?}", setup.handle.stats());
        std::thread::sleep(5 * MS);
    }
}

/// The functions on the stacks of waits in a profile.
fn waiting_functions(profile: &Profile) -> Vec<&str> {
    let waits = profile.of_kind(SampleKind::OffCpu);
    let names = waits.flat_map(|sample| functions(profile, sample));
    names.filter_map(|name| name.rsplit("::").next()).collect()
}

/// Whether all samples that the profile should have are lost.
fn is_empty(profile: &Profile) -> bool {
    profile.notes.join("").contains("lost before they were read")
}

#[inline(never)]
fn takes_stock_then_prices(stock: &Mutex<u32>, prices: &Mutex<u32>, both: &Barrier) {
    let mut stock = stock.lock().unwrap();
    both.wait();
    *stock += *prices.lock().unwrap_or_else(|error| error.into_inner());
}

#[inline(never)]
fn takes_prices_then_stock(stock: &Mutex<u32>, prices: &Mutex<u32>, both: &Barrier) {
    let mut prices = prices.lock().unwrap();
    both.wait();
    *prices += *stock.lock().unwrap_or_else(|error| error.into_inner());
}

/// Two tasks block their worker threads forever, so this runs in its own process.
fn deadlock(source: Source) {
    let setup = with("[request]=100ms|hung>300ms", source);
    let locks = Arc::new((Mutex::new(0), Mutex::new(0), Barrier::new(2)));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
    let task = |takes: fn(&Mutex<u32>, &Mutex<u32>, &Barrier)| {
        let (locks, dispatch) = (Arc::clone(&locks), setup.dispatch.clone());
        let span = || info_span!("request", http.route = "/orders/{id}");
        let span = tracing::dispatcher::with_default(&dispatch, span);
        runtime.spawn(
            async move {
                let (stock, prices, both) = &*locks;
                takes(stock, prices, both);
            }
            .instrument(span),
        )
    };
    let tasks = [task(takes_stock_then_prices), task(takes_prices_then_stock)];
    // Reported while they hang: nothing ends the deadlock.
    let kept = wait_for(&setup, 2);
    assert!(tasks.iter().all(|task| !task.is_finished()));
    for one in &kept {
        let span = &one.spans[0];
        assert_eq!((span.name(), span.reasons().to_string().as_str()), ("request", "hung"));
        assert!(span.is_open());
        assert!(one.profile.is_some(), "{one:?}");
        let account = span.times();
        // The span is idle until a thread of the runtime polls it.
        let entered = account.wall() - account.idle();
        assert!(account.off_cpu() > entered / 2, "{account:?}");
    }
    let profiles = setup.profiles();
    let names: Vec<_> = profiles.iter().flat_map(waiting_functions).collect();
    for function in ["takes_stock_then_prices", "takes_prices_then_stock"] {
        assert!(names.contains(&function), "{names:?}");
    }
    let is_waiting = |profile: &Profile| {
        let title = "request{http.route=/orders/{id}} · kept: hung · still open";
        profile.title.starts_with(title) && profile.headline.contains(", 100 % in watchdog::takes_")
    };
    assert!(profiles.iter().all(is_waiting), "{profiles:?}");
    // Of the two, only the second to hang is sure to have both threads in it.
    let is_said = |profile: &&Profile| {
        let waits = " of `request{http.route=/orders/{id}}` (thread ";
        profile.title.contains(" · still open · deadlock")
            && profile.notes[0].starts_with("deadlock (inferred): `")
            && profile.notes[0].matches(waits).count() == 2
    };
    assert!(profiles.iter().any(|profile| is_said(&profile)), "{:?}", profiles[0].notes);
    // Reported once, and not again while they hang.
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(setup.kept().len(), 2);
    assert_eq!(setup.handle.stats().kept_for(Reason::Hung), 2);
    std::process::exit(0);
}

#[test]
fn a_deadlock_is_profiled_while_it_lasts_with_both_stacks() {
    let test = "a_deadlock_is_profiled_while_it_lasts_with_both_stacks";
    if support::is_child(test) {
        let perf = std::env::var("SOURCE").unwrap() == "perf";
        deadlock(if perf { Source::Perf } else { Source::Timer });
    }
    for source in sources() {
        let name = if source == Source::Perf { "perf" } else { "timer" };
        let output = support::run_child(test, &[("SOURCE", name)]);
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success(),
            "{name}: {text}\n{}",
            String::from_utf8_lossy(&output.stdout)
        );
    }
}

/// Threads in spans that run or wait, in a process that is then stopped for a second.
fn stopped_in_spans() {
    let setup = Setup::new("1h|hung>1s");
    let has_ended = std::sync::atomic::AtomicBool::new(false);
    let goes_on = || !has_ended.load(std::sync::atomic::Ordering::Relaxed);
    let are_inside = Barrier::new(5);
    let in_span = |action: &dyn Fn()| {
        tracing::dispatcher::with_default(&setup.dispatch, || {
            info_span!("request").in_scope(|| {
                are_inside.wait();
                while goes_on() {
                    action();
                }
            });
        });
    };
    let in_span = &in_span;
    std::thread::scope(|scope| {
        for number in 0..4 {
            scope.spawn(move || match number % 2 {
                0 => in_span(&|| _ = burn(5 * MS)),
                _ => in_span(&|| std::thread::sleep(20 * MS)),
            });
        }
        are_inside.wait();
        // What they ran is known from the first check on.
        std::thread::sleep(300 * MS);
        println!("\nin spans");
        let kept = wait_for(&setup, 4);
        has_ended.store(true, std::sync::atomic::Ordering::Relaxed);
        for one in kept {
            let times = one.spans[0].times();
            // The second does not count, and another one is needed. Less what it takes to stop.
            assert!(times.wall() > 1_900 * MS, "{times:?}");
            // Up to the first check, an eighth of the limit.
            assert!(times.on_cpu_error() < 200 * MS, "{times:?}");
        }
    });
}

#[test]
fn a_process_that_was_stopped_does_not_hang() {
    use std::io::{BufRead as _, Read as _};
    use std::process::{Command, Stdio};
    let test = "a_process_that_was_stopped_does_not_hang";
    if support::is_child(test) {
        return stopped_in_spans();
    }
    if !HAS_STACKS {
        return;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env("CHILD", test);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut output = std::io::BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while line.trim() != "in spans" {
        line.clear();
        assert!(output.read_line(&mut line).unwrap() > 0, "it says when");
    }
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    std::thread::sleep(Duration::from_secs(1));
    rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();
    let mut text = String::new();
    output.read_to_string(&mut text).unwrap();
    child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    assert!(child.wait().unwrap().success(), "{text}");
}

#[test]
fn a_hung_span_gets_its_final_verdict_with_all_its_samples() {
    for source in sources() {
        // Enough time for a sample, also on a busy machine.
        let setup = with("200ms|hung>800ms", source);
        let ran = setup.run(|| {
            let start = cpu_time::ThreadTime::now();
            let span = info_span!("request").entered();
            burn(1_200 * MS);
            let early = wait_for(&setup, 1);
            assert_eq!(early[0].spans[0].reasons().to_string(), "hung");
            burn(300 * MS);
            drop(span);
            start.elapsed()
        });
        let kept = setup.kept();
        assert_eq!(kept.len(), 2, "{kept:?}");
        let (hung, last) = (&kept[0].spans[0], &kept[1].spans[0]);
        assert!(hung.is_open() && !last.is_open());
        assert_eq!(last.reasons().to_string(), "latency");
        assert_eq!(last.earlier_profiles(), [hung.profile().unwrap()]);
        assert!(hung.times().wall().ns() < last.times().wall().ns());
        // The on-CPU time of a running thread comes from its CPU clock, starting soon after it entered the span.
        let account = hung.times();
        assert!(account.on_cpu().ns() + account.on_cpu_error().ns() > 0, "{account:?}");
        let parts = account.on_cpu().ns() + account.off_cpu().ns() + account.idle().ns();
        assert!(parts.abs_diff(account.wall().ns()) < 1_000_000, "{account:?}");
        let profiles = setup.profiles();
        let [before, weight] = [hung, last].map(|span| {
            let id = span.profile().unwrap();
            profiles.iter().find(|profile| profile.id == id).unwrap().weight().ns()
        });
        assert!(u128::from(weight) <= ran.as_nanos() + ran.as_nanos() / 10, "{weight} of {ran:?}");
        assert!(weight > 1_000_000_000, "{weight}");
        assert!(before > 0 && before < weight, "{before} of {weight}");
        assert!(hung.samples() < last.samples(), "{kept:?}");
        assert!(!profiles.iter().any(is_empty), "an id of an empty profile");
    }
}

#[test]
fn a_continuing_wait_is_in_both_profiles_with_its_whole_length_in_the_last() {
    for source in sources() {
        let setup = with("100ms|hung>200ms", source);
        setup.run(|| {
            let span = info_span!("request").entered();
            let (send, receive) = std::sync::mpsc::channel::<()>();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    wait_for(&setup, 1);
                    drop(send);
                });
                _ = receive.recv();
                // The end of the scope waits, too.
                drop(span);
            });
        });
        let kept = setup.kept();
        let [hung, last] = &kept[..] else { panic!("{kept:?}") };
        assert_eq!((hung.waits.count, last.waits.count), (1, 1));
        assert!(hung.profile.is_some() && last.profile.is_some(), "{kept:?}");
        let waited = last.waits.total.ns();
        assert!(hung.waits.total.ns() > 100_000_000 && hung.waits.total.ns() < waited, "{kept:?}");
        let off_cpu_ns = last.spans[0].times().off_cpu().ns();
        assert!(
            waited <= off_cpu_ns + 2_000_000 && waited > off_cpu_ns / 2,
            "{waited} of {off_cpu_ns}"
        );
    }
}

#[test]
fn a_span_that_hangs_inside_another_is_kept_with_it() {
    for source in sources() {
        let setup = with("[outer]=hung>800ms,[inner]=hung>800ms", source);
        setup.run(|| {
            let _outer = info_span!("outer").entered();
            let _inner = info_span!("inner").entered();
            burn(900 * MS);
            // In two reports if a check of open spans came when only the outer one was over its limit.
            let start = Instant::now();
            while wait_for(&setup, 1).iter().map(|kept| kept.spans.len()).sum::<usize>() < 2 {
                assert!(start.elapsed() < PLENTY, "{:?}", setup.kept());
                burn(MS);
            }
        });
        let kept = setup.kept();
        let names: Vec<_> =
            kept.iter().flat_map(|kept| &kept.spans).map(|span| span.name()).collect();
        assert_eq!(names, ["outer", "inner"]);
        let profile = &setup.profiles()[0];
        let is_burning = |sample: &&Sample| {
            functions(profile, sample).iter().any(|name| name.ends_with("support::burn"))
        };
        let sample = profile.samples().iter().find(is_burning).unwrap();
        assert_eq!(profile.span_path(sample.link), ["outer", "inner"]);
    }
}

#[test]
fn a_snapshot_takes_no_samples_from_child_spans() {
    for source in sources() {
        // It was still closed when the child had its samples.
        let played = [3, 12, 48].into_iter().find_map(|seconds| {
            let setup = with(&format!("[outer]=open>{seconds}s,[inner]=error"), source);
            let is_in_time = setup.run(|| {
                let outer = info_span!("outer").entered();
                let inner = info_span!("inner");
                let start = Instant::now();
                inner.in_scope(|| burn(100 * MS));
                let is_in_time = start.elapsed() < Duration::from_secs(seconds);
                wait_for(&setup, 1);
                // It fails when all of its samples are already in the snapshot, and is not entered again.
                tracing::error!(parent: &inner, "oh");
                drop(inner);
                // This one fails, and none of its samples are in the snapshot.
                let other = info_span!("inner").entered();
                burn(100 * MS);
                tracing::error!("oh");
                drop(other);
                drop(outer);
                is_in_time
            });
            is_in_time.then_some(setup)
        });
        let setup = played.unwrap();
        let kept = setup.kept();
        let spans: Vec<_> = kept.iter().flat_map(|kept| &kept.spans).collect();
        let names: Vec<_> = spans.iter().map(|span| span.name()).collect();
        assert_eq!(names, ["outer", "inner", "inner"], "{kept:?}");
        assert!(spans[0].profile().is_ok() && spans[0].samples() > 0, "{:?}", spans[0]);
        for span in &spans[1..] {
            assert!(span.profile().is_ok() && span.samples() > 0, "{span:?}");
            assert!(span.earlier_profiles().is_empty(), "{span:?}");
        }
        assert!(!setup.profiles().iter().any(is_empty), "an id of an empty profile");
    }
}

#[test]
fn awaiting_is_not_hanging_but_counts_as_open() {
    let setup = Setup::new("[stream]=open>600ms,[request]=1h|hung>150ms");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    // For how long the stream was polled.
    let mut busy = Duration::ZERO;
    setup.run(|| {
        runtime.block_on(async {
            let request = async { tokio::time::sleep(400 * MS).await };
            let stream = async {
                burn(30 * MS);
                let start = Instant::now();
                while setup.kept().is_empty() && start.elapsed() < PLENTY {
                    tokio::time::sleep(5 * MS).await;
                }
            };
            let mut stream = std::pin::pin!(stream.instrument(info_span!("stream")));
            let stream = std::future::poll_fn(|context| {
                let start = Instant::now();
                let polled = stream.as_mut().poll(context);
                busy += start.elapsed();
                polled
            });
            tokio::join!(request.instrument(info_span!("request")), stream);
        });
    });
    let kept = setup.kept();
    assert_eq!(kept.len(), 1, "{kept:?}");
    let span = &kept[0].spans[0];
    assert_eq!((span.name(), span.reasons().to_string().as_str()), ("stream", "open"));
    let times = span.times();
    // The two clocks may differ a little.
    assert!(times.wall() - times.idle() <= busy + MS, "{busy:?} {times:?}");
    if HAS_STACKS {
        let is_open = |(key, value): (&str, &Value)| {
            key == "profile.span.open" && *value == Value::Bool(true)
        };
        let profile = &setup.profiles()[0];
        assert!(profile.attributes.iter().any(|one| is_open((one.key, &one.value))));
    }
}

#[test]
fn hang_detection_can_be_switched_off() {
    let hung = |rules: &str| {
        let setup = Setup::new(rules);
        setup.run(|| {
            info_span!("request").in_scope(|| burn(600 * MS));
        });
        setup.handle.stats().kept_for(Reason::Hung)
    };
    assert_eq!(hung("1ms|hung>100ms|hung=off"), 0);
    assert_eq!(hung("1ms|hung>100ms"), u64::from(HAS_STACKS));
}
