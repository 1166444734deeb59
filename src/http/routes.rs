//! What is typical of each route, for programs and as pages.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::time::{SystemTime, UNIX_EPOCH};

use percent_encoding::{NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use serde_json::Value;

use super::answer::{Failure, not_found, object, time};
use crate::compare::{Baseline, CohortHour, Drift, Quantity, TimeKind};
use crate::encode::HtmlText;
use crate::handle::Handle;
use crate::history::{hour_begins, kind_name};
use crate::profile::Profile;
use crate::publish::RecentlyKept;
use crate::references::CohortKey;

/// How many kept spans of a route are listed.
const MOST_KEPT: usize = 10;
/// The percentiles, each with how many reference spans are needed, so that some are above it.
const PERCENTILES: [(&str, f64, u64); 3] =
    [("p50_ms", 50.0, 10), ("p95_ms", 95.0, 100), ("p99_ms", 99.0, 500)];

/// What is known of a route in this hour and the one before.
pub(super) struct RouteSummary {
    name: String,
    recent: CohortHour,
    drift: Option<Drift>,
    kept: Vec<RecentlyKept>,
}

/// All routes, those with the most time first, or the one of that name.
pub(super) fn summaries(handle: &Handle, route: Option<&str>) -> Vec<RouteSummary> {
    let Some(published) = handle.published() else { return Vec::new() };
    let read = |key: &CohortKey, known: &crate::references::TypicalSpans| {
        let name = key.name();
        let is_wanted = route.is_none_or(|route| route == name);
        is_wanted.then(|| {
            let mut recent = known.last_hour.clone();
            recent.merge(known.history.hour());
            RouteSummary { name, recent, drift: known.drift.clone(), kept: Vec::new() }
        })
    };
    let routes = published.references.read_cohorts(read);
    let mut routes: Vec<_> = routes.into_iter().flatten().collect();
    routes.sort_by_cached_key(|route| (Reverse(route.all_wall_ns() as u64), route.name.clone()));
    for kept in handle.recently_kept() {
        let name = kept.kept.spans.first().map(|span| CohortKey::of(span.facts()).name());
        let route = routes.iter_mut().find(|route| Some(&route.name) == name.as_ref());
        _ = route.map(|route| route.kept.push(kept));
    }
    for route in &mut routes {
        let wall_ns = |kept: &RecentlyKept| {
            kept.kept.spans.first().map_or(0, |span| span.facts().times.wall_ns)
        };
        route.kept.sort_by_key(|kept| Reverse(wall_ns(kept)));
        route.kept.truncate(MOST_KEPT);
    }
    routes
}

/// What is known of all routes in this hour and the one before.
pub(super) fn recent_hours(handle: &Handle) -> BTreeMap<String, CohortHour> {
    let routes = summaries(handle, None).into_iter();
    routes.map(|RouteSummary { name, recent, .. }| (name, recent)).collect()
}

/// The version of the service that runs, if it is known.
pub(super) fn own_version(handle: &Handle) -> Option<String> {
    let published = handle.published()?;
    published.references.context().resource().get("service.version").map(ToString::to_string)
}

fn ms(ns: f64) -> f64 {
    (ns / 1e3).round() / 1e3
}

impl RouteSummary {
    /// Of all requests, estimated.
    fn all_wall_ns(&self) -> f64 {
        self.mean_wall_ns() * self.recent.walls.spans() as f64
    }

    fn references(&self) -> u64 {
        self.recent.references.spans()
    }

    fn mean_wall_ns(&self) -> f64 {
        self.recent.references.wall().mean(self.references())
    }

    /// The mean of each kind of time that there is, the largest first.
    fn split(&self) -> Vec<(TimeKind, f64)> {
        let mut kinds: Vec<(TimeKind, f64)> = Vec::new();
        for (quantity, of) in self.recent.references.quantities() {
            let Quantity::Wall(kind, _) = quantity else { continue };
            let mean_ns = of.mean(self.references());
            match kinds.iter_mut().find(|(known, _)| known == kind) {
                Some((_, sum)) => *sum += mean_ns,
                None => kinds.push((*kind, mean_ns)),
            }
        }
        kinds.sort_by(|a, b| b.1.total_cmp(&a.1));
        kinds
    }

    fn percentiles(&self) -> impl Iterator<Item = (&'static str, Option<f64>)> + '_ {
        PERCENTILES.into_iter().map(|(name, percent, least)| {
            let known = (self.references() >= least).then_some(percent);
            let ns = known.and_then(|percent| self.recent.walls.percentile_ns(percent));
            (name, ns.map(|ns| ms(ns as f64)))
        })
    }

    pub(super) fn to_json(&self) -> Value {
        let split = self.split().into_iter();
        let split = split.map(|(kind, ns)| (kind_name(kind), Value::from(ms(ns))));
        let mut members = vec![
            ("name", Value::from(self.name.as_str())),
            ("references", self.references().into()),
            ("requests_estimated", self.recent.walls.spans().into()),
            ("mean_wall_ms", ms(self.mean_wall_ns()).into()),
            ("mean_wall_split_ms", object(split)),
            ("drift", self.drift.as_ref().map_or(Value::Null, drift_to_json)),
            ("kept", self.kept.iter().map(kept_to_json).collect()),
        ];
        members.extend(self.percentiles().map(|(name, ms)| (name, ms.into())));
        object(members)
    }
}

fn drift_to_json(drift: &Drift) -> Value {
    let since = match &drift.since {
        Baseline::DayBefore => "the day before".to_owned(),
        Baseline::Version(version) => format!("version {version}"),
    };
    object([
        ("hour", Value::from(time(hour_begins(drift.hour)))),
        ("since", since.into()),
        ("was_ms", ms(drift.was_ns as f64).into()),
        ("is_ms", ms(drift.is_ns as f64).into()),
    ])
}

/// The name of the report of a kept span, if there is one.
fn report_of(kept: &RecentlyKept) -> Option<&str> {
    let names = kept.kept.files.iter().filter_map(|file| file.file_name()?.to_str());
    names.into_iter().find(|name| name.ends_with(".html"))
}

fn kept_to_json(kept: &RecentlyKept) -> Value {
    let Some(span) = kept.kept.spans.first() else { return Value::Null };
    object([
        ("time", Value::from(time(span.opened()))),
        ("wall_ms", ms(span.facts().times.wall_ns as f64).into()),
        ("id", kept.kept.profile.map(|id| id.to_string()).into()),
        ("file", report_of(kept).into()),
    ])
}

/// The profile of the mean request of a route.
pub(super) fn typical(handle: &Handle, route: &str) -> Result<Profile, Failure> {
    let found = handle.published().and_then(|published| {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now_unix_ns = u64::try_from(now.as_nanos()).unwrap_or(u64::MAX);
        let profiles = published.references.read_cohorts(|key, known| {
            (key.name() == route).then(|| {
                let lately = known.history.lately();
                let wall_ns = lately.wall().mean(lately.spans()) as u64;
                known.profile.requested(route, wall_ns, now_unix_ns)
            })
        });
        profiles.into_iter().flatten().next()
    });
    found.ok_or_else(not_found)
}

/// The value of a name in a query, decoded.
pub(super) fn value_in(query: &str, wanted: &str) -> Option<String> {
    let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    let (_, value) = pairs.find(|(name, _)| *name == wanted)?;
    let value = value.replace('+', " ");
    Some(percent_decode_str(&value).decode_utf8_lossy().into_owned())
}

/// As a value in a query.
pub(super) struct QueryValue<'a>(pub(super) &'a str);

impl fmt::Display for QueryValue<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        utf8_percent_encode(self.0, NON_ALPHANUMERIC).fmt(f)
    }
}

