//! The control groups of the process: for how long it was throttled, because it had used up its CPU quota, and its memory.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Why it is unknown for how long the process was throttled, in words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThrottlingUnknown(pub &'static str);

#[allow(missing_docs, reason = "the words say what they are")]
impl ThrottlingUnknown {
    pub const NOT_READ: Self = Self("cpu.stat was not read at its begin and end");
    pub const NO_PROC: Self = Self("/proc is not mounted");
    pub const NO_CONTROLLER: Self = Self("its control group has no cpu controller");
    pub const NOT_MOUNTED: Self = Self("the file system of control groups is not mounted");
    pub const NOT_VISIBLE: Self = Self("its control group is not visible here");
    pub const THREADED: Self = Self("its threads are in several control groups");
    pub const UNREADABLE: Self = Self("cpu.stat of its control group cannot be read");
}

/// The control group whose quota applies to this process: its own, or else the nearest one around it that has a quota.
#[derive(Debug, PartialEq, Eq)]
pub struct ControlGroup {
    stat: PathBuf,
}

/// `/proc/self/cgroup` and `/proc/self/mountinfo`.
fn read_groups() -> Result<[String; 2], ThrottlingUnknown> {
    let read = |path| fs::read_to_string(path).map_err(|_| ThrottlingUnknown::NO_PROC);
    Ok([read("/proc/self/cgroup")?, read("/proc/self/mountinfo")?])
}

/// The line of a text like `/proc/self/cgroup` that says in which group CPU time is limited.
pub fn cpu_group_in(groups: &str) -> Option<(bool, &str)> {
    group_in(groups, CPU)
}

const CPU: &str = "cpu";
const MEMORY: &str = "memory";

/// Of that controller, or of the unified hierarchy (version 2).
fn group_in<'a>(groups: &'a str, controller: &str) -> Option<(bool, &'a str)> {
    let mut found = None;
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(number), Some(controllers), Some(path)) =
            (fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        if controllers.split(',').any(|of_line| of_line == controller) {
            return Some((true, path));
        }
        if (number, controllers) == ("0", "") {
            found = Some((false, path));
        }
    }
    found
}

/// Where the group may be found: in each mount of its hierarchy that has it, the directory and the mount's own.
fn directories(
    [groups, mounts]: &[String; 2],
    controller: &str,
) -> Result<Vec<(PathBuf, PathBuf)>, ThrottlingUnknown> {
    let (is_first_version, path) =
        group_in(groups, controller).ok_or(ThrottlingUnknown::NO_CONTROLLER)?;
    let version_1 = is_first_version.then_some(controller);
    let mounts = mounts.lines().filter_map(|line| mount_in(line, version_1));
    let mounts: Vec<_> = mounts.collect();
    if mounts.is_empty() {
        return Err(ThrottlingUnknown::NOT_MOUNTED);
    }
    // The group is outside of what this process may see of the hierarchy.
    let is_outside = |path: &str| path.split('/').any(|name| name == "..");
    let inside = mounts.into_iter().filter(|(root, _)| !is_outside(root) && !is_outside(path));
    let found = inside.filter_map(|(root, at)| {
        let rest = Path::new(path).strip_prefix(&root).ok()?;
        Some((if rest == Path::new("") { at.clone() } else { at.join(rest) }, at))
    });
    let found: Vec<_> = found.collect();
    if found.is_empty() { Err(ThrottlingUnknown::NOT_VISIBLE) } else { Ok(found) }
}

/// Of a line of `/proc/self/mountinfo` that mounts the hierarchy, in version 1 of a controller: the group that is its root,
/// and where it is mounted.
fn mount_in(line: &str, version_1: Option<&str>) -> Option<(String, PathBuf)> {
    let (mount, system) = line.split_once(" - ")?;
    let mut system = system.split(' ');
    let (kind, options) = (system.next()?, system.nth(1)?);
    let is_it = match version_1 {
        Some(of) => kind == "cgroup" && options.split(',').any(|option| option == of),
        None => kind == "cgroup2",
    };
    let mut fields = mount.split(' ').skip(3);
    let (root, at) = (fields.next()?, fields.next()?);
    let path = |text| String::from_utf8(unescaped(text)).ok();
    is_it.then_some((path(root)?, path(at)?.into()))
}

