//! Seccomp filters that end a process at a system call, as systemd's `SystemCallFilter=` does.

use std::collections::BTreeMap;
use std::time::Duration;

use cpu_time::ThreadTime;
use seccompiler::{SeccompAction, SeccompFilter, apply_filter, apply_filter_all_threads};
use tracing_profiling::export::Memory;
use tracing_profiling::{Directory, ProfilingLayer, Source};

use super::{Host, MS, in_child};
use crate::support::{PLENTY, burn};

/// All system calls of the layer that an ordinary service may forbid, and some that it does not make.
pub(super) const CALLS: &[(&str, libc::c_long)] = &[
    ("perf_event_open", libc::SYS_perf_event_open),
    ("timer_create", libc::SYS_timer_create),
    ("timer_settime", libc::SYS_timer_settime),
    ("timer_delete", libc::SYS_timer_delete),
    ("process_vm_readv", libc::SYS_process_vm_readv),
    ("clock_gettime", libc::SYS_clock_gettime),
    ("getrusage", libc::SYS_getrusage),
    ("memfd_create", libc::SYS_memfd_create),
];
const NEVER_CALLED: &[libc::c_long] = &[
    libc::SYS_statfs,
    libc::SYS_rt_tgsigqueueinfo,
    libc::SYS_eventfd2,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_pwait,
    libc::SYS_ptrace,
    libc::SYS_kcmp,
];
const ACTIONS: [SeccompAction; 4] = [
    SeccompAction::KillProcess,
    SeccompAction::KillThread,
    SeccompAction::Trap,
    SeccompAction::Errno(libc::EPERM as u32),
];
const SOURCES: [Source; 4] = [Source::Auto, Source::Perf, Source::Timer, Source::None];

pub(super) fn program(calls: &[libc::c_long], action: SeccompAction) -> seccompiler::BpfProgram {
    let rules: BTreeMap<_, _> = calls.iter().map(|call| (*call, Vec::new())).collect();
    let architecture = std::env::consts::ARCH.try_into().unwrap();
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, action, architecture);
    filter.unwrap().try_into().unwrap()
}

/// Runs `action` in a forked child, which must exit successfully.
pub(super) fn in_fork(what: &str, action: impl FnOnce()) {
    println!("{what}");
    super::alone(action);
}

/// Busy-waits on a clock that is read without a system call.
pub(super) fn spin(time: Duration) {
    let start = std::time::Instant::now();
    while start.elapsed() < time {
        std::hint::spin_loop();
    }
}

/// Spans that run and block in turn.
fn work(host: &Host) {
    for _ in 0..2 {
        host.span(|| spin(10 * MS));
        host.span(|| std::thread::sleep(15 * MS));
    }
    std::thread::scope(|scope| {
        scope.spawn(|| host.span(|| spin(10 * MS)));
    });
    host.handle.flush(PLENTY).unwrap();
    assert_eq!(host.handle.stats().spans.kept, 5);
    let kept = host.lines_with("kept `kept`");
    assert!(kept.len() == 5 && kept.iter().all(|line| line.contains("wall_ms=")), "{kept:?}");
}

/// If the filter kills, exactly one message names the system call.
fn assert_logged(host: &Host, name: &str, action: &SeccompAction) {
    let lines = host.lines_with("a seccomp filter ends this process at ");
    let expected = usize::from(!matches!(action, SeccompAction::Errno(_)));
    assert_eq!(lines.len(), expected, "{lines:?}");
    assert!(lines.iter().all(|line| line.contains(name)), "{lines:?}");
}

fn each(test: &str, body: impl Fn(&str, libc::c_long, &SeccompAction, Source)) {
    in_child(module_path!(), test, &[], || {
        for (name, call) in CALLS {
            for action in ACTIONS {
                for source in SOURCES {
                    in_fork(&format!("{name} {action:?} {source:?}"), || {
                        body(name, *call, &action, source);
                    });
                }
            }
        }
    });
}

#[test]
fn a_filter_installed_before_the_layer() {
    each("a_filter_installed_before_the_layer", |name, call, action, source| {
        apply_filter(&program(&[call], action.clone())).unwrap();
        let dir = std::env::temp_dir().join(format!("host_lives-{}", std::process::id()));
        let directory = Directory::new(&dir);
        let host = Host::with(source, directory, |builder| builder.symbols(false));
        work(&host);
        assert_logged(&host, name, action);
        _ = host.handle.shutdown(PLENTY);
        _ = std::fs::remove_dir_all(dir);
    });
}

/// The filter applies to all threads, before any of them is in a span.
#[test]
fn a_filter_installed_after_the_layer() {
    each("a_filter_installed_after_the_layer", |name, call, action, source| {
        // These two are not probed again before each call.
        if ["timer_delete", "clock_gettime"].contains(&name) {
            return;
        }
        let host = Host::with(source, Memory::new(), |builder| builder.symbols(false));
        std::thread::sleep(5 * MS);
        apply_filter_all_threads(&program(&[call], action.clone())).unwrap();
        work(&host);
        assert_logged(&host, name, action);
        _ = host.handle.shutdown(PLENTY);
    });
}

