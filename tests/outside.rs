//! Crates outside the workspace that know only the README: they compile, run, and get a profile.

#![allow(clippy::unwrap_used, reason = "a test")]

use std::path::Path;
use std::process::{Command, Output};

/// Builds and runs a crate of `tests/outside` in that folder.
fn run(package: &str, folder: &Path) -> Output {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    // Debug builds, for the time they take; the folder is not the one of this build, which is
    // locked.
    Command::new(env!("CARGO"))
        .args(["run", "--quiet", "--locked", "--package", package, "--manifest-path"])
        .arg(root.join("tests/outside/Cargo.toml"))
        .arg("--target-dir")
        .arg(root.join("target/outside"))
        .current_dir(folder)
        .env_remove("TRACING_PROFILING")
        // Whatever this build has: others build without it.
        .env_remove("RUSTFLAGS")
        .env_remove("RUSTC_WORKSPACE_WRAPPER")
        .output()
        .unwrap()
}

fn text(output: &Output) -> String {
    let (out, err) = (&output.stdout, &output.stderr);
    let text = format!("{}{}", String::from_utf8_lossy(out), String::from_utf8_lossy(err));
    assert!(output.status.success(), "{text}");
    text
}

#[test]
fn what_the_readme_says_is_enough() {
    let folder = tempfile::tempdir().unwrap();
    let text = text(&run("readme", folder.path()));
    assert!(text.contains("kept `checkout` (latency)"), "{text}");
    if cfg!(tracing_profiling_unsupported) {
        return;
    }
    let files = std::fs::read_dir(folder.path().join("profiles")).unwrap();
    let files: Vec<_> = files.map(|file| file.unwrap().path()).collect();
    assert_eq!(files.len(), 2, "a picture, and for pprof: {files:?}");
    let picture = files.iter().find(|file| file.extension().unwrap() == "svg").unwrap();
    assert!(std::fs::read_to_string(picture).unwrap().contains("readme::work_it_out"));
}

#[test]
fn under_another_name_and_without_any_feature() {
    let folder = tempfile::tempdir().unwrap();
    let text = text(&run("renamed", folder.path()));
    assert!(text.contains("kept waits") && text.contains("kept works"), "{text}");
    if cfg!(tracing_profiling_unsupported) {
        return;
    }
    let files = std::fs::read_dir(folder.path().join("profiles")).unwrap();
    let names = files.map(|file| file.unwrap().file_name().into_string().unwrap());
    let pictures: Vec<_> = names.filter(|name| name.contains("works")).collect();
    assert!(pictures.len() == 1 && pictures[0].ends_with(".svg"), "{pictures:?}");
    let picture =
        std::fs::read_to_string(folder.path().join("profiles").join(&pictures[0])).unwrap();
    // The program and an address in it, and no function.
    assert!(picture.contains("renamed+0x") && !picture.contains("renamed::works"), "{picture}");
}