/// A duration with three digits: `1.20 s`, `350 ms`.
pub(super) struct Shown(pub(super) f64);

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ns = self.0.abs();
        let sign = if self.0 < 0.0 { "\u{2212}" } else { "" };
        if ns < 0.5 {
            return f.write_str("0");
        }
        let (size, unit) = match ns {
            ns if ns < 999.5e3 => (1e3, "\u{b5}s"),
            ns if ns < 999.5e6 => (1e6, "ms"),
            _ => (1e9, "s"),
        };
        let value = ns / size;
        let digits = if value >= 99.95 {
            0
        } else if value >= 9.995 {
            1
        } else {
            2
        };
        write!(f, "{sign}{value:.digits$} {unit}")
    }
}

/// What a kind of time is called in a page, and the look of its part of a bar.
pub(super) const fn kind_in_words(kind: TimeKind) -> (&'static str, &'static str) {
    match kind {
        TimeKind::OnCpu => ("on-CPU", "on"),
        TimeKind::OffCpu => ("off-CPU", "off"),
        TimeKind::Runnable => ("waiting for a CPU", "off"),
        TimeKind::Await => ("await", "await"),
        TimeKind::SchedulingDelay => ("scheduling delay", "delay"),
        TimeKind::UnexplainedIdle => ("unexplained idle", "rest"),
        TimeKind::OtherSpans => ("other spans on its stack", "rest"),
        TimeKind::Unmeasured => ("unmeasured", "rest"),
    }
}

