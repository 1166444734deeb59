//! Profiles of the process, of threads that the layer knows nothing of.

use std::ffi::c_void;
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use cpu_time::ProcessTime;
use rustix::process::Resource;
use seccompiler::{SeccompAction, apply_filter};
use tracing_profiling::export::Memory;
use tracing_profiling::profile::{Leaf, Profile, Sample, SampleKind};
use tracing_profiling::{ProfileError, ProfileOptions, Source};

use super::filters::program;
use super::limits::limit;
use super::signal_stacks::{Below, SignalStack, largest_frame, least};
use super::{Host, MS, alone, in_child};
use crate::support::{PLENTY, burn, functions, has_perf};

const SOURCES: [Source; 2] = [Source::Perf, Source::Timer];

fn options(duration: Duration) -> ProfileOptions {
    ProfileOptions { duration, rate: 250, ..ProfileOptions::default() }
}

fn weight_of(profile: &Profile, is_it: impl Fn(&Sample) -> bool) -> Duration {
    let samples = profile.of_kind(SampleKind::OnCpu).filter(|sample| is_it(sample));
    let points = samples.flat_map(|sample| &sample.points);
    Duration::from_nanos(points.map(|point| point.weight).sum())
}

/// The CPU time of samples in that function.
fn found(profile: &Profile, name: &str) -> Duration {
    weight_of(profile, |sample| {
        functions(profile, sample).iter().any(|function| function.rsplit("::").next() == Some(name))
    })
}

/// The CPU time that no sample represents.
fn not_sampled(profile: &Profile) -> Duration {
    weight_of(profile, |sample| match profile.leaf(sample.leaf) {
        Some(Leaf::Unknown(what)) => what.starts_with("not sampled"),
        _ => false,
    })
}

type Action<'a> = &'a mut (dyn FnMut() + Send);

/// Runs on a thread of the C library, which has no alternate signal stack, with a stack of that size.
fn in_thread_of_c(stack_bytes: usize, mut action: Action<'_>) {
    extern "C" fn start(action: *mut c_void) -> *mut c_void {
        // SAFETY: the pointer that was passed to `pthread_create` below; the thread is joined before it becomes invalid.
        unsafe { (*action.cast::<Action<'_>>())() };
        action
    }
    // SAFETY: the attributes are initialized before they are used, and the thread is joined.
    unsafe {
        let (mut attributes, mut thread) = (std::mem::zeroed(), std::mem::zeroed());
        assert_eq!(libc::pthread_attr_init(&raw mut attributes), 0);
        assert_eq!(libc::pthread_attr_setstacksize(&raw mut attributes, stack_bytes), 0);
        let argument = (&raw mut action).cast();
        assert_eq!(
            libc::pthread_create(&raw mut thread, &raw const attributes, start, argument),
            0
        );
        assert_eq!(libc::pthread_join(thread, std::ptr::null_mut()), 0);
        libc::pthread_attr_destroy(&raw mut attributes);
    }
}

#[inline(never)]
fn burn_in_c(cpu: Duration) {
    black_box(burn(cpu));
}

/// A profile while such a thread of C burns CPU time, after `begin`: the first one that `is_enough`.
fn of_thread_of_c(
    host: &Host,
    stack_bytes: usize,
    begin: impl Fn() + Sync,
    is_enough: impl Fn(&Profile) -> bool,
) -> Profile {
    let (has_begun, is_over) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            in_thread_of_c(stack_bytes, &mut || {
                begin();
                has_begun.store(true, Ordering::Relaxed);
                while !is_over.load(Ordering::Relaxed) {
                    burn_in_c(2 * MS);
                }
            });
        });
        while !has_begun.load(Ordering::Relaxed) {
            std::thread::yield_now();
        }
        let profile = profile_of(host, is_enough);
        is_over.store(true, Ordering::Relaxed);
        profile
    })
}

/// On a busy machine, threads may not run while a profile is made, and the search for them may take longer than it: each
/// one is longer than the one before.
fn profile_of(host: &Host, is_enough: impl Fn(&Profile) -> bool) -> Profile {
    let (start, mut length) = (Instant::now(), 300 * MS);
    loop {
        let profile = host.handle.profile(options(length)).unwrap();
        if is_enough(&profile) || start.elapsed() > PLENTY {
            return profile;
        }
        length = length * 3 / 2;
    }
}

fn is_found(profile: &Profile) -> bool {
    found(profile, "burn_in_c") > Duration::ZERO
}

fn is_missing(profile: &Profile) -> bool {
    not_sampled(profile) > Duration::ZERO
}

/// The layer with that source, if it can be had here.
fn host_with(source: Source) -> Option<Host> {
    (source == Source::Timer || has_perf()).then(|| Host::new(source, Memory::new()))
}

