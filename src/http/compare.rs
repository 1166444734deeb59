//! A route in some hours against other hours: what this version of the service does that the one before did not.

use std::io;
use std::time::SystemTime;

use axum::http::StatusCode;
use serde_json::{Value, json};

use super::answer::{Failure, not_found, time, unreadable};
use super::routes::{own_version, recent_hours};
use crate::compare::ComparedRow;
use crate::encode::{compared_row, compared_value};
use crate::handle::Handle;
use crate::history::{Period, RouteHistory, hour_begins, hour_of, stored_versions};

/// Compares what is stored. Without periods, this version, in this hour and the one before, with the version before; if
/// none is stored, with the same hour of the day before.
pub(super) fn compared(
    handle: &Handle,
    route: &str,
    before: Option<&str>,
    after: Option<&str>,
) -> Result<Value, Failure> {
    let dir = handle.dir().ok_or_else(not_found)?;
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound => (StatusCode::NOT_FOUND, error.to_string()),
        _ => unreadable(error),
    };
    let recent = RouteHistory::of_routes(recent_hours(handle));
    let versions = stored_versions(&dir).map_err(failed)?;
    let own = own_version(handle).unwrap_or_default();
    let after = after.map_or(Period::Recent, Period::parse);
    let version_before = || {
        let other = versions.iter().find(|version| **version != own)?;
        Some(Period::Version(other.clone()))
    };
    let day_before = || Period::Hour(hour_of(SystemTime::now()).saturating_sub(24));
    let before = before.map(Period::parse).or_else(version_before).unwrap_or_else(day_before);
    let read = |period: &Period| match period {
        Period::Recent => Ok(recent.clone()),
        stored => RouteHistory::of_period(&dir, stored).map_err(failed),
    };
    let (of_before, of_after) = (read(&before)?, read(&after)?);
    let comparison = of_after.compare_route(&of_before, route).ok_or_else(|| {
        let problem = format!("{route} was not seen in both {before} and {after}");
        (StatusCode::NOT_FOUND, problem)
    })?;
    let rows = |rows: &[ComparedRow]| -> Value {
        rows.iter().map(|row| compared_row(row, true)).collect()
    };
    let period = |period: &Period, of: &RouteHistory| {
        let (what, name) = match period {
            Period::Version(version) => ("version", version.clone()),
            Period::Hour(hour) => ("hour", time(hour_begins(*hour))),
            Period::Recent => ("recent", String::new()),
            Period::All => ("all", String::new()),
        };
        json!({ what: name, "references": of.references(route) })
    };
    Ok(json!({
        "route": route,
        "before": period(&before, &of_before),
        "after": period(&after, &of_after),
        "wall_ms": compared_value(comparison.wall, true),
        "rows": rows(&comparison.rows),
        "beside": rows(&comparison.beside),
        // Those that could be compared, the last one first.
        "versions": versions,
    }))
}