/// A page around some content. Links begin at the path at which the routes are nested.
pub(super) fn page(base: &str, title: &str, content: &str) -> String {
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<title>{title}</title>\n\
         <link rel=\"icon\" href=\"data:,\">\n<link rel=\"stylesheet\" href=\"{base}/index.css\">\n</head>\n\
         <body class=\"typical\">\n<header><h1>{title}</h1><nav><a href=\"{base}\">Kept spans</a> \
         <a href=\"{base}/routes\">Routes</a></nav></header>\n<main>\n{content}</main>\n</body>\n</html>\n",
        title = HtmlText(title)
    )
}

/// A number of milliseconds in a cell.
fn number(text: &mut String, ms: Option<f64>) {
    _ = match ms {
        Some(ms) => write!(text, "<td class=\"number\">{}</td>", Shown(ms * 1e6)),
        None => write!(text, "<td class=\"number\">\u{2013}</td>"),
    };
}

const EXPLAINED: &str = "<p class=\"hint\">Of this hour and the one before, from reference spans, which were chosen at \
    random when they were created; the number of requests is estimated from their probabilities. Percentiles need 10, 100 \
    and 500 of them.</p>\n";

/// The page with all routes.
pub(super) fn list_page(base: &str, routes: &[RouteSummary]) -> String {
    let mut text = String::from(EXPLAINED);
    if routes.is_empty() {
        text += "<section><p>No reference span has closed yet. <code>TRACING_PROFILING_REFERENCES=off</code> turns them \
            off, and so do rules that keep nothing.</p></section>\n";
        return page(base, "Routes", &text);
    }
    text += "<section class=\"wide\" tabindex=\"0\" role=\"region\" aria-label=\"Routes\">\n<table><thead><tr><th>Route</th>\
        <th class=\"number\">Requests</th><th class=\"number\">p50</th><th class=\"number\">p95</th>\
        <th class=\"number\">p99</th><th class=\"number\">Mean</th><th>Where the time goes</th>\
        <th class=\"number\">References</th></tr></thead>\n<tbody>\n";
    for route in routes {
        let name = HtmlText(&route.name);
        _ = write!(
            text,
            "<tr><td><a class=\"code\" href=\"{base}/routes?route={}\">{name}</a>",
            QueryValue(&route.name)
        );
        if let Some(drift) = &route.drift {
            _ = write!(text, " <span class=\"badge\">{}</span>", slower(drift));
        }
        _ = write!(text, "</td><td class=\"number\">~{}</td>", route.recent.walls.spans());
        route.percentiles().for_each(|(_, ms)| number(&mut text, ms));
        number(&mut text, Some(route.mean_wall_ns() / 1e6));
        _ = writeln!(
            text,
            "<td>{}</td><td class=\"number\">{}</td></tr>",
            bar(&route.split()),
            route.references()
        );
    }
    text += "</tbody></table></section>\n";
    page(base, "Routes", &text)
}

fn slower(drift: &Drift) -> String {
    let times = drift.is_ns as f64 / drift.was_ns.max(1) as f64;
    format!("+{:.0} %", (times - 1.0) * 100.0)
}

