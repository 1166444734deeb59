//! Programs in processes of their own, some with the layer and some without, whose CPU time per request is compared.
//!
//! A process without the layer is the only honest baseline: all layers of a process share the cache of what is wanted of
//! each callsite, so that any layer beside ours, however little it does, has what ours wants.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::io::{BufRead, BufReader, Lines};
use std::io::{Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::measure::{figure, median};

/// A process, and the client that sends requests to it, unless it makes them by itself.
pub(crate) struct Host {
    process: Child,
    questions: Option<ChildStdin>,
    answers: Lines<BufReader<ChildStdout>>,
    port: u16,
    client: Option<Child>,
}

/// How long each process is measured at a time, and how long it runs before that: until requests of the process before are
/// answered, and its own are in full flow.
#[derive(Clone, Copy)]
pub(crate) struct Phases {
    pub(crate) ms: u64,
    pub(crate) pause_ms: u64,
}

/// So short that other activity of the machine is the same for all processes of a round.
pub(crate) const SHORT: Phases = Phases { ms: 50, pause_ms: 5 };

impl Host {
    /// The process prints the port that it serves.
    pub(crate) fn start(command: &mut Command) -> Self {
        // Otherwise it would be chance whether memory is returned after a request and requested again by the next.
        command.env("MALLOC_TRIM_THRESHOLD_", (256 << 20).to_string());
        let mut process = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let questions = process.stdin.take();
        let answers = BufReader::new(process.stdout.take().expect("a pipe")).lines();
        let mut this = Self { process, questions, answers, port: 0, client: None };
        this.port = this.answer().parse().expect("a port");
        this
    }

    fn send(&self, what: &str) {
        let mut questions = self.questions.as_ref().expect("it is running");
        writeln!(questions, "{what}").expect("a pipe");
    }

    fn answer(&mut self) -> String {
        self.answers.next().expect("an answer").expect("a pipe")
    }

    pub(crate) fn ask(&mut self, what: &str) -> String {
        self.send(what);
        self.answer()
    }

    /// Numbers, separated by spaces.
    pub(crate) fn ask_numbers(&mut self, what: &str) -> Vec<f64> {
        self.ask(what).split(' ').map(|number| number.parse().expect("a number")).collect()
    }

    /// Starts `wrk`, which is stopped outside of the phases of this process.
    pub(crate) fn start_client(&mut self, clients: u32, script: &str, path: &str) {
        let mut command = Command::new("wrk");
        // It ends by a signal. With many concurrent requests, one takes seconds; and it is stopped in between. (It needs
        // memory for each microsecond of the limit.)
        command.args(["-t1", &format!("-c{clients}"), "-d3600s", "--timeout", "20s"]);
        command.args(["-s", script, &format!("http://127.0.0.1:{}{path}", self.port)]);
        let client = command.stdout(Stdio::piped()).spawn().expect("wrk");
        self.client = Some(client);
    }

    fn signal_client(&self, signal: Signal) {
        if let Some(client) = &self.client {
            let id = i32::try_from(client.id()).expect("a process");
            kill(Pid::from_raw(id), signal).expect("it runs");
        }
    }

    /// Lets it have requests, or stops them.
    pub(crate) fn run(&self, runs: bool) {
        match (&self.client, runs) {
            (None, true) => self.send("run"),
            (None, false) => self.send("stop"),
            (_, true) => self.signal_client(Signal::SIGCONT),
            (_, false) => self.signal_client(Signal::SIGSTOP),
        }
    }

    /// Ends `wrk`, and checks that all requests were answered. Its latencies include the time in which it was stopped.
    pub(crate) fn end_client(&mut self) {
        self.signal_client(Signal::SIGCONT);
        // A signal that it gets while it is stopped does not end its sleep.
        while self.client.as_mut().is_some_and(|wrk| wrk.try_wait().is_ok_and(|end| end.is_none()))
        {
            self.signal_client(Signal::SIGINT);
            std::thread::sleep(Duration::from_millis(50));
        }
        let Some(client) = self.client.take() else { return };
        let mut text = String::new();
        client.stdout.expect("a pipe").read_to_string(&mut text).expect("UTF-8");
        let numbers = text.lines().find_map(|line| line.strip_prefix("round "));
        let numbers = numbers.unwrap_or_else(|| panic!("{text}")).split(' ');
        let numbers: Vec<f64> = numbers.map(|number| number.parse().expect("a number")).collect();
        let [requests, failed] = numbers[..] else { panic!("{text}") };
        assert!(failed == 0.0 && requests > 0.0, "all requests are answered: {text}");
    }

    /// CPU time in nanoseconds and requests.
    fn measure(&mut self, phases: Phases) -> [f64; 2] {
        self.run(true);
        std::thread::sleep(Duration::from_millis(phases.pause_ms));
        let before = self.ask_numbers("read");
        std::thread::sleep(Duration::from_millis(phases.ms));
        let after = self.ask_numbers("read");
        self.run(false);
        [after[0] - before[0], after[1] - before[1]]
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.signal_client(Signal::SIGKILL);
        _ = self.client.take().map(|mut client| client.wait());
        // The process exits at the end of its input.
        self.questions = None;
        _ = self.process.wait();
    }
}

/// CPU time per request of each process in nanoseconds, for each round. In a round each process is measured twice, the
/// second time in reverse order, so that drift affects all alike. The order is another one each time, by chance: the last
/// one is measured twice in a row, with warm caches, and takes up to a tenth less.
pub(crate) fn rounds(hosts: &mut [Host], phases: Phases, count: usize) -> Vec<Vec<f64>> {
    let round = |_| {
        let mut order: Vec<usize> = (0..hosts.len()).collect();
        order.sort_by_cached_key(|_| RandomState::new().build_hasher().finish());
        let mut of_hosts = vec![[0.0; 2]; hosts.len()];
        for host in order.iter().chain(order.iter().rev()) {
            let [ns, requests] = hosts[*host].measure(phases);
            of_hosts[*host][0] += ns;
            of_hosts[*host][1] += requests;
        }
        of_hosts.iter().map(|[ns, requests]| ns / requests.max(1.0)).collect()
    };
    (0..count).map(round).collect()
}

/// The logarithm of the ratio of two processes in these rounds.
pub(crate) fn log_ratio(rounds: &[Vec<f64>], with: usize, without: usize) -> f64 {
    let log_ratios: Vec<f64> = rounds.iter().map(|ns| (ns[with] / ns[without]).ln()).collect();
    median(&log_ratios)
}

/// Half of the confidence interval, in percent.
pub(crate) fn half_interval(log_ratios: &[f64]) -> f64 {
    let [low, _, high] = estimate(log_ratios).map(|log_ratio| log_ratio.exp_m1() * 100.0);
    (high - low) / 2.0
}

/// The added cost in percent, the median and its interval.
pub(crate) fn added_percent(log_ratios: &[f64]) -> [f64; 3] {
    estimate(log_ratios).map(|log_ratio| log_ratio.exp_m1() * 100.0)
}

/// Prints the added cost, or that it is not known precisely enough to compare it with its goal.
pub(crate) fn print_added(name: &str, goal: f64, log_ratios: &[f64]) {
    let [low, middle, high] = added_percent(log_ratios);
    // With fewer values the interval is too narrow. Where all of it is above the goal, the goal is missed.
    if log_ratios.len() < 6 || (high - low) / 2.0 > goal && low <= goal {
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
