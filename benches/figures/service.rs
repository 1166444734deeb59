//! What the layer costs a service under load: CPU time of a request, with its confidence interval, and what
//! its clients see.

pub(crate) mod server;

use std::io::{BufRead, BufReader, Lines, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use crate::measure::{figure, median};
use server::{ORDERS, Standing};

/// Under which name each is a child of this bench, and its figures are; what it adds to a request's CPU time over the
/// first one, and how much that may be, in percent.
type Variant = (&'static str, &'static str, f64);
const VARIANTS: [Variant; 7] = [
    ("bare", "", 0.0),
    ("defaults", "service.cpu_per_request_added", 1.0),
    ("timer", "service.timer.cpu_per_request_added", 1.0),
    ("all_kept", "service.cpu_per_request_added_all_kept", 15.0),
    // Only where there is time for them: times alone, and what sampling from the first enter costs.
    ("none", "service.none.cpu_per_request_added", 1.0),
    ("early", "service.early.cpu_per_request_added", 100.0),
    ("early_timer", "service.early_timer.cpu_per_request_added", 100.0),
];
const AMONG_ALL_VARIANTS: usize = 4;
/// How long all of it may take among all figures.
const AMONG_ALL: Duration = Duration::from_secs(40);
/// Alone it goes on until one percent can be told from none, or for so long.
const ALONE: Duration = Duration::from_secs(900);
const NARROW: f64 = 0.5;
const LEAST_ROUNDS: usize = 12;
/// What becomes of kept spans.
const OF_INTEREST: [&str; 7] = [
    "spans_seen",
    "spans_kept",
    "spans_kept_without_samples",
    "spans_kept_exporter_busy",
    "profiles_exported",
    "samples_taken",
    "rate_lowered",
];
/// Before the first round of a process.
const WARM_UP: u32 = 1_000;
const REQUESTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/figures/service/requests.lua");

pub(crate) fn run() {
    if Command::new("wrk").arg("-v").output().is_err() {
        println!("no figures of a service: there is no `wrk` (apt-get install wrk)");
        return;
    }
    let start = Instant::now();
    let is_alone = std::env::args().any(|argument| argument == "service");
    let (variants, time) = match is_alone {
        true => (&VARIANTS[..], ALONE),
        false => (&VARIANTS[..AMONG_ALL_VARIANTS], AMONG_ALL),
    };
    let mut rounds: Vec<Vec<Round>> = variants.iter().map(|_| Vec::new()).collect();
    let mut standings: Vec<Vec<Standing>> = variants.iter().map(|_| Vec::new()).collect();
    for turn in 0_usize.. {
        let is_narrow = || (1..3).all(|number| half_interval(&ratios(&rounds, number)) <= NARROW);
        if start.elapsed() > time || turn >= LEAST_ROUNDS && is_alone && is_narrow() {
            break;
        }
        // Each time in processes of their own: how memory lies makes two of one kind differ by percents.
        let mut servers: Vec<Server> =
            variants.iter().map(|(name, ..)| Server::start(name)).collect();
        servers.iter_mut().for_each(Server::warm_up);
        for number in in_turn(turn, variants.len()) {
            let (round, standing) = servers[number].round();
            rounds[number].push(round);
            standings[number].push(standing);
        }
    }
    for (number, (_, name, goal)) in variants.iter().enumerate().skip(1) {
        added(name, *goal, &ratios(&rounds, number));
    }
    figure("service.rounds", rounds[0].len() as f64, "count");
    for (((name, ..), rounds), standings) in variants.iter().zip(&rounds).zip(&standings) {
        let of = |value: fn(&Round) -> f64| median(&rounds.iter().map(value).collect::<Vec<_>>());
        figure(&format!("service.{name}.cpu_per_request"), of(|round| round.cpu_us), "us");
        figure(&format!("service.{name}.requests"), of(|round| round.a_second), "1/s");
        figure(&format!("service.{name}.p50"), of(|round| round.p50_us), "us");
        figure(&format!("service.{name}.p99"), of(|round| round.p99_us), "us");
        figure(&format!("service.{name}.memory"), of(|round| round.resident_mib), "MiB");
        account(name, standings);
    }
}

/// The logarithms of how much dearer a request of that variant is than one of the first, round by round.
fn ratios(rounds: &[Vec<Round>], number: usize) -> Vec<f64> {
    let ratio = |(bare, with): (&Round, &Round)| (with.cpu_us / bare.cpu_us).ln();
    rounds[0].iter().zip(&rounds[number]).map(ratio).collect()
}

/// Each is first and last as often as the others, and forwards as often as backwards.
fn in_turn(turn: usize, variants: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..variants).collect();
    order.rotate_left(turn / 2 % variants);
    if turn % 2 == 1 {
        order.reverse();
    }
    order
}

/// What became of the spans of all requests.
fn account(name: &str, standings: &[Standing]) {
    let sum = |field: &str| -> Option<u64> {
        standings.iter().map(|standing| standing.stats.get(field).copied()).sum()
    };
    let Some(reading_ns) = sum("draining_cpu_ns") else { return };
    let requests: u64 = standings.iter().map(|standing| standing.requests).sum();
    figure(&format!("service.{name}.requests_in_all"), requests as f64, "count");
    for field in OF_INTEREST {
        let count = sum(field).expect("a field");
        figure(&format!("service.{name}.{field}"), count as f64, "count");
    }
    let cpu_ns: u64 = standings.iter().map(|standing| standing.cpu_ns).sum();
    let share = reading_ns as f64 / cpu_ns as f64 * 100.0;
    figure(&format!("service.{name}.reading_samples"), share, "%");
}

