//! System calls that are refused with an error, as by the filter of a container, by an emulator of the kernel (gVisor), or
//! at a limit: what is missing is said once, with the error, and what is not missing is right.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use rustix::process::Resource;
use seccompiler::{
    SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    apply_filter, apply_filter_all_threads,
};
use tracing_profiling::export::Memory;
use tracing_profiling::{Directory, Kept, Source};

use super::filters::{CALLS, in_fork, program, spin};
use super::limits::limit;
use super::{Host, MS, alone, in_child};
use crate::support::{PLENTY, has_perf};

const ERRNOS: [i32; 4] = [libc::ENOSYS, libc::EPERM, libc::EINVAL, libc::ENOTSUP];

/// A filter that answers `errno` to a call if the bits `mask` of its argument have that value.
fn refuse(call: libc::c_long, argument: (u8, u64, u64), errno: i32) {
    filter(call, Some(argument), SeccompAction::Errno(errno.cast_unsigned()));
}

/// The same with another action, or for any arguments.
pub(super) fn filter(call: libc::c_long, argument: Option<(u8, u64, u64)>, action: SeccompAction) {
    let rules = argument.into_iter().map(|(argument, mask, value)| {
        let is_it = SeccompCmpOp::MaskedEq(mask);
        let condition = SeccompCondition::new(argument, SeccompCmpArgLen::Dword, is_it, value);
        SeccompRule::new(vec![condition.unwrap()]).unwrap()
    });
    let rules = BTreeMap::from([(call, rules.collect())]);
    let (allow, architecture) = (SeccompAction::Allow, std::env::consts::ARCH.try_into().unwrap());
    let filter = SeccompFilter::new(rules, allow, action, architecture).unwrap();
    let filter: seccompiler::BpfProgram = filter.try_into().unwrap();
    apply_filter(&filter).unwrap();
}

/// The CPU clock of a thread by its id: such a clock has a negative number.
const OF_A_THREAD: (u8, u64, u64) = (0, 0x8000_0000, 0x8000_0000);

fn cpu_time() -> Option<u64> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: fills a local variable.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    (result == 0).then(|| (time.tv_sec * 1_000_000_000 + time.tv_nsec).cast_unsigned())
}

/// A host whose kept spans can be inspected.
struct Watched {
    host: Host,
    kept: Arc<Mutex<Vec<Kept>>>,
}

impl Watched {
    fn new(source: Source, directory: Option<Directory>) -> Self {
        let kept = Arc::new(Mutex::new(Vec::new()));
        let received = Arc::clone(&kept);
        let set = |builder: tracing_profiling::Builder| {
            let builder = builder.symbols(false);
            builder.on_kept(move |one| received.lock().unwrap().push(one.clone()))
        };
        let host = match directory {
            Some(directory) => Host::with(source, directory, set),
            None => Host::with(source, Memory::new(), set),
        };
        Self { host, kept }
    }

    /// A span that runs, until a sample was taken if that is possible, and one that sleeps.
    fn work(&self, has_stacks: bool) {
        let ns = |time: std::time::Duration| u64::try_from(time.as_nanos()).unwrap();
        let since = |before: Option<u64>| cpu_time().zip(before).map(|(now, then)| now - then);
        let in_span = |action: &dyn Fn()| {
            let (start, before) = (Instant::now(), cpu_time());
            let mut inside = None;
            self.host.span(|| {
                let before = cpu_time();
                action();
                inside = since(before);
            });
            (ns(start.elapsed()), inside.zip(since(before)))
        };
        let ran = in_span(&|| {
            let (start, samples) = (Instant::now(), || self.host.handle.stats().samples.taken);
            let before = cpu_time();
            spin(10 * MS);
            // Where others have the processor most of that time, too.
            while since(before).is_some_and(|ran_ns| ran_ns < ns(5 * MS)) {
                spin(MS);
            }
            while has_stacks && samples() == 0 && start.elapsed() < PLENTY {
                spin(5 * MS);
            }
        });
        let slept = in_span(&|| std::thread::sleep(20 * MS));
        self.host.handle.flush(PLENTY).unwrap();
        let kept = self.kept.lock().unwrap();
        // One without a profile is reported sooner.
        let mut kept: Vec<_> = kept.iter().map(|kept| &kept.spans[0]).collect();
        kept.sort_by_key(|span| span.facts.start());
        let times: Vec<_> = kept.iter().map(|span| *span.times()).collect();
        assert_eq!(times.len(), 2);
        for (times, (wall_ns, ran_ns)) in times.iter().zip([ran, slept]) {
            assert!(ns(times.wall()) <= wall_ns, "{times:?} {wall_ns}");
            assert_eq!(times.is_cpu_time_unknown, ran_ns.is_none(), "{times:?}");
            if let Some((inside_ns, around_ns)) = ran_ns {
                let sum = times.on_cpu() + times.off_cpu() + times.idle();
                assert!(ns(sum).abs_diff(ns(times.wall())) < 1_000, "{times:?}");
                let (on_cpu, error) = (ns(times.on_cpu()), ns(times.on_cpu_error()));
                assert!(on_cpu <= around_ns + error, "{times:?} {around_ns}");
                assert!(on_cpu + error >= inside_ns, "{times:?} {inside_ns}");
            }
        }
        assert!(times[0].wall() >= 10 * MS && times[1].wall() >= 20 * MS, "{times:?}");
    }

