//! Rules that are reloaded on SIGHUP.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

mod support;

use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use signal_hook::consts::SIGHUP;
use support::{PLENTY, Setup, is_child, run_child};
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber, info_span};
use tracing_profiling::{Handle, ProfilingLayer};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::prelude::*;

/// Runs the body in its own process, which may change its environment and receive signals.
macro_rules! in_child {
    (fn $name:ident() $body:block) => {
        #[test]
        fn $name() {
            if is_child(stringify!($name)) {
                $body
                return;
            }
            let output = run_child(stringify!($name), &[("TRACING_PROFILING", "")]);
            let (out, err) = (&output.stdout, &output.stderr);
            let text = format!("{}{}", String::from_utf8_lossy(out), String::from_utf8_lossy(err));
            assert!(output.status.success(), "{}\n{text}", output.status);
            assert!(text.contains("1 passed"), "{text}");
        }
    };
}

/// The log messages of the layer about SIGHUP.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<String>>>);

impl<S: Subscriber> Layer<S> for Lines {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        struct Message(String);
        impl Visit for Message {
            fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
                if field.name() == "message" {
                    self.0 = format!("{value:?}");
                }
            }
        }
        let mut message = Message(String::new());
        event.record(&mut message);
        if message.0.contains("SIGHUP") {
            let level = event.metadata().level();
            self.0.lock().unwrap().push(format!("{level} {}", message.0));
        }
    }
}

