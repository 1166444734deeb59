//! Waits inside profiled spans: where, for what, and how long.

#![cfg(not(tracing_profiling_unsupported))]
#![allow(clippy::expect_used, clippy::unwrap_used, clippy::indexing_slicing, reason = "a test")]

#[path = "waits/holders.rs"]
mod holders;
#[path = "support/sleeps.rs"]
mod sleeps;
mod support;
#[path = "waits/threads.rs"]
mod threads;

use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use support::Nanos as _;
use support::{Setup, burn, functions, has_perf, is_child, run_child};
use tracing::info_span;
use tracing_profiling::profile::{Leaf, Profile, Sample, SampleKind, Value};
use tracing_profiling::{Builder, Source};
use tracing_subscriber::layer::SubscriberExt as _;

const MS: Duration = Duration::from_millis(1);

/// Perf where it is allowed, and timers always.
fn sources() -> Vec<Source> {
    let perf = has_perf().then_some(Source::Perf);
    perf.into_iter().chain([Source::Timer]).collect()
}

fn with(source: Source) -> Setup {
    Setup::with("0ms", |builder: Builder| builder.source(source))
}

/// On a loaded machine the collector may get no CPU during a wait and miss it. This retries with longer waits:
/// `action` gets a time, and returns nothing if an expected wait is missing.
#[track_caller]
fn with_longer_waits<R>(mut action: impl FnMut(Duration) -> Option<R>) -> R {
    let times = [100, 400, 1_600, 6_400].map(|times| MS * times);
    times.into_iter().find_map(&mut action).expect("a wait of seconds is captured")
}

/// What a thread waited for, and the last path components of the functions, the innermost first.
fn names<'a>(profile: &'a Profile, sample: &Sample) -> Vec<&'a str> {
    let leaf = match profile.leaf(sample.leaf).unwrap() {
        Leaf::Blocked(call) | Leaf::BlockedBy(call, _) => Some(call.as_str()),
        Leaf::Unknown(why) => Some(*why),
        _ => None,
    };
    let functions = functions(profile, sample);
    let functions = functions.iter().map(|name| name.rsplit("::").next().unwrap());
    leaf.into_iter().chain(functions).collect()
}

fn waits(profile: &Profile) -> Vec<(&Sample, Vec<&str>, u64)> {
    profile
        .of_kind(SampleKind::OffCpu)
        .map(|sample| {
            let waited_ns = sample.points.iter().map(|point| point.weight).sum();
            (sample, names(profile, sample), waited_ns)
        })
        .collect()
}

#[inline(never)]
fn reserve(stock: &Mutex<u32>) -> Duration {
    let start = Instant::now();
    let mut stock = stock.lock().unwrap();
    let waited = start.elapsed();
    *stock += 1;
    waited
}

/// Takes the lock before this returns, and holds it for that long.
fn hold(stock: &Arc<Mutex<u32>>, time: Duration) -> std::thread::JoinHandle<()> {
    let stock = Arc::clone(stock);
    let (locked, wait) = mpsc::channel();
    let holder = std::thread::spawn(move || {
        let guard = stock.lock().unwrap();
        locked.send(()).unwrap();
        std::thread::sleep(time);
        drop(guard);
    });
    wait.recv().unwrap();
    holder
}

static STOCK: Mutex<u32> = Mutex::new(0);

#[test]
fn a_lock_in_a_static_has_its_name() {
    for source in sources() {
        let setup = with(source);
        let is_named = (0..8).any(|_| {
            let (locked, wait) = mpsc::channel();
            let holder = std::thread::spawn(move || {
                let guard = STOCK.lock().unwrap();
                locked.send(()).unwrap();
                std::thread::sleep(150 * MS);
                drop(guard);
            });
            wait.recv().unwrap();
            setup.run(|| info_span!("checkout").in_scope(|| reserve(&STOCK)));
            holder.join().unwrap();
            let profile = setup.memory.take().pop();
            profile.is_some_and(|profile| {
                let of_lock = |(_, names, _): &(_, Vec<&str>, _)| names.contains(&"reserve");
                waits(&profile).iter().filter(|wait| of_lock(wait)).any(|(_, names, _)| {
                    assert_eq!(names[0], "futex of waits::STOCK");
                    let is_said = |words: &str| profile.headline.contains(words);
                    is_said("[futex of waits::STOCK]") || is_said("[lock waits::STOCK ")
                })
            })
        });
        assert!(is_named, "{source:?}");
    }
}

