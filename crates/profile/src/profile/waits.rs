//! What most of the time and of the memory of a profile was spent in, and its waits.
//!
//! A wait blocks an executor only if the stack proves it: each function up to the one that runs the task has line
//! tables, which show what is inlined, and none is `block_in_place`.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use super::awaits::{self, Awaits};
use super::code_origin::{CodeOrigin, crate_of_file};
use super::leaf::Leaf;
use super::model::{FrameKind, Function, Location, LocationId, Profile};
use super::sample::{Sample, SampleKind, StackId};
use crate::facts::format::place_of;

/// The sum of a profile's waits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Waits {
    /// The number of waits.
    pub count: usize,
    /// Their total duration.
    pub total: Duration,
    /// The function with the longest total wait.
    pub longest: Option<WaitSite>,
    /// The function with the longest total wait in a task on a thread that runs tasks of tokio or `async-executor`, so that
    /// others could not run there. Unknown for code without line tables, where such a frame or that of `block_in_place` can
    /// be inlined, and for other executors.
    pub in_async: Option<WaitSite>,
    /// The total duration of all such waits.
    pub in_async_total: Duration,
}

/// A function that waited.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitSite {
    /// The function's name, without type parameters and closures: the program's innermost, or what comes next to it.
    pub function: String,
    /// The location in it: the last two parts of the file's path, and the line; empty if unknown.
    pub location: String,
    /// What it waited for, mostly: `[futex 0x7f…]` with the address of the lock, `[sleep]`, `[read]`.
    pub call: String,
    /// The total duration.
    pub waited: Duration,
}

impl Profile {
    /// Sums up the waits. Function names are known only after symbolization.
    pub fn waits(&self) -> Waits {
        let is_of_task =
            |sample: &Sample| self.blocked_in(sample).is_some() && self.blocks_tasks(sample);
        let in_tasks = self.of_kind(SampleKind::OffCpu).filter(|sample| is_of_task(sample));
        Waits {
            count: self.wait_count(),
            total: self.waited(),
            longest: self.longest_site(SampleKind::OffCpu, |_| true),
            in_async_total: Duration::from_nanos(in_tasks.map(Sample::total).sum()),
            in_async: self.longest_site(SampleKind::OffCpu, is_of_task),
        }
    }

    /// The function that has most of the time of some waits, or the line of awaits, and what most of that waited for. `None`
    /// if nothing is known of them but their length.
    pub(super) fn longest_site(
        &self,
        kind: SampleKind,
        is_wanted: impl Fn(&Sample) -> bool,
    ) -> Option<WaitSite> {
        let mut sites: BTreeMap<String, (u64, BTreeMap<[String; 3], u64>)> = BTreeMap::new();
        for sample in self.without_joins(kind).into_iter().filter(|sample| is_wanted(sample)) {
            let frames = self.code_of(self.location_ids(sample.stack));
            let call = match kind {
                SampleKind::Await => (!frames.is_empty()).then(|| awaits::awaited(&frames)),
                _ => self.blocked_in(sample).map(|call| format!("[{call}]")),
            };
            let Some(call) = call else { continue };
            let own = frames.get(own_number(&frames)).copied().unwrap_or_default();
            let site = [self.name_of(&own), own.place(), call];
            // Each line that awaits does so for something else.
            let of =
                site.iter().take(if kind == SampleKind::Await { 3 } else { 1 }).cloned().collect();
            let (waited, calls) = sites.entry(of).or_default();
            *waited += sample.total();
            *calls.entry(site).or_default() += sample.total();
        }
        let (waited, calls) = sites.into_values().max_by_key(|(waited, _)| *waited)?;
        let ([function, location, call], _) = calls.into_iter().max_by_key(|(_, ns)| *ns)?;
        Some(WaitSite { function, location, call, waited: Duration::from_nanos(waited) })
    }

    /// The share of the kept [`spans`](Self::spans)' on-CPU time that samples represent, 0 to 1; `None` without such time.
    pub fn coverage(&self) -> Option<f64> {
        let ran_ns = self.least_on_cpu_ns();
        (ran_ns > 0).then(|| (self.total(SampleKind::OnCpu) as f64 / ran_ns as f64).min(1.0))
    }

    /// For how long the threads of its spans ran at least.
    pub(super) fn least_on_cpu_ns(&self) -> u64 {
        let topmost = self.spans.iter().filter(|span| span.is_topmost);
        topmost.map(|span| span.times.least_on_cpu_ns()).sum()
    }

