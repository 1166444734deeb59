//! Rebuilds a profile with symbols and redacted names.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::mem;
use std::ops::Range;
use std::rc::Rc;

use super::branches::Branches;
use super::code_origin::{CodeOrigin, LINKAGE, OwnCode, is_helper, limits_time, whole_name};
use super::downsampling::Selection;
use super::leaf::{Leaf, LeafId, LeafMark, LockHolder};
use super::model::{
    FrameKind, Function, FunctionId, Line, Location, LocationId, MappingId, Profile,
};
use super::sample::{Point, Sample, SampleKind, StackId};
use super::spans::{Link, LinkId, ProfiledThread, ThreadId};
use crate::redact::Redaction;
use crate::text::capped;

/// A source of symbols.
pub trait Symbols {
    /// Further build ids of the file, for [`Mapping::build_ids`](super::Mapping::build_ids).
    fn build_ids(&mut self, mapping: MappingId) -> Vec<(String, String)>;
    /// The code at a location, with the innermost inlined function first. `None` to keep the location's own lines.
    fn lines(&mut self, location: &Location) -> Option<(FrameKind, Vec<SourceLine>)>;
    /// The name of the variable at an address in memory.
    fn variable(&mut self, _address: u64) -> Option<String> {
        None
    }
}

/// A line of a function that is not part of a profile yet.
#[derive(Clone, Debug)]
pub struct SourceLine {
    /// The function.
    pub function: Function,
    /// 0 if unknown.
    pub line: u32,
    /// 0 if unknown.
    pub column: u32,
}

/// The maximum number of functions in a stack, including inlined ones; outer callers beyond it are left out. More rows
/// do not help in a picture, and inlining turns some hundred frames into thousands of functions.
pub(crate) const MOST_LEVELS: usize = 1024;
/// The maximum number of functions inlined at one location.
const MOST_INLINED: usize = 256;

/// A symbolized profile, and what was left out.
#[derive(Debug)]
pub struct Symbolized {
    /// With names.
    pub profile: Profile,
    /// Samples and waits that were downsampled so that the profile fits. Others have their weight.
    pub downsampled: usize,
    /// Samples and waits whose outer callers were left out.
    pub shortened: usize,
}

impl Profile {
    /// Finds out whose code the functions of a profile are that was not rebuilt.
    pub(crate) fn classify(&mut self) {
        let functions: Vec<_> = self.functions().map(|(_, function)| function).collect();
        let program = self.first_mapping().and_then(|id| self.mapping(id));
        let own = OwnCode::of(functions.into_iter(), &self.spans, program);
        let mut origins = Vec::new();
        for (_, location) in self.locations() {
            let in_library = self.is_in_library(location);
            let ids = location.lines.iter().map(|line| line.function);
            let named = ids.filter_map(|id| Some((id, self.function(id)?)));
            origins.extend(named.map(|(id, function)| (id, own.origin(function, in_library))));
        }
        origins.into_iter().for_each(|(id, origin)| self.set_origin(id, origin));
    }

    /// Rebuilds the profile with symbols and redacted names. It has as many samples as fit into `most_bytes`. Entries
    /// that become equal are merged, and entries that no sample refers to are dropped. Title, notes and attributes are
    /// copied unchanged.
    pub fn symbolized(
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
            links: HashMap::new(),
            threads: HashMap::new(),
        };
        if let Some(program) = self.first_mapping() {
            rebuilding.mapping(program);
        }
        let points = self.downsampled_points(every);
        let downsampled = self.point_count() - points.len();
        // Whose code a function is depends on the names of others.
        let mut stacks = HashSet::new();
        for (sample, _) in &points {
            if stacks.insert(sample.stack) {
                rebuilding.stack_of(sample.stack);
            }
            if rebuilding.to.bytes() > most_bytes {
                return None;
            }
        }
        rebuilding.classify();
        let mut shortened = 0;
        for points in points.chunk_by(|(one, _), (next, _)| std::ptr::eq(*one, *next)) {
            let Some((sample, _)) = points.first() else { continue };
            let shown = rebuilding.stack(sample.stack, sample.kind);
            let leaf = rebuilding.leaf(sample.leaf, &shown);
            let link = sample.link.and_then(|link| rebuilding.link(link));
            for (_, point) in points {
                let thread = point.thread.and_then(|thread| rebuilding.thread(thread));
                for (number, stack) in shown.stacks.iter().enumerate() {
                    let weight = shown.share(point.weight, number);
                    let point = Point { thread, weight, ..*point };
                    rebuilding.to.add_sample_at(sample.kind, (*stack, leaf), link, point);
                }
                shortened += usize::from(shown.is_short);
                if rebuilding.to.bytes() > most_bytes {
                    return None;
                }
            }
        }
        Some(Symbolized { profile: rebuilding.to, downsampled, shortened })
    }
}