#[test]
fn a_wait_for_a_lock_has_its_length_its_function_and_the_address_of_the_lock() {
    for source in sources() {
        let setup = with(source);
        let stock = Arc::new(Mutex::new(0));
        let mut errors = Vec::new();
        for _ in 0..8 {
            let holder = hold(&stock, 150 * MS);
            let waited = setup.run(|| info_span!("checkout").in_scope(|| reserve(&stock)));
            holder.join().unwrap();
            let Some(profile) = setup.memory.take().pop() else { continue };
            let found = waits(&profile);
            let of_lock = found.iter().find(|(_, names, _)| names.contains(&"reserve"));
            let Some((_, names, waited_ns)) = of_lock else { continue };
            assert!(names[0].starts_with("futex 0x"), "{names:?}");
            let summary = profile.waits();
            let longest = summary.longest.unwrap();
            assert!(longest.function.ends_with("reserve"), "{longest:?}");
            assert!(longest.location.starts_with("tests/waits.rs:"), "{longest:?}");
            assert_eq!(summary.in_async, None);
            assert!(longest.call.starts_with("[futex 0x"), "{longest:?}");
            // The account agrees.
            let account = *setup.kept().last().unwrap().spans[0].times();
            let off_cpu_ns = account.off_cpu().ns() + account.on_cpu_error().ns();
            assert!(off_cpu_ns + 1_000_000 >= *waited_ns, "{account:?} {waited_ns}");
            let limit = MS.max(waited / 100);
            errors.push(
                waited.abs_diff(Duration::from_nanos(*waited_ns)).as_secs_f64()
                    / limit.as_secs_f64(),
            );
        }
        // If the thread has to share its CPU, its own measurement includes more than the wait, so the best of several
        // rounds shows the error.
        errors.sort_by(f64::total_cmp);
        assert!(!errors.is_empty(), "{source:?}: none of eight was captured");
        assert!(errors[0] < 1.0, "{source:?}: in units of 1 ms or 1 %: {errors:?}");
    }
}

#[test]
fn many_waits_of_one_segment_are_together_no_longer_than_its_off_cpu_time() {
    for source in sources() {
        for (count, sleep, work) in
            [(2, 120, 0), (10, 30, 0), (10, 30, 1), (25, 12, 3), (4, 300, 1)]
        {
            let setup = with(source);
            setup.run(|| {
                let _request = info_span!("request").entered();
                for _ in 0..count {
                    std::thread::sleep(MS * sleep);
                    burn(MS * work);
                }
            });
            let account = *setup.kept().last().unwrap().spans[0].times();
            let Some(profile) = setup.profiles().pop() else { continue };
            let waited_ns = profile.waited().ns();
            let most_ns = account.off_cpu().ns() + account.on_cpu_error().ns() + 1_000_000;
            assert!(
                waited_ns <= most_ns,
                "{source:?}, {count} of {sleep} ms: {waited_ns} of {account:?}"
            );
        }
    }
}

#[test]
fn waits_for_one_lock_have_one_address_at_all_call_sites() {
    #[inline(never)]
    fn here(stock: &Mutex<u32>) {
        reserve(stock);
    }
    #[inline(never)]
    fn there(stock: &Mutex<u32>) {
        reserve(stock);
    }
    for source in sources() {
        let counts = with_longer_waits(|time| {
            let setup = with(source);
            let (stock, other) = (Arc::new(Mutex::new(0)), Arc::new(Mutex::new(0)));
            setup.run(|| {
                let _request = info_span!("request").entered();
                for (lock, ask) in
                    [(&stock, here as fn(&Mutex<u32>)), (&stock, there), (&other, here)]
                {
                    let holder = hold(lock, time);
                    ask(lock);
                    holder.join().unwrap();
                }
            });
            let profile = setup.profiles().pop()?;
            let waits = waits(&profile);
            let asks = waits.iter().filter(|(_, names, _)| names.contains(&"reserve"));
            let locks: Vec<&str> = asks.map(|(_, names, _)| names[0]).collect();
            let same = |lock: &&&str| locks.iter().filter(|other| other == lock).count();
            let mut counts: Vec<_> = locks.iter().map(|lock| same(&lock)).collect();
            counts.sort_unstable();
            (counts.len() == 3).then_some(counts)
        });
        // Two call sites wait for one lock, and one for the other.
        assert_eq!(counts, [1, 2, 2], "{source:?}");
    }
}

#[test]
fn a_task_that_blocks_its_executor_is_reported() {
    #[inline(never)]
    fn nap(time: Duration) {
        std::thread::sleep(time);
    }
    async fn legacy(time: Duration) {
        nap(time);
    }
    async fn polite(time: Duration) {
        let span = tracing::Span::current();
        tokio::task::spawn_blocking(move || span.in_scope(|| nap(time))).await.unwrap();
        tokio::time::sleep(MS).await;
    }
    use tracing::Instrument as _;
    for source in sources() {
        let (profile, polite) = with_longer_waits(|time| {
            let setup = with(source);
            let dispatch = setup.dispatch.clone();
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(1)
                .enable_time()
                .on_thread_start(move || {
                    std::mem::forget(tracing::dispatcher::set_default(&dispatch));
                })
                .build()
                .unwrap();
            setup.run(|| {
                runtime.block_on(async {
                    tokio::spawn(legacy(time).instrument(info_span!("legacy"))).await.unwrap();
                    tokio::spawn(polite(time).instrument(info_span!("polite"))).await.unwrap();
                });
            });
            let profiles = setup.profiles();
            let of = |name: &str| {
                let mut found = profiles.iter().filter(|profile| profile.name == name);
                found.find(|profile| profile.waited().ns() > 50_000_000).cloned()
            };
            Some((of("legacy")?, of("polite")?))
        });
        // This one waits, too, but where blocking is allowed.
        assert!(polite.waits().longest.unwrap().function.ends_with("nap"));
        assert_eq!(polite.waits().in_async_total.ns(), 0);
        let found = profile.waits();
        assert_eq!(found.in_async_total.ns(), found.total.ns(), "{source:?}: {found:?}");
        assert!(found.in_async.unwrap().function.ends_with("nap"));
        let attribute =
            profile.attributes.iter().find(|a| a.key == "profile.blocked_in_async_ns").unwrap();
        assert_eq!(attribute.value, Value::Int(found.in_async_total.ns().try_into().unwrap()));
        assert!(profile.notes.iter().any(|note| note.contains("blocks an async executor")));
        assert!(profile.headline.contains(" blocking its executor"), "{}", profile.headline);
    }
}

