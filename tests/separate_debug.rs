//! Symbols in a separate file, embedded in a section, or in a form that cannot be read: whatever there is of them is used,
//! and whatever happens to that file, the program continues.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stdout,
    unsafe_code,
    reason = "a test, which loads libraries"
)]

mod support;

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;
use support::{Burning, HAS_STACKS, Log, PLENTY, Setup, burn, functions, taken_samples};
use tracing::level_filters::LevelFilter;
use tracing::{Dispatch, info_span};
use tracing_profiling::export::Memory;
use tracing_profiling::{Builder, ProfilingLayer};
use tracing_subscriber::prelude::*;

const MODE: &str = "SEPARATE_DEBUG_MODE";
const DEBUG_FILE: &str = "SEPARATE_DEBUG_FILE";

/// Makes a profile of `action`; returns whether it has the name of that function, and its lines.
fn profile(setup: &Setup, action: fn(), function: &str) -> (bool, bool) {
    setup.run(|| info_span!("busy").in_scope(action));
    let profile = setup.memory.take().pop().unwrap();
    let locations = taken_samples(&profile).flat_map(|sample| profile.stack(sample.stack));
    let lines = locations
        .flat_map(|location| &location.lines)
        .filter(|line| profile.function(line.function).unwrap().name.ends_with(function));
    let lines: Vec<_> = lines.collect();
    (!lines.is_empty(), lines.iter().any(|line| line.line > 0))
}

fn burn_a_while() {
    burn(Duration::from_millis(60));
}

/// Runs in a copy of this program whose debug information is in another file.
#[test]
fn child() {
    let Ok(mode) = std::env::var(MODE) else { return };
    let debug = std::env::var_os(DEBUG_FILE).map(PathBuf::from);
    let setup = Setup::new("0ms");
    println!("first {:?}", profile(&setup, burn_a_while, "::burn"));
    let Some(debug) = debug else { return };
    let whole = fs::read(&debug).unwrap();
    let overwrite = |bytes: &[u8]| {
        // In place, which also changes an existing mapping of the file.
        let file = File::options().write(true).open(&debug).unwrap();
        std::io::Write::write_all(&mut &file, bytes).unwrap();
        file.set_len(bytes.len() as u64).unwrap();
    };
    match mode.as_str() {
        "truncated" => overwrite(&[]),
        "shortened" => overwrite(&whole[..whole.len() / 3]),
        "scrambled" => overwrite(&whole.iter().map(|byte| !byte).collect::<Vec<_>>()),
        "removed" => fs::remove_file(&debug).unwrap(),
        _ => {}
    }
    // Another function, whose debug information was not read yet.
    for _ in 0..3 {
        println!("then {:?}", profile(&setup, sort_something, "::sort_something"));
    }
}

#[inline(never)]
fn sort_something() {
    let start = cpu_time::ThreadTime::now();
    while start.elapsed() < Duration::from_millis(60) {
        let mut numbers: Vec<_> = (0..5_000_u64).map(|i| (i * 7_919 % 5_003).to_string()).collect();
        numbers.sort();
        std::hint::black_box(numbers);
    }
}

fn objcopy(arguments: &[&str], files: &[&Path]) -> bool {
    let run = Command::new("objcopy").args(arguments).args(files).status();
    run.is_ok_and(|status| status.success())
}

fn run(program: &Path, mode: &str, debug: Option<&Path>) -> String {
    let mut child = Command::new(program);
    child.args(["--exact", "child", "--nocapture"]).env(MODE, mode);
    if let Some(debug) = debug {
        child.env(DEBUG_FILE, debug);
    }
    let output = child.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{mode}: {}: {text}", output.status);
    text
}

/// A copy of this program without debug information, and the file with it.
fn separated(directory: &Path) -> Option<(PathBuf, PathBuf)> {
    let this = std::env::current_exe().unwrap();
    let (program, debug) = (directory.join("program"), directory.join("program.debug"));
    let link = format!("--add-gnu-debuglink={}", debug.display());
    let is_made = objcopy(&["--only-keep-debug"], &[&this, &debug])
        && objcopy(&["--strip-all", &link], &[&this, &program]);
    is_made.then_some((program, debug))
}

