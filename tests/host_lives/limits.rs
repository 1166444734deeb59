//! Limits of the process and of its user, of which the layer must leave most to the program.

use std::fs::File;
use std::net::{TcpListener, TcpStream};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use rustix::process::{Resource, Rlimit, setrlimit};
use tracing_profiling::export::Memory;
use tracing_profiling::{Source, Stats};

use super::{Host, MS, alone, in_only_child};
use crate::support::{PLENTY, burn, has_perf};

const THREADS: usize = 64;

pub(super) fn limit(resource: Resource, value: u64) {
    setrlimit(resource, Rlimit { current: Some(value), maximum: Some(value) }).unwrap();
}

/// Becomes a user that has no other process, whose limits no other process uses up. Without privileges it stays the same.
fn drop_privileges() {
    let user = 61_000 + std::process::id() % 4_000;
    // SAFETY: changes this process, which has one thread.
    unsafe {
        if libc::geteuid() == 0 {
            assert_eq!(libc::setgroups(0, std::ptr::null()), 0);
            assert_eq!(libc::setgid(user), 0);
            assert_eq!(libc::setuid(user), 0);
        }
    }
}

/// Runs `action` while the layer samples as many of 64 threads as it can.
fn beside_sampled_threads(host: &Host, action: impl FnOnce(Stats)) {
    let (over, begun) = (AtomicBool::new(false), Barrier::new(THREADS + 1));
    struct Over<'a>(&'a AtomicBool);
    impl Drop for Over<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    std::thread::scope(|scope| {
        let _over = Over(&over);
        for _ in 0..THREADS {
            scope.spawn(|| {
                host.span(|| {
                    _ = burn(MS);
                    begun.wait();
                    // Mostly idle, so that 64 of them do not need the machine alone.
                    while !over.load(Ordering::Relaxed) {
                        std::hint::black_box((0..10_000).sum::<u64>());
                        std::thread::sleep(MS);
                    }
                });
            });
        }
        begun.wait();
        let start = Instant::now();
        let stats = loop {
            let stats = host.handle.stats();
            if stats.threads.sampled + stats.threads.unsampled >= THREADS as u64 {
                break stats;
            }
            assert!(start.elapsed() < PLENTY, "{stats:?}");
            std::thread::sleep(MS);
        };
        println!("{:?}", stats.threads);
        action(stats);
    });
}

/// Registers that many bytes as a buffer of a new io_uring. The error is an errno; `None` if there is no io_uring.
fn register_buffer(bytes: usize) -> Option<Result<(), i32>> {
    let last_error = || std::io::Error::last_os_error().raw_os_error().unwrap();
    let mut parameters = [0_u32; 30];
    // SAFETY: the kernel fills the parameters; the buffer and its description are valid until the file is closed.
    unsafe {
        let ring = libc::syscall(libc::SYS_io_uring_setup, 4, parameters.as_mut_ptr());
        if ring < 0 {
            println!("no io_uring: {}", last_error());
            return None;
        }
        let (access, kind) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let buffer = libc::mmap(std::ptr::null_mut(), bytes, access, kind, -1, 0);
        assert_ne!(buffer, libc::MAP_FAILED);
        let vector = libc::iovec { iov_base: buffer, iov_len: bytes };
        const REGISTER_BUFFERS: libc::c_int = 0;
        let result = libc::syscall(
            libc::SYS_io_uring_register,
            ring,
            REGISTER_BUFFERS,
            &raw const vector,
            1,
        );
        let result = if result == 0 { Ok(()) } else { Err(last_error()) };
        libc::close(ring as libc::c_int);
        libc::munmap(buffer, bytes);
        Some(result)
    }
}

