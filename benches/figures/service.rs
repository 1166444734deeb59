//! The cost of the layer in a service under load: CPU time per request, with its confidence interval, and the
//! latencies of its clients.

pub(crate) mod server;

use std::io::{BufRead, BufReader, Lines, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use crate::measure::{figure, median};
use server::{AWAITS, Measured, ORDERS, Phases};

/// A load on the service.
struct Load {
    /// The prefix of its figures.
    name: &'static str,
    path: &'static str,
    clients: u32,
    seconds: u32,
    phases: Phases,
    /// The settings, and the most that each may add to the CPU time of a request, in percent.
    kinds: &'static [(&'static str, f64)],
    /// How long the load may take if it is asked for by name; it ends sooner once the interval is narrow enough.
    most: Duration,
}

/// So short that other activity of the machine is the same in the four phases that are compared.
const SHORT: Phases = Phases { ms: 50, pause_ms: 5, connection_s: 0 };

/// For requests that take long, and in which threads may be sampled.
const fn long(pause_ms: u64) -> Phases {
    Phases { ms: 500, pause_ms, connection_s: 0 }
}

const fn with_connections(connection_s: u64) -> Phases {
    Phases { ms: 200, pause_ms: 20, connection_s }
}

const ORDERS_AT_ONCE: Load = Load {
    name: "service",
    path: "/orders/",
    clients: 4,
    seconds: 5,
    phases: SHORT,
    kinds: &[
        ("defaults", 1.0),
        ("timer", 1.0),
        // Only in the long run: times alone, and the cost of sampling from the first enter.
        ("none", 1.0),
        ("early", 100.0),
        ("early_timer", 100.0),
    ],
    most: Duration::from_secs(900),
};
const BOTH: &[(&str, f64)] = &[("defaults", 1.0), ("timer", 1.0)];
const OTHERS: [Load; 12] = [
    wrapped(Load { name: "service.wrapped", ..ORDERS_AT_ONCE }),
    wrapped(awaiting("service.wrapped.awaiting_20ms", "/awaits/20/", 100, 60)),
    Load {
        name: "service.all_kept",
        phases: long(100),
        ..few(&[("all_kept", 15.0), ("all_reported", 100.0)])
    },
    awaiting("service.awaiting_20ms", "/awaits/20/", 100, 60),
    awaiting("service.awaiting_50ms", "/awaits/50/", 250, 150),
    awaiting("service.awaiting_200ms", "/awaits/200/", 800, 400),
    Load {
        name: "service.saturated",
        path: "/lists/",
        clients: 256,
        seconds: 20,
        phases: long(1_000),
        ..few(&[("defaults", 2.0), ("timer", 2.0)])
    },
    Load {
        name: "service.one_sleeps",
        path: "/one_sleeps/",
        seconds: 10,
        phases: long(500),
        ..few(BOTH)
    },
    Load {
        name: "service.one_works",
        path: "/one_works/",
        seconds: 20,
        phases: Phases { ms: 2_000, ..long(500) },
        ..few(&[("defaults", 4.0), ("timer", 4.0)])
    },
    Load { name: "service.connections_1s", phases: with_connections(1), ..few(BOTH) },
    Load { name: "service.connections_5s", phases: with_connections(5), seconds: 12, ..few(BOTH) },
    Load {
        name: "service.connections_60s",
        phases: with_connections(60),
        seconds: 61,
        ..few(BOTH)
    },
];

const fn wrapped(load: Load) -> Load {
    Load { kinds: &[(AWAITS, 0.5)], most: Duration::from_secs(100), ..load }
}

const fn awaiting(name: &'static str, path: &'static str, clients: u32, pause_ms: u64) -> Load {
    let phases = Phases { ms: 2 * pause_ms, ..long(pause_ms) };
    Load { name, path, clients, phases, seconds: 10, ..few(BOTH) }
}

const fn few(kinds: &'static [(&'static str, f64)]) -> Load {
    Load { kinds, most: Duration::from_secs(300), ..ORDERS_AT_ONCE }
}

