//! The functions of a module are those of the file that is mapped at its code, however the program was started and
//! whatever has happened to the file since, or they have no names.
//!
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

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write as _;
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileExt as _, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cpu_time::ThreadTime;
use support::{HAS_STACKS, Log, Setup, burn, functions, is_child, run_child, taken_samples};
use tracing::info_span;
use tracing_profiling::export::Memory;
use tracing_profiling::profile::Profile;
use tracing_profiling::{ProfilingLayer, encode, resource_from_env};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::prelude::*;

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
    check_done(&run_child(test, &[]));
}

fn check_child(command: &mut Command) {
    check_done(&command.output().unwrap());
}

fn check_done(output: &Output) {
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
    build_with(&library, option, &[("first_function", 1), ("second_function", 1)]);
    library
}

/// Builds one of functions with that many words in their frames.
fn build_with(library: &Path, option: &str, functions: &[(&str, usize)]) {
    let dir = tempfile::tempdir().unwrap();
    let built = dir.path().join("library.so");
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-g", "-O1", "-fomit-frame-pointer", option, "-o"]).arg(&built);
    for (name, words) in functions {
        let source = dir.path().join(format!("{name}.c"));
        let code = format!(
            "unsigned long {name}(unsigned long rounds) {{
                 volatile unsigned long x[{words}];
                 x[0] = rounds;
                 for (unsigned long i = 0; i < rounds; i++) x[i % {words}] = (x[0] ^ i) * 3 % 1000003;
                 return x[0];
             }}"
        );
        fs::write(&source, code).unwrap();
        cc.arg(source);
    }
    assert!(cc.status().unwrap().success());
    // In place if there is a file: with the same inode.
    fs::write(library, fs::read(built).unwrap()).unwrap();
}

/// A library that stays loaded: after one was unloaded, it is not known for a moment of which library samples are.
struct Loaded(ManuallyDrop<libloading::Library>);

impl Loaded {
    fn load(path: &Path) -> Self {
        // SAFETY: the library was built above and has no initializers or finalizers.
        Self(ManuallyDrop::new(unsafe { libloading::Library::new(path) }.unwrap()))
    }

    fn close(self) {
        ManuallyDrop::into_inner(self.0).close().unwrap();
    }

    fn address_of(&self, function: &str) -> usize {
        // SAFETY: the address is not used.
        let function: libloading::Symbol<'_, *const ()> =
            unsafe { self.0.get(function.as_bytes()) }.unwrap();
        function.addr()
    }