impl Lines {
    fn len(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    fn last(&self) -> String {
        self.0.lock().unwrap().last().unwrap().clone()
    }
}

fn set_variable(rules: &str) {
    // SAFETY: this process reads the environment only through `std`, which has a lock for it.
    #[allow(unsafe_code, reason = "unsafe since edition 2024")]
    unsafe {
        std::env::set_var("TRACING_PROFILING", rules);
    }
}

fn kill() {
    let id = std::process::id().to_string();
    assert!(Command::new("kill").args(["-HUP", &id]).status().unwrap().success());
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PLENTY, "timed out waiting until {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Sets the variable, sends the signal, and waits until the result is logged.
fn reload(rules: &str, lines: &Lines) {
    set_variable(rules);
    let before = lines.len();
    kill();
    wait_until("a message is logged", || lines.len() > before);
}

fn subscribed(rules: &str) -> (Handle, Lines) {
    let lines = Lines::default();
    let builder = ProfilingLayer::builder().rules(rules.parse().unwrap());
    let layer = builder.exporter(tracing_profiling::export::Memory::new());
    let layer = layer.reload_on_sighup().build().unwrap();
    let handle = layer.handle();
    tracing_subscriber::registry().with(layer).with(lines.clone()).init();
    (handle, lines)
}

fn kept(handle: &Handle) -> u64 {
    info_span!("any").in_scope(|| ());
    handle.flush(PLENTY).unwrap();
    handle.stats().spans.kept
}

/// The number of the layer's threads that wait for the signal.
fn waiting_threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.flatten().map(|task| std::fs::read_to_string(task.path().join("comm")));
    names.flatten().filter(|name| name.trim() == "profiling-rules").count()
}

in_child! {
    fn sighup_reloads_the_rules() {
        let (handle, lines) = subscribed("1h");
        assert_eq!(kept(&handle), 0);
        reload("0ms", &lines);
        assert_eq!(lines.last(), "INFO SIGHUP: the rules are now `0s`");
        assert_eq!(kept(&handle), 1);
        reload("off", &lines);
        assert!(!handle.is_enabled());
        assert_eq!(kept(&handle), 1);
        // Without the variable, the builder's rules apply.
        reload("", &lines);
        assert_eq!(handle.rules().to_string(), "1h");
        for number in 1..=20 {
            reload(&format!("{number}s"), &lines);
            assert_eq!(handle.rules().to_string(), format!("{number}s"));
        }
        handle.set_enabled(false).unwrap();
        reload("3h", &lines);
        assert!(!handle.is_enabled(), "still disabled");
        assert_eq!(handle.rules().to_string(), "3h");
        assert_eq!(waiting_threads(), usize::from(cfg!(target_os = "linux")));
    }
}

in_child! {
    fn invalid_rules_cause_one_warning() {
        let (handle, lines) = subscribed("0ms");
        reload("shop=fast", &lines);
        assert_eq!(lines.len(), 1);
        let line = lines.last();
        assert!(line.starts_with("WARN "), "{line}");
        // In one line, whatever the variable contains.
        assert!(line.contains(r"shop=fast\n       ^"), "{line}");
        assert_eq!(handle.rules().to_string(), "0s");
        assert_eq!(kept(&handle), 1);
    }
}

in_child! {
    fn a_layer_that_is_off_is_turned_on() {
        let (handle, lines) = subscribed("off");
        assert!(!handle.is_enabled());
        reload("0ms", &lines);
        assert!(handle.is_enabled());
        assert_eq!(kept(&handle), 1);
    }
}

in_child! {
    fn earlier_handlers_are_still_called() {
        let before = Arc::new(AtomicUsize::new(0));
        // By the bare system call, as in a program without `signal-hook`.
        static CALLS: AtomicUsize = AtomicUsize::new(0);
        extern "C" fn handler(_: i32) {
            CALLS.fetch_add(1, Ordering::Relaxed);
        }
        let new = nix::sys::signal::SigAction::new(
            nix::sys::signal::SigHandler::Handler(handler),
            nix::sys::signal::SaFlags::SA_RESTART,
            nix::sys::signal::SigSet::empty(),
        );
        // SAFETY: the handler only increments a counter.
        #[allow(unsafe_code, reason = "as in a program")]
        unsafe { nix::sys::signal::sigaction(nix::sys::signal::Signal::SIGHUP, &new) }.unwrap();
        let (_handle, lines) = subscribed("1h");
        let after = Arc::clone(&before);
        // SAFETY: the same.
        #[allow(unsafe_code, reason = "as in a program")]
        unsafe {
            signal_hook::low_level::register(SIGHUP, move || {
                after.fetch_add(1, Ordering::Relaxed);
            })
        }
        .unwrap();
        reload("2h", &lines);
        assert_eq!(CALLS.load(Ordering::Relaxed), 1);
        // `signal-hook` calls it after the layer's action, and may not have done so yet.
        wait_until("the other is called", || before.load(Ordering::Relaxed) == 1);
    }
}

in_child! {
    fn the_signal_thread_ends_with_the_layer() {
        let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        // The first layer opens files that stay open for the lifetime of the process.
        let first = Setup::with("off", |builder| builder.reload_on_sighup());
        wait_until("the first waits", || waiting_threads() == 1);
        drop(first);
        wait_until("the first has ended", || waiting_threads() == 0);
        let before = open();
        let Setup { dispatch, .. } = Setup::with("off", |builder| builder.reload_on_sighup());
        wait_until("it waits", || waiting_threads() == 1);
        drop(dispatch);
        wait_until("it has ended", || waiting_threads() == 0);
        assert_eq!(open(), before);
        // The signal has no effect, and does not end the process.
        kill();

        let setup = Setup::with("0ms", |builder| builder.reload_on_sighup());
        wait_until("it waits", || waiting_threads() == 1);
        setup.handle.shutdown(PLENTY).unwrap();
        wait_until("it has ended", || waiting_threads() == 0);
        kill();
    }
}

in_child! {
    fn sighup_keeps_its_default_action_unless_requested() {
        let has_default = || {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
            u64::from_str_radix(caught.trim(), 16).unwrap() & 1 << (SIGHUP - 1) == 0
        };
        let setup = Setup::new("0ms");
        assert!(has_default());
        assert_eq!(waiting_threads(), 0);
        drop(setup);
        let _asked = Setup::with("off", |builder| builder.reload_on_sighup());
        assert!(!has_default());
    }
}
