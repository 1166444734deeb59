//! Threads that were in a span once, and are in none any more: nothing looks at them until they enter one again.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use tracing_profiling::Source;
use tracing_profiling::export::Memory;

use super::{Host, MS, alone, in_child};
use crate::support::{PLENTY, burn};

const THREADS: usize = 16;

/// How often the collector's thread has gone to sleep.
pub(super) fn sleeps_of_the_collector() -> u64 {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let mut collectors = tasks.filter_map(|task| {
        let status = std::fs::read_to_string(task.ok()?.path().join("status")).ok()?;
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
        let is_it = field("Name:")?.trim() == "profiling-drain";
        is_it.then(|| field("voluntary_ctxt_switches:")?.trim().parse().ok()).flatten()
    });
    collectors.next().unwrap()
}

#[test]
fn idle_threads_do_not_wake_the_collector_and_are_sampled_when_they_return() {
    let test = "idle_threads_do_not_wake_the_collector_and_are_sampled_when_they_return";
    in_child(module_path!(), test, &[], || {
        // In a process each: the collector of the one before may not have ended.
        let check = |source| {
            let host = Host::with(source, Memory::new(), |builder| builder.sampling_delay(5 * MS));
            let (idle, again) = (Barrier::new(THREADS + 1), Barrier::new(THREADS + 1));
            let (turn, mut is_quiet) = (std::sync::Mutex::new(()), false);
            std::thread::scope(|scope| {
                for _ in 0..THREADS {
                    scope.spawn(|| {
                        host.span(|| ());
                        idle.wait();
                        again.wait();
                        // Only the collector can arm a thread that stays in one segment.
                        let _turn = turn.lock().unwrap();
                        let before = host.handle.stats().threads.attached;
                        host.span(|| {
                            let start = Instant::now();
                            while host.handle.stats().threads.attached == before {
                                assert!(start.elapsed() < PLENTY, "it is sampled");
                                _ = burn(MS);
                            }
                        });
                    });
                }
                idle.wait();
                // Less than the ten seconds after which idle threads are forgotten.
                let start = Instant::now();
                loop {
                    let before = sleeps_of_the_collector();
                    std::thread::sleep(Duration::from_secs(1));
                    let more = sleeps_of_the_collector() - before;
                    println!("{more} sleeps in a second");
                    is_quiet = more <= 3;
                    if is_quiet || start.elapsed() > Duration::from_secs(7) {
                        break;
                    }
                }
                again.wait();
            });
            assert!(is_quiet, "nothing wakes the collector");
            host.handle.shutdown(PLENTY).unwrap();
        };
        [Source::Auto, Source::Timer].into_iter().for_each(|source| alone(|| check(source)));
    });
}