    /// The lines that state an error of the system, except those of kept spans.
    fn errors(&self) -> Vec<String> {
        self.host.lines_with("(os error ")
    }
}

/// What is said of a refused call, if anything is missing without it, and whether there are stacks.
fn expected(name: &str, source: Source) -> (Option<&'static str>, bool) {
    let uses_perf = source != Source::Timer;
    match name {
        "perf_event_open" => match source {
            Source::Timer => (None, true),
            Source::Perf => (Some("source none"), false),
            _ => (Some("source timer"), true),
        },
        "timer_create" | "timer_settime" | "timer_delete" => {
            let what = "source none: kept spans have times but no stacks; timers are not used";
            ((!uses_perf).then_some(what), uses_perf)
        }
        "clock_gettime" => (Some("the CPU time of threads cannot be read"), true),
        "getrusage" => (Some("page faults and context switches are not counted"), true),
        // Other ways are taken, or a check is left out.
        "process_vm_readv" | "memfd_create" => (None, true),
        name => panic!("{name} is new"),
    }
}

#[test]
fn a_refused_call_is_named_with_its_error_if_anything_is_missing() {
    let test = "a_refused_call_is_named_with_its_error_if_anything_is_missing";
    in_child(module_path!(), test, &[], || {
        let has_perf = has_perf();
        // Where perf is refused anyway, each line says so.
        let sources = [Source::Auto, Source::Perf, Source::Timer];
        for source in sources.into_iter().filter(|source| has_perf || *source == Source::Timer) {
            for ((name, call), errno) in
                CALLS.iter().flat_map(|call| ERRNOS.map(|errno| (call, errno)))
            {
                in_fork(&format!("{name} {errno} {source:?}"), || {
                    let answer = SeccompAction::Errno(errno.cast_unsigned());
                    apply_filter(&program(&[*call], answer)).unwrap();
                    let dir = std::env::temp_dir().join(format!("refusals-{}", std::process::id()));
                    let watched = Watched::new(source, Some(Directory::new(&dir)));
                    let (said, has_stacks) = expected(name, source);
                    watched.work(has_stacks);
                    let errors = watched.errors();
                    assert_eq!(errors.len(), usize::from(said.is_some()), "{errors:?}");
                    if let (Some(said), [line]) = (said, errors.as_slice()) {
                        let error = format!("(os error {errno})");
                        let parts = [said, name, &error];
                        assert!(parts.iter().all(|part| line.contains(part)), "{line} {parts:?}");
                        assert!(watched.host.handle.source().contains(&error));
                    }
                    let stats = watched.host.handle.stats();
                    assert_eq!(stats.samples.taken > 0, has_stacks, "{stats:?}");
                    let written = std::fs::read_dir(&dir).map_or(0, Iterator::count);
                    assert_eq!(written > 0, has_stacks, "profiles can be written");
                    _ = watched.host.handle.shutdown(PLENTY);
                    _ = std::fs::remove_dir_all(dir);
                });
            }
        }
    });
}

/// As in gVisor: a thread can have a timer on its own CPU clock only.
#[test]
fn timers_of_another_thread_may_be_refused() {
    in_child(module_path!(), "timers_of_another_thread_may_be_refused", &[], || {
        for errno in ERRNOS {
            in_fork(&format!("{errno}"), || {
                refuse(libc::SYS_timer_create, OF_A_THREAD, errno);
                let watched = Watched::new(Source::Timer, None);
                watched.work(false);
                let errors = watched.errors();
                let [line] = errors.as_slice() else { panic!("{errors:?}") };
                let error = format!("timer_create is refused: {}", error(errno));
                for part in ["source none", &error] {
                    assert!(line.contains(part), "{part}: {line}");
                }
                let unsampled = watched.host.lines_with("no profile: sampling is unavailable");
                assert_eq!(unsampled.len(), 2, "{unsampled:?}");
                assert!(watched.host.handle.stats().threads.refused_timers > 0);
            });
        }
    });
}