#[test]
fn each_wait_is_in_its_span_and_ends_when_the_thread_continues() {
    for source in sources() {
        let (in_query, in_request) = with_longer_waits(|time| {
            let setup = with(source);
            setup.run(|| {
                let _request = info_span!("request").entered();
                for _ in 0..3 {
                    burn(2 * MS);
                    info_span!("query").in_scope(|| std::thread::sleep(time));
                }
                std::thread::sleep(time);
            });
            let profile = setup.profiles().pop()?;
            let of = |path: &[&str]| -> (usize, u64) {
                let found = waits(&profile).into_iter();
                let found = found.filter(|(sample, ..)| profile.span_path(sample.link) == path);
                // A loaded machine adds waits for file reads.
                let sleeps = found.filter(|(_, names, _)| names[0] == "sleep");
                sleeps
                    .fold((0, 0), |(n, ns), (sample, _, more)| (n + sample.points.len(), ns + more))
            };
            let kept = setup.kept();
            let mut spans = kept.iter().flat_map(|kept| &kept.spans);
            let account = *spans.find(|span| span.name() == "request").unwrap().times();
            // The kernel's switch records and its thread accounting differ by some microseconds.
            let of_switches = if source == Source::Perf { 4 * 50_000 } else { 1_000_000 };
            let slack = account.on_cpu_error().ns() + of_switches;
            assert!(profile.waited().ns() <= account.off_cpu().ns() + slack, "{account:?}");
            let (queries, request) = (of(&["request", "query"]), of(&["request"]));
            (queries.0 + request.0 == 4).then_some(((queries, 3 * time), (request, time)))
        });
        for (((count, ns), time), expected) in [(in_query, 3), (in_request, 1)] {
            assert_eq!(count, expected, "{source:?}");
            assert!(u128::from(ns) > time.as_nanos() / 10 * 9, "{source:?} {ns} {time:?}");
        }
    }
}

#[test]
fn a_wait_alone_makes_a_profile() {
    for source in sources() {
        let (kept, profile) = with_longer_waits(|time| {
            let setup = with(source);
            setup.run(|| info_span!("sleepy").in_scope(|| std::thread::sleep(time)));
            let profile = setup.profiles().pop().filter(|profile| profile.wait_count() > 0)?;
            Some((setup.kept(), profile))
        });
        assert_eq!(kept[0].spans[0].profile(), Ok(profile.id), "{source:?}");
        // A loaded machine adds waits for file reads.
        let found = waits(&profile).into_iter().filter(|(_, names, _)| names[0] == "sleep");
        let sleeps: usize = found.map(|(sample, ..)| sample.points.len()).sum();
        assert_eq!((profile.sample_count(), sleeps), (0, 1));
    }
}

/// The kernel restricts `/proc` and `process_vm_readv` for threads of a process that is not dumpable, such as one that
/// was started with privileges, even for the process itself.
#[test]
fn without_permission_to_inspect_threads_a_wait_has_its_length() {
    const TEST: &str = "without_permission_to_inspect_threads_a_wait_has_its_length";
    if !is_child(TEST) {
        let output = run_child(TEST, &[]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    // Root may read everything.
    rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable).unwrap();
    let is_readable = std::fs::read_to_string("/proc/thread-self/syscall").is_ok();
    for source in sources() {
        let (stats, profile) = with_longer_waits(|time| {
            let setup = with(source);
            setup.run(|| info_span!("sleepy").in_scope(|| std::thread::sleep(time)));
            // Being preempted for a while also is a wait if the thread cannot be inspected.
            let profile = setup.profiles().pop().filter(|profile| profile.wait_count() == 1)?;
            Some((setup.handle.stats(), profile))
        });
        let found = waits(&profile);
        assert!(found[0].2 >= 50_000_000, "{source:?}");
        let expected = if is_readable { "sleep" } else { "waiting: location unknown" };
        assert_eq!(found[0].1[0], expected, "{source:?}");
        assert_eq!(stats.waits.without_stack, u64::from(!is_readable));
    }
}

/// How much of `/proc` shows of threads.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Shown {
    All,
    /// The program has changed its user, or is not dumpable.
    States,
    Nothing,
}

