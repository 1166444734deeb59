//! A route in some hours against other hours: what this version of the service does that the one before did not.

use std::io;
use std::time::SystemTime;

use axum::http::StatusCode;
use serde_json::{Value, json};

use tracing_profiling::compare::{ComparedRow, hour_begins, hour_of};
use tracing_profiling::{Handle, Period, RouteHistory};
use tracing_profiling_profile::encode::{compared_row, compared_value};

use crate::answer::{Failure, not_found, time, unreadable};
use crate::routes::own_version;

/// Compares what is stored. Without periods, this version, in this hour and the one before, with the version before; if
/// none is stored, with the same hour of the day before.
pub(crate) fn compared(
    handle: &Handle,
    route: &str,
    before: Option<&str>,
    after: Option<&str>,
) -> Result<Value, Failure> {
    let dir = handle.directory().ok_or_else(not_found)?;
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound => (StatusCode::NOT_FOUND, error.to_string()),
        _ => unreadable(error),
    };
    let versions = RouteHistory::versions(&dir).map_err(failed)?;
    let own = own_version(handle).unwrap_or_default();
    let after = after.map(Period::parse);
    let version_before = || {
        let other = versions.iter().find(|version| **version != own)?;
        Some(Period::Version(other.clone()))
    };
    let day_before = || Period::Hour(hour_of(SystemTime::now()).saturating_sub(24));
    let before = before.map(Period::parse).or_else(version_before).unwrap_or_else(day_before);
    let stored = |period: &Period| RouteHistory::of_period(&dir, period).map_err(failed);
    let of_before = stored(&before)?;
    let of_after = match &after {
        Some(after) => stored(after)?,
        None => RouteHistory::from(handle.routes()),
    };
    let comparison = of_after.compare_route(&of_before, route).ok_or_else(|| {
        let after = after.as_ref().map_or_else(|| "this hour".to_owned(), Period::to_string);
        let problem = format!("{route} was not seen in both {before} and {after}");
        (StatusCode::NOT_FOUND, problem)
    })?;
    let rows = |rows: &[ComparedRow]| -> Value {
        rows.iter().map(|row| compared_row(row, true)).collect()
    };
    let period = |period: Option<&Period>, of: &RouteHistory| {
        let (what, name) = match period {
            Some(Period::Version(version)) => ("version", version.clone()),
            Some(Period::Hour(hour)) => ("hour", time(hour_begins(*hour))),
            _ => ("recent", String::new()),
        };
        json!({ what: name, "references": of.references(route) })
    };
    Ok(json!({
        "route": route,
        "before": period(Some(&before), &of_before),
        "after": period(after.as_ref(), &of_after),
        "wall_ms": compared_value(comparison.wall, true),
        "rows": rows(&comparison.rows),
        "beside": rows(&comparison.beside),
        // Those that could be compared, the last one first.
        "versions": versions,
    }))
}
