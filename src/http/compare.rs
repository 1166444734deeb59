//! A route in some hours against other hours: what this version of the service does that the one before did not.

use std::io;
use std::time::SystemTime;

use axum::http::StatusCode;
use serde_json::Value;

use super::answer::{Failure, not_found, object, time, unreadable};
use super::routes::{own_version, recent_hours};
use crate::compare::{ComparedRow, ComparedValue, Comparison, Quantity, SpentIn};
use crate::handle::Handle;
use crate::history::{Period, RouteHistory, hour_begins, hour_of, stored_versions};

/// Two sets of hours of a route.
pub(super) struct ComparedPeriods {
    route: String,
    before: Period,
    after: Period,
    /// In each, how many reference spans there are.
    references: [u64; 2],
    comparison: Comparison,
    /// Those that could be compared, the last one first.
    versions: Vec<String>,
}

/// Compares what is stored. Without periods, this version, in this hour and the one before, with the version before; if
/// none is stored, with the same hour of the day before.
pub(super) fn compared(
    handle: &Handle,
    route: &str,
    before: Option<&str>,
    after: Option<&str>,
) -> Result<ComparedPeriods, Failure> {
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
    let references = [of_before.references(route), of_after.references(route)];
    let comparison = of_after.compare_route(&of_before, route).ok_or_else(|| {
        let problem = format!("{route} was not seen in both {before} and {after}");
        (StatusCode::NOT_FOUND, problem)
    })?;
    let route = route.to_owned();
    Ok(ComparedPeriods { route, before, after, references, comparison, versions })
}

fn value_to_json(value: ComparedValue) -> [(&'static str, Value); 4] {
    let interval = value.interval.map(|interval| vec![interval.low, interval.high]);
    [
        ("before", value.typical.into()),
        ("after", value.value.into()),
        ("extra", value.extra().into()),
        ("interval", interval.into()),
    ]
}

fn row_to_json(row: &ComparedRow) -> Value {
    let (unit, what, function) = match &row.quantity {
        Quantity::Wall(kind, function) => ("ns", kind.name(), Some(function)),
        Quantity::OtherThreads(function) => ("ns", "other_threads", Some(function)),
        Quantity::AllocatedBytes => ("bytes", "allocated_bytes", None),
        Quantity::ChildSpans(_) => ("count", "child_spans", None),
        Quantity::ChildTime(_) => ("ns", "child_time", None),
    };
    let child = match &row.quantity {
        Quantity::ChildSpans(name) | Quantity::ChildTime(name) => name.as_deref(),
        _ => None,
    };
    let mut members = vec![("what", Value::from(what)), ("unit", unit.into())];
    members.extend(child.map(|name| ("child", name.into())));
    if let Some(SpentIn::Function(function)) = function {
        members.push(("function", function.name.as_str().into()));
        members.push(("file", function.file.as_str().into()));
        members.extend((function.line > 0).then(|| ("line", function.line.into())));
    } else if let Some(function) = function {
        members.push(("others", (*function == SpentIn::Others).into()));
    }
    members.extend(value_to_json(row.value));
    members.push(("present_in", row.present_in.into()));
    object(members)
}

impl ComparedPeriods {
    pub(super) fn to_json(&self) -> Value {
        let Self { route, before, after, references, comparison, versions } = self;
        let [of_before, of_after] = *references;
        let rows = |rows: &[ComparedRow]| Value::Array(rows.iter().map(row_to_json).collect());
        let period = |period: &Period, references: u64| {
            let (what, name) = match period {
                Period::Version(version) => ("version", version.clone()),
                Period::Hour(hour) => ("hour", time(hour_begins(*hour))),
                Period::Recent => ("recent", String::new()),
                Period::All => ("all", String::new()),
            };
            object([(what, Value::from(name)), ("references", references.into())])
        };
        object([
            ("route", Value::from(route.as_str())),
            ("before", period(before, of_before)),
            ("after", period(after, of_after)),
            ("wall_ns", object(value_to_json(comparison.wall))),
            ("rows", rows(&comparison.rows)),
            ("beside", rows(&comparison.beside)),
            ("versions", versions.clone().into()),
        ])
    }
}