/// A thread that a timer samples while it runs on another stack installs one: the handler of the timer makes no call that
/// could end the process, or be refused, for the sake of that stack.
#[test]
fn a_filter_installed_by_a_thread_that_a_timer_samples_on_another_stack() {
    const TEST: &str = "a_filter_installed_by_a_thread_that_a_timer_samples_on_another_stack";
    const CALLS: [libc::c_long; 3] =
        [libc::SYS_process_vm_readv, libc::SYS_gettid, libc::SYS_getpid];
    fn runs(host: &Host) {
        let (start, before) = (ThreadTime::now(), host.handle.stats().stacks.on_other_stacks);
        while start.elapsed() < 50 * MS || host.handle.stats().stacks.on_other_stacks == before {
            std::hint::spin_loop();
        }
    }
    in_child(module_path!(), TEST, &[], || {
        for action in ACTIONS {
            in_fork(&format!("{action:?}"), || {
                let host =
                    Host::with(Source::Timer, Memory::new(), |builder| builder.symbols(false));
                let sampled = || {
                    let forbids = program(&CALLS, action.clone());
                    host.span(|| {
                        stacker::grow(1 << 20, || {
                            runs(&host);
                            apply_filter(&forbids).unwrap();
                            runs(&host);
                        });
                    });
                };
                std::thread::scope(|scope| _ = scope.spawn(sampled));
                host.handle.flush(PLENTY).unwrap();
                assert_eq!(host.handle.stats().spans.kept, 1);
            });
        }
    });
}

#[test]
fn forbidden_calls_that_are_never_made_have_no_effect() {
    in_child(module_path!(), "forbidden_calls_that_are_never_made_have_no_effect", &[], || {
        for source in SOURCES {
            in_fork(&format!("{source:?}"), || {
                apply_filter(&program(NEVER_CALLED, SeccompAction::KillProcess)).unwrap();
                let host = Host::new(source, Memory::new());
                work(&host);
                assert_eq!(host.lines_with("seccomp filter ends"), [""; 0]);
            });
        }
    });
}

/// All calls at once, with each action.
#[test]
fn a_filter_that_forbids_all_calls() {
    in_child(module_path!(), "a_filter_that_forbids_all_calls", &[], || {
        let calls: Vec<_> = CALLS.iter().map(|(_, call)| *call).collect();
        for action in ACTIONS {
            in_fork(&format!("{action:?}"), || {
                apply_filter(&program(&calls, action.clone())).unwrap();
                let host = Host::new(Source::Auto, Memory::new());
                work(&host);
                assert_logged(&host, "perf_event_open", &action);
                // The on-CPU time cannot be measured, and the log states that.
                let unknown = host.lines_with("on-CPU unknown");
                assert_eq!(unknown.len(), 5, "{unknown:?}");
            });
        }
    });
}

/// A program that waits for its children, or handles SIGCHLD, does not observe the layer's.
#[test]
fn the_child_that_probes_the_calls_is_invisible_to_the_program() {
    in_child(
        module_path!(),
        "the_child_that_probes_the_calls_is_invisible_to_the_program",
        &[],
        || {
            extern "C" fn handler(_: libc::c_int) {
                // SAFETY: ends the process at once.
                unsafe { libc::_exit(77) };
            }
            for disposition in [handler as extern "C" fn(_) as usize, libc::SIG_IGN, libc::SIG_DFL]
            {
                in_fork("", || {
                    // SAFETY: a function that may be called at any time, or a constant.
                    unsafe { libc::signal(libc::SIGCHLD, disposition) };
                    let wait_site = std::thread::spawn(|| {
                        for _ in 0..200 {
                            let mut status = 0;
                            // SAFETY: `status` is a local variable.
                            let child =
                                unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) };
                            assert_eq!(child, -1, "a child that is not the program's");
                            std::thread::sleep(Duration::from_micros(200));
                        }
                    });
                    apply_filter(&program(
                        &[libc::SYS_perf_event_open],
                        SeccompAction::KillProcess,
                    ))
                    .unwrap();
                    for _ in 0..3 {
                        let host = Host::new(Source::Auto, Memory::new());
                        host.span(|| spin(5 * MS));
                        _ = host.handle.shutdown(PLENTY);
                    }
                    wait_site.join().unwrap();
                });
            }
        },
    );
}

#[test]
fn waits_can_be_switched_off() {
    in_child(module_path!(), "waits_can_be_switched_off", &[], || {
        for source in [Source::Auto, Source::Timer] {
            for waits in [true, false] {
                let memory = Memory::new();
                let host = Host::with(source, memory.clone(), |builder| builder.off_cpu(waits));
                // On a busy machine, the collector may not run during a short one.
                for length in [100, 400, 1_600, 6_400] {
                    host.span(|| {
                        burn(20 * MS);
                        std::thread::sleep(length * MS);
                        burn(20 * MS);
                    });
                    _ = host.handle.flush(PLENTY);
                    if !waits || host.handle.stats().waits.captured > 0 {
                        break;
                    }
                }
                assert_eq!(host.handle.stats().waits.captured > 0, waits, "{source:?}");
                assert!(!host.lines_with("off_cpu_ms=").is_empty(), "{source:?}");
                assert!(!memory.profiles().is_empty(), "{source:?}");
            }
        }
    });
}

/// The same with an environment variable.
#[test]
fn waits_can_be_switched_off_by_a_variable() {
    let test = "waits_can_be_switched_off_by_a_variable";
    in_child(module_path!(), test, &[("TRACING_PROFILING_OFF_CPU", "off")], || {
        let builder = ProfilingLayer::builder().with_env().unwrap();
        let text = format!("{builder:?}");
        assert!(text.contains("waits: false"), "{text}");
    });
}