    /// The innermost functions of the samples of one kind with their own weights, the largest first: nanoseconds, bytes
    /// or numbers. Functions inlined into one count as a part of it: `wrapping_mul` would not be informative. Code without
    /// names is one entry for each file, and for each place in memory that is in no file, with its first address.
    pub fn functions_by(&self, kind: SampleKind) -> Vec<(String, u64)> {
        let mut own: HashMap<Cow<'_, str>, u64> = HashMap::new();
        let mut unnamed: BTreeMap<_, (u64, LocationId, u64)> = BTreeMap::new();
        for sample in self.of_kind(kind) {
            let weight = sample.total();
            let Some(leaf) = self.location_ids(sample.stack).next() else {
                if let Some(frame) = self.leaf(sample.leaf).and_then(Leaf::frame) {
                    *own.entry(frame.into()).or_default() += weight;
                }
                continue;
            };
            let Some(location) = self.location(leaf) else { continue };
            let function = location.lines.last().and_then(|line| self.function(line.function));
            if let Some(function) = function {
                *own.entry((&*function.name).into()).or_default() += weight;
                continue;
            }
            let Location { mapping, address, .. } = *location;
            let place = mapping.map_or(address / NEAR, |_| 0);
            let (first, id, sum) = unnamed.entry((mapping, place)).or_insert((address, leaf, 0));
            if address < *first {
                (*first, *id) = (address, leaf);
            }
            *sum += weight;
        }
        let named = own.into_iter().map(|(name, weight)| (name.into_owned(), weight));
        let unnamed = unnamed
            .into_values()
            .filter_map(|(_, id, weight)| Some((self.module_offset(self.location(id)?), weight)));
        let mut own: Vec<_> = named.chain(unnamed).collect();
        own.sort_by(|(a, first), (b, second)| second.cmp(first).then(b.cmp(a)));
        own
    }

    /// What a sample shows at the end of its stack, and the functions of that.
    pub fn stack_in_words(&self, sample: &Sample) -> Vec<String> {
        let leaf = self.leaf(sample.leaf).and_then(Leaf::frame);
        leaf.into_iter().chain(self.calls_in_words(sample.stack)).collect()
    }

