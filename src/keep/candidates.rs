//! The rules that may decide for a callsite.
//!
//! A [`Keep`] has more than a kilobyte, and a program's thread that hits a callsite first may have a stack of 16 KiB, so no
//! `Keep` is passed by value here.

use std::time::Duration;

use tracing::Metadata;

use super::condition::boxed;
use super::{Condition, Keep, Rule, Rules, Threshold};
use crate::facts::Measure;
use crate::ids::hash_of;

/// A rule that may decide for a callsite.
pub(super) struct Candidate<'a> {
    pub(super) rule: &'a Rule,
    /// Equal rules have the same.
    pub(super) id: u64,
    keep: &'a Keep,
    stated: Option<Box<Keep>>,
}

/// The rule of a callsite that states its own `Keep`.
static ANY: Rule = Rule::for_all(Keep::never());

impl Candidate<'_> {
    pub(super) fn keep(&self) -> &Keep {
        self.stated.as_deref().unwrap_or(self.keep)
    }

    pub(super) fn keeps(&self) -> bool {
        !self.keep().is_never()
    }
}

/// The rules that may decide for spans of a callsite, the most specific first.
pub(super) fn candidates<'a>(metadata: &Metadata<'_>, rules: &'a Rules) -> Vec<Candidate<'a>> {
    let new = |rule: &'a Rule| {
        let keep = if rule.admits(metadata) { &rule.keep } else { Keep::NEVER };
        Candidate { rule, id: hash_of(rule), keep, stated: None }
    };
    let mut candidates: Vec<_> = rules.candidates(metadata).into_iter().map(new).collect();
    let decides = |last: &Candidate<'_>| !last.rule.needs_values();
    // A directive that names the span or its target beats the attribute.
    let is_named = |last: &Candidate<'_>| decides(last) && !last.rule.is_for_all();
    if candidates.last().is_some_and(is_named) {
        return candidates;
    }
    let is_enabled = *metadata.level() <= rules.highest_level();
    if let Some(stated) = is_enabled.then(|| stated_by(metadata)).flatten() {
        candidates.pop_if(|last| decides(last));
        let id = hash_of(std::ptr::from_ref(metadata).addr());
        candidates.push(Candidate { rule: &ANY, id, keep: Keep::NEVER, stated: Some(stated) });
    }
    candidates
}

const FIRST_WORD: &str = "tracing_profiling";

/// The `Keep` that the attribute of a callsite states, if any. It is encoded in the name of a field that never has a
/// value, as words separated by blanks: `tracing_profiling threshold_ns=50000000 on_error`.
pub(super) fn stated_by(metadata: &Metadata<'_>) -> Option<Box<Keep>> {
    metadata.fields().iter().find_map(|field| read(field.name()))
}

/// Whether the callsite is that of an attribute, which may state nothing.
pub(super) fn has_attribute(metadata: &Metadata<'_>) -> bool {
    let is_first = |name: &str| name.split(' ').next() == Some(FIRST_WORD);
    metadata.fields().iter().any(|field| is_first(field.name()))
}

fn read(name: &str) -> Option<Box<Keep>> {
    let mut words = name.split(' ');
    words.next().filter(|first| *first == FIRST_WORD)?;
    let mut stated: Option<Box<Keep>> = None;
    for word in words {
        let keep = stated.get_or_insert_with(|| boxed(Keep::NEVER));
        match word.split_once('=').unwrap_or((word, "")) {
            ("threshold_ns", ns) => {
                let latency = Duration::from_nanos(ns.parse().ok()?);
                keep.add(Condition::Above(Measure::Wall, Threshold::Time(latency)));
            }
            ("on_error", "") => keep.add(Condition::Error),
            ("off", "") => *keep = boxed(Keep::NEVER),
            // Written by a later release of the macro: do not guess.
            _ => return None,
        }
    }
    stated
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_the_macro_writes() {
        let slow = Keep::slower_than(Duration::from_millis(50));
        let cases = [
            ("tracing_profiling threshold_ns=50000000", Some(slow)),
            ("tracing_profiling threshold_ns=50000000 on_error", Some(slow.or_failed())),
            ("tracing_profiling on_error", Some(Keep::failed())),
            ("tracing_profiling", None),
            ("tracing_profiling off", Some(Keep::never())),
        ];
        for (name, keep) in cases {
            assert_eq!(read(name).as_deref(), keep.as_ref(), "{name}");
        }
    }

    #[test]
    fn other_fields_are_ignored() {
        for name in ["name", "tracing_profiling.x", "off", "tracing_profiling sometimes", ""] {
            assert_eq!(read(name), None, "{name}");
        }
    }
}
