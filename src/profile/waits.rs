//! Sums up the waits of a profile.

use std::collections::HashMap;
use std::time::Duration;

use super::awaits::{self, Awaits};
use super::model::{FrameKind, Function, Location, LocationId, Profile, StackId};
use super::own_code::{OwnCode, is_of_dependency};
use super::sample::{Sample, SampleKind};

/// The sum of a profile's waits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Waits {
    /// The number of waits.
    pub count: usize,
    /// Their total duration.
    pub total: Duration,
    /// The function with the longest total wait.
    pub longest: Option<WaitSite>,
    /// The function with the longest total wait while an async task was polled, which blocked a thread of the executor.
    /// (Waits in `spawn_blocking` and `block_in_place` do not count.)
    pub in_async: Option<WaitSite>,
    /// The total duration of all such waits.
    pub in_async_total: Duration,
}

/// A function that waited.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct WaitSite {
    /// Its name: the innermost function outside the standard library, runtimes and other dependencies.
    pub function: String,
    /// The location in it: the last two parts of the file's path, and the line; empty if unknown.
    pub location: String,
    /// What it waited for: `[futex 0x7f…]` with the address of the lock, `[sleep]`, `[read]`. The longest one, if there
    /// are several.
    pub call: String,
    /// The total duration.
    pub waited: Duration,
}

impl Profile {
    /// Sums up the waits. Function names are known only after symbolization.
    pub fn waits(&self) -> Waits {
        let mut waits =
            Waits { count: self.wait_count(), total: self.waited(), ..Waits::default() };
        let (mut all, mut in_async) = (Sums::default(), Sums::default());
        let own = OwnCode::of(self);
        for sample in self.of_kind(SampleKind::OffCpu) {
            let waited_ns = sample.points.iter().map(|point| point.weight).sum();
            let (call, frames) = self.call_and_frames(sample, &own);
            // Only a note: the waiting function is unknown.
            if call.is_empty() {
                continue;
            }
            let wait_site = wait_site(&frames);
            all.add(wait_site, call, waited_ns);
            if blocks_a_task(&frames) {
                waits.in_async_total += Duration::from_nanos(waited_ns);
                in_async.add(wait_site, call, waited_ns);
            }
        }
        waits.longest = all.longest(self);
        waits.in_async = in_async.longest(self);
        waits
    }

    /// The functions of a stack with their files and lines, the innermost first.
    pub(crate) fn stack_in_words(&self, stack: StackId) -> Vec<String> {
        let mut words = Vec::new();
        for location in self.stack(stack) {
            for line in &location.lines {
                let Some(Function { name, file, .. }) = self.function(line.function) else {
                    continue;
                };
                let place = SourceFunction { file, line: line.line, ..SourceFunction::default() };
                words.push(match place.place() {
                    none if none.is_empty() => name.clone(),
                    place => format!("{name} ({place})"),
                });
            }
            if location.lines.is_empty() {
                words.push(self.module_offset(location));
            }
        }
        words
    }

    /// Sums up the awaits and scheduling delays. Function names are known only after symbolization.
    pub fn awaits(&self) -> Awaits {
        awaits::sum(self)
    }

    /// Whether its innermost frame does not state what it waited for.
    pub(crate) fn ends_in_code(&self, sample: &Sample) -> bool {
        self.stack(sample.stack).next().is_none_or(|location| location.kind != FrameKind::Wait)
    }

    /// What a wait was for, and in which function; `None` for a sample that is not a wait.
    #[cfg(feature = "firefox")]
    pub(crate) fn wait_site(&self, sample: &Sample, own: &OwnCode) -> Option<(&str, String)> {
        let (call, frames) = self.call_and_frames(sample, own);
        let mut sums = Sums::default();
        sums.add(wait_site(&frames), call, 0);
        let WaitSite { function, location, .. } = sums.longest(self)?;
        let place = if location.is_empty() { String::new() } else { format!(" ({location})") };
        (!call.is_empty()).then(|| (call, format!("{function}{place}")))
    }

    /// Whether code is in a shared library, or in no file.
    fn is_in_library(&self, location: &Location) -> bool {
        let mapping = location.mapping.and_then(|mapping| self.mapping(mapping));
        mapping.is_none_or(|mapping| mapping.file.contains(".so") || mapping.file.starts_with('['))
    }