/// The kernel writes spaces, tabs, newlines and backslashes of paths as octal numbers.
fn unescaped(text: &str) -> Vec<u8> {
    let (mut bytes, mut rest) = (Vec::with_capacity(text.len()), text.as_bytes());
    while let Some((first, after)) = rest.split_first() {
        let octal = after.get(..3).filter(|_| *first == b'\\');
        let octal = octal.and_then(|octal| std::str::from_utf8(octal).ok());
        let escaped = octal.and_then(|octal| u8::from_str_radix(octal, 8).ok());
        bytes.push(escaped.unwrap_or(*first));
        rest = if escaped.is_some() { after.get(3..).unwrap_or_default() } else { after };
    }
    bytes
}

/// For how long the group has been throttled, on all its CPUs together, from its `cpu.stat`. Version 1 has nanoseconds, and
/// version 2 microseconds. A group without the `cpu` controller has neither.
fn throttled_ns_in(stat: &str) -> Option<u64> {
    number_in(stat, "throttled_time")
        .or_else(|| number_in(stat, "throttled_usec")?.checked_mul(1_000))
}

/// Whether a group has a quota, by its `cpu.max` or `cpu.cfs_quota_us`.
fn is_quota(text: &str) -> bool {
    text.split_ascii_whitespace().next().is_some_and(|quota| quota.parse::<u64>().is_ok())
}

fn has_quota(directory: &Path) -> bool {
    let files = ["cpu.max", "cpu.cfs_quota_us"].map(|name| directory.join(name));
    files.iter().any(|file| fs::read_to_string(file).is_ok_and(|text| is_quota(&text)))
}

/// How much memory control groups leave, if they limit it. The memory of files counts as left: the kernel drops it first.
pub fn memory_left() -> Option<u64> {
    of_memory_groups(memory_left_in)
}

/// How much memory control groups allow, if they limit it.
pub fn memory_limit() -> Option<u64> {
    // Version 1 states the largest possible number where there is no limit.
    of_memory_groups(memory_limit_of).filter(|limit| *limit < 1 << 60)
}

/// The least of all groups that the process is in.
fn of_memory_groups(of: fn(&Path) -> Option<u64>) -> Option<u64> {
    let texts = read_groups().ok();
    let found = texts.and_then(|texts| directories(&texts, MEMORY).ok()).unwrap_or_default();
    let groups = found.iter().flat_map(|(directory, mounted)| {
        directory.ancestors().take_while(move |group| group.starts_with(mounted))
    });
    groups.filter_map(of).min()
}

/// A number that a file of the group has, by its name in version 2 or 1.
fn number_of(group: &Path, [version_2, version_1]: [&str; 2]) -> Option<u64> {
    let read = |name: &str| fs::read_to_string(group.join(name)).ok();
    read(version_2).or_else(|| read(version_1))?.trim().parse().ok()
}

fn memory_limit_of(group: &Path) -> Option<u64> {
    number_of(group, ["memory.max", "memory.limit_in_bytes"])
}

fn memory_left_in(group: &Path) -> Option<u64> {
    let limit = memory_limit_of(group)?;
    let used = number_of(group, ["memory.current", "memory.usage_in_bytes"])?;
    let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let of_files = stat.lines().filter_map(|line| {
        // In version 1, only these names include the groups below.
        let (name, bytes) = line.strip_prefix("total_").unwrap_or(line).split_once(' ')?;
        let is_of_files = ["inactive_file", "active_file"].contains(&name);
        bytes.parse::<u64>().ok().filter(|_| is_of_files).map(|bytes| (name, bytes))
    });
    // The last line of a name.
    let of_files: BTreeMap<_, _> = of_files.collect();
    Some(limit.saturating_sub(used.saturating_sub(of_files.values().sum())))
}

impl ControlGroup {
    /// The group of this process.
    pub fn find() -> Result<Self, ThrottlingUnknown> {
        let mut why = ThrottlingUnknown::NOT_VISIBLE;
        for (directory, mounted) in directories(&read_groups()?, CPU)? {
            match Self::at(&directory, &mounted) {
                Ok(group) => return Ok(group),
                Err(cause) => why = cause,
            }
        }
        Err(why)
    }

