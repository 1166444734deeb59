//! Which of several leaves that a future awaited at the same time are shown.

use std::ops::Range;

use super::code_origin::limits_time;
use super::model::{Line, LocationId, Profile};

/// A frame between the stacks of several leaves, before symbolization.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum LeafMark {
    /// The stack of another leaf follows.
    Other,
    /// The leaf whose stack follows woke the task.
    Woken,
}

impl LeafMark {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Other => "[or]",
            Self::Woken => "[woken by]",
        }
    }
}

/// The leaves whose stacks are in one, the last that cloned the waker first.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Branches {
    /// Those that are shown: all of which one may have been awaited, or the one that woke the task.
    pub(super) shown: Vec<Range<usize>>,
    /// Those that were awaited at the same time, but are not shown.
    pub(super) others: Vec<Range<usize>>,
    /// The number of timers, which only limit what is shown.
    pub(super) timers: usize,
}

impl Branches {
    /// Those of a stack. `marks` are the locations of [`LeafMark::Other`] and [`LeafMark::Woken`] in it.
    pub(super) fn of(
        profile: &Profile,
        stack: &[LocationId],
        marks: [Option<LocationId>; 2],
    ) -> Self {
        let [other, woken] = marks;
        let (mut parts, mut woke, mut at) = (Vec::new(), None, 0);
        for part in stack.split(|id| Some(*id) == other) {
            let range = at..at + part.len();
            at = range.end + 1;
            let is_woken = woken.is_some() && part.first().copied() == woken;
            if is_woken {
                woke = Some(parts.len());
            }
            parts.push(range.start + usize::from(is_woken)..range.end);
        }
        if parts.len() == 1 {
            return Self { shown: parts, ..Self::default() };
        }
        let lines =
            |part: &Range<usize>| lines(profile, stack.get(part.clone()).unwrap_or_default());
        let all_lines: Vec<_> = parts.iter().map(lines).collect();
        // A timeout polls its timer last, after what it limits.
        let limits = |timer: usize, limited: usize| {
            let lines = all_lines.get(timer).zip(all_lines.get(limited));
            timer < limited && lines.is_some_and(|(last, before)| is_timeout(profile, last, before))
        };
        let all = 0..parts.len();
        let is_timer = |leaf: usize| all.clone().any(|limited| limits(leaf, limited));
        let is_shown = |leaf: usize| match woke {
            Some(woke) if is_timer(woke) => limits(woke, leaf),
            Some(woke) => woke == leaf,
            None => true,
        };
        let mut branches = Self::default();
        for (leaf, part) in parts.into_iter().enumerate() {
            match (is_timer(leaf), is_shown(leaf)) {
                (true, _) => branches.timers += 1,
                (false, true) => branches.shown.push(part),
                (false, false) => branches.others.push(part),
            }
        }
        branches
    }
}

fn lines(profile: &Profile, part: &[LocationId]) -> Vec<Line> {
    let locations = part.iter().filter_map(|id| profile.location(*id));
    locations.flat_map(|location| location.lines.iter().copied()).collect()
}

/// Whether the innermost function that both are in limits the time of one of them, at another line.
fn is_timeout(profile: &Profile, last: &[Line], before: &[Line]) -> bool {
    let mut both = last.iter().rev().zip(before.iter().rev());
    let parting = both.find(|(last, before)| last != before);
    parting.is_some_and(|(last, before)| {
        let function = profile.function(last.function);
        last.function == before.function && function.is_some_and(limits_time)
    })
}

#[cfg(test)]
mod tests {
    use super::super::model::{FrameKind, Function, Location};
    use super::*;
    use crate::profile::ProfileId;

    /// The names of those that are shown and of the others, and the number of timers. A `*` stands before the leaf that woke
    /// the task; a function has a line.
    fn shown(leaves: &[&[&str]]) -> (Vec<String>, Vec<String>, usize) {
        let mut profile = Profile::new(ProfileId::for_test(1), 1);
        let mut stack = Vec::new();
        for (number, leaf) in leaves.iter().enumerate() {
            if number > 0 {
                stack.push(profile.add_leaf_mark(LeafMark::Other));
            }
            for frame in *leaf {
                if *frame == "*" {
                    stack.push(profile.add_leaf_mark(LeafMark::Woken));
                    continue;
                }
                let (name, line) = frame.rsplit_once(':').unwrap_or((frame, "1"));
                let function = profile.add_function(Function::named(name));
                let lines = vec![Line { function, line: line.parse().unwrap(), column: 0 }];
                let (kind, address) = (FrameKind::Rust, 0);
                let location = Location { mapping: None, address, kind, lines, is_inferred: false };
                stack.push(profile.add_location(location));
            }
        }
        let marks = [LeafMark::Other, LeafMark::Woken].map(|mark| profile.leaf_mark(mark));
        let Branches { shown, others, timers } = Branches::of(&profile, &stack, marks);
        let names = |parts: Vec<Range<usize>>| -> Vec<String> {
            let first = parts.into_iter().map(|part| stack[part][0]);
            let line = first.map(|id| profile.location(id).unwrap().lines[0]);
            line.map(|line| profile.function(line.function).unwrap().name.clone()).collect()
        };
        (names(shown), names(others), timers)
    }

    fn strings(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn the_leaf_that_woke_the_task_is_shown_and_otherwise_all() {
        let [a, b, c] = [["a", "main:1"], ["b", "main:2"], ["c", "main:3"]];
        assert_eq!(shown(&[&a]), (strings(&["a"]), Vec::new(), 0));
        assert_eq!(shown(&[&a, &b, &c]), (strings(&["a", "b", "c"]), Vec::new(), 0));
        let woken = ["*", "b", "main:2"];
        assert_eq!(shown(&[&a, &woken, &c]), (strings(&["b"]), strings(&["a", "c"]), 0));
        let woken = ["*", "a", "main:1"];
        assert_eq!(shown(&[&woken, &b]), (strings(&["a"]), strings(&["b"]), 0));
    }

    #[test]
    fn a_timer_is_not_shown_but_what_it_limits() {
        let timer = ["sleep", "tokio::time::timeout::poll:9", "main:2"];
        let limited = ["fetch", "tokio::time::timeout::poll:5", "main:2"];
        let beside = ["shutdown", "main:3"];
        assert_eq!(shown(&[&timer, &limited]), (strings(&["fetch"]), Vec::new(), 1));
        let woken = ["*", "fetch", "tokio::time::timeout::poll:5", "main:2"];
        assert_eq!(shown(&[&timer, &woken]), (strings(&["fetch"]), Vec::new(), 1));
        // It has elapsed.
        let elapsed = ["*", "sleep", "tokio::time::timeout::poll:9", "main:2"];
        let expected = (strings(&["fetch"]), strings(&["shutdown"]), 1);
        assert_eq!(shown(&[&elapsed, &limited, &beside]), expected);
        let joined = ["another", "tokio::time::timeout::poll:5", "main:2"];
        let expected = (strings(&["another", "fetch"]), Vec::new(), 1);
        assert_eq!(shown(&[&elapsed, &joined, &limited]), expected);
        assert_eq!(shown(&[&timer, &beside]).2, 0, "it limits something else");
    }
}