/// More threads than CPUs do not run for longer than what is a wait, and are not blocked.
#[test]
fn a_thread_that_waits_for_a_cpu_is_in_no_wait() {
    const TEST: &str = "a_thread_that_waits_for_a_cpu_is_in_no_wait";
    if is_child(TEST) {
        let shown = std::env::var("SHOWN").unwrap();
        let all = [Shown::All, Shown::States, Shown::Nothing];
        check_waits(all.into_iter().find(|one| format!("{one:?}") == shown).unwrap());
        return;
    }
    let program = std::env::current_exe().unwrap();
    for (shown, before) in [
        (Shown::All, &[][..]),
        (Shown::States, &["setpriv", "--reuid=65534", "--clear-groups"]),
        // With the `/proc` of the PID namespace around it.
        (Shown::Nothing, &["unshare", "--pid", "--fork"]),
        (
            Shown::Nothing,
            &["unshare", "--mount", "sh", "-c", "mount -t tmpfs none /proc && exec \"$@\"", "sh"],
        ),
    ] {
        let run = |program: &std::ffi::OsStr, arguments: &[&str]| {
            let before = before.iter().map(std::ffi::OsStr::new);
            let mut words = before.chain([program]);
            let mut command = std::process::Command::new(words.next().unwrap());
            command.args(words).args(arguments);
            command.env("CHILD", TEST).env("SHOWN", format!("{shown:?}")).output()
        };
        // Only root may do so.
        if !run("true".as_ref(), &[]).is_ok_and(|output| output.status.success()) {
            eprintln!("{shown:?} was not tried");
            continue;
        }
        let output = run(program.as_os_str(), &["--exact", TEST, "--nocapture"]).unwrap();
        let texts = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
        assert!(output.status.success(), "{shown:?}: {}", texts.concat());
    }
}

fn check_waits(shown: Shown) {
    if shown == Shown::States {
        let behavior = rustix::process::DumpableBehavior::NotDumpable;
        rustix::process::set_dumpable_behavior(behavior).unwrap();
    }
    let log = support::Log::default();
    let memory = tracing_profiling::export::Memory::new();
    let builder = tracing_profiling::ProfilingLayer::builder().rules("0ms".parse().unwrap());
    let builder = builder.sampling_delay(Duration::ZERO).exporter(memory.clone()).cpu_budget(0);
    let layer = builder.source(Source::Timer).build().unwrap();
    let handle = layer.handle();
    let written = log.clone();
    let fmt =
        tracing_subscriber::fmt::layer().with_ansi(false).with_writer(move || written.clone());
    let dispatch = tracing::Dispatch::new(tracing_subscriber::registry().with(fmt).with(layer));
    let in_span = |action: &dyn Fn()| {
        tracing::dispatcher::with_default(&dispatch, || info_span!("work").in_scope(action));
    };
    // Five threads on one CPU.
    std::thread::scope(|scope| {
        for _ in 0..5 {
            scope.spawn(|| {
                let mut cpus = rustix::thread::CpuSet::new();
                let allowed = rustix::thread::sched_getaffinity(None).unwrap();
                let first = (0..rustix::thread::CpuSet::MAX_CPU).find(|cpu| allowed.is_set(*cpu));
                cpus.set(first.unwrap());
                rustix::thread::sched_setaffinity(None, &cpus).unwrap();
                in_span(&|| _ = burn(MS * 100));
            });
        }
    });
    handle.flush(support::PLENTY).unwrap();
    let profiles = memory.profiles();
    assert_eq!(profiles.len(), 5, "{shown:?}");
    let found: Vec<_> = profiles.iter().flat_map(waits).map(|(_, names, ns)| (names, ns)).collect();
    assert!(found.is_empty(), "{shown:?}: {found:?}");
    threads::check(&handle, shown);
    // A thread that is blocked is in one, as far as that is known.
    let found = with_longer_waits(|time| {
        in_span(&|| std::thread::sleep(time));
        handle.flush(support::PLENTY).unwrap();
        let profile = memory.profiles().pop();
        let profile = profile.filter(|profile| profile.wait_count() == 1);
        match profile {
            None if shown == Shown::Nothing => Some(String::new()),
            profile => Some(waits(&profile?)[0].1[0].to_owned()),
        }
    });
    let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    let unseen = text.lines().filter(|line| line.contains("/proc/self/task/TID/syscall"));
    let unseen: Vec<_> = unseen.collect();
    let (expected, expected_line) = match shown {
        Shown::All => ("sleep", None),
        Shown::States => (
            "waiting: location unknown",
            Some(("waits have their length and no stack", "has changed its user")),
        ),
        Shown::Nothing => ("", Some(("there are no waits in profiles", "is /proc mounted"))),
    };
    assert_eq!(found, expected, "{shown:?}");
    assert_eq!(unseen.len(), usize::from(expected_line.is_some()), "{shown:?}: {text}");
    for ((what, why), line) in expected_line.iter().zip(unseen) {
        assert!(line.contains(what) && line.contains(why), "{shown:?}: {line}");
    }
}

#[inline(never)]
fn read_zeros(mut goes_on: impl FnMut() -> bool) {
    use std::io::Read as _;
    let mut zeros = std::fs::File::open("/dev/zero").unwrap();
    let mut buffer = vec![0; 1 << 20];
    while goes_on() {
        zeros.read_exact(&mut buffer).unwrap();
    }
}

/// Then the rest of the span's time is one sample without a stack.
fn of_user_code_alone(profile: &Profile) -> bool {
    profile.of_kind(SampleKind::OnCpu).any(|sample| names(profile, sample) == ["[kernel]"])
}