    fn at(directory: &Path, mounted: &Path) -> Result<Self, ThrottlingUnknown> {
        // What is mounted can be another group than the path says, as that of the host. A group of threads lists no processes.
        let processes = fs::read_to_string(directory.join("cgroup.procs"));
        let processes = processes.map_err(|error| match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied => {
                ThrottlingUnknown::NOT_VISIBLE
            }
            _ => ThrottlingUnknown::THREADED,
        })?;
        let own = std::process::id().to_string();
        if !processes.lines().any(|process| process == own) {
            return Err(ThrottlingUnknown::NOT_VISIBLE);
        }
        let around = directory.ancestors().take_while(|group| group.starts_with(mounted));
        let limiting = around.clone().find(|group| has_quota(group));
        let groups = limiting.into_iter().chain(around);
        let mut groups = groups.map(|group| Self { stat: group.join("cpu.stat") });
        let group = groups.find(|group| group.throttled_ns().is_some());
        group.ok_or_else(|| match fs::read(directory.join("cpu.stat")) {
            Ok(_) => ThrottlingUnknown::NO_CONTROLLER,
            Err(_) => ThrottlingUnknown::UNREADABLE,
        })
    }

    /// For how long it has been throttled, on all its CPUs together. `None` if that cannot be read any more: the process has
    /// left the group, and it was removed.
    pub fn throttled_ns(&self) -> Option<u64> {
        throttled_ns_in(&fs::read_to_string(&self.stat).ok()?)
    }
}

