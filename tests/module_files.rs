//! What is found at the path of a loaded library, when its symbols are read, can be anything. It hangs nothing, takes
//! nothing from the program, and ends nothing.

#![cfg(target_os = "linux")]
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    unsafe_code,
    reason = "a test, which loads libraries"
)]

mod support;

use std::fs::{self, File};
use std::io::Write as _;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileExt as _, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cpu_time::ThreadTime;
use support::{HAS_STACKS, Setup, is_child, run_child, taken_samples};
use tracing::info_span;
use tracing_profiling::profile::Profile;

const DONE: &str = "child is done";
const WITHOUT_ID: &str = "-Wl,--build-id=none";
const WITH_ID: &str = "-Wl,--build-id";

/// Runs the test in a process of its own, unless nothing can be tested.
fn in_child(test: &str, body: fn(&Path)) {
    if !HAS_STACKS || cfg!(target_feature = "crt-static") {
        return;
    }
    if Command::new("cc").arg("--version").output().is_err() {
        println!("skipped: there is no C compiler");
        return;
    }
    if is_child(test) {
        let dir = tempfile::tempdir().unwrap();
        body(dir.path());
        println!("{DONE}");
        return;
    }
    let output = run_child(test, &[]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains(DONE),
        "{}: {text}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Builds a library of two functions, each in a file of its own, with debug information.
fn build(dir: &Path, option: &str) -> PathBuf {
    let library = dir.join("built.so");
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-g", "-O1", option, "-o"]).arg(&library);
    for name in ["first_function", "second_function"] {
        let source = dir.join(format!("{name}.c"));
        let code = format!(
            "unsigned long {name}(unsigned long rounds) {{
                 volatile unsigned long x = rounds;
                 for (unsigned long i = 0; i < rounds; i++) x = (x ^ i) * 3 % 1000003;
                 return x;
             }}"
        );
        fs::write(&source, code).unwrap();
        cc.arg(source);
    }
    assert!(cc.status().unwrap().success());
    library
}

struct Loaded(libloading::Library);

impl Loaded {
    fn load(path: &Path) -> Self {
        // SAFETY: the library was built above and has no initializers or finalizers.
        Self(unsafe { libloading::Library::new(path) }.unwrap())
    }

    /// Takes 60 ms in that function.
    fn burn(&self, function: &str) {
        // SAFETY: both functions have this signature.
        let function: libloading::Symbol<'_, unsafe extern "C" fn(u64) -> u64> =
            unsafe { self.0.get(function.as_bytes()) }.unwrap();
        let start = ThreadTime::now();
        while start.elapsed() < Duration::from_millis(60) {
            // SAFETY: pure arithmetic.
            std::hint::black_box(unsafe { function(10_000) });
        }
    }
}

/// The profile of a span in which `action` runs.
fn profile(setup: &Setup, action: impl FnOnce()) -> Profile {
    setup.run(|| info_span!("in a library").in_scope(action));
    setup.memory.take().pop().unwrap()
}

/// Of the locations in the file of that name: how many there are, how many have a function, and how many a line.
fn locations(profile: &Profile, file: &str) -> (usize, usize, usize) {
    let is_in_it = |id| {
        profile.mapping(id).is_some_and(|mapping| mapping.file.rsplit('/').next() == Some(file))
    };
    let all = taken_samples(profile).flat_map(|sample| profile.stack(sample.stack));
    let there: Vec<_> = all.filter(|location| location.mapping.is_some_and(is_in_it)).collect();
    let named = there.iter().filter(|location| !location.lines.is_empty());
    let with_line = there.iter().filter(|at| at.lines.iter().any(|line| line.line > 0));
    (there.len(), named.count(), with_line.count())
}

/// Bytes that this process has written, to memory files as well.
fn written_bytes() -> u64 {
    let io = fs::read_to_string("/proc/self/io").unwrap();
    io.lines().find_map(|line| line.strip_prefix("wchar: ")).unwrap().parse().unwrap()
}

#[test]
fn what_is_no_file_is_left_alone() {
    in_child("what_is_no_file_is_left_alone", |dir| {
        let setup = Setup::new("0ms");
        for (id, option) in [("with", WITH_ID), ("without", WITHOUT_ID)] {
            let built = build(dir, option);
            for kind in
                ["fifo", "lonely_fifo", "socket", "directory", "zero", "null", "empty", "kernel"]
            {
                let name = format!("{kind}_{id}.so");
                let path = dir.join(&name);
                fs::copy(&built, &path).unwrap();
                let library = Loaded::load(&path);
                let has_reader = Arc::new(AtomicBool::new(false));
                let before = written_bytes();
                let profile = profile(&setup, || {
                    library.burn("first_function");
                    replace(kind, &path, &has_reader);
                });
                println!("{name}: {:?}", locations(&profile, &name));
                let (all, named, _) = locations(&profile, &name);
                assert!(all > 0 && named == 0, "{name}: {named} of {all}");
                assert!(!has_reader.load(Ordering::Relaxed), "{name} was opened");
                assert!(written_bytes() - before < 64 << 20, "{name} was copied");
                if kind == "fifo" {
                    // The writer ends.
                    drop(File::open(&path).unwrap());
                }
            }
        }
    });
}

