//! A profile made anew from another: with symbols, with other names, or with fewer samples.

use std::borrow::Cow;
use std::collections::HashMap;

use super::model::{
    FrameKind, Function, FunctionId, Line, Link, LinkId, Location, LocationId, Mapping, MappingId,
    Point, Profile, SampleKind, StackId,
};
use super::names::capped;

/// What functions, files and spans are called outside of the process.
pub(crate) trait PublicNames {
    /// A function, as a programmer writes it or as the linker knows it.
    fn function<'a>(&self, name: &'a str) -> Cow<'a, str>;
    /// A file of source code.
    fn source<'a>(&self, path: &'a str) -> Cow<'a, str>;
    /// A file of code.
    fn code<'a>(&self, path: &'a str) -> Cow<'a, str>;
    /// A span.
    fn span<'a>(&self, name: &'a str) -> Cow<'a, str>;
}

/// What is known of the files of code.
pub(crate) trait Symbols {
    /// More names of the very file, for [`Mapping::build_ids`].
    fn build_ids(&mut self, mapping: MappingId) -> Vec<(String, String)>;
    /// What a location is, and its lines; adds strings and functions to the profile, in which the mapping can
    /// have another place.
    fn lines(
        &mut self,
        profile: &mut Profile,
        mapping: MappingId,
        address: u64,
    ) -> (FrameKind, Vec<Line>);
    /// Addresses in the kernel of which the functions will be asked for.
    fn prepare_kernel(&mut self, addresses: &[u64]);
    /// The function of an address in the kernel, or of somewhere there if it is 0.
    fn kernel_function(&mut self, address: u64) -> String;
}

/// Functions that a stack shows, inlined ones too: what lies further out is left out. A picture with more rows
/// helps nobody, and what is inlined makes of some hundred frames thousands of functions.
pub(crate) const MOST_LEVELS: usize = 1024;
/// Functions inlined into each other at one place.
const MOST_INLINED: usize = 256;

/// A profile with symbols, and what it has not.
pub(crate) struct Symbolized {
    pub(crate) profile: Profile,
    /// Samples and waits for which others stand, so that the profile is no larger than it may be.
    pub(crate) thinned: usize,
    /// Those whose outer callers are left out.
    pub(crate) shortened: usize,
}

impl Profile {
    /// The same samples with other names. What has the same names then is one, and nothing is left of
    /// what no sample refers to. Title, notes and attributes are taken as they are.
    pub(crate) fn renamed(&self, names: &dyn PublicNames) -> Self {
        self.within_no_limit(1, &mut Renaming { names, functions: HashMap::new() })
    }

    /// The same with one of so many points of each kind: it stands for those that are left out, so that the
    /// sums stay right.
    #[cfg(feature = "_otlp")]
    pub(crate) fn thinned(&self, every: usize) -> Self {
        self.within_no_limit(every, &mut Copying::default())
    }

    /// The same profile with what `symbols` knows of its mappings and of each location in them; with as many
    /// of its samples as take so many bytes then.
    pub(crate) fn symbolized(&self, symbols: &mut dyn Symbols, most_bytes: usize) -> Symbolized {
        let in_kernel = |location: &&Location| location.kind == FrameKind::Kernel;
        let kernel = self.locations().filter(in_kernel).map(|location| location.address);
        symbols.prepare_kernel(&kernel.collect::<Vec<_>>());
        let points = self.sample_count() + self.wait_count();
        let mut every = 1;
        loop {
            // One sample is exported however large it is.
            let most_bytes = if every < points { most_bytes } else { usize::MAX };
            match self.rebuilt(every, most_bytes, &mut Symbolizing { symbols }) {
                Some(Rebuilding { to, shortened, .. }) => {
                    let thinned = points - (to.sample_count() + to.wait_count());
                    return Symbolized { profile: to, thinned, shortened };
                }
                None => every = every.saturating_mul(2),
            }
        }
    }

    fn within_no_limit(&self, every: usize, change: &mut dyn Rewrite) -> Self {
        let rebuilt = self.rebuilt(every, usize::MAX, change);
        rebuilt.map_or_else(|| self.clone(), |rebuilt| rebuilt.to)
    }