    /// Takes 60 ms in that function.
    #[inline(never)]
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

/// A setup with the log lines of the layer.
fn logged() -> (Setup, Log) {
    let log = Log::default();
    let memory = Memory::new();
    let builder = ProfilingLayer::builder().rules("0ms|level<=info".parse().unwrap()).rate(200);
    let builder = builder.sampling_delay(Duration::ZERO).cpu_budget(0).exporter(memory.clone());
    let layer = builder.build().unwrap();
    let (handle, written) = (layer.handle(), log.clone());
    let fmt = tracing_subscriber::fmt::layer().with_writer(move || written.clone());
    let fmt = fmt.with_ansi(false).with_filter(LevelFilter::WARN);
    let dispatch = tracing::Dispatch::new(tracing_subscriber::registry().with(layer).with(fmt));
    (Setup { handle, dispatch, memory, kept: Arc::default() }, log)
}

impl Log {
    /// The warnings that contain this text.
    fn warnings(&self, text: &str) -> usize {
        let log = String::from_utf8(self.0.lock().unwrap().clone()).unwrap();
        println!("log: {log}");
        log.lines().filter(|line| line.contains(text)).count()
    }
}

/// The functions in the file of that name, innermost ones alone, with the number of their samples; those without names
/// have an empty one.
fn functions_in(profile: &Profile, file: &str) -> BTreeMap<String, usize> {
    let mut found = BTreeMap::new();
    for sample in taken_samples(profile) {
        let Some(innermost) = profile.stack(sample.stack).next() else { continue };
        let mapping = innermost.mapping.and_then(|id| profile.mapping(id));
        if mapping.is_some_and(|mapping| mapping.file.rsplit('/').next() == Some(file)) {
            let function = innermost.lines.first().and_then(|line| profile.function(line.function));
            let name = function.map_or(String::new(), |function| function.name.clone());
            *found.entry(name).or_default() += sample.points.len();
        }
    }
    println!("{file}: {found:?}");
    found
}

/// Whether files are found that have no path any more, which takes privileges.
fn may_open_mapped() -> bool {
    let links = fs::read_dir("/proc/self/map_files").into_iter().flatten().flatten();
    links.into_iter().any(|link| File::open(link.path()).is_ok())
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
                let expected = if may_open_mapped() { all } else { 0 };
                assert!(all > 0 && named == expected, "{name}: {named} of {all}");
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
        let mut open = Vec::new();
        for (id, option) in [("with", WITH_ID), ("without", WITHOUT_ID)] {
            let name = format!("numbered_{id}.so");
            build_with(&dir.join(&name), option, &[("first_function", 1)]);
            let file = File::open(dir.join(&name)).unwrap();
            let library = Loaded::load(&path_of(&file));
            let (pipe, mut to_pipe) = std::io::pipe().unwrap();
            to_pipe.write_all(&[7; 10_000]).unwrap();
            for _ in 0..2 {
                let profile = profile(&setup, || {
                    library.burn("first_function");
                    // SAFETY: gives the number of the file, which is not used any more, to the pipe.
                    assert!(unsafe { libc::dup2(pipe.as_raw_fd(), file.as_raw_fd()) } > 0);
                });
                let (all, named, _) = locations(&profile, &name);
                assert!(all > 0 && named == all, "{named} of {all}");
            }
            let mut waiting = 0;
            // SAFETY: writes one integer.
            unsafe { libc::ioctl(pipe.as_raw_fd(), libc::FIONREAD, &raw mut waiting) };
            assert_eq!(waiting, 10_000, "bytes of the program");
            // The next one gets another number.
            open.push(file);
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
            setup.flush();
            library.close();
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
                libraries.into_iter().for_each(|library| library.close());
            }
            let library = Loaded::load(&late);
            setup.flush();
            library.burn("second_function");
        });
        for (name, function) in [("early.so", "first_function"), ("late.so", "second_function")] {
            let (all, named, with_line) = locations(&profile, name);
            println!("{name}: {named} of {all}, {with_line} with lines");
            assert!(all > 0 && (named, with_line) == (all, all));
            assert!(support::points_in(&profile, function) > 0);
        }
    });
}

fn path_of(file: &File) -> PathBuf {
    Path::new("/proc/self/fd").join(file.as_raw_fd().to_string())
}

/// The program that starts this one, as in its file.
fn interpreter() -> PathBuf {
    use std::os::unix::ffi::OsStringExt as _;
    const PT_INTERP: u64 = 3;
    let program = File::open(std::env::current_exe().unwrap()).unwrap();
    let header = headers(&program).find(|header| number(&program, *header, 4) == PT_INTERP);
    let header = header.unwrap();
    let mut path = vec![0; number(&program, header + 0x20, 8) as usize];
    program.read_exact_at(&mut path, number(&program, header + 8, 8)).unwrap();
    path.pop();
    PathBuf::from(std::ffi::OsString::from_vec(path))
}

const PROGRAM: &str = "PROGRAM";

/// A program whose file is `PROGRAM` has names.
fn check_program(setup: &Setup, log: &Log) {
    let path = std::env::var(PROGRAM).unwrap();
    let name = path.rsplit('/').next().unwrap();
    let profile = profile(setup, || _ = burn(Duration::from_millis(60)));
    let found = functions_in(&profile, name);
    assert!(found.keys().any(|function| function.ends_with("::burn")), "{found:?}");
    assert!(!found.contains_key(""), "{found:?}");
    let pprof = unpacked_pprof(&profile);
    assert!(contains(&pprof, name.as_bytes()) && !contains(&pprof, b"(deleted)"));
    let executable = resource_from_env().get("process.executable.name").cloned();
    assert_eq!(executable, Some(name.into()));
    assert_eq!(log.warnings("WARN"), 0);
}

#[test]
fn a_program_that_the_loader_was_started_with_has_its_names() {
    const TEST: &str = "a_program_that_the_loader_was_started_with_has_its_names";
    if !HAS_STACKS || cfg!(target_feature = "crt-static") {
        return;
    }
    if is_child(TEST) {
        let (setup, log) = logged();
        check_program(&setup, &log);
        println!("{DONE}");
        return;
    }
    let program = std::env::current_exe().unwrap();
    let mut command = Command::new(interpreter());
    command.arg(&program).args(["--exact", TEST, "--nocapture"]);
    check_child(command.env("CHILD", TEST).env(PROGRAM, &program));
}

