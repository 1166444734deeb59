//! The rules that may decide for a callsite.
//!
//! A [`Keep`] has more than a kilobyte, and a program's thread that hits a callsite first may have a stack of 16 KiB, so no
//! `Keep` is passed by value here.

use tracing::Metadata;

use super::{Keep, Rule, Rules, attribute};
use crate::ids::hash_of;

/// A rule that may decide for a callsite.
pub(super) struct Candidate<'a> {
    pub(super) rule: &'a Rule,
    /// Equal rules have the same.
    pub(super) id: u64,
    is_admitted: bool,
    /// What the attribute of the callsite states.
    stated: Option<Box<Keep>>,
}

impl Candidate<'_> {
    pub(super) fn keep(&self) -> &Keep {
        match &self.stated {
            Some(stated) => stated,
            None if self.is_admitted => &self.rule.keep,
            None => Keep::NEVER,
        }
    }

    pub(super) fn keeps(&self) -> bool {
        !self.keep().is_never()
    }
}

/// The rules that may decide for spans of a callsite, the most specific first.
pub(super) fn candidates<'a>(metadata: &Metadata<'_>, rules: &'a Rules) -> Vec<Candidate<'a>> {
    let new = |rule: &'a Rule| Candidate {
        rule,
        id: hash_of(rule),
        is_admitted: rule.admits(metadata),
        stated: None,
    };
    let mut candidates: Vec<_> = rules.candidates(metadata).into_iter().map(new).collect();
    let decides = |last: &Candidate<'_>| !last.rule.needs_values();
    // A directive that names the span or its target beats the attribute.
    let is_named = |last: &Candidate<'_>| decides(last) && !last.rule.is_for_all();
    if candidates.last().is_some_and(is_named) {
        return candidates;
    }
    let is_enabled = *metadata.level() <= rules.highest_level() && attribute::is_on(metadata);
    if let Some(stated) = is_enabled.then(|| attribute::keep_of(metadata)).flatten() {
        candidates.pop_if(|last| decides(last));
        let id = hash_of(std::ptr::from_ref(metadata).addr());
        candidates.push(Candidate {
            rule: Rule::any(),
            id,
            is_admitted: true,
            stated: Some(stated),
        });
    }
    candidates
}