#[test]
fn a_damaged_or_removed_debug_file_does_no_harm() {
    let directory = tempfile::tempdir().unwrap();
    if !HAS_STACKS {
        return;
    }
    let Some((program, debug)) = separated(directory.path()) else { return };
    let whole = fs::read(&debug).unwrap();
    for mode in ["left", "truncated", "shortened", "scrambled", "removed"] {
        fs::write(&debug, &whole).unwrap();
        let text = run(&program, mode, Some(&debug));
        assert!(text.contains("first (true, true)"), "{mode}: {text}");
        assert_eq!(text.matches("then (true, true)").count(), 3, "{mode}: {text}");
    }
    // A file that was damaged before the start.
    fs::write(&debug, &whole[..whole.len() / 2]).unwrap();
    assert!(run(&program, "left", Some(&debug)).contains("first (false, false)"));
}

#[test]
fn functions_have_names_with_any_compression_of_debug_sections() {
    if !HAS_STACKS {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let this = std::env::current_exe().unwrap();
    for (how, expected) in [("zlib", "first (true, true)"), ("zstd", "first (true, false)")] {
        let program = directory.path().join(how);
        if !objcopy(&[&format!("--compress-debug-sections={how}")], &[&this, &program]) {
            continue;
        }
        let text = run(&program, "left", None);
        assert!(text.contains(expected), "{how}: {text}");
    }
}

/// A library in C, with a function that it exports and one that it does not. `None` where there are no tools for it.
fn library(dir: &Path, options: &[&str]) -> Option<PathBuf> {
    if !HAS_STACKS || cfg!(target_feature = "crt-static") {
        return None;
    }
    let body = "{
        volatile unsigned long x = rounds;
        for (unsigned long i = 0; i < rounds; i++) { MARK x = (x ^ i) * 3 % 1000003; }
        return x;
    }";
    let code = format!(
        "#ifndef MARK
         #define MARK
         #endif
         #ifdef INLINED
         __attribute__((always_inline)) static inline unsigned long inlined_its_own(unsigned long rounds) {body}
         __attribute__((noinline)) static unsigned long its_own(unsigned long rounds) {{ return inlined_its_own(rounds) + 1; }}
         #else
         __attribute__((noinline)) static unsigned long its_own(unsigned long rounds) {body}
         #endif
         unsigned long exported(unsigned long rounds) {body}
         unsigned long call_its_own(unsigned long rounds) {{ return its_own(rounds) + 1; }}"
    );
    let (source, library) = (dir.join("library.c"), dir.join("library.so"));
    fs::write(&source, code).unwrap();
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-O1", "-o"]).args([&library, &source]).args(options);
    let is_built = cc.status().is_ok_and(|status| status.success());
    if !is_built || !objcopy(&["--version"], &[]) {
        println!("skipped: there is no C compiler, or no objcopy");
        return None;
    }
    Some(library)
}

/// Two profiles of the functions of a library: the names of those that they have, the warnings about the library, and
/// the notes of the last one about it.
fn profile_library(
    library: &Path,
    set: impl FnOnce(Builder) -> Builder,
) -> (BTreeSet<String>, Vec<Value>, Vec<String>) {
    let (memory, log) = (Memory::new(), Log::default());
    let builder = ProfilingLayer::builder()
        .rules("0ms|level<=info".parse().unwrap())
        .rate(200)
        .sampling_delay(Duration::ZERO)
        .cpu_budget(0)
        .exporter(memory.clone());
    let layer = set(builder).build().unwrap();
    let handle = layer.handle();
    let writer = log.clone();
    let json = tracing_subscriber::fmt::layer().json().with_writer(move || writer.clone());
    let json = json.with_filter(LevelFilter::WARN);
    let dispatch = Dispatch::new(tracing_subscriber::registry().with(json).with(layer));
    // SAFETY: the library was built above and has no initializers or finalizers.
    let loaded = unsafe { libloading::Library::new(library) }.unwrap();
    let run = |name: &str| {
        // SAFETY: both functions have this signature.
        let function: libloading::Symbol<'_, unsafe extern "C" fn(u64) -> u64> =
            unsafe { loaded.get(name.as_bytes()) }.unwrap();
        let burning = Burning::new(Duration::from_millis(60));
        while burning.goes_on() {
            // SAFETY: pure arithmetic.
            std::hint::black_box(unsafe { function(10_000) });
        }
    };
    tracing::dispatcher::with_default(&dispatch, || {
        for _ in 0..2 {
            info_span!("in a library").in_scope(|| ["exported", "call_its_own"].map(run));
            handle.flush(PLENTY).unwrap();
        }
    });
    let file = library.file_name().unwrap().to_str().unwrap();
    let profiles = memory.take();
    assert_eq!(profiles.len(), 2);
    let names = profiles.iter().flat_map(|profile| {
        let names = taken_samples(profile).flat_map(|sample| functions(profile, sample));
        let ours = names.filter(|name| name.ends_with("its_own") || *name == "exported");
        ours.map(str::to_owned).collect::<Vec<_>>()
    });
    let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    let events = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let fields = events.map(|event| event["fields"].clone());
    let is_of_library = |fields: &Value| {
        fields["file"].as_str().is_some_and(|path| path.rsplit('/').next() == Some(file))
    };
    let is_of_file = |note: &&String| note.contains(file);
    let notes = profiles[1].notes.iter().filter(is_of_file).cloned().collect();
    (names.collect(), fields.filter(is_of_library).collect(), notes)
}

