//! How cost and memory grow with the number of threads, the rate of spans, and their length.
//!
//! `cargo bench --bench scale` measures each point in processes of its own, alternating between a bare registry and
//! the layer, and prints figures and a table. `-- --plot FILE.svg` draws them. `-- --long` adds spans of one and of
//! ten minutes, all measured at the same time, so this takes ten minutes.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stderr,
    clippy::print_stdout,
    reason = "a bench, run by hand"
)]

mod load;
mod plot;
#[path = "../common/process.rs"]
mod process;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use load::{Axis, Point};

const THREADS: [u64; 4] = [1, 8, 64, 512];
const RATES: [u64; 4] = [10, 1_000, 100_000, 1_000_000];
const LENGTHS: [Duration; 5] = [
    Duration::from_millis(1),
    Duration::from_millis(10),
    Duration::from_millis(100),
    Duration::from_secs(1),
    Duration::from_secs(10),
];
const LONG_LENGTHS: [Duration; 2] = [Duration::from_secs(60), Duration::from_secs(600)];

/// Rounds per point. Longer points are measured once.
const ROUNDS: usize = 3;
const MEASURED: Duration = Duration::from_secs(2);

/// Results of one process, by name.
type Found = BTreeMap<String, f64>;

/// Medians of the results of the processes of one point.
#[derive(Debug)]
struct Row {
    number: f64,
    label: String,
    bare: Found,
    layer: Found,
}

impl Row {
    fn added(&self, name: &str) -> f64 {
        self.layer[name] - self.bare[name]
    }

    /// How much more CPU time a unit of work takes, in percent.
    fn slowdown(&self) -> f64 {
        let each = |found: &Found| found["cpu_ms"] / found["done"];
        (each(&self.layer) / each(&self.bare) - 1.0) * 100.0
    }

    /// In nanoseconds of CPU time.
    fn added_to_each(&self) -> f64 {
        let each = |found: &Found| found["cpu_ms"] / found["done"] * 1e6;
        each(&self.layer) - each(&self.bare)
    }
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let (mut plot, mut is_long) = (None, false);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--child" => return load::run(&Point::read(&mut arguments)),
            "--plot" => plot = Some(PathBuf::from(arguments.next().expect("a file"))),
            "--long" => is_long = true,
            // Passed by cargo.
            "--bench" => {}
            other => panic!("{other}: not known"),
        }
    }
    let threads: Vec<_> = THREADS.map(|count| measure(Axis::Threads, count)).into();
    print_threads(&threads);
    let rates: Vec<_> = RATES.map(|rate| measure(Axis::Rate, rate)).into();
    print_rates(&rates);
    let mut lengths: Vec<_> =
        LENGTHS.map(|length| measure(Axis::Length, length.as_millis() as u64)).into();
    if is_long {
        lengths.extend(measure_long());
    }
    print_lengths(&lengths);
    if let Some(path) = plot {
        plot::draw(&path, &threads, &rates, &lengths).expect("a plot");
        eprintln!("wrote {}", path.display());
    }
}

/// Measures all long points at once, since each takes so long; only their memory is of interest.
fn measure_long() -> Vec<Row> {
    let start_both = |length: &Duration| {
        let start_one = |has_layer| {
            let number = length.as_millis() as u64;
            start(&Point { axis: Axis::Length, number, has_layer, time: *length })
        };
        (*length, start_one(false), start_one(true))
    };
    let all: Vec<_> = LONG_LENGTHS.iter().map(start_both).collect();
    let finish_both = |(length, bare, layer): (Duration, Child, Child)| Row {
        number: length.as_millis() as f64,
        label: format!("{length:?}"),
        bare: finish(bare),
        layer: finish(layer),
    };
    all.into_iter().map(finish_both).collect()
}

fn measure(axis: Axis, number: u64) -> Row {
    let length = match axis {
        Axis::Length => Duration::from_millis(number),
        _ => Duration::ZERO,
    };
    let time = length.max(MEASURED);
    let rounds = if length > MEASURED { 1 } else { ROUNDS };
    let (mut bare, mut layer) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        bare.push(finish(start(&Point { axis, number, has_layer: false, time })));
        layer.push(finish(start(&Point { axis, number, has_layer: true, time })));
    }
    let label = match axis {
        Axis::Length => format!("{length:?}"),
        _ => number.to_string(),
    };
    Row { number: number as f64, label, bare: medians(&bare), layer: medians(&layer) }
}

fn start(point: &Point) -> Child {
    let this = std::env::current_exe().expect("the path of this program");
    let mut command = Command::new(this);
    command.arg("--child").args(point.to_arguments()).stdout(Stdio::piped());
    command.spawn().expect("a process")
}