/// Whether the innermost function that both stacks are in limits the time of one of them, at another line.
pub(super) fn is_timeout(profile: &Profile, last: &[LocationId], before: &[LocationId]) -> bool {
    let lines = |part: &[LocationId]| -> Vec<Line> {
        let locations = part.iter().filter_map(|id| profile.location(*id));
        locations.flat_map(|location| location.lines.iter().copied()).collect()
    };
    let (of_last, of_before) = (lines(last), lines(before));
    let mut both = of_last.iter().rev().zip(of_before.iter().rev());
    let parting = both.find(|(last, before)| last != before);
    parting.is_some_and(|(last, before)| {
        let function = profile.function(last.function);
        last.function == before.function && function.is_some_and(limits_time)
    })
}

/// Whether others can hold what is awaited, or send to it.
fn is_shared(awaited: &str) -> bool {
    const KINDS: [&str; 8] =
        ["mutex", "rwlock", "semaphore", "mpsc", "oneshot", "notify", "barrier", "pool"];
    let mut parts = awaited.split("::").map(str::to_lowercase);
    parts.any(|part| KINDS.contains(&&*part))
}

/// What shows a stack.
struct ShownStacks {
    /// Each has an equal part of the weight.
    stacks: Vec<StackId>,
    /// The number of leaves that are no branches of their own.
    hidden: usize,
    /// What most of those awaited that are not shown.
    others: String,
    /// Where the holder of a lock was, or what woke the task.
    elsewhere: String,
    /// Others can hold what is awaited, or send to it.
    is_shared: bool,
    /// Outer callers were left out.
    is_short: bool,
}

impl ShownStacks {
    /// The part of a weight that the stack with that number has. All parts sum to the weight.
    fn share(&self, weight: u64, number: usize) -> u64 {
        let of = self.stacks.len().max(1) as u128;
        let up_to = |part: usize| (u128::from(weight) * part as u128 / of) as u64;
        up_to(number + 1).saturating_sub(up_to(number))
    }
}

/// The state of a rebuild: new ids by old ids.
struct Rebuilding<'a> {
    from: &'a Profile,
    to: Profile,
    symbols: &'a mut dyn Symbols,
    redaction: &'a Redaction,
    /// By their original names, and whether all of their code is in libraries.
    functions: HashMap<Function, (FunctionId, bool)>,
    mappings: HashMap<MappingId, MappingId>,
    locations: HashMap<LocationId, LocationId>,
    stacks: HashMap<(StackId, SampleKind), Rc<ShownStacks>>,
    links: HashMap<LinkId, LinkId>,
    threads: HashMap<ThreadId, ThreadId>,
}