    /// What a wait is for, and its functions from the innermost, including inlined ones.
    pub(super) fn call_and_frames(
        &self,
        sample: &Sample,
        own: &OwnCode,
    ) -> (&str, Vec<SourceFunction<'_>>) {
        let (mut call, mut frames) = ("", Vec::new());
        for id in self.location_ids(sample.stack) {
            let Some(location) = self.location(id) else { continue };
            let in_library = self.is_in_library(location);
            let in_source = location.lines.iter().filter_map(|line| {
                let Function { name, file, .. } = self.function(line.function)?;
                let is_known_own = own.contains(file);
                let line = line.line;
                Some(SourceFunction { name, file, line, unnamed: None, in_library, is_known_own })
            });
            match location.kind {
                FrameKind::Wait => {
                    call = in_source.map(|frame| frame.name).next().unwrap_or_default();
                }
                FrameKind::Remark | FrameKind::Kernel => {}
                FrameKind::Rust | FrameKind::Native if location.lines.is_empty() => {
                    frames.push(SourceFunction {
                        unnamed: Some(id),
                        in_library,
                        ..SourceFunction::default()
                    });
                }
                FrameKind::Rust | FrameKind::Native => frames.extend(in_source),
            }
        }
        (call, frames)
    }
}

/// A function in the source code.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct SourceFunction<'a> {
    pub(super) name: &'a str,
    pub(super) file: &'a str,
    line: u32,
    /// Set if the function's name is unknown.
    pub(super) unnamed: Option<LocationId>,
    /// Whether it is in a shared library, or in no file.
    in_library: bool,
    /// Whether it is known to belong to the program itself, whatever its path looks like.
    is_known_own: bool,
}

impl SourceFunction<'_> {
    /// Whether it belongs to the program itself, not to a dependency.
    fn is_own(&self) -> bool {
        let is_named = !self.file.is_empty() || crate_of(self.name).is_some();
        is_named
            && !self.is_plumbing()
            && (self.file.ends_with(".rs") || crate_of(self.name).is_some())
    }

    /// Whether it waits on behalf of its callers, judging by its name or its file.
    fn is_plumbing(&self) -> bool {
        !self.is_known_own
            && (self.is_in_dependency()
                || crate_of(self.name).is_some_and(|of| PLUMBING.contains(&of)))
    }

    /// Whether its file belongs to a dependency.
    pub(super) fn is_in_dependency(&self) -> bool {
        !self.is_known_own && is_of_dependency(self.file)
    }

    pub(super) fn place(&self) -> String {
        if self.file.is_empty() {
            return String::new();
        }
        let parts: Vec<&str> = self.file.rsplitn(3, '/').take(2).collect();
        let end: Vec<&str> = parts.into_iter().rev().collect();
        format!("{}:{}", end.join("/"), self.line)
    }
}

/// Total time by function and call.
#[derive(Default)]
struct Sums<'a>(HashMap<Whose<'a>, HashMap<(&'a str, SourceFunction<'a>), u64>>);

/// A function's name, or its location.
type Whose<'a> = (&'a str, Option<LocationId>);

impl<'a> Sums<'a> {
    fn add(&mut self, wait_site: SourceFunction<'a>, call: &'a str, waited_ns: u64) {
        *self
            .0
            .entry((wait_site.name, wait_site.unnamed))
            .or_default()
            .entry((call, wait_site))
            .or_default() += waited_ns;
    }

    fn longest(self, profile: &Profile) -> Option<WaitSite> {
        let longest =
            self.0.into_iter().max_by_key(|(whose, calls)| (calls.values().sum::<u64>(), *whose));
        let ((function, unnamed), calls) = longest?;
        let place = unnamed.and_then(|id| profile.location(id));
        let function = match place {
            Some(location) => profile.module_offset(location),
            None if function.is_empty() => UNKNOWN.to_owned(),
            None => function.to_owned(),
        };
        let waited_ns = calls.values().sum();
        let ((call, frame), _) = calls.into_iter().max_by_key(|(call, ns)| (*ns, *call))?;
        Some(WaitSite {
            function,
            location: frame.place(),
            call: call.to_owned(),
            waited: Duration::from_nanos(waited_ns),
        })
    }
}