    /// None if it would take more bytes than it may.
    fn rebuilt<'a>(
        &'a self,
        every: usize,
        most_bytes: usize,
        change: &'a mut dyn Rewrite,
    ) -> Option<Rebuilding<'a>> {
        let mut to = Self::new(self.id, self.period_ns);
        to.name.clone_from(&self.name);
        to.title.clone_from(&self.title);
        to.notes.clone_from(&self.notes);
        to.start_unix_ns = self.start_unix_ns;
        to.duration_ns = self.duration_ns;
        to.attributes.clone_from(&self.attributes);
        let mut rebuilding = Rebuilding {
            from: self,
            to,
            change,
            mappings: HashMap::new(),
            locations: HashMap::new(),
            stacks: HashMap::new(),
            links: HashMap::new(),
            shortened: 0,
        };
        if let Some(program) = self.first_mapping() {
            rebuilding.mapping(program);
        }
        for kind in [SampleKind::OnCpu, SampleKind::OffCpu] {
            let total = self.points(kind).count();
            let (mut number, mut skipped_ns) = (0, 0);
            for sample in self.of_kind(kind) {
                for Point { time_unix_ns, weight_ns } in &sample.points {
                    number += 1;
                    skipped_ns += weight_ns;
                    if number % every.max(1) != 0 && number != total {
                        continue;
                    }
                    let (stack, is_short) = rebuilding.stack(sample.stack);
                    let link = sample.link.and_then(|link| rebuilding.link(link));
                    let weight_ns = std::mem::take(&mut skipped_ns);
                    let point = Point { time_unix_ns: *time_unix_ns, weight_ns };
                    rebuilding.to.add_sample(kind, stack, link, point);
                    rebuilding.shortened += usize::from(is_short);
                }
                if rebuilding.to.bytes() > most_bytes {
                    return None;
                }
            }
        }
        Some(rebuilding)
    }
}

/// What becomes of the values of a profile.
trait Rewrite {
    fn mapping(&mut self, id: MappingId, mapping: &Mapping) -> Mapping {
        _ = id;
        mapping.clone()
    }

    /// Of a location, with functions of the new profile.
    fn lines(
        &mut self,
        from: &Profile,
        to: &mut Profile,
        location: &Location,
    ) -> (FrameKind, Vec<Line>);

    fn span(&mut self, span: &str) -> String {
        span.to_owned()
    }
}

/// The new places of what was seen.
struct Rebuilding<'a> {
    from: &'a Profile,
    to: Profile,
    change: &'a mut dyn Rewrite,
    mappings: HashMap<MappingId, MappingId>,
    locations: HashMap<LocationId, LocationId>,
    /// And whether it was shortened.
    stacks: HashMap<StackId, (StackId, bool)>,
    links: HashMap<LinkId, LinkId>,
    shortened: usize,
}

impl Rebuilding<'_> {
    fn stack(&mut self, id: StackId) -> (StackId, bool) {
        if let Some(known) = self.stacks.get(&id) {
            return *known;
        }
        let mut stack = Vec::new();
        let (mut levels, mut is_short) = (0, false);
        for location in self.from.stack(id) {
            let Some(location) = self.location(*location) else { continue };
            let lines = self.to.location(location).map_or(0, |location| location.lines.len());
            levels += lines.max(1);
            if levels >= MOST_LEVELS {
                is_short = true;
                stack.push(self.to.add_remark("[deeper callers left out]"));
                break;
            }
            stack.push(location);
        }
        let place = (self.to.add_stack(stack), is_short);
        self.stacks.insert(id, place);
        place
    }

    fn location(&mut self, id: LocationId) -> Option<LocationId> {
        if let Some(known) = self.locations.get(&id) {
            return Some(*known);
        }
        let location = self.from.location(id)?;
        let mapping = location.mapping.and_then(|mapping| self.mapping(mapping));
        let (kind, lines) = self.change.lines(self.from, &mut self.to, location);
        let Location { address, is_inferred, .. } = *location;
        let new = Location { mapping, address, kind, lines, is_inferred };
        let place = self.to.add_location(new);
        self.locations.insert(id, place);
        Some(place)
    }

    fn mapping(&mut self, id: MappingId) -> Option<MappingId> {
        if let Some(known) = self.mappings.get(&id) {
            return Some(*known);
        }
        let mapping = self.change.mapping(id, self.from.mapping(id)?);
        let place = self.to.add_mapping(mapping);
        self.mappings.insert(id, place);
        Some(place)
    }

    fn link(&mut self, id: LinkId) -> Option<LinkId> {
        let mut unknown = Vec::new();
        let mut parent = None;
        let mut next = Some(id);
        while let Some(id) = next {
            if let Some(known) = self.links.get(&id) {
                parent = Some(*known);
                break;
            }
            unknown.push(id);
            next = self.from.link(id)?.parent;
        }
        for id in unknown.into_iter().rev() {
            let Link { span, ids, .. } = self.from.link(id)?;
            let span = self.change.span(span);
            let place = self.to.add_link(Link { span, parent, ids: *ids });
            self.links.insert(id, place);
            parent = Some(place);
        }
        parent
    }
}

