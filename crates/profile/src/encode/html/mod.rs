//! A report of one profile: a self-contained page for browsers.

mod data;
#[doc(hidden)]
mod summary;

use std::fmt::Write as _;

use super::brief::Brief;
use super::markdown;
use crate::profile::{Profile, Resource};
use crate::text::{disturbs, gzip_json};

pub use summary::KeptSummary;
pub(super) use summary::{child, split_ms};

/// The part of the scripts that writes numbers and times, for other pages.
pub const TEXTS_SCRIPT: &str = include_str!("texts.js");
const STYLE: &str = include_str!("report.css");
const BODY: &str = include_str!("report.body.html");
const SCRIPT: &str = concat!(include_str!("texts.js"), include_str!("report.js"));
/// The SHA-256 of [`STYLE`] and [`SCRIPT`], in Base64. A test compares them.
const STYLE_HASH: &str = "FqerwruuMyl2l3IupOfV3PwDu3NV4w5WZoyIA41ETZk=";
const SCRIPT_HASH: &str = "mKoKbtaV9GdBphERPE92joczBNL9IyG50+N20xJ+69E=";

/// What a report shows besides the profile.
#[derive(Clone, Debug, Default)]
pub struct HtmlContext {
    resource: Resource,
    trace_url: String,
    source_url: String,
}

impl HtmlContext {
    /// The report names the service and host of this resource.
    pub fn new(resource: impl Into<Resource>) -> Self {
        Self { resource: resource.into(), ..Self::default() }
    }

    /// The resource.
    pub fn resource(&self) -> &Resource {
        &self.resource
    }

    /// Makes each trace id a link, with `{trace_id}` and `{span_id}` in the URL replaced:
    /// `https://tempo.internal/trace/{trace_id}`. URLs that are neither `https` nor `http` are ignored.
    #[must_use]
    pub fn trace_url(self, template: impl Into<String>) -> Self {
        Self { trace_url: template.into(), ..self }
    }

    /// The template of links to traces; empty if there is none.
    pub fn trace_template(&self) -> &str {
        &self.trace_url
    }

    /// Makes each source location a link, with `{file}` and `{line}` in the URL replaced: `vscode://file//home/me/{file}:{line}`.
    /// URLs that would run a script are ignored.
    #[must_use]
    pub fn source_url(self, template: impl Into<String>) -> Self {
        Self { source_url: template.into(), ..self }
    }
}

/// Encodes a report: one HTML file that needs no network and no other file, and whose content security policy forbids
/// both. It shows which request it was, where its time went, a timeline of threads and spans, flame graphs of CPU time
/// and waits, the functions and waits with the most time, and what is missing.
///
/// The data is compressed JSON in the page.
pub fn html(profile: &Profile, context: &HtmlContext) -> String {
    let data = base64(&gzip_json(&data::ReportTables::of(profile, context)));
    let brief = Brief::of(profile);
    let mut page = String::with_capacity(data.len() + 128 * 1024);
    _ = write!(
        page,
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; script-src 'sha256-{SCRIPT_HASH}'; \
         style-src 'sha256-{STYLE_HASH}'; base-uri 'none'; form-action 'none'\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<title>{}</title>\n\
         <script type=\"application/json\" id=\"summary\">{}</script>\n\
         <script type=\"application/json\" id=\"brief\">{}</script>\n\
         <style>{STYLE}</style>\n</head>\n<body>\n\
         <noscript><p>Without JavaScript, this report is a summary.</p><pre>{}</pre></noscript>\n{BODY}\n\
         <script type=\"text/plain\" id=\"data\">{data}</script>\n\
         <script>{SCRIPT}</script>\n</body>\n</html>\n",
        html_text(&profile.title),
        summary::of(profile),
        summary::brief(&brief),
        html_text(&markdown::shortened(&brief)),
    );
    page
}

/// Text of an element.
fn html_text(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '\n' => escaped.push('\n'),
            _ if disturbs(character) => escaped.push('\u{fffd}'),
            _ => escaped.push(character),
        }
    }
    escaped
}

