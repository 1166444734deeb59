//! Symbolization of a program with more than 100 MiB of debug information: how long it takes, and how much memory. The
//! program is a library that a child process loads: one Rust file, compiled with full debug information and linked
//! [`UNITS`] times, so that it has that number of compilation units, each with its own functions, inlined functions
//! and lines.

#![allow(unsafe_code, reason = "loads and calls a library built for this bench")]

use std::collections::HashSet;
use std::ffi::c_ulong;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tracing::{dispatcher, info_span};

use crate::measure::{Setup, figure, median, work};

const UNITS: usize = 900;
/// The same as in the source of the unit.
const STEPS_OF_UNIT: usize = 8;
/// Frames of the program in each profile, each in a unit of its own. With some four inlined functions in each,
/// they fit in the 1,024 levels that a stack may have.
const FRAMES: usize = 180;
/// The layer frees cached debug information after this time.
const GIVEN_BACK_AFTER: Duration = Duration::from_secs(31);

const UNIT: &str = include_str!("program/unit.rs");
const STEPS: &str = include_str!("program/steps.c");

/// In cargo's target directory, so that the next run finds it again.
fn program() -> PathBuf {
    let this = std::env::current_exe().expect("the path of this program");
    let target = this.ancestors().nth(2).expect("a target directory");
    target.join("figures_program")
}

fn run_command(command: &mut Command) -> Vec<u8> {
    let output = command.stderr(Stdio::inherit()).output().expect("a compiler");
    assert!(output.status.success(), "{command:?}");
    output.stdout
}

/// Compiles and links it, unless it exists.
fn build(directory: &Path) {
    let version = run_command(Command::new("rustc").arg("-vV"));
    let stamp = format!("{UNITS}\n{}\n{UNIT}\n{STEPS}", String::from_utf8_lossy(&version));
    if std::fs::read_to_string(directory.join("stamp")).is_ok_and(|found| found == stamp) {
        return;
    }
    std::fs::create_dir_all(directory).expect("a directory");
    let write = |name: &str, text: &str| {
        std::fs::write(directory.join(name), text).expect("a source file");
    };
    write("unit.rs", UNIT);
    write("steps.c", STEPS);
    write("units", &"unit.o ".repeat(UNITS));
    let rustc = ["--edition=2024", "--crate-type=rlib", "--emit=obj", "-g", "-O", "-Cpanic=abort"];
    let rustc = rustc.iter().chain(&["-Ccodegen-units=1", "-Crelocation-model=pic", "unit.rs"]);
    run_command(Command::new("rustc").args(rustc).arg("-ounit.o").current_dir(directory));
    let cc = ["-shared", "-fPIC", "-Wl,--allow-multiple-definition", "-oprogram.so", "steps.c"];
    run_command(Command::new("cc").args(cc).arg("@units").current_dir(directory));
    write("stamp", &stamp);
}

/// The argument of a step; the unit knows only the first two fields.
#[repr(C)]
struct Walk<'a> {
    next: extern "C" fn(&mut Walk<'_>) -> u64,
    seed: u64,
    left: &'a [Step],
}

