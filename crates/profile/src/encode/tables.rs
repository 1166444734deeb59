//! What pprof and OTLP list of a profile: what its samples refer to, each once.

use std::hash::Hash;

use indexmap::IndexSet;

use crate::profile::{
    Function, FunctionId, Leaf, LeafId, Location, LocationId, MappingId, Profile, StackId,
};

/// What an entry of a table is of: code, or what the stack does not show.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum CodeOrLeaf<T> {
    Code(T),
    Leaf(LeafId),
}

/// The number of an entry is its place, from 1 on. The first string is empty, and has the number 0.
pub(super) struct Tables<'a> {
    pub(super) profile: &'a Profile,
    pub(super) strings: IndexSet<String>,
    pub(super) mappings: IndexSet<MappingId>,
    pub(super) locations: IndexSet<CodeOrLeaf<LocationId>>,
    pub(super) functions: IndexSet<CodeOrLeaf<FunctionId>>,
}

/// A location with the numbers of what it refers to.
pub(super) struct UsedLocation<'a> {
    pub(super) code: Option<&'a Location>,
    /// A function, its line and its column.
    pub(super) lines: Vec<(usize, i64, i64)>,
    /// 0 if it is in none.
    pub(super) mapping: usize,
}

pub(super) fn number<T: Hash + Eq>(table: &mut IndexSet<T>, entry: T) -> usize {
    table.insert_full(entry).0 + 1
}

pub(super) fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

impl<'a> Tables<'a> {
    pub(super) fn new(profile: &'a Profile) -> Self {
        Self {
            profile,
            strings: IndexSet::from([String::new()]),
            mappings: IndexSet::new(),
            locations: IndexSet::new(),
            functions: IndexSet::new(),
        }
    }

    pub(super) fn string(&mut self, string: &str) -> usize {
        let known = self.strings.get_index_of(string);
        known.unwrap_or_else(|| self.strings.insert_full(string.to_owned()).0)
    }

    fn frame_of(&self, leaf: LeafId) -> Option<String> {
        self.profile.leaf(leaf).and_then(Leaf::frame)
    }

    /// The leaf, if the stack does not show it.
    pub(super) fn not_shown(&self, leaf: LeafId) -> Option<LeafId> {
        self.frame_of(leaf).map(|_| leaf)
    }

    /// The numbers of the locations of a stack and a leaf, the innermost first.
    pub(super) fn frames(&mut self, stack: StackId, leaf: Option<LeafId>) -> Vec<usize> {
        let calls = self.profile.location_ids(stack).map(CodeOrLeaf::Code);
        let frames = leaf.map(CodeOrLeaf::Leaf).into_iter().chain(calls);
        frames.map(|entry| number(&mut self.locations, entry)).collect()
    }

    pub(super) fn location(&mut self, entry: CodeOrLeaf<LocationId>) -> UsedLocation<'a> {
        let code = match entry {
            CodeOrLeaf::Code(id) => self.profile.location(id),
            CodeOrLeaf::Leaf(leaf) => {
                let function = number(&mut self.functions, CodeOrLeaf::Leaf(leaf));
                return UsedLocation { code: None, lines: vec![(function, 0, 0)], mapping: 0 };
            }
        };
        let lines = code.into_iter().flat_map(|code| &code.lines).map(|line| {
            let function = number(&mut self.functions, CodeOrLeaf::Code(line.function));
            (function, i64::from(line.line), i64::from(line.column))
        });
        let lines = lines.collect();
        let mapping = code.and_then(|code| code.mapping);
        let mapping = mapping.map_or(0, |mapping| number(&mut self.mappings, mapping));
        UsedLocation { code, lines, mapping }
    }

    pub(super) fn function(&self, entry: CodeOrLeaf<FunctionId>) -> Function {
        let function = match entry {
            CodeOrLeaf::Code(id) => self.profile.function(id).cloned(),
            CodeOrLeaf::Leaf(leaf) => self.frame_of(leaf).map(|frame| Function::named(&frame)),
        };
        function.unwrap_or_else(|| Function::named(""))
    }
}
