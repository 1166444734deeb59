//! Rebuilds a profile with symbols and redacted names.

use std::borrow::Cow;
use std::collections::HashMap;

use super::OTHER_LEAF;
use super::downsampling::Selection;
use super::model::{
    FrameKind, Function, FunctionId, Line, Location, LocationId, MappingId, Profile,
};
use super::names::capped;
use super::sample::{Point, Sample, SampleKind};
use super::spans::{Link, LinkId, ProfiledThread, ThreadId};
use super::stack_tree::StackId;
use crate::redact::Redaction;

/// A source of symbols.
pub(crate) trait Symbols {
    /// Further build ids of the file, for [`Mapping::build_ids`](super::Mapping::build_ids).
    fn build_ids(&mut self, mapping: MappingId) -> Vec<(String, String)>;
    /// The code at a location, with the innermost inlined function first. `None` to keep the location's own lines.
    fn lines(&mut self, location: &Location) -> Option<(FrameKind, Vec<SourceLine>)>;
}

/// A line of a function that is not part of a profile yet.
#[derive(Clone, Debug)]
pub(crate) struct SourceLine {
    pub(crate) function: Function,
    pub(crate) line: u32,
    pub(crate) column: u32,
}

/// The maximum number of functions in a stack, including inlined ones; outer callers beyond it are left out. More rows
/// do not help in a picture, and inlining turns some hundred frames into thousands of functions.
pub(crate) const MOST_LEVELS: usize = 1024;
/// The maximum number of functions inlined at one location.
const MOST_INLINED: usize = 256;

/// A symbolized profile, and what was left out.
pub(crate) struct Symbolized {
    pub(crate) profile: Profile,
    /// Samples and waits that were downsampled so that the profile fits. Others have their weight.
    pub(crate) downsampled: usize,
    /// Samples and waits whose outer callers were left out.
    pub(crate) shortened: usize,
}

impl Profile {
    /// Rebuilds the profile with symbols and redacted names. It has as many samples as fit into `most_bytes`. Entries
    /// that become equal are merged, and entries that no sample refers to are dropped. Title, notes and attributes are
    /// copied unchanged.
    pub(crate) fn symbolized(
        &self,
        symbols: &mut dyn Symbols,
        redaction: &Redaction,
        most_bytes: usize,
    ) -> Symbolized {
        let points = self.point_count();
        let mut every = 1;
        loop {
            // A single sample is exported, however large it is.
            let most_bytes = if every < points { most_bytes } else { usize::MAX };
            match self.rebuilt(every, most_bytes, symbols, redaction) {
                Some(symbolized) => return symbolized,
                None => every = every.saturating_mul(2),
            }
        }
    }

    /// One in `every` points of each kind, and the first of each link in OTLP, with its sample. Each has the weight of
    /// those that are left out, so the sums do not change.
    pub(super) fn downsampled_points(&self, every: usize) -> Vec<(&Sample, Point)> {
        let kinds = SampleKind::ALL.map(|kind| (kind, self.points(kind).count(), every));
        let (mut selection, mut taken) = (Selection::new(kinds), Vec::new());
        for sample in SampleKind::ALL.into_iter().flat_map(|kind| self.of_kind(kind)) {
            let linked = sample.link.and_then(|link| self.link(link)?.linked);
            for point in &sample.points {
                let weight = selection.take(sample.kind, point.weight, linked);
                taken.extend(weight.map(|weight| (sample, Point { weight, ..*point })));
            }
        }
        taken
    }

    /// Returns `None` if the result would exceed `most_bytes`.
    fn rebuilt(
        &self,
        every: usize,
        most_bytes: usize,
        symbols: &mut dyn Symbols,
        redaction: &Redaction,
    ) -> Option<Symbolized> {
        let mut rebuilding = Rebuilding {
            from: self,
            to: self.without_samples(),
            symbols,
            redaction,
            functions: HashMap::new(),
            mappings: HashMap::new(),
            locations: HashMap::new(),
            stacks: HashMap::new(),
            await_stacks: HashMap::new(),
            allocation_stacks: HashMap::new(),
            links: HashMap::new(),
            threads: HashMap::new(),
        };
        if let Some(program) = self.first_mapping() {
            rebuilding.mapping(program);
        }
        let points = self.downsampled_points(every);
        let downsampled = self.point_count() - points.len();
        let mut shortened = 0;
        for (sample, point) in points {
            let (stack, is_short) = match sample.kind {
                SampleKind::OnCpu | SampleKind::OffCpu => rebuilding.stack(sample.stack),
                SampleKind::Await | SampleKind::Delay => rebuilding.await_stack(sample.stack),
                _ => rebuilding.allocation_stack(sample.stack),
            };
            let link = sample.link.and_then(|link| rebuilding.link(link));
            let thread = point.thread.and_then(|thread| rebuilding.thread(thread));
            let point = Point { thread, ..point };
            rebuilding.to.add_sample(sample.kind, stack, link, point);
            shortened += usize::from(is_short);
            if rebuilding.to.bytes() > most_bytes {
                return None;
            }
        }
        Some(Symbolized { profile: rebuilding.to, downsampled, shortened })
    }
}