/// Strips a library and embeds that section, as distributions do.
fn with_debugdata(library: &Path, section: &[u8], to: &Path) {
    let file = to.with_extension("section");
    fs::write(&file, section).unwrap();
    let add = format!("--add-section=.gnu_debugdata={}", file.display());
    assert!(objcopy(&["--strip-all", &add], &[library, to]));
}

fn xz(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut xz = Command::new("xz");
    xz.args(["--stdout", "-1"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let Ok(mut xz) = xz.spawn() else {
        println!("skipped: there is no xz");
        return None;
    };
    let mut input = xz.stdin.take().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || std::io::Write::write_all(&mut input, bytes).unwrap());
        Some(xz.wait_with_output().unwrap().stdout)
    })
}

/// What Fedora's `find-debuginfo` puts into each library: the symbols that `.dynsym` lacks, without sizes of sections.
fn its_own_symbols(dir: &Path, library: &Path) -> Vec<u8> {
    let [debug, symbols] = ["debug", "symbols"].map(|name| dir.join(name));
    assert!(objcopy(&["--only-keep-debug"], &[library, &debug]));
    assert!(objcopy(&["--strip-all", "--keep-symbol=its_own"], &[&debug, &symbols]));
    fs::read(symbols).unwrap()
}

fn all_names() -> BTreeSet<String> {
    ["call_its_own", "exported", "its_own"].map(str::to_owned).into()
}

/// On ARM, assemblers mark in this way where data in code begins and where it ends.
#[test]
fn marks_inside_functions_are_not_their_names() {
    let directory = tempfile::tempdir().unwrap();
    let mark = r#"-DMARK=__asm__ volatile(".set \"$d.%=\", .");"#;
    let Some(library) = library(directory.path(), &[mark]) else { return };
    let (names, ..) = profile_library(&library, |builder| builder);
    assert_eq!(names, all_names());
}

#[test]
fn functions_have_names_from_embedded_symbols() {
    let directory = tempfile::tempdir().unwrap();
    let dir = directory.path();
    let Some(library) = library(dir, &["-g"]) else { return };
    let Some(section) = xz(&its_own_symbols(dir, &library)) else { return };
    let stripped = dir.join("stripped.so");
    with_debugdata(&library, &section, &stripped);
    let found = profile_library(&stripped, |builder| builder);
    assert_eq!(found, (all_names(), vec![], vec![]));
}

#[test]
fn embedded_symbols_that_cannot_be_read_leave_the_other_names() {
    let directory = tempfile::tempdir().unwrap();
    let dir = directory.path();
    let Some(library) = library(dir, &[]) else { return };
    let symbols = its_own_symbols(dir, &library);
    let Some(section) = xz(&symbols) else { return };
    let mut changed = section.clone();
    let middle = section.len() / 2;
    changed[middle] ^= 0xff;
    let large = [symbols.as_slice(), &vec![0; 64 << 20]].concat();
    for (how, section) in [
        ("changed", changed),
        ("cut", section[..middle].to_vec()),
        ("not_xz", symbols.clone()),
        ("empty", xz(b"").unwrap()),
        ("text", xz(b"no ELF file").unwrap()),
        ("large", xz(&large).unwrap()),
    ] {
        let stripped = dir.join(format!("{how}.so"));
        with_debugdata(&library, &section, &stripped);
        let limit = if how == "large" { 48 << 20 } else { 512 << 20 };
        let (names, warnings, notes) =
            profile_library(&stripped, |builder| builder.memory(limit / 4));
        println!("{how}: {names:?} {warnings:?}");
        assert_eq!(names, ["call_its_own", "exported"].map(str::to_owned).into(), "{how}");
        let [warning] = warnings.as_slice() else { panic!("{how}: {warnings:?}") };
        assert_eq!([&warning["kind"], &warning["reason"]], ["symbols", "unreadable"]);
        let message = warning["message"].as_str().unwrap();
        assert!(message.contains(".gnu_debugdata"), "{how}: {message}");
        assert!(message.contains("only functions that it exports have names"), "{message}");
        let is_large = message.contains("TRACING_PROFILING_MEMORY");
        assert_eq!(is_large, how == "large", "{message}");
        assert!(notes[0].contains("only functions that are exported have names"), "{notes:?}");
    }
}