/// Half of the interval, in percent.
fn half_interval(log_ratios: &[f64]) -> f64 {
    let [low, _, high] = estimate(log_ratios).map(|log_ratio| log_ratio.exp_m1() * 100.0);
    (high - low) / 2.0
}

/// Prints what is added, or that it is not known well enough to be held against its goal.
fn added(name: &str, goal: f64, log_ratios: &[f64]) {
    let percent = |log_ratio: f64| log_ratio.exp_m1() * 100.0;
    let [low, middle, high] = estimate(log_ratios).map(percent);
    // The interval of fewer is narrower than it says.
    if log_ratios.len() < 6 || (high - low) / 2.0 > goal {
        println!("figure {name} unresolved %");
    } else {
        figure(name, middle, "%");
    }
    figure(&format!("{name}.ci_low"), low, "%");
    figure(&format!("{name}.ci_high"), high, "%");
}

/// Where the middle of what these were taken from is, and the interval that has it 95 times of 100. By Hodges
/// and Lehmann, with the ranks of Wilcoxon's test: a few rounds beside other work do not move it.
fn estimate(values: &[f64]) -> [f64; 3] {
    let mut means: Vec<f64> = Vec::new();
    for (number, first) in values.iter().enumerate() {
        means.extend(values[number..].iter().map(|second| (first + second) / 2.0));
    }
    means.sort_by(f64::total_cmp);
    let n = values.len() as f64;
    let outside = n * (n + 1.0) / 4.0 - 1.96 * (n * (n + 1.0) * (2.0 * n + 1.0) / 24.0).sqrt();
    // So many are below the interval.
    let outside = (outside.floor() as usize).saturating_sub(1);
    [means[outside], median(&means), means[means.len() - 1 - outside]]
}

/// One that is running, and does nothing unless it has requests.
struct Server {
    process: Child,
    questions: Option<ChildStdin>,
    answers: Lines<BufReader<ChildStdout>>,
    address: String,
}

/// A second under load.
struct Round {
    /// Of the whole process, for each request.
    cpu_us: f64,
    a_second: f64,
    p50_us: f64,
    p99_us: f64,
    resident_mib: f64,
}

impl Server {
    fn start(name: &str) -> Self {
        let this = std::env::current_exe().expect("the path of this program");
        let mut command = Command::new(this);
        command.args(["--child", &format!("service_{name}")]);
        // Whether memory is given back after a request, and taken again by the next, is otherwise chance.
        command.env("MALLOC_TRIM_THRESHOLD_", (256 << 20).to_string());
        let mut process =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("a process");
        let questions = process.stdin.take();
        let mut answers = BufReader::new(process.stdout.take().expect("a pipe")).lines();
        let port = answers.next().expect("a port").expect("a pipe");
        Self { process, questions, answers, address: format!("127.0.0.1:{port}") }
    }

    /// When it has done all that there was to do.
    fn standing(&mut self) -> Standing {
        let mut questions = self.questions.as_ref().expect("it is running");
        questions.write_all(b"\n").expect("a pipe");
        let answer = self.answers.next().expect("an answer").expect("a pipe");
        serde_json::from_str(&answer).expect("JSON")
    }

    /// Until files are read, threads are armed and symbols are there.
    fn warm_up(&mut self) {
        let mut stream = TcpStream::connect(&self.address).expect("it listens");
        let mut answers = BufReader::new(stream.try_clone().expect("a file"));
        for number in 0..WARM_UP {
            let order = number % ORDERS;
            let request = format!("GET /orders/{order} HTTP/1.1\r\nhost: shop\r\n\r\n");
            stream.write_all(request.as_bytes()).expect("it reads");
            read_answer(&mut answers);
        }
    }

    /// Also returns where it stands at the end.
    fn round(&mut self) -> (Round, Standing) {
        let before = self.standing();
        let wrk = Command::new("wrk")
            .args(["-t1", "-c4", "-d1s", "-s", REQUESTS, &format!("http://{}", self.address)])
            .output()
            .expect("wrk");
        let after = self.standing();
        let text = String::from_utf8(wrk.stdout).expect("UTF-8");
        let numbers = text.lines().find_map(|line| line.strip_prefix("round "));
        let numbers = numbers.unwrap_or_else(|| panic!("{text}")).split(' ');
        let numbers: Vec<f64> = numbers.map(|number| number.parse().expect("a number")).collect();
        let [requests, duration_us, failed, p50_us, p99_us] = numbers[..] else { panic!("{text}") };
        assert!(failed == 0.0 && requests > 0.0, "all requests are answered: {text}");
        let round = Round {
            cpu_us: (after.cpu_ns - before.cpu_ns) as f64
                / (after.requests - before.requests) as f64
                / 1e3,
            a_second: requests / duration_us * 1e6,
            p50_us,
            p99_us,
            resident_mib: after.resident_kib / 1024.0,
        };
        (round, after)
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
    answers.read_exact(&mut vec![0; length]).expect("all of it");
}

impl Drop for Server {
    fn drop(&mut self) {
        // Nobody asks any more: it ends.
        self.questions = None;
        _ = self.process.wait();
    }
}
