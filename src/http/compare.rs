//! A route in some hours against other hours: what this version of the service does that the one before did not.

use std::io;
use std::time::SystemTime;

use axum::http::StatusCode;
use serde_json::{Value, json};

use super::answer::{Failure, not_found, time, unreadable};
use super::routes::{own_version, recent_hours};
use crate::compare::{ComparedRow, ComparedValue, Quantity, SpentIn};
use crate::encode::{joined, known};
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
    let rows = |rows: &[ComparedRow]| rows.iter().map(row_to_json).collect::<Value>();
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
        "wall_ms": value_to_json(comparison.wall, true),
        "rows": rows(&comparison.rows),
        "beside": rows(&comparison.beside),
        // Those that could be compared, the last one first.
        "versions": versions,
    }))
}

/// Times are in milliseconds, not rounded, so that they add up.
fn value_to_json(value: ComparedValue, is_time: bool) -> Value {
    let shown = |number: i64| -> Value {
        if is_time { (number as f64 / 1e6).into() } else { number.into() }
    };
    json!({
        "before": shown(value.typical.cast_signed()),
        "after": shown(value.value.cast_signed()),
        "extra": shown(value.extra()),
        "interval": value.interval.map(|interval| [shown(interval.low), shown(interval.high)]),
    })
}

fn row_to_json(row: &ComparedRow) -> Value {
    let (what, child) = match &row.quantity {
        Quantity::Wall(kind, _) => (kind.name(), None),
        Quantity::OtherThreads(_) => ("other_threads", None),
        Quantity::AllocatedBytes => ("allocated_bytes", None),
        Quantity::ChildSpans(name) => ("child_spans", name.as_deref()),
        Quantity::ChildTime(name) => ("child_time", name.as_deref()),
    };
    let is_time = row.quantity.unit() == "ns";
    let unit = if is_time { "ms" } else { row.quantity.unit() };
    let of_function = match row.quantity.spent_in() {
        Some(SpentIn::Function(of)) => {
            json!({ "function": of.name, "file": of.file, "line": (of.line > 0).then_some(of.line) })
        }
        others => json!({ "child": child, "others": others.map(|of| *of == SpentIn::Others) }),
    };
    let of_row = json!({ "what": what, "unit": unit, "present_in": row.present_in });
    joined(joined(of_row, known(of_function)), value_to_json(row.value, is_time))
}