impl Rebuilding<'_> {
    fn classify(&mut self) {
        let program = self.from.first_mapping().and_then(|id| self.from.mapping(id));
        let own = OwnCode::of(self.functions.keys(), &self.from.spans, program);
        for (function, (id, in_library)) in &self.functions {
            self.to.set_origin(*id, own.origin(function, *in_library));
        }
    }

    /// The stacks that show a stack: of awaits one for each branch.
    fn stack(&mut self, id: StackId, kind: SampleKind) -> Rc<ShownStacks> {
        if let Some(known) = self.stacks.get(&(id, kind)) {
            return Rc::clone(known);
        }
        let (mut stack, is_short) = self.stack_of(id);
        let marks = [LeafMark::Other, LeafMark::Woken].map(|mark| self.mark(mark));
        let at = self.mark(LeafMark::Elsewhere);
        let at = at.and_then(|mark| stack.iter().position(|location| *location == mark));
        let elsewhere = stack.split_off(at.unwrap_or(stack.len())).into_iter();
        let elsewhere = match kind {
            SampleKind::OffCpu => self.to.own_place(elsewhere),
            _ => self.to.own_place_in_task(elsewhere),
        };
        let branches =
            Branches::of(&stack, marks, |last, before| is_timeout(&self.to, last, before));
        let mut part = |part: &Range<usize>| {
            self.without_helpers(stack.get(part.clone()).unwrap_or_default(), kind)
        };
        let [shown, others] = [&branches.shown, &branches.others]
            .map(|parts| parts.iter().map(&mut part).collect::<Vec<_>>());
        // A leaf can clone the waker twice.
        let mut distinct: Vec<_> = shown.iter().chain(&others).collect();
        let count = distinct.len();
        distinct.sort_unstable();
        distinct.dedup();
        let hidden = branches.timers + count - distinct.len();
        let is_most = |of: &&Vec<_>| others.iter().filter(|it| it == of).count() * 2 > others.len();
        let most = others.iter().find(is_most).map(|stack| stack.iter().copied());
        let others = most.map(|stack| self.to.awaited(stack)).unwrap_or_default();
        let mut awaited = shown.iter().map(|stack| self.to.awaited(stack.iter().copied()));
        let is_shared = !shown.is_empty() && awaited.all(|awaited| is_shared(&awaited));
        let stacks = shown.into_iter().map(|stack| self.to.add_stack(stack)).collect();
        let shown = ShownStacks { stacks, hidden, others, elsewhere, is_shared, is_short };
        let shown = Rc::new(shown);
        self.stacks.insert((id, kind), Rc::clone(&shown));
        shown
    }

    fn mark(&mut self, mark: LeafMark) -> Option<LocationId> {
        self.from.leaf_mark(mark).and_then(|id| self.location(id))
    }

    /// A stack without this crate's wrappers, jumps to other modules, and innermost helpers, unless nothing is left.
    fn without_helpers(&mut self, stack: &[LocationId], kind: SampleKind) -> Vec<LocationId> {
        // Whether each function is left out; code without a name and a note have one entry.
        let (mut is_innermost, mut is_code_left, mut left_out) = (true, false, Vec::new());
        for location in stack.iter().filter_map(|id| self.to.location(*id)) {
            if location.kind == FrameKind::Remark {
                left_out.resize(left_out.len() + location.lines.len().max(1), false);
                continue;
            }
            if location.lines.is_empty() {
                (is_innermost, is_code_left) = (false, true);
                left_out.push(false);
            }
            for line in &location.lines {
                let origin = self.to.origin(line.function);
                let function = self.to.function(line.function);
                let name = function.map_or("", |function| &function.name);
                is_innermost &= is_helper(kind, origin, name);
                // Without line tables it may have the program's code, which was inlined into it.
                let is_known = function.is_some_and(|function| !function.file.is_empty());
                let is_left_out = is_innermost
                    || is_known && origin == CodeOrigin::Wrapper
                    // It only jumps on behalf of its caller.
                    || name == LINKAGE;
                left_out.push(is_left_out);
                is_code_left |= !is_left_out;
            }
        }
        if !is_code_left || !left_out.contains(&true) {
            return stack.to_vec();
        }
        let (mut without, mut left_out) = (Vec::new(), left_out.into_iter());
        for id in stack {
            let Some(location) = self.to.location(*id) else { continue };
            let here: Vec<_> = left_out.by_ref().take(location.lines.len().max(1)).collect();
            if !here.contains(&true) {
                without.push(*id);
            } else if here.contains(&false) {
                let lines = location.lines.iter().zip(here).filter(|(_, left_out)| !left_out);
                let lines = lines.map(|(line, _)| *line).collect();
                let part = Location { lines, ..location.clone() };
                without.push(self.to.add_location(part));
            }
        }
        without
    }

    fn stack_of(&mut self, id: StackId) -> (Vec<LocationId>, bool) {
        let from = self.from;
        let mut stack = Vec::new();
        let others = [LeafMark::Other, LeafMark::Elsewhere].map(|mark| from.leaf_mark(mark));
        let (mut levels, mut is_short) = (0, false);
        for id in from.location_ids(id) {
            if others.contains(&Some(id)) {
                levels = 0;
            } else if levels >= MOST_LEVELS {
                // Symbols of what is left out would cost time.
                match others {
                    [None, None] => break,
                    _ => continue,
                }
            }
            let Some(location) = self.location(id) else { continue };
            let lines = self.to.location(location).map_or(0, |location| location.lines.len());
            levels += lines.max(1);
            if levels >= MOST_LEVELS {
                is_short = true;
                stack.push(self.to.add_remark("[deeper callers left out]"));
                continue;
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
        let mut number = 0;
        while let Some([SourceLine { function, .. }, caller, ..]) = lines.get_mut(number..) {
            if let Some(name) = whole_name(&function.name, &caller.function.name) {
                *function =
                    Function { file: mem::take(&mut function.file), ..Function::named(&name) };
            }
            number += 1;
        }
        // The outermost function states where the code is.
        if lines.len() > MOST_INLINED {
            lines.drain(MOST_INLINED - 1..lines.len() - 1);
        }
        let is_code = kind != FrameKind::Remark;
        let in_library = self.from.is_in_library(location);
        let lines = lines.into_iter().map(|SourceLine { function, line, column }| {
            // Notes keep their names.
            let function = if is_code {
                self.code(function, in_library)
            } else {
                self.to.add_function(function)
            };
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
    fn code(&mut self, function: Function, in_library: bool) -> FunctionId {
        if let Some((known, is_of_libraries)) = self.functions.get_mut(&function) {
            *is_of_libraries &= in_library;
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
        self.functions.insert(function, (place, in_library));
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

    fn leaf(&mut self, id: LeafId, shown: &ShownStacks) -> LeafId {
        let leaf = match self.from.leaf(id) {
            Some(Leaf::Delayed { behind: Some(span) }) => {
                Leaf::Delayed { behind: Some(self.span_name(span)) }
            }
            Some(Leaf::AwaitingUntil { span, woke, .. }) => {
                let at = Some(&shown.elsewhere).filter(|at| shown.is_shared && !at.is_empty());
                // Who woke it may have done so in another span than that which left the thread.
                let span = span.as_ref().filter(|_| *woke || at.is_none());
                let span = span.map(|span| self.span_name(span));
                // A connection, too, is woken in a span: that of the request which opened it.
                if *woke && !shown.is_shared || at.is_none() && span.is_none() {
                    Leaf::Awaiting
                } else {
                    let (woke, at) = (*woke || at.is_some(), at.cloned().unwrap_or_default());
                    Leaf::AwaitingUntil { span, woke, at }
                }
            }
            Some(Leaf::AwaitingOneOf { count, .. }) => {
                let hidden = u32::try_from(shown.hidden).unwrap_or(u32::MAX);
                match count.saturating_sub(hidden) {
                    0 | 1 => Leaf::Awaiting,
                    count => Leaf::AwaitingOneOf { count, others: shown.others.clone() },
                }
            }
            Some(Leaf::BlockedBy(call, holder)) => {
                let thread = self.span_name(&holder.thread);
                let span = holder.span.as_ref().map(|span| self.span_name(span));
                let holder = LockHolder { thread, span, at: shown.elsewhere.clone(), ..*holder };
                Leaf::BlockedBy(self.call(call), holder)
            }
            Some(Leaf::Blocked(call)) => Leaf::Blocked(self.call(call)),
            Some(leaf) => leaf.clone(),
            None => Leaf::Ran,
        };
        self.to.add_leaf(leaf)
    }

    fn span_name(&self, name: &str) -> String {
        capped(&self.redaction.redact_span(name)).into_owned()
    }

    /// What a thread was blocked in. A futex in a variable has its name.
    fn call(&mut self, call: &str) -> String {
        let futex = call.strip_prefix("futex 0x");
        let address = futex.and_then(|address| u64::from_str_radix(address, 16).ok());
        match address.and_then(|address| self.symbols.variable(address)) {
            Some(name) => format!("futex of {}", capped(&self.redaction.redact_function(&name))),
            None => call.to_owned(),
        }
    }

    fn link(&mut self, id: LinkId) -> Option<LinkId> {
        let around = std::iter::successors(Some(id), |id| self.from.link(*id)?.parent);
        let unknown: Vec<_> = around.take_while(|id| !self.links.contains_key(id)).collect();
        for id in unknown.into_iter().rev() {
            let link = self.from.link(id)?;
            let span = self.span_name(&link.span);
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
        let wait = profile.add_leaf(Leaf::Blocked("secret wait".to_owned()));
        let place = (profile.add_stack(vec![location]), wait);
        let outer = profile.add_link(Link::named("a", None));
        let span = format!("secret {name}");
        let link = profile.add_link(Link::named(span, Some(outer)));
        let point = Point { time_unix_ns: 100 - address, weight: 5, thread: None };
        profile.add_sample_at(SampleKind::OffCpu, place, Some(link), point);
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
        let functions = renamed.stack(merged.stack).map(|location| {
            let function = renamed.function(location.lines[0].function).unwrap();
            (function.name.as_str(), function.system_name.as_str())
        });
        // The linker's name is redacted, too.
        assert_eq!(functions.collect::<Vec<_>>(), [("x", "x")]);
        assert_eq!(renamed.leaf(merged.leaf).unwrap().to_string(), "[secret wait]");
        let all = format!("{renamed:?}").replace("secret wait", "");
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

    /// The names that are left of a stack. Those in one string, separated by `+`, are inlined into the last.
    fn await_names(kind: SampleKind, stack: &[&str]) -> Vec<String> {
        let (mut profile, mapping) = prog();
        let mut locations = Vec::new();
        for (address, names) in (0..).zip(stack) {
            if names.starts_with('[') && *names != LINKAGE {
                locations.push(profile.add_remark(names));
                continue;
            }
            let lines = names.split(" + ").map(|name| {
                let mut function = Function::named(name.trim_end_matches(" without lines"));
                for (of, file) in [
                    ("tracing_profiling::", "src/awaits/future.rs"),
                    ("tracing_profiling_capture::", "crates/capture/src/sys/allocator.rs"),
                ] {
                    if name.contains(of) && !name.ends_with(" without lines") {
                        file.clone_into(&mut function.file);
                    }
                }
                Line { function: profile.add_function(function), line: 1, column: 0 }
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
    fn stacks_have_neither_wrappers_nor_what_clones_or_allocates_for_others() {
        let stack = [
            "<core::task::wake::Waker>::clone + into_waker + tokio::sync::atomic_waker::register + Sleep::poll",
            "shop::fetch",
            "<tracing_profiling::awaits::future::Profiled<F> as core::future::future::Future>::poll + tracing_profiling_capture::sys::task_waker::TaskWaker<T>::poll",
            "<tracing_profiling::awaits::future::Profiled<F> as core::future::future::Future>::poll + tokio::runtime::task::raw::poll",
        ];
        let expected = ["Sleep::poll", "shop::fetch", "tokio::runtime::task::raw::poll"];
        assert_eq!(await_names(SampleKind::Await, &stack), expected);
        assert_eq!(await_names(SampleKind::Delay, &stack), expected);
        let ran = await_names(SampleKind::OnCpu, &stack);
        assert_eq!(ran.len(), 6, "what runs in the leaf is seen: {ran:?}");
        let allocated = [
            "tracing_profiling_capture::sys::allocator::note_allocated",
            "<tracing_profiling_capture::sys::allocator::ProfilingAllocator<A> as core::alloc::GlobalAlloc>::alloc",
            "__rust_alloc + alloc::vec::Vec<T>::push + shop::fetch",
            "tracing_profiling::awaits::tower::call",
            "alloc::boxed::Box<F>::call",
            "[cut]",
        ];
        for kind in [SampleKind::AllocatedBytes, SampleKind::InUseBlocks] {
            let names = await_names(kind, &allocated);
            assert_eq!(names, ["shop::fetch", "alloc::boxed::Box<F>::call", "[cut]"]);
        }
        // The wrappers are left out of all stacks.
        let ran = await_names(SampleKind::OnCpu, &allocated);
        assert_eq!(
            ran,
            [
                "__rust_alloc",
                "alloc::vec::Vec<T>::push",
                "shop::fetch",
                "alloc::boxed::Box<F>::call",
                "[cut]"
            ]
        );
        // The program's code may have been inlined into it.
        let stack = ["tracing_profiling::awaits::record::Observed::poll without lines", "tokio::f"];
        let ran = await_names(SampleKind::OnCpu, &stack);
        assert_eq!(ran, ["tracing_profiling::awaits::record::Observed::poll", "tokio::f"]);
        let wrapper = ["tracing_profiling::awaits::record::Observed::poll", "[cut]"];
        assert_eq!(await_names(SampleKind::OnCpu, &wrapper), wrapper, "nothing else is left");
        let jump = [LINKAGE, "shop::fetch"];
        assert_eq!(await_names(SampleKind::OnCpu, &jump), ["shop::fetch"]);
        // Nothing else is left.
        assert_eq!(await_names(SampleKind::OnCpu, &[LINKAGE, "[cut]"]), [LINKAGE, "[cut]"]);
        assert_eq!(await_names(SampleKind::Await, &["alloc::f", "core::mem::g"]).len(), 2);
        assert_eq!(await_names(SampleKind::Await, &["[cut]"]).len(), 1);
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
        assert_eq!(
            (profile.total(SampleKind::OnCpu), profile.total(SampleKind::OffCpu)),
            (10_000, 10_000)
        );
        assert_eq!(profile.total(SampleKind::Await), 10_000);
        // A single sample is never too large.
        let least = symbolized(&profile, 0).profile;
        assert_eq!((least.sample_count(), least.wait_count()), (1, 1));
        assert_eq!(
            (least.total(SampleKind::OnCpu), least.total(SampleKind::OffCpu)),
            (10_000, 10_000)
        );
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
        assert_eq!(weights.sum::<u64>(), profile.total(SampleKind::OnCpu));
    }

    #[cfg(feature = "otlp")]
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
        assert_eq!((fewer.total(SampleKind::OnCpu), fewer.total(SampleKind::OffCpu)), (70, 10));
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