fn error(errno: i32) -> std::io::Error {
    std::io::Error::from_raw_os_error(errno)
}

#[test]
fn the_clocks_of_other_threads_may_be_refused() {
    in_child(module_path!(), "the_clocks_of_other_threads_may_be_refused", &[], || {
        for errno in ERRNOS {
            in_fork(&format!("{errno}"), || {
                refuse(libc::SYS_clock_gettime, OF_A_THREAD, errno);
                let watched = Watched::new(Source::Timer, None);
                watched.work(true);
                let errors = watched.errors();
                let [line] = errors.as_slice() else { panic!("{errors:?}") };
                let said =
                    "the CPU time of other threads cannot be read (clock_gettime is refused: ";
                assert!(line.contains(&format!("{said}{})", error(errno))), "{line}");
            });
        }
    });
}

/// The call is allowed, and what makes the event sample is not.
#[test]
fn the_requests_of_perf_events_may_be_refused() {
    in_child(module_path!(), "the_requests_of_perf_events_may_be_refused", &[], || {
        if !has_perf() {
            println!("perf events are not allowed here");
            return;
        }
        const ENABLE: u64 = 0x2400;
        for errno in ERRNOS {
            in_fork(&format!("{errno}"), || {
                refuse(libc::SYS_ioctl, (1, 0xffff_ffff, ENABLE), errno);
                let watched = Watched::new(Source::Auto, None);
                watched.work(true);
                let errors = watched.errors();
                let [line] = errors.as_slice() else { panic!("{errors:?}") };
                assert!(line.contains("source timer") && line.contains("ioctl"), "{line}");
                assert!(line.contains(&error(errno).to_string()), "{line}");
            });
        }
    });
}

/// Each timer takes one of the pending signals, and the layer leaves most to the program.
#[test]
fn without_pending_signals_it_is_said_that_no_thread_is_sampled() {
    let test = "without_pending_signals_it_is_said_that_no_thread_is_sampled";
    in_child(module_path!(), test, &[], || {
        for signals in [0, 1, 2, 7] {
            for is_first in [true, false] {
                println!("{signals} {is_first}");
                alone(|| {
                    let set = || limit(Resource::Sigpending, signals);
                    if is_first {
                        set();
                    }
                    let watched = Watched::new(Source::Timer, None);
                    if !is_first {
                        set();
                    }
                    watched.work(false);
                    let cause = format!("`ulimit -i`, now {signals}");
                    let host = &watched.host;
                    let start = host.lines_with("source timer: ");
                    assert_eq!(start.len(), 1, "{start:?}");
                    assert_eq!(start[0].contains(&cause), is_first, "{start:?}");
                    let later = host.lines_with("some threads are not sampled");
                    assert_eq!(later.len(), 1, "{later:?}");
                    assert!(later[0].contains(&cause), "{later:?}");
                    assert!(host.handle.source().contains(&cause), "{}", host.handle.source());
                    let why = host.lines_with("no profile: its threads were not sampled");
                    assert_eq!(why.len(), 1, "{why:?}");
                    assert!(host.handle.stats().threads.refused_timers > 0);
                });
            }
        }
    });
}

/// A filter that is installed when the layer exists.
#[test]
fn a_timer_that_is_refused_later_is_named_with_its_error() {
    in_child(module_path!(), "a_timer_that_is_refused_later_is_named_with_its_error", &[], || {
        for (name, call) in CALLS.iter().filter(|(name, _)| name.starts_with("timer_")) {
            for errno in ERRNOS {
                in_fork(&format!("{name} {errno}"), || {
                    let watched = Watched::new(Source::Timer, None);
                    let answer = SeccompAction::Errno(errno.cast_unsigned());
                    apply_filter_all_threads(&program(&[*call], answer)).unwrap();
                    let (start, is_said) = (Instant::now(), || !watched.errors().is_empty());
                    if *name == "timer_delete" {
                        // A timer samples until it has to be deleted, and then there are no more.
                        watched.work(true);
                        while !is_said() && start.elapsed() < PLENTY {
                            std::thread::scope(|scope| {
                                scope.spawn(|| watched.host.span(|| spin(MS)));
                            });
                            watched.host.handle.flush(PLENTY).unwrap();
                        }
                    } else {
                        watched.work(false);
                    }
                    let errors = watched.errors();
                    let [line] = errors.as_slice() else { panic!("{errors:?}") };
                    let cause = format!("{name} is refused: {}", error(errno));
                    assert!(line.contains(&cause), "{line}");
                    assert!(watched.host.handle.source().contains(&cause));
                    _ = watched.host.handle.shutdown(PLENTY);
                });
            }
        }
    });
}
