//! Resource usage of this process, from procfs.

#![allow(dead_code, reason = "not every bench needs all of it")]

use std::{fmt, fs};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Resident memory in KiB, plus perf rings, which the kernel does not count as resident.
pub(crate) fn resident_kib() -> f64 {
    with_rings("Rss:")
}

/// The same without pages of files, which the kernel maps in pieces of up to 64 KiB or more, and shares.
pub(crate) fn anonymous_kib() -> f64 {
    with_rings("Anonymous:")
}

fn with_rings(field: &str) -> f64 {
    let status = fs::read_to_string("/proc/self/smaps_rollup").expect("procfs");
    let value = status.lines().find_map(|line| line.strip_prefix(field)).expect("a field");
    let kib: f64 = value.trim().trim_end_matches(" kB").parse().expect("a number");
    kib + ring_bytes().iter().sum::<u64>() as f64 / 1024.0
}

/// The sizes of all mapped perf rings.
fn ring_bytes() -> Vec<u64> {
    let maps = fs::read_to_string("/proc/self/maps").expect("procfs");
    let rings = maps.lines().filter(|line| line.contains("[perf_event]")).map(|line| {
        let (start, end) = line.split(' ').next().and_then(|r| r.split_once('-')).expect("a range");
        let number = |hex| u64::from_str_radix(hex, 16).expect("an address");
        number(end) - number(start)
    });
    rings.collect()
}

/// The number of open files.
pub(crate) fn open_files() -> usize {
    // Minus the one that lists them.
    fs::read_dir("/proc/self/fd").expect("procfs").count() - 1
}

/// The number of open perf events.
fn perf_events() -> usize {
    let files = fs::read_dir("/proc/self/fd").expect("procfs").flatten();
    let is_event = |file: &fs::DirEntry| {
        fs::read_link(file.path())
            .is_ok_and(|target| target.as_os_str() == "anon_inode:[perf_event]")
    };
    files.filter(is_event).count()
}

/// The resources that this process uses at one moment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Usage {
    /// Resident memory, with perf rings.
    pub(crate) mib: f64,
    pub(crate) files: usize,
    /// How many of the files are perf events.
    pub(crate) events: usize,
    pub(crate) mappings: usize,
    pub(crate) rings: usize,
    pub(crate) threads: usize,
}

impl Usage {
    pub(crate) fn now() -> Self {
        let maps = fs::read_to_string("/proc/self/maps").expect("procfs");
        Self {
            mib: resident_kib() / 1024.0,
            files: open_files(),
            events: perf_events(),
            mappings: maps.lines().count(),
            rings: ring_bytes().len(),
            threads: fs::read_dir("/proc/self/task").expect("procfs").count(),
        }
    }
}

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { mib, files, events, mappings, rings, threads } = self;
        write!(f, "{mib:.1} MiB, {files} files, {events} of them perf events, ")?;
        write!(f, "{mappings} mappings, {rings} of them perf rings, ")?;
        write!(f, "{threads} threads")
    }
}

/// Raises the limit of open files to the hard limit, which servers usually do and shells do not.
pub(crate) fn allow_many_files() {
    let limit = getrlimit(Resource::Nofile);
    let all = Rlimit { current: limit.maximum, ..limit };
    setrlimit(Resource::Nofile, all).expect("the hard limit");
}