/// The number that follows a name in a line.
fn number_in(text: &str, name: &str) -> Option<u64> {
    let mut values =
        text.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix([' ', ':']));
    values.next()?.split_ascii_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const V1: &str = "31 24 0:27 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:9 - cgroup cgroup rw,cpu,cpuacct\n";
    const V2: &str =
        "24 22 0:22 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";

    fn found(groups: &str, mounts: &str) -> Result<Vec<String>, ThrottlingUnknown> {
        let found = directories(&[groups.to_owned(), mounts.to_owned()], CPU)?.into_iter();
        Ok(found.map(|(directory, _)| directory.display().to_string()).collect())
    }

    #[test]
    fn the_group_is_found_in_both_versions() {
        let in_v1 = "4:memory:/a\n3:cpu,cpuacct:/system.slice/a.service\n2:cpuset:/b\n0::/c\n";
        let hybrid = format!("{V2}{V1}");
        let expected = Ok(vec!["/sys/fs/cgroup/cpu,cpuacct/system.slice/a.service".to_owned()]);
        assert_eq!(found(in_v1, &hybrid), expected);
        // Version 1 has it, so version 2 does not.
        assert_eq!(found(in_v1, V2), Err(ThrottlingUnknown::NOT_MOUNTED));
        let in_v2 = "1:name=systemd:/\n0::/user.slice/a b\n";
        assert_eq!(found(in_v2, &hybrid), Ok(vec!["/sys/fs/cgroup/user.slice/a b".to_owned()]));
        assert_eq!(found(in_v2, V1), Err(ThrottlingUnknown::NOT_MOUNTED));
        // `cpuacct` and `cpuset` limit nothing.
        assert_eq!(found("4:cpuacct:/a\n2:cpuset:/b\n", V1), Err(ThrottlingUnknown::NO_CONTROLLER));
        assert_eq!(found("", V2), Err(ThrottlingUnknown::NO_CONTROLLER));
        assert_eq!(found("garbage\n0:x\n", V2), Err(ThrottlingUnknown::NO_CONTROLLER));
        assert_eq!(found("0::/a\n", ""), Err(ThrottlingUnknown::NOT_MOUNTED));
        assert_eq!(found("0::/a\n", "1 2 3 - cgroup2\n"), Err(ThrottlingUnknown::NOT_MOUNTED));
    }

    #[test]
    fn a_container_has_the_group_where_its_mount_begins() {
        let mounted = |root: &str| {
            format!("396 394 0:21 {root} /sys/fs/cgroup/cpu ro,relatime - cgroup cgroup rw,cpu\n")
        };
        let of = |path: &str, root: &str| found(&format!("2:cpu:{path}\n"), &mounted(root));
        let at = |path: &str| Ok(vec![path.to_owned()]);
        assert_eq!(of("/pod/one", "/pod/one"), at("/sys/fs/cgroup/cpu"));
        assert_eq!(of("/pod/one/inner", "/pod/one"), at("/sys/fs/cgroup/cpu/inner"));
        // A namespace of control groups.
        assert_eq!(of("/", "/"), at("/sys/fs/cgroup/cpu"));
        // The beginning of a name is not that of a path.
        assert_eq!(of("/pod/one", "/pod/on"), Err(ThrottlingUnknown::NOT_VISIBLE));
        assert_eq!(of("/pod/one", "/pod/two"), Err(ThrottlingUnknown::NOT_VISIBLE));
        // The mount of the host in a namespace, and a process that was moved out of its own.
        assert_eq!(of("/", "/../.."), Err(ThrottlingUnknown::NOT_VISIBLE));
        assert_eq!(of("/../other", "/"), Err(ThrottlingUnknown::NOT_VISIBLE));
        // Any of several mounts.
        let two = mounted("/pod/two") + &mounted("/pod").replace("/cpu ro", "/c\\040pu ro");
        assert_eq!(found("2:cpu:/pod/one\n", &two), at("/sys/fs/cgroup/c pu/one"));
    }

    #[test]
    fn escapes_of_paths_are_resolved() {
        for (text, expected) in
            [("/a\\040b", "/a b"), ("\\134\\011", "\\\t"), ("/\\04", "/\\04"), ("\\999", "\\999")]
        {
            assert_eq!(unescaped(text), expected.as_bytes(), "{text}");
        }
    }

    #[test]
    fn the_time_is_in_nanoseconds_or_microseconds() {
        let v1 =
            "nr_periods 7\nnr_throttled 2\nthrottled_time 127918677\nnr_bursts 0\nburst_time 0\n";
        let v2 = "usage_usec 73899\nuser_usec 27213\nnr_periods 7\nnr_throttled 3\nthrottled_usec 139381\n";
        assert_eq!(throttled_ns_in(v1), Some(127_918_677));
        assert_eq!(throttled_ns_in(v2), Some(139_381_000));
        for without in [
            "",
            "usage_usec 1\nuser_usec 1\nsystem_usec 1\n",
            "throttled_usec -5\n",
            "throttled_usec 18446744073709551615\n",
            "throttled_time_max 5\nwait_sum 9\n",
            "throttled_time\n",
        ] {
            assert_eq!(throttled_ns_in(without), None, "{without}");
        }
    }

    #[test]
    fn a_quota_is_a_number() {
        for (text, expected) in [
            ("20000 100000\n", true),
            ("max 100000\n", false),
            ("max\n", false),
            ("-1\n", false),
            ("20000\n", true),
            ("", false),
        ] {
            assert_eq!(is_quota(text), expected, "{text}");
        }
    }

    #[test]
    fn a_group_that_lists_other_processes_is_not_that_of_this_one() {
        let directory = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(directory.path().join(name), text).unwrap();
        let why = || ControlGroup::at(directory.path(), directory.path()).map(drop);
        assert_eq!(why(), Err(ThrottlingUnknown::NOT_VISIBLE));
        write("cpu.stat", "nr_throttled 1\nthrottled_usec 5\n");
        write("cgroup.procs", "1\n");
        assert_eq!(why(), Err(ThrottlingUnknown::NOT_VISIBLE));
        write("cgroup.procs", &format!("1\n{}\n", std::process::id()));
        assert_eq!(why(), Ok(()));
        write("cpu.stat", "usage_usec 5\n");
        assert_eq!(why(), Err(ThrottlingUnknown::NO_CONTROLLER));
    }

    #[test]
    fn memory_is_left_up_to_the_limit_but_for_what_cannot_be_dropped() {
        let group = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(group.path().join(name), text).unwrap();
        let left = || memory_left_in(group.path());
        assert_eq!(left(), None);
        write("memory.limit_in_bytes", "1000\n");
        write("memory.usage_in_bytes", "900\n");
        write(
            "memory.stat",
            "cache 5\ninactive_file 1\nactive_file 2\ntotal_inactive_file 300\ntotal_active_file 50\n",
        );
        assert_eq!(left(), Some(450));
        write("memory.current", "950\n");
        write("memory.stat", "anon 600\nfile 350\ninactive_file 200\nactive_file 150\n");
        for (limit, expected) in [("max\n", None), ("2000\n", Some(1_400)), ("500\n", Some(0))] {
            write("memory.max", limit);
            assert_eq!(left(), expected);
        }
    }

    /// A quota of the group around, which has the time.
    #[test]
    fn the_nearest_group_with_a_quota_is_read() {
        let mounted = tempfile::tempdir().unwrap();
        let own = mounted.path().join("pod/container");
        fs::create_dir_all(&own).unwrap();
        fs::write(own.join("cgroup.procs"), std::process::id().to_string()).unwrap();
        let groups =
            [(own.clone(), "max 100000", 1), (mounted.path().join("pod"), "20000 100000", 2)];
        for (group, quota, us) in groups {
            fs::write(group.join("cpu.max"), quota).unwrap();
            fs::write(group.join("cpu.stat"), format!("throttled_usec {us}\n")).unwrap();
        }
        let read = || ControlGroup::at(&own, mounted.path()).unwrap().throttled_ns();
        assert_eq!(read(), Some(2_000));
        fs::write(own.join("cpu.max"), "50000 100000").unwrap();
        assert_eq!(read(), Some(1_000));
    }
}
