//! A profile with other names for what it names.

use std::borrow::Cow;
use std::collections::HashMap;

use super::model::{
    FrameKind, Function, FunctionId, Line, Link, LinkId, Location, LocationId, Mapping, MappingId,
    Profile, StackId,
};

/// What functions, files and spans are called outside of the process.
pub(crate) trait Names {
    /// A function, as a programmer writes it or as the linker knows it.
    fn function<'a>(&self, name: &'a str) -> Cow<'a, str>;
    /// A file of source code.
    fn source<'a>(&self, path: &'a str) -> Cow<'a, str>;
    /// A file of code.
    fn code<'a>(&self, path: &'a str) -> Cow<'a, str>;
    /// A span.
    fn span<'a>(&self, name: &'a str) -> Cow<'a, str>;
}

impl Profile {
    /// The same samples with other names. What has the same names then is one, and nothing is left of
    /// what no sample refers to. Title, notes and attributes are taken as they are.
    pub(crate) fn renamed(&self, names: &dyn Names) -> Self {
        let mut renamed = Self::new(self.id, self.period_ns);
        renamed.name.clone_from(&self.name);
        renamed.title.clone_from(&self.title);
        renamed.notes.clone_from(&self.notes);
        renamed.start_unix_ns = self.start_unix_ns;
        renamed.duration_ns = self.duration_ns;
        renamed.attributes.clone_from(&self.attributes);
        let mut renaming = Renaming {
            from: self,
            to: renamed,
            names,
            functions: HashMap::new(),
            mappings: HashMap::new(),
            locations: HashMap::new(),
            stacks: HashMap::new(),
            links: HashMap::new(),
        };
        for sample in self.samples() {
            let stack = renaming.stack(sample.stack);
            let link = sample.link.and_then(|link| renaming.link(link));
            for point in &sample.points {
                renaming.to.add_sample(sample.kind, stack, link, *point);
            }
        }
        renaming.to
    }
}

/// The new places of what was seen.
struct Renaming<'a> {
    from: &'a Profile,
    to: Profile,
    names: &'a dyn Names,
    /// Those of code: remarks of ours keep their names.
    functions: HashMap<FunctionId, FunctionId>,
    mappings: HashMap<MappingId, MappingId>,
    locations: HashMap<LocationId, LocationId>,
    stacks: HashMap<StackId, StackId>,
    links: HashMap<LinkId, LinkId>,
}

impl Renaming<'_> {
    fn stack(&mut self, id: StackId) -> StackId {
        if let Some(known) = self.stacks.get(&id) {
            return *known;
        }
        let locations = self.from.stack(id).iter().filter_map(|id| self.location(*id)).collect();
        let stack = self.to.add_stack(locations);
        self.stacks.insert(id, stack);
        stack
    }

    fn location(&mut self, id: LocationId) -> Option<LocationId> {
        if let Some(known) = self.locations.get(&id) {
            return Some(*known);
        }
        let location = self.from.location(id)?;
        let mapping = location.mapping.and_then(|mapping| self.mapping(mapping));
        let is_code = !matches!(location.kind, FrameKind::Wait | FrameKind::Remark);
        let lines = location.lines.iter().filter_map(|line| {
            let function = self.function(line.function, is_code)?;
            Some(Line { function, ..*line })
        });
        let lines = lines.collect();
        let place = self.to.add_location(Location { mapping, lines, ..location.clone() });
        self.locations.insert(id, place);
        Some(place)
    }

    fn function(&mut self, id: FunctionId, is_code: bool) -> Option<FunctionId> {
        if let Some(known) = self.functions.get(&id).filter(|_| is_code) {
            return Some(*known);
        }
        let Function { name, system_name, file } = self.from.function(id)?;
        let (name, linkers) = (self.from.string(*name), self.from.string(*system_name));
        if !is_code {
            return self.to.name_alone(name).function.into();
        }
        let new = self.names.function(name);
        // A mangled name says the same in another way, which no pattern would find.
        let new_linkers =
            if new == name { self.names.function(linkers) } else { Cow::Borrowed(new.as_ref()) };
        let file = self.names.source(self.from.string(*file));
        let function = Function {
            name: self.to.add_string(&new),
            system_name: self.to.add_string(&new_linkers),
            file: self.to.add_string(&file),
        };
        let place = self.to.add_function(function);
        self.functions.insert(id, place);
        Some(place)
    }

    fn mapping(&mut self, id: MappingId) -> Option<MappingId> {
        if let Some(known) = self.mappings.get(&id) {
            return Some(*known);
        }
        let mapping = self.from.mapping(id)?;
        let file = self.names.code(&mapping.file).into_owned();
        let place = self.to.add_mapping(Mapping { file, ..mapping.clone() });
        self.mappings.insert(id, place);
        Some(place)
    }

    /// Spans are not nested deeper than a picture shows, so this does not recurse deeper either.
    fn link(&mut self, id: LinkId) -> Option<LinkId> {
        if let Some(known) = self.links.get(&id) {
            return Some(*known);
        }
        let Link { span, parent, ids } = self.from.link(id)?;
        let parent = parent.and_then(|parent| self.link(parent));
        let span = self.names.span(span).into_owned();
        let place = self.to.add_link(Link { span, parent, ids: *ids });
        self.links.insert(id, place);
        Some(place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::{Point, ProfileId, SampleKind};

    /// Everything that begins with `secret` is hidden.
    struct Hiding;

    impl Hiding {
        fn hide<'a>(name: &'a str) -> Cow<'a, str> {
            if name.contains("secret") { "x".into() } else { name.into() }
        }
    }

    impl Names for Hiding {
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
}