fn finish(child: Child) -> Found {
    let output = child.wait_with_output().expect("its output");
    assert!(output.status.success(), "{}", output.status);
    let text = String::from_utf8(output.stdout).expect("numbers");
    let pair = |line: &str| {
        let (name, value) = line.split_once(' ').expect("a name and a number");
        (name.to_owned(), value.parse().expect("a number"))
    };
    text.lines().map(pair).collect()
}

fn medians(all: &[Found]) -> Found {
    let median = |name: &String| {
        let mut values: Vec<f64> = all.iter().map(|found| found[name]).collect();
        values.sort_by(f64::total_cmp);
        (name.clone(), values[values.len() / 2])
    };
    all[0].keys().map(median).collect()
}

fn figure(name: &str, value: f64, unit: &str) {
    let value = shown(value);
    println!("figure scale.{name} {value} {unit}");
}

fn shown(value: f64) -> String {
    let digits = match value.abs() {
        v if v >= 100.0 => 0,
        v if v >= 10.0 => 1,
        _ => 2,
    };
    format!("{value:.digits$}")
}

fn print_threads(rows: &[Row]) {
    for row in rows {
        let name = format!("threads.{}", row.label);
        figure(&format!("{name}.cpu_bare"), row.bare["cpu_ms"], "ms/s");
        figure(&format!("{name}.cpu_added"), row.added("cpu_ms"), "ms/s");
        figure(&format!("{name}.memory_added"), row.added("memory_mib"), "MiB");
        figure(&format!("{name}.files_added"), row.added("files"), "count");
        figure(&format!("{name}.sampled"), row.layer["sampled"], "count");
        figure(&format!("{name}.sampled_by_timer"), row.layer["by_timer"], "count");
    }
    println!(
        "\n| threads | CPU bare, ms/s | added, ms/s | memory added, MiB | a thread, KiB | files |"
    );
    println!("|---|---|---|---|---|---|");
    for row in rows {
        let memory = row.added("memory_mib");
        println!(
            "| {} | {} | {} | {} | {} | {} |",
            row.label,
            shown(row.bare["cpu_ms"]),
            shown(row.added("cpu_ms")),
            shown(memory),
            shown(memory * 1024.0 / row.number),
            row.added("files"),
        );
    }
    println!();
}

fn print_rates(rows: &[Row]) {
    for row in rows {
        let name = format!("rate.{}", row.label);
        figure(&format!("{name}.reached_bare"), row.bare["done"], "spans/s");
        figure(&format!("{name}.reached"), row.layer["done"], "spans/s");
        figure(&format!("{name}.cpu_bare"), row.bare["cpu_ms"], "ms/s");
        figure(&format!("{name}.cpu_added"), row.added("cpu_ms"), "ms/s");
        figure(&format!("{name}.added_to_each"), row.added_to_each(), "ns");
        figure(&format!("{name}.memory_added"), row.added("memory_mib"), "MiB");
    }
    println!(
        "\n| spans per second | reached | CPU bare, ms/s | added, ms/s | per span, ns | memory added, MiB |"
    );
    println!("|---|---|---|---|---|---|");
    for row in rows {
        println!(
            "| {} | {:.0} | {} | {} | {} | {} |",
            row.label,
            row.layer["done"],
            shown(row.bare["cpu_ms"]),
            shown(row.added("cpu_ms")),
            shown(row.added_to_each()),
            shown(row.added("memory_mib")),
        );
    }
    println!();
}

fn print_lengths(rows: &[Row]) {
    for row in rows {
        let name = format!("length.{}", row.label);
        figure(&format!("{name}.slowdown"), row.slowdown(), "%");
        figure(&format!("{name}.memory_added"), row.added("memory_mib"), "MiB");
        figure(&format!("{name}.samples"), row.layer["samples"], "count");
        figure(&format!("{name}.samples_in_profile"), row.layer["samples_kept"], "count");
        figure(&format!("{name}.samples_represent"), row.layer["weight_percent"], "%");
        figure(&format!("{name}.waits_in_profile"), row.layer["waits_kept"], "count");
    }
    println!(
        "\n| length of a span | slower by, % | memory added, MiB | samples | in its profile | their weight |"
    );
    println!("|---|---|---|---|---|---|");
    for row in rows {
        println!(
            "| {} | {} | {} | {} | {} | {} % |",
            row.label,
            shown(row.slowdown()),
            shown(row.added("memory_mib")),
            row.layer["samples"],
            row.layer["samples_kept"],
            shown(row.layer["weight_percent"]),
        );
    }
    println!();
}
