//! A program that becomes a daemon: it continues in the child of a fork, and the process that made the layer
//! exits.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use tracing::{Dispatch, Event, Subscriber};
use tracing_profiling::export::Memory;
use tracing_profiling::{FlushError, ProfilingLayer, Source};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::{Context, SubscriberExt as _};

use super::{Host, MS, alone, end_if_hanging, in_child};
use crate::support::{PLENTY, burn};

/// Forks `forks` times and exits each parent. The last child runs `daemon`.
fn become_daemon(forks: u32, file: &std::path::Path, daemon: impl FnOnce()) {
    for _ in 0..forks {
        // SAFETY: using spans in the child is what this test is about.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child > 0 {
            // SAFETY: this process has nothing left to do.
            unsafe { libc::_exit(0) };
        }
    }
    end_if_hanging();
    let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(daemon));
    std::fs::write(file, if ended.is_ok() { "well" } else { "not well" }).unwrap();
    // SAFETY: as above.
    unsafe { libc::_exit(0) };
}

#[test]
fn a_daemon_logs_that_profiling_has_ended() {
    in_child(module_path!(), "a_daemon_logs_that_profiling_has_ended", &[], || {
        for source in [Source::Perf, Source::Timer, Source::None] {
            for forks in [1, 2] {
                let dir = tempfile::tempdir().unwrap();
                let file = dir.path().join("ended");
                let daemon_file = file.clone();
                alone(move || {
                    let host = Host::new(source, Memory::new());
                    host.span(|| _ = burn(5 * MS));
                    become_daemon(forks, &daemon_file, || {
                        let logged = || host.lines_with("was forked from").len();
                        let start = Instant::now();
                        while logged() == 0 {
                            assert!(start.elapsed() < PLENTY, "nothing is logged");
                            host.span(|| {});
                        }
                        (0..100).for_each(|_| host.span(|| {}));
                        assert_eq!(logged(), 1);
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

/// The parent continues, and so does its profiling.
#[test]
fn a_child_with_a_live_parent_logs_nothing() {
    in_child(module_path!(), "a_child_with_a_live_parent_logs_nothing", &[], || {
        let host = Host::new(Source::Auto, Memory::new());
        host.span(|| _ = burn(5 * MS));
        alone(|| {
            alone(|| {
                (0..1_000).for_each(|_| host.span(|| {}));
                assert!(host.lines_with("was forked from").is_empty());
                assert_eq!(host.handle.flush(MS), Err(FlushError::Forked));
                assert_eq!(host.handle.shutdown(MS), Err(FlushError::Forked));
            });
        });
        host.span(|| _ = burn(5 * MS));
        host.handle.flush(PLENTY).unwrap();
        assert_eq!(host.handle.stats().spans.kept, 2);
    });
}

/// The layer's threads log, but the logger's lock belongs to the program: it must be free in the child.
#[test]
fn a_child_can_log_whenever_it_was_forked() {
    /// A logger with a lock, as any logger that writes to one destination has.
    #[derive(Clone, Default)]
    struct Log(Arc<(Mutex<()>, AtomicBool)>);

    impl<S: Subscriber> Layer<S> for Log {
        fn on_event(&self, _: &Event<'_>, _: Context<'_, S>) {
            let (lock, is_locked) = &*self.0;
            let _locked = lock.lock().unwrap();
            is_locked.store(true, Ordering::SeqCst);
            std::thread::sleep(50 * MS);
        }
    }

    in_child(module_path!(), "a_child_can_log_whenever_it_was_forked", &[], || {
        for _ in 0..5 {
            let log = Log::default();
            let layer = ProfilingLayer::builder()
                .source(Source::None)
                .exporter(Memory::new())
                .build()
                .unwrap();
            let dispatch =
                Dispatch::new(tracing_subscriber::registry().with(log.clone()).with(layer));
            // The layer logs which features are available.
            let start = Instant::now();
            while !log.0.1.load(Ordering::SeqCst) {
                assert!(start.elapsed() < PLENTY, "nothing is logged");
                std::thread::sleep(MS);
            }
            alone(|| {
                tracing::dispatcher::with_default(&dispatch, || tracing::info!("in the child"))
            });
        }
    });
}
