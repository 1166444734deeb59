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

/// What is known of a route, and its slowest kept spans.
pub(crate) struct RouteSummary {
    route: Route,
    kept: Vec<RecentlyKept>,
}

/// All routes, those with the most time first, or the one of that name.
pub(crate) fn summaries(handle: &Handle, wanted: Option<&str>) -> Vec<RouteSummary> {
    let routes = handle.routes().into_iter();
    let routes = routes.filter(|route| wanted.is_none_or(|name| name == route.name));
    let mut routes: Vec<_> = routes.map(|route| RouteSummary { route, kept: Vec::new() }).collect();
    routes.sort_by_cached_key(|it| (Reverse(it.all_wall_ns() as u64), it.route.name.clone()));
    for kept in handle.recently_kept() {
        let route = routes.iter_mut().find(|it| it.route.name == kept.route);
        _ = route.map(|route| route.kept.push(kept));
    }
    for route in &mut routes {
        let wall_ns = |kept: &RecentlyKept| {
            kept.kept.spans.first().map_or(0, |span| span.facts.times.wall_ns)
        };
        route.kept.sort_by_key(|kept| Reverse(wall_ns(kept)));
        route.kept.truncate(MOST_KEPT);
    }
    routes
}

/// The version of the service that runs, if it is known.
pub(crate) fn own_version(handle: &Handle) -> Option<String> {
    handle.report_context().resource().get("service.version").map(ToString::to_string)
}

impl RouteSummary {
    /// Of all requests, estimated.
    fn all_wall_ns(&self) -> f64 {
        self.mean_wall_ns() * self.route.recent.walls.spans() as f64
    }

    fn references(&self) -> u64 {
        self.route.recent.references.spans()
    }

    fn mean_wall_ns(&self) -> f64 {
        self.route.recent.references.wall().mean(self.references())
    }

    pub(crate) fn to_json(&self) -> Value {
        let mut split: BTreeMap<&'static str, f64> = BTreeMap::new();
        for (quantity, of) in self.route.recent.references.quantities() {
            if let Quantity::Wall(kind, _) = quantity {
                *split.entry(kind.name()).or_default() += of.mean(self.references());
            }
        }
        let percentile = |(name, percent, least)| {
            let known = (self.references() >= least).then_some(percent);
            let ns = known.and_then(|percent| self.route.recent.walls.percentile_ns(percent));
            (name, Value::from(ns.map(ms)))
        };
        let all = json!({
            "name": self.route.name,
            "references": self.references(),
            "requests_estimated": self.route.recent.walls.spans(),
            "mean_wall_ms": ms(self.mean_wall_ns() as u64),
            "mean_wall_split_ms": Value::from_iter(split.into_iter().map(|(kind, ns)| (kind, ms(ns as u64)))),
            "drift": self.route.drift.as_ref().map(drift_to_json),
            "kept": self.kept.iter().map(kept_to_json).collect::<Value>(),
        });
        joined(all, PERCENTILES.into_iter().map(percentile).collect())
    }
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