fn make_fifo(path: &Path) {
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

fn replace(kind: &str, path: &Path, has_reader: &Arc<AtomicBool>) {
    fs::remove_file(path).unwrap();
    match kind {
        "lonely_fifo" => make_fifo(path),
        "fifo" => {
            make_fifo(path);
            let (path, has_reader) = (path.to_owned(), Arc::clone(has_reader));
            // Waits for a reader.
            std::thread::spawn(move || {
                let _writer = File::options().write(true).open(path).unwrap();
                has_reader.store(true, Ordering::Relaxed);
            });
            std::thread::sleep(Duration::from_millis(20));
        }
        "socket" => drop(UnixListener::bind(path).unwrap()),
        "directory" => fs::create_dir(path).unwrap(),
        "zero" => symlink("/dev/zero", path).unwrap(),
        "null" => symlink("/dev/null", path).unwrap(),
        "empty" => drop(File::create(path).unwrap()),
        "kernel" => symlink("/proc/self/maps", path).unwrap(),
        _ => panic!("{kind}"),
    }
}

#[test]
fn a_number_that_is_used_again_is_not_read() {
    in_child("a_number_that_is_used_again_is_not_read", |dir| {
        let setup = Setup::new("0ms");
        for option in [WITH_ID, WITHOUT_ID] {
            let file = File::open(build(dir, option)).unwrap();
            let number = file.as_raw_fd().to_string();
            let library = Loaded::load(&Path::new("/proc/self/fd").join(&number));
            let (pipe, mut to_pipe) = std::io::pipe().unwrap();
            to_pipe.write_all(&[7; 10_000]).unwrap();
            for _ in 0..2 {
                let profile = profile(&setup, || {
                    library.burn("first_function");
                    // SAFETY: gives the number of the file, which is not used any more, to the pipe.
                    assert!(unsafe { libc::dup2(pipe.as_raw_fd(), file.as_raw_fd()) } > 0);
                });
                let (all, named, _) = locations(&profile, &number);
                assert!(all > 0 && named == 0, "{named} of {all}");
            }
            let mut waiting = 0;
            // SAFETY: writes one integer.
            unsafe { libc::ioctl(pipe.as_raw_fd(), libc::FIONREAD, &raw mut waiting) };
            assert_eq!(waiting, 10_000, "bytes of the program");
        }
    });
}

#[test]
fn a_library_that_shrinks_in_place_does_no_harm() {
    in_child("a_library_that_shrinks_in_place_does_no_harm", |dir| {
        for (id, option) in [("with", WITH_ID), ("without", WITHOUT_ID)] {
            let built = build(dir, option);
            for what in ["all", "sections"] {
                // Each with symbols of its own: those of the last one are still open.
                let setup = Setup::new("0ms");
                let name = format!("{what}_{id}.so");
                let path = dir.join(&name);
                fs::copy(&built, &path).unwrap();
                let library = Loaded::load(&path);
                let before = profile(&setup, || library.burn("first_function"));
                let (all, named, with_line) = locations(&before, &name);
                assert!(all > 0 && (named, with_line) == (all, all), "{before:?}");
                // Of this one nothing was read yet. As the program does not run the library later, it does not matter
                // to it that its code is gone.
                let after = profile(&setup, || {
                    library.burn("second_function");
                    let file = File::options().read(true).write(true).open(&path).unwrap();
                    let length = if what == "all" { 0 } else { end_of_loaded(&file) };
                    file.set_len(length).unwrap();
                });
                let (all, named, with_line) = locations(&after, &name);
                println!("{name}: {named} of {all}, {with_line} with lines");
                assert!(all > 0);
                // If it is shorter than a header, it is not the file that was loaded.
                let expected = if what == "all" { 0 } else { all };
                assert_eq!((named, with_line), (expected, expected), "{name}");
                // Its finalizers are gone.
                std::mem::forget(library);
            }
        }
        println!("{DONE}");
        // SAFETY: ends the process at once, without the finalizers.
        unsafe { libc::_exit(0) };
    });
}

/// More libraries than the collector remembers without looking which of them are needed.
#[test]
fn libraries_that_come_and_go_leave_earlier_stacks_right() {
    in_child("libraries_that_come_and_go_leave_earlier_stacks_right", |dir| {
        let setup = Setup::new("0ms");
        let built = build(dir, WITH_ID);
        let (early, late) = (dir.join("early.so"), dir.join("late.so"));
        fs::copy(&built, &early).unwrap();
        fs::copy(&built, &late).unwrap();
        let profile = profile(&setup, || {
            let library = Loaded::load(&early);
            library.burn("first_function");
            library.0.close().unwrap();
            for round in 0..3 {
                let load = |number| {
                    let path = dir.join(format!("{round}_{number}.so"));
                    fs::copy(&built, &path).unwrap();
                    let library = Loaded::load(&path);
                    fs::remove_file(&path).unwrap();
                    library
                };
                let libraries: Vec<_> = (0..600).map(load).collect();
                // The collector looks which libraries there are before it reads samples of this thread.
                libraries.first().unwrap().burn("first_function");
                std::thread::sleep(Duration::from_millis(100));
                libraries.into_iter().for_each(|library| library.0.close().unwrap());
            }
            Loaded::load(&late).burn("second_function");
        });
        for (name, function) in [("early.so", "first_function"), ("late.so", "second_function")] {
            let (all, named, with_line) = locations(&profile, name);
            println!("{name}: {named} of {all}, {with_line} with lines");
            assert!(all > 0 && (named, with_line) == (all, all));
            assert!(support::points_in(&profile, function) > 0);
        }
    });
}

/// Where the last loaded segment ends in the file. What follows is only read by debuggers.
fn end_of_loaded(file: &File) -> u64 {
    let number = |at: u64, length: usize| {
        let mut bytes = [0; 8];
        file.read_exact_at(bytes.get_mut(..length).unwrap(), at).unwrap();
        u64::from_le_bytes(bytes)
    };
    const PT_LOAD: u64 = 1;
    let headers = (0..number(0x38, 2)).map(|index| number(0x20, 8) + index * number(0x36, 2));
    let loaded = headers.filter(|header| number(*header, 4) == PT_LOAD);
    loaded.map(|header| number(header + 8, 8) + number(header + 0x20, 8)).max().unwrap()
}
