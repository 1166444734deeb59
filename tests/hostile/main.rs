//! A host program that is hostile to a library that samples it: it forks, unloads code, switches stacks, nearly
//! overflows them, uses signals itself, and blocks in many system calls.
//!
//! Each scenario runs in its own process, once with each source of samples. The process must exit successfully and in
//! time, and the scenario's own assertions must hold. Samples are not checked where the layer reports that it samples
//! no thread. No verdict depends on timing, except for deadlines that only a hang exceeds.

#![cfg(target_os = "linux")]
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stdout,
    unsafe_code,
    reason = "a test"
)]

#[path = "../support/mod.rs"]
mod support;

mod allocations;
mod blocking;
mod host;
mod libraries;
mod processes;
mod runner;
mod signals;
mod stacks;
mod threads;

use std::time::Duration;

use host::{repeat_for, sampled, sampled_at};
use runner::{DEADLINE, play, play_within};
use tracing::info_span;
use tracing_profiling::ProfilingAllocator;

#[cfg(not(over_jemalloc))]
#[global_allocator]
static ALLOCATOR: ProfilingAllocator = ProfilingAllocator::system();

/// As `tests/outside/jemalloc` compiles this program.
#[cfg(over_jemalloc)]
#[global_allocator]
static ALLOCATOR: ProfilingAllocator<tikv_jemallocator::Jemalloc> =
    ProfilingAllocator::new(tikv_jemallocator::Jemalloc);

/// Declares a test of each scenario for each source: `NAME::perf` and `NAME::timer`.
macro_rules! scenarios {
    ($($name:ident: $scenario:expr;)+) => {
        $(mod $name {
            use super::*;

            #[test]
            fn perf() {
                play(concat!(stringify!($name), "::perf"), "perf", || $scenario);
            }

            #[test]
            fn timer() {
                play(concat!(stringify!($name), "::timer"), "timer", || $scenario);
            }
        })+
    };
}

scenarios! {
    fork_and_exec: sampled(processes::fork_and_exec);
    fork_without_exec: sampled(processes::fork);
    fork_and_spawn: sampled(processes::fork_and_spawn);
    exec_in_place: processes::exec_in_place();
    load_and_unload: sampled(libraries::load_and_unload);
    ten_thousand_threads: sampled(threads::ten_thousand);
    sigprof_installed_first: signals::handler_installed_first();
    sigprof_installed_later: signals::handler_installed_later();
    every_signal_installed_first: signals::every_handler_installed_first();
    every_signal_installed_later: signals::every_handler_installed_later();
    sigprof_reset_to_default: signals::reset_to_default();
    sigprof_ignored: signals::ignored();
    all_signals_blocked: sampled(signals::all_blocked);
    no_room_for_signals: signals::no_room_for_signals();
    near_the_guard_page: sampled(stacks::near_the_guard_page);
    near_the_guard_page_of_a_raw_thread: sampled(stacks::near_the_guard_page_of_a_raw_thread);
    growing_stacks: sampled(stacks::growing);
    coroutines: sampled(stacks::coroutines);
    in_a_handler_on_its_own_stack: sampled(stacks::in_a_handler_on_its_own_stack);
    panics: sampled(threads::panics);
    blocking_calls: sampled(blocking::all_calls);
    allocations_everywhere: sampled(allocations::everywhere);
    everything: sampled(everything);
}

/// The program aborts on purpose, and must end by SIGABRT with the layer in it as well.
mod abort {
    use super::*;

    fn must_abort(test: &str, source: &str) {
        if support::is_child(test) {
            processes::abort_in_the_panic_hook();
        } else {
            let program = std::env::current_exe().unwrap();
            runner::run(&program, test, source, DEADLINE).assert_killed_by(libc::SIGABRT);
        }
    }

    #[test]
    fn perf() {
        must_abort("abort::perf", "perf");
    }

    #[test]
    fn timer() {
        must_abort("abort::timer", "timer");
    }
}

/// A program without symbols is profiled too.
mod stripped {
    use super::*;

    fn in_a_copy(test: &str, source: &str) {
        if support::is_child(test) {
            play(test, source, scenario);
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        if let Some(copy) = runner::stripped_copy(dir.path()) {
            runner::run(&copy, test, source, DEADLINE).assert_success();
        }
    }

    fn scenario() {
        sampled(|host| {
            info_span!("without symbols").in_scope(|| support::burn(Duration::from_millis(200)));
            host.setup.flush();
            let profiles = host.setup.profiles();
            if host.is_sampling() {
                assert!(profiles.iter().any(|profile| !profile.samples().is_empty()));
            }
            let named = profiles.iter().map(|profile| support::points_in(profile, "burn"));
            assert_eq!(named.sum::<usize>(), 0);
        });
    }

    #[test]
    fn perf() {
        in_a_copy("stripped::perf", "perf");
    }

    #[test]
    fn timer() {
        in_a_copy("stripped::timer", "timer");
    }
}

/// Most scenarios at once in one process, several times.
fn everything(host: &host::Host) {
    const TIME: Duration = Duration::from_secs(5);
    let actions: &[fn(&host::Host)] = &[
        processes::fork_and_exec,
        processes::fork,
        libraries::load_and_unload,
        |_| threads::eight_short_threads(),
        |_| threads::allocate(3, 20),
        threads::panics,
        stacks::near_the_guard_page,
        stacks::near_the_guard_page_of_a_raw_thread,
        stacks::growing,
        stacks::coroutines,
        stacks::in_a_handler_on_its_own_stack,
        signals::all_blocked,
        |_| blocking::wait_in_all_calls(200, Duration::from_millis(100)),
    ];
    std::thread::scope(|scope| {
        for action in actions {
            scope.spawn(|| repeat_for(TIME, || action(host)));
        }
    });
}

/// At the highest rate, for the number of seconds in an environment variable.
mod stress {
    use super::*;

    fn for_the_given_time(test: &str, source: &str) {
        let seconds = std::env::var("PROFILING_TEST_STRESS_SECONDS");
        let time = Duration::from_secs(seconds.map_or(3, |seconds| seconds.parse().unwrap()));
        play_within(DEADLINE + time, test, source, || {
            sampled_at(10_000, "1ms|error", |host| threads::stress(host, time));
        });
    }

    #[test]
    fn perf() {
        for_the_given_time("stress::perf", "perf");
    }

    #[test]
    fn timer() {
        for_the_given_time("stress::timer", "timer");
    }
}