/// In the run of all figures: the number of kinds of the first load, and its duration.
const AMONG_ALL: (usize, Duration) = (3, Duration::from_secs(40));
/// Half of the confidence interval, in percent.
const NARROW: f64 = 0.5;
const LEAST_TURNS: usize = 12;
/// The counters to print.
const OF_INTEREST: [&str; 8] = [
    "spans.seen",
    "spans.kept",
    "spans.kept_without_samples",
    "spans.kept_exporter_busy",
    "spans.kept_over_rate_limit",
    "profiles.exported",
    "samples.taken",
    "sampling.rate_reduced",
];
/// Requests before the first round of a process.
const WARM_UP: u32 = 1_000;
const REQUESTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/figures/service/requests.lua");

pub(crate) fn run() {
    if Command::new("wrk").arg("-v").output().is_err() {
        println!("no figures of a service: `wrk` is not installed (apt-get install wrk)");
        return;
    }
    let asked: Vec<_> =
        std::env::args().filter(|argument| argument.starts_with("service")).collect();
    // `service` alone means the first load; a name with a dot means all loads whose names begin with it.
    let is_asked = |load: &&Load| {
        let is_it = |asked: &String| {
            load.name == asked || asked.contains('.') && load.name.starts_with(asked.as_str())
        };
        asked.iter().any(is_it)
    };
    let Load { kinds, most, .. } = ORDERS_AT_ONCE;
    match asked.is_empty() {
        true => measure(&ORDERS_AT_ONCE, &kinds[..AMONG_ALL.0], AMONG_ALL.1),
        false => {
            if is_asked(&&ORDERS_AT_ONCE) {
                measure(&ORDERS_AT_ONCE, kinds, most);
            }
            OTHERS.iter().filter(is_asked).for_each(|load| measure(load, load.kinds, load.most));
        }
    }
}

