//! What is typical of each route.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use serde_json::{Value, json};
use tracing_profiling::compare::{Baseline, Drift, Quantity, hour_begins};
use tracing_profiling::{Handle, RecentlyKept, Route};
use tracing_profiling_profile::encode::joined;
use tracing_profiling_profile::text::ms;

use crate::answer::time;

/// How many kept spans of a route are listed.
const MOST_KEPT: usize = 10;
/// The percentiles, each with how many reference spans are needed, so that some are above it.
const PERCENTILES: [(&str, f64, u64); 3] =
    [("p50_ms", 50.0, 10), ("p95_ms", 95.0, 100), ("p99_ms", 99.0, 500)];

/// What is known of all routes, those with the most time first, or of the one of that name.
pub(crate) fn summaries(handle: &Handle, wanted: Option<&str>) -> Value {
    let mut routes = handle.routes();
    routes.retain(|route| wanted.is_none_or(|name| name == route.name));
    // By the time of all requests, estimated.
    routes.sort_by_cached_key(|route| {
        let all_wall_ns = mean_wall_ns(route) * route.recent.walls.spans() as f64;
        (Reverse(all_wall_ns as u64), route.name.clone())
    });
    let mut kept = handle.recently_kept();
    kept.sort_by_key(|it| Reverse(it.kept.spans.first().map(|span| span.facts.times.wall_ns)));
    routes.iter().map(|route| to_json(route, &kept)).collect()
}

/// The version of the service that runs, if it is known.
pub(crate) fn own_version(handle: &Handle) -> Option<String> {
    handle.report_context().resource().get("service.version").map(ToString::to_string)
}

fn mean_wall_ns(route: &Route) -> f64 {
    let references = &route.recent.references;
    references.wall().mean(references.spans())
}

/// A route, with the slowest of the kept spans that are its own.
fn to_json(route: &Route, kept: &[RecentlyKept]) -> Value {
    let (walls, references) = (&route.recent.walls, &route.recent.references);
    let mut split: BTreeMap<&'static str, f64> = BTreeMap::new();
    for (quantity, of) in references.quantities() {
        if let Quantity::Wall(kind, _) = quantity {
            *split.entry(kind.name()).or_default() += of.mean(references.spans());
        }
    }
    let percentile = |(name, percent, least)| {
        let known = (references.spans() >= least).then_some(percent);
        (name, Value::from(known.and_then(|percent| walls.percentile_ns(percent)).map(ms)))
    };
    let kept = kept.iter().filter(|it| it.route == route.name).take(MOST_KEPT);
    let all = json!({
        "name": route.name,
        "references": references.spans(),
        "requests_estimated": walls.spans(),
        "mean_wall_ms": ms(mean_wall_ns(route) as u64),
        "mean_wall_split_ms": Value::from_iter(split.into_iter().map(|(kind, ns)| (kind, ms(ns as u64)))),
        "drift": route.drift.as_ref().map(drift_to_json),
        "kept": kept.map(kept_to_json).collect::<Value>(),
    });
    joined(all, PERCENTILES.into_iter().map(percentile).collect())
}

fn drift_to_json(drift: &Drift) -> Value {
    let since = match &drift.since {
        Baseline::DayBefore => "the day before".to_owned(),
        Baseline::Version(version) => format!("version {version}"),
    };
    let hour = time(hour_begins(drift.hour));
    json!({ "hour": hour, "since": since, "was_ms": ms(drift.was_ns), "is_ms": ms(drift.is_ns) })
}

/// The name of the report of a kept span, if there is one.
fn report_of(kept: &RecentlyKept) -> Option<&str> {
    let names = kept.kept.files.iter().filter_map(|file| file.file_name()?.to_str());
    names.into_iter().find(|name| name.ends_with(".html"))
}

fn kept_to_json(kept: &RecentlyKept) -> Value {
    let Some(span) = kept.kept.spans.first() else { return Value::Null };
    json!({
        "time": span.facts.start().map(time),
        "wall_ms": ms(span.facts.times.wall_ns),
        "id": kept.kept.profile.map(|id| id.to_string()),
        "file": report_of(kept),
        "reasons": span.facts.reasons.to_string(),
    })
}
