//! Measuring, and printing the results.

use std::time::{Duration, Instant};

use tracing::Dispatch;
use tracing_profiling::export::Memory;
use tracing_profiling::{Builder, Handle, ProfilingLayer};
use tracing_subscriber::prelude::*;

/// Prints a figure.
pub(crate) fn figure(name: &str, value: f64, unit: &str) {
    let digits = match value.abs() {
        v if v >= 100.0 => 0,
        v if v >= 10.0 => 1,
        v if v >= 0.1 || v == 0.0 => 2,
        _ => 4,
    };
    println!("figure {name} {value:.digits$} {unit}");
}

pub(crate) fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 { values[middle] } else { (values[middle - 1] + values[middle]) / 2.0 }
}

/// Nanoseconds per run of `action`, over `count` runs.
pub(crate) fn time_each(count: u32, mut action: impl FnMut()) -> f64 {
    let start = Instant::now();
    for _ in 0..count {
        action();
    }
    start.elapsed().as_nanos() as f64 / f64::from(count)
}

/// Runs the variants in turn, `rounds` times, and returns the values of each.
pub(crate) fn interleave(rounds: usize, variants: &mut [&mut dyn FnMut() -> f64]) -> Vec<Vec<f64>> {
    let mut values = vec![Vec::with_capacity(rounds); variants.len()];
    for round in 0..=rounds {
        for (variant, values) in variants.iter_mut().zip(&mut values) {
            let value = variant();
            // The first round warms up.
            if round > 0 {
                values.push(value);
            }
        }
    }
    values
}

/// The median of the differences, round by round.
pub(crate) fn added(base: &[f64], with: &[f64]) -> f64 {
    let differences: Vec<f64> = with.iter().zip(base).map(|(with, base)| with - base).collect();
    median(&differences)
}

/// The median of the quotients, round by round.
pub(crate) fn ratio(base: &[f64], with: &[f64]) -> f64 {
    let quotients: Vec<f64> = with.iter().zip(base).map(|(with, base)| with / base).collect();
    median(&quotients)
}

/// A layer on a subscriber of its own that exports to memory.
pub(crate) struct Setup {
    pub(crate) dispatch: Dispatch,
    pub(crate) handle: Handle,
    pub(crate) memory: Memory,
}

impl Setup {
    /// Spans are sampled from their first enter.
    pub(crate) fn new(rules: &str, set: impl FnOnce(Builder) -> Builder) -> Self {
        Self::late(rules, |builder| set(builder.sampling_delay(Duration::ZERO)))
    }

    /// Spans are sampled once they are old.
    pub(crate) fn late(rules: &str, set: impl FnOnce(Builder) -> Builder) -> Self {
        let memory = Memory::new();
        let builder = ProfilingLayer::builder()
            .rules(rules.parse().expect("rules of this bench"))
            .exporter(memory.clone());
        let layer = set(builder).build().expect("threads");
        let handle = layer.handle();
        let dispatch = Dispatch::new(tracing_subscriber::registry().with(layer));
        Self { dispatch, handle, memory }
    }

    pub(crate) fn flush(&self) {
        self.handle.flush(Duration::from_secs(60)).expect("flushed");
    }
}

/// A fixed amount of work, about 100 µs.
pub(crate) fn work() -> u64 {
    work_for(40_000)
}

pub(crate) fn work_for(rounds: u64) -> u64 {
    let mut x = 1_u64;
    let mut i = 0;
    while i < rounds {
        x = std::hint::black_box((x ^ i) * 3 % 1_000_003);
        i += 1;
    }
    x
}

/// Runs a part of this bench in a process of its own, and returns its output. `part` may have arguments, and `prefix` is
/// the command that starts the process.
pub(crate) fn child(part: &str, prefix: &[&str]) -> String {
    let this = std::env::current_exe().expect("the path of this program");
    let this = this.to_str().expect("a path in UTF-8");
    let mut command: Vec<&str> = prefix.to_vec();
    command.extend([this, "--child"]);
    command.extend(part.split(' '));
    let output = std::process::Command::new(command[0])
        .args(&command[1..])
        .stderr(std::process::Stdio::inherit())
        .output()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}");
    String::from_utf8(output.stdout).expect("figures")
}

/// The command that starts a process as an unprivileged user.
pub(crate) fn unprivileged() -> &'static [&'static str] {
    let is_root = std::fs::read_to_string("/proc/self/status")
        .is_ok_and(|status| status.lines().any(|line| line.starts_with("Uid:\t0")));
    if is_root {
        &[
            "setpriv",
            "--reuid=65534",
            "--regid=65534",
            "--clear-groups",
            "--inh-caps=-all",
            "--bounding-set=-all",
        ]
    } else {
        &[]
    }
}
