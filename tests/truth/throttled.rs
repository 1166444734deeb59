//! Compares for how long the process was throttled with `cpu.stat` of its control group, and checks what is said where
//! that is unknown.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use tracing::info_span;
use tracing_profiling::{Builder, Facts, Measure, Source};

use crate::DONE;
use crate::support::{PLENTY, Setup, burn, is_child};

const MS: Duration = Duration::from_millis(1);
/// How long to wait until a quota is used up.
const PATIENCE: Duration = Duration::from_secs(60);

/// A control group with a CPU quota, which is removed when it is dropped.
struct Group(PathBuf);

impl Group {
    /// Makes a group with a quota in percent of a CPU; `None` if that is not permitted here.
    fn new(name: &str, percent: Option<u32>) -> Option<Self> {
        let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
        let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
        let is_v1 = groups
            .lines()
            .any(|line| line.split(':').nth(1).unwrap().split(',').any(|c| c == "cpu"));
        let is_it = |line: &&str| match is_v1 {
            true => line.contains(" - cgroup ") && line.split([' ', ',']).any(|word| word == "cpu"),
            false => line.contains(" - cgroup2 "),
        };
        let mount = PathBuf::from(mounts.lines().find(is_it)?.split(' ').nth(4)?);
        if !is_v1 {
            _ = fs::write(mount.join("cgroup.subtree_control"), "+cpu");
        }
        let group = Self(mount.join(format!("tracing-profiling-{name}-{}", std::process::id())));
        fs::create_dir(&group.0).ok()?;
        if let Some(percent) = percent {
            let written = match is_v1 {
                true => fs::write(group.0.join("cpu.cfs_period_us"), "100000").and_then(|()| {
                    fs::write(group.0.join("cpu.cfs_quota_us"), (percent * 1_000).to_string())
                }),
                false => fs::write(group.0.join("cpu.max"), format!("{} 100000", percent * 1_000)),
            };
            written.ok()?;
        }
        Some(group)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // The kernel may take a moment until processes that have ended have left it.
        while fs::remove_dir(&self.0).is_err_and(|error| error.raw_os_error() == Some(16)) {
            std::thread::sleep(10 * MS);
        }
    }
}

/// In nanoseconds.
fn throttled_ns(group: &Path) -> u64 {
    let text = fs::read_to_string(group.join("cpu.stat")).unwrap();
    let number = |name| -> Option<u64> {
        text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
    };
    number("throttled_time").or_else(|| Some(number("throttled_usec")? * 1_000)).unwrap()
}

fn facts(setup: &Setup, name: &str) -> Facts {
    let kept = setup.kept();
    let mut all = kept.iter().flat_map(|kept| &kept.spans);
    all.find(|span| span.name() == name).unwrap().facts.clone()
}

fn sampled_by_timers(builder: Builder) -> Builder {
    builder.source(Source::Timer).rate(200)
}

/// Runs a test of this program in another process, as the arguments of the command.
fn run(mut command: Command, test: &str, group: &Path) -> String {
    let program = std::env::current_exe().unwrap();
    let command = command.arg(program).args(["--exact", test, "--nocapture"]);
    let output = command.env("CHILD", test).env("GROUP", group).output().unwrap();
    let texts = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    println!("{}", texts.concat());
    assert!(output.status.success() && texts.concat().contains(DONE), "{}", output.status);
    texts.concat()
}

fn group_of_child() -> PathBuf {
    PathBuf::from(std::env::var_os("GROUP").unwrap())
}

fn enter(group: &Path, file: &str, id: u32) {
    fs::write(group.join(file), id.to_string()).unwrap();
}

#[test]
fn throttled_time_is_that_of_the_control_group() {
    const TEST: &str = "throttled::throttled_time_is_that_of_the_control_group";
    if !is_child(TEST) {
        let Some(group) = Group::new("quota", Some(20)) else {
            println!("skipped: no control group with a quota can be made here");
            return;
        };
        run(Command::new("env"), TEST, &group.0);
        return;
    }
    let group = group_of_child();
    enter(&group, "cgroup.procs", std::process::id());
    let setup = Setup::of_rules("0ms", sampled_by_timers);
    let mut read = [0; 2];
    setup.run(|| {
        let before = throttled_ns(&group);
        info_span!("busy").in_scope(|| {
            let begun = throttled_ns(&group);
            // On a busy machine it may take long until the quota is used up at all.
            let start = std::time::Instant::now();
            while throttled_ns(&group) - begun < 500_000_000 && start.elapsed() < PATIENCE {
                burn(10 * MS);
            }
            read[0] = throttled_ns(&group) - begun;
        });
        read[1] = throttled_ns(&group) - before;
    });
    if read[0] < 500_000_000 {
        println!("skipped: other programs leave the group less than its quota; {DONE}");
        return;
    }
    let facts = facts(&setup, "busy");
    let (ns, runnable_ns) = (facts.get(Measure::Throttled).unwrap(), facts.get(Measure::Runnable));
    println!("throttled {ns} of {read:?}, runnable {runnable_ns:?} of {:?}", facts.times.off_cpu());
    let [inside_ns, around_ns] = read;
    assert!(
        ns + inside_ns / 10 >= inside_ns && ns <= around_ns + around_ns / 10,
        "{ns} of {read:?}"
    );
    assert_eq!(facts.throttling_unknown(), None);
    assert!(runnable_ns.is_some_and(|ns| ns > 0), "it could have run");
    let profile = setup.profiles().pop().unwrap();
    // On a busy machine other programs may keep it from a CPU for much longer than its quota does.
    let is_much = Duration::from_nanos(ns) >= facts.times.wall() / 10;
    assert_eq!(profile.title.contains(" of throttling"), is_much, "{}", profile.title);
    assert!(profile.notes[0].contains(" of throttling"), "{:?}", profile.notes);
    println!("{DONE}");
}

