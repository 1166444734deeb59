//! A profile in 2 KiB of JSON: for agents and scripts.

use std::io::{self, Write};

use super::brief::{Brief, BriefComparison, BriefDetail, BriefRows, MOST_BYTES};
use super::html::json::{Array, Json, Object, Plain, text_of};
use super::html::{ChildSummary, kind_name};
use crate::profile::{OwnRow, Profile, SampleKind};
use crate::text::{disturbs, ms};

/// Encodes the most important of a profile as a JSON object of at most 2,048 bytes: `name`, `reasons`, `time`, ids, the
/// `headline` that explains most of its time, `wall_ms` with its parts in `split_ms`, `functions` with the most of each
/// kind, how it differs from typical requests (`compared`), child spans (`children`), and what is `missing`. Where that is
/// too long, rows and the ends of long texts are left out.
pub fn json_summary(profile: &Profile) -> String {
    shortened(&Brief::of(profile))
}

pub(super) fn shortened(brief: &Brief<'_>) -> String {
    let mut texts =
        BriefDetail::LEVELS.into_iter().map(|detail| text_of(|json| write(brief, detail, json)));
    texts.find(|text| text.len() <= MOST_BYTES).unwrap_or_else(|| "{}".to_owned())
}

/// A text of the program.
pub(super) fn plain(text: &str, detail: BriefDetail) -> String {
    let plain = |character| if disturbs(character) { '\u{fffd}' } else { character };
    detail.shortened(text).chars().map(plain).collect()
}

fn write(brief: &Brief<'_>, detail: BriefDetail, out: &mut dyn Write) -> io::Result<()> {
    let facts = &brief.facts;
    Object::write(out, |summary| {
        if let Some(id) = &brief.id {
            summary.member("id", &**id)?;
        }
        summary.member("name", plain(&facts.name(), detail))?;
        summary.member("reasons", facts.reasons.to_string())?;
        summary.member("time", brief.time())?;
        if let Some((trace, span)) = facts.ids() {
            summary.member("trace_id", trace.to_string())?;
            summary.member("span_id", span.to_string())?;
        }
        summary.member("open", Plain(facts.is_open))?;
        summary.member("headline", plain(&brief.headline, detail.whole_line()))?;
        summary.member("wall_ms", ms(facts.times.wall_ns))?;
        summary.object("split_ms", |split| {
            facts.split().parts().try_for_each(|(kind, ns)| split.member(kind.name(), ms(ns)))
        })?;
        let beside = facts.beside();
        summary.member("beside", Array(|| beside.iter().filter(|_| detail.rows > 0)))?;
        let rows = || brief.rows.iter().flat_map(|rows| of_rows(rows, detail));
        summary.member("functions", Array(rows))?;
        if let Some(compared) = &brief.compared {
            summary.object("compared", |of| write_compared(compared, detail, of))?;
        }
        let children = || facts.children.totals.iter().take(detail.rows);
        summary
            .member("children", Array(|| children().map(|of| ChildSummary(of, Some(detail)))))?;
        let hints = || brief.hints.iter().filter(|_| detail.rows > 0);
        summary.member("hints", Array(hints))?;
        let missing = || brief.missing.iter().take(detail.rows.max(1));
        summary.member("missing", Array(|| missing().map(|text| plain(text, detail))))
    })
}

fn of_rows(rows: &BriefRows, detail: BriefDetail) -> impl Iterator<Item = RowJson<'_>> {
    rows.list.iter().take(detail.rows).map(move |row| RowJson { kind: rows.kind, row, detail })
}

struct RowJson<'a> {
    kind: SampleKind,
    row: &'a OwnRow,
    detail: BriefDetail,
}

impl Json for RowJson<'_> {
    fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let Self { kind, row: OwnRow { function, location, leaf, share }, detail } = self;
        Object::write(out, |row| {
            row.member("kind", kind_name(*kind))?;
            row.member("name", plain(function, *detail))?;
            if !location.is_empty() {
                row.member("location", plain(location, *detail))?;
            }
            if !leaf.is_empty() {
                row.member("in", plain(leaf, *detail))?;
            }
            row.member("share", (share * 1e3).round() / 1e3)
        })
    }
}

fn write_compared(
    of: &BriefComparison<'_>,
    detail: BriefDetail,
    out: &mut Object<'_>,
) -> io::Result<()> {
    out.member("references", Plain(of.summary.references))?;
    if let Some(ns) = of.summary.median_wall_ns {
        out.member("median_ms", ms(ns))?;
    }
    if let Some(times) = of.summary.times() {
        out.member("times", times)?;
    }
    let rows = || of.rows.iter().take(detail.rows);
    out.member(
        "more_ms",
        Array(|| rows().map(|(what, ns)| (plain(what, detail), *ns as f64 / 1e6))),
    )
}
