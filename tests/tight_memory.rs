//! A process that may not use more memory than it needs without the layer.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "a test")]

mod support;

use std::process::{Command, Output};
use std::time::Duration;

use support::{HAS_STACKS, burn};
use tracing::info_span;
use tracing_profiling::{Directory, ProfilingLayer};
use tracing_subscriber::prelude::*;

const MODE: &str = "TIGHT_MEMORY_MODE";

/// The child, which runs with a limit.
#[test]
fn child() {
    let Ok(mode) = std::env::var(MODE) else { return };
    let directory = tempfile::tempdir().unwrap();
    let builder = ProfilingLayer::builder().exporter(Directory::new(directory.path()));
    let builder = match mode.as_str() {
        "off" => builder.rules("off".parse().unwrap()),
        source => builder.rules("0ms".parse().unwrap()).source(source.parse().unwrap()),
    };
    // If the layer cannot be built, the program still does its work.
    match builder.build() {
        Ok(layer) => {
            let handle = layer.handle();
            let subscriber = tracing_subscriber::registry().with(layer);
            tracing::subscriber::with_default(subscriber, work);
            _ = handle.flush(Duration::from_secs(60));
        }
        Err(error) => {
            println!("{error}");
            work();
        }
    }
    println!("{}", std::fs::read_to_string("/proc/self/status").unwrap());
}

fn work() {
    for _ in 0..2 {
        info_span!("busy").in_scope(|| burn(Duration::from_millis(30)));
        info_span!("waiting").in_scope(|| std::thread::sleep(Duration::from_millis(30)));
    }
}

fn run(mode: &str, limit: Option<(&str, u64)>) -> Option<Output> {
    let this = std::env::current_exe().unwrap();
    let mut command = match limit {
        Some((what, bytes)) => {
            let mut command = Command::new("prlimit");
            command.arg(format!("--{what}={bytes}")).arg(this);
            command
        }
        None => Command::new(this),
    };
    // The standard library deadlocks if it has no memory for a backtrace.
    command.args(["--exact", "child", "--nocapture", "--test-threads=1"]);
    command.env(MODE, mode).env("RUST_BACKTRACE", "0");
    command.output().ok()
}

#[test]
fn with_tight_memory_the_layer_does_not_end_the_program() {
    if !HAS_STACKS {
        // The limits of other systems are not read.
        return;
    }
    let text = String::from_utf8(run("off", None).unwrap().stdout).unwrap();
    let field = |name: &str| {
        let line = text.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
    };
    let mut refused = Vec::new();
    for (what, needed) in [("as", field("VmPeak:")), ("data", field("VmData:"))] {
        for more in [0, 1, 2, 4, 8, 16, 32, 64, 128] {
            let limit = Some((what, needed + (more << 20)));
            let Some(off) = run("off", limit) else { return };
            if !off.status.success() {
                continue;
            }
            for source in ["timer", "perf", "none"] {
                let output = run(source, limit).unwrap();
                let errors = String::from_utf8_lossy(&output.stderr);
                assert!(
                    output.status.success(),
                    "{what} + {more} MiB, {source}: {}: {errors}",
                    output.status
                );
                if String::from_utf8_lossy(&output.stdout)
                    .contains("profiling needs 14 MiB of memory")
                {
                    refused.push((what, more));
                }
            }
        }
    }
    assert!(!refused.is_empty() || !support::HAS_STACKS, "too little memory is reported as such");
    assert!(refused.iter().all(|(_, more)| *more < 64), "{refused:?}");
}