#[test]
fn a_program_that_is_replaced_before_its_first_profile_keeps_its_name() {
    const TEST: &str = "a_program_that_is_replaced_before_its_first_profile_keeps_its_name";
    if !HAS_STACKS {
        return;
    }
    if is_child(TEST) {
        let (setup, log) = logged();
        let path = PathBuf::from(std::env::var_os(PROGRAM).unwrap());
        let other = path.with_extension("new");
        fs::copy("/bin/true", &other).unwrap();
        fs::rename(other, path).unwrap();
        check_program(&setup, &log);
        println!("{DONE}");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("shop");
    fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    let mut command = Command::new(&program);
    command.args(["--exact", TEST, "--nocapture"]);
    check_child(command.env("CHILD", TEST).env(PROGRAM, &program));
}

/// A library whose path leads to another one has the names of neither, or its own.
#[test]
fn a_library_that_is_replaced_does_not_get_the_names_of_the_other() {
    in_child("a_library_that_is_replaced_does_not_get_the_names_of_the_other", |dir| {
        for (id, option) in [("with", WITH_ID), ("without", WITHOUT_ID)] {
            for how in ["replaced", "deleted", "moved"] {
                let (setup, log) = logged();
                let name = format!("{how}_{id}.so");
                let (path, other) = (dir.join(&name), dir.join(format!("other_{name}")));
                build_with(&path, option, &[("first_function", 1)]);
                build_with(&other, option, &[("other_function", 1)]);
                let library = Loaded::load(&path);
                for _ in 0..2 {
                    let profile = profile(&setup, || {
                        library.burn("first_function");
                        match how {
                            "replaced" if other.exists() => fs::rename(&other, &path).unwrap(),
                            "moved" if path.exists() => fs::rename(&path, &other).unwrap(),
                            "deleted" if path.exists() => fs::remove_file(&path).unwrap(),
                            _ => {}
                        }
                    });
                    let is_known = how == "moved" || may_open_mapped();
                    let expected = if is_known { "first_function" } else { "" };
                    let found = functions_in(&profile, &name);
                    assert!(found.keys().eq([expected]), "{name}: {found:?}");
                    let warnings = log.warnings("was replaced, changed or deleted");
                    assert_eq!(warnings, usize::from(!is_known));
                }
            }
        }
    });
}

/// Another library at the same address, from the same path, and perhaps with the same inode.
#[test]
fn a_library_in_the_place_of_another_has_its_own_names_and_tables() {
    in_child("a_library_in_the_place_of_another_has_its_own_names_and_tables", |dir| {
        let path = dir.join("plugin.so");
        for option in [WITH_ID, WITHOUT_ID] {
            let built = |name: &'static str, words| {
                build_with(&path, option, &[(name, words)]);
                (name, fs::read(&path).unwrap())
            };
            let plugins = [built("small_function", 1), built("large_function", 500)];
            for is_renamed in [false, true] {
                let (setup, _log) = logged();
                let (mut same, mut points) = (0, 0);
                // The second one comes while samples of the first are still in the ring. Usually, its address is that of
                // the first.
                for round in 0..20 {
                    let mut at = 0;
                    let profile = profile(&setup, || {
                        for (function, bytes) in &plugins {
                            put(&path, bytes, is_renamed);
                            let library = Loaded::load(&path);
                            let address = library.address_of(function);
                            same += usize::from(address == at);
                            at = address;
                            library.burn(function);
                            library.close();
                        }
                    });
                    for sample in taken_samples(&profile) {
                        let names = functions(&profile, sample);
                        if let [function, caller, ..] = *names.as_slice()
                            && function.ends_with("_function")
                        {
                            // Until the collector knows the library, stacks end in it.
                            let is_true = caller.ends_with("::burn") || caller.starts_with('[');
                            assert!(is_true, "{function} is called by {caller}");
                            points += sample.points.len();
                        }
                    }
                    check_times(&profile);
                    if same >= 4 && round >= 4 {
                        break;
                    }
                }
                println!("{option}: {same} times at the same address, {points} samples");
                assert!(same > 0 && points > 0);
                assert!(in_turn(&path, &plugins, is_renamed) > 0);
            }
        }
    });
}