/// Crates whose functions wait on behalf of their callers.
pub(super) const PLUMBING: [&str; 19] = [
    "std",
    "core",
    "alloc",
    "parking_lot",
    "parking_lot_core",
    "lock_api",
    "crossbeam",
    "crossbeam_channel",
    "crossbeam_utils",
    "tokio",
    "mio",
    "rustix",
    "libc",
    "nix",
    "futures",
    "futures_util",
    "futures_core",
    "tracing",
    "tracing_profiling",
];

pub(super) const UNKNOWN: &str = "an unknown function";

/// The innermost function of the program itself, judging by names, or otherwise by mapped files, because functions of
/// the C library may have names, too. If there is none, the innermost function.
fn wait_site<'a>(frames: &[SourceFunction<'a>]) -> SourceFunction<'a> {
    frames.get(own_number(frames)).copied().unwrap_or_default()
}

/// The number of the frame that [`wait_site`] returns.
pub(super) fn own_number(frames: &[SourceFunction<'_>]) -> usize {
    let of_program = |frame: &SourceFunction<'_>| !frame.in_library;
    let own = frames.iter().position(SourceFunction::is_own);
    own.or_else(|| frames.iter().position(|frame| of_program(frame) && !frame.is_plumbing()))
        .or_else(|| frames.iter().position(of_program))
        .unwrap_or(0)
}

/// The crate in a Rust function's path; for `<A as B>::f`, that of `A`.
pub(super) fn crate_of(name: &str) -> Option<&str> {
    let name = name.trim_start_matches(['<', '&', '(', '[', '*']);
    let name = name.strip_prefix("mut ").or_else(|| name.strip_prefix("dyn ")).unwrap_or(name);
    let (first, _) = name.split_once("::")?;
    let is_name = first.chars().all(|c| c.is_alphanumeric() || c == '_');
    is_name.then_some(first)
}

/// Whether an executor was polling a task that had not registered that it would block.
fn blocks_a_task(frames: &[SourceFunction<'_>]) -> bool {
    for SourceFunction { name, .. } in frames {
        if name.contains("BlockingTask") || name.contains("block_in_place") {
            return false;
        }
        let polls =
            ["Future>::poll", "Future::poll", "task::raw::poll", "poll_future", "async_task::raw"];
        if polls.iter().any(|part| name.contains(part)) {
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::Facts;
    use crate::profile::{Line, Point, ProfileId};

    fn frames<'a>(names: &[&'a str]) -> Vec<SourceFunction<'a>> {
        names.iter().map(|name| SourceFunction { name, ..SourceFunction::default() }).collect()
    }

    fn wait(profile: &mut Profile, call: &str, functions: &[&str], waited_ns: u64) {
        let mut stack = vec![profile.add_wait(call)];
        for (address, name) in (1..).zip(functions) {
            let function = profile.add_function(Function::named(name));
            stack.push(profile.add_location(Location {
                mapping: None,
                address,
                kind: FrameKind::Rust,
                lines: vec![Line { function, line: 0, column: 0 }],
                is_inferred: false,
            }));
        }
        let stack = profile.add_stack(stack);
        let point = Point { time_unix_ns: 1, weight: waited_ns, thread: None };
        profile.add_sample(SampleKind::OffCpu, stack, None, point);
    }

    #[test]
    fn reports_the_function_with_the_longest_wait_and_its_call() {
        let mut profile = Profile::new(ProfileId::for_test(1), 1);
        let lock = ["syscall", "std::sys::futex::futex_wait", "shop::reserve", "shop::main"];
        wait(&mut profile, "[futex 0x10]", &lock, 30);
        wait(&mut profile, "[futex 0x20]", &lock, 40);
        wait(&mut profile, "[sleep]", &["nanosleep", "shop::nap", "shop::main"], 60);
        let waits = profile.waits();
        assert_eq!((waits.count, waits.total), (3, Duration::from_nanos(130)));
        let longest = waits.longest.unwrap();
        assert_eq!(longest.function, "shop::reserve");
        assert_eq!(
            (longest.call.as_str(), longest.waited),
            ("[futex 0x20]", Duration::from_nanos(70))
        );
        assert_eq!((waits.in_async, waits.in_async_total), (None, Duration::ZERO));
    }

    #[test]
    fn without_names_the_function_is_a_location_in_the_executable() {
        let mut profile = Profile::new(ProfileId::for_test(1), 1);
        let mut stack = vec![profile.add_wait("[sleep]")];
        for (file, address) in [("/usr/lib/libc.so.6", 0x10), ("shop", 0x20), ("shop", 0x30)] {
            let file = file.to_owned();
            let mapping =
                profile.add_mapping(crate::profile::Mapping { file, ..Default::default() });
            stack.push(profile.add_location(Location {
                mapping: Some(mapping),
                address,
                kind: FrameKind::Native,
                lines: Vec::new(),
                is_inferred: false,
            }));
        }
        let (waits, runs) =
            (profile.add_stack(stack.clone()), profile.add_stack(stack[2..].to_vec()));
        let point = Point { time_unix_ns: 1, weight: 7, thread: None };
        profile.add_sample(SampleKind::OffCpu, waits, None, point);
        profile.add_sample(SampleKind::OnCpu, runs, None, point);
        assert_eq!(profile.waits().longest.unwrap().function, "shop+0x20");
        assert_eq!(profile.top_function(), Some(("shop+0x20".to_owned(), 1.0)));
    }

    /// As with debug symbols of glibc installed: its functions have names, files and lines.
    #[test]
    fn functions_of_libraries_are_skipped_with_and_without_names() {
        let stacks = |named: bool| {
            let mut profile = Profile::new(ProfileId::for_test(1), 1);
            let mut stack = vec![profile.add_wait("[read]")];
            for (address, (module, function, file)) in (1..).zip([
                (
                    "/usr/lib/libc.so.6",
                    "__GI___libc_read",
                    "./io/../sysdeps/unix/sysv/linux/read.c",
                ),
                ("/usr/lib/libpthread.so.0", "start_io", "./nptl/io.c"),
                ("[vdso]", "entry", ""),
                ("/srv/shop", "std::sys::fs::unix::File::read", "/rustc/a/library/std/src/fs.rs"),
                ("/srv/shop", "load_table", "table.c"),
                ("/srv/shop", "main", "main.c"),
                (
                    "/usr/lib/libc.so.6",
                    "__libc_start_call_main",
                    "./csu/../sysdeps/x86/libc-start.c",
                ),
            ]) {
                let file_of_code = module.to_owned();
                let mapping = profile.add_mapping(crate::profile::Mapping {
                    file: file_of_code,
                    ..Default::default()
                });
                let is_named = named || module == "/srv/shop";
                let lines = is_named.then(|| {
                    let function = Function { file: file.to_owned(), ..Function::named(function) };
                    Line { function: profile.add_function(function), line: 7, column: 0 }
                });
                stack.push(profile.add_location(Location {
                    mapping: Some(mapping),
                    address,
                    kind: FrameKind::Native,
                    lines: lines.into_iter().collect(),
                    is_inferred: false,
                }));
            }
            let stack = profile.add_stack(stack);
            let point = Point { time_unix_ns: 1, weight: 7, thread: None };
            profile.add_sample(SampleKind::OffCpu, stack, None, point);
            profile.waits().longest.unwrap().function
        };
        assert_eq!([stacks(true), stacks(false)], ["load_table", "load_table"]);
    }

    #[test]
    fn distinguishes_tasks_that_block_from_threads_that_may_block() {
        let task = [
            "clock_nanosleep",
            "std::thread::sleep",
            "shop::legacy::{{closure}}",
            "<tracing::instrument::Instrumented<T> as core::future::future::Future>::poll",
            "tokio::runtime::task::raw::poll",
        ];
        assert!(blocks_a_task(&frames(&task)));
        assert_eq!(wait_site(&frames(&task)).name, "shop::legacy::{{closure}}");
        let pool = [
            "clock_nanosleep",
            "shop::export",
            "<tokio::runtime::blocking::task::BlockingTask<T> as core::future::future::Future>::poll",
            "tokio::runtime::task::raw::poll",
        ];
        assert!(!blocks_a_task(&frames(&pool)));
        let in_place =
            ["read", "tokio::task::blocking::block_in_place", "tokio::runtime::task::raw::poll"];
        assert!(!blocks_a_task(&frames(&in_place)));
        let parked =
            ["futex_wait", "tokio::runtime::park::CachedParkThread::block_on", "shop::main"];
        assert!(!blocks_a_task(&frames(&parked)));
    }

    #[test]
    fn inlined_functions_are_recognized_by_their_files() {
        let frame =
            |name, file, line| SourceFunction { name, file, line, ..SourceFunction::default() };
        let stack = [
            frame("__nanosleep", "./time/nanosleep.c", 7),
            frame("sleep", "/rustc/abc/library/std/src/thread/mod.rs", 8),
            frame("poll", "/usr/local/cargo/registry/src/x/tokio-1/src/poll.rs", 9),
            frame("{async_fn#0}", "/home/me/shop/src/legacy.rs", 21),
            frame("<F as core::future::future::Future>::poll", "", 0),
        ];
        let found = wait_site(&stack);
        assert_eq!((found.name, found.place().as_str()), ("{async_fn#0}", "src/legacy.rs:21"));
    }

    /// Of a tree in a directory with a version, as a release's.
    #[test]
    fn the_program_waits_in_its_own_function_wherever_it_was_built() {
        let longest = |directory: &str, dependency: &str, names: (&str, &'static str, &str)| {
            let (target, own_file, main) = names;
            let mut profile = Profile::new(ProfileId::for_test(1), 1);
            let target = target.to_owned().into();
            let span = Facts { target, own_file, ..Facts::default() };
            profile.spans = vec![span];
            let mut stack = vec![profile.add_wait("[sleep]")];
            for (address, (function, file)) in (1..).zip([
                ("sleep", "/rustc/library/std/src/thread/mod.rs".to_owned()),
                ("retry<shop::ask>", format!("{dependency}/src/retry.rs")),
                ("ask", format!("{directory}/src/upstream.rs")),
                ("shop::serve", format!("{directory}/src/serve.rs")),
                // The code of a macro.
                ("shop::serve::{{closure}}", "tokio-1.50.0/src/macros/select.rs".to_owned()),
                (main, format!("{directory}/src/main.rs")),
                ("main", String::new()),
            ]) {
                let function = Function { file, ..Function::named(function) };
                let function = profile.add_function(function);
                stack.push(profile.add_location(Location {
                    mapping: None,
                    address,
                    kind: FrameKind::Rust,
                    lines: vec![Line { function, line: 3, column: 0 }],
                    is_inferred: false,
                }));
            }
            let stack = profile.add_stack(stack);
            let point = Point { time_unix_ns: 1, weight: 7, thread: None };
            profile.add_sample(SampleKind::OffCpu, stack, None, point);
            profile.waits().longest.unwrap().function
        };
        for (directory, dependency) in [
            ("shop-2.0.1", "retry-1.4.0"),
            ("/build/shop-2.0.1", "/root/.cargo/registry/src/index.crates.io-1/retry-1.4.0"),
            ("/build/shop-2.0.1", "/build/retry-1.4.0"),
            ("/remapped", "registry/src/index/retry-1.4.0"),
            ("vendor/shop", "vendor/retry"),
            ("services/shop", "external/crates__retry-1.4.0"),
            ("services/shop", "/proc/self/cwd/external/rules~crates__retry"),
            ("services/shop", "third-party/rust/vendor/retry"),
            ("shop", "/home/me/fbsource/third-party/rust/retry/1.4.0"),
            ("shop-0123456789abcdef/abc1234/shop", "retry-0123456789abcdef/abc1234"),
        ] {
            for span in [
                ("shop::serve", "src/serve.rs", "main"),
                ("another target", "src/serve.rs", "shop::main"),
                // Of a dependency, such as tower-http.
                ("tower_http::trace", "", "shop::main"),
            ] {
                assert_eq!(longest(directory, dependency, span), "ask", "{directory} {span:?}");
            }
        }
        // The program's crate has another name than the tree.
        let span = ("shop::serve", "src/serve.rs", "main");
        assert_eq!(longest("/build/release-2.0.1", "/build/retry-1.4.0", span), "ask");
    }

    #[test]
    fn crates_are_read_from_paths() {
        for (name, expected) in [
            ("shop::f", Some("shop")),
            ("<std::net::TcpStream as std::io::Read>::read", Some("std")),
            ("<&mut shop::X as core::fmt::Write>::f", Some("shop")),
            ("nanosleep", None),
        ] {
            assert_eq!(crate_of(name), expected, "{name}");
        }
    }
}
