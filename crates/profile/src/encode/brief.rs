//! What the short forms of a profile say.

use std::borrow::Cow;
use std::time::UNIX_EPOCH;

use super::html::KeptSummary;
use crate::facts::{Facts, Measure, Reason};
use crate::ids::ProfileId;
use crate::profile::{ComparedSummary, OwnRow, Profile, SampleKind, own_name};
use crate::text::rfc3339;

/// The most that a short form has.
pub(super) const MOST_BYTES: usize = 2_048;

/// A smaller share is not worth a place.
const NOTABLE: f64 = 0.05;
/// The same of a row of its own.
const LEAST_ROW: f64 = 0.01;

/// How much of it is said.
#[derive(Clone, Copy)]
pub(super) struct BriefDetail {
    /// The most rows of each list.
    pub(super) rows: usize,
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

    /// Of a text that is a sentence.
    pub(super) fn whole_line(self) -> Self {
        Self { chars: self.chars * 4, ..self }
    }

    /// The beginning and the end of a long text: a path has its names at its end.
    pub(super) fn shortened(self, text: &str) -> Cow<'_, str> {
        let Some((_, _)) = text.char_indices().nth(self.chars) else { return text.into() };
        let (begin, end) = (self.chars / 3, self.chars - self.chars / 3 - 1);
        let begin = text.char_indices().nth(begin).map_or(0, |(at, _)| at);
        let end = text.char_indices().rev().nth(end.saturating_sub(1)).map_or(0, |(at, _)| at);
        format!("{}…{}", text.get(..begin).unwrap_or_default(), text.get(end..).unwrap_or_default())
            .into()
    }
}

/// The rows of one kind of samples.
pub(super) struct BriefRows {
    pub(super) kind: SampleKind,
    pub(super) list: Vec<OwnRow>,
}

/// How the first span differs from typical ones.
pub(super) struct BriefComparison<'a> {
    pub(super) summary: Cow<'a, ComparedSummary>,
    /// What is certain, with the nanoseconds.
    pub(super) rows: Vec<(String, i64)>,
}

/// What the short forms of a profile say.
pub(super) struct Brief<'a> {
    pub(super) id: Option<Cow<'a, str>>,
    pub(super) facts: Cow<'a, Facts>,
    /// Whether it is of a span, whose facts are known.
    pub(super) has_span: bool,
    pub(super) headline: Cow<'a, str>,
    pub(super) rows: Vec<BriefRows>,
    /// The innermost functions on-CPU, with their shares.
    pub(super) own_time: Vec<(String, f64)>,
    pub(super) compared: Option<BriefComparison<'a>>,
    pub(super) missing: Vec<Cow<'a, str>>,
    /// What the words mean for this span.
    pub(super) hints: Vec<&'static str>,
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
        let of_kind = |(_, kind)| {
            let mut list = profile.own_rows(kind);
            let small = list.iter().skip(1).position(|row| row.share < LEAST_ROW);
            list.truncate(small.map_or(list.len(), |at| at + 1));
            BriefRows { kind, list }
        };
        let rows: Vec<_> = kinds.into_iter().map(of_kind).collect();
        let is_of_cpu = rows.iter().any(|rows| rows.kind == SampleKind::OnCpu);
        let weight_ns = profile.sampled_or_more(SampleKind::OnCpu).max(1) as f64;
        let own_time = profile.functions_by(SampleKind::OnCpu).into_iter().filter(|_| is_of_cpu);
        let own_time = own_time.map(|(name, ns)| (own_name(&name), ns as f64 / weight_ns));
        let own_time = own_time.filter(|(_, share)| *share >= NOTABLE).take(3).collect();
        let headline = match profile.headline.as_str() {
            "" => Cow::Owned(
                profile.hotspots().iter().map(ToString::to_string).collect::<Vec<_>>().join("; "),
            ),
            headline => Cow::Borrowed(headline),
        };
        Self {
            id: (profile.id != ProfileId::NONE).then(|| profile.id.to_string().into()),
            headline,
            rows,
            own_time,
            compared: compared(profile, &facts),
            missing: missing(profile, &facts),
            hints: hints(&facts),
            has_span: !profile.spans.is_empty(),
            facts,
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
            id: Some(kept.id.clone()),
            facts: Cow::Borrowed(kept.facts),
            has_span: true,
            headline: Cow::Borrowed(kept.headline),
            rows: Vec::new(),
            own_time: Vec::new(),
            compared: compared
                .map(|it| BriefComparison { summary: Cow::Borrowed(it), rows: Vec::new() }),
            missing: vec![missing.into()],
            hints: hints(kept.facts),
        }
    }

    /// When it began.
    pub(super) fn time(&self) -> String {
        rfc3339(self.facts.start().unwrap_or(UNIX_EPOCH))
    }
}

fn compared(profile: &Profile, facts: &Facts) -> Option<BriefComparison<'static>> {
    let compared = profile.compared.as_deref()?;
    let summary = compared.summary();
    if !summary.is_of(facts) {
        return None;
    }
    let certain = compared.comparison.rows.iter().filter(|row| row.value.certain_extra().is_some());
    let rows = certain.map(|row| (row.quantity.to_string(), row.value.extra())).collect();
    Some(BriefComparison { summary: Cow::Owned(summary), rows })
}

fn hints(facts: &Facts) -> Vec<&'static str> {
    let times = &facts.times;
    let mut hints = Vec::new();
    if times.delay_ns > times.wall_ns / 4 {
        hints.push(
            "Scheduling delay: it was woken and ready to continue, but the thread of its executor was busy with the span \
             named after \"behind\".",
        );
    }
    let runnable_ns = facts.get(Measure::Runnable).unwrap_or_default();
    if runnable_ns > times.wall_ns / 10 {
        hints.push(match facts.get(Measure::Throttled).is_some_and(|ns| ns > 0) {
            true => "Waiting for a CPU, a part of off-CPU: the quota of its control group was used up, or others had it.",
            false => "Waiting for a CPU, a part of off-CPU: other threads or programs had it.",
        });
    }
    if facts.reasons.contains(Reason::Error) {
        hints.push(match facts.error_at {
            Some(_) => "Error: an ERROR event, whose message is in the log.",
            None => "Error: a panic passed through it, its status was set, its response says so (5xx), or an ERROR event of unknown place.",
        });
    }
    hints
}

fn missing<'a>(profile: &'a Profile, facts: &Facts) -> Vec<Cow<'a, str>> {
    const LITTLE: f64 = 0.9;
    let mut missing: Vec<Cow<'_, str>> =
        profile.losses.iter().map(|loss| loss.as_str().into()).collect();
    let unsampled_ns = facts.get(Measure::Unsampled).unwrap_or_default();
    if let Some(coverage) = profile.coverage().filter(|coverage| *coverage < LITTLE)
        && facts.times.subtree_on_cpu_ns > facts.times.wall_ns / 20
    {
        missing.push(format!("samples cover {:.0} % of on-CPU time", coverage * 100.0).into());
    } else if unsampled_ns > facts.times.wall_ns / 20 {
        let text = format!("{} on-CPU were not sampled", crate::facts::format::Ns(unsampled_ns));
        missing.push(text.into());
    }
    let unexplained_ns = facts.times.idle_ns.saturating_sub(facts.times.explained_idle_ns());
    if unexplained_ns > facts.times.wall_ns / 10 {
        missing.push("where it was idle: only futures wrapped by .profiled() show that".into());
    }
    if profile.id == ProfileId::NONE || profile.point_count() == 0 {
        missing.push("samples: none fell in it".into());
    }
    missing
}
