//! The directory store without disk space, or without a directory.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "a test")]

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use support::{HAS_STACKS, PLENTY, Setup, burn};
use tracing::info_span;
use tracing_profiling::NoProfile;
use tracing_profiling::export::Directory;

const MS: Duration = Duration::from_millis(1);
const DAY: Duration = Duration::from_secs(86_400);

fn setup(path: &Path, quota: u64) -> Setup {
    let directory = Directory::new(path).with_quota(quota, DAY);
    Setup::with("0ms", |builder| builder.profiles_per_minute(10_000).exporter(directory))
}

fn keep(setup: &Setup) {
    tracing::dispatcher::with_default(&setup.dispatch, || {
        info_span!("request").in_scope(|| burn(30 * MS));
    });
}

fn files(path: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(path).map(|entries| entries.flatten().collect::<Vec<_>>());
    entries.unwrap_or_default().into_iter().map(|entry| entry.path()).collect()
}

#[test]
fn a_profile_over_the_quota_is_lost_and_evicts_no_other() {
    let directory = tempfile::tempdir().unwrap();
    let many = setup(directory.path(), u64::MAX);
    for _ in 0..3 {
        keep(&many);
    }
    many.flush();
    let before = files(directory.path());
    assert_eq!(before.len(), if HAS_STACKS { 9 } else { 0 });
    let few = setup(directory.path(), 1000);
    for lost in 1..=2 {
        keep(&few);
        assert_eq!(few.handle.flush(PLENTY).is_ok(), !HAS_STACKS, "the profile is lost");
        few.handle.flush(PLENTY).unwrap();
        let stats = few.handle.stats();
        let expected = if HAS_STACKS { lost } else { 0 };
        assert_eq!(stats.profiles.dropped_export_failed, expected, "the profile is not retried");
        assert_eq!(stats.spans.no_profile_exporter_fails, 0, "another profile may fit");
        assert_eq!(files(directory.path()).len(), before.len());
    }
}

/// Runs on a file system of its own, which is full long before the quota.
#[test]
#[cfg(target_os = "linux")]
fn a_full_file_system_evicts_the_oldest_profiles() {
    const NAME: &str = "a_full_file_system_evicts_the_oldest_profiles";
    if support::is_child(NAME) {
        let directory = PathBuf::from(std::env::var_os("DIRECTORY").unwrap()).join("profiles");
        let setup = setup(&directory, u64::MAX);
        let (mut written, start) = (0, Instant::now());
        let mut removed = false;
        while !removed {
            assert!(start.elapsed() < 5 * PLENTY, "{:?}", setup.handle.stats());
            keep(&setup);
            setup.flush();
            written += 1;
            let stats = setup.handle.stats();
            assert_eq!(
                (stats.profiles.exported, stats.spans.no_profile_exporter_fails),
                (written, 0)
            );
            let newest = setup.kept().last().unwrap().profile.unwrap().to_string();
            let files = files(&directory);
            let is_newest = |path: &&PathBuf| path.to_string_lossy().contains(&newest);
            assert_eq!(files.iter().filter(is_newest).count(), 3);
            removed = (files.len() as u64) < 3 * written;
        }
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let script = "mount -t tmpfs -o size=1500k none \"$DIRECTORY\" || exit 77; exec \"$0\" \"$@\"";
    let output = std::process::Command::new("unshare")
        .args(["--mount", "sh", "-c", script])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", NAME, "--nocapture"])
        .env("CHILD", NAME)
        .env("DIRECTORY", directory.path())
        .output();
    let Ok(output) = output else { return };
    let errors = String::from_utf8_lossy(&output.stderr);
    // Only a user who may mount has such a file system.
    if !HAS_STACKS || output.status.code() == Some(77) || errors.starts_with("unshare:") {
        return;
    }
    assert!(output.status.success(), "{}\n{errors}", String::from_utf8_lossy(&output.stdout));
}

#[test]
fn no_profile_is_reserved_until_the_directory_can_be_created() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    fs::write(&file, "not a directory").unwrap();
    for path in [PathBuf::from("/proc/nope"), file.join("profiles"), file.clone()] {
        if path.starts_with("/proc") && !cfg!(target_os = "linux") {
            continue;
        }
        let setup = setup(&path, u64::MAX);
        for _ in 0..2 {
            keep(&setup);
            setup.flush();
        }
        let fails =
            if HAS_STACKS { NoProfile::ExporterFails } else { NoProfile::SamplingUnavailable };
        for kept in setup.kept() {
            assert_eq!(kept.spans[0].profile(), Err(fails), "{}", path.display());
        }
        if !HAS_STACKS || path != file {
            continue;
        }
        fs::remove_file(&file).unwrap();
        let start = Instant::now();
        while setup.handle.stats().profiles.exported == 0 {
            assert!(start.elapsed() < PLENTY, "{:?}", setup.handle.stats());
            keep(&setup);
            setup.flush();
        }
        assert!(setup.kept().last().unwrap().spans[0].profile().is_ok());
        assert_eq!(files(&file).len(), 3);
    }
}
