//! A program that closes all file descriptors, as a daemon does, including those of the layer. The descriptors
//! that it opens afterwards reuse these numbers, and the layer must not touch them.

use std::fs::{self, File};
use std::io::{Read as _, Seek as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::time::{Duration, Instant};

use tracing_profiling::export::Memory;
use tracing_profiling::{Directory, Source};

use super::{Host, MS, in_child};
use crate::support::{PLENTY, burn};

const CONTENT: &[u8] = b"written by the program alone, from the first byte to the last";

fn close_all() {
    // SAFETY: closing descriptors that belong to others is what this test is about.
    assert_eq!(unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0) }, 0);
}

/// At least as many as the layer can have open.
fn open_files() -> Vec<File> {
    let open = |number| {
        let path = std::env::temp_dir().join(format!("host_lives-{}-{number}", std::process::id()));
        let options = &mut File::options();
        let mut file = options.read(true).write(true).create_new(true).open(&path).unwrap();
        fs::remove_file(path).unwrap();
        file.write_all(CONTENT).unwrap();
        file.rewind().unwrap();
        file
    };
    (0..64).map(open).collect()
}

fn assert_untouched(files: &mut [File]) {
    for file in files {
        let number = file.as_raw_fd();
        assert_eq!(file.stream_position().unwrap(), 0, "descriptor {number} has been read from");
        let mut content = Vec::new();
        file.read_to_end(&mut content).unwrap();
        assert_eq!(content, CONTENT, "descriptor {number} has been written to");
        file.rewind().unwrap();
    }
}

/// `idle` is how long the program uses no span after the close; if long enough, sampling stops.
fn closes_all(source: Source, writes: bool, threads: usize, idle: Duration) {
    let dir = tempfile::tempdir().unwrap();
    let host = match writes {
        true => {
            let directory = Directory::new(dir.path());
            Host::new(source, directory)
        }
        false => Host::new(source, Memory::new()),
    };
    let rounds = |count: usize| {
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    for _ in 0..count {
                        host.span(|| _ = burn(20 * MS));
                        host.span(|| std::thread::sleep(10 * MS));
                    }
                });
            }
        });
    };
    host.span(|| _ = burn(20 * MS));
    rounds(2);
    // A thread that is reading or writing a file while it is closed cannot detect that.
    host.handle.flush(PLENTY).unwrap();
    close_all();
    let mut files = open_files();
    std::thread::sleep(idle);
    rounds(5);
    let start = Instant::now();
    while host.lines_with("profiling has ended").is_empty() {
        assert!(start.elapsed() < PLENTY, "the end of profiling is not logged");
        host.span(|| _ = burn(MS));
        std::thread::sleep(MS);
    }
    // No more threads are armed, and those that were armed delete their timers at their next hook.
    host.span(|| _ = burn(MS));
    let timers = || fs::read_to_string("/proc/self/timers").unwrap_or_default();
    while !timers().is_empty() {
        assert!(start.elapsed() < PLENTY, "{}", timers());
        std::thread::sleep(MS);
    }
    _ = host.handle.flush(MS);
    _ = host.handle.shutdown(MS);
    drop(host);
    std::thread::sleep(10 * MS);
    assert_untouched(&mut files);
}

#[test]
fn files_of_the_program_stay_untouched() {
    in_child(module_path!(), "files_of_the_program_stay_untouched", &[], || {
        for source in [Source::Timer, Source::Perf, Source::None] {
            for writes in [false, true] {
                closes_all(source, writes, 4, 50 * MS);
            }
        }
    });
}

#[test]
fn files_stay_untouched_while_no_thread_is_in_a_span() {
    in_child(module_path!(), "files_stay_untouched_while_no_thread_is_in_a_span", &[], || {
        for source in [Source::Timer, Source::Perf] {
            closes_all(source, true, 1, Duration::from_millis(1_500));
        }
    });
}

/// Closes all descriptors while two layers exist, then drops one and shuts down the other.
#[test]
fn dropping_a_layer_later_closes_nothing() {
    in_child(module_path!(), "dropping_a_layer_later_closes_nothing", &[], || {
        for source in [Source::Timer, Source::Perf] {
            let hosts = [Host::new(source, Memory::new()), Host::new(source, Memory::new())];
            for host in &hosts {
                host.span(|| _ = burn(20 * MS));
                host.handle.flush(PLENTY).unwrap();
            }
            close_all();
            let mut files = open_files();
            let [first, second] = hosts;
            drop(first);
            _ = second.handle.shutdown(PLENTY);
            drop(second);
            std::thread::sleep(100 * MS);
            assert_untouched(&mut files);
        }
    });
}
