//! The cost of the layer in a service under load: CPU time per request, against the same service in a process without the
//! layer, with its confidence interval.

pub(crate) mod server;

use std::collections::BTreeMap;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::hosts::{
    Host, Phases, SHORT, added_percent, half_interval, log_ratio, print_added, rounds,
};
use crate::measure::{figure, median};
use server::{
    ALONE, AWAITS, DO_NOTHING, NO_SUBSCRIBER, NOT_PRINTED, ONLY_OURS, OTEL, State, WITHOUT,
};

/// A load on the service.
struct Load {
    /// The prefix of its figures.
    name: &'static str,
    path: &'static str,
    clients: u32,
    phases: Phases,
    /// How often each process of a turn is measured.
    rounds: usize,
    /// The lifetime of connections that have a span; 0 if they have none.
    connection_s: u64,
    compared: &'static [Compared],
    /// How long the load may take if it is asked for by name; it ends sooner once the interval is narrow enough.
    most: Duration,
}

/// A kind of process, the one it is compared with, and the most that it may add to the CPU time of a request, in percent.
struct Compared {
    /// The rest of the figure's name.
    figure: &'static str,
    with: &'static str,
    without: &'static str,
    goal: f64,
}

const fn added(figure: &'static str, with: &'static str, goal: f64) -> Compared {
    Compared { figure, with, without: WITHOUT, goal }
}

const ANY: f64 = f64::INFINITY;
const CONTINUOUS: &str = "service.continuous";
const REFERENCES: &str = "service.references";

const ORDERS_AT_ONCE: Load = Load {
    name: "service",
    path: "/orders/",
    clients: 4,
    phases: SHORT,
    rounds: 8,
    connection_s: 0,
    compared: &[
        added("cpu_per_request_added", "defaults", 1.0),
        added("timer.cpu_per_request_added", "timer", 1.0),
        added("none.cpu_per_request_added", "none", 1.0),
        added("cpu_per_request_added_by_tracing_opentelemetry", OTEL, ANY),
    ],
    most: Duration::from_secs(900),
};
const BOTH: &[Compared] = &[
    added("cpu_per_request_added", "defaults", 1.0),
    added("timer.cpu_per_request_added", "timer", 1.0),
];
const OTHERS: [Load; 16] = [
    // Against other processes, which tells what the baseline pays for.
    Load {
        name: "service.against",
        compared: &[
            Compared {
                figure: "spans_only_ours.cpu_per_request_added",
                with: ONLY_OURS,
                without: NOT_PRINTED,
                goal: ANY,
            },
            Compared {
                figure: "no_subscriber.cpu_per_request_added",
                with: "defaults",
                without: NO_SUBSCRIBER,
                goal: ANY,
            },
            Compared {
                figure: "layer_that_does_nothing.cpu_per_request_added",
                with: ALONE,
                without: DO_NOTHING,
                goal: ANY,
            },
        ],
        most: Duration::from_secs(300),
        ..ORDERS_AT_ONCE
    },
    few(Load {
        name: "service.early",
        compared: &[
            added("cpu_per_request_added", "early", ANY),
            added("timer.cpu_per_request_added", "early_timer", ANY),
        ],
        ..ORDERS_AT_ONCE
    }),
    wrapped(Load { name: "service.wrapped", ..ORDERS_AT_ONCE }),
    few(Load {
        name: CONTINUOUS,
        compared: &[Compared {
            figure: "cpu_added",
            with: "continuous",
            without: "defaults",
            goal: 0.3,
        }],
        ..ORDERS_AT_ONCE
    }),
    few(Load {
        name: REFERENCES,
        compared: &[Compared {
            figure: "cpu_added",
            with: "defaults",
            without: "no_references",
            goal: 0.3,
        }],
        ..ORDERS_AT_ONCE
    }),
    wrapped(awaiting("service.wrapped.awaiting_20ms", "/awaits/20/", 100, 60)),
    few(Load {
        name: "service.all_kept",
        phases: long(100),
        rounds: 2,
        compared: &[
            added("cpu_per_request_added", "all_kept", 15.0),
            // With a line and a call of `on_kept` for each.
            added("reported.cpu_per_request_added", "all_reported", ANY),
        ],
        ..ORDERS_AT_ONCE
    }),
    awaiting("service.awaiting_20ms", "/awaits/20/", 100, 60),
    awaiting("service.awaiting_50ms", "/awaits/50/", 250, 150),
    awaiting("service.awaiting_200ms", "/awaits/200/", 800, 400),
    few(Load {
        name: "service.saturated",
        path: "/lists/",
        clients: 256,
        phases: Phases { ms: 1_000, pause_ms: 1_000 },
        rounds: 2,
        compared: &[
            added("cpu_per_request_added", "defaults", 2.0),
            added("timer.cpu_per_request_added", "timer", 2.0),
        ],
        ..ORDERS_AT_ONCE
    }),
    few(Load {
        name: "service.one_sleeps",
        path: "/one_sleeps/",
        phases: long(500),
        rounds: 4,
        compared: BOTH,
        ..ORDERS_AT_ONCE
    }),
    few(Load {
        name: "service.one_works",
        path: "/one_works/",
        phases: Phases { ms: 2_000, pause_ms: 500 },
        rounds: 2,
        compared: &[
            added("cpu_per_request_added", "defaults", 4.0),
            added("timer.cpu_per_request_added", "timer", 4.0),
        ],
        ..ORDERS_AT_ONCE
    }),
    with_connections("service.connections_1s", 1, 4),
    with_connections("service.connections_5s", 5, 10),
    with_connections("service.connections_60s", 60, 40),
];