/// A thread of another group, and a group that the process has left and that was removed.
#[test]
fn groups_that_change_leave_no_wrong_number() {
    const TEST: &str = "throttled::groups_that_change_leave_no_wrong_number";
    if !is_child(TEST) {
        let Some(group) = Group::new("left", Some(20)) else {
            println!("skipped: no control group with a quota can be made here");
            return;
        };
        run(Command::new("env"), TEST, &group.0);
        return;
    }
    let (group, id) = (group_of_child(), std::process::id());
    enter(&group, "cgroup.procs", id);
    let setup =
        Setup::of_rules("0ms", |builder| sampled_by_timers(builder).sampling_delay(10 * MS));
    let work = |name: &'static str, times: u32| {
        setup.run(|| {
            let span = info_span!("work", name);
            span.in_scope(|| (0..times).for_each(|_| _ = burn(2 * MS)));
        });
        let kept = setup.kept();
        let facts = kept.last().unwrap().spans[0].facts.clone();
        println!("{name}: {:?} {:?}", facts.get(Measure::Throttled), facts.throttling_unknown());
        facts
    };
    // With a fifth of a CPU, the collector can begin after the first span.
    let start = std::time::Instant::now();
    while work("in its group", 30).get(Measure::Throttled).is_none() {
        assert!(start.elapsed() < PLENTY);
    }
    let mounted = group.parent().unwrap();
    enter(mounted, "cgroup.procs", id);
    let other = Group::new("other", None).unwrap();
    fs::remove_dir(&group).unwrap();
    // Known again within some seconds, and until then no number of the group that is gone.
    let start = std::time::Instant::now();
    let mut states = Vec::new();
    while start.elapsed() < Duration::from_secs(30) {
        let facts = work("in another group", 60);
        let known = facts.get(Measure::Throttled);
        states.push((known, facts.throttling_unknown()));
        if known.is_some() {
            break;
        }
    }
    // The root group has no quota; with version 2 it has no such counter.
    let last = *states.last().unwrap();
    let without = Some("its control group has no cpu controller");
    assert!(last.0 == Some(0) || states.iter().any(|(_, why)| *why == without), "{states:?}");
    if other.0.join("tasks").exists() {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                enter(&other.0, "tasks", rustix::thread::gettid().as_raw_nonzero().get() as u32);
                let start = std::time::Instant::now();
                while work("in a group of its own", 60).throttling_unknown()
                    != Some("its threads are in several control groups")
                {
                    assert!(start.elapsed() < Duration::from_secs(60));
                }
            });
        });
    }
    println!("{DONE}");
}

/// Nothing that a container or a sandbox hides leads to a wrong number or a warning.
#[test]
fn what_is_hidden_is_unknown_and_says_why() {
    const TEST: &str = "throttled::what_is_hidden_is_unknown_and_says_why";
    if is_child(TEST) {
        let setup = Setup::of_rules("0ms", sampled_by_timers);
        setup.run(|| info_span!("busy").in_scope(|| _ = burn(200 * MS)));
        let facts = facts(&setup, "busy");
        let known = facts.get(Measure::Throttled);
        println!("state: {known:?} {}", facts.throttling_unknown().unwrap_or("known"));
        println!("runnable: {:?}", facts.get(Measure::Runnable).is_some());
        println!("{DONE}");
        return;
    }
    let environments: [(&str, &[&str], &[&str]); 5] = [
        ("this one", &["env"], &[]),
        (
            "without /proc",
            &["unshare", "--mount", "sh", "-c", "mount -t tmpfs none /proc && exec \"$@\"", "sh"],
            &["/proc is not mounted"],
        ),
        (
            "without control groups",
            &["unshare", "--mount", "sh", "-c", "umount -R -l /sys/fs/cgroup && exec \"$@\"", "sh"],
            &[
                "the file system of control groups is not mounted",
                "its control group has no cpu controller",
            ],
        ),
        ("with the /proc of another PID namespace", &["unshare", "--pid", "--fork"], &[]),
        (
            "in a namespace of control groups, with the mounts of another",
            &["unshare", "--cgroup", "env"],
            &[],
        ),
    ];
    for (name, way, expected) in environments {
        let command = || {
            let mut command = Command::new(way[0]);
            command.args(&way[1..]);
            command
        };
        if !command().arg("true").output().is_ok_and(|output| output.status.success()) {
            println!("{name}: skipped, not permitted here");
            continue;
        }
        let text = run(command(), TEST, Path::new(""));
        let state = text.lines().find_map(|line| line.strip_prefix("state: ")).unwrap().to_owned();
        println!("{name}: {state}");
        let is_expected = expected.iter().any(|words| state == format!("None {words}"));
        assert!(is_expected || expected.is_empty(), "{name}: {state}");
        assert!(!text.contains(" WARN "), "{name}");
        // Where nothing is expected, it is known, or hidden from this whole test.
        assert!(state.ends_with(" known") == state.starts_with("Some("), "{name}: {state}");
    }
}
