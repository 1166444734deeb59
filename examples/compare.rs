//! Compares what is typical of each route in two versions of a service, or in two stored files or directories, for
//! pipelines:
//!
//! ```sh
//! cargo run --example compare -- 1.4.1 1.4.2 --dir profiles --fail-above 10%
//! cargo run --example compare -- before/typical after/typical
//! ```
//!
//! An argument is a path if there is such a file or directory, and otherwise a version in the directory of profiles.
//!
//! The status is 0 if no route is slower by more than the limit, 1 if one is, beyond chance, and 2 if nothing can be
//! compared. Without `--fail-above` it is not 1.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command-line program")]

use std::error::Error;
use std::path::Path;
use std::process::ExitCode;

use tracing_profiling::compare::{ComparedValue, Comparison, Quantity, SpentIn};
use tracing_profiling::{Period, RouteHistory};

const USAGE: &str = "usage: compare BEFORE AFTER [--dir DIRECTORY] [--fail-above PERCENT%]";
const MOST_ROWS: usize = 5;

struct Arguments {
    before: String,
    after: String,
    dir: String,
    fail_above: Option<f64>,
}

impl Arguments {
    fn parse(mut given: impl Iterator<Item = String>) -> Result<Self, Box<dyn Error>> {
        let (mut positional, mut dir, mut fail_above) = (Vec::new(), "profiles".to_owned(), None);
        while let Some(argument) = given.next() {
            match argument.as_str() {
                "--dir" => dir = given.next().ok_or(USAGE)?,
                "--fail-above" => {
                    let percent = given.next().ok_or(USAGE)?;
                    let percent: f64 = percent.trim_end_matches('%').parse()?;
                    let limit = Some(percent).filter(|percent| (0.0..1e6).contains(percent));
                    fail_above = Some(limit.ok_or(USAGE)?);
                }
                option if option.starts_with("--") => return Err(USAGE.into()),
                _ => positional.push(argument),
            }
        }
        let [before, after] = <[String; 2]>::try_from(positional).map_err(|_| USAGE)?;
        Ok(Self { before, after, dir, fail_above })
    }

    fn read(&self, what: &str) -> std::io::Result<RouteHistory> {
        match Path::new(what).exists() {
            true => RouteHistory::read(what),
            false => RouteHistory::of_period(&self.dir, &Period::Version(what.to_owned())),
        }
    }
}

fn main() -> ExitCode {
    ExitCode::from(status(std::env::args().skip(1)))
}

/// What the program ends with.
pub(crate) fn status(given: impl Iterator<Item = String>) -> u8 {
    match Arguments::parse(given).and_then(|arguments| run(&arguments)) {
        Ok(true) => 0,
        Ok(false) => 1,
        Err(error) => {
            eprintln!("{error}");
            2
        }
    }
}

/// Whether no route is slower by more than the limit.
fn run(arguments: &Arguments) -> Result<bool, Box<dyn Error>> {
    let (before, after) = (arguments.read(&arguments.before)?, arguments.read(&arguments.after)?);
    for damaged in [before.unreadable(), after.unreadable()].into_iter().filter(|files| *files > 0)
    {
        eprintln!("{damaged} damaged files are left out");
    }
    let mut compared = after.compare(&before);
    if compared.is_empty() {
        return Err("no route is in both".into());
    }
    compared.sort_by_key(|(_, comparison)| std::cmp::Reverse(comparison.wall.extra()));
    let mut all_hold = true;
    for (route, comparison) in &compared {
        let limit = arguments.fail_above.filter(|limit| is_slower(comparison.wall, *limit));
        let verdict =
            limit.map_or(String::new(), |limit| format!("  SLOWER by more than {limit} %"));
        all_hold &= limit.is_none();
        let references = [comparison.references, after.references(route)];
        println!("{route}  ({} and {} references){verdict}", references[0], references[1]);
        println!("    {:40} {}", "wall time", line(comparison.wall, 1e6, "ms"));
        print_rows(comparison);
    }
    Ok(all_hold)
}

/// By more than a limit in percent, and beyond chance.
fn is_slower(wall: ComparedValue, percent: f64) -> bool {
    let is_certain = wall.interval.is_some_and(|interval| interval.low > 0);
    is_certain && wall.extra() as f64 > wall.typical as f64 * percent / 100.0
}

fn print_rows(comparison: &Comparison) {
    let rows = comparison.rows.iter().filter(|row| row.value.extra() != 0).take(MOST_ROWS);
    for row in rows {
        println!("      {:38} {}", name_of(&row.quantity), line(row.value, 1e6, "ms"));
    }
    let beside = comparison
        .beside
        .iter()
        .filter(|row| row.value.interval.is_some_and(|interval| interval.excludes_zero()));
    for row in beside.take(MOST_ROWS) {
        let (size, unit) = match row.quantity {
            Quantity::AllocatedBytes => (1e3, "KB"),
            Quantity::ChildSpans(_) => (1.0, ""),
            _ => (1e6, "ms"),
        };
        println!("    {:40} {}", name_of(&row.quantity), line(row.value, size, unit));
    }
}

/// Before, after, and the difference with its interval.
fn line(value: ComparedValue, size: f64, unit: &str) -> String {
    let shown = |number: i64| format!("{:+.3}", number as f64 / size);
    let interval = value.interval.map_or("(too few for an interval)".to_owned(), |interval| {
        format!("({} to {} {unit})", shown(interval.low), shown(interval.high))
    });
    let (before, after) = (value.typical as f64 / size, value.value as f64 / size);
    format!("{before:10.3} -> {after:10.3} {unit}  {:>10} {interval}", shown(value.extra()))
}

fn name_of(quantity: &Quantity) -> String {
    let function = |of: &SpentIn| match of {
        SpentIn::Function(function) if function.line > 0 => {
            format!("{} ({}:{})", function.name, function.file, function.line)
        }
        SpentIn::Function(function) => function.name.clone(),
        SpentIn::Unknown => "in no known function".to_owned(),
        _ => "in other functions".to_owned(),
    };
    match quantity {
        Quantity::Wall(kind, of) => format!("{kind:?}: {}", function(of)),
        Quantity::OtherThreads(of) => format!("on other threads: {}", function(of)),
        Quantity::AllocatedBytes => "allocated".to_owned(),
        Quantity::ChildSpans(name) => format!("{} spans", name.as_deref().unwrap_or("other")),
        Quantity::ChildTime(name) => {
            format!("time of {} spans", name.as_deref().unwrap_or("other"))
        }
    }
}