#[test]
fn threads_with_small_stacks_are_sampled_where_the_handler_has_room() {
    let test = "threads_with_small_stacks_are_sampled_where_the_handler_has_room";
    in_child(module_path!(), test, &[], || {
        alone(|| {
            let host = Host::new(Source::Timer, Memory::new());
            // The least that the C library allows, without an alternate stack.
            let profile = of_thread_of_c(&host, libc::PTHREAD_STACK_MIN, || {}, is_found);
            assert!(is_found(&profile), "{:?}", host.handle.stats());
            // Of the smaller ones, the kernel's frame may leave no room for the handler.
            for bytes in [largest_frame().max(2048), least(), 32 * 1024] {
                println!("{bytes} bytes");
                let stack = SignalStack::new(bytes, Below::Painted);
                let missed = || host.handle.stats().samples.dropped_signal_stack_full;
                let before = missed();
                let is_over = |profile: &Profile| is_found(profile) || missed() > before;
                let profile = of_thread_of_c(&host, 1 << 20, || _ = stack.install(), is_over);
                assert_eq!(stack.changed_below(), 0, "bytes below the stack");
                let has_no_room = missed() > before && bytes < largest_frame() + 2048;
                assert!(is_found(&profile) || has_no_room);
            }
        });
    });
}

/// The handler would end the process there.
#[test]
fn threads_with_filters_of_their_own_get_no_timer() {
    in_child(module_path!(), "threads_with_filters_of_their_own_get_no_timer", &[], || {
        alone(|| {
            let host = Host::new(Source::Timer, Memory::new());
            let filter = program(&[libc::SYS_process_vm_readv], SeccompAction::KillProcess);
            let begin = || apply_filter(&filter).unwrap();
            let profile = of_thread_of_c(&host, 1 << 20, begin, is_missing);
            assert!(!is_found(&profile) && is_missing(&profile));
            assert!(host.handle.stats().threads.refused_timers > 0, "{:?}", host.handle.stats());
        });
    });
}

/// A signal that a thread blocks waits until it unblocks it: then there is no such timer any more.
#[test]
fn threads_that_block_signals_are_sampled_by_perf_alone_and_live() {
    let test = "threads_that_block_signals_are_sampled_by_perf_alone_and_live";
    in_child(module_path!(), test, &[], || {
        let set_mask = |how| {
            // SAFETY: changes the calling thread's signal mask alone.
            unsafe {
                let mut all = std::mem::zeroed();
                libc::sigfillset(&raw mut all);
                assert_eq!(libc::pthread_sigmask(how, &raw const all, std::ptr::null_mut()), 0);
            }
        };
        for source in SOURCES {
            alone(|| {
                let Some(host) = host_with(source) else { return };
                let (is_over, is_unblocked) = (AtomicBool::new(false), AtomicBool::new(false));
                std::thread::scope(|scope| {
                    scope.spawn(|| {
                        in_thread_of_c(1 << 20, &mut || {
                            set_mask(libc::SIG_BLOCK);
                            while !is_over.load(Ordering::Relaxed) {
                                burn_in_c(2 * MS);
                            }
                            set_mask(libc::SIG_UNBLOCK);
                            burn_in_c(2 * MS);
                            is_unblocked.store(true, Ordering::Relaxed);
                        });
                    });
                    let is_any = |profile: &Profile| match source {
                        Source::Perf => is_found(profile),
                        _ => is_missing(profile),
                    };
                    let profile = profile_of(&host, is_any);
                    is_over.store(true, Ordering::Relaxed);
                    assert!(is_any(&profile));
                    assert_eq!(is_found(&profile), source == Source::Perf);
                });
                assert!(is_unblocked.load(Ordering::Relaxed));
            });
        }
    });
}

#[test]
fn threads_that_cannot_have_a_timer_are_not_sampled() {
    in_child(module_path!(), "threads_that_cannot_have_a_timer_are_not_sampled", &[], || {
        for is_limited_before in [true, false] {
            alone(|| {
                let set_limit = |is_now: bool| {
                    if is_now {
                        limit(Resource::Sigpending, 0);
                    }
                };
                set_limit(is_limited_before);
                let host = Host::new(Source::Timer, Memory::new());
                set_limit(!is_limited_before);
                let profile = of_thread_of_c(&host, 1 << 20, || {}, is_missing);
                assert!(!is_found(&profile) && is_missing(&profile));
                let stats = host.handle.stats();
                assert!(stats.threads.refused_timers > 0, "{stats:?}");
                // What to do about it.
                let start = Instant::now();
                while host.lines_with("ulimit -i").is_empty() {
                    assert!(start.elapsed() < PLENTY);
                    std::thread::sleep(MS);
                }
            });
        }
    });
}

