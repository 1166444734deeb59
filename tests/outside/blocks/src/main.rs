//! Which waits are said to block an async executor, in the build profile that this is built with. Prints a table. Fails if a wait
//! is accused that blocks none, or if one is not that does while the build has what shows it: `blocks FOUND`, where `FOUND` is
//! `found` or `missed`.

mod cases;

use std::process::ExitCode;
use std::time::Duration;

use cases::{CASES, Case, Truth};
use tracing_profiling::export::Memory;
use tracing_profiling::profile::Profile;
use tracing_profiling::{Handle, ProfilingLayer};
use tracing_subscriber::prelude::*;

const LIMIT: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    let expected = std::env::args().nth(1).expect("`found` or `missed`");
    let memory = Memory::new();
    let layer = ProfilingLayer::builder()
        .rules("off,[case]=10ms".parse().unwrap())
        .exporter(memory.clone())
        .profiles_per_minute(1_000)
        .build()
        .unwrap();
    let handle = layer.handle();
    tracing_subscriber::registry().with(layer).init();
    let mut is_right = true;
    for case in &CASES {
        let is_accused = is_accused(case, &handle, &memory);
        let is_expected = match case.truth {
            Truth::Blocks => is_accused == (expected == "found"),
            Truth::MayBlock => !is_accused,
            Truth::BlocksUnseen => true,
        };
        is_right &= is_expected;
        let remark = if is_expected { "" } else { "  WRONG" };
        println!("{:38} {:12} {is_accused}{remark}", case.name, format!("{:?}", case.truth));
    }
    if is_right { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs a case with longer and longer waits, until the sleep was seen.
fn is_accused(case: &Case, handle: &Handle, memory: &Memory) -> bool {
    let mut time = Duration::from_millis(40);
    loop {
        (case.run)(time);
        handle.flush(LIMIT).unwrap();
        let profiles = memory.take();
        if let Some(profile) = profiles.iter().find(|profile| has_seen(profile, time)) {
            if std::env::var_os("STACKS").is_some() {
                println!("{}", stacks(profile));
            }
            return !profile.waits().in_async_total.is_zero();
        }
        time *= 2;
        assert!(time < LIMIT, "{} was not seen to wait", case.name);
    }
}

fn has_seen(profile: &Profile, time: Duration) -> bool {
    let waits = profile.waits();
    waits.longest.is_some_and(|longest| longest.waited > time / 2)
}

/// The functions of all stacks, to find out why.
fn stacks(profile: &Profile) -> String {
    let mut text = String::new();
    for sample in profile.samples() {
        for location in profile.stack(sample.stack) {
            for line in &location.lines {
                let function = profile.function(line.function).unwrap();
                text += &format!("    {} {}:{}\n", function.name, function.file, line.line);
            }
            if location.lines.is_empty() {
                text += &format!("    {:#x} of {:?}\n", location.address, location.mapping);
            }
        }
        text.push('\n');
    }
    text
}
