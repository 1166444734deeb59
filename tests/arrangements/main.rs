//! In whatever arrangement of layers this one is, others receive exactly what they receive without it, and it receives the
//! spans that its rules want. Callsites, the maximum level and the default subscriber belong to a process, so each case
//! runs in its own.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::print_stdout,
    clippy::panic,
    clippy::unwrap_used,
    unsafe_code,
    reason = "a test"
)]

mod cases;
mod traffic;

use std::process::Command;

use cases::{CASES, Case, Wanted, level_of};
use traffic::{Mode, Seen, level_number};

/// How the subscriber becomes the default.
const SCOPES: [&str; 3] = ["global", "scoped", "two threads"];

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Some(at) = arguments.iter().position(|argument| argument == "--child") {
        let [name, rules, mode, scope, enabled @ ..] = &arguments[at + 1..] else {
            panic!("{arguments:?}")
        };
        let case = CASES.iter().find(|case| case.name == name).expect("a case");
        let seen = traffic::run(case, rules, Mode::named(mode), scope, enabled);
        println!("{}", serde_json::to_string(&seen).unwrap());
        return;
    }
    if arguments.iter().any(|argument| argument == "--list") {
        return println!("arrangements: test");
    }
    let wanted: Vec<_> = arguments.iter().filter(|one| !one.starts_with("--")).collect();
    let mut failed = Vec::new();
    println!(
        "{:<44} {:<26} {:<12} {:<6} what the program sees",
        "arrangement", "rules", "default", "mode"
    );
    // Each case in one way, or in all; .ci/nightly sets the variable.
    let is_thorough = std::env::var_os("PROFILING_TEST_ARRANGEMENTS").is_some();
    for (number, case) in CASES.iter().enumerate() {
        if !wanted.is_empty() && !wanted.iter().any(|wanted| case.name.contains(wanted.as_str())) {
            continue;
        }
        for (at, scope) in SCOPES.into_iter().enumerate() {
            if is_thorough || number % SCOPES.len() == at {
                for rules in case.rules(is_thorough) {
                    check(case, rules, scope, &mut failed);
                }
            }
        }
    }
    assert!(failed.is_empty(), "\n{}", failed.join("\n"));
    println!("arrangements: ok");
}

/// Runs a case. If it ends with the layer off, it waits until just `enabled` is enabled.
fn seen(case: &Case, rules: &str, mode: Mode, scope: &str, enabled: &[String]) -> Seen {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--child", case.name, rules, mode.name(), scope])
        .args(enabled)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let last = text.lines().last().and_then(|line| serde_json::from_str(line).ok());
    let errors = String::from_utf8_lossy(&output.stderr);
    last.unwrap_or_else(|| panic!("{} {mode:?} {scope}: {}\n{errors}", case.name, output.status))
}

/// Whether the log says that the layer cannot filter itself. It says nothing while it is off.
fn warns(case: &Case, mode: Mode) -> bool {
    case.warns && matches!(mode, Mode::On | Mode::OnLater | Mode::OffLater)
}

fn check(case: &Case, rules: &str, scope: &str, failed: &mut Vec<String>) {
    let without = seen(case, rules, Mode::Without, scope, &[]);
    let undisturbed = seen(case, rules, Mode::Undisturbed, scope, &[]);
    let level_of_rules = level_of(rules);
    let modes = [Mode::On, Mode::Off, Mode::OnLater, Mode::OffLater];
    let all = std::thread::scope(|threads| {
        let seen = modes.map(|mode| {
            let enabled = &without.enabled;
            threads.spawn(move || (mode, seen(case, rules, mode, scope, enabled)))
        });
        seen.map(|thread| thread.join().unwrap())
    });
    for (mode, with) in all {
        let mut fail = |what: String| {
            failed.push(format!("{}, {rules}, {scope}, {}: {what}", case.name, mode.name()))
        };
        println!("{:<44} {rules:<26} {scope:<12} {:<6} {}", case.name, mode.name(), with.levels());
        let is_on = matches!(mode, Mode::On | Mode::OnLater);
        let with_level = with.level;
        for (what, read) in [
            ("lines", (|seen| &seen.lines) as fn(&Seen) -> &Vec<String>),
            ("OpenTelemetry spans", |seen| &seen.exported),
            ("contexts", |seen| &seen.contexts),
            ("spans and events of a recorder", |seen| &seen.recorded),
        ] {
            let (with, without) = (read(&with), read(&without));
            if case.hides
                && with_level >= level_number("debug")
                && (is_on || !case.is_free)
                && ["OpenTelemetry spans", "contexts"].contains(&what)
            {
                continue;
            }
            // A question (`enabled!`) can disturb the filters of tracing-subscriber, so that they miss the next span or
            // line. With this layer they can be spared that, and then see what they do if nothing asks.
            if with != without && with != read(&undisturbed) {
                let only = |one: &[String], other: &[String]| -> Vec<String> {
                    let mut rest = other.to_vec();
                    let is_extra =
                        |line: &&String| match rest.iter().position(|other| other == *line) {
                            Some(at) => {
                                rest.remove(at);
                                false
                            }
                            None => true,
                        };
                    one.iter().filter(is_extra).cloned().collect()
                };
                let (missing, new) = (only(without, with), only(with, without));
                fail(format!("{what}: missing {missing:?}, new {new:?}"));
            }
        }
        // `DEBUG` spans are profiled if the rules enable them, or another layer wants them.
        let others_want = without.enabled.iter().any(|one| one == "any DEBUG");
        let has_debug = !matches!(case.wanted, Wanted::ToInfo)
            && with_level >= level_number("debug")
            && (level_of_rules == level_number("debug") || others_want || case.is_loose);
        let wanted = if is_on { case.wanted.names(has_debug) } else { Vec::new() };
        if with.profiled != wanted {
            fail(format!("profiled {:?} instead of {wanted:?}", with.profiled));
        }
        // What the program asks about itself.
        let free_level = match case.is_free {
            true if is_on => without.level.max(level_of_rules),
            true => without.level,
            false => with.level,
        };
        if with.level != free_level {
            fail(format!("the level is {}, not {free_level}", with.level));
        }
        if case.is_free {
            // `log` learns the level once, at the start.
            let at_start = if mode == Mode::OffLater { level_of_rules } else { free_level };
            let may_be = [without.log_level, without.log_level.max(at_start)];
            if !may_be.contains(&with.log_level) {
                fail(format!("the level of `log` is {}, not {may_be:?}", with.log_level));
            }
            if with.enabled != without.enabled {
                fail(format!("enabled {:?} instead of {:?}", with.enabled, without.enabled));
            }
        }
        if with.warnings != usize::from(warns(case, mode)) {
            fail(format!("{} warnings", with.warnings));
        }
    }
}
