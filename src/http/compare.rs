//! A route in some hours against other hours: what this version of the service does that the one before did not.

use std::fmt::Write as _;
use std::io;
use std::time::SystemTime;

use axum::http::StatusCode;
use serde_json::Value;

use super::answer::{Failure, not_found, object, time, unreadable};
use super::routes::{QueryValue, Shown, kind_in_words, own_version, page, recent_hours};
use crate::compare::{ComparedRow, ComparedValue, Comparison, Quantity, SpentIn, TimeKind};
use crate::encode::HtmlText;
use crate::handle::Handle;
use crate::history::{Period, RouteHistory, hour_begins, hour_of, kind_name, stored_versions};

/// How many rows a page shows.
const MOST_ROWS: usize = 20;

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
        Quantity::Wall(kind, function) => ("ns", kind_name(*kind), Some(function)),
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
        members.push(("line", function.line.into()));
    } else if let Some(function) = function {
        members.push(("others", (*function == SpentIn::Others).into()));
    }
    members.extend(value_to_json(row.value));
    members.push(("present_in", row.present_in.into()));
    object(members)
}

/// The name of what a row is of, and where it is.
fn row_in_words(quantity: &Quantity) -> (String, String) {
    let function = |function: &SpentIn| match function {
        SpentIn::Function(function) if function.line > 0 => {
            (function.name.clone(), format!(" {}:{}", function.file, function.line))
        }
        SpentIn::Function(function) => (function.name.clone(), format!(" {}", function.file)),
        SpentIn::Unknown => ("in no known function".to_owned(), String::new()),
        SpentIn::Others => ("in other functions".to_owned(), String::new()),
    };
    let alone = |text: &str| (text.to_owned(), String::new());
    match quantity {
        Quantity::Wall(
            TimeKind::Runnable
            | TimeKind::UnexplainedIdle
            | TimeKind::OtherSpans
            | TimeKind::Unmeasured,
            SpentIn::Unknown,
        ) => alone(""),
        Quantity::Wall(_, of) => function(of),
        Quantity::OtherThreads(of) => {
            let (name, file) = function(of);
            (name, format!("{file} on other threads"))
        }
        Quantity::AllocatedBytes => alone("allocated"),
        Quantity::ChildSpans(name) => {
            alone(&format!("{} spans", name.as_deref().unwrap_or("other")))
        }
        Quantity::ChildTime(name) => {
            alone(&format!("wall time of {} spans", name.as_deref().unwrap_or("other")))
        }
    }
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

    pub(super) fn to_page(&self, base: &str) -> String {
        let Self { route, before, after, references, comparison, versions } = self;
        let mut text = String::new();
        let wall = comparison.wall;
        let [of_before, of_after] = references;
        let sure = match wall.interval {
            Some(interval) if interval.excludes_zero() => "",
            Some(_) => " The difference can be chance.",
            None => {
                " Fewer than ten reference spans: whether the difference is chance is not known."
            }
        };
        _ = write!(
            text,
            "<p>The mean request takes {} in {} ({of_after} references), and took {} in {} ({of_before}): {}.{sure}</p>\n\
             <section class=\"wide\" tabindex=\"0\" role=\"region\" aria-label=\"Differences\"><table>\
             <caption>Where the difference is. The rows add up to it; each interval has a confidence of 95 %.</caption>\
             <thead><tr><th>Kind</th><th>In</th><th class=\"number\">Difference</th><th class=\"number\">Between</th>\
             <th class=\"number\">Before</th><th class=\"number\">After</th></tr></thead><tbody>\n",
            Shown(wall.value as f64),
            HtmlText(&after.to_string()),
            Shown(wall.typical as f64),
            HtmlText(&before.to_string()),
            difference(&Quantity::Wall(TimeKind::OnCpu, SpentIn::Unknown), wall.extra()),
        );
        let changed = |row: &&ComparedRow| row.value.extra() != 0;
        comparison.rows.iter().take(MOST_ROWS).for_each(|row| write_row(&mut text, row));
        let rest: i64 = comparison.rows.iter().skip(MOST_ROWS).map(|row| row.value.extra()).sum();
        if comparison.rows.len() > MOST_ROWS {
            _ = writeln!(
                text,
                "<tr><td></td><td>{} further rows</td><td class=\"number\">{}</td><td></td><td></td><td></td></tr>",
                comparison.rows.len() - MOST_ROWS,
                Shown(rest as f64)
            );
        }
        text += "</tbody></table></section>\n";
        if comparison.beside.iter().any(|row| changed(&row)) {
            text += "<section class=\"wide\" tabindex=\"0\" role=\"region\" aria-label=\"Beside it\"><table><caption>Beside the \
                wall time</caption><tbody>\n";
            let beside = comparison.beside.iter().filter(changed).take(MOST_ROWS);
            beside.for_each(|row| write_row(&mut text, row));
            text += "</tbody></table></section>\n";
        }
        if !versions.is_empty() {
            text += "<section><h2>Against another version</h2><ul>";
            for version in versions {
                _ = write!(
                    text,
                    "<li><a href=\"{base}/compare?route={}&amp;before={}\">{}</a></li>",
                    QueryValue(route),
                    QueryValue(version),
                    HtmlText(version)
                );
            }
            text += "</ul></section>\n";
        }
        page(base, route, &text)
    }
}

/// A value in the unit of a quantity.
fn shown(quantity: &Quantity, value: f64) -> String {
    match quantity {
        Quantity::AllocatedBytes => format!("{:.0} KB", value / 1e3),
        Quantity::ChildSpans(_) => format!("{value:.0}"),
        _ => Shown(value).to_string(),
    }
}

fn difference(quantity: &Quantity, extra: i64) -> String {
    let sign = if extra > 0 { "+" } else { "" };
    format!("{sign}{}", shown(quantity, extra as f64))
}

fn write_row(text: &mut String, row: &ComparedRow) {
    let ComparedRow { quantity, value, .. } = row;
    let kind = match quantity {
        Quantity::Wall(kind, _) => kind_in_words(*kind).0,
        _ => "",
    };
    let (name, place) = row_in_words(quantity);
    let between = value.interval.map_or("\u{2013}".to_owned(), |interval| {
        format!(
            "{} and {}",
            difference(quantity, interval.low),
            difference(quantity, interval.high)
        )
    });
    let is_sure = value.interval.is_some_and(crate::compare::Interval::excludes_zero);
    let extra = difference(quantity, value.extra());
    let extra = if is_sure { format!("<b>{extra}</b>") } else { extra };
    _ = writeln!(
        text,
        "<tr><td>{kind}</td><td><span class=\"code\">{}</span><small>{}</small></td><td class=\"number\">{extra}</td>\
         <td class=\"number\">{between}</td><td class=\"number\">{}</td><td class=\"number\">{}</td></tr>",
        HtmlText(&name),
        HtmlText(&place),
        shown(quantity, value.typical as f64),
        shown(quantity, value.value as f64),
    );
}
