//! A program that becomes a daemon: it goes on in the child of a fork, and the process that made the layer
//! ends.

use std::time::Instant;

use tracing_profiling::Source;
use tracing_profiling::export::Memory;

use super::{Host, MS, in_child};
use crate::support::{PLENTY, burn};

/// Forks so many times, and ends each parent. `daemon` is what the last one does.
fn become_daemon(forks: u32, file: &std::path::Path, daemon: impl FnOnce()) {
    for _ in 0..forks {
        // SAFETY: the child uses spans, which is what this is about.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child > 0 {
            // SAFETY: this process is done.
            unsafe { libc::_exit(0) };
        }
    }
    let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(daemon));
    std::fs::write(file, if ended.is_ok() { "well" } else { "not well" }).unwrap();
    // SAFETY: as above.
    unsafe { libc::_exit(0) };
}

#[test]
fn a_daemon_says_that_profiling_has_ended() {
    in_child(module_path!(), "a_daemon_says_that_profiling_has_ended", &[], || {
        for source in [Source::Perf, Source::Timer, Source::None] {
            for forks in [1, 2] {
                let folder = tempfile::tempdir().unwrap();
                let file = folder.path().join("ended");
                let daemon_file = file.clone();
                super::alone(move || {
                    let host = Host::new(source, Memory::new());
                    host.span(|| _ = burn(5 * MS));
                    become_daemon(forks, &daemon_file, || {
                        let said = || host.lines_with("was forked from").len();
                        let start = Instant::now();
                        while said() == 0 {
                            assert!(start.elapsed() < PLENTY, "nothing is said");
                            host.span(|| {});
                        }
                        (0..100).for_each(|_| host.span(|| {}));
                        assert_eq!(said(), 1);
                    });
                });
                let start = Instant::now();
                while !std::fs::read_to_string(&file).is_ok_and(|text| !text.is_empty()) {
                    assert!(start.elapsed() < PLENTY, "the daemon does not end");
                    std::thread::sleep(MS);
                }
                assert_eq!(std::fs::read_to_string(&file).unwrap(), "well");
            }
        }
    });
}

/// Its parent goes on, and so does profiling.
#[test]
fn a_child_beside_its_parent_says_nothing() {
    in_child(module_path!(), "a_child_beside_its_parent_says_nothing", &[], || {
        let host = Host::new(Source::Auto, Memory::new());
        host.span(|| _ = burn(5 * MS));
        super::alone(|| {
            super::alone(|| {
                (0..1_000).for_each(|_| host.span(|| {}));
                assert!(host.lines_with("was forked from").is_empty());
            });
        });
        host.span(|| _ = burn(5 * MS));
        assert!(host.handle.flush(PLENTY));
        assert_eq!(host.handle.stats().spans_kept, 2);
    });
}