/// For requests that take long, and in which threads may be sampled.
const fn long(pause_ms: u64) -> Phases {
    Phases { ms: 500, pause_ms }
}

const fn with_connections(name: &'static str, connection_s: u64, rounds: usize) -> Load {
    let phases = Phases { ms: 200, pause_ms: 20 };
    few(Load { name, phases, connection_s, rounds, compared: BOTH, ..ORDERS_AT_ONCE })
}

const fn wrapped(load: Load) -> Load {
    const WRAPPED: &[Compared] =
        &[Compared { figure: "await_added", with: AWAITS, without: "defaults", goal: 0.5 }];
    Load { compared: WRAPPED, most: Duration::from_secs(100), ..load }
}

const fn awaiting(name: &'static str, path: &'static str, clients: u32, pause_ms: u64) -> Load {
    let phases = Phases { ms: 2 * pause_ms, pause_ms };
    few(Load { name, path, clients, phases, compared: BOTH, ..ORDERS_AT_ONCE })
}

const fn few(load: Load) -> Load {
    Load { most: Duration::from_secs(300), ..load }
}

/// The duration of the first load in the run of all figures.
const AMONG_ALL: Duration = Duration::from_secs(25);
/// Half of the confidence interval, in percent.
const NARROW: f64 = 0.3;
const LEAST_TURNS: usize = 12;
/// The counters to print.
const OF_INTEREST: [&str; 9] = [
    "references.added",
    "spans.seen",
    "spans.kept",
    "spans.no_profile_no_samples",
    "spans.no_profile_queue_full",
    "spans.no_profile_rate_limit",
    "profiles.exported",
    "samples.taken",
    "sampling.rate_reduced",
];
/// Before the first round of a process: files are read, threads are started and symbols are loaded.
const WARM_UP: Duration = Duration::from_millis(400);
pub(crate) const REQUESTS: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/figures/service/requests.lua");

pub(crate) fn run() {
    if Command::new("wrk").arg("-v").output().is_err() {
        println!("no figures of a service: `wrk` is not installed (apt-get install wrk)");
        return;
    }
    let asked: Vec<_> =
        std::env::args().filter(|argument| argument.starts_with("service")).collect();
    // `service` alone means the first load, and the same against other processes; a name with a dot means all loads whose
    // names begin with it.
    let is_asked = |load: &&Load| {
        let is_it = |asked: &String| {
            load.name == asked
                || asked == "service" && load.name == "service.against"
                || asked.contains('.') && load.name.starts_with(asked.as_str())
        };
        asked.iter().any(is_it)
    };
    if asked.is_empty() {
        return measure(&Load { most: AMONG_ALL, ..ORDERS_AT_ONCE });
    }
    let first = [ORDERS_AT_ONCE];
    first.iter().chain(&OTHERS).filter(is_asked).for_each(measure);
}

