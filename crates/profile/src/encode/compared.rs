//! Comparisons as JSON. Unknown numbers are absent.

use serde_json::{Value, json};

use super::json::{joined, known};
use crate::compare::{ComparedRow, ComparedValue, Quantity, SpentIn};
use crate::facts::Facts;
use crate::profile::Compared;

/// The comparison of one of some kept spans, in the data of a report.
pub(super) fn of(compared: &Compared, spans: &[Facts]) -> Value {
    let comparison = &compared.comparison;
    let rows = |rows: &[ComparedRow]| -> Value {
        rows.iter().map(|row| compared_row(row, false)).collect()
    };
    known(json!({
        "cohort": compared.cohort,
        "kept": compared.find(spans).map_or(-1, |number| number as i64),
        "references": comparison.references,
        "median": comparison.median_wall_ns,
        "times": compared.summary().times(),
        "wall": compared_value(comparison.wall, false),
        "rows": rows(&comparison.rows),
        "beside": rows(&comparison.beside),
    }))
}

/// What is compared. With `in_ms`, times are in milliseconds, not rounded, so that they add up, and else in nanoseconds.
pub fn compared_row(row: &ComparedRow, in_ms: bool) -> Value {
    let quantity = &row.quantity;
    let (what, child) = match quantity {
        Quantity::Wall(kind, _) => (kind.name(), None),
        Quantity::OtherThreads(_) => ("other_threads", None),
        Quantity::AllocatedBytes => ("allocated_bytes", None),
        Quantity::ChildSpans(name) => ("child_spans", name.as_deref()),
        Quantity::ChildTime(name) => ("child_time", name.as_deref()),
    };
    let function = match quantity.spent_in() {
        Some(SpentIn::Function(function)) => Some(function),
        _ => None,
    };
    let is_time = quantity.unit() == "ns";
    let of_row = known(json!({
        "what": what,
        "words": quantity.words(),
        "function": function.map(|of| &of.name),
        "file": function.map(|of| &of.file),
        "line": function.map(|of| of.line).filter(|line| *line > 0),
        "child": child,
        // The sum of several small ones.
        "others": *quantity == quantity.rest() && quantity.unit() != "bytes",
        "unit": if is_time && in_ms { "ms" } else { quantity.unit() },
        "present_in": row.present_in,
        "as_extreme_in": row.as_extreme_in,
    }));
    joined(of_row, compared_value(row.value, is_time && in_ms))
}

/// A value and what it is compared with. The interval is null if it is unknown.
pub fn compared_value(value: ComparedValue, in_ms: bool) -> Value {
    let shown =
        |number: i64| -> Value { if in_ms { (number as f64 / 1e6).into() } else { number.into() } };
    json!({
        "before": shown(value.typical.cast_signed()),
        "after": shown(value.value.cast_signed()),
        "extra": shown(value.extra()),
        "interval": value.interval.map(|interval| [shown(interval.low), shown(interval.high)]),
    })
}
