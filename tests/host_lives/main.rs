//! What must not end the host, or touch what is its own. Each test runs in a process of its own.

#![cfg(all(target_os = "linux", not(tracing_profiling_unsupported)))]
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stdout,
    unsafe_code,
    reason = "a test"
)]

#[path = "../support/mod.rs"]
mod support;

mod files;
mod filters;
mod forks;
mod memory;
mod signals;

use std::os::unix::process::ExitStatusExt as _;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use support::is_child;
use tracing::{Dispatch, info_span};
use tracing_profiling::export::Exporter;
use tracing_profiling::{Builder, Handle, ProfilingLayer, Source};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::prelude::*;

const MS: Duration = Duration::from_millis(1);

/// Runs `body` in a process of its own, which is this very program with that one test.
fn in_child(module: &str, test: &str, variables: &[(&str, &str)], body: impl FnOnce()) {
    let (_, module) = module.split_once("::").unwrap();
    let test = format!("{module}::{test}");
    if is_child(&test) {
        alone(body);
        println!("child is done");
        return;
    }
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &test, "--nocapture", "--include-ignored", "--test-threads=1"])
        .env("CHILD", &test)
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    let is_well = output.status.success() && text.contains("child is done");
    assert!(is_well, "{}\n{text}\n{errors}", output.status);
}

/// The harness has a thread of its own, in which signals are not blocked. In the child of a fork there is
/// none but the one that forks: this is the program's `main`.
fn alone(body: impl FnOnce()) {
    // SAFETY: the only other thread waits for the end of this one, and holds no lock.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        hang_no_longer();
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
        // SAFETY: ends this process, and nothing that belongs to the parent.
        unsafe { libc::_exit(i32::from(ended.is_err())) };
    }
    let mut status = 0;
    // SAFETY: a child of ours; the status is of ours.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(std::process::ExitStatus::from_raw(status).code(), Some(0), "{status}");
}

/// What hangs ends this process: it would hold the output open, for which the test waits.
fn hang_no_longer() {
    // SAFETY: the signal is nobody else's here, and ends the process.
    unsafe { libc::alarm(300) };
}

/// A layer whose lines of log can be read.
struct Host {
    handle: Handle,
    dispatch: Dispatch,
    lines: Lines,
}

impl Host {
    fn new(source: Source, exporter: impl Exporter + 'static) -> Self {
        Self::with(source, exporter, |builder| builder)
    }

    fn with(
        source: Source,
        exporter: impl Exporter + 'static,
        set: impl FnOnce(Builder) -> Builder,
    ) -> Self {
        let builder = ProfilingLayer::builder()
            .rules("0ms".parse().unwrap())
            .rate(200)
            .arm_after(Duration::ZERO)
            .cpu_budget(0)
            .source(source)
            .exporter(exporter);
        let layer = set(builder).build().unwrap();
        let (handle, lines) = (layer.handle(), Lines::default());
        let registry = tracing_subscriber::registry().with(lines.clone()).with(layer);
        Self { handle, dispatch: Dispatch::new(registry), lines }
    }

    /// One kept span.
    fn span(&self, work: impl FnOnce()) {
        tracing::dispatcher::with_default(&self.dispatch, || info_span!("kept").in_scope(work));
    }

    fn lines_with(&self, part: &str) -> Vec<String> {
        let lines = self.lines.0.lock().unwrap();
        lines.iter().filter(|line| line.contains(part)).cloned().collect()
    }
}

/// A layer that collects the messages of our own events.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<String>>>);

impl<S: tracing::Subscriber> Layer<S> for Lines {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        struct Message(String);
        impl tracing::field::Visit for Message {
            fn record_debug(&mut self, _: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                self.0 = format!("{value:?}");
            }
        }
        if event.metadata().target() == "tracing_profiling" {
            let mut message = Message(String::new());
            event.record(&mut message);
            println!("{}", message.0);
            self.0.lock().unwrap().push(message.0);
        }
    }
}