/// Everything stays as it is.
#[derive(Default)]
#[cfg_attr(not(feature = "_otlp"), allow(dead_code, reason = "only what is sent is thinned so"))]
struct Copying {
    functions: HashMap<FunctionId, FunctionId>,
}

impl Rewrite for Copying {
    fn lines(
        &mut self,
        from: &Profile,
        to: &mut Profile,
        location: &Location,
    ) -> (FrameKind, Vec<Line>) {
        let line = |line: &Line| {
            let function = *self.functions.entry(line.function).or_insert_with(|| {
                let text = |id| from.string(id);
                let known = from.function(line.function);
                let [name, system_name, file] = known.map_or([""; 3], |function| {
                    [function.name, function.system_name, function.file].map(text)
                });
                let name = to.add_string(name);
                let system_name = to.add_string(system_name);
                let file = to.add_string(file);
                to.add_function(Function { name, system_name, file })
            });
            Line { function, ..*line }
        };
        (location.kind, location.lines.iter().map(line).collect())
    }
}

/// Names become others.
struct Renaming<'a> {
    names: &'a dyn PublicNames,
    /// Those of code: remarks of ours keep their names.
    functions: HashMap<FunctionId, FunctionId>,
}

impl Rewrite for Renaming<'_> {
    fn mapping(&mut self, _: MappingId, mapping: &Mapping) -> Mapping {
        let file = capped(&self.names.code(&mapping.file)).into_owned();
        Mapping { file, ..mapping.clone() }
    }

    fn span(&mut self, span: &str) -> String {
        capped(&self.names.span(span)).into_owned()
    }

    fn lines(
        &mut self,
        from: &Profile,
        to: &mut Profile,
        location: &Location,
    ) -> (FrameKind, Vec<Line>) {
        let is_code = !matches!(location.kind, FrameKind::Wait | FrameKind::Remark);
        let lines = location.lines.iter().filter_map(|line| {
            let function = self.function(from, to, line.function, is_code)?;
            Some(Line { function, ..*line })
        });
        (location.kind, lines.collect())
    }
}

impl Renaming<'_> {
    fn function(
        &mut self,
        from: &Profile,
        to: &mut Profile,
        id: FunctionId,
        is_code: bool,
    ) -> Option<FunctionId> {
        if let Some(known) = self.functions.get(&id).filter(|_| is_code) {
            return Some(*known);
        }
        let Function { name, system_name, file } = from.function(id)?;
        let (name, linkers) = (from.string(*name), from.string(*system_name));
        if !is_code {
            return to.name_alone(name).function.into();
        }
        let new = self.names.function(name);
        // A mangled name says the same in another way, which no pattern would find.
        let new_linkers =
            if new == name { self.names.function(linkers) } else { Cow::Borrowed(new.as_ref()) };
        let file = self.names.source(from.string(*file));
        let function = Function {
            name: to.add_string(&capped(&new)),
            system_name: to.add_string(&capped(&new_linkers)),
            file: to.add_string(&capped(&file)),
        };
        let place = to.add_function(function);
        self.functions.insert(id, place);
        Some(place)
    }
}

/// Addresses become functions.
struct Symbolizing<'a> {
    symbols: &'a mut dyn Symbols,
}

