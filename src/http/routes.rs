//! What is typical of each route.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use percent_encoding::percent_decode_str;
use serde_json::{Value, json};

use super::answer::{Failure, not_found, time};
use crate::compare::{Baseline, CohortHour, Drift, Quantity};
use crate::encode::joined;
use crate::facts::format::nanoseconds;
use crate::handle::Handle;
use crate::history::hour_begins;
use crate::profile::Profile;
use crate::publish::RecentlyKept;
use crate::references::CohortKey;
use crate::text::ms;

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
            recent.merge(&known.hour);
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

    pub(super) fn to_json(&self) -> Value {
        let mut split: BTreeMap<&'static str, f64> = BTreeMap::new();
        for (quantity, of) in self.recent.references.quantities() {
            if let Quantity::Wall(kind, _) = quantity {
                *split.entry(kind.name()).or_default() += of.mean(self.references());
            }
        }
        let percentile = |(name, percent, least)| {
            let known = (self.references() >= least).then_some(percent);
            let ns = known.and_then(|percent| self.recent.walls.percentile_ns(percent));
            (name, Value::from(ns.map(ms)))
        };
        let all = json!({
            "name": self.name,
            "references": self.references(),
            "requests_estimated": self.recent.walls.spans(),
            "mean_wall_ms": ms(self.mean_wall_ns() as u64),
            "mean_wall_split_ms": Value::from_iter(split.into_iter().map(|(kind, ns)| (kind, ms(ns as u64)))),
            "drift": self.drift.as_ref().map(drift_to_json),
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
        "time": time(span.opened()),
        "wall_ms": ms(span.facts().times.wall_ns),
        "id": kept.kept.profile.map(|id| id.to_string()),
        "file": report_of(kept),
        "reasons": span.facts().reasons.to_string(),
    })
}

/// The profile of the mean request of a route.
pub(super) fn typical(handle: &Handle, route: &str) -> Result<Profile, Failure> {
    let found = handle.published().and_then(|published| {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now_unix_ns = nanoseconds(now);
        let profiles = published.references.read_cohorts(|key, known| {
            (key.name() == route).then(|| {
                known.profile.requested(route, known.references.mean_wall_ns(), now_unix_ns)
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
