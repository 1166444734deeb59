//! A profile of the process against `perf record` of the same seconds: eight functions over six threads.

#![allow(unsafe_code, reason = "threads of the C library")]

use std::collections::HashMap;
use std::ffi::c_void;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cpu_time::{ProcessTime, ThreadTime};
use tracing::{dispatcher, info_span};
use tracing_profiling::profile::{Leaf, Profile, Sample, SampleKind};
use tracing_profiling::{ProfileOptions, Source};

use crate::measure::{Setup, figure, unprivileged};

const TIME: Duration = Duration::from_secs(8);
const MS: Duration = Duration::from_millis(1);

/// Functions that the compiler must not merge.
macro_rules! burns {
    ($($name:ident),+) => {
        $(
            #[inline(never)]
            fn $name(cpu: Duration) {
                let start = ThreadTime::now();
                let mut x = std::hint::black_box(stringify!($name)).len() as u64;
                while start.elapsed() < cpu {
                    let mut i = 0;
                    // No calls, so that samples are in this function however it is built.
                    while i < 20_000 {
                        x = (x ^ i) * 3 % 1_000_003;
                        i += 1;
                    }
                }
                std::hint::black_box(x);
            }
        )+
        const FUNCTIONS: &[&str] = &[$(stringify!($name)),+];
    };
}

burns! {
    burn_first, burn_second, burn_in_c, burn_in_c_too, burn_in_span, burn_beside_span, burn_short, burn_with_pauses
}

static IS_OVER: AtomicBool = AtomicBool::new(false);

fn goes_on() -> bool {
    !IS_OVER.load(Ordering::Relaxed)
}

/// Begins a thread as a library in C does.
fn begin_in_c(run: extern "C" fn(*mut c_void) -> *mut c_void) {
    let mut thread = std::mem::MaybeUninit::uninit();
    let (usual, none) = (std::ptr::null(), std::ptr::null_mut());
    // SAFETY: the function takes no argument, and the thread is not waited for.
    let begun = unsafe { libc::pthread_create(thread.as_mut_ptr(), usual, run, none) };
    assert_eq!(begun, 0);
}

extern "C" fn one_in_c(none: *mut c_void) -> *mut c_void {
    while goes_on() {
        burn_in_c(3 * MS);
        std::thread::sleep(17 * MS);
    }
    none
}

extern "C" fn other_in_c(none: *mut c_void) -> *mut c_void {
    while goes_on() {
        burn_in_c_too(15 * MS);
        std::thread::sleep(35 * MS);
    }
    none
}

fn load(setup: &Setup) {
    let dispatch = setup.dispatch.clone();
    std::thread::spawn(|| {
        while goes_on() {
            burn_first(2 * MS);
            burn_second(4 * MS);
            std::thread::sleep(20 * MS);
        }
    });
    begin_in_c(one_in_c);
    begin_in_c(other_in_c);
    std::thread::spawn(move || {
        dispatcher::with_default(&dispatch, || {
            while goes_on() {
                info_span!("span").in_scope(|| burn_in_span(4 * MS));
                burn_beside_span(2 * MS);
                std::thread::sleep(20 * MS);
            }
        });
    });
    // In turn.
    std::thread::spawn(|| {
        while goes_on() {
            let start = Instant::now();
            _ = std::thread::spawn(|| burn_short(25 * MS)).join();
            std::thread::sleep((50 * MS).saturating_sub(start.elapsed()));
        }
    });
    std::thread::spawn(|| {
        while goes_on() {
            burn_with_pauses(MS);
            std::thread::sleep(9 * MS);
        }
    });
}

fn ns_of(profile: &Profile, is_it: impl Fn(&Sample) -> bool) -> u64 {
    let samples = profile.of_kind(SampleKind::OnCpu).filter(|sample| is_it(sample));
    samples.flat_map(|sample| &sample.points).map(|point| point.weight).sum()
}