/// A thread that could not be sampled, and what else is lost, matters to the spans that were open then, and to no later one.
#[test]
fn a_loss_hides_kernel_time_of_the_spans_in_which_it_was() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};
    const TEST: &str = "a_loss_hides_kernel_time_of_the_spans_in_which_it_was";
    if !is_child(TEST) {
        let output = run_child(TEST, &[]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    // Root may sample the kernel.
    let none = CapabilitySet::empty();
    let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
    set_capabilities(None, sets).unwrap();
    let paranoid = std::fs::read_to_string("/proc/sys/kernel/perf_event_paranoid");
    if !has_perf() || paranoid.is_ok_and(|level| level.trim() != "2") {
        eprintln!("skipped: perf is not allowed for user code alone");
        return;
    }
    // Room for the events of one or two threads.
    let most = Rlimit { current: Some(128), maximum: getrlimit(Resource::Nofile).maximum };
    setrlimit(Resource::Nofile, most).unwrap();
    let setup = with(Source::Perf);
    let read = || {
        // Samples fall in user code alone, and without one there is no profile.
        burn(20 * MS);
        let start = cpu_time::ThreadTime::now();
        read_zeros(|| start.elapsed() < 100 * MS);
    };
    setup.run(|| {
        let _outer = info_span!("outer").entered();
        read();
        let barrier = std::sync::Barrier::new(8);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    tracing::dispatcher::with_default(&setup.dispatch, || {
                        info_span!("crowded").in_scope(|| {
                            barrier.wait();
                            burn(MS);
                            barrier.wait();
                        });
                    });
                });
            }
        });
    });
    let lost = || setup.handle.stats().threads.refused_open_files;
    assert!(lost() > 0);
    let profiles = setup.memory.take();
    let outer = profiles.iter().find(|profile| profile.name == "outer").unwrap();
    assert!(!of_user_code_alone(outer), "{:?}", outer.notes);
    // The files of the threads before may not have been given back yet.
    let has_kernel_time = || {
        setup.run(|| info_span!("later").in_scope(read));
        setup.memory.take().iter().any(of_user_code_alone)
    };
    assert!((0..20).any(|_| has_kernel_time()), "{} threads were refused", lost());
}

/// Containers can have clocks of their own, as after they were moved to another machine.
#[test]
fn a_time_namespace_moves_no_time_and_loses_no_wait() {
    const TEST: &str = "a_time_namespace_moves_no_time_and_loses_no_wait";
    if is_child(TEST) {
        return check_times();
    }
    let program = std::env::current_exe().unwrap();
    for offset in ["8640000", "-60"] {
        let run = |more: &[&str], program: &std::ffi::OsStr, arguments: &[&str]| {
            let mut command = std::process::Command::new("unshare");
            command.args(["--time", "--monotonic", offset, "--boottime", offset, "--fork"]);
            command.args(more).arg(program).args(arguments).env("CHILD", TEST).output()
        };
        // A user without privileges needs a namespace in which it has them.
        let ways = [&[][..], &["--user", "--map-root-user"]];
        let can = |way: &&&[&str]| {
            run(way, "true".as_ref(), &[]).is_ok_and(|output| output.status.success())
        };
        let Some(way) = ways.iter().find(can) else {
            eprintln!("no time namespace with {offset} can be made here");
            continue;
        };
        let output = run(way, program.as_os_str(), &["--exact", TEST, "--nocapture"]).unwrap();
        let texts = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
        assert!(output.status.success(), "{offset}: {}", texts.concat());
        assert!(texts.concat().contains("1 passed"), "{offset}: {}", texts.concat());
    }
}

fn check_times() {
    // Perf has the clock of the machine, so timers are chosen.
    for source in [Source::Auto, Source::Timer] {
        // The time of day may be set in steps.
        const STEP: Duration = Duration::from_secs(60);
        let setup = with(source);
        with_longer_waits(|time| {
            let (before, start) = (std::time::SystemTime::now(), Instant::now());
            setup.run(|| {
                info_span!("work").in_scope(|| {
                    burn(MS * 20);
                    std::thread::sleep(time);
                });
            });
            let took = start.elapsed();
            let profile = setup.profiles().pop().unwrap();
            let times = before - STEP..before + took + STEP;
            let points = profile.samples().iter().flat_map(|sample| &sample.points);
            assert!(
                times.contains(&profile.start()),
                "{source:?}: {:?} {times:?}",
                profile.start()
            );
            assert!(profile.duration() <= took, "{source:?}: {:?} {took:?}", profile.duration());
            for point in points {
                assert!(times.contains(&point.time()), "{source:?}: {:?} {times:?}", point.time());
            }
            let [(_, names, waited_ns)] = waits(&profile).try_into().ok()?;
            assert_eq!(names[0], "sleep", "{source:?}");
            assert!(waited_ns <= took.ns(), "{source:?}: {waited_ns} {took:?}");
            Some(())
        });
    }
}