/// The place of a section's content in a file.
fn section_of(file: &[u8], name: &str) -> std::ops::Range<usize> {
    let number = |at: usize, length: usize| {
        let mut bytes = [0; 8];
        bytes[..length].copy_from_slice(&file[at..at + length]);
        u64::from_le_bytes(bytes) as usize
    };
    let header = |index: usize| number(0x28, 8) + index * number(0x3a, 2);
    let names = number(header(number(0x3e, 2)) + 0x18, 8);
    let is_it = |header: &usize| {
        let at = names + number(*header, 4);
        file[at..].starts_with(name.as_bytes()) && file[at + name.len()] == 0
    };
    let header = (0..number(0x3c, 2)).map(header).find(is_it).unwrap();
    let start = number(header + 0x18, 8);
    start..start + number(header + 0x20, 8)
}

#[test]
fn debug_information_that_cannot_be_read_leaves_the_names() {
    let directory = tempfile::tempdir().unwrap();
    let dir = directory.path();
    let Some(library) = library(dir, &["-g", "-gz=zlib"]) else { return };
    let whole = fs::read(&library).unwrap();
    for section in [".debug_info", ".debug_abbrev", ".debug_line"] {
        let mut bytes = whole.clone();
        // Behind the header of the compression.
        let place = section_of(&bytes, section);
        bytes[place.start + 24..place.end].fill(0xff);
        let damaged = dir.join(format!("damaged{section}.so"));
        fs::write(&damaged, bytes).unwrap();
        let (names, warnings, _) = profile_library(&damaged, |builder| builder);
        println!("{section}: {names:?} {warnings:?}");
        assert_eq!(names, all_names(), "{section}");
        let [warning] = warnings.as_slice() else { panic!("{section}: {warnings:?}") };
        assert_eq!([&warning["kind"], &warning["reason"]], ["symbols", "unreadable"]);
        let message = warning["message"].as_str().unwrap();
        assert!(message.contains("its functions but no lines"), "{message}");
    }
}

/// What there is of debug information that is not read, or none, is said once.
#[test]
fn debug_information_of_other_forms_is_said_once() {
    let directory = tempfile::tempdir().unwrap();
    let dir = directory.path();
    let build = |name: &str, options: &[&str]| {
        let named = dir.join(name);
        fs::rename(library(dir, options)?, &named).unwrap();
        Some(named)
    };
    let Some(whole) = build("whole.so", &["-g"]) else { return };
    let split_4 = build("split_4.so", &["-gdwarf-4", "-gsplit-dwarf"]).unwrap();
    let split_5 = build("split_5.so", &["-gdwarf-5", "-gsplit-dwarf"]).unwrap();
    // Not every objcopy has each.
    let compressed = |from: &Path, how: &str| {
        let to = from.with_extension(how);
        objcopy(&[&format!("--compress-debug-sections={how}")], &[from, &to]).then_some(to)
    };
    let zipped = compressed(&split_4, "zlib");
    let (old, zstd) = (compressed(&whole, "zlib-gnu"), compressed(&whole, "zstd"));
    let is_split = Some(("split", "no inlined functions"));
    for (library, warning, note) in [
        (&Some(whole), None, None),
        (&Some(split_4), is_split, Some("without inlined functions")),
        (&Some(split_5), is_split, Some("without inlined functions")),
        (&zipped, is_split, Some("without inlined functions")),
        (&old, Some(("compressed", "`.zdebug_`")), None),
        (&zstd, Some(("compressed", "with zstd")), None),
    ] {
        let Some(library) = library else { continue };
        let (names, warnings, notes) = profile_library(library, |builder| builder);
        println!("{library:?}: {names:?} {warnings:?} {notes:?}");
        assert_eq!(names, all_names());
        assert_eq!(warnings.len(), usize::from(warning.is_some()));
        for (warning, (reason, text)) in warnings.iter().zip(warning) {
            assert_eq!([&warning["kind"], &warning["reason"]], ["symbols", reason]);
            assert!(warning["message"].as_str().unwrap().contains(text), "{warning}");
        }
        assert_eq!(notes.len(), usize::from(note.is_some()));
        assert!(notes.iter().zip(note).all(|(shown, note)| shown.contains(note)));
    }
}

