//! A program that closes all files, as one does that becomes a daemon: among them are ours. What it opens
//! then under their numbers is its own.

use std::fs::{self, File};
use std::io::{Read as _, Seek as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::time::{Duration, Instant};

use tracing_profiling::export::Memory;
use tracing_profiling::{Directory, Source};

use super::{Host, MS, in_child};
use crate::support::{PLENTY, burn};

const CONTENT: &[u8] = b"of the program alone, from its first byte to its last";

fn close_all() {
    // SAFETY: this is the point: whose files they are the program does not ask.
    assert_eq!(unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0) }, 0);
}

/// As many as there may be files of ours.
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

fn must_be_untouched(files: &mut [File]) {
    for file in files {
        let number = file.as_raw_fd();
        assert_eq!(file.stream_position().unwrap(), 0, "somebody has read from {number}");
        let mut content = Vec::new();
        file.read_to_end(&mut content).unwrap();
        assert_eq!(content, CONTENT, "somebody has written to {number}");
        file.rewind().unwrap();
    }
}

/// `idle` before spans are used again, and while nothing is sampled if that is long enough.
fn closes_all(source: Source, writes: bool, threads: usize, idle: Duration) {
    let folder = tempfile::tempdir().unwrap();
    let host = match writes {
        true => {
            let directory = Directory::new(folder.path());
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
    // Whoever is in the middle of reading or writing a file when it is closed cannot know.
    assert!(host.handle.flush(PLENTY));
    close_all();
    let mut files = open_files();
    std::thread::sleep(idle);
    rounds(5);
    let start = Instant::now();
    while host.lines_with("profiling has ended").is_empty() {
        assert!(start.elapsed() < PLENTY, "nothing says that it has ended");
        host.span(|| _ = burn(MS));
        std::thread::sleep(MS);
    }
    // Threads are armed no more, and those that were give their timers back at their next hook.
    host.span(|| _ = burn(MS));
    let timers = || fs::read_to_string("/proc/self/timers").unwrap_or_default();
    while !timers().is_empty() {
        assert!(start.elapsed() < PLENTY, "{}", timers());
        std::thread::sleep(MS);
    }
    host.handle.flush(MS);
    host.handle.shutdown(MS);
    drop(host);
    std::thread::sleep(10 * MS);
    must_be_untouched(&mut files);
}

#[test]
fn files_of_the_program_stay_its_own() {
    in_child(module_path!(), "files_of_the_program_stay_its_own", &[], || {
        for source in [Source::Timer, Source::Perf, Source::None] {
            for writes in [false, true] {
                closes_all(source, writes, 4, 50 * MS);
            }
        }
    });
}

#[test]
fn also_while_nobody_is_in_a_span() {
    in_child(module_path!(), "also_while_nobody_is_in_a_span", &[], || {
        for source in [Source::Timer, Source::Perf] {
            closes_all(source, true, 1, Duration::from_millis(1_500));
        }
    });
}

/// Two layers, of which one is gone.
#[test]
fn what_is_dropped_later_closes_nothing() {
    in_child(module_path!(), "what_is_dropped_later_closes_nothing", &[], || {
        for source in [Source::Timer, Source::Perf] {
            let hosts = [Host::new(source, Memory::new()), Host::new(source, Memory::new())];
            for host in &hosts {
                host.span(|| _ = burn(20 * MS));
                assert!(host.handle.flush(PLENTY));
            }
            close_all();
            let mut files = open_files();
            let [first, second] = hosts;
            drop(first);
            second.handle.shutdown(PLENTY);
            drop(second);
            std::thread::sleep(100 * MS);
            must_be_untouched(&mut files);
        }
    });
}
