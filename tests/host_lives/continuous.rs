//! A process that is profiled continuously: a timer for each thread that runs, and nothing else.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Resource;
use seccompiler::{SeccompAction, apply_filter};
use tracing_profiling::export::Memory;
use tracing_profiling::profile::Profile;
use tracing_profiling::{Builder, Source};

use super::filters::program;
use super::limits::limit;
use super::signals::block;
use super::{Host, MS, alone, in_child};
use crate::support::{PLENTY, burn, has_all_threads};

const LONG: Duration = Duration::from_secs(3_600);
/// How often one profile is made where it is not.
const SHORT: Duration = Duration::from_secs(1);

fn host(memory: &Memory, set: impl FnOnce(Builder) -> Builder) -> Host {
    Host::with(Source::Auto, memory.clone(), |builder| set(builder.rules("1h".parse().unwrap())))
}

/// The timers of this process on the CPU time of threads. `None` where the kernel does not list timers.
fn timers() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/self/timers").ok()?;
    let is_it = |line: &&str| {
        line.trim_start().strip_prefix("ClockID:").is_some_and(|id| id.trim().starts_with('-'))
    };
    Some(text.lines().filter(is_it).count())
}

fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PLENTY, "{what}");
        std::thread::sleep(MS);
    }
}

/// Burns CPU for many samples, and waits until the collector has read some.
fn burn_until_sampled(host: &Host) {
    let (start, before) = (Instant::now(), taken(host));
    // The threads of the layer are sampled, too.
    _ = burn(300 * MS);
    while taken(host) == before {
        assert!(start.elapsed() < PLENTY, "{:?}", host.handle.stats().continuous);
        _ = burn(20 * MS);
        // It reads what its rings have.
        _ = host.handle.open_spans(LONG);
    }
}

fn taken(host: &Host) -> u64 {
    host.handle.stats().continuous.taken
}

fn has_function(profile: &Profile, name: &str) -> bool {
    crate::support::points_in(profile, name) > 0
}

#[test]
fn it_is_switched_while_the_program_runs_and_costs_no_timer_while_it_is_off() {
    let test = "it_is_switched_while_the_program_runs_and_costs_no_timer_while_it_is_off";
    in_child(module_path!(), test, &[], || {
        if !has_all_threads() {
            return;
        }
        let memory = Memory::new();
        let host = host(&memory, |builder| builder.continuous_interval(LONG));
        _ = burn(50 * MS);
        host.handle.flush(PLENTY).unwrap();
        assert_eq!((host.handle.continuous(), taken(&host)), (0, 0));
        let has = |is_on: bool| timers().is_none_or(|found| (found > 0) == is_on);
        assert!(has(false), "{:?}", timers());
        for rate in [200, 97] {
            let before = memory.profiles().len();
            host.handle.set_continuous(rate).unwrap();
            assert_eq!(host.handle.continuous(), rate);
            burn_until_sampled(&host);
            assert!(has(true));
            // A forked child has no timer, and leaves that of its parent.
            alone(|| {
                assert!(has(false), "{:?}", timers());
                _ = burn(50 * MS);
            });
            assert!(has(true));
            host.handle.set_continuous(0).unwrap();
            wait_until("it is off", || has(false) && memory.profiles().len() > before);
            let profile = memory.profiles().pop().unwrap();
            assert!(has_function(&profile, "burn"));
            assert_eq!(profile.period(), Duration::from_nanos(1_000_000_000 / u64::from(rate)));
        }
        // Without rules nothing is profiled.
        host.handle.set_continuous(200).unwrap();
        burn_until_sampled(&host);
        assert!(has(true));
        host.handle.set_enabled(false).unwrap();
        wait_until("it is off", || has(false));
        host.handle.set_enabled(true).unwrap();
        burn_until_sampled(&host);
        assert!(has(true), "it is on again");
        // The last one is complete at the end.
        host.handle.flush(PLENTY).unwrap();
        let before = memory.profiles().len();
        host.handle.shutdown(PLENTY).unwrap();
        assert!(has(false));
        assert_eq!(memory.profiles().len(), before + 1);
        assert!(host.handle.set_continuous(1).is_err());
        assert!(host.lines_with("kept").is_empty(), "a profile of the process is no kept span");
    });
}

#[test]
fn a_profile_is_made_after_each_interval_also_while_one_is_asked_for() {
    let test = "a_profile_is_made_after_each_interval_also_while_one_is_asked_for";
    in_child(module_path!(), test, &[], || {
        if !has_all_threads() {
            return;
        }
        let memory = Memory::new();
        let host = host(&memory, |builder| builder.continuous(97).continuous_interval(SHORT));
        let options =
            tracing_profiling::ProfileOptions { duration: 2 * SHORT, ..Default::default() };
        let handle = host.handle.clone();
        let asked = std::thread::spawn(move || handle.profile(options).unwrap());
        let with_burn = || {
            let profiles = memory.profiles().into_iter();
            profiles.filter(|profile| has_function(profile, "burn")).collect::<Vec<_>>()
        };
        let start = Instant::now();
        while with_burn().len() < 3 || !asked.is_finished() {
            assert!(start.elapsed() < PLENTY, "{:?}", host.handle.stats().continuous);
            _ = burn(20 * MS);
        }
        assert!(has_function(&asked.join().unwrap(), "burn"));
        let profiles = with_burn();
        let begins: Vec<_> = profiles.iter().map(Profile::start).collect();
        assert!(begins.is_sorted());
        assert!(profiles.iter().all(|profile| profile.duration() >= SHORT));
        host.handle.shutdown(PLENTY).unwrap();
    });
}

