//! The host program: a layer, and threads that are sampled throughout.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tracing::info_span;

use crate::support::{PLENTY, Setup, burn, has_perf};

const MS: Duration = Duration::from_millis(1);

pub(crate) struct Host {
    pub(crate) setup: Setup,
    sampled_at_first: AtomicBool,
}

/// Makes a layer, runs `action` while other threads burn CPU time in spans, and asserts that the layer shuts down in
/// time.
pub(crate) fn sampled(action: impl FnOnce(&Host)) {
    sampled_at(1_000, "0ms", action);
}

pub(crate) fn sampled_at(hertz: u32, rules: &str, action: impl FnOnce(&Host)) {
    let host = Host::start(hertz, rules);
    host.while_burning(|| action(&host));
    host.end();
}

impl Host {
    /// The subscriber is the global default, as in a real program, so all threads are profiled.
    pub(crate) fn start(hertz: u32, rules: &str) -> Self {
        // In the programs that have the allocator, many of its calls are samples.
        let setup = Setup::with(rules, |builder| {
            builder.rate(hertz).heap(true).alloc_sample_interval(16 << 10).with_env().unwrap()
        });
        tracing::dispatcher::set_global_default(setup.dispatch.clone()).unwrap();
        Self { setup, sampled_at_first: AtomicBool::new(false) }
    }

    /// Whether threads are being sampled. If not, nothing is asserted about samples.
    pub(crate) fn is_sampling(&self) -> bool {
        self.setup.handle.stats().threads.sampled > 0
    }

    pub(crate) fn while_burning<R>(&self, action: impl FnOnce() -> R) -> R {
        /// Stops the threads also when `action` panics, since the scope would otherwise wait forever.
        struct Stop<'a>(&'a AtomicBool);
        impl Drop for Stop<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }

        let stop = AtomicBool::new(false);
        let begun = Barrier::new(3);
        std::thread::scope(|scope| {
            let _stop = Stop(&stop);
            for _ in 0..2 {
                scope.spawn(|| {
                    // Enough for some samples, whatever `action` does.
                    info_span!("burner begins").in_scope(|| burn(50 * MS));
                    begun.wait();
                    while !stop.load(Ordering::Relaxed) {
                        info_span!("burner").in_scope(|| burn(2 * MS));
                    }
                    info_span!("burner ends").in_scope(|| burn(50 * MS));
                });
            }
            begun.wait();
            println!("threads are sampled: {}", self.is_sampling());
            self.sampled_at_first.store(self.is_sampling(), Ordering::Relaxed);
            action()
        })
    }

    pub(crate) fn end(&self) {
        self.setup.flush();
        let stats = self.setup.handle.stats();
        println!("{stats:?}");
        assert!(stats.spans.kept > 0);
        assert_eq!(stats.sampling.records_malformed, 0);
        if std::env::var("TRACING_PROFILING_SOURCE").is_ok_and(|source| source == "perf") {
            // Fails if CI expects perf events and they are refused.
            has_perf();
        }
        if self.sampled_at_first.load(Ordering::Relaxed) {
            assert!(stats.samples.taken > 0);
            assert!(stats.profiles.exported > 0);
        }
        self.setup.handle.shutdown(PLENTY).unwrap();
        // The program continues to use spans after the shutdown.
        info_span!("after the shutdown").in_scope(|| burn(MS));
    }
}

/// Calls `action` until `time` has passed, and at least once.
pub(crate) fn repeat_for(time: Duration, mut action: impl FnMut()) {
    let start = Instant::now();
    loop {
        action();
        if start.elapsed() >= time {
            return;
        }
    }
}