fn measure(load: &Load, kinds: &[(&'static str, f64)], most: Duration) {
    let start = Instant::now();
    let mut of_kinds: Vec<OfKind> = kinds.iter().map(|_| OfKind::default()).collect();
    for turn in 0_usize.. {
        let is_narrow = |of_kind: &OfKind| half_interval(&of_kind.log_ratios) <= NARROW;
        // The remaining kinds are printed with the interval that they have by then.
        let is_enough = turn >= LEAST_TURNS && of_kinds.iter().take(2).all(is_narrow);
        if turn > 0 && start.elapsed() > most || is_enough {
            break;
        }
        for number in in_turn(turn, kinds.len()) {
            of_kinds[number].add(load, kinds[number].0);
        }
    }
    for ((kind, goal), of_kind) in kinds.iter().zip(&of_kinds) {
        let name = match *kind {
            "defaults" => format!("{}.cpu_per_request_added", load.name),
            // Of the same load.
            AWAITS => format!("{}.await_added", load.name.replacen(".wrapped", "", 1)),
            "all_kept" => "service.cpu_per_request_added_all_kept".to_owned(),
            kind => format!("{}.{kind}.cpu_per_request_added", load.name),
        };
        added(&name, *goal, &of_kind.log_ratios);
    }
    figure(&format!("{}.turns", load.name), of_kinds[0].log_ratios.len() as f64, "count");
    for ((kind, _), of_kind) in kinds.iter().zip(&of_kinds) {
        of_kind.print(&format!("{}.{kind}", load.name));
    }
}

/// The results of one kind.
#[derive(Default)]
struct OfKind {
    /// The logarithms of the ratio of CPU time per request, with the layer to without, one per process.
    log_ratios: Vec<f64>,
    /// The measurements of each process, and the median and 99th percentile of latency in microseconds.
    measured: Vec<(Measured, [f64; 2])>,
}

impl OfKind {
    /// Runs one process, since memory layout makes two processes of one kind differ.
    fn add(&mut self, load: &Load, kind: &str) {
        let mut server = Server::start(kind, load.phases);
        server.warm_up(load);
        let (measured, latencies) = server.measure(load);
        let log_ratio =
            |[without, with]: &[(u64, u64); 2]| (per_request(*with) / per_request(*without)).ln();
        let log_ratios: Vec<f64> = measured.quads.iter().map(log_ratio).collect();
        self.log_ratios.push(median(&log_ratios));
        self.measured.push((measured, latencies));
    }

    fn print(&self, name: &str) {
        let quads = || self.measured.iter().flat_map(|(measured, _)| &measured.quads);
        for (what, kind) in [("without", 0), ("with", 1)] {
            let us: Vec<f64> = quads().map(|quad| per_request(quad[kind]) / 1e3).collect();
            figure(&format!("{name}.{what}.cpu_per_request"), median(&us), "us");
        }
        for (what, number) in [("p50", 0), ("p99", 1)] {
            let of_all: Vec<f64> = self.measured.iter().map(|(_, us)| us[number]).collect();
            figure(&format!("{name}.{what}"), median(&of_all), "us");
        }
        let in_all = |field: &str| -> u64 {
            self.measured.iter().map(|(measured, _)| measured.stats[field]).sum()
        };
        for field in OF_INTEREST {
            figure(&format!("{name}.{field}"), in_all(field) as f64, "count");
        }
        let sampled =
            in_all("spans.kept_sampled_ns") as f64 / in_all("spans.kept_on_cpu_ns").max(1) as f64;
        figure(&format!("{name}.covered"), sampled * 100.0, "%");
        // Over the whole time, including the pauses that the figures above leave out.
        let own_ms_a_second = |(measured, _): &(Measured, _)| {
            measured.own_cpu_ns as f64 / measured.took_ns as f64 * 1e3
        };
        let own: Vec<f64> = self.measured.iter().map(own_ms_a_second).collect();
        figure(&format!("{name}.own_threads"), median(&own), "ms/s");
        let resident = |(measured, _): &(Measured, _)| measured.resident_kib / 1024.0;
        let resident: Vec<f64> = self.measured.iter().map(resident).collect();
        figure(&format!("{name}.memory"), median(&resident), "MiB");
    }
}

/// CPU time per request in nanoseconds.
fn per_request((cpu_ns, requests): (u64, u64)) -> f64 {
    cpu_ns as f64 / requests.max(1) as f64
}

/// The order of the kinds in a turn: each is first and last as often as the others, in both directions.
fn in_turn(turn: usize, kinds: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..kinds).collect();
    order.rotate_left(turn / 2 % kinds);
    if turn % 2 == 1 {
        order.reverse();
    }
    order
}

/// Half of the confidence interval, in percent.
fn half_interval(log_ratios: &[f64]) -> f64 {
    let [low, _, high] = estimate(log_ratios).map(|log_ratio| log_ratio.exp_m1() * 100.0);
    (high - low) / 2.0
}

/// Prints the added cost, or that it is not known precisely enough to compare it with its goal.
fn added(name: &str, goal: f64, log_ratios: &[f64]) {
    let percent = |log_ratio: f64| log_ratio.exp_m1() * 100.0;
    let [low, middle, high] = estimate(log_ratios).map(percent);
    // With fewer values the interval is too narrow.
    if log_ratios.len() < 6 || (high - low) / 2.0 > goal {
        println!("figure {name} unresolved %");
    } else {
        figure(name, middle, "%");
    }
    figure(&format!("{name}.ci_low"), low, "%");
    figure(&format!("{name}.ci_high"), high, "%");
}

/// The location of the values and its 95 % confidence interval, by the Hodges-Lehmann estimator with the ranks of
/// Wilcoxon's test. It is robust against a few rounds disturbed by other load.
fn estimate(values: &[f64]) -> [f64; 3] {
    let mut means: Vec<f64> = Vec::new();
    for (number, first) in values.iter().enumerate() {
        means.extend(values[number..].iter().map(|second| (first + second) / 2.0));
    }
    means.sort_by(f64::total_cmp);
    let n = values.len() as f64;
    let outside = n * (n + 1.0) / 4.0 - 1.96 * (n * (n + 1.0) * (2.0 * n + 1.0) / 24.0).sqrt();
    // The number of means below the interval.
    let outside = (outside.floor() as usize).saturating_sub(1);
    [means[outside], median(&means), means[means.len() - 1 - outside]]
}

/// A running server, which is idle unless it has requests.
struct Server {
    process: Child,
    questions: Option<ChildStdin>,
    answers: Lines<BufReader<ChildStdout>>,
    address: String,
}

impl Server {
    fn start(kind: &str, phases: Phases) -> Self {
        let this = std::env::current_exe().expect("the path of this program");
        let mut command = Command::new(this);
        let phases = serde_json::to_string(&phases).expect("JSON");
        command.args(["--child", "service", kind, &phases]);
        // Otherwise it would be chance whether memory is returned after a request and requested again by the next.
        command.env("MALLOC_TRIM_THRESHOLD_", (256 << 20).to_string());
        let mut process =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("a process");
        let questions = process.stdin.take();
        let mut answers = BufReader::new(process.stdout.take().expect("a pipe")).lines();
        let port = answers.next().expect("a port").expect("a pipe");
        Self { process, questions, answers, address: format!("127.0.0.1:{port}") }
    }

    fn send(&self, what: &str) {
        let mut questions = self.questions.as_ref().expect("it is running");
        writeln!(questions, "{what}").expect("a pipe");
    }

    /// Sends requests until files are read, threads are started and symbols are loaded.
    fn warm_up(&self, load: &Load) {
        for kind in ["without", "with"] {
            self.send(kind);
            let mut stream = TcpStream::connect(&self.address).expect("it listens");
            let mut answers = BufReader::new(stream.try_clone().expect("a file"));
            for number in 0..WARM_UP {
                let order = number % ORDERS;
                let request = format!("GET /orders/{order} HTTP/1.1\r\nhost: shop\r\n\r\n");
                stream.write_all(request.as_bytes()).expect("it reads");
                read_answer(&mut answers);
            }
        }
        // Includes one-time costs of this load, such as the first profiles.
        if load.path != ORDERS_AT_ONCE.path {
            self.load(load, 1);
        }
    }

    /// Runs the load; returns the median and 99th percentile of latency in microseconds.
    fn load(&self, load: &Load, seconds: u32) -> [f64; 2] {
        let clients = format!("-c{}", load.clients);
        let seconds = format!("-d{seconds}s");
        let url = format!("http://{}{}", self.address, load.path);
        let wrk = Command::new("wrk")
            // With many concurrent requests, one takes seconds.
            .args(["-t1", &clients, &seconds, "--timeout", "20s", "-s", REQUESTS, &url])
            .output()
            .expect("wrk");
        let text = String::from_utf8(wrk.stdout).expect("UTF-8");
        let numbers = text.lines().find_map(|line| line.strip_prefix("round "));
        let numbers = numbers.unwrap_or_else(|| panic!("{text}")).split(' ');
        let numbers: Vec<f64> = numbers.map(|number| number.parse().expect("a number")).collect();
        let [requests, _, failed, p50_us, p99_us] = numbers[..] else { panic!("{text}") };
        assert!(failed == 0.0 && requests > 0.0, "all requests are answered: {text}");
        [p50_us, p99_us]
    }

    fn measure(&mut self, load: &Load) -> (Measured, [f64; 2]) {
        self.send("begin");
        let latencies = self.load(load, load.seconds);
        self.send("end");
        let answer = self.answers.next().expect("an answer").expect("a pipe");
        (serde_json::from_str(&answer).expect("JSON"), latencies)
    }
}

fn read_answer(answers: &mut BufReader<TcpStream>) {
    let (mut line, mut length) = (String::new(), 0);
    while line != "\r\n" {
        line.clear();
        let count = answers.read_line(&mut line).expect("an answer");
        assert!(count > 0, "an answer");
        if let Some(number) = line.strip_prefix("content-length: ") {
            length = number.trim().parse().expect("a number");
        }
    }
    answers.read_exact(&mut vec![0; length]).expect("the whole body");
}

impl Drop for Server {
    fn drop(&mut self) {
        // The server exits at the end of its input.
        self.questions = None;
        _ = self.process.wait();
    }
}
