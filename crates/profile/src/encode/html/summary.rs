//! What a list of kept spans shows of one.

use std::borrow::Cow;
use std::time::UNIX_EPOCH;

use serde_json::{Value, json};

use crate::encode::brief::{Brief, facts_of};
use crate::encode::json::{joined, known, summary_of, text_of};
use crate::encode::markdown;
use crate::facts::{ChildTotals, Facts, Measure, Unit};
use crate::profile::{ComparedSummary, Hotspots, Profile};
use crate::text::{ms, rfc3339};

/// A kept span, and what its profile shows.
#[derive(Debug)]
pub struct KeptSummary<'a> {
    pub id: Cow<'a, str>,
    pub facts: &'a Facts,
    pub samples: usize,
    pub headline: &'a str,
    pub hotspots: &'a Hotspots,
    pub compared: Option<&'a ComparedSummary>,
    /// Why there is no profile, if there is none.
    pub no_profile: Option<&'a str>,
}

/// The summary of a profile, as a JSON object.
pub(super) fn of(profile: &Profile) -> String {
    let hotspots = profile.hotspots();
    let compared = profile.compared.as_ref().map(|compared| compared.summary());
    let summary = KeptSummary {
        id: profile.id.to_string().into(),
        facts: &facts_of(profile),
        samples: profile.sample_count(),
        headline: &profile.headline,
        hotspots: &hotspots,
        compared: compared.as_ref(),
        no_profile: None,
    };
    text_of(&summary.to_json())
}

/// The profile in 2 KiB for programs and people, as a JSON object of two texts.
pub(super) fn brief(brief: &Brief<'_>) -> String {
    let (markdown, json) = (markdown::shortened(brief), summary_of(brief));
    text_of(&json!({ "markdown": markdown, "json": json }))
}

impl KeptSummary<'_> {
    /// As [`markdown`](crate::encode::markdown), without what only the profile says.
    pub fn to_markdown(&self) -> String {
        markdown::shortened(&Brief::of_kept(self))
    }

    /// As [`json_summary`](crate::encode::json_summary), without what only the profile says.
    pub fn to_json_summary(&self) -> String {
        summary_of(&Brief::of_kept(self))
    }

    pub fn to_json(&self) -> Value {
        let facts = self.facts;
        let measures = Measure::ALL.iter().filter_map(|measure| {
            let value = facts.get(*measure)?;
            let is_time = measure.unit() == Unit::Nanoseconds;
            Some((measure.row().field, if is_time { ms(value).into() } else { value.into() }))
        });
        let fields = facts.fields.iter().map(|(name, value)| (*name, value.as_str()));
        let children = &facts.children;
        let has_children = !children.totals.is_empty();
        let list = || children.totals.iter().map(child).collect::<Value>();
        let (trace_id, span_id) = super::data::texts(facts.ids());
        let compared = self.compared.filter(|compared| compared.is_of(facts));
        let slower_in = compared.and_then(|compared| compared.slower_in.as_ref());
        let summary = json!({
            "id": self.id,
            "name": facts.name(),
            "span": &*facts.span,
            "fields": Value::from_iter(fields),
            "reasons": facts.reasons.to_string(),
            "rule": facts.rule.as_deref().unwrap_or_default(),
            "error_at": facts.error_at,
            "time": rfc3339(facts.start().unwrap_or(UNIX_EPOCH)),
            "split_ms": split_ms(facts),
            "beside": facts.beside(),
            "children": has_children.then(list),
            "children_from_ms": has_children.then(|| ms(children.from_ns)),
            "samples": self.samples,
            "headline": self.headline,
            "hotspots": self.hotspots,
            "references": compared.map(|compared| compared.references),
            "typical_median_ms": compared.and_then(|compared| compared.median_wall_ns).map(ms),
            "times_typical": compared.and_then(ComparedSummary::times),
            "slower_in": slower_in.map(|slower_in| slower_in.quantity.to_string()),
            "slower_in_ms": slower_in.map(|slower_in| ms(slower_in.extra_ns)),
            "trace_id": trace_id,
            "span_id": span_id,
            "no_profile": self.no_profile,
            "open": facts.is_open,
        });
        known(joined(summary, Value::from_iter(measures.collect::<Vec<(_, Value)>>())))
    }
}

/// The parts of wall time.
pub(crate) fn split_ms(facts: &Facts) -> Value {
    facts.split().parts().map(|(kind, ns)| (kind.name(), ms(ns))).collect()
}

/// The spans of one name inside a kept one; without a name, those of all others.
pub(crate) fn child(of: &ChildTotals) -> Value {
    known(json!({
        "name": of.name,
        "count": of.count,
        "total_ms": ms(of.total_ns),
        "longest_ms": ms(of.longest_ns),
        "open_ms": ms(of.open_ns),
        "order": of.order().to_string(),
    }))
}
