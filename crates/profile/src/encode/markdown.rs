//! A profile in 2 KiB of Markdown: for agents, chats and terminals.

use std::fmt::Write as _;

use super::brief::Brief;
use crate::facts::ChildTotals;
use crate::facts::format::Ns;
use crate::profile::{OwnRow, Profile, SampleKind};

/// Encodes the most important of a profile as Markdown of at most 2,048 bytes: which request it was, what explains most
/// of its time, the parts of its wall time, the functions with the most of each, how it differs from typical requests, its
/// child spans, and what is missing. Where that is too long, rows and the ends of long texts are left out, first those of
/// the least weight.
///
/// All texts of the program are in code spans, without backticks and control characters.
pub fn markdown(profile: &Profile) -> String {
    shortened(&Brief::of(profile))
}

pub(super) fn shortened(brief: &Brief<'_>) -> String {
    brief.within_limit(write).unwrap_or_default()
}

/// A text of the program as a code span.
fn code(text: &str) -> String {
    if text.trim().is_empty() { "`-`".to_owned() } else { format!("`{}`", text.replace('`', "'")) }
}

fn write(brief: &Brief<'_>) -> String {
    let mut out = String::new();
    let facts = &brief.facts;
    let name = code(&brief.span.name);
    // A profile of the process, or of what is typical, has no span.
    _ = match brief.has_span {
        true => {
            let wall = Ns(facts.times.wall_ns);
            writeln!(out, "# {name}: {wall} wall, kept for {}\n", facts.reasons)
        }
        false => writeln!(out, "# {name}\n"),
    };
    write_identity(brief, &mut out);
    if !brief.headline.is_empty() {
        _ = writeln!(out, "**In short:** {}\n", code(&brief.headline));
    }
    if brief.has_span {
        _ = writeln!(out, "Where it went: {}", facts.split());
        if !brief.beside.is_empty() {
            _ = writeln!(out, "\nBeside that: {}", brief.beside.join("; "));
        }
    }
    let mut before = None;
    for row in &brief.functions {
        if before.replace(row.kind) != Some(row.kind) {
            _ = writeln!(out, "\n## {}\n", title(row.kind));
        }
        _ = writeln!(out, "- {}", own_row(row));
    }
    write_compared(brief, &mut out);
    write_children(brief, &mut out);
    if !brief.missing.is_empty() {
        let missing: Vec<_> = brief.missing.iter().map(|text| code(text)).collect();
        _ = writeln!(out, "\nMissing: {}", missing.join("; "));
    }
    out
}

fn write_identity(brief: &Brief<'_>, out: &mut String) {
    let facts = &brief.facts;
    let mut parts = vec![format!("began {}", brief.span.time)];
    if facts.is_open {
        parts.push("still open".to_owned());
    }
    if let Some(rule) = facts.rule.as_deref().filter(|rule| !rule.is_empty()) {
        parts.push(format!("rule {}", code(rule)));
    }
    if !facts.target.is_empty() {
        parts.push(format!("target {}", code(&facts.target)));
    }
    if let Some((trace, span)) = facts.ids() {
        parts.push(format!("trace {trace} span {span}"));
    }
    parts.extend(brief.id.as_ref().map(|id| format!("id {id}")));
    _ = writeln!(out, "{}\n", parts.join(" · "));
}

const fn title(kind: SampleKind) -> &'static str {
    match kind {
        SampleKind::OnCpu => "On-CPU, by the innermost function of own code or next to it",
        SampleKind::OffCpu => "Blocked in",
        SampleKind::Await => "Awaited in",
        _ => "Allocated in",
    }
}

fn own_row(row: &OwnRow) -> String {
    let mut text = format!("{:.0} % {}", row.share * 100.0, code(&row.function));
    if !row.location.is_empty() {
        _ = write!(text, " at {}", code(&row.location));
    }
    if !row.leaf.is_empty() {
        _ = write!(text, " in {}", code(&row.leaf));
    }
    text
}

fn of_ms(ms: f64) -> Ns {
    Ns((ms * 1e6).round() as u64)
}

