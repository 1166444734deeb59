//! What the short forms of a profile say.

use std::borrow::Cow;
use std::time::UNIX_EPOCH;

use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use super::html::{KeptSummary, child, split_ms};
use crate::facts::format::Ns;
use crate::facts::{ChildTotals, Facts, Measure};
use crate::ids::ProfileId;
use crate::profile::{ComparedSummary, OwnRow, Profile, SampleKind};
use crate::text::{disturbs, ms, rfc3339};

/// The most that a short form has.
pub(super) const MOST_BYTES: usize = 2_048;

/// A smaller share is not worth a row of its own.
const LEAST_ROW: f64 = 0.01;

/// How much of it is said.
#[derive(Clone, Copy)]
pub(super) struct BriefDetail {
    /// The most rows of each list.
    rows: usize,
    /// The most characters of a text.
    chars: usize,
}

impl BriefDetail {
    /// From the most to the least. Of the last one, nothing can be too long: it has less than ten texts of four bytes, or
    /// six in JSON, for each character.
    pub(super) const LEVELS: [Self; 7] = [
        Self { rows: 5, chars: 160 },
        Self { rows: 4, chars: 120 },
        Self { rows: 3, chars: 90 },
        Self { rows: 2, chars: 70 },
        Self { rows: 1, chars: 50 },
        Self { rows: 0, chars: 30 },
        Self { rows: 0, chars: 12 },
    ];

    /// The beginning and the end of a long text of the program: a path has its names at its end.
    pub(super) fn shortened(self, text: &str) -> String {
        let plain = |character| if disturbs(character) { '\u{fffd}' } else { character };
        let length = text.chars().count();
        if length <= self.chars {
            return text.chars().map(plain).collect();
        }
        let begin = self.chars / 3;
        let end = self.chars - begin - 1;
        let (begin, end) = (text.chars().take(begin), text.chars().skip(length - end));
        begin.chain(['…']).chain(end).map(plain).collect()
    }
}

/// How the first span differs from typical ones.
#[derive(Clone, Serialize)]
pub(super) struct BriefComparison {
    pub(super) references: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) median_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) times: Option<f64>,
    /// What is certain, with the milliseconds.
    #[serde(rename = "more_ms")]
    pub(super) rows: Vec<(String, f64)>,
}

/// Which span it is.
#[derive(Clone, Serialize)]
pub(super) struct BriefSpan {
    pub(super) name: String,
    reasons: String,
    pub(super) time: String,
    #[serde(flatten)]
    ids: Option<Value>,
    open: bool,
}

/// What the short forms of a profile say, in the order in which JSON has it.
#[derive(Clone, Serialize)]
pub(super) struct Brief<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) id: Option<Cow<'a, str>>,
    #[serde(flatten)]
    pub(super) span: BriefSpan,
    pub(super) headline: String,
    wall_ms: f64,
    split_ms: Value,
    pub(super) beside: Vec<String>,
    pub(super) functions: Vec<OwnRow>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) compared: Option<BriefComparison>,
    #[serde(serialize_with = "child_rows")]
    pub(super) children: Vec<ChildTotals>,
    pub(super) missing: Vec<String>,
    #[serde(skip)]
    pub(super) facts: Cow<'a, Facts>,
    /// Whether it is of a span, whose facts are known.
    #[serde(skip)]
    pub(super) has_span: bool,
}

fn child_rows<S: Serializer>(rows: &[ChildTotals], to: S) -> Result<S::Ok, S::Error> {
    to.collect_seq(rows.iter().map(child))
}

/// What is known of the first span, or only of a profile that has none.
pub(super) fn facts_of(profile: &Profile) -> Cow<'_, Facts> {
    let (span, start_unix_ns) = (|| profile.name.clone().into(), profile.start_unix_ns);
    let unnamed = || Facts { span: span(), start_unix_ns, ..Facts::default() };
    profile.spans.first().map_or_else(|| Cow::Owned(unnamed()), Cow::Borrowed)
}

impl<'a> Brief<'a> {
    pub(super) fn of(profile: &'a Profile) -> Self {
        let facts = facts_of(profile);
        // Spans inside it wait and await, too, and times can be unknown.
        let kinds = [
            (facts.times.subtree_on_cpu_ns, SampleKind::OnCpu),
            (facts.times.off_cpu_ns, SampleKind::OffCpu),
            (facts.times.await_ns, SampleKind::Await),
        ];
        let kinds = kinds.map(|(ns, kind)| (ns.max(profile.total(kind)), kind));
        // Of what takes the least time, nothing is worth a row.
        let is_worth = |(ns, _): &(u64, SampleKind)| {
            profile.spans.is_empty() || *ns >= facts.times.wall_ns / 20
        };
        let mut kinds: Vec<_> = kinds.into_iter().filter(is_worth).collect();
        kinds.sort_by_key(|(ns, _)| std::cmp::Reverse(*ns));
        let of_kind = |(_, kind): &(u64, SampleKind)| {
            let rows = profile.own_rows(*kind).into_iter().enumerate();
            rows.take_while(|(number, row)| *number == 0 || row.share >= LEAST_ROW)
        };
        let functions = kinds.iter().flat_map(of_kind).map(|(_, row)| row).collect();
        let headline = match profile.headline.as_str() {
            "" => {
                profile.hotspots().0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
            }
            headline => headline.to_owned(),
        };
        let id = (profile.id != ProfileId::NONE).then(|| profile.id.to_string().into());
        Self {
            functions,
            compared: compared(profile, &facts),
            missing: missing(profile, &facts),
            has_span: !profile.spans.is_empty(),
            ..Self::of_facts(id, facts, headline)
        }
    }