/// Prints the process's id, and then what a profile of it found: the nanoseconds of each function, of all, without samples,
/// and by the process's CPU clock.
fn profiled(source: Source) {
    // In a build without optimization, it would lower the rate.
    let setup = Setup::late("1h", |builder| builder.source(source).cpu_budget(0));
    load(&setup);
    // Each thread has its first events by then.
    std::thread::sleep(200 * MS);
    println!("{}", std::process::id());
    let used = std::thread::spawn(|| {
        let start = ProcessTime::now();
        std::thread::sleep(TIME);
        start.elapsed()
    });
    let options = ProfileOptions { duration: TIME, ..ProfileOptions::default() };
    let profile = setup.handle.profile(options).expect("a profile");
    IS_OVER.store(true, Ordering::Relaxed);
    let used = used.join().expect("no panic");
    for name in FUNCTIONS {
        let is_it = |sample: &Sample| {
            let lines = profile.stack(sample.stack).flat_map(|location| &location.lines);
            let mut functions = lines.filter_map(|line| profile.function(line.function));
            functions.any(|function| function.name.ends_with(name))
        };
        println!("{name} {}", ns_of(&profile, is_it));
    }
    let rest = ns_of(&profile, |sample| match profile.leaf(sample.leaf) {
        Some(Leaf::Unknown(what)) => what.starts_with("not sampled"),
        _ => false,
    });
    println!("all {}\nrest {rest}\nused {}", profile.weight().as_nanos(), used.as_nanos());
    let stats = setup.handle.stats();
    eprintln!("{:?} {:?} {:?}", stats.threads, stats.samples, stats.sampling);
}

pub(crate) fn by_perf() {
    // As an unprivileged user, rings for all threads may be too much.
    profiled(Source::Auto);
}

pub(crate) fn by_timer() {
    profiled(Source::Timer);
}

/// The samples of `perf record` in a process by function.
fn recorded(data: &std::path::Path, id: &str) -> HashMap<&'static str, f64> {
    let output = Command::new("perf")
        .args(["script", "-F", "ip,sym", "--pid", id, "-i"])
        .arg(data)
        .stderr(Stdio::null())
        .output()
        .expect("perf");
    let text = String::from_utf8_lossy(&output.stdout);
    let mut samples = HashMap::new();
    for line in text.lines() {
        // Whether perf could demangle it or not, and of names that are the beginning of others, the longer one.
        let found = FUNCTIONS.iter().filter(|name| line.contains(**name));
        if let Some(name) = found.max_by_key(|name| name.len()) {
            *samples.entry(*name).or_insert(0.0) += 1.0;
        }
    }
    samples
}

fn compare(name: &str, part: &str, prefix: &[&str]) {
    let this = std::env::current_exe().expect("the path of this program");
    let this = this.to_str().expect("a path in UTF-8");
    let command = [prefix, &[this, "--child", part]].concat();
    let mut child = Command::new(command[0])
        .args(&command[1..])
        .stdout(Stdio::piped())
        .spawn()
        .expect("this program");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let id = lines.next().expect("a line").expect("its id");
    let directory = tempfile::tempdir().expect("a directory");
    let data = directory.path().join("perf.data");
    let seconds = TIME.as_secs().to_string();
    // Of all processes: perf gives up if a thread of one process ends while it lists them.
    let record = Command::new("perf")
        .args(["record", "-q", "-a", "-F", "999", "-e", "cpu-clock:u", "-o"])
        .arg(&data)
        .args(["--", "sleep", &seconds])
        .output()
        .expect("perf");
    assert!(record.status.success(), "{record:?}");
    let lines: Vec<_> = lines.map(|line| line.expect("a line")).collect();
    assert!(child.wait().expect("a child").success());
    let ours: HashMap<&str, f64> = lines
        .iter()
        .filter_map(|line| line.split_once(' '))
        .map(|(name, ns)| (name, ns.parse().expect("a number")))
        .collect();
    let theirs = recorded(&data, &id);
    let sum =
        |of: &HashMap<&str, f64>| -> f64 { FUNCTIONS.iter().filter_map(|name| of.get(name)).sum() };
    let (all_ours, all_theirs) = (sum(&ours), sum(&theirs));
    let share = |of: &HashMap<&str, f64>, all: f64, name| {
        of.get(name).copied().unwrap_or(0.0) / all * 100.0
    };
    let mut most = 0.0_f64;
    for function in FUNCTIONS {
        let (a, b) = (share(&ours, all_ours, function), share(&theirs, all_theirs, function));
        eprintln!("{function:>20} {a:6.2} {b:6.2} {:6.2}", a - b);
        most = most.max((a - b).abs());
    }
    figure(&format!("{name}.share_error"), most, "points");
    let used = ours["used"];
    figure(&format!("{name}.time_error"), (ours["all"] - used).abs() / used * 100.0, "%");
    figure(&format!("{name}.not_sampled"), ours["rest"] / used * 100.0, "%");
}

pub(crate) fn run() {
    for (name, part) in [("process", "process_perf"), ("process.timer", "process_timer")] {
        compare(name, part, &[]);
        compare(&format!("{name}.unprivileged"), part, unprivileged());
    }
}
