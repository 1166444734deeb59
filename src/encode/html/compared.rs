//! A kept span against typical ones, in the data of a report.

use std::io::{self, Write};

use super::json::{Array, Json, Object, Plain};
use crate::compare::{ComparedRow, ComparedValue, OwnFunction, Quantity, SpentIn};
use crate::facts::Facts;
use crate::profile::Compared;

/// The comparison of one of some kept spans. Unknown numbers are absent.
pub(super) struct ComparedSpan<'a> {
    pub(super) compared: &'a Compared,
    pub(super) spans: &'a [Facts],
}

impl Json for ComparedSpan<'_> {
    fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let Self { compared, spans } = self;
        let (comparison, summary) = (&compared.comparison, compared.summary());
        Object::write(out, |data| {
            data.member("cohort", &compared.cohort)?;
            let kept = compared.find(spans).map_or(-1, |(number, _)| number as i64);
            data.member("kept", Plain(kept))?;
            data.member("references", Plain(comparison.references))?;
            if let Some(ns) = comparison.median_wall_ns {
                data.member("median", Plain(ns))?;
            }
            if let Some(times) = summary.times() {
                data.member("times", times)?;
            }
            data.object("wall", |wall| write_value(comparison.wall, wall))?;
            data.member("rows", Array(|| comparison.rows.iter().map(Row)))?;
            data.member("beside", Array(|| comparison.beside.iter().map(Row)))
        })
    }
}

fn write_value(compared: ComparedValue, data: &mut Object<'_>) -> io::Result<()> {
    data.member("value", Plain(compared.value))?;
    data.member("typical", Plain(compared.typical))?;
    data.member("extra", Plain(compared.extra()))?;
    if let Some(interval) = compared.interval {
        data.member("low", Plain(interval.low))?;
        data.member("high", Plain(interval.high))?;
    }
    Ok(())
}

struct Row<'a>(&'a ComparedRow);

impl Json for Row<'_> {
    fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let Self(ComparedRow { quantity, value, present_in, as_extreme_in }) = *self;
        Object::write(out, |row| {
            row.member("words", quantity.words())?;
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
            row.member("name", name)?;
            row.member("file", file)?;
            if line > 0 {
                row.member("line", Plain(line))?;
            }
            row.member("others", Plain(is_of_others(quantity)))?;
            row.member("unit", quantity.unit())?;
            write_value(*value, row)?;
            row.member("present_in", Plain(*present_in))?;
            if let Some(number) = as_extreme_in {
                row.member("as_extreme_in", Plain(*number))?;
            }
            Ok(())
        })
    }
}

/// Whether it is the sum of several small ones.
fn is_of_others(quantity: &Quantity) -> bool {
    matches!(quantity, Quantity::ChildSpans(None) | Quantity::ChildTime(None))
        || quantity.spent_in() == Some(&SpentIn::Others)
}