/// As `dwz` makes it of all debug information that Fedora installs, and of some that Debian does: a part is in a file that
/// several others have in common. Without that file, symbol tables have the names of all functions but inlined ones.
#[test]
fn names_that_are_in_a_supplementary_file_are_found_and_no_function_loses_its_name() {
    let directory = tempfile::tempdir().unwrap();
    let dir = directory.path();
    let dwz = |arguments: &[&str]| {
        let status = Command::new("dwz").args(arguments).current_dir(dir).status();
        status.is_ok_and(|status| status.success())
    };
    let Some(library) = library(dir, &["-DINLINED"]) else { return };
    if !dwz(&["--version"]) {
        return println!("skipped: there is no dwz");
    }
    let inlined = || all_names().into_iter().chain(["inlined_its_own".to_owned()]).collect();
    for (dwarf, compressed, path) in [
        ("4", false, "supplement"),
        ("5", false, "supplement"),
        ("4", true, "./supplement"),
        ("5", true, "/absolute"),
    ] {
        let options = ["-DINLINED", "-g", &format!("-gdwarf-{dwarf}")];
        self::library(dir, &options).unwrap();
        let at = |name: &str| dir.join(name);
        for debug in ["linked", "other"] {
            assert!(objcopy(&["--only-keep-debug"], &[&library, &at(debug)]));
        }
        let path = path.replace("/absolute", &at("supplement").display().to_string());
        let standard: &[&str] = if dwarf == "5" { &["-5"] } else { &[] };
        let multifile = ["-m", "supplement", "-M", &path, "linked", "other"];
        assert!(dwz(&[standard, &multifile].concat()), "{dwarf}");
        for file in ["linked", "supplement"].iter().filter(|_| compressed) {
            assert!(objcopy(&["--compress-debug-sections=zlib"], &[&at(file)]));
        }
        let whole = fs::read(at("supplement")).unwrap();
        let most = if compressed { 2 } else { 6 };
        for how in
            ["whole", "missing", "other", "cut", "damaged", "stripped"].into_iter().take(most)
        {
            match how {
                "missing" => fs::remove_file(at("supplement")).unwrap(),
                "other" => _ = fs::copy(at("other"), at("supplement")).unwrap(),
                "cut" => fs::write(at("supplement"), &whole[..whole.len() / 2]).unwrap(),
                "damaged" => {
                    let mut bytes = whole.clone();
                    bytes[section_of(&whole, ".debug_info")].fill(0xff);
                    fs::write(at("supplement"), bytes).unwrap();
                }
                _ => fs::write(at("supplement"), &whole).unwrap(),
            }
            if how == "stripped" {
                assert!(objcopy(&["--strip-symbol=its_own"], &[&at("linked")]));
            }
            let link = format!("--add-gnu-debuglink={}", at("linked").display());
            let loaded = at(&format!("{dwarf}{compressed}{how}.so"));
            assert!(objcopy(&["--strip-all", &link], &[&library, &loaded]));
            let (names, warnings, _) = profile_library(&loaded, |builder| builder);
            println!("{dwarf}, {compressed}, {how}: {names:?} {warnings:?}");
            let is_whole = ["whole", "stripped"].contains(&how);
            assert_eq!(names, if is_whole { inlined() } else { all_names() });
            assert_eq!(warnings.len(), usize::from(!is_whole));
            assert!(warnings.iter().all(|warning| warning["reason"] == "unreadable"));
        }
    }
    // Within one file, there is nothing that others have.
    self::library(dir, &["-DINLINED", "-g"]).unwrap();
    assert!(dwz(&["library.so"]));
    assert_eq!(profile_library(&library, |builder| builder), (inlined(), vec![], vec![]));
}