fn measure(load: &Load) {
    let start = Instant::now();
    let mut kinds: Vec<&'static str> = Vec::new();
    for kind in load.compared.iter().flat_map(|compared| [compared.without, compared.with]) {
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    let number = |kind| kinds.iter().position(|known| *known == kind).expect("it is in the list");
    let mut of_kinds: Vec<KindSamples> = kinds.iter().map(|_| KindSamples::default()).collect();
    // The logarithms of the ratios, one per turn.
    let mut log_ratios = vec![Vec::new(); load.compared.len()];
    for turn in 0_usize.. {
        let is_narrow = |log_ratios: &Vec<f64>| half_interval(log_ratios) <= NARROW;
        let is_enough = || turn >= LEAST_TURNS && log_ratios.iter().take(2).all(is_narrow);
        if turn > 0 && start.elapsed() > load.most || is_enough() {
            break;
        }
        let rounds = take_turn(load, &kinds, &mut of_kinds);
        for (compared, log_ratios) in load.compared.iter().zip(&mut log_ratios) {
            let (with, without) = (number(compared.with), number(compared.without));
            log_ratios.push(log_ratio(&rounds, with, without));
        }
    }
    for (compared, log_ratios) in load.compared.iter().zip(&log_ratios) {
        let name = match (load.name, compared.with) {
            // Of the same load.
            (name, AWAITS) => format!("{}.await_added", name.replacen(".wrapped", "", 1)),
            ("service.all_kept", "all_kept") => "service.cpu_per_request_added_all_kept".to_owned(),
            (CONTINUOUS, _) => "continuous.cpu_added".to_owned(),
            (REFERENCES, _) => "reference.cpu_added".to_owned(),
            (name, _) => format!("{name}.{}", compared.figure),
        };
        print_added(&name, compared.goal, log_ratios);
    }
    if let [ours, .., theirs] = &log_ratios[..]
        && load.compared.last().is_some_and(|compared| compared.with == OTEL)
        && ours.len() >= LEAST_TURNS / 2
    {
        let [[_, ours, _], [_, theirs, _]] = [ours, theirs].map(|ratios| added_percent(ratios));
        figure(&format!("{}.ratio_to_tracing_opentelemetry", load.name), ours / theirs, "x");
    }
    if load.name == REFERENCES {
        // Of the layer's threads, in and between the measured times.
        let [with, without] = ["defaults", "no_references"].map(|kind| &of_kinds[number(kind)]);
        let own = |of_kind: &KindSamples| median(&of_kind.own_ms_a_second);
        let per_s = with.references_per_s();
        if per_s > 0.0 {
            figure("reference.own_threads", (own(with) - own(without)) / per_s, "ms");
        }
    }
    figure(&format!("{}.turns", load.name), log_ratios[0].len() as f64, "count");
    for (kind, of_kind) in kinds.iter().zip(&of_kinds) {
        of_kind.print(&format!("{}.{kind}", load.name));
    }
}

/// Starts a process of each kind and measures them in rounds. New processes each time, since memory layout makes two
/// processes of one kind differ.
fn take_turn(load: &Load, kinds: &[&str], of_kinds: &mut [KindSamples]) -> Vec<Vec<f64>> {
    let start = |kind: &&str| {
        let mut command = Command::new(std::env::current_exe().expect("the path of this program"));
        command.args(["--child", "service", *kind, &load.connection_s.to_string()]);
        Host::start(&mut command)
    };
    let mut hosts: Vec<Host> = kinds.iter().map(start).collect();
    for host in &mut hosts {
        host.start_client(load.clients, REQUESTS, load.path);
        std::thread::sleep(WARM_UP.max(Duration::from_millis(load.phases.ms)));
        host.run(false);
    }
    let state =
        |host: &mut Host| -> State { serde_json::from_str(&host.ask("state")).expect("JSON") };
    let before: Vec<State> = hosts.iter_mut().map(state).collect();
    let rounds = rounds(&mut hosts, load.phases, load.rounds);
    for (number, (host, before)) in hosts.iter_mut().zip(before).enumerate() {
        let after = state(host);
        let of_kind = &mut of_kinds[number];
        of_kind.us.extend(rounds.iter().map(|round| round[number] / 1e3));
        of_kind.resident_mib.push(after.resident_kib / 1024.0);
        let loaded_ms = (2 * load.rounds) as f64 * (load.phases.ms + load.phases.pause_ms) as f64;
        let own_ns = after.own_cpu_ns.saturating_sub(before.own_cpu_ns);
        of_kind.own_ms_a_second.push(own_ns as f64 / 1e3 / loaded_ms);
        of_kind.loaded_s += loaded_ms / 1e3;
        for (name, count) in after.stats {
            let before = before.stats.get(&name).copied().unwrap_or_default();
            *of_kind.stats.entry(name).or_default() += count.saturating_sub(before);
        }
        host.end_client();
    }
    rounds
}

/// The results of one kind, of all processes.
#[derive(Default)]
struct KindSamples {
    /// CPU time per request in each round.
    us: Vec<f64>,
    resident_mib: Vec<f64>,
    /// CPU time of the layer's threads, all of it, for each second under load.
    own_ms_a_second: Vec<f64>,
    /// The increase of each counter, and the seconds under load.
    stats: BTreeMap<String, u64>,
    loaded_s: f64,
}

impl KindSamples {
    /// References per second under load.
    fn references_per_s(&self) -> f64 {
        self.stats.get("references.added").map_or(0.0, |count| *count as f64 / self.loaded_s)
    }

    fn print(&self, name: &str) {
        figure(&format!("{name}.cpu_per_request"), median(&self.us), "us");
        figure(&format!("{name}.memory"), median(&self.resident_mib), "MiB");
        if self.stats.is_empty() {
            return;
        }
        for field in OF_INTEREST {
            figure(&format!("{name}.{field}"), self.stats[field] as f64, "count");
        }
        let sampled = self.stats["spans.kept_sampled_ns"] as f64;
        let covered = sampled / self.stats["spans.kept_on_cpu_ns"].max(1) as f64;
        figure(&format!("{name}.covered"), covered * 100.0, "%");
        figure(&format!("{name}.own_threads"), median(&self.own_ms_a_second), "ms/s");
        figure(&format!("{name}.references_per_s"), self.references_per_s(), "1/s");
    }
}
