//! Crates outside the workspace that follow only the README: they compile, run, and get a profile.

#![allow(clippy::unwrap_used, reason = "a test")]

mod support;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Builds a crate of `tests/outside` and runs it in that directory.
fn run(package: &str, dir: &Path) -> Output {
    cargo("run", package).current_dir(dir).output().unwrap()
}

/// The same with these features.
fn run_with(package: &str, features: &str, dir: &Path) -> Output {
    cargo("run", package).args(["--features", features]).current_dir(dir).output().unwrap()
}

fn target() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("target/outside")
}

fn cargo(action: &str, package: &str) -> Command {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut cargo = Command::new(env!("CARGO"));
    // A debug build, which is faster to build. It has its own target directory, since this build's is locked.
    cargo
        .args([action, "--quiet", "--locked", "--package", package, "--manifest-path"])
        .arg(root.join("tests/outside/Cargo.toml"))
        .arg("--target-dir")
        .arg(target())
        .env_remove("TRACING_PROFILING")
        // The flags of this build do not apply.
        .env_remove("RUSTFLAGS")
        .env_remove("RUSTC_WORKSPACE_WRAPPER");
    cargo
}

fn text(output: &Output) -> String {
    let (out, err) = (&output.stdout, &output.stderr);
    let text = format!("{}{}", String::from_utf8_lossy(out), String::from_utf8_lossy(err));
    assert!(output.status.success(), "{text}");
    text
}

#[test]
fn the_readme_is_sufficient() {
    let dir = tempfile::tempdir().unwrap();
    let text = text(&run("readme", dir.path()));
    // The field and its value may have colors.
    assert!(text.contains("kept `checkout`") && text.contains("latency"), "{text}");
    if cfg!(tracing_profiling_unsupported) {
        return;
    }
    let files = std::fs::read_dir(dir.path().join("profiles")).unwrap();
    let files: Vec<_> = files.map(|file| file.unwrap().path()).collect();
    assert_eq!(files.len(), 2, "a report and a pprof file: {files:?}");
    let report = files.iter().find(|file| file.extension().unwrap() == "html").unwrap();
    let data = support::data_of_report(&std::fs::read(report).unwrap());
    assert!(data.contains("readme::work_it_out"), "{data}");
}

#[test]
fn a_renamed_dependency_without_features_works() {
    let dir = tempfile::tempdir().unwrap();
    let text = text(&run("renamed", dir.path()));
    assert!(text.contains("kept waits") && text.contains("kept works"), "{text}");
    if cfg!(tracing_profiling_unsupported) {
        return;
    }
    let files = std::fs::read_dir(dir.path().join("profiles")).unwrap();
    let names = files.map(|file| file.unwrap().file_name().into_string().unwrap());
    let reports: Vec<_> = names.filter(|name| name.contains("works")).collect();
    assert!(reports.len() == 1 && reports[0].ends_with(".html"), "{reports:?}");
    let report = std::fs::read(dir.path().join("profiles").join(&reports[0])).unwrap();
    let data = support::data_of_report(&report);
    // The program and an address in it, without a function.
    assert!(data.contains("renamed+0x") && !data.contains("renamed::works"), "{data}");
}

/// `.ci/nightly` runs it, and in nine build profiles for release.
#[test]
#[ignore = "builds five executors"]
fn only_what_blocks_an_async_executor_is_said_to() {
    if !cfg!(target_os = "linux") || cfg!(tracing_profiling_unsupported) {
        return;
    }
    text(&cargo("run", "blocks").args(["--", "found"]).output().unwrap());
}

#[test]
fn a_plugin_that_is_unloaded_leaves_no_handler_behind() {
    if !cfg!(target_os = "linux") || cfg!(tracing_profiling_unsupported) {
        return;
    }
    text(&cargo("build", "plugin").output().unwrap());
    let built = target().join("debug");
    let mut program = Command::new(built.join("plugin"));
    let ended = program.arg(built.join("libplugin.so")).output().unwrap();
    let text = text(&ended);
    assert!(text.contains("survived"), "{text}");
}

/// The features for `https` must not decide what cryptography the program's own rustls uses, or make it panic because there
/// are two.
///
/// The default of rustls is built from C for minutes, so .ci/nightly runs it.
#[test]
#[ignore = "builds aws-lc"]
fn a_program_with_the_defaults_of_rustls_keeps_its_choice() {
    let dir = tempfile::tempdir().unwrap();
    for (features, expected) in [
        ("", "enable the feature `otlp-tls-ring` or `otlp-tls-aws-lc`"),
        ("aws-lc", "exports before the host has a provider"),
    ] {
        let text = text(&run_with("host_tls", features, dir.path()));
        assert!(text.contains(expected), "{features}: {text}");
        assert!(text.contains("exports with the provider of the host"), "{features}: {text}");
    }
}