/// One that exports the same, has the same size and the same build id or none, and is written over the other.
#[test]
fn a_library_that_is_overwritten_has_its_own_names_and_tables_whatever_its_build_id() {
    in_child(
        "a_library_that_is_overwritten_has_its_own_names_and_tables_whatever_its_build_id",
        |dir| {
            let build = |path: &Path, option, [first, second]: [&str; 2], leaf, words| {
                let code = format!(
                    "#define LEAF(name) \
                         __attribute__((noinline, used)) \
                         static unsigned long name(unsigned long rounds) {{ \
                             volatile unsigned long x[{words}]; \
                             x[0] = rounds; \
                             for (unsigned long i = 0; i < rounds; i++) \
                                 x[i % {words}] = (x[0] ^ i) * 3 % 1000003; \
                             return x[0]; \
                         }}
                     LEAF({first})
                     LEAF({second})
                     unsigned long exported(unsigned long rounds) {{ return {leaf}(rounds) + 1; }}"
                );
                let source = dir.join("library.c");
                fs::write(&source, code).unwrap();
                let mut cc = Command::new("cc");
                cc.args(["-shared", "-fPIC", "-O1", "-fomit-frame-pointer", option]);
                cc.args(["-fno-stack-protector", "-fno-toplevel-reorder", "-o"]);
                assert!(cc.arg(path).arg(source).status().unwrap().success());
                fs::read(path).unwrap()
            };
            let [path, built, filler] =
                ["plugin.so", "built.so", "filler.so"].map(|name| dir.join(name));
            for option in [WITHOUT_ID, "-Wl,--build-id=0x0123456789abcdef"] {
                // Two functions change places, one has a larger frame, and one another name.
                let first = build(&built, option, ["aaa", "bbb"], "aaa", 40);
                for (functions, leaf, words, is_elsewhere) in [
                    (["bbb", "aaa"], "aaa", 40, false),
                    (["bbb", "aaa"], "aaa", 40, true),
                    (["aaa", "bbb"], "aaa", 60, false),
                    (["ccc", "bbb"], "ccc", 40, false),
                ] {
                    let second = build(&built, option, functions, leaf, words);
                    assert_eq!(first.len(), second.len());
                    let (setup, _log) = logged();
                    for (bytes, leaf) in [(&first, "aaa"), (&second, leaf)] {
                        fs::write(&path, bytes).unwrap();
                        let library = Loaded::load(&path);
                        let profile = profile(&setup, || {
                            for _ in 0..2 {
                                library.burn("exported");
                                setup.flush();
                            }
                        });
                        library.close();
                        if is_elsewhere && fs::rename(&built, &filler).is_ok() {
                            // Stays where the first one was.
                            Loaded::load(&filler);
                        }
                        let mut whole = 0;
                        for sample in taken_samples(&profile) {
                            let names = support::functions(&profile, sample);
                            if let [name @ ("aaa" | "bbb" | "ccc"), caller, ..] = *names.as_slice()
                            {
                                assert_eq!(name, leaf, "{option} {functions:?} {words}");
                                assert!(
                                    ["exported", "["].iter().any(|start| caller.starts_with(start)),
                                    "{names:?}"
                                );
                                whole +=
                                    usize::from(names.iter().any(|name| name.ends_with("::burn")));
                            }
                        }
                        assert!(whole > 0, "{option} {functions:?} {words}");
                    }
                }
            }
        },
    );
}