/// Whether a function clones wakers on behalf of a leaf future.
fn clones_wakers(Function { name, file, .. }: &Function) -> bool {
    const PARTS: [&str; 9] = [
        "core::task::wake::",
        // Inlined functions have no path.
        "into_waker",
        "core::ops::function::",
        "atomic_waker",
        "AtomicWaker",
        "WakerRef",
        "catch_unwind",
        "__rust_try",
        "AssertUnwindSafe",
    ];
    const CONTAINERS: [&str; 3] = ["core::option::", "alloc::", "core::mem::"];
    let is_poll = name.ends_with("Future>::poll");
    // In release builds, inlined functions have no path.
    let is_inlined_waker = !name.contains("::") && file.ends_with("/task/wake.rs");
    let is_waker = is_inlined_waker || PARTS.iter().any(|part| name.contains(part));
    !is_poll && (is_waker || CONTAINERS.iter().any(|part| name.starts_with(part)))
}

/// Whether a function allocates on behalf of the code that calls it: this crate's allocator, and Rust's library with its
/// collections.
fn allocates(Function { name, file, .. }: &Function) -> bool {
    const PARTS: [&str; 5] =
        ["__rust_", "__rg_", "__rdl_", "ProfilingAllocator", "tracing_profiling::sys::allocator"];
    // In release builds, inlined functions have no path.
    let is_inlined_here = !name.contains("::") && file.ends_with("src/sys/allocator.rs");
    let is_allocator = is_inlined_here || PARTS.iter().any(|part| name.contains(part));
    is_allocator || if file.is_empty() { is_named_like_library(name) } else { is_in_library(file) }
}

/// Whether that source file is of Rust's library, or of its hash maps.
fn is_in_library(file: &str) -> bool {
    let is_of_rust = file.starts_with("/rustc/") || file.contains("/rustlib/src/rust/");
    (is_of_rust && file.contains("/library/")) || file.contains("hashbrown-")
}

/// The same, judging by a function's name. Of a trait's function, the type and the trait must be of the library: programs
/// implement their own traits for its types.
fn is_named_like_library(name: &str) -> bool {
    const CRATES: [&str; 4] = ["alloc::", "core::", "std::", "hashbrown::"];
    let is_of_crate = |path: &str| {
        let path = path.trim_start_matches(['<', '&', '[', '(']);
        CRATES.iter().any(|part| path.starts_with(part))
    };
    let of_trait = name.strip_prefix('<').and_then(|rest| {
        let is_outermost = |(at, _): &(usize, &str)| {
            let before = rest.get(..*at).unwrap_or_default();
            before.matches('<').count() <= before.matches('>').count()
        };
        let (at, separator) = rest.match_indices(" as ").find(is_outermost)?;
        rest.get(at + separator.len()..)
    });
    is_of_crate(name) && of_trait.is_none_or(is_of_crate)
}

/// Whether a function limits the time of a future, judging by its name or its file.
fn is_of_timeout(Function { name, file, .. }: &Function) -> bool {
    let has = |text: &str, parts: [&str; 2]| parts.iter().any(|part| text.contains(part));
    has(name, ["::timeout::", "Timeout<"]) || has(file, ["/timeout.rs", "/timeout/"])
}

/// Whether a function is of this crate's wrapper.
fn is_of_wrapper(Function { name, file, .. }: &Function) -> bool {
    const FILES: [&str; 3] =
        ["src/awaits/future.rs", "src/awaits/record.rs", "src/sys/task_waker.rs"];
    name.contains("tracing_profiling::awaits::")
        || name.contains("tracing_profiling::sys::task_waker")
        || FILES.iter().any(|part| file.ends_with(part))
}

