//! Which of several leaves that a future awaited at the same time are shown.

use std::ops::Range;

/// The leaves whose stacks are in one, the last that cloned the waker first.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Branches {
    /// The leaves that are shown: all of which one may have been awaited, or the one that woke the task.
    pub(super) shown: Vec<Range<usize>>,
    /// The leaves that were awaited at the same time, but are not shown.
    pub(super) others: Vec<Range<usize>>,
    /// The number of timers, which only limit what is shown.
    pub(super) timers: usize,
}

impl Branches {
    /// Splits a stack into its leaves. `other` and `woken` are the frames before the stack of another leaf, and before
    /// that of the leaf which woke the task. `limits` says whether one is the timer of a timeout that limits another.
    pub(super) fn of<T: Copy + PartialEq>(
        stack: &[T],
        [other, woken]: [Option<T>; 2],
        limits: impl Fn(&[T], &[T]) -> bool,
    ) -> Self {
        let (mut parts, mut woke, mut at) = (Vec::new(), None, 0);
        for part in stack.split(|frame| Some(*frame) == other) {
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
        let frames = |leaf: usize| parts.get(leaf).and_then(|part| stack.get(part.clone()));
        // A timeout polls its timer last, after what it limits.
        let limits = |timer: usize, limited: usize| {
            let both = frames(timer).zip(frames(limited));
            timer < limited && both.is_some_and(|(timer, limited)| limits(timer, limited))
        };
        let is_timer = |leaf: usize| (leaf + 1..parts.len()).any(|limited| limits(leaf, limited));
        let is_shown = |leaf: usize| match woke {
            Some(woke) if is_timer(woke) => limits(woke, leaf),
            Some(woke) => woke == leaf,
            None => true,
        };
        let mut branches = Self::default();
        for (leaf, part) in parts.iter().enumerate() {
            match (is_timer(leaf), is_shown(leaf)) {
                (true, _) => branches.timers += 1,
                (false, true) => branches.shown.push(part.clone()),
                (false, false) => branches.others.push(part.clone()),
            }
        }
        branches
    }
}

#[cfg(test)]
mod tests {
    use super::super::leaf::LeafMark;
    use super::super::model::{FrameKind, Function, Line, Location};
    use super::super::rebuild::is_timeout;
    use super::*;
    use crate::profile::{Profile, ProfileId};

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
        let Branches { shown, others, timers } =
            Branches::of(&stack, marks, |last, before| is_timeout(&profile, last, before));
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
