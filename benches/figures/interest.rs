//! The cost of what no layer wants: the callsites of other crates, below the level that is printed.
//!
//! The programs are those of `benches/hosts`, each in a process with the layer and in one without.

use std::process::Command;
use std::time::Duration;

use crate::hosts::{Host, SHORT, half_interval, log_ratio, print_added, rounds};
use crate::measure::{added, figure, median};
use crate::service::REQUESTS;

const PACKAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/hosts");
const TARGET: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/hosts");

pub(crate) fn run() {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(["build", "--release", "--locked", "--quiet", "--target-dir", TARGET]);
    let built = command.current_dir(PACKAGE).status().expect("cargo");
    assert!(built.success(), "benches/hosts is built");
    callsites();
    program("grpc", "interest.grpc_call", None, [3.0, 0.5]);
    match Command::new("wrk").arg("-v").output() {
        Ok(_) => program("sqlx", "interest.sqlx_request", Some("/orders/"), [2.0, 0.5]),
        Err(_) => println!("no interest.sqlx_request: `wrk` is not installed"),
    }
}

/// Whether there is a layer, and the rules.
const WITHOUT: (&str, Option<&str>) = ("without", None);
const WITH: (&str, Option<&str>) = ("with", None);
const OFF: (&str, Option<&str>) = ("with", Some("off"));

fn start(program: &str, (layer, rules): (&str, Option<&str>)) -> Host {
    let mut command = Command::new(format!("{TARGET}/release/hosts"));
    command.args([program, layer]);
    if let Some(rules) = rules {
        command.env("TRACING_PROFILING", rules);
    }
    Host::start(&mut command)
}

fn callsites() {
    const ROUNDS: usize = 21;
    let mut hosts = [WITHOUT, WITH, OFF].map(|layer| start("callsites", layer));
    let mut times: Vec<[Vec<f64>; 3]> = Vec::new();
    for _ in 0..=ROUNDS {
        times.push(hosts.each_mut().map(|host| host.ask_numbers("measure")));
    }
    for (number, name) in ["trace_event", "debug_span", "log_trace"].iter().enumerate() {
        // The first round warms up.
        let of = |host: usize| times[1..].iter().map(|round| round[host][number]).collect();
        let [without, with, off]: [Vec<f64>; 3] = [of(0), of(1), of(2)];
        figure(&format!("interest.{name}"), added(&without, &with), "ns");
        figure(&format!("interest.off.{name}"), added(&without, &off), "ns");
        figure(&format!("interest.{name}.without"), median(&without), "ns");
    }
}

/// Compares until both intervals are narrower than this, in percent, if the figures are asked for by name.
const NARROW: f64 = 0.3;
const LEAST_TURNS: usize = 6;
const WARM_UP: Duration = Duration::from_millis(1_500);
const A_PAUSE: Duration = Duration::from_millis(300);
const MOST_TURNS: usize = 40;

fn program(program: &str, name: &str, path: Option<&str>, goals: [f64; 2]) {
    let is_asked = std::env::args().any(|argument| argument.starts_with("interest"));
    let (mut of_with, mut of_off, mut us) = (Vec::new(), Vec::new(), [const { Vec::new() }; 3]);
    for turn in 0..MOST_TURNS {
        let are_narrow = || [&of_with, &of_off].iter().all(|of| half_interval(of) <= NARROW);
        // In the run of all figures there is no time for more.
        let is_enough = turn >= LEAST_TURNS && (!is_asked || are_narrow());
        if is_enough {
            break;
        }
        let mut hosts = [WITHOUT, WITH, OFF].map(|layer| start(program, layer));
        for host in &mut hosts {
            if let Some(path) = path {
                host.start_client(4, REQUESTS, path);
            }
            host.run(true);
        }
        // Until the symbols of the first reference spans are read, once in the life of a process.
        std::thread::sleep(WARM_UP);
        hosts.iter().for_each(|host| host.run(false));
        std::thread::sleep(A_PAUSE);
        let rounds = rounds(&mut hosts, SHORT, 4);
        of_with.push(log_ratio(&rounds, 1, 0));
        of_off.push(log_ratio(&rounds, 2, 0));
        for (number, us) in us.iter_mut().enumerate() {
            us.extend(rounds.iter().map(|round| round[number] / 1e3));
        }
        hosts.iter_mut().for_each(Host::end_client);
    }
    print_added(&format!("{name}_added"), goals[0], &of_with);
    print_added(&format!("{name}_added_off"), goals[1], &of_off);
    for (us, layer) in us.iter().zip(["without", "with", "off"]) {
        figure(&format!("{name}.{layer}"), median(us), "us");
    }
}