/// All CPU time of a span is in its profile, including the time in the kernel.
#[test]
fn kernel_time_is_part_of_the_total() {
    for source in sources() {
        let mut tries = 0..5;
        // The CPU time of the span by time of day.
        let mut had = Vec::new();
        let (setup, [least_ns, most_ns]) = loop {
            let setup = with(source);
            had.clear();
            setup.run(|| {
                info_span!("reads").in_scope(|| {
                    let start = cpu_time::ThreadTime::now();
                    let mut until = |cpu| {
                        let now = std::time::UNIX_EPOCH.elapsed().unwrap();
                        had.push((now.as_nanos() as u64, start.elapsed().as_nanos() as u64));
                        start.elapsed() < cpu
                    };
                    while until(100 * MS) {
                        burn(MS);
                    }
                    read_zeros(|| until(400 * MS));
                });
            });
            // On a busy machine timers rarely hit a thread: the time after the last sample is missing.
            let profile = &setup.profiles()[0];
            let account = *setup.kept()[0].spans[0].times();
            let by_time = match of_user_code_alone(profile) {
                // The remaining time up to the end of the span is kernel time.
                true => Some([account.on_cpu().ns(); 2]),
                false => {
                    let on_cpu = profile.of_kind(SampleKind::OnCpu);
                    let points = on_cpu.flat_map(|sample| &sample.points);
                    let last_ns = points.map(|point| point.time().ns()).max().unwrap();
                    let next = had.partition_point(|(time_ns, _)| *time_ns < last_ns);
                    let next = next.min(had.len() - 1);
                    let by_time = [next.saturating_sub(1), next].map(|at: usize| had[at].1);
                    // Most of the time in the kernel is before that.
                    Some(by_time).filter(|[least_ns, _]| *least_ns >= 250_000_000)
                }
            };
            let lost = setup.handle.stats().samples.dropped_ring_full;
            // Lost samples are not in the total.
            if let Some(by_time) = by_time.filter(|_| lost == 0) {
                break (setup, by_time);
            }
            assert!(
                tries.next().is_some(),
                "{source:?}: {lost} samples lost again, or the last one was early"
            );
        };
        let profile = &setup.profiles()[0];
        let account = *setup.kept()[0].spans[0].times();
        let sampled_ns = profile.weight().ns();
        // Nor is the time in which no kernel tick hit the thread for long; it is counted.
        let usual_ns = profile.period().ns().max(4_000_000);
        let late_ns = setup.handle.stats().samples.dropped_late * usual_ns;
        // Up to one sample more or less at each end.
        let slack_ns = 2 * usual_ns + account.on_cpu().ns() / 50;
        assert!(
            sampled_ns + late_ns + slack_ns >= least_ns && sampled_ns <= most_ns + slack_ns,
            "{source:?}: {sampled_ns} of {least_ns} to {most_ns}, {account:?} {:?}, {:?}",
            profile.notes,
            setup.handle.stats(),
        );
        // The kernel's part is at the user's call, with or without kernel frames; or separate where perf sees only
        // user code.
        let on_cpu = profile.of_kind(SampleKind::OnCpu);
        let in_kernel_ns: u64 = on_cpu
            .filter(|sample| {
                let names = names(profile, sample);
                names.contains(&"read_zeros") || names.contains(&"[kernel]")
            })
            .flat_map(|sample| &sample.points)
            .map(|point| point.weight)
            .sum();
        // The first 100 ms were in user code.
        let least_in_kernel_ns = least_ns.saturating_sub(150_000_000 + late_ns) / 2;
        assert!(
            in_kernel_ns >= least_in_kernel_ns,
            "{source:?}: {in_kernel_ns} {:?}",
            profile.notes
        );
    }
}

/// If no hook empties the ring of switch records and it is full, it lacks the later waits.
#[test]
fn many_short_waits_are_not_merged_into_a_long_one() {
    for source in sources() {
        let setup = with(source);
        // Where there are no switch records, only the longer ones are long enough to be seen.
        let round = |number: u32| {
            let start = Instant::now();
            std::thread::sleep(if number.is_multiple_of(20) { 8 * MS } else { MS });
            burn(MS);
            start.elapsed()
        };
        let longest_round =
            setup.run(|| info_span!("job").in_scope(|| (0..400).map(round).max().unwrap()));
        let account = *setup.kept()[0].spans[0].times();
        let profile = &setup.profiles()[0];
        let slack = account.on_cpu_error().ns() + 1_000_000;
        assert!(profile.waited().ns() <= account.off_cpu().ns() + slack, "{:?}", profile.notes);
        let longest = profile.of_kind(SampleKind::OffCpu).flat_map(|sample| &sample.points);
        let longest = longest.map(|point| point.weight).max().unwrap_or(0);
        let most = longest_round.as_nanos() as u64 + 1_000_000;
        assert!(longest <= most, "{source:?}: {longest} {longest_round:?} {account:?}");
    }
}