/// Profiles of each while it is loaded. Returns how often the second one was at the address of the first.
fn in_turn(path: &Path, plugins: &[(&'static str, Vec<u8>)], is_renamed: bool) -> usize {
    let (setup, _log) = logged();
    let (mut same, mut at) = (0, 0);
    for (function, bytes) in plugins.iter().cycle().take(4) {
        put(path, bytes, is_renamed);
        let library = Loaded::load(path);
        let address = library.address_of(function);
        same += usize::from(address == at);
        at = address;
        let profile = profile(&setup, || {
            // First, the list of modules is read, and then samples that are certainly of this one.
            for _ in 0..2 {
                library.burn(function);
                setup.flush();
            }
        });
        library.close();
        let mut whole = 0;
        for sample in taken_samples(&profile) {
            if let [name, caller, ..] = *functions(&profile, sample).as_slice()
                && name.ends_with("_function")
            {
                assert_eq!(name, *function);
                let is_whole = caller.ends_with("::burn");
                assert!(is_whole || caller.starts_with('['), "{name} is called by {caller}");
                whole += usize::from(is_whole) * sample.points.len();
            }
        }
        assert!(whole > 0, "no stack of {function} is whole");
    }
    same
}

/// Replaces a file, or its content.
fn put(path: &Path, bytes: &[u8], is_renamed: bool) {
    if is_renamed {
        let new = path.with_file_name("new.so");
        fs::write(&new, bytes).unwrap();
        fs::rename(new, path).unwrap();
    } else {
        fs::write(path, bytes).unwrap();
    }
}

/// Of two functions that take 60 ms each, none has many more samples.
fn check_times(profile: &Profile) {
    let points = |function| support::points_in(profile, function) * 5;
    let (small, large) = (points("small_function"), points("large_function"));
    println!("{small} and {large} ms");
    assert!(small < 90 && large < 90, "{small} and {large} ms");
}

/// Each file takes a descriptor, and address space.
#[test]
fn what_was_read_of_libraries_that_are_gone_is_closed() {
    in_child("what_was_read_of_libraries_that_are_gone_is_closed", |dir| {
        let setup = Setup::new("0ms");
        let built = build(dir, WITHOUT_ID);
        let mut most = 0;
        for number in 0..40 {
            let name = format!("{number}.so");
            fs::copy(&built, dir.join(&name)).unwrap();
            let library = Loaded::load(&dir.join(&name));
            let profile = profile(&setup, || library.burn("first_function"));
            library.close();
            let found = functions_in(&profile, &name);
            assert!(found.keys().all(|function| function == "first_function"), "{found:?}");
            let open = fs::read_dir("/proc/self/fd").unwrap();
            let links = open.filter_map(|link| fs::read_link(link.unwrap().path()).ok());
            let is_copy =
                |to: &PathBuf| to.to_string_lossy().starts_with("/memfd:tracing-profiling");
            most = most.max(links.filter(is_copy).count());
        }
        println!("at most {most} files");
        assert!(most > 2 && most < 30, "{most}");
    });
}

#[test]
fn of_many_files_that_are_gone_some_are_reported() {
    in_child("of_many_files_that_are_gone_some_are_reported", |dir| {
        let (setup, log) = logged();
        let built = build(dir, WITH_ID);
        for number in 0..40 {
            let path = dir.join(format!("{number}.so"));
            fs::copy(&built, &path).unwrap();
            profile(&setup, || {
                let library = Loaded::load(&path);
                // First, the list of modules is read, and then samples that are certainly of this one.
                for _ in 0..2 {
                    library.burn("first_function");
                    setup.flush();
                }
                library.close();
                fs::remove_file(&path).unwrap();
            });
        }
        assert_eq!(log.warnings("was replaced, changed or deleted"), 32);
        assert_eq!(log.warnings("further files are not reported"), 1);
    });
}

#[test]
fn a_library_that_was_loaded_by_a_relative_path_keeps_its_names() {
    in_child("a_library_that_was_loaded_by_a_relative_path_keeps_its_names", |dir| {
        for (id, option) in [("with", WITH_ID), ("without", WITHOUT_ID)] {
            let name = format!("plugin_{id}.so");
            let (setup, log) = logged();
            let at = |name: &str| dir.join(name).join("lib");
            fs::create_dir_all(at("first")).unwrap();
            fs::create_dir_all(at("other")).unwrap();
            build_with(&at("first").join(&name), option, &[("first_function", 1)]);
            build_with(&at("other").join(&name), option, &[("other_function", 1)]);
            std::env::set_current_dir(dir.join("first")).unwrap();
            let library = Loaded::load(&Path::new("./lib").join(&name));
            let profile = profile(&setup, || {
                library.burn("first_function");
                std::env::set_current_dir(dir.join("other")).unwrap();
            });
            let found = functions_in(&profile, &name);
            assert!(found.keys().eq(["first_function"]), "{found:?}");
            assert_eq!(log.warnings("WARN"), 0);
        }
    });
}

#[test]
fn a_library_in_memory_has_its_names_while_its_descriptor_is_open() {
    in_child("a_library_in_memory_has_its_names_while_its_descriptor_is_open", |dir| {
        let mut open = Vec::new();
        for option in [WITH_ID, WITHOUT_ID] {
            let (setup, log) = logged();
            let name = std::ffi::CString::new("plugin").unwrap();
            let mut file = File::from(
                rustix::fs::memfd_create(&name, rustix::fs::MemfdFlags::CLOEXEC).unwrap(),
            );
            file.write_all(&fs::read(build(dir, option)).unwrap()).unwrap();
            let library = Loaded::load(&path_of(&file));
            let before = profile(&setup, || library.burn("first_function"));
            assert!(functions_in(&before, "memfd:plugin").keys().eq(["first_function"]));
            assert_eq!(log.warnings("WARN"), 0);
            drop(file);
            // The next one gets another number.
            open.push(File::open("/dev/null").unwrap());
            let after = profile(&setup, || library.burn("second_function"));
            let is_known = may_open_mapped();
            let expected = if is_known { "second_function" } else { "" };
            assert!(functions_in(&after, "memfd:plugin").keys().eq([expected]));
            assert_eq!(log.warnings("was replaced"), usize::from(!is_known));
        }
    });
}

/// Nothing is at its path, but that is no proof that it was replaced.
#[test]
fn a_library_that_chroot_hides_is_not_said_to_be_replaced() {
    in_child("a_library_that_chroot_hides_is_not_said_to_be_replaced", |dir| {
        let (setup, log) = logged();
        let library = Loaded::load(&build(dir, WITH_ID));
        profile(&setup, || library.burn("first_function"));
        let (root, empty) = (File::open("/").unwrap(), dir.join("empty"));
        fs::create_dir(&empty).unwrap();
        if std::os::unix::fs::chroot(&empty).is_err() {
            println!("skipped: only root may change the root");
            return;
        }
        let after = profile(&setup, || library.burn("second_function"));
        rustix::process::fchdir(&root).unwrap();
        std::os::unix::fs::chroot(".").unwrap();
        assert!(functions_in(&after, "built.so").keys().eq([""]));
        assert_eq!(log.warnings("was replaced"), 0);
        assert_eq!(
            log.warnings(
                "built.so cannot be read, so its functions have no names: it is not at its path"
            ),
            1
        );
    });
}

#[test]
fn without_proc_there_are_addresses_and_one_warning() {
    const TEST: &str = "without_proc_there_are_addresses_and_one_warning";
    if !HAS_STACKS {
        return;
    }
    if is_child(TEST) {
        let (setup, log) = logged();
        for _ in 0..2 {
            let profile = profile(&setup, || _ = burn(Duration::from_millis(60)));
            let mut samples = taken_samples(&profile).peekable();
            assert!(samples.peek().is_some());
            assert!(samples.all(|sample| {
                functions(&profile, sample).iter().all(|name| name.starts_with('['))
            }));
        }
        assert_eq!(log.warnings("no names"), 1);
        assert_eq!(log.warnings("mount /proc"), 1);
        println!("{DONE}");
        return;
    }
    let without = |program: &std::ffi::OsStr| {
        let mut command = Command::new("unshare");
        let script = "mount -t tmpfs none /proc && exec \"$@\"";
        command.args(["--mount", "sh", "-c", script, "sh"]).arg(program);
        command
    };
    // Only root may do so.
    if !without("true".as_ref()).output().is_ok_and(|output| output.status.success()) {
        println!("skipped: mounting is not permitted here");
        return;
    }
    let mut command = without(std::env::current_exe().unwrap().as_os_str());
    check_child(command.args(["--exact", TEST, "--nocapture"]).env("CHILD", TEST));
}

fn unpacked_pprof(profile: &Profile) -> Vec<u8> {
    use std::io::Read as _;
    let mut bytes = Vec::new();
    let packed = encode::pprof(profile);
    flate2::read::GzDecoder::new(packed.as_slice()).read_to_end(&mut bytes).unwrap();
    bytes
}

fn contains(bytes: &[u8], text: &[u8]) -> bool {
    bytes.windows(text.len()).any(|window| window == text)
}

/// Where the last loaded segment ends in the file. What follows is only read by debuggers.
fn end_of_loaded(file: &File) -> u64 {
    const PT_LOAD: u64 = 1;
    let loaded = headers(file).filter(|header| number(file, *header, 4) == PT_LOAD);
    let end = |header| number(file, header + 8, 8) + number(file, header + 0x20, 8);
    loaded.map(end).max().unwrap()
}

/// Where its program headers are.
fn headers(file: &File) -> impl Iterator<Item = u64> {
    let (first, size) = (number(file, 0x20, 8), number(file, 0x36, 2));
    (0..number(file, 0x38, 2)).map(move |index| first + index * size)
}

fn number(file: &File, at: u64, length: usize) -> u64 {
    let mut bytes = [0; 8];
    file.read_exact_at(bytes.get_mut(..length).unwrap(), at).unwrap();
    u64::from_le_bytes(bytes)
}
