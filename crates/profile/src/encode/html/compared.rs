//! A kept span against typical ones, in the data of a report.

use serde_json::{Value, json};

use crate::compare::{ComparedRow, ComparedValue, OwnFunction, Quantity, SpentIn};
use crate::encode::json::{joined, known};
use crate::facts::Facts;
use crate::profile::Compared;

/// The comparison of one of some kept spans. Unknown numbers are absent.
pub(super) fn of(compared: &Compared, spans: &[Facts]) -> Value {
    let comparison = &compared.comparison;
    let rows = |rows: &[ComparedRow]| -> Value { rows.iter().map(row).collect() };
    known(json!({
        "cohort": compared.cohort,
        "kept": compared.find(spans).map_or(-1, |(number, _)| number as i64),
        "references": comparison.references,
        "median": comparison.median_wall_ns,
        "times": compared.summary().times(),
        "wall": value(comparison.wall),
        "rows": rows(&comparison.rows),
        "beside": rows(&comparison.beside),
    }))
}

fn value(compared: ComparedValue) -> Value {
    known(json!({
        "value": compared.value,
        "typical": compared.typical,
        "extra": compared.extra(),
        "low": compared.interval.map(|interval| interval.low),
        "high": compared.interval.map(|interval| interval.high),
    }))
}

fn row(row: &ComparedRow) -> Value {
    let quantity = &row.quantity;
    let (name, file, line) = match (quantity, quantity.spent_in()) {
        (_, Some(SpentIn::Function(function))) => {
            let OwnFunction { name, file, line } = &**function;
            (name.as_str(), file.as_str(), *line)
        }
        (Quantity::ChildSpans(name) | Quantity::ChildTime(name), _) => {
            (name.as_deref().unwrap_or_default(), "", 0)
        }
        _ => ("", "", 0),
    };
    let of_row = known(json!({
        "words": quantity.words(),
        "name": name,
        "file": file,
        "line": (line > 0).then_some(line),
        "others": is_of_others(quantity),
        "unit": quantity.unit(),
        "present_in": row.present_in,
        "as_extreme_in": row.as_extreme_in,
    }));
    joined(of_row, value(row.value))
}

/// Whether it is the sum of several small ones.
fn is_of_others(quantity: &Quantity) -> bool {
    matches!(quantity, Quantity::ChildSpans(None) | Quantity::ChildTime(None))
        || quantity.spent_in() == Some(&SpentIn::Others)
}