/// A bar of the parts of a time, for those who see it: what it shows is in the text below.
fn bar(split: &[(TimeKind, f64)]) -> String {
    let all: f64 = split.iter().map(|(_, ns)| ns).sum();
    let mut text = String::from(
        "<svg class=\"parts\" viewBox=\"0 0 100 10\" preserveAspectRatio=\"none\" aria-hidden=\"true\">",
    );
    let mut x = 0.0;
    for (kind, ns) in split {
        let width = ns / all.max(1.0) * 100.0;
        let look = kind_in_words(*kind).1;
        _ = write!(
            text,
            "<rect class=\"{look}\" x=\"{x:.2}\" width=\"{width:.2}\" height=\"10\"/>"
        );
        x += width;
    }
    text += "</svg><small>";
    let shown = split.iter().filter(|(_, ns)| *ns >= all / 1_000.0);
    for (number, (kind, ns)) in shown.enumerate() {
        let (words, and) = (kind_in_words(*kind).0, if number > 0 { " + " } else { "" });
        _ = write!(text, "{and}{words} {}", Shown(*ns));
    }
    text + "</small>"
}

/// The page of one route.
pub(super) fn route_page(base: &str, route: &RouteSummary) -> String {
    let (mut text, name) = (String::from(EXPLAINED), QueryValue(&route.name));
    if let Some(drift) = &route.drift {
        let since = match &drift.since {
            Baseline::DayBefore => "in the same hour of the day before".to_owned(),
            Baseline::Version(version) => format!("with version {version}"),
        };
        _ = writeln!(
            text,
            "<p class=\"problem\">It has become slower: {} on average in the hour from {}, and {} {} ({}).</p>",
            Shown(drift.is_ns as f64),
            humantime::format_rfc3339_seconds(hour_begins(drift.hour)),
            Shown(drift.was_ns as f64),
            HtmlText(&since),
            slower(drift)
        );
    }
    text += "<section><dl class=\"figures\">\n";
    let mut figure = |words: &str, value: String| {
        _ = writeln!(text, "<div><dt>{words}</dt><dd>{value}</dd></div>");
    };
    figure("requests, estimated", route.recent.walls.spans().to_string());
    figure("references", route.references().to_string());
    for ((_, percent, _), (_, ms)) in PERCENTILES.iter().zip(route.percentiles()) {
        let value = ms.map_or("\u{2013}".to_owned(), |ms| Shown(ms * 1e6).to_string());
        figure(&format!("p{percent:.0}"), value);
    }
    figure("mean", Shown(route.mean_wall_ns()).to_string());
    _ = writeln!(text, "</dl>{}</section>", bar(&route.split()));
    _ = write!(
        text,
        "<section><h2>The typical request</h2><ul>\
         <li><a href=\"{base}/routes/profile?route={name}&amp;format=html\">Its flame graph</a>, the mean of the last \
         references</li>"
    );
    if cfg!(feature = "pprof") {
        _ = write!(
            text,
            "<li><a href=\"{base}/routes/profile?route={name}\">For <code>go tool pprof</code></a>: \
             <code>-diff_base</code> takes it, with the file of a kept span</li>"
        );
    }
    if cfg!(feature = "otlp") {
        _ = write!(
            text,
            "<li><a href=\"{base}/routes/profile?route={name}&amp;format=otlp\">As OTLP</a></li>"
        );
    }
    _ = writeln!(
        text,
        "<li><a href=\"{base}/compare?route={name}\">This version against the one before</a>, or this hour against the \
         day before</li></ul></section>"
    );
    text += "<section><h2>The slowest kept ones</h2>\n";
    if route.kept.is_empty() {
        text += "<p>None of the last 1,000 kept spans is of this route.</p>";
    } else {
        text += "<table><thead><tr><th>Begun</th><th class=\"number\">Wall time</th><th>Report</th></tr></thead><tbody>\n";
    }
    for kept in &route.kept {
        let Some(span) = kept.kept.spans.first() else { continue };
        let begun = time(span.opened());
        _ = write!(
            text,
            "<tr><td><time datetime=\"{begun}\">{begun}</time></td><td class=\"number\">{}</td><td>",
            Shown(span.facts().times.wall_ns as f64)
        );
        _ = match report_of(kept) {
            Some(name) => {
                let why = HtmlText(&span.facts().reasons.to_string()).to_string();
                write!(text, "<a href=\"{base}/profiles/{}\">{why}</a>", QueryValue(name))
            }
            None => write!(text, "no report"),
        };
        text += "</td></tr>\n";
    }
    text += if route.kept.is_empty() { "</section>\n" } else { "</tbody></table></section>\n" };
    page(base, &route.name, &text)
}