type Step = extern "C" fn(&mut Walk<'_>) -> u64;

/// Calls the next function of the program, and works at the end.
extern "C" fn next(walk: &mut Walk<'_>) -> u64 {
    match walk.left.split_first() {
        Some((step, left)) => {
            walk.left = left;
            step(walk)
        }
        None => (0..300).map(|_| work()).sum(),
    }
}

/// Memory of a process, in MiB.
#[derive(Clone, Copy)]
struct Resident {
    /// Allocated memory; the anonymous memory also includes what the allocator retains.
    heap: f64,
    anonymous: f64,
    of_files: f64,
    /// The peak of both together, since [`forget_peak`].
    peak: f64,
}

fn resident() -> Resident {
    let status = std::fs::read_to_string("/proc/self/status").expect("procfs");
    let field = |name| {
        let value = status.lines().find_map(|line| line.strip_prefix(name)).expect("a field");
        let kib = value.trim().trim_end_matches(" kB").parse::<f64>().expect("a number");
        kib / 1024.0
    };
    // SAFETY: only reads statistics of the C library.
    let heap = unsafe { libc::mallinfo2() };
    Resident {
        heap: (heap.uordblks + heap.hblkhd) as f64 / 1048576.0,
        anonymous: field("RssAnon:"),
        of_files: field("RssFile:"),
        peak: field("VmHWM:"),
    }
}

fn forget_peak() {
    std::fs::write("/proc/self/clear_refs", "5").expect("procfs");
}

struct Profiler {
    setup: Setup,
    written: Receiver<Instant>,
    steps: Vec<Step>,
}

impl Profiler {
    /// Runs a span in which functions of the program call each other. Returns the time from its close to its profile,
    /// in milliseconds, and the memory right before the close. `unit` is the first unit, `step` the function in each.
    fn profile(&self, unit: usize, step: usize) -> (f64, Resident) {
        let units = (unit..UNITS).step_by(UNITS / FRAMES).take(FRAMES);
        let steps: Vec<Step> =
            units.map(|unit| self.steps[unit * STEPS_OF_UNIT + step % STEPS_OF_UNIT]).collect();
        let (closed, before) = dispatcher::with_default(&self.setup.dispatch, || {
            let span = info_span!("request").entered();
            next(&mut Walk { next, seed: 7, left: &steps });
            forget_peak();
            let before = resident();
            let closed = Instant::now();
            drop(span);
            (closed, before)
        });
        let written = self.written.recv().expect("a profile");
        (written.duration_since(closed).as_secs_f64() * 1e3, before)
    }

    /// The number of distinct locations of the program with lines in the last profile.
    fn frames(&self) -> usize {
        let profiles = self.setup.memory.take();
        let profile = profiles.last().expect("a profile");
        let stacks = profile.samples().iter().map(|sample| sample.stack);
        let known: HashSet<_> = stacks.flat_map(|stack| profile.location_ids(stack)).collect();
        let locations = known.into_iter().filter_map(|id| profile.location(id));
        let has_place = |location: &&tracing_profiling::profile::Location| {
            let mapping = location.mapping.and_then(|id| profile.mapping(id));
            // The function, and the functions it was inlined into.
            mapping.is_some_and(|mapping| mapping.file.ends_with("program.so"))
                && location.lines.len() > 2
                && location.lines.iter().all(|line| line.line > 0)
        };
        locations.filter(has_place).count()
    }
}

pub(crate) fn child() {
    measure(true);
}

/// The same without symbols, for memory that is not of symbols.
pub(crate) fn child_without() {
    measure(false);
}

/// Prints the results, one value per line, in two parts; [`run`] and [`given_back`] name them.
fn measure(symbols: bool) {
    // SAFETY: built for this bench; it runs no code when it is loaded.
    let library = unsafe { libloading::Library::new(program().join("program.so")) };
    let library = library.expect("a library");
    // SAFETY: the function has this signature, see `program/steps.c`.
    let steps: libloading::Symbol<'_, unsafe extern "C" fn(&mut c_ulong) -> *const Step> =
        unsafe { library.get(b"program_steps") }.expect("its function");
    let mut count = 0;
    // SAFETY: the array has `count` functions, and lives as long as the library.
    let steps = unsafe {
        let steps = steps(&mut count);
        std::slice::from_raw_parts(steps, count as usize).to_vec()
    };
    assert_eq!(steps.len(), UNITS * STEPS_OF_UNIT);
    let (sender, written) = mpsc::channel();
    let setup = Setup::new("0ms", |builder| {
        let builder = builder.symbols(symbols).stack_bytes(u32::MAX);
        builder.on_kept(move |_| _ = sender.send(Instant::now()))
    });
    let profiler = Profiler { setup, written, steps };

    let (first, before) = profiler.profile(0, 0);
    let after = resident();
    let peak = after.peak - before.anonymous - before.of_files;
    println!("{first}\n{peak}\n{}", after.anonymous - before.anonymous);
    println!("{}\n{}", after.of_files - before.of_files, profiler.frames());
    let again: Vec<f64> = (0..5).map(|_| profiler.profile(0, 0).0).collect();
    // Other functions of the same units.
    let warm: Vec<f64> = (1..6).map(|step| profiler.profile(0, step).0).collect();
    // Units that were not used yet.
    let elsewhere: Vec<f64> = (1..3).map(|unit| profiler.profile(unit, 0).0).collect();
    println!("{}\n{}\n{}", median(&again), median(&warm), median(&elsewhere));
    assert!(!symbols || profiler.frames() >= FRAMES);
    println!("{}\n", resident().anonymous - before.anonymous);

    std::thread::sleep(GIVEN_BACK_AFTER);
    let after = resident();
    println!("{}\n{}", after.anonymous - before.anonymous, after.heap - before.heap);
    println!("{}", after.of_files - before.of_files);
    drop(profiler);
    drop(library);
}

/// A child process, which waits until memory is freed.
struct Waiting {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Waiting {
    fn start(part: &str) -> Self {
        let this = std::env::current_exe().expect("the path of this program");
        let mut command = Command::new(this);
        command.args(["--child", part]).stdout(Stdio::piped());
        let mut child = command.spawn().expect("a process");
        let lines = BufReader::new(child.stdout.take().expect("its output"));
        Self { child, lines }
    }

    /// The values up to an empty line or the end.
    fn values(&mut self) -> Vec<f64> {
        let lines = self.lines.by_ref().lines().map(|line| line.expect("a value"));
        let values = lines.take_while(|line| !line.is_empty());
        values.map(|line| line.parse().expect("a number")).collect()
    }
}

/// With symbols and without.
static WAITING: Mutex<Option<[Waiting; 2]>> = Mutex::new(None);

/// Bytes of sections with debug information.
fn debug_information(program: &Path) -> u64 {
    let sections = run_command(Command::new("readelf").arg("-SW").arg(program));
    let sections = String::from_utf8_lossy(&sections).replace("[ ", "[");
    let of_section = |line: &str| {
        let mut fields = line.split_whitespace().skip_while(|field| !field.starts_with(".debug_"));
        u64::from_str_radix(fields.nth(4)?, 16).ok()
    };
    sections.lines().filter_map(of_section).sum()
}

pub(crate) fn run() {
    let directory = program();
    build(&directory);
    let bytes = debug_information(&directory.join("program.so"));
    figure("symbols.debug_information", bytes as f64 / 1048576.0, "MiB");
    let mut children = ["symbols", "symbols_without"].map(|part| {
        let mut child = Waiting::start(part);
        let values = child.values();
        (child, values)
    });
    let [with, without] = children.each_mut().map(|(_, values)| std::mem::take(values));
    let of_symbols = |at: usize| with[at] - without[at];
    figure("symbols.frames", with[4], "");
    figure("symbols.first", with[0], "ms");
    figure("symbols.warm", with[6], "ms");
    figure("symbols.warm_same_stacks", with[5], "ms");
    figure("symbols.warm_other_units", with[7], "ms");
    figure("symbols.without", without[6], "ms");
    figure("symbols.first_memory", of_symbols(1), "MiB");
    figure("symbols.first_memory_anonymous", of_symbols(2), "MiB");
    figure("symbols.first_memory_of_files", of_symbols(3), "MiB");
    figure("symbols.memory_of_all", of_symbols(8), "MiB");
    *WAITING.lock().unwrap_or_else(PoisonError::into_inner) =
        Some(children.map(|(child, _)| child));
}

/// The second part, after the other benches, so that they need not wait.
pub(crate) fn given_back() {
    let waiting = WAITING.lock().unwrap_or_else(PoisonError::into_inner).take();
    let [with, without] = waiting.expect("`run` before").map(|mut waiting| {
        let values = waiting.values();
        assert!(waiting.child.wait().expect("a process").success());
        values
    });
    let of_symbols = |at: usize| with[at] - without[at];
    figure("symbols.memory_after", of_symbols(0), "MiB");
    figure("symbols.memory_after_heap", of_symbols(1), "MiB");
    figure("symbols.memory_after_of_files", of_symbols(2), "MiB");
}