#[test]
fn waits_of_ended_threads_are_complete() {
    for source in sources() {
        let setup = Setup::with("0ms", |builder: Builder| {
            builder.source(source).profiles_per_minute(1_000_000)
        });
        for round in 0..60 {
            std::thread::scope(|scope| {
                for thread in 0..6 {
                    let dispatch = &setup.dispatch;
                    let time = Duration::from_micros(10_000 + (round * 6 + thread) * 337 % 5_000);
                    scope.spawn(move || {
                        tracing::dispatcher::with_default(dispatch, || {
                            info_span!("brief").in_scope(|| std::thread::sleep(time));
                        });
                    });
                }
            });
        }
        setup.flush();
        let accounts: Vec<_> = setup.kept().iter().map(|kept| *kept.spans[0].times()).collect();
        assert_eq!(accounts.len(), 360);
        let profiles = setup.profiles();
        for profile in profiles {
            // A profile that was reserved for a wait has it, unless a sample fell in it, too.
            let is_there = profile.wait_count() > 0 || profile.sample_count() > 0;
            assert!(
                is_there && !profile.notes.join("").contains("lost before"),
                "{:?}",
                profile.notes
            );
            if source == Source::Perf && profile.wait_count() > 0 {
                assert!(profile.waited().ns() >= 10_000_000, "{:?}", profile.notes);
            }
        }
    }
}

/// For waits beyond the limit, the time is kept, and lies inside the span.
#[test]
fn waits_beyond_the_limit_of_a_profile_keep_their_time() {
    for source in sources() {
        let (setup, time) = with_longer_waits(|time| {
            let setup = Setup::with("0ms|hung=off", |builder: Builder| {
                builder.source(source).samples_per_profile(2)
            });
            setup.run(|| {
                info_span!("waits").in_scope(|| (0..5).for_each(|_| std::thread::sleep(time)));
            });
            (setup.handle.stats().waits.dropped_memory > 0).then_some((setup, time))
        });
        let profile = &setup.profiles()[0];
        assert!(profile.duration().ns() < 60_000_000_000, "{}", profile.duration().ns());
        let range = profile.start().ns()..profile.start().ns() + profile.duration().ns();
        let points = profile.samples().iter().flat_map(|sample| &sample.points);
        assert!(points.into_iter().all(|point| range.contains(&point.time().ns())));
        // On a loaded machine one or two may be missed.
        let (kept, dropped) = (2, setup.handle.stats().waits.dropped_memory);
        let each_ns = time.as_nanos() as u64 / 10 * 9;
        assert!(profile.waited().ns() >= (kept + dropped) * each_ns, "{:?}", profile.notes);
        assert!(profile.waits().longest.unwrap().call.contains("sleep"));
    }
}

/// CPU time in which a thread has blocked the timer signal is attributed to no span.
#[test]
fn time_with_blocked_signals_is_attributed_to_no_span() {
    let setup = with(Source::Timer);
    setup.run(|| {
        let _outer = info_span!("outer").entered();
        burn(20 * MS);
        let unblock = block_all_signals();
        info_span!("critical").in_scope(|| burn(500 * MS));
        info_span!("tiny").in_scope(|| {
            unblock();
            burn(10 * MS);
        });
    });
    let profile = &setup.profiles()[0];
    assert!(profile.weight().ns() < 300_000_000, "{:?}", profile.notes);
    assert!(setup.handle.stats().samples.dropped_late > 0);
    assert!(
        profile.attributes.iter().any(|attribute| attribute.key == "profile.samples_lost_late")
    );
}

fn block_all_signals() -> impl FnOnce() {
    // SAFETY: plain structures; changes the mask of the calling thread.
    #[allow(unsafe_code, reason = "there is no safe way to block signals")]
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut before: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, &raw mut before);
        move || {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
        }
    }
}

/// Time of children that were exported before, and time without samples, is not kernel time.
#[test]
fn time_in_an_earlier_profile_is_not_kernel_time() {
    for source in sources() {
        let setup = with(source);
        setup.run(|| {
            let _connection = info_span!("connection").entered();
            for _ in 0..3 {
                info_span!("request").in_scope(|| burn(100 * MS));
            }
            setup.handle.flush(support::PLENTY).unwrap();
            burn(50 * MS);
        });
        for profile in setup.profiles() {
            let kernel = profile
                .of_kind(SampleKind::OnCpu)
                .filter(|sample| functions(&profile, sample) == ["[kernel]"]);
            let kernel_ns: u64 = kernel.flat_map(|sample| &sample.points).map(|p| p.weight).sum();
            assert!(kernel_ns < 50_000_000, "{source:?}: {kernel_ns} {:?}", profile.notes);
        }
    }
}

