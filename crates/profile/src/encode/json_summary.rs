//! A profile in 2 KiB of JSON: for agents and scripts.

use serde::Serialize;
use serde_json::{Value, json};

use super::brief::{Brief, BriefComparison, BriefDetail, BriefRows, MOST_BYTES};
use super::html::{child, kind_name, rounded, split_ms};
use super::json::{known, text_of};
use crate::profile::{OwnRow, Profile};
use crate::text::{disturbs, ms};

/// Encodes the most important of a profile as a JSON object of at most 2,048 bytes: `name`, `reasons`, `time`, ids, the
/// `headline` that explains most of its time, `wall_ms` with its parts in `split_ms`, `functions` with the most of each
/// kind, how it differs from typical requests (`compared`), child spans (`children`), and what is `missing`. Where that is
/// too long, rows and the ends of long texts are left out.
pub fn json_summary(profile: &Profile) -> String {
    shortened(&Brief::of(profile))
}

pub(super) fn shortened(brief: &Brief<'_>) -> String {
    let mut texts = BriefDetail::LEVELS.into_iter().map(|detail| text_of(&shown(brief, detail)));
    texts.find(|text| text.len() <= MOST_BYTES).unwrap_or_else(|| "{}".to_owned())
}

/// A text of the program.
pub(super) fn plain(text: &str, detail: BriefDetail) -> String {
    let plain = |character| if disturbs(character) { '\u{fffd}' } else { character };
    detail.shortened(text).chars().map(plain).collect()
}

/// In the order in which it is shown.
#[derive(Serialize)]
struct Shown<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
    name: String,
    reasons: String,
    time: String,
    #[serde(flatten)]
    ids: Option<Value>,
    open: bool,
    headline: String,
    wall_ms: f64,
    split_ms: Value,
    beside: Vec<String>,
    functions: Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    compared: Option<Value>,
    children: Value,
    hints: &'a [&'static str],
    missing: Vec<String>,
}

fn shown<'a>(brief: &'a Brief<'_>, detail: BriefDetail) -> Shown<'a> {
    let facts = &brief.facts;
    let rows = brief.rows.iter().flat_map(|rows| of_rows(rows, detail));
    let children = facts.children.totals.iter().take(detail.rows);
    let missing = brief.missing.iter().take(detail.rows.max(1));
    let ids = facts.ids().map(|(trace, span)| (trace.to_string(), span.to_string()));
    let ids = ids.map(|(trace, span)| json!({ "trace_id": trace, "span_id": span }));
    Shown {
        id: brief.id.as_deref(),
        name: plain(&facts.name(), detail),
        reasons: facts.reasons.to_string(),
        time: brief.time(),
        ids,
        open: facts.is_open,
        headline: plain(&brief.headline, detail.whole_line()),
        wall_ms: ms(facts.times.wall_ns),
        split_ms: split_ms(facts),
        beside: if detail.rows > 0 { facts.beside() } else { Vec::new() },
        functions: rows.collect(),
        compared: brief.compared.as_ref().map(|compared| of_compared(compared, detail)),
        children: children.map(|of| child(of, Some(detail))).collect(),
        hints: if detail.rows > 0 { &brief.hints } else { &[] },
        missing: missing.map(|text| plain(text, detail)).collect(),
    }
}

fn of_rows(rows: &BriefRows, detail: BriefDetail) -> impl Iterator<Item = Value> {
    let some = move |text: &str| (!text.is_empty()).then(|| plain(text, detail));
    rows.list.iter().take(detail.rows).map(move |OwnRow { function, location, leaf, share }| {
        known(json!({
            "kind": kind_name(rows.kind),
            "name": plain(function, detail),
            "location": some(location),
            "in": some(leaf),
            "share": rounded(*share),
        }))
    })
}

fn of_compared(of: &BriefComparison<'_>, detail: BriefDetail) -> Value {
    let rows = of.rows.iter().take(detail.rows);
    known(json!({
        "references": of.summary.references,
        "median_ms": of.summary.median_wall_ns.map(ms),
        "times": of.summary.times(),
        "more_ms": rows.map(|(what, ns)| json!([plain(what, detail), *ns as f64 / 1e6])).collect::<Value>(),
    }))
}