impl Rewrite for Symbolizing<'_> {
    fn mapping(&mut self, id: MappingId, mapping: &Mapping) -> Mapping {
        let mut mapping = mapping.clone();
        mapping.build_ids.extend(self.symbols.build_ids(id));
        mapping
    }

    fn lines(
        &mut self,
        from: &Profile,
        to: &mut Profile,
        location: &Location,
    ) -> (FrameKind, Vec<Line>) {
        match (location.kind, location.mapping) {
            (FrameKind::Kernel, _) => {
                let name = self.symbols.kernel_function(location.address);
                (FrameKind::Kernel, vec![to.name_alone(&capped(&name))])
            }
            (_, Some(mapping)) => {
                let (kind, mut lines) = self.symbols.lines(to, mapping, location.address);
                // What it was inlined into in the end says where it is.
                if lines.len() > MOST_INLINED {
                    lines.drain(MOST_INLINED - 1..lines.len() - 1);
                }
                (kind, lines)
            }
            _ => Copying::default().lines(from, to, location),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::ProfileId;

    /// Everything that begins with `secret` is hidden.
    struct Hiding;

    impl Hiding {
        fn hide<'a>(name: &'a str) -> Cow<'a, str> {
            if name.contains("secret") { "x".into() } else { name.into() }
        }
    }

    impl PublicNames for Hiding {
        fn function<'a>(&self, name: &'a str) -> Cow<'a, str> {
            Self::hide(name)
        }
        fn source<'a>(&self, path: &'a str) -> Cow<'a, str> {
            Self::hide(path)
        }
        fn code<'a>(&self, path: &'a str) -> Cow<'a, str> {
            Self::hide(path)
        }
        fn span<'a>(&self, name: &'a str) -> Cow<'a, str> {
            Self::hide(name)
        }
    }

    fn add(profile: &mut Profile, address: u64, name: &str, linkers: &str) {
        let mapping = profile.add_mapping(Mapping {
            file: format!("/secret/{name}"),
            start: 0,
            end: 100,
            ..Mapping::default()
        });
        let function = Function {
            name: profile.add_string(name),
            system_name: profile.add_string(linkers),
            file: profile.add_string("/secret/main.rs"),
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
        let outer = profile.add_link(Link { span: "a".into(), parent: None, ids: None });
        let span = format!("secret {name}");
        let link = profile.add_link(Link { span, parent: Some(outer), ids: None });
        let point = Point { time_unix_ns: 100 - address, weight_ns: 5 };
        profile.add_sample(SampleKind::OffCpu, stack, Some(link), point);
    }

    #[test]
    fn what_is_the_same_then_is_one_and_no_name_is_left() {
        let mut profile = Profile::new(ProfileId::for_test(1), 5);
        add(&mut profile, 7, "secret_a", "_ZN3aaaE");
        add(&mut profile, 7, "secret_b", "_ZN3bbbE");
        add(&mut profile, 8, "open", "secret_open");
        assert_eq!(profile.samples().len(), 3);
        let renamed = profile.renamed(&Hiding);
        assert_eq!(renamed.samples().len(), 2, "a and b are one");
        let [merged, open] = renamed.samples() else { panic!("two") };
        assert_eq!(merged.points.len(), 2);
        assert_eq!(renamed.span_path(merged.link), ["a", "x"]);
        assert_eq!(open.points, profile.samples()[2].points);
        // What it waited for is a remark of ours.
        let [wait, function] = renamed.stack(merged.stack) else { panic!("two frames") };
        let name = |id: &LocationId| {
            let line = renamed.location(*id).unwrap().lines[0];
            let function = renamed.function(line.function).unwrap();
            (renamed.string(function.name), renamed.string(function.system_name))
        };
        assert_eq!(name(wait), ("[secret wait]", "[secret wait]"));
        assert_eq!(name(function), ("x", "x"), "also as the linker has it");
        let all = format!("{renamed:?}").replace("[secret wait]", "");
        assert!(!all.contains("secret") && !all.contains("aaa"), "{all}");
    }

    fn point(time_unix_ns: u64) -> Point {
        Point { time_unix_ns, weight_ns: 10 }
    }

    fn location(profile: &mut Profile, mapping: MappingId, address: u64) -> LocationId {
        let (mapping, kind, lines) = (Some(mapping), FrameKind::Native, Vec::new());
        profile.add_location(Location { mapping, address, kind, lines, is_inferred: false })
    }

    /// The functions of a stack.
    fn names(profile: &Profile, stack: StackId) -> Vec<&str> {
        let locations = profile.stack(stack).iter().map(|id| profile.location(*id).unwrap());
        let lines = locations.flat_map(|location| &location.lines);
        lines.map(|line| profile.string(profile.function(line.function).unwrap().name)).collect()
    }

    /// As many functions at an address as it has thousands.
    struct ByAddress;

    impl Symbols for ByAddress {
        fn build_ids(&mut self, _: MappingId) -> Vec<(String, String)> {
            vec![("kind".to_owned(), "id".to_owned())]
        }

        fn lines(
            &mut self,
            profile: &mut Profile,
            mapping: MappingId,
            address: u64,
        ) -> (FrameKind, Vec<Line>) {
            assert_eq!(profile.mapping(mapping).unwrap().file, "prog");
            let line = |inlined| match inlined {
                0 => profile.name_alone(&format!("f{address}")),
                inlined => profile.name_alone(&format!("f{address} in {inlined}")),
            };
            (FrameKind::Rust, (0..=address / 1_000).map(line).collect())
        }

        fn prepare_kernel(&mut self, _: &[u64]) {}

        fn kernel_function(&mut self, address: u64) -> String {
            format!("k{address}")
        }
    }

    fn prog() -> (Profile, MappingId) {
        let mut profile = Profile::new(ProfileId::for_test(1), 10);
        let mapping = profile.add_mapping(Mapping { file: "prog".into(), ..Mapping::default() });
        (profile, mapping)
    }

    #[test]
    fn symbolization_gives_lines() {
        let (mut profile, mapping) = prog();
        let inner = location(&mut profile, mapping, 16);
        let outer = location(&mut profile, mapping, 32);
        let remark = profile.add_remark("[cut]");
        let stack = profile.add_stack(vec![inner, outer, remark]);
        profile.add_sample(SampleKind::OnCpu, stack, None, point(1));
        let Symbolized { profile, thinned, shortened } =
            profile.symbolized(&mut ByAddress, usize::MAX);
        assert_eq!((thinned, shortened), (0, 0));
        let sample = &profile.samples()[0];
        assert_eq!(names(&profile, sample.stack), ["f16", "f32", "[cut]"]);
        let first = profile.location(profile.stack(sample.stack)[0]).unwrap();
        assert_eq!(first.kind, FrameKind::Rust);
        assert_eq!(profile.mapping(first.mapping.unwrap()).unwrap().build_ids.len(), 1);
    }

    #[test]
    fn what_lies_further_out_than_a_stack_may_be_high_is_left_out() {
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
            let symbolized = profile.symbolized(&mut ByAddress, usize::MAX);
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
    fn a_profile_that_would_be_too_large_has_fewer_samples_that_stand_for_all() {
        let (mut profile, mapping) = prog();
        for number in 0..1_000 {
            let stack = (0..50).map(|i| location(&mut profile, mapping, number * 1_000 + i));
            let stack = stack.collect();
            let stack = profile.add_stack(stack);
            profile.add_sample(SampleKind::OnCpu, stack, None, point(number));
            profile.add_sample(SampleKind::OffCpu, stack, None, point(number));
        }
        let whole = profile.symbolized(&mut ByAddress, usize::MAX);
        assert_eq!((whole.thinned, whole.profile.sample_count()), (0, 1_000));
        let most_bytes = 1 << 20;
        assert!(whole.profile.bytes() > most_bytes);
        let Symbolized { profile, thinned, .. } = profile.symbolized(&mut ByAddress, most_bytes);
        assert!(profile.bytes() <= most_bytes, "{}", profile.bytes());
        assert!(profile.sample_count() > 0 && profile.wait_count() > 0);
        assert_eq!(thinned, 2_000 - profile.sample_count() - profile.wait_count());
        assert_eq!((profile.weight_ns(), profile.waited_ns()), (10_000, 10_000));
        // One sample is never too large.
        let least = profile.symbolized(&mut ByAddress, 0).profile;
        assert_eq!((least.sample_count(), least.wait_count()), (1, 1));
        assert_eq!((least.weight_ns(), least.waited_ns()), (10_000, 10_000));
    }

    #[cfg(feature = "_otlp")]
    #[test]
    fn thinning_keeps_sums_and_loses_no_kind() {
        let mut whole = Profile::new(ProfileId::for_test(1), 10);
        let remark = whole.add_remark("x");
        let stack = whole.add_stack(vec![remark]);
        for time in 0..7 {
            whole.add_sample(SampleKind::OnCpu, stack, None, point(time));
        }
        whole.add_sample(SampleKind::OffCpu, stack, None, point(9));
        let mut thin = whole.thinned(3);
        assert_eq!((thin.weight_ns(), thin.waited_ns()), (70, 10));
        assert_eq!((thin.sample_count(), thin.wait_count()), (3, 1));
        let stack = thin.samples()[0].stack;
        thin.add_sample(SampleKind::OffCpu, stack, None, point(10));
        assert_eq!(thin.samples().len(), 2);
    }

    #[test]
    fn the_program_stays_the_first_file_of_code() {
        let mut profile = Profile::new(ProfileId::for_test(1), 10);
        let files = ["/opt/secret/shop", "libc.so.6"].map(str::to_owned);
        let [_, libc] =
            files.map(|file| profile.add_mapping(Mapping { file, ..Mapping::default() }));
        let inner = location(&mut profile, libc, 16);
        let stack = profile.add_stack(vec![inner]);
        profile.add_sample(SampleKind::OffCpu, stack, None, point(1));
        let renamed = profile.renamed(&Hiding);
        let first = renamed.first_mapping().and_then(|id| renamed.mapping(id));
        assert_eq!(first.unwrap().file, "x");
    }
}