/// Base64 as in RFC 4648, section 4.
fn base64(bytes: &[u8]) -> String {
    const DIGITS: [u8; 64] = *b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let byte = |n: usize| u32::from(chunk.get(n).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for n in 0..4 {
            let digit = DIGITS.get((bits >> (18 - 6 * n) & 63) as usize);
            text.push(digit.filter(|_| n <= chunk.len()).map_or('=', |digit| char::from(*digit)));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::sync::Arc;
    use std::time::Duration;

    use ::base64::Engine as _;
    use ::base64::prelude::BASE64_STANDARD;
    use serde_json::{Value, json};

    use super::super::tests::{checkout, deep, waiting};
    use super::super::{json_summary, markdown};
    use super::*;
    use crate::facts::{ChildTotals, Children, Facts, Measure, TimeBreakdown, Unit};
    use crate::profile::{Compared, Placed, ProfiledThread, SampleKind, add_stacks};

    fn context() -> HtmlContext {
        HtmlContext::new(Resource::new().with("service.name", "<shop>"))
            .trace_url("https://tempo.internal/{trace_id}")
    }

    /// The contents of the element with that id.
    fn element<'a>(page: &'a str, id: &str) -> &'a str {
        let (_, rest) = page.split_once(&format!("id=\"{id}\">")).unwrap();
        rest.split_once("</script>").unwrap().0
    }

    fn unpacked(profile: &Profile) -> Value {
        let page = html(profile, &context());
        let data = element(&page, "data");
        let bytes = BASE64_STANDARD.decode(data).unwrap();
        let mut json = String::new();
        flate2::read::GzDecoder::new(bytes.as_slice()).read_to_string(&mut json).unwrap();
        serde_json::from_str(&json).unwrap()
    }

    #[test]
    fn base64_is_as_a_library_decodes_it() {
        for length in 0..9 {
            let bytes: Vec<_> =
                [0xff, 0xef, 0xbe, 0, 1, 2, 250, 9].into_iter().take(length).collect();
            assert_eq!(BASE64_STANDARD.decode(base64(&bytes)).unwrap(), bytes);
        }
    }

    /// Fails after a change of the script or the style, and states the new hash.
    #[cfg(feature = "otlp")]
    #[test]
    fn the_policy_allows_exactly_this_script_and_style() {
        use sha2::{Digest, Sha256};
        for (text, hash) in [(STYLE, STYLE_HASH), (SCRIPT, SCRIPT_HASH)] {
            assert_eq!(hash, base64(&Sha256::digest(text)));
        }
    }

    #[test]
    fn markup_in_names_is_text() {
        let mut profile = checkout();
        let hostile = "</script><script>alert(1)</script><!--\u{202e}\"'&";
        profile.title = hostile.to_owned();
        profile.name = hostile.to_owned();
        profile.notes = vec![hostile.to_owned()];
        let page = html(&profile, &context());
        assert!(!page.contains("alert(1)</script>") && !page.contains("<!--"));
        assert!(page.contains("<title>&lt;/script&gt;"));
        assert_eq!(page.matches("</script>").count(), 4, "summary, brief, data and script");
        let summary: Value = serde_json::from_str(element(&page, "summary")).unwrap();
        assert_eq!(summary["name"], hostile);
        assert_eq!(unpacked(&profile)["notes"], json!([hostile]));
    }

    /// The functions of a sample, the outermost first.
    fn functions(data: &Value, sample: usize) -> Vec<String> {
        let number = |table: &str, column: &str, row: i64| {
            data[table][column][row as usize].as_i64().unwrap()
        };
        let mut stack = number("samples", "stack", sample as i64);
        let mut names = Vec::new();
        while stack >= 0 {
            let function = number("frames", "function", number("stacks", "frame", stack));
            let name = number("functions", "name", function);
            names.push(data["strings"][name as usize].as_str().unwrap().to_owned());
            stack = number("stacks", "parent", stack);
        }
        names.reverse();
        names
    }

    #[test]
    fn the_data_has_every_sample_with_its_stack_span_and_thread() {
        let mut profile = waiting();
        let thread = profile.add_thread(ProfiledThread { name: "worker".to_owned(), tid: 42 });
        profile.set_thread_of_all(thread);
        let data = unpacked(&profile);
        let samples = &data["samples"];
        assert_eq!(samples["kind"], json!([1, 0, 0, 0, 1, 0]));
        assert_eq!(samples["time"], json!([5, 5, 10, 10, 20, 49]), "differences");
        let on_cpu = 5_000_000;
        assert_eq!(
            samples["weight"],
            json!([300_000_000, on_cpu, on_cpu, on_cpu, 20_000_000, on_cpu])
        );
        assert_eq!(samples["thread"], json!([0, 0, 0, 0, 0, 0]));
        assert_eq!(samples["span"], json!([0, 1, 1, 0, 0, 0]));
        assert_eq!(data["threads"]["tid"], json!([42]));
        assert_eq!(data["spans"]["parent"], json!([-1, 0]));
        assert_eq!(functions(&data, 0), ["shop::reserve"]);
        assert_eq!(samples["leaf"], json!([1, 0, 0, 0, 1, 0]));
        let texts = [&data["leaves"]["text"][0], &data["leaves"]["text"][1]];
        let text = |number: &Value| data["strings"][number.as_u64().unwrap() as usize].clone();
        assert_eq!(texts.map(text), ["", "futex 0x7f01"]);
        assert_eq!(data["leaves"]["kind"], json!([0, 1]));
        assert_eq!(functions(&data, 1), ["shop::main", "shop::price"]);
        assert_eq!(data["frames"]["kind"], json!([0, 0, 0, 0]));
        assert_eq!(data["frames"]["inferred"], json!([0, 0, 0, 1]));
        assert_eq!(data["functions"]["origin"], json!([0, 0, 0]), "all own");
        assert_eq!(data["resource"], json!([["service.name", "<shop>"]]));
        assert_eq!(data["trace_url"], "https://tempo.internal/{trace_id}");
    }

    #[test]
    fn the_data_has_awaits_and_scheduling_delays() {
        let ms = Duration::from_millis;
        let (spans, stack) = (["GET /cart"], ["tokio::Sleep::poll", "shop::fetch"]);
        let mut profile = Profile::builder("GET /cart")
            .sample(SampleKind::Await, &spans, &stack, ms(10), ms(180))
            .sample(SampleKind::Delay, &spans, &stack, ms(190), ms(20))
            .build();
        let times = TimeBreakdown {
            idle_ns: 210_000_000,
            await_ns: 180_000_000,
            delay_ns: 20_000_000,
            other_spans_ns: 3_000_000,
            ..TimeBreakdown::default()
        };
        profile.spans = vec![Facts { times, ..Facts::default() }];
        let data = unpacked(&profile);
        assert_eq!(data["samples"]["kind"], json!([2, 3]));
        assert_eq!(data["samples"]["weight"], json!([180_000_000, 20_000_000]));
        assert_eq!(data["samples"]["thread"], json!([-1, -1]));
        assert_eq!(data["leaves"]["kind"], json!([2, 3]));
        let kept = &data["kept"][0];
        assert_eq!(
            (&kept["await"], &kept["scheduling_delay"]),
            (&json!(180_000_000), &json!(20_000_000))
        );
        let page = html(&profile, &context());
        let summary: Value = serde_json::from_str(element(&page, "summary")).unwrap();
        assert_eq!([&summary["await_ms"], &summary["scheduling_delay_ms"]], [180.0, 20.0]);
        assert_eq!(
            (&kept["other_spans"], &summary["other_spans_ms"]),
            (&json!(3_000_000), &json!(3.0))
        );
    }

    #[test]
    fn the_report_and_its_summary_have_the_child_spans() {
        let totals = |name: Option<&str>, count, total_ns, open_ns| {
            let name = name.map(str::to_owned);
            ChildTotals { name, count, total_ns, longest_ns: 9_000_000, open_ns }
        };
        let query = totals(Some("query"), 214, 1_926_000_000, 1_926_000_000);
        let children = Children {
            totals: vec![query, totals(None, 3, 20_000_000, 10_000_000)],
            from_ns: 5_000_000,
            ..Children::default()
        };
        let mut profile = checkout();
        profile.spans = vec![Facts { children, ..Facts::default() }, Facts::default()];
        let data = unpacked(&profile);
        let expected = json!({ "from": 5_000_000, "incomplete": false, "totals": [
            { "name": "query", "count": 214, "total": 1_926_000_000, "longest": 9_000_000, "open": 1_926_000_000,
                "order": "in turn" },
            { "name": "", "count": 3, "total": 20_000_000, "longest": 9_000_000, "open": 10_000_000,
                "order": "at the same time" },
        ] });
        assert_eq!(data["kept"][0]["children"], expected);
        assert_eq!(data["kept"][1]["children"]["totals"], json!([]));
        let page = html(&profile, &context());
        let summary: Value = serde_json::from_str(element(&page, "summary")).unwrap();
        let expected = json!([
            { "name": "query", "count": 214, "total_ms": 1926.0, "longest_ms": 9.0, "open_ms": 1926.0, "order": "in turn" },
            { "count": 3, "total_ms": 20.0, "longest_ms": 9.0, "open_ms": 10.0, "order": "at the same time" },
        ]);
        assert_eq!((&summary["children"], &summary["children_from_ms"]), (&expected, &json!(5.0)));
    }

    #[test]
    fn without_scripts_the_page_is_a_summary() {
        let mut profile = waiting();
        profile.headline = "waits for <stock>".to_owned();
        let page = html(&profile, &context());
        let (_, text) = page.split_once("<noscript>").unwrap();
        let (text, _) = text.split_once("</noscript>").unwrap();
        assert!(text.contains("\n**In short:** `waits for &lt;stock&gt;`\n"), "{text}");
        assert!(text.contains("## Blocked in\n"), "{text}");
    }

    #[test]
    fn each_form_says_what_stands_beside_the_split() {
        let mut profile = waiting();
        let mut times = TimeBreakdown::default();
        times.usage.major_faults = 2_000;
        profile.spans = vec![Facts { times, ..Facts::default() }];
        let summary = element(&html(&profile, &context()), "summary").to_owned();
        let data = unpacked(&profile).to_string();
        for text in [markdown(&profile), json_summary(&profile), summary, data] {
            assert!(text.contains("2,000 major page faults"), "{text}");
        }
    }

    #[test]
    fn each_known_measure_is_in_the_report_and_its_summary() {
        let times = TimeBreakdown {
            wall_ns: 5_000_000,
            allocations: Some(Default::default()),
            own_allocations: Some(Default::default()),
            ..TimeBreakdown::default()
        };
        let facts = Facts { times, ..Facts::default() };
        let mut profile = checkout();
        profile.spans = vec![facts.clone()];
        let data = unpacked(&profile);
        let summary: Value =
            serde_json::from_str(element(&html(&profile, &context()), "summary")).unwrap();
        let known = Measure::ALL.iter().filter_map(|one| Some((one, facts.get(*one)?)));
        for (measure, value) in known {
            assert_eq!(data["kept"][0][measure.name()], value, "{measure:?}");
            let expected = match measure.unit() {
                Unit::Nanoseconds => json!(value as f64 / 1e6),
                _ => json!(value),
            };
            assert_eq!(summary[measure.row().field], expected, "{measure:?}");
        }
        profile.spans[0].times = times.without_cpu_time();
        assert_eq!(unpacked(&profile)["kept"][0].get("on_cpu"), None);
    }

    /// `waiting`, as the span of [`Compared::for_test`].
    fn compared(references: u64) -> Profile {
        let mut profile = waiting();
        let facts = Facts { span: "GET /checkout".into(), ..Facts::default() };
        profile.spans = vec![Facts::default(), facts];
        profile.compared = Some(Arc::new(Compared::for_test(references)));
        profile
    }

    #[test]
    fn the_data_has_the_comparison_with_typical_spans() {
        let data = unpacked(&compared(200));
        let compared_with = &data["compared"];
        assert_eq!(compared_with["kept"], 1, "the span is found by its name");
        assert_eq!(compared_with["cohort"], "GET /checkout");
        assert_eq!(
            (&compared_with["references"], &compared_with["median"]),
            (&json!(200), &json!(98_000_000))
        );
        assert_eq!(compared_with["times"], 12.0);
        let first = json!({
            "what": "on_cpu", "words": "on-CPU", "function": "shop::count_cheap_bundles",
            "file": "shop/src/similar.rs", "others": false, "unit": "ns", "after": 1_070_000_000,
            "before": 10_000_000, "extra": 1_060_000_000, "interval": [1_020_000_000, 1_100_000_000],
            "present_in": 12, "as_extreme_in": 0
        });
        assert_eq!(compared_with["rows"][0], first);
        let extra = |row: &Value| row["extra"].as_i64().unwrap();
        let sum: i64 = compared_with["rows"].as_array().unwrap().iter().map(extra).sum();
        assert_eq!(sum, extra(&compared_with["wall"]));
        let beside = compared_with["beside"].as_array().unwrap();
        let units: Vec<_> = beside.iter().map(|row| row["unit"].as_str().unwrap()).collect();
        assert_eq!(units, ["ns", "bytes", "count", "ns"]);
        assert_eq!(beside[2]["child"], "query");

        let few = &unpacked(&compared(9))["compared"];
        assert_eq!(
            (few.get("times"), &few["wall"]["interval"], &few["rows"][0]["interval"]),
            (None, &Value::Null, &Value::Null)
        );
        assert_eq!(
            (unpacked(&waiting()).get("compared"), unpacked(&waiting()).get("typical")),
            (None, None)
        );
    }

    #[test]
    fn the_stacks_of_typical_spans_are_those_of_the_profile() {
        let mut profile = compared(200);
        let mut typical = Profile::new(crate::profile::ProfileId::NONE, 0);
        add_stacks(&mut typical, &profile, |weight| Placed::AtItsStack(weight / 2));
        let millisecond = Duration::from_millis(1);
        let stack = ["shop::usual", "shop::main"];
        let usual = Profile::builder("x")
            .sample(SampleKind::OffCpu, &[], &stack, millisecond, 3 * millisecond)
            .build();
        add_stacks(&mut typical, &usual, Placed::AtItsStack);
        profile.compared =
            Some(Arc::new(Compared { typical: Arc::new(typical), ..Compared::for_test(200) }));
        let data = unpacked(&profile);
        let list = |table: &str, column: &str| data[table][column].as_array().unwrap().clone();
        let without = unpacked(&waiting());
        let of_profile: Vec<_> = list("samples", "stack");
        assert_eq!(of_profile, *without["samples"]["stack"].as_array().unwrap());
        // Each is one of the profile but the last, which has frames of its own: its functions have no file.
        let (last, shared) =
            list("typical", "stack").split_last().map(|(a, b)| (a.clone(), b.to_vec())).unwrap();
        assert!(shared.iter().all(|stack| of_profile.contains(stack)), "{shared:?}");
        assert!(!of_profile.contains(&last));
        assert_eq!(
            list("stacks", "parent").len(),
            without["stacks"]["parent"].as_array().unwrap().len() + 2
        );
        // 15 ms on-CPU in one stack and 5 ms in another, 320 ms off-CPU: half of it.
        let rows = list("typical", "kind").into_iter().zip(list("typical", "weight"));
        let mut rows: Vec<_> =
            rows.map(|(kind, weight)| (kind.as_u64().unwrap(), weight.as_u64().unwrap())).collect();
        rows.sort_unstable();
        assert_eq!(rows, [(0, 2_500_000), (0, 7_500_000), (1, 3_000_000), (1, 160_000_000)]);
        // The leaf is without the lock's address.
        let text = |leaf: &Value| {
            data["strings"]
                [data["leaves"]["text"][leaf.as_u64().unwrap() as usize].as_u64().unwrap() as usize]
                .clone()
        };
        let texts: Vec<_> = list("typical", "leaf").iter().map(text).collect();
        assert!(texts.contains(&json!("futex")), "{texts:?}");
    }

    #[test]
    fn the_summary_says_how_a_span_differs_from_typical_ones() {
        let summary = |profile: &Profile| -> Value {
            serde_json::from_str(element(&html(profile, &context()), "summary")).unwrap()
        };
        let mut profile = compared(200);
        profile.spans.remove(0);
        let of_span = summary(&profile);
        assert_eq!(
            [&of_span["references"], &of_span["typical_median_ms"]],
            [&json!(200), &json!(98.0)]
        );
        assert_eq!([&of_span["times_typical"], &of_span["slower_in_ms"]], [12.0, 1060.0]);
        assert_eq!(of_span["slower_in"], "on-CPU in shop::count_cheap_bundles");
        let other = summary(&compared(200));
        assert_eq!(other.get("references"), None, "the comparison is of another span");
    }

    #[test]
    fn markup_in_a_comparison_is_text() {
        let hostile = "</script><script>alert(1)</script>";
        let mut profile = compared(200);
        let typical = Profile::builder(hostile)
            .sample(SampleKind::OnCpu, &[], &[hostile], Duration::ZERO, Duration::from_millis(3))
            .build();
        let with_names = Compared {
            cohort: hostile.to_owned(),
            span: hostile.to_owned(),
            typical: Arc::new(typical),
            ..Compared::for_test(200)
        };
        profile.compared = Some(Arc::new(with_names));
        profile.spans = vec![Facts { span: hostile.into(), ..Facts::default() }];
        let page = html(&profile, &context());
        assert_eq!(page.matches("</script>").count(), 4, "summary, brief, data and script");
        assert_eq!(unpacked(&profile)["compared"]["cohort"], hostile);
    }

    #[test]
    fn a_profile_without_samples_or_spans_is_a_report() {
        let mut profile = checkout();
        profile.keep_only(SampleKind::OffCpu);
        assert_eq!(unpacked(&profile)["samples"]["stack"], json!([]));
        let profile = Profile::new(crate::profile::ProfileId::for_test(1), 5);
        assert_eq!(unpacked(&profile)["kept"], json!([]));
    }

    #[test]
    fn deep_stacks_are_written_without_recursion() {
        let data = unpacked(&deep(100_000));
        assert_eq!(data["stacks"]["parent"].as_array().unwrap().len(), 100_000);
    }
}