/// The state of a rebuild: new ids by old ids.
struct Rebuilding<'a> {
    from: &'a Profile,
    to: Profile,
    symbols: &'a mut dyn Symbols,
    redaction: &'a Redaction,
    /// By their original names.
    functions: HashMap<Function, FunctionId>,
    mappings: HashMap<MappingId, MappingId>,
    locations: HashMap<LocationId, LocationId>,
    /// And whether the stack was shortened.
    stacks: HashMap<StackId, (StackId, bool)>,
    /// The same for stacks of awaits.
    await_stacks: HashMap<StackId, (StackId, bool)>,
    allocation_stacks: HashMap<StackId, (StackId, bool)>,
    links: HashMap<LinkId, LinkId>,
    threads: HashMap<ThreadId, ThreadId>,
}

impl Rebuilding<'_> {
    fn stack(&mut self, id: StackId) -> (StackId, bool) {
        if let Some(known) = self.stacks.get(&id) {
            return *known;
        }
        let (stack, is_short) = self.stack_of(id);
        let place = (self.to.add_stack(stack), is_short);
        self.stacks.insert(id, place);
        place
    }

    /// The stack of an await, from the leaf future to the wrapper. The functions inside of the leaf that clone the waker
    /// are left out, and those of the wrapper.
    fn await_stack(&mut self, id: StackId) -> (StackId, bool) {
        if let Some(known) = self.await_stacks.get(&id) {
            return *known;
        }
        let (stack, is_short) = self.stack_of(id);
        let stack = self.likely_leaf(&stack);
        let stack = self.without_ends(stack, clones_wakers, is_of_wrapper);
        let place = (self.to.add_stack(stack), is_short);
        self.await_stacks.insert(id, place);
        place
    }

    /// The stack of an allocation, without the functions of the allocator and of the collection that grew: the innermost
    /// function is the one whose code allocates.
    fn allocation_stack(&mut self, id: StackId) -> (StackId, bool) {
        if let Some(known) = self.allocation_stacks.get(&id) {
            return *known;
        }
        let (stack, is_short) = self.stack_of(id);
        let stack = self.without_ends(&stack, allocates, |_| false);
        let place = (self.to.add_stack(stack), is_short);
        self.allocation_stacks.insert(id, place);
        place
    }

    /// The part of a stack that shows what was awaited. If two leaves cloned the waker, it is the one that did last,
    /// unless that is the timer of a timeout which has just polled the other one: a timeout polls its timer last.
    fn likely_leaf<'b>(&self, stack: &'b [LocationId]) -> &'b [LocationId] {
        let lines = |part: &[LocationId]| -> Vec<Line> {
            let locations = part.iter().filter_map(|id| self.to.location(*id));
            locations.flat_map(|location| location.lines.iter().copied()).collect()
        };
        let is_or = |id: &LocationId| {
            let names = lines(std::slice::from_ref(id)).into_iter();
            let mut names = names.filter_map(|line| self.to.function(line.function));
            names.any(|function| function.name == OTHER_LEAF)
        };
        let mut parts = stack.splitn(2, is_or);
        let (Some(last), Some(before)) = (parts.next(), parts.next()) else {
            return stack.split(is_or).next().unwrap_or(stack);
        };
        // The innermost function that both are in, at different lines of it.
        let (of_last, of_before) = (lines(last), lines(before));
        let mut both = of_last.iter().rev().zip(of_before.iter().rev());
        let parting = both.find(|(last, before)| last != before);
        let is_timeout = parting.is_some_and(|(last, before)| {
            let function = self.to.function(last.function);
            last.function == before.function && function.is_some_and(is_of_timeout)
        });
        if is_timeout { before } else { last }
    }

    /// A stack without the innermost functions for which `is_inner` holds, and without the outermost ones for which
    /// `is_outer` holds, but for one.
    fn without_ends(
        &mut self,
        stack: &[LocationId],
        is_inner: fn(&Function) -> bool,
        is_outer: fn(&Function) -> bool,
    ) -> Vec<LocationId> {
        let lines: Vec<_> = stack
            .iter()
            .filter_map(|id| self.to.location(*id))
            .flat_map(|location| match location.kind {
                FrameKind::Wait | FrameKind::Remark => vec![None; location.lines.len().max(1)],
                _ if location.lines.is_empty() => vec![None],
                _ => location.lines.iter().map(Some).collect(),
            })
            .map(|line| line.and_then(|line| self.to.function(line.function)))
            .collect();
        // The notes come first.
        let notes = lines.iter().take_while(|function| function.is_none()).count();
        let inner = lines.iter().skip(notes).take_while(|function| function.is_some_and(is_inner));
        let first = notes + inner.count();
        // The innermost function of the wrapper of a future stays: its type parameter names the function that it polls.
        let outer = lines.iter().rev().take_while(|function| function.is_some_and(is_outer));
        let outer = outer.count().saturating_sub(1);
        // If nothing else is left, all may be of interest.
        let kept = if first < lines.len() - outer {
            first..lines.len() - outer
        } else {
            notes..lines.len()
        };
        let (mut without, mut next) = (Vec::new(), 0);
        for id in stack {
            let Some(location) = self.to.location(*id) else { continue };
            let numbers = next..next + location.lines.len().max(1);
            next = numbers.end;
            let is_kept = |number: usize| number < notes || kept.contains(&number);
            if numbers.clone().all(is_kept) {
                without.push(*id);
            } else if numbers.clone().any(is_kept) {
                let lines = location.lines.iter().zip(numbers);
                let lines = lines.filter(|(_, number)| is_kept(*number)).map(|(line, _)| *line);
                let part = Location { lines: lines.collect(), ..location.clone() };
                without.push(self.to.add_location(part));
            }
        }
        without
    }

    fn stack_of(&mut self, id: StackId) -> (Vec<LocationId>, bool) {
        let from = self.from;
        let mut stack = Vec::new();
        let (mut levels, mut is_short) = (0, false);
        for location in from.location_ids(id) {
            let Some(location) = self.location(location) else { continue };
            let lines = self.to.location(location).map_or(0, |location| location.lines.len());
            levels += lines.max(1);
            if levels >= MOST_LEVELS {
                is_short = true;
                stack.push(self.to.add_remark("[deeper callers left out]"));
                break;
            }
            stack.push(location);
        }
        (stack, is_short)
    }

    fn location(&mut self, id: LocationId) -> Option<LocationId> {
        if let Some(known) = self.locations.get(&id) {
            return Some(*known);
        }
        let location = self.from.location(id)?;
        let mapping = location.mapping.and_then(|mapping| self.mapping(mapping));
        let (kind, mut lines) = self
            .symbols
            .lines(location)
            .unwrap_or_else(|| (location.kind, self.from.source_lines(location)));
        // The outermost function states where the code is.
        if lines.len() > MOST_INLINED {
            lines.drain(MOST_INLINED - 1..lines.len() - 1);
        }
        let is_code = !matches!(kind, FrameKind::Wait | FrameKind::Remark);
        let lines = lines.into_iter().map(|SourceLine { function, line, column }| {
            // Notes keep their names.
            let function =
                if is_code { self.code(function) } else { self.to.add_function(function) };
            Line { function, line, column }
        });
        let lines = lines.collect();
        let Location { address, is_inferred, .. } = *location;
        let new = Location { mapping, address, kind, lines, is_inferred };
        let place = self.to.add_location(new);
        self.locations.insert(id, place);
        Some(place)
    }

    /// Adds a function with its redacted names.
    fn code(&mut self, function: Function) -> FunctionId {
        if let Some(known) = self.functions.get(&function) {
            return *known;
        }
        let Function { name, system_name, file } = &function;
        let new = self.redaction.redact_function(name);
        // A mangled name contains the same information in a form that no pattern matches.
        let linkers = if new == *name {
            self.redaction.redact_function(system_name)
        } else {
            Cow::Borrowed(&*new)
        };
        let public = Function {
            name: capped(&new).into_owned(),
            system_name: capped(&linkers).into_owned(),
            file: capped(&self.redaction.redact_source(file)).into_owned(),
        };
        let place = self.to.add_function(public);
        self.functions.insert(function, place);
        place
    }

    fn mapping(&mut self, id: MappingId) -> Option<MappingId> {
        if let Some(known) = self.mappings.get(&id) {
            return Some(*known);
        }
        let mut mapping = self.from.mapping(id)?.clone();
        mapping.build_ids.extend(self.symbols.build_ids(id));
        mapping.file = capped(&self.redaction.redact_module(&mapping.file)).into_owned();
        let place = self.to.add_mapping(mapping);
        self.mappings.insert(id, place);
        Some(place)
    }

    fn link(&mut self, id: LinkId) -> Option<LinkId> {
        let around = std::iter::successors(Some(id), |id| self.from.link(*id)?.parent);
        let unknown: Vec<_> = around.take_while(|id| !self.links.contains_key(id)).collect();
        for id in unknown.into_iter().rev() {
            let link = self.from.link(id)?;
            let span = capped(&self.redaction.redact_span(&link.span)).into_owned();
            let parent = link.parent.and_then(|parent| self.links.get(&parent).copied());
            let place = self.to.add_link(Link { span, parent, ..link.clone() });
            self.links.insert(id, place);
        }
        self.links.get(&id).copied()
    }

    fn thread(&mut self, id: ThreadId) -> Option<ThreadId> {
        if let Some(known) = self.threads.get(&id) {
            return Some(*known);
        }
        let ProfiledThread { name, tid } = self.from.thread(id)?;
        let name = self.redaction.redact_span(name).into_owned();
        let place = self.to.add_thread(ProfiledThread { name, tid: *tid });
        self.threads.insert(id, place);
        Some(place)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::ids::{SpanId, TraceId};
    use crate::profile::{Mapping, Point, ProfileId};

    /// Hides every name that contains `secret`.
    fn hiding() -> Redaction {
        Redaction::new().full_paths(true).replace(".*secret.*", "x").unwrap()
    }

    /// Keeps the lines of every location.
    struct NoSymbols;

    impl Symbols for NoSymbols {
        fn build_ids(&mut self, _: MappingId) -> Vec<(String, String)> {
            Vec::new()
        }
        fn lines(&mut self, _: &Location) -> Option<(FrameKind, Vec<SourceLine>)> {
            None
        }
    }

    fn renamed(profile: &Profile) -> Profile {
        profile.symbolized(&mut NoSymbols, &hiding(), usize::MAX).profile
    }

    fn symbolized(profile: &Profile, most_bytes: usize) -> Symbolized {
        profile.symbolized(&mut ByAddress, &Redaction::new().full_paths(true), most_bytes)
    }

    fn add(profile: &mut Profile, address: u64, name: &str, linkers: &str) {
        let mapping = profile.add_mapping(Mapping {
            file: format!("/secret/{name}"),
            start: 0,
            end: 100,
            ..Mapping::default()
        });
        let function = Function {
            name: name.to_owned(),
            system_name: linkers.to_owned(),
            file: "/secret/main.rs".to_owned(),
        };
        let line = Line { function: profile.add_function(function), line: 3, column: 1 };
        let location = profile.add_location(Location {
            mapping: Some(mapping),
            address,
            kind: FrameKind::Rust,
            lines: vec![line],
            is_inferred: false,
        });
        let wait = profile.add_wait("[secret wait]");
        let stack = profile.add_stack(vec![wait, location]);
        let outer = profile.add_link(Link::named("a", None));
        let span = format!("secret {name}");
        let link = profile.add_link(Link::named(span, Some(outer)));
        let point = Point { time_unix_ns: 100 - address, weight: 5, thread: None };
        profile.add_sample(SampleKind::OffCpu, stack, Some(link), point);
    }

    #[test]
    fn entries_that_become_equal_are_merged_and_no_name_leaks() {
        let mut profile = Profile::new(ProfileId::for_test(1), 5);
        add(&mut profile, 7, "secret_a", "_ZN3aaaE");
        add(&mut profile, 7, "secret_b", "_ZN3bbbE");
        add(&mut profile, 8, "open", "secret_open");
        assert_eq!(profile.samples().len(), 3);
        let renamed = renamed(&profile);
        assert_eq!(renamed.samples().len(), 2, "a and b are merged");
        let [merged, open] = renamed.samples() else { panic!("two") };
        assert_eq!(merged.points.len(), 2);
        assert_eq!(renamed.span_path(merged.link), ["a", "x"]);
        assert_eq!(open.points, profile.samples()[2].points);
        // What it waited for is not redacted.
        let functions = renamed.stack(merged.stack).map(|location| {
            let function = renamed.function(location.lines[0].function).unwrap();
            (function.name.as_str(), function.system_name.as_str())
        });
        // The linker's name is redacted, too.
        assert_eq!(functions.collect::<Vec<_>>(), [("[secret wait]", "[secret wait]"), ("x", "x")]);
        let all = format!("{renamed:?}").replace("[secret wait]", "");
        assert!(!all.contains("secret") && !all.contains("aaa"), "{all}");
    }

    fn point(time_unix_ns: u64) -> Point {
        Point { time_unix_ns, weight: 10, thread: None }
    }

    fn location(profile: &mut Profile, mapping: MappingId, address: u64) -> LocationId {
        let (mapping, kind, lines) = (Some(mapping), FrameKind::Native, Vec::new());
        profile.add_location(Location { mapping, address, kind, lines, is_inferred: false })
    }

    /// The names of the functions of a stack.
    fn names(profile: &Profile, stack: StackId) -> Vec<&str> {
        let lines = profile.stack(stack).flat_map(|location| &location.lines);
        lines.map(|line| profile.function(line.function).unwrap().name.as_str()).collect()
    }

    /// Inlines one function per 1,000 of an address.
    #[test]
    fn what_allocates_for_others_is_no_code_of_the_program() {
        let std = "/rustc/5980/library/alloc/src/vec/mod.rs";
        for (name, file) in [
            ("alloc::vec::Vec<T,A>::push", std),
            ("clone_subtree", std),
            (
                "<T as core::convert::From<U>>::from",
                "/home/a/lib/rustlib/src/rust/library/core/x.rs",
            ),
            ("insert", "/home/a/.cargo/registry/src/x/hashbrown-0.15.2/src/map.rs"),
            ("{closure#0}", "/srv/tracing-profiling/src/sys/allocator.rs"),
            ("tracing_profiling::sys::allocator::note_allocated", ""),
            ("shop::_::__rust_alloc", "shop/src/main.rs"),
            ("alloc::vec::Vec<shop::Item>::push", ""),
            ("<alloc::vec::Vec<<shop::A as shop::B>::C> as core::clone::Clone>::clone", ""),
        ] {
            let function = Function { file: file.to_owned(), ..Function::named(name) };
            assert!(allocates(&function), "{name} {file}");
        }
        for (name, file) in [
            ("<alloc::vec::Vec<u32> as shop::Encode>::encode", "shop/src/encode.rs"),
            ("<alloc::vec::Vec<u32> as shop::Encode>::encode", ""),
            ("<alloc::vec::Vec<<shop::A as core::ops::Add>::Output> as shop::Encode>::encode", ""),
            ("<shop::Item as core::clone::Clone>::clone", ""),
            ("<shop::Item as core::clone::Clone>::clone", "shop/src/item.rs"),
            ("shop::sys::allocator::new_arena", "shop/src/sys/allocator.rs"),
            ("shop::library::alloc", "shop/library/alloc/src/lib.rs"),
        ] {
            let function = Function { file: file.to_owned(), ..Function::named(name) };
            assert!(!allocates(&function), "{name} {file}");
        }
    }

    struct ByAddress;

    impl Symbols for ByAddress {
        fn build_ids(&mut self, _: MappingId) -> Vec<(String, String)> {
            vec![("kind".to_owned(), "id".to_owned())]
        }

        fn lines(&mut self, location: &Location) -> Option<(FrameKind, Vec<SourceLine>)> {
            location.mapping?;
            let address = location.address;
            let line = |inlined| {
                let function = match inlined {
                    0 => Function::named(&format!("f{address}")),
                    inlined => Function::named(&format!("f{address} in {inlined}")),
                };
                SourceLine { function, line: 0, column: 0 }
            };
            Some((FrameKind::Rust, (0..=address / 1_000).map(line).collect()))
        }
    }

    fn prog() -> (Profile, MappingId) {
        let mut profile = Profile::new(ProfileId::for_test(1), 10);
        let mapping = profile.add_mapping(Mapping { file: "prog".into(), ..Mapping::default() });
        (profile, mapping)
    }

    #[test]
    fn symbolization_adds_lines() {
        let (mut profile, mapping) = prog();
        let inner = location(&mut profile, mapping, 16);
        let outer = location(&mut profile, mapping, 32);
        let remark = profile.add_remark("[cut]");
        let stack = profile.add_stack(vec![inner, outer, remark]);
        profile.add_sample(SampleKind::OnCpu, stack, None, point(1));
        let Symbolized { profile, downsampled, shortened } = symbolized(&profile, usize::MAX);
        assert_eq!((downsampled, shortened), (0, 0));
        let sample = &profile.samples()[0];
        assert_eq!(names(&profile, sample.stack), ["f16", "f32", "[cut]"]);
        let first = profile.stack(sample.stack).next().unwrap();
        assert_eq!(first.kind, FrameKind::Rust);
        assert_eq!(profile.mapping(first.mapping.unwrap()).unwrap().build_ids.len(), 1);
    }

    /// The names that are left of a stack. Those in one string, separated by blanks, are inlined into the last.
    fn await_names(kind: SampleKind, stack: &[&str]) -> Vec<String> {
        let (mut profile, mapping) = prog();
        let mut locations = Vec::new();
        for (address, names) in (0..).zip(stack) {
            if names.starts_with('[') {
                locations.push(profile.add_wait(names));
                continue;
            }
            let lines = names.split(' ').map(|name| {
                let function = profile.add_function(Function::named(name));
                Line { function, line: 1, column: 0 }
            });
            let lines = lines.collect();
            let (mapping, kind, is_inferred) = (Some(mapping), FrameKind::Rust, false);
            locations.push(profile.add_location(Location {
                mapping,
                address,
                kind,
                lines,
                is_inferred,
            }));
        }
        let stack = profile.add_stack(locations);
        profile.add_sample(kind, stack, None, point(1));
        let rebuilt = profile.symbolized(&mut NoSymbols, &Redaction::new(), usize::MAX).profile;
        names(&rebuilt, rebuilt.samples()[0].stack).into_iter().map(str::to_owned).collect()
    }

    #[test]
    fn stacks_of_awaits_end_at_the_leaf_and_at_the_wrapper() {
        let stack = [
            "<core::task::wake::Waker>::clone into_waker tokio::sync::atomic_waker::register Sleep::poll",
            "shop::fetch",
            "poll<tracing_profiling::awaits::future::Profiled<shop::fetch>> tracing_profiling::sys::task_waker::TaskWaker<T>::poll",
        ];
        let wrapper = "poll<tracing_profiling::awaits::future::Profiled<shop::fetch>>";
        let expected = ["Sleep::poll", "shop::fetch", wrapper];
        assert_eq!(await_names(SampleKind::Await, &stack), expected);
        let mut delayed = vec!["[scheduling delay]"];
        delayed.extend(stack);
        let mut all = vec!["[scheduling delay]"];
        all.extend(expected);
        assert_eq!(await_names(SampleKind::Delay, &delayed), all);
        assert_eq!(await_names(SampleKind::OnCpu, &stack).len(), 7, "only those of awaits");
        // Nothing else is left.
        assert_eq!(await_names(SampleKind::Await, &["alloc::f", "core::mem::g"]).len(), 2);
        assert_eq!(await_names(SampleKind::Await, &["[awaiting: stack not copied]"]).len(), 1);
    }

    #[test]
    fn outer_callers_of_a_deep_stack_are_left_out() {
        for (frames, inlined, is_short) in [
            (1_022, 0, false),
            (1_023, 0, true),
            (20_000, 0, true),
            (127, 7, false),
            (128, 7, true),
            (1_000, 24, true),
            (3, 255, false),
            (3, 20_000, false),
            (5, 20_000, true),
        ] {
            let (mut profile, mapping) = prog();
            let mut stack: Vec<_> = (0..frames)
                .map(|i| location(&mut profile, mapping, inlined * 1_000 + i % 1_000))
                .collect();
            stack.push(profile.add_remark("[cut]"));
            let stack = profile.add_stack(stack);
            profile.add_sample(SampleKind::OnCpu, stack, None, point(1));
            let symbolized = symbolized(&profile, usize::MAX);
            assert_eq!(symbolized.shortened, usize::from(is_short), "{frames} x {inlined}");
            let profile = symbolized.profile;
            let names = names(&profile, profile.samples()[0].stack);
            assert!(names.len() <= MOST_LEVELS, "{frames} x {inlined}: {}", names.len());
            assert_eq!(names[0], format!("f{}", inlined * 1_000));
            let remark = if is_short { "[deeper callers left out]" } else { "[cut]" };
            assert_eq!(names.last(), Some(&remark));
            if inlined > MOST_INLINED as u64 {
                let outermost = format!("f{} in {inlined}", inlined * 1_000);
                assert_eq!(names[MOST_INLINED - 1], outermost);
            }
        }
    }

    #[test]
    fn a_profile_that_would_be_too_large_is_downsampled() {
        let (mut profile, mapping) = prog();
        for number in 0..1_000 {
            let stack = (0..50).map(|i| location(&mut profile, mapping, number * 1_000 + i));
            let stack = stack.collect();
            let stack = profile.add_stack(stack);
            profile.add_sample(SampleKind::OnCpu, stack, None, point(number));
            for kind in [SampleKind::OffCpu, SampleKind::Await] {
                profile.add_sample(kind, stack, None, point(number));
            }
        }
        let whole = symbolized(&profile, usize::MAX);
        assert_eq!((whole.downsampled, whole.profile.sample_count()), (0, 1_000));
        let most_bytes = 1 << 20;
        assert!(whole.profile.bytes() > most_bytes);
        let Symbolized { profile, downsampled, .. } = symbolized(&profile, most_bytes);
        assert!(profile.bytes() <= most_bytes, "{}", profile.bytes());
        assert!(profile.sample_count() > 0 && profile.wait_count() > 0);
        assert_eq!(downsampled, 3_000 - profile.point_count());
        assert_eq!((profile.weight_ns(), profile.waited_ns()), (10_000, 10_000));
        assert_eq!(profile.total(SampleKind::Await), 10_000);
        // A single sample is never too large.
        let least = symbolized(&profile, 0).profile;
        assert_eq!((least.sample_count(), least.wait_count()), (1, 1));
        assert_eq!((least.weight_ns(), least.waited_ns()), (10_000, 10_000));
    }

    #[test]
    fn the_first_sample_of_each_link_is_not_downsampled() {
        let mut profile = Profile::new(ProfileId::for_test(1), 10);
        let remark = profile.add_remark("x");
        let stack = profile.add_stack(vec![remark]);
        for number in 1..=3 {
            let linked = Some((TraceId::from_bytes([1; 16]), SpanId::from_bytes([number; 8])));
            let link = profile.add_link(Link { linked, ..Link::named("a", None) });
            for time in 0..10 {
                profile.add_sample(SampleKind::OnCpu, stack, Some(link), point(time));
            }
        }
        let taken = profile.downsampled_points(1_000);
        let links: HashSet<_> = taken.iter().map(|(sample, _)| sample.link).collect();
        assert_eq!((taken.len(), links.len()), (4, 3), "and the last sample");
        let weights = taken.iter().map(|(_, point)| point.weight);
        assert_eq!(weights.sum::<u64>(), profile.weight_ns());
    }

    #[cfg(feature = "_otlp")]
    #[test]
    fn downsampling_keeps_sums_and_all_kinds() {
        let mut whole = Profile::new(ProfileId::for_test(1), 10);
        let remark = whole.add_remark("x");
        let stack = whole.add_stack(vec![remark]);
        for time in 0..7 {
            whole.add_sample(SampleKind::OnCpu, stack, None, point(time));
        }
        for kind in [SampleKind::OffCpu, SampleKind::Await, SampleKind::Delay] {
            whole.add_sample(kind, stack, None, point(9));
        }
        let mut fewer = whole.downsampled(3);
        assert_eq!((fewer.weight_ns(), fewer.waited_ns()), (70, 10));
        let awaits = [SampleKind::Await, SampleKind::Delay].map(|kind| fewer.total(kind));
        assert_eq!((awaits, fewer.point_count()), ([10; 2], 6));
        assert_eq!((fewer.sample_count(), fewer.wait_count()), (3, 1));
        let stack = fewer.samples()[0].stack;
        fewer.add_sample(SampleKind::OffCpu, stack, None, point(10));
        assert_eq!(fewer.samples().len(), 4);
    }

    #[test]
    fn the_executable_stays_the_first_mapping() {
        let mut profile = Profile::new(ProfileId::for_test(1), 10);
        let files = ["/opt/secret/shop", "libc.so.6"].map(str::to_owned);
        let [_, libc] =
            files.map(|file| profile.add_mapping(Mapping { file, ..Mapping::default() }));
        let inner = location(&mut profile, libc, 16);
        let stack = profile.add_stack(vec![inner]);
        profile.add_sample(SampleKind::OffCpu, stack, None, point(1));
        let renamed = renamed(&profile);
        let first = renamed.first_mapping().and_then(|id| renamed.mapping(id));
        assert_eq!(first.unwrap().file, "x");
    }
}