    /// What is known of a kept span without its profile.
    pub(super) fn of_kept(kept: &KeptSummary<'a>) -> Self {
        let compared = kept.compared.filter(|compared| compared.is_of(kept.facts));
        let missing = match kept.no_profile {
            Some(why) => format!("a profile: {why}"),
            None => "the stacks: the directory has no report of the profile".to_owned(),
        };
        Self {
            compared: compared.map(|summary| BriefComparison::of(summary, Vec::new())),
            missing: vec![missing],
            ..Self::of_facts(
                Some(kept.id.clone()),
                Cow::Borrowed(kept.facts),
                kept.headline.to_owned(),
            )
        }
    }

    fn of_facts(id: Option<Cow<'a, str>>, facts: Cow<'a, Facts>, headline: String) -> Self {
        let ids = |(trace, span): (_, _)| json!({ "trace_id": trace, "span_id": span });
        Self {
            id,
            span: BriefSpan {
                name: facts.name(),
                reasons: facts.reasons.to_string(),
                time: rfc3339(facts.start().unwrap_or(UNIX_EPOCH)),
                ids: facts.trace.map(|of| ids((of.trace.to_string(), of.span.to_string()))),
                open: facts.is_open,
            },
            headline,
            wall_ms: ms(facts.times.wall_ns),
            split_ms: split_ms(&facts),
            beside: facts.beside(),
            functions: Vec::new(),
            compared: None,
            children: facts.children.totals.clone(),
            missing: Vec::new(),
            facts,
            has_span: true,
        }
    }

    /// The text that `write` makes of as much as fits.
    pub(super) fn within_limit(&self, write: impl Fn(&Self) -> String) -> Option<String> {
        let mut texts = BriefDetail::LEVELS.into_iter().map(|detail| write(&self.at(detail)));
        texts.find(|text| text.len() <= MOST_BYTES)
    }

    /// Returns the brief with at most that detail.
    fn at(&self, detail: BriefDetail) -> Self {
        let BriefDetail { rows, chars } = detail;
        let shorten = |text: &mut String| *text = detail.shortened(text);
        let mut brief = self.clone();
        shorten(&mut brief.span.name);
        // A sentence.
        brief.headline = BriefDetail { rows, chars: chars * 4 }.shortened(&brief.headline);
        let (mut number, mut before) = (0, None);
        brief.functions.retain(|row| {
            number = if before.replace(row.kind) == Some(row.kind) { number + 1 } else { 1 };
            number <= rows
        });
        for row in &mut brief.functions {
            [&mut row.function, &mut row.location, &mut row.leaf].into_iter().for_each(shorten);
        }
        if let Some(compared) = &mut brief.compared {
            compared.rows.truncate(rows);
            compared.rows.iter_mut().for_each(|(what, _)| shorten(what));
        }
        brief.children.truncate(rows);
        brief.children.iter_mut().filter_map(|row| row.name.as_mut()).for_each(shorten);
        if rows == 0 {
            brief.beside.clear();
        }
        brief.missing.truncate(rows.max(1));
        brief.missing.iter_mut().for_each(shorten);
        let facts = brief.facts.to_mut();
        facts.target = detail.shortened(&facts.target).into();
        facts.rule = facts.rule.as_deref().map(|rule| detail.shortened(rule).into());
        brief
    }
}

impl BriefComparison {
    fn of(summary: &ComparedSummary, rows: Vec<(String, f64)>) -> Self {
        let ComparedSummary { references, median_wall_ns, .. } = *summary;
        Self { references, median_ms: median_wall_ns.map(ms), times: summary.times(), rows }
    }
}

fn compared(profile: &Profile, facts: &Facts) -> Option<BriefComparison> {
    let compared = profile.compared.as_deref()?;
    let summary = compared.summary();
    if !summary.is_of(facts) {
        return None;
    }
    let certain = compared.comparison.rows.iter().filter(|row| row.value.certain_extra().is_some());
    let rows = certain.map(|row| (row.quantity.to_string(), row.value.extra() as f64 / 1e6));
    Some(BriefComparison::of(&summary, rows.collect()))
}

fn missing(profile: &Profile, facts: &Facts) -> Vec<String> {
    const LITTLE: f64 = 0.9;
    let mut missing = profile.losses.clone();
    let unsampled_ns = facts.get(Measure::Unsampled).unwrap_or_default();
    if let Some(coverage) = profile.coverage().filter(|coverage| *coverage < LITTLE)
        && facts.times.subtree_on_cpu_ns > facts.times.wall_ns / 20
    {
        missing.push(format!("samples cover {:.0} % of on-CPU time", coverage * 100.0));
    } else if unsampled_ns > facts.times.wall_ns / 20 {
        missing.push(format!("{} on-CPU were not sampled", Ns(unsampled_ns)));
    }
    let unexplained_ns = facts.times.idle_ns.saturating_sub(facts.times.explained_idle_ns());
    if unexplained_ns > facts.times.wall_ns / 10 {
        missing.push("where it was idle: only futures wrapped by .profiled() show that".to_owned());
    }
    if profile.id == ProfileId::NONE || profile.point_count() == 0 {
        missing.push("samples: none fell in it".to_owned());
    }
    missing
}
