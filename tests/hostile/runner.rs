//! Runs one scenario in its own process with one source of samples, and checks how it ends.

use std::io::{Read as _, Seek as _};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};
use std::{env, fs};

use crate::support::{has_perf, is_child};

/// Much longer than any scenario takes, also on a busy machine: a child that exceeds it hangs.
pub(crate) const DEADLINE: Duration = Duration::from_secs(120);

/// The scenario that also runs where the requested source is unavailable.
const WITHOUT_PERF: &str = "everything::perf";

/// The last line of a successful child. The exit status is not enough: a test filter without a match exits with 0 too.
const DONE: &str = "child is done";

/// How a child ended, and its output.
#[derive(Debug)]
pub(crate) struct Ended {
    /// `None` if it was killed at the deadline.
    status: Option<ExitStatus>,
    text: String,
}

/// Runs the scenario if this is the child. Otherwise runs the child and asserts that it succeeds.
pub(crate) fn play(test: &str, source: &str, scenario: impl FnOnce()) {
    play_within(DEADLINE, test, source, scenario);
}

pub(crate) fn play_within(deadline: Duration, test: &str, source: &str, scenario: impl FnOnce()) {
    play_as(deadline, &[], test, source, scenario);
}

/// The same with more environment variables for the child.
pub(crate) fn play_as(
    deadline: Duration,
    variables: &[(&str, &str)],
    test: &str,
    source: &str,
    scenario: impl FnOnce(),
) {
    if is_child(test) {
        scenario();
        println!("{DONE}");
    } else if source == "perf" && !has_perf() && test != WITHOUT_PERF {
        println!("skipped: perf events are refused here; {WITHOUT_PERF} covers that");
    } else {
        let program = env::current_exe().unwrap();
        run_as(&program, variables, test, source, deadline).assert_success();
    }
}

/// Runs that test of that program as a child process.
pub(crate) fn run(program: &Path, test: &str, source: &str, deadline: Duration) -> Ended {
    run_as(program, &[], test, source, deadline)
}

fn run_as(
    program: &Path,
    variables: &[(&str, &str)],
    test: &str,
    source: &str,
    deadline: Duration,
) -> Ended {
    // Files instead of pipes: the child's own children may survive it and hold a pipe open.
    let mut output = tempfile::tempfile().unwrap();
    let mut command = Command::new(program);
    command
        .args(["--exact", test, "--nocapture", "--include-ignored"])
        .env("CHILD", test)
        .env("TRACING_PROFILING_SOURCE", source)
        .envs(variables.iter().copied())
        .stdout(output.try_clone().unwrap())
        .stderr(output.try_clone().unwrap())
        // Its own process group, so that it is killed together with its children.
        .process_group(0);
    // The developer's own settings must not affect the test.
    for name in ["", "_RATE", "_STACK_BYTES", "_DIR"] {
        command.env_remove(format!("TRACING_PROFILING{name}"));
    }
    let start = Instant::now();
    let mut child = command.spawn().unwrap();
    let mut where_it_hangs = String::new();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break Some(status);
        }
        if start.elapsed() > deadline {
            where_it_hangs = threads_of(child.id());
            let group = rustix::process::Pid::from_child(&child);
            rustix::process::kill_process_group(group, rustix::process::Signal::KILL).unwrap();
            child.wait().unwrap();
            break None;
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    let mut text = Vec::new();
    output.rewind().unwrap();
    output.read_to_end(&mut text).unwrap();
    let mut text = String::from_utf8_lossy(&text).into_owned();
    text.push_str(&where_it_hangs);
    println!("{test} with {source}, {:?}: {status:?}\n{text}", start.elapsed());
    Ended { status, text }
}

impl Ended {
    pub(crate) fn assert_success(&self) {
        let status = self.assert_ended();
        assert!(status.success() && self.text.contains(DONE), "{status}");
    }

    pub(crate) fn assert_killed_by(&self, signal: i32) {
        assert_eq!(self.assert_ended().signal(), Some(signal));
    }

    /// Asserts that the child ended before the deadline. `run` has already printed the output.
    fn assert_ended(&self) -> ExitStatus {
        assert!(self.status.is_some(), "hangs");
        assert!(!self.text.contains("thread 'profiling-"), "a thread of the library panicked");
        self.status.unwrap()
    }
}

/// The state of each thread of a hanging process and of its children, as the kernel reports it.
fn threads_of(process: u32) -> String {
    let mut text = format!("--- {process} hangs:\n");
    let Ok(tasks) = fs::read_dir(format!("/proc/{process}/task")) else { return text };
    for task in tasks.flatten().map(|task| task.path()) {
        let read = |name: &str| fs::read_to_string(task.join(name)).unwrap_or_default();
        let status = read("status");
        let of_interest = ["State:", "SigPnd:", "ShdPnd:", "SigBlk:", "voluntary_ctxt_switches:"];
        let status: Vec<_> = status
            .lines()
            .filter(|line| of_interest.iter().any(|key| line.starts_with(key)))
            .collect();
        let [name, syscall, stack] = ["comm", "syscall", "stack"].map(read);
        text += &format!("{} {status:?} in {} {syscall}{stack}\n", name.trim(), read("wchan"));
        let children = read("children");
        text.extend(children.split_whitespace().map(|child| threads_of(child.parse().unwrap())));
    }
    text
}

/// A copy of this test program without symbols, if `strip` is available.
pub(crate) fn stripped_copy(dir: &Path) -> Option<PathBuf> {
    let copy = dir.join("stripped");
    fs::copy(env::current_exe().unwrap(), &copy).unwrap();
    match Command::new("strip").arg("-s").arg(&copy).status() {
        Ok(status) => {
            assert!(status.success());
            Some(copy)
        }
        Err(error) => {
            println!("skipped: there is no `strip` here ({error})");
            None
        }
    }
}