fn write_compared(brief: &Brief<'_>, out: &mut String) {
    let Some(compared) = &brief.compared else { return };
    if compared.times.is_none() && compared.rows.is_empty() {
        return;
    }
    _ = write!(out, "\n## Against {} typical ones", compared.references);
    if let Some(ms) = compared.median_ms {
        _ = write!(out, " of {}", of_ms(ms));
    }
    out.push_str("\n\n");
    if let Some(times) = compared.times {
        _ = writeln!(out, "{times} times as long");
    }
    for (what, ms) in &compared.rows {
        let sign = if *ms < 0.0 { "-" } else { "+" };
        _ = writeln!(out, "- {sign}{} {}", of_ms(ms.abs()), code(what));
    }
}

fn write_children(brief: &Brief<'_>, out: &mut String) {
    if brief.children.is_empty() {
        return;
    }
    out.push_str("\n## Child spans");
    let from_ns = brief.facts.children.from_ns;
    if from_ns > 0 {
        _ = write!(out, " created from {} on", Ns(from_ns));
    }
    out.push_str("\n\n");
    for row in &brief.children {
        let ChildTotals { name, count, total_ns, longest_ns, .. } = row;
        let (name, order) =
            (name.as_deref().map_or_else(|| "others".to_owned(), code), row.order());
        let (total, longest) = (Ns(*total_ns), Ns(*longest_ns));
        _ = writeln!(out, "- {count} × {name}: {total} {order}, longest {longest}");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use proptest::prelude::*;

    use super::super::brief::BriefDetail;
    use super::super::json_summary;
    use super::super::tests::{awaiting, waiting, with_idle};
    use super::*;
    use crate::facts::{Children, Facts, Reason, TimeBreakdown};
    use crate::profile::Compared;

    /// A text that tries to be markup, with a letter that no other text has.
    fn hostile() -> impl Strategy<Value = String> {
        let short = "[Ω`|<>\\[\\]()*_#!&~\n\r\t\\\\\"'\u{0}\u{202e}\u{2028}:/ 1.🔥-]{0,80}";
        let attacks = ["`Ω", "\n# Ω", "``Ω``", "\r\n\r\n- Ω", "<img src=Ω>", "[Ω](javascript:Ω)"];
        let attacks = attacks.map(str::to_owned).to_vec();
        prop_oneof![
            4 => short,
            2 => proptest::sample::select(attacks),
            1 => (1..5_000_usize).prop_map(|length| "Ω🔥".repeat(length)),
            1 => (1..5_000_usize).prop_map(|length| "\u{1}<Ω".repeat(length)),
        ]
    }

    fn profile(texts: &[String], numbers: &[u64]) -> Profile {
        let mut texts = texts.iter().cycle();
        let mut numbers = numbers.iter().copied().cycle();
        let mut text = || texts.next().cloned().unwrap_or_default();
        let mut number = || numbers.next().unwrap_or_default();
        let kinds = [SampleKind::OnCpu, SampleKind::OffCpu, SampleKind::Await];
        let mut profile = Profile::builder(text());
        for kind in kinds.iter().cycle().take(12) {
            let (outer, inner) = (text(), text());
            let weight = Duration::from_nanos(number() / 16);
            profile = profile.sample(*kind, &[&text()], &[&inner, &outer], Duration::ZERO, weight);
        }
        let mut profile = profile.build();
        let totals = (0..17).map(|_| ChildTotals {
            name: Some(text()),
            count: number(),
            total_ns: number(),
            longest_ns: number(),
            open_ns: number(),
        });
        let children =
            Children { totals: totals.collect(), from_ns: number(), ..Children::default() };
        let (idle_ns, half_ns) = (number(), number() / 4);
        let times = TimeBreakdown {
            wall_ns: number(),
            on_cpu_ns: half_ns,
            subtree_on_cpu_ns: half_ns,
            off_cpu_ns: half_ns,
            idle_ns,
            await_ns: idle_ns / 3,
            delay_ns: idle_ns / 3,
            ..TimeBreakdown::default()
        };
        let span = text();
        let mut compared = Compared::for_test(200);
        compared.rename_for_test(&span, &text());
        profile.compared = Some(Arc::new(compared));
        profile.spans = vec![Facts {
            span: span.into(),
            target: text().into(),
            rule: Some(text().into()),
            start_unix_ns: number(),
            times,
            children,
            is_topmost: true,
            ..Facts::default()
        }];
        profile.headline = text();
        profile.losses = (0..9).map(|_| text()).collect();
        profile
    }

    /// What is in no code span.
    fn outside(markdown: &str) -> String {
        let mut outside = String::new();
        for line in markdown.lines() {
            assert!(line.matches('`').count().is_multiple_of(2), "{line}");
            outside.extend(line.split('`').step_by(2));
            outside.push('\n');
        }
        outside
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(300) })]
        #[test]
        fn short_forms_are_short_whatever_the_profile_and_no_text_is_markup(
            texts in prop::collection::vec(hostile(), 1..40),
            numbers in prop::collection::vec(any::<u64>(), 1..40),
        ) {
            let profile = profile(&texts, &numbers);
            let markdown = markdown(&profile);
            prop_assert!((100..=2_048).contains(&markdown.len()), "{} bytes", markdown.len());
            let outside = outside(&markdown);
            prop_assert!(!outside.contains(['Ω', '<', '[', '🔥']), "{}", outside);
            let json = json_summary(&profile);
            prop_assert!(json.len() <= 2_048, "{} bytes", json.len());
            let json: serde_json::Value = serde_json::from_str(&json).unwrap();
            prop_assert!(json["headline"].is_string() && json["wall_ms"].is_number(), "{}", json);
        }
    }

    #[test]
    fn an_ordinary_profile_is_said_in_full() {
        let mut profile = with_idle(awaiting(), 1_300);
        profile.spans[0].reasons = [Reason::Error].into_iter().collect();
        profile.spans[0].error_at = Some("src/shop.rs:7".to_owned());
        profile.headline = "idle 1.28 s: 1.18 s awaiting, 100 % in shop::fetch".to_owned();
        profile.losses = vec!["3 stacks cut short".to_owned()];
        profile.spans[0].children = Children {
            totals: vec![ChildTotals {
                name: Some("query".to_owned()),
                count: 214,
                total_ns: 1_000_000_000,
                longest_ns: 9_000_000,
                open_ns: 1_000_000_000,
            }],
            from_ns: 5_000_000,
            ..Children::default()
        };
        let mut compared = Compared::for_test(200);
        compared.rename_for_test("GET /checkout", "GET /checkout");
        profile.compared = Some(Arc::new(compared));
        let text = markdown(&profile);
        for expected in [
            "# `GET /checkout`: 1.30 s wall, kept for ",
            "**In short:** `idle 1.28 s: 1.18 s awaiting, 100 % in shop::fetch`\n",
            "wall 1.30 s = 20.0 ms on-CPU (2 %) + 1.18 s await (91 %) + 20.0 ms scheduling delay (2 %) + 80.0 ms \
             unexplained idle (6 %)\n",
            "## Awaited in\n\n- 100 % `shop::fetch` at `src/upstream.rs:41` in `tokio::time::sleep::Sleep`\n",
            "## Against 200 typical ones of 98.0 ms\n\n12 times as long\n- +1.06 s `on-CPU in shop::count_cheap_bundles`",
            "## Child spans created from 5.00 ms on\n\n- 214 × `query`: 1.00 s in turn, longest 9.00 ms\n",
            "Missing: `3 stacks cut short`",
        ] {
            assert!(text.contains(expected), "{expected} in {text}");
        }
        let mut few = profile.clone();
        let mut compared = Compared::for_test(9);
        compared.rename_for_test("GET /checkout", "GET /checkout");
        few.compared = Some(Arc::new(compared));
        assert!(!markdown(&few).contains("## Against"), "nothing certain");
        let json: serde_json::Value = serde_json::from_str(&json_summary(&profile)).unwrap();
        assert_eq!(json["functions"][0]["name"], "shop::fetch");
        assert_eq!(json["functions"][0]["in"], "tokio::time::sleep::Sleep");
        assert_eq!(
            (&json["split_ms"]["await"], &json["compared"]["times"]),
            (&1180.0.into(), &12.0.into())
        );
        assert_eq!(json["children"][0]["count"], 214);
        assert_eq!(json["missing"][0], "3 stacks cut short");
    }

    #[test]
    fn without_a_headline_the_hotspots_are_said() {
        let text = markdown(&waiting());
        assert!(text.contains("**In short:** `") && text.contains("shop::reserve"), "{text}");
        assert!(
            text.contains("- 100 % `shop::reserve` at `src/stock.rs:9` in `[futex 0x7f01]`"),
            "{text}"
        );
    }

    #[test]
    fn long_texts_keep_their_beginning_and_end() {
        let detail = BriefDetail::LEVELS[6];
        assert_eq!(detail.shortened("shop::cart::price_of"), "shop…rice_of");
        assert_eq!(detail.shortened("twelve chars"), "twelve chars");
    }
}