#[test]
fn io_uring_can_lock_its_memory_beside_sampled_threads() {
    in_only_child(module_path!(), "io_uring_can_lock_its_memory_beside_sampled_threads", || {
        for locked in [512 << 10, 2 << 20, 8 << 20] {
            for source in [Source::Auto, Source::Perf] {
                alone(|| {
                    limit(Resource::Memlock, locked);
                    drop_privileges();
                    let bytes = locked as usize / 8 * 5;
                    match register_buffer(bytes) {
                        None => return,
                        Some(alone) => assert_eq!(alone, Ok(()), "without the layer"),
                    }
                    let host = Host::new(source, Memory::new());
                    beside_sampled_threads(&host, |stats| {
                        assert_eq!(register_buffer(bytes), Some(Ok(())), "{locked}");
                        if has_perf() {
                            let by_perf = stats.threads.sampled - stats.threads.sampled_by_timer;
                            // A quarter of 512 KiB is less than the smallest ring.
                            assert_eq!(by_perf > 0, locked > 512 << 10, "some are sampled by perf");
                            assert!(stats.threads.refused_locked_memory > 0, "counted");
                        }
                        if source == Source::Auto {
                            assert_eq!(stats.threads.sampled, THREADS as u64);
                        }
                    });
                    host.handle.shutdown(PLENTY).unwrap();
                });
            }
        }
    });
}

/// A service that comes near to its limit of open files, before or after the layer samples.
#[test]
fn accept_works_near_the_limit_of_open_files() {
    in_only_child(module_path!(), "accept_works_near_the_limit_of_open_files", || {
        const FILES: u64 = 1024;
        for source in [Source::Auto, Source::Perf] {
            for is_full_first in [true, false] {
                alone(|| {
                    limit(Resource::Nofile, FILES);
                    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
                    let address = listener.local_addr().unwrap();
                    let host = Host::new(source, Memory::new());
                    let in_use = || std::fs::read_dir("/proc/self/fd").unwrap().count() as u64 - 1;
                    let before = in_use();
                    let fill = || -> Vec<File> {
                        let open = |_| File::open("/dev/null").unwrap();
                        (before..FILES / 100 * 95).map(open).collect()
                    };
                    let mut files = if is_full_first { fill() } else { Vec::new() };
                    beside_sampled_threads(&host, |stats| {
                        if files.is_empty() {
                            files = fill();
                        }
                        let by_perf = stats.threads.sampled - stats.threads.sampled_by_timer;
                        assert_eq!(by_perf > 0, has_perf() && !is_full_first);
                        // Both ends are of this process.
                        let connected = TcpStream::connect(address).unwrap();
                        let accepted = listener.accept().unwrap();
                        drop((connected, accepted));
                        if source == Source::Auto {
                            assert_eq!(stats.threads.sampled, THREADS as u64);
                        }
                        if has_perf() {
                            let threads = &stats.threads;
                            // Without privileges, the limit of locked memory can be met first.
                            let by_memory =
                                if is_full_first { 0 } else { threads.refused_locked_memory };
                            assert!(threads.refused_open_files + by_memory > 0, "counted");
                        }
                    });
                    host.handle.shutdown(PLENTY).unwrap();
                });
            }
        }
    });
}

#[test]
fn timers_of_the_program_can_be_created_beside_sampled_threads() {
    let test = "timers_of_the_program_can_be_created_beside_sampled_threads";
    in_only_child(module_path!(), test, || {
        for signals in [16_u64, 64, 256] {
            alone(|| {
                limit(Resource::Sigpending, signals);
                drop_privileges();
                let host = Host::new(Source::Timer, Memory::new());
                beside_sampled_threads(&host, |stats| {
                    assert_eq!(stats.threads.sampled, (signals / 8).min(THREADS as u64));
                    assert_eq!(stats.threads.refused_timers > 0, signals / 8 < THREADS as u64);
                    for number in 0..signals / 8 * 7 {
                        let mut timer = std::ptr::null_mut();
                        // SAFETY: creates a timer that is never set.
                        let created = unsafe {
                            libc::timer_create(
                                libc::CLOCK_MONOTONIC,
                                std::ptr::null_mut(),
                                &raw mut timer,
                            )
                        };
                        assert_eq!(created, 0, "timer {number} of {signals}");
                    }
                });
                host.handle.shutdown(PLENTY).unwrap();
            });
        }
    });
}
