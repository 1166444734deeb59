//! Debug information in a separate file, or in a form that cannot be read: whatever happens to that file, the program
//! continues.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "a test")]

mod support;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use support::{HAS_STACKS, Setup, burn, taken_samples};
use tracing::info_span;

const MODE: &str = "SEPARATE_DEBUG_MODE";
const DEBUG_FILE: &str = "SEPARATE_DEBUG_FILE";

/// Makes a profile of `action`; returns whether it has the name of that function, and its lines.
fn profile(setup: &Setup, action: fn(), function: &str) -> (bool, bool) {
    setup.run(|| info_span!("busy").in_scope(action));
    let profile = setup.memory.take().pop().unwrap();
    let locations = taken_samples(&profile).flat_map(|sample| profile.stack(sample.stack));
    let lines = locations
        .flat_map(|location| &location.lines)
        .filter(|line| profile.function(line.function).unwrap().name.ends_with(function));
    let lines: Vec<_> = lines.collect();
    (!lines.is_empty(), lines.iter().any(|line| line.line > 0))
}

fn burn_a_while() {
    burn(Duration::from_millis(60));
}

/// Runs in a copy of this program whose debug information is in another file.
#[test]
fn child() {
    let Ok(mode) = std::env::var(MODE) else { return };
    let debug = std::env::var_os(DEBUG_FILE).map(PathBuf::from);
    let setup = Setup::new("0ms");
    println!("first {:?}", profile(&setup, burn_a_while, "::burn"));
    let Some(debug) = debug else { return };
    let whole = fs::read(&debug).unwrap();
    let overwrite = |bytes: &[u8]| {
        // In place, which also changes an existing mapping of the file.
        let file = File::options().write(true).open(&debug).unwrap();
        std::io::Write::write_all(&mut &file, bytes).unwrap();
        file.set_len(bytes.len() as u64).unwrap();
    };
    match mode.as_str() {
        "truncated" => overwrite(&[]),
        "shortened" => overwrite(&whole[..whole.len() / 3]),
        "scrambled" => overwrite(&whole.iter().map(|byte| !byte).collect::<Vec<_>>()),
        "removed" => fs::remove_file(&debug).unwrap(),
        _ => {}
    }
    // Another function, whose debug information was not read yet.
    for _ in 0..3 {
        println!("then {:?}", profile(&setup, sort_something, "::sort_something"));
    }
}

#[inline(never)]
fn sort_something() {
    let start = std::time::Instant::now();
    while start.elapsed() < Duration::from_millis(60) {
        let mut numbers: Vec<_> = (0..5_000_u64).map(|i| (i * 7_919 % 5_003).to_string()).collect();
        numbers.sort();
        std::hint::black_box(numbers);
    }
}

fn objcopy(arguments: &[&str], files: &[&Path]) -> bool {
    let run = Command::new("objcopy").args(arguments).args(files).status();
    run.is_ok_and(|status| status.success())
}

fn run(program: &Path, mode: &str, debug: Option<&Path>) -> String {
    let mut child = Command::new(program);
    child.args(["--exact", "child", "--nocapture"]).env(MODE, mode);
    if let Some(debug) = debug {
        child.env(DEBUG_FILE, debug);
    }
    let output = child.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{mode}: {}: {text}", output.status);
    text
}

/// A copy of this program without debug information, and the file with it.
fn separated(directory: &Path) -> Option<(PathBuf, PathBuf)> {
    let this = std::env::current_exe().unwrap();
    let (program, debug) = (directory.join("program"), directory.join("program.debug"));
    let link = format!("--add-gnu-debuglink={}", debug.display());
    let is_made = objcopy(&["--only-keep-debug"], &[&this, &debug])
        && objcopy(&["--strip-all", &link], &[&this, &program]);
    is_made.then_some((program, debug))
}

#[test]
fn a_damaged_or_removed_debug_file_does_no_harm() {
    let directory = tempfile::tempdir().unwrap();
    if !HAS_STACKS {
        return;
    }
    let Some((program, debug)) = separated(directory.path()) else { return };
    let whole = fs::read(&debug).unwrap();
    for mode in ["left", "truncated", "shortened", "scrambled", "removed"] {
        fs::write(&debug, &whole).unwrap();
        let text = run(&program, mode, Some(&debug));
        assert!(text.contains("first (true, true)"), "{mode}: {text}");
        assert_eq!(text.matches("then (true, true)").count(), 3, "{mode}: {text}");
    }
    // A file that was damaged before the start.
    fs::write(&debug, &whole[..whole.len() / 2]).unwrap();
    assert!(run(&program, "left", Some(&debug)).contains("first (false, false)"));
}

#[test]
fn functions_have_names_with_any_compression_of_debug_sections() {
    if !HAS_STACKS {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let this = std::env::current_exe().unwrap();
    for (how, expected) in [("zlib", "first (true, true)"), ("zstd", "first (true, false)")] {
        let program = directory.path().join(how);
        if !objcopy(&[&format!("--compress-debug-sections={how}")], &[&this, &program]) {
            continue;
        }
        let text = run(&program, "left", None);
        assert!(text.contains(expected), "{how}: {text}");
    }
}