/// Threads that block until the end.
struct IdleThreads(Arc<(Mutex<bool>, Condvar)>, Vec<JoinHandle<()>>);

impl IdleThreads {
    /// As many as the system allows.
    fn begin(most: usize) -> Self {
        let shared = Arc::new((Mutex::new(false), Condvar::new()));
        let begin = |_| {
            let shared = Arc::clone(&shared);
            let wait = move || {
                let (is_over, changed) = &*shared;
                drop(changed.wait_while(is_over.lock().unwrap(), |is_over| !*is_over).unwrap());
            };
            std::thread::Builder::new().stack_size(32 * 1024).spawn(wait).ok()
        };
        let threads = (0..most).map_while(begin).collect();
        Self(shared, threads)
    }

    fn end(self) {
        let (is_over, changed) = &*self.0;
        *is_over.lock().unwrap() = true;
        changed.notify_all();
        self.1.into_iter().for_each(|thread| thread.join().unwrap());
    }
}

#[test]
fn ten_thousand_threads_are_searched_for_those_that_run() {
    in_child(module_path!(), "ten_thousand_threads_are_searched_for_those_that_run", &[], || {
        for source in SOURCES {
            alone(|| {
                let Some(host) = host_with(source) else { return };
                let idle = IdleThreads::begin(10_000);
                println!("{} threads", idle.1.len());
                let profile = of_thread_of_c(&host, 1 << 20, || {}, is_found);
                assert!(is_found(&profile), "{:?}", host.handle.stats());
                let stats = host.handle.stats();
                // Only those that have run.
                assert!(stats.threads.attached < 1_000, "{stats:?}");
                assert_eq!(stats.threads.refused_timers + stats.threads.refused_open_files, 0);
                idle.end();
            });
        }
    });
}

#[test]
fn what_threads_run_that_come_and_go_is_sampled_or_known_to_be_missing() {
    let test = "what_threads_run_that_come_and_go_is_sampled_or_known_to_be_missing";
    in_child(module_path!(), test, &[], || {
        for source in SOURCES {
            alone(|| {
                let Some(host) = host_with(source) else { return };
                let (is_over, begun) = (AtomicBool::new(false), AtomicU64::new(0));
                let process = ProcessTime::now();
                let profile = std::thread::scope(|scope| {
                    scope.spawn(|| {
                        while !is_over.load(Ordering::Relaxed) {
                            std::thread::scope(|inner| {
                                inner.spawn(|| burn_in_c(MS / 2));
                            });
                            begun.fetch_add(1, Ordering::Relaxed);
                        }
                    });
                    let profile = profile_of(&host, is_missing);
                    is_over.store(true, Ordering::Relaxed);
                    profile
                });
                let (all, rest) = (profile.weight(), not_sampled(&profile));
                println!("{begun:?} threads, {all:?}, {rest:?} of them not sampled");
                assert!(rest > Duration::ZERO && all < process.elapsed() * 3 / 2, "{all:?}");
                // All is given back.
                let start = Instant::now();
                while host.handle.stats().threads.sampled > 0 {
                    assert!(start.elapsed() < PLENTY, "{:?}", host.handle.stats());
                    std::thread::sleep(MS);
                }
            });
        }
    });
}

#[test]
fn a_process_can_fork_while_a_profile_of_it_is_made() {
    in_child(module_path!(), "a_process_can_fork_while_a_profile_of_it_is_made", &[], || {
        for source in SOURCES {
            alone(|| {
                let Some(host) = host_with(source) else { return };
                let is_over = AtomicBool::new(false);
                std::thread::scope(|scope| {
                    scope.spawn(|| {
                        while !is_over.load(Ordering::Relaxed) {
                            burn_in_c(2 * MS);
                        }
                    });
                    let profiles = scope.spawn(|| {
                        while !is_over.load(Ordering::Relaxed) {
                            host.handle.profile(options(300 * MS)).unwrap();
                        }
                    });
                    let start = Instant::now();
                    while host.handle.stats().threads.attached == 0 {
                        assert!(start.elapsed() < PLENTY, "{:?}", host.handle.stats());
                        std::thread::sleep(MS);
                    }
                    for _ in 0..10 {
                        alone(|| {
                            host.span(|| _ = burn(5 * MS));
                            let refused = host.handle.profile(options(500 * MS)).unwrap_err();
                            assert_eq!(refused, ProfileError::Ended);
                        });
                    }
                    is_over.store(true, Ordering::Relaxed);
                    profiles.join().unwrap();
                });
                let profile = of_thread_of_c(&host, 1 << 20, || {}, is_found);
                assert!(is_found(&profile), "{:?}", host.handle.stats());
            });
        }
    });
}