/// How often the collector's thread has gone to sleep.
fn sleeps_of_the_collector() -> u64 {
    super::idle_threads::sleeps_of_the_collector()
}

#[test]
fn an_idle_process_is_woken_about_once_a_second() {
    in_child(module_path!(), "an_idle_process_is_woken_about_once_a_second", &[], || {
        if !has_all_threads() {
            return;
        }
        let memory = Memory::new();
        let host = host(&memory, |builder| builder.continuous(97).continuous_interval(LONG));
        host.handle.flush(PLENTY).unwrap();
        // The threads of the layer end what they do at the start.
        let start = Instant::now();
        loop {
            let (before, begin) = (sleeps_of_the_collector(), Instant::now());
            std::thread::sleep(4 * SHORT);
            let more = sleeps_of_the_collector() - before;
            // As many searches for threads as were due by then, and one sleep more each for a futex that was contended.
            let searches = begin.elapsed().as_secs() + 1;
            println!("{more} sleeps for {searches} searches");
            if (2..=2 * searches).contains(&more) {
                break;
            }
            assert!(start.elapsed() < PLENTY, "it is woken by that and by nothing else");
        }
        host.handle.shutdown(PLENTY).unwrap();
    });
}

/// Sleeping threads get no signal: their calls would return `EINTR`.
#[test]
fn no_call_of_a_thread_that_sleeps_is_interrupted() {
    in_child(module_path!(), "no_call_of_a_thread_that_sleeps_is_interrupted", &[], || {
        if !has_all_threads() {
            return;
        }
        let memory = Memory::new();
        let host = host(&memory, |builder| builder.continuous(1_000).continuous_interval(SHORT));
        let (is_over, interrupted) = (AtomicBool::new(false), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    while !is_over.load(Ordering::Relaxed) {
                        // SAFETY: waits for no file.
                        let result = unsafe { libc::poll(std::ptr::null_mut(), 0, 5) };
                        interrupted.fetch_add(u64::from(result != 0), Ordering::Relaxed);
                    }
                });
            }
            // Through the ends of some intervals, when the layer's threads run.
            let start = Instant::now();
            while taken(&host) < 200 || host.handle.stats().continuous.profiles < 2 {
                assert!(start.elapsed() < PLENTY, "{:?}", host.handle.stats().continuous);
                _ = burn(20 * MS);
            }
            is_over.store(true, Ordering::Relaxed);
        });
        assert_eq!(interrupted.load(Ordering::Relaxed), 0);
        host.handle.shutdown(PLENTY).unwrap();
    });
}

/// The handler would end the process there. The others are sampled.
#[test]
fn threads_that_cannot_have_a_timer_have_none() {
    in_child(module_path!(), "threads_that_cannot_have_a_timer_have_none", &[], || {
        if !has_all_threads() {
            return;
        }
        let filter = program(&[libc::SYS_process_vm_readv], SeccompAction::KillProcess);
        let filtered = || apply_filter(&filter).unwrap();
        let blocking = || block(&(1..=libc::SIGRTMAX()).collect::<Vec<_>>());
        let begins: [&(dyn Fn() + Sync); 2] = [&filtered, &blocking];
        for begin in begins {
            let memory = Memory::new();
            let host = Host::with(Source::Timer, memory.clone(), |builder| {
                builder.rules("1h".parse().unwrap()).continuous_interval(LONG)
            });
            let (has_begun, is_over) = (AtomicBool::new(false), AtomicBool::new(false));
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    begin();
                    has_begun.store(true, Ordering::Release);
                    while !is_over.load(Ordering::Acquire) {
                        _ = burn_without_timer(MS);
                    }
                });
                wait_until("it has begun", || has_begun.load(Ordering::Acquire));
                host.handle.set_continuous(97).unwrap();
                burn_until_sampled(&host);
                is_over.store(true, Ordering::Release);
            });
            host.handle.set_continuous(0).unwrap();
            wait_until("it is off", || !memory.profiles().is_empty());
            let profile = memory.profiles().pop().unwrap();
            assert!(has_function(&profile, "burn_until_sampled"));
            assert!(!has_function(&profile, "burn_without_timer"));
            host.handle.shutdown(PLENTY).unwrap();
        }
    });
}

#[inline(never)]
fn burn_without_timer(cpu: Duration) -> u64 {
    std::hint::black_box(burn(cpu))
}

#[test]
fn a_refused_timer_is_said_once_and_the_rest_works() {
    in_child(module_path!(), "a_refused_timer_is_said_once_and_the_rest_works", &[], || {
        limit(Resource::Sigpending, 0);
        let memory = Memory::new();
        let host = Host::with(Source::Timer, memory.clone(), |builder| {
            let builder = builder.rules("1h".parse().unwrap());
            builder.continuous(97).continuous_interval(SHORT)
        });
        let said = || host.lines_with("the process is not profiled continuously");
        wait_until("it is said", || said().len() == 1);
        assert!(said()[0].contains("`ulimit -i`, now 0"), "{:?}", said());
        assert!(said()[0].contains("continuous_off"), "{:?}", said());
        assert!(timers().is_none_or(|timers| timers == 0));
        // It is not tried again until it is switched on again.
        host.handle.flush(PLENTY).unwrap();
        assert_eq!(said().len(), 1);
        host.handle.set_continuous(0).unwrap();
        host.handle.flush(PLENTY).unwrap();
        host.handle.set_continuous(97).unwrap();
        wait_until("it is said again", || said().len() == 2);
        host.handle.shutdown(PLENTY).unwrap();
        assert!(memory.profiles().is_empty());
    });
}
