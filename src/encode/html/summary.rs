//! What a list of kept spans shows of one.

use std::borrow::Cow;
use std::io::{self, Write};
use std::time::UNIX_EPOCH;

use super::json::{Array, Json, Object, Plain, text_of};
use crate::encode::brief::{Brief, BriefDetail, facts_of};
use crate::encode::json_summary::plain;
use crate::encode::{json_summary, markdown};
use crate::facts::{ChildTotals, Facts, Measure, Unit};
use crate::profile::{ComparedSummary, FunctionShare, Hotspot, Hotspots, Profile, SampleKind};
use crate::text::{ms, rfc3339};

/// A kept span, and what its profile shows.
#[derive(Debug)]
pub(crate) struct KeptSummary<'a> {
    pub(crate) id: Cow<'a, str>,
    pub(crate) facts: &'a Facts,
    pub(crate) samples: usize,
    pub(crate) headline: &'a str,
    pub(crate) hotspots: &'a Hotspots,
    pub(crate) compared: Option<&'a ComparedSummary>,
    /// Why there is no profile, if there is none.
    pub(crate) no_profile: Option<&'a str>,
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
    summary.to_json()
}

/// The profile in 2 KiB for programs and people, as a JSON object of two texts.
pub(super) fn brief(brief: &Brief<'_>) -> String {
    let write = |forms: &mut Object<'_>| {
        forms.member("markdown", markdown::shortened(brief))?;
        forms.member("json", json_summary::shortened(brief))
    };
    text_of(|json| Object::write(json, write))
}

impl KeptSummary<'_> {
    /// As [`markdown`](crate::encode::markdown), without what only the profile says.
    #[cfg(feature = "axum")]
    pub(crate) fn to_markdown(&self) -> String {
        markdown::shortened(&Brief::of_kept(self))
    }

    /// As [`json_summary`](crate::encode::json_summary), without what only the profile says.
    #[cfg(feature = "axum")]
    pub(crate) fn to_json_summary(&self) -> String {
        json_summary::shortened(&Brief::of_kept(self))
    }

    pub(crate) fn to_json(&self) -> String {
        text_of(|json| self.write(json))
    }

    fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let facts = self.facts;
        Object::write(out, |summary| {
            summary.member("id", &*self.id)?;
            summary.member("name", facts.name())?;
            summary.member("span", &*facts.span)?;
            summary.object("fields", |fields| {
                facts.fields.iter().try_for_each(|(name, value)| fields.member(name, value))
            })?;
            summary.member("reasons", facts.reasons.to_string())?;
            summary.member("rule", facts.rule.as_deref().unwrap_or_default())?;
            if let Some(place) = &facts.error_at {
                summary.member("error_at", place)?;
            }
            summary.member("time", rfc3339(facts.start().unwrap_or(UNIX_EPOCH)))?;
            for measure in Measure::ALL {
                match facts.get(*measure) {
                    Some(ns) if measure.unit() == Unit::Nanoseconds => {
                        summary.member(measure.row().field, ms(ns))?;
                    }
                    Some(number) => summary.member(measure.row().field, Plain(number))?,
                    None => {}
                }
            }
            summary.object("split_ms", |split| {
                facts.split().parts().try_for_each(|(kind, ns)| split.member(kind.name(), ms(ns)))
            })?;
            summary.member("beside", Array(|| facts.beside().into_iter()))?;
            if !facts.children.totals.is_empty() {
                let children = || facts.children.totals.iter().map(|of| ChildSummary(of, None));
                summary.member("children", Array(children))?;
                summary.member("children_from_ms", ms(facts.children.from_ns))?;
            }
            summary.member("samples", Plain(self.samples))?;
            summary.member("headline", self.headline)?;
            summary.member("hotspots", Array(|| self.hotspots.iter().map(HotspotRow)))?;
            if let Some(compared) = self.compared.filter(|compared| compared.is_of(facts)) {
                write_compared(compared, summary)?;
            }
            let (trace, id) = super::data::texts(facts.ids());
            summary.member("trace_id", trace)?;
            summary.member("span_id", id)?;
            if let Some(why) = self.no_profile {
                summary.member("no_profile", why)?;
            }
            summary.member("open", Plain(facts.is_open))
        })
    }
}

fn write_compared(compared: &ComparedSummary, summary: &mut Object<'_>) -> io::Result<()> {
    summary.member("references", Plain(compared.references))?;
    if let Some(ns) = compared.median_wall_ns {
        summary.member("typical_median_ms", ms(ns))?;
    }
    if let Some(times) = compared.times() {
        summary.member("times_typical", times)?;
    }
    if let Some(slower_in) = &compared.slower_in {
        summary.member("slower_in", slower_in.quantity.to_string())?;
        summary.member("slower_in_ms", ms(slower_in.extra_ns))?;
    }
    Ok(())
}

/// The spans of one name inside a kept one; without a name, those of all others.
pub(crate) struct ChildSummary<'a>(pub(crate) &'a ChildTotals, pub(crate) Option<BriefDetail>);

impl Json for ChildSummary<'_> {
    fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let Self(of, detail) = self;
        Object::write(out, |children| {
            if let Some(name) = &of.name {
                children
                    .member("name", detail.map_or_else(|| name.clone(), |of| plain(name, of)))?;
            }
            children.member("count", Plain(of.count))?;
            children.member("total_ms", ms(of.total_ns))?;
            children.member("longest_ms", ms(of.longest_ns))?;
            children.member("open_ms", ms(of.open_ns))?;
            children.member("order", of.order().to_string())
        })
    }
}

/// What holds most of one kind of time, or of the allocated bytes.
struct HotspotRow<'a>(&'a Hotspot);

impl Json for HotspotRow<'_> {
    fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let Self(hotspot) = self;
        Object::write(out, |row| {
            row.member("kind", kind_name(hotspot.kind))?;
            row.member("functions", Array(|| hotspot.functions.iter().map(ShareRow)))?;
            row.member("callers", Array(|| hotspot.callers.iter()))?;
            for (name, share) in [("leaf", &hotspot.leaf), ("beside", &hotspot.beside)] {
                share.iter().try_for_each(|share| row.member(name, ShareRow(share)))?;
            }
            row.member("certain", Plain(hotspot.is_certain))
        })
    }
}

pub(crate) const fn kind_name(kind: SampleKind) -> &'static str {
    match kind {
        SampleKind::OnCpu => "on_cpu",
        SampleKind::OffCpu => "off_cpu",
        SampleKind::Await => "await",
        SampleKind::Delay => "scheduling_delay",
        _ => "allocated",
    }
}

struct ShareRow<'a>(&'a FunctionShare);

impl Json for ShareRow<'_> {
    fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let FunctionShare { name, location, share, .. } = self.0;
        Object::write(out, |row| {
            row.member("name", name)?;
            row.member("location", location)?;
            row.member("share", rounded(*share))
        })
    }
}

fn rounded(share: f64) -> f64 {
    (share * 1e3).round() / 1e3
}