/// Where no file in memory can be made, a library that names a separate debug file has the names of its own symbol table.
#[cfg(target_os = "linux")]
#[test]
fn without_files_in_memory_a_library_with_a_debug_file_keeps_its_names() {
    use seccompiler::{SeccompAction, SeccompFilter, apply_filter};
    let directory = tempfile::tempdir().unwrap();
    let dir = directory.path();
    let Some(library) = library(dir, &["-g"]) else { return };
    let [debug, loaded] = ["linked", "loaded.so"].map(|name| dir.join(name));
    assert!(objcopy(&["--only-keep-debug"], &[&library, &debug]));
    let link = format!("--add-gnu-debuglink={}", debug.display());
    assert!(objcopy(&["--strip-debug", &link], &[&library, &loaded]));
    // The layer's threads have the filter of the one that builds it.
    let profiled = std::thread::spawn(move || {
        let calls = [(libc::SYS_memfd_create, vec![])].into();
        let refuse = SeccompAction::Errno(libc::EPERM as u32);
        let arch = std::env::consts::ARCH.try_into().unwrap();
        let filter = SeccompFilter::new(calls, SeccompAction::Allow, refuse, arch).unwrap();
        let filter: seccompiler::BpfProgram = filter.try_into().unwrap();
        apply_filter(&filter).unwrap();
        profile_library(&loaded, |builder| builder)
    });
    let (names, warnings, _) = profiled.join().unwrap();
    println!("{warnings:?}");
    assert_eq!(names, all_names());
    let [warning] = warnings.as_slice() else { panic!("{warnings:?}") };
    assert!(warning["message"].as_str().unwrap().contains("its functions but no lines"));
}

#[cfg(target_arch = "x86_64")]
std::arch::global_asm!(
    ".type assembly_without_lines, @function",
    ".globl assembly_without_lines",
    "assembly_without_lines:",
    // No caller is found without unwind tables and frame pointers.
    "push rbx",
    "push rbp",
    "xor ebp, ebp",
    "2:",
    ".rept 64",
    "imul rbx, rbx, 3",
    ".endr",
    "dec rdi",
    "jnz 2b",
    "pop rbp",
    "pop rbx",
    "ret",
    ".size assembly_without_lines, . - assembly_without_lines",
);

/// Whether a program has line tables is not a matter of what happens to be sampled.
#[cfg(target_arch = "x86_64")]
#[test]
fn a_program_of_which_only_assembly_is_sampled_has_line_tables() {
    unsafe extern "C" {
        fn assembly_without_lines(rounds: u64);
    }
    if !HAS_STACKS {
        return;
    }
    let log = Log::default();
    let memory = Memory::new();
    let builder = ProfilingLayer::builder().rules("0ms|level<=info".parse().unwrap()).rate(1_000);
    let builder = builder.sampling_delay(Duration::ZERO).cpu_budget(0).exporter(memory.clone());
    let layer = builder.build().unwrap();
    let handle = layer.handle();
    let writer = log.clone();
    let json = tracing_subscriber::fmt::layer().json().with_writer(move || writer.clone());
    let dispatch = Dispatch::new(
        tracing_subscriber::registry().with(json.with_filter(LevelFilter::WARN)).with(layer),
    );
    tracing::dispatcher::with_default(&dispatch, || {
        info_span!("assembly").in_scope(|| {
            let burning = Burning::new(Duration::from_millis(500));
            while burning.goes_on() {
                // SAFETY: only uses registers, and restores those of the caller.
                unsafe { assembly_without_lines(1_000_000) };
            }
        });
        handle.flush(PLENTY).unwrap();
    });
    let profile = memory.take().pop().unwrap();
    let locations = taken_samples(&profile).flat_map(|sample| profile.stack(sample.stack));
    let in_assembly = locations.filter(|location| {
        let mut functions =
            location.lines.iter().filter_map(|line| profile.function(line.function));
        functions.any(|function| function.name == "assembly_without_lines")
    });
    let addresses: BTreeSet<_> = in_assembly.map(|location| location.address).collect();
    println!("{} addresses", addresses.len());
    assert!(addresses.len() > 8, "{addresses:?}");
    let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    assert!(!text.contains("no_line_tables"), "{text}");
}
