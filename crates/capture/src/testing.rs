//! What tests need.
#![allow(clippy::unwrap_used, reason = "for tests")]

/// For a test in a process of its own: whether this is that process. Otherwise the test of that path has run in one.
pub fn is_alone(test: &str) -> bool {
    const VARIABLE: &str = "PROFILING_TEST_ALONE";
    if std::env::var(VARIABLE).is_ok_and(|alone| alone == test) {
        return true;
    }
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    let output = command.args(["--exact", test]).env(VARIABLE, test).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{output:?}");
    false
}
