//! What must neither end the host nor touch what it owns. Each test runs in its own process.

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

mod continuous;
mod files;
mod filters;
mod forks;
mod idle_threads;
mod limits;
mod memory;
mod nested;
mod refusals;
mod signal_stacks;
mod signals;
mod timer_signal;
mod values;
mod whole_process;

use std::os::unix::process::ExitStatusExt as _;
use std::sync::{Arc, Mutex, RwLock};
use std::time::Duration;

use support::is_child;
use tracing::{Dispatch, info_span};
use tracing_profiling::export::Exporter;
use tracing_profiling::{Builder, Handle, ProfilingLayer, Source};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::prelude::*;

const MS: Duration = Duration::from_millis(1);

/// The memory that perf events lock and the signals of timers are limited for all processes of a user together.
static USER: RwLock<()> = RwLock::new(());

/// Runs `body` in its own process: this test program, run again with only that test.
fn in_child(module: &str, test: &str, variables: &[(&str, &str)], body: impl FnOnce()) {
    let _shared = USER.read();
    run_in_child(module, test, variables, body);
}

/// The same while no other test runs.
fn in_only_child(module: &str, test: &str, body: impl FnOnce()) {
    let _alone = USER.write();
    run_in_child(module, test, &[], body);
}

fn run_in_child(module: &str, test: &str, variables: &[(&str, &str)], body: impl FnOnce()) {
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
    let succeeded = output.status.success() && text.contains("child is done");
    assert!(succeeded, "{}\n{text}\n{errors}", output.status);
}

/// Runs `body` in a forked child, whose only thread stands in for the program's `main`. The test harness has another
/// thread, in which signals are not blocked.
fn alone(body: impl FnOnce()) {
    // SAFETY: the only other thread waits for this one to end and holds no lock.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        end_if_hanging();
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
        // SAFETY: ends this process without touching the parent's state.
        unsafe { libc::_exit(i32::from(ended.is_err())) };
    }
    let mut status = 0;
    // SAFETY: `child` is our child, and `status` a local variable.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(std::process::ExitStatus::from_raw(status).code(), Some(0), "{status}");
}

/// Ends a process that hangs: it would hold the output open, and the test waits for that to close.
fn end_if_hanging() {
    // SAFETY: nothing else here uses this signal, which ends the process.
    unsafe { libc::alarm(300) };
}

/// A layer whose log lines can be read.
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
            .sampling_delay(Duration::ZERO)
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

/// A layer that collects the messages and fields of `tracing_profiling`'s own events.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<String>>>);

impl<S: tracing::Subscriber> Layer<S> for Lines {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        struct Message(String);
        impl tracing::field::Visit for Message {
            fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                match field.name() {
                    "message" => self.0.insert_str(0, &format!("{value:?}")),
                    name => self.0.push_str(&format!(" {name}={value:?}")),
                }
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