/// The collector rarely polls threads that stay blocked.
#[test]
fn blocked_threads_are_polled_rarely() {
    const TEST: &str = "blocked_threads_are_polled_rarely";
    if !is_child(TEST) {
        let output = run_child(TEST, &[]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    let wakeups = || -> u64 {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        let of_collector = tasks.filter_map(|task| {
            let path = task.unwrap().path();
            let name = std::fs::read_to_string(path.join("comm")).ok()?;
            let status = std::fs::read_to_string(path.join("status")).ok()?;
            let count =
                status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
            (name.trim() == "profiling-drain").then(|| count.trim().parse::<u64>().unwrap())
        });
        of_collector.sum()
    };
    for source in sources() {
        let setup = with(source);
        setup.run(|| {
            let _main = info_span!("main").entered();
            std::thread::sleep(200 * MS);
            let (before, start) = (wakeups(), Instant::now());
            std::thread::sleep(2_000 * MS);
            let count = wakeups() - before;
            // Scans come after a quarter of the time that the thread has been blocked: 14 before the usual interval. That
            // is 40 ms, in which a ring of samples can fill. With timers, the CPU clock is read every 6 ms.
            let interval_ms = if source == Source::Timer { 6 } else { 40 };
            let most = start.elapsed().as_millis() / interval_ms + 1 + 14;
            assert!(u128::from(count) <= most, "{source:?}: {count} of {most}");
        });
        setup.handle.shutdown(support::PLENTY).unwrap();
    }
}

/// Where perf records switches, of many waits that are too short to be captured some are, each with the time of those that
/// were skipped before it.
#[test]
fn many_short_waits_are_where_some_of_them_were() {
    #[inline(never)]
    fn query() {
        std::thread::sleep(2 * MS);
        std::hint::black_box(());
    }
    if !has_perf() {
        return;
    }
    // The collector may get no CPU for a while.
    let seen = [200, 800, 3_200].into_iter().find_map(|count| {
        let setup = with(Source::Perf);
        setup.run(|| info_span!("job").in_scope(|| (0..count).for_each(|_| query())));
        let account = *setup.kept().last()?.spans[0].times();
        let profile = setup.profiles().pop()?;
        assert!(profile.waited().ns() <= account.off_cpu().ns() + account.on_cpu_error().ns());
        let waits = waits(&profile);
        let in_query = waits.iter().filter(|(_, names, _)| names.contains(&"query"));
        let points = in_query.flat_map(|(sample, ..)| &sample.points);
        // On a busy machine many are longer.
        let short = points.filter(|point| point.weight < 5_000_000).count();
        println!("{short} of {count}, {:?} of {account:?}", profile.waited());
        (short > count / 10).then_some(())
    });
    assert!(seen.is_some(), "short waits have stacks");
}

#[test]
fn a_long_wait_after_many_short_ones_is_captured() {
    for source in sources() {
        let (waited_ns, time) = with_longer_waits(|time| {
            let setup = with(source);
            setup.run(|| {
                info_span!("job").in_scope(|| {
                    // More than the ring of switch records holds, without a hook that empties it.
                    (0..400).for_each(|_| std::thread::sleep(MS / 10));
                    std::thread::sleep(time);
                });
            });
            let profile = setup.profiles().pop()?;
            let sleeps = waits(&profile).into_iter().filter(|(_, names, _)| names[0] == "sleep");
            let longest = sleeps.map(|(_, _, waited_ns)| waited_ns).max()?;
            (u128::from(longest) > time.as_nanos() / 10 * 8).then_some((longest, time))
        });
        assert!(
            u128::from(waited_ns) > time.as_nanos() / 10 * 8,
            "{source:?} {waited_ns} {time:?}"
        );
    }
}

/// One to forty sleeps in a segment, sampled from the enter and from when the span is old. The error of their lengths
/// on a quiet machine is a figure (`split.wait_error`); these assertions hold on any machine.
#[test]
fn waits_lie_in_their_span_and_within_its_off_cpu_time() {
    for source in sources() {
        for (sampling_delay, sleeps) in [Duration::ZERO, 12 * MS]
            .into_iter()
            .flat_map(|arm| sleeps::ALL.iter().map(move |sleeps| (arm, sleeps)))
        {
            let setup = Setup::of_rules("0ms", |builder| {
                builder.source(source).profiles_per_minute(10_000).sampling_delay(sampling_delay)
            });
            let slept = setup.run(|| sleeps.sleep());
            let account = *setup.kept().last().unwrap().spans[0].times();
            let profiles = setup.profiles();
            let waits: Vec<_> = profiles.iter().flat_map(sleeps::waits).collect();
            let of = format!("{source:?}, {sampling_delay:?}, {sleeps:?}: {waits:?} of {slept:?}");
            let waited_ns: u64 = waits.iter().map(|wait| wait.when.len_ns()).sum();
            let most_ns = account.off_cpu().ns() + account.on_cpu_error().ns();
            assert!(waited_ns <= most_ns, "{waited_ns} of {account:?}: {of}");
            for wait in &waits {
                assert!(slept.holds(wait), "{wait:?} is not in its span: {of}");
                // With timers, the first check does not know when the wait began.
                let may_be_marked = !sampling_delay.is_zero() || source == Source::Timer;
                assert!(may_be_marked || !wait.is_marked, "sampled from the enter: {of}");
            }
            assert!(waits.iter().filter(|wait| wait.is_marked).count() <= 1, "{of}");
            for (slept_ns, reported_ns) in sleeps::reported(&slept, &waits, sampling_delay) {
                let Some(reported_ns) = reported_ns else { continue };
                // With timers the length is measured from the CPU clock: off by a preemption right before or after.
                if source == Source::Perf {
                    let slack_ns = 1_000_000 + slept_ns / 100;
                    let least_ns = u64::try_from(sleeps.sleep.as_nanos()).unwrap();
                    assert!(
                        reported_ns <= slept_ns + slack_ns,
                        "{reported_ns} of {slept_ns}: {of}"
                    );
                    assert!(
                        reported_ns + slack_ns >= least_ns,
                        "{reported_ns} of {slept_ns}: {of}"
                    );
                }
            }
        }
    }
}