    /// The functions of a stack with their files and lines, the innermost first.
    pub(super) fn calls_in_words(&self, stack: StackId) -> Vec<String> {
        let mut words = Vec::new();
        for location in self.stack(stack) {
            for line in &location.lines {
                let Some(Function { name, file, .. }) = self.function(line.function) else {
                    continue;
                };
                words.push(match place_of(file, line.line) {
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

    /// What a thread was blocked in, or why that is not known; `None` if nothing is known of the wait but its length.
    pub(super) fn blocked_in(&self, sample: &Sample) -> Option<Cow<'_, str>> {
        match self.leaf(sample.leaf)? {
            Leaf::Unknown(why) => Some((*why).into()),
            leaf => leaf.blocked_in(),
        }
    }

    /// Where a wait, an await or a scheduling delay was, in one line; `None` of other samples, and if nothing is known of
    /// a wait but its length.
    #[cfg(feature = "firefox")]
    pub(crate) fn place_of(&self, sample: &Sample) -> Option<String> {
        let ids = || self.location_ids(sample.stack);
        match sample.kind {
            SampleKind::OffCpu => {
                self.blocked_in(sample)?;
                let place = self.own_place(ids());
                Some(if place.is_empty() { UNKNOWN.to_owned() } else { place })
            }
            SampleKind::Await | SampleKind::Delay => {
                let (place, awaited) = (self.own_place(ids()), self.awaited(ids()));
                let at = if place.is_empty() || awaited.is_empty() { "" } else { " at " };
                Some(format!("{place}{at}{awaited}"))
            }
            _ => None,
        }
    }

    /// Where a sample was taken in the program's own code: the innermost own function, or what comes next to that, with its
    /// file and line. Code without names is its file. `None` if its stack is unknown.
    pub(crate) fn own_function(&self, sample: &Sample) -> Option<(String, &str, u32)> {
        let frames = self.code_of(self.location_ids(sample.stack));
        let own = frames.get(own_number(&frames))?;
        let Some(location) = own.unnamed.and_then(|id| self.location(id)) else {
            return Some((awaits::own_name(own.name), own.file, own.line));
        };
        let mapping = location.mapping.and_then(|mapping| self.mapping(mapping))?;
        Some((mapping.file.clone(), "", 0))
    }

    /// Whether a wait kept a thread from running other tasks: on its stack an executor runs a task, which has not left the
    /// executor by `block_in_place`. Unknown and `false` if a function in between may have others inlined that do not show.
    fn blocks_tasks(&self, sample: &Sample) -> bool {
        let mut callee = None;
        for location in self.stack(sample.stack) {
            if location.lines.is_empty() && self.origin_of_unnamed(location) == CodeOrigin::Foreign
            {
                return false;
            }
            for line in &location.lines {
                let Some(Function { name, file, .. }) = self.function(line.function) else {
                    continue;
                };
                let is_hiding = location.kind == FrameKind::Rust && file.is_empty();
                if is_hiding || name.contains("block_in_place") {
                    return false;
                }
                let of = crate_of_file(file);
                let runs_tasks = match (of.as_deref(), callee.as_deref()) {
                    (Some("tokio"), _) if name.ends_with("run_task") => file.contains("/runtime/"),
                    (Some("tokio"), _) => {
                        name.ends_with("tick") && file.ends_with("/task/local.rs")
                    }
                    (Some("async_executor"), Some("async_task")) => true,
                    _ => false,
                };
                if runs_tasks {
                    return true;
                }
                callee = of;
            }
        }
        false
    }

    /// Whether code is in a shared library, or in no file.
    pub(super) fn is_in_library(&self, location: &Location) -> bool {
        let mapping = location.mapping.and_then(|mapping| self.mapping(mapping));
        mapping.is_none_or(|mapping| mapping.file.contains(".so") || mapping.file.starts_with('['))
    }

    /// Whose code it is, if its functions have no names.
    pub(crate) fn origin_of_unnamed(&self, location: &Location) -> CodeOrigin {
        if self.is_in_library(location) { CodeOrigin::Library } else { CodeOrigin::Foreign }
    }

    /// The innermost function of the program that a stack shows in the task that an executor runs, or in a thread without
    /// one, with its file and line; empty if there is none.
    pub(super) fn own_place_in_task(&self, ids: impl Iterator<Item = LocationId>) -> String {
        let is_executor = |frame: &SourceFunction<'_>| {
            let is_in = |text: &str| EXECUTES.iter().any(|of| text.contains(of));
            frame.origin != CodeOrigin::Own && (is_in(frame.file) || is_in(frame.name))
        };
        let frames = self.code_of(ids);
        self.place_of_program(frames.split(is_executor).next().unwrap_or_default())
    }

    /// The innermost of these functions that is the program's own.
    pub(super) fn place_of_program(&self, frames: &[SourceFunction<'_>]) -> String {
        let own = frames.iter().find(|frame| frame.origin == CodeOrigin::Own);
        own.map(|own| self.place_in_words(own)).unwrap_or_default()
    }

    /// The innermost own function of a stack, with its file and line; empty if the stack is.
    pub(super) fn own_place(&self, ids: impl Iterator<Item = LocationId>) -> String {
        let frames = self.code_of(ids);
        frames.get(own_number(&frames)).map(|own| self.place_in_words(own)).unwrap_or_default()
    }

    fn place_in_words(&self, own: &SourceFunction<'_>) -> String {
        let place = own.place();
        let place = if place.is_empty() { place } else { format!(" ({place})") };
        self.name_of(own) + &place
    }

    /// The name of a function, or its location.
    pub(super) fn name_of(&self, function: &SourceFunction<'_>) -> String {
        match function.unnamed.and_then(|id| self.location(id)) {
            Some(location) => self.module_offset(location),
            None => awaits::own_name(function.name),
        }
    }

    pub(super) fn awaited(&self, ids: impl Iterator<Item = LocationId>) -> String {
        awaits::awaited(&self.code_of(ids))
    }

    /// The functions of a stack's code from the innermost, including inlined ones.
    pub(super) fn code_of(&self, ids: impl Iterator<Item = LocationId>) -> Vec<SourceFunction<'_>> {
        let mut frames = Vec::new();
        for id in ids {
            let Some(location) = self.location(id) else { continue };
            if matches!(location.kind, FrameKind::Remark | FrameKind::Kernel) {
                continue;
            }
            if location.lines.is_empty() {
                frames.push(SourceFunction {
                    unnamed: Some(id),
                    origin: self.origin_of_unnamed(location),
                    ..SourceFunction::default()
                });
            }
            frames.extend(location.lines.iter().filter_map(|line| {
                let Function { name, file, .. } = self.function(line.function)?;
                let origin = self.origin(line.function);
                Some(SourceFunction { name, file, line: line.line, unnamed: None, origin })
            }));
        }
        frames
    }
}

/// Code in no file that is no further apart was generated together.
const NEAR: u64 = 64 << 10;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct SourceFunction<'a> {
    pub(super) name: &'a str,
    pub(super) file: &'a str,
    line: u32,
    /// Set if the function's name is unknown.
    pub(super) unnamed: Option<LocationId>,
    pub(super) origin: CodeOrigin,
}

impl SourceFunction<'_> {
    pub(super) fn place(&self) -> String {
        place_of(self.file, self.line)
    }
}

/// In the names or the files of functions that run tasks, or that wake them for a socket or a timer.
const EXECUTES: [&str; 5] = ["runtime", "executor", "async_task", "async-task", "block_on"];

pub(super) const UNKNOWN: &str = "an unknown function";

/// The number of the innermost function of the program itself, or of what comes next to that.
pub(super) fn own_number(frames: &[SourceFunction<'_>]) -> usize {
    let innermost = frames.iter().enumerate().min_by_key(|(_, frame)| frame.origin);
    innermost.map_or(0, |(number, _)| number)
}

#[cfg(test)]
mod tests {
    use super::super::code_origin::OwnCode;
    use super::*;
    use crate::facts::Facts;
    use crate::profile::{Line, Mapping, Point, ProfileId};

    #[test]
    fn functions_have_the_samples_without_a_stack() {
        let mut profile = Profile::new(ProfileId::for_test(1), 10);
        let leaf = profile.add_leaf(Leaf::Unknown("allocated: stack not copied"));
        let (stack, kind) = (profile.add_stack(Vec::new()), SampleKind::AllocatedBytes);
        let point = Point { time_unix_ns: 1, weight: 7, thread: None };
        profile.add_sample_at(kind, (stack, leaf), None, point);
        let functions = profile.functions_by(kind);
        assert_eq!(functions, [("[allocated: stack not copied]".to_owned(), 7)]);
    }

    fn wait(profile: &mut Profile, call: &str, functions: &[&str], waited_ns: u64) {
        let functions: Vec<_> = functions.iter().map(|name| (*name, "")).collect();
        wait_at(profile, call, &functions, waited_ns);
    }

    /// Rust, if the name or the file shows that.
    fn wait_at(profile: &mut Profile, call: &str, functions: &[(&str, &str)], waited_ns: u64) {
        let mut stack = Vec::new();
        for (address, (name, file)) in (1..).zip(functions) {
            let function = Function { file: (*file).to_owned(), ..Function::named(name) };
            let function = profile.add_function(function);
            let is_rust = name.contains("::") || file.ends_with(".rs");
            stack.push(profile.add_location(Location {
                mapping: None,
                address,
                kind: if is_rust { FrameKind::Rust } else { FrameKind::Native },
                lines: vec![Line { function, line: 0, column: 0 }],
                is_inferred: false,
            }));
        }
        let point = Point { time_unix_ns: 1, weight: waited_ns, thread: None };
        add_wait(profile, call, stack, point);
    }

    fn add_wait(profile: &mut Profile, call: &str, stack: Vec<LocationId>, point: Point) {
        let leaf = profile.add_leaf(Leaf::Blocked(call.to_owned()));
        let place = (profile.add_stack(stack), leaf);
        profile.add_sample_at(SampleKind::OffCpu, place, None, point);
    }

    #[test]
    fn reports_the_function_with_the_longest_wait_and_its_call() {
        let mut profile = Profile::new(ProfileId::for_test(1), 1);
        let lock = ["syscall", "std::sys::futex::futex_wait", "shop::reserve", "shop::main"];
        wait(&mut profile, "futex 0x10", &lock, 30);
        wait(&mut profile, "futex 0x20", &lock, 40);
        wait(&mut profile, "sleep", &["nanosleep", "shop::nap", "shop::main"], 60);
        profile.classify();
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
        let mut stack = Vec::new();
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
        let runs = profile.add_stack(stack[1..].to_vec());
        let point = Point { time_unix_ns: 1, weight: 7, thread: None };
        add_wait(&mut profile, "sleep", stack, point);
        profile.add_sample(SampleKind::OnCpu, runs, None, point);
        assert_eq!(profile.waits().longest.unwrap().function, "shop+0x20");
        assert_eq!(profile.functions_by(SampleKind::OnCpu), [("shop+0x20".to_owned(), 7)]);
    }

    /// As with debug symbols of glibc installed: its functions have names, files and lines.
    #[test]
    fn functions_of_libraries_are_skipped_with_and_without_names() {
        let stacks = |named: bool| {
            let mut profile = Profile::new(ProfileId::for_test(1), 1);
            let mut stack = Vec::new();
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
            let point = Point { time_unix_ns: 1, weight: 7, thread: None };
            add_wait(&mut profile, "read", stack, point);
            profile.classify();
            profile.waits().longest.unwrap().function
        };
        assert_eq!([stacks(true), stacks(false)], ["load_table", "load_table"]);
    }

    /// As line tables and symbol tables show them.
    #[test]
    fn a_wait_blocks_tasks_if_every_frame_up_to_the_executor_shows_what_is_inlined() {
        const SLEEP: (&str, &str) = ("sleep", "/rustc/library/std/src/thread/functions.rs");
        const WORKS: (&str, &str) = ("shop::works", "shop/src/main.rs");
        const POLL: (&str, &str) = ("poll<shop::works, S>", "tokio-1.54.1/src/runtime/task/raw.rs");
        const WORKER: (&str, &str) = (
            "tokio::runtime::scheduler::multi_thread::worker::Context::run_task",
            "tokio-1.54.1/src/runtime/scheduler/multi_thread/worker.rs",
        );
        const POOL: (&str, &str) = ("run", "tokio-1.54.1/src/runtime/blocking/pool.rs");

        for (stack, expected) in [
            (vec![POLL, WORKER], true),
            // Of C in the program and in a library.
            (vec![("sqlite3_step", ""), ("nanosleep", "time.c"), POLL, WORKER], true),
            (
                vec![POLL, ("run_task", "vendor/tokio/src/runtime/scheduler/current_thread.rs")],
                true,
            ),
            (vec![POLL, ("{impl#3}::tick", "tokio-1.54.1/src/task/local.rs")], true),
            (
                vec![
                    ("run", "async-task-4.7.1/src/runnable.rs"),
                    ("{async_block#0}", "async-executor-1.14.1/src/lib.rs"),
                    ("block_on", "futures-lite-2.6.1/src/future.rs"),
                ],
                true,
            ),
            // The future that an executor is given, and a thread for what blocks.
            (vec![("{async_fn#0}", "async-executor-1.14.1/src/lib.rs")], false),
            (
                vec![
                    ("run", "async-task-4.7.1/src/runnable.rs"),
                    ("main_loop", "blocking-1.7.0/src/lib.rs"),
                ],
                false,
            ),
            (vec![("block_on", "tokio-1.54.1/src/runtime/park.rs")], false),
            (vec![POLL, POOL, ("main", "")], false),
            (vec![("block_in_place<F, R>", WORKER.1), POLL, WORKER], false),
            // Another crate's function of that name.
            (vec![POLL, ("run_task", "shop/src/runtime/worker.rs")], false),
            // Without line tables, of the program or of tokio, `block_in_place` can be inlined.
            (vec![("shop::dep", ""), POLL, WORKER], false),
            (vec![POLL, (WORKER.0, "")], false),
        ] {
            let mut profile = Profile::new(ProfileId::for_test(1), 1);
            let stack: Vec<_> = [SLEEP, WORKS].into_iter().chain(stack).collect();
            wait_at(&mut profile, "sleep", &stack, 30);
            profile.classify();
            let waits = profile.waits();
            assert_eq!(waits.in_async_total == waits.total, expected, "{stack:?}");
            assert_eq!(waits.in_async.is_some(), expected, "{stack:?}");
        }
    }

    #[test]
    fn inlined_functions_are_recognized_by_their_files() {
        let frame = |name, file: &'static str, line| {
            let function = Function { file: file.to_owned(), ..Function::named(name) };
            let origin = OwnCode::for_test().origin(&function, false);
            SourceFunction { name, file, line, origin, ..SourceFunction::default() }
        };
        let stack = [
            frame("__nanosleep", "./time/nanosleep.c", 7),
            frame("sleep", "/rustc/abc/library/std/src/thread/mod.rs", 8),
            frame("poll", "/usr/local/cargo/registry/src/x/tokio-1/src/poll.rs", 9),
            frame("{async_fn#0}", "/home/me/shop/src/legacy.rs", 21),
            frame("<F as core::future::future::Future>::poll", "", 0),
        ];
        let found = stack[own_number(&stack)];
        assert_eq!((found.name, found.place().as_str()), ("{async_fn#0}", "src/legacy.rs:21"));
    }

    /// Of a tree in a directory with a version, as a release's.
    #[test]
    fn the_program_waits_in_its_own_function_wherever_it_was_built() {
        use CodeOrigin::{Dependency, Library, Own, Runtime, Std};
        let longest = |directory: &str, dependency: &str, names: (&str, &'static str, &str)| {
            let (target, own_file, main) = names;
            let mut profile = Profile::new(ProfileId::for_test(1), 1);
            let target = target.to_owned().into();
            let span = Facts { target, own_file, ..Facts::default() };
            profile.spans = vec![span];
            let mut stack = Vec::new();
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
            let point = Point { time_unix_ns: 1, weight: 7, thread: None };
            add_wait(&mut profile, "sleep", stack, point);
            profile.classify();
            let origins = profile.functions().map(|(id, _)| profile.origin(id));
            let expected = [Std, Dependency, Own, Own, Runtime, Own, Library];
            let found: Vec<_> = origins.collect();
            assert_eq!(found, expected, "{directory} {dependency} {names:?}");
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
            ("./services/shop", "./external/rules_rust++crate+crates__retry-1.4.0"),
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

    fn named(profile: &mut Profile, name: &str) -> Line {
        let function = profile.add_function(Function::named(name));
        Line { function, line: 1, column: 0 }
    }

    fn point(time_unix_ns: u64) -> Point {
        Point { time_unix_ns, weight: 10, thread: None }
    }

    #[test]
    fn a_function_includes_what_is_inlined_into_it() {
        let mut profile = Profile::new(ProfileId::for_test(1), 10);
        let (busy, idle) = (named(&mut profile, "busy"), named(&mut profile, "idle"));
        let inlined = profile.add_location(Location {
            mapping: None,
            address: 1,
            kind: FrameKind::Rust,
            lines: vec![idle, busy],
            is_inferred: false,
        });
        let other = profile.add_location(Location {
            mapping: None,
            address: 2,
            kind: FrameKind::Rust,
            lines: vec![idle],
            is_inferred: false,
        });
        let hot = profile.add_stack(vec![inlined, other]);
        let cold = profile.add_stack(vec![other]);
        for time in 0..3 {
            profile.add_sample(SampleKind::OnCpu, hot, None, point(time));
        }
        profile.add_sample(SampleKind::OnCpu, cold, None, point(9));
        assert_eq!(profile.functions_by(SampleKind::OnCpu)[0], ("busy".to_owned(), 30));
    }

    #[test]
    fn code_without_names_is_summed_up_by_file_and_place() {
        let mut profile = Profile::new(ProfileId::for_test(1), 10);
        let file = "/opt/shop".to_owned();
        let shop = profile.add_mapping(Mapping { file, ..Default::default() });
        let generated = 0x7f00_0000_0000;
        let far = generated + (1 << 20);
        let named = named(&mut profile, "named");
        let places = [
            (Some(shop), 0x1000, 1),
            (Some(shop), 0xff_1000, 2),
            (None, generated, 3),
            (None, generated + 0x30, 3),
            (None, generated + 0x1000, 3),
            (None, far, 8),
        ];
        for (mapping, address, weight) in places {
            let location = profile.add_location(Location {
                mapping,
                address,
                kind: FrameKind::Native,
                lines: Vec::new(),
                is_inferred: false,
            });
            let stack = profile.add_stack(vec![location]);
            profile.add_sample(SampleKind::OnCpu, stack, None, Point { weight, ..point(1) });
        }
        let location = profile.add_location(Location {
            mapping: Some(shop),
            address: 0x2000,
            kind: FrameKind::Rust,
            lines: vec![named],
            is_inferred: false,
        });
        let stack = profile.add_stack(vec![location]);
        profile.add_sample(SampleKind::OnCpu, stack, None, Point { weight: 4, ..point(1) });
        let expected =
            [("0x7f0000000000", 9), ("0x7f0000100000", 8), ("named", 4), ("shop+0x1000", 3)];
        let expected = expected.map(|(name, weight)| (name.to_owned(), weight));
        assert_eq!(profile.functions_by(SampleKind::OnCpu), expected);
    }
}
