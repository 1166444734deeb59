//! A program with the subscriber of the README, and the layer or not. It prints the port that it serves, or 0, and answers
//! each line of its input.

#![allow(clippy::expect_used, clippy::panic, clippy::print_stdout, reason = "a bench")]

mod callsites;
mod grpc;
mod sqlx_requests;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cpu_time::ProcessTime;
use tracing_profiling::ProfilingLayer;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::prelude::*;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, program, layer] = &arguments[..] else { panic!("{arguments:?}") };
    // Nothing is printed, since that has its price with the layer and without.
    let fmt = tracing_subscriber::fmt::layer().with_writer(std::io::sink);
    let fmt = fmt.with_filter(EnvFilter::new("info"));
    let registry = tracing_subscriber::registry().with(fmt);
    match layer.as_str() {
        "without" => registry.init(),
        // With the variables of the environment, such as `TRACING_PROFILING=off`.
        "with" => registry.with(ProfilingLayer::from_env().expect("settings")).init(),
        _ => panic!("{layer}"),
    }
    match program.as_str() {
        "callsites" => callsites::run(),
        "grpc" => grpc::run(),
        "sqlx" => sqlx_requests::run(),
        _ => panic!("{program}"),
    }
}

/// What a program has done so far.
#[derive(Clone, Default)]
struct Done(Arc<AtomicU64>);

impl Done {
    fn count(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// Answers `read` with the CPU time of this process in nanoseconds and the count, until the input ends. Other lines go
    /// to `action`.
    fn answer(&self, mut action: impl FnMut(&str)) {
        for line in std::io::stdin().lines() {
            match line.expect("a pipe").as_str() {
                "read" => {
                    let ns = ProcessTime::now().as_duration().as_nanos();
                    println!("{ns} {}", self.0.load(Ordering::Relaxed));
                }
                line => action(line),
            }
        }
    }
}
