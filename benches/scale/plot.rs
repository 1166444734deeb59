//! Draws the plot.

use std::error::Error;
use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;

use crate::Row;

type Panel<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// One line of a panel.
struct Line {
    name: &'static str,
    color: RGBColor,
    points: Vec<(f64, f64)>,
}

const BLUE: RGBColor = RGBColor(33, 102, 172);
const RED: RGBColor = RGBColor(178, 24, 43);

pub(crate) fn draw(
    path: &Path,
    threads: &[Row],
    rates: &[Row],
    lengths: &[Row],
) -> Result<(), Box<dyn Error>> {
    let root = SVGBackend::new(path, (1000, 700)).into_drawing_area();
    root.fill(&WHITE)?;
    let [cpu_threads, memory_threads, cpu_rates, memory_lengths] =
        <[Panel<'_>; 4]>::try_from(root.split_evenly((2, 2))).map_err(|_| "four panels")?;
    let of = |rows: &[Row], value: &dyn Fn(&Row) -> f64| {
        rows.iter().map(|row| (row.number, value(row))).collect::<Vec<_>>()
    };
    let cpu = |rows: &[Row]| {
        vec![
            Line { name: "bare", color: BLUE, points: of(rows, &|row| row.bare["cpu_ms"]) },
            Line {
                name: "with the layer",
                color: RED,
                points: of(rows, &|row| row.layer["cpu_ms"]),
            },
        ]
    };
    let memory = |rows: &[Row]| {
        vec![
            Line { name: "bare", color: BLUE, points: of(rows, &|row| row.bare["memory_mib"]) },
            Line {
                name: "with the layer",
                color: RED,
                points: of(rows, &|row| row.layer["memory_mib"]),
            },
        ]
    };
    let count = |value: &f64| with_thousands(*value);
    panel(
        &cpu_threads,
        "CPU time, 500 spans per second in total",
        ("threads", "ms per second"),
        cpu(threads),
        &count,
    )?;
    panel(&memory_threads, "Resident memory", ("threads", "MiB"), memory(threads), &count)?;
    let title = "CPU time, empty spans on two threads";
    panel(&cpu_rates, title, ("spans per second", "ms per second"), cpu(rates), &count)?;
    let title = "Resident memory, a span of that length, sampled all the time";
    panel(&memory_lengths, title, ("length", "MiB"), memory(lengths), &|ms| length(*ms))?;
    root.present()?;
    Ok(())
}

fn panel(
    area: &Panel<'_>,
    title: &str,
    (x_name, y_name): (&str, &str),
    lines: Vec<Line>,
    x_label: &dyn Fn(&f64) -> String,
) -> Result<(), Box<dyn Error>> {
    let all = || lines.iter().flat_map(|line| &line.points);
    let least = |values: &mut dyn Iterator<Item = f64>| values.fold(f64::MAX, f64::min);
    let most = |values: &mut dyn Iterator<Item = f64>| values.fold(f64::MIN, f64::max);
    let (first, last) = (least(&mut all().map(|at| at.0)), most(&mut all().map(|at| at.0)));
    // A logarithmic scale, to show growth. Values of zero or below cannot be drawn on it.
    let low = least(&mut all().map(|at| at.1)).max(0.1);
    let high = most(&mut all().map(|at| at.1)).max(1.0);
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 16))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(56)
        .build_cartesian_2d(
            (first..last).log_scale().with_key_points(all().map(|at| at.0).collect()),
            (low / 1.5..high * 2.0).log_scale(),
        )?;
    chart
        .configure_mesh()
        .x_desc(x_name)
        .y_desc(y_name)
        .x_label_formatter(x_label)
        .y_label_formatter(&|value| with_thousands(*value))
        .light_line_style(TRANSPARENT)
        .bold_line_style(BLACK.mix(0.12))
        .draw()?;
    for line in lines {
        let points: Vec<_> = line.points.iter().map(|(x, y)| (*x, y.max(low))).collect();
        let color = line.color;
        chart
            .draw_series(LineSeries::new(points.iter().copied(), color.stroke_width(2)))?
            .label(line.name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], color.stroke_width(2)));
        chart.draw_series(points.iter().map(|at| Circle::new(*at, 3, color.filled())))?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .border_style(TRANSPARENT)
        .draw()?;
    Ok(())
}

fn with_thousands(value: f64) -> String {
    match value {
        v if v >= 1e6 => format!("{}M", v / 1e6),
        v if v >= 1e3 => format!("{}k", v / 1e3),
        v => v.to_string(),
    }
}

fn length(ms: f64) -> String {
    match ms {
        ms if ms >= 60_000.0 => format!("{} min", ms / 60_000.0),
        ms if ms >= 1_000.0 => format!("{} s", ms / 1_000.0),
        ms => format!("{ms} ms"),
    }
}
